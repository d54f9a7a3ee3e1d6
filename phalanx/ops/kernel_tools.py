"""What the Triton implementations share: dtypes of their arithmetic, grid sizes, the order of tiles."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

HOPPER_SHARED = 232448  # bytes that a program may have


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a kernel computes in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def triton_wide(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32


@triton.jit
def uniform(n, INTERPRETED: tl.constexpr):
    """An int32 loaded from memory, marked for ptxas as equal in all threads of a warp. A loop counter with this bound
    is then kept in uniform registers, from which descriptors of tiles in shared memory have to come in any case."""
    if INTERPRETED:
        return n
    else:
        return tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [n], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def grouped_order(at, M, tiles_n, GROUP: tl.constexpr, BM: tl.constexpr):
    """The position of the at-th tile, in tiles down and across: M rows in tiles of BM rows, tiles_n tiles across. GROUP
    rows of tiles are computed together over all columns, so that their operands stay in the L2 cache."""
    first = at // (GROUP * tiles_n) * GROUP
    together = tl.minimum(tl.cdiv(M, BM) - first, GROUP)
    return first + at % (GROUP * tiles_n) % together, at % (GROUP * tiles_n) // together


def warps_for(block: int) -> int:
    """Number of warps for rows of `block` elements: about 16 elements a thread."""
    return max(1, min(16, block // 512))


@cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@cache
def _shared_bytes(index: int) -> int:
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def shared_bytes(x: Tensor) -> int:
    """Shared memory that a program may have on x's device; Hopper's in the interpreter."""
    return _shared_bytes(x.device.index or 0) if x.is_cuda else HOPPER_SHARED


def num_programs(x: Tensor, per_processor: int) -> int:
    """Programs of a persistent grid on x's device; 2 per "processor" in the interpreter."""
    return per_processor * (_processors(x.device.index or 0) if x.is_cuda else 2)


def cut_rows(x: Tensor, rows: int, cols: int) -> tuple[int, int, int]:
    """For sums over the rows of x (T, F) in tiles of rows x cols: programs down and across, and how many tiles each
    has, one below the other."""
    tiles, across = triton.cdiv(len(x), rows), triton.cdiv(x.shape[1], cols)
    each = max(1, triton.cdiv(tiles * across, num_programs(x, per_processor=8)))
    return triton.cdiv(tiles, each), across, each
