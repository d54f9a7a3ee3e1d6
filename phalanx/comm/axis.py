"""Axis: one communicator as one rank sees it, with the collectives on plain tensors. Over an axis of size 1 each is the
identity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import PeerLost
from phalanx.comm.debug import Watch
from phalanx.comm.health.waits import timed


class Work:
    """A collective in flight. `wait()` returns its result; on a GPU the current stream waits, the host does not."""

    def __init__(
        self, result: Tensor, handle: Any = None, finish: Callable[[], None] | None = None, kept: Tensor | None = None
    ):
        """kept: what is sent, which must not be freed before it has gone."""
        self.result, self._handle, self._finish, self._kept = result, handle, finish, kept

    def over(self) -> bool:
        """Whether it is complete, without waiting."""
        return self._handle is None or self._handle.is_completed()

    def wait(self) -> Tensor:
        if self._handle is not None:
            try:
                self._handle.wait()
            except RuntimeError as error:
                raise PeerLost(
                    f"a collective failed, so another rank died or did not answer in time: {error}"
                ) from error
            self._handle = None
            self._kept = None
        if self._finish is not None:
            self._finish()
            self._finish = None
        return self.result


SMALL = 2**16  # bytes of one rank's slice


def _at_once(part: Tensor) -> bool:
    """Whether to use an all-to-all, with all exchanges in flight at once, instead of gloo's ring, which passes slices
    on one exchange after the other.

    For small slices on 4 ranks that takes a quarter of the time; for large ones it would only take memory.
    """
    return part.device.type == "cpu" and 0 < part.nbytes <= SMALL


def _all_gather(out: Tensor, x: Tensor, group: Any, async_op: bool) -> Any:
    if _at_once(x):
        each = x.reshape(1, -1).view(torch.uint8).repeat(out.numel() // x.numel(), 1)
        return dist.all_to_all_single(out.view(len(each), -1).view(torch.uint8), each, group=group, async_op=async_op)
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    return call(out, x, group=group, async_op=async_op)


def _reduce_scatter(out: Tensor, x: Tensor, group: Any, async_op: bool) -> Any:
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(out, x, group=group, async_op=async_op)


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source)


class Arriving(Protocol):
    """A gather or scatter in slices, so that a matmul can work on some while others travel."""

    def parts(self) -> Iterator[tuple[slice, Tensor]]: ...

    def wait(self) -> Tensor: ...


class Overlap(Protocol):
    """Exchanges that overlap with matmuls, through memory that the ranks share (symmetric.Symmetric)."""

    nbytes: int
    turn: int

    def fits(self, whole: int) -> bool: ...

    def take_turn(self) -> int: ...

    def back_to(self, turn: int) -> None: ...

    def pulled(self, x: Tensor) -> Arriving: ...

    def pushed(self, tokens: int, width: int, like: Tensor) -> Arriving: ...

    def rows(self, tokens: int, width: int, like: Tensor, back: bool) -> Any: ...


class PulledExchange(Protocol):
    """Shared memory of buckets (overlap.SharedExchange): weight shards are pulled from it, and gradient sums go through
    it."""

    parts: Any
    sums: Any
    nbytes: int


class GatheredParts:
    """The reference implementation of symmetric.PulledParts: gathers everything, then yields it as one slice."""

    def __init__(self, work: Work):
        self.work = work

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """(rows of the whole, their values), ready for the current stream."""
        whole = self.work.wait()
        yield slice(0, len(whole)), whole

    def wait(self) -> Tensor:
        return self.work.wait()


class ScatteredSums:
    """The reference implementation of symmetric.PushedParts: one slice to fill in, scattered as soon as it is
    filled."""

    def __init__(self, axis: Axis, tokens: int, width: int, like: Tensor, local: bool = False):
        self.axis, self.buffer, self.local = axis, like.new_empty(tokens, width), local

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """(rows of the product, where to write them); the caller must have written them when it asks for the next."""
        yield slice(0, len(self.buffer)), self.buffer
        self.work = (
            Work(self.axis.own_rows(self.buffer))
            if self.local
            else self.axis.reduce_scatter(self.buffer, async_op=True)
        )

    def wait(self) -> Tensor:
        """This rank's rows of the sum over ranks."""
        return self.work.wait()


