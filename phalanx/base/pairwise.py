"""Sums in a fixed binary tree: the order of additions depends only on the number of terms, not on which rank holds
them.

A tree over n terms is halved as long as both halves are equal. So 2, 4, 8 ... ranks with n / 2, n / 4 ... consecutive
terms each can add up their own and then each other's, and get the same bits as one rank with all of them.
"""

from __future__ import annotations

from torch import Tensor


def pairwise_sum(x: Tensor) -> Tensor:
    """(n, ...) -> (...), the tree over dim 0."""
    groups = len(x) & -len(x)  # the largest power of two that divides n: how often halves can be equal
    x = _halves(x.view(groups, len(x) // groups, *x.shape[1:]))
    while len(x) > 1:
        x = x[0::2] + x[1::2]
    return x[0]


def _halves(x: Tensor) -> Tensor:
    """(groups, n, ...) -> (groups, ...), for groups whose halves are not equal."""
    n = x.shape[1]
    return x[:, 0] if n == 1 else _halves(x[:, : n // 2]) + _halves(x[:, n // 2 :])


def merges(leaves: int) -> list[int]:
    """For terms that arrive one after the other: how many times, after each, the two newest sums are added up."""
    if leaves == 1:
        return [0]
    left, right = merges(leaves // 2), merges(leaves - leaves // 2)
    return [*left, *right[:-1], right[-1] + 1]


def waiting(leaves: int) -> int:
    """The largest number of sums, besides the newest, that wait for their other half: log2(leaves) for a power of
    two."""
    return 0 if leaves == 1 else max(waiting(leaves // 2), 1 + waiting(leaves - leaves // 2))
