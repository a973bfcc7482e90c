"""Train: the state, one step, the loop, and the one place that assembles a run."""

from trainer.train.loop import State, Update, fit
from trainer.train.plan import Plan, make_plan
from trainer.train.ready import make_ready
from trainer.train.run import run
from trainer.train.score import score
from trainer.train.start import Start

__all__ = ["Plan", "Start", "State", "Update", "fit", "make_plan", "make_ready", "run", "score"]