class SwappedRows:
    """The reference implementation of symmetric.PushedRows: a slot for each rank, whether needed or not, carried by an
    all-to-all."""

    def __init__(self, axis: Axis, tokens: int, width: int, like: Tensor, local: bool = False):
        self.axis, self.tokens, self.local = axis, tokens, local
        self._buffer = like.new_zeros(axis.size * tokens, width)
        self.first = axis.index * tokens

    @property
    def addresses(self) -> Tensor:
        """(size,) int64: the address of this rank's slot on each rank, counted so that row `first` is where the slot
        starts."""
        whole = self._buffer
        distance = self.tokens * whole.shape[1] * whole.element_size()
        return torch.arange(self.axis.size, device=whole.device) * distance + (
            whole.data_ptr() - self.axis.index * distance
        )

    def part(self, rank: int) -> Tensor:
        """(tokens, width): this rank's slot on `rank`, to write to."""
        return self._buffer[rank * self.tokens : (rank + 1) * self.tokens]

    def fill(self, write: Callable[[Any], None]) -> SwappedRows:
        write(self)
        if not self.local:
            self._buffer = self.axis.all_to_all(self._buffer)
        elif self.axis.size > 1:
            mine = self.part(self.axis.index).clone()
            self._buffer.zero_()
            self.part(self.axis.index).copy_(mine)
        return self

    def wait(self) -> Tensor:
        """(size * tokens, width): what all ranks wrote for this one."""
        return self._buffer


