"""The memory of live sequences on one rank: which layers share page tables, how many pages there is room for, and the
pages themselves. All of it follows from what layers declare that they keep (nn.memory.PageSpec)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import ConfigError, Problem
from phalanx.base.free_memory import host_memory
from phalanx.base.sizes import size_text
from phalanx.comm.mesh import Mesh
from phalanx.layout.grid import Coords
from phalanx.nn.memory import LayerMemory, PageSpec
from phalanx.nn.module import Block, Module
from phalanx.planning.plan import Plan

NO_LIMIT = 1 << 62  # bytes, where the system does not say
GPU_SHARE, HOST_SHARE = 0.9, 0.25  # of free memory
COUNT_BYTES = torch.int32.itemsize + torch.bool.itemsize  # of a token of the vocabulary: how often, and whether at all
LEAST_PAGES = 2  # of layers that keep everything: the one that nobody has, and one to write
SPARE_PAGES = 2  # of a sequence's window: where it begins and ends inside pages


@dataclass(frozen=True)
class MemoryLimits:
    """What memory is made for.

    most_sequences  that are generated at once
    most_tokens     of one step
    length          tokens of a sequence at most
    page_size       tokens in a page, on all ranks of context parallelism together
    cp              of which each rank remembers 1 / cp
    source          rows that an encoder reads, where all sources have as many (recordings); None: a source is as long
                    as a sequence may be
    prefix_states   states of prefixes that recurrent layers keep, beside those of sequences
    """

    most_sequences: int
    most_tokens: int
    length: int
    page_size: int = 16
    cp: int = 1
    source: int | None = None
    prefix_states: int = 0

    @property
    def states(self) -> int:
        """Slots of states: of each sequence, of prefixes, and the one that nobody has (NO_SLOT)."""
        return 1 + self.most_sequences + self.prefix_states

    @property
    def own_page_size(self) -> int:
        """Tokens in a page that this rank remembers."""
        return self.page_size // self.cp

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def most_pages(self, window: int | None) -> int:
        """Pages that are ever in use at once: of a window, as many as it reaches back over."""
        whole = self.pages_of(self.length)
        reached = whole if window is None else min(whole, self.pages_of(window) + SPARE_PAGES)
        return self.most_sequences * reached + self.shared_pages(window)

    def pages_for(self, kept: KeptTokens) -> int:
        """The same of layers that remember these tokens."""
        if kept.source and self.source is not None:
            return self.most_sequences * self.pages_of(self.source) + self.shared_pages(None)
        return self.most_pages(kept.window)

    def read(self, kept: KeptTokens) -> int:
        """Tokens that one of the longest sequence reads of those that such layers remember."""
        if kept.source and self.source is not None:
            return self.source
        return self.length if kept.window is None else min(self.length, kept.window)

    def fixes(self, kept: KeptTokens) -> bool:
        """Whether a sequence's length, once it is long, has no part in how many pages such layers need."""
        return kept.window is not None or (kept.source and self.source is not None)

    def shared_pages(self, window: int | None) -> int:
        """Of those the ones that are no sequence's own: the one that nobody has, and of a window those that a step
        writes."""
        return 1 + (0 if window is None else self.pages_of(self.most_tokens))


class KeptTokens(NamedTuple):
    """Which tokens a layer remembers of a sequence: those of a window (None: all), or of its source, which an encoder
    reads."""

    window: int | None = None
    source: bool = False


@dataclass(frozen=True)
class LayerGroup:
    """Layers that remember the same tokens, so that one table of pages serves them all.

    page_bytes  of one page, in all layers of this rank together; 0 where none of them is here
    """

    kept: KeptTokens
    page_bytes: int

    @property
    def window(self) -> int | None:
        return self.kept.window


def kept_by(plan: Plan, depths: int = 0) -> tuple[KeptTokens, ...]:
    """By which layers are grouped, on all ranks alike: those that keep all of the text first, those that keep a source
    last. depths: of multi-token prediction, that draft. ConfigError for a model that takes whole sequences alone."""
    segments = [segment for pp in range(plan.grid.pp) for segment in plan.blocks_of(Coords(pp=pp)).values()]
    blocks = [block for segment in segments for block in segment if block.works_on is None]
    modules = (module for block in blocks for module in block.modules())
    why = next((m.whole_only for m in modules if isinstance(m, Module) and m.whole_only), None)
    if why is not None:
        raise ConfigError([Problem("model.family", plan.run.model.family, f"does not generate text: {why}")])
    found = {kept_tokens(layer) for layer in remembering(blocks, depths)}
    return tuple(sorted(found, key=lambda kept: (kept.source, kept.window is not None, kept.window or 0)))


