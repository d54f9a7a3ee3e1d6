"""Tokens and sums of rows written through pointers into other ranks' memory, one token for each program, and the
returned sums added up.

A token's experts determine which ranks it concerns, so nothing is counted, and nothing is sent that nobody reads. Each
rank starts with a different target, so that they do not all write to the same one at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.experts.permute_kernel import WIDTH
from phalanx.ops.kernel_tools import triton_wide, warps_for, wide_of

if TYPE_CHECKING:
    from phalanx.ops.experts.rows import ExpertRows
    from phalanx.ops.experts.spread import Buffers, Spread


@triton.jit
def _chosen(experts, token, NOBODY: tl.constexpr, SLOTS: tl.constexpr, K_BLOCK: tl.constexpr):
    """A token's experts, padded with a number that no rank has."""
    slot = tl.arange(0, K_BLOCK)
    return tl.load(experts + token * SLOTS + slot, mask=slot < SLOTS, other=NOBODY)


@triton.jit
def _concerns(chosen, rank, HERE: tl.constexpr, ETP: tl.constexpr):
    """Whether a rank holds one of the experts."""
    return tl.max((chosen // HERE == rank // ETP).to(tl.int32), 0) > 0


@triton.jit
def _on(addresses, rank, like):
    """The start of a buffer on a rank; buffers are aligned."""
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def _send_tokens(
    x,
    experts,
    addresses,
    first,
    D,
    HERE: tl.constexpr,
    ETP: tl.constexpr,
    RANKS: tl.constexpr,
    SLOTS: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the token to row first + token on every rank that it concerns."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + token * D + cols, mask=cols < D)
    chosen = _chosen(experts, token, RANKS * HERE, SLOTS, K_BLOCK)
    for k in tl.static_range(RANKS):
        rank = (token + k) % RANKS
        tl.store(
            _on(addresses, rank, x) + (first + token) * D + cols,
            value,
            mask=(cols < D) & _concerns(chosen, rank, HERE, ETP),
        )


@triton.jit
def _send_sums(
    y,
    row,
    experts,
    addresses,
    tokens,
    first,
    index,
    D,
    HERE: tl.constexpr,
    ETP: tl.constexpr,
    RANKS: tl.constexpr,
    SLOTS: tl.constexpr,
    K_BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the sum of a token's rows here, in the order of its slots, to row first + token on the rank that it came
    from; this rank's own tokens come last."""
    pair = (tl.program_id(0).to(tl.int64) + first + tokens) % (
        RANKS * tokens
    )  # number of a token among those of all ranks
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if _concerns(_chosen(experts, pair, RANKS * HERE, SLOTS, K_BLOCK), index, HERE, ETP):
        total = tl.zeros((BLOCK,), WIDE)
        for k in tl.static_range(SLOTS):
            r = tl.load(row + pair * SLOTS + k).to(tl.int64)
            total += tl.load(y + r * D + cols, mask=(cols < D) & (r >= 0), other=0.0).to(WIDE)
        to = _on(addresses, pair // tokens, y) + (first + pair % tokens) * D + cols
        tl.store(to, total.to(y.dtype.element_ty), mask=cols < D)


@triton.jit
def _add_sums(
    parts,
    out,
    experts,
    tokens,
    D,
    HERE: tl.constexpr,
    ETP: tl.constexpr,
    RANKS: tl.constexpr,
    SLOTS: tl.constexpr,
    K_BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up, in rank order, what the ranks that a token concerns have sent back."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    chosen = _chosen(experts, token, RANKS * HERE, SLOTS, K_BLOCK)
    total = tl.zeros((BLOCK,), WIDE)
    for rank in tl.static_range(RANKS):
        mask = (cols < D) & _concerns(chosen, rank, HERE, ETP)
        total += tl.load(parts + (rank * tokens + token) * D + cols, mask=mask, other=0.0).to(WIDE)
    tl.store(out + token * D + cols, total.to(out.dtype.element_ty), mask=cols < D)


def _form(spread: Spread, slots: int, width: int) -> tuple[int, dict]:
    """(programs per token, constants of a kernel)"""
    block = min(WIDTH, triton.next_power_of_2(width))
    form = dict(
        HERE=spread.here,
        ETP=spread.etp,
        RANKS=spread.ranks,
        SLOTS=slots,
        K_BLOCK=triton.next_power_of_2(slots),
        BLOCK=block,
    )
    return triton.cdiv(width, block), dict(**form, num_warps=warps_for(block))


def send_tokens(x: Tensor, experts_TK: Tensor, spread: Spread, to: Buffers) -> None:
    """x (T, D) to this rank's part on each rank that a token has an expert on."""
    (tokens, width), x = x.shape, x.contiguous()
    columns, form = _form(spread, experts_TK.shape[1], width)
    if x.numel():
        _send_tokens[(tokens, columns)](x, experts_TK.contiguous(), to.addresses, to.first, width, **form)


def send_sums(y: Tensor, rows: ExpertRows, everyones: Tensor, spread: Spread, to: Buffers) -> None:
    """For each token with an expert here, write the sum of its rows (R, D) to the rank that it came from; `everyones`
    (N * T, K) and `rows` cover the tokens of all ranks."""
    width, y = y.shape[1], y.contiguous()
    columns, form = _form(spread, everyones.shape[1], width)
    if len(everyones) and width:
        _send_sums[(len(everyones), columns)](
            y,
            rows.row_TK,
            everyones.contiguous(),
            to.addresses,
            to.tokens,
            to.first,
            spread.index,
            width,
            WIDE=triton_wide(wide_of(y.dtype)),
            **form,
        )


def add_sums(parts: Tensor, experts_TK: Tensor, spread: Spread) -> Tensor:
    """(T, D) the sums (N * T, D) that came back for each token, added in rank order, in fp32 or wider."""
    (tokens, slots), width = experts_TK.shape, parts.shape[1]
    out = torch.empty(tokens, width, dtype=parts.dtype, device=parts.device)
    columns, form = _form(spread, slots, width)
    if out.numel():
        _add_sums[(tokens, columns)](
            parts, out, experts_TK.contiguous(), tokens, width, WIDE=triton_wide(wide_of(parts.dtype)), **form
        )
    return out
