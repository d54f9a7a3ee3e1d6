"""How tokens are passed to the ops of scans: as rows of consecutive tokens, or as one token of each sequence whose
state is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass


@dataclass(frozen=True)
class TokenRows:
    """R rows of L consecutive tokens each.

    numbers  (R, L) int64: the document of each token; None: each row is part of one
    before   (R, K - 1, C): the tokens before each row, zero where they belong to another document than its first token;
             None: nothing comes before
    """

    numbers: Tensor | None = None
    before: Tensor | None = None


WHOLE_ROWS = TokenRows()


@dataclass(frozen=True)
class StateSlots:
    """What is kept of S sequences, one token of each of which comes.

    kept   (slots, ...): updated in place
    slots  (S,) int64: where each sequence's is; they differ
    fresh  (S,) bool: which sequences begin here; None: none
    """

    kept: Tensor
    slots: Tensor
    fresh: Tensor | None = None

    def old(self) -> Tensor:
        """(S, ...): what each sequence goes on from."""
        found = self.kept[self.slots]
        if self.fresh is None:
            return found
        return torch.where(self.fresh.view(-1, *(1,) * (found.dim() - 1)), 0, found)

    def set(self, new: Tensor) -> None:
        self.kept[self.slots] = new.to(self.kept.dtype)


def documents_of(x: Tensor) -> Tensor:
    """For cases of ops: documents of 1, 2, 3 ... tokens, one after another, over the borders of rows x (R, L, ...)."""
    at = torch.arange(x.shape[0] * x.shape[1], device=x.device)
    return ((torch.sqrt(8.0 * at + 1) - 1) / 2).long().view(x.shape[:2])
