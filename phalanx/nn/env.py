"""Env: what a module must know of its place to build itself: coordinates, the tensor-parallel axis, dtype. No groups
are needed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

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
from phalanx.ops.op import Kernels, Op


@dataclass(frozen=True)
class WeightRules:
    """How parameters are made.

    dtype         of the weights that are computed with
    tied_stages   the pipeline ranks that hold the input embedding and the head
    mtp_stage     the one that predicts tokens further ahead with both; None: the model has no such block
    linears       chooses the method of each linear; None: all are plain
    freeze        globs of names that train.freeze lists
    gradients     what weight gradients go through
    """

    dtype: torch.dtype = torch.float32
    tied_stages: tuple[int, int] = (0, 0)
    mtp_stage: int | None = None
    linears: LinearMethods | None = None
    freeze: tuple[str, ...] = ()
    gradients: GradientQueue = field(default_factory=GradientQueue, compare=False, repr=False)


@dataclass(frozen=True)
class OpChoices:
    """Which implementations modules ask for. `plain_ops`: ops that stay plain whatever `kernels` says; `dispatch`,
    `expert_room` and `sources` are those of ops.experts.exchange."""

    kernels: Kernels = "auto"
    plain_ops: tuple[str, ...] = ()
    dispatch: Dispatch = "alltoall"
    expert_room: float = math.inf
    sources: int = 0
    cp_attention: Form = "ring"


@dataclass(frozen=True)
class Env:
    """Modules are built on the meta device. `objective` is what the head's loss is."""

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
        """Whether all global tensors in it have names that train.freeze fits (the config's check sees to it that
        none or all do)."""
        names = [piece.name for piece in spec.pieces]
        return (
            spec.exported
            and bool(names)
            and all(any(fnmatchcase(name, glob) for glob in self.weights.freeze) for name in names)
        )

    def kernels_for(self, op: Op) -> Kernels:
        """What callers of an op give it for `kernels`: train.kernels, or "plain" where train.plain_ops names it."""
        return "plain" if op.is_plain(self.ops.plain_ops) else self.ops.kernels

    def cut(self, length: int) -> tuple[int, int]:
        """This rank's run (start, stop) of a length cut over tp; sizes may differ by one."""
        return cut(length, self.grid.tp)[self.at.tp]

    @property
    def everyone(self) -> tuple[Replica, ...]:
        """Replicas of a parameter that each tp rank holds whole."""
        return (Replica("tp", tuple(range(self.grid.tp))),) if self.grid.tp > 1 else ()

    def tied(self) -> tuple[Replica, ...]:
        """Replicas of a parameter that the first and the last stage share."""
        return self.shared(*self.weights.tied_stages)

    def shared(self, *stages: int | None) -> tuple[Replica, ...]:
        """Replicas of a parameter that blocks on these pipeline ranks share; None: a block that there is not."""
        members = tuple(sorted({s for s in stages if s is not None}))
        return (Replica("pp", members),) if len(members) > 1 else ()
