"""ParamSpec: which parts of which global tensors one rank's storage of a parameter holds. Initialization, checkpoints,
gradient sums and norms follow from it.

Global tensors have the names, shapes and orientation of Hugging Face checkpoints. The storage of a rank may be fused
(qkv, gate and up), padded (vocabulary) or transposed (GPT-2's Conv1D); nothing outside the rank sees that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import TYPE_CHECKING, Any, Literal, get_args

from phalanx.base.dataclass import dataclass
from phalanx.layout.box import Box
from phalanx.layout.grid import AxisName, Coords, Grid, SumAxis

if TYPE_CHECKING:  # importing torch takes seconds
    from torch import Tensor

Role = Literal["linear", "expert", "embedding", "head", "norm", "bias", "router", "conv"]
"""The role of a parameter for optimizers: one may take some roles and leave the others to its fallback."""
ROLES: tuple[Role, ...] = get_args(Role)


class Init(ABC):
    """How a global tensor gets its initial values: a frozen dataclass, since plans are compared. nn/initial.py has the
    kinds; a layer may bring one of its own."""

    @abstractmethod
    def fill(self, out: Tensor, piece: Piece, seed: int) -> None:
        """Write the initial values of a piece to `out` (its box, in global orientation). They depend on the seed, the
        tensor's name and each element's place in the whole tensor, so that every layout begins with the same bits."""


@dataclass(frozen=True)
class Replica:
    """Coordinates along a mesh axis whose ranks hold the same piece; its gradient is the sum over them."""

    axis: AxisName | Literal["etp"]
    members: tuple[int, ...]


@dataclass(frozen=True)
class MatrixOutputs:
    """`count` outputs of a linear that belong to one matrix of a global tensor which holds several, such as queries of
    a fused q, k and v. heads: whether they are those of one head of attention."""

    matrix: str
    count: int
    heads: bool = False


@dataclass(frozen=True)
class Piece:
    """One box of one global tensor, and where it is in the rank's storage.

    name, shape   of the global tensor
    box           the part of it held here
    local         one slice for each storage dim; a number selects one of a stack and drops the dim (one expert of many)
    transposed    the last two dims of the storage are those of the global tensor, swapped
    init, decay   initial values; whether weight decay applies
    replicas      other ranks that hold it (besides those of ParamSpec.summed_over, which always do)
    outputs       to which matrices its outputs belong, for optimizers of matrices: a pattern that repeats. None: all to
                  one
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    local: tuple[slice | int, ...]
    init: Init
    decay: bool = True
    transposed: bool = False
    replicas: tuple[Replica, ...] = ()
    outputs: tuple[MatrixOutputs, ...] = ()

    def of(self, storage: Any) -> Any:
        """This piece of its storage (anything indexed like a tensor), in global orientation."""
        view = storage[self.local]
        return view.mT if self.transposed else view

    @property
    def slices(self) -> tuple[slice, ...]:
        """`local`, with numbers written as slices."""
        return tuple(slice(s, s + 1) if isinstance(s, int) else s for s in self.local)

    def first(self, shape: tuple[int, ...]) -> int:
        """Number of the piece's first element in a storage of this shape."""
        return sum(s.start * prod(shape[d + 1 :]) for d, s in enumerate(self.slices))

    def is_writer(self, grid: Grid, at: Coords) -> bool:
        """Whether this rank's copy is the one that counts in norms and is written to checkpoints (the first member of
        each replica axis)."""
        return all(grid.index(at, r.axis) == r.members[0] for r in self.replicas)


@dataclass(frozen=True)
class LogicalMatrix:
    """A matrix as mathematics knows it, in a global tensor that may hold several: queries of a fused q, k and v.

    dim     of the tensor's last two: 0 if its rows are outputs, 1 if its columns are
    ranges  (start, stop, step) of its outputs, in order
    shape   (outputs, inputs)
    head    outputs of a head of attention; 0: it has no heads
    """

    dim: int
    ranges: tuple[tuple[int, int, int], ...]
    shape: tuple[int, int]
    head: int = 0


@dataclass(frozen=True)
class ParamSpec:
    """The storage of one parameter on one rank: its shape and the pieces in it. Elements outside all pieces are padding
    (zero).

    summed_over   the ranks that hold the same storage and see different tokens: "dp" means dp x cp; edp is for experts
    trained       False: model state that is updated from statistics, not from gradients; kept whole on every rank, in
                  the masters' dtype
    exported      whether Hugging Face checkpoints contain it
    frozen        not updated (train.freeze): its weights are stored like others, but it has no gradient and no moments
    coded         whether its weights are stored as FP8 values of their masters
    base_format   of frozen weights that are stored as quantized values (lora.base): the name of the format
    role          its role for optimizers; a weight has one role on all ranks (a tied head is an embedding)
    logical       of a whole matrix (layout.homes): the matrices in it
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    summed_over: SumAxis = "dp"
    trained: bool = True
    exported: bool = True
    frozen: bool = False
    coded: bool = False
    base_format: str | None = None
    role: Role = "linear"
    logical: tuple[LogicalMatrix, ...] = ()

    @property
    def learns(self) -> bool:
        """Whether it has a gradient."""
        return self.trained and not self.frozen

    @property
    def name(self) -> str:
        """A name for people: that of the first global tensor in it."""
        return self.pieces[0].name if self.pieces else "padding"
