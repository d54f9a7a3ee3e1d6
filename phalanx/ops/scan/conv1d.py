"""Causal depthwise convolution over the tokens of a document, with its activation: each feature is a weighted sum of
itself at the last few tokens.

Tokens come as rows: R spans of L consecutive tokens each. `numbers` says which document each token belongs to; a tap
reads zero where it would reach into another document. `before` holds the K - 1 tokens that precede each row, for rows
that go on with a document. Saved for backward: the inputs.

Shapes: R rows, L tokens of a row, C channels, K taps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.ops.dense.activation import widened
from phalanx.ops.dense.grads import add_grad
from phalanx.ops.op import ALL_KERNELS, Case, Implementation, Kernels, Op, triton


def _taps(x: Tensor, numbers: Tensor | None, before: Tensor | None, taps: int) -> list[Tensor]:
    """For each tap, the oldest first, what it reads at every token: `taps` tensors (R, L, C), zero where the document
    of the token begins later."""
    length, reach = x.shape[1], taps - 1
    padded = F.pad(x, (0, 0, reach, 0)) if before is None else torch.cat((before, x), 1)
    read = [padded[:, k : k + length] for k in range(taps)]
    if numbers is None:
        return read
    there = torch.cat((numbers[:, :1].expand(-1, reach), numbers), 1)
    same = (there[:, k : k + length] == numbers for k in range(reach))
    return [torch.where(seen.unsqueeze(-1), each, 0) for seen, each in zip(same, read)] + read[reach:]


def _sums(x: Tensor, weight: Tensor, bias: Tensor | None, numbers: Tensor | None, before: Tensor | None) -> Tensor:
    """The convolution without its activation."""
    y = sum(tap * weight[:, k] for k, tap in enumerate(_taps(x, numbers, before, weight.shape[1])))
    return y if bias is None else y + bias  # type: ignore[return-value]


def conv_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, numbers: Tensor | None, before: Tensor | None, silu: bool
) -> Tensor:
    """x (R, L, C), weight (C, K), bias (C,) or None, numbers (R, L) int64 or None, before (R, K - 1, C) or None ->
    (R, L, C)."""
    y = _sums(widened(x), widened(weight), None if bias is None else widened(bias), numbers, _wide(before))
    return (F.silu(y) if silu else y).to(x.dtype)


def conv_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    numbers: Tensor | None,
    before: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of x, of weight (C, K) and bias (C,), both in at least fp32, and of `before`.

    With z the sums and g = dy * silu'(z): dw_k = sum over tokens of g_t x_{t - K + 1 + k}, db = sum of g, and
    dx_s = sum over taps of w_k g_{s + K - 1 - k}, each where both tokens are of one document.
    """
    wide, w, old, taps = widened(x), widened(weight), _wide(before), weight.shape[1]
    g = widened(dy)
    if silu:
        z = _sums(wide, w, None if bias is None else widened(bias), numbers, old)
        s = torch.sigmoid(z)
        g = g * s * (1 + z * (1 - s))
    dw = torch.stack([(g * tap).sum((0, 1)) for tap in _taps(wide, numbers, old, taps)], 1)
    rows, length, channels = x.shape
    reach = taps - 1
    dpadded = wide.new_zeros(rows, reach + length, channels)
    for k in range(taps):
        part = g * w[:, k]
        if numbers is not None:
            there = torch.cat((numbers[:, :1].expand(-1, reach), numbers), 1)[:, k : k + length]
            part = torch.where((there == numbers).unsqueeze(-1), part, 0)
        dpadded[:, k : k + length] += part
    dbefore = None if before is None else dpadded[:, :reach].to(before.dtype)
    return dpadded[:, reach:].to(x.dtype), dw, g.sum((0, 1)), dbefore


def _wide(x: Tensor | None) -> Tensor | None:
    return None if x is None else widened(x)


