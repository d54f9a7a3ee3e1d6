"""ParamSpec: what one rank's storage of a parameter holds of which global tensors; init, checkpoints, sums and norms follow from it.

Global tensors have the names, shapes and orientation of Hugging Face checkpoints. The storage of a rank may be fused (qkv,
gate and up), padded (vocabulary) or transposed (GPT-2's Conv1D); nothing outside the rank sees that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.layout.box import Box
from phalanx.layout.grid import AxisName, Coords


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
    local         one slice per storage dim
    transposed    the storage's dims are the global dims reversed (2-d only)
    init, decay   initial values; whether weight decay applies
    replicas      who else holds it (besides data parallelism, which always does)
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    local: tuple[slice, ...]
    init: Init
    decay: bool = True
    transposed: bool = False
    replicas: tuple[Replica, ...] = ()

    def is_writer(self, at: Coords) -> bool:
        """Whether this rank's copy counts: in norms once, in checkpoints once (the first member of each replica axis)."""
        return all(getattr(at, r.axis) == r.members[0] for r in self.replicas)


@dataclass(frozen=True)
class ParamSpec:
    """Storage of one parameter on one rank: its shape and the pieces in it. Elements outside every piece are padding (zero)."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def name(self) -> str:
        """A name for people: of the first global tensor in it."""
        return self.pieces[0].name if self.pieces else "padding"
