"""The house: rooms on floors, no circles between files, no room with the name of a public function, names that are
words of the field. What the rooms are is docs/architecture.md."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

from phalanx.base.registry import BUILT_IN
from tests.harness import rooms_picture

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "phalanx"
PUBLIC = {
    "load",
    "check",
    "plan",
    "train",
    "session",
    "sampler",
    "verify",
    "generate",
    "chat",
    "serve",
    "embed",
    "export",
    "evaluate",
    "report",
    "compare",
}


def modules() -> dict[str, Path]:
    """Every file of the package by its dotted name below `phalanx`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports_of(source: str, known: set[str]) -> set[str]:
    """Modules of the package that a file imports, inside functions and for type checkers too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "phalanx":
            base = (node.module or "").removeprefix("phalanx").lstrip(".")
            inner = {f"{base}.{alias.name}".lstrip(".") for alias in node.names}
            found |= (inner & known) or {base}
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("phalanx.") for alias in node.names if alias.name.startswith("phalanx.")}
    return (found & known) - {""}


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of more than one file that reach each other (Tarjan, "Depth-first search and linear graph algorithms",
    1972)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in imports[name]:
            if other not in number:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == number[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in imports:
        if name not in number:
            visit(name)
    return found


def test_no_two_files_import_each_other_in_a_circle():
    files = modules()
    imports = {name: imports_of(path.read_text(encoding="utf-8"), set(files)) for name, path in files.items()}
    assert len(files) > 250 and sum(map(len, imports.values())) > 1000
    assert circles(imports) == []
    assert imports_of(
        "def f():\n    from phalanx.base import tree\n    import phalanx.base.log as log", set(files)
    ) == {"base.tree", "base.log"}
    imports["base.errors"] = imports["base.errors"] | {"cli.main"}  # as a function of a lower room might
    assert any({"base.errors", "cli.main"} <= set(group) for group in circles(imports))


def test_dataclasses_are_cheap_to_import():
    """Those of base/dataclass.py: hundreds of Python's own took more than half of the time to import a run."""
    names = re.compile(r"^\s*from dataclasses import .*\bdataclass\b|\bdataclasses\.dataclass\b", re.MULTILINE)
    files = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "base/dataclass.py"]
    assert [path for path in files if names.search(path.read_text(encoding="utf-8"))] == []
    assert names.search((PACKAGE / "base/dataclass.py").read_text(encoding="utf-8"))


def floors() -> list[set[str]]:
    """Rooms by floor, the highest first, as import-linter checks them."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    [contract] = config["tool"]["importlinter"]["contracts"]
    assert contract["exhaustive"] and contract["type"] == "layers"
    files = {"__main__", "api"}
    return [{room.strip() for room in layer.split("|")} - files for layer in contract["layers"]]


def test_the_page_has_every_room_on_its_floor():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\w+)/` \|", page, re.MULTILINE)
    by_floor = defaultdict(set)
    for floor, room in rows:
        by_floor[int(floor)].add(room)
    above = [rooms for rooms in floors() if rooms]
    assert [by_floor[floor] for floor in sorted(by_floor, reverse=True)] == above
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == {room for _, room in rows}


def test_the_picture_is_of_these_rooms():
    """python -m tests.harness.rooms_picture docs/images/rooms.svg writes it."""
    assert (ROOT / "docs/images/rooms.svg").read_text(encoding="utf-8") == rooms_picture.picture()
    drawn = [set(row) for row in rooms_picture.floors()]
    assert drawn == [rooms for rooms in floors() if rooms]
    every = set().union(*drawn)
    assert {*rooms_picture.BATCH, *rooms_picture.WEIGHT, *rooms_picture.LAPTOP} <= every


def test_no_room_has_the_name_of_a_public_function():
    """Python would bind the sub-package over the function as soon as somebody imports it."""
    names = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert not names & PUBLIC


# Private words and the field's (or this package's one) word for the same.
PRIVATE = {
    "ahead": "mtp, or prefetch",
    "again": "recomputed",
    "apart": "gradient_distance",
    "codes": "quantized",
    "deal": "assign",
    "dealt": "balanced",
    "holdings": "boxes",
    "landing": "staging buffer",
    "sharing": "batch_group",
    "stand": "lazy tensor",
    "tape": "recompute",
    "tell": "reduce_step_totals",
    "told": "step totals",
    "turned": "transposed, of RoPE rotated",
    "twin": "reference or fast implementation",
    "unmade": "lazy tensor",
    "wheel": "optional package",
    "wheels": "optional packages",
}
WORDS_KEPT = {
    "launch.outcome: CODES": "exit codes",
    "text.readers: tell": "of a file object",
    "evaluation.perplexity: tell": "prints",
    "training.saves: _tell": "writes to the log",
}


def words_of(name: str) -> set[str]:
    """Of an identifier: LowWeight_of -> {"low", "weight", "of"}."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


