"""The support matrix: pairs of features in one run, and the page that was generated from all of them."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from tests.harness.support import ALLOWED, judge, pairs
from tests.harness.support_features import FEATURES, exclude

PAGE = Path(__file__).resolve().parents[2] / "docs/support.md"
POSSIBLE = {f"{a.name} with {b.name}": (a, b) for a, b in pairs() if exclude(a, b) is None}
ONCE_BROKEN = (
    "balance of the global batch with start from Hugging Face",
    "level 3 with frozen first blocks",
    "fp16 with FP8 delayed",
    "recompute for long sequences with FP8 tensorwise",
)
SAMPLE = (*random.Random(20261122).sample(sorted(POSSIBLE), 12), *ONCE_BROKEN)


@pytest.mark.parametrize("name", [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.soak) for n in POSSIBLE])
def test_pairs(ranks, name):
    """Green, or refused by a rule that the page explains, with a value that works instead."""
    outcome = judge(ranks, *POSSIBLE[name])
    assert outcome.kind == "green" or outcome.rule in ALLOWED, outcome.text


def test_the_page_has_every_pair():
    """And it was made with these features: names and rules are as they are here."""
    table = PAGE.read_text(encoding="utf-8").partition("```text")[2].partition("```")[0]
    rows = re.findall(r"^ ?(\d+) (\S.*?)  +([+·!? a-z]+)$", table, re.MULTILINE)
    assert [name for _, name, _ in rows] == [f.name for f in FEATURES]
    for (_, name, signs), row in zip(rows, FEATURES):
        found = dict(zip((f.name for f in FEATURES), signs.replace(" ", ""), strict=False))
        assert len(found) == FEATURES.index(row) + 1, name
        for column in FEATURES[: len(found)]:
            assert (found[column.name] == "·") == (exclude(column, row) is not None), (column.name, name)
            assert found[column.name] != "!", (column.name, name)
