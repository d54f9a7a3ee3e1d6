"""Attention kernels that return the log-sum-exp of each query's scores, and whose backward takes one as input: the
building blocks of attention with sinks or over several ranks.

A kernel's backward recomputes the probabilities as e^(score - L) and subtracts D = dout . out. If it is given the L and
the output of a softmax over more keys than its own, it returns exactly its own share of the gradients. So whatever
joins a softmax later (sinks, keys of other ranks) needs no kernel of its own.

Shapes: q (B, heads, S, K), k (B, kv_heads, keys, K), v (B, kv_heads, keys, V). An additive mask is (B or 1, heads or 1,
S, keys) or None. causal: query i reads keys 0 .. i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.ops.attention.flash import LEAST_BOUND, use_flash
from phalanx.ops.op import Kernels

aten = torch.ops.aten


@dataclass(frozen=True)
class Backend:
    """forward(q, k, v, mask, causal, scale) -> (out (B, heads, S, V), log-sum-exp (B, heads, S), what backward needs
    ...); backward(dout, q, k, v, out, log-sum-exp, mask, causal, scale, ...) -> dq, dk, dv."""

    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def choose_backend(
    q: Tensor, v: Tensor, mask: Tensor | None, kernels: Kernels = "plain", steady: bool = True
) -> Backend:
    """The kernel for these operands on this device.

    Without a mask, bf16 and fp16 on GPUs run flash-attn-4 where `kernels` allows it and it is installed, or cuDNN on
    Hopper and newer, or torch's flash attention. With a mask, and in fp32, memory-efficient attention runs, for which k
    and v are repeated to the query heads. float64, and heads whose width is no multiple of 8, run the plain formula,
    which materializes the S x keys scores. `steady=False` says that shapes hardly ever repeat: then not cuDNN, which
    prepares itself for every new shape.
    """
    alike = q.shape[-1] == v.shape[-1]
    if q.is_meta:
        return DRY
    if not q.is_cuda:
        return CPU if alike else PLAIN
    if q.dtype == torch.float64 or q.shape[-1] % 8 or v.shape[-1] % 8:
        return PLAIN
    if mask is not None or q.dtype == torch.float32:
        return EFFICIENT
    if use_flash(kernels, q, v):
        return FLASH_ATTN
    fixed = torch.are_deterministic_algorithms_enabled()  # cuDNN's backward has no fixed order
    if (
        steady
        and kernels != "plain"
        and not fixed
        and max(q.shape[-1], v.shape[-1]) <= 128
        and torch.cuda.get_device_capability(q.device) >= (9, 0)
    ):
        return CUDNN
    return FLASH if alike else EFFICIENT


@dataclass(frozen=True)
class Segments:
    """Spans of flat queries and of flat keys that read each other: span i is of[i] .. of[i + 1], int32; either may be
    empty. `most_queries`, `most_keys`: upper bounds on their lengths."""

    of_queries: Tensor
    of_keys: Tensor
    most_queries: int
    most_keys: int


def segments_backend(segments: Segments, flash_attn: bool) -> Backend:
    """Attention inside segments. q (B, heads, S, K) and k are laid out as B * S flat tokens; values may be narrower.
    causal: each segment has as many queries as keys. For queries whose segment has no keys, the output and the
    log-sum-exp are undefined, and dq is zero."""
    queries, keys = (max(LEAST_BOUND, n) for n in (segments.most_queries, segments.most_keys))
    ends = (segments.of_queries, segments.of_keys, queries, keys)
    return _segments_by_flash_attn(ends) if flash_attn else _segments_by_torch(ends)


def _flat(x: Tensor) -> Tensor:
    """(B, heads, S, K) -> (B * S, heads, K)."""
    return x.transpose(1, 2).flatten(0, 1)


def _unflat(x: Tensor, like: Tensor) -> Tensor:
    """(B * S, heads, K) -> (B, heads, S, K), B of `like`."""
    return x.unflatten(0, (len(like), -1)).transpose(1, 2)


def _segments_by_torch(ends: tuple[Tensor, Tensor, int, int]) -> Backend:
    def widened(v: Tensor, q: Tensor) -> Tensor:
        return F.pad(v, (0, q.shape[-1] - v.shape[-1]))

    def forward(q: Tensor, k: Tensor, v: Tensor, mask: None, causal: bool, scale: float) -> tuple[Any, ...]:
        flat = (_flat(q), _flat(k), _flat(widened(v, q)))
        out, lse, *random, _ = aten._flash_attention_forward(
            *flat, *ends, 0.0, causal, False, scale=scale
        )  # lse (heads, T)
        return _unflat(out, q)[..., : v.shape[-1]], lse.unflatten(1, (len(q), -1)).transpose(0, 1), *random

    def backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: None,
        causal: bool,
        scale: float,
        *random: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        flat = (_flat(t).contiguous() for t in (widened(dout, q), q, k, widened(v, q), widened(out, q)))
        lse = lse.transpose(0, 1).flatten(1).contiguous()
        dq, dk, dv = aten._flash_attention_backward(*flat, lse, *ends, 0.0, causal, *random, scale=scale)
        return _unflat(dq, q), _unflat(dk, k), _unflat(dv, v)[..., : v.shape[-1]]

    return Backend(forward, backward)


def _segments_by_flash_attn(ends: tuple[Tensor, Tensor, int, int]) -> Backend:
    named = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), ends))

    def forward(q: Tensor, k: Tensor, v: Tensor, mask: None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        from flash_attn.cute.interface import _flash_attn_fwd

        out, lse, *_ = _flash_attn_fwd(
            _flat(q), _flat(k), _flat(v), **named, softmax_scale=scale, causal=causal, return_lse=True
        )
        return _unflat(out, q), lse.unflatten(1, (len(q), -1)).transpose(0, 1)

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn.cute.interface import _flash_attn_bwd

        flat, lse = (_flat(t) for t in (q, k, v, out, dout)), lse.transpose(0, 1).flatten(1).contiguous()
        fixed = torch.are_deterministic_algorithms_enabled()
        dq, dk, dv = _flash_attn_bwd(*flat, lse, **named, softmax_scale=scale, causal=causal, deterministic=fixed)[:3]
        return _unflat(dq, q), _unflat(dk, k), _unflat(dv, v)

    return Backend(forward, backward)


def repeated(x: Tensor, heads: int) -> Tensor:
    """Keys or values repeated for each query head."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def folded(dx: Tensor, kv_heads: int) -> Tensor:
    """The gradient of x from that of `repeated` x."""
    return dx if dx.shape[1] == kv_heads else dx.unflatten(1, (kv_heads, -1)).sum(2)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = q @ repeated(k, q.shape[1]).mT * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(), -torch.inf
        )
    return scores if scores.dtype == torch.float64 else scores.float()


