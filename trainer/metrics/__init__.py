"""See a run from outside: the catalogue of series, the recorders that write them, and the endpoint of a node that serves them.

A recorder takes the numbers that it is given; measuring is the caller's. Nothing here raises into training, waits for a device or a
peer, or prints, but for one warning where metrics come to an end.
"""

from trainer.metrics.exporter import Exporter, health_of, serve
from trainer.metrics.folder import keep_ranks, new_folder, places
from trainer.metrics.node import AgentRecorder, reason_of
from trainer.metrics.page import renewed
from trainer.metrics.recorder import Recorder
from trainer.metrics.reporter import Counting
from trainer.metrics.table import Reason

__all__ = [
    "AgentRecorder",
    "Counting",
    "Exporter",
    "Reason",
    "Recorder",
    "health_of",
    "keep_ranks",
    "new_folder",
    "places",
    "reason_of",
    "renewed",
    "serve",
]
