"""Formats of frozen base weights (`lora.base`) as data, and where the quantized values of a box of a matrix lie.

A value x is stored as the number of a value v of a small table and a scale s that a block of values shares: x ~ v s.
Blocks are counted from the first element of the global matrix, in the orientation of Hugging Face checkpoints. So a
rank that holds a box of the matrix stores the same numbers and scales as one that holds all of it; where its box cuts a
block, each side has the scale. With `double`, scales are quantized themselves, in groups of neighbouring blocks.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from phalanx.base.align import BYTES, room
from phalanx.base.dataclass import dataclass
from phalanx.ops.optimizer.blockwise import dynamic_map

ROW = 8  # values of a row are stored in whole groups of so many, which a kernel reads at once

# Dettmers et al., "QLoRA", 2023, appendix E: quantiles of the normal distribution, scaled to [-1, 1], with a zero
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@dataclass(frozen=True)
class BaseFormat:
    """How frozen weights are stored.

    bits    of a stored number
    block   rows and columns that share a scale; a block at the edge of a matrix may be smaller
    kind    the table of values: a book of its own, all integers of so many bits, or the FP8 numbers E4M3
    top     the value that the largest |x| of a block becomes
    scale   dtype of scales
    double  blocks whose scales are quantized together, to 8 bits (QLoRA's double quantization); 0: scales are stored
            as they are
    """

    name: str
    bits: Literal[4, 8]
    block: tuple[int, int]
    kind: Literal["book", "integers", "e4m3"]
    top: float
    scale: torch.dtype = torch.float32
    double: int = 0

    @property
    def bits_per_weight(self) -> float:
        """Of a large matrix."""
        scale = 8 + 32 / self.double if self.double else 8 * self.scale.itemsize
        return self.bits + scale / (self.block[0] * self.block[1])


FORMATS = {
    f.name: f
    for f in (
        BaseFormat("int8", 8, (1, 128), "integers", 127.5),
        # DeepSeek-V3, 2024, section 3.3: the blocks of its published weights
        BaseFormat("fp8", 8, (128, 128), "e4m3", 448.0),
        BaseFormat("int4", 4, (1, 64), "integers", 7.5, torch.bfloat16),
        BaseFormat("nf4", 4, (1, 64), "book", 1.0, double=256),
    )
}


@cache
def table(format: BaseFormat, device: torch.device | None = None) -> Tensor:
    """(2 ** bits,) fp32: the value of each stored number. Integers are stored with their least value at zero, E4M3
    numbers as their bits; the two that are NaN are never stored."""
    if format.kind == "book":
        return torch.tensor(NF4, device=device)
    if format.kind == "integers":
        half = 1 << (format.bits - 1)
        return torch.arange(-half, half, dtype=torch.float32, device=device)
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num().to(device)


@cache
def scale_table(device: torch.device | None = None) -> Tensor:
    """(256,) fp32: the value of each quantized scale."""
    return dynamic_map(True, device)


Pair = tuple[int, int]


@dataclass(frozen=True)
class MatrixBox:
    """A box of a global matrix of `shape`: rows start[0]..stop[0], columns start[1]..stop[1]."""

    shape: Pair
    start: Pair
    stop: Pair

    @staticmethod
    def whole(shape: Pair) -> MatrixBox:
        return MatrixBox(shape, (0, 0), shape)

    @property
    def size(self) -> Pair:
        return self.stop[0] - self.start[0], self.stop[1] - self.start[1]


@dataclass(frozen=True)
class EncodedBox:
    """Where the parts of an encoded box lie, in bytes from its first one: numbers, row by row, each row padded to whole
    groups of ROW; the scales of all blocks that it touches, row by row; with double quantization the scales of the
    groups of blocks that it touches, and the offset of all scales of the matrix."""

    format: BaseFormat
    box: MatrixBox

    @property
    def row_bytes(self) -> int:
        return room(self.box.size[1], ROW) * self.format.bits // 8

    @property
    def first_block(self) -> Pair:
        return self.box.start[0] // self.format.block[0], self.box.start[1] // self.format.block[1]

    @property
    def blocks(self) -> Pair:
        """How many blocks it touches, down and across."""
        (top, left), (high, wide), (bottom, right) = self.first_block, self.format.block, self.box.stop
        return -(-bottom // high) - top, -(-right // wide) - left

    @property
    def blocks_across(self) -> int:
        """Of the whole matrix."""
        return -(-self.box.shape[1] // self.format.block[1])

    @property
    def groups(self) -> range:
        """Numbers of the groups of blocks, in the whole matrix, that it touches; none without double quantization."""
        if not self.format.double:
            return range(0)
        (top, left), (down, across) = self.first_block, self.blocks
        last = (top + down - 1) * self.blocks_across + left + across - 1
        return range((top * self.blocks_across + left) // self.format.double, last // self.format.double + 1)

    @property
    def scales_at(self) -> int:
        return room(self.box.size[0] * self.row_bytes, BYTES)

    @property
    def groups_at(self) -> int:
        each = 1 if self.format.double else self.format.scale.itemsize
        return self.scales_at + room(self.blocks[0] * self.blocks[1] * each, BYTES)

    @property
    def nbytes(self) -> int:
        return self.groups_at + (room(4 * (len(self.groups) + 1), BYTES) if self.format.double else 0)

    @property
    def source(self) -> MatrixBox:
        """The box whose values are needed to encode it: whole blocks, or, since double quantization subtracts the mean
        of all scales, the whole matrix."""
        if self.format.double:
            return MatrixBox.whole(self.box.shape)
        (top, left), (down, across), (high, wide) = self.first_block, self.blocks, self.format.block
        rows, columns = self.box.shape
        stop = min(rows, (top + down) * high), min(columns, (left + across) * wide)
        return MatrixBox(self.box.shape, (top * high, left * wide), stop)
