"""What the trainer does with odd data, as whole processes; test names carry the ids of the list, as in test_behaviour.py."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from tests.conftest import Run, Start
from trainer import codes

Env = dict[str, str]
OPTIONS = ("--image-size", "24", "--steps", "2", "--global-batch-size", "6", "--norm", "group", "--run-name", "r")
TWO = ("--nproc-per-node", "2")


def draw(path: Path, *, shade: int = 90, size: tuple[int, int] = (40, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(len(str(path))).integers(0, 60, (*size[::-1], 3), dtype=np.uint8)
    Image.fromarray(noise + np.uint8(shade)).save(path, quality=92)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Class folders with six pictures per class to train on, and two to test."""
    root = tmp_path / "pictures"
    for split, count in (("train", 6), ("val", 2)):
        for shade, name in ((20, "dark"), (180, "light")):
            for number in range(count):
                draw(root / split / name / f"{number}.jpg", shade=shade)
    return root


def folder(root: Path, *more: str) -> tuple[str | Path, ...]:
    return "train", "--dataset", "folder", "--data-dir", root, *OPTIONS, *more


def read_list(rows: Sequence[str | bytes], root: Path, *more: str) -> tuple[str | Path, ...]:
    """Write a training list beside the root, and return the command that trains on it; the test list is in order."""
    path, test = root.parent / "train.txt", root.parent / "test.txt"
    path.write_bytes(b"".join(row if isinstance(row, bytes) else f"{row}\n".encode() for row in rows))
    test.write_text("val/dark/0.jpg 0\nval/light/0.jpg 1\n")
    lists = ("--data-dir", root, "--train-list", path, "--test-list", test)
    return "train", "--dataset", "list", *lists, *OPTIONS, *more


GOOD_ROWS = [
    f"train/{name}/{number}.jpg {label}" for label, name in enumerate(("dark", "light")) for number in range(6)
]


def summary(tmp_path: Path, run: str = "r") -> dict[str, object]:
    return json.loads((tmp_path / "runs" / run / "summary.json").read_text())


def refused(ended: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """Check that a run ended before its first step, with one line of error that has all the words."""
    assert ended.returncode == code, ended.stderr
    errors = [line for line in ended.stderr.splitlines() if " error " in line]
    assert len(errors) == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    for word in words:
        assert word in errors[0]


def run_under(
    prefix: Sequence[str], arguments: Sequence[str | Path], env: Env, cwd: Path
) -> subprocess.CompletedProcess[str]:
    """Run the trainer as the command of another program."""
    command = [*prefix, sys.executable, "-m", "trainer", *map(str, arguments)]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)


def test_a05_small_shared_memory_is_told_with_what_it_has_and_wants(trainer_env: Env, pictures: Path) -> None:
    mount = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh"]
    run = run_under(mount, folder(pictures, "--workers", "2", "--image-size", "224"), trainer_env, pictures.parent)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stderr.splitlines() if "/dev/shm" in line]
    assert len(lines) == 2  # training and evaluation want different amounts
    for line in lines:
        assert "/dev/shm has 1 MB free, and the batches of 2 loader processes want" in line
        assert "--shm-size" in line
    assert summary(pictures.parent)["evaluation"]["samples"] == 4  # type: ignore[index]


def test_a13_archive_is_unpacked_once_by_two_ranks(run_trainer: Run, pictures: Path, tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "archive"), "gztar", pictures)
    ended = run_trainer(*folder(tmp_path / "new", "--archive", archive, *TWO))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert summary(tmp_path)["topology"]["ranks"] == 2  # type: ignore[index]
    files = sorted(path.relative_to(pictures) for path in pictures.rglob("*.jpg"))
    assert sorted(path.relative_to(tmp_path / "new") for path in (tmp_path / "new").rglob("*.jpg")) == files
    Path(archive).unlink()
    again = run_trainer("prepare", "--dataset", "folder", "--data-dir", tmp_path / "new", "--archive", archive)
    assert (again.returncode, again.stderr) == (0, "")


