"""A head with an adapter: what the adapter's first matrix makes of a token goes into the head beside the token, as more
features, and its second matrix is more columns of the head's (ops.dense.cross_entropy.HeadMatrix).

So the logits are computed and freed chunk by chunk, as without an adapter. The head is cut over tp by the vocabulary,
and so is the second matrix; the first is whole on each rank and multiplies its own tokens. One gather over tp brings
both.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from phalanx.nn.adapter import LinearPiece, LowRankAdapter, LowRankTerm
from phalanx.nn.module import Module
from phalanx.ops.dense.cross_entropy import HeadMatrix


class MadePiece(LinearPiece, Protocol):
    """A matrix whose adapter has been made, and its modules."""

    @property
    def made(self) -> list[Any]: ...


class AdaptedHead(Module):
    """What an adapter adds to the logits of a head, unless it is not `on`."""

    def __init__(self, env: Any, piece: MadePiece, adapter: LowRankAdapter):
        super().__init__(env)
        self.piece, self.adapter, self.on = piece, adapter, True
        self.linears = nn.ModuleList(piece.made)

    def enter(self, x: Tensor) -> Tensor:
        """x (T / tp, D) -> (T / tp, D + r)."""
        if not self.on:
            return x
        term = self._term
        h = term.down(self.piece.dropout(x, term.dropout)) * term.scale
        return torch.cat((x, h.to(x.dtype)), -1)

    def matrix(self, weight: Tensor) -> HeadMatrix:
        return HeadMatrix(weight, self._term.up.weight if self.on else None)

    @property
    def _term(self) -> LowRankTerm:
        (term,) = self.adapter.terms()
        return term
