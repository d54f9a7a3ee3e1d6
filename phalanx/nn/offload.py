"""Activations that wait in host memory between the forward and the backward of some blocks: what is held, and how it
leaves and comes back.

Knows tensors and a device, not when to move: whoever runs the blocks says that (pipeline.execute, at instructions of
the schedule). On a GPU copies go to pinned memory and back on a stream of their own, beside compute; on the CPU they
are plain copies. Either way the bits that come back are those that left. Rajbhandari et al., "ZeRO-Infinity", 2021,
section 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class Mover:
    """Copies between a device and the host, on a stream of its own where there are any.

    What leaves stays in memory until its copy is over, and the host waits for that before more leaves: else it would
    run ahead of the device and ask for memory that copies have not yet freed.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._leaving: tuple[Any, Sequence[Tensor]] | None = None  # a copy under way, and what it reads

    def to_host(self, xs: Sequence[Tensor]) -> list[Tensor]:
        if self.stream is None:
            return [x.clone() for x in xs]
        hosts = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in xs]
        self.finish()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for host, x in zip(hosts, xs):
                host.copy_(x, non_blocking=True)
            self._leaving = self.stream.record_event(), xs
        return hosts

    def finish(self) -> None:
        """Wait for the copies to the host."""
        if self._leaving is not None:
            self._leaving[0].synchronize()
            self._leaving = None

    def to_device(self, hosts: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """The tensors, and what to wait for before they are read or let go of (None: nothing)."""
        if self.stream is None:
            return [host.clone() for host in hosts], None
        self.finish()
        xs = [torch.empty(host.shape, dtype=host.dtype, device=self.device) for host in hosts]
        self.stream.wait_stream(
            torch.cuda.current_stream(self.device)
        )  # the memory may still be read by who had it before
        with torch.cuda.stream(self.stream):
            for host, x in zip(hosts, xs):
                x.copy_(host, non_blocking=True)
            return xs, self.stream.record_event()


@dataclass(eq=False)
class Memory:
    """All bytes of one storage: `here` (N,) uint8 on the device, or `host`."""

    here: Tensor | None
    host: Tensor | None = None


@dataclass(frozen=True)
class Part:
    """A tensor in memory that is held: how it lies there."""

    memory: Memory
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        m = self.memory
        if m.here is None:
            raise RuntimeError("an activation that waits on the host is read before it was fetched")
        return torch.empty(0, dtype=self.dtype, device=m.here.device).set_(
            m.here.untyped_storage(), self.offset, self.size, self.stride
        )


@dataclass(eq=False)
class Held:
    """What blocks save for the backward of one micro-batch; a storage is held once, whatever views of it are saved."""

    mover: Mover
    memories: dict[int, Memory] = field(default_factory=dict)
    arrived: Any = None  # what to wait for of what came back

    def put(self, tensor: Tensor) -> Part:
        storage = tensor.untyped_storage()
        memory = self.memories.get(storage._cdata)
        if memory is None:
            memory = Memory(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
            self.memories[storage._cdata] = memory
        return Part(memory, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def spare(self, staying: Iterable[Tensor]) -> None:
        """The memory of `staying`, which others hold anyway, does not leave."""
        for key in {t.untyped_storage()._cdata for t in staying}:
            self.memories.pop(key, None)

    def leave(self, staying: Iterable[Tensor]) -> int:
        """Copy all to the host and let go of it here, but the memory of `staying`. The bytes that left."""
        self.spare(staying)
        memories = list(self.memories.values())
        for m, host in zip(memories, self.mover.to_host([m.here for m in memories])):  # type: ignore[misc]
            m.host, m.here = host, None
        return sum(m.host.nbytes for m in memories if m.host is not None)

    def took(self, x: Tensor) -> bool:
        """Whether the memory of x has left."""
        return x.untyped_storage()._cdata in self.memories

    def come_back(self) -> None:
        memories = list(self.memories.values())
        back, self.arrived = self.mover.to_device([m.host for m in memories])  # type: ignore[misc]
        for m, here in zip(memories, back):
            m.here, m.host = here, None
        self.memories.clear()  # from here on the graph alone holds it

    def arrive(self) -> None:
        """The device goes on when what came back is there."""
        if self.arrived is not None:
            torch.cuda.current_stream(self.mover.device).wait_event(self.arrived)


def hollow(x: Tensor) -> None:
    """Let go of the memory of a tensor that autograd alone knows from here on, by its shape."""
    x.data = x.new_empty(()).expand(x.shape)
