"""Attention kernels that return the log-sum-exp of each query's scores, and whose backward takes one as input: the
building blocks of attention with sinks or over several ranks.

A kernel's backward makes the probabilities anew as e^(score - L) and subtracts D = dout . out. With the L and the
output of more keys than it was given it so returns its own share of the gradients: what joins a softmax later
(sinks, keys of other ranks) needs no kernel of its own. Shapes: q (B, heads, S, K), k (B, kv_heads, keys, K), v (B,
kv_heads, keys, V).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.ops.attention.flash import FLASH_ATTN, NARROW, flash_fits
from phalanx.ops.op import ALL_KERNELS, Case, Implementation, Kernels, Op

aten = torch.ops.aten


class Scoring(NamedTuple):
    """Which scores there are, their scale, and what becomes of them.

    mask      additive, (B or 1, 1, S, keys); None: nothing is hidden by it
    causal    query i reads keys 0 .. i
    soft_cap  scores become cap * tanh(scores / cap)
    bias      (heads, S, keys): added afterwards; it has a gradient
    """

    mask: Tensor | None
    causal: bool
    scale: float
    soft_cap: float | None = None
    bias: Tensor | None = None

    @property
    def features(self) -> frozenset[str]:
        """What a backend must have, beside masks."""
        asked = {"soft_cap": self.soft_cap is not None, "bias": self.bias is not None}
        return frozenset(name for name, wanted in asked.items() if wanted)

    @property
    def added(self) -> Tensor | None:
        """Mask and bias as one."""
        if self.bias is None or self.mask is None:
            return self.mask if self.bias is None else self.bias[None]
        return self.mask + self.bias


class SavedBlock(NamedTuple):
    """What a backward is given: inputs; output (B, heads, S, V) and log-sum-exp (B, heads, S) of all that the queries
    read, here or elsewhere; what the forward wanted to have back."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    kept: tuple[Any, ...] = ()


class Gradients(NamedTuple):
    """Those of the inputs, and (heads, S, keys) of the bias, if there is one."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Backend:
    """forward(q, k, v, how) -> (output, log-sum-exp, what backward wants to have back ...)."""

    forward: Callable[[Tensor, Tensor, Tensor, Scoring], tuple[Any, ...]]
    backward: Callable[[Tensor, SavedBlock, Scoring], Gradients]


def block_backend(q: Tensor, v: Tensor, how: Scoring, kernels: Kernels = "plain", steady: bool = True) -> Backend:
    """The implementation of BLOCKS that is to run. Not `steady`: shapes that hardly ever come again."""
    masked = how.mask is not None or how.bias is not None
    sizes = (q.shape[-1], v.shape[-1], q.shape[1] != v.shape[1], masked, steady)
    found: Backend = BLOCKS.choose(kernels, q, *sizes, asked=how.features)
    return found


def repeated(x: Tensor, heads: int) -> Tensor:
    """Keys or values repeated for each query head."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def folded(dx: Tensor, kv_heads: int) -> Tensor:
    """The gradient of x from that of `repeated` x."""
    return dx if dx.shape[1] == kv_heads else dx.unflatten(1, (kv_heads, -1)).sum(2)


# ---- the definition ------------------------------------------------------------------------------


def _scores(q: Tensor, k: Tensor, how: Scoring) -> tuple[Tensor, Tensor | None]:
    """In at least fp32, and the tanh of capped ones."""
    scores = (q @ repeated(k, q.shape[1]).mT).to(torch.promote_types(q.dtype, torch.float32)) * how.scale
    capped = None
    if how.soft_cap is not None:
        capped = torch.tanh(scores / how.soft_cap)
        scores = capped * how.soft_cap
    for added in (how.mask, how.bias):
        if added is not None:
            scores = scores + added
    if how.causal:
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(), -torch.inf
        )
    return scores, capped


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> tuple[Tensor, Tensor]:
    scores, _ = _scores(q, k, how)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp().to(v.dtype) @ repeated(v, q.shape[1]), lse


