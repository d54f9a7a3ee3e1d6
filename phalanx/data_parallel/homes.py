"""MatrixHome: the whole matrices that one rank of a stage updates, and their way there and back.

Buckets of such matrices are reduced like all others; their gradients are then sharded over all ranks that sum them,
whatever the ZeRO stage (layout.shards). As soon as those of a bucket are complete, while backward goes on with earlier
layers, an all-to-all over the stage begins: each rank sends the gradient elements that it has to the homes of their
matrices, in the master dtype and as they are; what they are to be clipped by is known later, and each home multiplies
by it. Whoever may still change gradients after backward (a loop of one's own) has them sent at the update instead.

The home then updates master and state, which no other rank has, bucket by bucket in the order of forward, but for the
first, whose gradients come last: it is the second. The weights of one go back by another all-to-all, in their own
dtype, while those of the next are updated; from the ranks that store them they are gathered as after any update, while
the one after that is updated. The last bucket is still on its way when the update is over, and arrives while the next
forward computes the first layers (`reached`). With n elements on a stage of R ranks, a rank sends at most about n / R
gradients, and as many weights for each tp rank that holds a copy. Nothing here waits for the device.

Among matrices that cost the same, homes are where most of the gradient is. A matrix that one rank has whole stays
there: it is updated in place. Others lie in the order in which they arrive: where ranks have whole rows, as without tp,
gradients are read where they arrived, and updated weights are written into their message.

a bucket:  resting -- leave --> coming -- bring_gradients --> here -- (update), send_weights --> going -- (its weights
are placed) --> stored -- (they are gathered) --> resting
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.base.align import ELEMENTS, room
from phalanx.base.dataclass import dataclass
from phalanx.base.dtypes import Precision
from phalanx.comm.axis import Work
from phalanx.comm.mesh import Mesh
from phalanx.data_parallel.flat import FlatBucket
from phalanx.data_parallel.storage import FullPrecision, write_range
from phalanx.layout.box import Box
from phalanx.layout.buckets import Slot
from phalanx.layout.homes import home_bucket, homes_of, lies_whole, nearer
from phalanx.layout.param import ParamSpec, Piece
from phalanx.layout.strided import boxes_in


class Announced(NamedTuple):
    """What ranks announce about a box of a matrix. counts: the rank's gradient counts (others hold replicas of it).
    wide: it takes weights in the master dtype and casts them itself. bucket: the one that holds it."""

    matrix: int
    start: list[int]
    stop: list[int]
    counts: bool
    wide: bool
    bucket: int


@dataclass(frozen=True)
class LocalBox:
    """A box of a matrix in this rank's buckets: what is announced about it, its gradient, and where its weights go.
    whole: it is all of the matrix, and lies as at home."""

    said: Announced
    grad: Tensor
    weight: Tensor
    whole: bool


@dataclass(frozen=True)
class MatrixExchange:
    """One all-to-all over the stage: tensors to send and to fill, each in the order of ranks; numbers of elements to
    and from each rank."""

    send: list[Tensor]
    receive: list[Tensor]
    sizes_to: list[int]
    sizes_from: list[int]

    @staticmethod
    def of(send: list[list[Tensor]], receive: list[list[Tensor]]) -> MatrixExchange:
        """Given by rank."""
        return MatrixExchange(
            [x for of_rank in send for x in of_rank],
            [x for of_rank in receive for x in of_rank],
            [sum(x.numel() for x in of_rank) for of_rank in send],
            [sum(x.numel() for x in of_rank) for of_rank in receive],
        )


@dataclass
class UpdatedBucket:
    """Matrices at home here of the ranks' bucket `bucket`, while they are updated. What travels of them: elements
    `start` .. of the home's bucket, gradient (n,) and, if the update writes it, message (n,), the weights. written:
    whether the update writes weights."""

    bucket: int
    start: int
    gradient: Tensor
    message: Tensor | None = None
    written: bool = False

    def within(self, slot: Slot) -> slice:
        return slice(slot.offset - self.start, slot.offset - self.start + room(slot.numel, ELEMENTS))


class MatrixHome:
    """This rank as a home.

    bucket   where its matrices are in the flat tensors here, each whole, in global orientation
    master   (numel,) in the master dtype
    lo, hi, own   as in a FlatBucket whose elements are all this rank's
    order    the numbers of the ranks' buckets that hold matrices, as they are updated: the same on all ranks
    patient  whether weights may arrive in the next forward; not so if they are quantized at the end of a step
    """

    def __init__(
        self,
        matrices: Sequence[ParamSpec],
        flat: Sequence[FlatBucket],
        mesh: Mesh,
        precision: Precision,
        cost: Callable[[ParamSpec], float],
    ):
        """`flat`: this rank's buckets of the matrices; `cost` of an update of a matrix."""
        self.mesh, self.stage, self.flat = mesh, mesh.stage, flat
        self._coming: dict[int, Work] = {}  # gradients, by bucket
        self._going: list[tuple[int, list[tuple[MatrixExchange, Work]]]] = []  # weights of buckets
        self._stored: list[int] = []  # buckets whose weights are to be gathered
        self._here: UpdatedBucket | None = None
        here = self._boxes(matrices)
        said = [
            [Announced(*each) for each in json.loads(text)]
            for text in self.stage.all_gather_text(json.dumps([b.said for b in here]))
        ]
        homes = self._assigned(matrices, said, cost)
        of_matrix = Counter(s.matrix for of_rank in said for s in of_rank)
        alone = (b for b in here if of_matrix[b.said.matrix] == 1 and b.whole)
        stays = {b.said.matrix: b for b in alone if homes[b.said.matrix] == self.stage.index}
        everything = sorted((s for of_rank in said for s in of_rank), key=lambda s: (s.bucket, s.matrix not in stays))
        mine = [i for i in dict.fromkeys(s.matrix for s in everything) if homes[i] == self.stage.index]
        self.bucket = home_bucket([matrices[i] for i in mine])
        self.lo, self.hi, self.own = 0, self.bucket.numel, (0, self.bucket.numel)
        self.values_dtype = precision.master
        self.master = torch.zeros(self.hi, dtype=precision.master, device=mesh.device)
        slots = dict(zip(mine, self.bucket.slots))
        self.order = update_order({s.bucket for s in everything})
        self.patient = all(isinstance(f.storage, FullPrecision) for f in flat)
        self._slots: dict[int, list[Slot]] = {bucket: [] for bucket in self.order}
        for number, bucket in dict.fromkeys((s.matrix, s.bucket) for s in everything if s.matrix in slots):
            self._slots[bucket].append(slots[number])
        if sum(map(len, self._slots.values())) != homes.count(self.stage.index):
            raise RuntimeError("a matrix lies in several buckets, which would be updated one after the other")
        self._stays = {slots[i].offset: box for i, box in stays.items()}
        self._travel = {
            bucket: [slot for slot in of_bucket if slot.offset not in self._stays]
            for bucket, of_bucket in self._slots.items()
        }

        def whole(announced: Announced) -> Tensor:
            slot, (piece,) = slots[announced.matrix], matrices[announced.matrix].pieces
            values = self.master[slot.offset : slot.offset + slot.numel].view(slot.spec.shape)
            return values[Box(tuple(announced.start), tuple(announced.stop)).within(piece.box)]

        self._gradients: dict[int, MatrixExchange] = {}
        self._weights: dict[int, list[tuple[MatrixExchange, torch.dtype]]] = {}
        for bucket in self.order:
            boxes = [b for b in here if b.said.bucket == bucket and b.said.matrix not in stays]
            to_home = [[b for b in boxes if homes[b.said.matrix] == home] for home in range(self.stage.size)]
            at_home = [
                [s for s in of_rank if s.matrix in slots and s.bucket == bucket and s.matrix not in stays]
                for of_rank in said
            ]
            self._gradients[bucket] = MatrixExchange.of(
                [[b.grad for b in of_home if b.said.counts] for of_home in to_home],
                [[whole(s) for s in of_rank if s.counts] for of_rank in at_home],  # as they will lie in the gradient
            )
            self._weights[bucket] = [
                (
                    MatrixExchange.of(
                        [[whole(s) for s in of_rank if s.wide == wide] for of_rank in at_home],
                        [[b.weight for b in of_home if b.said.wide == wide] for of_home in to_home],
                    ),
                    precision.master if wide else precision.compute,
                )
                for wide in sorted({s.wide for of_rank in said for s in of_rank if s.bucket == bucket})
            ]
            brought, wanted = sum(self._gradients[bucket].sizes_from), sum(s.numel for s in self._travel[bucket])
            if brought != wanted:
                raise RuntimeError(f"of {wanted} elements of bucket {bucket}'s matrices ranks have {brought}")

    def _assigned(
        self, matrices: Sequence[ParamSpec], said: Sequence[Sequence[Announced]], cost: Callable[[ParamSpec], float]
    ) -> list[int]:
        """The home of each matrix: among matrices of a bucket that cost the same, near to those who have most of them,
        so that little travels, and each rank has as much to do in a bucket as without that."""
        have, bucket = [Counter[int]() for _ in matrices], dict[int, int]()
        for rank, of_rank in enumerate(said):
            for each in of_rank:
                have[each.matrix][rank] += prod(b - a for a, b in zip(each.start, each.stop))
                bucket[each.matrix] = each.bucket
        near = [max(ranks.items(), key=lambda pair: (pair[1], -pair[0]), default=(0, 0)) for ranks in have]
        kinds = [(bucket.get(i), cost(matrix)) for i, matrix in enumerate(matrices)]
        return nearer(homes_of(matrices, self.stage.size, cost), kinds, near)

    def _boxes(self, matrices: Sequence[ParamSpec]) -> list[LocalBox]:
        numbers = {(m.pieces[0].name, _which(m.pieces[0].box)): i for i, m in enumerate(matrices)}
        found = []
        for f in self.flat:
            wide = f.storage.separate_masters
            for of_piece in boxes_in(f.bucket, f.lo, f.hi):
                counts = self._counts(of_piece.piece)
                for part in of_piece.matrices():
                    number = numbers[part.piece.name, _which(part.box)]
                    said = Announced(number, [*part.box.start], [*part.box.stop], counts, wide, f.bucket.id)
                    views = part.of(f.own_grad, f.lo), part.of(f.master, f.lo)
                    found.append(LocalBox(said, *views, lies_whole(part)))
        return found

    def _counts(self, piece: Piece) -> bool:
        """Whether this rank's copy is the one whose gradient is sent; each stage decides for itself."""
        grid, at = self.mesh.grid, self.mesh.at
        return all(r.axis == "pp" or grid.index(at, r.axis) == r.members[0] for r in piece.replicas)

    def write(self, first: int, values: Tensor) -> None:
        """Set masters of elements `first` .. of the bucket."""
        write_range(self.master, 0, first, values)

    def slots(self, bucket: int) -> list[Slot]:
        """The matrices of one of the ranks' buckets that are at home here."""
        return self._slots[bucket]

    def leave(self, bucket: int) -> None:
        """Start collecting the gradients of a bucket's matrices, which are complete; those in the bucket may still be
        read. If backward is repeated, the last time counts."""
        earlier = self._coming.pop(bucket, None)
        if earlier is not None:
            earlier.wait()
        self._coming[bucket] = self._posted(self._gradients[bucket], self.values_dtype)

    def begin(self) -> None:
        """The same of all buckets that have not left yet."""
        for bucket in self.order:
            if bucket not in self._coming:
                self.leave(bucket)

    def bring_gradients(self, bucket: int) -> None:
        """Wait for the gradients of a bucket's matrices at home here."""
        arrived, places = self._coming.pop(bucket).wait(), self._gradients[bucket].receive
        start, stop = extent(self._travel[bucket])
        if not in_order(places, start, stop):
            whole = arrived.new_zeros(stop - start)
            place_all(parts_of(arrived, places), [within(whole, start, x) for x in places])
            arrived = whole
        self._here = UpdatedBucket(bucket, start, arrived)

    def gradient(self, slot: Slot) -> Tensor:
        """As HomeExchange.gradient."""
        stays = self._stays.get(slot.offset)
        return self._open.gradient[self._open.within(slot)] if stays is None else stays.grad.view(-1)

    def weights(self, slot: Slot) -> Tensor | None:
        """As HomeExchange.weights."""
        here, stays = self._open, self._stays.get(slot.offset)
        here.written = True
        if stays is not None:
            return stays.weight.view(-1)
        ((transfer, dtype), *others) = self._weights[here.bucket]
        if others or not in_order(transfer.send, *extent(self._travel[here.bucket])):
            return None
        if here.message is None:
            here.message = torch.empty_like(here.gradient, dtype=dtype)
        return here.message[here.within(slot)]

    def send_weights(self, bucket: int) -> None:
        """Start sending the weights of a bucket's matrices from all homes to the ranks that store them, and set their
        gradients to zero if they were brought. Those of the bucket before it have had time to arrive."""
        here, self._here = self._here, None
        if here is None or not here.written:
            staying = [(slot, self._stays[slot.offset]) for slot in self.slots(bucket) if slot.offset in self._stays]
            masters = [self.master[slot.offset : slot.offset + slot.numel] for slot, _ in staying]
            place_all(masters, [box.weight.view(-1) for _, box in staying])
        message = None if here is None else here.message
        transfers = [(transfer, self._posted(transfer, dtype, message)) for transfer, dtype in self._weights[bucket]]
        self._going.append((bucket, [each for each in transfers if not self._over(*each)]))
        for f in self._of(bucket) if here is not None else ():
            f.own_grad.zero_()
        if len(self._going) > 1:
            self._store()

    @property
    def _open(self) -> UpdatedBucket:
        if self._here is None:
            raise RuntimeError("no bucket is being updated: its gradients are to be brought first")
        return self._here

    def _over(self, transfer: MatrixExchange, work: Work) -> bool:
        """Whether weights are there at once, and are placed."""
        if work.over():
            place_all(parts_of(work.wait(), transfer.receive), transfer.receive)
            return True
        return False

    def gather(self) -> None:
        """The update is over: start gathering what has arrived."""
        while self._stored:
            self._gather()
        if not self.patient:
            self.finish()

    def reached(self, bucket: int) -> None:
        """Forward is about to use a bucket of this rank. What is still on its way is there by the time of the second of
        those with matrices, and has all those after it to be gathered."""
        if self._going and bucket in self.order and (bucket != min(self.order) or bucket == self._going[-1][0]):
            self.finish()

    def fetched(self, bucket: int) -> None:
        """A bucket of this rank is about to be fetched from the ranks that store it (ZeRO-3)."""
        if any(bucket == number for number, _ in self._going):
            self.finish()

    def finish(self) -> None:
        """Wait for the weights that other homes send to this rank, and start gathering them."""
        while self._going:
            self._store()
        while self._stored:
            self._gather()

    def _store(self) -> None:
        """Place the weights that were sent first, and start gathering those before them."""
        bucket, transfers = self._going.pop(0)
        for transfer, work in transfers:
            place_all(parts_of(work.wait(), transfer.receive), transfer.receive)
        for f in self._of(bucket):
            f.storage.replaced()
            f.storage.gather_groups()
        self._stored.append(bucket)
        if len(self._stored) > 1:
            self._gather()

    def _gather(self) -> None:
        for f in self._of(self._stored.pop(0)):
            f.storage.gather_parts()

    def _of(self, bucket: int) -> list[FlatBucket]:
        return [f for f in self.flat if f.bucket.id == bucket]

    @torch.no_grad()
    def _posted(self, transfer: MatrixExchange, dtype: torch.dtype, packed: Tensor | None = None) -> Work:
        """Start the exchange. packed: all that is to be sent, if it lies there already."""
        if packed is None:
            packed = torch.empty(sum(transfer.sizes_to), dtype=dtype, device=self.mesh.device)
            into = parts_of(packed, transfer.send)
            place_all(transfer.send, [to.view(x.shape) for to, x in zip(into, transfer.send)])
        return self.stage.post_all_to_all(packed, transfer.sizes_to, transfer.sizes_from)


