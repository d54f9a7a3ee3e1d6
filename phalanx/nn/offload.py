"""Activation offload: activations wait in host memory between the forward and the backward of some blocks.

On a GPU they are copied to pinned memory and back on a stream of their own, while blocks compute; on the CPU these are
plain copies. The bits that come back are the bits that were copied away. Rajbhandari et al., "ZeRO-Infinity", 2021,
section 5.

This file knows tensors and a device, not when to copy: schedule.offload places the instructions, pipeline.execute
carries them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass


class Mover:
    """Copies tensors between a device and the host: on a GPU on a stream of its own, through pinned memory.

    The source of a copy to the host stays alive until that copy is complete, and the host waits for that before it
    starts the next one. Otherwise the host would run ahead of the device and allocate memory that the copies have not
    freed yet.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copying: tuple[Any, Sequence[Tensor]] | None = None  # the end of a copy to the host, and its sources

    def to_host(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Copies of `xs` on the host. On a GPU they are complete after `finish`."""
        if self.stream is None:
            return [x.clone() for x in xs]
        hosts = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in xs]
        self.finish()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for host, x in zip(hosts, xs):
                host.copy_(x, non_blocking=True)
            self._copying = self.stream.record_event(), xs
        return hosts

    def finish(self) -> None:
        """Wait until the copies to the host are complete, then free their sources."""
        if self._copying is not None:
            self._copying[0].synchronize()
            self._copying = None

    def to_device(self, hosts: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """The tensors, and the event to wait for before they are read or freed (None: nothing to wait for)."""
        if self.stream is None:
            return [host.clone() for host in hosts], None
        self.finish()
        xs = [torch.empty(host.shape, dtype=host.dtype, device=self.device) for host in hosts]
        # Kernels of the current stream may still read the memory that the allocator has just reused for `xs`.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for host, x in zip(hosts, xs):
                x.copy_(host, non_blocking=True)
            return xs, self.stream.record_event()


@dataclass(eq=False)
class OffloadedStorage:
    """All bytes of one storage: `device` or `host`, (N,) uint8, whichever it is on."""

    device: Tensor | None
    host: Tensor | None = None


@dataclass(frozen=True)
class OffloadedTensor:
    """A tensor in an offloaded storage: which part of it, and in which layout."""

    storage: OffloadedStorage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        data = self.storage.device
        if data is None:
            raise RuntimeError("an offloaded activation is read before it was fetched")
        return torch.empty(0, dtype=self.dtype, device=data.device).set_(
            data.untyped_storage(), self.offset, self.size, self.stride
        )


@dataclass(eq=False)
class OffloadedActivations:
    """What the blocks of one segment save for the backward of one micro-batch, and where it is.

        forward           to_host            to_device              wait
          put   on device ───────▶ on host ───────────▶ on its way ──────▶ on device, read by backward

    A storage is copied once, however many saved tensors are views of it. `to_device` hands all storages over to the
    autograd graph, so that backward frees each one after its last use; a segment that is never offloaded goes from
    `put` straight to backward.
    """

    mover: Mover
    storages: dict[int, OffloadedStorage] = field(default_factory=dict)
    copied_back: Any = None  # the event at the end of the copies to the device

    def put(self, tensor: Tensor) -> OffloadedTensor:
        """Keep a tensor that a block saves."""
        untyped = tensor.untyped_storage()
        storage = self.storages.get(untyped._cdata)
        if storage is None:
            storage = OffloadedStorage(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(untyped))
            self.storages[untyped._cdata] = storage
        return OffloadedTensor(storage, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def to_host(self, staying: Iterable[Tensor]) -> int:
        """Copy all storages to the host and free them on the device, except those of `staying`, which something else
        keeps alive anyway. Returns the number of bytes copied."""
        for key in {t.untyped_storage()._cdata for t in staying}:
            self.storages.pop(key, None)
        storages = list(self.storages.values())
        for storage, host in zip(storages, self.mover.to_host([s.device for s in storages])):  # type: ignore[misc]
            storage.host = host
            storage.device = None
        return sum(s.host.nbytes for s in storages if s.host is not None)

    def holds(self, x: Tensor) -> bool:
        """Whether the storage of `x` is one of these."""
        return x.untyped_storage()._cdata in self.storages

    def to_device(self) -> None:
        """Start copying everything back. From here on only the autograd graph keeps it alive."""
        storages = list(self.storages.values())
        copies, self.copied_back = self.mover.to_device([s.host for s in storages])  # type: ignore[misc]
        for storage, copy in zip(storages, copies):
            storage.device = copy
            storage.host = None
        self.storages.clear()

    def wait(self) -> None:
        """Make the device wait for the copies of `to_device`, if there were any."""
        if self.copied_back is not None:
            torch.cuda.current_stream(self.mover.device).wait_event(self.copied_back)


def free_storage(x: Tensor) -> None:
    """Free the storage of `x`; autograd still needs its shape, nobody needs its values."""
    x.data = x.new_empty(()).expand(x.shape)