def _plain_backward(dout: Tensor, saved: SavedBlock, how: Scoring) -> Gradients:
    """With P the probabilities: dv = P^T dout, dscores = P * (dout v^T - dout . out), and of scores cap * t before the
    cap (1 - t^2) times as much."""
    q, k, v, out, lse, _ = saved
    heads, kv_heads = q.shape[1], k.shape[1]
    scores, capped = _scores(q, k, how)
    probs = (scores - lse.unsqueeze(-1)).exp()
    dprobs = dout @ repeated(v, heads).mT - (dout * out).sum(-1, keepdim=True)
    dscores = probs * dprobs
    dbias = None if how.bias is None else dscores.sum(0)
    if capped is not None:
        dscores = dscores * (1 - capped * capped)
    dscores = (dscores * how.scale).to(q.dtype)
    dq, dk, dv = dscores @ repeated(k, heads), dscores.mT @ q, probs.to(q.dtype).mT @ dout
    return Gradients(dq, folded(dk, kv_heads), folded(dv, kv_heads), dbias)


# ---- the same by rows ------------------------------------------------------------------------------

ROW_ELEMENTS = 2**26
"""So many scores are there at once."""


def _in_rows(q: Tensor, k: Tensor, how: Scoring) -> Iterator[tuple[slice, slice, Scoring]]:
    """Queries, a part of them at a time, the keys that they may read, and their scoring."""
    count = max(1, ROW_ELEMENTS // (len(q) * q.shape[1] * k.shape[2]))
    for first in range(0, q.shape[2], count):
        rows = slice(first, min(first + count, q.shape[2]))
        keys = slice(0, min(rows.stop, k.shape[2]) if how.causal else k.shape[2])
        mask = None if how.mask is None else how.mask[..., rows, keys]
        if how.causal:
            later = torch.arange(rows.start, rows.stop, device=q.device).unsqueeze(-1) < torch.arange(
                keys.stop, device=q.device
            )
            hidden = torch.zeros_like(later, dtype=q.dtype).masked_fill_(later, -torch.inf)[None, None]
            mask = hidden if mask is None else mask + hidden
        bias = None if how.bias is None else how.bias[:, rows, keys]
        yield rows, keys, Scoring(mask, False, how.scale, how.soft_cap, bias)


def _rows_forward(q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> tuple[Tensor, Tensor]:
    parts = [
        _plain_forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], each) for rows, keys, each in _in_rows(q, k, how)
    ]
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def _rows_backward(dout: Tensor, saved: SavedBlock, how: Scoring) -> Gradients:
    q, k, v, out, lse, _ = saved
    wide = torch.promote_types(q.dtype, torch.float32)
    dk, dv = (torch.zeros_like(x, dtype=wide) for x in (k, v))
    dbias = None if how.bias is None else torch.zeros_like(how.bias, dtype=wide)
    dq = []
    for rows, keys, each in _in_rows(q, k, how):
        part = SavedBlock(q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows], lse[:, :, rows])
        found = _plain_backward(dout[:, :, rows], part, each)
        dq.append(found.q)
        dk[:, :, keys] += found.k
        dv[:, :, keys] += found.v
        if dbias is not None and found.bias is not None:
            dbias[:, rows, keys] = found.bias
    return Gradients(torch.cat(dq, 2), dk.to(k.dtype), dv.to(v.dtype), dbias)


# ---- torch's kernels -----------------------------------------------------------------------------


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> tuple[Any, ...]:
    call: Callable[..., tuple[Any, ...]] = aten._scaled_dot_product_flash_attention_for_cpu
    return call(q, k, v, 0.0, how.causal, attn_mask=how.mask, scale=how.scale)


def _cpu_backward(dout: Tensor, saved: SavedBlock, how: Scoring) -> Gradients:
    call = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return Gradients(*call(dout, *saved[:5], 0.0, how.causal, attn_mask=how.mask, scale=how.scale))


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> tuple[Any, ...]:
    made = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, how.causal, scale=how.scale)
    return tuple(made[:-1])


def _flash_backward(dout: Tensor, saved: SavedBlock, how: Scoring) -> Gradients:
    *lengths, seed, offset = saved.kept
    call = aten._scaled_dot_product_flash_attention_backward
    return Gradients(*call(dout, *saved[:5], *lengths, 0.0, how.causal, seed, offset, scale=how.scale))


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> tuple[Any, ...]:
    """Its log-sum-exp has a dim of size 1 behind it."""
    call = aten._scaled_dot_product_cudnn_attention
    out, lse, *kept, _ = call(q, k, v, None, True, 0.0, how.causal, scale=how.scale)
    return out, lse.squeeze(-1), *kept


