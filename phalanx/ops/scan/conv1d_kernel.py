"""The causal depthwise convolution. A program follows some channels of a row through a strip of tokens, and keeps the
last inputs in registers: each is read once. Tokens are taken in turns of TURN, whose loads begin before any is used.

Backward computes the sums anew from the inputs. It keeps the last gradients of sums, g, as well: an input's gradient,

    dx_s = w_last g_s + ... + w_0 g_(s + K - 1)        over the tokens of its document

is there as soon as the last token that reads it has passed. So a strip of backward goes K - 1 tokens further than the
inputs that are its own. Each program keeps its part of the weight's gradient; the parts are added up in one order. The
few tokens before a row are left to the reference.

What moves: x and y, or x, dy and dx. 32,768 tokens of 5,376 channels in bf16 are 0.70 and 1.06 GB, which an H200 copies
in 0.17 and 0.25 ms.
"""

# mypy: disable-error-code="assignment, var-annotated"
# Tuples grow in Triton's functions, which it compiles anew for each length.

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.kernel_tools import triton_wide, wide_of
from phalanx.ops.scan import conv1d
from phalanx.ops.scan.conv1d import ConvInputs

TURN = 8
WARPS = 2
FORWARD = dict(STRIP=64, BC=256)  # tokens that a program reads, and channels
BACKWARD = dict(STRIP=128, BC=128)


