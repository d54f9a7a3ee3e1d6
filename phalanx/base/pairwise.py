"""Sums in a fixed binary tree: the order of additions depends on the number of terms alone, not on who holds them.

A tree over n terms is cut in halves as long as they are equal, so that 2, 4, 8 ... ranks with runs of n / 2, n / 4
... terms each can add up their own and then each other's, and get the same bits as one rank with all of them.
"""

from __future__ import annotations

from torch import Tensor


def pairwise_sum(x: Tensor) -> Tensor:
    """(n, ...) -> (...), the tree over dim 0."""
    groups = len(x) & -len(x)  # the largest power of two that divides n: so often can halves be equal
    x = _halves(x.view(groups, len(x) // groups, *x.shape[1:]))
    while len(x) > 1:
        x = x[0::2] + x[1::2]
    return x[0]


def _halves(x: Tensor) -> Tensor:
    """(groups, n, ...) -> (groups, ...), for groups whose halves are not equal."""
    n = x.shape[1]
    return x[:, 0] if n == 1 else _halves(x[:, : n // 2]) + _halves(x[:, n // 2 :])


def merges(leaves: int) -> list[int]:
    """For terms that come one after the other: how often, after each, the two newest sums are added up."""
    if leaves == 1:
        return [0]
    left, right = merges(leaves // 2), merges(leaves - leaves // 2)
    return [*left, *right[:-1], right[-1] + 1]


def waiting(leaves: int) -> int:
    """How many sums wait at most for the other half of theirs, beside the newest: log2(leaves) of a power of two."""
    return 0 if leaves == 1 else max(waiting(leaves // 2), 1 + waiting(leaves - leaves // 2))
