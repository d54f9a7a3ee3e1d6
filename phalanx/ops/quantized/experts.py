"""The matmul of many experts at once (ops.experts.grouped) with quantized operands: forward, gradient of the input,
gradient of the weight.

Tokens travel to their experts in the activations' dtype and are cast there. Which elements share a scale, for R rows
sorted by expert and E experts here:

tensor   all rows that go through the experts at once, compared over the ranks whose tokens do; for weights, each
         expert's matrix
line     a row; for the weight gradient, a feature of one expert's rows; for weights, a row or a column of an
         expert's matrix
block    a slice of a row; for the weight gradient, a slice of one expert's rows, counted from its first; for weights,
         blocks of a matrix
delayed  one number for all, known from earlier steps

Values that are summed over rows are stored transposed, (features, P): each expert's begin at a multiple of PLACE, with
zeros between. So sums run along contiguous memory, no block has rows of two experts, and nothing waits for the device.
If experts are sharded over etp by width, amaxes cover the whole width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.comm.axis import Axis
from phalanx.ops.dense.activation import GATED, GatedRows, GatedRowsGrad, parts_of_sums
from phalanx.ops.dense.gate import Gate
from phalanx.ops.dense.grads import account
from phalanx.ops.experts.grouped import GROUPED, Later, add_sum_grad, segments
from phalanx.ops.experts.permute import Gathered
from phalanx.ops.lazy_tensor import source_of
from phalanx.ops.op import Kernels, Op, triton
from phalanx.ops.quantized.linear import DY, W, WeightQuantizer, X
from phalanx.ops.quantized.recipes import (
    Block,
    Format,
    Scaled,
    block_amax,
    cast_scaled,
    multipliers,
    spread,
    wide_of,
)
from phalanx.ops.quantized.rounding import Key
from phalanx.ops.quantized.scale_blocks import Blocks

Source = Tensor | Gathered | GatedRows  # and GatedRowsGrad
PLACE = 128


@dataclass(frozen=True)
class PaddedRows:
    """Where R rows sorted by expert are stored if each expert's begin at a multiple of PLACE; all on the device."""

    group_R: Tensor
    """Expert of each row; for padding, the last expert."""
    place_R: Tensor
    """Place of each row; for padding, `total`."""
    group_P: Tensor
    """Expert of each place."""
    total: int
    """P, the number of places."""

    @staticmethod
    def of(ends: Tensor, rows: int, tiles: int) -> PaddedRows:
        at, padded = torch.arange(rows, device=ends.device), torch.arange(tiles * PLACE, device=ends.device)
        ends, last = ends.long(), len(ends) - 1
        starts = F.pad(ends[:-1], (1, 0))
        stops = torch.cumsum((ends - starts + PLACE - 1) // PLACE * PLACE, 0)
        firsts = F.pad(stops[:-1], (1, 0))
        group = torch.searchsorted(ends, at, right=True).clamp_max(last)
        place = torch.where(at < ends[-1], firsts[group] + at - starts[group], len(padded))
        return PaddedRows(group, place, torch.searchsorted(stops, padded, right=True).clamp_max(last), len(padded))

    def lay(self, x: Tensor) -> Tensor:
        """Rows (R, C) -> (P, C), zeros in unused places."""
        return x.new_zeros(self.total + 1, x.shape[1]).index_copy(0, self.place_R, x)[: self.total]


def group_amax(x: Tensor, group: Tensor, count: int) -> Tensor:
    """(E, C) fp32 largest |x| of each feature over the rows (R, C) of each expert; `group` (R,): the expert of each
    row."""
    return x.new_zeros(count, x.shape[1]).scatter_reduce(0, group.unsqueeze(1).expand_as(x), x.abs(), "amax").float()


def tiles_for(rows: int, count: int) -> int:
    """The number of groups of PLACE places that is enough for any division of so many rows among `count` experts."""
    return -(-rows // PLACE) + count


def _of_groups(numbers: Tensor, block: Block, group: Tensor) -> Tensor:
    """Values given for each expert, (E, C), expanded to rows; anything that is not given by expert is returned as it
    is."""
    return numbers[group] if block[0] == 0 and len(numbers) > 1 else numbers


def values(q: Scaled, group: Tensor, dtype: torch.dtype) -> Tensor:
    """The dequantized values (R, C) in `dtype`; `group` (R,): the expert of each row."""
    return q.quantized.to(dtype) * spread(_of_groups(q.scales, q.block, group), q.block, q.quantized.shape).to(dtype)  # type: ignore[arg-type]


def product(a: Scaled, w_ESO: Tensor, ends: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """The definition of matmuls of rows: a (R, S) times its expert's values (S, O), summed in at least fp32, plus its
    bias, rounded at the end."""
    y = torch.zeros(len(a.quantized), w_ESO.shape[2], dtype=dtype, device=a.quantized.device)
    if y.is_meta:
        shape = a.quantized.shape
        return torch.mm(
            y.new_empty(1, 1).expand(shape), y.new_empty(1, 1).expand(shape[1], y.shape[1]), out=y
        )  # as much work
    x = values(a, PaddedRows.of(ends, len(y), 0).group_R, w_ESO.dtype)
    for e, rows in enumerate(segments(ends)):
        part = torch.mm(x[rows], w_ESO[e])
        y[rows] = part if bias is None else part + bias[e]
    return y


def add_product_(buffer: Tensor, dy: Scaled, x: Scaled, ends: Tensor) -> None:
    """The definition of weight gradients: buffer[e] (O, I) += dy x^T over the places of e, with dy (O, P) and x (I,
    P)."""
    if buffer.is_meta:
        return
    wide, at = (
        torch.float64 if buffer.dtype == torch.float64 else torch.float32,
        PaddedRows.of(ends, 0, dy.quantized.shape[1] // PLACE),
    )
    left, right = (values(q.transposed(), at.group_P, wide) for q in (dy, x))
    first = 0
    for e, rows in enumerate(segments(ends)):
        where = slice(first, first + rows.stop - rows.start)
        buffer[e] += torch.mm(left[where].t(), right[where]).to(buffer.dtype)
        first += -(-(rows.stop - rows.start) // PLACE) * PLACE


QUANT_ROWS = Op(
    "quant_rows",
    "casts to FP8 of rows sorted by expert, and of experts' weights",
    __name__,  # the kernels fuse methods of ExpertQuantizer
    (),
    (triton("phalanx.ops.quantized.quantize_grouped_kernel", shapes="not float64"),),
    switches=("quant",),
)
QUANT_PRODUCTS = Op(
    "quant_products",
    "matmuls of many experts at once, of FP8 values",
    __name__,
    ("product", "add_product_"),
    (triton("phalanx.ops.quantized.grouped_gemm_kernel", shapes="not float64"),),
    switches=("quant",),
)


class ExpertQuantizer(WeightQuantizer):
    """The quantized state of a stack of experts' matrices (E, out, in). `cut`: which dim of a matrix, 0 or 1, is
    sharded over etp."""

    _ends: Tensor | None = None  # of the stack's own rows, (E * out,)

    @property
    def everyone(self) -> Axis:
        """The ranks whose tokens go through these experts at once: those of one micro-batch, or of several where ep
        spans more than one."""
        batch_group, experts = self.axes.batch_group, self.axes.experts
        return batch_group if batch_group.size >= experts.size else experts

    def keeps_quantized(self, shape: tuple[int, ...]) -> bool:
        return self.recipe.turns and shape[1] % PLACE == 0  # no zeros between the places of experts

    def blocks(self, shape: tuple[int, ...]) -> Blocks:
        count, outer, inner = shape
        return Blocks(count * outer, inner, (self.recipe.weight[0] or outer, self.recipe.weight[1] or inner))

    @property
    def shared(self) -> Axis | None:
        return self.axes.etp if self.recipe.weight == (0, 0) else None

    @torch.no_grad()
    def refresh(self, weight: Tensor) -> None:
        count, outer, inner = weight.shape
        if outer % max(1, self.recipe.weight[0]):
            raise ValueError(f"{outer} outputs of an expert are no whole blocks of {self.recipe.weight[0]}")
        if self._ends is None or self._ends.device != weight.device:
            self._ends = torch.arange(1, count + 1, dtype=torch.int32, device=weight.device) * outer
        tiles = count * -(-outer // PLACE)
        made = self.cast(W, weight.reshape(count * outer, inner), self._ends, tiles, self.cut, into=self._quantized)
        if self._quantized is None:
            self._quantized = made
        elif made is not self._quantized:
            for old, new in zip(self._quantized, made):
                old.quantized.view(torch.uint8).copy_(new.quantized.view(torch.uint8))
                old.scales.copy_(new.scales)

    def rows(self, which: int, x: Source, ends: Tensor) -> tuple[Scaled, Scaled]:
        """Quantized x (R, C): in its own order, for sums over features, and transposed by places, (C, P), for sums over
        rows."""
        x = source_of(x)
        if not isinstance(x, Tensor) and not (self._triton(x.x) and self._whole(x)):
            x = x.tensor()
        features_cut = (which == X) == (
            self.cut == 1
        )  # of inputs where the in-dim is cut, of gradients where the out-dim is
        return self.cast(which, x, ends, tiles_for(x.shape[0], len(ends)), 1 if features_cut else None)

    def _whole(self, x: Source) -> bool:
        """Whether it can be quantized by the kernel that computes it."""
        taken: bool = QUANT_ROWS.implementations[0].load().takes(x, self.recipe.tokens)
        return taken

    def cast(
        self,
        which: int,
        x: Source,
        ends: Tensor,
        tiles: int,
        cut: int | None,
        into: tuple[Scaled, Scaled] | None = None,
    ) -> tuple[Scaled, Scaled]:
        """The same for rows or for a stack; `cut`: the dim of x that is sharded over etp."""
        if not isinstance(x, Tensor) or self._triton(x):
            return self._cast_by_triton(which, x, ends, tiles, cut, into)
        return self._cast_plainly(which, x, ends, tiles, cut, into)

    def _cast_plainly(
        self, which: int, x: Tensor, ends: Tensor, tiles: int, cut: int | None, into: Any
    ) -> tuple[Scaled, Scaled]:
        recipe, format, block, count = self.recipe, self._format(which), self._block(which), len(ends)
        at = PaddedRows.of(ends, len(x), tiles)
        x = torch.where((at.place_R < at.total).unsqueeze(1), x, 0)
        if self.amax is not None:
            largest = x.abs().amax().float() if x.numel() else self.amax[which]
            self.amax[which : which + 1].copy_(torch.maximum(self.amax[which], largest).view(1))
        tops = None
        if self._given(which):
            multiplier = self.multiplier[which].view(1, 1)  # type: ignore[index]
        else:
            tops = (
                self._tops(which, x, at.group_R, count, cut)
                if block == (0, 0) or recipe.scale == "two levels"
                else None
            )
            multiplier = self._multipliers(which, x, at.group_R, count, cut, tops)
        q, wide = _quantized(x, multiplier, block, at.group_R, format, self.key(which, second=False))
        if self.counts is not None:
            zeros, cut_off = (q.quantized.float() == 0) & (x != 0), wide.abs() > format.max * (1 + 2.0**-20)
            self.counts[which, 0, :-1] += torch.stack((zeros.sum(), cut_off.sum(), ends[-1].long() * x.shape[1]))
        laid = at.lay(x) if which == W else self.mixed(at.lay(x))
        if not self._given(which):
            if recipe.hadamard and which != W:
                tops = self._tops(which, laid, at.group_P, count, cut)
            multiplier = self._multipliers(which, laid, at.group_P, count, cut, tops, second=True)
        block, key = self._block(which, second=True), self.key(which, second=True)
        return q, _quantized(laid, multiplier, block, at.group_P, format, key)[0].transposed()

    def _tops(self, which: int, x: Tensor, group: Tensor, count: int, cut: int | None) -> Tensor:
        """Amax of whole tensors: (E, 1) for matrices, (1, 1) for all rows; `group`: the expert of each row."""
        of_features = group_amax(x, group, count)
        if which == W:
            return self._compare(of_features.amax(1, keepdim=True), which, cut is not None)
        return self._compare(of_features.amax().view(1, 1), which, False, whole=True)

    def _multipliers(
        self,
        which: int,
        x: Tensor,
        group: Tensor,
        count: int,
        cut: int | None,
        tops: Tensor | None,
        second: bool = False,
    ) -> Tensor:
        """Multipliers of the blocks of x (R, C); `group` (R,): the expert of each row, `tops` from `_tops`."""
        format, block = self._format(which), self._block(which, second)
        if block == (0, 0):
            return multipliers(tops, format)  # type: ignore[arg-type]
        if block == (0, 1):
            return multipliers(self._compare(group_amax(x, group, count), which, cut == 0), format)
        amax = block_amax(x, block)
        if block == (1, 0):
            self._compare(amax, which, cut == 1)
        if tops is not None and len(tops) > 1:
            tops = tops[group[:: block[0]]]
        return multipliers(amax, format, self.recipe.scale, tops)

    def _cast_by_triton(
        self, which: int, x: Source, ends: Tensor, tiles: int, cut: int | None, into: Any
    ) -> tuple[Scaled, Scaled]:
        kernels = QUANT_ROWS.implementations[0].load()
        first = second = None
        if self._given(which):
            mode, first = kernels.GIVEN, self.multiplier[which : which + 1]  # type: ignore[index]
        elif self.recipe.tokens == (0, 0):
            mode, first = kernels.WHOLE, kernels.amax(x, ends, tiles, per_expert=which == W)
            self._compare(first, which, cut is not None, whole=True)
        elif self.recipe.tokens == (1, 0):
            mode, (first, second) = kernels.LINES, kernels.amax_lines(x, ends, tiles)
            self._compare(first, which, cut == 1)
            self._compare(second, which, cut == 0)
        else:
            mode = kernels.SQUARES if which == W else kernels.BLOCKS
        counts = None if self.counts is None else self.counts[which]
        format = self._format(which)
        made: tuple[Scaled, Scaled] = kernels.cast_both(x, ends, tiles, format, mode, first, second, counts, into)
        return made

    def _compare(self, amax: Tensor, which: int, cut: bool, whole: bool = False) -> Tensor:
        """The largest amax, in place, over the ranks that hold other parts of what shares a scale: of `whole` tensors
        of tokens, or sharded over etp (`cut`)."""
        if whole and which != W:
            return self.everyone.all_reduce(amax, "max").wait()
        return self.axes.etp.all_reduce(amax, "max").wait() if cut else amax

    def _products(self, weight: Tensor) -> Any:
        """The kernels of these matmuls; None: they are composed of ordinary ones."""
        exact = self.recipe.emulated or weight.dtype == torch.float64
        return None if exact else QUANT_PRODUCTS.fast(self.kernels, weight)

    def times_weight(
        self, a: Scaled, weight: Tensor, ends: Tensor, dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """Rows a (R, in) -> (R, out): times their expert's matrix, transposed, plus its bias."""
        b = self.quantized(weight)[0]
        kernels = self._products(weight)
        if kernels is not None:
            return kernels.product(a, b, ends, dtype, bias, self.fast_forward)
        count, outer, inner = weight.shape
        group = torch.arange(count, device=ends.device).repeat_interleave(outer)
        w = (
            values(b, group, wide_of(weight)).view(count, outer, inner).transpose(1, 2)
            if not weight.is_meta
            else weight.transpose(1, 2)
        )
        return product(a, w, ends, dtype, bias)

    def times_transposed(self, a: Scaled, weight: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows a (R, out) -> (R, in): times their expert's matrix."""
        b = self.quantized(weight)[1]
        kernels = self._products(weight)
        if kernels is not None:
            return kernels.product_of_padded(a, b, ends, dtype, self.fast_backward)
        count, outer, inner = weight.shape
        if weight.is_meta:
            return product(a, weight, ends, dtype, None)
        group = torch.arange(count, device=ends.device).repeat_interleave(b.quantized.shape[1] // count)
        return product(
            a, values(b.transposed(), group, wide_of(weight)).view(count, -1, inner)[:, :outer], ends, dtype, None
        )

    def add_grads(self, weight: Tensor, dy: Scaled, x: Scaled, ends: Tensor) -> Tensor | None:
        """Account for dy x^T of each expert; returns what a backward must return for the weight (ops.dense.grads)."""
        kernels = self._products(weight)
        if kernels is not None:
            return account(weight, lambda buffer: kernels.add_product_(buffer, dy, x, ends, self.fast_backward))
        return account(weight, lambda buffer: add_product_(buffer, dy, x, ends))


def _quantized(
    x: Tensor, multiplier: Tensor, block: Block, group: Tensor, format: Format, key: Key | None
) -> tuple[Scaled, Tensor]:
    """Quantized x, and the scaled values before the cast. `key`: for random rounding."""
    wide = x.to(wide_of(x)) * spread(_of_groups(multiplier, block, group), block, x.shape)  # type: ignore[arg-type]
    return Scaled(cast_scaled(wide, block, format, key), 1.0 / multiplier, block), wide


class _QuantizedGroupedMatmul(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        ends: Tensor,
        bias: Tensor | None,
        quantizer: ExpertQuantizer,
        later: Later | None,
    ) -> Tensor:  # type: ignore[override]
        q, kept = quantizer.rows(X, x, ends)
        ctx.save_for_backward(kept.quantized, kept.scales, ends)
        ctx.weight, ctx.bias, ctx.quantizer, ctx.later, ctx.block = weight, bias, quantizer, later, kept.block
        return quantizer.times_weight(q, weight, ends, x.dtype, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (quantized, scales, ends), weight, bias, quantizer = ctx.saved_tensors, ctx.weight, ctx.bias, ctx.quantizer
        need_x, need_w, _, need_b, _, _ = ctx.needs_input_grad
        q, of_padded = quantizer.rows(DY, dy, ends)
        dx, dw = quantizer.times_transposed(q, weight, ends, dy.dtype) if need_x else None, None
        grads = partial(quantizer.add_grads, weight, of_padded, Scaled(quantized, scales, ctx.block), ends)
        if need_w and ctx.later is not None and weight.grad is not None:
            ctx.later.append(grads)
        elif need_w:
            dw = grads()
        db = add_sum_grad(bias, dy, ends, GROUPED.choose(quantizer.kernels, dy)) if need_b else None
        return dx, dw, None, db, None, None


class _QuantizedGroupedMLP(Function):
    """_QuantizedGroupedMatmul, gated_rows and _QuantizedGroupedMatmul in one op, with the same quantized values and
    results. The first quantizer is for gate_up, the second for down."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        quantizers: tuple[ExpertQuantizer, ExpertQuantizer],
        ends: Tensor,
        weights: Tensor | None,
        gate: Gate,
        kernels: Kernels,
        later: Later | None,
    ) -> Tensor:  # type: ignore[override]
        up_quantizer, quantizer = quantizers
        q, kept = up_quantizer.rows(X, x, ends)
        both = up_quantizer.times_weight(q, gate_up, ends, x.dtype)
        h, h_kept = quantizer.rows(X, GatedRows(both, weights, ends[-1], gate, kernels), ends)
        ctx.gate_up, ctx.down, ctx.gate, ctx.kernels, ctx.later = gate_up, down, gate, kernels, later
        ctx.quantizers, ctx.blocks = quantizers, (kept.block, h_kept.block)
        ctx.save_for_backward(kept.quantized, kept.scales, both, h_kept.quantized, h_kept.scales, ends, weights)
        return quantizer.times_weight(h, down, ends, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gate_up, down, later, (up_quantizer, quantizer) = ctx.gate_up, ctx.down, ctx.later, ctx.quantizers
        x_quantized, x_scales, both, h_quantized, h_scales, ends, weights = ctx.saved_tensors
        need_x, need_up, need_down = ctx.needs_input_grad[:3]
        q, of_padded = quantizer.rows(DY, dy, ends)
        dh = quantizer.times_transposed(q, down, ends, dy.dtype)
        d_down = (
            quantizer.add_grads(down, of_padded, Scaled(h_quantized, h_scales, ctx.blocks[1]), ends)
            if need_down
            else None
        )
        sums = None if weights is None else weights.new_zeros(parts_of_sums(dh.shape[1]), len(weights))
        source = GatedRowsGrad(both, weights, ends[-1], ctx.gate, ctx.kernels, dy=dh, sums=sums)
        q, of_padded = up_quantizer.rows(DY, source, ends)
        dx, d_up = up_quantizer.times_transposed(q, gate_up, ends, dy.dtype) if need_x else None, None
        grads = partial(up_quantizer.add_grads, gate_up, of_padded, Scaled(x_quantized, x_scales, ctx.blocks[0]), ends)
        if need_up and later is not None and gate_up.grad is not None:
            later.append(grads)
        elif need_up:
            d_up = grads()
        return dx, d_up, d_down, None, None, None if sums is None else sums.sum(0), None, None, None


def use_quantized_grouped_mlp(quantizers: tuple[ExpertQuantizer, ExpertQuantizer], kernels: Kernels, x: Tensor) -> bool:
    """Whether experts whose matrices have these quantizers, and no biases, run as one op: only with casts by Triton.
    `kernels`: of the activation."""
    return all(quantizer.by_triton(x) for quantizer in quantizers) and GATED.fast(kernels, x) is not None


def quantized_grouped_mlp(
    x_RD: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ends: Tensor,
    weights_R: Tensor | None,
    gate: Gate,
    kernels: Kernels = "auto",
    later: Later | None = None,
    *,
    quantizers: tuple[ExpertQuantizer, ExpertQuantizer],
) -> Tensor:
    """Gated experts: x (R, D) -> (R, D), with quantized x, activations (times `weights_R`), gate_up (E, 2F, D) and down
    (E, D, F). x, and the gradient of the output, may be lazy tensors (ops.lazy_tensor)."""
    return _QuantizedGroupedMLP.apply(x_RD, gate_up, down, quantizers, ends, weights_R, gate, kernels, later)


def quantized_grouped_matmul(
    x_RI: Tensor,
    weight_EOI: Tensor,
    ends_E: Tensor,
    quantizer: ExpertQuantizer,
    bias_EO: Tensor | None = None,
    later: Later | None = None,
) -> Tensor:
    """As ops.experts.grouped.grouped_matmul, with quantized x and weight."""
    return _QuantizedGroupedMatmul.apply(x_RI, weight_EOI, ends_E, bias_EO, quantizer, later)
