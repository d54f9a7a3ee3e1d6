"""Curves as SVG inside a page: text in the page's font and size, colours by class so that the page's scheme applies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from phalanx.base.dataclass import dataclass

WIDTH, HEIGHT = 400, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 34  # the same for all plots, so that those below each other line up
POINTS = 400  # a line has at most so many
COLOURS = 6  # classes c0 to c5


@dataclass(frozen=True)
class Curve:
    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = "line"
    """line, faint (in the background, not in the legend), dots"""


@dataclass(frozen=True)
class Plot:
    title: str
    x_label: str
    curves: list[Curve]
    x_end: float
    from_zero: bool = False
    """Whether the y axis begins at 0, so that noise in nearly constant values is not magnified."""


def smoothed(values: Sequence[float], part: float = 0.02) -> list[float]:
    """A mean of past values in which older ones count less, over about `part` of all; Inf and NaN are skipped."""
    decay = 1 - 1 / max(1.0, part * len(values))
    total = weight = 0.0
    found = []
    for value in values:
        if math.isfinite(value):
            total = decay * total + value
            weight = decay * weight + 1
        found.append(total / weight if weight else math.nan)
    return found


def draw(plot: Plot) -> str:
    """<figure> with an <svg>, its title and a legend."""
    curves = [_finite(curve) for curve in plot.curves]
    values = [y for curve in curves for y in curve.y]
    if not values:
        return ""
    low, high = _range(curves)
    low = min(low, 0.0) if plot.from_zero else low
    x_ticks, y_ticks = ticks(0, plot.x_end or 1, 4), ticks(low, high, 4)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(plot.title)}">']
    for value in y_ticks:
        y = _y(value, low, high)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label(value)}</text>')
    for value in x_ticks:
        x = _x(value, plot.x_end)
        anchor = "end" if x > WIDTH - RIGHT - 14 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="{anchor}">{label(value)}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 3}" text-anchor="middle">{escape(plot.x_label)}</text>'
    )
    named = [curve for curve in curves if curve.style != "faint"]
    for curve in curves:
        colour = named.index(curve) % COLOURS if curve in named else 0
        parts.append(_shape(curve, f"{curve.style} c{colour}", plot.x_end, low, high))
    legend = (
        "".join(f'<span class="c{i % COLOURS}">{escape(curve.name)}</span>' for i, curve in enumerate(named))
        if len(named) > 1
        else ""
    )
    return (
        f"<figure><figcaption>{escape(plot.title)}<div "
        f'class="legend">{legend}</div></figcaption>{"".join(parts)}</svg></figure>'
    )


def _finite(curve: Curve) -> Curve:
    pairs = [(x, y) for x, y in zip(curve.x, curve.y) if y is not None and math.isfinite(y)]
    every = max(1, len(pairs) // POINTS)
    pairs = pairs[::every] + ([pairs[-1]] if pairs and (len(pairs) - 1) % every else [])
    return Curve(curve.name, [x for x, _ in pairs], [y for _, y in pairs], curve.style)


def _range(curves: list[Curve]) -> tuple[float, float]:
    """The whole range of curves that are not faint; spikes of faint ones may leave the plot."""
    values = [y for curve in curves if curve.style != "faint" for y in curve.y] or [
        y for curve in curves for y in curve.y
    ]
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return low - room if low < 0 or low - room > 0 else 0.0, high + room


def _shape(curve: Curve, kind: str, x_end: float, low: float, high: float) -> str:
    points = [(_x(x, x_end), _y(min(max(y, low), high), low, high)) for x, y in zip(curve.x, curve.y)]
    if curve.style == "dots" or len(points) == 1:
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in points)
        return f'<g class="{kind}"><polyline points="{_text(points)}"/>{dots}</g>'
    return f'<g class="{kind}"><polyline points="{_text(points)}"/></g>'


def _text(points: list[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _x(value: float, end: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * value / (end or 1)


def _y(value: float, low: float, high: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from low to high."""
    raw = (high - low) / about
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1, 2, 5, 10) if m * size >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def label(value: float) -> str:
    if value == 0:
        return "0"
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * size or (abs(value) >= size and size > 1e3):
            return f"{value / size:g}{unit}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
