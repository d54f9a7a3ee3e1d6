"""Cutting a list of blocks with costs into pipeline stages; uneven stages are legal."""

from __future__ import annotations

import operator
from collections.abc import Callable


def cut_stages(costs: list[float], num_stages: int) -> list[range]:
    """Contiguous runs of blocks, at least one each, whose largest cost is as small as possible.

    Among those the sum of squared costs is smallest, so that what is left over is spread evenly.
    """
    if not 1 <= num_stages <= len(costs):
        raise ValueError(f"cannot cut {len(costs)} blocks into {num_stages} stages")
    total = [0.0]
    for c in costs:
        total.append(total[-1] + c)
    largest, _ = _best_cut(total, num_stages, max, lambda cost: cost)
    return _best_cut(total, num_stages, operator.add, lambda cost: cost * cost if cost <= largest else float("inf"))[1]


def cut_virtual_stages(costs: list[float], num_ranks: int, per_rank: int) -> list[range]:
    """The same for ranks that hold `per_rank` stages each, stage s on rank s % num_ranks: first the costliest rank counts, then the
    costliest stage, then evenness. Starts from `cut_stages` and moves single blocks between stages as long as that helps."""
    sizes = [len(r) for r in cut_stages(costs, num_ranks * per_rank)]
    if per_rank == 1:
        return given_stages(tuple(sizes))
    best = _unevenness(costs, sizes, num_ranks)
    improved = True
    while improved:
        improved = False
        for a in range(len(sizes)):
            for b in range(len(sizes)):
                if a == b or sizes[a] == 1:
                    continue
                moved = list(sizes)
                moved[a] -= 1
                moved[b] += 1
                found = _unevenness(costs, moved, num_ranks)
                if found < best:
                    sizes, best, improved = moved, found, True
    return given_stages(tuple(sizes))


def _unevenness(costs: list[float], sizes: list[int], num_ranks: int) -> tuple[float, float, float]:
    stages = [sum(costs[i] for i in r) for r in given_stages(tuple(sizes))]
    ranks = [sum(stages[r::num_ranks]) for r in range(num_ranks)]
    digits = 9  # sums in another order must not look like progress
    scale = sum(costs) or 1.0
    return round(max(ranks) / scale, digits), round(max(stages) / scale, digits), round(sum((s / scale) ** 2 for s in [*ranks, *stages]), digits)


Price = Callable[[float], float]


def _best_cut(total: list[float], num_stages: int, add: Callable[[float, float], float], price: Price) -> tuple[float, list[range]]:
    """The smallest price of a cut, each stage's price added by `add`, and the cut. `total[j]`: cost of the first j blocks.

    Dynamic programming over (stages, blocks): O(num_stages * len(total)^2).
    """
    n, never = len(total) - 1, float("inf")
    best = [0.0] + [never] * n  # best[j]: of the first j blocks in the stages so far
    choice: list[list[int]] = []
    for _ in range(num_stages):
        after, back = [never] * (n + 1), [0] * (n + 1)
        for j in range(1, n + 1):
            for i in range(j):
                candidate = add(best[i], price(total[j] - total[i]))
                if candidate < after[j]:
                    after[j], back[j] = candidate, i
        best = after
        choice.append(back)
    runs, end = [], n
    for back in reversed(choice):
        runs.append(range(back[end], end))
        end = back[end]
    return best[n], runs[::-1]


def given_stages(sizes: tuple[int, ...]) -> list[range]:
    """Runs of the given numbers of blocks."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [range(e - s, e) for e, s in zip(ends, sizes)]
