"""A method of adapters from outside the package: y = W x + scale * B gelu(A x) (the parallel adapter of He et al.,
"Towards a unified view of parameter-efficient transfer learning", 2022), which no merged matrix can stand for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import gelu

import phalanx as px


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    width: int = 4
    scale: float = 4.0


@px.adapter("parallel")
class Parallel(px.Adapter):
    Config = ParallelConfig

    def __init__(self, piece: px.LinearPiece, config: ParallelConfig):
        super().__init__(piece, config)
        self.enter = self.down(piece, config.width)
        self.leave = self.up(piece, config.width)

    def delta(self, x: Tensor) -> Tensor:
        return self.leave(gelu(self.enter(x))) * self.config.scale


class Unfinished(px.Adapter):
    """It does not say what is added."""


class Elsewhere:
    """It is no adapter."""

    Config = ParallelConfig

    def delta(self, x: Tensor) -> Tensor:
        return x