class DryConv:
    """Without data: allocates what the fused implementation does."""

    @staticmethod
    def conv_forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, numbers: Tensor | None, before: Tensor | None, silu: bool
    ) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def conv_backward(
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        numbers: Tensor | None,
        before: Tensor | None,
        silu: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        wide = torch.empty_like(weight, dtype=widened(weight[:0]).dtype)
        return dx, wide, wide[:, 0], None if before is None else torch.empty_like(before)


class _Conv(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        numbers: Tensor | None,
        before: Tensor | None,
        silu: bool,
        by: Any,  # type: ignore[override]
    ) -> Tensor:
        ctx.save_for_backward(x, numbers, before)
        ctx.weight, ctx.bias, ctx.silu, ctx.by = weight, bias, silu, by
        y: Tensor = by.conv_forward(x, _flat(weight), bias, numbers, before, silu)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x, numbers, before), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        dx, dw, db, dbefore = ctx.by.conv_backward(dy, x, _flat(weight), bias, numbers, before, ctx.silu)
        need_w, need_b = ctx.needs_input_grad[1:3]
        dw_out = add_grad(weight, dw.view(weight.shape)) if need_w else None
        db_out = add_grad(bias, db) if need_b else None
        return dx, dw_out, db_out, None, dbefore, None, None


def _flat(weight: Tensor) -> Tensor:
    """(C, 1, K), as torch.nn.Conv1d has it, or (C, K) -> (C, K)."""
    return weight.detach().flatten(1)


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    numbers: Tensor | None = None,
    before: Tensor | None = None,
    silu: bool = True,
    kernels: Kernels = "auto",
) -> Tensor:
    """y_t = silu(bias + sum over k of weight_k x_{t - K + 1 + k}) of x (R, L, C), in its dtype; without `silu`, the sum
    itself.

    weight   (C, 1, K), as torch.nn.Conv1d has it; bias (C,) or None
    numbers  (R, L) int64: the document of each token; None: each row is part of one
    before   (R, K - 1, C): the tokens before each row, zero where they belong to another document than its first token;
             None: nothing comes before
    """
    made: Tensor = _Conv.apply(x, weight, bias, numbers, before, silu, CONV1D.choose(kernels, x))
    return made


def last_tokens(x: Tensor, before: Tensor | None, taps: int) -> Tensor:
    """(R, K - 1, C): what the rows x (R, L, C) leave to those that follow them."""
    reach = taps - 1
    padded = F.pad(x, (0, 0, reach, 0)) if before is None else torch.cat((before.to(x.dtype), x), 1)
    return padded[:, padded.shape[1] - reach :]


def conv1d_step(
    x: Tensor,
    states: Tensor,
    slots: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool = True,
    fresh: Tensor | None = None,
) -> Tensor:
    """One token of each of S sequences, x (S, C) -> (S, C). states (slots, K - 1, C): the last inputs of sequences,
    updated in place at `slots` (S,) int64, which differ. `fresh` (S,) bool: which sequences begin here."""
    old = states[slots]
    old = old if fresh is None else torch.where(fresh[:, None, None], 0, old)
    read = torch.cat((old, x.unsqueeze(1).to(states.dtype)), 1)
    states[slots] = read[:, 1:]
    y = (widened(read) * widened(_flat(weight)).t()).sum(1)
    y = y if bias is None else y + widened(bias.detach())
    return (F.silu(y) if silu else y).to(x.dtype)


def _numbers(x: Tensor) -> Tensor:
    """Documents of 1, 2, 3 ... tokens, one after another, over the borders of rows."""
    at = torch.arange(x.shape[0] * x.shape[1], device=x.device)
    return ((torch.sqrt(8.0 * at + 1) - 1) / 2).long().view(x.shape[:2])


def _case(x: Tensor, weight: Tensor, bias: Tensor, before: Tensor, kernels: Kernels) -> Tensor:
    return conv1d(x, weight, bias, _numbers(x), before, True, kernels)


def _whole(x: Tensor, weight: Tensor, kernels: Kernels) -> Tensor:
    return conv1d(x, weight, None, None, None, False, kernels)


CONV1D = Op(
    "conv1d",
    "causal depthwise convolution inside documents, with its activation",
    __name__,
    ("conv_forward", "conv_backward"),
    (
        triton("phalanx.ops.scan.conv1d_kernel"),
        Implementation("dry", f"{__name__}:DryConv", "meta", modes=ALL_KERNELS),
    ),
    cases=(
        Case("conv1d, documents", _case, ((2, 45, 21), (21, 1, 4), (21,), (2, 3, 21)), (1, 2)),
        Case("conv1d, whole rows", _whole, ((3, 17, 40), (40, 1, 3)), (1,)),
        Case("conv1d, fewer tokens than taps", _case, ((2, 2, 5), (5, 1, 4), (5,), (2, 3, 5)), (1, 2)),
        Case(
            "conv1d of 5376 channels",
            _case,
            ((2, 2048, 5376), (5376, 1, 4), (5376,), (2, 3, 5376)),
            (1, 2),
            large=True,
        ),
    ),
)
