"""Shard, the unit that an optimizer updates: this rank's range of one flat bucket, with its optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.layout.buckets import Bucket, Slot
from phalanx.ops.optimizer.blockwise import Blockwise
from phalanx.ops.optimizer.masters import SplitMaster
from phalanx.ops.optimizer.moments import Narrow
from phalanx.ops.optimizer.packed import PackedTensor
from phalanx.ops.optimizer.state import Moment

MASTER = "master"  # the name of the masters in checkpoints


@dataclass(frozen=True)
class StateRange:
    """A range of elements of one parameter group as they are stored: master and gradient (n,) in the master dtype;
    state (n,) by name, possibly in a narrower dtype or packed; `out` (n,) the weights, if they are stored separately
    (packed masters store them too)."""

    master: Tensor | SplitMaster
    grad: Tensor
    state: Mapping[str, Tensor | PackedTensor]
    out: Tensor | None = None

    def __getitem__(self, run: slice) -> StateRange:
        run = slice(run.start, min(run.stop, len(self.master)))
        state = {name: kept[run] for name, kept in self.state.items()}
        return StateRange(self.master[run], self.grad[run], state, None if self.out is None else self.out[run])


class HomeExchange(Protocol):
    """Exchange between the home rank of whole matrices and the ranks that hold their gradients and weights. All ranks
    of a stage call it together.

    order   numbers of the ranks' buckets, as their matrices are to be updated; slots: those of a bucket that are here
    gradient   (n,) that of a matrix of the bucket whose gradients were brought last, with its padding
    weights    (n,) where updated weights of such a matrix are stored, or travel to where they are. Who asks writes
               those of all matrices of the bucket. None: `send_weights` takes them from the masters, as it does if
               nobody asked
    """

    order: list[int]

    def slots(self, bucket: int) -> list[Slot]: ...

    def begin(self) -> None: ...

    def bring_gradients(self, bucket: int) -> None: ...

    def gradient(self, slot: Slot) -> Tensor: ...

    def weights(self, slot: Slot) -> Tensor | None: ...

    def send_weights(self, bucket: int) -> None: ...


@dataclass
class Shard:
    """Elements lo..hi of a bucket. master, grad and each tensor of the state are (hi - lo,) in the master dtype; the
    state may be in a narrower dtype, and both may be packed. `out` are the weights, if they are stored separately.

    own     the elements that no other rank writes to a checkpoint
    home    for whole matrices (layout.homes): brings their gradients before an update, sends their weights after it;
            `grad` and `out` are then empty and None
    """

    bucket: Bucket
    lo: int
    hi: int
    own: tuple[int, int]
    master: Tensor | SplitMaster
    grad: Tensor
    state: Mapping[str, Tensor | PackedTensor]
    out: Tensor | None = None
    home: HomeExchange | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is stored for each element: its master, then the optimizer's state."""
        return MASTER, *self.state

    def range(self, start: int, stop: int) -> StateRange:
        return StateRange(self.master, self.grad, self.state, self.out)[start:stop]

    @property
    def packed(self) -> bool:
        """Whether anything of it is."""
        return any(isinstance(self.stored(kind), PackedTensor) for kind in self.kinds)

    def stored(self, kind: str) -> Tensor | PackedTensor:
        """The masters, or the state tensor of this name (hi - lo,), as they are stored."""
        return self.master if kind == MASTER else self.state[kind]

    def values(self, kind: str) -> Tensor:
        """The same as numbers, in the dtype in which checkpoints have them."""
        kept = self.stored(kind)
        return kept.wide(kept.dtype) if isinstance(kept, PackedTensor) else kept

    @property
    def moments(self) -> list[Tensor]:
        """The objects that hold the state."""
        return [t for kept in self.state.values() for t in tensors_of(kept)]


def zero_state(
    state: Mapping[str, Moment], master: Tensor | PackedTensor, dtype: torch.dtype | None
) -> dict[str, Tensor | PackedTensor]:
    """The initial state of masters (n,), in `dtype` if given (E4M3: stored as in ops.optimizer.moments; uint8: as in
    ops.optimizer.blockwise)."""

    def zero(moment: Moment) -> Tensor | PackedTensor:
        if dtype == torch.float8_e4m3fn:
            return Narrow.zeros(len(master), master.device, moment.nonnegative)
        if dtype == torch.uint8:
            return Blockwise.zeros(len(master), master.device, not moment.nonnegative)
        return torch.zeros(len(master), dtype=dtype or master.dtype, device=master.device)

    return {name: zero(moment) for name, moment in state.items()}


def tensors_of(kept: Tensor | PackedTensor) -> tuple[Tensor, ...]:
    """The objects that hold it."""
    return kept.tensors if isinstance(kept, PackedTensor) else (kept,)


def widened(kept: Tensor | PackedTensor, dtype: torch.dtype) -> Tensor:
    return kept.wide(dtype) if isinstance(kept, PackedTensor) else kept.to(dtype)


def keep(kept: Tensor | PackedTensor, values: Tensor, step: Tensor) -> None:
    if isinstance(kept, PackedTensor):
        kept.store_(values, step)
    else:
        kept.copy_(values)
