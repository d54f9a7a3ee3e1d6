"""Rotary position embedding of the packed qkv, split into q, k and v. Backward rotates back and writes d_qkv as one
tensor, or leaves that to the linear before it if that linear quantizes it to FP8 (ops.lazy_tensor)."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.base.dataclass import dataclass
from phalanx.ops.dense.rope_scaling import inverse_frequencies
from phalanx.ops.lazy_tensor import LazySource, LazyTensor
from phalanx.ops.op import Case, Kernels, Op, invariant, triton


class Angles(NamedTuple):
    """cos and sin (T, pairs) of the angles by which pairs of features are rotated: features i and i + pairs of a head,
    or `interleaved` 2i and 2i + 1. Further features of a head are not rotated."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    @property
    def pairs(self) -> int:
        return self.cos.shape[-1]

    @property
    def members(self) -> tuple[slice, slice]:
        """Where the first and the second features of the pairs are."""
        n = self.pairs
        return (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if self.interleaved else (slice(0, n), slice(n, 2 * n))


def rotary_table(
    positions: Tensor, inv: Tensor, dtype: torch.dtype, factor: float = 1.0, interleaved: bool = False
) -> Angles:
    """cos and sin (T, pairs) of positions (T,) or, of each pair, (T, pairs), times `factor`, in `dtype`, computed in
    float64."""
    wide = positions.to(torch.float64)
    angle = (wide if wide.dim() == 2 else wide.unsqueeze(-1)) * inv.to(positions.device)
    return Angles((angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype), interleaved)


def turn(x: Tensor, table: Angles, interleaved: bool) -> Tensor:
    """x (T, heads, K) with all of its features rotated by the table's angles. `interleaved`: features 2i and 2i + 1 are
    a pair (DeepSeek's weights) and are returned as features i and i + K/2. Otherwise features i and i + K/2 are a pair.
    Scores do not depend on which, as long as queries and keys use the same order."""
    cos, sin = table.cos.unsqueeze(1), table.sin.unsqueeze(1)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def rotate(x: Tensor, table: Angles, back: bool = False) -> Tensor:
    """x (T, heads, K) with the pairs of the table rotated by its angles, or rotated `back`, where they are."""
    cos, sin = table.cos.unsqueeze(1), table.sin.unsqueeze(1)
    sin = -sin if back else sin
    first, second = table.members
    out = x.clone()
    a, b = x[..., first], x[..., second]
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out


def pack_heads(q: Tensor, k: Tensor, v: Tensor, table: Angles | None, back: bool = False) -> Tensor:
    """q (sequences, heads, S, K), k and v (sequences, kv_heads, S, K) packed into (sequences * S, heads + 2 * kv_heads,
    K), with q and k rotated by the table's angles, or rotated `back`."""
    sequences, heads, length, width = q.shape
    packed = torch.cat((q, k, v), 1).transpose(1, 2).reshape(sequences * length, -1, width)
    if table is None:
        return packed
    rotated = heads + k.shape[1]
    return torch.cat((rotate(packed[:, :rotated], table, back), packed[:, rotated:]), 1)


def split_heads(qkv: Tensor, heads: int, kv_heads: int, sequences: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (sequences, heads, S, K), k and v (sequences, kv_heads, S, K): views of the packed qkv (sequences * S, heads
    + 2 * kv_heads, K)."""
    x = qkv.view(sequences, -1, *qkv.shape[1:]).transpose(1, 2)
    return x[:, :heads], x[:, heads : heads + kv_heads], x[:, heads + kv_heads :]


@dataclass(frozen=True)
class RopeGrad(LazySource):
    """The gradient of the packed qkv (T, (heads + 2 * kv_heads) * K), not in memory: dq (sequences, heads, S, K), dk
    and dv (sequences, kv_heads, S, K), the first two still to be rotated back by the table's angles."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    table: Angles | None
    by: Any

    @property
    def shape(self) -> tuple[int, int]:
        sequences, heads, length, width = self.dq.shape
        return sequences * length, (heads + 2 * self.dk.shape[1]) * width

    @property
    def x(self) -> Tensor:  # type: ignore[override]
        return self.dq

    def tensor(self) -> Tensor:
        made: Tensor = self.by.pack_heads(self.dq, self.dk, self.dv, self.table, True)
        return made.reshape(self.shape)


class _Rope(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, heads: int, kv_heads: int, sequences: int, table: Any, by: Any, lazy: bool
    ) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.table, ctx.by, ctx.lazy, ctx.shape = table, by, lazy, qkv.shape
        qkv = qkv.reshape(len(qkv), heads + 2 * kv_heads, -1)
        if table is not None:
            qkv = by.pack_heads(*split_heads(qkv, heads, kv_heads, sequences), table)
        return split_heads(qkv, heads, kv_heads, sequences)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        d = RopeGrad(dq, dk, dv, ctx.table, ctx.by)
        made = LazyTensor(d) if ctx.lazy else d.tensor().reshape(ctx.shape)
        return made, None, None, None, None, None, None


def rope(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    sequences: int,
    table: Angles | None,
    kernels: Kernels = "auto",
    lazy_grad: bool = False,
) -> tuple[Tensor, ...]:
    """The packed qkv (sequences * S, heads + 2 * kv_heads, K), or its last two dims merged, as q, k, v (sequences,
    heads or kv_heads, S, K), with the pairs of features of q and k that the table has rotated by its angles. Without a
    table they are only split.

    Backward packs the three gradients in one pass. With `lazy_grad`, for qkv (T, (heads + 2 * kv_heads) K), it passes a
    lazy tensor (ops.lazy_tensor) to the linear that produced qkv.
    """
    even = prod(qkv.shape[1:]) // (heads + 2 * kv_heads) % 2 == 0  # odd head widths run the reference
    by = ROPE.choose(kernels if even else "plain", qkv)
    return _Rope.apply(qkv, heads, kv_heads, sequences, table, by, lazy_grad)


def table_for(x: Tensor, features: int | None = None, interleaved: bool = False) -> Angles:
    """Angles for test cases of qkv (T, heads, K), for all features or the first so many."""
    inv = inverse_frequencies(features or x.shape[-1], 100.0)
    return rotary_table(torch.arange(len(x), device=x.device) * 7, inv, x.dtype, interleaved=interleaved)


def _case(
    heads: int, kv_heads: int, sequences: int, features: int | None = None, interleaved: bool = False
) -> Callable[[Tensor, Kernels], Tensor]:
    """The outputs of rope, packed again. features: rotated ones, if not all."""

    def call(x: Tensor, kernels: Kernels) -> Tensor:
        table = None if features == 0 else table_for(x, features, interleaved)
        return torch.cat(rope(x, heads, kv_heads, sequences, table, kernels), 1).transpose(1, 2).flatten(0, 1)

    return call


ROPE = Op(
    "rope",
    "rotary position embedding, packed heads taken apart",
    __name__,
    ("pack_heads",),
    (
        triton("phalanx.ops.dense.rope_kernel", invariant=True, shapes="even widths of heads"),
        invariant(__name__, "any", shapes="element by element"),
    ),
    cases=(
        Case("rope", _case(3, 2, 2), ((10, 7, 6),)),
        Case("rope, one head", _case(1, 1, 1), ((5, 3, 64),)),
        Case("rope, part of a head", _case(3, 2, 2, features=6), ((10, 7, 20),)),
        Case("rope, pairs of neighbours", _case(2, 1, 2, interleaved=True), ((6, 4, 12),)),
        Case("rope, part of a head, pairs of neighbours", _case(3, 2, 2, features=4, interleaved=True), ((10, 7, 10),)),
        Case("taking heads apart", _case(4, 4, 3, features=0), ((6, 12, 8),)),
        Case("rope of 32 heads of 128", _case(32, 8, 1), ((1030, 48, 128),), large=True),
        Case("rope of half of 96 heads of 128", _case(96, 8, 1, features=64), ((1030, 112, 128),), large=True),
        Case("rope of 40 heads of 128, neighbours", _case(40, 8, 1, interleaved=True), ((1030, 56, 128),), large=True),
    ),
)
