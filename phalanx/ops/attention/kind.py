"""AttentionKind: what a layer's attention reads, as data; AttentionBackend: which of it an implementation supports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

from torch import Tensor

from phalanx.base.errors import PhalanxError


class UnsupportedAttention(PhalanxError):
    """No backend that could run here supports everything that a layer's attention asks for."""

    exit_code = 2


@dataclass(frozen=True)
class AttentionKind:
    """What the queries of a layer read, and how scores become probabilities. The default is plain causal attention.

    direction  causal: a query reads no later token; both: it reads its whole document
    window     a query reads only tokens less than this far away, and itself (Beltagy et al., "Longformer", 2020)
    chunk      a query reads only inside its chunk of this many tokens (Meta, "Llama 4", 2025)
    sinks      each head has a logit that joins the softmax's denominator (Xiao et al., 2024)
    soft_cap   scores become cap * tanh(scores / cap) (Gemma team, "Gemma 2", 2024)
    bias       what is added to the scores (Press et al., "Train short, test long", 2022)
    scale      of the scores; None: 1 / sqrt(width of a query)
    """

    direction: Literal["causal", "both"] = "causal"
    window: int | None = None
    chunk: int | None = None
    sinks: bool = False
    soft_cap: float | None = None
    bias: Literal["alibi"] | None = None
    scale: float | None = None

    @cached_property
    def features(self) -> frozenset[str]:
        """The names of the fields that differ from plain causal attention."""
        return frozenset(field.name for field in fields(self) if getattr(self, field.name) != field.default)

    def keys_per_query(self, length: int) -> float:
        """Mean number of keys that a query reads, for FLOPs: length / 2 for plain causal attention (the diagonal counts
        half)."""
        length = length if self.chunk is None else min(self.chunk, length)
        w = length if self.window is None else min(self.window, length)
        before = w - w * w / (2 * length) if length else 0.0
        return before if self.direction == "causal" else 2 * before


CAUSAL = AttentionKind()


@dataclass(frozen=True)
class AttentionBackend:
    """One way to compute attention over whole sequences.

    supports  the features of a kind that it can compute
    runs      (kernels, q, v, no_dense) -> whether it takes these operands; no_dense: what is hidden leads to lengths
              that hardly ever repeat
    call      (q, k, v, batch, kind, window, sinks) -> (T, heads * V)
    """

    name: str
    supports: frozenset[str]
    runs: Callable[..., bool]
    call: Callable[..., Tensor]


def refuse_unsupported(kind: AttentionKind, backends: Sequence[AttentionBackend]) -> None:
    """Raise UnsupportedAttention, with what each backend lacks, if none of them has all features of a kind."""
    lacking = {backend.name: sorted(kind.features - backend.supports) for backend in backends}
    if all(lacking.values()):
        reasons = "; ".join(f"{name} has no {', no '.join(features)}" for name, features in lacking.items())
        raise UnsupportedAttention(f"no backend computes attention with {', '.join(sorted(kind.features))}: {reasons}")