@triton.jit
def _place(C, L, OWN: tl.constexpr, BC: tl.constexpr):
    """Row, first token and channels of a program. Those of one strip follow one another, so that what runs at a time
    reads whole tokens."""
    tiles, strips = tl.cdiv(C, BC), tl.cdiv(L, OWN)
    strip = tl.program_id(0) // tiles
    cols = tl.program_id(0) % tiles * BC + tl.arange(0, BC)
    return (strip // strips).to(tl.int64), strip % strips * OWN, cols


@triton.jit
def _input(
    x,
    before,
    row,
    token,
    cols,
    inside,
    L,
    C,
    x_row,
    x_tok,
    K: tl.constexpr,
    BEFORE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """x at a token, (channels,): zero outside the row, but what `before` has."""
    there = (token >= 0) & (token < L)
    value = tl.load(x + row * x_row + tl.cast(token, tl.int64) * x_tok + cols, mask=inside & there, other=0.0).to(WIDE)
    if BEFORE:
        old = (token < 0) & (token >= 1 - K)
        value += tl.load(before + (row * (K - 1) + token + K - 1) * C + cols, mask=inside & old, other=0.0).to(WIDE)
    return value


@triton.jit
def _document(numbers, row, token, L, DOCUMENTS: tl.constexpr):
    """The document of a token; tokens before the row are of its first one."""
    if DOCUMENTS:
        return tl.load(numbers + row * L + tl.minimum(tl.maximum(token, 0), L - 1))
    return tl.full((), 0, tl.int64)


@triton.jit
def _of_document(value, document, own, DOCUMENTS: tl.constexpr):
    """The value, or zero if it is of another document."""
    if DOCUMENTS:
        return tl.where(document == own, value, 0.0)
    return value


@triton.jit
def _weights(weight, cols, inside, K: tl.constexpr, WIDE: tl.constexpr):
    """(channels,) for each tap."""
    taps = ()
    for k in tl.static_range(K):
        taps = taps + (tl.load(weight + cols * K + k, mask=inside, other=0.0).to(WIDE),)
    return taps


@triton.jit
def _before_strip(
    x,
    numbers,
    before,
    row,
    first,
    cols,
    inside,
    L,
    C,
    x_row,
    x_tok,
    K: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    BEFORE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Inputs and documents of the K - 1 tokens before `first`."""
    values, documents = (), ()
    for k in tl.static_range(K - 1):
        token = first - (K - 1) + k
        values = values + (_input(x, before, row, token, cols, inside, L, C, x_row, x_tok, K, BEFORE, WIDE),)
        documents = documents + (_document(numbers, row, token, L, DOCUMENTS),)
    return values, documents


@triton.jit
def _sums(values, documents, taps, offset, K: tl.constexpr, DOCUMENTS: tl.constexpr):
    """The convolution at the newest of these K inputs."""
    z = offset + taps[K - 1] * values[K - 1]
    for k in tl.static_range(K - 1):
        z += taps[k] * _of_document(values[k], documents[k], documents[K - 1], DOCUMENTS)
    return z


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
    STRIP: tl.constexpr,
    TURN: tl.constexpr,
    BC: tl.constexpr,
):
    row, start, cols = _place(C, L, STRIP, BC)
    inside = cols < C
    taps = _weights(weight, cols, inside, K, WIDE)
    offset = tl.load(bias + cols, mask=inside, other=0.0).to(WIDE) if BIAS else tl.zeros((BC,), WIDE)
    values, documents = _before_strip(
        x, numbers, before, row, start, cols, inside, L, C, x_row, x_tok, K, DOCUMENTS, BEFORE, WIDE
    )
    for turn in range(0, STRIP // TURN):
        first = start + turn * TURN
        for i in tl.static_range(TURN):
            values = values + (_input(x, before, row, first + i, cols, inside, L, C, x_row, x_tok, K, False, WIDE),)
            documents = documents + (_document(numbers, row, first + i, L, DOCUMENTS),)
        for i in tl.static_range(TURN):
            z = _sums(values[i : i + K], documents[i : i + K], taps, offset, K, DOCUMENTS)
            if SILU:
                z = z / (1.0 + tl.exp(-z))
            to = y + (row * L + first + i) * C + cols
            tl.store(to, z.to(y.dtype.element_ty), mask=inside & (first + i < L))
        values, documents = values[TURN:], documents[TURN:]


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
    STRIP: tl.constexpr,
    TURN: tl.constexpr,
    BC: tl.constexpr,
):
    """Takes STRIP tokens, and makes the gradients of the first STRIP - K + 1 of them."""
    OWN: tl.constexpr = STRIP - K + 1
    row, start, cols = _place(C, L, OWN, BC)
    inside = cols < C
    taps = _weights(weight, cols, inside, K, WIDE)
    offset = tl.load(bias + cols, mask=inside, other=0.0).to(WIDE) if BIAS else tl.zeros((BC,), WIDE)
    values, documents = _before_strip(
        x, numbers, before, row, start, cols, inside, L, C, x_row, x_tok, K, DOCUMENTS, BEFORE, WIDE
    )
    above, dw = (), ()
    for _ in tl.static_range(K - 1):  # of tokens before the strip, which belong to the gradients of earlier inputs
        above = above + (tl.zeros((BC,), WIDE),)
    for _ in tl.static_range(K):
        dw = dw + (tl.zeros((BC,), WIDE),)
    db = tl.zeros((BC,), WIDE)
    for turn in range(0, STRIP // TURN):
        first = start + turn * TURN
        given = ()
        for i in tl.static_range(TURN):
            token = first + i
            values = values + (_input(x, before, row, token, cols, inside, L, C, x_row, x_tok, K, False, WIDE),)
            given = given + (_input(dy, before, row, token, cols, inside, L, C, dy_row, dy_tok, K, False, WIDE),)
            documents = documents + (_document(numbers, row, token, L, DOCUMENTS),)
        for i in tl.static_range(TURN):
            token, g = first + i, given[i]
            seen, of = values[i : i + K], documents[i : i + K]
            if SILU:
                z = _sums(seen, of, taps, offset, K, DOCUMENTS)
                s = 1.0 / (1.0 + tl.exp(-z))
                g = g * s * (1.0 + z * (1.0 - s))
            counted = tl.where(token < start + OWN, g, 0.0)
            db += counted
            more = ()
            for k in tl.static_range(K):
                more = more + (dw[k] + counted * _of_document(seen[k], of[k], of[K - 1], DOCUMENTS),)
            dw = more
            above = above + (g,)
            readers = above[i : i + K]
            d = taps[K - 1] * readers[0]
            for k in tl.static_range(K - 1):
                d += taps[k] * _of_document(readers[K - 1 - k], of[K - 1 - k], of[0], DOCUMENTS)
            read = token - (K - 1)
            to = dx + (row * L + read) * C + cols
            tl.store(to, d.to(dx.dtype.element_ty), mask=inside & (read >= start) & (read < L))
        values, documents, above = values[TURN:], documents[TURN:], above[TURN:]
    part = (row * tl.cdiv(L, OWN) + start // OWN) * C + cols
    tl.store(db_parts + part, db, mask=inside)
    for k in tl.static_range(K):
        tl.store(dw_parts + part * K + k, dw[k], mask=inside)


def _features_last(x: Tensor) -> Tensor:
    """The same, contiguous in its features."""
    return x if x.stride(2) == 1 else x.contiguous()


def conv_forward(s: ConvInputs) -> Tensor:
    """As the reference."""
    x, (rows, length, channels) = _features_last(s.x), s.x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (rows * triton.cdiv(length, FORWARD["STRIP"]) * triton.cdiv(channels, FORWARD["BC"]),)
    if y.numel():
        given = (x, s.weight.contiguous(), s.bias, _packed(s.numbers), _packed(s.before))
        _forward[grid](*given, y, length, channels, x.stride(0), x.stride(1), **FORWARD, **_constants(s))
    return y


def conv_backward(dy: Tensor, s: ConvInputs) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As the reference."""
    x, dy, (rows, length, channels) = _features_last(s.x), _features_last(dy), s.x.shape
    taps, wide = s.weight.shape[1], wide_of(x.dtype)
    strips = rows * triton.cdiv(length, BACKWARD["STRIP"] - taps + 1)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw = torch.empty(strips, channels, taps, dtype=wide, device=x.device)  # programs fill all parts
    db = torch.empty(strips, channels, dtype=wide, device=x.device)
    if dx.numel():
        given = (dy, x, s.weight.contiguous(), s.bias, _packed(s.numbers), _packed(s.before))
        strides = (x.stride(0), x.stride(1), dy.stride(0), dy.stride(1))
        grid = (strips * triton.cdiv(channels, BACKWARD["BC"]),)
        _backward[grid](*given, dx, dw, db, length, channels, *strides, **BACKWARD, **_constants(s))
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
        TURN=TURN,
        num_warps=WARPS,
    )
