"""An elastic node: torch's elastic agent starts its ranks, and starts them anew where nodes leave or join.

That agent sends SIGTERM to its ranks where the nodes change, and starts them again whatever their code was. So that a stop is a stop,
SIGTERM to this process goes on to the ranks as SIGUSR2; and a rank of which no start is to follow leaves its code in a file, which a
thread here waits for. All else that our own agent sees from outside is left to the ranks: see `hangs.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from trainer import codes, log, stop
from trainer.agent import Ends
from trainer.cli.environment import AGENT_JOB, END_FILE
from trainer.cli.resolved import Job
from trainer.codes import PeerLost, SettingError, Stopped
from trainer.config import Config
from trainer.launch import Elastic, Node
from trainer.parent import die_with

#: torch counts restarts for as long as the node lives, and may count one where a node joins; against loops there is --max-starts.
_RESTARTS = 100
_LOOK_SECONDS = 0.1
_ONE_TRY_SECONDS = 5.0
#: How much longer than --grace this process may take to end, where torch waits in native code for a node that does not answer.
_GONE_SECONDS = 30.0
#: How long the other nodes' ranks have to read in a rank's store why all end, before torch ends the other ranks of its node.
_FAREWELL_SECONDS = 1.5

_END = signal.SIGUSR2
#: How a rank under this agent takes signals: what torch sends where the nodes change is the weakest.
MEANINGS = {signal.SIGTERM: signal.SIGHUP, _END: signal.SIGTERM, signal.SIGINT: signal.SIGINT}


def run_elastic(job: Job, node: Node, *, processes: int) -> int:
    """Start this node's ranks under torch's elastic agent and return the exit code.

    Raises:
        SettingError: what is asked for cannot be elastic.
        PeerLost: there is nobody where the nodes are to meet.
    """
    assert node.elastic is not None
    config = job.resolved.config
    _check(job)
    with tempfile.TemporaryDirectory(prefix="trainer-") as folder:
        end_file = Path(folder) / str(os.getpid())  # a rank knows by its name whose child it must be
        os.environ[END_FILE] = str(end_file)
        # Without it, a node that joins after another was lost fails: it looks for rank 0's address in the wrong store.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(math.ceil(config.grace)))
        os.environ[AGENT_JOB] = _of_ranks(job).dumps()
        with _watched(end_file, limit_seconds=config.grace + _GONE_SECONDS):
            try:
                address = find_address(node, seconds=config.rendezvous_seconds)
                return _run(settings_for(config, node.elastic, processes=processes, address=address), config, end_file)
            except Stopped as stopped:
                return stopped.code


def _check(job: Job) -> None:
    config = job.resolved.config
    if job.command != "train":
        raise SettingError(
            f"elastic nodes are for `trainer train`; for `trainer {job.command}` on this node alone add --launcher agent"
        )
    if config.run_name is None:
        raise SettingError(
            "an elastic run needs --run-name, and --runs-dir on storage that all nodes share: with each change of the nodes it goes on "
            "from its checkpoints"
        )
    if config.resume == "never":
        raise SettingError(
            "--resume is never, but an elastic run goes on from its checkpoints whenever its nodes change"
        )


def settings_for(config: Config, elastic: Elastic, *, processes: int, address: str | None) -> dict[str, Any]:
    """Return the arguments of torch's LaunchConfig, all that matter: its defaults are not torchrun's."""
    restarts = (number for number in (config.max_restarts, elastic.max_restarts, _RESTARTS) if number is not None)
    return {
        "min_nodes": elastic.minimum,
        "max_nodes": elastic.maximum,
        "nproc_per_node": processes,
        "run_id": elastic.run_id or config.run_name,
        "role": "trainer",
        "rdzv_endpoint": elastic.endpoint,
        "rdzv_backend": "c10d",
        "rdzv_configs": {"join_timeout": math.ceil(config.rendezvous_seconds), **dict(elastic.conf)},
        "max_restarts": next(restarts),
        "monitor_interval": 0.1,
        "start_method": "spawn",
        "local_addr": address,
        "signals_to_handle": f"{_END.name},SIGINT",
    }


def find_address(node: Node, *, seconds: float) -> str | None:
    """Wait until somebody listens where the nodes meet, and return the address under which the others reach this node.

    On the node that is to listen there itself, that is the endpoint's. None leaves it to torch: the host's own name. torch's own
    wait for the endpoint, up to a minute in native code, hears no signal.

    Raises:
        PeerLost: nobody listens there after so many seconds, or the name does not resolve.
    """
    assert node.elastic is not None
    assert node.master_port is not None
    told = node.elastic.local_addr
    if "is_host" in dict(node.elastic.conf):
        return told
    deadline = time.monotonic() + seconds
    while True:
        try:
            found = socket.getaddrinfo(node.master_addr, node.master_port, type=socket.SOCK_STREAM)
            if any(_is_here(family, where) for family, _, _, _, where in found):
                return told or node.master_addr
            with socket.create_connection((node.master_addr, node.master_port), _ONE_TRY_SECONDS) as connection:
                return told or str(connection.getsockname()[0])
        except OSError as error:
            if time.monotonic() >= deadline:
                raise PeerLost(
                    f"nobody answered at {node.elastic.endpoint}, where the nodes meet, within {seconds:g} s (--rendezvous-seconds): "
                    f"{error.strerror or error}; check that its node was started"
                ) from error
        time.sleep(min(0.3, max(0.0, deadline - time.monotonic())))


def _is_here(family: int, where: tuple[Any, ...]) -> bool:
    with socket.socket(family) as probe, contextlib.suppress(OSError):
        probe.bind((where[0], 0, *where[2:]))  # which only an address of this host allows
        return True
    return False


def _of_ranks(job: Job) -> Job:
    """Return the job without what is this process's own: torch's agent says where its ranks are."""
    launch = ("nnodes", "node_rank", "nproc_per_node", "master_addr", "master_port")
    config = dataclasses.replace(job.resolved.config, launcher="auto", **dict.fromkeys(launch))  # type: ignore[arg-type]
    return dataclasses.replace(job, resolved=dataclasses.replace(job.resolved, config=config, warnings=[]))


def _run(settings: Mapping[str, Any], config: Config, end_file: Path) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    def end(signum: int, frame: FrameType | None) -> NoReturn:
        # What torch raises once ranks are up. Any other exception would close the rendezvous, for all nodes and for good.
        raise SignalException(f"received {signum}", sigval=signal.Signals(signum))

    _take_notes()
    _handle(end)
    try:
        code = _launch(settings, config, end_file)
    except SignalException as error:  # also where it comes when the agent has just ended
        code = _stopped(error.sigval).code
    return _last_word(end_file) or code


def _launch(settings: Mapping[str, Any], config: Config, end_file: Path) -> int:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    try:
        wanted = LaunchConfig(**settings, logs_specs=DefaultLogsSpecs(log_dir=os.devnull))
        elastic_launch(wanted, sys.executable)("-P", "-m", "trainer", *sys.argv[1:])
    except ChildFailedError as error:
        ends = Ends()
        for rank, failure in sorted(error.failures.items(), key=lambda item: item[1].timestamp):
            code = codes.from_process(failure.exitcode)
            ends.add(rank, codes.PEER_LOST if code == codes.NODES_CHANGED else code)
        if ends.code not in codes.PERMANENT | codes.STOP_CODES:
            log.error(f"no restart of {settings['max_restarts']} (--max-restarts) is left: {ends.cause}")
        return ends.code
    except SignalException:
        raise
    except Exception as error:  # noqa: BLE001 - torch's agent has no one way to end where the rendezvous is closed or gone
        return _last_word(end_file) or _end_without_nodes(error, settings, config)
    return codes.OK


def _end_without_nodes(error: Exception, settings: Mapping[str, Any], config: Config) -> int:
    """Return the code of a node that found no other nodes, or has lost those it had."""
    from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

    from trainer.train.folder import is_finished

    assert config.run_name is not None
    if is_finished(config.runs_dir / config.run_name):
        log.info("the other nodes have finished the run")
        return codes.OK
    where, seconds = settings["rdzv_endpoint"], settings["rdzv_configs"]["join_timeout"]
    if isinstance(error, RendezvousTimeoutError):
        log.error(
            f"waited {seconds} s (--rendezvous-seconds) at {where} for {settings['min_nodes']} nodes; check that they were started"
        )
    else:
        reason = " ".join(str(error).split())[:200]
        log.error(f"the nodes that met at {where}, or the one that holds their rendezvous, have ended: {reason}")
    return codes.PEER_LOST


class _Notes(logging.Handler):
    """Of torch's notes, made for its own developers, tell the one that matters to others: that a signal killed a rank."""

    def emit(self, record: logging.LogRecord) -> None:
        code, local_rank, *_ = record.args if isinstance(record.args, tuple) and len(record.args) > 1 else (0, 0)
        if record.levelno == logging.ERROR and isinstance(code, int) and code < 0:
            log.warning(f"local rank {local_rank} ended first, killed by {signal.Signals(-code).name}")


