"""Which sequence of which group (pair) each token of a micro-batch belongs to, and sums over groups."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.comm.axis import Axis
from phalanx.sequence.batch import Batch, PerBatch

SLOTS = PerBatch[tuple[Tensor, Tensor]]()


@dataclass(frozen=True)
class SequenceGroups:
    """The groups of a micro-batch, or of a context-parallel rank's shard of it: at most P groups of n sequences.

    slot     (T,) number of each token's sequence, group by group; P * n: it belongs to none
    there    (P,) whether the group exists: all of its sequences have labels
    counts   whether sums over groups are computed on this rank: on one of the ranks that share them
    """

    slot: Tensor
    there: Tensor
    size: int
    counts: bool

    @property
    def count(self) -> Tensor:
        """() number of groups that exist, on the rank that counts them."""
        return self.total(self.there)

    def total(self, values: Tensor) -> Tensor:
        """() sum of values (P,) over the groups that exist; 0 on ranks that do not count them."""
        total = torch.where(self.there, values, 0).sum()
        return total if self.counts else torch.zeros_like(total)

    def sums(self, values: Tensor, cp: Axis) -> Tensor:
        """values (T,) -> (P, n) float64 sums over each sequence's tokens, including those on other cp ranks."""
        sums = values.new_zeros(len(self.there) * self.size + 1, dtype=torch.float64)
        sums.index_put_((self.slot,), values.double(), accumulate=True)  # in a fixed order on GPUs too
        return cp.all_reduce(sums[:-1]).wait().view(-1, self.size)

    def of_tokens(self, values: Tensor) -> Tensor:
        """values (P, n) -> (T,) the value of each token's sequence; 0 if it belongs to no existing group."""
        known = torch.where(self.there.unsqueeze(1), values, 0).flatten()
        return torch.cat((known, known.new_zeros(1)))[self.slot]


def groups_of(batch: Batch, size: int) -> SequenceGroups:
    """Groups of `size` consecutive documents in a sequence of the batch."""
    slot, there = SLOTS.of(batch, lambda: _slots(batch, size), size)
    return SequenceGroups(slot, there, size, batch.part.index == 0)


def _slots(batch: Batch, size: int) -> tuple[Tensor, Tensor]:
    """`slot` and `there` of SequenceGroups."""
    whole = batch.uncut
    if whole.documents is None:
        raise ValueError("an objective over sequences needs documents: data.document_attention=true")
    documents = whole.documents.view(whole.num_sequences, whole.seq_length)
    begins = torch.ones_like(documents)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    number = begins.cumsum(1) - 1  # of each token's document in its sequence
    room = max(1, min(whole.room_for_documents, whole.seq_length) // size) * size  # documents of a sequence
    first = torch.arange(whole.num_sequences, device=documents.device).unsqueeze(1) * room
    none = whole.num_sequences * room
    slot = torch.where(number < room, number + first, none).flatten()
    labels = torch.zeros(none + 1, dtype=torch.float64, device=documents.device)
    labels.index_put_((slot,), whole.labelled.double(), accumulate=True)
    there = (labels[:-1].view(-1, size) > 0).all(1)
    return (slot if batch.whole is None else batch.take(slot)), there
