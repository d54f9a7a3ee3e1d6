"""An embedding with an adapter: what the adapter makes of the tokens' ids is added to their rows of the frozen matrix.

The matrix is cut over tp by the vocabulary, and so is the one that ids are looked up in, (r, vocabulary); what it gives
is summed and scattered over tp, r features wide. The other, (width, r), is whole on each rank and multiplies its own
tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from phalanx.layout.box import Box
from phalanx.layout.param import Init, ParamSpec, Piece
from phalanx.nn.adapter import Adapter, AdapterInit, LocalLinear, LocalVector
from phalanx.nn.env import Env
from phalanx.nn.initial import ZEROS
from phalanx.nn.linear_method import AnyEmbedding
from phalanx.nn.module import Module, OutputRows, column_spec
from phalanx.nn.parameter import Parameter
from phalanx.ops.dense.embedding import embedding
from phalanx.ops.dense.matmul import local_matmul
from phalanx.ops.dense.rows import ROWS


class EmbeddingAdapterWeight(Module):
    """One of an adapter's matrices; `looked_up`: by ids, else it multiplies. Its weight is made when it has a name."""

    def __init__(self, of: AnyEmbedding, spec: ParamSpec, looked_up: bool):
        super().__init__(of.env)
        self.spec, self.looked_up, self.first, self.count = spec, looked_up, of.first, of.count
        self._weight: Parameter | None = None

    def make(self, name: str) -> None:
        """Make the weight, whose name has no `.weight` at its end, as in PEFT."""
        pieces = tuple(replace(p, name=f"{p.name.removesuffix('.weight')}.{name}") for p in self.spec.pieces)
        self._weight = self.param(replace(self.spec, pieces=pieces))

    @property
    def weight(self) -> Parameter:
        if self._weight is None:
            raise TypeError("what down or up returns must be assigned to an attribute of the adapter")
        return self._weight

    def forward(self, x: Tensor) -> Tensor:
        if self.looked_up:
            return embedding(x, self.weight, self.first, self.count, self.env.tp, self.env.ops.by_config(ROWS))
        return local_matmul(x, self.weight)


class EmbeddingPiece:
    """A phalanx.LinearPiece of an embedding: its inputs are ids, its outputs features."""

    is_embedding = True

    def __init__(self, of: AnyEmbedding):
        (piece,) = of.weight.spec.pieces
        self.of, self.name, (self.inputs, self.outputs) = of, piece.name, piece.shape
        self.made: list[EmbeddingAdapterWeight] = []

    def down(self, rank: int, init: AdapterInit, trained: bool = True) -> LocalLinear:
        """ids -> rank: (rank, vocabulary), stored as the embedding is, with the same padding."""
        of, rows = self.of, self.of.weight.shape[0]
        box = Box((0, of.first), (rank, of.first + of.count))
        local = (slice(0, of.count), slice(0, rank))
        piece = Piece(self.name, (rank, self.inputs), box, local, known(init), transposed=True)
        return self._made(ParamSpec((rows, rank), (piece,), frozen=not trained), looked_up=True)

    def up(self, rank: int, init: AdapterInit, trained: bool = True) -> LocalLinear:
        env: Env = self.of.env
        rows = OutputRows(self.name, self.outputs, 0, self.outputs, env.everyone)
        return self._made(replace(column_spec([rows], rank, known(init)), frozen=not trained), looked_up=False)

    def _made(self, spec: ParamSpec, looked_up: bool) -> EmbeddingAdapterWeight:
        self.made.append(EmbeddingAdapterWeight(self.of, replace(spec, exported=False), looked_up))
        return self.made[-1]

    def per_output(self, init: Init) -> LocalVector:
        raise TypeError(f"{self.name} is an embedding, which has no number for each output")

    @property
    def weight(self) -> Tensor:
        raise TypeError(f"{self.name} is an embedding, whose weight adapters do not read")

    def spread(self, x: Tensor, like: Tensor) -> Tensor:
        return x

    def dropping(self, p: float) -> None:
        """Ids have no dropout, as in PEFT."""
        return None

    def dropout(self, x: Tensor, p: float) -> Tensor:
        return x

    def sum_over_inputs(self, x: Tensor) -> Tensor:
        raise TypeError(f"{self.name} is an embedding, whose weight adapters do not read")


class AdaptedEmbedding(Module):
    """What an adapter adds to the rows that an embedding looks up, unless it is not `on`."""

    def __init__(self, of: AnyEmbedding, method: type[Adapter], config: Any):
        super().__init__(of.env)
        piece = EmbeddingPiece(of)
        self.adapter, self.on = method(piece, config), True
        for name, value in vars(self.adapter).items():
            if isinstance(value, EmbeddingAdapterWeight):
                value.make(name)
        self.first_weight, self.second_weight = piece.made

    def forward(self, rows: Tensor, ids: Tensor) -> Tensor:
        """rows: of the frozen embedding, of this rank's tokens (T / tp, D); ids (T,)."""
        return rows + self.adapter.delta(ids) if self.on else rows


def known(init: AdapterInit) -> Init:
    """kaiming is of the inputs' number, which an embedding's ids are not."""
    if isinstance(init, Init):
        return init
    if init != "zeros":
        raise ValueError(f"init={init!r} is not for embeddings: zeros, or an Init")
    return ZEROS
