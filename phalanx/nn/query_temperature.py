"""The temperature of queries by position: attention stays sharp in sequences longer than those trained on."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.sequence.batch import Batch, PerBatch

FACTORS = PerBatch[Tensor]()


@dataclass(frozen=True)
class QueryTemperature:
    """A query at position p is multiplied by 1 + scale * log(1 + floor((p + 1) / step)) before it attends (Meta,
    "Llama 4", 2025; Nakanishi, "Scalable-Softmax is superior for attention", 2025).

    step   positions that have the same factor, the first of them 1
    scale  how fast it grows
    """

    step: float
    scale: float

    def __post_init__(self) -> None:
        if self.step <= 0:
            raise ValueError(f"a temperature that grows every {self.step} positions: the step must be positive")

    def applied(self, q: Tensor, batch: Batch) -> Tensor:
        """q (sequences, heads, S, K), multiplied in at least fp32."""
        dtype = torch.promote_types(q.dtype, torch.float32)
        factors = FACTORS.of(batch, lambda: self.factors(batch.positions).to(dtype), self, dtype)
        return (q * factors.view(len(q), 1, -1, 1)).to(q.dtype)

    def factors(self, positions: Tensor) -> Tensor:
        """Of positions (T,), in float64."""
        return 1 + self.scale * torch.log1p(((positions.double() + 1) / self.step).floor())
