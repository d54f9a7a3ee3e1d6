"""Adam's moments in FP8: E4M3 values, and one power of two for every BLOCK of them (microscaling: Rouhani et al.,
2023).

Works on flat ranges of elements and knows nothing of parameters; the first block of a range begins with it. Of the
second moment, the square root is stored: it spans half as many powers of two (the values of a block span 17), and no
positive value becomes zero, since updates are divided by it.

E4M3 has three bits of fraction, so the 5 % by which a moving average changes in a step would mostly be lost in
rounding. Values are therefore rounded up or down at random, which is right on average. The random bits are a hash of
the number itself and the step, so equal numbers are rounded alike on any rank and after a restart; a number whose last
bit differs may be rounded differently. The values are exact in bf16, which is what checkpoints store, and storing a
loaded value gives the same bits again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.ops.optimizer.packed import PackedTensor, check_blocks

BLOCK = 32
LEAST, MOST = -54, 100  # exponents of blocks; the bounds keep the second moment, a square, within the range of fp32
MAX = 448.0
GOLDEN, MIX = 0x9E3779B9, (0x85EBCA6B, 0xC2B2AE35)  # murmur3's finalizer (Appleby, 2011)


@dataclass(frozen=True)
class Narrow(PackedTensor):
    """`quantized` (n,) E4M3 and `exponents` (n / BLOCK,) int8. `root`: the numbers are >= 0 and their square roots are
    stored."""

    quantized: Tensor
    exponents: Tensor
    root: bool

    dtype, block, name = torch.bfloat16, BLOCK, "optim.moments=fp8"

    @staticmethod
    def zeros(n: int, device: torch.device, root: bool) -> Narrow:
        check_blocks(n, BLOCK)
        exponents = torch.full((n // BLOCK,), LEAST, dtype=torch.int8, device=device)
        return Narrow(torch.zeros(n, dtype=torch.float8_e4m3fn, device=device), exponents, root)

    def __len__(self) -> int:
        return len(self.quantized)

    def part(self, start: int, stop: int) -> Narrow:
        return Narrow(self.quantized[start:stop], self.exponents[start // BLOCK : stop // BLOCK], self.root)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.quantized, self.exponents

    def wide(self, dtype: torch.dtype) -> Tensor:
        """The numbers (n,), exact in bf16 and wider."""
        kept = (self.quantized.float().view(-1, BLOCK) * torch.exp2(self.exponents.float()).unsqueeze(1)).flatten()
        return (kept.square() if self.root else kept).to(dtype)

    def store_(self, values: Tensor, step: Tensor | None = None) -> None:
        """Store (n,) numbers. With `step` (), rounded at random as in this step; without it, to the nearest."""
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
    """The power of two of each block, from its largest number (fp32). Values go up to 1.75 * 2^8 with room to be
    rounded up, so that numbers that were stored before get the same values or finer ones."""
    bits = amax.view(torch.int32)
    return ((bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).int()).clamp(LEAST, MOST).to(torch.int8)


def rounded(size: Tensor, noise: Tensor) -> Tensor:
    """Round numbers 0 <= size of fp32 to one of their two neighbours in E4M3: up if the part cut off, in units of 2^-20
    of their distance, plus the noise reaches 1."""
    full = ((size.view(torch.int32) + noise.int()) & -(1 << 20)).view(torch.float32)
    small = torch.floor(size * 512.0 + noise.float() * 2.0**-20) * 2.0**-9
    return torch.where(size < 2.0**-6, small, full).clamp_max(MAX)


def noise_of(kept: Tensor, step: Tensor, root: bool) -> Tensor:
    """(n,) int64 in [0, 2^20)."""
    x = (kept.contiguous().view(torch.int32).long() ^ (step.long() * 2 + root) * GOLDEN) & 0xFFFFFFFF
    for shift, factor in zip((16, 13), MIX):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return (x ^ (x >> 16)) & 0xFFFFF
