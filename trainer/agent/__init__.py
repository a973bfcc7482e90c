"""Supervise this node's ranks as child processes: start them, forward signals, find hangs, end what is left, start anew.

The agent imports no torch, so it is up at once, stays small, and is not caught in what catches a rank. It knows nothing of
models or data, and it gets the children's environments from its caller. How one start goes is in `watch.py`, what a hang is and
what is done about it in `hangs.py` and `flight.py`, how ends become one code in `ends.py`, when there is another start in `starts.py`.
"""

from trainer.agent.ends import Ends
from trainer.agent.flight import flight_recorder
from trainer.agent.starts import Launch, is_stopped, listen, supervise

__all__ = ["Ends", "Launch", "flight_recorder", "is_stopped", "listen", "supervise"]
