"""Random runs with three to eight features at once do what one process does, or are refused by the rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tests.harness.support as support
from tests.harness.compose import draw, merged, smaller, trouble
from tests.harness.sample import rest_in_soak
from tests.harness.support_features import exclude

SAMPLE = (2, 7, 13, 19, 20, 21)


@pytest.mark.parametrize("seed", rest_in_soak(range(300), SAMPLE))
def test_compositions(ranks, seed):
    text = trouble(ranks, draw(seed))
    assert not text, f"{[f.name for f in draw(seed)]}\n{text}"


def test_a_draw_can_be_run():
    """Its features exclude each other nowhere, begin with a family, and are the same whenever they are drawn."""
    for seed in range(12):
        features = draw(seed)
        assert features == draw(seed) and features[0].kind == "family" and len(features) > 2
        assert all(exclude(a, b) is None for a in features for b in features)
        assert set(features[0].families) <= set(merged(features).families)


def test_what_fails_is_made_smaller():
    features = draw(2)
    [needed, other] = features[2], features[-1]
    assert smaller(features, lambda left: needed in left and other in left) == (features[0], needed, other)


def test_a_run_that_differs_has_trouble(ranks, monkeypatch):
    """One process that clips otherwise has other losses in the second step."""
    really = support.one_process

    def clipped(t):
        alone = really(t)
        return replace(alone, run=replace(alone.run, optim=replace(alone.run.optim, clip_grad=1e-3)))

    monkeypatch.setattr(support, "one_process", clipped)
    assert "losses" in trouble(ranks, draw(SAMPLE[0]))
