"""Find the files of a data set that consists of a few known ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trainer.codes import DataError


def find_files(
    names: Sequence[str], *, folder: Path, subfolder: str, endings: Sequence[str] = ("",)
) -> dict[str, Path]:
    """Return the path of each file, in `folder` or in its `subfolder`, with the first of the `endings` that is there.

    Raises:
        DataError: some are missing; says which, and how to get them.
    """
    places = [place / (name + ending) for name in names for place in (folder, folder / subfolder) for ending in endings]
    there = [path for path in places if os.path.isfile(path)]  # noqa: PTH113 - Path.is_file raises
    found = {name: [path for path in there if path.name in [name + ending for ending in endings]] for name in names}
    missing = [name for name, paths in found.items() if not paths]
    if missing:
        words = "none of the files" if len(missing) == len(names) else f"no {' and no '.join(missing)}"
        form = f", each plain or with {endings[-1]}," if len(endings) > 1 else ""
        raise DataError(
            f"--data-dir {folder} holds {words}; expected {', '.join(names)}{form} in {folder} or in "
            f"{folder / subfolder}: put them there, or let --download or --archive do it"
        )
    return {name: paths[0] for name, paths in found.items()}
