"""Muon: momentum whose update is orthogonalised, matrix by matrix (Jordan et al., "Muon", 2024). Queries, keys and
values, gates and ups, and each expert are matrices of their own. All that is no matrix of a linear goes to
optim.fallback.

How is in ops.optimizer.orthogonal. The coefficients of the polynomials are data: five times the same (Jordan), or
others in each iteration, each the best for what the one before it left (Amsel et al., "The Polar Express", 2025).

Torch is not imported here, so that a config can be read without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import problem, within
from phalanx.layout.param import LogicalMatrix, ParamSpec
from phalanx.ops.optimizer.state import Moment
from phalanx.optim.config import OptimConfig
from phalanx.optim.optimizer import MatrixOptimizer, StepScalars, StoredMatrix, WholeMatrix, check_decays, optimizer

if TYPE_CHECKING:  # importing torch takes seconds
    from torch import Tensor

    from phalanx.ops.op import Kernels

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
MATCHED = 0.2  # root mean square of AdamW's updates, as Moonlight measured it
PASSES = 6000.0
"""FLOPs of matmuls that take as long as the passes over memory for one element, on an H100 in bf16."""


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
    per_head: bool = False
    """Queries, keys and values of each head of attention are matrices of their own, instead of those of all heads."""
    products: Literal["bf16", "master"] = "bf16"
    """Precision in which the update is orthogonalised. bf16: products of 16 bits, as is usual (of fp16, which rounds
    less; in fp32 on CPUs, which multiply fp16 slowly); master: in the masters' dtype. In fp64 runs it is fp64."""


@optimizer("muon")
class Muon(MatrixOptimizer):
    Config = MuonConfig
    roles = ("linear", "expert")
    state = {"momentum": Moment()}
    op = "symmetric"

    def update_matrices(self, matrices: Sequence[WholeMatrix], kernels: Kernels) -> None:
        import torch  # start-up time: see above

        c, first = self.config, matrices[0]
        for p in matrices:
            p.momentum.lerp_(p.grad, 1 - c.momentum)
        directions = torch.stack([p.grad.lerp(p.momentum, c.momentum) if c.nesterov else p.momentum for p in matrices])
        updates = self._updates(directions, first.logical or (whole(first.master.shape),), kernels)
        for p, update in zip(matrices, updates):
            p.master.mul_(1 - p.lr * p.weight_decay).add_(update, alpha=-p.lr)

    def update_stored(self, matrices: Sequence[StoredMatrix], scalars: StepScalars, kernels: Kernels) -> bool:
        import torch  # start-up time: see above

        from phalanx.ops.optimizer.directions import MatrixRange, MomentumOptions, apply_, directions_

        c, first = self.config, matrices[0]
        stored: list[Any] = [m.stored for m in matrices]
        if not all(isinstance(t, torch.Tensor) for s in stored for t in (s.master, s.state["momentum"])):
            return False  # packed
        options, cut = MomentumOptions(c.momentum, c.nesterov), slice(0, math.prod(first.shape))  # without padding
        parts = [MatrixRange(s.master, s.grad, s.state["momentum"], s.out) for s in (each[cut] for each in stored)]
        grad = parts[0].grad
        narrow = torch.bfloat16 if self._narrow(grad) else None  # what the first product reads anyway
        directions = torch.empty(len(parts), *first.shape, dtype=narrow or grad.dtype, device=grad.device)
        for part, to in zip(parts, directions):
            directions_(part, to.view(-1), options, scalars.factor, scalars.skip, kernels)
        updates = self._updates(directions, first.logical or (whole(first.shape),), kernels)
        for part, update in zip(parts, updates):
            apply_(part, update.view(-1), (first.lr, first.weight_decay), scalars.skip, kernels)
        return True

    def _updates(self, directions: Tensor, logical: tuple[LogicalMatrix, ...], kernels: Kernels) -> Tensor:
        """(B, rows, columns) -> the same orthogonalised and scaled, each logical matrix by itself; in the dtype of the
        products, if all have one."""
        import torch  # start-up time: see above

        from phalanx.ops.optimizer.orthogonal import orthogonalized

        found, polynomials = list[torch.Tensor](), polynomials_of(self.config.coefficients, self.config.iterations)
        together = side_by_side(logical)
        for matrix in together:
            outputs = directions.mT if matrix.dim else directions
            parts = [outputs[:, start:stop:step] for start, stop, step in matrix.ranges]
            stacked = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            shape = self._shape(matrix)
            alone, scale = stacked.reshape(-1, *shape), factor_of(shape, self.config.adjust)
            made = orthogonalized(alone, polynomials, self._narrow(directions), kernels, scale)
            found.append(made.view(stacked.shape))
        if len(found) == 1 and not together[0].dim and found[0].shape == directions.shape:
            return found[0]
        dtypes = {made.dtype for made in found}
        updates = torch.empty_like(directions, dtype=dtypes.pop() if len(dtypes) == 1 else torch.float32)
        for matrix, made in zip(together, found):
            into, at = updates.mT if matrix.dim else updates, 0
            for one in matrix.ranges:
                count = len(range(*one))
                into[:, slice(*one)] = made[:, at : at + count]
                at += count
        return updates

    def _narrow(self, values: Tensor) -> bool:
        """Whether products have 16 bits."""
        return self.config.products == "bf16" and values.element_size() < 8

    def _shape(self, matrix: LogicalMatrix) -> tuple[int, int]:
        """(outputs, inputs) of what is orthogonalised as one."""
        outputs, inputs = matrix.shape
        return (matrix.head if self.config.per_head and matrix.head else outputs, inputs)

    def flops(self, matrix: ParamSpec) -> float:
        from phalanx.ops.optimizer.orthogonal import flops  # start-up time: it imports torch

        shapes = [(self._shape(each), each.shape[0]) for each in matrix.logical]
        return sum(
            outputs // rows * flops(rows, columns, self.config.iterations) for (rows, columns), outputs in shapes
        )

    def cost(self, matrix: ParamSpec) -> float:
        return PASSES * math.prod(matrix.shape) + self.flops(matrix)

    @classmethod
    def check(cls, config: Any) -> list[Problem]:
        c = config
        found = within("optim", c, "momentum", "[0, 1)") + within("optim", c, "iterations", "[1, 100)")
        found += check_decays(c, "momentum")
        if c.adjust == "original" and c.fallback is not None and c.fallback.lr == c.lr:
            rule = (
                "must be given with optim.adjust=original, and not be that of optim, whose learning rates are then not "
                "those of other optimizers"
            )
            because = {"optim.lr": c.lr, "optim.adjust": c.adjust}
            usual = next(rate for rate in (OptimConfig.lr, 1e-4) if rate != c.lr)
            found.append(problem("optim.fallback", c.fallback, "lr", rule, because, (usual,)))
        return found


