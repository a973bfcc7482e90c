"""Time the reading of training pictures beside the classic way, in turns, on one thread. Run by `make bench-data`.

Classic, per sample: Pillow opens the file and converts it to RGB; RandomResizedCrop draws; resized_crop (bilinear, antialias), hflip,
to_tensor and normalize follow. A classic loader then stacks the samples into the batch that it hands over; it is timed without
and with that. Ours is what the trainer does: `ImageSource.fetch` draws, decodes, and makes the uint8 batch that leaves a loader
process; `Prepare` makes normalised floats of it, here on the CPU. Both take the same views of the same files (what the classic
way drew is put aside), and the files are in the page cache after the first round. Times are CPU time, so that what else runs on
the machine counts for less.

TRAINER_TEST_DATA names the folder that holds imagenet-sample/; a folder given as argument goes first. Nothing is judged here.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL
import torch
import torchvision
from PIL import Image
from timing import print_table
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms import functional as classic

from trainer.data import Batch, DataSet, draws
from trainer.data.pictures.decode import jpeg_decoder
from trainer.data.pictures.images import ASPECT, MEAN, STD, ImageSource, View, random_view, uniforms
from trainer.data.pictures.index import build_index
from trainer.data.sets import I64, U64
from trainer.train.prepare import Prepare

SIZE, MIN_CROP = 224, 0.08


@dataclass(frozen=True)
class Part:
    """Hold a batch of the work: what ours gets, and the same for the classic way."""

    ids: I64
    seeds: U64
    files: list[Path]
    views: list[View]


def parts(source: ImageSource, *, batch: int, seed: int) -> Iterator[Part]:
    """Cut all samples into batches, with views that change with the seed."""
    for first in range(0, len(source), batch):
        ids = np.arange(first, min(first + batch, len(source)), dtype=np.int64)
        seeds = draws(seed, positions=ids, count=1)[:, 0]
        files = [source.index.path(number) for number in ids.tolist()]
        views = []
        for file, numbers in zip(files, uniforms(seeds), strict=True):
            with Image.open(file) as image:
                width, height = image.size
            views.append(random_view(numbers.tolist(), height=height, width=width, min_crop=MIN_CROP))
        yield Part(ids, seeds, files, views)


def read_classic(part: Part) -> list[torch.Tensor]:
    """Return normalised floats, one tensor for each sample."""
    samples = []
    for file, view in zip(part.files, part.views, strict=True):
        with file.open("rb") as opened:
            image = Image.open(opened).convert("RGB")
        RandomResizedCrop.get_params(image, scale=[MIN_CROP, 1], ratio=list(ASPECT))
        torch.rand(1)  # as RandomHorizontalFlip does
        image = classic.resized_crop(image, view.top, view.left, view.height, view.width, [SIZE, SIZE])
        tensor = classic.to_tensor(classic.hflip(image) if view.mirrored else image)
        samples.append(classic.normalize(tensor, MEAN, STD))
    return samples


def read_batch(part: Part, *, source: ImageSource) -> Batch:
    """Return our uint8 batch."""
    images, labels = source.fetch(part.ids, seeds=part.seeds)
    return Batch(0, *(torch.from_numpy(array) for array in (part.ids, images, labels)))


def difference(work: list[Part], *, read: Callable[[Part], torch.Tensor]) -> list[float]:
    """Return for each picture the mean absolute difference of its pixels from the classic way's, in levels of 0 to 255."""
    scale = torch.tensor(STD).view(1, 3, 1, 1) * 255
    found = []
    for part in work:
        apart = (read(part) - torch.stack(read_classic(part))).abs() * scale
        found += apart.mean(dim=(1, 2, 3)).tolist()
    return found


def measure(tasks: dict[str, Callable[[Part], object]], work: list[list[Part]]) -> dict[str, list[float]]:
    """Return the CPU milliseconds per picture of each round; the tasks take turns batch by batch, so a slow second meets all."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for number, batches in enumerate(work):
        spent = dict.fromkeys(tasks, 0.0)
        for part in batches:
            for name, task in tasks.items():
                began = time.process_time()
                task(part)
                spent[name] += time.process_time() - began
        if number:  # the first round is for the caches
            for name, seconds in spent.items():
                times[name].append(1000 * seconds / sum(len(part.ids) for part in batches))
    return times


def table(times: dict[str, list[float]], *, head: str) -> list[list[str]]:
    """Return rows with medians, spreads, and how many times faster than the two classic ones each is."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    samples, batch, *_ = medians.values()
    rows = [[head, "CPU ms each", "min-max", "x samples", "x batch"]]
    for name, value in medians.items():
        spread = f"{min(times[name]):.2f}-{max(times[name]):.2f}"
        rows.append([name, f"{value:.2f}", spread, f"{samples / value:.2f}", f"{batch / value:.2f}"])
    return rows


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="of JPEG files; its subfolders are left out")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=64)
    return parser.parse_args()


def make_source(folder: Path) -> ImageSource:
    """List the folder's pictures."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
    if not names:
        sys.exit(f"{folder} has no .jpg or .jpeg file")
    index = build_index(folder, names=names, labels=[0] * len(names))
    return ImageSource(index, SIZE, augment=True, min_crop=MIN_CROP, max_pixels=10**8)


def main() -> None:
    """Print the times, the two ratios and the difference of the pictures."""
    given = arguments()
    torch.set_num_threads(1)
    source = make_source(given.folder or Path(os.environ.get("TRAINER_TEST_DATA", "")) / "imagenet-sample")
    dataset = DataSet("files", source, source, 1, (3, SIZE, SIZE), MEAN, STD, 0, fingerprint="", in_memory=False)
    prepare = Prepare(dataset, torch.device("cpu"), channels_last=False)
    tasks: dict[str, Callable[[Part], object]] = {
        "classic, a float tensor per sample": read_classic,
        "classic, a float batch": lambda part: torch.stack(read_classic(part)),
        "ours, the uint8 batch": lambda part: read_batch(part, source=source),
        "ours, a float batch on the CPU": lambda part: prepare(read_batch(part, source=source)),
    }
    work = [list(parts(source, batch=given.batch, seed=seed)) for seed in range(given.rounds + 1)]
    rows = table(measure(tasks, work), head=f"{len(source)} pictures, {given.rounds} rounds, batch {given.batch}")
    print_table(rows)
    apart = difference(work[0], read=lambda part: prepare(read_batch(part, source=source))[0])
    print(
        f"difference of the pictures, of 255: {statistics.mean(apart):.3f} in the mean, {max(apart):.3f} in the worst"
    )
    kind = "torchvision" if jpeg_decoder() else "Pillow alone"
    print(f"torch {torch.__version__}, torchvision {torchvision.__version__}, Pillow {PIL.__version__}; JPEG by {kind}")


if __name__ == "__main__":
    main()
