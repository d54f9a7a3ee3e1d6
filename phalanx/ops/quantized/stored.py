"""Quantized values of a range of a matrix's elements, as flat buffers divide them: largest values of blocks, casts,
transposes.

A scaling block may span several ranges on several ranks. Whoever holds a range finds its largest values here;
data_parallel compares them over ranks. The master is rounded to the dtype of the weights before it is quantized, so the
quantized values are those of the weights.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from phalanx.ops.op import Case, Kernels, Op, triton
from phalanx.ops.quantized.recipes import COUNTS, E4M3, SLOTS, Format, cast, count_lost, multipliers, wide_of
from phalanx.ops.quantized.scale_blocks import Blocks


def note_largest_(bits: Tensor, x: Tensor, first: int, blocks: Blocks, dtype: torch.dtype) -> None:
    """Raise bits (count,) int32 to at least those of the largest |x| of each block as fp32 (NaN above all numbers), for
    elements x (n,) from number `first` on, rounded to `dtype`."""
    if not len(x):
        return
    size = x.to(dtype).abs().float().view(torch.int32)  # torch's scatter_reduce ignores NaN among floats
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
    """Write quantized (n,) uint8 for elements x (n,) from number `first` on, rounded to `dtype`, times the multiplier
    (count,) fp32 of their blocks. counts (SLOTS, COUNTS): losses are added, as in ops.quantized.recipes.COUNTED. bits:
    as in note_largest_."""
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
    """out (C, R) = the transpose of FP8 bytes (R, C)."""
    out.view(torch.uint8).copy_(quantized.view(torch.uint8).t())


def _case(rows: int, columns: int, block: tuple[int, int], large: bool = False) -> Case:
    """A weight in runs, cut through rows and blocks, each too short for its losses to be sampled."""

    def call(x: Tensor, kernels: Kernels) -> tuple[Tensor, ...]:
        by, blocks, flat = STORED.choose(kernels, x), Blocks(rows, columns, block), x.detach().flatten()
        bits, recomputed = torch.zeros(2, blocks.count, dtype=torch.int32, device=x.device)
        quantized = torch.zeros(flat.numel(), dtype=torch.uint8, device=x.device)
        counts = torch.zeros(SLOTS, COUNTS, dtype=torch.int64, device=x.device)
        ends = sorted({0, 64 * 3, 64 * 101, 64 * 102, flat.numel() // 2, flat.numel()})
        runs = [slice(first, last) for first, last in pairwise(ends)]
        for run in runs:
            by.note_largest_(bits, flat[run], run.start, blocks, torch.bfloat16)
        multiplier = multipliers(bits.view(torch.float32), E4M3)
        for run in runs:
            how = (blocks, multiplier, E4M3, torch.bfloat16, counts, recomputed)
            by.cast_run_(quantized[run], flat[run], run.start, *how)
        out = torch.zeros(columns, rows, dtype=torch.uint8, device=x.device)
        by.turn_(out, quantized.view(rows, columns))
        return bits, recomputed, quantized, counts.sum(0)[:-1], out

    name = f"{rows} x {columns}, scales of {block[0]} x {block[1]}"
    return Case(name, call, ((rows, columns),), dtypes=(torch.float32,), large=large, exact=True)


STORED = Op(
    "stored",
    "casts of weights that are kept in 8 bits",
    __name__,
    ("note_largest_", "cast_run_", "turn_"),
    (triton("phalanx.ops.quantized.stored_kernel", shapes="not float64"),),
    switches=("quant",),
    cases=(
        _case(48, 272, (48, 272)),
        _case(256, 64, (128, 128)),
        _case(384, 64, (128, 64)),
        _case(4096, 1408, (4096, 1408), large=True),
        _case(1024, 768, (128, 128), large=True),
        _case(2048, 384, (256, 384), large=True),
    ),
)
