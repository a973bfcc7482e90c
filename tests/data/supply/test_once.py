"""Data are put into place once, whatever number of processes ask for it and whenever one of them is killed."""

from __future__ import annotations

import gzip
import io
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import filelock
import pytest

from trainer import log
from trainer.codes import DataError, SettingError
from trainer.config import Config
from trainer.data import idx
from trainer.data.supply import fetch
from trainer.data.supply.fetch import Resource
from trainer.data.supply.once import LOCK, prepare

ROOT = Path(__file__).resolve().parents[3]

#: Prints whether it did something.
PREPARE = """
import sys
from pathlib import Path
from trainer import log
from trainer.config import Config
from trainer.data.supply.once import prepare
log.setup("text")
config = Config(dataset="folder", archive=Path(sys.argv[1]), data_dir=Path(sys.argv[2]))
print("did", prepare(config), flush=True)
"""

#: Kills a process at its first file effect, another one at its second, and so on, until one gets through; sees after each that what is
#: in place is whole, and that the next start ends with everything in place. Prints how many were killed.
KILL_AT_EACH = """
import os, signal, sys
from pathlib import Path
from trainer.config import Config
from trainer.data.supply.once import prepare
from trainer.data.supply.archives import is_unpacked

EFFECTS = {"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.link"}
archive, top, names = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]

def hooked(number):
    left = number
    def hook(event, arguments):
        nonlocal left
        # What rmtree removes has no path of its own here.
        if event in EFFECTS and (str(top) in str(arguments[0]) or event in ("os.rmdir", "os.remove")):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    return hook

def start(config, kill_at):
    child = os.fork()
    if child == 0:
        if kill_at:
            sys.addaudithook(hooked(kill_at))
        try:
            prepare(config)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def tree(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} if folder.exists() else set()

killed = 0
while True:
    folder = top / f"data {killed}"
    config = Config(dataset="folder", archive=archive, data_dir=folder)
    code = start(config, killed + 1)
    seen = {name for name in tree(folder) if not name.startswith(".")}
    for part in ("train", "val"):
        whole = {name for name in names if name.startswith(part)}
        assert {name for name in seen if name.startswith(part)} in (set(), whole), (killed, seen)
    if is_unpacked(archive, folder):
        assert seen == set(names), (killed, seen)
    if code == 0:
        break
    assert code == -signal.SIGKILL, code
    killed += 1
    # Half of the time the next start has no --archive: then it finishes what was complete, and else finds nothing.
    if killed % 2 and seen:
        prepare(Config(dataset="folder", data_dir=folder))
        assert {name for name in tree(folder) if not name.startswith(".")} == set(names), killed
    assert start(config, 0) == 0
    assert tree(folder) == {*names, ".prepare.lock", f".unpacked-{archive.name}.json"}, (killed, tree(folder))
print("killed", killed)
"""

FILES = {"train/cat/1.jpg": b"one", "train/dog/2.jpg": b"two", "val/cat/3.jpg": b"three", "val/dog/4.jpg": b""}


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def tree(folder: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(".")}


def config(tmp_path: Path, **settings: Any) -> Config:
    given = {"dataset": "folder", "data_dir": tmp_path / "data"} | settings
    return Config(**given)


