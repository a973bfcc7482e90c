"""The endpoint of a node: /metrics from the files that its processes write, /healthz, /readyz."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from trainer import log
from trainer.beat import Sign
from trainer.metrics.server import Answer, Server, listen

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LOOK_SECONDS = 0.1
#: After which part of the time it is allowed a rank that gives no sign of life is called unhealthy.
_UNHEALTHY_PART = 0.5


class Exporter:
    """Serve the node's endpoint until `close`.

    Attributes:
        port: where it listens.
    """

    def __init__(self, server: Server) -> None:
        self.port, self._server = server.port, server

    def linger(self, seconds: float, *, stop: Callable[[], bool]) -> None:
        """Go on for `seconds`, so that the last values are fetched; `stop` cuts it short."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not stop():
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """End it; the port is free afterwards."""
        self._server.close()


def serve(folder: Path, *, address: str, port: int, health: Callable[[], tuple[bool, str]]) -> Exporter | None:
    """Start the endpoint in a thread of this process, which may be one without torch; where that fails, warn and return None.

    Args:
        folder: where the node's processes keep their numbers.
        address: "" for every address of this host, else one of them or a name for it.
        port: 0 takes a free one.
        health: tells whether all is well, and in one line what is not; called in the thread.
    """
    try:
        listener = listen(address, port=port)
    except (OSError, UnicodeError) as error:
        where = f"port {port}" if not address else f"port {port} of {address}"
        reason = str((error.strerror if isinstance(error, OSError) else None) or error).partition(" (while")[0]
        log.warning(f"no metrics: cannot listen on {where} ({reason}); see --metrics-port and --metrics-address")
        return None
    node = _Node(folder)
    return Exporter(Server(listener, {"/metrics": node.answer, "/healthz": lambda: _health(health), "/readyz": _ready}))


class _Node:
    """Collect the node's series, and this process's own process_ ones."""

    def __init__(self, folder: Path) -> None:
        # Here, and not in the thread: an import there at the moment of a fork could lock the child up.
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector
        from prometheus_client.process_collector import ProcessCollector

        self._folder, self._generate = folder, generate_latest
        self._merge: Callable[[list[str]], Iterable[Metric]] = MultiProcessCollector.merge
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self._is_warned = False

    def describe(self) -> Iterable[Metric]:
        """Tell the registry nothing: it would collect only to learn the names."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics that have values."""
        # One that no process has set yet (a gauge without a mark) has no samples, and is absent with its help.
        files = sorted(map(os.fspath, self._folder.glob("*.db")))
        return [metric for metric in self._merge(files) if metric.samples]

    def answer(self) -> Answer:
        try:
            return Answer(HTTPStatus.OK, self._generate(self._registry), _METRICS_TYPE)
        except Exception as error:  # noqa: BLE001 - a file may be anything by now, and the endpoint goes on
            if not self._is_warned:
                log.warning(f"metrics in {self._folder} cannot be read: {type(error).__name__}: {error}")
            self._is_warned = True
            return Answer(HTTPStatus.INTERNAL_SERVER_ERROR, b"the metrics cannot be read\n")


def _health(health: Callable[[], tuple[bool, str]]) -> Answer:
    is_well, line = health()
    return Answer(HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE, f"{line}\n".encode())


def _ready() -> Answer:
    return Answer(HTTPStatus.OK, b"ready\n")


def health_of(signs: Sequence[tuple[int, Sign]], *, now: float) -> tuple[bool, str]:
    """Tell, from each rank's number and last sign of life, whether one has been silent for half of what it is allowed."""
    silent = [
        f"rank {rank}: no sign of life for {now - sign.since:.0f} s in {sign.phase.words}"
        for rank, sign in signs
        if now - sign.since > _UNHEALTHY_PART * (sign.due - sign.since)
    ]
    return not silent, "; ".join(silent) or "ok"
