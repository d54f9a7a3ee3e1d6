"""Which of some measurements are outliers: robust z-scores, whose thresholds follow from the measurements themselves.

The scale is the median absolute deviation (Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993), and at
least the noise of one measurement, as its repeats show it: where all nodes are equal, the deviation alone would be 0.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import exp, log
from statistics import NormalDist, median
from typing import TypeVar

NORMAL = 1.4826  # of a normal distribution: standard deviation over median absolute deviation
FALSE_ALARMS = 1e-3  # expected in one comparison of clean nodes with normal errors, over all its values
LEAST = 3.5  # Iglewicz and Hoaglin's threshold
Key = TypeVar("Key", bound=Hashable)


def deviation(values: Sequence[float]) -> float:
    """The median absolute deviation, scaled to a standard deviation."""
    middle = median(values)
    return NORMAL * median(abs(v - middle) for v in values)


def threshold(count: int) -> float:
    """The z-score beyond which one of `count` values is an outlier."""
    return max(LEAST, -NormalDist().inv_cdf(FALSE_ALARMS / max(1, count)))


def z_scores(values: Mapping[Key, float], noise: float) -> dict[Key, float]:
    """How many robust standard deviations each value is above the median. noise: the standard deviation of one
    measurement."""
    if len(values) < 3:
        return dict.fromkeys(values, 0.0)  # of two, nobody can say which one is wrong
    scale = max(deviation(list(values.values())), noise)
    middle = median(values.values())
    return {key: (value - middle) / scale if scale > 0 else _sign(value - middle) for key, value in values.items()}


def _sign(difference: float) -> float:
    return float("inf") if difference > 0 else float("-inf") if difference < 0 else 0.0


def slow(rates: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
    """The keys whose rate is an outlier below the others, with its ratio to the median. rates: repeats of each key.

    Of a key its best repeat counts, because a machine that does something else can only make it slower. Ratios are
    compared (by logarithms), so a tenth of the rate is the same distance at any rate. The noise is how far repeats fall
    short of their best.
    """
    best = {key: log(max(of)) for key, of in rates.items() if of and max(of) > 0}
    if len(best) < 3:
        return {}
    noise = repeat_noise([of for of in rates.values() if of and min(of) > 0])
    limit, middle = threshold(len(best)), median(best.values())
    scores = z_scores(best, noise)
    return {key: exp(best[key] - middle) for key, z in scores.items() if z < -limit}


def repeat_noise(repeats: Sequence[Sequence[float]]) -> float:
    """The standard deviation of the logarithm of one measurement: how far the repeats of a key fall short of its best
    one, pooled over keys."""
    short = [log(max(of)) - log(v) for of in repeats for v in sorted(of)[:-1]]
    return NORMAL * median(short) if short else 0.0
