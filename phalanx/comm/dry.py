"""DryAxis: an axis of any size without process groups, whose collectives only return tensors of the right shape and
count bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.comm.axis import Axis, SwappedRows, Work


def ring_bytes(op: str, nbytes: int, size: int) -> float:
    """Bytes that each rank sends in a ring collective over `size` ranks; `nbytes` is the size of the whole tensor
    (gathered, or not yet scattered)."""
    hops = 2 if op == "all_reduce" else 1
    return hops * nbytes * (size - 1) / size


class DryAxis(Axis):
    """The axis that modules use on the meta device. `sent` counts the bytes that this rank sends, by operation.

    With size 1 it is an ordinary Axis: nothing is sent.
    """

    def __init__(self, name: str, size: int, index: int = 0):
        super().__init__(name, tuple(range(size)), index)
        self.sent: Counter[str] = Counter()

    def _count(self, op: str, whole: Tensor) -> None:
        self.sent[op] += round(ring_bytes(op, whole.numel() * whole.element_size(), self.size))

    def all_reduce(self, x: Tensor, op: str = "sum", async_op: bool = False) -> Work:
        self._count("all_reduce", x)
        return Work(x)

    def all_gather(self, x: Tensor, async_op: bool = False) -> Work:
        if self.size == 1:
            return Work(x)
        whole = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        self._count("all_gather", whole)
        return Work(whole)

    def all_gather_into(self, out: Tensor, async_op: bool = False) -> Work:
        self._count("all_gather", out)
        return Work(out)

    def all_gather_to(self, out: Tensor, own: Tensor, async_op: bool = False) -> Work:
        self._count("all_gather", out)
        return Work(out)

    def reduce_scatter(self, x: Tensor, async_op: bool = False) -> Work:
        if self.size == 1:
            return Work(x)
        self._count("reduce_scatter", x)
        return Work(x.new_empty(x.shape[0] // self.size, *x.shape[1:]))

    def reduce_scatter_within(self, x: Tensor, async_op: bool = False, onto: Tensor | None = None) -> Work:
        self._count("reduce_scatter", x)
        n = x.numel() // self.size
        return Work(x[self.index * n : (self.index + 1) * n])

    def all_to_all(self, x: Tensor, send: Sequence[int] | None = None, receive: Sequence[int] | None = None) -> Tensor:
        if self.size > 1:
            self._count("all_to_all", x)
        return x.new_empty(len(x) if receive is None else sum(receive), *x.shape[1:])

    def hop(self, x: Tensor | None, to: int, out: Tensor | None, source: int) -> Work:
        if x is not None:
            self.sent["hop"] += x.numel() * x.element_size()
        return Work(torch.empty(0, device="meta") if out is None else out)

    def push(self, tokens: int, width: int, like: Tensor, back: bool, share: float = 1.0) -> SwappedRows:
        self.sent["push"] += round((self.size - 1) * share * tokens * width * like.element_size())
        return SwappedRows(self, tokens, width, like, local=True)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        self._count("broadcast", x)
        return x
