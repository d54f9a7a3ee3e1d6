"""What stands in autograd's graph for a tensor that is never in memory: who reads it makes of its source what is
wanted, codes of 8 bits.

Sources are frozen dataclasses: ops.dense.norm.Normed, ops.dense.rope.RopeGrad, ops.experts.permute.Gathered; those of
ops.dense.activation need no stand-in, their reader is in the same op. Whoever makes a stand-in must know that the one
reader takes sources; any other reads NaN.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, device


class LazySource:
    """A source: `x` has its dtype and lies on its device, and is of its shape where a kind does not say otherwise."""

    x: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.x.shape[0], self.x.shape[1]

    @property
    def device(self) -> device:
        return self.x.device

    def tensor(self) -> Tensor:
        """Make it."""
        raise NotImplementedError


def lazy_tensor(source: LazySource, nan: Tensor) -> Tensor:
    """A tensor of the source's shape, of one number in memory: `nan` ()."""
    made: Any = nan.expand(source.shape)
    made.source = source
    return made  # type: ignore[no-any-return]


def source_of(x: Any) -> Any:
    """The source that x stands for, if it does; else x."""
    return getattr(x, "source", x)
