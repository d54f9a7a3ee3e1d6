"""The documentation does what it says: blocks marked `run` are run page by page, and every key, verb and link in it
exists.

A block's first line: ```bash run [exit=N] is run (exit 0 unless stated); ```yaml file=NAME and ```python file=NAME
are written to NAME first; ```text output is what the block before it prints: its lines come in this order, and `...`
stands for whatever is not shown. Other blocks are only read by people.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from phalanx.base import tree
from phalanx.cli.main import cli
from phalanx.config.run import Run
from phalanx.config.validate import NAMED
from phalanx.optim.adamw import AdamWConfig
from tests.harness.trust import BEGIN, END, with_table

ROOT = Path(__file__).resolve().parents[2]
ROOT_PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES = [*ROOT_PAGES, *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
MAX_OPTIONS = 145
# Pages whose commands train for a while, and show what tests of their own show: in `make soak`.
LONG = ("benchmarks", "context", "embeddings", "encoder-decoders", "encoders", "experts", "generation", "lora", "sound")
LONG += ("howto-init-from-hugging-face", "howto-own-training-loop", "howto-resume-on-other-layout")
LONG += ("state-space", "vision")


@dataclass(frozen=True)
class Block:
    language: str
    options: tuple[str, ...]
    text: str

    def option(self, name: str) -> str | None:
        return next((o.partition("=")[2] for o in self.options if o.partition("=")[0] == name), None)


def blocks(page: Path) -> list[Block]:
    infos = ((m["info"].split(), m["text"]) for m in BLOCK.finditer(page.read_text(encoding="utf-8")))
    return [Block(info[0] if info else "", tuple(info[1:]), text) for info, text in infos]


def runs(page: Path) -> bool:
    return any(b.option("run") is not None for b in blocks(page))


def ids(page: Path) -> str:
    return page.stem


# ---- running them --------------------------------------------------------------------------------


@pytest.mark.trust(
    30,
    "follow a page of the docs: 7 of 28 tested claims were stale",
    "commands and what they print are compared page by page",
)
@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[pytest.mark.soak] if ids(p) in LONG else []) for p in PAGES if runs(p)], ids=ids
)
def test_the_commands_of_a_page(page, warm, tmp_path):
    for name in ("recipes", "examples"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__")
        )  # others compile meanwhile
    path = f"{warm.folder}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    said = ""
    for block in blocks(page):
        if name := block.option("file"):
            (tmp_path / name).write_text(block.text)
        if block.option("output") is not None:
            assert not (missing := not_printed(block.text, said)), (
                f"{page.name} shows what was not printed: {missing!r}\n{said}"
            )
        if block.option("run") is None:
            continue
        done = subprocess.run(
            ["bash", "-e", "-c", block.text], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200
        )
        said = f"{block.text}--- exit {done.returncode}\n{done.stdout}{done.stderr}"
        assert done.returncode == int(block.option("exit") or 0), said
        assert "Traceback" not in done.stdout + done.stderr, said


def not_printed(shown: str, printed: str) -> str | None:
    """The first line of `shown` that `printed` lacks after the ones before it, or None. Spaces at the end of lines
    don't count."""
    lines = iter([line.rstrip() for line in printed.splitlines()])
    for wanted in shown.splitlines():
        pattern = ".*".join(re.escape(part) for part in wanted.rstrip().split("..."))
        if wanted.strip() not in ("", "...") and not any(re.fullmatch(pattern, line) for line in lines):
            return wanted
    return None


def test_shown_output_is_compared_line_by_line():
    printed = "model   llama\nparameters  250,432\nstep=1 loss=6.2\nstep=2 loss=6.1\n"
    assert not_printed("parameters  250,432\n...\nstep=2 loss=...\n", printed) is None
    assert not_printed("parameters  250,433\n", printed) == "parameters  250,433"
    assert not_printed("step=2 loss=...\nstep=1 loss=...\n", printed) == "step=1 loss=..."


# ---- reading them --------------------------------------------------------------------------------


def keys() -> set[str]:
    paths = {k.path for k in tree.keys(Run)}
    return paths | {f"optim.fallback.{k.path}" for k in tree.keys(AdamWConfig)}