def start(archive: Path, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PREPARE, str(archive), str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return int(closed.getsockname()[1])


# --- what is asked for


def test_archive_is_unpacked_into_a_folder_that_is_made(tmp_path: Path) -> None:
    asked = config(tmp_path, archive=write_tar(tmp_path / "a.tgz", FILES), data_dir=tmp_path / "deep" / "data")
    assert prepare(asked)
    assert tree(tmp_path / "deep" / "data") == FILES
    assert not prepare(asked)


@pytest.mark.parametrize(
    ("dataset", "inner"),
    [("folder", "train/a/1.jpg"), ("folder", "val/a/1.jpg"), ("mnist", "MNIST/raw/x"), ("mnist", "t10k-images-idx3-ubyte.gz"),
     ("cifar10", "cifar-10-batches-py/x"), ("cifar100", "meta")],
)  # fmt: skip
def test_folder_around_the_data_set_is_left_out(tmp_path: Path, dataset: str, inner: str) -> None:
    prepare(config(tmp_path, dataset=dataset, archive=write_tar(tmp_path / "a.tgz", {f"set/v2/{inner}": b"1"})))
    assert tree(tmp_path / "data") == {inner: b"1"}


@pytest.mark.parametrize("dataset", ["list", "my.module:load"])
def test_paths_stay_where_only_the_user_knows_them(tmp_path: Path, dataset: str) -> None:
    prepare(config(tmp_path, dataset=dataset, archive=write_tar(tmp_path / "a.tgz", {"set/1.jpg": b"1"})))
    assert tree(tmp_path / "data") == {"set/1.jpg": b"1"}


def test_download_fills_up_what_the_archive_lacks(tmp_path: Path) -> None:
    names = [name for pair in idx.FILES.values() for name in pair]
    archive = write_tar(tmp_path / "a.tgz", {f"mnist/{name}.gz": gzip.compress(b"") for name in names})
    nowhere = [Resource((f"http://127.0.0.1:{closed_port()}/",), "", f"MNIST/raw/{name}.gz") for name in names]
    assert prepare(config(tmp_path, dataset="mnist", archive=archive, download=True), resources=nowhere)
    assert fetch.is_there("mnist", tmp_path / "data")


def test_nothing_asked_for_is_nothing_done(tmp_path: Path) -> None:
    assert not prepare(config(tmp_path))
    assert not prepare(config(tmp_path, data_dir=None))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dataset", ["glyphs", "random"])
def test_data_sets_without_files_need_nothing(tmp_path: Path, dataset: str, capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("text")
    assert not prepare(config(tmp_path, dataset=dataset, download=True, data_dir=None))
    assert f"--dataset {dataset} needs no files: --download has nothing to do" in capsys.readouterr().out
    assert not prepare(config(tmp_path, dataset=dataset, archive=tmp_path / "none.zip"))
    assert not list(tmp_path.iterdir())


# --- what is there is not touched


def test_prepared_data_need_no_lock_and_no_write(tmp_path: Path) -> None:
    asked = config(tmp_path, archive=write_tar(tmp_path / "a.tgz", FILES))
    prepare(asked)
    (tmp_path / "data" / LOCK).unlink()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "data", *(tmp_path / "data").rglob("*"))}
    (tmp_path / "a.tgz").unlink()
    assert not prepare(asked)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "data", *(tmp_path / "data").rglob("*"))} == before


