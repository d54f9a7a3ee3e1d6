"""Moments in 8 bits by block-wise dynamic quantization (Dettmers et al., "8-bit Optimizers via Block-wise
Quantization", 2022): each number is the nearest of 256 fixed values times a scale that BLOCK neighbours share.

The 256 values are the paper's dynamic map: with i leading zeros, the other bits divide [0.1, 1] * 10^-i evenly. So
numbers near a block's largest are stored to within 0.7 % of that, and there are values down to 10^-7 of it. One map has
a sign (first moments), one has not (second moments). What differs from the paper:

- a positive second moment is never stored as zero, since updates are divided by its root;
- blocks are of 64 elements, to which the parameters of a bucket are aligned, so no block mixes two of them;
- the map's ends are 1 and, where it has a sign, -0.993; the scale is such that the block's largest magnitude is at one
  of them, whereas the paper divides by that magnitude, and stores -0.993 of a largest number that is negative;
- a scale is rounded to 16 significant bits. So the products of values and scale, rounded to fp32, still tell both.
  Checkpoints store these fp32 numbers, which any layout, any setting of optim.moments and any other tool reads, and
  which give the same bits when they are stored again in the same blocks.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from phalanx.base.align import ELEMENTS
from phalanx.base.dataclass import dataclass
from phalanx.ops.optimizer.packed import PackedTensor, check_blocks

BLOCK = ELEMENTS
EXPONENTS = 7  # of ten
BYTES = 1 + 4 / BLOCK
"""Of one number."""


@cache
def dynamic_map(signed: bool, device: torch.device | None = None) -> Tensor:
    """(256,) fp32, ascending, from the largest negative value (signed) or 0 to 1."""
    values = [torch.tensor([0.0, 1.0])]
    for i in range(EXPONENTS):
        bounds = torch.linspace(0.1, 1, 2 ** (i + (0 if signed else 1)) + 1)
        means = 10 ** (i - EXPONENTS + 1) * ((bounds[:-1] + bounds[1:]) / 2)
        values += [means, -means] if signed else [means]
    return torch.cat(values).sort().values.to(device)


@cache
def midpoints(signed: bool, device: torch.device | None = None) -> Tensor:
    """(255,) fp32: up to and including each of these, numbers are rounded down to the value before it."""
    values = dynamic_map(signed, device)
    return (values[:-1] + values[1:]) / 2


@dataclass(frozen=True)
class Blockwise(PackedTensor):
    """`quantized` (n,) uint8, indices into the map; `scales` (n / BLOCK,) fp32."""

    quantized: Tensor
    scales: Tensor
    signed: bool

    dtype, block, name = torch.float32, BLOCK, "optim.moments=8bit"

    @staticmethod
    def zeros(n: int, device: torch.device, signed: bool) -> Blockwise:
        check_blocks(n, BLOCK)
        zero = int(torch.searchsorted(dynamic_map(signed), 0.0))
        quantized = torch.full((n,), zero, dtype=torch.uint8, device=device)
        return Blockwise(quantized, torch.zeros(n // BLOCK, device=device), signed)

    def __len__(self) -> int:
        return len(self.quantized)

    def part(self, start: int, stop: int) -> Blockwise:
        return Blockwise(self.quantized[start:stop], self.scales[start // BLOCK : stop // BLOCK], self.signed)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.quantized, self.scales

    def wide(self, dtype: torch.dtype) -> Tensor:
        values = dynamic_map(self.signed, self.scales.device)[self.quantized.int()].view(-1, BLOCK)
        return (values * self.scales.unsqueeze(1)).flatten().to(dtype)

    def store_(self, values: Tensor, step: Tensor | None = None) -> None:
        """Rounded to the nearest. Numbers that were stored before, in the same blocks, get the same bits."""
        x = values.float().view(-1, BLOCK)
        scales = scale_of(x, self.signed)
        relative = torch.where(scales > 0, x.T / scales, 0.0).T.contiguous()
        nearest = torch.bucketize(relative, midpoints(self.signed, x.device))
        self.quantized.copy_((nearest if self.signed else torch.where(x > 0, nearest.clamp_min(1), 0)).flatten())
        self.scales.copy_(scales)


def scale_of(x: Tensor, signed: bool) -> Tensor:
    """(blocks,) the scales of numbers x (blocks, BLOCK)."""
    high, low = x.amax(1), -x.amin(1)
    if signed:
        high = torch.where(low >= high, low / -dynamic_map(signed, x.device)[0], high)
    return ((high.view(torch.int32) + 0x80) & ~0xFF).view(torch.float32)
