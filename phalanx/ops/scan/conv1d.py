"""Causal depthwise convolution over the tokens of a document, with its activation: each feature is a weighted sum of
itself at the last few tokens.

Tokens come as rows (TokenRows). A tap reads zero where it would reach into another document. Saved for backward: the
inputs.

Shapes: R rows, L tokens of a row, C channels, K taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.ops.dense.activation import widened
from phalanx.ops.dense.grads import add_grad
from phalanx.ops.op import ALL_KERNELS, Case, Implementation, Kernels, Op, triton
from phalanx.ops.scan.rows import WHOLE_ROWS, TokenRows, documents_of


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


@dataclass(frozen=True)
class ConvInputs:
    """x (R, L, C), weight (C, K), bias (C,) or None, numbers and before as in TokenRows; silu: whether the sum is
    activated."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    numbers: Tensor | None
    before: Tensor | None
    silu: bool

    def sums(self) -> Tensor:
        """The convolution without its activation, in at least fp32."""
        weight = widened(self.weight)
        y = sum(tap * weight[:, k] for k, tap in enumerate(self.taps()))
        return y if self.bias is None else y + widened(self.bias)  # type: ignore[return-value]

    def taps(self) -> list[Tensor]:
        before = None if self.before is None else widened(self.before)
        return _taps(widened(self.x), self.numbers, before, self.weight.shape[1])


def conv_forward(s: ConvInputs) -> Tensor:
    """(R, L, C) in the dtype of x."""
    y = s.sums()
    return (F.silu(y) if s.silu else y).to(s.x.dtype)


def conv_backward(dy: Tensor, s: ConvInputs) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of x, of weight (C, K) and bias (C,), both in at least fp32, and of `before`.

    With z the sums and g = dy * silu'(z): dw_k = sum over tokens of g_t x_{t - K + 1 + k}, db = sum of g, and
    dx_s = sum over taps of w_k g_{s + K - 1 - k}, each where both tokens are of one document.
    """
    g, w, (rows, length, channels), taps = widened(dy), widened(s.weight), s.x.shape, s.weight.shape[1]
    if s.silu:
        z = s.sums()
        sigmoid = torch.sigmoid(z)
        g = g * sigmoid * (1 + z * (1 - sigmoid))
    dw = torch.stack([(g * tap).sum((0, 1)) for tap in s.taps()], 1)
    reach = taps - 1
    dpadded = g.new_zeros(rows, reach + length, channels)
    for k in range(taps):
        part = g * w[:, k]
        if s.numbers is not None:
            there = torch.cat((s.numbers[:, :1].expand(-1, reach), s.numbers), 1)[:, k : k + length]
            part = torch.where((there == s.numbers).unsqueeze(-1), part, 0)
        dpadded[:, k : k + length] += part
    dbefore = None if s.before is None else dpadded[:, :reach].to(s.before.dtype)
    return dpadded[:, reach:].to(s.x.dtype), dw, g.sum((0, 1)), dbefore


class DryConv:
    """Without data: allocates what the fused implementation does."""

    @staticmethod
    def conv_forward(s: ConvInputs) -> Tensor:
        return torch.empty_like(s.x, memory_format=torch.contiguous_format)

    @staticmethod
    def conv_backward(dy: Tensor, s: ConvInputs) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        dx = torch.empty_like(s.x, memory_format=torch.contiguous_format)
        wide = torch.empty_like(s.weight, dtype=widened(s.weight[:0]).dtype)
        return dx, wide, wide[:, 0], None if s.before is None else torch.empty_like(s.before)


class _Conv(Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:  # type: ignore[override]
        x, weight, bias, numbers, before, silu, by = given
        ctx.save_for_backward(x, numbers, before)
        ctx.weight, ctx.bias, ctx.silu, ctx.by = weight, bias, silu, by
        y: Tensor = by.conv_forward(ConvInputs(x, _flat(weight), bias, numbers, before, silu))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x, numbers, before), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        inputs = ConvInputs(x, _flat(weight), bias, numbers, before, ctx.silu)
        dx, dw, db, dbefore = ctx.by.conv_backward(dy, inputs)
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
    rows: TokenRows = WHOLE_ROWS,
    silu: bool = True,
    kernels: Kernels = "auto",
) -> Tensor:
    """y_t = silu(bias + sum over k of weight_k x_{t - K + 1 + k}) of the rows x (R, L, C), in its dtype; without
    `silu`, the sum itself. weight (C, 1, K), as torch.nn.Conv1d has it; bias (C,) or None."""
    by = CONV1D.choose(kernels, x)
    made: Tensor = _Conv.apply(x, weight, bias, rows.numbers, rows.before, silu, by)
    return made


def last_tokens(x: Tensor, before: Tensor | None, taps: int) -> Tensor:
    """(R, K - 1, C): what the rows x (R, L, C) leave to those that follow them."""
    reach = taps - 1
    padded = F.pad(x, (0, 0, reach, 0)) if before is None else torch.cat((before.to(x.dtype), x), 1)
    return padded[:, padded.shape[1] - reach :]


def _case(x: Tensor, weight: Tensor, bias: Tensor, before: Tensor, kernels: Kernels) -> Tensor:
    return conv1d(x, weight, bias, TokenRows(documents_of(x), before), True, kernels)


def _whole(x: Tensor, weight: Tensor, kernels: Kernels) -> Tensor:
    return conv1d(x, weight, None, WHOLE_ROWS, False, kernels)


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
        Case("conv1d, documents", _case, ((2, 267, 21), (21, 1, 4), (21,), (2, 3, 21)), (1, 2)),
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
