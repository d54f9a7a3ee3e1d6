"""Page-locked host memory for much at once. Knows nothing of checkpoints."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor

from phalanx.checkpoint.threads import cores, in_threads, share_of

HUGE_PAGE = 2 << 20
TOUCHED = 64 << 20  # by a thread at a time
PAGE = 4096


class PageLocked:
    """`memory` (size,) uint8 on the host, to which a GPU copies beside its work. It is unlocked with this object.

    The driver locks what it allocates page by page in one thread, about 1 GB/s, and torch rounds sizes up to powers of
    two. Here threads touch huge pages first, where the system has these, and little is left to do for the driver.
    """

    def __init__(self, size: int):
        cuda, memory = torch.cuda.cudart(), touched(size)
        if cuda.cudaHostRegister(memory.data_ptr(), len(memory), 0) == cuda.cudaError.success:
            weakref.finalize(self, _unlock, memory).atexit = False
        else:  # some systems only lock what the driver allocates
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # the error stays until a kernel of this thread reports it
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.memory = memory[:size]


def _unlock(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def touched(size: int) -> Tensor:
    """At least `size` bytes (uint8) of zeros, in huge pages where the system has these. All pages are there already.
    Processes that are forked do not get them: a kernel would copy pages that a GPU writes to."""
    memory = mmap.mmap(-1, -(-size // HUGE_PAGE) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)
    found = torch.frombuffer(memory, dtype=torch.uint8)

    def touch(parts: Iterator[Tensor]) -> None:
        for part in parts:
            part[::PAGE].zero_()

    in_threads(found.split(TOUCHED), touch, share_of(cores(), 1))
    return found
