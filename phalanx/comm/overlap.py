"""Shards of ranks on one host, exchanged by copy engines: weights are pulled from the ranks that hold them, gradients
pushed to the ranks that sum them.

A collective's kernels take multiprocessors from concurrent matmuls, which then wait for the last few; copies take none.
Each rank's shard of the weights is in memory that the others can read, so gathering is copying. The shards change once
a step. That needs one barrier before the first copy after a change (all have written) and one before the next change
(all have read), however many gathers there are. For gradients, each rank receives the others' pieces of its shard, in
sets of buffers used in turn, and adds them to its own in rank order. A set is written again two pieces later; this is
safe because of the barrier of the piece in between, which a rank enters only after its sum of the older one.

The memory is torch's symmetric memory on a GPU (never multicast), and on a CPU files that all ranks map. data_parallel
decides who needs which shard when.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.comm.symmetric import FOLDER, made_by_all, make_file

ALIGN = 64  # bytes: shards of buckets are multiples of it, so none are wasted
SETS = 3 * 2**28  # upper bound in bytes for both sets of gradient pieces
FIRST = -1  # priority of streams: barriers and sums are short, and others wait for them


class SharedBuffers:
    """`nbytes` on each rank of an axis that all ranks can read and write: `buffers`, uint8, by rank."""

    def __init__(self, axis: Axis, nbytes: int, device: torch.device):
        self._axis = axis
        self._handle: Any = None
        self.buffers = self._on_gpu(nbytes, device) if device.type == "cuda" else self._on_cpu(nbytes)

    def _on_gpu(self, nbytes: int, device: torch.device) -> list[Tensor]:
        import torch.distributed._symmetric_memory as memory

        own = made_by_all(self._axis, lambda: memory.empty(nbytes, dtype=torch.uint8, device=device).zero_())
        self._handle = memory.rendezvous(own, self._axis.group)
        others = [self._handle.get_buffer(r, (nbytes,), torch.uint8) for r in range(self._axis.size)]
        return [own if r == self._axis.index else other for r, other in enumerate(others)]

    def _on_cpu(self, nbytes: int) -> list[Tensor]:
        mine = make_file(nbytes)
        paths = self._axis.all_gather_text(mine)
        try:
            if not all(paths):
                raise OSError(
                    f"no room for {nbytes / 2**20:.0f} MiB a rank in {FOLDER or 'the folder for temporary files'}"
                )
            mapped = made_by_all(  # from here on every rank has them open
                self._axis,
                lambda: [torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8) for path in paths],
            )
        finally:
            if mine:
                os.unlink(mine)
        return mapped

    def barrier(self, channel: int = 0) -> None:
        """What every rank wrote before is visible to all afterwards. On a GPU the current stream waits, not the host;
        each of two streams has its own channel."""
        if self._handle is not None:
            self._handle.barrier(channel=channel)
        else:
            self._axis.barrier()


class Aside:
    """A stream beside the current one; on a CPU, the current thread."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=FIRST) if device.type == "cuda" else None

    def __call__(self) -> AbstractContextManager[Any]:
        """Work inside waits for everything issued before on the current stream."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def done(self) -> Done:
        """Everything issued on this stream so far."""
        return Done(None if self._stream is None else self._stream.record_event(), self._device)


class Done:
    """A handle like those of torch's collectives."""

    def __init__(self, event: Any, device: torch.device):
        self._event, self._device = event, device

    def wait(self) -> None:
        """The current stream waits."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def is_completed(self) -> bool:
        return self._event is None or self._event.query()


class PulledMemory:
    """Memory for shards that others pull. `place` allocates in it, in the same order on all ranks of the axis."""

    def __init__(self, axis: Axis, nbytes: int, device: torch.device):
        self.size, self.index = axis.size, axis.index
        self._memory, self._aside = SharedBuffers(axis, nbytes, device), Aside(device)
        self._own = self._memory.buffers[axis.index]
        self._taken = 0
        self._changed, self._read = True, False

    def place(self, numel: int, dtype: torch.dtype) -> Tensor:
        """(numel,) zeros that others can pull."""
        start, stop = self._taken, self._taken + numel * dtype.itemsize
        self._taken = -(-stop // ALIGN) * ALIGN
        if stop > len(self._own):
            raise ValueError(f"no room for {numel} elements of {dtype}: {stop} bytes of {len(self._own)}")
        return self._own[start:stop].view(dtype).zero_()

    def holds(self, own: Tensor) -> bool:
        return self._own.data_ptr() <= own.data_ptr() < self._own.data_ptr() + len(self._own) and own.numel() > 0

    def open(self) -> None:
        """To be called before this rank, and all others, change their shards: wait until all ranks have read them."""
        if self._read:
            self._memory.barrier(channel=1)
        self._changed, self._read = True, False

    def changed(self) -> None:
        """Shards have changed again since `open`: the next pull waits until all ranks have written."""
        self._changed = True

    def pull(self, out: Tensor, own: Tensor) -> Done:
        """Fill `out` (size * n,) from each rank's `own` (n,), which is stored in this memory; or `own` is a slice of
        `out`, all of which is stored here."""
        first, n, nbytes = own.data_ptr() - self._own.data_ptr(), own.numel(), own.nbytes
        within = out.data_ptr() + self.index * nbytes == own.data_ptr()
        with self._aside():
            if self._changed:
                self._memory.barrier()
            self._changed, self._read = False, True
            for k in range(self.size):  # each rank begins with a different one
                rank = (self.index + k) % self.size
                at = first + (rank - self.index) * nbytes * within
                if rank != self.index or not within:
                    out[rank * n : (rank + 1) * n].copy_(self._memory.buffers[rank][at : at + nbytes].view(own.dtype))
        return self._aside.done()


class SummedMemory:
    """Memory for pieces of gradients on their way to the rank that sums them."""

    def __init__(self, axis: Axis, largest: int, device: torch.device):
        """largest: bytes of the largest shard that a rank sums; shards that exceed a set's piece are sent in
        several."""
        self.size, self.index = axis.size, axis.index
        self.piece = piece_bytes(axis.size, largest)
        self._memory, self._aside = SharedBuffers(axis, 2 * (axis.size - 1) * self.piece, device), Aside(device)
        self._turn = 0
        self._add = add_pieces
        if device.type == "cuda" and find_spec("triton"):
            from phalanx.comm.sum_kernel import add_pieces_

            self._add = add_pieces_

    def reduce(self, x: Tensor, out: Tensor, add: bool) -> Done:
        """out (n,) = this rank's slice of the sum of x (size * n,) over the ranks, or is increased by it; `out` may be
        this rank's slice of x."""
        parts, step = x.view(self.size, -1), self.piece // x.element_size()
        with self._aside():
            for first in range(0, len(out), step):
                part = slice(first, min(first + step, len(out)))
                received = self._exchange(parts[:, part])
                self._add(out[part], parts[self.index, part], received, self.index, add)
        return self._aside.done()

    def _exchange(self, parts: Tensor) -> Tensor:
        """parts (size, n), of which row r goes to rank r -> (size - 1, n) what the others sent, in rank order."""
        self._turn ^= 1
        for k in range(1, self.size):
            rank = (self.index + k) % self.size
            self._set(rank, parts)[self.index - (self.index > rank)].copy_(parts[rank])
        self._memory.barrier()
        return self._set(self.index, parts)

    def _set(self, rank: int, like: Tensor) -> Tensor:
        """(size - 1, n): where others write for a rank on this turn."""
        nbytes = (self.size - 1) * self.piece
        whole = self._memory.buffers[rank][self._turn * nbytes : (self._turn + 1) * nbytes].view(like.dtype)
        return whole.view(self.size - 1, -1)[:, : like.shape[1]]


