"""Recipes of FP8 (and FP4) training as data, and the reference implementations of their casts, scales and scaled
matmuls.

A value x is stored as a value c of a narrow format and a scale s shared by a block of values: x ~ c s. In both operands
of a GEMM, blocks extend along the summed dim. A recipe is found by its name or as `module:NAME` (base/registry.py).
Which linears use it is up to nn/fp8.py, and how it works over ranks to ops/quantized/quantizer.py.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.registry import NotFound, find
from phalanx.ops.quantized.rounding import Key, noise_for

SEAM = "fp8_recipe"
Block = tuple[int, int]  # rows and columns that share a scale; 0: all of them
SLOTS = 32  # counters that casts spread their counts over, so that programs of a kernel do not wait for each other
COUNTED = (
    "zeros",
    "cut",
    "values",
)  # in each slot: values that became zero, values clamped to the largest number, all values examined
COUNTS = len(COUNTED) + 1  # and the bits of the largest |value| as fp32, where a kernel sees it
WHOLE, LINE = (0, 0), (1, 0)  # one scale for the whole tensor, or for each row
LARGEST_BLOCK = 128  # what experts' tokens are padded to, so blocks of tokens must divide it
FLOOR = 2.0**-100  # the least amax for which a scale is computed: its inverse stays in range


@dataclass(frozen=True)
class Format:
    """A narrow floating-point format. `dtype` stores its values; `max` is the largest finite one. E2M1 is stored as
    E4M3, which has all of its values."""

    name: str
    dtype: torch.dtype
    max: float


E4M3 = Format("E4M3", torch.float8_e4m3fn, 448.0)
E5M2 = Format("E5M2", torch.float8_e5m2, 57344.0)
E2M1 = Format("E2M1", torch.float8_e4m3fn, 6.0)


@dataclass(frozen=True)
class Recipe:
    """How a linear's activations, weights and gradients are quantized.

    forward, backward  formats of activations and weights, and of gradients
    tokens             block of activations (and their gradients) with tokens as rows, for sums over features; for sums
                       over tokens (the weight gradient), rows and columns are swapped
    weight             block of weights (out, in), for sums over inputs
    scale              what scales are: any fp32 number, powers of two, or E4M3 numbers times one fp32 number for the
                       whole tensor
    delayed            scales come from the amaxes of earlier steps
    at_random          gradients are rounded to one of their two neighbours at random, right on average
    hadamard           so many tokens are mixed before both operands of the weight gradient are cast
                       (ops.quantized.rounding); 0: none
    emulated           Hopper has no such matmul: values are dequantized, on a GPU to the dtype of the activations
                       (exact if scales are powers of two, and otherwise with an error far below that of
                       quantization), and multiplied in it. Not measured on hardware
    capability         the least compute capability of NVIDIA GPUs that have its matmuls; emulated: all have

    ValueError where no implementation computes what it says.
    """

    forward: Format
    backward: Format
    tokens: Block
    weight: Block
    scale: Literal["fp32", "power of 2", "two levels"] = "fp32"
    delayed: bool = False
    at_random: bool = False
    hadamard: int = 0
    emulated: bool = False
    capability: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        sizes = {*self.tokens, *self.weight, self.hadamard} - {0}
        if any(size < 0 or LARGEST_BLOCK % size for size in sizes):
            raise ValueError(f"sizes of blocks and hadamard must be 0 or divide {LARGEST_BLOCK}")
        if self.tokens not in (WHOLE, LINE) and (self.tokens[0] != 1 or self.tokens[1] == 0):
            raise ValueError("tokens must be (0, 0), one scale for all; (1, 0), one for each; or (1, n)")
        if self.weight not in (WHOLE, LINE) and 0 in self.weight:
            raise ValueError("weight must be (0, 0), one scale for all; (1, 0), one for each output; or (m, n)")
        if self.delayed and not self.tokens == self.weight == WHOLE:
            raise ValueError("delayed scales are those of whole tensors: tokens and weight must be (0, 0)")
        if self.scale != "fp32" and min(self.tokens[1], self.weight[1]) < 2:
            raise ValueError(f"scales ({self.scale}) must be fp32 unless blocks have several values in a row")
        if self.at_random and (self.backward is not E2M1 or self.tokens[1] < 4):
            raise ValueError("at_random needs gradients in E2M1, in blocks of 4 or more values")
        if not self.emulated and (self.hadamard or self.scale != "fp32" or self._operands() not in MULTIPLIED):
            raise ValueError("GPUs have no such matmul: set emulated=True")

    def _operands(self) -> tuple[Block, Block, Format, Format]:
        return self.tokens, self.weight, self.forward, self.backward

    @property
    def turns(self) -> bool:
        """Whether a quantized weight, transposed, is the quantized transpose: then ranks need only one byte for each
        element."""
        return self.weight == self.weight[::-1] and self.scale == "fp32"

    @property
    def unit(self) -> int:
        """What the sizes of a matmul must be multiples of."""
        return max(16, *self.tokens, *self.weight, self.hadamard)


SQUARE = (128, 128)
MULTIPLIED = (
    (WHOLE, WHOLE, E4M3, E5M2),
    (WHOLE, WHOLE, E4M3, E4M3),
    (LINE, LINE, E4M3, E4M3),
    ((1, 128), SQUARE, E4M3, E4M3),
)
"""Blocks of tokens and weights, and formats of forward and backward, that GPUs multiply without emulation
(ops/quantized/gemm.py)."""

# one scale per tensor, of its own amax; Micikevicius et al., "FP8 formats for deep learning", 2022 (E5M2 for gradients)
TENSORWISE = Recipe(E4M3, E5M2, WHOLE, WHOLE, capability=(8, 9))
DELAYED = Recipe(E4M3, E5M2, WHOLE, WHOLE, delayed=True, capability=(8, 9))
ROWWISE = Recipe(E4M3, E4M3, LINE, LINE, capability=(9, 0))
# DeepSeek-V3, 2024, section 3.3
BLOCKWISE = Recipe(E4M3, E4M3, (1, 128), SQUARE, capability=(9, 0))
# Rouhani et al., "Microscaling data formats for deep learning", 2023; scales rounded up: Mishra et al., 2025
MXFP8 = Recipe(E4M3, E4M3, (1, 32), (1, 32), "power of 2", emulated=True)
# NVIDIA, "Pretraining large language models with NVFP4", 2025, section 4
NVFP4 = Recipe(E2M1, E2M1, (1, 16), (16, 16), "two levels", at_random=True, hadamard=16, emulated=True)


def find_recipe(name: str) -> Recipe:
    """The recipe that `train.fp8.recipe` means. NotFound says what is wrong with it."""
    found = find(SEAM, name)
    if not isinstance(found, Recipe):
        raise NotFound("is no FP8 recipe: it must be a Recipe of phalanx.ops.quantized.recipes")
    return found


@dataclass(frozen=True)
class Scaled:
    """Quantized values (R, C) and the scales of their blocks, (R / r, C / c) rounded up, fp32: the represented numbers
    are values times scales."""

    quantized: Tensor
    scales: Tensor
    block: Block

    def transposed(self) -> Scaled:
        """The transposed matrix in contiguous memory: matmuls need the summed dim to be contiguous."""
        return Scaled(transposed(self.quantized), self.scales.t().contiguous(), (self.block[1], self.block[0]))

    def rows(self, rows: slice) -> Scaled:
        """A slice of rows that splits no block."""
        size = self.block[0]
        scales = self.scales if size == 0 else self.scales[rows.start // size : -(-rows.stop // size)]
        return Scaled(self.quantized[rows], scales, self.block)


def transposed(quantized: Tensor) -> Tensor:
    """The reference implementation of quantize_kernel.transposed."""
    return quantized.view(torch.uint8).t().contiguous().view(quantized.dtype)


def wide_of(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def block_amax(x: Tensor, block: Block) -> Tensor:
    """Largest |x| of each block, fp32 (R / r, C / c); NaN where a block contains one. The last block may be smaller."""
    rows, columns = (size or max(1, length) for size, length in zip(block, x.shape))
    whole = F.pad(x.abs(), (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    return whole.view(whole.shape[0] // rows, rows, whole.shape[1] // columns, columns).amax((1, 3)).float()


def spread(scales: Tensor, block: Block, shape: tuple[int, int]) -> Tensor:
    """A scale for each element, (R, C) or broadcast to it."""
    for dim, size in enumerate(block):
        if size > 1:
            scales = scales.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
    return scales


def multipliers(amax: Tensor, format: Format, scale: str = "fp32", top: Tensor | None = None) -> Tensor:
    """Factors, fp32, by which values are multiplied before the cast, so that the largest becomes the format's largest.
    For zeros, any number. NaN and inf stay visible, as NaN and as an infinite scale, so that a matmul with them gives
    no number either. top: amax of the whole tensor."""
    largest = amax.new_full(
        (), format.max
    )  # GPUs divide by a number as by its inverse, and a number over a tensor would be rounded twice
    if scale == "power of 2":
        return torch.exp2(-torch.ceil(torch.log2(amax.clamp_min(FLOOR) / largest)))
    if scale == "two levels":
        whole = (amax.amax() if top is None else top).clamp_min(FLOOR) / amax.new_full((), format.max * E4M3.max)
        steps = cast(amax / whole / largest, E4M3).float().clamp_min(2.0**-9)
        return 1.0 / (steps * whole)
    return largest / amax.clamp_min(FLOOR)


def cast(x: Tensor, format: Format, noise: Tensor | None = None) -> Tensor:
    """Quantize x: to the nearest, ties to even; larger values become the largest, NaN and inf become NaN. float64 is
    first rounded to fp32.

    noise (for E2M1): uniform numbers in [0, 1) shaped like x; a value becomes the larger of its two neighbours where
    its relative position between them exceeds the noise.
    """
    kept = x.clamp(-format.max, format.max)
    if format is E2M1:
        kept = _to_e2m1(kept, noise)
    return torch.where(x.isfinite(), kept, math.nan).to(format.dtype)


def _to_e2m1(x: Tensor, noise: Tensor | None) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, with x's sign and ties to even; or one of x's neighbours, by noise."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0)).to(x.dtype)
    steps = size / step
    whole = torch.round(steps) if noise is None else steps.floor() + (steps.frac() > noise)
    return torch.copysign(whole * step, x)


def quantize(x: Tensor, block: Block, format: Format, multiplier: Tensor, key: Key | None = None) -> Scaled:
    """The reference implementation of quantize_kernel.cast_both: quantized x times the multiplier of its block, in x's
    dtype but at least fp32. `key`: of random rounding."""
    scaled = x.to(wide_of(x)) * spread(multiplier, block, x.shape)  # type: ignore[arg-type]
    return Scaled(cast_scaled(scaled, block, format, key), 1.0 / multiplier, block)


def cast_scaled(scaled: Tensor, block: Block, format: Format, key: Key | None) -> Tensor:
    """Quantize values that are already multiplied."""
    return cast(scaled, format, None if key is None else noise_for(scaled.clamp(-format.max, format.max), block, key))


def lost(x: Tensor, q: Scaled, format: Format, multiplier: Tensor) -> Tensor:
    """(3,) int64, as in COUNTED, over all values."""
    return count_lost(x, q.quantized, x.to(wide_of(x)) * spread(multiplier, q.block, x.shape), format)  # type: ignore[arg-type]


def count_lost(x: Tensor, quantized: Tensor, scaled: Tensor, format: Format) -> Tensor:
    """(3,) int64, as in COUNTED, for values x that were cast as `scaled` and became `quantized`, all of one shape."""
    zeros, cut = (quantized.float() == 0) & (x != 0), scaled.abs() > format.max * (1 + 2.0**-20)
    return torch.stack((zeros.sum(), cut.sum(), torch.full_like(zeros, True).sum()))


def dequantize(q: Scaled, dtype: torch.dtype) -> Tensor:
    """The represented numbers, rounded once to `dtype`, (R, C)."""
    values = q.quantized.to(dtype)  # exact: every dtype here has more bits than the quantized values
    if 1 in q.block and not any(
        length % max(1, size) for length, size in zip(values.shape, q.block)
    ):  # without materializing a scale for each element
        rows, columns = (size or length for size, length in zip(q.block, values.shape))
        blocks = values.view(values.shape[0] // rows, rows, values.shape[1] // columns, columns)
        blocks.mul_(q.scales[:, None, :, None])
        return values
    return values.mul_(spread(q.scales, q.block, q.quantized.shape))  # type: ignore[arg-type]


def scaled_product(a: Scaled, b: Scaled, dtype: torch.dtype) -> Tensor:
    """The definition of all scaled matmuls: a (M, K), b (N, K) -> a b^T (M, N), summed in at least fp32, rounded to
    `dtype` at the end."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.mm(dequantize(a, wide), dequantize(b, wide).t()).to(dtype)
