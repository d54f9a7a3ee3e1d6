"""Attention by flash kernels inside documents and windows and with sinks. No mask is built, and keys that are not read
cost nothing.

Two packages of kernels. flash-attn-4 (CuTe DSL kernels for Hopper and newer, an optional package) computes all of
these. torch's own flash kernels (version 2, any GPU since Ampere) compute what would otherwise need a mask, because
torch's public function has neither windows nor documents. The functions here decide which one runs. Dao et al.,
"FlashAttention", 2022; Dao, "FlashAttention-2", 2023; Shah et al., "FlashAttention-3", 2024.

Their backward sums dq in the order in which blocks finish, so gradients differ in the last bits from run to run, unless
`torch.use_deterministic_algorithms(True)` asks for a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.ops.dense.grads import add_grad
from phalanx.ops.op import Implementation, Kernels, Op, Package
from phalanx.sequence.batch import Batch, PerBatch

aten = torch.ops.aten
# on lengths: with 1 and shared keys torch's kernels believe that every span has exactly one query, and fail where one
# is empty
LEAST_BOUND = 2


def flash_fits(query: int, value: int, shared: bool = False) -> bool:
    """Head widths with which flash-attn-4's kernels were tested here (with 40, its gradients were wrong). Its backward
    supports keys shared between query heads (`shared`) only where values are as wide as queries."""
    return (query, value) in ((64, 64), (128, 128), (192, 128)) and not (shared and query != value)


def torch_flash_fits(query: int, value: int, shared: bool = False) -> bool:
    """Values narrower than queries are padded with zeros."""
    return query >= value and query % 8 == 0 and query <= 256


NARROW = (torch.bfloat16, torch.float16)
FLASH_ATTN = Implementation(
    "flash-attn",
    "flash_attn.cute.interface",
    "cuda",
    (9, 0),
    NARROW,
    Package("flash-attn-4", "flash_attn.cute.interface", "4.0.0b36"),
    flash_fits,
    "heads of 64, 128, or 192 with values of 128",
    modes=("auto",),
    insisted=("optional",),
    cost="attention is torch's",
)
TORCH_FLASH = Implementation(
    "torch-flash",
    "torch.ops.aten",
    "cuda",
    (8, 0),
    NARROW,
    fits=torch_flash_fits,
    shapes="heads of at most 256, in multiples of 8; used inside documents and windows",
)


def use_flash(kernels: Kernels, q: Tensor, v: Tensor) -> bool:
    """Whether flash-attn-4 is to run."""
    return FLASH_ATTN.takes(kernels, q, (q.shape[-1], v.shape[-1], q.shape[1] != v.shape[1]))


def use_torch_flash(kernels: Kernels, q: Tensor, v: Tensor) -> bool:
    """Whether torch's flash kernels may run, where more is hidden than the keys after each query."""
    return TORCH_FLASH.takes(kernels, q, (q.shape[-1], v.shape[-1]))


@dataclass(frozen=True)
class Spans:
    """Spans of flat tokens that attend among themselves: span i is offsets[i] .. offsets[i + 1], int32; the last ones
    may be empty.

    `longest` is an upper bound on their lengths; `whole` says that all are equally long, that is, whole sequences. Made
    without a mask and without waiting for the device.
    """

    offsets: Tensor
    longest: int
    whole: bool


SPANS = PerBatch[Spans]()


def spans_of(batch: Batch) -> Spans:
    """The sequences of a batch, or its documents."""
    return SPANS.of(batch, lambda: _find_spans(batch))


