"""RMSNorm of each head and its gate, forward and backward in one pass each: tiles of heads, whichever tokens they are
of. The gate is read where a projection has left it, in rows that are wider than it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.kernel_tools import num_programs, triton_wide, warps_for, wide_of
from phalanx.ops.scan.norm_gate import HeadGate


@triton.jit
def _tile(
    start,
    rows,
    x,
    z,
    step,
    H: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    SILU: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Of TILE heads from number `start` on: where they are in x, what of them is there, the normalized x, its factor,
    act(z) and its derivative. Tokens are `step` apart in z."""
    row = (start + tl.arange(0, TILE)).to(tl.int64)
    cols = tl.arange(0, BLOCK)[None, :]
    there = (row < rows)[:, None] & (cols < K)
    at = row[:, None] * K + cols
    v = tl.load(x + at, mask=there, other=0.0).to(WIDE)
    scale = (1.0 / tl.sqrt(tl.sum(v * v, 1) / K + EPS))[:, None]
    gate_at = (row // H * step + row % H * K)[:, None] + cols
    g = tl.load(z + gate_at, mask=there, other=0.0).to(WIDE)
    s = 1.0 / (1.0 + tl.exp(-g))
    if SILU:
        return at, there, v * scale, scale, g * s, s * (1.0 + g * (1.0 - s))
    else:
        return at, there, v * scale, scale, s, s * (1.0 - s)


@triton.jit
def _forward(
    x,
    z,
    weight,
    y,
    rows,
    step,
    H: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    SILU: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    start = tl.program_id(0) * TILE
    at, there, n, _, a, _ = _tile(start, rows, x, z, step, H, K, EPS, SILU, WIDE, BLOCK, TILE)
    cols = tl.arange(0, BLOCK)
    w = tl.load(weight + cols, mask=cols < K, other=0.0).to(WIDE)[None, :]
    # rounded before the weight, as the reference implementation and Hugging Face do
    out = n.to(x.dtype.element_ty).to(WIDE) * w * a
    tl.store(y + at, out.to(y.dtype.element_ty), mask=there)


@triton.jit
def _backward(
    dy,
    x,
    z,
    weight,
    dx,
    dz,
    dw_parts,
    rows,
    step,
    programs,
    H: tl.constexpr,
    K: tl.constexpr,
    EPS: tl.constexpr,
    SILU: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Each program handles every `programs`-th tile and keeps its share of the weight's gradient in registers."""
    first = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    w = tl.load(weight + cols, mask=cols < K, other=0.0).to(WIDE)[None, :]
    dw = tl.zeros((TILE, BLOCK), WIDE)
    for start in range(first * TILE, rows, programs * TILE):
        at, there, n, scale, a, slope = _tile(start, rows, x, z, step, H, K, EPS, SILU, WIDE, BLOCK, TILE)
        d = tl.load(dy + at, mask=there, other=0.0).to(WIDE)
        dw += d * n * a
        tl.store(dz + at, (d * n * w * slope).to(dz.dtype.element_ty), mask=there)
        g = d * a * w
        g = scale * (g - n * (tl.sum(g * n, 1) / K)[:, None])
        tl.store(dx + at, g.to(dx.dtype.element_ty), mask=there)
    tl.store(dw_parts + first * K + cols, tl.sum(dw, 0), mask=cols < K)


def _shape(x: Tensor) -> tuple[int, int, int, int]:
    """Heads of all tokens, heads and features of one, and how many heads a tile has."""
    tokens, heads, width = x.shape
    return tokens * heads, heads, width, max(1, min(16, 2048 // triton.next_power_of_2(width)))


def _in_rows(z: Tensor) -> Tensor:
    """The gate, with the features of a token's heads next to each other."""
    return z if z.stride(-1) == 1 and z.stride(-2) == z.shape[-1] else z.contiguous()


def forward(x: Tensor, z: Tensor, weight: Tensor, eps: float, gate: HeadGate) -> Tensor:
    x, z = x.contiguous(), _in_rows(z)
    rows, heads, width, tile = _shape(x)
    y, block = torch.empty_like(x), triton.next_power_of_2(width)
    if rows:
        _forward[(triton.cdiv(rows, tile),)](
            x,
            z,
            weight,
            y,
            rows,
            z.stride(0),
            H=heads,
            K=width,
            EPS=eps,
            SILU=gate == "silu",
            WIDE=triton_wide(wide_of(x.dtype)),
            BLOCK=block,
            TILE=tile,
            num_warps=warps_for(block * tile),
        )
    return y


def backward(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, eps: float, gate: HeadGate
) -> tuple[Tensor, Tensor, Tensor]:
    dy, x, z = dy.contiguous(), x.contiguous(), _in_rows(z)
    rows, heads, width, tile = _shape(x)
    wide, block = wide_of(x.dtype), triton.next_power_of_2(width)
    programs = min(triton.cdiv(rows, tile), num_programs(x, per_processor=2))
    dx, dz = torch.empty_like(x), torch.empty(x.shape, dtype=z.dtype, device=z.device)
    dw = torch.empty(programs, width, dtype=wide, device=x.device)
    if rows:
        _backward[(programs,)](
            dy,
            x,
            z,
            weight,
            dx,
            dz,
            dw,
            rows,
            z.stride(0),
            programs,
            H=heads,
            K=width,
            EPS=eps,
            SILU=gate == "silu",
            WIDE=triton_wide(wide),
            BLOCK=block,
            TILE=tile,
            num_warps=warps_for(block * tile),
        )
    return dx, dz, dw.sum(0)