def _plain_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, mask, causal, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp().to(v.dtype) @ repeated(v, q.shape[1]), lse


def _plain_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """With P the probabilities: dv = P^T dout, dscores = P * (dout v^T - dout . out)."""
    heads, kv_heads = q.shape[1], k.shape[1]
    probs = (_scores(q, k, mask, causal, scale) - lse.unsqueeze(-1)).exp()
    dprobs = dout @ repeated(v, heads).mT - (dout * out).sum(-1, keepdim=True)
    dscores = (probs * dprobs * scale).to(q.dtype)
    dq, dk, dv = dscores @ repeated(k, heads), dscores.mT @ q, probs.to(q.dtype).mT @ dout
    return dq, folded(dk, kv_heads), folded(dv, kv_heads)


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)


def _cpu_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
    )


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, mask: None, causal: bool, scale: float) -> tuple[Any, ...]:
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, scale=scale
    )
    return out, lse, cum_q, cum_k, max_q, max_k, seed, offset


def _flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: None,
    causal: bool,
    scale: float,
    cum_q: Any,
    cum_k: Any,
    max_q: int,
    max_k: int,
    seed: Tensor,
    offset: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    call = aten._scaled_dot_product_flash_attention_backward
    return call(dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset, scale=scale)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, mask: None, causal: bool, scale: float) -> tuple[Any, ...]:
    """cuDNN's log-sum-exp has a trailing dim of size 1."""
    call = aten._scaled_dot_product_cudnn_attention
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = call(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse.squeeze(-1), cum_q, cum_k, max_q, max_k, seed, offset


def _cudnn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: None,
    causal: bool,
    scale: float,
    cum_q: Any,
    cum_k: Any,
    max_q: int,
    max_k: int,
    seed: Tensor,
    offset: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    call, lse = aten._scaled_dot_product_cudnn_attention_backward, lse.unsqueeze(-1)
    return call(dout, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, causal, scale=scale)


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    heads_last = (t.transpose(1, 2) for t in (q, k, v))
    out, lse, *_ = _flash_attn_fwd(*heads_last, softmax_scale=scale, causal=causal, return_lse=True)
    return out.transpose(1, 2), lse


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    heads_last = (t.transpose(1, 2) for t in (q, k, v, out, dout))
    fixed = torch.are_deterministic_algorithms_enabled()
    dq, dk, dv = _flash_attn_bwd(*heads_last, lse, softmax_scale=scale, causal=causal, deterministic=fixed)[:3]
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Any, ...]:
    """Its log-sum-exp is padded."""
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    out, lse, *more = aten._scaled_dot_product_efficient_attention(
        q, k, v, _aligned(mask, q), True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.shape[2]], lse.shape[-1] - q.shape[2], *more


def _efficient_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    padding: int,
    seed: Tensor,
    offset: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    call, wanted, kv_heads = (
        aten._scaled_dot_product_efficient_attention_backward,
        [True, True, True, False],
        k.shape[1],
    )
    k, v, lse = repeated(k, q.shape[1]), repeated(v, q.shape[1]), F.pad(lse, (0, padding))
    dq, dk, dv, _ = call(dout, q, k, v, _aligned(mask, q), out, lse, seed, offset, 0.0, wanted, causal, scale=scale)
    return dq, folded(dk, kv_heads), folded(dv, kv_heads)


def _aligned(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """(B, heads, S, keys) with rows that start at multiples of 16 bytes, as memory-efficient attention requires."""
    if mask is None:
        return None
    keys = mask.shape[-1]
    return F.pad(mask, (0, -keys % 8))[..., :keys].expand(*q.shape[:2], -1, -1)


def _dry_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Allocates like a fused kernel: tokens before heads."""
    out = q.new_empty(len(q), q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def _dry_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = fused_gradients(q, k, v)
    return dq, dk, dv


PLAIN = Backend(_plain_forward, _plain_backward)
CPU = Backend(_cpu_forward, _cpu_backward)
FLASH = Backend(_flash_forward, _flash_backward)
CUDNN = Backend(_cudnn_forward, _cudnn_backward)
FLASH_ATTN = Backend(_flash_attn_forward, _flash_attn_backward)
EFFICIENT = Backend(_efficient_forward, _efficient_backward)
DRY = Backend(_dry_forward, _dry_backward)  # allocates as a fused kernel does, for tensors on the meta device


def fused_gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Allocates gradients of q, k and v as backward kernels do: those of narrow dtypes are first summed in fp32, in
    memory that is freed afterwards."""
    sums = [torch.empty_like(t, dtype=torch.float32) for t in inputs if t.dtype.itemsize < 4]
    made = tuple(torch.empty_like(t) for t in inputs)
    del sums
    return made
