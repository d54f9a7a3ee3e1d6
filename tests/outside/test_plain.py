"""A family of another package, in one file (plain.py), through everything that a family of Phalanx goes through."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from phalanx.base.errors import CheckpointError, ConfigError
from phalanx.checkpoint.hf import from_hf, read_folder
from phalanx.config.read import load_run
from phalanx.config.run import Run, TrainConfig
from phalanx.config.write import to_dict
from phalanx.data.config import DataConfig
from phalanx.forecast.decide import make_plan
from phalanx.forecast.text import plan_text
from phalanx.layout.config import LayoutConfig
from phalanx.models.registry import load_family
from phalanx.verifying.shrink import shrink
from tests.harness.parity import SEQ, VOCAB, compare, truth_of
from tests.harness.sample import rest_in_soak
from tests.outside.plain import PlainConfig
from tests.verifying.test_verify import is_valid_and_passes

NAME = "tests.outside.plain:FAMILY"
STEPS = 2
MODEL = PlainConfig(
    family=NAME,
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=42,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    final_logit_softcapping=2.0,
)
LAYOUTS = {
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "dp2, sharding 3": (2, {"sharding": 3}),
    "cp2": (2, {"cp": 2}),
    "dp2, sharding 0": (2, {"sharding": 0}),
    "dp2, sharding 1": (2, {"sharding": 1}),
    "dp2, sharding 2": (2, {"sharding": 2}),
    "tp2 cp2, sharding 3": (4, {"tp": 2, "cp": 2, "sharding": 3}),
}
USUAL = ("tp2", "pp2", "cp2", "dp2, sharding 3")


def run_of(tied: bool = False, **layout: object) -> Run:
    train = TrainConfig(steps=10, global_batch=8, micro_batch=1, seq_length=SEQ, precision="fp64")
    model = replace(MODEL, tie_word_embeddings=tied)
    return Run(model=model, train=train, layout=LayoutConfig(**layout), data=DataConfig(mock=True))


@pytest.mark.parametrize("name", rest_in_soak(LAYOUTS, USUAL))
def test_a_layout_changes_nothing(ranks, name):
    world, layout = LAYOUTS[name]
    run = run_of(tied=name == "pp2", **layout)
    truth = truth_of(ranks, run, STEPS, False)
    compare(ranks.run("tests.harness.parity:run_layout", world, run, STEPS, False), truth, STEPS)


def test_saved_under_one_layout_and_loaded_under_another(ranks, tmp_path):
    assert all(ranks.run("tests.harness.checkpoints:save_on_rank", 2, run_of(tp=2), tmp_path, {}))
    (path,) = tmp_path.glob("step-*")
    for found in ranks.run("tests.harness.checkpoints:load_on_rank", 2, run_of(sharding=3), path):
        assert found == []
    assert json.loads((path / "manifest.json").read_text())["model"]["family"] == NAME
    written = json.loads((path / "weights/config.json").read_text())
    assert written["model_type"] == "plain" and written["architectures"] == ["PlainForCausalLM"]
    load_family(NAME)  # as a config that names it does: what a folder names is never imported
    folder = read_folder(path)
    assert folder.model == replace(MODEL, head_dim=8) and from_hf(written) == folder.model
    copy = tmp_path / "copy"
    (path / "weights").rename(copy)  # a Hugging Face folder, without the manifest beside it
    named = load_run(None, [f"init_from={copy}", f"model.family={NAME}", *SIZES[6:]])
    assert named.model == folder.model
    with pytest.raises(CheckpointError, match="activation"):
        from_hf({**written, "hidden_act": "activation"})


SIZES = [
    f"model.family={NAME}",
    "model.vocab_size=131",
    "model.hidden_size=32",
    "model.intermediate_size=42",
    "model.num_hidden_layers=4",
    "model.num_attention_heads=4",
    "train.steps=1",
    "train.global_batch=8",
    "train.micro_batch=1",
    "train.seq_length=16",
]


def test_what_a_checkpoint_names_is_not_imported(ranks, tmp_path):
    """The manifest names a module that is there, and that nobody's config named."""
    assert all(ranks.run("tests.harness.checkpoints:save_on_rank", 2, run_of(tp=2), tmp_path, {}))
    (path,) = tmp_path.glob("step-*")
    code = (
        "import sys\n"
        "from phalanx.base.errors import CheckpointError\n"
        "from phalanx.checkpoint.hf import read_folder\n"
        "try: read_folder(sys.argv[1])\n"
        "except CheckpointError as error: assert 'is no family of Phalanx' in str(error), error\n"
        "else: raise AssertionError('read')\n"
        "assert 'tests.outside.plain' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_a_config_names_it():
    run = load_run(None, [*SIZES, "model.final_logit_softcapping=2.0"])
    assert isinstance(run.model, PlainConfig) and run.model.family == NAME
    assert to_dict(run)["model"]["family"] == NAME and load_run(None, (), to_dict(run)) == run
    assert "Plain" in "".join(facts.name for facts in make_plan(run, 2).facts)
    with pytest.raises(ConfigError, match="is not a key of model"):
        load_run(None, [*SIZES, "model.final_logit_soft=2.0"])


@pytest.mark.parametrize(
    "name, said",
    [
        ("tests.outside.plain:FAMLY", "has no FAMLY. Valid near it: tests.outside.plain:FAMILY"),
        ("tests.outsid.plain:FAMILY", "no module tests.outsid on Python's path"),
        ("tests.outside.plain:PlainLayer", "is not derived from phalanx.Family"),
        ("tests.outside.broken:NO_SIZES", "its config Sizeless has no vocab_size: int, no hidden_size: int"),
        ("tests.outside.broken:NO_ENV", "must be a function of (config, env): too many positional arguments"),
        ("tests.outside.broken:AGAIN", "model_type 'llama' is of two families: phalanx.models.llama:FAMILY and"),
    ],
)
def test_a_name_that_leads_to_no_family_is_a_problem_of_the_config(name, said):
    with pytest.raises(ConfigError) as error:
        load_run(None, [f"model.family={name}", *SIZES[1:]])
    assert "model.family" in str(error.value) and said in str(error.value)


def test_plan_and_verify_work_on_it(ranks):
    run = run_of(tp=2, pp=2)
    assert NAME in plan_text(run, 4)
    small = shrink(run, 4)
    assert isinstance(small.run.model, PlainConfig) and small.run.model.final_logit_softcapping == 2.0
    is_valid_and_passes(ranks, small)
