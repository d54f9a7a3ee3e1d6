"""Continuing a run: every difference of config and data is refused, told or recorded as its class says; resumes are
exact to the bit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.base import tree
from phalanx.base.errors import CheckpointError
from phalanx.base.log import Log
from phalanx.base.placement import Placement
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.keep import latest
from phalanx.checkpoint.manifest import read_manifest
from phalanx.config.run import RampConfig, Run
from phalanx.config.write import to_dict
from phalanx.data.config import DataConfig
from phalanx.data.index import CorpusWriter
from phalanx.models.gpt2 import GPT2Config
from phalanx.optim.adamw import AdamWConfig
from phalanx.optim.muon import MuonConfig
from phalanx.training.main import train
from phalanx.training.resume import changed_keys, check_resume, class_of
from tests.training.test_loop import RAMP, make_run, rows_of


def test_every_key_has_a_class():
    kinds = {key.path: class_of(key.path) for key in tree.leaves(Run)}
    fixed = {key for key, kind in kinds.items() if kind == "must match"}
    assert {key for key in fixed if not key.startswith("lora.")} == {"train.seq_length", "train.seed"}
    assert {key for key in kinds if key.startswith("lora.")} - fixed == {"lora.init_from"}, "adapters go on as they are"
    assert kinds["optim.lr"] == kinds["layout.tp"] == kinds["train.global_batch"] == "may change"
    assert kinds["log.interval"] == kinds["dir"] == kinds["data.paths"] == "recorded"
    with pytest.raises(KeyError):
        class_of("something.new")


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("begun"), steps=3)
    train(run, Placement())
    return run


def recomputed(begun, folder: Path, path: str, value) -> Run:
    shutil.copytree(begun.dir, folder / "run")
    run = replace(begun, dir=str(folder / "run"), train=replace(begun.train, steps=4))
    return tree.replace_at(run, path, value)


@pytest.mark.parametrize(
    "path, value, shown",
    [
        ("train.seq_length", 8, "train.seq_length 16 -> 8"),
        ("train.seed", 7, "train.seed 1234 -> 7"),
        ("model.hidden_size", 24, "model.hidden_size 16 -> 24"),
        ("model.rope_theta", 5e5, "model.rope_theta 10000.0 -> 500000.0"),
    ],
)
def test_what_must_match_is_refused_old_to_new(begun, tmp_path, path, value, shown):
    run = recomputed(begun, tmp_path, path, value)
    with pytest.raises(CheckpointError, match=shown.replace(".", r"\.")):
        train(run, Placement())
    both = tree.replace_at(tree.replace_at(run, "model.num_hidden_layers", 3), "train.seed", 5)
    with pytest.raises(CheckpointError) as error:
        train(both, Placement())
    assert "model.num_hidden_layers 2 -> 3" in str(error.value) and "train.seed 1234 -> 5" in str(error.value)
    assert len(rows_of(run)) == 3, "nothing was trained"


@pytest.mark.parametrize(
    "path, value, shown",
    [
        ("optim.lr", 1e-3, "optim.lr 0.003 -> 0.001"),
        ("train.micro_batch", 4, "train.micro_batch 2 -> 4"),
        ("train.precision", "bf16", 'train.precision "fp32" -> "bf16"'),
        ("optim.lr_scale", {"*norm*": 0.5}, 'optim.lr_scale {} -> {"*norm*": 0.5}'),
        ("model.initializer_range", 0.1, "model.initializer_range 0.02 -> 0.1"),
    ],
)
def test_what_may_change_is_told(begun, tmp_path, capsys, path, value, shown):
    train(recomputed(begun, tmp_path, path, value), Placement())
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("changed since"))
    assert shown in line and "train.steps 3 -> 4" in line and "dir" not in line


@pytest.mark.parametrize("section", ["optim", "optim.fallback"])
def test_learning_rates_by_name_are_compared_as_one(section, tmp_path):
    run = replace(make_run(tmp_path, steps=1), optim=MuonConfig(name="muon", fallback=AdamWConfig()))
    before, now = (to_dict(tree.replace_at(run, f"{section}.lr_scale", scale)) for scale in ({}, {"*0*": 0.5}))
    assert list(changed_keys(before, now)) == [(f"{section}.lr_scale", {}, {"*0*": 0.5})]


def test_what_is_recorded_is_not_told_but_written_down(begun, tmp_path, capsys):
    run = recomputed(begun, tmp_path, "train.timeout_s", 77.0)
    train(run, Placement())
    assert "timeout" not in capsys.readouterr().out
    assert read_manifest(latest(Path(run.dir) / "checkpoints")).config["train"]["timeout_s"] == 77.0


def test_allow_lets_one_key_differ(begun, tmp_path, capsys):
    run = recomputed(begun, tmp_path, "train.seed", 7)
    train(replace(run, checkpoint=CheckpointConfig(allow=["train.seed"])), Placement())
    assert [r["step"] for r in rows_of(run)] == [1, 2, 3, 4]


def test_a_folder_that_anybody_may_write_to_is_told(begun, tmp_path, capsys):
    run = recomputed(begun, tmp_path, "train.timeout_s", 77.0)
    checkpoints = Path(run.dir) / "checkpoints"
    checkpoints.chmod(0o777)
    train(run, Placement())
    told = [line for line in "".join(capsys.readouterr()).splitlines() if "may be written by anybody" in line]
    assert len(told) == 1 and str(checkpoints) in told[0] and "777" in told[0] and "chmod o-w" in told[0]
    checkpoints.chmod(0o1777)  # the sticky bit: nobody replaces what is another's
    train(replace(run, train=replace(run.train, steps=5)), Placement())
    assert "may be written by anybody" not in "".join(capsys.readouterr())


# --- data


def corpus(prefix: Path, seed: int, tokens: int = 4000) -> str:
    with CorpusWriter(prefix, np.uint16) as writer:
        writer.add_document(np.random.default_rng(seed).integers(0, 67, tokens))
    return str(prefix)


def test_another_file_of_the_same_size_is_seen_and_a_moved_one_is_the_same(tmp_path):
    first = replace(make_run(tmp_path / "run", steps=2), data=DataConfig(paths=(corpus(tmp_path / "text", 0),)))
    train(first, Placement())
    (tmp_path / "moved").mkdir()
    moved = replace(
        first, data=DataConfig(paths=(corpus(tmp_path / "moved/text", 0),)), train=replace(first.train, steps=3)
    )
    train(moved, Placement())
    corpus(tmp_path / "text", 1)
    swapped = replace(first, train=replace(first.train, steps=4))
    with pytest.raises(CheckpointError, match=r"data\.sources \[\"text: "):
        train(swapped, Placement())
    blend = replace(
        swapped, data=DataConfig(paths=(corpus(tmp_path / "text", 0), corpus(tmp_path / "more", 2)), weights=(1.0, 2.0))
    )
    with pytest.raises(CheckpointError, match=r"(?s)data\.order.*data\.sources"):
        train(blend, Placement())
    train(replace(blend, checkpoint=CheckpointConfig(allow=["data"])), Placement())
    assert [r["step"] for r in rows_of(first)] == [1, 2, 3, 4]


def test_another_tokenizer_is_seen(begun):
    """Same size, other merges: only the fingerprint, which is of what decides ids, tells them apart."""
    manifest = read_manifest(latest(Path(begun.dir) / "checkpoints"))
    before = manifest.scalars["facts"]
    assert "data.tokenizer" in before, "every checkpoint holds it"
    then = replace(manifest, scalars={**manifest.scalars, "facts": {**before, "data.tokenizer": "ab"}})
    with pytest.raises(CheckpointError, match=r'data\.tokenizer "ab" -> "cd"'):
        check_resume(begun, {**before, "data.tokenizer": "cd"}, then, Path("there"), Log())


# --- exactness
# --------------------------------------------------------------------------------------------------------------------

DROPOUT = GPT2Config(
    vocab_size=67,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=16,
    dropout=0.2,
    attention_dropout=0.1,
)


def exact(run: Run):
    """Everything that a run leaves behind: hex of every loss and norm, and the bytes of its last checkpoint."""
    manifest = read_manifest(latest(Path(run.dir) / "checkpoints"))
    numbers = [
        (r["step"], r["loss"].hex(), r["grad_norm"].hex(), r["consumed_samples"], r["skipped"]) for r in rows_of(run)
    ]
    return numbers, {n: r.xxh3 for n, r in manifest.files.items()}, manifest.optimizer, manifest.scalars


@pytest.mark.parametrize(
    "options, model",
    [
        (dict(rampup=RAMP), None),
        (dict(precision="fp16", loss_scale=2.0**24, loss_scale_window=3), None),
        (dict(precision="bf16"), DROPOUT),
        (dict(rampup=RampConfig(start=4, increment=4, samples=20), precision="bf16"), DROPOUT),
    ],
)
def test_two_resumes_in_a_row_are_exact(tmp_path, options, model):
    """Batch ramp, a loss scale that halves and doubles, dropout: stopped after 4 and after 9 of 12 steps."""
    found = []
    for name, stops in (("whole", (12,)), ("parts", (4, 9, 12))):
        run = make_run(tmp_path / name, **options)
        run = replace(run, model=model or run.model, optim=replace(run.optim, decay_steps=12))
        for steps in stops:
            train(replace(run, train=replace(run.train, steps=steps)), Placement())
        found.append(exact(run))
    assert found[0] == found[1]
    if options.get("precision") == "fp16":
        assert found[0][3]["skipped"] > 0 and float.fromhex(found[0][2]["scaler.scale"]) < 2.0**24
