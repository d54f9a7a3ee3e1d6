"""Safetensors files: written as a stream of tensors (nothing is held twice), read by box through a memory map. Never pickle."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.holdings import Item
from phalanx.checkpoint.storage import Output, Receipt, Storage
from phalanx.layout.box import Box

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
WRITE_BYTES = 64 << 20  # copied to the host and written at once


class TensorFile:
    """A safetensors file under way. Its tensors (name, shape) of one dtype are known in advance and come in that order.

    A failed write is kept until `finish`, so that the ranks which send to this one are not left waiting.
    """

    def __init__(self, storage: Storage, path: Path, entries: Iterable[tuple[str, tuple[int, ...]]], dtype: torch.dtype):
        self._failed: CheckpointError | None = None
        self._output: Output | None = None
        try:
            self._output = Output(storage, path)
            self._output.write(header(entries, dtype))
        except CheckpointError as error:
            self._failed = error

    def add(self, tensor: Tensor) -> None:
        """The next tensor, in any memory layout, on any device."""
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if self._output is None or self._failed is not None:
            return
        try:
            for part in flat.split(WRITE_BYTES):
                self._output.write(part.cpu().numpy().data)
        except CheckpointError as error:
            self._failed = error

    def finish(self) -> Receipt:
        if self._failed is not None:
            raise self._failed
        return self._output.finish()  # type: ignore[union-attr]

    def close(self) -> None:
        """Give the file back, whatever became of it."""
        if self._output is not None:
            self._output.close()


def header(entries: Iterable[tuple[str, tuple[int, ...]]], dtype: torch.dtype) -> bytes:
    """Length and JSON table of a safetensors file, padded so that the data is aligned to 8 bytes."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in entries:
        size = prod(shape) * dtype.itemsize
        table[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class Part:
    """A stored box of a global tensor: `key` in `file`."""

    file: str
    key: str
    box: Box


@dataclass
class Stored:
    """A global tensor as it lies in the files of a folder."""

    shape: tuple[int, ...]
    parts: list[Part] = field(default_factory=list)


Index = dict[str, Stored]


def fill(items: list[Item], index: Index, folder: Path) -> None:
    """Copy each item's box from the files that hold it, reading only that. The dtype may change; a value that nobody stored is an error."""
    jobs: dict[str, list[tuple[str, tuple[slice, ...], Tensor]]] = {}
    for item in items:
        found = 0
        for part in index[item.name].parts:
            common = part.box.intersect(item.box)
            if not common.empty:
                jobs.setdefault(part.file, []).append((part.key, common.within(part.box), item.view[common.within(item.box)]))
                found += common.numel
        if found != item.box.numel:
            raise CheckpointError(f"{folder}: {found} of the {item.box.numel} elements of {item.name} in {item.box} are stored")
    for file in sorted(jobs):
        with open_tensors(folder / file) as tensors:
            for key, where, target in jobs[file]:
                target.copy_(tensors.get_slice(key)[where])


def open_tensors(path: Path) -> Any:
    """A safetensors file, memory-mapped. A damaged one raises CheckpointError."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def natural(name: str) -> list[tuple[int, str]]:
    """Sorting key with numbers in numeric order: layer 2 before layer 10."""
    return [(int(t), "") if t.isdigit() else (-1, t) for t in re.split(r"(\d+)", name)]
