"""The site of `make docs`: it has every page, is built strictly, reads without a network, and quotes real messages."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def pages_of(nav: object) -> list[str]:
    """Pages of a navigation, in its order."""
    if isinstance(nav, str):
        return [nav]
    inner = nav.values() if isinstance(nav, dict) else nav
    return [page for part in inner for page in pages_of(part)]


def test_the_navigation_has_every_page_once():
    settings = YAML(typ="safe", pure=True).load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = pages_of(settings["nav"])
    own = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert len(pages) == len(set(pages)) and own <= set(pages)
    assert settings["theme"]["font"] is False


def texts_of_the_package() -> str:
    """Every string of the source, pieces that stand beside each other joined, f-strings without their values."""
    found = []
    for path in (ROOT / "phalanx").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(p.value if isinstance(p, ast.Constant) else "\0" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_troubleshooting_quotes_messages_that_there_are():
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r'^\|(?: \d+ \|)? "([^"]+)" \|', page, re.MULTILINE)
    texts = texts_of_the_package()
    assert len(quoted) > 20 and not [text for text in quoted if text not in texts]


class Loaded(HTMLParser):
    """What a browser would load of a page by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "img", "iframe") and values.get("src"):
            self.found.append(values["src"] or "")
        if tag == "link" and values.get("rel") != "canonical":
            self.found.append(values.get("href") or "")


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is in requirements-dev.txt")
def test_it_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    built = sorted((tmp_path / "site").rglob("*.html"))
    assert {path.stem for path in DOCS.glob("*.md")} <= {path.stem for path in built}
    for page in built:
        parser = Loaded()
        parser.feed(page.read_text(encoding="utf-8"))
        assert parser.found and not [url for url in parser.found if re.match(r"(https?:)?//", url)], page.name
    api = (tmp_path / "site/api.html").read_text(encoding="utf-8")
    assert "load_run" in api
    plain = re.sub(r"\s+", "", re.sub(r"<[^>]+>", "", api))
    assert "LRPointdataclass" in plain  # as docs/site_dataclasses.py has it
    assert (tmp_path / "site/search/search_index.json").stat().st_size > 100_000
