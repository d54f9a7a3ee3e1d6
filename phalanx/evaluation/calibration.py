"""Calibration: whether a model that gives its choice a probability of 70 % is right in 70 % of such cases.

For multiple-choice questions, the probability of a choice is the softmax over the choices' log-likelihoods. Needs only
numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from phalanx.base.dataclass import dataclass

BINS = 15
COLDEST, HOTTEST = 1e-3, 1e3  # temperatures between which the best is looked for
PRECISION = 1e-9  # of the best temperature's logarithm
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class ReliabilityBin:
    """Questions whose likeliest choice has a probability above `low` and at most `high`: how many, the mean of that
    probability, and how many of them it gets right, from 0 to 1."""

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Calibration:
    """Of `questions`.

    ece              expected calibration error: |confidence - accuracy|, averaged over bins of equal width by their
                     counts (Guo et al., "On Calibration of Modern Neural Networks", 2017)
    brier            squared distance of the probabilities from the right answer's (1 there, else 0), summed over
                     choices, averaged over questions: from 0 to 2 (Brier, 1950)
    temperature      that of which the log-likelihoods, divided by it, give the right answers the highest likelihood:
                     above 1 for a model that is too sure (ibid.); None: there is no best one, as when all are right
    scaled_ece       the ECE at that temperature
    curve            the reliability curve: bins that have questions
    """

    questions: int
    ece: float
    brier: float
    temperature: float | None
    scaled_ece: float | None
    curve: tuple[ReliabilityBin, ...]


def calibration(scores: Sequence[Sequence[float]], right: Sequence[int], bins: int = BINS) -> Calibration:
    """scores: of each question, the log-likelihood of each of its choices (questions may have unequal numbers of
    them). right: the number of the right one. ValueError without questions, for a question without choices or a right
    answer that is none of them, and for scores that are NaN or +inf, or all -inf."""
    table, answers = padded(scores, right), np.asarray(right, np.int64)
    probabilities = softmax(table)
    curve = reliability(probabilities, answers, bins)
    temperature = fitted_temperature(table, answers)
    scaled = None
    if temperature is not None:
        scaled = calibration_error(reliability(softmax(table / temperature), answers, bins))
    return Calibration(
        questions=len(answers),
        ece=calibration_error(curve),
        brier=brier_score(probabilities, answers),
        temperature=temperature,
        scaled_ece=scaled,
        curve=curve,
    )


def padded(scores: Sequence[Sequence[float]], right: Sequence[int]) -> np.ndarray:
    """(questions, choices) float64; -inf where a question has fewer choices than others."""
    if not len(scores) or len(scores) != len(right):
        raise ValueError(f"{len(scores)} questions and {len(right)} right answers: there must be one for each, and one")
    table = np.full((len(scores), max(map(len, scores))), -np.inf)
    for number, (row, answer) in enumerate(zip(scores, right)):
        if not 0 <= answer < len(row):
            raise ValueError(f"question {number} has {len(row)} choices, and its right answer is number {answer}")
        table[number, : len(row)] = row
    if not (table < np.inf).all() or not np.isfinite(table.max(-1)).all():
        raise ValueError("log-likelihoods must be numbers below infinity, one of each question finite")
    return table


def softmax(table: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    powers = np.exp(table - table.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def reliability(probabilities: np.ndarray, right: np.ndarray, bins: int) -> tuple[ReliabilityBin, ...]:
    """Of (questions, choices): the bins that have questions, from the lowest."""
    confidence = probabilities.max(-1)
    hit = probabilities.argmax(-1) == right
    which = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    found = []
    for number in np.unique(which).tolist():
        here = which == number
        found.append(
            ReliabilityBin(
                low=number / bins,
                high=(number + 1) / bins,
                count=int(here.sum()),
                confidence=float(confidence[here].mean()),
                accuracy=float(hit[here].mean()),
            )
        )
    return tuple(found)


def calibration_error(curve: Sequence[ReliabilityBin]) -> float:
    total = sum(each.count for each in curve)
    return sum(each.count * abs(each.confidence - each.accuracy) for each in curve) / total


def brier_score(probabilities: np.ndarray, right: np.ndarray) -> float:
    wanted = np.zeros_like(probabilities)
    wanted[np.arange(len(right)), right] = 1.0
    return float(((probabilities - wanted) ** 2).sum(-1).mean())


def fitted_temperature(table: np.ndarray, right: np.ndarray) -> float | None:
    """The temperature at which the right answers are likeliest, between COLDEST and HOTTEST. None if none is best: if
    every likeliest choice is right, the colder the better, and if right answers are no likelier than others on average,
    the hotter the better (the loss is convex in 1 / temperature)."""
    shifted = table - table.max(-1, keepdims=True)
    there = np.isfinite(shifted)
    mine = shifted[np.arange(len(right)), right]
    average = np.where(there, shifted, 0.0).sum(-1) / there.sum(-1)
    if not np.isfinite(mine).all() or not mine.any() or mine.mean() <= average.mean():
        return None

    def loss(log_inverse: float) -> float:
        scaled = np.where(there, shifted, 0.0) * np.exp(log_inverse)
        sums = np.where(there, np.exp(scaled), 0.0).sum(-1)
        return float((np.log(sums) - mine * np.exp(log_inverse)).mean())

    return float(np.exp(-least(loss, -np.log(HOTTEST), -np.log(COLDEST))))


def least(f: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one minimum has it, by golden sections (Kiefer, 1953)."""
    a, b = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_a, at_b = f(a), f(b)
    while high - low > PRECISION:
        if at_a <= at_b:
            high, b, at_b = b, a, at_a
            a = high - GOLDEN * (high - low)
            at_a = f(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + GOLDEN * (high - low)
            at_b = f(b)
    return (low + high) / 2


def plain_calibration(found: Calibration) -> dict[str, Any]:
    """As JSON has it."""
    curve = [vars(each) for each in found.curve]
    return {**{name: value for name, value in vars(found).items() if name != "curve"}, "curve": curve}
