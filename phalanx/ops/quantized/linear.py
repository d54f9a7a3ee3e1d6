"""The communicating matmuls of a sub-layer with quantized operands: forward, gradient of the input, gradient of the
weight.

Quantized values travel between tp ranks, not bf16 ones. If elements that share a scale are spread over ranks, the scale
is computed from the amax of all of them; so values and scales are those of one process wherever no block of fixed size
is split. A weight is quantized once for each step (`WeightQuantizer.refresh`), in both orientations, because FP8 GEMMs
need the summed dim to be contiguous. A SwiGLU MLP is one op: its activations and their gradients are computed directly
as quantized values.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.base.rng import key_of
from phalanx.comm.axis import Axis, ModelAxes
from phalanx.ops.dense.activation import GATED, Gated, GatedGrad
from phalanx.ops.dense.grads import account, add_grad, add_product_grad, lasting
from phalanx.ops.dense.norm import Normed
from phalanx.ops.dense.rope import RopeGrad
from phalanx.ops.lazy_tensor import source_of
from phalanx.ops.op import Kernels, Op, triton
from phalanx.ops.quantized.gemm import add_fast_product_, fast_product
from phalanx.ops.quantized.recipes import (
    Format,
    Recipe,
    Scaled,
    block_amax,
    dequantize,
    lost,
    multipliers,
    quantize,
    scaled_product,
)
from phalanx.ops.quantized.rounding import Key, mixed, signs_of
from phalanx.ops.quantized.scale_blocks import Blocks
from phalanx.ops.quantized.stored import STORED

Source = Tensor | Gated | GatedGrad | Normed | RopeGrad
TENSORS = ("activations", "weights", "gradients")
X, W, DY = range(3)
Accumulate = Literal["mixed", "fast", "precise"]


QUANT = Op(
    "quant",
    "casts to FP8 with their scales",
    "phalanx.ops.quantized.recipes",  # where casts are defined; the kernels fuse methods of WeightQuantizer
    (),
    (triton("phalanx.ops.quantized.quantize_kernel", shapes="not float64"),),
)
QUANT_EMULATED = Op(
    "quant_emulated",
    "casts of the emulated recipes mxfp8 and nvfp4",
    "phalanx.ops.quantized.recipes",
    (),
    (triton("phalanx.ops.quantized.emulated", shapes="not float64; blocks along lines"),),
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

    def by_triton(self, weight: Tensor) -> bool:
        return self._triton(weight)

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
        if self._triton(weight):
            self._quantized = self._cast(W, weight, self.cut, turn=True, into=self._quantized)
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
        x = source_of(x)
        if not isinstance(x, Tensor) and not (self._triton(x.x) and self._takes(x)):
            x = x.tensor()
        if not isinstance(x, Tensor) or self._triton(x):
            return self._cast(which, x, cut, turn)
        first = self.quantize(which, x, cut)
        second = first if first.block == first.block[::-1] else self.quantize(which, x, cut, second=True)
        return first, second.transposed() if turn else second

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
        mix, casts = recipe.hadamard if second and which != W else 0, self._emulated_casts(block, x)
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

    def _emulated_casts(self, block: tuple[int, int], x: Tensor) -> Any:
        """The Triton implementation of casts of emulated recipes, if it is to run; it supports only blocks along
        lines."""
        if 1 not in block or not self.recipe.emulated or x.dtype == torch.float64:
            return None
        return QUANT_EMULATED.fast(self.kernels, x)

    def _takes(self, x: Source) -> bool:
        taken: bool = QUANT.implementations[0].load().takes(x, self.recipe.tokens)
        return taken

    def _cast(
        self, which: int, x: Source, cut: int, turn: bool, into: tuple[Scaled, Scaled] | None = None
    ) -> tuple[Scaled, Scaled]:
        """As `both`, by Triton."""
        kernels = QUANT.implementations[0].load()
        recipe, format = self.recipe, self._format(which)
        first = second = None
        if self._given(which):
            mode, first = kernels.GIVEN, self.multiplier[which : which + 1]  # type: ignore[index]
        elif recipe.tokens == (0, 0):
            mode, first = kernels.WHOLE, kernels.amax(x)
            self._largest(first, which, True, True)
        elif recipe.tokens == (1, 0):
            mode, (first, second) = kernels.LINES, kernels.amax_lines(x)
            self._largest(first, which, cut == 1, False)
            self._largest(second, which, cut == 0, True)
        else:
            mode = kernels.SQUARES if which == W else kernels.BLOCKS
        made: tuple[Scaled, Scaled] = kernels.cast_both(
            x, format, mode, first, second, turn, counts=None if self.counts is None else self.counts[which], into=into
        )
        return made

    def _format(self, which: int) -> Format:
        return self.recipe.backward if which == DY else self.recipe.forward

    def _block(self, which: int, second: bool = False) -> tuple[int, int]:
        block = self.recipe.weight if which == W else self.recipe.tokens
        return block[::-1] if second else block

    def _given(self, which: int) -> bool:
        """Whether the scale is known before the tensor is."""
        return self.recipe.delayed and self.multiplier is not None and not self.current

    def _triton(self, x: Tensor) -> bool:
        return not self.recipe.emulated and x.dtype != torch.float64 and QUANT.fast(self.kernels, x) is not None

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
        if a.quantized.is_cuda and not self.recipe.emulated:
            return fast_product(a, b, dtype, fast, out)
        if a.quantized.is_cuda:
            return torch.mm(dequantize(a, dtype), dequantize(b, dtype).t(), out=out)
        y = scaled_product(a, b, dtype)
        return y if out is None else out.copy_(y)

    def add_weight_grad(self, weight: Tensor, dy: Scaled, x: Scaled) -> Tensor | None:
        """Account for dy x^T, for dy (out, T) and x (in, T) with blocks along tokens; returns what a backward must
        return for the weight."""
        if weight.grad is None:
            return self.product(dy, x, weight.dtype, self.fast_backward)
        if dy.quantized.is_cuda and self.recipe.emulated:
            return add_product_grad(weight, dequantize(dy, weight.dtype).t(), dequantize(x, weight.dtype).t())
        if dy.quantized.is_cuda:
            return account(weight, lambda buffer: add_fast_product_(buffer, dy, x, self.fast_backward))
        return account(weight, lambda buffer: buffer.add_(scaled_product(dy, x, buffer.dtype)))

    def transposed(self, q: Scaled) -> Scaled:
        """The transposed matrix in contiguous memory."""
        if not self._triton(q.scales):
            return q.transposed()
        transposed = QUANT.implementations[0].load().transposed
        return Scaled(transposed(q.quantized), q.scales.t().contiguous(), (q.block[1], q.block[0]))


def _gather(q: Scaled, tp: Axis) -> tuple[Any, Tensor]:
    """Start gathering the quantized values (n, F) of each rank into (T, F), as bytes; returns the pending gather and
    the scales of all ranks. ValueError if a block is split between ranks."""
    if tp.size > 1 and q.block[0] > 0 and len(q.quantized) % q.block[0]:
        raise ValueError(f"{len(q.quantized)} tokens of each rank are no whole blocks of {q.block[0]}")
    return tp.gather(q.quantized.view(torch.uint8)), q.scales if q.block[0] == 0 else tp.all_gather(q.scales).wait()


def _gather_multiply(
    q: Scaled, tp: Axis, quantizer: WeightQuantizer, weight: Scaled, fast: bool, y: Tensor
) -> tuple[Any, Tensor]:
    """y (T, out) = the quantized values of all ranks (n, in) times those of the weight (out, in). Returns what
    `_gather` returned."""
    quantized, scales = _gather(q, tp)
    for rows, part in quantized.parts():
        quantizer.product(
            Scaled(part.view(q.quantized.dtype), _rows_of(scales, q.block, rows), q.block),
            weight,
            y.dtype,
            fast,
            out=y[rows],
        )
    return quantized, scales


def _multiply_scatter(q: Scaled, tp: Axis, quantizer: WeightQuantizer, weight: Scaled, fast: bool, like: Tensor) -> Any:
    """Start scattering the matmul of quantized values (T, in) with those of the weight (out, in), summed over ranks, in
    the dtype of `like`."""
    scattering = tp.scatter(len(q.quantized), len(weight.quantized), like)
    for rows, out in scattering.parts():
        quantizer.product(q.rows(rows), weight, like.dtype, fast, out=out)
    return scattering


def _add_from_gathered(
    q: Scaled,
    columns: Scaled,
    gathered: tuple[Any, Tensor],
    tp: Axis,
    quantizer: WeightQuantizer,
    weight: Tensor,
    h: Scaled,
) -> Tensor | None:
    """Account for the weight's gradient from dy of all ranks (q, gathered; `columns` has blocks along tokens) and h
    (in, T)."""
    if tp.size == 1:
        return quantizer.add_weight_grad(weight, columns, h)
    gathering = gathered if columns is q else _gather(columns, tp)
    return quantizer.add_weight_grad(weight, _whole_of(columns, gathering, quantizer, weight), h)


def _whole_of(kept: Scaled, gathering: tuple[Any, Tensor] | None, quantizer: WeightQuantizer, weight: Tensor) -> Scaled:
    """The gathered values of all ranks, transposed, for the gradient of `weight`. With a single rank nothing was
    gathered."""
    if gathering is None:
        return kept
    quantized = lasting(weight, gathering[0].wait(), own=False)
    return quantizer.transposed(Scaled(quantized.view(kept.quantized.dtype), gathering[1], kept.block))


class _QuantizedGatherMatmul(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, quantizer: WeightQuantizer
    ) -> Tensor:  # type: ignore[override]
        ctx.weight, ctx.bias, ctx.tp, ctx.quantizer = weight, bias, tp, quantizer
        q, kept = quantizer.both(X, x, cut=0, turn=tp.size == 1)
        ctx.block = kept.block
        ctx.save_for_backward(kept.quantized, kept.scales)
        y = x.new_empty(len(x) * tp.size, weight.shape[0])
        _gather_multiply(q, tp, quantizer, quantizer.quantized(weight)[0], quantizer.fast_forward, y)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight, bias, tp, quantizer = ctx.weight, ctx.bias, ctx.tp, ctx.quantizer
        kept = Scaled(ctx.saved_tensors[0], ctx.saved_tensors[1], ctx.block)
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        db = add_grad(bias, dy.sum(0, dtype=_wide(bias))) if need_b else None
        gathering = _gather(kept, tp) if need_w and tp.size > 1 else None
        q, columns = quantizer.both(DY, dy, cut=1, turn=True)
        scattering = (
            _multiply_scatter(q, tp, quantizer, quantizer.quantized(weight)[1], quantizer.fast_backward, dy)
            if need_x
            else None
        )
        dw = (
            quantizer.add_weight_grad(weight, columns, _whole_of(kept, gathering, quantizer, weight))
            if need_w
            else None
        )
        return scattering.wait() if scattering else None, dw, db, None, None


class _QuantizedMatmulScatter(Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, quantizer: WeightQuantizer
    ) -> Tensor:  # type: ignore[override]
        ctx.weight, ctx.bias, ctx.tp, ctx.quantizer = weight, bias, tp, quantizer
        q, kept = quantizer.both(X, h, cut=1, turn=True)
        ctx.block = kept.block
        ctx.save_for_backward(kept.quantized, kept.scales)
        y = _multiply_scatter(q, tp, quantizer, quantizer.quantized(weight)[0], quantizer.fast_forward, h).wait()
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight, bias, tp, quantizer = ctx.weight, ctx.bias, ctx.tp, ctx.quantizer
        h = Scaled(ctx.saved_tensors[0], ctx.saved_tensors[1], ctx.block)
        need_h, need_w, need_b = ctx.needs_input_grad[:3]
        db = add_grad(bias, dy.sum(0, dtype=_wide(bias))) if need_b else None
        if not (need_h or need_w):
            return None, None, db, None, None
        q, columns = quantizer.both(DY, dy, cut=0, turn=tp.size == 1)
        dh = dy.new_empty(h.quantized.shape[::-1]) if need_h else None
        gathered = (
            _gather(q, tp)
            if dh is None
            else _gather_multiply(q, tp, quantizer, quantizer.quantized(weight)[1], quantizer.fast_backward, dh)
        )
        dw = _add_from_gathered(q, columns, gathered, tp, quantizer, weight, h) if need_w else None
        return dh, dw, db, None, None


class _QuantizedGatedMLP(Function):
    """_QuantizedGatherMatmul, SwiGLU and _QuantizedMatmulScatter in one op, with the same quantized values, sums and
    gradients. `up_quantizer` is for gate_up, `quantizer` for down."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        tp: Axis,
        up_quantizer: WeightQuantizer,
        quantizer: WeightQuantizer,
        kernels: Kernels,
    ) -> Tensor:  # type: ignore[override]
        ctx.gate_up, ctx.down, ctx.tp, ctx.quantizers, ctx.kernels = (
            gate_up,
            down,
            tp,
            (up_quantizer, quantizer),
            kernels,
        )
        q, x_kept = up_quantizer.both(X, x, cut=0, turn=tp.size == 1)
        both = x.new_empty(len(x) * tp.size, gate_up.shape[0])
        _gather_multiply(q, tp, up_quantizer, up_quantizer.quantized(gate_up)[0], up_quantizer.fast_forward, both)
        h, h_kept = quantizer.both(X, Gated(both, kernels), cut=1, turn=True)
        ctx.blocks = x_kept.block, h_kept.block
        ctx.save_for_backward(x_kept.quantized, x_kept.scales, both, h_kept.quantized, h_kept.scales)
        return _multiply_scatter(h, tp, quantizer, quantizer.quantized(down)[0], quantizer.fast_forward, x).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gate_up, down, tp, (up_quantizer, quantizer) = ctx.gate_up, ctx.down, ctx.tp, ctx.quantizers
        x_quantized, x_scales, both, h_quantized, h_scales = ctx.saved_tensors
        x, h = Scaled(x_quantized, x_scales, ctx.blocks[0]), Scaled(h_quantized, h_scales, ctx.blocks[1])
        need_x, need_up, need_down = ctx.needs_input_grad[:3]
        q, columns = quantizer.both(DY, dy, cut=0, turn=tp.size == 1)
        dh = dy.new_empty(h.quantized.shape[::-1])
        gathered = _gather_multiply(q, tp, quantizer, quantizer.quantized(down)[1], quantizer.fast_backward, dh)
        d_down = _add_from_gathered(q, columns, gathered, tp, quantizer, down, h) if need_down else None
        q, columns = up_quantizer.both(DY, GatedGrad(dh, both, ctx.kernels), cut=1, turn=True)
        gathering = _gather(x, tp) if need_up and tp.size > 1 else None
        scattering = (
            _multiply_scatter(q, tp, up_quantizer, up_quantizer.quantized(gate_up)[1], up_quantizer.fast_backward, dy)
            if need_x
            else None
        )
        d_up = (
            up_quantizer.add_weight_grad(gate_up, columns, _whole_of(x, gathering, up_quantizer, gate_up))
            if need_up
            else None
        )
        return scattering.wait() if scattering else None, d_up, d_down, None, None, None, None


