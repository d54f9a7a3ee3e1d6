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