def identifiers(source: str) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME}


def test_names_are_words_of_the_field():
    """Of identifiers and of files. Config keys are identifiers: the fields of the sections."""
    assert words_of("_LowWeight_of2D") == {"low", "weight", "of2", "d"}
    found = []
    for module, path in modules().items():
        names = identifiers(path.read_text(encoding="utf-8")) | {path.stem}
        for name in sorted(names):
            for word in sorted(words_of(name) & set(PRIVATE)):
                if f"{module}: {name}" not in WORDS_KEPT:
                    found.append(f"{path.relative_to(ROOT)}: {name} (not {word}, but {PRIVATE[word]})")
    assert not found, "\n".join(found)


def test_a_class_name_exists_once():
    places = defaultdict(list)
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    assert len(places) > 300
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_formatting_is_never_switched_off():
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert "fmt: " + "skip" not in text and "fmt: " + "off" not in text, path


# functions with more than six parameters, by room: fewer is better, more is a dataclass waiting to be named
MANY_PARAMETERS = {
    "ops": 24,
    "nn": 9,
    "checkpoint": 1,
    "cli": 3,
    "base": 1,
    "data": 1,
    "layout": 1,
    "schedule": 1,
    "training": 1,
}


def test_functions_with_many_parameters_become_fewer():
    """Kernels aside. Whoever mends one lowers the number here."""
    found: Counter[str] = Counter()
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and not any("jit" in ast.unparse(d) for d in node.decorator_list):
                names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                if len(names) - (names[:1] in (["self"], ["cls"], ["ctx"])) > 6:
                    found[path.relative_to(PACKAGE).parts[0]] += 1
    assert dict(found) == MANY_PARAMETERS


# where a family's name may stand outside models/: its path, a tokenizer's published pattern, the demo's own config
MAY_NAME_A_FAMILY = ("base/registry.py", "text/words.py", "text/merges.py", "text/tokenizers.py", "cli/demo.py")
MAY_NAME_A_FAMILY += ("checkpoint/embedder_files.py",)  # a file of sentence-transformers
# which family other frameworks' models are, and what else of theirs goes with it
MAY_NAME_A_FAMILY += tuple(f"config/importers/{name}.py" for name in ("megatron_model", "torchtitan_models"))


def test_no_code_outside_models_asks_which_family_it_is():
    """A family is one file: names of families are no identifiers and no whole strings elsewhere."""
    names = "|".join(BUILT_IN["family"])
    word, found = re.compile(rf"(?:^|[_.])(?:{names})(?:$|[_.])", re.IGNORECASE), []
    for path in modules().values():
        place = str(path.relative_to(PACKAGE))
        if place.startswith("models/") or place in MAY_NAME_A_FAMILY:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            said = [getattr(node, name, None) for name in ("id", "attr", "name", "arg", "module")]
            said += [node.value] if isinstance(node, ast.Constant) else []
            found += [f"{place}: {text}" for text in said if isinstance(text, str) and word.search(text)]
    assert not [text for text in found if " " not in text.partition(": ")[2]], found