class Axis:
    """`size` ranks, of which this one is number `index`; `ranks` are their numbers in the world."""

    def __init__(
        self, name: str, ranks: tuple[int, ...] = (0,), index: int = 0, group: Any = None, watch: Watch | None = None
    ):
        self.name, self.ranks, self.index, self.group = name, ranks, index, group
        self.size = len(ranks)
        self.watch = watch or Watch()
        self._title = f"{name} of {self.size} ranks from {ranks[0]}"
        self.memory: Overlap | None = None  # where set, matmuls overlap with their exchanges
        self.shared: PulledExchange | None = (
            None  # where set, what lies there is pulled by the others, and sums go through it
        )

    def _local(self, op: str, x: Tensor) -> bool:
        """Whether the call stays on this rank: size 1, or a test drops it."""
        if self.size == 1:
            return True
        if self.watch.on and self.watch.dropped(op, self.name, x.numel() * x.element_size()):
            return True
        self.watch.last.note(self._title, op, x.numel())
        return False

    def _repeated(self, x: Tensor) -> Tensor:
        """The stand-in for a gathered x when the call stays on this rank."""
        return x if self.size == 1 else x.repeat(self.size, *(1,) * (x.dim() - 1))

    def own_rows(self, x: Tensor) -> Tensor:
        """The stand-in for a scattered x when the call stays on this rank."""
        n = x.shape[0] // self.size
        return x if self.size == 1 else x[self.index * n : (self.index + 1) * n].clone()

    def _run(self, call: Callable[[], Any]) -> Any:
        waits = self.watch.waits
        try:
            return timed(waits.around(call), waits) if waits.on else call()
        except RuntimeError as error:
            ranks = ", ".join(map(str, self.ranks))
            raise PeerLost(
                f"a collective over {self.name} (ranks {ranks}) failed, so one of them died or timed out: {error}"
            ) from error

    def all_reduce(self, x: Tensor, op: str = "sum", async_op: bool = False) -> Work:
        """Sum (or max) of x over the axis, in place."""
        if self._local("all_reduce", x):
            return Work(x)
        kind = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
        handle = self._run(lambda: dist.all_reduce(x, op=kind, group=self.group, async_op=async_op))
        return Work(x, handle)

    def all_gather(self, x: Tensor, async_op: bool = False) -> Work:
        """(n, ...) on each rank -> (size * n, ...), in rank order along dim 0."""
        if self._local("all_gather", x):
            return Work(self._repeated(x))
        x = x.contiguous()
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        return Work(out, self._run(lambda: _all_gather(out, x, self.group, async_op)))

    def gather(self, x: Tensor) -> Arriving:
        """As all_gather, in slices that a matmul can use as they arrive."""
        memory = self.memory
        if memory is None or not memory.fits(x.nbytes * self.size):
            return GatheredParts(self.all_gather(x, async_op=True))
        return GatheredParts(Work(self._repeated(x))) if self._local("all_gather", x) else memory.pulled(x)

    def scatter(self, tokens: int, width: int, like: Tensor) -> Arriving:
        """As reduce_scatter of a matmul's output (tokens, width) with the dtype of `like`, in slices that are sent as
        they are filled in."""
        memory = self.memory
        if memory is None or not memory.fits(tokens * width * like.element_size()):
            return ScatteredSums(self, tokens, width, like)
        return (
            ScatteredSums(self, tokens, width, like, local=True)
            if self._local("reduce_scatter", like)
            else memory.pushed(tokens, width, like)
        )

    def push(self, tokens: int, width: int, like: Tensor, back: bool, share: float = 1.0) -> Any:
        """(size * tokens, width) with the dtype of `like`: each rank writes its `tokens` rows on all ranks, or those
        rows that a rank needs.

        share   the fraction of rows that a rank needs, as a forecast may assume
        Returns SwappedRows, or the overlap's equivalent (symmetric.PushedRows).
        """
        memory, rows = self.memory, torch.empty(tokens, width, dtype=like.dtype, device="meta")
        if self._local("push", rows):
            return SwappedRows(self, tokens, width, like, local=True)
        if memory is None or not memory.fits(rows.nbytes * self.size):
            return SwappedRows(self, tokens, width, like)
        return memory.rows(tokens, width, like, back)

    def all_gather_into(self, out: Tensor, async_op: bool = False) -> Work:
        """Fill `out` (size * n,) from each rank's own n elements of it, in place."""
        n = out.numel() // self.size
        own = out[self.index * n : (self.index + 1) * n]
        if self._local("all_gather", own):
            return Work(out)
        if self._pulls(own):
            return Work(out, self._run(lambda: self.shared.parts.pull(out, own)))  # type: ignore[union-attr]
        if out.device.type == "cpu":  # gloo needs separate input and output
            own = own.clone()
        return Work(out, self._run(lambda: _all_gather(out, own, self.group, async_op)))

    def all_gather_to(self, out: Tensor, own: Tensor, async_op: bool = False) -> Work:
        """Fill `out` (size * n,) from each rank's `own` (n,), which is stored elsewhere."""
        if self._local("all_gather", own):
            out.view(self.size, -1).copy_(own)
            return Work(out)
        if self._pulls(own):
            return Work(out, self._run(lambda: self.shared.parts.pull(out, own)))  # type: ignore[union-attr]
        return Work(out, self._run(lambda: _all_gather(out, own, self.group, async_op)))

    def _pulls(self, own: Tensor) -> bool:
        return self.shared is not None and self.shared.parts is not None and self.shared.parts.holds(own)

    def reduce_scatter(self, x: Tensor, async_op: bool = False) -> Work:
        """(size * n, ...) on each rank -> (n, ...): this rank's slice of the sum."""
        n = x.shape[0] // self.size
        if self._local("reduce_scatter", x):
            return Work(self.own_rows(x))
        x = x.contiguous()
        out = x.new_empty(n, *x.shape[1:])
        if not _at_once(out):
            return Work(out, self._run(lambda: _reduce_scatter(out, x, self.group, async_op)))
        parts = torch.empty_like(x)  # added in rank order, as symmetric.PushedParts does
        handle = self._run(lambda: dist.all_to_all_single(parts, x, group=self.group, async_op=async_op))
        return Work(out, handle, finish=lambda: _copy(out, parts.view(self.size, *out.shape).sum(0)))

    def reduce_scatter_within(self, x: Tensor, async_op: bool = False, onto: Tensor | None = None) -> Work:
        """Sum of x (size * n,) over the axis. Each rank gets its own n elements, in place, or added to `onto` (n,); the
        result is one or the other. The rest of x is undefined."""
        n = x.numel() // self.size
        own = x[self.index * n : (self.index + 1) * n]
        if self._local("reduce_scatter", x):
            return Work(own)
        sums = None if self.shared is None else self.shared.sums
        if sums is not None and async_op:
            out, add = (own, False) if onto is None else (onto, True)
            return Work(out, self._run(lambda: sums.reduce(x, out, add)))
        if x.device.type != "cpu":
            return Work(own, self._run(lambda: _reduce_scatter(own, x, self.group, async_op)))
        output = torch.empty_like(own)  # gloo needs separate input and output
        handle = self._run(lambda: _reduce_scatter(output, x, self.group, async_op))
        work = Work(own, handle, finish=lambda: _copy(own, output))
        return work if async_op else Work(work.wait())

    def all_to_all(self, x: Tensor, send: Sequence[int] | None = None, receive: Sequence[int] | None = None) -> Tensor:
        """Rows of x, divided into slices of `send` rows for each rank -> the slices of `receive` rows from each rank,
        in rank order.

        Without sizes all slices are equal.
        """
        total = len(x) if receive is None else sum(receive)
        if self._local("all_to_all", x):
            return x if self.size == 1 else x.new_zeros(total, *x.shape[1:])
        x = x.contiguous()
        out = x.new_empty(total, *x.shape[1:])
        to, source = None if send is None else list(send), None if receive is None else list(receive)
        self._run(lambda: dist.all_to_all_single(out, x, source, to, group=self.group))
        return out

    def post_all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Work:
        """As all_to_all, without waiting."""
        if self._local("all_to_all", x):
            return Work(x if self.size == 1 else x.new_zeros(sum(receive), *x.shape[1:]))
        x = x.contiguous()
        out = x.new_empty(sum(receive), *x.shape[1:])
        to, source = list(send), list(receive)
        call = partial(dist.all_to_all_single, out, x, source, to, group=self.group, async_op=True)
        return Work(out, self._run(call), kept=x)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """x of rank number `source` in the axis, in place."""
        if not self._local("broadcast", x):
            self._run(lambda: dist.broadcast(x, src=self.ranks[source], group=self.group))
        return x

    def post_broadcast(self, x: Tensor, source: int) -> Work:
        """As broadcast, without waiting: for rank number `source`, which has x already. The others receive it by
        `broadcast`, when they need it."""
        if self._local("broadcast", x):
            return Work(x)
        return Work(x, self._run(lambda: dist.broadcast(x, src=self.ranks[source], group=self.group, async_op=True)))

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text, in rank order (as bytes in tensors: nothing is unpickled)."""
        if self.size == 1:
            return [text]
        device = self.device
        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8).to(device)
        sizes = self.all_gather(torch.tensor([len(text.encode())], device=device)).wait().tolist()
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8, device=device)
        padded[: min(len(data), len(padded))] = data[: len(padded)]
        rows = self.all_gather(padded).wait().view(self.size, -1).cpu()
        return [row[:n].numpy().tobytes().decode() for row, n in zip(rows, sizes)]

    @property
    def device(self) -> torch.device:
        """The device on which this axis' group communicates."""
        nccl = self.size > 1 and dist.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def barrier(self) -> None:
        """Wait until every rank is here. Not watched: it moves no data, and what dropping it would change depends on
        timing."""
        with self.watch.paused():
            self.all_reduce(torch.zeros(1, device=self.device)).wait().cpu()  # on a GPU the host waits too

    def send(self, x: Tensor, to: int) -> Work:
        """Post the send of x to the axis' rank number `to`."""
        if self._local("send", x):
            return Work(x)
        return Work(x, self._run(lambda: dist.isend(x, dst=self.ranks[to], group=self.group)))

    def recv(self, out: Tensor, source: int) -> Work:
        """Post the receive of `out` from the axis' rank number `source`."""
        if self._drops_sends():
            return Work(out.zero_())
        return Work(out, self._run(lambda: dist.irecv(out, src=self.ranks[source], group=self.group)))

    def _drops_sends(self) -> bool:
        drop = self.watch.drop if self.watch.on else None
        return drop is not None and (drop.op, drop.axis) == ("send", self.name)

    def hop(self, x: Tensor | None, to: int, out: Tensor | None, source: int) -> Work:
        """Post together the send of x to the axis' rank number `to` and the receive of `out` from its rank number
        `source`; None: nothing goes that way. All ranks of the axis must do so, in the same order. The result is
        `out`."""
        nothing = torch.empty(0)
        if self._local("hop", nothing if x is None else x):
            return Work(nothing if out is None else out.zero_())
        posts = [] if x is None else [dist.P2POp(dist.isend, x, self.ranks[to], self.group)]
        posts += [] if out is None else [dist.P2POp(dist.irecv, out, self.ranks[source], self.group)]
        return Work(nothing if out is None else out, self._posted(posts))

    def trade(self, gives: Sequence[tuple[Tensor, int]], takes: Sequence[tuple[Tensor, int]]) -> Work:
        """Post together the sends of tensors to the axis' ranks of these numbers and the receives from them: one call
        of the communication library, which waits for none of them alone. A rank may send another several, which that
        one receives in the same order; one without any may leave the call out, if all have met in a collective of this
        axis before (NCCL opens its connections then)."""
        kept = [(x, to) for x, to in gives if not self._local("send", x)]
        if self._drops_sends():
            for out, _ in takes:
                out.zero_()
            takes = []
        posts = [dist.P2POp(dist.isend, x, self.ranks[to], self.group) for x, to in kept]
        posts += [dist.P2POp(dist.irecv, out, self.ranks[source], self.group) for out, source in takes]
        return Work(torch.empty(0), self._posted(posts))

    def _posted(self, posts: list[Any]) -> Handles:
        return Handles(self._run(lambda: dist.batch_isend_irecv(posts)) if posts else [])


