"""RMSNorm and LayerNorm over the last dim, computed in at least fp32, with the preceding residual addition.

Each rank normalizes its own tokens. `add_*_norm` handles the residual stream in one pass: it returns both the sum and
its norm, and its backward adds the gradient of the sum to the one through the norm. If the only reader of a norm
quantizes it to FP8, the norm is not written to memory (ops.lazy_tensor).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.base.dataclass import dataclass
from phalanx.ops.dense.grads import add_grad
from phalanx.ops.in_order import sum_in_order
from phalanx.ops.lazy_tensor import LazySource, LazyTensor
from phalanx.ops.op import Case, Kernels, Op, invariant, triton


@dataclass(frozen=True)
class Normed(LazySource):
    """x (T, D) scale (T,), rounded to the weight's dtype, times weight (D,): the output of RMSNorm, not in memory."""

    x: Tensor
    scale: Tensor
    weight: Tensor

    def tensor(self) -> Tensor:
        return _times(_widen(self.x) * self.scale.unsqueeze(-1), self.weight, self.x.dtype)


def _times(normed: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A wide norm, rounded to the weight's dtype, times the weight, in `dtype`."""
    return (normed.to(weight.dtype) * weight).to(dtype)


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


ELEMENTS = 1 << 25  # rows that the reference implementations widen at a time, to need little memory beside x


def _rows(x: Tensor) -> list[slice]:
    step = max(1, ELEMENTS // max(1, x[0].numel())) if len(x) else 1
    return [slice(a, min(a + step, len(x))) for a in range(0, len(x), step)]


def norm_forward(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x + delta, its norm, and mean (LayerNorm, with bias) and scale of each row."""
    total = x if delta is None else x + delta
    if len(parts := _rows(total)) <= 1:
        return total, *_norm_of(total, weight, bias, eps)
    y, mean, scale = torch.empty_like(total), *(_widen(total[0]).new_empty(len(total)) for _ in range(2))
    for rows in parts:
        y[rows], mean_of, scale[rows] = _norm_of(total[rows], weight, bias, eps)
        if bias is not None:
            mean[rows] = mean_of
    return total, y, mean if bias is not None else mean[:0].clone(), scale


def _norm_of(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    wide = _widen(x)
    if bias is None:
        scale = torch.rsqrt(wide.square().mean(-1) + eps)
        return _times(wide * scale.unsqueeze(-1), weight, x.dtype), scale.new_empty(0), scale
    mean = wide.mean(-1)
    scale = torch.rsqrt(wide.var(-1, unbiased=False) + eps)
    normed = (wide - mean.unsqueeze(-1)) * scale.unsqueeze(-1)
    return (normed * weight + bias).to(x.dtype), mean, scale


def norm_backward(
    dys: Sequence[Tensor], x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor, dtotal: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """With n the normalized x, s its scale, g = dy * w: dx = s * (g - n * mean(g * n)), less s * mean(g) for LayerNorm;
    dw = sum(dy * n), db = sum(dy). dys: one or two gradients, whose sum is dy."""
    dy = dys[0] if len(dys) == 1 else dys[0] + dys[1]
    if len(parts := _rows(x)) <= 1:
        return _norm_grads(dy, x, weight, mean, scale, dtotal)
    dx, dw, db = torch.empty_like(x), *(_widen(x[0]).new_zeros(x.shape[-1]) for _ in range(2))
    for rows in parts:
        of_rows = (mean[rows] if mean.numel() else mean, scale[rows], None if dtotal is None else dtotal[rows])
        dx[rows], more_dw, more_db = _norm_grads(dy[rows], x[rows], weight, *of_rows)
        dw, db = dw + more_dw, db + more_db
    return dx, dw, db


def _norm_grads(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor, dtotal: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dy_wide, s = _widen(dy), scale.unsqueeze(-1)
    center = mean.numel() > 0
    n = (_widen(x) - mean.unsqueeze(-1) if center else _widen(x)) * s
    g = dy_wide * weight
    dx = g - n * (g * n).mean(-1, keepdim=True)
    dx = (dx - g.mean(-1, keepdim=True) if center else dx) * s
    dx = dx if dtotal is None else dx + dtotal
    return dx.to(x.dtype), (dy_wide * n).sum(0), dy_wide.sum(0)


class NormInOrder:
    """Batch-invariant: sums over a row in one order. torch takes another for a few rows than for many."""

    @staticmethod
    def norm_forward(
        x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        total = x if delta is None else x + delta
        wide, width = _widen(total), x.shape[-1]
        mean = wide.new_empty(0) if bias is None else sum_in_order(wide) / width
        centered = wide if bias is None else wide - mean.unsqueeze(-1)
        scale = 1 / torch.sqrt(sum_in_order(centered * centered) / width + eps)
        normed = centered * scale.unsqueeze(-1)
        y = _times(normed, weight, x.dtype) if bias is None else (normed * weight + bias).to(x.dtype)
        return total, y, mean, scale

    norm_backward = staticmethod(norm_backward)


class _Norm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        by: Any,  # type: ignore[override]
        lazy: bool = False,
        twice: bool = False,
    ) -> tuple[Tensor, ...]:
        norm_scale = getattr(by, "norm_scale", None) if lazy else None
        if norm_scale is not None:
            total, scale = norm_scale(x, delta, eps)
            y: Tensor = LazyTensor(Normed(total, scale, weight))
            mean = scale.new_empty(0)
        else:
            total, y, mean, scale = by.norm_forward(x, delta, weight, bias, eps)
        ctx.save_for_backward(total, mean, scale)
        ctx.weight, ctx.bias, ctx.by, ctx.added = weight, bias, by, delta is not None
        ctx.set_materialize_grads(False)
        return (total, y, y.data) if twice else (total, y)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, dtotal: Tensor | None, dy: Tensor | None, dsecond: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        dys = [d for d in (dy, dsecond) if d is not None]
        if not dys:  # nobody used the norm
            return dtotal, dtotal if ctx.added else None, None, None, None, None, None, None
        (x, mean, scale), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        dx, dw, db = ctx.by.norm_backward(dys, x, weight, mean, scale, dtotal)
        need_w, need_b = ctx.needs_input_grad[2:4]
        dw_out = add_grad(weight, dw) if need_w else None
        db_out = add_grad(bias, db) if need_b else None
        return dx, dx if ctx.added else None, dw_out, db_out, None, None, None, None


class _PlusOne(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.weight = weight
        return _widen(weight) + 1

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Tensor | None:  # type: ignore[override]
        return add_grad(ctx.weight, d)


def plus_one(weight: Tensor) -> Tensor:
    """weight (D,) + 1 in at least fp32, for norms whose weights are stored as their distance from one: near one, bf16
    is too coarse for them."""
    made: Tensor = _PlusOne.apply(weight)
    return made


def rms_norm(x: Tensor, weight: Tensor, eps: float, kernels: Kernels = "auto") -> Tensor:
    """x (T, D) / sqrt(mean(x^2) + eps) * weight (D,), whose dtype may be wider than x's. Zhang & Sennrich, "Root mean
    square layer normalization", 2019."""
    return _Norm.apply(x, None, weight, None, eps, NORM.choose(kernels, x))[1]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, kernels: Kernels = "auto") -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim of x (T, D). Ba et al., "Layer normalization",
    2016."""
    return _Norm.apply(x, None, weight, bias, eps, NORM.choose(kernels, x))[1]


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, kernels: Kernels = "auto", lazy: bool = False
) -> tuple[Tensor, Tensor]:
    """(x + delta, rms_norm(x + delta)), each (T, D); without `delta`, x itself and its norm.

    lazy: whether the norm's only reader accepts a lazy tensor (ops.lazy_tensor). Implementations without a `norm_scale`
    do not return one.
    """
    return _Norm.apply(x, delta, weight, None, eps, NORM.choose(kernels, x), lazy)


def add_layer_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, eps: float, kernels: Kernels = "auto"
) -> tuple[Tensor, Tensor]:
    """(x + delta, layer_norm(x + delta)), each (T, D); without `delta`, x itself and its norm."""
    return _Norm.apply(x, delta, weight, bias, eps, NORM.choose(kernels, x))


def add_layer_norm_twice(
    x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float, kernels: Kernels = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """(x + delta, its norm, the same norm again), each (T, D), for two readers of a norm: backward reads the gradients
    of both, where autograd would first have written their sum. Both norms are in one memory."""
    return _Norm.apply(x, delta, weight, bias, eps, NORM.choose(kernels, x), False, True)


def _add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, kernels: Kernels) -> Tensor:
    return torch.cat(add_rms_norm(x, delta, weight, 1e-3, kernels))


def _add_layer_norm(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, kernels: Kernels) -> Tensor:
    return torch.cat(add_layer_norm(x, delta, weight, bias, 1e-5, kernels))


def _layer_norm_twice(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, kernels: Kernels) -> Tensor:
    return torch.cat(add_layer_norm_twice(x, delta, weight, bias, 1e-5, kernels))


def _rms_norm(x: Tensor, weight: Tensor, kernels: Kernels) -> Tensor:
    return rms_norm(x, weight, 1e-5, kernels)


NORM = Op(
    "norm",
    "RMSNorm and LayerNorm, with the residual addition before them",
    __name__,
    ("norm_forward", "norm_backward"),
    (triton("phalanx.ops.dense.norm_kernel", invariant=True), invariant(f"{__name__}:NormInOrder", "any")),
    cases=(
        Case("rms_norm", lambda x, w, k: rms_norm(x, w, 1e-3, k), ((5, 7), (7,)), (1,)),
        Case("rms_norm, wide", _rms_norm, ((9, 1100), (1100,)), (1,)),
        Case("rms_norm, several tiles", _rms_norm, ((91, 300), (300,)), (1,)),
        Case("rms_norm, weights less one", lambda x, w, k: rms_norm(x, plus_one(w), 1e-3, k), ((5, 24), (24,)), (1,)),
        Case("add_rms_norm", _add_rms_norm, ((6, 40), (6, 40), (40,)), (2,)),
        Case(
            "stream and rms_norm",
            lambda x, w, k: torch.cat(add_rms_norm(x, None, w, 1e-3, k)),
            ((1, 64), (64,)),
            (1,),
        ),
        Case("layer_norm", lambda x, w, b, k: layer_norm(x, w, b, 1e-3, k), ((5, 7), (7,), (7,)), (1, 2)),
        Case("add_layer_norm", _add_layer_norm, ((13, 33), (13, 33), (33,), (33,)), (2, 3)),
        Case("add_layer_norm, for two readers", _layer_norm_twice, ((13, 33), (13, 33), (33,), (33,)), (2, 3)),
        Case("rms_norm of 4096", _rms_norm, ((1030, 4096), (4096,)), (1,), large=True),
        Case("add_rms_norm of 4096", _add_rms_norm, ((1030, 4096), (1030, 4096), (4096,)), (2,), large=True),
        Case("add_layer_norm of 1600", _add_layer_norm, ((1030, 1600),) * 2 + ((1600,),) * 2, (2, 3), large=True),
    ),
)