@torch.no_grad()
def place_all(values: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    if places:
        torch._foreach_copy_(list(places), [x.view(to.shape) for x, to in zip(values, places)])


def parts_of(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """A flat tensor (numel,) cut into as many elements as each of these has."""
    return list(flat.split([x.numel() for x in like])) if like else []


def extent(slots: Sequence[Slot]) -> tuple[int, int]:
    """The elements of a bucket from the first of these slots to the end of the last."""
    return (slots[0].offset, slots[-1].offset + room(slots[-1].numel, ELEMENTS)) if slots else (0, 0)


def in_order(views: Iterable[Tensor], start: int, stop: int) -> bool:
    """Whether these views of a flat tensor are its elements start..stop, one after the other and without a gap."""
    for view in views:
        if not view.is_contiguous() or view.storage_offset() != start:
            return False
        start += view.numel()
    return start == stop


def within(flat: Tensor, start: int, view: Tensor) -> Tensor:
    """The same elements as the view of a flat tensor has, of one that begins with its element number `start`."""
    return flat.as_strided(view.shape, view.stride(), view.storage_offset() - start)


def update_order(buckets: Iterable[int]) -> list[int]:
    """That of forward, in which weights are needed, but for the first bucket: it is the second, since its gradients are
    complete last."""
    found = sorted(buckets)
    return [*found[1:2], *found[:1], *found[2:]]


def _which(box: Box) -> tuple[int, ...]:
    """The index of the matrix in its stack."""
    return box.start[: max(0, len(box.start) - 2)]