def side_by_side(logical: Sequence[LogicalMatrix]) -> list[LogicalMatrix]:
    """Those of one shape as one, whose outputs are theirs one after the other: they are orthogonalised in one stack."""
    alike = dict[tuple[int, tuple[int, int], int], list[tuple[int, int, int]]]()
    for matrix in logical:
        ranges = alike.setdefault((matrix.dim, matrix.shape, matrix.head), [])
        for start, stop, step in matrix.ranges:
            if ranges and ranges[-1][1:] == (start, 1) and step == 1:
                ranges[-1] = ranges[-1][0], stop, 1
            else:
                ranges.append((start, stop, step))
    return [LogicalMatrix(dim, tuple(ranges), shape, head) for (dim, shape, head), ranges in alike.items()]


def whole(shape: Sequence[int]) -> LogicalMatrix:
    """All rows of a matrix of linears, as outputs."""
    rows, columns = shape
    return LogicalMatrix(0, ((0, rows, 1),), (rows, columns))


def factor_of(shape: Sequence[int], adjust: Literal["match_rms_adamw", "original"]) -> float:
    """What the learning rate of a matrix (outputs, inputs) is multiplied by."""
    rows, columns = shape
    return MATCHED * math.sqrt(max(rows, columns)) if adjust == "match_rms_adamw" else math.sqrt(max(1, rows / columns))


def polynomials_of(coefficients: str, iterations: int) -> list[Polynomial]:
    """As many as there are iterations: each is applied once, the last one until the end."""
    given = POLYNOMIALS[coefficients]
    return [given[min(number, len(given) - 1)] for number in range(iterations)]
