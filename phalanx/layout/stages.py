"""Divides a list of blocks with costs into pipeline stages, which may be uneven."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np

DIGITS = 9  # to which costs are compared: sums in another order must not look like progress


def cut_stages(costs: list[float], num_stages: int) -> list[range]:
    """Contiguous ranges of blocks, at least one block each, whose largest cost is as small as possible.

    Among those, the sum of squared costs is smallest, so that the rest is spread evenly.
    """
    if not 1 <= num_stages <= len(costs):
        raise ValueError(f"cannot cut {len(costs)} blocks into {num_stages} stages")
    total = np.array([0.0, *accumulate(costs)])
    cost = total[:, None] - total  # [j, i]: cost of a stage with blocks i to j - 1
    cost[np.triu_indices(len(total))] = np.inf
    largest, _ = _best_cut(cost, num_stages, np.maximum)
    return _best_cut(np.where(cost <= largest, cost * cost, np.inf), num_stages, np.add)[1]


def _best_cut(price: np.ndarray, num_stages: int, add: Any) -> tuple[float, list[range]]:
    """The cut with the smallest price, and that price; the prices of stages are combined by `add`. price[j, i]: of a
    stage with blocks i to j - 1.

    Dynamic programming over (stages, blocks): O(num_stages * len(price)^2).
    """
    places = len(price) - num_stages  # where a stage may end, if every other stage has a block
    best, choice = np.zeros(1), []  # best: for the blocks before each place
    for stage in range(num_stages):
        sums = add(best, price[stage + 1 : stage + 1 + places, stage : stage + len(best)])
        best = sums.min(axis=1)
        choice.append(sums.argmin(axis=1) + stage)
    ends = [len(price) - 1]
    for stage, start_of in reversed(list(enumerate(choice))):
        ends.append(int(start_of[ends[-1] - stage - 1]))
    return float(best[-1]), _runs(ends[::-1])


def cut_virtual_stages(costs: list[float], num_ranks: int, per_rank: int) -> list[range]:
    """The same for ranks that hold `per_rank` stages each, stage s on rank s % num_ranks. It minimizes the costliest
    rank first, then the costliest stage, then unevenness, starting from `cut_stages` and moving single blocks between
    stages as long as that helps."""
    stages = cut_stages(costs, num_ranks * per_rank)
    if per_rank == 1:
        return stages
    total = np.array([0.0, *accumulate(costs)]) / (sum(costs) or 1.0)
    ends = np.array([0, *(s.stop for s in stages)])
    best, improved = _unevenness(np.diff(total[ends]), num_ranks), True
    while improved:
        improved = False
        for a in range(len(stages)):
            b = -1
            while ends[a + 1] - ends[a] > 1:
                found = _unevenness_after_moves(total, ends, a, num_ranks)
                b = next((b for b in range(b + 1, len(stages)) if found[b] < best), len(stages))
                if b == len(stages):
                    break
                best, improved = found[b], True
                ends[min(a, b) + 1 : max(a, b) + 1] += 1 if b < a else -1
    return _runs(ends.tolist())


Unevenness = tuple[float, ...]
"""The costliest rank, the costliest stage, and the sum of squares of both."""


def _unevenness(stages: np.ndarray, num_ranks: int) -> Unevenness:
    ranks = stages.reshape(-1, num_ranks).sum(axis=0)
    return tuple(np.round([ranks.max(), stages.max(), (ranks**2).sum() + (stages**2).sum()], DIGITS).tolist())


def _unevenness_after_moves(total: np.ndarray, ends: np.ndarray, a: int, num_ranks: int) -> list[Unevenness]:
    """The result if stage a gave a block to each of the stages. total[j]: cost of the first j blocks; stage s has
    blocks ends[s] to ends[s + 1] - 1."""
    last = len(ends) - 2
    # the same from the model's end
    before = _after_moves_on(total[-1] - total[::-1], len(total) - 1 - ends[::-1], last - a, num_ranks)
    return [*before[::-1], (np.inf,), *_after_moves_on(total, ends, a, num_ranks)]


def _after_moves_on(total: np.ndarray, ends: np.ndarray, a: int, num_ranks: int) -> list[Unevenness]:
    """The result if stage a gave a block to each of the stages after it; those in between receive one and give one."""
    now, starts, stops, more = np.diff(total[ends]), ends[:-1], ends[1:], np.arange(a + 1, len(ends) - 1)
    gives = total[stops[a] - 1] - total[starts[a]]
    passes = (total[stops - 1] - total[starts - 1])[more]
    gets = (total[stops] - total[starts - 1])[more]
    after = [*np.maximum.accumulate(now[::-1])[::-1][a + 2 :], 0.0][: len(more)]
    most = np.maximum(np.maximum(gets, after), np.maximum.accumulate([*now[:a], gives, *passes])[a:-1])
    # of stages and ranks: changes accumulate with each stage that a block passes
    square = (now**2).sum() - now[a] ** 2 + gives**2 - now[more] ** 2 + gets**2
    square[1:] += np.cumsum(passes**2 - now[more] ** 2)[:-1]
    ranks = np.zeros((len(more) + 1, num_ranks))
    ranks[0] = now.reshape(-1, num_ranks).sum(axis=0)
    ranks[0, a % num_ranks] += gives - now[a]
    ranks[np.arange(1, len(more) + 1), more % num_ranks] = passes - now[more]
    ranks = np.cumsum(ranks, axis=0)[:-1]
    ranks[np.arange(len(more)), more % num_ranks] += gets - now[more]
    return list(
        map(
            tuple,
            np.round(np.stack([ranks.max(axis=1), most, square + (ranks**2).sum(axis=1)], axis=1), DIGITS).tolist(),
        )
    )


def _runs(ends: list[int]) -> list[range]:
    return [range(*pair) for pair in pairwise(ends)]


def given_stages(sizes: tuple[int, ...]) -> list[range]:
    """Consecutive ranges with the given numbers of blocks."""
    return _runs([0, *accumulate(sizes)])