def _take_notes() -> None:
    logger = logging.getLogger("torch.distributed")
    logger.handlers[:] = [_Notes()]
    logger.propagate = False


def _stopped(signum: int) -> Stopped:
    return Stopped(signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)


def _handle(handler: Callable[[int, FrameType | None], object]) -> None:
    for signum in (_END, signal.SIGINT):
        signal.signal(signum, handler)


@contextlib.contextmanager
def _watched(end_file: Path, *, limit_seconds: float) -> Iterator[None]:
    """End what the main thread does when this process gets SIGTERM, or a rank has left its last word.

    Until torch's agent is there, by `Stopped`. Where nothing has ended `limit_seconds` later, the process does.
    """

    def end(signum: int, frame: FrameType | None) -> NoReturn:
        raise _stopped(signum)

    done = threading.Event()
    _handle(end)
    # In all threads, also those to come: the signal stays until the thread here asks for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def watch() -> None:
        while not done.is_set():
            if signal.sigtimedwait([signal.SIGTERM], _LOOK_SECONDS) or end_file.exists():
                signal.pthread_kill(threading.main_thread().ident or 0, _END)
                if not done.wait(limit_seconds):
                    os._exit(_last_word(end_file) or codes.TERMINATED)

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
        if code in codes.PERMANENT:
            time.sleep(_FAREWELL_SECONDS)
        with contextlib.suppress(OSError):
            temporary = Path(f"{path}.{os.getpid()}")
            temporary.write_text(str(code))
            temporary.replace(path)


def prepare_rank() -> stop.Stop:
    """Return how this rank takes stop signals; under an elastic agent, have the kernel kill it when that ends, however it ends."""
    path = os.environ.get(END_FILE)
    if not path:
        return stop.Stop()
    die_with(int(Path(path).name))
    return stop.Stop(MEANINGS)
