"""The largest score of each head of attention: the largest q k^T * scale of all pairs of a query and a key that it
reads, before anything is added to the scores or caps them. QK-clip (optim.qk_clip) needs it.

Attention's own kernels do not give it: flash kernels keep the log-sum-exp of a row, which is above its largest score,
and cuDNN's API gives nothing else. So the scores are computed once more, forward alone, and as few of them as decide:
no score of some queries and keys is above the product of their largest norms, and only those that may be above a
threshold are asked for. Where all of them may be, this is one of the two matmuls of attention's forward: a seventh of
what attention takes forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.ops.attention.backends import repeated
from phalanx.ops.attention.kind import CAUSAL, AttentionKind, by_documents
from phalanx.ops.attention.reach import Reach, reach_of
from phalanx.ops.op import Case, Kernels, Op, triton
from phalanx.sequence.batch import Batch

ROWS = 256  # queries whose scores the reference makes at once


@torch.no_grad()
def largest_scores(q: Tensor, k: Tensor, reach: Reach, scale: float, least: float) -> Tensor:
    """q (sequences, heads, L, K), k (sequences, kv_heads, S, K) -> (heads,) in at least fp32: the largest score of each
    head, or `least` if none is larger. Query head h reads kv head h // (heads / kv_heads)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    found = torch.full((q.shape[1],), least, dtype=wide, device=q.device)
    keys, place = repeated(k, q.shape[1]).to(wide).mT, torch.arange(k.shape[2], device=q.device)
    for at in range(0, q.shape[2], ROWS):
        rows = slice(at, at + ROWS)
        scores = q[:, :, rows].to(wide) @ keys * scale
        first, stop = (ends[:, rows].unsqueeze(-1) for ends in reach)
        seen = ((first <= place) & (place < stop)).unsqueeze(1)
        found = torch.maximum(found, scores.masked_fill(~seen, -torch.inf).amax((0, 2, 3)))
    return found


@dataclass(frozen=True)
class LargestScores:
    """The largest scores of a layer's heads on this rank since they were last set to `least`.

    values   (heads,), raised in place
    least    smaller ones are not asked for
    kernels  which implementations are asked for
    """

    values: Tensor
    least: float
    kernels: Kernels = "auto"

    def of_heads(self, first: int, count: int) -> LargestScores:
        """Those of `count` heads from number `first` on, in the same memory."""
        return replace(self, values=self.values[first : first + count])

    def forget(self) -> None:
        self.values.fill_(self.least)

    def take(self, q: Tensor, k: Tensor, reach: Reach, scale: float) -> None:
        """Raise them by the scores of these queries and keys, as in `largest_scores`."""
        q, k = q.detach(), k.detach()
        made = LARGEST_SCORES.choose(self.kernels, q).largest_scores(q, k, reach, scale, self.least)
        self.values.copy_(torch.maximum(self.values, made.to(self.values.dtype)))

    def take_whole(self, q: Tensor, k: Tensor, batch: Batch, kind: AttentionKind) -> None:
        """The same, where k has the keys of whole sequences."""
        batch, kind = by_documents(batch, kind)
        scale = 1 / math.sqrt(q.shape[-1]) if kind.scale is None else kind.scale
        self.take(q, k, reach_of(batch, kind), scale)


def _case(name: str, kind: AttentionKind, documents: bool, shape: tuple[int, ...], least: float, **fields: Any) -> Case:
    """shape: sequences, tokens of each, heads, kv heads, width. With a `least` above 0 all queries and keys have
    one direction, and later ones are larger: scores are as large as norms allow, and the largest is in the last
    block."""
    sequences, length, heads, kv_heads, width = shape

    def call(packed: Tensor, kernels: Kernels) -> tuple[Tensor, ...]:
        ids = torch.arange(sequences * length, device=packed.device)
        batch = Batch(ids, ids, ids % length, ids // length, sequences, length)
        if documents:
            starts = (ids % length == 0) | (ids % 7 == 3) | (ids % 11 == 0)
            batch = replace(batch, documents=starts.cumsum(0) - 1)
        q, k = packed.unflatten(0, (sequences, length)).transpose(1, 2).split((heads, kv_heads), 1)
        if least > 0:
            q = k = q[:, :, :1] * (1 + 2 * torch.arange(length, device=q.device).to(q.dtype).view(-1, 1) / length)
        reach = reach_of(batch, kind)
        return (LARGEST_SCORES.choose(kernels, q).largest_scores(q, k, reach, width**-0.5, least),)

    dtypes = (torch.float16, torch.float32)
    return Case(name, call, ((sequences * length, heads + kv_heads, width),), dtypes=dtypes, **fields)


def _cases() -> Iterator[Case]:
    kinds = {
        "causal": (CAUSAL, False),
        "documents": (CAUSAL, True),
        "a window, both ways": (AttentionKind("both", window=9), False),
    }
    for name, (kind, documents) in kinds.items():
        yield _case(f"largest, {name}", kind, documents, (2, 67, 4, 2, 40), -9.0)
        for width in (64, 128, 192):
            shape = (2, 1000, 8, 2, width)
            yield _case(f"largest, {name}, heads of {width}", kind, documents, shape, -9.0, large=True)
    yield _case("largest, some above", CAUSAL, False, (2, 150, 2, 2, 16), 3.0)


LARGEST_SCORES = Op(
    "largest_scores",
    "the largest score of each head of attention, for optim.qk_clip",
    __name__,
    ("largest_scores",),
    (
        triton(
            "phalanx.ops.attention.largest_scores_kernel",
            dtypes=(torch.bfloat16, torch.float16, torch.float32),
        ),
    ),
    cases=tuple(_cases()),
)
