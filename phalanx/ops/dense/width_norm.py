"""RMSNorm of queries and of keys over their whole width: one mean square for all heads of a token, on whatever tp ranks
they are.

Each rank sums the squares of its own heads; the sums of both, two numbers for each token, are added over tp, in forward
and in backward. Only the incoming qkv and the factors are saved. Team OLMo, "2 OLMo 2 Furious", 2024, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.base.dataclass import dataclass
from phalanx.comm.axis import Axis
from phalanx.ops.dense.activation import widened
from phalanx.ops.dense.grads import add_grad
from phalanx.ops.in_order import sum_in_order
from phalanx.ops.op import Case, Kernels, Op, invariant


@dataclass(frozen=True)
class HeadShard:
    """The heads in a packed qkv: `heads` of queries and `kv_heads` of keys on this rank, of `all_heads` and
    `all_kv_heads`, each of `width` features. `copies`: the tp ranks that hold each key head."""

    heads: int
    kv_heads: int
    all_heads: int
    all_kv_heads: int
    width: int
    copies: int

    def by_head(self, pair: Tensor) -> Tensor:
        """(2, T), of queries and of keys -> (T, heads + kv_heads, 1)."""
        queries, keys = pair.unsqueeze(-1)
        return torch.cat((queries.expand(-1, self.heads), keys.expand(-1, self.kv_heads)), 1).unsqueeze(-1)

    def means(self, sums: Tensor) -> Tensor:
        """(2, T) sums over all features of queries and of keys -> their means."""
        queries, keys = sums
        return torch.stack((queries / (self.all_heads * self.width), keys / (self.all_kv_heads * self.width)))

    def pair(self, of_heads: Tensor) -> Tensor:
        """(T, heads + kv_heads) -> (2, T): the sums over this rank's query heads and over its key heads."""
        return torch.stack((of_heads[:, : self.heads].sum(-1), of_heads[:, self.heads :].sum(-1)))


def _wide(qkv: Tensor, shard: HeadShard) -> Tensor:
    """Queries and keys (T, heads + kv_heads, K) in at least fp32."""
    return widened(qkv[:, : shard.heads + shard.kv_heads])


def _with_values(normed: Tensor, qkv: Tensor) -> Tensor:
    return torch.cat((normed.to(qkv.dtype), qkv[:, normed.shape[1] :]), 1)


def forward(qkv: Tensor, weight: Tensor, shard: HeadShard, eps: float, tp: Axis) -> tuple[Tensor, Tensor]:
    """qkv (T, heads + 2 * kv_heads, K) with q and k normalized and scaled by weight (heads + kv_heads, K); and the
    factors (2, T) of q and of k."""
    x = _wide(qkv, shard)
    sums = shard.pair(x.square().sum(-1))
    sums[1] /= shard.copies
    scale = torch.rsqrt(shard.means(tp.all_reduce(sums).wait()) + eps)
    return _with_values(x * shard.by_head(scale) * weight, qkv), scale


def backward(
    d: Tensor, qkv: Tensor, weight: Tensor, scale: Tensor, shard: HeadShard, tp: Axis
) -> tuple[Tensor, Tensor]:
    """The gradients of qkv and of the weight. With n the normalized x, s its factor and g = d * w: dx = s * (g - n *
    mean(g * n)), dw = sum(d * n).

    The ranks that hold a key head have each a part of its gradient: their parts add up in the mean, and each subtracts
    an equal share of it.
    """
    x, s, own = _wide(qkv, shard), shard.by_head(scale), _wide(d, shard)
    n, g = x * s, own * weight
    mean = shard.means(tp.all_reduce(shard.pair((g * n).sum(-1))).wait())
    mean[1] /= shard.copies
    return _with_values((g - n * shard.by_head(mean)) * s, d), (own * n).sum(0)


class SumsInOrder:
    """Batch-invariant: the sums of single heads, in one order, are gathered and added in the order of the heads, which
    is the same at every tp."""

    @staticmethod
    def forward(qkv: Tensor, weight: Tensor, shard: HeadShard, eps: float, tp: Axis) -> tuple[Tensor, Tensor]:
        x = _wide(qkv, shard)
        of_heads = tp.all_gather(sum_in_order(x * x).unsqueeze(0)).wait()  # (tp, T, heads + kv_heads)
        of_queries, of_keys = of_heads[..., : shard.heads], of_heads[:: shard.copies, :, shard.heads :]
        sums = [sum_in_order(each.transpose(0, 1).flatten(1)) for each in (of_queries, of_keys)]
        scale = 1 / torch.sqrt(shard.means(torch.stack(sums)) + eps)
        return _with_values(x * shard.by_head(scale) * weight, qkv), scale

    backward = staticmethod(backward)


class _WidthNorm(Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, weight: Tensor, shard: HeadShard, eps: float, tp: Axis, by: Any) -> Tensor:  # type: ignore[override]
        rows = weight.detach().view(shard.heads + shard.kv_heads, shard.width)
        out, scale = by.forward(qkv, rows, shard, eps, tp)
        ctx.save_for_backward(qkv, scale)
        ctx.weight, ctx.shard, ctx.tp, ctx.by = weight, shard, tp, by
        made: Tensor = out
        return made

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (qkv, scale), shard = ctx.saved_tensors, ctx.shard
        rows = ctx.weight.detach().view(shard.heads + shard.kv_heads, shard.width)
        dqkv, dw = ctx.by.backward(d, qkv, rows, scale, shard, ctx.tp)
        return dqkv, add_grad(ctx.weight, dw.flatten()) if ctx.needs_input_grad[1] else None, None, None, None, None


def width_norm(
    qkv: Tensor, weight: Tensor, shard: HeadShard, eps: float, tp: Axis, kernels: Kernels = "auto"
) -> Tensor:
    """The packed qkv (T, heads + 2 * kv_heads, K) of this rank with all queries of a token, and all its keys, divided
    by sqrt(mean(x^2) + eps) over their whole width, and multiplied by weight ((heads + kv_heads) * K,)."""
    made: Tensor = _WidthNorm.apply(qkv, weight, shard, eps, tp, WIDTH_NORM.choose(kernels, qkv))
    return made


def _case(heads: int, kv_heads: int) -> Callable[..., Tensor]:
    def call(x: Tensor, weight: Tensor, kernels: Kernels) -> Tensor:
        shard = HeadShard(heads, kv_heads, heads, kv_heads, x.shape[-1], 1)
        return width_norm(x, weight, shard, 1e-3, Axis("tp"), kernels)

    return call


WIDTH_NORM = Op(
    "width_norm",
    "RMSNorm of queries and of keys over all heads",
    __name__,
    ("forward", "backward"),
    (invariant(f"{__name__}:SumsInOrder", "any"),),
    switches=("norm",),
    cases=(
        Case("width_norm", _case(3, 2), ((10, 7, 6), (30,)), (1,)),
        Case("width_norm, one head", _case(1, 1), ((5, 3, 64), (128,)), (1,)),
        Case("width_norm of 32 heads of 128", _case(32, 8), ((1030, 48, 128), (40 * 128,)), (1,), large=True),
    ),
)
