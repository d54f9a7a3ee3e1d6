"""Shard, the unit that an optimizer updates: this rank's range of one flat bucket, with its optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from phalanx.layout.buckets import Bucket
from phalanx.ops.optimizer.moments import Narrow
from phalanx.ops.optimizer.state import Moment

MASTER = "master"  # the name of the masters in checkpoints


@dataclass(frozen=True)
class StateRange:
    """A range of elements of one parameter group as they are stored: master and gradient (n,) in the master dtype;
    state (n,) by name, possibly in a narrower dtype or in FP8; `out` (n,) the weights, if they are stored
    separately."""

    master: Tensor
    grad: Tensor
    state: Mapping[str, Tensor | Narrow]
    out: Tensor | None = None

    def __getitem__(self, run: slice) -> StateRange:
        run = slice(run.start, min(run.stop, len(self.master)))
        state = {name: kept[run] for name, kept in self.state.items()}
        return StateRange(self.master[run], self.grad[run], state, None if self.out is None else self.out[run])


class HomeExchange(Protocol):
    """Exchange between the home rank of whole matrices and the ranks that hold their gradients and weights. All ranks
    of a stage call it together."""

    def bring_gradients(self) -> None: ...

    def send_weights(self) -> None: ...


@dataclass
class Shard:
    """Elements lo..hi of a bucket. master, grad and each tensor of the state are (hi - lo,) in the master dtype; the
    state may be in a narrower dtype or in FP8. `out` are the weights, if they are stored separately.

    own     the elements that no other rank writes to a checkpoint
    home    for whole matrices (layout.homes): brings their gradients before an update, sends their weights after it
    """

    bucket: Bucket
    lo: int
    hi: int
    own: tuple[int, int]
    master: Tensor
    grad: Tensor
    state: Mapping[str, Tensor | Narrow]
    out: Tensor | None = None
    home: HomeExchange | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is stored for each element: its master, then the optimizer's state."""
        return MASTER, *self.state

    def range(self, start: int, stop: int) -> StateRange:
        return StateRange(self.master, self.grad, self.state, self.out)[start:stop]

    def values(self, kind: str) -> Tensor:
        """The masters, or the state tensor of this name (hi - lo,). State kept in FP8 is returned as its numbers, exact
        in bf16."""
        kept = self.master if kind == MASTER else self.state[kind]
        return kept.wide(torch.bfloat16) if isinstance(kept, Narrow) else kept

    def keep(self, kind: str, values: Tensor) -> None:
        """Store `values`, after they were loaded."""
        kept = self.master if kind == MASTER else self.state[kind]
        if isinstance(kept, Narrow):
            kept.store_(values)

    @property
    def moments(self) -> list[Tensor]:
        """The objects that hold the state."""
        return [t for kept in self.state.values() for t in (kept.tensors if isinstance(kept, Narrow) else (kept,))]


def zero_state(state: Mapping[str, Moment], master: Tensor, dtype: torch.dtype | None) -> dict[str, Tensor | Narrow]:
    """The initial state of masters (n,), in `dtype` if given (E4M3: stored as in ops.optimizer.moments)."""

    def zero(moment: Moment) -> Tensor | Narrow:
        if dtype == torch.float8_e4m3fn:
            return Narrow.zeros(len(master), master.device, moment.nonnegative)
        return torch.zeros_like(master, dtype=dtype)

    return {name: zero(moment) for name, moment in state.items()}


def widened(moment: Tensor | Narrow, dtype: torch.dtype) -> Tensor:
    return moment.wide(dtype) if isinstance(moment, Narrow) else moment.to(dtype)


def keep(moment: Tensor | Narrow, values: Tensor, step: Tensor) -> None:
    if isinstance(moment, Narrow):
        moment.store_(values, step)
    else:
        moment.copy_(values)
