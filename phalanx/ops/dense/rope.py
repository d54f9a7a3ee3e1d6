"""Rotary position embedding of the packed qkv, split into q, k and v. Backward rotates back and writes d_qkv as one
tensor, or leaves that to the linear before it if that linear quantizes it to FP8 (ops.lazy_tensor)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.ops.dense.rope_scaling import inverse_frequencies
from phalanx.ops.lazy_tensor import LazySource, LazyTensor
from phalanx.ops.op import Case, Kernels, Op, invariant, triton


def rotary_table(positions: Tensor, inv: Tensor, dtype: torch.dtype, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin (T, K / 2) of positions (T,), times `factor`, in `dtype`, computed in float64."""
    angle = positions.to(torch.float64).unsqueeze(-1) * inv.to(positions.device)
    return (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)


def turn(x: Tensor, table: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """x (T, heads, K) rotated by the table's angles. `interleaved`: features 2i and 2i + 1 are a pair (DeepSeek's
    weights) and are returned as features i and i + K/2. Otherwise features i and i + K/2 are a pair, as in other
    models. Scores do not depend on which, as long as queries and keys use the same order."""
    cos, sin = (t.unsqueeze(1) for t in table)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def pack_heads(q: Tensor, k: Tensor, v: Tensor, table: tuple[Tensor, Tensor] | None, back: bool = False) -> Tensor:
    """q (sequences, heads, S, K), k and v (sequences, kv_heads, S, K) packed into (sequences * S, heads + 2 * kv_heads,
    K), with q and k rotated by the table's angles, or rotated `back`."""
    sequences, heads, length, width = q.shape
    packed = torch.cat((q, k, v), 1).transpose(1, 2).reshape(sequences * length, -1, width)
    if table is None:
        return packed
    cos, sin = (t.unsqueeze(1) for t in table)
    sin = -sin if back else sin
    rotated, half = heads + k.shape[1], width // 2
    out = packed.clone()
    a, b = packed[:, :rotated, :half], packed[:, :rotated, half:]
    out[:, :rotated, :half] = a * cos - b * sin
    out[:, :rotated, half:] = b * cos + a * sin
    return out


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
    table: tuple[Tensor, Tensor] | None
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
    table: tuple[Tensor, Tensor] | None,
    kernels: Kernels = "auto",
    lazy_grad: bool = False,
) -> tuple[Tensor, ...]:
    """The packed qkv (sequences * S, heads + 2 * kv_heads, K), or its last two dims merged, as q, k, v (sequences,
    heads or kv_heads, S, K), with q and k rotated by the table's angles: feature i pairs with i + K/2. Without a table
    they are only split.

    Backward packs the three gradients in one pass. With `lazy_grad`, for qkv (T, (heads + 2 * kv_heads) K), it passes a
    lazy tensor (ops.lazy_tensor) to the linear that produced qkv.
    """
    even = prod(qkv.shape[1:]) // (heads + 2 * kv_heads) % 2 == 0  # odd head widths run the reference
    by = ROPE.choose(kernels if even else "plain", qkv)
    return _Rope.apply(qkv, heads, kv_heads, sequences, table, by, lazy_grad)


def table_for(x: Tensor) -> tuple[Tensor, Tensor]:
    """Angles for test cases of qkv (T, heads, K)."""
    return rotary_table(torch.arange(len(x), device=x.device) * 7, inverse_frequencies(x.shape[-1], 100.0), x.dtype)


def _case(heads: int, kv_heads: int, sequences: int, rotate: bool = True) -> Callable[[Tensor, Kernels], Tensor]:
    """The outputs of rope, packed again."""

    def call(x: Tensor, kernels: Kernels) -> Tensor:
        table = table_for(x) if rotate else None
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
        Case("taking heads apart", _case(4, 4, 3, rotate=False), ((6, 12, 8),)),
        Case("rope of 32 heads of 128", _case(32, 8, 1), ((1030, 48, 128),), large=True),
    ),
)
