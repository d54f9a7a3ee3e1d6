"""Calibration of synthetic questions whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.evaluation.calibration import BINS, calibration, fitted_temperature, padded, softmax

QUESTIONS = 200_000


def questions(temperature: float, choices: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Log-likelihoods of a model that is right as often as its probabilities at this temperature say."""
    random = np.random.default_rng(7)
    scores = random.normal(0, 2, (QUESTIONS, choices))
    truth = softmax(scores / temperature)
    right = (random.random(QUESTIONS)[:, None] > truth.cumsum(-1)).sum(-1)
    return scores, right


@pytest.mark.parametrize("temperature", [1.0, 1.7, 0.6])
def test_it_finds_the_truth(temperature):
    """Truth: how sure the model is and how sure it ought to be, without any draw of answers."""
    scores, right = questions(temperature)
    said, true = softmax(scores), softmax(scores / temperature)
    sure, best = said.max(-1), said.argmax(-1)
    chance = true[np.arange(QUESTIONS), best]
    bins = np.clip(np.ceil(sure * BINS).astype(int) - 1, 0, BINS - 1)
    ece = sum(abs((sure - chance)[bins == b].sum()) for b in range(BINS)) / QUESTIONS
    brier = (said**2 - 2 * said * true + true).sum(-1).mean()
    found = calibration(scores.tolist(), right.tolist())
    assert found.ece == pytest.approx(ece, abs=0.005) and found.brier == pytest.approx(brier, abs=0.005)
    assert found.temperature == pytest.approx(temperature, rel=0.02)
    assert found.scaled_ece is not None and found.scaled_ece < 0.005
    assert found.questions == sum(each.count for each in found.curve) == QUESTIONS
    if temperature != 1.0:
        assert found.ece > 0.03
    for each in found.curve:
        here = bins == round(each.low * BINS)
        assert each.low < each.confidence <= each.high and each.count == here.sum()
        if each.count > 5000:
            assert each.accuracy == pytest.approx(chance[here].mean(), abs=0.02)


def test_by_hand():
    """Two questions, one of two and one of three choices: sure by 0.8, right; sure by 0.5, wrong."""
    scores = [[np.log(0.8), np.log(0.2)], [np.log(0.25) - 9, np.log(0.5) - 9, np.log(0.25) - 9]]
    found = calibration(scores, [0, 2], bins=10)
    assert found.ece == pytest.approx((0.2 + 0.5) / 2)
    assert found.brier == pytest.approx((0.04 + 0.04 + 0.0625 + 0.25 + 0.5625) / 2)
    [low, high] = found.curve
    assert (low.low, low.high, low.count, low.accuracy) == (0.4, 0.5, 1, 0.0)
    assert (high.count, high.accuracy) == (1, 1.0) and high.confidence == pytest.approx(0.8)


@pytest.mark.parametrize("right", [[0, 0], [1, 1]])
def test_no_temperature_is_best_if_all_are_right_or_all_wrong(right):
    assert calibration([[0.0, -1.0], [0.0, -2.0]], right).temperature is None


def test_a_right_answer_that_is_impossible_has_no_temperature():
    assert fitted_temperature(padded([[0.0, -np.inf], [0.0, -1.0]], [1, 0]), np.array([1, 0])) is None


@pytest.mark.parametrize(
    "scores, right, text",
    [
        ([], [], "0 questions"),
        ([[0.0, 1.0]], [0, 1], "1 questions and 2"),
        ([[0.0, 1.0]], [2], "2 choices, and its right answer is number 2"),
        ([[np.nan, 1.0]], [1], "below infinity"),
        ([[-np.inf, -np.inf]], [1], "one of each question finite"),
    ],
)
def test_what_has_no_calibration(scores, right, text):
    with pytest.raises(ValueError, match=text):
        calibration(scores, right)
