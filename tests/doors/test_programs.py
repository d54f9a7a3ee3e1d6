"""Programs that no other test starts (GPU checks, benchmarks, examples, recipes) name only what the package still
has."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests/gpu", "benchmarks", "examples", "recipes")
PROGRAMS = [str(path.relative_to(ROOT)) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_a_program_imports_is_there(program):
    tree = ast.parse((ROOT / program).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and is_ours(node.module)]
    assert not [
        f"{node.module}: {name.name}" for node in imports for name in node.names if not has(node.module, name.name)
    ]


def is_ours(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in ("phalanx", "tests")


def has(module: str, name: str) -> bool:
    """Whether a module has this name, as a value or as a module of its own."""
    if hasattr(importlib.import_module(module), name):
        return True
    try:
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return False
    return True
