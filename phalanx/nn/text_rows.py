"""Which text each document of a micro-batch is, and to which query it belongs, for objectives over embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.sequence.batch import Batch, PerBatch
from phalanx.sequence.sample import POSITIVE, QUERY, Pooling

ROWS = PerBatch[tuple[Tensor, Tensor]]()
WEIGHTS = PerBatch[Tensor]()


@dataclass(frozen=True)
class TextRows:
    """The documents of a micro-batch, a row for each.

    role, query   (R,) int64, as in nn.objective.StepTexts; the rows of queries are counted inside the micro-batch
    counts        whether sums over texts are computed on this rank: on one of the ranks that share them
    """

    role: Tensor
    query: Tensor
    counts: bool

    @property
    def count(self) -> Tensor:
        """() number of queries with their positive, on the rank that counts them."""
        found = ((self.role == QUERY) & (self.query >= 0)).sum()
        return found if self.counts else torch.zeros_like(found)


def text_rows(batch: Batch) -> TextRows:
    """The texts of a micro-batch, whole ones also where this rank has a shard of each."""
    role, query = ROWS.of(batch, lambda: _rows(batch.uncut))
    return TextRows(role, query, batch.part.index == 0)


def num_rows(batch: Batch) -> int:
    """R, known on the host: an upper bound on the documents of the micro-batch."""
    return min(batch.room_for_documents, batch.all_tokens)


def _rows(whole: Batch) -> tuple[Tensor, Tensor]:
    if whole.documents is None:
        raise ValueError("an objective over embeddings needs documents: data.document_attention=true")
    documents, rows = whole.documents, num_rows(whole)
    places = torch.arange(whole.num_tokens, device=documents.device)
    none = torch.full((rows,), -1, dtype=torch.int64, device=documents.device)
    role = none.scatter_reduce(0, documents, torch.where(whole.labelled, whole.labels, -1), "amax")
    sequence = none.scatter_reduce(0, documents, places // whole.seq_length, "amax")
    here = torch.arange(rows, device=documents.device)
    last = torch.where(role == QUERY, here, -1).cummax(0).values  # the last query up to here, if in the same sequence
    belongs = (role >= 0) & (last >= 0) & (sequence[last.clamp(min=0)] == sequence)
    query = torch.where(belongs, last, -1)
    complete = torch.zeros_like(none).scatter_reduce(
        0, query.clamp(min=0), ((role == POSITIVE) & belongs).long(), "amax"
    )
    return role, torch.where(belongs & (complete[query.clamp(min=0)] > 0), query, -1)


def pooling_weights(batch: Batch, pooling: Pooling) -> Tensor:
    """(T,) float64: with what weight the hidden state of each token of this shard enters its document's embedding."""
    return WEIGHTS.of(batch, lambda: _weights(batch, pooling), pooling)


def _weights(batch: Batch, pooling: Pooling) -> Tensor:
    whole = batch.uncut
    documents = whole.documents
    if documents is None:
        raise ValueError("an objective over embeddings needs documents: data.document_attention=true")
    if pooling == "mean":
        ones = torch.ones(len(documents), dtype=torch.float64, device=documents.device)
        sizes = torch.zeros(num_rows(whole), dtype=torch.float64, device=documents.device)
        found = 1 / sizes.index_put_((documents,), ones, accumulate=True)[documents]
    else:
        border = torch.ones(len(documents), dtype=torch.float64, device=documents.device)
        changes = (documents[1:] != documents[:-1]).double()
        if pooling == "first":
            border[1:] = changes
        else:
            border[:-1] = changes
        found = border
    return found if batch.whole is None else batch.take(found)
