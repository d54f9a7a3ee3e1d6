"""Many tensor names in few lines: names that differ only in numbers share a line with ranges, so that none has to be
left out."""

from __future__ import annotations

import re
from collections import defaultdict

Numbers = tuple[
    tuple[int, ...], ...
]  # for each position in a name, the numbers found there; it stands for all their combinations


def folded(lines: list[str]) -> list[str]:
    """Lines that contain a name, where those that differ only in the numbers between its dots are merged:
    `layers.0-3.experts.0-1,7.up (12 tensors)`.

    The meaning is exactly that of the lines themselves; the order is that of the first line of each.
    """
    groups: dict[tuple[str, ...], list[Numbers]] = defaultdict(list)
    for line in lines:
        parts = re.split(r"(?<=\.)(\d+)(?=\.)", line)
        groups[tuple(parts[::2])].append(tuple((int(n),) for n in parts[1::2]))
    return [_line(texts, numbers) for texts, found in groups.items() for numbers in _merged(found, len(texts) - 1)]


def _merged(found: list[Numbers], places: int) -> list[Numbers]:
    """Fewer sets of combinations for the same names: from the last position on, sets that differ only there are
    merged."""
    for place in reversed(range(places)):
        alike: dict[Numbers, list[int]] = defaultdict(list)
        for numbers in found:
            alike[(*numbers[:place], *numbers[place + 1 :])].extend(numbers[place])
        found = [(*rest[:place], tuple(sorted(here)), *rest[place:]) for rest, here in alike.items()]
    return found


def _line(texts: tuple[str, ...], numbers: Numbers) -> str:
    count = 1
    line = texts[0]
    for here, text in zip(numbers, texts[1:]):
        line += _runs(here) + text
        count *= len(here)
    return line if count == 1 else f"{line} ({count} tensors)"


def _runs(numbers: tuple[int, ...]) -> str:
    """The text of numbers as ranges: 1-3,7 for 1, 2, 3, 7."""
    starts = [n for n in numbers if n - 1 not in numbers]
    stops = [n for n in numbers if n + 1 not in numbers]
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, stops))