def test_a13_killed_while_unpacking_is_done_again(start_trainer: Start, run_trainer: Run, tmp_path: Path) -> None:
    root = tmp_path / "pictures"
    for number in range(4000):
        path = root / "train" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 3000)
    for name in "ab":
        draw(root / "val" / name / "0.jpg")
    archive = shutil.make_archive(str(tmp_path / "archive"), "tar", root)
    command = ("prepare", "--dataset", "folder", "--data-dir", tmp_path / "new", "--archive", archive)
    process = start_trainer(*command)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "new").glob(".unpacking/**/*.jpg")):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "new" / "train").exists()
    ended = run_trainer(*command)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "4000 training and 2 test samples" in ended.stdout
    assert len(list((tmp_path / "new").rglob("*.jpg"))) == 4002


def test_a13_no_data_and_no_network_is_3_at_once(trainer_env: Env, tmp_path: Path) -> None:
    """In a network namespace of its own there is no network but a loopback that is up for the ranks."""
    loopback = ["unshare", "-rn", "sh", "-c", 'ip link set lo up 2>/dev/null; exec "$@"', "sh"]
    arguments = ("train", "--dataset", "mnist", "--data-dir", tmp_path / "none", "--download", *TWO)
    run = run_under(loopback, arguments, trainer_env, tmp_path)
    assert run.returncode == codes.DATA, run.stderr
    assert "Traceback" not in run.stderr
    assert "--archive" in run.stderr


def test_a14_unreadable_picture_is_named_or_skipped(run_trainer: Run, pictures: Path) -> None:
    """Half a JPEG; 0 bytes and text are in distributed/test_pictures.py, all else in data/pictures/test_decode.py."""
    bad = pictures / "train/light/3.jpg"
    bad.write_bytes(bad.read_bytes()[:600])
    steps = ("--steps", "4", *TWO)  # two epochs
    ended = run_trainer(*folder(pictures, *steps))
    assert ended.returncode == codes.DATA
    assert f"the picture '{bad}' cannot be read: " in ended.stderr
    assert "Traceback" not in ended.stderr
    skipping = ("--bad-samples", "skip", "--max-bad-samples", "0.1", "--run-name", "skip")
    ended = run_trainer(*folder(pictures, *steps, *skipping))
    assert ended.returncode == 0, ended.stderr
    found = summary(pictures.parent, "skip")
    assert (found["steps"], found["samples"], found["skipped"]) == (4, 24, 2)
    assert "skipped        2 samples that cannot be read" in ended.stdout


def test_a14_orientation_is_applied_in_training_and_evaluation(run_trainer: Run, tmp_path: Path) -> None:
    """Two data sets of the same pictures, once upright, once lying with EXIF 6: the same loss from the same steps."""
    losses = []
    for name in ("upright", "lying"):
        for split in ("train", "val"):
            for label in "ab":
                path = tmp_path / name / split / label / "0.png"
                path.parent.mkdir(parents=True)
                image = Image.fromarray(np.random.default_rng(ord(label)).integers(0, 256, (48, 64, 3), dtype=np.uint8))
                exif = Image.Exif()
                exif[0x0112] = 6 if name == "lying" else 1
                (image.rotate(90, expand=True) if name == "lying" else image).save(path, exif=exif)
        ended = run_trainer(*folder(tmp_path / name, "--run-name", name, "--global-batch-size", "2"))
        assert ended.returncode == 0, ended.stderr
        found = summary(tmp_path, name)
        losses.append((found["final_loss"], found["evaluation"]["loss"]))  # type: ignore[index]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a15_what_is_no_class_and_no_picture_is_left_out(run_trainer: Run, pictures: Path) -> None:
    (pictures / "train/.ipynb_checkpoints").mkdir()
    draw(pictures / "train/.ipynb_checkpoints/0.jpg")
    (pictures / "train/notes.txt").write_text("stray")
    (pictures / "train/dark/Thumbs.db").write_bytes(b"stray")
    (pictures / "train/dark/0.jpg").rename(pictures / "train/dark/0.JPG")
    ended = run_trainer("prepare", "--dataset", "folder", "--data-dir", pictures)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "folder: 12 training and 4 test samples, 2 classes" in ended.stdout
    assert "Thumbs.db" in ended.stdout


