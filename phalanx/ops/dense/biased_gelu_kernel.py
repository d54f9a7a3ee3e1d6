"""GELU of x plus a bias, forward and backward, in one pass over memory each; backward also sums the bias's gradient."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.dense.gate import EXACT_GEGLU, GEGLU
from phalanx.ops.dense.gated_kernel import factor, plus_cube
from phalanx.ops.kernel_tools import cut_rows, triton_wide, wide_of

ROWS, COLS = 16, 256  # of a tile


@triton.jit
def _below(x, SHORT: tl.constexpr, INTERPRETED: tl.constexpr):
    """The normal distribution below x, and its density there.

    SHORT: by a polynomial in 1 / (1 + p |x|) times the density, within 7.5e-8 (Abramowitz & Stegun, "Handbook of
    mathematical functions", 7.1.26), which rounds to the same 16-bit numbers but for the last bit. erf itself takes so
    many instructions that memory waits for them.
    """
    if SHORT:
        density, t = _approximate(-0.7213475204444817 * x * x, 1.0 + 0.23164188 * tl.abs(x), INTERPRETED)
        poly = 1.061405429 * t - 1.453152027
        poly = poly * t + 1.421413741
        poly = poly * t - 0.284496736
        poly = (poly * t + 0.254829592) * t
        tail = 0.5 * poly * density
        below = tl.where(x < 0.0, tail, 1.0 - tail)
    else:
        density = tl.exp(-0.5 * x * x)
        below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    return below, density * 0.3989422804014327


@triton.jit
def _approximate(power, divisor, INTERPRETED: tl.constexpr):
    """2^power and 1 / divisor of fp32, each accurate to about 2^-22 on a GPU, in an instruction each."""
    if INTERPRETED:
        return tl.exp2(power), 1.0 / divisor
    else:
        return (
            tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [power], tl.float32, True, 1),
            tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [divisor], tl.float32, True, 1),
        )


@triton.jit
def _forward(
    x,
    bias,
    y,
    T,
    F,
    EXACT: tl.constexpr,
    SHORT: tl.constexpr,
    ALPHA: tl.constexpr,
    CUBIC: tl.constexpr,
    WIDE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = (rows < T)[:, None] & (cols < F)[None, :]
    at = rows[:, None] * F + cols[None, :]
    v = tl.load(x + at, mask=mask, other=0.0).to(WIDE)
    v += tl.load(bias + cols, mask=cols < F, other=0.0).to(WIDE)[None, :]
    if EXACT:
        s, _ = _below(v, SHORT, INTERPRETED)
    else:
        s = factor(v, ALPHA, CUBIC, False, INTERPRETED)
    tl.store(y + at, (v * s).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    dy,
    x,
    bias,
    dx,
    sums,
    T,
    F,
    EACH,
    EXACT: tl.constexpr,
    SHORT: tl.constexpr,
    ALPHA: tl.constexpr,
    CUBIC: tl.constexpr,
    WIDE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """A program handles EACH tiles of rows of its columns, and leaves its part of the bias's gradient in `sums`."""
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = cols < F
    b = tl.load(bias + cols, mask=inside, other=0.0).to(WIDE)[None, :]
    total = tl.zeros((ROWS, COLS), WIDE)
    first = tl.program_id(0).to(tl.int64) * EACH * ROWS
    for tile in range(EACH):
        rows = first + tile * ROWS + tl.arange(0, ROWS)
        mask = (rows < T)[:, None] & inside[None, :]
        at = rows[:, None] * F + cols[None, :]
        d = tl.load(dy + at, mask=mask, other=0.0).to(WIDE)
        v = tl.load(x + at, mask=mask, other=0.0).to(WIDE) + b
        if EXACT:
            s, density = _below(v, SHORT, INTERPRETED)
            d = d * (s + v * density)
        else:
            s = factor(v, ALPHA, CUBIC, False, INTERPRETED)
            d = d * s * (1.0 + ALPHA * plus_cube(v, 3.0 * CUBIC) * (1.0 - s))
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=mask)
        total += d
    tl.store(sums + tl.program_id(0) * F + cols, tl.sum(total, 0), mask=inside)


def _constants(x: Tensor, exact: bool) -> dict[str, Any]:
    gate = EXACT_GEGLU if exact else GEGLU
    return dict(
        EXACT=exact,
        SHORT=x.dtype in (torch.bfloat16, torch.float16),
        ALPHA=gate.alpha,
        CUBIC=gate.cubic,
        WIDE=triton_wide(x.dtype),
        INTERPRETED=not x.is_cuda,
        ROWS=ROWS,
        COLS=COLS,
        num_warps=8,
    )


def gelu_forward(x: Tensor, bias: Tensor, exact: bool) -> Tensor:
    """gelu(x + bias) (T, F)."""
    x = x.contiguous()
    y = torch.empty_like(x)
    rows, width = x.shape
    if y.numel():
        _forward[(triton.cdiv(rows, ROWS), triton.cdiv(width, COLS))](x, bias, y, rows, width, **_constants(x, exact))
    return y


def gelu_backward(dy: Tensor, x: Tensor, bias: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    """The gradients of x, and of the bias in at least fp32."""
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    rows, width = x.shape
    parts, across, each = cut_rows(x, ROWS, COLS)
    sums = torch.empty(parts, width, dtype=wide_of(x.dtype), device=x.device)
    if dx.numel():
        _backward[(parts, across)](dy, x, bias, dx, sums, rows, width, each, **_constants(x, exact))
    return dx, sums.sum(0)
