"""Every command in the pages runs, and prints what they show.

A command is a line that starts with "$ " in a ```console block of a page. The commands of a block run in one new folder, in order,
each with the options that CASES adds to keep it short; a command without an entry there is a failure. The lines below it must be
printed, where numbers may differ and "..." stands for anything. A ```python block begins with its file's name and is written there.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.docs.pages import BLOCKS, CASES, COMMANDS, FAKE_NVML, Case, fenced, like


@pytest.fixture
def shell_env(trainer_env, tmp_path):
    """The environment of a person's shell: `trainer`, `python` and `torchrun` are those of this Python."""
    tools = tmp_path / "tools"
    tools.mkdir()
    write_script(tools / "trainer", "from trainer.cli import main")
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), trainer_env["PATH"]])
    return trainer_env | {"PATH": path}


def write_script(path: Path, imports: str) -> None:
    """Write what pip would for an entry point; torch.multiprocessing's children import it again."""
    path.write_text(f'#!{sys.executable}\nimport sys\n{imports}\nif __name__ == "__main__":\n    sys.exit(main())\n')
    path.chmod(0o755)


@pytest.fixture
def folder(tmp_path, shell_env):
    """A folder to work in: the project's files, and a .venv that is up to date and stands for this Python."""
    place = tmp_path / "here"
    (place / ".venv" / "bin").mkdir(parents=True)
    for path in ROOT.iterdir():
        if path.name[0] != "." and path.name not in ("runs", "build"):
            (place / path.name).symlink_to(path)
    write_script(place / ".venv/bin/trainer", "from trainer.cli import main")
    write_script(place / ".venv/bin/pytest", "from pytest import console_main as main")
    for name in ("bin/pip", ".trainer", ".test"):
        (place / ".venv" / name).touch()
    return place


@dataclass
class Started:
    """Hold a running command, and the file that its output goes to."""

    command: str
    case: Case
    shown: tuple[str, ...]
    process: subprocess.Popen[bytes]
    output: Path

    def check(self) -> None:
        """Wait for the end; compare the exit code and what is shown."""
        code = self.process.wait(timeout=280)
        printed = self.output.read_text(errors="replace")
        assert code == self.case.code, f"$ {self.command}\nended with {code}\n{printed}"
        for line in self.shown:
            found = any(re.fullmatch(like(line), one.rstrip()) for one in printed.splitlines())
            assert found, f"$ {self.command}\nshows {line!r} in the page, but printed\n{printed}"


@pytest.fixture
def start(folder, shell_env, request) -> Iterator[Callable[..., Started]]:
    """Give a function that starts a command with a shell; what is left of it at the end is killed."""
    started: list[Started] = []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def begin(command: str, shown: tuple[str, ...]) -> Started:
        case = CASES[command]
        data = request.getfixturevalue("test_data") if "{data}" in case.extra else None
        env = dict(shell_env)
        if case.gpus:
            (folder / "fake").mkdir(exist_ok=True)
            (folder / "fake" / "pynvml.py").write_text(FAKE_NVML)
            env["PYTHONPATH"] = f"{folder / 'fake'}{os.pathsep}{env['PYTHONPATH']}"
        if case.prepare:
            case.prepare(folder)
        output = folder.parent / f"output-{len(started)}"
        line = command + case.extra.format(port=port, data=data)
        with output.open("wb") as file:
            process = subprocess.Popen(
                line, shell=True, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
        started.append(Started(line, case, shown, process, output))
        return started[-1]

    yield begin
    for item in started:
        if item.process.poll() is None:
            os.killpg(item.process.pid, signal.SIGKILL)
            item.process.wait()


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page}:{block.line}")
def test_commands_of_the_page_do_what_it_shows(block, start, folder):
    for _, lines in fenced(block.page, "python"):
        (folder / lines[0].removeprefix("# ")).write_text("\n".join(lines) + "\n")
    running = []
    for command, shown in block.commands:
        running.append(start(command, shown))
        if running[-1].case.waits:
            running.pop().check()
    for item in running:
        item.check()


def test_every_command_of_the_pages_is_known_and_no_other():
    assert set(COMMANDS) == set(CASES)
