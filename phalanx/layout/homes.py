"""Homes: which rank of a pipeline stage updates which global matrix, for optimizers that need whole matrices.

A matrix is a global tensor, whatever it is fused with in memory (q, k, v; gate, up; experts), or one matrix (last two
dims) of a tensor that stacks several. Any rank of a stage (dp x cp x tp, which are also edp x ep x etp) can be a home;
a weight that stages share has a home on each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from phalanx.base.align import ELEMENTS, room
from phalanx.layout.box import Box
from phalanx.layout.buckets import Bucket, Slot
from phalanx.layout.param import ParamSpec


def whole_matrices(specs: Iterable[ParamSpec]) -> list[ParamSpec]:
    """Every matrix among the global tensors of these parameters of an unsharded stage, once and whole."""
    found: dict[str, list[ParamSpec]] = {}
    for spec in specs:
        for piece in spec.pieces:
            if piece.name in found:
                continue
            of_stages = tuple(r for r in piece.replicas if r.axis == "pp")
            depth = max(0, len(piece.shape) - 2)
            found[piece.name] = []
            for at in product(*map(range, piece.shape[:depth])):
                last = piece.shape[depth:]
                box = Box((*at, *(0 for _ in last)), (*(i + 1 for i in at), *last))
                whole = replace(
                    piece, box=box, local=Box.full(box.shape).slices(), transposed=False, replicas=of_stages
                )
                found[piece.name].append(ParamSpec(box.shape, (whole,), exported=spec.exported, role=spec.role))
    return [matrix for matrices in found.values() for matrix in matrices]


def homes_of(matrices: Sequence[ParamSpec], ranks: int) -> list[int]:
    """The home of each matrix, as a rank number in the stage. Assigned from the largest down, each to the rank with the
    fewest elements so far."""
    loads, homes = [0] * ranks, [0] * len(matrices)
    for i in sorted(range(len(matrices)), key=lambda i: (-_room(matrices[i]), i)):
        homes[i] = loads.index(min(loads))
        loads[homes[i]] += _room(matrices[i])
    return homes


def home_bucket(matrices: Sequence[ParamSpec]) -> Bucket:
    """The matrices one after the other, as their home rank holds them. This bucket belongs to no segment."""
    slots, offset = list[Slot](), 0
    for i, matrix in enumerate(matrices):
        slots.append(Slot(i, offset, prod(matrix.shape), matrix))
        offset += _room(matrix)
    return Bucket(-1, tuple(slots), offset, frozenset())


def _room(matrix: ParamSpec) -> int:
    return room(prod(matrix.shape), ELEMENTS)
