"""Docstrings of the standard library as queries and passages: a name with its first line, and the rest of the text
under the signature, as `help()` shows it."""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LEFT_OUT = ("site-packages", "test", "tests", "idlelib", "lib2to3")
LEAST = 60  # characters of a passage's text


@dataclass(frozen=True)
class Docstring:
    """name: qualified, with the module. query: in words, with the first line. passage: signature and the rest."""

    name: str
    query: str
    passage: str


def docstrings() -> list[Docstring]:
    """All of them, in an order that says nothing."""
    root, found = Path(sysconfig.get_paths()["stdlib"]), dict[str, Docstring]()
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if any(part in LEFT_OUT for part in inside.parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        module = ".".join(inside.with_suffix("").parts).removesuffix(".__init__")
        for each in _documented(tree, module):
            found.setdefault(each.passage.partition(") ")[2][:80], each)
    every = list(found.values())
    return [every[i] for i in np.random.default_rng(0).permutation(len(every))]


def _documented(node: ast.AST, prefix: str) -> Iterator[Docstring]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        name = f"{prefix}.{child.name}"
        first, _, rest = (ast.get_docstring(child) or "").partition("\n")
        first, rest = " ".join(first.split()), " ".join(rest.split())
        if len(rest) >= LEAST and len(first) >= 15:
            arguments = "" if isinstance(child, ast.ClassDef) else ast.unparse(child.args)
            yield Docstring(name, f"{in_words(name)}: {first}", f"{in_words(child.name)} ({arguments}) {rest}")
        yield from _documented(child, name)


def in_words(name: str) -> str:
    """os.path.relPath -> os path rel path."""
    return " ".join(re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[._]+", " ", name).lower().split())
