"""WeightQuantizer: how a linear's weight, its input and the gradient of its output are quantized, and multiplied.

A weight is quantized once for each step (`WeightQuantizer.refresh`), in both orientations, because FP8 GEMMs need the
summed dim to be contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from phalanx.base.rng import key_of
from phalanx.comm.axis import Axis, ModelAxes
from phalanx.ops.dense.activation import Gated, GatedGrad
from phalanx.ops.dense.norm import Normed
from phalanx.ops.dense.rope import RopeGrad
from phalanx.ops.lazy_tensor import source_of
from phalanx.ops.op import Case, Implementation, Kernels, Op, triton
from phalanx.ops.quantized.casts import BLOCKS, GIVEN, LINES, SQUARES, WHOLE, CastSpec
from phalanx.ops.quantized.gemm import QUANT_MATMUL
from phalanx.ops.quantized.recipes import (
    COUNTS,
    E2M1,
    E4M3,
    SLOTS,
    Block,
    Format,
    Recipe,
    Scaled,
    block_amax,
    find_recipe,
    lost,
    multipliers,
    quantize,
)
from phalanx.ops.quantized.rounding import Key, mixed, signs_of
from phalanx.ops.quantized.scale_blocks import Blocks
from phalanx.ops.quantized.stored import STORED

Source = Tensor | Gated | GatedGrad | Normed | RopeGrad
TENSORS = ("activations", "weights", "gradients")
X, W, DY = range(3)
Accumulate = Literal["mixed", "fast", "precise"]


def spread_out(x: Tensor) -> Tensor:
    """For cases: numbers of many sizes, some of them zero."""
    powers = torch.exp2(torch.arange(x.numel()).view(x.shape) * 7 % 23 - 11).to(x)  # the same on all devices
    return torch.where(x.abs() < 0.1, 0, x.detach()) * powers


def noting(quantizer: WeightQuantizer, device: torch.device) -> WeightQuantizer:
    """For cases: one that counts what casts lose and, of delayed scaling, has multipliers: too large for some numbers,
    too small for others."""
    quantizer.counts = torch.zeros(3, SLOTS, COUNTS, dtype=torch.int64, device=device)
    quantizer.amax = torch.zeros(3, device=device)
    if quantizer.recipe.delayed:
        quantizer.multiplier = torch.tensor([3.0, 40.0, 0.01], device=device)
    return quantizer


def noted(quantizer: WeightQuantizer) -> tuple[Tensor, Tensor]:
    """For cases: what was lost, and the amaxes."""
    counts, amax = quantizer.counts, quantizer.amax
    seen = torch.maximum(counts[..., -1].amax(1).int().view(torch.float32), amax)  # type: ignore[index,arg-type]
    return counts[..., :-1].sum(1), seen  # type: ignore[index]


def _cast_cases(recipes: Sequence[str], shapes: Sequence[tuple[int, int]]) -> Iterator[Case]:
    """Activations, weights and gradients in both orders, transposed or not."""

    def call(recipe: str, x: Tensor, kernels: Kernels) -> tuple[Tensor, ...]:
        found, x = [], spread_out(x)
        quantizer = noting(WeightQuantizer(find_recipe(recipe), "w", 0, ModelAxes(), kernels), x.device)
        for which in (X, W, DY):
            for turn in (True, False):
                for q in quantizer.both(which, x, 0, turn):
                    found += [q.quantized.view(torch.uint8), q.scales]
        return *found, *noted(quantizer)

    for recipe in recipes:
        for shape in shapes:
            large, name = shape[0] >= 1000, f"{recipe}, {shape[0]} x {shape[1]}"
            dtypes = (torch.bfloat16,) if large else (torch.bfloat16, torch.float32)
            yield Case(name, partial(call, recipe), (shape,), dtypes=dtypes, large=large, exact=True)


FP8_SHAPES = ((16, 16), (48, 272), (272, 144), (4096, 1408), (1000, 1024))
EMULATED_SHAPES = ((16, 32), (144, 144), (4096, 1408), (1008, 1024))  # whole runs of tokens to mix

QUANT = Op(
    "quant",
    "casts to FP8 with their scales",
    "phalanx.ops.quantized.recipes",  # where casts are defined; the kernels fuse methods of WeightQuantizer
    (),
    (
        triton("phalanx.ops.quantized.quantize_kernel", shapes="not float64"),
        Implementation("dry", "phalanx.ops.quantized.casts:DryMatrices", "meta"),
    ),
    cases=tuple(_cast_cases(("tensorwise", "delayed", "rowwise", "blockwise"), FP8_SHAPES)),
)
QUANT_EMULATED = Op(
    "quant_emulated",
    "casts of the emulated recipes mxfp8 and nvfp4",
    "phalanx.ops.quantized.recipes",
    (),
    (triton("phalanx.ops.quantized.emulated", shapes="not float64; blocks of 16 or 32 along lines, of E4M3 or E2M1"),),
    cases=tuple(_cast_cases(("mxfp8", "nvfp4"), EMULATED_SHAPES)),
    switches=("quant",),
)


class WeightQuantizer:
    """The quantized state of a linear's weight (out, in). `name`: the weight's global name; `cut`: its dim that is
    sharded over tp.

    on           whether matmuls use quantized values; off: the weight itself
    current      whether delayed scaling uses the current scale of each tensor (to begin a history)
    amax         (3,) fp32, the largest of each tensor so far in this step
    counts       (3, SLOTS, COUNTS) int64, as ops.quantized.recipes.COUNTED, and amaxes seen by kernels. The training
                 engine creates, reads and zeroes amax and counts
    multiplier   (3,) fp32, from earlier steps: for delayed scaling
    """

    casts = QUANT

    def __init__(
        self,
        recipe: Recipe,
        name: str,
        cut: int,
        axes: ModelAxes,
        kernels: Kernels = "auto",
        accumulate: Accumulate = "mixed",
        seed: int = 0,
    ):
        self.recipe, self.name, self.cut, self.axes, self.kernels = recipe, name, cut, axes, kernels
        self.signs, self.keys = (
            signs_of(seed, recipe.hadamard),
            (key_of(seed, "rounding", name, 0), key_of(seed, "rounding", name, 1)),
        )
        self.on, self.current = True, False
        self.fast_forward, self.fast_backward = accumulate != "precise", accumulate == "fast"
        self.counts: Tensor | None = None
        self.amax: Tensor | None = None
        self.multiplier: Tensor | None = None
        self._quantized: tuple[Scaled, Scaled] | None = None

    def keeps_quantized(self, shape: tuple[int, ...]) -> bool:
        """Whether a weight of this shape can be stored as one quantized value for each element, because its transpose
        has the same values."""
        return self.recipe.turns

    def blocks(self, shape: tuple[int, ...]) -> Blocks:
        """Which elements of a weight share a scale, where the weight is stored quantized."""
        rows, columns = shape
        return Blocks(rows, columns, (self.recipe.weight[0] or rows, self.recipe.weight[1] or columns))

    @property
    def shared(self) -> Axis | None:
        """The ranks that hold other parts of what shares a scale in a weight, if any."""
        return self.axes.tp if self.recipe.weight == (0, 0) else None

    @property
    def format(self) -> Format:
        """The format of a weight."""
        return self.recipe.forward

    def given_scale(self) -> Tensor | None:
        """(1,) the multiplier of the weight, if it is known before the weight is."""
        return self.multiplier[W : W + 1] if self._given(W) else None  # type: ignore[index]

    def hold(self, straight: Tensor, transposed: Tensor, scales: Tensor, transposed_scales: Tensor) -> None:
        """Use these quantized values (rows, columns), their transpose and the scales of both: views of the memory into
        which their owner writes them."""
        self._quantized = (
            Scaled(straight, scales, self.recipe.weight),
            Scaled(transposed, transposed_scales, self.recipe.weight),
        )

    def by_triton(self, x: Tensor) -> bool:
        """Whether kernels cast x."""
        return self._kernels(x) is not None

    def _kernels(self, x: Tensor) -> Any:
        """The implementation of `casts` for x; None: the definition."""
        exact = self.recipe.emulated or x.dtype == torch.float64
        return None if exact else self.casts.fast(self.kernels, x)

    def stored_by(self, weight: Tensor) -> Any:
        """The implementation of STORED for this weight."""
        exact = self.recipe.emulated or weight.dtype == torch.float64
        return STORED.choose("plain" if exact else self.kernels, weight)

    def quantized(self, weight: Tensor) -> tuple[Scaled, Scaled]:
        """The quantized weight (out, in), for forward, and its transpose (in, out), for the gradient of the input."""
        if self._quantized is None:
            self.refresh(weight)
        return self._quantized  # type: ignore[return-value]

    @torch.no_grad()
    def refresh(self, weight: Tensor) -> None:
        """Quantize the weight again in place, because CUDA graphs read these addresses."""
        kernels = self._kernels(weight)
        if kernels is not None:
            self._quantized = self._cast(kernels, W, weight, self.cut, turn=True, into=self._quantized)
            return
        made = self.both(W, weight, self.cut, turn=True)
        if self._quantized is None:
            self._quantized = made
        else:
            for old, new in zip(self._quantized, made):
                old.quantized.view(torch.uint8).copy_(new.quantized.view(torch.uint8))
                old.scales.copy_(new.scales)

    def both(self, which: int, x: Source, cut: int, turn: bool) -> tuple[Scaled, Scaled]:
        """Quantized x (R, C) with blocks along its features, and with blocks along its rows; the latter for the
        transposed matrix (C, R) if `turn`.

        `cut`: the dim of x that is sharded over tp.
        """
        kernels, source = self._source(x)
        if kernels is not None:
            return self._cast(kernels, which, source, cut, turn)
        first = self.quantize(which, source, cut)
        second = first if first.block == first.block[::-1] else self.quantize(which, source, cut, second=True)
        return first, second.transposed() if turn else second

    def _source(self, x: Any) -> tuple[Any, Any]:
        """(the implementation of `casts`, or None; x, as a tensor unless the kernel that computes x can quantize it)"""
        x = source_of(x)
        kernels = self._kernels(x if isinstance(x, Tensor) else x.x)
        if isinstance(x, Tensor) or (kernels is not None and kernels.takes(x, self.recipe.tokens)):
            return kernels, x
        x = x.tensor()
        return self._kernels(x), x

    def mixed(self, x: Tensor) -> Tensor:
        """Activations or gradients as the weight gradient takes them: with the recipe's transform over tokens, if it
        has one."""
        return mixed(x, self.recipe.hadamard, self.signs) if self.recipe.hadamard else x

    def key(self, which: int, second: bool) -> Key | None:
        """The key of random rounding; None: round to the nearest."""
        return self.keys[second] if which == DY and self.recipe.at_random else None

    def quantize(self, which: int, x: Tensor, cut: int, second: bool = False) -> Scaled:
        """One quantized form: of x itself, or of `mixed` x, to be summed over tokens. `second`: with blocks along x's
        rows. Losses of the cast are recorded for the first form only."""
        recipe, format = self.recipe, self._format(which)
        block, key = self._block(which, second), self.key(which, second)
        mix, casts = recipe.hadamard if second and which != W else 0, self._emulated_casts(block, format, x)
        if casts is None:
            x = self.mixed(x) if mix else x
        amax = block_amax(x, block) if casts is None else casts.block_amax(x, block, mix, self.signs)
        if self.amax is not None and not second:
            self.amax[which : which + 1].copy_(torch.maximum(self.amax[which], amax.amax()).view(1))
        if self._given(which):
            multiplier = self.multiplier[which].view(1, 1)  # type: ignore[index]
        else:
            self._largest(amax, which, block[cut] == 0, block[0] == 0)
            top = self._largest(amax.amax(), which, True, True) if recipe.scale == "two levels" else None
            multiplier = multipliers(amax, format, recipe.scale, top)
        counts = self.counts[which] if not second and self.counts is not None else None
        if casts is not None:
            return casts.quantize(x, block, format, multiplier, key, mix, self.signs, counts)
        q = quantize(x, block, format, multiplier, key)
        if counts is not None:
            counts[0, :-1] += lost(x, q, format, multiplier)
        return q

    def _emulated_casts(self, block: Block, format: Format, x: Tensor) -> Any:
        """The Triton implementation of casts of emulated recipes, if it is to run and supports these blocks: even where
        train.kernels insists on it, other blocks take the reference."""
        supported = sorted(block) in ([1, 16], [1, 32]) and format in (E4M3, E2M1)
        if not self.recipe.emulated or not supported or x.dtype == torch.float64:
            return None
        return QUANT_EMULATED.fast(self.kernels, x)

    def _cast(
        self, kernels: Any, which: int, x: Source, cut: int, turn: bool, into: tuple[Scaled, Scaled] | None = None
    ) -> tuple[Scaled, Scaled]:
        """As `both`, by `kernels`."""
        recipe = self.recipe
        first = second = None
        if self._given(which):
            mode, first = GIVEN, self.multiplier[which : which + 1]  # type: ignore[index]
        elif recipe.tokens == (0, 0):
            mode, first = WHOLE, kernels.amax(x)
            self._largest(first, which, True, True)
        elif recipe.tokens == (1, 0):
            mode, (first, second) = LINES, kernels.amax_lines(x)
            self._largest(first, which, cut == 1, False)
            self._largest(second, which, cut == 0, True)
        else:
            mode = SQUARES if which == W else BLOCKS
        counts = None if self.counts is None else self.counts[which]
        cast = CastSpec(self._format(which), mode, first, second, counts)
        made: tuple[Scaled, Scaled] = kernels.cast_both(x, cast, turn, into)
        return made

    def _format(self, which: int) -> Format:
        return self.recipe.backward if which == DY else self.recipe.forward

    def _block(self, which: int, second: bool = False) -> tuple[int, int]:
        block = self.recipe.weight if which == W else self.recipe.tokens
        return block[::-1] if second else block

    def _given(self, which: int) -> bool:
        """Whether the scale is known before the tensor is."""
        return self.recipe.delayed and self.multiplier is not None and not self.current

    def _largest(self, amax: Tensor, which: int, over_tp: bool, over_cp: bool) -> Tensor:
        """The largest amax, in place, over the ranks that hold other parts of what shares a scale: sharded over tp and,
        for activations and gradients, tokens over cp."""
        axes, over_cp = self.axes, over_cp and which != W
        if over_tp:
            return (axes.batch_group if over_cp else axes.tp).all_reduce(amax, "max").wait()
        for axis in (axes.heads, axes.keys) if over_cp else ():
            axis.all_reduce(amax, "max").wait()
        return amax

    def product(self, a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool, out: Tensor | None = None) -> Tensor:
        """a (M, K), b (N, K) -> a b^T (M, N)."""
        by = QUANT_MATMUL.choose(self.kernels, a.quantized, self.recipe.emulated)
        y: Tensor = by.product(a, b, dtype, fast, out)
        return y

    def add_weight_grad(self, weight: Tensor, dy: Scaled, x: Scaled) -> Tensor | None:
        """Account for dy x^T, for dy (out, T) and x (in, T) with blocks along tokens; returns what a backward must
        return for the weight."""
        if weight.grad is None:
            return self.product(dy, x, weight.dtype, self.fast_backward)
        by = QUANT_MATMUL.choose(self.kernels, dy.quantized, self.recipe.emulated)
        dw: Tensor | None = by.add_grad(weight, dy, x, self.fast_backward)
        return dw

    def transposed(self, q: Scaled) -> Scaled:
        """The transposed matrix in contiguous memory."""
        kernels = self._kernels(q.scales)
        if kernels is None:
            return q.transposed()
        return Scaled(kernels.transposed(q.quantized), q.scales.t().contiguous(), (q.block[1], q.block[0]))
