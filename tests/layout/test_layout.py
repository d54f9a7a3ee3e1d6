"""Boxes, grids, stage cuts and buckets against brute force over everything small enough to list."""

from __future__ import annotations

import itertools
import random
from itertools import combinations
from math import prod

import numpy as np
import pytest

from phalanx.base.align import ELEMENTS
from phalanx.layout.box import Box, cut, flat_range_boxes
from phalanx.layout.buckets import cut_segments, make_buckets, piece_ranges, replica_ranges
from phalanx.layout.grid import Coords, Grid
from phalanx.layout.param import ParamSpec, Piece, Replica
from phalanx.layout.stages import cut_stages, cut_virtual_stages, given_stages
from phalanx.layout.transfer import NotCovered, transfers
from phalanx.nn.initial import ZEROS


@pytest.mark.parametrize("length, parts", itertools.product((0, 1, 2, 7, 12, 131), (1, 2, 3, 5, 8)))
def test_cut(length, parts):
    """The runs follow each other from 0 to length, differ by at most one, the longer first."""
    runs = cut(length, parts)
    assert [a for a, _ in runs] + [length] == [0] + [b for _, b in runs]
    sizes = [b - a for a, b in runs]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def random_box(pick: random.Random, shape: tuple[int, ...]) -> Box:
    start = tuple(pick.randint(0, n) for n in shape)
    return Box(start, tuple(pick.randint(a, n) for a, n in zip(start, shape)))


@pytest.mark.parametrize("number", range(50))
def test_boxes(number):
    """Truth: sets of elements."""
    pick = random.Random(number)
    shape = tuple(pick.randint(1, 5) for _ in range(number % 3 + 1))
    elements = np.arange(prod(shape)).reshape(shape)
    a, b = random_box(pick, shape), random_box(pick, shape)
    inside = lambda box: set(elements[box.slices()].ravel().tolist())  # noqa: E731
    both = a.intersect(b)
    assert inside(both) == inside(a) & inside(b)
    assert (
        both.empty == (not inside(both)) and both.numel == len(inside(both)) and a.shape == elements[a.slices()].shape
    )
    if not both.empty:
        assert (elements[a.slices()][both.within(a)] == elements[both.slices()]).all()
    assert inside(Box.full(shape)) == set(elements.ravel().tolist())


@pytest.mark.parametrize("number", range(20))
def test_transfers_make_up_what_is_wanted(number):
    """Holders that tile a tensor: every element of a wanted box comes once, from who has it. One holder less is
    noticed."""
    pick = random.Random(number)
    shape = tuple(pick.randint(2, 6) for _ in range(number % 3 + 1))
    elements = np.arange(prod(shape)).reshape(shape)
    cuts = [cut(n, pick.randint(1, n)) for n in shape]
    tiles = [Box(tuple(a for a, _ in corner), tuple(b for _, b in corner)) for corner in itertools.product(*cuts)]
    holders = [(n, tile) for n, tile in enumerate(tiles)]
    wanted = random_box(pick, shape)
    got = np.full(wanted.shape, -1)
    for t in transfers(wanted, holders):
        assert (got[t.target] == -1).all()
        got[t.target] = elements[tiles[t.holder].slices()][t.source]
    assert (got == elements[wanted.slices()]).all()
    whole = Box.full(shape)
    with pytest.raises(NotCovered, match=f"{prod(shape) - tiles[0].numel} of the {prod(shape)} elements"):
        transfers(whole, holders[1:])


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2), (2, 2, 2, 2)], ids=str)
def test_flat_ranges_are_tiled_by_boxes(shape):
    """Every range of every shape: the boxes, in order, hold exactly its elements, and there are at most 2 * dims -
    1."""
    elements = np.arange(prod(shape)).reshape(shape)
    for start, stop in itertools.combinations_with_replacement(range(prod(shape) + 1), 2):
        boxes = flat_range_boxes(shape, start, stop)
        found = [e for box in boxes for e in elements[box.slices()].ravel().tolist()]
        assert found == list(range(start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1) and not any(box.empty for box in boxes)


AXES = ("pp", "dp", "cp", "tp")


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 3, 1, 2), (3, 1, 2, 4), (1, 5, 1, 1)], ids=str)
def test_grid(sizes):
    """Truth: a table of ranks with one dim per axis, tp innermost."""
    grid = Grid(*sizes)
    table = np.arange(grid.world).reshape(sizes)
    for where in itertools.product(*map(range, sizes)):
        at = Coords(*where)
        assert grid.rank(at) == table[where] and grid.coords(int(table[where])) == at
        for n in range(len(AXES) + 1):
            for axes in itertools.combinations(AXES, n):
                index = tuple(slice(None) if a in axes else i for a, i in zip(AXES, where))
                assert grid.ranks(at, axes) == tuple(np.ravel(table[index]).tolist())
        for d, axis in enumerate(AXES):
            assert grid.size(axis) == sizes[d]
            some = tuple(range(0, sizes[d], 2))
            assert grid.members(at, axis, some) == tuple(int(table[(*where[:d], i, *where[d + 1 :])]) for i in some)


