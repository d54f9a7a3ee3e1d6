"""What a text reads of a stream of units, such as images: each rank of tp x cp computes features of its own units, and
they go where their tokens are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from phalanx.nn.env import Env
from phalanx.ops.experts.exchange import gather
from phalanx.sequence.batch import Batch
from phalanx.sequence.units import feature_index


def unit_rows(name: str, joined: int = 1) -> Callable[[Batch, int], int]:
    """Rows on this rank of a stream (sequence.streams) with one row for `joined` rows of the units."""

    def rows(batch: Batch, tp: int) -> int:
        return batch.beside[name].num_tokens // joined

    return rows


@dataclass(frozen=True)
class Features:
    """Features of a stream of units, and the token of the text that stands for one."""

    stream: str
    token: int

    def put(self, x: Tensor, own: Tensor, batch: Batch, env: Env) -> Tensor:
        """x (T / tp, D) with the features in place of what there is at their tokens. own: (rows, D), the features of
        this rank's units."""
        found, stands = self._at_tokens(own, batch, env)
        return found.to(x.dtype).where(stands, x)

    def add(self, x: Tensor, own: Tensor, batch: Batch, env: Env) -> Tensor:
        """x with the features added at their tokens."""
        found, stands = self._at_tokens(own, batch, env)
        return x + found.to(x.dtype).where(stands, 0)

    def _at_tokens(self, own: Tensor, batch: Batch, env: Env) -> tuple[Tensor, Tensor]:
        """(T / tp, D) the feature of each token of this rank, and whether (T / tp, 1) it stands for one."""
        first, stop = env.cut(batch.num_tokens)
        index = feature_index(batch, self.stream, self.token)[first:stop]
        return gather(own, env.axes.batch_group)[index.clamp(min=0)], (index >= 0).unsqueeze(1)