def test_files_of_the_users_are_enough_for_download(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in fetch.LAYOUTS["cifar10"].files:
        (tmp_path / "data" / name).touch()
    assert not prepare(config(tmp_path, dataset="cifar10", download=True))
    assert not (tmp_path / "data" / LOCK).exists()


# --- what cannot be done


@pytest.mark.parametrize("dataset", ["folder", "list", "my.module:load", "mnst"])
def test_download_of_what_cannot_be_fetched_is_a_setting_error(tmp_path: Path, dataset: str) -> None:
    with pytest.raises(
        SettingError,
        match=f"--download cannot fetch --dataset {dataset}, only mnist, fashion-mnist, cifar10, cifar100; .*--archive",
    ):
        prepare(config(tmp_path, dataset=dataset, download=True))


@pytest.mark.parametrize("settings", [{"download": True}, {"archive": Path("a.zip")}])
def test_data_dir_must_be_set(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="--data-dir is not set; --(archive|download) needs the folder"):
        prepare(config(tmp_path, dataset="mnist", data_dir=None, **settings))


def test_no_data_and_no_network_is_said_at_once(tmp_path: Path) -> None:
    nowhere = [Resource((f"http://127.0.0.1:{closed_port()}/a",), "", "a")]
    with pytest.raises(
        DataError, match="--dataset mnist cannot be fetched: a .*Connection refused.*--data-dir .*--archive"
    ) as caught:
        prepare(config(tmp_path, dataset="mnist", download=True), resources=nowhere)
    assert caught.value.code == 3
    assert not tree(tmp_path / "data")


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_folder_that_cannot_be_made_is_named_with_the_uid(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        SettingError, match=rf"--data-dir {tmp_path / place} cannot be used as uid {os.getuid()}: \w+"
    ) as caught:
        prepare(config(tmp_path, archive=write_tar(tmp_path / "a.tgz", FILES), data_dir=tmp_path / place))
    assert "\n" not in str(caught.value)


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The lock's place is taken, which even root cannot overlook."""
    (tmp_path / "data" / LOCK).mkdir(parents=True)
    with pytest.raises(SettingError, match=f"--data-dir {tmp_path}/data cannot be used as uid .*{LOCK}"):
        prepare(config(tmp_path, archive=write_tar(tmp_path / "a.tgz", FILES)))


def test_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on the size of a file stands in for it; its signal is off, as in the interpreter."""
    archive = write_tar(tmp_path / "a.tgz", {"train/1": bytes(100_000)})
    command = [
        "bash",
        "-c",
        'ulimit -f 20; exec "$0" "$@"',
        sys.executable,
        "-c",
        PREPARE,
        str(archive),
        str(tmp_path / "data"),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "File too large" in ended.stderr.splitlines()[-1]
    assert "SettingError" in ended.stderr.splitlines()[-1]
    assert [path.name for path in (tmp_path / "data").iterdir()] == [LOCK]


# --- several processes, and kills


def test_of_two_processes_one_does_it_and_the_other_waits(tmp_path: Path) -> None:
    archive, folder = write_tar(tmp_path / "a.tgz", FILES), tmp_path / "data"
    folder.mkdir()
    with filelock.FileLock(folder / LOCK):
        both = [start(archive, folder), start(archive, folder)]
        lines = [process.stdout.readline() for process in both if process.stdout]
    lines += [line for process in both for line in process.communicate(timeout=60)[0].splitlines()]
    text = "\n".join(lines)
    assert [process.returncode for process in both] == [0, 0]
    assert text.count("another process puts the data into place; waiting for it") == 2
    assert text.count(f"unpacking {archive}") == 1
    assert sorted(line for line in lines if line.startswith("did")) == ["did False", "did True"]
    assert tree(folder) == FILES


def test_killed_while_it_unpacks_the_next_start_does_it_again(tmp_path: Path) -> None:
    many = {f"train/{number % 10}/{number}": bytes(20_000) for number in range(1500)} | {"val/0/last": b"last"}
    archive, folder = write_tar(tmp_path / "a.tgz", many), tmp_path / "data"
    for count in (1, 600):
        process = start(archive, folder)
        last = folder / ".unpacking" / "content" / "train" / str(count % 10) / str(count)
        until(last.exists)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not tree(folder)
    assert prepare(config(tmp_path, archive=archive))
    assert tree(folder) == many


def test_killed_at_any_moment_it_leaves_nothing_that_is_taken_for_whole(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "a.tgz", {f"pictures/{name}": content for name, content in FILES.items()})
    (tmp_path / "top").mkdir()
    command = [sys.executable, "-c", KILL_AT_EACH, str(archive), str(tmp_path / "top"), *FILES]
    single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # it forks
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | single, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[-1]) > 30


def test_waiting_is_said_at_growing_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log.setup("text")
    monkeypatch.setattr(sys.modules[prepare.__module__], "SAY_AGAIN_SECONDS", 0.25)
    archive = write_tar(tmp_path / "a.tgz", FILES)
    (tmp_path / "data").mkdir()
    with ThreadPoolExecutor(1) as pool, filelock.FileLock(tmp_path / "data" / LOCK):
        waiting = pool.submit(prepare, config(tmp_path, archive=archive))
        seen = ""
        while "2 s so far" not in seen:
            seen += capsys.readouterr().out
            time.sleep(0.02)
        assert seen.count("waiting for it") == 4
    assert waiting.result()