def _rows_of(scales: Tensor, block: tuple[int, int], rows: slice) -> Tensor:
    return scales if block[0] == 0 else scales[rows.start // block[0] : -(-rows.stop // block[0])]


def _wide(param: Tensor) -> torch.dtype:
    return param.dtype if param.grad is None else param.grad.dtype


def quantized_gather_matmul(
    x: Tensor, weight: Tensor, tp: Axis, bias: Tensor | None, quantizer: WeightQuantizer
) -> Tensor:
    """As ops.dense.matmul.gather_matmul, with quantized x and weight."""
    return _QuantizedGatherMatmul.apply(x, weight, bias, tp, quantizer)


def quantized_matmul_scatter(
    h: Tensor, weight: Tensor, tp: Axis, bias: Tensor | None, quantizer: WeightQuantizer
) -> Tensor:
    """As ops.dense.matmul.matmul_scatter, with quantized h and weight."""
    return _QuantizedMatmulScatter.apply(h, weight, bias, tp, quantizer)


def use_quantized_gated_mlp(quantizers: tuple[WeightQuantizer, WeightQuantizer], kernels: Kernels, x: Tensor) -> bool:
    """Whether an MLP whose weights have these quantizers runs as one op. Its savings are passes of Triton casts, so
    those must run. `kernels`: of SwiGLU."""
    casts = all(QUANT.fast(quantizer.kernels, x) is not None for quantizer in quantizers)
    return casts and GATED.fast(kernels, x) is not None


def quantized_gated_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    tp: Axis,
    quantizers: tuple[WeightQuantizer, WeightQuantizer],
    kernels: Kernels = "auto",
) -> Tensor:
    """As ops.dense.gated_mlp.gated_mlp, with quantized x and weights: gate_up (2F, D) stacked, down (D, F)."""
    return _QuantizedGatedMLP.apply(x, gate_up, down, tp, *quantizers, kernels)
