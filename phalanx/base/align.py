"""Where tensors that share memory may begin, for those who lay them out and those who hand them to a GEMM. Knows no
tensors of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BYTES = 16  # cuBLAS takes matrices and scales that begin at a multiple of it, no others; kernels load as much at once
# of a bucket: pieces begin at multiples of it, so of every dtype, 8-bit codes too, where BYTES do; of bf16 at a line of
# 128 bytes
ELEMENTS = 64


def room(count: int, unit: int) -> int:
    """The next multiple of `unit`: what `count` elements take if others follow that are to begin at one."""
    return -(-count // unit) * unit


def begins_well(x: Tensor) -> bool:
    """Whether it begins at a multiple of BYTES."""
    return x.data_ptr() % BYTES == 0
