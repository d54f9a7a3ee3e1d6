"""Homes: which rank of a pipeline stage updates which global matrix, for optimizers that need whole matrices.

A matrix is a global tensor, whatever it is fused with in memory (q, k, v; gate, up; experts), or one matrix (last two
dims) of a tensor that stacks several. If the global tensor itself is fused (GPT-2's q, k and v), it has one home, and
`ParamSpec.logical` says which matrices are in it. Any rank of a stage (dp x cp x tp, which are also edp x ep x etp)
can be a home; a weight that stages share has a home on each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, product
from math import prod

from phalanx.base.align import ELEMENTS, room
from phalanx.layout.box import Box
from phalanx.layout.buckets import Bucket, Slot
from phalanx.layout.param import LogicalMatrix, ParamSpec, Piece
from phalanx.layout.strided import StridedBox


def whole_matrices(specs: Iterable[ParamSpec]) -> list[ParamSpec]:
    """Every matrix among the global tensors of these parameters of an unsharded stage, once and whole."""
    found: dict[str, list[ParamSpec]] = {}
    for spec in specs:
        for piece in spec.pieces:
            if piece.name in found:
                continue
            of_stages = tuple(r for r in piece.replicas if r.axis == "pp")
            depth = max(0, len(piece.shape) - 2)
            logical = logical_matrices([p for p in spec.pieces if p.name == piece.name])
            found[piece.name] = []
            for at in product(*map(range, piece.shape[:depth])):
                last = piece.shape[depth:]
                box = Box((*at, *(0 for _ in last)), (*(i + 1 for i in at), *last))
                whole = replace(
                    piece, box=box, local=Box.full(box.shape).slices(), transposed=False, replicas=of_stages
                )
                made = ParamSpec(box.shape, (whole,), exported=spec.exported, role=spec.role, logical=logical)
                found[piece.name].append(made)
    return [matrix for matrices in found.values() for matrix in matrices]


def logical_matrices(pieces: Sequence[Piece]) -> tuple[LogicalMatrix, ...]:
    """The matrices in a global tensor, or in each of those that it stacks, from all pieces of it. Vectors have none."""
    first = pieces[0]
    if len(first.shape) < 2:
        return ()
    dim = 1 if first.transposed else 0
    inputs, ranges, heads = first.shape[-1 - dim], dict[str, list[tuple[int, int, int]]](), dict[str, int]()
    for piece in {(p.box.start[dim - 2], p.box.stop[dim - 2], p.outputs): p for p in pieces}.values():
        for name, head, found in _ranges(piece, piece.box.start[dim - 2], piece.box.stop[dim - 2]):
            ranges.setdefault(name, []).extend(found)
            heads[name] = head
    return tuple(
        LogicalMatrix(dim, tuple(joined(of)), (sum(len(range(*r)) for r in of), inputs), heads[name])
        for name, of in ranges.items()
    )


def _ranges(piece: Piece, start: int, stop: int) -> Iterable[tuple[str, int, list[tuple[int, int, int]]]]:
    """For each matrix that outputs start..stop of a piece belong to: its name, outputs of a head, and ranges."""
    period = sum(each.count for each in piece.outputs)
    if not period:
        yield "", 0, [(start, stop, 1)]
        return
    firsts = accumulate((each.count for each in piece.outputs), initial=start)
    for each, first in zip(piece.outputs, firsts):
        head = each.count if each.heads else 0
        if each.count == 1:
            yield each.matrix, head, [(first, stop, period)]
        else:
            yield each.matrix, head, [(at, at + each.count, 1) for at in range(first, stop, period)]


def joined(ranges: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbours without a gap as one range."""
    found = list[tuple[int, int, int]]()
    for start, stop, step in ranges:
        if found and found[-1][1] == start and found[-1][2] == step == 1:
            found[-1] = (found[-1][0], stop, 1)
        else:
            found.append((start, stop, step))
    return found


def elements(matrix: ParamSpec) -> float:
    """The cost of an update that takes as long for each element."""
    return float(_room(matrix))


def homes_of(matrices: Sequence[ParamSpec], ranks: int, cost: Callable[[ParamSpec], float] = elements) -> list[int]:
    """The home of each matrix, as a rank number in the stage. Assigned from the costliest update down, each to the rank
    with the least to do so far."""
    loads, homes = [0.0] * ranks, [0] * len(matrices)
    costs = [cost(matrix) for matrix in matrices]
    for i in sorted(range(len(matrices)), key=lambda i: (-costs[i], i)):
        homes[i] = loads.index(min(loads))
        loads[homes[i]] += costs[i]
    return homes


def lies_whole(part: StridedBox) -> bool:
    """Whether a box of a matrix in a bucket is all of it and lies as at home, row by row and without padding."""
    step = 1
    for size, stride in zip(reversed(part.box.shape), reversed(part.stride)):
        if size > 1 and stride != step:
            return False
        step *= size
    return step == prod(part.piece.shape[-2:]) == room(step, ELEMENTS)


def nearer(homes: Sequence[int], kinds: Sequence[Hashable], near: Sequence[tuple[int, int]]) -> list[int]:
    """Homes that have as many matrices of each kind as before, but those that they are near to, as far as possible.
    near: the rank that has most of a matrix, and how much; those come first of whom it has more."""
    found, left, far = list(homes), Counter(zip(kinds, homes)), list[int]()
    for i in sorted(range(len(homes)), key=lambda i: (-near[i][1], i)):
        kind, (rank, _) = kinds[i], near[i]
        if left[kind, rank]:
            found[i] = rank
            left[kind, rank] -= 1
        else:
            far.append(i)
    spare = dict[Hashable, list[int]]()
    for kind, rank in left.elements():
        spare.setdefault(kind, []).append(rank)
    for i in reversed(far):
        found[i] = spare[kinds[i]].pop()
    return found


def home_bucket(matrices: Sequence[ParamSpec]) -> Bucket:
    """The matrices one after the other, as their home rank holds them. This bucket belongs to no segment."""
    slots, offset = list[Slot](), 0
    for i, matrix in enumerate(matrices):
        slots.append(Slot(i, offset, prod(matrix.shape), matrix))
        offset += _room(matrix)
    return Bucket(-1, tuple(slots), offset, frozenset())


def _room(matrix: ParamSpec) -> int:
    return room(prod(matrix.shape), ELEMENTS)
