"""What the model receives, and the trace of it."""

from __future__ import annotations

import contextlib
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.codes import SettingError, TrainerError
from trainer.data import ArraySource, Batch, DataSet
from trainer.train.prepare import Prepare, open_trace


@pytest.fixture
def dataset():
    source = ArraySource(np.zeros((2, 2, 3, 3), np.uint8), np.zeros(2, np.int64))
    return DataSet("two", source, source, 2, (2, 3, 3), (0.5, 0.25), (0.5, 0.125), 0, "f", True)


def batch(count: int, *, step: int = 4) -> Batch:
    images = torch.arange(count * 18, dtype=torch.uint8).view(count, 2, 3, 3)
    return Batch(step, torch.arange(10, 10 + count), images, torch.zeros(count, dtype=torch.int64))


def test_pictures_are_normalised_per_channel(dataset):
    inputs, labels = Prepare(dataset, torch.device("cpu"), channels_last=False)(batch(3))
    expected = (batch(3).images / 255 - torch.tensor([0.5, 0.25]).view(1, 2, 1, 1)) / torch.tensor([0.5, 0.125]).view(
        1, 2, 1, 1
    )
    torch.testing.assert_close(inputs, expected, rtol=1e-5, atol=1e-5)
    assert (inputs.dtype, labels.dtype) == (torch.float32, torch.int64)


def test_a_sample_is_the_same_whatever_batch_it_comes_in(dataset):
    prepare = Prepare(dataset, torch.device("cpu"), channels_last=False)
    alone = torch.cat(
        [
            prepare(Batch(0, one, image, one))[0]
            for one, image in zip(torch.arange(14).split(1), batch(14).images.split(1), strict=True)
        ]
    )
    assert torch.equal(prepare(batch(14))[0], alone)


def test_channels_last_changes_the_layout_alone(dataset):
    plain, last = (Prepare(dataset, torch.device("cpu"), channels_last=value)(batch(3))[0] for value in (False, True))
    assert torch.equal(plain, last)
    assert last.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_trace_has_step_sample_and_crc_of_what_is_passed_on(dataset, tmp_path, channels_last):
    path = tmp_path / "new" / "rank-0.csv"
    for _ in range(2):  # a resumed run adds to it
        with open_trace(path.parent, rank=0) as trace:
            prepare = Prepare(dataset, torch.device("cpu"), channels_last=channels_last, trace=trace)
            inputs, _ = prepare(batch(2))
    rows = [f"4,{10 + index},{zlib.crc32(inputs[index].contiguous().numpy().tobytes())}" for index in range(2)]
    assert path.read_text().splitlines() == rows * 2


def test_a_trace_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(SettingError, match=r"--trace: .*rank-3\.csv cannot be written"),
        open_trace(tmp_path / "file", rank=3),
    ):
        pass


def test_no_folder_is_no_trace():
    with open_trace(None, rank=0) as trace:
        assert trace is None


def test_a_trace_on_a_full_disk_is_one_line(dataset):
    trace = Path("/dev/full").open("a", encoding="ascii")  # noqa: SIM115 - closing it raises, too
    prepare = Prepare(dataset, torch.device("cpu"), channels_last=False, trace=trace)
    with pytest.raises(TrainerError, match=r"--trace: /dev/full cannot be written \(No space left on device\)"):
        prepare(batch(2))
    with contextlib.suppress(OSError):
        trace.close()
