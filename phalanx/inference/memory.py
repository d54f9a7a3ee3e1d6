"""The memory of sequences that go on, on one rank: which layers remember alike, how many pages there is room for, and
the pages themselves. All of it follows from what layers say that they remember (nn.memory.PageSpec)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phalanx.base.free_memory import host_memory
from phalanx.layout.grid import Coords
from phalanx.nn.memory import LayerMemory, PageSpec
from phalanx.nn.module import Block, Module
from phalanx.planning.plan import Plan

NO_LIMIT = 1 << 62  # bytes, where the system does not say
GPU_SHARE, HOST_SHARE = 0.9, 0.25  # of free memory
SPARE_PAGES = 2  # of a sequence's window: where it begins and ends inside pages


@dataclass(frozen=True)
class MemoryLimits:
    """What memory is made for.

    most_sequences  that are generated at once
    most_tokens     of one step
    length          tokens of a sequence at most
    page_size       tokens in a page
    """

    most_sequences: int
    most_tokens: int
    length: int
    page_size: int = 16

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def most_pages(self, window: int | None) -> int:
        """Pages that are ever in use at once, with the one that nobody has: of a window, as many as it reaches back
        over, and those that a step writes."""
        whole = self.pages_of(self.length)
        if window is None:
            return 1 + self.most_sequences * whole
        reached = min(whole, self.pages_of(window) + SPARE_PAGES)
        return 1 + self.most_sequences * reached + self.pages_of(self.most_tokens)


@dataclass(frozen=True)
class LayerGroup:
    """Layers that remember the same tokens, so that one table of pages serves them all.

    page_bytes  of one page, in all layers of this rank together; 0 where none of them is here
    """

    window: int | None
    page_bytes: int


def windows_of(plan: Plan) -> tuple[int | None, ...]:
    """By which layers are grouped, on all ranks alike; those that keep everything first."""
    found = {
        remembered(layer).window
        for pp in range(plan.grid.pp)
        for segment in plan.blocks_of(Coords(pp=pp)).values()
        for layer in remembering(segment)
    }
    return tuple(sorted(found, key=lambda window: (window is not None, window or 0)))


def layer_groups(
    layers: Sequence[Module], windows: Sequence[int | None], dtype: torch.dtype, page_size: int
) -> tuple[LayerGroup, ...]:
    """The groups, with what the layers of this rank take of each."""
    bytes_of = dict.fromkeys(windows, 0)
    for layer in layers:
        spec = remembered(layer)
        bytes_of[spec.window] += page_size * spec.token_bytes(dtype)
    return tuple(LayerGroup(window, size) for window, size in bytes_of.items())


def remembered(layer: Module) -> PageSpec:
    if layer.remembers is None:
        raise RuntimeError(f"{type(layer).__name__} remembers nothing")
    return layer.remembers


def remembering(blocks: Sequence[Block]) -> list[Module]:
    """The layers of these blocks that remember something, in the order of the model."""
    return [layer for block in blocks for layer in block.remembering()]


def pages_that_fit(groups: Sequence[LayerGroup], limits: MemoryLimits, free: int) -> tuple[int, ...]:
    """Pages of each group in `free` bytes: of windows as many as are ever used, of all others equally many tokens, as
    many as fit and are of use. A group that gets less than one sequence needs has too few: who asks checks that."""
    wanted = [limits.most_pages(group.window) for group in groups]
    left = free - sum(n * group.page_bytes for n, group in zip(wanted, groups) if group.window is not None)
    each = sum(group.page_bytes for group in groups if group.window is None)
    fit = max(0, left) // each if each else max(wanted)
    return tuple(n if group.window is not None else min(n, fit) for n, group in zip(wanted, groups))


def give_memory(
    layers: Sequence[Module],
    groups: Sequence[LayerGroup],
    num_pages: Sequence[int],
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Allocate the pages of these layers."""
    number = {group.window: i for i, group in enumerate(groups)}
    for layer in layers:
        spec = remembered(layer)
        group = number[spec.window]
        layer.memory = LayerMemory(group, spec.allocate(num_pages[group], page_size, dtype, device))


def room_for_pages(device: torch.device, ranks: int) -> float:
    """Bytes that pages may take on this rank if nobody says how many. A GPU is this rank's own; the memory of a host is
    shared by its ranks, and by whatever else its user does."""
    if device.type != "cuda":
        return HOST_SHARE * (host_memory() or NO_LIMIT) / ranks
    free, _ = torch.cuda.mem_get_info(device)
    return GPU_SHARE * (free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
