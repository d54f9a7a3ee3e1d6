"""The picture of docs/architecture.md: every room of phalanx/ on its floor, as pyproject.toml's import contract has
them, and through which rooms a batch and a weight go.

    python -m tests.harness.rooms_picture docs/images/rooms.svg

writes it; tests/doors/test_house.py compares.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = {"__main__", "api"}  # layers of the contract that are files, not rooms
BATCH = ("data", "sequence", "engine", "pipeline", "models", "nn", "ops", "comm")
WEIGHT = ("nn", "layout", "ops", "data_parallel", "comm", "optim", "models", "checkpoint")
LAPTOP = ("config", "planning", "forecast", "layout", "schedule")
LEFT, WIDTH, HEIGHT, GAP, FLOOR = 44, 142, 30, 12, 42
BATCH_COLOUR, WEIGHT_COLOUR = "#1f6feb", "#bc4c00"


def floors() -> list[list[str]]:
    """Rooms by floor, the highest first."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    [contract] = config["tool"]["importlinter"]["contracts"]
    found = [[room.strip() for room in layer.split("|")] for layer in contract["layers"]]
    return [rooms for rooms in ([room for room in floor if room not in FILES] for floor in found) if rooms]


def badge(x: float, y: float, number: int, colour: str) -> str:
    return (
        f'<circle cx="{x:g}" cy="{y:g}" r="8" fill="{colour}"/>'
        f'<text x="{x:g}" y="{y + 3.5:g}" font-size="10" fill="#ffffff" text-anchor="middle">{number}</text>'
    )


def room_box(name: str, x: float, y: float) -> str:
    fill, line = ("#fff8c5", "#d4a72c") if name in LAPTOP else ("#f6f8fa", "#afb8c1")
    parts = [
        f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="{fill}" stroke="{line}"/>',
        f'<text x="{x + 10:g}" y="{y + 19:g}" font-size="13" fill="#1f2328">{name}/</text>',
    ]
    at = x + WIDTH - 13
    for way, colour in ((WEIGHT, WEIGHT_COLOUR), (BATCH, BATCH_COLOUR)):
        if name in way:
            parts.append(badge(at, y + HEIGHT / 2, way.index(name) + 1, colour))
            at -= 19
    return "".join(parts)


def picture() -> str:
    rows = floors()
    wide = LEFT + max(len(row) for row in rows) * (WIDTH + GAP) + GAP
    high = len(rows) * FLOOR + 64
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif" role="img">',
        "<title>The rooms of phalanx/ by floor; a room imports only from lower floors</title>",
        f'<rect width="{wide}" height="{high}" fill="#ffffff"/>',
    ]
    for number, row in enumerate(rows):
        y = 10 + number * FLOOR
        parts.append(f'<text x="14" y="{y + 20}" font-size="12" fill="#57606a">{len(rows) - 1 - number}</text>')
        parts += [room_box(name, LEFT + i * (WIDTH + GAP), y) for i, name in enumerate(row)]
    y = 10 + len(rows) * FLOOR
    legend = '<text x="{x}" y="{y}" font-size="12" fill="#1f2328">{says}</text>'
    parts.append(f'<rect x="{LEFT}" y="{y}" width="18" height="14" rx="3" fill="#fff8c5" stroke="#d4a72c"/>')
    parts.append(legend.format(x=LEFT + 26, y=y + 12, says="decides on a laptop, without process groups"))
    parts.append(badge(LEFT + 320, y + 8, 1, BATCH_COLOUR))
    parts.append(legend.format(x=LEFT + 335, y=y + 12, says="the path of a batch"))
    parts.append(badge(LEFT + 490, y + 8, 1, WEIGHT_COLOUR))
    parts.append(legend.format(x=LEFT + 505, y=y + 12, says="the path of a weight"))
    parts.append(legend.format(x=LEFT, y=y + 36, says="A room imports only from rooms on lower floors."))
    return "\n".join([*parts, "</svg>", ""])


def main(path: str) -> None:
    Path(path).write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
