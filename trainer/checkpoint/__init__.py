"""Save, find, verify, load and remove checkpoints: folders that are whole or not there; and what guards a run's folder.

    <run>/checkpoints/step-00000500/   model.safetensors  optimizer.safetensors  state.json  manifest.json

The manifest holds the size and the SHA-256 of the other three; a checkpoint is valid only if they hold. Nothing is
pickled. When to save, and who saves (one process per run), is decided elsewhere; no collectives live here.
"""

from trainer.checkpoint.files import DISK, Files, SaveFailed, replace_json
from trainer.checkpoint.hold import hold
from trainer.checkpoint.layout import (
    FOLDER,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    PARTS,
    STATE,
    VERSION,
    best_step,
    find,
    step_of,
)
from trainer.checkpoint.listing import Row, listing
from trainer.checkpoint.packing import Tensors
from trainer.checkpoint.reading import Loaded, parse, read, read_newest, resolve, verify, weights_digest
from trainer.checkpoint.saving import prune, save, sweep
from trainer.checkpoint.starts import count_start, take_back
from trainer.checkpoint.writer import Outcome, Writer

__all__ = [
    "DISK",
    "FOLDER",
    "MANIFEST",
    "MODEL",
    "OPTIMIZER",
    "PARTS",
    "STATE",
    "VERSION",
    "Files",
    "Loaded",
    "Outcome",
    "Row",
    "SaveFailed",
    "Tensors",
    "Writer",
    "best_step",
    "count_start",
    "find",
    "hold",
    "listing",
    "parse",
    "prune",
    "read",
    "read_newest",
    "replace_json",
    "resolve",
    "save",
    "step_of",
    "sweep",
    "take_back",
    "verify",
    "weights_digest",
]
