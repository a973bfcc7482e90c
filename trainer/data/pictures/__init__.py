"""Data sets of picture files: which files there are, what their labels mean, and how they become pixels."""
