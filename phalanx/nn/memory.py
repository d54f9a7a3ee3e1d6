"""What a layer remembers of a sequence while it is generated: said by the layer as a pure value, from which bytes and
allocation follow. Attention remembers tokens, in pages that all sequences share; a recurrence remembers a state of each
sequence."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.comm.axis import Axis
from phalanx.ops.attention.kind import NOTHING, AttentionKind, Learned
from phalanx.ops.attention.paged import FP8, Pages, paged_attention, paged_attention_parts, store_pages
from phalanx.ops.attention.paged_context import gather_tokens, join_over
from phalanx.ops.attention.prompts import attend_sequences
from phalanx.ops.op import Kernels
from phalanx.sequence.batch import Batch
from phalanx.sequence.paged import PagedSequences, SourceSpans, StateSpans


@dataclass(frozen=True)
class PageSpec:
    """What attention remembers of each token, on this rank.

    heads   of keys and values here
    key     features of a key
    value   features of a value
    shared  the value is the first `value` features of the key (a latent is both), and takes no room of its own
    window  a token is read by itself and those less than so many tokens later, then forgotten; None: it is kept
    source  of each token of the encoder's text, in place of the sequence's own
    lender  name of the layer whose keys and values these are, where several layers read them (nn.shared_keys); they
            are stored once on a rank, by the first of these layers. None: nobody else reads them
    """

    heads: int
    key: int
    value: int
    shared: bool = False
    window: int | None = None
    source: bool = False
    lender: str | None = None

    @property
    def stored(self) -> tuple[int, ...]:
        """Features of what is stored of a token and head: a key, and a value that is no part of it."""
        return (self.key,) if self.shared else (self.key, self.value)

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token. In FP8 with its scales."""
        scales = torch.float32.itemsize * len(self.stored) if dtype == FP8 else 0
        return self.heads * (sum(self.stored) * dtype.itemsize + scales)

    def allocate(self, pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str) -> Pages:
        """Empty pages: zeros."""
        shape = (pages, page_size, self.heads)
        made = [torch.zeros(*shape, width, dtype=dtype, device=device) for width in self.stored]
        scales = [torch.zeros(shape, device=device) if dtype == FP8 else None for _ in self.stored]
        if self.shared:
            return Pages(made[0], None, self.value, scales[0])
        return Pages(made[0], made[1], self.value, scales[0], scales[1])


@dataclass(frozen=True)
class LayerMemory:
    """The pages of one layer on this rank.

    group  which spans and slots of a batch are its own (PagedSequences)
    cp     the ranks that share every page
    lent   whether another layer of this rank writes what this one reads
    """

    group: int
    pages: Pages
    cp: Axis
    lent: bool = False

    def attend(
        self,
        heads: tuple[Tensor, Tensor, Tensor | None],
        paged: PagedSequences,
        kind: AttentionKind,
        learned: Learned,
        kernels: Kernels,
    ) -> Tensor:
        """q (T / cp, query heads, key), k (T / cp, heads, key), v (T / cp, heads, value) or None -> (T / cp, query
        heads, value): writes the keys and values of the tokens that are here, and lets each read those of its sequence
        up to itself."""
        q, k, v = gather_tokens(heads, self.cp)
        if not self.lent:
            store_pages(k, v, self.pages, paged.slots[self.group], kernels)
        spans = paged.spans[self.group]
        if self.cp.size == 1:
            return attend_sequences((q, k, v), self.pages, spans, kind, learned, kernels)
        alone = replace(learned, sinks=None)
        out, lse = paged_attention_parts(q, self.pages, spans, replace(kind, sinks=False), alone, kernels)
        return join_over(out, lse, learned.sinks, self.cp)

    def read(
        self,
        q: Tensor,
        keys: tuple[Tensor, Tensor] | None,
        source: SourceSpans,
        kind: AttentionKind,
        kernels: Kernels,
    ) -> Tensor:
        """q (T, query heads, key) of cross-attention -> (T, query heads, value). keys: keys and values (M, heads, .)
        of the encoder's tokens in this step, which are written first; None: there are none."""
        if keys is not None:
            store_pages(*keys, self.pages, source.slots, kernels)
        return paged_attention(q, self.pages, source.spans, replace(kind, direction="causal"), NOTHING, kernels)


@dataclass(frozen=True)
class StateSpec:
    """What a recurrent layer remembers of each sequence, on this rank.

    heads     whose states have `width` x `state` numbers
    channels  of the convolution before it, which reads `taps` tokens
    """

    heads: int
    width: int
    state: int
    channels: int
    taps: int

    def sequence_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one sequence of a model of this dtype."""
        states = self.heads * self.width * self.state * wide_dtype(dtype).itemsize
        return states + (self.taps - 1) * self.channels * dtype.itemsize

    def allocate(self, slots: int, dtype: torch.dtype, device: torch.device | str, cp: Axis) -> LayerStates:
        """Zeros."""
        shape = (slots, self.heads, self.width, self.state)
        tokens = torch.zeros(slots, self.taps - 1, self.channels, dtype=dtype, device=device)
        return LayerStates(torch.zeros(shape, dtype=wide_dtype(dtype), device=device), tokens, cp)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of states: sums over many tokens."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class LayerStates:
    """The states of one layer on this rank.

    states  (slots, heads, width, state)
    tokens  (slots, taps - 1, channels): the inputs of the convolution that came last
    cp      the ranks that share the tokens of a step; each keeps all states
    """

    states: Tensor
    tokens: Tensor
    cp: Axis

    def spans_of(self, batch: Batch) -> StateSpans:
        if batch.paged is None or batch.paged.states is None:
            raise RuntimeError("a layer that remembers states is given a batch that does not say whose they are")
        return batch.paged.states

    def all_tokens(self, x: Tensor) -> Tensor:
        """(T / cp, ...) -> (T, ...) of all tokens of the step."""
        return x if self.cp.size == 1 else self.cp.all_gather(x).wait()

    def own_tokens(self, x: Tensor) -> Tensor:
        """The inverse."""
        return self.cp.own_rows(x)