def layer_groups(
    layers: Sequence[Module], kept: Sequence[KeptTokens], dtype: torch.dtype, page_size: int
) -> tuple[LayerGroup, ...]:
    """The groups, with what the layers of this rank take of each. page_size: tokens in a page that it remembers."""
    bytes_of = dict.fromkeys(kept, 0)
    for layer in storing(layers):
        bytes_of[kept_tokens(layer)] += page_size * remembered(layer).token_bytes(dtype)
    return tuple(LayerGroup(each, size) for each, size in bytes_of.items())


def kept_tokens(layer: Module) -> KeptTokens:
    spec = remembered(layer)
    return KeptTokens(spec.window, spec.source)


def remembered(layer: Module) -> PageSpec:
    if layer.remembers is None:
        raise RuntimeError(f"{type(layer).__name__} remembers nothing")
    return layer.remembers


def remembering(blocks: Sequence[Block], depths: int = 0) -> list[Module]:
    """The layers of these blocks that remember something, in the order of the model. depths: of multi-token
    prediction, that draft."""
    return [layer for block in blocks for layer in (*block.remembering(), *block.drafting(depths))]


def storing(layers: Sequence[Module]) -> list[Module]:
    """Those of this rank's layers that have pages of their own. Of layers that read the same keys, the first."""
    found, lenders = list[Module](), set[str]()
    for layer in layers:
        lender = remembered(layer).lender
        if lender is None or lender not in lenders:
            found.append(layer)
        if lender is not None:
            lenders.add(lender)
    return found


def pages_that_fit(groups: Sequence[LayerGroup], limits: MemoryLimits, free: int) -> tuple[int, ...]:
    """Pages of each group in `free` bytes: of windows and of sources of one length as many as are ever used, of all
    others equally many tokens, as many as fit and are of use. Where these leave no room for one whole sequence, they
    get pages for fewer sequences, for one at least. No pages at all if not even that is there."""
    whole = limits.pages_of(limits.length)
    each = sum(group.page_bytes for group in groups if not limits.fixes(group.kept))

    def left(count: int) -> int:
        """Bytes beside the windows, and sources of one length, of so many sequences."""
        windows = [group for group in groups if limits.fixes(group.kept)]
        few = replace(limits, most_sequences=count)
        return free - sum(few.pages_for(group.kept) * group.page_bytes for group in windows)

    count = most_that(limits.most_sequences, lambda count: left(count) >= each * (1 + whole))
    if count == 0 and left(1) < each * LEAST_PAGES:
        return (0,) * len(groups)
    count = max(1, count)
    fit = left(count) // each if each else 1 + limits.most_sequences * whole
    few = replace(limits, most_sequences=count)
    return tuple(
        few.pages_for(group.kept) if limits.fixes(group.kept) else min(limits.most_pages(None), fit) for group in groups
    )


