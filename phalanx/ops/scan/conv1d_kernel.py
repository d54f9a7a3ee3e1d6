"""The causal depthwise convolution: a program computes a tile of tokens by channels of one row, and reads each tap as a
shifted tile (the shifts hit the cache).

Backward computes the sums anew from the inputs. A program has the gradients of the sums at its own tokens, and computes
those of the tokens after them, whose taps reach back into the tile. Each program keeps its part of the weight's
gradient; the parts are added up in one order. The few tokens before a row are left to the reference.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.kernel_tools import triton_wide, wide_of
from phalanx.ops.scan import conv1d
from phalanx.ops.scan.conv1d import ConvInputs

TOKENS, CHANNELS = 64, 32  # of a tile


@triton.jit
def _tap(
    x,
    before,
    numbers,
    row,
    token,
    at,
    cols,
    here,
    inside,
    own,
    L,
    C,
    x_row,
    x_tok,
    K: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    BEFORE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """x at tokens `token` as tokens `at` read it, (tokens, channels): zero in another document. `own`: the documents
    of `at`."""
    seen = here & (token >= 0)
    if DOCUMENTS:
        seen = seen & (tl.load(numbers + row * L + token, mask=seen, other=-1) == own)
    values = tl.load(
        x + row * x_row + token.to(tl.int64)[:, None] * x_tok + cols[None, :],
        mask=seen[:, None] & inside[None, :],
        other=0.0,
    ).to(WIDE)
    if BEFORE:
        old = here & (token < 0) & (token >= 1 - K)
        if DOCUMENTS:
            first = tl.load(numbers + row * L)
            old = old & (own == first)
        values += tl.load(
            before + (row * (K - 1) + token + K - 1)[:, None] * C + cols[None, :],
            mask=old[:, None] & inside[None, :],
            other=0.0,
        ).to(WIDE)
    return values


@triton.jit
def _forward(
    x,
    weight,
    bias,
    numbers,
    before,
    y,
    L,
    C,
    x_row,
    x_tok,
    K: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    BEFORE: tl.constexpr,
    WIDE: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(2) * BT + tl.arange(0, BT)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    here, inside = at < L, cols < C
    own = at
    if DOCUMENTS:
        own = tl.load(numbers + row * L + at, mask=here, other=-1)
    z = tl.zeros((BT, BC), WIDE)
    for k in tl.static_range(K):
        w = tl.load(weight + cols * K + k, mask=inside, other=0.0).to(WIDE)
        z += w[None, :] * _tap(
            x,
            before,
            numbers,
            row,
            at - (K - 1) + k,
            at,
            cols,
            here,
            inside,
            own,
            L,
            C,
            x_row,
            x_tok,
            K,
            DOCUMENTS,
            BEFORE,
            WIDE,
        )
    if BIAS:
        z += tl.load(bias + cols, mask=inside, other=0.0).to(WIDE)[None, :]
    if SILU:
        z = z / (1.0 + tl.exp(-z))
    place = (row * L + at)[:, None] * C + cols[None, :]
    tl.store(y + place, z.to(y.dtype.element_ty), mask=here[:, None] & inside[None, :])


@triton.jit
def _gradient(
    dy,
    x,
    weight,
    bias,
    numbers,
    before,
    row,
    at,
    cols,
    here,
    inside,
    own,
    L,
    C,
    x_row,
    x_tok,
    dy_row,
    dy_tok,
    K: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    BEFORE: tl.constexpr,
    WIDE: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """The gradient of the sums at tokens `at`, zero outside the row."""
    g = tl.load(
        dy + row * dy_row + at.to(tl.int64)[:, None] * dy_tok + cols[None, :],
        mask=here[:, None] & inside[None, :],
        other=0.0,
    ).to(WIDE)
    if SILU:
        z = tl.zeros((BT, BC), WIDE)
        for k in tl.static_range(K):
            w = tl.load(weight + cols * K + k, mask=inside, other=0.0).to(WIDE)
            z += w[None, :] * _tap(
                x,
                before,
                numbers,
                row,
                at - (K - 1) + k,
                at,
                cols,
                here,
                inside,
                own,
                L,
                C,
                x_row,
                x_tok,
                K,
                DOCUMENTS,
                BEFORE,
                WIDE,
            )
        if BIAS:
            z += tl.load(bias + cols, mask=inside, other=0.0).to(WIDE)[None, :]
        s = 1.0 / (1.0 + tl.exp(-z))
        g = g * s * (1.0 + z * (1.0 - s))
    return g


@triton.jit
def _backward(
    dy,
    x,
    weight,
    bias,
    numbers,
    before,
    dx,
    dw_parts,
    db_parts,
    L,
    C,
    x_row,
    x_tok,
    dy_row,
    dy_tok,
    K: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    BEFORE: tl.constexpr,
    WIDE: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(2) * BT + tl.arange(0, BT)
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    here, inside = at < L, cols < C
    own = at
    if DOCUMENTS:
        own = tl.load(numbers + row * L + at, mask=here, other=-1)
    part = (row * tl.num_programs(2) + tl.program_id(2)) * C + cols
    g = _gradient(
        dy,
        x,
        weight,
        bias,
        numbers,
        before,
        row,
        at,
        cols,
        here,
        inside,
        own,
        L,
        C,
        x_row,
        x_tok,
        dy_row,
        dy_tok,
        K,
        SILU,
        BIAS,
        DOCUMENTS,
        BEFORE,
        WIDE,
        BT,
        BC,
    )
    tl.store(db_parts + part, tl.sum(g, 0), mask=inside)
    for k in tl.static_range(K):
        tap = _tap(
            x,
            before,
            numbers,
            row,
            at - (K - 1) + k,
            at,
            cols,
            here,
            inside,
            own,
            L,
            C,
            x_row,
            x_tok,
            K,
            DOCUMENTS,
            BEFORE,
            WIDE,
        )
        tl.store(dw_parts + part * K + k, tl.sum(g * tap, 0), mask=inside)
    d = g * tl.load(weight + cols * K + K - 1, mask=inside, other=0.0).to(WIDE)[None, :]
    for k in range(0, K - 1):  # not unrolled: each turn computes the sums of the tokens that read `at` by tap k anew
        reader = at + (K - 1) - k
        reads = reader < L
        document = reader
        if DOCUMENTS:
            document = tl.load(numbers + row * L + reader, mask=reads, other=-1)
        g = _gradient(
            dy,
            x,
            weight,
            bias,
            numbers,
            before,
            row,
            reader,
            cols,
            reads,
            inside,
            document,
            L,
            C,
            x_row,
            x_tok,
            dy_row,
            dy_tok,
            K,
            SILU,
            BIAS,
            DOCUMENTS,
            BEFORE,
            WIDE,
            BT,
            BC,
        )
        w = tl.load(weight + cols * K + k, mask=inside, other=0.0).to(WIDE)
        same = here & reads
        if DOCUMENTS:
            same = same & (document == own)
        d += tl.where(same[:, None], g * w[None, :], 0.0)
    place = (row * L + at)[:, None] * C + cols[None, :]
    tl.store(dx + place, d.to(dx.dtype.element_ty), mask=here[:, None] & inside[None, :])


def _features_last(x: Tensor) -> Tensor:
    """The same, contiguous in its features."""
    return x if x.stride(2) == 1 else x.contiguous()


def conv_forward(s: ConvInputs) -> Tensor:
    """As the reference."""
    x, (rows, length, channels) = _features_last(s.x), s.x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (rows, triton.cdiv(channels, CHANNELS), triton.cdiv(length, TOKENS))
    if y.numel():
        given = (x, s.weight.contiguous(), s.bias, _packed(s.numbers), _packed(s.before))
        _forward[grid](*given, y, length, channels, x.stride(0), x.stride(1), **_constants(s))
    return y


def conv_backward(dy: Tensor, s: ConvInputs) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As the reference."""
    x, dy, (rows, length, channels) = _features_last(s.x), _features_last(dy), s.x.shape
    taps, wide, tiles = s.weight.shape[1], wide_of(x.dtype), triton.cdiv(length, TOKENS)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw = torch.zeros(rows * tiles, channels, taps, dtype=wide, device=x.device)
    db = torch.zeros(rows * tiles, channels, dtype=wide, device=x.device)
    if dx.numel():
        given = (dy, x, s.weight.contiguous(), s.bias, _packed(s.numbers), _packed(s.before))
        strides = (x.stride(0), x.stride(1), dy.stride(0), dy.stride(1))
        grid = (rows, triton.cdiv(channels, CHANNELS), tiles)
        _backward[grid](*given, dx, dw, db, length, channels, *strides, **_constants(s))
    dbefore = None
    if s.before is not None:  # only the first tokens of a row read it
        few = slice(0, taps - 1)
        first = replace(s, x=s.x[:, few], numbers=None if s.numbers is None else s.numbers[:, few])
        dbefore = conv1d.conv_backward(dy[:, few], first)[3]
    return dx, dw.sum(0), db.sum(0), dbefore


def _packed(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _constants(s: ConvInputs) -> dict[str, object]:
    return dict(
        K=s.weight.shape[1],
        SILU=s.silu,
        BIAS=s.bias is not None,
        DOCUMENTS=s.numbers is not None,
        BEFORE=s.before is not None,
        WIDE=triton_wide(wide_of(s.x.dtype)),
        BT=TOKENS,
        BC=CHANNELS,
    )
