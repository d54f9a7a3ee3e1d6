"""Checkpoints in object storage, on a real server process that speaks S3: saved, listed, loaded, retired
(tests/faults/storage.py has uploads that die)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.base.errors import CheckpointError, DamagedCheckpoint
from phalanx.base.placement import Placement
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.keep import Keep, find, ignored, latest, list_checkpoints
from phalanx.checkpoint.load import load_weights
from phalanx.checkpoint.manifest import NAME, read_manifest, verify
from phalanx.checkpoint.places import place
from phalanx.cli.main import cli, guarded
from phalanx.training.main import train
from tests.checkpoint.test_checkpoint import TINY
from tests.faults.storage import object_server
from tests.harness.checkpoints import expected, load_here, make_run, make_state, save_here, set_state
from tests.training.test_loop import make_run as small_run
from tests.training.test_loop import rows_of


@pytest.fixture(scope="module")
def bucket():
    """s3://bucket on a server of this test alone."""
    with object_server() as name:
        yield name


@pytest.fixture(scope="module")
def tiny():
    state = make_state(replace(make_run("llama", "fp32", 100), model=TINY))
    set_state(state)
    return state


def test_saved_there_and_loaded_from_there(bucket, tiny, tmp_path):
    root = f"{bucket}/a/checkpoints"
    assert list_checkpoints(root) == [] and latest(root) is None
    local = save_here(tiny, tmp_path).path
    for step in (10, 20, 30):
        assert save_here(tiny, root, step, keep=Keep(2)).warnings == ()
    assert not save_here(tiny, root, 30).written, "a good one is not written again"
    assert [p.name for p in list_checkpoints(root)] == ["step-00000020", "step-00000030"]
    path = find(f"{bucket}/a")
    assert path.name == "step-00000030" and verify(path) == []
    here, there = read_manifest(local).files, read_manifest(path).files
    assert {n: r.xxh3 for n, r in here.items()} == {n: r.xxh3 for n, r in there.items()}
    other = make_state(tiny.plan.run)
    load_here(other, path)
    assert all(
        torch.equal(s.master, expected(s, "master")) and torch.equal(s.state["v"], expected(s, "v"))
        for s in other.optimizer.shards
    )
    load_weights(path, other.buffers, other.mesh)
    with pytest.raises(
        CheckpointError,
        match="there is no checkpoint in s3://bucket/mistyped|there is no checkpoint s3://bucket/mistyped",
    ):
        find(f"{bucket}/mistyped")


def test_damage_and_retries(bucket, tiny):
    root = place(f"{bucket}/c/checkpoints")
    path = save_here(tiny, root, 10).path
    file = path / "state/rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 4
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="rank-00000.safetensors is damaged: the tensor"):
        load_here(tiny, path)
    assert save_here(tiny, root, 10).written and verify(path) == []
    (path / NAME).unlink()
    assert list_checkpoints(root) == [], "without its manifest it is an upload that was not completed"


def test_a_run_with_its_checkpoints_there(bucket, tmp_path):
    """Two resumes, the last one from storage alone: the run's folder is another one."""
    whole = small_run(tmp_path / "whole", steps=6)
    train(whole, Placement())
    there = CheckpointConfig(dir=f"{bucket}/run", interval=2)
    optim = replace(whole.optim, decay_steps=6)
    for steps, folder in ((2, "one"), (4, "one"), (6, "two")):
        run = small_run(tmp_path / folder, steps=steps)
        train(replace(run, checkpoint=there, optim=optim), Placement())
    losses = {r["step"]: r["loss"] for folder in ("one", "two") for r in rows_of(small_run(tmp_path / folder))}
    assert losses == {r["step"]: r["loss"] for r in rows_of(whole)}
    assert [p.name for p in list_checkpoints(f"{bucket}/run")] == ["step-00000004", "step-00000006"]
    assert not (tmp_path / "one/checkpoints").exists()


READS = {
    "find": find,
    "latest": lambda path: latest(path.parent),
    "list": lambda path: list_checkpoints(path.parent),
    "ignored": ignored,
    "manifest": read_manifest,
    "exists": lambda path: path.exists(),
    "glob": lambda path: list(path.glob("*")),
    "stat": lambda path: path.stat(),
    "text": lambda path: (path / NAME).read_text(),
}


@pytest.mark.trust(
    18,
    "object storage that stops answering while a checkpoint is read",
    "one line with the path and what the client says, exit 4",
)
def test_a_server_that_does_not_answer(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with object_server() as bucket:
        path = save_here(tiny, f"{bucket}/run/checkpoints", 10).path
        opened = (path / NAME).open("rb")
        bucket.stop()
        for name, read in {
            **READS,
            "load": lambda path: load_here(tiny, path),
            "rest": lambda path: opened.read(),
        }.items():
            with pytest.raises(CheckpointError, match="object storage does not answer or refuses: .*Connect") as caught:
                read(path)
            assert f"{bucket}/run" in str(caught.value) and not isinstance(caught.value, DamagedCheckpoint), name
        [problem] = verify(path)
        assert "does not answer" in problem
        for words in (
            ["checkpoint", "list", f"{bucket}/run"],
            ["checkpoint", "verify", str(path)],
            ["generate", str(path), "--prompt", "x"],
        ):
            assert guarded(lambda words=words: cli.main(args=words, standalone_mode=False)) == 4, words
        run = replace(small_run(tmp_path / "run", steps=2), checkpoint=CheckpointConfig(dir=f"{bucket}/run"))
        with pytest.raises(CheckpointError, match="does not answer"):
            train(run, Placement())
