"""How a layer attends, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal

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

    def within(self, length: int) -> AttentionKind:
        """In sequences of `length` tokens, in which a window as long hides nothing."""
        return self if self.window is None or self.window < length else replace(self, window=None)

    def keys_per_query(self, length: int) -> float:
        """Mean number of keys that a query reads, for FLOPs: length / 2 for plain causal attention (the diagonal counts
        half)."""
        length = length if self.chunk is None else min(self.chunk, length)
        w = length if self.window is None else min(self.window, length)
        before = w - w * w / (2 * length) if length else 0.0
        return before if self.direction == "causal" else 2 * before


CAUSAL = AttentionKind()


MASKED = frozenset(("window", "sinks", "scale"))
"""Features that masks, or kernels with windows, give causal attention."""

PAGED = frozenset(("window", "chunk", "sinks", "soft_cap", "scale"))
"""Those that attention over pages has."""


def refuse_unsupported(kind: AttentionKind, offers: Mapping[str, frozenset[str]]) -> None:
    """UnsupportedAttention, with what each lacks, if none of the offers (name -> features) has all features of a
    kind."""
    lacking = {name: sorted(kind.features - features) for name, features in offers.items()}
    if all(lacking.values()):
        reasons = "; ".join(f"{name} has no {', no '.join(features)}" for name, features in lacking.items())
        raise UnsupportedAttention(f"no backend computes attention with {', '.join(sorted(kind.features))}: {reasons}")
