"""Activations that wait in host memory between the forward and the backward of some blocks: what is held, and how it leaves and comes back.

Knows tensors and a device, not when to move: whoever runs the blocks says that (pipeline.execute, at instructions of the schedule). On a GPU
copies go to pinned memory and back on a stream of their own, beside compute; on the CPU they are plain copies. What is held in the memory of
CUDA graphs is copied by graphs, always between the same places. Either way the bits that come back are those that left. Rajbhandari et al.,
"ZeRO-Infinity", 2021, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class Mover:
    """Copies between a device and the host, on a stream of its own where there are any."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_host(self, x: Tensor) -> Tensor:
        if self.stream is None:
            return x.clone()
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(x, non_blocking=True)
        x.record_stream(self.stream)  # its memory is used anew only after the copy
        return host

    def to_device(self, host: Tensor) -> tuple[Tensor, Any]:
        """The tensor, and what to wait for before it is read (None: nothing)."""
        if self.stream is None:
            return host.clone(), None
        x = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))  # the memory may still be read by who had it before
        with torch.cuda.stream(self.stream):
            x.copy_(host, non_blocking=True)
            arrived = self.stream.record_event()
        x.record_stream(self.stream)
        return x, arrived


@dataclass(eq=False)
class Memory:
    """All bytes of one storage: `here` (N,) uint8 on the device, or `host`; `arrived`: what to wait for before the first reading."""

    here: Tensor | None
    host: Tensor | None = None
    arrived: Any = None


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
        if m.arrived is not None:
            torch.cuda.current_stream(m.here.device).wait_event(m.arrived)
            m.arrived = None
        return torch.empty(0, dtype=self.dtype, device=m.here.device).set_(m.here.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(eq=False)
class Held:
    """What blocks save for the backward of one micro-batch; a storage is held once, whatever views of it are saved."""

    mover: Mover
    memories: dict[int, Memory] = field(default_factory=dict)

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
        for m in self.memories.values():
            m.host, m.here = self.mover.to_host(m.here), None  # type: ignore[arg-type]
        return sum(m.host.nbytes for m in self.memories.values() if m.host is not None)

    def come_back(self) -> None:
        for m in self.memories.values():
            (m.here, m.arrived), m.host = self.mover.to_device(m.host), None  # type: ignore[arg-type]
        self.memories.clear()  # from here on the graph alone holds it

    def between_places(self, new_host: Callable[[int], Tensor]) -> Places:
        """Where all that is held now is to lie on the host; from here on the graph alone holds it. `new_host`: that many bytes there."""
        memories = list(self.memories.values())
        self.memories.clear()
        return Places(memories, [new_host(m.here.nbytes) for m in memories])  # type: ignore[union-attr]


@dataclass(eq=False)
class Places:
    """What was held, until it is fetched, and its places on the host. The copies can be captured: none allocates on the host or waits."""

    memories: list[Memory]
    hosts: list[Tensor]

    def copy_out(self) -> None:
        for m, host in zip(self.memories, self.hosts, strict=True):
            host.copy_(m.here, non_blocking=True)  # type: ignore[arg-type]

    def let_go(self) -> None:
        """Of the memory here, which others may write from now on."""
        for m in self.memories:
            m.here = None

    def copy_in(self, device: torch.device) -> None:
        """To new memory, which the graph alone holds."""
        for m, host in zip(self.memories, self.hosts, strict=True):
            m.here = torch.empty(host.shape, dtype=host.dtype, device=device)
            m.here.copy_(host, non_blocking=True)
        self.memories.clear()
