"""Cutting a list of blocks with costs into pipeline stages; uneven stages are legal."""

from __future__ import annotations


def cut_stages(costs: list[float], num_stages: int) -> list[range]:
    """Contiguous runs of blocks, at least one each, whose largest cost is as small as possible.

    Among those the sum of squared costs is smallest, so that what is left over is spread evenly. Dynamic programming over
    (stages, blocks): O(num_stages * len(costs)^2).
    """
    n = len(costs)
    if not 1 <= num_stages <= n:
        raise ValueError(f"cannot cut {n} blocks into {num_stages} stages")
    total = [0.0]
    for c in costs:
        total.append(total[-1] + c)
    worst = (float("inf"), float("inf"))
    best = [(0.0, 0.0)] + [worst] * n  # best[j]: (largest, sum of squares) of the first j blocks in the stages so far
    choice: list[list[int]] = []
    for _ in range(num_stages):
        after, back = [worst] * (n + 1), [0] * (n + 1)
        for j in range(1, n + 1):
            for i in range(j):
                here = total[j] - total[i]
                candidate = (max(best[i][0], here), best[i][1] + here * here)
                if best[i] != worst and candidate < after[j]:
                    after[j], back[j] = candidate, i
        best = after
        choice.append(back)
    runs, end = [], n
    for back in reversed(choice):
        runs.append(range(back[end], end))
        end = back[end]
    return runs[::-1]


def given_stages(sizes: tuple[int, ...]) -> list[range]:
    """Runs of the given numbers of blocks."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [range(e - s, e) for e, s in zip(ends, sizes)]
