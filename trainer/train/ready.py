"""Put a run's data and first weights in place, before any rank is started: what `trainer prepare` does."""

from __future__ import annotations

from trainer import log
from trainer.data import load, prepare
from trainer.train.first import read_weights
from trainer.train.report import describe_data
from trainer.train.start import Start


def make_ready(start: Start) -> None:
    """Fetch or unpack the data, read what they are, and fetch the first weights.

    Raises:
        SettingError, DataError, CheckpointError: as training would, with the same line.
    """
    config = start.config
    prepare(config)
    describe_data(load(config, cache_dir=start.cache_dir))
    if config.weights is not None:
        tensors, _ = read_weights(config.weights, model=config.model)
        log.info(f"first weights: {config.weights}, {sum(value.numel() for value in tensors.values())} numbers")
