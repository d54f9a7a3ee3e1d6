"""What the Triton kernels of the delta rule share: tiles of a chunk's tokens, documents, matmuls, lengths of keys."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def documents_at(numbers, row, start, at, here, L, DOCUMENTS: tl.constexpr):
    """The documents of tokens `at` of a row and of the state before the chunk, counted from that of its last token, and
    1 past the end of the row."""
    own = tl.where(here, 0, 1)
    carried = tl.full((), 0, tl.int32)
    if DOCUMENTS:
        last = tl.load(numbers + row * L + tl.minimum(start + at.shape[0], L) - 1)
        own = (tl.load(numbers + row * L + at, mask=here, other=last + 1) - last).to(tl.int32)
        carried = (tl.load(numbers + row * L + tl.maximum(start - 1, 0)) - last).to(tl.int32)
    return own, carried


@triton.jit
def summable(decay, WIDE: tl.constexpr):
    """Decays in the wide dtype, none below where exp is 0 already (ops.scan.scan.NOTHING_LEFT). NaN stays."""
    LEAST: tl.constexpr = -746.0 if WIDE == tl.float64 else -104.0
    logs = decay.to(WIDE)
    return tl.where(logs < LEAST, LEAST, logs)


@triton.jit
def tile(x, row, head, start, i, cols, here, inside, x_row, x_tok, WIDTH: tl.constexpr):
    """(tokens, features) of a head, of the tokens i after `start`. What all of them have in common is added to the
    address first, so that a thread has few long numbers."""
    first = x + row * x_row + long(start) * x_tok + head * WIDTH
    mask = here[:, None] if WIDTH // cols.shape[0] * cols.shape[0] == WIDTH else here[:, None] & inside[None, :]
    return tl.load(first + (i[:, None] * x_tok + cols[None, :]), mask=mask, other=0.0)


@triton.jit
def across(x, row, head, start, i, cols, here, inside, x_row, x_tok, WIDTH: tl.constexpr):
    """(features, tokens) of a head."""
    first = x + row * x_row + long(start) * x_tok + head * WIDTH
    mask = here[None, :] if WIDTH // cols.shape[0] * cols.shape[0] == WIDTH else here[None, :] & inside[:, None]
    return tl.load(first + (i[None, :] * x_tok + cols[:, None]), mask=mask, other=0.0)


@triton.jit
def state_tile(states, place, m, n, wanted, inside, V: tl.constexpr, K: tl.constexpr):
    """(features of values, features of keys) of a state."""
    at = states + place * V * K + (m[:, None] * K + n[None, :])
    if V // m.shape[0] * m.shape[0] == V and K == n.shape[0]:
        return tl.load(at)
    return tl.load(at, mask=wanted[:, None] & inside[None, :], other=0.0)


@triton.jit
def long(x):
    return tl.full((), 0, tl.int64) + x


@triton.jit
def dot(a, b, ELEMENT: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """In the dtype of values, added up in the wide one."""
    return tl.dot(a.to(ELEMENT), b.to(ELEMENT), out_dtype=WIDE, input_precision=PRECISION).to(WIDE)


@triton.jit
def wide_dot(a, b, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """All in the wide dtype."""
    return tl.dot(a, b, out_dtype=WIDE, input_precision=PRECISION).to(WIDE)


@triton.jit
def length_factors(x, NORMALIZE: tl.constexpr, EPSILON: tl.constexpr):
    """(tokens,): what a token's features are multiplied with to have length 1."""
    found = tl.sum(x * 0, 1) + 1.0
    if NORMALIZE:
        found = 1 / tl.sqrt(tl.sum(x * x, 1) + EPSILON)
    return found


@triton.jit
def along(grad, x, factors, NORMALIZE: tl.constexpr):
    """The gradient of x from that of x over its length, times `factors`; without its part along x."""
    if NORMALIZE:
        grad -= x * (factors * factors * tl.sum(grad * x, 1))[:, None]
    return grad


@triton.jit
def level(sums, row, head, start, i, n, inside, own_sums, number, L, H, K: tl.constexpr, C: tl.constexpr):
    """Of the blocks of a level, whose two halves are compared with each other: what is left of each token by feature,
    (C, K), since the last one of the first half or until then; which pairs (C, C) are in one block; and which tokens
    are in a second half."""
    half = C >> (number + 1)
    border = i // (2 * half) * (2 * half) + half - 1
    since = tile(sums, row, head, start, border, n, start + border < L, inside, long(L) * H * K, H * K, K)
    second = (i // half) % 2 == 1
    between = tl.where(second[:, None], own_sums - since, since - own_sums)
    left = tl.exp(tl.minimum(between, 0.0))
    block = i // (2 * half)
    return left, block[:, None] == block[None, :], second
