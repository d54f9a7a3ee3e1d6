"""Attention by flash kernels inside documents and windows and with sinks. No mask is built, and keys that are not read
cost nothing.

Two packages of kernels. flash-attn-4 (CuTe DSL kernels for Hopper and newer, an optional package) takes everything;
torch's own flash kernels (version 2, any GPU from Ampere on) take what would need a mask, since torch's public call
has neither windows nor documents. Where each runs is said here. Dao et al., "FlashAttention", 2022; Dao,
"FlashAttention-2", 2023; Shah et al., "FlashAttention-3", 2024. Their backward adds up d_q in the order in which
blocks finish, so gradients differ in the last bits from run to run, unless
`torch.use_deterministic_algorithms(True)` asks for a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.base.dataclass import dataclass
from phalanx.ops.attention.kind import SPANNED, AttentionKind, Learned, by_documents
from phalanx.ops.dense.grads import add_grad
from phalanx.ops.op import Implementation, Package
from phalanx.sequence.batch import Batch, PerBatch

aten = torch.ops.aten
# on lengths: with 1 and shared keys torch's kernels believe that every span has exactly one query, and fail where one
# is empty
LEAST_BOUND = 2


ENDS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
"""What flash-attn-4 calls the bounds of runs of tokens."""


def flash_fits(query: int, value: int, shared: bool = False, hidden: bool = False) -> bool:
    """Widths of heads that flash-attn-4's kernels were tested with here (of 40, its gradients were wrong). Its backward
    shares keys between query heads (`shared`) only where values are as wide. What is hidden makes no difference."""
    return (query, value) in ((64, 64), (128, 128), (192, 128)) and not (shared and query != value)


def torch_flash_fits(query: int, value: int, shared: bool = False, hidden: bool = True) -> bool:
    """Taken where something is `hidden` beside what is later. Values narrower than queries are filled up with zeros."""
    return hidden and query >= value and query % 8 == 0 and query <= 256


NARROW = (torch.bfloat16, torch.float16)
FLASH_ATTN = Implementation(
    "flash-attn",
    "phalanx.ops.attention.flash:ByFlashAttn",
    "cuda",
    (9, 0),
    NARROW,
    Package("flash-attn-4", "flash_attn.cute.interface", "4.0.0b36"),
    flash_fits,
    "heads of 64, 128, or 192 with values of 128",
    SPANNED | {"soft_cap"},
    modes=("auto",),
    insisted=("optional",),
    cost="attention is torch's",
)
TORCH_FLASH = Implementation(
    "torch-flash",
    "phalanx.ops.attention.flash:ByTorchFlash",
    "cuda",
    (8, 0),
    NARROW,
    fits=torch_flash_fits,
    shapes="heads of at most 256, in multiples of 8; used inside documents and windows",
    features=SPANNED,
)


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
    # Kernels start programs for every span as if each were the longest: bounds far too large cost more than attention.
    offsets = torch.full((batch.room_for_documents + 1,), tokens, dtype=torch.int64, device=device)
    offsets.scatter_reduce_(0, batch.documents, torch.arange(tokens, device=device), "amin")
    return Spans(
        offsets.flip(0).cummin(0).values.flip(0).int(), batch.longest, False
    )  # a document number that no token has is an empty span


class ByFlashAttn:
    """By flash-attn-4. It reads the heads where they lie (views of the packed qkv: the kernels' tensors are (T, heads,
    K) with any strides but the last), and returns gradients that `ops.dense.rope` packs in the one pass it makes
    anyway: nothing is copied for it."""

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, batch: Batch, kind: AttentionKind, learned: Learned) -> Tensor:
        from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func  # an optional package

        batch, kind = by_documents(batch, kind)
        causal = kind.direction == "causal"
        spans, heads_last = spans_of(batch), tuple(t.transpose(1, 2) for t in (q, k, v))
        how: dict[str, Any] = {
            "causal": causal,
            "softmax_scale": kind.scale,
            "softcap": kind.soft_cap or 0.0,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        if learned.sinks is not None:
            how["learnable_sink"] = own_precision(learned.sinks)
        if kind.window is not None:
            how["window_size"] = (kind.window - 1, 0 if causal else kind.window - 1)
        if spans.whole:
            out = flash_attn_func(*heads_last, **how)[0]
        else:
            ends = dict(zip(ENDS, (spans.offsets, spans.offsets, spans.longest, spans.longest)))
            out = flash_attn_varlen_func(*(t.flatten(0, 1) for t in heads_last), **ends, **how)[0]
        return out.reshape(batch.num_tokens, -1)


class ByTorchFlash:
    """By torch's flash kernels, over flat tokens."""

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, batch: Batch, kind: AttentionKind, learned: Learned) -> Tensor:
        batch, kind = by_documents(batch, kind)
        flat = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, F.pad(v, (0, q.shape[-1] - v.shape[-1]))))
        out = _TorchFlash.apply(*flat, learned.sinks, spans_of(batch), kind)[..., : v.shape[-1]]
        return out.reshape(batch.num_tokens, -1)


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
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Any, spans: Spans, kind: AttentionKind) -> Tensor:  # type: ignore[override]
        longest, causal = max(LEAST_BOUND, spans.longest), kind.direction == "causal"
        ctx.shape = (spans.offsets, spans.offsets, longest, longest, 0.0, causal)
        reach = None if kind.window is None else kind.window - 1
        ctx.how = {
            "scale": kind.scale,
            "window_size_left": reach,
            "window_size_right": 0 if causal and reach is not None else reach,
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
        return dq, dk, dv, ds, None, None
