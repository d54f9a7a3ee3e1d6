"""What casts rows sorted by expert and experts' weights, and what is multiplied by them: WeightQuantizer of a stack of
matrices.

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

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.comm.axis import Axis, ModelAxes
from phalanx.ops.dense.activation import GatedRows
from phalanx.ops.dense.grads import account
from phalanx.ops.experts.grouped import segments
from phalanx.ops.experts.permute import Gathered
from phalanx.ops.op import Case, Implementation, Kernels, Op, triton
from phalanx.ops.quantized.casts import BLOCKS, GIVEN, LINES, SQUARES, WHOLE, CastSpec
from phalanx.ops.quantized.quantizer import DY, W, WeightQuantizer, X, noted, noting, spread_out
from phalanx.ops.quantized.recipes import (
    Block,
    Format,
    Scaled,
    block_amax,
    cast_scaled,
    find_recipe,
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


FEW_ENDS, MANY_ENDS = (5, 5, 130, 200), (300, 1711, 1711, 1712, 3000, 3128, 3129, 4990)


def _cast_cases() -> Iterator[Case]:
    """Rows of uneven experts, of which the last are nobody's, and a stack of matrices: all that is read of them."""

    def call(recipe: str, numbers: tuple[int, ...], x: Tensor, weight: Tensor, kernels: Kernels) -> tuple[Tensor, ...]:
        quantizer = ExpertQuantizer(find_recipe(recipe), "w", 0, ModelAxes(), kernels)
        noting(quantizer, x.device)
        ends, last = torch.tensor(numbers, dtype=torch.int32, device=x.device), numbers[-1]
        tiles = sum(-(-(stop - start) // PLACE) for start, stop in pairwise((0, *numbers)))
        group, found = PaddedRows.of(ends, len(x), tiles).group_P, []
        for which in (X, DY):
            q, laid = quantizer.rows(which, spread_out(x), ends)
            laid = Scaled(laid.quantized[:, : PLACE * tiles], laid.scales, laid.block).transposed()
            scales = q.scales if len(q.scales) == 1 else q.scales[:last]
            found += [q.quantized[:last].view(torch.uint8), scales, values(laid, group, torch.float32)]
        for q in quantizer.quantized(spread_out(weight)):
            found += [q.quantized.view(torch.uint8), q.scales]
        return *found, *noted(quantizer)

    for recipe in ("tensorwise", "delayed", "rowwise", "blockwise"):
        for numbers, rows, shape in ((FEW_ENDS, 208, (128, 144)), (MANY_ENDS, 5100, (256, 384))):
            shapes, large = ((rows, shape[1]), (len(numbers), *shape)), rows > 1000
            how: dict[str, Any] = dict(dtypes=(torch.bfloat16,), large=large, exact=True)
            yield Case(f"{recipe}, {rows} rows of {shape[1]}", partial(call, recipe, numbers), shapes, **how)


def _product_cases() -> Iterator[Case]:
    """Output, and gradients of rows and matrices."""

    def call(recipe: str, numbers: tuple[int, ...], *given: Any) -> tuple[Tensor, ...]:
        x, weight, bias, dy, kernels = given
        quantizer = ExpertQuantizer(find_recipe(recipe), "w", 0, ModelAxes(), kernels)
        ends = torch.tensor(numbers, dtype=torch.int32, device=x.device)
        (q, kept), (dq, of_padded) = quantizer.rows(X, x.detach(), ends), quantizer.rows(DY, dy.detach(), ends)
        y = quantizer.times_weight(q, weight.detach(), ends, x.dtype, bias.detach())
        dx = quantizer.times_transposed(dq, weight.detach(), ends, x.dtype)
        quantizer.add_grads(weight, of_padded, kept, ends)
        return y, dx, weight.grad

    for recipe in ("tensorwise", "rowwise", "blockwise"):
        for numbers, outer, inner in ((FEW_ENDS, 128, 256), (MANY_ENDS, 256, 384)):
            rows, count = numbers[-1], len(numbers)
            shapes = ((rows, inner), (count, outer, inner), (count, outer), (rows, outer))
            how: dict[str, Any] = dict(dtypes=(torch.bfloat16,), large=rows > 1000)
            name = f"{recipe}, {rows} x {inner} x {outer}"
            yield Case(name, partial(call, recipe, numbers), shapes, (1,), **how)


QUANT_ROWS = Op(
    "quant_rows",
    "casts to FP8 of rows sorted by expert, and of experts' weights",
    __name__,  # the kernels fuse methods of ExpertQuantizer
    (),
    (
        triton("phalanx.ops.quantized.quantize_grouped_kernel", shapes="not float64"),
        Implementation("dry", "phalanx.ops.quantized.casts:DryRows", "meta"),
    ),
    switches=("quant",),
    cases=tuple(_cast_cases()),
)
QUANT_PRODUCTS = Op(
    "quant_products",
    "matmuls of many experts at once, of FP8 values",
    __name__,
    ("product", "add_product_"),
    (triton("phalanx.ops.quantized.grouped_gemm_kernel", shapes="not float64"),),
    switches=("quant",),
    cases=tuple(_product_cases()),
)


class ExpertQuantizer(WeightQuantizer):
    """The quantized state of a stack of experts' matrices (E, out, in). `cut`: which dim of a matrix, 0 or 1, is
    sharded over etp."""

    casts = QUANT_ROWS
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
        stack = (weight.reshape(count * outer, inner), self._ends, tiles)
        made = self._cast_rows(self._kernels(weight), W, stack, self.cut, self._quantized)
        if self._quantized is None:
            self._quantized = made
        elif made is not self._quantized:
            for old, new in zip(self._quantized, made):
                old.quantized.view(torch.uint8).copy_(new.quantized.view(torch.uint8))
                old.scales.copy_(new.scales)

    def rows(self, which: int, x: Source, ends: Tensor) -> tuple[Scaled, Scaled]:
        """Quantized x (R, C): in its own order, for sums over features, and transposed by places, (C, P), for sums over
        rows."""
        kernels, x = self._source(x)
        features_cut = (which == X) == (
            self.cut == 1
        )  # of inputs where the in-dim is cut, of gradients where the out-dim is
        sorted_rows = (x, ends, tiles_for(x.shape[0], len(ends)))
        return self._cast_rows(kernels, which, sorted_rows, 1 if features_cut else None)

    def _cast_rows(
        self,
        kernels: Any,
        which: int,
        rows: tuple[Any, Tensor, int],
        cut: int | None,
        into: tuple[Scaled, Scaled] | None = None,
    ) -> tuple[Scaled, Scaled]:
        """The same for rows or for a stack: x, ends and tiles. `cut`: the dim of x that is sharded over etp."""
        if kernels is None:
            return self._cast_plainly(which, *rows, cut)
        return self._cast_by_kernels(kernels, which, rows, cut, into)

    def _cast_plainly(self, which: int, x: Tensor, ends: Tensor, tiles: int, cut: int | None) -> tuple[Scaled, Scaled]:
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

    def _cast_by_kernels(
        self, kernels: Any, which: int, rows: tuple[Any, Tensor, int], cut: int | None, into: Any
    ) -> tuple[Scaled, Scaled]:
        x, ends, tiles = rows
        first = second = None
        if self._given(which):
            mode, first = GIVEN, self.multiplier[which : which + 1]  # type: ignore[index]
        elif self.recipe.tokens == (0, 0):
            mode, first = WHOLE, kernels.amax(x, ends, tiles, per_expert=which == W)
            self._compare(first, which, cut is not None, whole=True)
        elif self.recipe.tokens == (1, 0):
            mode, (first, second) = LINES, kernels.amax_lines(x, ends, tiles)
            self._compare(first, which, cut == 1)
            self._compare(second, which, cut == 0)
        else:
            mode = SQUARES if which == W else BLOCKS
        counts = None if self.counts is None else self.counts[which]
        cast = CastSpec(self._format(which), mode, first, second, counts)
        made: tuple[Scaled, Scaled] = kernels.cast_both(x, ends, tiles, cast, into)
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
