"""Activations of MLPs: gated ones over stacked gate and up (SwiGLU, gpt-oss's clamped form, GeGLU), and GELU in both
forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.base.dataclass import dataclass
from phalanx.ops.dense.gate import CLAMPED_SWIGLU, EXACT_GEGLU, GEGLU, SWIGLU, Gate
from phalanx.ops.lazy_tensor import LazySource
from phalanx.ops.op import Case, Implementation, Kernels, Op, invariant, triton


def gated_forward(x: Tensor, gate: Gate, weights: Tensor | None = None, last: Tensor | None = None) -> Tensor:
    """y (R, F) from x (R, 2F): the gated activation, times `weights` (R,), zero from row `last` () on."""
    g, u, s = _clamped(x, gate)
    y = g * s * (u + gate.shift)
    y = y if weights is None else (y * weights.unsqueeze(-1)).to(x.dtype)
    return y if last is None else torch.where(rows_before(last, y), y, 0)


def gated_backward(
    dy: Tensor, x: Tensor, gate: Gate, weights: Tensor | None = None, last: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Clamping passes the gradient up to and including the limit. torch's own clamp passes it at the limit before
    version 2.15 and not since; here it is the same with every version."""
    g, u, s = _clamped(x, gate)
    raw_g, raw_u = _parts(x, gate)
    u = u + gate.shift
    dweights = None
    if weights is not None:
        products = ((g * s * u).to(weights.dtype) * dy.to(weights.dtype)).sum(-1)
        dweights = products if last is None else torch.where(rows_before(last, products), products, 0)
        dy = (dy * weights.unsqueeze(-1)).to(x.dtype)
    dg = gate.backward(dy * u, g, s) * (raw_g <= gate.limit)
    du = dy * g * s * (raw_u.abs() <= gate.limit)
    dx = torch.stack((dg, du), -1).flatten(-2) if gate.interleaved else torch.cat((dg, du), -1)
    return dx if last is None else torch.where(rows_before(last, dx), dx, 0), dweights


class GatedByExp:
    """Batch-invariant on CPUs, where torch's sigmoid and gelu have other last bits in the elements that a vector of the
    processor does not fill; exp, tanh and erf have the same everywhere."""

    @staticmethod
    def gated_forward(x: Tensor, gate: Gate, weights: Tensor | None = None, last: Tensor | None = None) -> Tensor:
        g, u, _ = _clamped(x, gate)
        wide = widened(g)
        s = gate.factor(wide) if gate.exact else 1 / (1 + torch.exp(-gate.inner(wide)))
        y = g * s.to(x.dtype) * (u + gate.shift)
        y = y if weights is None else (y * weights.unsqueeze(-1)).to(x.dtype)
        return y if last is None else torch.where(rows_before(last, y), y, 0)

    gated_backward = staticmethod(gated_backward)


class DryGated:
    """Without data: allocates what the kernels do, which is their outputs."""

    @staticmethod
    def gated_forward(x: Tensor, gate: Gate, weights: Tensor | None = None, last: Tensor | None = None) -> Tensor:
        return x.new_empty(x.shape[0], x.shape[1] // 2)

    @staticmethod
    def gated_backward(
        dy: Tensor, x: Tensor, gate: Gate, weights: Tensor | None = None, last: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return torch.empty_like(x), None if weights is None else torch.empty_like(weights)


def widened(x: Tensor) -> Tensor:
    """x in at least fp32."""
    return x if x.dtype == torch.float64 else x.float()


def _parts(x: Tensor, gate: Gate) -> tuple[Tensor, Tensor]:
    """Gate and up, (R, F) each."""
    g, u = x.unflatten(-1, (-1, 2)).unbind(-1) if gate.interleaved else x.chunk(2, -1)
    return g, u


def _clamped(x: Tensor, gate: Gate) -> tuple[Tensor, Tensor, Tensor]:
    """Clamped gate, clamped up, and the factor s by which the gate is multiplied."""
    g, u = _parts(x, gate)
    g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)
    return g, u, gate.factor(g)


def rows_before(last: Tensor, rows: Tensor) -> Tensor:
    """Which rows come before row `last`, shaped to broadcast over the other dims."""
    return (torch.arange(len(rows), device=rows.device) < last).view(-1, *(1,) * (rows.dim() - 1))


@dataclass(frozen=True)
class Gated(LazySource):
    """silu(gate) * up (T, F) of x = [gate, up] (T, 2F), not in memory: computed by the kernel that quantizes it
    (quantize_kernel.py), or by `tensor`."""

    x: Tensor
    kernels: Kernels = "auto"

    @property
    def shape(self) -> tuple[int, int]:
        return self.x.shape[0], self.x.shape[1] // 2

    def tensor(self) -> Tensor:
        return swiglu(self.x, self.kernels)


@dataclass(frozen=True)
class GatedGrad(LazySource):
    """The gradient (T, 2F) of [gate, up] from dy (T, F), not in memory either."""

    dy: Tensor
    x: Tensor
    kernels: Kernels = "auto"

    def tensor(self) -> Tensor:
        made: Tensor = GATED.choose(self.kernels, self.x).gated_backward(self.dy, self.x, SWIGLU)[0]
        return made


@dataclass(frozen=True)
class GatedRows(LazySource):
    """The output of `gated_rows` for x (R, 2F), not in memory: (R, F), times `weights` (R,) if given. Rows from row
    `last` () on are padding."""

    x: Tensor
    weights: Tensor | None
    last: Tensor
    gate: Gate = SWIGLU
    kernels: Kernels = "auto"

    @property
    def inner(self) -> int:
        return self.x.shape[1] // 2

    @property
    def shape(self) -> tuple[int, int]:
        return self.x.shape[0], self.inner

    def tensor(self) -> Tensor:
        by = GATED.choose(self.kernels, self.x)
        made: Tensor = by.gated_forward(self.x, self.gate, self.weights, self.last)
        return made


ROOT = math.sqrt(2 / math.pi)
SUMMED = 64  # at least so many features are summed at once for the gradient of the rows' weights


def parts_of_sums(inner: int) -> int:
    return -(-inner // SUMMED)


@dataclass(frozen=True)
class GatedRowsGrad(GatedRows):
    """The gradient (R, 2F) of x from dy (R, F), not in memory either. The kernel that computes it also adds to `sums`
    (`parts_of_sums(F)`, R), zeroed beforehand, whose sum over the first dim is the gradient of the weights."""

    dy: Tensor = field(kw_only=True)
    sums: Tensor | None = field(kw_only=True)

    @property
    def shape(self) -> tuple[int, int]:
        return self.x.shape[0], self.x.shape[1]

    def tensor(self) -> Tensor:
        by = GATED.choose(self.kernels, self.x)
        dx, dweights = by.gated_backward(self.dy, self.x, self.gate, self.weights, self.last)
        if self.sums is not None and dweights is not None:
            self.sums[0].copy_(dweights)
        made: Tensor = dx
        return made


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None, last: Tensor | None, gate: Gate, by: Any) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weights, last)
        ctx.gate, ctx.by = gate, by
        y: Tensor = by.gated_forward(x, gate, weights, last)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weights, last = ctx.saved_tensors
        dx, dweights = ctx.by.gated_backward(dy, x, ctx.gate, weights, last)
        return dx, dweights, None, None, None


