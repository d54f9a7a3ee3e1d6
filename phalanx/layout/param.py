"""ParamSpec: what one rank's storage of a parameter holds of which global tensors; init, checkpoints, sums and norms
follow from it.

Global tensors have the names, shapes and orientation of Hugging Face checkpoints. The storage of a rank may be fused
(qkv, gate and up), padded (vocabulary) or transposed (GPT-2's Conv1D); nothing outside the rank sees that.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Literal, get_args

from phalanx.layout.box import Box
from phalanx.layout.grid import AxisName, Coords, SumAxis

Role = Literal["linear", "expert", "embedding", "head", "norm", "bias", "router", "conv"]
"""What a parameter is to an optimizer, which may take some roles and leave the others to its fallback."""
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True)
class Init:
    """Initial values of a global tensor: normal(0, std), zeros or ones."""

    kind: Literal["normal", "zeros", "ones"]
    std: float = 0.0


@dataclass(frozen=True)
class Replica:
    """Coordinates along a mesh axis whose ranks hold the same piece; its gradient is the sum over them."""

    axis: AxisName
    members: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """One box of one global tensor, and where it lies in the rank's storage.

    name, shape   the global tensor
    box           the part of it held here
    local         one slice per storage dim; a number picks one of a stack and drops the dim (an expert of many)
    transposed    the last two dims of the storage are those of the global tensor, swapped
    init, decay   initial values; whether weight decay applies
    replicas      who else holds it (besides the ranks of ParamSpec.summed_over, which always do)
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    local: tuple[slice | int, ...]
    init: Init
    decay: bool = True
    transposed: bool = False
    replicas: tuple[Replica, ...] = ()

    def of(self, storage: Any) -> Any:
        """This piece of its storage (anything indexed like a tensor), in global orientation."""
        view = storage[self.local]
        return view.mT if self.transposed else view

    @property
    def slices(self) -> tuple[slice, ...]:
        """`local` with the numbers written as slices."""
        return tuple(slice(s, s + 1) if isinstance(s, int) else s for s in self.local)

    def first(self, shape: tuple[int, ...]) -> int:
        """Number of the piece's first element in a storage of this shape."""
        return sum(s.start * prod(shape[d + 1 :]) for d, s in enumerate(self.slices))

    def is_writer(self, at: Coords) -> bool:
        """Whether this rank's copy counts: in norms once, in checkpoints once (the first member of each replica
        axis)."""
        return all(getattr(at, r.axis) == r.members[0] for r in self.replicas)


@dataclass(frozen=True)
class ParamSpec:
    """Storage of one parameter on one rank: its shape and the pieces in it. Elements outside every piece are padding
    (zero).

    summed_over   the ranks that hold the same storage and see different tokens: "dp" means dp x cp, or edp for
    experts
    trained       False: state of the model that follows from what it sees, not from gradients; kept whole on every
    rank, in the
                  masters' dtype
    exported      whether Hugging Face checkpoints have it
    frozen        whether it stays as it is (train.freeze): its weights are as those of others, but it has no
    gradient and no moments
    coded         whether its weights are kept as 8-bit codes of their masters
    role          what it is to an optimizer; one weight has one role on all ranks (a tied head is an embedding)
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    summed_over: SumAxis = "dp"
    trained: bool = True
    exported: bool = True
    frozen: bool = False
    coded: bool = False
    role: Role = "linear"

    @property
    def learns(self) -> bool:
        """Whether it gets a gradient."""
        return self.trained and not self.frozen

    @property
    def name(self) -> str:
        """A name for people: of the first global tensor in it."""
        return self.pieces[0].name if self.pieces else "padding"
