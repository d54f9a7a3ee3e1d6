"""Options that are gone: whoever says one is told what to type instead, wherever it is said."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from phalanx.base.errors import Problem
from phalanx.checkpoint.keep import find
from phalanx.checkpoint.manifest import NAME, parse
from phalanx.cli.setup import all_problems
from phalanx.config.device_check import Facts
from phalanx.config.read import load_run, read
from phalanx.config.removed import REMOVED, Removed, replace_removed
from tests.config.test_config import BASE, QWEN3_MOE

ROOT = Path(__file__).parents[2]
WAYS = ("auto", "allgather", "alltoall", "push")
EXPERTS = [*QWEN3_MOE.split(), "layout.ep=2"]
TOLD = "was removed: tokens travel to experts in train.precision; type layout.dispatch="


@pytest.mark.parametrize("way", WAYS)
def test_an_override_that_says_it(way):
    [found] = read(None, [*EXPERTS, f"layout.dispatch={way}_fp8"], BASE).problems
    assert str(found) == f"config error: layout.dispatch='{way}_fp8': {TOLD}{way}. (set in command line)"


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_says_it(tmp_path, way):
    file = tmp_path / "run.yaml"
    file.write_text(f"layout:\n  ep: 2\n  dispatch: {way}_fp8\n")
    [found] = read(file, QWEN3_MOE.split(), BASE).problems
    assert (found.field, found.rule, found.where) == ("layout.dispatch", TOLD + way, f"{file}:3")
    assert load_run(file, [*QWEN3_MOE.split(), f"layout.dispatch={way}"], BASE).layout.dispatch == way


def test_it_is_told_with_all_other_problems():
    """Those of form and those of the rules, for which it counts as what replaces it."""
    loaded = read(None, [*EXPERTS, "layout.dispatch=alltoall_fp8", "train.stepz=3", "optim.beta1=2"], BASE)
    found = all_problems(loaded, Facts(world_size=2, files=False))
    assert [p.field for p in found] == ["layout.dispatch", "train.stepz", "optim.beta1"]


def test_what_replaces_an_option_is_accepted():
    for option in REMOVED:
        words = [f"{key}={json.dumps(value)}" for key, value in option.instead.items()]
        assert load_run(None, [*EXPERTS, *words], BASE) and set(option.instead) <= set(option.settings)


def test_an_option_can_be_two_settings_at_once():
    """Each alone is no removed option; a function says which values are meant."""
    gone = Removed({"a.b": lambda n: n > 0, "a.c": "on"}, "they exclude each other", {"a.c": "off"})
    data = {"a": {"b": 2, "c": "on"}}
    found, replaced = replace_removed(data, (gone,))
    rule = "was removed: they exclude each other; type a.c=off"
    assert found == [Problem("a.b", 2, rule, {"a.c": "on"})] and replaced == {"a.c"}
    assert data == {"a": {"b": 2, "c": "off"}}
    for kept in ({"a": {"b": 0, "c": "on"}}, {"a": {"b": 2, "c": "auto"}}, {"a": {"b": 2}}, {"a": 3}, {}):
        assert replace_removed(kept, (gone,)) == ([], frozenset())


# ---- runs that began when the option was there ---------------------------------------------------


def as_of_then(folder: Path) -> None:
    """Make the saved configs of a run say it: config.yaml and that of its checkpoint."""
    file, checkpoint = folder / "config.yaml", find(folder)
    text = file.read_text()
    assert text.count("dispatch: auto") == 1
    file.write_text(text.replace("dispatch: auto", "dispatch: push_fp8"))
    manifest = parse(checkpoint)
    manifest.config["layout"]["dispatch"] = "push_fp8"
    (checkpoint / NAME).write_text(manifest.text())


@pytest.fixture(scope="module")
def old_run(warm, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("old") / "run"
    words = ["train.steps=2", "train.device=cpu", "optim.warmup_steps=0"]
    done = warm.phalanx("train", "recipes/tiny_mixtral.yaml", f"dir={folder}", *words, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    as_of_then(folder)
    return folder


def test_a_checkpoint_that_is_evaluated(warm, old_run, tmp_path):
    """Its config is read where no other is given."""
    (tmp_path / "run").symlink_to(old_run)
    (tmp_path / "notes.txt").write_text("1 2 3")
    done = warm.phalanx("eval", "run", "--data", "notes.txt", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"layout.dispatch='push_fp8': {TOLD}push. (set in the config of run)" in done.stderr


def test_a_run_that_is_continued(warm, old_run):
    """It is refused and nothing of it changes; with what the message says typed it goes on from its checkpoint."""
    line = 1 + next(
        i for i, text in enumerate((old_run / "config.yaml").read_text().splitlines()) if "push_fp8" in text
    )
    before = {path: path.read_bytes() for path in old_run.rglob("*") if path.is_file()}
    done = warm.phalanx("train", str(old_run), "train.steps=3", cwd=ROOT)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"layout.dispatch='push_fp8': {TOLD}push. (set in {old_run}/config.yaml:{line})" in done.stderr
    assert {path: path.read_bytes() for path in old_run.rglob("*") if path.is_file()} == before
    done = warm.phalanx("train", str(old_run), "train.steps=3", "layout.dispatch=push", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    log = (old_run / "log.txt").read_text()
    assert 'layout.dispatch "push_fp8" -> "push"' in log and "continue from" in log


def test_a_renamed_value_works_and_one_line_says_its_new_name(tmp_path):
    """`train.kernels=wheels` of configs and of runs of before: as `optional`, from Python with a warning."""
    loaded = read(None, ["train.kernels=wheels"], BASE)
    assert loaded.run is not None and loaded.run.train.kernels == "optional" and not loaded.problems
    assert loaded.notes == ("train.kernels=wheels is called train.kernels=optional now",)
    assert read(None, ["train.kernels=optional"], BASE).notes == ()
    with pytest.warns(UserWarning, match="is called train.kernels=optional now"):
        assert load_run(None, ["train.kernels=wheels"], BASE).train.kernels == "optional"


@pytest.mark.parametrize("key", ["model.family", "optim.name"])
def test_a_checkpoint_s_config_imports_nothing_unless_the_user_says_so(key):
    """What a manifest names may be anybody's."""
    section, name = key.split(".")
    base = {**BASE, section: {**BASE.get(section, {}), name: "antigravity:NAME"}}
    loaded = read(None, [], base, "the config of a checkpoint")
    [found] = loaded.problems
    assert loaded.run is None and "antigravity" not in sys.modules and found.field == key
    assert f"imported only if you name it: type {key}=antigravity:NAME" in found.rule
    [found] = read(None, [f"{key}=tests.outside.nothing:NAME"], base, "the config of a checkpoint").problems
    assert "antigravity" not in sys.modules and "tests.outside.nothing" in str(found)