class Handles:
    """The handles of several posts, as one."""

    def __init__(self, handles: Sequence[Any]):
        self.handles = handles

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()

    def is_completed(self) -> bool:
        return all(handle.is_completed() for handle in self.handles)


@dataclass(frozen=True)
class ModelAxes:
    """The axes that modules communicate over.

    tp, cp            of the dense view
    heads, keys       of cp: the neighbours that exchange heads, and the ranks that read each other's keys
    groups            heads and keys for fewer neighbours, who share a document, by their number
    batch_group       tp x cp, the ranks that share a micro-batch
    media             batch_group x a part of dp, the ranks that compute each other's images (layout.media_group)
    ep, etp, experts  of the expert view; `experts` is both together
    """

    tp: Axis = field(default_factory=lambda: Axis("tp"))
    ep: Axis = field(default_factory=lambda: Axis("ep"))
    etp: Axis = field(default_factory=lambda: Axis("etp"))
    experts: Axis = field(default_factory=lambda: Axis("ep x etp"))
    cp: Axis = field(default_factory=lambda: Axis("cp"))
    heads: Axis = field(default_factory=lambda: Axis("cp heads"))
    keys: Axis = field(default_factory=lambda: Axis("cp keys"))
    batch_group: Axis = field(default_factory=lambda: Axis("tp x cp"))
    media: Axis = field(default_factory=lambda: Axis("tp x cp x dp"))
    groups: Mapping[int, tuple[Axis, Axis]] = field(default_factory=dict)

    def among(self, degree: int) -> ModelAxes:
        """The same, with the heads and keys of the `degree` neighbours of cp that share a document."""
        if degree == self.cp.size:
            return self
        heads, keys = self.groups.get(degree) or (Axis("cp heads"), Axis("cp keys"))
        return replace(self, heads=heads, keys=keys)
