"""docs/coming-from.md has the tables of tests/harness/coming_from.py, which say what config/synonyms.py says."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.base import tree
from phalanx.config.run import Run
from phalanx.config.synonyms import NOT_BUILT, SYNONYMS
from tests.harness.coming_from import FRAMEWORKS, MARK, REST, rest, section_of, with_tables

PAGE = Path(__file__).resolve().parents[2] / "docs/coming-from.md"


def test_the_page_is_that_of_the_synonyms():
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_tables(page), "run: python -m tests.harness.coming_from docs/coming-from.md"
    assert {m["name"] for m in MARK.finditer(page)} == {*FRAMEWORKS, REST, "not built"}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_table_says_what_messages_say(framework):
    keys = {k.path for k in tree.keys(Run)}
    for name, key in FRAMEWORKS[framework].items():
        known = SYNONYMS.get(section_of(name))
        assert key in keys and known in (None, key), f"{name}: {key}, but messages name {known}"


def test_every_synonym_is_on_the_page():
    page = PAGE.read_text(encoding="utf-8").replace("-", "_")
    assert not [name for name in (*SYNONYMS, *NOT_BUILT) if f"{name}`" not in page and f"{name}." not in page]
    assert set(rest()) <= set(SYNONYMS)