def most_that(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `limit` that fits, if smaller ones fit where a larger one does; 0: none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def sequence_bytes(groups: Sequence[LayerGroup], limits: MemoryLimits) -> int:
    """Bytes of the pages of one sequence of the greatest length."""
    alone = replace(limits, most_sequences=1)
    return sum((alone.pages_for(g.kept) - alone.shared_pages(g.window)) * g.page_bytes for g in groups)


def longest_that_fits(groups: Sequence[LayerGroup], limits: MemoryLimits, free: int) -> int:
    """Tokens of the longest sequence that has pages in `free` bytes, alone; 0: there is room for none."""

    def fits(length: int) -> bool:
        one = replace(limits, most_sequences=1, length=length)
        return sum(one.pages_for(group.kept) * group.page_bytes for group in groups) <= free

    return most_that(limits.length, fits)


def no_room(field: str, limits: MemoryLimits, needs: int, longest: int, because: dict[str, Any]) -> Problem:
    """A cache that cannot hold one sequence of `limits.length` tokens, which needs so many bytes on a rank; longest:
    that fits. because: what room there is."""
    rule = f"needs {size_text(needs)} on a rank for what is remembered of one sequence, and there is less"
    return Problem(field, limits.length, rule, because, (longest,) if longest else ())


@dataclass(frozen=True)
class RankRoom:
    """What the memory of one rank, or of the rank with the least, holds.

    groups       of layers that remember alike
    pages        of each group
    sequences    whose states it holds, at most those that are generated at once
    state_bytes  of the states of one sequence
    """

    groups: tuple[LayerGroup, ...]
    pages: tuple[int, ...]
    sequences: int
    state_bytes: int

    @staticmethod
    def of(groups: Sequence[LayerGroup], limits: MemoryLimits, state_bytes: int, free: int) -> RankRoom:
        """free: bytes for pages, beside the states."""
        sequences = limits.most_sequences
        if state_bytes and free < 0:
            others = limits.states - limits.most_sequences
            sequences = max(0, (free + limits.states * state_bytes) // state_bytes - others)
        return RankRoom(tuple(groups), pages_that_fit(groups, limits, free), sequences, state_bytes)

    def check(self, limits: MemoryLimits, asked: bool, because: dict[str, Any], option: str = "") -> None:
        """ConfigError if there is no room for the states of all sequences at once, if there are no pages, or if `asked`
        and they are too few for one sequence of the greatest length. option: what fields are called after."""
        if self.sequences < limits.most_sequences:
            rule = "must have room for the state of each sequence that is generated at once"
            why, valid = {"bytes of a state": size_text(self.state_bytes)}, (self.sequences,) if self.sequences else ()
            raise ConfigError([Problem(f"{option}sequences", limits.most_sequences, rule, why, valid)])
        full = [count - 1 for group, count in zip(self.groups, self.pages) if not limits.fixes(group.kept)]
        longest = max(0, min(full, default=limits.pages_of(limits.length)) * limits.page_size)
        if not all(self.pages) or (asked and longest < limits.length):
            needs = sequence_bytes(self.groups, limits)
            raise ConfigError([no_room(f"{option}length", limits, needs, longest, because)])


@dataclass(frozen=True)
class DraftRoom:
    """What drafts from multi-token prediction are kept in, for each sequence.

    tokens  drafted at once
    states  bytes of what depths made of its last token, which the depths after them read in the next step
    """

    tokens: int = 0
    states: int = 0


NO_DRAFTS = DraftRoom()


def row_bytes(limits: MemoryLimits, vocabulary: int, drafts: DraftRoom = NO_DRAFTS, states: int = 0) -> int:
    """Bytes that an engine keeps on a rank beside pages: the last token of each sequence, its drafts, the `states` of
    recurrent layers (bytes of one; those of prefixes too, and room for one that nobody has), and where tokens are
    drawn, counts of those of the vocabulary for penalties (if one asks for them)."""
    token = torch.int64.itemsize
    each = token * (1 + drafts.tokens) + vocabulary * COUNT_BYTES + drafts.states
    return limits.most_sequences * each + limits.states * states


def keeping(blocks: Sequence[Block]) -> list[Module]:
    """The layers of these blocks that keep a state of each sequence."""
    return [layer for block in blocks for layer in block.keeping()]


def state_bytes(layers: Sequence[Module], dtype: torch.dtype) -> int:
    """Bytes of the states of one sequence in these layers, of a model of this dtype."""
    return sum(layer.keeps.sequence_bytes(dtype) for layer in layers if layer.keeps is not None)


def give_states(layers: Sequence[Module], limits: MemoryLimits, dtype: torch.dtype, mesh: Mesh) -> None:
    """Allocate the states of these layers: a slot for each sequence, after the one that nobody has (NO_SLOT), and then
    those of prefixes."""
    for layer in layers:
        if layer.keeps is not None:
            layer.states = layer.keeps.allocate(limits.states, dtype, mesh.device, mesh.cp)


def copy_states(layers: Sequence[Module], sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy states from slots to others, of which each is named once."""
    for layer in layers:
        for t in () if layer.states is None else (layer.states.states, layer.states.tokens):
            t[list(targets)] = t[list(sources)]


def give_memory(
    layers: Sequence[Module],
    groups: Sequence[LayerGroup],
    num_pages: Sequence[int],
    page_size: int,
    dtype: torch.dtype,
    mesh: Mesh,
) -> None:
    """Allocate the pages of these layers. page_size: tokens in a page that this rank remembers."""
    number, of_lender = {group.kept: i for i, group in enumerate(groups)}, dict[str, LayerMemory]()
    for layer in layers:
        spec, group = remembered(layer), number[kept_tokens(layer)]
        if spec.lender in of_lender:
            layer.memory = replace(of_lender[spec.lender], lent=True)
            continue
        layer.memory = LayerMemory(group, spec.allocate(num_pages[group], page_size, dtype, mesh.device), mesh.cp)
        if spec.lender is not None:
            of_lender[spec.lender] = layer.memory


def forget_memory(blocks: Sequence[Block]) -> None:
    """Free the pages and states of these blocks' layers."""
    for block in blocks:
        for module in block.modules():
            if isinstance(module, Module):
                module.memory = module.states = None


def room_for_pages(device: torch.device, ranks: int) -> float:
    """Bytes that pages may take on this rank if nobody says how many. A GPU is this rank's own; the memory of a host is
    shared by its ranks, and by whatever else its user does."""
    if device.type != "cuda":
        return HOST_SHARE * (host_memory() or NO_LIMIT) / ranks
    free, _ = torch.cuda.mem_get_info(device)
    return GPU_SHARE * (free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