def swiglu(x: Tensor, kernels: Kernels = "auto", gate: Gate = SWIGLU) -> Tensor:
    """x = [gate, up] (T, 2F) -> silu(gate) * up (T, F), or another gate's: clamped, of interleaved pairs, GeGLU's."""
    return _Gated.apply(x, None, None, gate, GATED.choose(kernels, x))


def gated_rows(
    x_R2F: Tensor, ends_E: Tensor, weights_R: Tensor | None = None, gate: Gate = SWIGLU, kernels: Kernels = "auto"
) -> Tensor:
    """[gate, up] (R, 2F), or interleaved pairs of them, of rows sorted by expert -> (R, F), times each row's weight.
    Rows past the last end are not read (ops.experts.permute).

    Applying the weights here rather than in combine_rows means that the experts' outputs need not be kept for backward.
    """
    return _Gated.apply(x_R2F, weights_R, ends_E[-1], gate, GATED.choose(kernels, x_R2F))


def gelu(x: Tensor, exact: bool = False) -> Tensor:
    """GELU, by default in the tanh form of GPT-2. Hendrycks & Gimpel, "Gaussian error linear units", 2016."""
    return F.gelu(x, approximate="none" if exact else "tanh")


def gelu_by_formula(x: Tensor, exact: bool = False) -> Tensor:
    """The same, batch-invariant on every device (GatedByExp)."""
    wide = widened(x)
    inner = torch.erf(wide * math.sqrt(0.5)) if exact else torch.tanh(ROOT * (wide + 0.044715 * wide * wide * wide))
    return (0.5 * wide * (1 + inner)).to(x.dtype)


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), near GELU: what CLIP was trained with."""
    return x * torch.sigmoid(1.702 * x)


def some_rows(of_rows: Callable[..., Tensor], x: Tensor, weights: Tensor, kernels: Kernels) -> Tensor:
    """An example of an activation of rows sorted by expert: all rows but the last, which is padding."""
    ends = torch.tensor([0, len(x) - 1], dtype=torch.int32, device=x.device)
    here = torch.arange(len(x), device=x.device) < ends[-1]
    x, weights = torch.where(here.unsqueeze(1), x, 0), torch.where(here, weights, 0)
    wide = weights if x.dtype == torch.float64 else weights.float()
    return of_rows(x, ends, wide, kernels=kernels)[: len(x) - 1]


CLAMPED_ROWS = partial(gated_rows, gate=CLAMPED_SWIGLU)
GATED = Op(
    "swiglu",
    "gated activations: SwiGLU, gpt-oss's clamped one, GeGLU",
    __name__,
    ("gated_forward", "gated_backward"),
    (
        triton("phalanx.ops.dense.gated_kernel", invariant=True),
        invariant(f"{__name__}:GatedByExp"),
        Implementation("dry", f"{__name__}:DryGated", "meta"),
    ),
    cases=(
        Case("swiglu", swiglu, ((3, 14),)),
        Case("swiglu, wide", swiglu, ((2, 2 * 1030),)),
        Case("rows of experts, clamped and weighed", partial(some_rows, CLAMPED_ROWS), ((5, 20), (5,))),
        Case("geglu", partial(swiglu, gate=GEGLU), ((3, 14),)),
        Case("geglu with GELU itself", partial(swiglu, gate=EXACT_GEGLU), ((3, 14),)),
        Case("geglu with GELU itself, of 1152", partial(swiglu, gate=EXACT_GEGLU), ((1030, 2 * 1152),), large=True),
        Case("swiglu of 14336", swiglu, ((1030, 2 * 14336),), large=True),
    ),
)
