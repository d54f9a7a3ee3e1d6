"""Muon: momentum whose update is orthogonalised, matrix by matrix (Jordan et al., "Muon", 2024). Queries, keys and
values, gates and ups, and each expert are matrices of their own. All that is no matrix of a linear goes to
optim.fallback.

A matrix U S V^T becomes nearly U V^T by odd polynomials a x + b x^3 + c x^5 of its singular values, which products of
matrices compute. The coefficients are data: five times the same (Jordan), or others in each iteration, each the best
for what the one before it left (Amsel et al., "The Polar Express", 2025).

Torch is not imported here, so that a config can be read without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from phalanx.base.errors import Problem
from phalanx.base.rules import problem, within
from phalanx.ops.optimizer.state import Moment
from phalanx.optim.config import OptimConfig
from phalanx.optim.optimizer import Optimizer, WholeMatrix, optimizer

if TYPE_CHECKING:  # importing torch takes seconds
    from torch import Tensor

Polynomial = tuple[float, float, float]

JORDAN: Polynomial = (3.4445, -4.7750, 2.0315)
SAFETY = 1.01  # Polar Express divides singular values by it before each polynomial, so that rounding is no overflow
# for singular values from 0.001 to 1; the last one is repeated
EXPRESS: tuple[Polynomial, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
POLYNOMIALS = MappingProxyType(
    {
        "jordan": (JORDAN,),
        "polar_express": (*((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in EXPRESS[:-1]), EXPRESS[-1]),
    }
)
LEAST = 1e-7  # a matrix of zeros is divided by this
MATCHED = 0.2  # root mean square of AdamW's updates, as Moonlight measured it


@dataclass(frozen=True, kw_only=True)
class MuonConfig(OptimConfig):
    momentum: float = 0.95
    """Decay of the momentum, in [0, 1)."""
    nesterov: bool = True
    """The update is made of the gradient and the momentum, not of the momentum alone."""
    adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """What the learning rate of a matrix (rows, columns) is multiplied by. match_rms_adamw: 0.2 sqrt(max(rows,
    columns)), which makes updates as large as AdamW's, so that one rate and decay serve all tensors (Liu et al., "Muon
    is scalable for LLM training", 2025); original: sqrt(max(1, rows / columns)), whose rates are not AdamW's, so that
    optim.fallback.lr must be given."""
    coefficients: Literal["jordan", "polar_express"] = "jordan"
    """By which polynomials singular values are brought near 1: jordan, one that is repeated and leaves them between
    about 0.7 and 1.2; polar_express, each the best for what the one before it left."""
    iterations: int = 5
    """Polynomials that are applied."""
    products: Literal["bf16", "master"] = "bf16"
    """Dtype in which the update is orthogonalised: bf16, as is usual, or that of the masters. In fp64 runs it is
    fp64."""


@optimizer("muon")
class Muon(Optimizer):
    Config = MuonConfig
    owns = "matrix"
    roles = ("linear", "expert")
    state = {"momentum": Moment()}

    def update(self, p: WholeMatrix) -> None:
        c = self.config
        p.momentum.lerp_(p.grad, 1 - c.momentum)
        direction = p.grad.lerp(p.momentum, c.momentum) if c.nesterov else p.momentum
        update = orthogonalized(direction, POLYNOMIALS[c.coefficients], c.iterations, c.products)
        p.master.mul_(1 - p.lr * p.weight_decay).add_(update, alpha=-p.lr * factor_of(p.master, c.adjust))

    @classmethod
    def check(cls, config: Any) -> list[Problem]:
        c = config
        found = within("optim", c, "momentum", "[0, 1)") + within("optim", c, "iterations", "[1, 100)")
        if c.adjust == "original" and c.fallback is not None and c.fallback.lr == c.lr:
            rule = "must be given with optim.adjust=original, whose learning rates are not those of other optimizers"
            because = {"optim.lr": c.lr, "optim.adjust": c.adjust}
            usual = next(rate for rate in (OptimConfig.lr, 1e-4) if rate != c.lr)
            found.append(problem("optim.fallback", c.fallback, "lr", rule, because, (usual,)))
        return found


def factor_of(matrix: Tensor, adjust: Literal["match_rms_adamw", "original"]) -> float:
    """What the learning rate of a matrix is multiplied by."""
    rows, columns = matrix.shape
    return MATCHED * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else math.sqrt(max(1, rows / columns))


def orthogonalized(
    matrix: Tensor, polynomials: tuple[Polynomial, ...], iterations: int, products: Literal["bf16", "master"]
) -> Tensor:
    """The matrix with its singular values near 1, in its dtype. The first polynomials are applied once each, the last
    one until there were so many iterations."""
    import torch  # start-up time: see above

    narrow = products == "bf16" and matrix.dtype != torch.float64
    x = matrix.bfloat16() if narrow else matrix
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x  # the square of scores is that of the shorter side
    x = x / x.norm().clamp(min=LEAST)
    for number in range(iterations):
        a, b, c = polynomials[min(number, len(polynomials) - 1)]
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrix.dtype)
