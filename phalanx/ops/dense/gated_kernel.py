"""Gated activations over stacked gate and up, forward and backward, in one pass over memory each. Rows past the last
one are not touched."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.kernel_tools import triton_wide

if TYPE_CHECKING:
    from phalanx.ops.dense.gate import Gate

BLOCK = 1024


@triton.jit
def _places(row, cols, F, PAIRS: tl.constexpr):
    """Where gate and up of features `cols` of a row are in memory."""
    first = row * 2 * F
    if PAIRS:
        return first + 2 * cols, first + 2 * cols + 1
    else:
        return first + cols, first + F + cols


@triton.jit
def clamped(raw_gate, raw_up, LIMIT: tl.constexpr, SHIFT: tl.constexpr, CLAMP: tl.constexpr):
    """The clamped gate, and the clamped up plus its shift."""
    gate, up = raw_gate, raw_up
    if CLAMP:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return gate, up + SHIFT


@triton.jit
def gated(gate, up, ALPHA: tl.constexpr, INTERPRETED: tl.constexpr):
    """The activation of `clamped` gate and up."""
    return gate * sigmoid(gate, ALPHA, INTERPRETED) * up


@triton.jit
def factor(gate, ALPHA: tl.constexpr, CUBIC: tl.constexpr, EXACT: tl.constexpr, INTERPRETED: tl.constexpr):
    """What the gate is multiplied by (Gate.factor)."""
    if EXACT:
        return 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        return sigmoid(plus_cube(gate, CUBIC), ALPHA, INTERPRETED)


@triton.jit
def plus_cube(gate, CUBIC: tl.constexpr):
    """gate + CUBIC * gate^3."""
    if CUBIC == 0.0:
        return gate
    else:
        return gate + CUBIC * gate * gate * gate


@triton.jit
def gated_slopes(
    d,
    gate,
    up,
    s,
    raw_gate,
    raw_up,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    CLAMP: tl.constexpr,
    CUBIC: tl.constexpr = 0.0,
    EXACT: tl.constexpr = False,
):
    """Gradients of gate and up from that of the activation; s is the gate's `factor`."""
    through = d * s
    if EXACT:
        dgate = d * up * (s + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327)
    else:
        dgate = through * up * (1.0 + ALPHA * plus_cube(gate, 3.0 * CUBIC) * (1.0 - s))
    dup = through * gate
    if CLAMP:
        dgate = tl.where(raw_gate <= LIMIT, dgate, 0.0)
        dup = tl.where(tl.abs(raw_up) <= LIMIT, dup, 0.0)
    return dgate, dup


