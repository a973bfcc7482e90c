"""Data sets, the order in which training uses them, and the batches of each rank.

What other modules use is here; of the files, `order.py` is pure arithmetic, `table.py` knows the data sets by name.
"""

from trainer.data.loader import auto_workers, test_batches, train_batches
from trainer.data.order import draws, epoch_end, epochs_done, order, rank_positions, total_steps
from trainer.data.sets import ArraySource, DataSet, Source
from trainer.data.steps import Batch
from trainer.data.supply.once import prepare
from trainer.data.table import load

__all__ = [
    "ArraySource",
    "Batch",
    "DataSet",
    "Source",
    "auto_workers",
    "draws",
    "epoch_end",
    "epochs_done",
    "load",
    "order",
    "prepare",
    "rank_positions",
    "test_batches",
    "total_steps",
    "train_batches",
]
