"""The live process group: meeting the other ranks, collectives, the per-step agreement, and how a lost peer is told.

Everything that waits for another rank waits here, within a limit, and a wait that fails becomes one line that says who was
waited for and where. Which ranks exist is `launch.py`'s knowledge; the environment is not read here.
"""

from trainer.group.agreement import Agreement, Verdict
from trainer.group.live import Group, alone, connect
from trainer.group.rendezvous import Meeting

__all__ = ["Agreement", "Group", "Meeting", "Verdict", "alone", "connect"]
