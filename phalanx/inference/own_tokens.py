"""The part of a step that a rank computes: all of its tokens, or its part of them where ranks of context parallelism
share a step."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.sequence.paged import PagedSequences


def own_batch(ids: Tensor, positions: Tensor, real: Tensor | None, paged: PagedSequences, cp: Axis) -> Batch:
    """ids, positions, real (T,) of all tokens of a step, which cp divides -> a batch of T / cp: rank after rank has
    those that follow."""
    tokens = cp.own_rows(ids)
    return Batch(
        tokens=tokens,
        labels=torch.full_like(tokens, IGNORE),
        positions=cp.own_rows(positions),
        samples=torch.zeros_like(tokens),
        num_sequences=1,
        seq_length=len(tokens),
        real=None if real is None else cp.own_rows(real),
        paged=paged,
    )


def own_slots(slots: Tensor, cp: Axis) -> Tensor:
    """slots (T,) in pages that all ranks of cp share -> in this rank's own pages; those of tokens that others remember
    are in NO_PAGE, which is page 0."""
    if cp.size == 1:
        return slots
    return torch.where(slots % cp.size == cp.index, slots // cp.size, 0)
