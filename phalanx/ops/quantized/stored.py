"""Codes of a run of a matrix's elements, as flat buffers are cut: largest values of its blocks, casts, transposes.

A block of scales may lie in several runs, on several ranks: whoever holds a run finds its largest values, who
compares them over ranks is data_parallel's matter. What is cast is the master's value rounded to the dtype of the
weights, so that codes are those of the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.ops.op import Op, triton
from phalanx.ops.quantized.recipes import Format, cast, count_lost, wide_of
from phalanx.ops.quantized.scale_blocks import Blocks


def note_largest_(bits: Tensor, x: Tensor, first: int, blocks: Blocks, dtype: torch.dtype) -> None:
    """bits (count,) int32 become at least those of the largest |x| of each block as fp32 (NaN above all numbers), of
    elements x (n,) from number `first` on, rounded to `dtype`."""
    if not len(x):
        return
    size = x.to(dtype).abs().float().view(torch.int32)  # torch's scatter_reduce forgets NaN among floats
    bits.scatter_reduce_(0, blocks.of(first, first + len(x), x.device), size, "amax")


def cast_run_(
    quantized: Tensor,
    x: Tensor,
    first: int,
    blocks: Blocks,
    multiplier: Tensor,
    format: Format,
    dtype: torch.dtype,
    counts: Tensor | None,
    bits: Tensor | None,
) -> None:
    """codes (n,) uint8 of elements x (n,) from number `first` on, rounded to `dtype`, times the multiplier (count,)
    fp32 of their blocks. counts (SLOTS, COUNTS): what was lost is added, as ops.quantized.recipes.COUNTED. bits: as
    of note_largest_."""
    if not len(x):
        return
    if bits is not None:
        note_largest_(bits, x, first, blocks, dtype)
    x = x.to(dtype)
    scaled = x.to(wide_of(x)) * multiplier[blocks.of(first, first + len(x), x.device)]
    made = cast(scaled, format)
    quantized.copy_(made.view(torch.uint8))
    if counts is not None:
        counts[0, :-1] += count_lost(x, made, scaled, format)


def turn_(out: Tensor, quantized: Tensor) -> None:
    """out (C, R) = the transpose of 8-bit codes (R, C)."""
    out.view(torch.uint8).copy_(quantized.view(torch.uint8).t())


STORED = Op(
    "stored",
    "casts of weights that are kept in 8 bits",
    __name__,
    ("note_largest_", "cast_run_", "turn_"),
    (triton("phalanx.ops.quantized.stored_kernel", shapes="not float64"),),
    switches=("quant",),
)
