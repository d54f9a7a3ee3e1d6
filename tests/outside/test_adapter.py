"""Adapters from outside the package, in one file that no file of ours names: a method that is not linear, found by
`lora.method=module:NAME`, in every layout, in checkpoints and from the command line; and what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from phalanx.checkpoint.contents import Contents
from phalanx.config.read import load_run, read
from phalanx.config.run import Run
from phalanx.forecast.check import Facts, check
from phalanx.layout.config import LayoutConfig
from phalanx.nn.adapter import find_adapter
from tests.harness import checkpoints, parity
from tests.harness.sample import rest_in_soak

OUTSIDE = Path(__file__).parent
if str(OUTSIDE) not in sys.path:
    sys.path.append(str(OUTSIDE))
PARALLEL = "parallel_adapter.parallel:Parallel"
STEPS = 2
LAYOUTS = {
    "tp2": ("llama", 2, {"tp": 2}),
    "pp2": ("llama", 2, {"pp": 2}),
    "dp2 sharding 3": ("llama", 2, {"sharding": 3, "bucket_mb": 0}),
    "tp2 ep2": ("mixtral", 2, {"tp": 2, "ep": 2}),
    "cp2": ("llama", 2, {"cp": 2}),
    "dp2, sharding 1": ("llama", 2, {"sharding": 1}),
    "dp2, sharding 2": ("llama", 2, {"sharding": 2}),
}
USUAL = ("tp2", "pp2", "dp2 sharding 3", "tp2 ep2")


def run_of(model: str, layout: dict, precision: str = "fp64", **fields) -> Run:
    run = replace(parity.base_run(model, precision=precision), layout=LayoutConfig(**layout))
    return replace(run, lora=find_adapter(PARALLEL).Config(method=PARALLEL, **fields))


def steps_on_rank(rank: int, world: int, model: str, layout: dict) -> dict:
    """The rank imports this module, so finds the package, before it makes the run."""
    return parity.run_layout(rank, world, run_of(model, layout), STEPS)


@pytest.mark.parametrize("name", rest_in_soak(LAYOUTS, USUAL))
def test_it_is_the_same_in_every_layout(ranks, name):
    """Truth: one process in float64."""
    model, world, layout = LAYOUTS[name]
    [alone] = ranks.run("tests.outside.test_adapter:steps_on_rank", 1, model, {"sharding": 0})
    truth = {**alone, "grads": [parity.assemble([g]) for g in alone["grads"]]}
    truth["weights"] = parity.assemble([alone["weights"]])
    grads = truth["grads"][0]
    assert all(n.endswith((".enter.weight", ".leave.weight")) for n in grads) and len(grads) > 20
    assert all(np.any(g) for n, g in grads.items() if ".experts." not in n)
    parity.compare(ranks.run("tests.outside.test_adapter:steps_on_rank", world, model, layout), truth, STEPS)


def save_on_rank(rank: int, world: int, layout: dict, root: Path) -> bool:
    return checkpoints.save_on_rank(rank, world, run_of("mixtral", layout, "bf16"), root, {})


def load_on_rank(rank: int, world: int, layout: dict, path: Path) -> list[str]:
    return checkpoints.load_on_rank(rank, world, run_of("mixtral", layout, "bf16"), path)


def test_checkpoints_go_from_layout_to_layout(ranks, tmp_path):
    assert all(ranks.run("tests.outside.test_adapter:save_on_rank", 2, {"tp": 2, "ep": 2}, tmp_path))
    path = tmp_path / "step-00000010"
    for world, layout in ((2, {"pp": 2, "sharding": 1}), (2, {"sharding": 3, "ep": 2})):
        assert not any(ranks.run("tests.outside.test_adapter:load_on_rank", world, layout, path))
    with Contents(path) as contents:
        mine = contents.shapes("m")
        assert mine and all(n.endswith((".enter.weight", ".leave.weight")) for n in mine)
    assert [p.name for p in (path / "adapter").iterdir()] == ["adapter_model.safetensors"], "PEFT has no such method"


# ---- the config

SMALL = ["model.family=llama", "model.vocab_size=64", "model.hidden_size=16", "model.intermediate_size=32"]
SMALL += ["model.num_hidden_layers=1", "model.num_attention_heads=2", "train.steps=1", "train.global_batch=1"]
SMALL += ["train.micro_batch=1", "train.seq_length=8", "data.mock=true"]


def test_the_config_has_the_fields_of_the_method():
    run = load_run(None, [*SMALL, f"lora.method={PARALLEL}", "lora.width=2", 'lora.targets=["*.q_proj.weight"]'])
    assert run.lora == find_adapter(PARALLEL).Config(method=PARALLEL, width=2, targets=["*.q_proj.weight"])
    assert load_run(None, [*SMALL, "lora.method=parallel"]).lora.method == PARALLEL, "another process must find it"
    assert load_run(None, SMALL).lora is None


@pytest.mark.parametrize(
    "overrides, field, rule, valid",
    [
        (
            "lora.method=parallel_adapter.paralel:Parallel",
            "lora.method",
            "there is no module parallel_adapter.paralel",
            PARALLEL,
        ),
        ("lora.method=parallel_adapter.parallel:Paralel", "lora.method", "has no Paralel", PARALLEL),
        (
            "lora.method=parallel_adapter.parallel:Unfinished",
            "lora.method",
            "has no delta(self, x: Tensor) -> Tensor",
            None,
        ),
        ("lora.method=parallel_adapter.parallel:Elsewhere", "lora.method", "is not derived from phalanx.Adapter", None),
        ("lora.method=lorra", "lora.method", 'must be one of "lora"', "lora"),
        (f"lora.method={PARALLEL} lora.rank=4", "lora.rank", "is a key of lora only with method lora", None),
        (f"lora.method={PARALLEL} lora.widht=4", "lora.widht", "is not a key of lora", "lora.width"),
    ],
)
def test_what_is_refused(overrides, field, rule, valid):
    found = {p.field: p for p in read(None, [*SMALL, *overrides.split()]).problems}
    assert list(found) == [field] and rule in found[field].rule
    assert valid is None or valid in found[field].valid


def test_experts_cut_over_etp_take_linear_methods_alone():
    """What `down` gives there is a part of a sum, so gelu of it would be wrong."""
    layout = {"etp": 2}
    facts = Facts(world_size=2, local_ranks=2, files=False)
    found = {p.field: p for p in check(run_of("mixtral", layout), facts)}
    assert "a method that is not linear" in found["layout.etp"].rule and found["layout.etp"].valid == (1,)
    some = run_of("mixtral", layout, targets=["*.w1.weight", "*.w3.weight", "*proj*"])
    assert "layout.etp" not in {p.field for p in check(some, facts)}


def test_the_program_finds_it_by_path_and_a_checkpoint_does_not_import_it(warm, tmp_path):
    root = Path(__file__).parents[2]
    program = partial(warm.phalanx, cwd=root, env={"PYTHONPATH": f"{root}:{OUTSIDE}"})
    run = f"{tmp_path}/run"
    done = program("train", "recipes/tiny_llama.yaml", "train.steps=1", f"lora.method={PARALLEL}", f"dir={run}")
    assert done.returncode == 0, done.stderr
    assert f"method: {PARALLEL}" in Path(run, "config.yaml").read_text(encoding="utf-8")
    refused = program("eval", run)
    assert refused.returncode == 2 and f"type lora.method={PARALLEL}" in refused.stderr
