"""Tensors as the bytes of safetensors files, in blocks of host memory that are kept and filled again.

The format: the header's length (8 bytes, little endian), the header (JSON: type, shape and place of every tensor), the
tensors' bytes. Each tensor is copied once, straight to its place in the file: no other copy is made, and what then
hashes and writes a block needs neither torch nor the interpreter's lock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from typing import Any

import torch
from torch import Tensor

from trainer.codes import SettingError

Tensors = Mapping[str, Tensor]

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
}  # fmt: skip
_LENGTH_BYTES = 8
_ALIGNMENT = 64


class Snapshot:
    """Copy tensors into host memory that is kept from one time to the next, pinned where they come from a GPU."""

    def __init__(self) -> None:
        self._blocks: dict[str, _Block] = {}
        self._reserving: Future[None] | None = None

    def reserve(self, files: Mapping[str, Tensors], *, thread: Executor) -> None:
        """Have `thread` get the memory for such tensors: the first use of a page costs more than the copy.

        Raises:
            SettingError: a tensor has a type that a checkpoint cannot hold.
        """
        forms = {name: _form(tensors) for name, tensors in files.items()}

        def get() -> None:
            for name, form in forms.items():
                self._blocks[name] = _Block(form, touch=True)

        self._reserving = thread.submit(get)

    def take(self, files: Mapping[str, Tensors]) -> dict[str, memoryview]:
        """Return the safetensors files of these tensors, by file name; the next call overwrites them.

        Costs one wait for the GPU, if there is one, and new memory only where names, types or shapes are others than before.

        Raises:
            SettingError: a tensor has a type that a checkpoint cannot hold.
        """
        if self._reserving is not None:
            self._reserving.result()
            self._reserving = None
        for name, tensors in files.items():
            form = _form(tensors)
            if name not in self._blocks or self._blocks[name].form != form:
                self._blocks.pop(name, None)  # gives its memory back first
                self._blocks[name] = _Block(form)
            self._blocks[name].fill(tensors)
        devices = {tensor.device for tensors in files.values() for tensor in tensors.values() if tensor.is_cuda}
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return {name: self._blocks[name].data for name in files}


#: Name, type, shape, and whether it comes from a GPU, in the order of the file.
_Form = list[tuple[str, torch.dtype, torch.Size, bool]]


def _form(tensors: Tensors) -> _Form:
    # Widest type first: every tensor then begins at a multiple of its own width.
    order = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    for name, tensor in order:
        if tensor.dtype not in _NAMES:
            raise SettingError(f"tensor {name!r} is {tensor.dtype}, which a checkpoint cannot hold; use another type")
    return [(name, tensor.dtype, tensor.shape, tensor.is_cuda) for name, tensor in order]


class _Block:
    """Hold one safetensors file in memory, and a view of every tensor's place in it."""

    def __init__(self, form: _Form, *, touch: bool = False) -> None:
        self.form = form
        header: dict[str, dict[str, Any]] = {}
        end = 0
        for name, dtype, shape, _ in form:
            start, end = end, end + shape.numel() * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        head = json.dumps(header, separators=(",", ":")).encode()
        head += b" " * (-(_LENGTH_BYTES + len(head)) % _ALIGNMENT)
        first = _LENGTH_BYTES + len(head)
        flat = torch.empty(first + end, dtype=torch.uint8, pin_memory=any(is_cuda for *_, is_cuda in form))
        if touch:
            flat.numpy().fill(0)  # not by torch: it would use all its threads
        self.data: memoryview = flat.numpy().data
        self.data[:first] = len(head).to_bytes(_LENGTH_BYTES, "little") + head
        self._places: dict[str, Tensor] = {}
        for name, dtype, shape, _ in form:
            start, end = (first + offset for offset in header[name]["data_offsets"])
            self._places[name] = flat[start:end].view(dtype).view(shape)

    def fill(self, tensors: Tensors) -> None:
        """Copy every tensor to its place, in the order of its indices; a copy from a GPU has only begun by then."""
        for name, place in self._places.items():
            source = tensors[name].detach()
            if source.is_cuda or not source.is_contiguous():
                place.copy_(source, non_blocking=True)
            else:
                # torch would copy with all its threads, and on a busy machine they wait long for each other.
                _bytes_of(place)[:] = _bytes_of(source)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
