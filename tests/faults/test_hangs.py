"""Hangs of whole jobs: one rank stops, waits or spins, whatever it is in; how the job ends then, what it shows, and what is no hang.

Which ranks the agent takes for hung, with small children in place of ranks: ../agent/test_hangs.py.
"""

from __future__ import annotations

from tests.distributed.conftest import Job

HANG_SECONDS = 3
#: How much later than its limit everything has to be over.
LATER_SECONDS = 15
COMMON = (
    "--dataset", "slow:load", "--model", "slow:build", "--lr", "0.01", "--global-batch-size", "4", "--workers", "0",
    "--log-format", "json", "--log-every", "1", "--eval-every", "1000000", "--checkpoint-every", "0",
)  # fmt: skip
TWO = ("--nproc-per-node", "2")
ENDLESS = (*COMMON, *TWO, "--steps", "1000000", "--max-restarts", "0", "--hang-timeout", str(HANG_SECONDS))
#: The first ten steps have a longer limit, the least of which nobody can set.
AT = 14

#: Data and a model that do what a variable says from a step on, on one rank; a file says that they have begun.
SLOW = """
import ctypes, os, pathlib, time
import torch

def begins():
    '''Tell whether this is the rank and the time to do it, and leave word of it.'''
    if os.environ["RANK"] != os.environ.get("TRAINER_TEST_RANK"):
        return False
    pathlib.Path("begun").touch()
    return True

def sleeps_for_ever():
    time.sleep(600)

def holds_the_lock():
    ctypes.PyDLL(None).sleep(600)

def sleeps_at_the_first_start():
    first = pathlib.Path("first")
    if not first.exists():
        first.touch()
        time.sleep(600)

def takes_longer_and_longer(step):
    time.sleep(max(0, step - 11) * 0.7)

def pauses(step):
    time.sleep(5 if step == 14 else 0)

class Numbers(torch.utils.data.Dataset):
    classes = 3
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        if DOES == "data" and index == 50 and begins():
            sleeps_for_ever()
        return torch.full((1, 4, 4), index, dtype=torch.uint8), index % 3

def load(split, config):
    return Numbers(64 if split == "train" else 4)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.step = torch.nn.Linear(16, 3), 0
    def forward(self, pictures):
        self.step += self.training
        time.sleep(0.03)
        if not self.training:
            time.sleep(4)
        elif DOES in ("pauses", "takes_longer_and_longer"):
            globals()[DOES](self.step)
        elif DOES and DOES != "data" and self.step == 14 and begins():
            globals()[DOES]()
        return self.layer(pictures.flatten(1))

def build(config, *, classes, shape):
    return Model()

DOES = os.environ.get("TRAINER_TEST_DOES", "")
"""


def make(job: Job, does: str = "", *, rank: int = 0) -> Job:
    (job.folder / "slow.py").write_text(SLOW)
    job.env |= {"TRAINER_TEST_DOES": does, "TRAINER_TEST_RANK": str(rank)}
    return job
