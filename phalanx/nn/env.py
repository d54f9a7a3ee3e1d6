"""Env: what a module must know of its place to build itself: coordinates, the tensor-parallel axis, dtype. No groups
are needed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from phalanx.comm.axis import Axis, ModelAxes
from phalanx.layout.box import cut
from phalanx.layout.grid import Coords, Grid
from phalanx.layout.param import ParamSpec, Replica
from phalanx.nn.recompute import Recompute
from phalanx.ops.attention.context import Form
from phalanx.ops.experts.exchange import Dispatch
from phalanx.ops.op import Kernels
from phalanx.ops.quantized.experts import ExpertQuantizer
from phalanx.ops.quantized.linear import Accumulate, WeightQuantizer
from phalanx.ops.quantized.recipes import Recipe


@dataclass(frozen=True)
class Fp8Linears:
    """Which linears use a recipe: those whose weights' names fit no glob and whose layer is one of `layers`. `kept`:
    their weights are kept as codes, where the recipe allows it."""

    recipe: Recipe
    layers: range
    exclude: tuple[str, ...] = ()
    accumulate: Accumulate = "mixed"
    kept: bool = False

    def takes(self, name: str) -> bool:
        layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
        return (layer is None or layer in self.layers) and not any(fnmatchcase(name, glob) for glob in self.exclude)


@dataclass(frozen=True)
class Env:
    """Modules are built on the meta device; `tied_stages` are the pipeline ranks that hold the input embedding and
    the head, `mtp_stage` the one that predicts tokens further ahead with both (None: the model has no such block);
    `sources` is that of ops.experts.exchange."""

    grid: Grid = field(default_factory=Grid)
    at: Coords = field(default_factory=Coords)
    axes: ModelAxes = field(default_factory=ModelAxes)
    dtype: torch.dtype = torch.float32
    seed: int = 0
    tied_stages: tuple[int, int] = (0, 0)
    mtp_stage: int | None = None
    kernels: Kernels = "auto"
    plain_ops: tuple[str, ...] = ()
    dispatch: Dispatch = "alltoall"
    expert_room: float = math.inf
    sources: int = 0
    fp8: Fp8Linears | None = None
    cp_attention: Form = "ring"
    freeze: tuple[str, ...] = ()
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
            and all(any(fnmatchcase(name, glob) for glob in self.freeze) for name in names)
        )

    def kernels_for(self, op: str) -> Kernels:
        """Which twin of an op (a name of ops.kernels.OPS or ops.dense.optional_kernels.WHEELS) its callers ask for.

        The whole MLP as one op has an activation inside: it is not taken where that is to be plain.
        """
        parts = {op, "swiglu"} if op == "mlp" else {op}
        return "plain" if parts & set(self.plain_ops) else self.kernels

    def weight_quantizer(self, names: Iterable[str], cut: int) -> WeightQuantizer | None:
        """What a linear with these global matrices keeps beside its weight, whose dim `cut` is cut over tp; None: it
        is in `dtype`."""
        once = list(dict.fromkeys(names))
        if self.fp8 is None or not all(self.fp8.takes(name) for name in once):
            return None
        return WeightQuantizer(
            self.fp8.recipe, _together(once), cut, self.axes, self.kernels_for("quant"), self.fp8.accumulate, self.seed
        )

    def expert_quantizer(self, names: Iterable[str], count: int, cut: int) -> ExpertQuantizer | None:
        """The same of a stack of `count` experts' matrices (`{}` in a name stands for their number), of which dim
        `cut` is cut over etp. All or none are in low precision, so that all ranks of ep agree."""
        once = list(dict.fromkeys(names))
        if self.fp8 is None or not all(self.fp8.takes(name.format(e)) for name in once for e in range(count)):
            return None
        name = _together([name.replace("{}.", "") for name in once])
        return ExpertQuantizer(
            self.fp8.recipe, name, cut, self.axes, self.kernels_for("quant"), self.fp8.accumulate, self.seed
        )

    def cut(self, length: int) -> tuple[int, int]:
        """This rank's run (start, stop) of a length cut over tp; sizes may differ by one."""
        return cut(length, self.grid.tp)[self.at.tp]

    @property
    def everyone(self) -> tuple[Replica, ...]:
        """Replicas of a parameter that each tp rank holds whole."""
        return (Replica("tp", tuple(range(self.grid.tp))),) if self.grid.tp > 1 else ()

    def tied(self) -> tuple[Replica, ...]:
        """Replicas of a parameter that the first and the last stage share."""
        return self.shared(*self.tied_stages)

    def shared(self, *stages: int | None) -> tuple[Replica, ...]:
        """Replicas of a parameter that blocks on these pipeline ranks share; None: a block that there is not."""
        members = tuple(sorted({s for s in stages if s is not None}))
        return (Replica("pp", members),) if len(members) > 1 else ()


def _together(names: list[str]) -> str:
    """One name for matrices that are stored together."""
    first, *others = (name.removesuffix(".weight") for name in names)
    return "+".join((first, *(other.rsplit(".", 1)[-1] for other in others)))