def documented(page: Path) -> str:
    """A page without the blocks that show output and the table of faults, which may show a user's mistakes."""
    text = re.sub(rf"{re.escape(BEGIN)}.*{re.escape(END)}", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = BLOCK.sub(lambda m: "" if m["info"].startswith("text") or "exit=2" in m["info"] else m[0], text)
    return re.sub(r"^    (config error|\$ ).*\n", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_keys_exist(page):
    """Whatever looks like `section.key` in code is a key of the config."""
    sections = "|".join(k.path for k in tree.keys(Run) if "." not in k.path and tree.sections(k.hint))
    found = re.findall(rf"(?<![\w./-])(?:{sections})\.[a-z_][a-z0-9_]*(?:\.[a-z_]+)*(?![\w(]|\.\w|/)", documented(page))
    assert not {key for key in found if not key.endswith((".py", ".txt", ".md", ".yaml"))} - keys()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_verbs_exist(page):
    """Whatever follows `phalanx` in a command is a verb, and its options exist."""
    text = documented(page)
    commands = re.findall(r"^(?:\$ |srun | {4})?phalanx ([^#\n]+)", text, re.MULTILINE) + re.findall(
        r"`phalanx ([^`]+)`", text
    )
    commands += re.findall(r"-m phalanx ([^#`\n]+)", text)
    for command in commands:
        verb, words = cli, command.split()
        while isinstance(verb, click.Group) and not words[:1] == ["--version"]:
            assert words and words[0] in verb.every(), f"phalanx {command}"
            verb = verb.every()[words.pop(0)]
        options = {name for p in verb.params for name in p.opts} | {"--help"}
        used = {w.partition("=")[0] for w in words if w.startswith("--")}
        assert used <= options, f"phalanx {command}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_files_exist(page):
    """Paths into the repository that a page names in code."""
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:phalanx|tests|recipes|examples|benchmarks|docs)/[\w/.-]*)`", text))
    named |= {f"phalanx/{p}" for p in re.findall(rf"`((?:{'|'.join(rooms())})/[\w/]+\.py)`", text)}
    assert not {path for path in named if not (ROOT / path).exists() and "NAME" not in path}


def rooms() -> list[str]:
    return [p.name for p in (ROOT / "phalanx").iterdir() if p.is_dir() and (p / "__init__.py").exists()]


def linked(page: Path) -> set[Path]:
    """The pages of ours that a page links to."""
    targets = re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    return {(page.parent / target).resolve() for target in targets}


def test_every_page_is_reachable_from_the_readme():
    """README links to the pages of docs/, and those to the pages in its folders."""
    found = {PAGES[0]}
    while new := {target for page in found for target in linked(page)} & set(PAGES) - found:
        found |= new
    assert not set(PAGES) - found
    assert not {page for page in PAGES if page.parent == ROOT / "docs"} - linked(PAGES[0])


def test_the_first_hour_of_the_readme_is_the_quickstart():
    """README shows the commands that the quickstart runs."""
    quickstart = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    hour = PAGES[0].read_text(encoding="utf-8").partition("## A first hour")[2].partition("\n[")[0]
    commands = [line.partition("#")[0].strip() for line in hour.splitlines() if line.startswith("    ")]
    own = [c for c in commands if c.startswith(("phalanx", "python"))]
    assert len(own) >= 7 and all(c in quickstart for c in own), [c for c in own if c not in quickstart]


def test_the_plan_that_the_readme_shows_is_that_of_phalanx():
    readme = PAGES[0].read_text(encoding="utf-8")
    shown = re.search(r"^    \$ phalanx (plan tiny-llama [^\n]+)\n((?:    [^\n]*\n)+)", readme, re.MULTILINE)
    assert shown is not None
    printed = CliRunner().invoke(cli, shown[1].split())
    assert printed.exit_code == 0 and not_printed(textwrap.dedent(shown[2]), printed.output) is None


def test_every_dependency_has_a_reason():
    """README's table names what pyproject.toml asks for, and nothing else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *(name for extra in project["optional-dependencies"].values() for name in extra)]
    wanted = {re.split(r"[\[<>=]", name)[0] for name in asked} - {"phalanx"}  # an extra may name another of ours
    table = PAGES[0].read_text(encoding="utf-8").partition("## Dependencies")[2]
    assert {row for row in re.findall(r"^\| ([a-z0-9.-]+)(?: \(extra[^|]*\))? \|", table, re.MULTILINE)} - {
        "package"
    } == wanted


def test_the_table_of_trust_is_that_of_the_tests():
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    assert page == with_table(page), "run: python -m tests.harness.trust docs/faults.md"


# ---- the config's own documentation --------------------------------------------------------------


def test_every_key_says_what_it_is():
    """The string below each field; Llama-3's rotary factors are Hugging Face's and have theirs in the docstring of
    the section."""
    silent = [
        k.path
        for k in tree.leaves(Run)
        if not k.doc and not k.path.startswith("model.rope_scaling.") and k.name != "family"
    ]
    assert not silent
    assert all(k.doc.endswith((".", ")")) for k in tree.leaves(Run) if k.doc)


def test_there_are_few_options():
    """Beside the model section, whose fields are those of the families' published configs, the cluster section, whose
    are the schedulers', and beside those that only one optimizer, objective or method of adapters has."""
    shared = {f"{section}.{name}" for section, (base, _) in NAMED.items() for name in tree.field_names(base)}
    named = tuple(f"{section}." for section in NAMED)
    options = {
        k.path for k in tree.leaves(Run) if k.path in shared or not k.path.startswith(("model.", "cluster.", *named))
    }
    assert len(options) < MAX_OPTIONS
