"""The one batch type: flat tokens of one micro-batch, with document boundaries beside them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

IGNORE = -100  # label of a token that has no loss, as in torch's cross entropy


@dataclass(frozen=True)
class Batch:
    """One micro-batch. T = num_sequences * seq_length tokens, in sequence order.

    tokens     (T,) int64  input ids
    labels     (T,) int64  the next token of each, or IGNORE
    positions  (T,) int64  position inside the sequence (or inside the document, when attention stays inside documents)
    samples    (T,) int64  global sample id of each token: a key of dropout, the same in every layout
    documents  (T,) int64  number of the document that each token belongs to, or None: attention then spans the sequence
    The last two ints are host facts: whether a batch is uniform is never read from the device.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    samples: Tensor
    num_sequences: int
    seq_length: int
    documents: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.seq_length

    def to(self, device: torch.device | str) -> Batch:
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {k: v.to(device, non_blocking=True) for k, v in moved.items() if isinstance(v, Tensor)}
        return replace(self, **moved)
