"""What stands in autograd's graph for a tensor that is never in memory: who reads it makes of its source what is wanted, codes of 8 bits.

A source is a frozen dataclass with `shape`, `device`, `x` (a tensor of its dtype) and `tensor()`, which makes it (ops.norm.Normed,
ops.rope.RopeGrad; ops.activation.Gated needs no stand-in, its reader is in the same op). Whoever makes a stand-in must know that the one
reader takes sources; any other reads NaN.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, device


class Unmade(Protocol):
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def device(self) -> device: ...
    @property
    def x(self) -> Tensor: ...
    def tensor(self) -> Tensor: ...


def stand_in(source: Unmade, nan: Tensor) -> Tensor:
    """A tensor of the source's shape, of one number in memory: `nan` ()."""
    made: Any = nan.expand(source.shape)
    made.source = source
    return made  # type: ignore[no-any-return]


def source_of(x: Any) -> Any:
    """The source that x stands for, if it does; else x."""
    return getattr(x, "source", x)
