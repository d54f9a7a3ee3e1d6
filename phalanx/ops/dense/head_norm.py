"""RMSNorm of each query and key head, then their rotation: from the packed qkv to q, k and v in one pass, and back in
one.

Only the incoming qkv is saved for backward. The order is Qwen3's: normalize, scale by the weight, rotate (Yang et al.,
"Qwen3 technical report", 2025).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.ops.dense.grads import add_grad
from phalanx.ops.dense.norm import NORM, plus_one
from phalanx.ops.dense.rope import Angles, pack_heads, rotate, split_heads, table_for
from phalanx.ops.op import Case, Kernels, Op, invariant, triton

Table = Angles | None


def _normed(qkv: Tensor, heads: int, kv_heads: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """q and k unnormalized (wide), normalized, and the (T, heads + kv_heads, 1) factors between them."""
    x = qkv[:, : heads + kv_heads]
    x = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x, x * scale, scale


def forward(qkv: Tensor, heads: int, q_weight: Tensor, k_weight: Tensor, table: Table, eps: float) -> Tensor:
    """The packed qkv (T, heads + 2 * kv_heads, K) with q and k normalized, scaled and rotated."""
    kv_heads = (qkv.shape[1] - heads) // 2
    n = _normed(qkv, heads, kv_heads, eps)[1].to(q_weight.dtype)
    weighed = torch.cat((n[:, :heads] * q_weight, n[:, heads:] * k_weight), 1).to(qkv.dtype)
    rotated = weighed if table is None else rotate(weighed, table)
    return torch.cat((rotated, qkv[:, heads + kv_heads :]), 1)


def backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, table: Table, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of qkv and of both weights. With d rotated back, n the normalized x, s its factor and g = d * w: dx
    = s * (g - n * mean(g * n)), dw = sum(d * n)."""
    heads, kv_heads = dq.shape[1], dk.shape[1]
    d = pack_heads(dq, dk, dv, table, back=True)
    x, n, scale = _normed(qkv, heads, kv_heads, eps)
    rotated = d[:, : heads + kv_heads].to(x.dtype)
    dw = rotated * n
    g = torch.cat((rotated[:, :heads] * q_weight, rotated[:, heads:] * k_weight), 1)
    dx = (g - n * (g * n).mean(-1, keepdim=True)) * scale
    return (
        torch.cat((dx.to(d.dtype), d[:, heads + kv_heads :]), 1),
        dw[:, :heads].sum((0, 1)),
        dw[:, heads:].sum((0, 1)),
    )


class HeadRows:
    """Batch-invariant: each head is a row of the op `norm`, whatever the number of heads here. The kernel's sums over a
    head follow that number, which differs with tp."""

    @staticmethod
    def forward(qkv: Tensor, heads: int, q_weight: Tensor, k_weight: Tensor, table: Table, eps: float) -> Tensor:
        kv_heads, by = (qkv.shape[1] - heads) // 2, NORM.choose("invariant", qkv)
        parts = (qkv[:, :heads], q_weight), (qkv[:, heads : heads + kv_heads], k_weight)
        normed = [by.norm_forward(x.flatten(0, 1), None, weight, None, eps)[1].view(x.shape) for x, weight in parts]
        weighed = torch.cat(normed, 1)
        rotated = weighed if table is None else rotate(weighed, table)
        return torch.cat((rotated, qkv[:, heads + kv_heads :]), 1)

    backward = staticmethod(backward)


class _HeadNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        heads: int,
        kv_heads: int,
        sequences: int,
        table: Table,
        by: Any,
    ) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.save_for_backward(qkv)
        ctx.weights, ctx.eps, ctx.table, ctx.by = (q_weight, k_weight), eps, table, by
        return split_heads(by.forward(qkv, heads, q_weight, k_weight, table, eps), heads, kv_heads, sequences)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dqkv, *dw = ctx.by.backward(dq, dk, dv, *ctx.saved_tensors, *ctx.weights, ctx.table, ctx.eps)
        given = [add_grad(w, g) if need else None for w, g, need in zip(ctx.weights, dw, ctx.needs_input_grad[1:3])]
        return dqkv, *given, None, None, None, None, None, None


def norm_rope(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    heads: int,
    kv_heads: int,
    sequences: int,
    table: Table,
    kernels: Kernels = "auto",
) -> tuple[Tensor, ...]:
    """The packed qkv (sequences * S, heads + 2 * kv_heads, K) as q, k, v (sequences, heads or kv_heads, S, K), of which
    there may be queries alone. Each
    head of q and k is divided by sqrt(mean(x^2) + eps), multiplied by its weight (K,), then rotated as in
    ops.dense.rope; without a table it is not rotated."""
    by = NORM_ROPE.choose("plain" if qkv.shape[-1] % 2 and kernels != "invariant" else kernels, qkv)
    return _HeadNorm.apply(qkv, q_weight, k_weight, eps, heads, kv_heads, sequences, table, by)


def _case(
    heads: int, kv_heads: int, sequences: int, features: int | None = None, interleaved: bool = False
) -> Callable[..., Tensor]:
    """The outputs of norm_rope, packed again. features: rotated ones, if not all."""

    def call(x: Tensor, q: Tensor, k: Tensor, kernels: Kernels) -> Tensor:
        table = None if features == 0 else table_for(x, features, interleaved)
        made = norm_rope(x, q, k, 1e-3, heads, kv_heads, sequences, table, kernels)
        return torch.cat(made, 1).transpose(1, 2).flatten(0, 1)

    return call


def _less_one(x: Tensor, q: Tensor, k: Tensor, kernels: Kernels) -> Tensor:
    """With weights that are stored less one, so wider than x."""
    return _case(3, 2, 2)(x, plus_one(q), plus_one(k), kernels)


NORM_ROPE = Op(
    "norm_rope",
    "RMSNorm of each head, then its rotation",
    __name__,
    ("forward", "backward"),
    (
        triton("phalanx.ops.dense.head_norm_kernel", shapes="even widths of heads"),
        invariant(f"{__name__}:HeadRows", "any"),
    ),
    switches=("norm", "rope"),
    cases=(
        Case("norm_rope, weights less one", _less_one, ((10, 7, 6), (6,), (6,)), (1, 2)),
        Case("norm_rope", _case(3, 2, 2), ((10, 7, 6), (6,), (6,)), (1, 2)),
        Case("norm_rope, queries alone", _case(3, 0, 2), ((10, 3, 6), (6,), (6,)), (1,)),
        Case("norm_rope, one head", _case(1, 1, 1), ((5, 3, 64), (64,), (64,)), (1, 2)),
        Case("norm_rope, part of a head", _case(3, 2, 2, features=6), ((10, 7, 20), (20,), (20,)), (1, 2)),
        Case("norm_rope, neighbours", _case(2, 1, 1, 4, interleaved=True), ((5, 4, 10), (10,), (10,)), (1, 2)),
        Case("norm_rope, no angles", _case(5, 1, 3, features=0), ((9, 7, 20), (20,), (20,)), (1, 2)),
        Case("norm_rope of 32 heads of 128", _case(32, 8, 1), ((1030, 48, 128), (128,), (128,)), (1, 2), large=True),
        Case("norm_rope of half a head", _case(32, 8, 1, 64), ((1030, 48, 128), (128,), (128,)), (1, 2), large=True),
    ),
)