def test_a15_empty_class_is_refused_by_name_or_allowed(run_trainer: Run, pictures: Path) -> None:
    (pictures / "train/empty").mkdir()
    refused(run_trainer(*folder(pictures, *TWO)), codes.DATA, "'empty'", "--empty-classes allow")
    ended = run_trainer(*folder(pictures, "--empty-classes", "allow"))
    assert ended.returncode == 0
    assert "3 classes" in ended.stdout


def test_a16_foreign_weights_load_in_one_process_and_are_saved_without_prefixes(
    run_trainer: Run, pictures: Path
) -> None:
    """The other prefixes and forms of files are in test_models_weights.py."""
    base = run_trainer(*folder(pictures, "--run-name", "base", "--steps", "1"))
    assert base.returncode == 0, base.stderr
    saved = "runs/{}/checkpoints/step-0000000{}/model.safetensors"
    own = safetensors.torch.load_file(pictures.parent / saved.format("base", 1))
    torch.save(
        {"state_dict": {f"module._orig_mod.{name}": value for name, value in own.items()}},
        pictures.parent / "foreign.pth",
    )
    more = ("--weights", "foreign.pth", "--launcher", "none", "--lr", "1e-30", "--weight-decay", "0", "--steps", "1")
    ended = run_trainer(*folder(pictures, *more))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "first weights: foreign.pth" in ended.stdout
    again = safetensors.torch.load_file(pictures.parent / saved.format("r", 1))
    assert again.keys() == own.keys()
    assert all(torch.allclose(again[name], own[name], atol=1e-20) for name in own)


def test_a18_bad_labels_are_3_with_their_lines_before_the_first_step(run_trainer: Run, pictures: Path) -> None:
    labels = {1: "-1", 3: "2", 4: "-100", 7: "1.5", 12: ""}
    rows = [
        f"{row.split()[0]} {labels[line]}" if line in labels else row for line, row in enumerate(GOOD_ROWS, start=1)
    ]
    ended = run_trainer(*read_list(rows, pictures, *TWO, "--num-classes", "2"))
    refused(ended, codes.DATA, "train.txt", *(f"line {line}: " for line in labels), "'-1'", "'2'", "'-100'", "'1.5'")
    assert "step 1" not in ended.stdout


def test_a18_words_among_numbers_are_3_and_two_classes_have_no_top_5(run_trainer: Run, pictures: Path) -> None:
    rows = [*GOOD_ROWS]
    rows[2] = "train/dark/2.jpg dark"
    refused(run_trainer(*read_list(rows, pictures)), codes.DATA, "line 3", "'dark'")
    ended = run_trainer(*read_list(GOOD_ROWS, pictures))
    assert ended.returncode == 0
    assert summary(pictures.parent)["evaluation"]["top5"] == 1.0  # type: ignore[index]


def test_a29_csv_in_any_dress_is_the_same_data_set(run_trainer: Run, pictures: Path) -> None:
    plain = ["path,label", *(row.replace(" ", ",") for row in GOOD_ROWS)]
    quoted = [",".join(f'"{cell}"' for cell in row.split(",")) for row in plain]
    dressed = ["\ufeff" + "\r\n".join([*quoted, "", ""])]
    fingerprints = set()
    for name, rows in (("text", GOOD_ROWS), ("plain", plain), ("dressed", dressed)):
        ended = run_trainer(*read_list(rows, pictures, "--run-name", name))
        assert (ended.returncode, ended.stderr) == (0, "")
        fingerprints.add(summary(pictures.parent, name)["fingerprint"])
    assert len(fingerprints) == 1


@pytest.mark.parametrize(
    ("rows", "line", "word"),
    [
        (["file name,kind", "train/dark/0.jpg,0"], "line 1", "label"),
        (["path,label", "train/dark/0.jpg,0", "train/dark/none.jpg,0"], "line 3", "none.jpg"),
        (["path,label", b"train/dark/\xe9.jpg,0\n"], "line 2", "UTF-8"),
    ],
    ids=["wrong header", "missing file", "other encoding"],
)
def test_a29_faults_of_a_csv_are_3_with_the_line(
    rows: list[str | bytes], line: str, word: str, run_trainer: Run, pictures: Path
) -> None:
    command = list(read_list(rows, pictures))
    (pictures.parent / "train.txt").rename(pictures.parent / "train.csv")
    command[command.index(pictures.parent / "train.txt")] = pictures.parent / "train.csv"
    refused(run_trainer(*command), codes.DATA, "train.csv", line, word)


