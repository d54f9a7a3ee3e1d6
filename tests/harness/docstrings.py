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
    """module: where it is. names: of the classes around it and its own. first: its first line. rest: the signature and
    the other lines."""

    module: str
    names: tuple[str, ...]
    first: str
    rest: str

    @property
    def words(self) -> str:
        """Its name inside the module."""
        return in_words(".".join(self.names))

    @property
    def query(self) -> str:
        """Its name with the module, and the first line."""
        return f"{in_words(self.module)} {self.words}: {self.first}"

    @property
    def passage(self) -> str:
        """Its own name, and the rest."""
        return f"{in_words(self.names[-1])} {self.rest}"


def library_files() -> Iterator[tuple[str, str]]:
    """(module, source) of each file of the standard library, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if any(part in LEFT_OUT for part in inside.parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        yield ".".join(inside.with_suffix("").parts).removesuffix(".__init__"), source


def docstrings() -> list[Docstring]:
    """All of them, in an order that says nothing."""
    found = dict[str, Docstring]()
    for module, source in library_files():
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        for each in _documented(tree, module, ()):
            found.setdefault(each.rest.partition(") ")[2][:80], each)
    every = list(found.values())
    return [every[i] for i in np.random.default_rng(0).permutation(len(every))]


def _documented(node: ast.AST, module: str, around: tuple[str, ...]) -> Iterator[Docstring]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        names = (*around, child.name)
        first, _, rest = (ast.get_docstring(child) or "").partition("\n")
        first, rest = " ".join(first.split()), " ".join(rest.split())
        if len(rest) >= LEAST and len(first) >= 15:
            arguments = "" if isinstance(child, ast.ClassDef) else ast.unparse(child.args)
            yield Docstring(module, names, first, f"({arguments}) {rest}")
        yield from _documented(child, module, names)


def in_words(name: str) -> str:
    """os.path.relPath -> os path rel path."""
    return " ".join(re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[._]+", " ", name).lower().split())
