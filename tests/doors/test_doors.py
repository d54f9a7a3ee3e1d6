"""The doors of the repository: files at its root, forms and workflows name what exists; the list of quick tests too."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import phalanx
from phalanx.config.removed import REMOVED, RENAMED
from tests.quick import QUICK

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
YAMLS = [*sorted((ROOT / ".github").rglob("*.yml")), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"]
DOORS = [
    *YAMLS,
    *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", ".editorconfig", "pyproject.toml")),
    *sorted((ROOT / ".github").rglob("*.md")),
]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), re.MULTILINE))


@pytest.mark.parametrize("path", [path for path in DOORS if path.suffix in (".md", ".yml")], ids=lambda p: p.name)
def test_make_targets_exist(path):
    found = re.findall(r"(?:`|run: |^ {4})make ([a-z][a-z -]*)", read(path), re.MULTILINE)
    assert {target for names in found for target in names.split()} - {"and"} <= targets()


def test_help_names_the_targets_that_people_need():
    helped = set(re.findall(r"^# make ([a-z-]+)", read(ROOT / "Makefile"), re.MULTILINE))
    assert {"train", "quick", "test", "soak", "test-gpu"} <= helped <= targets()


@pytest.mark.parametrize("path", YAMLS, ids=lambda p: p.name)
def test_it_is_yaml(path):
    assert YAML(typ="safe", pure=True).load(read(path))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_workflows_do_what_people_do(path):
    """Every command is a make target, so that a failure can be repeated by hand."""
    jobs = YAML(typ="safe", pure=True).load(read(path))["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands and all(re.fullmatch(r"make [a-z -]+", command) for command in commands)


def test_hooks_run_what_make_runs():
    """The commands of the hooks before a commit are those of `make lint imports`."""
    [repo] = YAML(typ="safe", pure=True).load(read(ROOT / ".pre-commit-config.yaml"))["repos"]
    entries = {hook["id"]: hook["entry"] for hook in repo["hooks"]}
    recipes = read(ROOT / "Makefile").replace("$(PY)", ".venv/bin/python").replace("$(VENV)", ".venv")
    assert entries["ruff-check"] in recipes
    assert entries["ruff-format"].removeprefix(".venv/bin/python -m ruff format ") in recipes
    assert entries["import-linter"].removeprefix("env PYTHONPATH=. ") in recipes


@pytest.mark.parametrize("path", DOORS, ids=lambda p: p.name)
def test_nothing_of_one_machine(path):
    assert not re.search(r"/work/|/home/|/root/|/tmp/|localhost:|[\w.-]+@[\w-]+\.\w+", read(path))


def test_versions_agree():
    assert YAML(typ="safe", pure=True).load(read(ROOT / "CITATION.cff"))["version"] == phalanx.__version__
    assert re.findall(r"^## (.+)", read(ROOT / "CHANGELOG.md"), re.MULTILINE)[:2] == ["Unreleased", phalanx.__version__]


def test_the_changelog_says_what_replaces_removed_options():
    text = read(ROOT / "CHANGELOG.md")
    words = {str(value) for option in REMOVED for value in option.settings.values()} | {old for _, old in RENAMED}
    words |= set(RENAMED.values())
    assert not {word for word in words if word not in text}


def test_supported_pythons():
    project = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]
    oldest = project["requires-python"].removeprefix(">=")
    named = [name.rpartition(" ")[2] for name in project["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert named[0] == oldest and (ROOT / "phalanx/py.typed").exists()


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, lines that go on joined, without comments."""
    text = re.sub(r"\\\n\s*", " ", read(ROOT / "Dockerfile"))
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]


def test_dockerfile():
    """Syntax alone: nothing here can build it."""
    found = instructions()
    assert {name for name, _ in found} <= {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "ENTRYPOINT", "CMD"}
    stages = [re.fullmatch(r"[\w.:/-]+(?: AS (\w+))?", rest) for name, rest in found if name == "FROM"]
    assert found[0][0] == "FROM" and len(stages) == 2 and all(stages)
    names = {stage[1] for stage in stages if stage}
    for name, rest in found:
        words = [word for word in rest.split() if not word.startswith("--")]
        if name == "COPY" and "--from=" in rest:
            assert re.search(r"--from=(\w+)", rest)[1] in names
        elif name == "COPY":
            assert len(words) >= 2 and all((ROOT / word).exists() for word in words[:-1])
        if name == "RUN":
            assert words[0] in ("pip", "useradd")  # the network is for packages alone
        if name in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(word, str) for word in ast.literal_eval(rest))
    users = [rest for name, rest in found if name == "USER"]
    assert (
        users
        and users[-1] != "root"
        and found.index(("USER", users[-1])) > max(number for number, (name, _) in enumerate(found) if name == "RUN")
    )
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE"} <= set(
        " ".join(rest for name, rest in found if name == "COPY").split()
    )


# ---- quick ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", QUICK)
def test_quick_names_tests_that_are_there(entry):
    name, _, test = entry.partition("::")
    assert (ROOT / "tests" / name).is_file() and QUICK[entry]
    if test:
        functions = {node.name for node in ast.walk(ast.parse(read(ROOT / "tests" / name))) if is_function(node)}
        assert test.partition("[")[0] in functions


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef)


def test_layouts_of_quick_are_named():
    """And among those that `make test` runs: others would be left out by their mark."""
    from tests.verifying.test_parity import NAMED, NAMED_SAMPLE

    asked = [re.fullmatch(r"verifying/test_parity\.py::test_named_layouts\[(.*)\]", entry) for entry in QUICK]
    names = [match[1] for match in asked if match]
    assert len(names) >= 4 and set(names) <= set(NAMED_SAMPLE) & set(NAMED)
