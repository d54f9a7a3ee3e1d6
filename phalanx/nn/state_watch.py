"""Where the state of a layer with a scan or linear attention first overflows: looked for after a bad step, never in one
that is well."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.sequence.batch import Batch


@dataclass(frozen=True)
class OverflowPlace:
    """sample: its number in the order of the run. document: of those of its sequence, from 0. position: of the token
    whose output is the first that is not finite, inside the document (or the sequence, where attention goes across
    documents). head: of all ranks' heads of values."""

    sample: int
    document: int
    position: int
    head: int


class StateWatch:
    """Looks at what one layer computes of each micro-batch. `found`: the first place whose output is not finite
    although all that the layer read is; None so far. Waits for the device."""

    def __init__(self) -> None:
        self.found: OverflowPlace | None = None

    def look(self, y: Tensor, read: Sequence[Tensor], batch: Batch, first_head: int) -> None:
        """y (B, L, heads, features) of this rank's tokens and heads, of which `first_head` is the first."""
        bad = ~torch.isfinite(y).all(-1).flatten(0, 1)
        if self.found is not None or not bad.any() or not all(torch.isfinite(t).all() for t in read):
            return
        token, head = (int(n) for n in bad.nonzero()[0])
        document = 0
        if batch.documents is not None:
            sequence = token // y.shape[1]
            whole = batch.uncut.documents
            first = batch.documents if whole is None else whole
            document = int(batch.documents[token] - first[sequence * batch.seq_length])
        self.found = OverflowPlace(int(batch.samples[token]), document, int(batch.positions[token]), first_head + head)
