"""Gathers boxes of global tensors on the ranks that write them, one tensor at a time on each, so no rank ever holds the
whole model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from math import prod

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.boxes import Item
from phalanx.checkpoint.exchange import Message, Offer, carry
from phalanx.checkpoint.tensors import Entry, natural
from phalanx.comm.axis import Axis
from phalanx.layout.box import Box


@dataclass(frozen=True)
class Job:
    """A global tensor, and which rank has which box of it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[int, Box], ...]

    @property
    def size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class File:
    """Tensors that one rank writes to one file, in this order.

    folder  of the checkpoint, in which it lies
    names   what the tensors are called in it; empty: as the jobs are
    local   whether the writer has all of them whole, so nothing is gathered
    """

    name: str
    writer: int
    jobs: tuple[Job, ...]
    folder: str = "weights"
    names: tuple[str, ...] = ()
    local: bool = False

    @property
    def size(self) -> int:
        return sum(job.size for job in self.jobs)


def plan_files(held: list[list[Offer]], max_bytes: int) -> list[File]:
    """Files of a model for which rank r offers the boxes held[r]: the same on every rank, and the same files in every
    layout.

    Raises CheckpointError if the offers do not cover each tensor exactly.
    """
    jobs = _jobs(held)
    groups: list[list[Job]] = [[]]
    size = 0
    for job in jobs:
        if groups[-1] and size + job.size > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(job)
        size += job.size
    count, world = len(groups), len(held)
    names = (
        ["model.safetensors"] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    )
    return [File(names[i], i * world // count if count < world else i % world, tuple(g)) for i, g in enumerate(groups)]


def written_where_whole(files: Sequence[File], whole: Sequence[Sequence[int]]) -> list[File]:
    """The same files, each written by a rank that has all of its tensors whole, if there is one: of these ranks by the
    one with the fewest bytes so far. whole[r]: the numbers of the files that rank r has so."""
    has: list[list[int]] = [[] for _ in files]
    for rank, numbers in enumerate(whole):
        for number in numbers:
            has[number].append(rank)
    bytes_of, found, world = [0] * len(whole), list[File](), len(whole)
    for file, ranks in zip(files, has):
        # of equals the planned writer or the next one after it: few files are written on different hosts
        writer = min(ranks, key=lambda r: (bytes_of[r], (r - file.writer) % world), default=file.writer)
        bytes_of[writer] += file.size
        found.append(replace(file, writer=writer, local=bool(ranks)))
    return found


def plan_whole(tensors: Iterable[Entry], max_bytes: int) -> list[File]:
    """The files of whole tensors held by one process."""
    return plan_files([[Offer(0, n, t[0], t[1], Box.full(t[1]), t[2]) for n, t in enumerate(tensors)]], max_bytes)


def _jobs(held: list[list[Offer]]) -> list[Job]:
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    parts: dict[str, list[tuple[int, Box]]] = {}
    for offer in (o for rank in held for o in rank):
        name, shape = offer.name, offer.shape
        dtypes[name] = offer.dtype
        if shapes.setdefault(name, shape) != shape:
            raise CheckpointError(f"ranks disagree about the shape of {name}: {shapes[name]} and {shape}")
        parts.setdefault(name, []).append((offer.rank, offer.box))
    for name, boxes in parts.items():
        have = sum(box.numel for _, box in boxes)
        if have != prod(shapes[name]):
            raise CheckpointError(f"the ranks offer {have} elements of {name}, which has {prod(shapes[name])}")
    return [Job(name, shapes[name], dtypes[name], tuple(sorted(parts[name]))) for name in sorted(parts, key=natural)]


def gather(axis: Axis, files: list[File], items: list[Item], device: torch.device) -> Iterator[tuple[File, Tensor]]:
    """(file, whole tensor) for each tensor of the files that this rank writes and that are not local, in their order;
    every rank must iterate to the end.

    In each round every writer receives its next tensor.
    """
    mine = {(i.name, i.box): i.view for i in items}
    split = [f for f in files if not f.local]
    queues = [[(f, job) for f in split if f.writer == rank for job in f.jobs] for rank in range(axis.size)]
    for round in zip_longest(*queues):
        yield from _round(axis, [entry for entry in round if entry is not None], mine, device)


def _round(
    axis: Axis, entries: list[tuple[File, Job]], mine: dict[tuple[str, Box], Tensor], device: torch.device
) -> Iterator[tuple[File, Tensor]]:
    me, messages = axis.index, list[Message]()
    ready: list[tuple[File, Tensor]] = []
    for file, job in entries:
        whole = torch.empty(job.shape, dtype=job.dtype, device=device) if file.writer == me else None
        if whole is not None:
            ready.append((file, whole))
        for source, box in job.parts:
            give = mine[job.name, box] if source == me else None
            into = whole[box.slices()] if whole is not None else None
            messages.append(Message(source, file.writer, job.dtype, give, into))
    carry(axis, messages, device)
    yield from ready
