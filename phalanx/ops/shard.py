"""Shard: what an optimizer updates: this rank's part of one flat bucket, with its state beside it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from phalanx.layout.buckets import Bucket


@dataclass
class Shard:
    """Elements lo..hi of a bucket. master, grad, m and v are (hi - lo,) in the master dtype, m and v perhaps in a
    narrower one; `out` their weights, where those are apart.

    own   the elements that no other rank writes to a checkpoint
    """

    bucket: Bucket
    lo: int
    hi: int
    own: tuple[int, int]
    master: Tensor
    grad: Tensor
    m: Tensor
    v: Tensor
    out: Tensor | None = None
