"""Exchanges of a few tokens between GPUs of one host, each of them one kernel: in a step of generation a collective's
start takes longer than its bytes.

Every rank pushes its values into the others' memory and waits for theirs. An exchange is cut into channels of CHANNEL
bytes, which know nothing of each other; a channel counts its exchanges on the device, so that a CUDA graph can be
replayed, and values travel with that number. Its memory comes in two halves, used in turn. A half is written again two
exchanges later: by then the others have read it, since they have sent the values of the exchange in between, for which
this rank has waited.

    rank r, channel c, exchange n:  push (value, n) to all -> read until every value has the number n
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.comm.overlap import SharedBuffers

CHANNEL = 2**11  # bytes of one rank's values that a program of the kernels carries
CHANNELS = 2**9  # what one rank gives or gets in an exchange is at most CHANNEL * CHANNELS bytes: 1 MiB
WORD = 4


class SmallExchanges:
    """For Axis.memory: gathers and scatters of matmuls' tokens that fit; larger ones stay collectives.

    Sums are added in rank order in at least fp32, so all ranks' layouts of the same size give the same bits.
    """

    turn = 0  # of buffers: the device counts

    def __init__(self, axis: Axis, device: torch.device):
        self.size, self.index = axis.size, axis.index
        self.nbytes = 2 * axis.size * CHANNELS * 2 * CHANNEL  # numbers take as much as values
        self._shared = SharedBuffers(axis, self.nbytes, device)  # zeros: exchanges are numbered from 1
        starts = torch.tensor([buffer.data_ptr() for buffer in self._shared.buffers], dtype=torch.int64)
        from phalanx.comm import small_kernel  # Triton. After the memory: all ranks must meet there, whoever lacks it

        self._kernels = small_kernel
        self._memory = (starts.to(device), torch.zeros(CHANNELS, dtype=torch.int32, device=device))

    def fits(self, whole: int) -> bool:
        """Whether a gathered (or not yet scattered) tensor of `whole` bytes fits: in memory, and into words."""
        return whole <= self.size * CHANNEL * CHANNELS and whole % (self.size * WORD) == 0

    def take_turn(self) -> int:
        return self.turn

    def back_to(self, turn: int) -> None:
        """Nothing: the device counts on across replays."""

    def pulled(self, x: Tensor) -> Exchanged:
        """x (n, ...) of all ranks, gathered: (size * n, ...)."""
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        self._kernels.gather(x.contiguous(), out, self._memory, **self._sizes)
        return Exchanged(out)

    def pushed(self, tokens: int, width: int, like: Tensor) -> ToSum:
        """A matmul's output (tokens, width), to be filled in and scattered."""
        return ToSum(self, like.new_empty(tokens, width))

    def summed(self, parts: Tensor) -> Tensor:
        """parts (size * n, width) of each rank -> this rank's rows (n, width) of the sum over ranks."""
        out = parts.new_empty(len(parts) // self.size, *parts.shape[1:])
        self._kernels.scatter(parts, out, self._memory, **self._sizes)
        return out

    @property
    def _sizes(self) -> dict[str, int]:
        return {"INDEX": self.index, "SIZE": self.size, "CHANNELS": CHANNELS, "WORDS": CHANNEL // WORD}

    def rows(self, tokens: int, width: int, like: Tensor, back: bool) -> Any:
        raise NotImplementedError("exchanges of experts' rows go through symmetric.Symmetric")


class Exchanged:
    """A gather that the current stream has in its order."""

    def __init__(self, whole: Tensor):
        self._whole = whole

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """(rows of the whole, their values)."""
        yield slice(0, len(self._whole)), self._whole

    def wait(self) -> Tensor:
        return self._whole


class ToSum:
    """One slice to fill in, summed over ranks as soon as it is filled."""

    def __init__(self, exchanges: SmallExchanges, buffer: Tensor):
        self._exchanges, self._buffer = exchanges, buffer

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """(rows of the product, where to write them); the caller must have written them when it asks for the next."""
        yield slice(0, len(self._buffer)), self._buffer
        self._sum = self._exchanges.summed(self._buffer)

    def wait(self) -> Tensor:
        """This rank's rows of the sum over ranks."""
        return self._sum