def _find_spans(batch: Batch) -> Spans:
    device, tokens, length = batch.tokens.device, batch.num_tokens, batch.seq_length
    if batch.documents is None:
        return Spans(torch.arange(0, tokens + 1, length, dtype=torch.int32, device=device), length, True)
    offsets = torch.full((batch.room_for_documents + 1,), tokens, dtype=torch.int64, device=device)
    offsets.scatter_reduce_(0, batch.documents, torch.arange(tokens, device=device), "amin")
    return Spans(
        offsets.flip(0).cummin(0).values.flip(0).int(), length, False
    )  # a document number that no token has is an empty span


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spans: Spans,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    flash_attn: bool = True,
) -> Tensor:
    """Causal: q (sequences, heads, S, K), k (sequences, kv_heads, S, K), v (..., V), sinks (heads,) -> (T, heads * V),
    bf16 or fp16.

    The kernels take (T, heads, K) with any strides but the last, so they read the heads in place, as views of the
    packed qkv. The gradients returned are packed by `ops.dense.rope` in the one pass that it makes in any case; nothing
    else is copied. `flash_attn`: by flash-attn-4, otherwise by torch's kernels.
    """
    if flash_attn:
        out = _by_flash_attn(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), spans, window, scale, sinks)
    else:
        flat = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, F.pad(v, (0, q.shape[-1] - v.shape[-1]))))
        out = _TorchFlash.apply(*flat, sinks, spans, window, scale)[..., : v.shape[-1]]
    return out.reshape(q.shape[0] * q.shape[2], -1)


def _by_flash_attn(
    q: Tensor, k: Tensor, v: Tensor, spans: Spans, window: int | None, scale: float | None, sinks: Tensor | None
) -> Tensor:
    """q, k, v (sequences, S, heads, K or V) -> the shape of q with width V; flat where documents divide the
    sequences."""
    from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

    how: dict[str, Any] = {
        "causal": True,
        "softmax_scale": scale,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if sinks is not None:
        how["learnable_sink"] = own_precision(sinks)
    if window is not None:
        how["window_size"] = (window - 1, 0)
    if spans.whole:
        return flash_attn_func(q, k, v, **how)[0]
    ends = {
        "cu_seqlens_q": spans.offsets,
        "cu_seqlens_k": spans.offsets,
        "max_seqlen_q": spans.longest,
        "max_seqlen_k": spans.longest,
    }
    return flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), **ends, **how)[0]


def own_precision(x: Tensor) -> Tensor:
    """A parameter in at least fp32, whose gradient is summed in that dtype too."""
    made: Tensor = _InFp32.apply(x)
    return made


class _InFp32(Function):
    """A parameter in at least fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.x = x
        return x.clone() if x.dtype == torch.float64 else x.float()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor | None:  # type: ignore[override]
        return add_grad(ctx.x, dy)


class _TorchFlash(Function):
    """torch's flash kernels over spans of flat tokens. ops/attention/sinks.py explains how sinks join the result of a
    plain kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Any, spans: Spans, window: Any, scale: Any) -> Tensor:  # type: ignore[override]
        longest = max(LEAST_BOUND, spans.longest)
        ctx.shape = (spans.offsets, spans.offsets, longest, longest, 0.0, True)
        ctx.how = {
            "scale": scale,
            "window_size_left": None if window is None else window - 1,
            "window_size_right": 0 if window else None,
        }
        out, lse, *random, _ = aten._flash_attention_forward(q, k, v, *ctx.shape, False, **ctx.how)  # lse (heads, T)
        if sinks is not None:
            whole = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
            out, lse = (out * (lse - whole).exp().t().unsqueeze(-1)).to(q.dtype), whole
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.sinks, ctx.random = sinks, random
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = aten._flash_attention_backward(
            dout.contiguous(), q, k, v, out, lse, *ctx.shape, *ctx.random, **ctx.how
        )
        ds = None
        if ctx.sinks is not None and ctx.needs_input_grad[3]:
            dot = (dout.float() * out).sum(-1).t()
            ds = add_grad(ctx.sinks, -((ctx.sinks.float().unsqueeze(-1) - lse).exp() * dot).sum(1))
        return dq, dk, dv, ds, None, None, None


ATTENTION = Op(
    "attention",
    "attention inside documents and windows, with sinks",
    "phalanx.ops.attention.attention",
    (),
    (FLASH_ATTN, TORCH_FLASH),
)
