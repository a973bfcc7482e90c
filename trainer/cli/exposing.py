"""The node's metrics endpoint: served by the agent, from the numbers that it and its ranks leave in a folder.

Under a foreign launcher there is no agent, and no endpoint yet.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trainer import codes, log, metrics
from trainer.beat import Records
from trainer.cli.environment import METRICS_DIR
from trainer.config import Config

#: Two intervals of a usual Prometheus, and a little: a pod that has ended is found no more.
_LINGER_SECONDS = 35.0


@dataclass
class Exposed:
    """Hold the agent's side of the endpoint; without an endpoint all of it does nothing.

    Attributes:
        recorder: takes the agent's own numbers.
        environment: what tells the ranks where theirs go.
        records: the ranks' signs of life, of the start that is under way.
    """

    recorder: metrics.AgentRecorder = field(default_factory=metrics.AgentRecorder.off)
    environment: dict[str, str] = field(default_factory=dict)
    records: Records | None = None
    first_rank: int = 0
    exporter: metrics.Exporter | None = None

    def health(self) -> tuple[bool, str]:
        """Tell whether a rank has been silent for too long."""
        signs = self.records.read() if self.records else []
        return metrics.health_of(list(enumerate(signs, start=self.first_rank)), now=time.monotonic())

    def linger(self, seconds: float | None, *, stop: Callable[[], bool]) -> None:
        """Stay for the last scrapes after a good end."""
        if seconds is None:
            seconds = _LINGER_SECONDS if "KUBERNETES_SERVICE_HOST" in os.environ else 0.0
        if self.exporter is not None and seconds:
            log.info(f"the endpoint stays for {seconds:g} s (--metrics-linger-seconds)")
            self.exporter.linger(seconds, stop=stop)


@contextlib.contextmanager
def exposed(config: Config, *, first_rank: int, wanted: bool) -> Iterator[Exposed]:
    """Serve the node's endpoint while the context lasts, unless --metrics-port is 0."""
    made = Exposed(first_rank=first_rank)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(metrics.new_folder(metrics.places())) if wanted and config.metrics_port else None
        if folder is not None:
            _serve(made, folder, config, stack)
        yield made


def _serve(made: Exposed, folder: Path, config: Config, stack: contextlib.ExitStack) -> None:
    address, port = config.metrics_address, config.metrics_port
    made.exporter = metrics.serve(folder, address=address, port=port, health=made.health)
    if made.exporter is None:
        return
    stack.callback(made.exporter.close)
    made.recorder = metrics.AgentRecorder.open(folder)
    made.environment = {METRICS_DIR: str(folder)}
    counting = metrics.Counting(made.recorder)
    log.LOGGER.addHandler(counting)
    stack.callback(log.LOGGER.removeHandler, counting)


def recorder_of_rank(*, rank: int, local_rank: int, since: float) -> metrics.Recorder:
    """Return what takes a rank's numbers: into the folder that the agent tells, or nowhere."""
    folder = os.environ.pop(METRICS_DIR, None)
    if folder is None:
        return metrics.Recorder.off()
    made = metrics.Recorder.open(Path(folder), rank=rank, local_rank=local_rank, since=since)
    log.LOGGER.addHandler(metrics.Counting(made))
    return made


def process_began() -> float:
    """Return when this process was started, by the monotonic clock."""
    ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(0.0, age)


def phase_of(code: int) -> Literal["succeeded", "stopped", "failed"]:
    """Return the phase in which a node is that has ended with `code`."""
    return "succeeded" if code == codes.OK else "stopped" if code in codes.STOP_CODES else "failed"
