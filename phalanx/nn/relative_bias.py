"""The table of a relative position bias: a number for each bucket of distances and each head, which the layers of a
stack share (Raffel et al., "T5", 2020)."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.base.dataclass import dataclass
from phalanx.layout.box import Box
from phalanx.layout.param import ParamSpec, Piece, Replica
from phalanx.nn.env import Env
from phalanx.nn.initial import Normal
from phalanx.nn.module import Module
from phalanx.nn.parameter import Parameter
from phalanx.ops.attention.kind import RelativeBias


@dataclass(frozen=True)
class BiasSpec:
    """name: global, of the table in the first layer; heads: of the whole layer; bias: how distances fall into buckets;
    std: of the initial values."""

    name: str
    heads: int
    bias: RelativeBias
    std: float


class RelativeBiasTable(Module):
    """(buckets, heads), sharded over tp by heads. Each layer of a stack makes one, and all of them hold one parameter.

    replicas  the pipeline ranks that hold it (Env.shared)
    made      parameters of the blocks on this rank by global name; its own may be among them
    """

    def __init__(
        self,
        env: Env,
        spec: BiasSpec,
        replicas: tuple[Replica, ...] = (),
        made: Mapping[str, Parameter] | None = None,
    ):
        super().__init__(env)
        self.bias = spec.bias
        (first, last), buckets = env.cut(spec.heads), spec.bias.buckets
        box = Box((0, first), (buckets, last))
        local = (slice(0, buckets), slice(0, last - first))
        init = Normal(spec.std)
        piece = Piece(spec.name, (buckets, spec.heads), box, local, init, decay=False, replicas=replicas)
        found = (made or {}).get(spec.name)
        self.weight = self.param(ParamSpec((buckets, last - first), (piece,), role="bias")) if found is None else found
