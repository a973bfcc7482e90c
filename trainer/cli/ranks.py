"""One rank in this process: from settings to its exit code. How ranks are found and started is in `launching.py`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainer import codes, devices, log, stop
from trainer.beat import Pulse
from trainer.cli.elastic import note_end, prepare_rank
from trainer.cli.exposing import process_began, recorder_of_rank
from trainer.cli.hangs import allowance_for, print_stacks_on_request, watched
from trainer.cli.resolved import Job, Resolved
from trainer.codes import Stopped, TrainerError
from trainer.config import Config
from trainer.launch import Rank
from trainer.metrics import Recorder

if TYPE_CHECKING:
    from trainer.train import Start

#: How long a rank may take to end by itself once another rank has published its end.
_FAREWELL_SECONDS = 3.0


def run_rank(job: Job, rank: Rank, *, listen_fd: int | None, beat_fd: int | None = None) -> int:
    """Do the job as one rank, in this process, and return its exit code.

    Args:
        listen_fd, beat_fd: rank 0's listening socket and the records of signs of life, from our agent; None without one.
    """
    stop.restore_defaults()
    flag = prepare_rank()
    recorder = recorder_of_rank(rank=rank.rank, local_rank=rank.local_rank, since=process_began())
    print_stacks_on_request()
    with contextlib.suppress(OSError):  # it may be gone
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.append(here)  # for module:function in the working folder; last, so that it hides nothing
    pulse = _pulse(job.resolved.config, rank, beat_fd)
    in_place = beat_fd is None and job.command != "prepare"  # which has but one phase, of any length
    try:
        with watched(pulse) if in_place else contextlib.nullcontext():
            _run(job, _start(job, rank, listen_fd, pulse, flag, recorder))
        return codes.OK
    except Stopped as stopped:
        changed = stopped.code == codes.NODES_CHANGED
        log.info("stopped: the nodes change" if changed else f"stopped by {signal.Signals(stopped.signum).name}")
        return _leave(stopped.code)
    except TrainerError as error:
        if not error.shared or rank.rank == 0:
            log.error(str(error))
        return _leave(error.code)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the last door; code of the user's must not end a rank with 0
        log.failure(f"unexpected {describe_error(error)}")
        return _leave(codes.UNEXPECTED)


def _run(job: Job, start: Start) -> None:
    from trainer import train  # imports torch, so after the environment is set

    if job.command == "train":
        train.run(start)
    elif job.command == "prepare":
        train.make_ready(start)
    else:
        assert job.target is not None
        train.score(start, job.target)


def _pulse(config: Config, rank: Rank, beat_fd: int | None) -> Pulse:
    single_node = rank.world_size == (rank.local_world_size or 1)  # where nobody tells, there may be others
    return Pulse(allowance_for(config, single_node=single_node), fd=beat_fd, index=rank.local_rank)


def describe_error(error: BaseException) -> str:
    """Return an error's type and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _leave(code: int) -> int:
    """Leave word of it, and end the process here if torch's threads are up: after a failure, tearing a broken group down may hang or abort."""
    note_end(code)
    if "torch" in sys.modules and threading.active_count() > 1:
        exit_now(code)
    return code


def exit_now(code: int) -> None:
    """End this process without the interpreter's cleaning up."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _end_with_peer(code: int, line: str) -> None:
    time.sleep(_FAREWELL_SECONDS)
    log.error(line)
    note_end(code)
    exit_now(code)


def _start(job: Job, rank: Rank, listen_fd: int | None, pulse: Pulse, flag: stop.Stop, recorder: Recorder) -> Start:
    resolved, visible = job.resolved, visible_devices(job.resolved.config)
    from trainer.train import Start

    return Start(
        config=resolved.config,
        sources=resolved.sources,
        rank=rank,
        stop=flag,
        devices=visible,
        cpus=devices.usable_cpus(),
        cache_dir=_cache_dir(resolved),
        listen_fd=listen_fd,
        on_end=_end_with_peer,
        pulse=pulse,
        restarts=job.restarts,
        recorder=recorder,
    )


def _cache_dir(resolved: Resolved) -> Path | None:
    if resolved.config.cache_dir is not None:
        return resolved.config.cache_dir
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "trainer"
    # Not expanduser: without a home it would name a folder "~" in the working folder.
    home = os.environ.get("HOME", "")
    return Path(home) / ".cache" / "trainer" if home.startswith("/") else None


def visible_devices(config: Config) -> tuple[str, ...]:
    """Return the devices (UUIDs) that this process may train on; none where --device is cpu."""
    return () if config.device == "cpu" else devices.visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
