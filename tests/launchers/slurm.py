"""A Slurm of our own: two nodes on this machine, private folders, free ports. What is run in it is not here."""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

#: No cgroups, no accounting, and nodes that claim more CPUs than there are. FirstJobId: the trainer derives its port from
#: the number of the job, and two of these may run at a time. The interactive step is what `salloc` without a command runs.
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
FirstJobId={job}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
LaunchParameters=use_interactive_step
InteractiveStepOptions="--interactive --preserve-env $SHELL"
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8
NodeName={host}-2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def free_port() -> int:
    """Return a port that was free a moment ago, below those that the kernel gives to outgoing connections."""
    while True:
        port = random.randrange(10000, 20000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


def find_program(name: str) -> str | None:
    """Return a program's path; daemons are in /usr/sbin, which is not in everybody's PATH."""
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")


@contextlib.contextmanager
def running_slurm(mark: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Run munged, slurmctld and two slurmd with `mark` in their environment; give the variables that srun needs."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)  # munged wants everybody to reach its socket
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(
        CONF.format(
            host=host,
            ports=[free_port() for _ in range(3)],
            user=pwd.getpwuid(os.getuid()).pw_name,
            job=random.randrange(1, 10**6),
            folder=folder,
        )
    )
    (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
    (folder / "munge.key").chmod(0o600)
    (folder / "state").mkdir()
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    variables = {"SLURM_CONF": str(folder / "slurm.conf")}
    commands = [
        ["munged", "--foreground", *(f"--{option}={folder}/munge.{file}" for option, file in files.items())],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", host],
        ["slurmd", "-D", "-N", f"{host}-2"],
    ]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands):
            with (folder / f"daemon-{number}.log").open("wb") as output:
                started.append(_start(command, env={**os.environ, **variables, **mark}, output=output.fileno()))
            if command[0] == "munged":
                _wait_until((folder / "munge.socket").is_socket, started, folder)
        _wait_until(lambda: _states(variables) == ["idle", "idle"], started, folder)
        yield variables
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(timeout=60)
        shutil.rmtree(folder)


def _start(command: list[str], *, env: dict[str, str], output: int) -> subprocess.Popen[bytes]:
    program = find_program(command[0])
    assert program is not None
    return subprocess.Popen([program, *command[1:]], env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def _states(variables: Mapping[str, str]) -> list[str]:
    command = ["sinfo", "--noheader", "--Node", "--format", "%t"]
    result = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    return result.stdout.split()


def _wait_until(ready: Callable[[], bool], started: list[subprocess.Popen[bytes]], folder: Path) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        if time.monotonic() > deadline or any(process.poll() is not None for process in started):
            logs = [path.read_text() for path in sorted(folder.glob("daemon-*.log"))]
            raise AssertionError("Slurm does not start\n" + "\n".join(logs))
        time.sleep(0.1)
