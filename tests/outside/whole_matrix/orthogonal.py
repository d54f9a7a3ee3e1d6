"""Momentum with orthogonalised updates, as a package of somebody else's has it. It needs the matrices of linears
whole."""

from __future__ import annotations

from dataclasses import dataclass

import phalanx as px


@dataclass(frozen=True, kw_only=True)
class OrthogonalConfig(px.OptimConfig):
    decay: float = 0.95
    """Decay of the momentum."""
    iterations: int = 8
    """Newton-Schulz iterations."""


@px.optimizer("orthogonal_momentum")
class OrthogonalMomentum(px.Optimizer):
    Config = OrthogonalConfig
    owns = "matrix"
    roles = ("linear", "expert")  # the others (embedding, head, norm, bias, router) go to optim.fallback
    state = {"momentum": px.Moment()}

    def update(self, p: px.WholeMatrix) -> None:
        p.momentum.lerp_(p.grad, 1 - self.config.decay)
        x = p.momentum / (p.momentum.norm() + 1e-12)
        for _ in range(self.config.iterations):  # continuous where singular values vanish
            x = 1.5 * x - 0.5 * x @ x.mT @ x
        p.master.mul_(1 - p.lr * p.weight_decay).sub_(p.lr * x)


class EveryMatrix(OrthogonalMomentum):
    """It takes embeddings, heads and routers too."""

    roles = ("linear", "expert", "embedding", "head", "router")


class NoSuchRole(OrthogonalMomentum):
    roles = ("matrices",)
