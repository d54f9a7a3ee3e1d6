"""Checkpoint folders whose name is not that of the step they hold: renamed, or a link. They are never taken for the
newest, nor removed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.base.errors import CheckpointError
from phalanx.base.placement import Placement
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.keep import Keep, candidates, find, latest, list_checkpoints, misnamed
from phalanx.checkpoint.manifest import read_manifest, verify
from phalanx.training.main import train
from tests.checkpoint.test_checkpoint import make_state, save_here, tiny_run
from tests.training.test_loop import make_run


@pytest.fixture(scope="module")
def tiny():
    return make_state(tiny_run())


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


def names(root) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.trust(
    17,
    "an old checkpoint, renamed to a larger step, was continued from",
    "the newest real one is used, and the other one named",
)
@pytest.mark.parametrize("how", ["renamed", "linked"])
def test_the_newest_real_one_wins(warm, tmp_path, root, tiny, how):
    for step in (5, 10, 15):
        save_here(tiny, root, step, keep=Keep(0))
    wrong = root / "step-00000900"
    if how == "renamed":
        (root / "step-00000005").rename(wrong)
    else:
        wrong.symlink_to("step-00000005")
    assert find(tmp_path) == find(root) == latest(root) == candidates(tmp_path)[0] == root / "step-00000015"
    [told] = misnamed(root)
    assert str(wrong) in told and "its manifest is of step 5; to use it, rename it to step-00000005" in told
    assert ("a link" in told) == (how == "linked")
    listed = warm.phalanx("checkpoint", "list", str(tmp_path))
    assert listed.returncode == 0 and listed.stdout.splitlines()[-1] == told
    checked = warm.phalanx("checkpoint", "verify", str(tmp_path))
    assert checked.stdout == f"{root / 'step-00000015'} good\n" and checked.stderr == f"warning: {told}\n"
    named = warm.phalanx("checkpoint", "verify", str(wrong))  # by its own name it is what the user means
    assert named.returncode == 0 and named.stderr == ""


def test_retention_neither_counts_nor_removes_it(root, tiny):
    for step in (1, 2):
        save_here(tiny, root, step, keep=Keep(0))
    (root / "step-00000001").rename(root / "step-00000900")
    for step in (3, 4, 5):
        save_here(tiny, root, step, keep=Keep(2))
    assert names(root) == ["step-00000004", "step-00000005", "step-00000900"]


def test_the_step_whose_name_it_has_is_saved_all_the_same(root, tiny):
    save_here(tiny, root, 3, keep=Keep(0))
    (root / "step-00000003").rename(root / "step-00000006")
    saved = save_here(tiny, root, 6, keep=Keep(1))
    assert saved.written and read_manifest(saved.path).step == 6
    assert saved.warnings == (
        f"{root / 'step-00000006'} held another step: it is step-00000006.holds-step-00000003 now",
    )
    aside = root / "step-00000006.holds-step-00000003"
    assert verify(aside) == [] and read_manifest(aside).step == 3
    save_here(tiny, root, 7, keep=Keep(1))
    assert names(root) == ["step-00000006.holds-step-00000003", "step-00000007"]


def test_a_run_says_what_it_ignores_and_never_begins_anew(tmp_path, capfd):
    run = make_run(tmp_path / "run", steps=3)
    run = replace(run, checkpoint=CheckpointConfig(interval=1, keep_last=0))
    train(run, Placement())
    root = tmp_path / "run" / "checkpoints"
    (root / "step-00000001").rename(root / "step-00000900")
    capfd.readouterr()
    train(replace(run, train=replace(run.train, steps=4)), Placement())
    said = capfd.readouterr()
    assert said.err.count("step-00000900 is not used: its manifest is of step 1") == 1
    assert f"continue from {root / 'step-00000003'}" in said.out
    for path in list_checkpoints(root):
        path.rename(tmp_path / path.name)
    with pytest.raises(
        CheckpointError,
        match="step-00000900 is not used: its manifest is of step 1; to use it, rename it to step-00000001",
    ):
        train(run, Placement())
