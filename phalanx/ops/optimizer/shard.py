"""Shard: what an optimizer updates: this rank's part of one flat bucket, with its state beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.layout.buckets import Bucket
from phalanx.ops.optimizer.moments import Narrow


@dataclass
class Shard:
    """Elements lo..hi of a bucket. master, grad, m and v are (hi - lo,) in the master dtype, m and v perhaps in a
    narrower one, or in 8 bits; `out` their weights, where those are apart.

    own   the elements that no other rank writes to a checkpoint
    """

    bucket: Bucket
    lo: int
    hi: int
    own: tuple[int, int]
    master: Tensor
    grad: Tensor
    m: Tensor | Narrow
    v: Tensor | Narrow
    out: Tensor | None = None

    def values(self, kind: str) -> Tensor:
        """`master`, `m` or `v` (hi - lo,): itself, or of what is kept in 8 bits the numbers, exact in bf16."""
        kept: Tensor | Narrow = getattr(self, kind)
        return kept.wide(torch.bfloat16) if isinstance(kept, Narrow) else kept

    def keep(self, kind: str, values: Tensor) -> None:
        """Take `values` that were filled in."""
        kept: Tensor | Narrow = getattr(self, kind)
        if isinstance(kept, Narrow):
            kept.store_(values)

    @property
    def moments(self) -> list[Tensor]:
        """What holds m and v."""
        return [t for kept in (self.m, self.v) for t in (kept.tensors if isinstance(kept, Narrow) else (kept,))]
