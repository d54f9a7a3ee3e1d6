"""What a text reads of a stream of units, such as images. Each rank computes features of its own units, and they go
where their tokens are: first to the replica whose text has them, where several replicas compute them
(layout.media_group), then to all of its ranks of tp x cp."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.comm.axis import Axis
from phalanx.nn.env import Env
from phalanx.ops.experts.exchange import gather, swap
from phalanx.sequence.batch import Batch
from phalanx.sequence.unit_route import UnitRoute
from phalanx.sequence.units import feature_index


@dataclass(frozen=True)
class UnitRows:
    """Rows on this rank of a stream (sequence.streams) with one row for `joined` rows of the units: other numbers in
    each micro-batch."""

    name: str
    joined: int = 1

    def __call__(self, batch: Batch, tp: int) -> int:
        return batch.beside[self.name].num_tokens // self.joined


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
        units = batch.beside[self.stream].units
        if units is not None and units.route is not None:
            own = routed(own, units.route, env.axes.media)
        return gather(own, env.axes.batch_group)[index.clamp(min=0)], (index >= 0).unsqueeze(1)


def routed(own: Tensor, route: UnitRoute, axis: Axis) -> Tensor:
    """own (rows, D), the features of the units that this rank computes -> (share, D) those of its share of its own
    text's, whoever has computed them. Gradients go back the same way."""
    found = swap(own[route.rows], axis, [*route.send], [*route.receive])
    return torch.cat([found, found.new_zeros(1, found.shape[1])])[route.order]
