"""Attention inside segments: runs of flat queries that read runs of flat keys, by kernels that have no masks. Documents
of one block of context parallelism are such runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.ops.attention.backends import (
    PLAIN,
    Gradients,
    SavedBlock,
    Scoring,
    beside_more,
    case_shapes,
    flash_attn_backward,
    flash_attn_forward,
)
from phalanx.ops.attention.flash import ENDS, FLASH_ATTN, LEAST_BOUND, TORCH_FLASH
from phalanx.ops.op import Case, Op

aten = torch.ops.aten


@dataclass(frozen=True)
class Segments:
    """Runs of flat queries and of flat keys that read each other: run i is of[i] .. of[i + 1], int32; either may be
    empty. `most_`: a bound."""

    of_queries: Tensor
    of_keys: Tensor
    most_queries: int
    most_keys: int

    @property
    def ends(self) -> tuple[Tensor, Tensor, int, int]:
        return self.of_queries, self.of_keys, max(LEAST_BOUND, self.most_queries), max(LEAST_BOUND, self.most_keys)


def _flat(x: Tensor) -> Tensor:
    """(B, heads, S, K) -> (B * S, heads, K)."""
    return x.transpose(1, 2).flatten(0, 1)


def _unflat(x: Tensor, like: Tensor) -> Tensor:
    """(B * S, heads, K) -> (B, heads, S, K), B of `like`."""
    return x.unflatten(0, (len(like), -1)).transpose(1, 2)


def _flat_lse(lse: Tensor) -> Tensor:
    """(B, heads, S) -> (heads, B * S)."""
    return lse.transpose(0, 1).flatten(1).contiguous()


def _unflat_lse(lse: Tensor, like: Tensor) -> Tensor:
    return lse.unflatten(1, (len(like), -1)).transpose(0, 1)


def _row(x: Tensor) -> Tensor:
    """(B, heads, S, K) -> (1, heads, B * S, K)."""
    return _flat(x).transpose(0, 1)[None]


class MaskedSegments:
    """Attention inside segments: q (B, heads, S, K) lies flat as B * S tokens, k and v alike; values may be
    narrower. Causal: the segments have as many queries as keys. Of queries whose segment has no keys the output and
    the log-sum-exp mean nothing, and dq is zero. The definition: a mask of all queries and all keys."""

    def __init__(self, segments: Segments) -> None:
        self.segments = segments

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> tuple[Any, ...]:
        out, lse = PLAIN.forward(_row(q), _row(k), _row(v), self._masked(q, k, how))
        return _unflat(out[0].transpose(0, 1), q), _unflat_lse(lse[0], q)

    def backward(self, dout: Tensor, saved: SavedBlock, how: Scoring) -> Gradients:
        q, k, v, out, lse, _ = saved
        flat = SavedBlock(_row(q), _row(k), _row(v), _row(out), _flat_lse(lse)[None])
        made = PLAIN.backward(_row(dout), flat, self._masked(q, k, how))
        return Gradients(*(_unflat(t[0].transpose(0, 1), q) for t in made[:3]))

    def _masked(self, q: Tensor, k: Tensor, how: Scoring) -> Scoring:
        segments = self.segments
        numbers, places = [], []
        for ends, x in ((segments.of_queries, q), (segments.of_keys, k)):
            tokens = torch.arange(len(x) * x.shape[2], dtype=ends.dtype, device=x.device)
            number = torch.searchsorted(ends, tokens, right=True) - 1
            numbers.append(number)
            places.append(tokens - ends[number])
        seen = numbers[0][:, None] == numbers[1]
        if how.causal:
            seen &= places[0][:, None] >= places[1]
        return Scoring(torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, -torch.inf), False, how.scale)


class TorchSegments(MaskedSegments):
    """By torch's flash kernels."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> tuple[Any, ...]:
        flat = (_flat(q), _flat(k), _flat(_widened(v, q)))
        given = (*self.segments.ends, 0.0, how.causal, False)
        out, lse, *random, _ = aten._flash_attention_forward(*flat, *given, scale=how.scale)  # lse (heads, T)
        return _unflat(out, q)[..., : v.shape[-1]], _unflat_lse(lse, q), *random

    def backward(self, dout: Tensor, saved: SavedBlock, how: Scoring) -> Gradients:
        q, k, v, out, lse, random = saved
        wide = (_widened(dout, q), q, k, _widened(v, q), _widened(out, q))
        flat, given = (_flat(t).contiguous() for t in wide), (*self.segments.ends, 0.0, how.causal, *random)
        dq, dk, dv = aten._flash_attention_backward(*flat, _flat_lse(lse), *given, scale=how.scale)
        return Gradients(_unflat(dq, q), _unflat(dk, k), _unflat(dv, v)[..., : v.shape[-1]])


