"""Train image classifiers with DistributedDataParallel, on one CPU or on many nodes, from the same command."""

__version__ = "0.1.0"
