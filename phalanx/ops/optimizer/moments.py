"""Adam's moments in 8 bits: codes of E4M3, and for every BLOCK of them a power of two (microscaling: Rouhani et al.,
2023).

Knows flat runs of elements and nothing of parameters; blocks begin where runs begin. Of the second moment the root
is kept: its range is half as many powers of two (codes of one block span 17), and no positive one becomes zero,
since updates are divided by it. Eight bits have three of fraction, so the 5 % by which a moving average moves in a
step would mostly be rounded away: codes are therefore rounded up or down at random, right on average. What decides
is a hash of the number itself and of the step: the same for equal numbers on any rank, and after a restart; a number
whose last bit differs may be rounded otherwise. Values are exact in bf16, which is what checkpoints hold, and what
was stored is stored again to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
LEAST, MOST = -54, 100  # exponents of blocks: so that the second moment, a square, stays in the range of fp32
MAX = 448.0
GOLDEN, MIX = 0x9E3779B9, (0x85EBCA6B, 0xC2B2AE35)  # murmur3's last mixing (Appleby, 2011)


@dataclass(frozen=True)
class Narrow:
    """`codes` (n,) E4M3 and `exponents` (n / BLOCK,) int8; `root`: of numbers >= 0 whose roots are kept."""

    quantized: Tensor
    exponents: Tensor
    root: bool

    @staticmethod
    def zeros(n: int, device: torch.device, root: bool) -> Narrow:
        if n % BLOCK:
            raise ValueError(f"{n} elements are no whole blocks of {BLOCK}")
        exponents = torch.full((n // BLOCK,), LEAST, dtype=torch.int8, device=device)
        return Narrow(torch.zeros(n, dtype=torch.float8_e4m3fn, device=device), exponents, root)

    def __getitem__(self, run: slice) -> Narrow:
        if run.start % BLOCK or run.stop % BLOCK:
            raise ValueError(
                f"optim.moments=fp8 keeps {BLOCK} elements together, and optim.lr_scale tells matrices apart "
                "that are stored in one "
                f"(at element {run.start if run.start % BLOCK else run.stop}); give them one factor"
            )
        return Narrow(self.quantized[run], self.exponents[run.start // BLOCK : run.stop // BLOCK], self.root)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.quantized, self.exponents

    def wide(self, dtype: torch.dtype) -> Tensor:
        """The numbers (n,), exact in bf16 and wider."""
        kept = (self.quantized.float().view(-1, BLOCK) * torch.exp2(self.exponents.float()).unsqueeze(1)).flatten()
        return (kept.square() if self.root else kept).to(dtype)

    def store_(self, values: Tensor, step: Tensor | None = None) -> None:
        """Keep (n,) numbers; `step` (): rounded at random as this step does it, without one to the nearest."""
        kept = values.float()
        kept = kept.sqrt() if self.root else kept
        exponents = exponents_of(kept.abs().view(-1, BLOCK).amax(1))
        noise = torch.full_like(kept, 1 << 19, dtype=torch.int64) if step is None else noise_of(kept, step, self.root)
        size = kept.abs().view(-1, BLOCK) * torch.exp2(-exponents.float()).unsqueeze(1)
        size = rounded(size.flatten(), noise)
        if self.root:
            size = torch.where((kept > 0) & (size == 0), 2.0**-9, size)
        self.exponents.copy_(exponents)
        self.quantized.copy_(torch.copysign(size, kept).to(self.quantized.dtype))


def exponents_of(amax: Tensor) -> Tensor:
    """The power of two of blocks with these largest numbers (fp32): codes go up to 1.75 2^8, and what is rounded up
    still has room, so that numbers that were stored once have the same codes or finer ones."""
    bits = amax.view(torch.int32)
    return ((bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).int()).clamp(LEAST, MOST).to(torch.int8)


def rounded(size: Tensor, noise: Tensor) -> Tensor:
    """Numbers 0 <= size of fp32, to one of the two neighbours in E4M3: up if what is cut off, in 2^-20 of their
    distance, and the noise are 1."""
    full = ((size.view(torch.int32) + noise.int()) & -(1 << 20)).view(torch.float32)
    small = torch.floor(size * 512.0 + noise.float() * 2.0**-20) * 2.0**-9
    return torch.where(size < 2.0**-6, small, full).clamp_max(MAX)


def noise_of(kept: Tensor, step: Tensor, root: bool) -> Tensor:
    """(n,) int64 in [0, 2^20)."""
    x = (kept.contiguous().view(torch.int32).long() ^ (step.long() * 2 + root) * GOLDEN) & 0xFFFFFFFF
    for shift, factor in zip((16, 13), MIX):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return (x ^ (x >> 16)) & 0xFFFFF
