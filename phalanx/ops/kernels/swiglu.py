"""SwiGLU over stacked gate and up, forward and backward: one pass over memory each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.kernels.common import triton_wide

BLOCK = 1024


@triton.jit
def _forward(x, y, F, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < F
    gate = tl.load(x + row * 2 * F + cols, mask=mask, other=0.0).to(WIDE)
    up = tl.load(x + row * 2 * F + F + cols, mask=mask, other=0.0).to(WIDE)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y + row * F + cols, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward(dy, x, dx, F, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < F
    d = tl.load(dy + row * F + cols, mask=mask, other=0.0).to(WIDE)
    gate = tl.load(x + row * 2 * F + cols, mask=mask, other=0.0).to(WIDE)
    up = tl.load(x + row * 2 * F + F + cols, mask=mask, other=0.0).to(WIDE)
    s = 1.0 / (1.0 + tl.exp(-gate))
    dgate = d * up * s * (1.0 + gate * (1.0 - s))
    tl.store(dx + row * 2 * F + cols, dgate.to(dx.dtype.element_ty), mask=mask)
    tl.store(dx + row * 2 * F + F + cols, (d * gate * s).to(dx.dtype.element_ty), mask=mask)


def swiglu_forward(x: Tensor) -> Tensor:
    """x = [gate, up] (T, 2F) -> silu(gate) * up (T, F)."""
    rows, inner = x.shape[0], x.shape[1] // 2
    x, y = x.contiguous(), torch.empty(rows, inner, dtype=x.dtype, device=x.device)
    if y.numel():
        _forward[(rows, triton.cdiv(inner, BLOCK))](x, y, inner, WIDE=triton_wide(x.dtype), BLOCK=BLOCK)
    return y


def swiglu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Gradient (T, 2F) of x = [gate, up] from dy (T, F)."""
    rows, inner = dy.shape
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    if dy.numel():
        _backward[(rows, triton.cdiv(inner, BLOCK))](dy, x, dx, inner, WIDE=triton_wide(x.dtype), BLOCK=BLOCK)
    return dx
