"""The Optimizer protocol: what a file must define to add an optimizer. How weights and state are stored and sharded is
not its concern (optim/sharded.py).

Torch is not imported here, so that a config that names an optimizer can be read without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from phalanx.base import registry
from phalanx.base.dataclass import dataclass
from phalanx.base.errors import ConfigError, Problem
from phalanx.base.registry import BUILT_IN, NotFound, find, path_of, registered, registers
from phalanx.base.rules import problem
from phalanx.layout.buckets import Updater
from phalanx.layout.homes import elements
from phalanx.layout.param import ROLES, LogicalMatrix, ParamSpec, Role
from phalanx.ops.optimizer.state import Moment
from phalanx.optim.config import OptimConfig

if TYPE_CHECKING:  # importing torch takes seconds
    from torch import Tensor

    from phalanx.ops.op import Kernels
    from phalanx.ops.optimizer.shard import StateRange

SEAM = OptimConfig.seam
SCHEDULE = "lr_schedule"
SLOWEST = 0.99
"""Slowest decay of a moment in bf16. Half a step of its 8 bits is 2^-9 of its value, so slower moments would not
change."""


@dataclass
class ParamRange:
    """Some elements of one parameter group during an update: working copies (n,) in the master dtype, to be changed in
    place or replaced.

    master          the weights; grad: their gradient, unscaled and clipped
    state           the optimizer's own, by name; each is also an attribute: `p.momentum` is `p.state["momentum"]`
    lr              learning rate of these elements, including their factor (optim.lr_scale); weight_decay: theirs
    step            () counts applied steps on the device, including this one
    """

    master: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    lr: float
    weight_decay: float
    step: Tensor

    def __getattr__(self, name: str) -> Tensor:
        if name != "state" and name in self.state:
            return self.state[name]
        raise AttributeError(
            f"a range has no {name}: it has {', '.join([*RANGE_FIELDS, *self.__dict__.get('state', ())])}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in RANGE_FIELDS:
            super().__setattr__(name, value)
        elif name in self.state:
            self.state[name] = value
        else:
            raise AttributeError(f"a range has no {name}; an optimizer's state is declared in its `state`")


@dataclass
class WholeMatrix(ParamRange):
    """As ParamRange, for one whole global matrix: master, grad and state are (rows, columns), in the orientation of
    Hugging Face checkpoints (linears: outputs, inputs). A vector, if an optimizer takes any, is (n,).

    logical         the matrices in it: queries, keys and values of a fused one; empty for vectors
    """

    logical: tuple[LogicalMatrix, ...] = ()


RANGE_FIELDS = tuple(f.name for f in fields(WholeMatrix))


@dataclass(frozen=True)
class StepScalars:
    """Device scalars () of one update: `step` counts applied steps, including this one; gradients are to be multiplied
    by `factor`; where `skip` is 1, only the gradients change."""

    step: Tensor
    factor: Tensor
    skip: Tensor


class Optimizer(ABC):
    """How weights are updated from gradients. Subclass it, and refer to it by `@optimizer("name")` or by `module:NAME`.

    Config      its fields in the `optim` section, besides the shared ones
    owns        range: any range of elements can be updated separately, wherever it is stored; matrix: it needs whole
                global matrices, each of which one rank then updates (a WholeMatrix). Both work with layout.sharding 0
                to 3
    roles       of the parameters that it takes (layout.param.Role); the others go to optim.fallback
    state       what it remembers for each element, by name; memory, sharding and checkpoints follow from it
    """

    Config: ClassVar[type[OptimConfig]] = OptimConfig
    owns: ClassVar[Literal["range", "matrix"]] = "range"
    roles: ClassVar[tuple[Role, ...]] = ROLES
    state: ClassVar[Mapping[str, Moment]] = {}

    def __init__(self, config: OptimConfig):
        self.config: Any = config

    @abstractmethod
    def update(self, p: Any) -> None:
        """Change p.master and the state for one step. `p` is a ParamRange, or a WholeMatrix if the optimizer owns
        those. Update a range element by element: which elements it has, and how many, depends on the layout. If a step
        is skipped, the caller discards the result. Do not read values from the device (`item`, `if tensor`), because
        that makes the host wait."""

    @classmethod
    def check(cls, config: Any) -> list[Problem]:
        """Problems with the fields of `Config`."""
        return []

    def cost(self, matrix: ParamSpec) -> float:
        """What the update of a whole matrix costs relative to others: homes (layout.homes) are given equal sums."""
        return elements(matrix)


@dataclass(frozen=True)
class StoredMatrix:
    """A whole matrix where it is stored, in flat ranges that may end with padding: `shape` (rows, columns), or (n,) of
    a vector, and as in WholeMatrix."""

    stored: StateRange
    shape: tuple[int, ...]
    lr: float
    weight_decay: float
    logical: tuple[LogicalMatrix, ...]


class MatrixOptimizer(Optimizer):
    """An optimizer of whole matrices that can update several of one shape at once, with the same result as one by one
    but for rounding.

    op      the name in train.plain_ops of what its kernels compute
    """

    owns = "matrix"
    op: ClassVar[str]

    def update(self, p: WholeMatrix) -> None:
        self.update_matrices([p], "plain")

    @abstractmethod
    def update_matrices(self, matrices: Sequence[WholeMatrix], kernels: Kernels) -> None:
        """As `update`, of matrices that agree in shape, logical matrices, rates and step."""

    def update_stored(self, matrices: Sequence[StoredMatrix], scalars: StepScalars, kernels: Kernels) -> bool:
        """The same in place, in fewer passes over memory, from gradients that are not scaled and may be left as they
        are: those of a home have memory during the update alone. False: nothing was done, because this optimizer has no
        such form for how these are stored."""
        return False

    @abstractmethod
    def flops(self, matrix: ParamSpec) -> float:
        """Of the matmuls of an update."""


class FusedOptimizer(Optimizer):
    """An optimizer that can also update whole ranges in place, with the same result as its `update`, in fewer passes
    over memory.

    op      its name in train.plain_ops
    """

    op: ClassVar[str]

    @abstractmethod
    def update_ranges(
        self, ranges: Sequence[StateRange], lr: float, weight_decay: float, scalars: StepScalars, kernels: Kernels
    ) -> None:
        """Scale the gradients, update masters and state, write the weights, and set the gradients to zero."""


def check_decays(config: OptimConfig, *names: str) -> list[Problem]:
    """Problems of fields that are decays of moments which are too slow for bf16."""
    slow = [name for name in names if config.moments == "bf16" and getattr(config, name) > SLOWEST]
    rule = f"must be <= {SLOWEST} with bf16 moments, which round smaller changes away"
    because = {"optim.moments": config.moments}
    return [problem("optim", config, name, rule, because, (0.95, SLOWEST)) for name in slow]


T = TypeVar("T", bound=type[Optimizer])


def optimizer(name: str) -> Callable[[T], T]:
    """Name an Optimizer: `optim.name` may be that name wherever its module has been imported."""
    return registers(SEAM, name)


def find_optimizer(name: str) -> type[Optimizer]:
    """The optimizer that `optim.name` refers to. NotFound says what is wrong with it."""
    found: type[Optimizer] = find(SEAM, name, Optimizer)
    wrong = [problem for problem in _wrong_with(found) if problem]
    if wrong:
        raise NotFound(f"is no usable Optimizer: {found.__module__}:{found.__qualname__} {'; '.join(wrong)}")
    return found


def _wrong_with(cls: type[Optimizer]) -> list[str]:
    taken = {*RANGE_FIELDS, *dir(ParamRange)}
    bad = [name for name in cls.state if not name.isidentifier() or name in taken]
    unknown = [role for role in cls.roles if role not in ROLES]
    whole = cls.owns == "matrix"
    other = [name for name, kind in cls.state.items() if not isinstance(kind, Moment)]
    return [
        f'has owns={cls.owns!r}; what exists is "range" and "matrix"' if cls.owns not in ("range", "matrix") else "",
        f"has owns={cls.owns!r}, but its update_ranges takes ranges"
        if whole and issubclass(cls, FusedOptimizer)
        else "",
        f"takes a role that there is not: {', '.join(map(repr, unknown))} (there are {', '.join(ROLES)})"
        if unknown
        else "",
        "" if cls.roles else "takes no role",
        f"names a state {', '.join(map(repr, bad))}, which is no free attribute name of a range" if bad else "",
        f"has a state that is no Moment: {', '.join(map(repr, other))}" if other else "",
        "" if issubclass(cls.Config, OptimConfig) else "has a Config that is not derived from phalanx.OptimConfig",
    ]


def optimizers_of(config: OptimConfig) -> tuple[Optimizer, ...]:
    """The optimizer of a config and, if that leaves any role, its fallback."""
    found = find_optimizer(config.name)(config)
    return (found,) if config.fallback is None else (found, find_optimizer(config.fallback.name)(config.fallback))


def updater_of(config: OptimConfig) -> Callable[[ParamSpec], Updater]:
    """Which of these updates a parameter, by its role. ConfigError if a role is left."""
    left = roles_left(config)
    if left:
        raise ConfigError(left)
    updaters: dict[Role, Updater] = {}
    for number, each in enumerate(optimizers_of(config)):
        for role in each.roles:
            updaters.setdefault(role, Updater(number, each.owns == "matrix"))
    return lambda spec: updaters[spec.role]


def roles_left(config: OptimConfig) -> list[Problem]:
    """A problem if neither the optimizer nor its fallback takes every role."""
    if config.fallback is None:
        return []
    taken, rest = find_optimizer(config.name).roles, find_optimizer(config.fallback.name).roles
    left = [role for role in ROLES if role not in (*taken, *rest)]
    if not left:
        return []
    because = {"optim.name": config.name, "roles that neither takes": ", ".join(left)}
    rule = "must be an optimizer that takes the roles which optim.name leaves, such as adamw"
    return [Problem("optim.fallback.name", config.fallback.name, rule, because)]


def completed(config: OptimConfig) -> OptimConfig:
    """As base.registry.completed, for the `optim` section; with a fallback if the optimizer leaves any role."""
    config = registry.completed("optim", config, OptimConfig, find_optimizer)
    given = config.fallback
    if given is None and set(find_optimizer(config.name).roles) < set(ROLES):
        given = OptimConfig(**config.for_fallback)  # type: ignore[arg-type]
    if given is not None:
        fallback = registry.completed("optim.fallback", given, OptimConfig, find_optimizer)
        config = config if fallback == config.fallback else replace(config, fallback=fallback)
    if config.schedule in registered(SCHEDULE) and config.schedule not in BUILT_IN[SCHEDULE]:
        config = replace(config, schedule=path_of(SCHEDULE, config.schedule))
    return config
