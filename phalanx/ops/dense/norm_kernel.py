"""RMSNorm and LayerNorm with the preceding residual addition, forward and backward: one row of tokens per loop step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.kernel_tools import num_programs, triton_wide, warps_for, wide_of


@triton.jit
def _norm_forward(
    x,
    delta,
    weight,
    bias,
    total,
    y,
    mean_out,
    scale_out,
    D,
    EPS: tl.constexpr,
    ADD: tl.constexpr,
    CENTER: tl.constexpr,
    WRITE: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < D
    v = tl.load(x + row * D + cols, mask=mask, other=0.0).to(WIDE)
    if ADD:
        v = (v + tl.load(delta + row * D + cols, mask=mask, other=0.0).to(WIDE)).to(x.dtype.element_ty)
        tl.store(total + row * D + cols, v, mask=mask)
        v = v.to(WIDE)
    if CENTER:
        mean = tl.sum(v, 0) / D
        tl.store(mean_out + row, mean)
        v = tl.where(mask, v - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(v * v, 0) / D + EPS)
    tl.store(scale_out + row, scale)
    if WRITE:
        w = tl.load(weight + cols, mask=mask, other=0.0).to(WIDE)
        if CENTER:
            out = v * scale * w + tl.load(bias + cols, mask=mask, other=0.0).to(WIDE)
        else:
            out = (v * scale).to(weight.dtype.element_ty).to(
                WIDE
            ) * w  # rounded before the weight, as the reference implementation and Hugging Face do
        tl.store(y + row * D + cols, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _norm_backward(
    dy,
    dsecond,
    x,
    weight,
    mean_in,
    scale_in,
    dtotal,
    dx,
    parts,
    rows,
    D,
    programs,
    ADD: tl.constexpr,
    TWICE: tl.constexpr,
    CENTER: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Each program handles every `programs`-th tile of TILE rows and keeps its share of the gradients of weight and
    bias in registers, until it stores them to parts (programs, 1 or 2, D)."""
    first = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < D
    w = tl.load(weight + cols, mask=inside, other=0.0).to(WIDE)[None, :]
    dw = tl.zeros((TILE, BLOCK), WIDE)
    db = tl.zeros((TILE, BLOCK), WIDE)
    wide_D = tl.full((), D, tl.int64)  # offsets may pass 2^31
    for start in range(first * TILE, rows, programs * TILE):
        row = start + tl.arange(0, TILE)
        there = row < rows
        at = row[:, None] * wide_D + cols[None, :]
        mask = there[:, None] & inside[None, :]
        g = tl.load(dy + at, mask=mask, other=0.0).to(WIDE)
        if TWICE:
            g += tl.load(dsecond + at, mask=mask, other=0.0).to(WIDE)
        n = tl.load(x + at, mask=mask, other=0.0).to(WIDE)
        scale = tl.load(scale_in + row, mask=there, other=0.0)[:, None]
        if CENTER:
            n = n - tl.load(mean_in + row, mask=there, other=0.0)[:, None]
        n = tl.where(mask, n * scale, 0.0)
        dw += g * n
        if CENTER:
            db += g
        g = g * w
        d = g - n * (tl.sum(g * n, 1) / D)[:, None]
        if CENTER:
            d = d - (tl.sum(g, 1) / D)[:, None]
        d = d * scale
        if ADD:
            d = d + tl.load(dtotal + at, mask=mask, other=0.0).to(WIDE)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=mask)
    parts += first * (1 + CENTER) * D
    tl.store(parts + cols, tl.sum(dw, 0), mask=inside)
    if CENTER:
        tl.store(parts + D + cols, tl.sum(db, 0), mask=inside)


def norm_forward(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x + delta, its norm, and mean and scale of each row: RMSNorm without `bias` (the mean is then empty), LayerNorm
    with it."""
    return _forward(x, delta, weight, bias, eps, torch.empty_like(x, memory_format=torch.contiguous_format))


def norm_scale(x: Tensor, delta: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta and the scale of each row, for an RMSNorm whose output is not written."""
    total, _, _, scale = _forward(x, delta, x, None, eps, None)
    return total, scale


def _forward(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, y: Any
) -> tuple[Tensor, Any, Tensor, Tensor]:
    x = x.contiguous()
    delta = None if delta is None else delta.contiguous()
    rows, width = x.shape
    wide = wide_of(x.dtype)
    total = x if delta is None else torch.empty_like(x)
    scale = torch.empty(rows, dtype=wide, device=x.device)
    mean = torch.empty(rows if bias is not None else 0, dtype=wide, device=x.device)
    block = triton.next_power_of_2(width)
    if rows:
        _norm_forward[(rows,)](
            x,
            delta,
            weight,
            bias,
            total,
            y,
            mean,
            scale,
            width,
            EPS=eps,
            ADD=delta is not None,
            CENTER=bias is not None,
            WRITE=y is not None,
            WIDE=triton_wide(wide),
            BLOCK=block,
            num_warps=warps_for(block),
        )
    return total, y, mean, scale


def norm_backward(
    dys: Sequence[Tensor], x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor, dtotal: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx + dtotal, gradient of the weight, gradient of the bias or an empty tensor), the last two (D,) in the wide
    dtype. dys: one or two gradients of the norm."""
    dy, *dsecond = (d.contiguous() for d in dys)
    x, dtotal = x.contiguous(), None if dtotal is None else dtotal.contiguous()
    rows, width = x.shape
    center = mean.numel() > 0
    block = triton.next_power_of_2(width)
    tile = max(1, min(16, 4096 // block))  # narrow rows: several at once, to keep enough bytes in flight
    programs = min(triton.cdiv(rows, tile), num_programs(x, per_processor=2))
    dx = torch.empty_like(x)
    parts = torch.empty(programs, 1 + center, width, dtype=scale.dtype, device=x.device)
    if rows:
        _norm_backward[(programs,)](
            dy,
            dsecond[0] if dsecond else None,
            x,
            weight,
            mean,
            scale,
            dtotal,
            dx,
            parts,
            rows,
            width,
            programs,
            ADD=dtotal is not None,
            TWICE=bool(dsecond),
            CENTER=center,
            WIDE=triton_wide(scale.dtype),
            BLOCK=block,
            TILE=tile,
            num_warps=warps_for(block * tile),
        )
    dw, *db = parts.sum(0)  # of both in one kernel: it takes longer to start than to run
    return dx, dw, db[0] if center else dw.new_empty(0)
