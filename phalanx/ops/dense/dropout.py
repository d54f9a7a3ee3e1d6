"""Dropout whose mask is a function of (seed, sample, position, layer, site, feature): the same bits in every layout."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.base.rng import keep_mask


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
