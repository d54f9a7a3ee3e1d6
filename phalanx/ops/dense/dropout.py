"""Dropout whose mask is a function of counters: the same bits in every layout.

Masks of a block's sites are keyed by (seed, layer, site), those of an adapter's input by the seed and the name of its
matrix; the counter is always (feature, position, sample). The latter are not stored: backward draws them again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.base.dataclass import dataclass
from phalanx.base.rng import keep_columns, keep_mask, key_of
from phalanx.ops.op import Case, Kernels, Op, triton


def dropout_mask(
    p: float,
    seed: int,
    layer: int,
    site: int,
    rows: tuple[Tensor, Tensor],
    features: int,
    dtype: torch.dtype,
    extra: int = 0,
) -> Tensor:
    """(*R, features) factors: 0 with probability p, otherwise 1 / (1 - p). rows = (sample ids, positions), each of
    shape R."""
    return keep_mask(p, seed, layer, site, rows, features, extra).to(dtype).mul_(1.0 / (1.0 - p))


def dropout(
    x: Tensor, p: float, seed: int, layer: int, site: int, rows: tuple[Tensor, Tensor], extra: int = 0
) -> Tensor:
    """x (*R, features) times its `dropout_mask`."""
    return x if p == 0.0 else x * dropout_mask(p, seed, layer, site, rows, x.shape[-1], x.dtype, extra)


@dataclass(frozen=True)
class TokenDropout:
    """Dropout of some features of T tokens.

    p        the probability of 0; what is left is divided by 1 - p
    key      of the random numbers
    samples, positions  (T,) int64 global sample id and place in it of each token
    first    the global number of the first feature
    kernels  implementation
    """

    p: float
    key: tuple[int, int]
    samples: Tensor
    positions: Tensor
    first: int = 0
    kernels: Kernels = "auto"

    @staticmethod
    def of(p: float, seed: int, name: str, rows: tuple[Tensor, Tensor], **more: Any) -> TokenDropout:
        """Of the input of what has this name."""
        return TokenDropout(p, key_of(seed, "dropout", name), *rows, **more)

    def __call__(self, x: Tensor) -> Tensor:
        """x (T, features) -> the same with what is dropped zero; without gradients."""
        dropped: Tensor = DROPOUT.choose(self.kernels, x).drop(x, self)
        return dropped


def drop(x: Tensor, how: TokenDropout) -> Tensor:
    columns = range(how.first, how.first + x.shape[-1])
    keep = keep_columns(how.p, how.key, (how.samples, how.positions), columns)
    return x * keep.to(x.dtype).mul_(1.0 / (1.0 - how.p))


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: TokenDropout) -> Tensor:  # type: ignore[override]
        ctx.how = how
        return how(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.how(dy), None


def token_dropout(x: Tensor, how: TokenDropout) -> Tensor:
    """x (T, features), with gradients, by a mask that is not stored."""
    dropped: Tensor = _Dropout.apply(x, how)
    return dropped


def _case(x: Tensor, kernels: Kernels, first: int = 0, p: float = 0.3) -> Tensor:
    """Of neighbouring tokens of several samples, one of which has a number of more than 32 bits."""
    at = torch.arange(len(x), device=x.device)
    how = TokenDropout.of(p, 7, "case", (at // 3 + ((at // 6) << 33), at % 3), first=first)
    return token_dropout(x, replace(how, kernels=kernels))


DROPOUT = Op(
    "dropout",
    "dropout by counters, of the input of adapters (lora.dropout)",
    __name__,
    ("drop",),
    (triton("phalanx.ops.dense.dropout_kernel"),),
    cases=(
        Case("dropout", _case, ((7, 33),)),
        Case("dropout, from the sixth feature on", lambda x, k: _case(x, k, 6), ((5, 300),)),
        Case("dropout of nearly all", lambda x, k: _case(x, k, 1, 0.97), ((9, 40),)),
        Case("dropout, a layer of 8B", lambda x, k: _case(x, k, 3584), ((1030, 3584),), large=True),
    ),
)
