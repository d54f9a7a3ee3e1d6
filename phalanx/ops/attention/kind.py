"""How a layer attends, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import PhalanxError
from phalanx.sequence.batch import Batch, PerBatch

Direction = Literal["causal", "both", "prefix"]


class UnsupportedAttention(PhalanxError):
    """No backend that could run here supports everything that a layer's attention asks for."""

    exit_code = 2


@dataclass(frozen=True)
class RelativeBias:
    """A learned number for each head and bucket of distances is added to the scores (Raffel et al., "T5", 2020).

    buckets        of distances; near ones have a bucket each, far ones share some by their logarithm
    max_distance   from here on all distances are in the last bucket
    bidirectional  later keys have half of the buckets; otherwise they share the bucket of distance 0
    """

    buckets: int
    max_distance: int
    bidirectional: bool = False

    def __post_init__(self) -> None:
        side = self.buckets // 2 if self.bidirectional else self.buckets
        if side < 2 or self.max_distance <= side // 2 or (self.bidirectional and self.buckets % 2):
            raise ValueError(f"{self}: at least two buckets a side, and distances beyond half of them")


@dataclass(frozen=True)
class Learned:
    """The parameters of attention itself, of the heads that are here.

    sinks  (heads,): a logit for each head that joins the softmax's denominator
    bias   (buckets, heads): what a distance's bucket adds to the scores
    """

    sinks: Tensor | None = None
    bias: Tensor | None = None

    def check(self, kind: AttentionKind) -> None:
        """ValueError if these are not the parameters that a kind of attention has."""
        if kind.sinks != (self.sinks is not None):
            raise ValueError(f"the kind of attention has sinks={kind.sinks}, and the logits given are {self.sinks}")
        if (kind.bias is None) != (self.bias is None):
            raise ValueError(f"the kind of attention has bias={kind.bias}, and the table given is {self.bias}")
        if kind.bias is not None and self.bias is not None and len(self.bias) != kind.bias.buckets:
            raise ValueError(f"a table {tuple(self.bias.shape)} has no row for each of {kind.bias.buckets} buckets")


NOTHING = Learned()


@dataclass(frozen=True)
class AttentionKind:
    """What the queries of a layer read, and how scores become probabilities. The default is plain causal attention.

    direction  causal: a query reads no later token; both: it reads its whole document; prefix: those of the first
               tokens of a document (Batch.prefix) read each other, the rest is causal (Liu et al., 2018)
    window     a query reads only tokens less than this far away, and itself (Beltagy et al., "Longformer", 2020)
    chunk      a query reads only inside its chunk of this many tokens, counted from the first of its document (Meta,
               "Llama 4", 2025)
    sinks      each head has a logit that joins the softmax's denominator (Xiao et al., 2024)
    soft_cap   scores become cap * tanh(scores / cap) (Gemma team, "Gemma 2", 2024)
    bias       what is added to the scores by distance
    together   the id of a token: where several follow each other in a document, they read each other whatever their
               order and the window, such as the tokens of an image (Gemma team, "Gemma 3 technical report", 2025). A
               window then hides only what is before
    scale      of the scores; None: 1 / sqrt(width of a query)
    """

    direction: Direction = "causal"
    window: int | None = None
    chunk: int | None = None
    sinks: bool = False
    soft_cap: float | None = None
    bias: RelativeBias | None = None
    together: int | None = None
    scale: float | None = None

    @property
    def reads_later(self) -> bool:
        """Whether some queries read later tokens."""
        return self.direction != "causal" or self.together is not None

    @cached_property
    def features(self) -> frozenset[str]:
        """The names of the fields that differ from plain causal attention; "prefix" for a direction of its own."""
        found = {field.name for field in fields(self) if getattr(self, field.name) != field.default}
        return frozenset(found - {"direction"} | {"prefix"} if self.direction == "prefix" else found)

    def within(self, length: int) -> AttentionKind:
        """In sequences of `length` tokens, in which a window or chunk as long hides nothing."""
        window, chunk = (None if size is None or size >= length else size for size in (self.window, self.chunk))
        return self if (window, chunk) == (self.window, self.chunk) else replace(self, window=window, chunk=chunk)

    def keys_per_query(self, length: int) -> float:
        """Mean number of keys that a query reads, for FLOPs: length / 2 for plain causal attention (the diagonal counts
        half). How long prefixes are, and tokens that read each other, is known from data alone: they are counted as
        causal."""
        length = length if self.chunk is None else min(self.chunk, length)
        w = length if self.window is None else min(self.window, length)
        before = w - w * w / (2 * length) if length else 0.0
        return 2 * before if self.direction == "both" else before


CAUSAL = AttentionKind()

EVERYTHING = frozenset(("prefix", *(field.name for field in fields(AttentionKind))))
"""All features."""

WAYS_OUT = {"flash-attn": "train.kernels=auto", "invariant": "train.batch_invariant=false"}
"""What a config asks for where one backend alone is offered, and what to set instead."""

SPANNED = frozenset(("direction", "window", "chunk", "sinks", "scale"))
"""Those that kernels inside documents and windows have; a chunk is a document to them."""

PAGED = frozenset(("window", "chunk", "sinks", "soft_cap", "bias", "together", "scale"))
"""Those that attention over pages has."""


TOGETHER = PerBatch[Tensor]()


def groups_together(batch: Batch, token: int) -> Tensor:
    """(tokens of whole sequences,) for each token that is `token`: the number of its group, neighbours in a document
    that all are it; -1 for others."""
    return TOGETHER.of(batch, lambda: _find_groups(batch.uncut, token), token)


def _find_groups(batch: Batch, token: int) -> Tensor:
    here, number = batch.tokens == token, batch.runs[0]
    place = torch.arange(len(here), device=here.device)
    begins = here & ((place % batch.seq_length == 0) | ~here.roll(1) | (number != number.roll(1)))
    return (begins.cumsum(0) - 1).where(here, -1)


def in_one_group(of_queries: Tensor, of_keys: Tensor) -> Tensor:
    """Whether queries (..., L, 1) and keys (..., 1, S) are in one group."""
    return (of_queries == of_keys) & (of_keys >= 0)


def by_documents(batch: Batch, kind: AttentionKind) -> tuple[Batch, AttentionKind]:
    """The same attention without chunks: they are documents of a batch of the same tokens."""
    return (batch, kind) if kind.chunk is None else (batch.chunked(kind.chunk), replace(kind, chunk=None))


def refuse_unsupported(kind: AttentionKind, offers: Mapping[str, frozenset[str]]) -> None:
    """UnsupportedAttention, with what each lacks, if none of the offers (name -> features) has all features of a
    kind."""
    lacking = {name: sorted(kind.features - features) for name, features in offers.items()}
    if all(lacking.values()):
        reasons = "; ".join(f"{name} has no {', no '.join(features)}" for name, features in lacking.items())
        way_out = "".join(f": set {WAYS_OUT[name]}" for name in lacking if len(lacking) == 1 and name in WAYS_OUT)
        asked = ", ".join(sorted(kind.features))
        raise UnsupportedAttention(f"no backend computes attention with {asked}: {reasons}{way_out}")
