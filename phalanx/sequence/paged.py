"""Sequences that go on: where the tokens of a batch belong in what layers remember of the tokens before them.

A batch of generation mixes pieces of prompts and single tokens, one sequence after another, as one flat run of tokens.
What a layer remembers of a sequence lies in pages of `page_size` tokens, scattered over a pool that all sequences
share; a table says which pages are a sequence's (Kwon et al., "PagedAttention", 2023).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

NO_PAGE = 0
"""The number of the page that no sequence has: padding is written there, and what is no longer read points there."""


@dataclass(frozen=True)
class PagedSpans:
    """What attention reads: S sequences, of each the tokens that are here and the pages of all up to them.

    starts        (S + 1,) int32  the first token of each sequence in the batch, and one past the last one's; tokens
                  after that are padding, and so are sequences without tokens
    lengths       (S,) int32  tokens of each sequence so far, those in the batch included: the token at place i of a
                  sequence's n tokens here has position length - n + i
    table         (S, P) int32  numbers of the pages of each sequence, in order; NO_PAGE where its tokens are no longer
                  read (they have left a window) or not there yet
    page_size     tokens in a page
    most_queries  a bound on the tokens of one sequence in the batch
    most_keys     a bound on the tokens of one sequence so far
    batch_invariant  the bits of what a token gets depend on its sequence alone, not on who else is in the batch nor on
                  the pieces that a prompt is read in; slower
    """

    starts: Tensor
    lengths: Tensor
    table: Tensor
    page_size: int
    most_queries: int
    most_keys: int
    batch_invariant: bool = False

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True)
class PagedSequences:
    """Beside the tokens of a batch: of each group of layers that remember alike (nn.memory), what they read and where
    they write.

    spans   of each group
    slots   of each group (T,) int64  where what is remembered of a token is written: page * page_size + place in it;
            of padding inside NO_PAGE
    ends    (R,) int64  places in the batch of the tokens whose logits are wanted
    length  that no sequence may exceed: where angles of rotary embeddings follow the length of a sequence, they are
            those of this one for all tokens, whenever they come
    """

    spans: tuple[PagedSpans, ...]
    slots: tuple[Tensor, ...]
    ends: Tensor
    length: int

    @property
    def tensors(self) -> list[Tensor]:
        return [self.ends, *self.slots, *(t for s in self.spans for t in (s.starts, s.lengths, s.table))]

    def to(self, device: torch.device | str) -> PagedSequences:
        def moved(spans: PagedSpans) -> PagedSpans:
            values: dict[str, Any] = {f.name: getattr(spans, f.name) for f in fields(spans)}
            there: dict[str, Any] = {
                n: v.to(device, non_blocking=True) for n, v in values.items() if isinstance(v, Tensor)
            }
            return replace(spans, **there)

        slots = tuple(s.to(device, non_blocking=True) for s in self.slots)
        return replace(
            self, spans=tuple(map(moved, self.spans)), slots=slots, ends=self.ends.to(device, non_blocking=True)
        )