def _widened(v: Tensor, q: Tensor) -> Tensor:
    return F.pad(v, (0, q.shape[-1] - v.shape[-1]))


class FlashAttnSegments(MaskedSegments):
    """By flash-attn-4."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: Scoring) -> tuple[Tensor, Tensor]:
        out, lse = flash_attn_forward(_flat(q), _flat(k), _flat(v), how, **dict(zip(ENDS, self.segments.ends)))
        return _unflat(out, q), _unflat_lse(lse, q)

    def backward(self, dout: Tensor, saved: SavedBlock, how: Scoring) -> Gradients:
        flat = tuple(_flat(t) for t in (*saved[:4], dout))
        made = flash_attn_backward(_flat_lse(saved.lse), flat, how, **dict(zip(ENDS, self.segments.ends)))
        return Gradients(*(_unflat(t, saved.q) for t in made))


def _segments_case(name: str, causal: bool, kv_heads: int, widths: tuple[int, int]) -> Case:
    """Two sequences of 1,024 tokens in documents: each reads itself, or other keys, which some documents lack, and some
    of which no query reads."""
    own, others = (0, 300, 1, 723, 1000, 24, 0), (760, 64, 0, 200, 0, 24, 1000)
    keys = own if causal else others

    def call(*given: Any) -> tuple[Tensor, ...]:
        *tensors, kernels = given
        q, k, v = tensors[:3]
        of_queries, of_keys = (F.pad(torch.tensor(sizes).cumsum(0), (1, 0)).int().to(q.device) for sizes in (own, keys))
        lonely = (torch.tensor(keys).repeat_interleave(torch.tensor(own)) == 0).to(q.device)
        chosen = SEGMENTS.choose(kernels, q, q.shape[-1], v.shape[-1], q.shape[1] != k.shape[1])
        backend = chosen(Segments(of_queries, of_keys, 1024, 1024 if causal else 2048))
        return beside_more(backend, tensors, Scoring(None, causal, widths[0] ** -0.5), lonely.view(2, 1, -1))

    return Case(name, call, case_shapes(8, kv_heads, 1024, 1024, widths), large=True)


SEGMENTS = Op(
    "attention_segments",
    "attention inside documents of a block, with the log-sum-exp of scores",
    f"{__name__}:MaskedSegments",
    ("forward", "backward"),
    (
        replace(
            FLASH_ATTN,
            source=f"{__name__}:FlashAttnSegments",
            features=frozenset(),
            modes=("auto", "optional"),
            insisted=(),
        ),
        replace(TORCH_FLASH, source=f"{__name__}:TorchSegments", features=frozenset()),
    ),
    switches=("attention",),
    cases=tuple(
        _segments_case(
            f"{reads}, {kv_heads} kv heads of {wide} and {value}", reads == "own keys", kv_heads, (wide, value)
        )
        for reads in ("own keys", "other keys")
        for kv_heads, wide, value in ((2, 128, 128), (8, 64, 64), (8, 192, 128))
    ),
)
