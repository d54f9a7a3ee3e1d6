"""Memory that all ranks of an axis on one host can read and write, and the exchanges through it.

Gathering: each rank leaves its tokens in its buffer, and the others pull them slice by slice while the matmul works on
slices that have arrived. Scattering: each finished slice of a matmul's output is pushed to the rank that owns it while
the next is computed, and the owner adds up what it received. Copies run on a separate stream, on a GPU by copy engines,
so they take no multiprocessors from the matmul. Pushing rows: each rank writes just the rows that another needs to
their place in its buffer; only the device knows which rows they are.

Buffers come in two sets used in turn, with one barrier for each exchange. An exchange writes to a set that was last
used two exchanges ago. This is safe because of the barrier of the exchange in between, which every rank enters only
after its own work with the older one. So an exchange must be complete on this rank (all slices taken, or waited for)
before the barrier of the next. A second `gather` ensures that for the first; a `gather` and a `scatter` after it may be
open together, since copies run one after another. On a GPU the memory is torch's symmetric memory (never multicast),
and on a CPU a file that all ranks map.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor

from phalanx.comm.axis import Axis

ALIGN = 512
T = TypeVar("T")
FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else None  # None: the folder for temporary files


class Symmetric:
    """Two sets of buffers on each rank of an axis; a set has `whole` bytes to gather from and as many to scatter to."""

    def __init__(self, axis: Axis, whole: int, device: torch.device):
        self.size, self.index, self.device = axis.size, axis.index, device
        self.whole = -(-whole // (ALIGN * axis.size)) * ALIGN * axis.size
        self.nbytes = total = 4 * self.whole
        self.turn = 0
        self.open: PulledParts | None = None  # a gather whose slices may still be in flight
        self._handle: Any = None
        self._axis = axis
        self._views: dict[tuple, Tensor] = {}  # created once: a view costs the host microseconds
        self._buffers = self._on_gpu(axis, total) if device.type == "cuda" else self._on_cpu(axis, total)
        starts = [[buffer.data_ptr() + number * self.whole for buffer in self._buffers] for number in range(4)]
        # of each half of each set on every rank, for kernels
        self._addresses = torch.tensor(starts, dtype=torch.int64).to(device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.sum: Callable[[Tensor], Tensor] = lambda parts: parts.sum(0)
        if device.type == "cuda" and find_spec("triton"):
            from phalanx.comm.sum_kernel import sum_parts

            self.sum = sum_parts

    def _on_gpu(self, axis: Axis, total: int) -> list[Tensor]:
        import torch.distributed._symmetric_memory as memory

        self._own = made_by_all(axis, lambda: memory.empty(total, dtype=torch.uint8, device=self.device))
        self._handle = memory.rendezvous(self._own, axis.group)
        return [self._handle.get_buffer(r, (total,), torch.uint8) for r in range(axis.size)]

    def _on_cpu(self, axis: Axis, total: int) -> list[Tensor]:
        path = axis.all_gather_text(make_file(total * axis.size) if axis.index == 0 else "")[0]
        if not path:
            raise OSError(f"no room for {total * axis.size / 2**20:.0f} MiB in {FOLDER or tempfile.gettempdir()}")
        try:
            size = total * axis.size
            mapped = made_by_all(axis, lambda: torch.from_file(path, shared=True, size=size, dtype=torch.uint8))
        finally:  # either every rank has it open, or none will
            if axis.index == 0:
                os.unlink(path)
        return list(mapped.split(total))

    def take_turn(self) -> int:
        self.turn ^= 1
        return self.turn

    def back_to(self, turn: int) -> None:
        """End on the turn with which a sequence began that will be replayed, so that turns still alternate across
        replays."""
        if self.turn != turn:
            self.take_turn()
            self.barrier()

    def fits(self, whole: int) -> bool:
        """Whether a gathered (or not yet scattered) tensor of `whole` bytes fits."""
        return whole <= self.whole

    def pulled(self, x: Tensor) -> PulledParts:
        """x of all ranks, gathered in slices."""
        return PulledParts(self, x)

    def pushed(self, tokens: int, width: int, like: Tensor) -> PushedParts:
        """A matmul's output (tokens, width), scattered in slices as they are filled in."""
        return PushedParts(self, tokens, width, like)

    def rows(self, tokens: int, width: int, like: Tensor, back: bool) -> PushedRows:
        """Rows that each rank writes where they are needed."""
        return PushedRows(self, tokens, width, like, back)

    def view(self, rank: int, turn: int, scatter: bool, part: int, like: Tensor) -> Tensor:
        """Slice number `part` of a set on a rank, with the shape and dtype of `like`."""
        key = (rank, turn, scatter, part, like.shape, like.dtype)
        if key not in self._views:
            start = (2 * turn + scatter) * self.whole + part * (self.whole // self.size)
            self._views[key] = self._buffers[rank][start : start + like.nbytes].view(like.dtype).view(like.shape)
        return self._views[key]

    def addresses(self, turn: int, scatter: bool) -> Tensor:
        """(size,) int64 on the device: where that half of a set begins on each rank."""
        return self._addresses[2 * turn + scatter]

    def barrier(self) -> None:
        """What every rank wrote before is visible to all afterwards. On a GPU the stream waits, not the host."""
        if self._handle is not None:
            self._handle.barrier(channel=0)
        else:
            self._axis.barrier()

    def aside(self) -> AbstractContextManager[Any]:
        """Work inside runs on the copy stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def mark(self) -> Any:
        """An event on the current stream."""
        return None if self.stream is None else torch.cuda.current_stream(self.device).record_event()

    def after(self, mark: Any) -> None:
        """The current stream waits for a mark."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)


def made_by_all(axis: Axis, work: Callable[[], T]) -> T:
    """The result of `work` on this rank, once every rank of the axis has its own. OSError on all of them if one
    failed."""
    made: list[T] = []
    trouble = ""
    try:
        made.append(work())
    except (RuntimeError, OSError, ImportError) as error:
        trouble = first_line(error)
    found = [text for text in axis.all_gather_text(trouble) if text]
    if found:
        raise OSError(found[0])
    return made[0]


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def make_file(nbytes: int) -> str:
    """Create a file that only its owner can read, with its blocks allocated (writing to a hole on a full disk would
    kill the process); returns its path, or "" if that fails."""
    try:
        file, path = tempfile.mkstemp(prefix="phalanx-", dir=FOLDER)
    except OSError:
        return ""
    try:
        os.posix_fallocate(file, 0, nbytes) if hasattr(os, "posix_fallocate") else os.truncate(file, nbytes)
    except OSError:
        os.unlink(path)
        return ""
    finally:
        os.close(file)
    return path


class PulledParts:
    """The gather of x (n, ...) of each rank into (size * n, ...): slices as they arrive, the rank's own first.

    Slices arrive in this rank's buffer, from which the others pull this rank's own; they stay valid until the exchange
    after the next. The own slice is written, and the barrier passed, before the matmuls that use the slices are
    launched: behind a matmul they would wait for its multiprocessors, and other ranks for them.
    """

    def __init__(self, memory: Symmetric, x: Tensor):
        self.memory, self.tokens = memory, x.shape[0]
        m, n = memory, memory.size
        turn = m.take_turn()
        shape = torch.empty(n * x.shape[0], *x.shape[1:], dtype=x.dtype, device="meta")
        wholes = [m.view(rank, turn, False, 0, shape) for rank in range(n)]
        self.out = wholes[m.index]
        self.order = [(m.index + k) % n for k in range(1, n)]
        self.out[self._rows(m.index)].copy_(x)
        if m.open is not None:
            m.open.arrived()
        m.barrier()
        m.open = self
        begun, self.marks = m.mark(), []
        with m.aside():
            m.after(begun)
            for peer in self.order:
                self.out[self._rows(peer)].copy_(wholes[peer][self._rows(peer)])
                self.marks.append(m.mark())

    def _rows(self, rank: int) -> slice:
        return slice(rank * self.tokens, (rank + 1) * self.tokens)

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """(rows of the whole, their values), ready for the current stream."""
        for peer, mark in ((self.memory.index, None), *zip(self.order, self.marks)):
            self.memory.after(mark)
            yield self._rows(peer), self.out[self._rows(peer)]
        self.arrived()

    def arrived(self) -> None:
        """The current stream waits for all slices."""
        self.memory.after(self.marks[-1])
        if self.memory.open is self:
            self.memory.open = None

    def wait(self) -> Tensor:
        self.arrived()
        return self.out


class PushedParts:
    """The scatter of a matmul's output (T, width): slices to fill in, each pushed to its rank as soon as it is filled;
    the rank's own last."""

    def __init__(self, memory: Symmetric, tokens: int, width: int, like: Tensor):
        self.memory, self.rows = memory, tokens // memory.size
        self.part = like.new_empty(self.rows, width)
        self.turn = memory.take_turn()
        self.kept: list[Tensor] = []  # read by the copy stream until `wait`

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """(rows of the output, where to write them); the caller must have written them when it asks for the next."""
        m, mark = self.memory, None
        for k in range(1, m.size):
            peer = (m.index + k) % m.size
            buffer = self.part if k == 1 else torch.empty_like(self.part)
            self.kept.append(buffer)
            yield slice(peer * self.rows, (peer + 1) * self.rows), buffer
            filled = m.mark()
            with m.aside():
                m.after(filled)
                m.view(peer, self.turn, True, m.index, buffer).copy_(buffer)
                mark = m.mark()
        yield (
            slice(m.index * self.rows, (m.index + 1) * self.rows),
            m.view(m.index, self.turn, True, m.index, self.part),
        )
        self.pushed = mark

    def wait(self) -> Tensor:
        """This rank's rows of the sum over ranks, added in rank order in at least fp32."""
        m = self.memory
        m.after(self.pushed)
        m.barrier()
        first, distance = m.view(m.index, self.turn, True, 0, self.part), m.whole // m.size // self.part.element_size()
        received = torch.as_strided(
            first, (m.size, *self.part.shape), (distance, *self.part.stride()), first.storage_offset()
        )
        return m.sum(received)


class PushedRows:
    """Buffers (size * tokens, width) on each rank; this rank writes to slot number `index` on all of them, and only
    rows that were written may be read. `back`: which half of a set, so that both directions use different memory."""

    def __init__(self, memory: Symmetric, tokens: int, width: int, like: Tensor, back: bool):
        self.memory, self.tokens = memory, tokens
        turn = memory.take_turn()
        shape = torch.empty(memory.size * tokens, width, dtype=like.dtype, device="meta")
        self._wholes = [memory.view(rank, turn, back, 0, shape) for rank in range(memory.size)]
        self.addresses = memory.addresses(turn, back)
        self.first = memory.index * tokens  # first row of this rank's slot

    def part(self, rank: int) -> Tensor:
        """(tokens, width): this rank's slot on `rank`, to write to."""
        return self._wholes[rank][self.first : self.first + self.tokens]

    def fill(self, write: Callable[[PushedRows], None]) -> PushedRows:
        """Launch `write` on the copy stream, which waits for everything issued before; what it reads is kept until
        `wait`."""
        m, begun = self.memory, self.memory.mark()
        with m.aside():
            m.after(begun)
            write(self)
            m.barrier()
            self._filled, self._kept = m.mark(), write
        return self

    def wait(self) -> Tensor:
        """What all ranks wrote here; valid until the exchange after the next."""
        self.memory.after(self._filled)
        del self._kept
        return self._wholes[self.memory.index]
