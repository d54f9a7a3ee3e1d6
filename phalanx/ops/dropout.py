"""Dropout whose mask is a function of (seed, sample, position, layer, site, feature): the same bits in every layout."""

from __future__ import annotations

from torch import Tensor

from phalanx.base.rng import keep_mask


def dropout(x: Tensor, p: float, seed: int, layer: int, site: int, rows: tuple[Tensor, Tensor], extra: int = 0) -> Tensor:
    """x (*R, features) with each element zeroed with probability p and the rest scaled by 1 / (1 - p).

    rows = (sample ids, positions), each of shape R. Recomputed in backward only as autograd's mask product.
    """
    if p == 0.0:
        return x
    keep = keep_mask(p, seed, layer, site, rows, x.shape[-1], extra)
    return x * keep.to(x.dtype).mul_(1.0 / (1.0 - p))