def piece_bytes(size: int, largest: int) -> int:
    """Bytes of a piece, which one rank sends to another at a time."""
    return -(-min(largest, SETS // (2 * (size - 1))) // ALIGN) * ALIGN


def sums_bytes(size: int, largest: int) -> int:
    """Bytes that SummedMemory takes on each rank."""
    return 2 * (size - 1) * piece_bytes(size, largest)


def add_pieces(out: Tensor, own: Tensor, received: Tensor, index: int, add: bool) -> None:
    """out (n,) = the sum, in rank order, of own (n,), from rank number `index`, and received (size - 1, n); or out is
    increased by it."""
    rows = [*received[:index], own, *received[index:]]
    total = rows[0] + rows[1]
    for row in rows[2:]:
        total += row
    out.add_(total) if add else out.copy_(total)


class SharedExchange:
    """Both for one axis: shards that are pulled, and sums of gradients."""

    def __init__(self, axis: Axis, parts: int, largest: int, device: torch.device):
        """parts: bytes of all shards that others may read on this rank; largest: as in SummedMemory. 0: nothing is
        pulled, or summed."""
        self.parts = PulledMemory(axis, parts, device) if parts else None
        self.sums = SummedMemory(axis, largest, device) if largest else None
        self.nbytes = parts + (sums_bytes(axis.size, largest) if largest else 0)

    def open(self) -> None:
        if self.parts is not None:
            self.parts.open()