def test_a30_256_open_files_are_enough_for_two_ranks_with_workers(trainer_env: Env, pictures: Path) -> None:
    """The memory of a long list over three epochs is in data/pictures/test_memory.py."""
    ended = run_under(
        ["prlimit", "--nofile=256"], folder(pictures, *TWO, "--workers", "2"), trainer_env, pictures.parent
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert summary(pictures.parent)["steps"] == 2


def test_bad_test_picture_does_not_lose_the_steps_before_it(run_trainer: Run, pictures: Path) -> None:
    (pictures / "val/dark/0.jpg").write_bytes(b"junk")
    ended = run_trainer(*folder(pictures, *TWO))
    assert ended.returncode == codes.DATA
    saved = pictures.parent / "runs/r/checkpoints/step-00000002"
    assert (saved / "manifest.json").exists()
    draw(pictures / "val/dark/0.jpg", shade=20)
    again = run_trainer(*folder(pictures, *TWO))
    assert (again.returncode, again.stderr) == (0, "")
    assert "resumed at step 2" in again.stdout
    assert summary(pictures.parent)["evaluation"]["samples"] == 4  # type: ignore[index]


def test_evaluation_on_other_classes_is_refused_and_their_head_is_new(run_trainer: Run, pictures: Path) -> None:
    assert run_trainer(*folder(pictures)).returncode == 0
    other = Path(shutil.copytree(pictures, pictures.parent / "other"))
    for split in ("train", "val"):
        (other / split / "dark").rename(other / split / "very dark")
    ended = run_trainer("eval", "runs/r", "--data-dir", other)
    refused(ended, codes.DATA, "class 0 is 'light'", "'dark' in runs/r")
    ended = run_trainer(*folder(other, "--run-name", "other", "--weights", "runs/r"))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "first weights: runs/r; the head head is new, for 2 classes" in ended.stdout
    elsewhere = run_trainer("eval", pictures.parent / "runs/r", cwd=other)
    assert (elsewhere.returncode, elsewhere.stderr) == (0, "")


def test_nothing_good_to_skip_to_is_one_line(run_trainer: Run, pictures: Path) -> None:
    for path in pictures.glob("train/*/*.jpg"):
        path.write_bytes(b"junk")
    ended = run_trainer(*folder(pictures, "--bad-samples", "skip", "--max-bad-samples", "1"))
    assert ended.returncode == codes.DATA
    assert "12 samples in a row cannot be read" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_path_that_is_no_utf_8_is_one_line(run_trainer: Run, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"nu\xff")
    odd.mkdir()
    refused(run_trainer(*folder(odd, *TWO)), codes.DATA, "has no train/")


def test_settings_that_the_data_set_does_not_look_at_are_told(run_trainer: Run, pictures: Path) -> None:
    ended = run_trainer(
        "train",
        "--data-dir",
        pictures,
        "--steps",
        "1",
        "--limit-train",
        "8",
        "--limit-test",
        "8",
        "--global-batch-size",
        "4",
    )
    assert ended.returncode == 0
    (line,) = ended.stderr.splitlines()
    assert line.endswith(
        "--data-dir is passed over: --dataset glyphs has no files; for class folders give --dataset folder"
    )


def test_limits_take_some_of_each_class(run_trainer: Run, pictures: Path) -> None:
    ended = run_trainer(*folder(pictures, "--limit-train", "6", "--limit-test", "2", "--trace", "trace"))
    assert ended.returncode == 0
    assert summary(pictures.parent)["evaluation"]["samples"] == 2  # type: ignore[index]
    ids = {line.split(",")[1] for line in (pictures.parent / "trace/rank-0.csv").read_text().splitlines()}
    assert ids == set("012345")
