"""An elastic node: torch's elastic agent starts its ranks, and starts them anew where nodes leave or join.

That agent sends SIGTERM to its ranks where the nodes change, and starts them again whatever their code was. So that a stop is a stop,
SIGTERM to this process goes on to the ranks as SIGUSR2; and a rank of which no start is to follow leaves its code in a file, which a
thread here waits for. All else that our own agent sees from outside is left to the ranks: see `hangs.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from trainer import codes, log, stop
from trainer.agent import Ends
from trainer.cli.environment import AGENT_JOB, END_FILE
from trainer.cli.resolved import Job
from trainer.codes import SettingError
from trainer.launch import Elastic, Node

_RESTARTS = 3
_LOOK_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1

_END = signal.SIGUSR2
#: How a rank under this agent takes signals: what torch sends where the nodes change is the weakest.
MEANINGS = {signal.SIGTERM: signal.SIGHUP, _END: signal.SIGTERM, signal.SIGINT: signal.SIGINT}


def run_elastic(job: Job, node: Node, *, processes: int) -> int:
    """Start this node's ranks under torch's elastic agent and return the exit code.

    Raises:
        SettingError: the run has no name, by which a world that has changed finds its checkpoints; or what PET_RDZV_CONF says
            is not understood.
    """
    assert node.elastic is not None
    if job.resolved.config.run_name is None:
        raise SettingError(
            "an elastic run needs --run-name, and --runs-dir on storage that all nodes share: with each change of the nodes it goes on "
            "from its checkpoints"
        )
    if job.resolved.config.resume == "never":
        raise SettingError(
            "--resume is never, but an elastic run goes on from its checkpoints whenever its nodes change"
        )
    settings = _settings(job, node.elastic, processes=processes)
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        end_file = Path(folder) / "end"
        os.environ[END_FILE] = str(end_file)
        # Without it, a node that joins after another was lost fails: it looks for rank 0's address in the wrong store.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(job.resolved.config.grace)))
        os.environ[AGENT_JOB] = _of_ranks(job).dumps()
        return _run(settings, end_file)


def _settings(job: Job, elastic: Elastic, *, processes: int) -> dict[str, Any]:
    """Return the arguments of torch's LaunchConfig, all of them: its defaults are not torchrun's."""
    config, told = job.resolved.config, os.environ.get("PET_MAX_RESTARTS") or ""
    restarts = config.max_restarts if config.max_restarts is not None else int(told) if told.isdigit() else _RESTARTS
    return {
        "min_nodes": elastic.minimum,
        "max_nodes": elastic.maximum,
        "nproc_per_node": processes,
        "run_id": os.environ.get("PET_RDZV_ID") or config.run_name,
        "role": "trainer",
        "rdzv_endpoint": elastic.endpoint,
        "rdzv_backend": "c10d",
        "rdzv_configs": {"timeout": int(config.rendezvous_seconds), **_conf(os.environ.get("PET_RDZV_CONF") or "")},
        "max_restarts": restarts,
        "monitor_interval": 0.1,
        "start_method": "spawn",
        "local_addr": os.environ.get("PET_LOCAL_ADDR") or _local_address(elastic.endpoint),
        "signals_to_handle": f"{_END.name},SIGINT",
    }


def _conf(text: str) -> dict[str, str]:
    """Parse PET_RDZV_CONF, "key=value,key=value", as torchrun does. Raises SettingError."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    if not all(key.strip() and equals for key, equals, _ in pairs):
        raise SettingError(f"PET_RDZV_CONF is {text!r}; allowed: key=value,key=value, as in last_call_timeout=5")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _local_address(endpoint: str) -> str | None:
    """Return the address under which others reach this host, where its own name does not resolve: it is what torch announces."""
    with contextlib.suppress(OSError):
        socket.getaddrinfo(socket.getfqdn(), None)
        return None
    host, _, port = endpoint.rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing: it only chooses the way
            return str(probe.getsockname()[0])
    return None


def _of_ranks(job: Job) -> Job:
    """Return the job without what is this process's own: torch's agent says where its ranks are."""
    launch = ("nnodes", "node_rank", "nproc_per_node", "master_addr", "master_port")
    config = dataclasses.replace(job.resolved.config, launcher="auto", **dict.fromkeys(launch))  # type: ignore[arg-type]
    return dataclasses.replace(job, resolved=dataclasses.replace(job.resolved, config=config, warnings=[]))


def _run(settings: dict[str, Any], end_file: Path) -> int:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence()

    def end(signum: int, frame: FrameType | None) -> NoReturn:
        # What torch raises once ranks are up. Any other exception would close the rendezvous, for all nodes and for good.
        raise SignalException(f"received {signum}", sigval=signal.Signals(signum))

    for signum in (_END, signal.SIGINT):
        signal.signal(signum, end)
    ends = Ends()
    with _watched(end_file):
        try:
            config = LaunchConfig(**settings, logs_specs=DefaultLogsSpecs())
            elastic_launch(config, sys.executable)("-P", "-m", "trainer", *sys.argv[1:])
        except ChildFailedError as error:
            for rank, failure in sorted(error.failures.items(), key=lambda item: item[1].timestamp):
                ends.add(rank, codes.from_process(failure.exitcode))
            log.error(f"this node ends: {ends.cause}")
        except SignalException as error:
            return _last_word(end_file) or 128 + (signal.SIGINT if error.sigval == signal.SIGINT else signal.SIGTERM)
        except (RendezvousError, ConnectionError, OSError) as error:
            log.error(f"the nodes did not meet at {settings['rdzv_endpoint']}: {' '.join(str(error).split())[:300]}")
            return codes.PEER_LOST
    return _last_word(end_file) or ends.code


def _silence() -> None:
    """Keep torch's notes for its own developers away; each of its modules has a level of its own."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextlib.contextmanager
def _watched(end_file: Path) -> Iterator[None]:
    """End the elastic agent of the main thread when this process gets SIGTERM, or a rank has left its last word."""
    done = threading.Event()
    # In all threads, also those to come: the signal stays until the thread here asks for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def watch() -> None:
        while not done.is_set():
            if signal.sigtimedwait([signal.SIGTERM], _LOOK_SECONDS) or end_file.exists():
                signal.pthread_kill(threading.main_thread().ident or 0, _END)
                return

    thread = threading.Thread(target=watch, daemon=True, name="ends")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _last_word(end_file: Path) -> int:
    try:
        return int(end_file.read_text())
    except OSError:
        return 0


def note_end(code: int) -> None:
    """Leave word, as a rank under an elastic agent, of an end after which no rank is to be started again."""
    path = os.environ.get(END_FILE)
    if path and code in codes.PERMANENT | {codes.TERMINATED, codes.INTERRUPTED}:
        with contextlib.suppress(OSError):
            temporary = Path(f"{path}.{os.getpid()}")
            temporary.write_text(str(code))
            temporary.replace(path)


def prepare_rank() -> stop.Stop:
    """Return how this rank takes stop signals; under an elastic agent, have the kernel kill it when that ends, however it ends."""
    if END_FILE not in os.environ:
        return stop.Stop()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return stop.Stop(MEANINGS)
