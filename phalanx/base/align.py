"""Alignment of tensors that share memory, for the code that lays them out and the code that passes them to a GEMM.
Independent of any model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BYTES = 16  # cuBLAS takes only matrices and scales aligned to it; kernels load as many at once
# Parameters and shards in a bucket begin at multiples of this, so they are aligned to BYTES in every dtype, FP8
# included, and in bf16 to a cache line of 128 bytes.
ELEMENTS = 64


def room(count: int, unit: int) -> int:
    """The next multiple of `unit`: the space for `count` elements if what follows must begin at a multiple."""
    return -(-count // unit) * unit


def begins_well(x: Tensor) -> bool:
    """Whether its address is a multiple of BYTES."""
    return x.data_ptr() % BYTES == 0