@triton.jit
def sigmoid(gate, ALPHA: tl.constexpr, INTERPRETED: tl.constexpr):
    """1 / (1 + e^(-ALPHA gate)). For fp32 on a GPU, by the hardware's approximate 2^x and 1 / x, each accurate to about
    2^-22: four instructions instead of eleven, in kernels that are bound by instructions. Results below 2^-126 become
    zero."""
    if INTERPRETED or gate.dtype == tl.float64:
        return 1.0 / (1.0 + tl.exp(-ALPHA * gate))
    else:
        return tl.inline_asm_elementwise(
            "{.reg .f32 x; ex2.approx.ftz.f32 x, $1; add.ftz.f32 x, x, 0f3F800000; rcp.approx.ftz.f32 $0, x;}",
            "=f,f",
            [gate * (-ALPHA * 1.4426950408889634)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _forward(
    x,
    weights,
    last,
    y,
    F,
    ALPHA: tl.constexpr,
    CUBIC: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    CLAMP: tl.constexpr,
    PAIRS: tl.constexpr,
    EXACT: tl.constexpr,
    WEIGH: tl.constexpr,
    SOME: tl.constexpr,
    WIDE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if SOME:
        if row >= tl.load(last):
            return
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < F
    at_gate, at_up = _places(row, cols, F, PAIRS)
    raw_gate = tl.load(x + at_gate, mask=mask, other=0.0).to(WIDE)
    raw_up = tl.load(x + at_up, mask=mask, other=0.0).to(WIDE)
    gate, up = clamped(raw_gate, raw_up, LIMIT, SHIFT, CLAMP)
    out = gate * factor(gate, ALPHA, CUBIC, EXACT, INTERPRETED) * up
    if WEIGH:
        out = out * tl.load(weights + row).to(WIDE)
    tl.store(y + row * F + cols, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    dy,
    x,
    weights,
    last,
    dx,
    dweights,
    F,
    ALPHA: tl.constexpr,
    CUBIC: tl.constexpr,
    LIMIT: tl.constexpr,
    SHIFT: tl.constexpr,
    CLAMP: tl.constexpr,
    PAIRS: tl.constexpr,
    EXACT: tl.constexpr,
    WEIGH: tl.constexpr,
    SOME: tl.constexpr,
    WIDE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """A program handles BLOCKS blocks of a row: all of them where the weight's gradient is summed over the row."""
    row = tl.program_id(0).to(tl.int64)
    if SOME:
        if row >= tl.load(last):
            if WEIGH:
                tl.store(dweights + row, 0.0)
            return
    if WEIGH:
        weight = tl.load(weights + row).to(WIDE)
        sums = tl.zeros((BLOCK,), WIDE)
    for block in range(BLOCKS):
        cols = (tl.program_id(1) * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
        mask = cols < F
        d = tl.load(dy + row * F + cols, mask=mask, other=0.0).to(WIDE)
        at_gate, at_up = _places(row, cols, F, PAIRS)
        raw_gate = tl.load(x + at_gate, mask=mask, other=0.0).to(WIDE)
        raw_up = tl.load(x + at_up, mask=mask, other=0.0).to(WIDE)
        gate, up = clamped(raw_gate, raw_up, LIMIT, SHIFT, CLAMP)
        s = factor(gate, ALPHA, CUBIC, EXACT, INTERPRETED)
        if WEIGH:
            sums += d * gate * s * up
            d = d * weight
        dgate, dup = gated_slopes(d, gate, up, s, raw_gate, raw_up, ALPHA, LIMIT, CLAMP, CUBIC, EXACT)
        tl.store(dx + at_gate, dgate.to(dx.dtype.element_ty), mask=mask)
        tl.store(dx + at_up, dup.to(dx.dtype.element_ty), mask=mask)
    if WEIGH:
        tl.store(dweights + row, tl.sum(sums, 0).to(dweights.dtype.element_ty))


def _constants(gate: Gate, weights: Tensor | None, last: Tensor | None, x: Tensor) -> dict:
    return dict(
        ALPHA=gate.alpha,
        CUBIC=gate.cubic,
        LIMIT=gate.limit,
        SHIFT=gate.shift,
        CLAMP=math.isfinite(gate.limit),
        PAIRS=gate.interleaved,
        EXACT=gate.exact,
        WEIGH=weights is not None,
        SOME=last is not None,
        WIDE=triton_wide(x.dtype),
        INTERPRETED=not x.is_cuda,
    )


def block_of(inner: int) -> int:
    """The widest power of two up to BLOCK that leaves at most an eighth of its lanes idle, or 128."""
    return next((b for b in (1024, 512, 256) if -(-inner // b) * b <= inner * 9 / 8), 128)


def gated_forward(x: Tensor, gate: Gate, weights: Tensor | None = None, last: Tensor | None = None) -> Tensor:
    """x = [gate, up] (R, 2F), or interleaved pairs of them -> (R, F), times `weights` (R,). Rows from row `last` () on
    keep their values."""
    rows, inner = x.shape[0], x.shape[1] // 2
    x, y = x.contiguous(), torch.empty(rows, inner, dtype=x.dtype, device=x.device)
    block = block_of(inner)
    if y.numel():
        _forward[(rows, triton.cdiv(inner, block))](
            x, weights, last, y, inner, BLOCK=block, **_constants(gate, weights, last, x)
        )
    return y


def gated_backward(
    dy: Tensor, x: Tensor, gate: Gate, weights: Tensor | None = None, last: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x (R, 2F) and of the weights (R,) from dy (R, F)."""
    rows, inner = dy.shape
    dy, x = dy.contiguous(), x.contiguous()
    dx, dweights = torch.empty_like(x), None if weights is None else torch.empty_like(weights)
    block = block_of(inner)
    blocks = triton.cdiv(inner, block)
    together = 1 if weights is None else blocks
    if dy.numel():
        _backward[(rows, blocks // together)](
            dy,
            x,
            weights,
            last,
            dx,
            dweights,
            inner,
            BLOCK=block,
            BLOCKS=together,
            **_constants(gate, weights, last, x),
        )
    return dx, dweights