@pytest.mark.parametrize(
    "sizes", [((2, 2, 1, 4), (4, 2)), ((1, 4, 1, 2), (8, 1)), ((1, 2, 3, 2), (3, 2)), ((3, 2, 1, 2), (1, 1))], ids=str
)
def test_expert_view(sizes):
    """Truth: a table of the same ranks with dims (pp, edp, ep, etp), numbered in the same order."""
    dense, (ep, etp) = sizes
    grid = Grid(*dense, ep=ep, etp=etp)
    assert grid.edp * ep * etp == grid.stage == grid.world // grid.pp
    table = np.arange(grid.world).reshape(grid.pp, grid.edp, ep, etp)
    axes = ("edp", "ep", "etp")
    for rank in range(grid.world):
        at = grid.coords(rank)
        where = tuple(int(i[0]) for i in np.where(table == rank))
        mine = grid.expert_coords(at)
        assert (at.pp, mine.edp, mine.ep, mine.etp) == where
        for n in range(4):
            for some in itertools.combinations(axes, n):
                index = (where[0], *(slice(None) if a in some else i for a, i in zip(axes, where[1:])))
                assert grid.expert_ranks(at, some) == tuple(np.ravel(table[index]).tolist())


def all_cuts(n: int, stages: int):
    for inner in itertools.combinations(range(1, n), stages - 1):
        ends = (0, *inner, n)
        yield [range(a, b) for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("number", range(60))
def test_stages_are_cut_optimally(number):
    """Truth: all cuts. The largest stage is as small as can be; among those cuts the sum of squares is."""
    pick = random.Random(number)
    costs = [float(pick.choice([1, 1, 2, 3, 5, 8, 30])) for _ in range(pick.randint(1, 9))]
    stages = pick.randint(1, len(costs))
    check_cut(costs, stages)


def test_stages_that_greed_in_the_largest_first_misses():
    """A first part with a larger maximum can belong to the better whole."""
    check_cut([7.0, 3.0, 7.0, 1.0, 5.0, 4.0, 15.0, 7.0], 6)


def check_cut(costs: list[float], stages: int) -> None:
    price = lambda runs: (max(sum(costs[i] for i in r) for r in runs), sum(sum(costs[i] for i in r) ** 2 for r in runs))  # noqa: E731
    found = cut_stages(costs, stages)
    assert [i for r in found for i in r] == list(range(len(costs))) and len(found) == stages and all(found)
    assert price(found) == min(map(price, all_cuts(len(costs), stages)))


def test_stages_of_real_costs():
    """Costs that are no whole numbers; a count of stages that cannot be is refused; given sizes are taken as they
    are."""
    assert [len(r) for r in cut_stages([0.1] * 7, 3)] in ([3, 2, 2], [2, 3, 2], [2, 2, 3])
    for stages in (0, 4):
        with pytest.raises(ValueError, match=f"cannot cut 3 blocks into {stages} stages"):
            cut_stages([1.0] * 3, stages)
    assert given_stages((1, 3, 2)) == [range(0, 1), range(1, 4), range(4, 6)]


@pytest.mark.parametrize("layers, head", [(8, 0.1), (9, 1.0), (10, 4.2), (7, 2.5)])
def test_virtual_stages_balance_ranks(layers, head):
    """Truth: the best of all cuts into 2 x 2 stages by trying them all: no rank's share is larger than need be."""
    costs = [0.01, *[1.0] * layers, head]
    found = cut_virtual_stages(costs, 2, 2)
    assert [i for r in found for i in r] == list(range(len(costs))) and all(len(r) for r in found)

    def largest(stages: list[range]) -> float:
        shares = [sum(costs[i] for i in r) for r in stages]
        return max(shares[0] + shares[2], shares[1] + shares[3])

    every = [given_stages((a, b - a, c - b, len(costs) - c)) for a, b, c in combinations(range(1, len(costs)), 3)]
    assert largest(found) == pytest.approx(min(map(largest, every)))


@pytest.mark.parametrize("number", range(30))
def test_segments(number):
    """Segments follow each other; each is within the limit or one block; the next block would not have fitted."""
    pick = random.Random(number)
    sizes, limit = [pick.randint(1, 10) for _ in range(pick.randint(1, 12))], pick.randint(1, 25)
    segments = cut_segments(sizes, limit)
    assert [i for r in segments for i in r] == list(range(len(sizes))) and all(segments)
    for r, after in itertools.zip_longest(segments, segments[1:]):
        assert len(r) == 1 or sum(sizes[i] for i in r) <= limit
        assert after is None or sum(sizes[i] for i in r) + sizes[after.start] > limit


def spec(name: str, *shape: int, replicas: tuple[Replica, ...] = ()) -> ParamSpec:
    whole = tuple(slice(0, n) for n in shape)
    return ParamSpec(shape, (Piece(name, shape, Box.full(shape), whole, ZEROS, replicas=replicas),))


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_buckets(shards):
    """One bucket per set of users; slots aligned, apart, in order; shards equal, aligned, covering; a tied tensor
    has its own."""
    tied = (Replica("pp", (0, 1)),)
    first, second, both = frozenset({(0, 0)}), frozenset({(0, 1)}), frozenset({(0, 0), (0, 1)})
    params = [
        (spec("embed", 13, 5, replicas=tied), first),
        (spec("a", 7, 9), first),
        (spec("a.norm", 3), first),
        (spec("b", 65), second),
        (spec("head", 13, 5), both),
        (spec("c", 1), first),
        (spec("replicated", 4, replicas=(Replica("tp", (0, 1)),)), second),
    ]
    buckets = make_buckets(params, Grid(dp=shards))
    assert [b.id for b in buckets] == list(range(len(buckets)))
    names = [([params[s.param][0].name for s in b.slots], b.users) for b in buckets]
    assert names == [(["embed"], first), (["a", "a.norm", "c"], first), (["b", "replicated"], second), (["head"], both)]
    for b in buckets:
        ends = 0
        for s in b.slots:
            assert (
                s.offset % ELEMENTS == 0
                and s.offset >= ends
                and s.numel == prod(s.spec.shape)
                and s.spec is params[s.param][0]
            )
            ends = s.offset + s.numel
        parts = [b.shard(i, shards) for i in range(shards)]
        assert [lo for lo, _ in parts] + [b.numel] == [0] + [hi for _, hi in parts]
        assert ends <= b.numel < ends + ELEMENTS * (shards + 1) and len({hi - lo for lo, hi in parts}) == 1
        assert all(lo % ELEMENTS == 0 for lo, _ in parts)


def test_ranges_of_pieces():
    """Truth: numbering the storage. A replicated piece that is not whole rows is refused."""
    halves = [
        Piece(n, (2, 5), Box.full((2, 5)), (slice(2 * i, 2 * i + 2), slice(0, 5)), ZEROS) for i, n in enumerate("qk")
    ]
    (bucket,) = make_buckets([(spec("x", 3), frozenset()), (ParamSpec((4, 5), tuple(halves)), frozenset())], Grid())
    slot = bucket.slots[1]
    storage = np.arange(slot.offset, slot.offset + 20).reshape(4, 5)
    for piece, (a, b) in zip(slot.spec.pieces, piece_ranges(slot)):
        assert storage[piece.local].ravel().tolist() == list(range(a, b))
    narrow = Piece("v", (4, 2), Box.full((4, 2)), (slice(0, 4), slice(0, 2)), ZEROS)
    (bucket,) = make_buckets([(ParamSpec((4, 5), (narrow,)), frozenset())], Grid())
    with pytest.raises(ValueError, match="v: a replicated piece must be whole rows"):
        piece_ranges(bucket.slots[0])
    everyone = (Replica("tp", (0, 1)),)
    columns = [
        Piece("w", (4, 2), Box((0, i), (4, i + 1)), (slice(0, 4), slice(i, i + 1)), ZEROS, replicas=everyone)
        for i in range(2)
    ]
    (bucket,) = make_buckets([(ParamSpec((4, 2), tuple(columns)), frozenset())], Grid(tp=2))
    assert replica_ranges(bucket.slots[0]) == [(columns[0], (0, 8))], "all of it is held by the same ranks"


def test_one_writer_of_each_replica():
    """Truth: of all ranks that hold a piece, exactly one writes it per place outside its replicas."""
    grid = Grid(pp=2, tp=4)
    piece = Piece(
        "x",
        (1,),
        Box.full((1,)),
        (slice(0, 1),),
        ZEROS,
        replicas=(Replica("tp", (2, 3)), Replica("pp", (0, 1))),
    )
    holders = [c for c in map(grid.coords, range(grid.world)) if c.tp in (2, 3)]
    assert [c for c in holders if piece.is_writer(grid, c)] == [Coords(pp=0, tp=2)]