def _cudnn_backward(dout: Tensor, saved: SavedBlock, how: Scoring) -> Gradients:
    q, k, v, out, lse, (*lengths, seed, offset) = saved
    given = (dout, q, k, v, out, lse.unsqueeze(-1), seed, offset, None, *lengths)
    call = aten._scaled_dot_product_cudnn_attention_backward
    return Gradients(*call(*given, 0.0, how.causal, scale=how.scale))


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> tuple[Any, ...]:
    """Its log-sum-exp is padded."""
    call, heads = aten._scaled_dot_product_efficient_attention, q.shape[1]
    given = (q, repeated(k, heads), repeated(v, heads), _aligned(how.added, q))
    out, lse, *more = call(*given, True, 0.0, how.causal, scale=how.scale)
    return out, lse[..., : q.shape[2]], lse.shape[-1] - q.shape[2], *more


def _efficient_backward(dout: Tensor, saved: SavedBlock, how: Scoring) -> Gradients:
    q, k, v, out, lse, (padding, seed, offset) = saved
    call, heads, kv_heads = aten._scaled_dot_product_efficient_attention_backward, q.shape[1], k.shape[1]
    given = (dout, q, repeated(k, heads), repeated(v, heads), _aligned(how.added, q), out, F.pad(lse, (0, padding)))
    wanted = [True, True, True, how.bias is not None]
    dq, dk, dv, added = call(*given, seed, offset, 0.0, wanted, how.causal, scale=how.scale)
    dbias = None if how.bias is None else added.sum(0, dtype=torch.float32)
    return Gradients(dq, folded(dk, kv_heads), folded(dv, kv_heads), dbias)


def _aligned(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """(B, heads, S, keys) with rows that start at multiples of 16 bytes, as memory-efficient attention requires."""
    if mask is None:
        return None
    keys = mask.shape[-1]
    return F.pad(mask, (0, -keys % 8))[..., :keys].expand(*q.shape[:2], -1, -1)


# ---- flash-attn-4 --------------------------------------------------------------------------------


def flash_attn_forward(q: Tensor, k: Tensor, v: Tensor, how: Scoring, **ends: Any) -> tuple[Tensor, Tensor]:
    """q, k, v with tokens before heads."""
    from flash_attn.cute.interface import _flash_attn_fwd  # an optional package

    more = {"softmax_scale": how.scale, "causal": how.causal, "softcap": how.soft_cap or 0.0}
    out, lse, *_ = _flash_attn_fwd(q, k, v, **ends, **more, return_lse=True)
    return out, lse


def flash_attn_backward(lse: Tensor, tensors: tuple[Tensor, ...], how: Scoring, **ends: Any) -> tuple[Tensor, ...]:
    """tensors: q, k, v, out, dout with tokens before heads -> dq, dk, dv alike."""
    from flash_attn.cute.interface import _flash_attn_bwd  # an optional package

    fixed = torch.are_deterministic_algorithms_enabled()
    more = {"softmax_scale": how.scale, "causal": how.causal, "softcap": how.soft_cap or 0.0}
    made = _flash_attn_bwd(*tensors, lse, **ends, **more, deterministic=fixed)
    return tuple(made[:3])


def _heads_last_forward(q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> tuple[Tensor, Tensor]:
    out, lse = flash_attn_forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), how)
    return out.transpose(1, 2), lse


def _heads_last_backward(dout: Tensor, saved: SavedBlock, how: Scoring) -> Gradients:
    tensors = tuple(t.transpose(1, 2) for t in (*saved[:4], dout))
    return Gradients(*(t.transpose(1, 2) for t in flash_attn_backward(saved.lse, tensors, how)))


# ---- tensors without data ------------------------------------------------------------------------


