"""Hooks of mkdocs: pages outside docs/ that the site has too (on disk they stay where people look for them), and code
blocks whose first line has words for tests/doors/test_docs.py."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

OUTSIDE = {"benchmarks/results/README.md": "results.md", "CHANGELOG.md": "changelog.md"}
"""Path in the repository -> page of the site."""
FENCE = re.compile(r"^```(?P<language>\w+)(?: .*?(?:file=(?P<file>\S+).*)?)$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.docs_dir).parent
    for source, page in OUTSIDE.items():
        text = (root / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    for source, name in OUTSIDE.items():
        markdown = markdown.replace(f"](../{source}", f"]({name}")
    return FENCE.sub(fence, markdown)


def fence(match: re.Match[str]) -> str:
    """Its language, and the file that it is as its title: other words would make mkdocs take it for text."""
    title = f' title="{match["file"]}"' if match["file"] else ""
    return f"```{match['language']}{title}"
