"""Env: what a module must know about its rank to build itself: coordinates, the tensor-parallel axis, dtype. It needs
no process groups."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import field, replace
from fnmatch import fnmatchcase

import torch

from phalanx.base.dataclass import dataclass
from phalanx.comm.axis import Axis, ModelAxes
from phalanx.layout.box import cut
from phalanx.layout.grid import Coords, Grid
from phalanx.layout.param import ParamSpec, Replica
from phalanx.nn.linear_method import LinearMethods
from phalanx.nn.objective import Objective, pretraining
from phalanx.nn.recompute import Recompute
from phalanx.ops.attention.context import Form
from phalanx.ops.dense.grads import GradientQueue
from phalanx.ops.experts.exchange import Dispatch
from phalanx.ops.op import Kernels, NotInvariant, Op


@dataclass(frozen=True)
class WeightRules:
    """How parameters are created.

    dtype         of the weights used in computation
    stages        the pipeline rank of each block
    mtp_stage     the rank of multi-token prediction, which shares weights with both; None: the model has none
    linears       chooses the method of each linear; None: all are plain
    freeze        globs of names that are frozen (train.freeze; with adapters, all); also: of those among them that are
                  trained all the same (lora.also)
    copies        other ranks that hold all that is built (Env.whole)
    gradients     the queue that weight gradients go through
    """

    dtype: torch.dtype = torch.float32
    stages: tuple[int, ...] = (0,)
    mtp_stage: int | None = None
    linears: LinearMethods | None = None
    freeze: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    copies: tuple[Replica, ...] = ()
    gradients: GradientQueue = field(default_factory=GradientQueue, compare=False, repr=False)

    @property
    def tied_stages(self) -> tuple[int, int]:
        """The pipeline ranks that hold the input embedding and the head."""
        return self.stages[0], self.stages[-1]


@dataclass(frozen=True)
class OpChoices:
    """Which implementations modules ask for. `plain_ops`: ops that run their reference whatever `kernels` says;
    `batch_invariant`: those whose rows have the same bits in any batch and at any tp, or none; `dispatch`,
    `expert_room` and `sources` are those of ops.experts.exchange."""

    kernels: Kernels = "auto"
    plain_ops: tuple[str, ...] = ()
    batch_invariant: bool = False
    dispatch: Dispatch = "alltoall"
    expert_room: float = math.inf
    sources: int = 0
    cp_attention: Form = "ring"

    def by_config(self, op: Op) -> Kernels:
        """train.kernels, or "plain" if train.plain_ops names the op."""
        return "plain" if op.is_plain(self.plain_ops) else self.kernels


def _fits(name: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


@dataclass(frozen=True)
class Env:
    """What modules are built with, on the meta device. `objective` defines the loss of the head."""

    grid: Grid = field(default_factory=Grid)
    at: Coords = field(default_factory=Coords)
    axes: ModelAxes = field(default_factory=ModelAxes)
    seed: int = 0
    weights: WeightRules = field(default_factory=WeightRules)
    ops: OpChoices = field(default_factory=OpChoices)
    objective: Objective = field(default_factory=pretraining, compare=False)
    recompute: Recompute = field(default_factory=Recompute, compare=False, repr=False)

    @property
    def tp(self) -> Axis:
        return self.axes.tp

    def freezes(self, spec: ParamSpec) -> bool:
        """Whether all global tensors in it are frozen by their names (the config check ensures that all or none
        are)."""
        names, rules = [piece.name for piece in spec.pieces], self.weights
        return (
            spec.exported
            and bool(names)
            and all(_fits(name, rules.freeze) and not (spec.trained and _fits(name, rules.also)) for name in names)
        )

    def kernels_for(self, op: Op) -> Kernels:
        """The `kernels` argument for an op of a module's forward."""
        return "invariant" if self.ops.batch_invariant else self.ops.by_config(op)

    def refuse_invariance(self, what: str) -> None:
        """For modules that add up in an order that depends on the batch or the layout: NotInvariant, if bits must
        not."""
        if self.ops.batch_invariant:
            raise NotInvariant(f"{what} is not batch-invariant: set train.batch_invariant=false")

    def cut(self, length: int) -> tuple[int, int]:
        """This rank's slice (start, stop) of a length sharded over tp; sizes may differ by one."""
        return cut(length, self.grid.tp)[self.at.tp]

    def whole(self) -> Env:
        """For modules that every rank of tp and cp holds whole and runs on rows of its own: theirs is a mesh of one
        rank, and gradients are summed over all."""
        weights = replace(self.weights, copies=self.everyone)
        return replace(self, grid=Grid(), at=Coords(), axes=ModelAxes(), weights=weights)

    @property
    def everyone(self) -> tuple[Replica, ...]:
        """Replicas of a parameter that every tp rank holds whole."""
        return (Replica("tp", tuple(range(self.grid.tp))),) if self.grid.tp > 1 else ()

    def tied(self) -> tuple[Replica, ...]:
        """Replicas of a parameter that the first and the last stage share."""
        return self.shared(*self.weights.tied_stages)

    def shared_by(self, blocks: Iterable[int]) -> tuple[Replica, ...]:
        """Replicas of a parameter that the blocks with these numbers share."""
        stages = self.weights.stages
        return self.shared(*(stages[b] for b in blocks)) if len(stages) > 1 else ()

    def shared(self, *stages: int | None) -> tuple[Replica, ...]:
        """Replicas of a parameter that blocks on these pipeline ranks share. None stands for a block that does not
        exist."""
        members = tuple(sorted({s for s in stages if s is not None}))
        return (Replica("pp", members),) if len(members) > 1 else ()
