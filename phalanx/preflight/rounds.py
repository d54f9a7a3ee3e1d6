"""Which nodes measure with each other: rounds of pairs in which no node occurs twice, so that no measurement
disturbs another."""

from __future__ import annotations

from math import ceil, log2

ALL_PAIRS = 8  # nodes up to which every pair is measured


def tournament(count: int) -> list[list[tuple[int, int]]]:
    """Rounds of pairs of `count` nodes: all pairs of a few nodes, else ceil(log2 n) + 1 rounds in which each node has
    another partner (with an odd count one node rests in each round).

    The circle method: node 0 stays, the others move one place each round. Rounds are taken far apart, so that partners
    lie near and far in the order of the nodes.
    """
    if count < 2:
        return []
    even = count + count % 2
    every = [_round(even, number, count) for number in range(even - 1)]
    wanted = len(every) if count <= ALL_PAIRS else ceil(log2(count)) + 1
    return [every[i * len(every) // wanted] for i in range(wanted)]


def partners(number: int, count: int, brief: bool) -> list[int]:
    """The nodes that node `number` of `count` tries to reach: all others. brief: of more than ALL_PAIRS only node 0,
    and those 1, 2, 4, ... places further round the ring, so that ceil(log2 n) others try each node."""
    if not brief or count <= ALL_PAIRS:
        return [other for other in range(count) if other != number]
    ring = {(number + 2**power) % count for power in range(ceil(log2(count)))}
    return sorted((ring | {0}) - {number})


def _round(even: int, number: int, count: int) -> list[tuple[int, int]]:
    circle = [0, *((number + i) % (even - 1) + 1 for i in range(even - 1))]
    pairs = [(circle[i], circle[even - 1 - i]) for i in range(even // 2)]
    return [(min(pair), max(pair)) for pair in pairs if max(pair) < count]


def disjoint(pairs: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Some pairs as rounds in which no node is twice."""
    rounds: list[list[tuple[int, int]]] = []
    for pair in pairs:
        home = next((r for r in rounds if not any(set(pair) & set(other) for other in r)), None)
        if home is None:
            rounds.append([pair])
        else:
            home.append(pair)
    return rounds
