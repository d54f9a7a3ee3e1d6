"""The input embedding, sharded over tp by vocabulary, and how many of its rows a rank holds."""

from __future__ import annotations

from torch import Tensor

from phalanx.layout.box import Box, cut
from phalanx.layout.param import Init, ParamSpec, Piece, Replica, Role
from phalanx.nn.env import Env
from phalanx.nn.initial import ZEROS, Normal
from phalanx.nn.module import Module
from phalanx.nn.parameter import Parameter
from phalanx.ops.dense.embedding import embedding
from phalanx.ops.dense.rows import ROWS

ROW_MULTIPLE = 64  # rows of storage are padded to a multiple of this, so that GEMMs over the vocabulary stay aligned


def vocabulary_rows(env: Env, vocab: int) -> int:
    """Rows of storage of each rank, padding included."""
    return -(-cut(vocab, env.grid.tp)[0][1] // ROW_MULTIPLE) * ROW_MULTIPLE


def vocabulary_spec(
    env: Env,
    name: str,
    vocab: int,
    width: int,
    init: Init,
    replicas: tuple[Replica, ...] = (),
    role: Role = "embedding",
) -> ParamSpec:
    """Storage (padded rows, width) for this rank's rows of a (vocab, width) matrix. Every rank has the same number of
    rows."""
    first, stop = env.cut(vocab)
    rows = vocabulary_rows(env, vocab)
    piece = Piece(
        name,
        (vocab, width),
        Box((first, 0), (stop, width)),
        (slice(0, stop - first), slice(0, width)),
        init,
        True,
        False,
        replicas,
    )
    return ParamSpec((rows, width), (piece,), role=role)


def vocabulary_bias_spec(env: Env, name: str, vocab: int) -> ParamSpec:
    """A number for each row of `vocabulary_spec`; no weight decay."""
    first, stop = env.cut(vocab)
    rows = vocabulary_rows(env, vocab)
    piece = Piece(name, (vocab,), Box((first,), (stop,)), (slice(0, stop - first),), ZEROS, False)
    return ParamSpec((rows,), (piece,), role="bias")


class Embedding(Module):
    """`weight` may be passed in: the weight of another block on this rank that reads the same matrix."""

    def __init__(
        self,
        env: Env,
        name: str,
        vocab: int,
        width: int,
        std: float,
        replicas: tuple[Replica, ...] = (),
        weight: Parameter | None = None,
    ):
        super().__init__(env)
        first, stop = env.cut(vocab)
        self.first, self.count = first, stop - first
        self.weight = (
            weight
            if weight is not None
            else self.param(vocabulary_spec(env, name, vocab, width, Normal(std), replicas))
        )
        linears = env.weights.linears
        self.rows = None if linears is None or weight is not None else linears.rows_of(self)

    def forward(self, ids: Tensor) -> Tensor:
        """ids (T,) of the whole micro-batch -> this rank's tokens (T / tp, D)."""
        rows = embedding(ids, self.weight, self.first, self.count, self.env.tp, self.env.ops.by_config(ROWS))
        return rows if self.rows is None else self.rows(rows, ids)
