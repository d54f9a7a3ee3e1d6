"""Sequences that go on: where the tokens of a batch belong in what layers remember of the tokens before them.

A batch of generation mixes pieces of prompts and single tokens, one sequence after another, as one flat run of tokens.
What a layer remembers of a sequence lies in pages of `page_size` tokens, scattered over a pool that all sequences
share; a table says which pages are a sequence's (Kwon et al., "PagedAttention", 2023). Ranks of context parallelism
share every page: of cp ranks, rank r remembers the tokens at positions r, r + cp, r + 2 cp ... So tables are the same
on all of them, and a page of cp * n tokens takes the room of n on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass

NO_PAGE = 0
"""The number of the page that no sequence has: padding is written there, and what is no longer read points there."""
NO_SLOT = 0
"""The number of the state that no sequence has."""


@dataclass(frozen=True)
class PagedSpans:
    """What attention reads: S sequences, of each the tokens that are here and the pages of all up to them.

    starts        (S + 1,) int32  the first token of each sequence in the batch, and one past the last one's; tokens
                  after that are padding, and so are sequences without tokens
    lengths       (S,) int32  tokens of each sequence so far, those in the batch included: the token at place i of a
                  sequence's n tokens here has position length - n + i
    table         (S, P) int32  numbers of the pages of each sequence, in order; NO_PAGE where its tokens are no longer
                  read (they have left a window) or not there yet
    page_size     tokens in a page that are remembered here
    most_queries  a bound on the tokens of one sequence in the batch
    most_keys     a bound on the tokens of one sequence so far
    batch_invariant  the bits of what a token gets depend on its sequence alone, not on who else is in the batch nor on
                  the pieces that a prompt is read in; slower
    prompts       which of the sequences begin here, if there are some
    offset        position of the first token of a sequence that is remembered here
    stride        positions from each such token to the next: 1, if all are
    together      (T, 2) int32  of each token here: the first position of those that read each other whatever their
                  order, it among them, and one past their last (the tokens of an image, all of them here); twice the
                  same where there are none. None: no token here has such others
    """

    starts: Tensor
    lengths: Tensor
    table: Tensor
    page_size: int
    most_queries: int
    most_keys: int
    batch_invariant: bool = False
    prompts: PromptSpans | None = None
    offset: int = 0
    stride: int = 1
    together: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    def keys_before(self, position: int) -> int:
        """Tokens of a sequence before a position that are remembered here."""
        return max(0, -(-(position - self.offset) // self.stride))

    def with_prompts(self, counts: Sequence[int], lengths: Sequence[int]) -> PagedSpans:
        """The same, knowing which sequences begin here. counts, lengths: of their tokens here and so far, on the
        host."""
        first = len(counts)
        while first and counts[first - 1] == lengths[first - 1]:
            first -= 1
        longest = max(counts[first:], default=0)
        if longest < 2:
            return self
        begin, others = sum(counts[:first]), None
        if first:
            others = replace(
                self,
                starts=self.starts[: first + 1],
                lengths=self.lengths[:first],
                table=self.table[:first],
                most_queries=max(counts[:first]),
                most_keys=max(lengths[:first]),
                together=None if self.together is None else self.together[:begin],
            )
        end = begin + sum(counts[first:])
        return replace(self, prompts=PromptSpans(begin, end, self.starts[first:] - begin, longest, others))

    def to(self, device: torch.device | str) -> PagedSpans:
        there = {n: getattr(self, n).to(device, non_blocking=True) for n in ("starts", "lengths", "table")}
        if self.together is not None:
            there["together"] = self.together.to(device, non_blocking=True)
        return replace(self, **there, prompts=None if self.prompts is None else self.prompts.to(device))


@dataclass(frozen=True)
class PromptSpans:
    """The last sequences of a batch, of which no token came before: what they read is in the batch, and need not be
    fetched from pages.

    begin    their first token in the batch
    end      one past their last
    offsets  (n + 1,) int32  the first token of each, counted from `begin`, and one past the last one's
    longest  a bound on their tokens
    others   the sequences before them; None: there are none
    """

    begin: int
    end: int
    offsets: Tensor
    longest: int
    others: PagedSpans | None

    def to(self, device: torch.device | str) -> PromptSpans:
        others = None if self.others is None else self.others.to(device)
        return replace(self, offsets=self.offsets.to(device, non_blocking=True), others=others)


@dataclass(frozen=True)
class SourceSpans:
    """What cross-attention reads: of each sequence an encoder's memory, whose keys and values lie in pages of their
    own from the step on in which the sequence begins.

    spans  every token of the batch is a sequence of its own, whose last token so far is the source's last: so it reads
           all of the source
    slots  (M,) int64  where the keys and values of the encoder's tokens in this step are written; of padding, inside
           NO_PAGE
    """

    spans: PagedSpans
    slots: Tensor

    def to(self, device: torch.device | str) -> SourceSpans:
        return SourceSpans(self.spans.to(device), self.slots.to(device, non_blocking=True))


@dataclass(frozen=True)
class StatePiece:
    """Tokens start .. stop of a batch, those of one sequence; where its state is, and whether it begins here."""

    start: int
    stop: int
    slot: int
    fresh: bool


@dataclass(frozen=True)
class StateSpans:
    """What layers read and write that remember a state of each sequence, however long it is. The first tokens of the
    batch are those of sequences with one token each.

    slots   (n,) int64  where the states of these sequences are; NO_SLOT: padding
    fresh   (n,) bool  which of them begin here
    pieces  the tokens after them, sequence by sequence
    """

    slots: Tensor
    fresh: Tensor
    pieces: tuple[StatePiece, ...] = ()

    @staticmethod
    def of(slots: Sequence[int], starts: Sequence[int], firsts: Sequence[int]) -> StateSpans:
        """Of a batch of S sequences, on the host: their slots, the first token of each in the batch (S + 1), and its
        position in the sequence."""
        counts = [stop - start for start, stop in zip(starts, starts[1:])]
        single = next((i for i, count in enumerate(counts) if count != 1), len(counts))
        pieces = tuple(
            StatePiece(starts[i], starts[i + 1], slots[i], firsts[i] == 0)
            for i in range(single, len(counts))
            if counts[i] > 0
        )
        fresh = [first == 0 for first in firsts[:single]]
        return StateSpans(
            torch.tensor(slots[:single], dtype=torch.int64), torch.tensor(fresh, dtype=torch.bool), pieces
        )

    def to(self, device: torch.device | str) -> StateSpans:
        slots, fresh = (t.to(device, non_blocking=True) for t in (self.slots, self.fresh))
        return StateSpans(slots, fresh, self.pieces)


@dataclass(frozen=True)
class PagedSequences:
    """Beside the tokens of a batch: of each group of layers that remember alike (nn.memory), what they read and where
    they write. With context parallelism a rank's batch has its part of the step's T tokens, and this has all of them.

    spans   of each group
    slots   of each group (T,) int64  where what is remembered of a token is written: page * page_size + place in it;
            of padding, and of tokens that other ranks remember, inside NO_PAGE
    ends    (R,) int64  places among the T tokens of those whose logits are wanted
    length  that no sequence may exceed: where angles of rotary embeddings follow the length of a sequence, they are
            those of this one for all tokens, whenever they come
    states  what layers read and write that remember a state; None: there are none
    source  of models with an encoder; None: there is none
    """

    spans: tuple[PagedSpans, ...]
    slots: tuple[Tensor, ...]
    ends: Tensor
    length: int
    states: StateSpans | None = None
    source: SourceSpans | None = None

    @property
    def tensors(self) -> list[Tensor]:
        source = self.source
        spans = self.spans if source is None else (*self.spans, source.spans)
        slots = self.slots if source is None else (*self.slots, source.slots)
        of_states = [] if self.states is None else [self.states.slots, self.states.fresh]
        return [self.ends, *slots, *(t for s in spans for t in (s.starts, s.lengths, s.table)), *of_states]

    def to(self, device: torch.device | str) -> PagedSequences:
        slots = tuple(s.to(device, non_blocking=True) for s in self.slots)
        spans, ends = tuple(s.to(device) for s in self.spans), self.ends.to(device, non_blocking=True)
        source = None if self.source is None else self.source.to(device)
        states = None if self.states is None else self.states.to(device)
        return replace(self, spans=spans, slots=slots, ends=ends, source=source, states=states)