def _dry_forward(q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> tuple[Tensor, Tensor]:
    """As fused kernels do it, tokens before heads."""
    out = q.new_empty(len(q), q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)
    return out, q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def _dry_backward(dout: Tensor, saved: SavedBlock, how: Scoring) -> Gradients:
    """The gradient of a bias is made for each sequence, then summed."""
    found = Gradients(*fused_gradients(*saved[:3]))
    if how.bias is None:
        return found
    return found._replace(bias=how.bias.new_empty(len(saved.q), *how.bias.shape).sum(0))


def fused_gradients(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Allocates gradients of q, k and v as backward kernels do: those of narrow dtypes are first summed in fp32, in
    memory that is freed afterwards."""
    sums = [torch.empty_like(t, dtype=torch.float32) for t in inputs if t.dtype.itemsize < 4]
    made = tuple(torch.empty_like(t) for t in inputs)
    del sums
    return made


# ---- the op: attention to one block of keys ------------------------------------------------------

PLAIN = Backend(_plain_forward, _plain_backward)
ROWS = Backend(_rows_forward, _rows_backward)
CPU = Backend(_cpu_forward, _cpu_backward)
FLASH = Backend(_flash_forward, _flash_backward)
CUDNN = Backend(_cudnn_forward, _cudnn_backward)
HEADS_LAST = Backend(_heads_last_forward, _heads_last_backward)
EFFICIENT = Backend(_efficient_forward, _efficient_backward)
DRY = Backend(_dry_forward, _dry_backward)


def _flash_attn_fits(query: int, value: int, shared: bool, masked: bool, steady: bool) -> bool:
    return not masked and flash_fits(query, value, shared)


def _cudnn_fits(query: int, value: int, shared: bool, masked: bool, steady: bool) -> bool:
    """cuDNN prepares itself for each shape anew, and its backward has no fixed order."""
    fixed = torch.are_deterministic_algorithms_enabled()
    return steady and not masked and not fixed and max(query, value) <= 128 and query % 8 == value % 8 == 0


def _flash_block_fits(query: int, value: int, shared: bool, masked: bool, steady: bool) -> bool:
    return not masked and query == value and query % 8 == 0


def _efficient_fits(query: int, value: int, *_: bool) -> bool:
    return query % 8 == value % 8 == 0


def _cpu_fits(query: int, value: int, *_: bool) -> bool:
    return query == value


def beside_more(backend: Any, given: Sequence[Tensor], how: Scoring, blind: Tensor | None) -> tuple[Tensor, ...]:
    """For cases. given: q, k, v, the gradient of the output, and an output and log-sum-exp of other keys -> output,
    log-sum-exp and gradients of both together. `blind`: queries that read nothing here."""
    q, k, v, dout, more, more_lse = (t.detach() for t in given)
    out, lse, *kept = backend.forward(q, k, v, how)
    if blind is not None:
        out, lse = out.masked_fill(blind.unsqueeze(-1), 0), lse.masked_fill(blind, -torch.inf)
    whole = torch.logaddexp(lse, more_lse.to(lse.dtype))
    out = out * (lse - whole).exp().unsqueeze(-1) + more * (more_lse - whole).exp().unsqueeze(-1)
    saved = SavedBlock(q, k, v, out.to(q.dtype), whole.contiguous(), tuple(kept))
    return saved.out, whole, *(grad for grad in backend.backward(dout, saved, how) if grad is not None)


def case_shapes(
    heads: int, kv_heads: int, queries: int, keys: int, widths: tuple[int, int]
) -> tuple[tuple[int, ...], ...]:
    """Of what `beside_more` is given."""
    q, k, v = ((2, n, tokens, widths[0]) for n, tokens in ((heads, queries), (kv_heads, keys), (kv_heads, keys)))
    out = (*q[:3], widths[1])
    return q, k, (*v[:3], widths[1]), out, out, q[:3]


def _block_case(
    name: str,
    seen: str,
    *shape: Any,
    more: Mapping[str, Any] | None = None,
    large: bool = False,
    dtypes: Any = None,
) -> Case:
    """seen: "all", "causal", or "mask". more: a soft cap; "bias": a bias of the scores, the last input."""
    soft_cap, biased = (more or {}).get("soft_cap"), bool((more or {}).get("bias"))

    def call(*given: Any) -> tuple[Tensor, ...]:
        *tensors, kernels = given
        q, k, v = tensors[:3]
        mask, bias = None, tensors.pop().detach() if biased else None
        if seen == "mask":
            places = (torch.arange(x.shape[2], device=x.device) for x in (q, k))
            later = next(places)[:, None] * 2 < next(places)  # every query reads the first key
            mask = torch.zeros_like(later, dtype=q.dtype).masked_fill_(later, -torch.inf)[None, None]
        how = Scoring(mask, seen == "causal", q.shape[-1] ** -0.5, soft_cap, bias)
        return beside_more(block_backend(q, v, how, kernels), tensors, how, None)

    heads, _, queries, keys, _ = shape
    shapes = case_shapes(*shape) + (((heads, queries, keys),) if biased else ())
    asked = frozenset(feature for feature, given in (("soft_cap", soft_cap), ("bias", biased)) if given)
    return Case(name, call, shapes, dtypes=dtypes, large=large, asked=asked)


BLOCKS = Op(
    "attention_block",
    "attention to one block of keys, with the log-sum-exp of scores",
    f"{__name__}:PLAIN",
    ("forward", "backward"),
    (
        replace(
            FLASH_ATTN,
            source=f"{__name__}:HEADS_LAST",
            fits=_flash_attn_fits,
            features=frozenset(("soft_cap",)),
            modes=("auto", "optional"),
            insisted=(),
        ),
        Implementation(
            "cudnn",
            f"{__name__}:CUDNN",
            "cuda",
            (9, 0),
            NARROW,
            fits=_cudnn_fits,
            features=frozenset(),
            shapes="heads of at most 128, in multiples of 8, no mask",
        ),
        Implementation(
            "flash",
            f"{__name__}:FLASH",
            "cuda",
            dtypes=NARROW,
            fits=_flash_block_fits,
            features=frozenset(),
            shapes="values as wide as queries, in multiples of 8, no mask",
            modes=ALL_KERNELS,
        ),
        Implementation(
            "efficient",
            f"{__name__}:EFFICIENT",
            "cuda",
            dtypes=(*NARROW, torch.float32),
            fits=_efficient_fits,
            features=frozenset(("bias",)),
            shapes="heads in multiples of 8",
            modes=ALL_KERNELS,
        ),
        Implementation(
            "cpu",
            f"{__name__}:CPU",
            "cpu",
            fits=_cpu_fits,
            shapes="values as wide as queries",
            features=frozenset(),
            modes=ALL_KERNELS,
        ),
        Implementation("dry", f"{__name__}:DRY", "meta", features=frozenset(("bias",)), modes=ALL_KERNELS),
        Implementation("rows", f"{__name__}:ROWS", modes=ALL_KERNELS),
    ),
    switches=("attention",),
    cases=(
        _block_case("all keys", "all", 4, 2, 9, 13, (6, 6)),
        _block_case("causal", "causal", 4, 4, 11, 11, (6, 6)),
        _block_case("mask", "mask", 4, 1, 9, 13, (6, 6)),
        _block_case("soft cap", "causal", 4, 2, 11, 11, (6, 6), more={"soft_cap": 0.8}),
        _block_case("bias, mask", "mask", 4, 2, 9, 13, (6, 6), more={"bias": True}),
        *(
            _block_case(
                f"{seen}, bias, heads of {width}",
                seen,
                8,
                8,
                512,
                keys,
                (width, width),
                more={"bias": True},
                large=True,
            )
            for seen, width, keys in (("all", 64, 1088), ("mask", 128, 1003))
        ),
        *(
            _block_case(
                f"{seen}, {kv_heads} kv heads of {wide} and {value}",
                seen,
                8,
                kv_heads,
                queries,
                keys,
                (wide, value),
                large=True,
            )
            for seen, queries, keys in (("causal", 1024, 1024), ("all", 512, 1088), ("mask", 500, 1088))
            for kv_heads, wide, value in ((2, 128, 128), (8, 64, 64), (8, 192, 128))
        ),
        _block_case("causal, fp32", "causal", 8, 2, 1000, 1000, (64, 64), large=True, dtypes=(torch.float32,)),
    ),
)
