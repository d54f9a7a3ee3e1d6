"""FP8 recipes from outside the package, in one file that no file of ours names (outside/microscaled/recipes.py): a
layout changes nothing, checkpoints go from layout to layout, a run resumes by the recipe's path; and what is
refused."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.base.placement import Placement
from phalanx.comm.axis import ModelAxes
from phalanx.config.read import load_run, read
from phalanx.config.run import Fp8Config, Run
from phalanx.forecast.check import Facts, check
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.models.llama import LlamaConfig
from phalanx.models.mixtral import MixtralConfig
from phalanx.ops.quantized.quantizer import DY, W, WeightQuantizer, X
from phalanx.ops.quantized.recipes import E2M1, E4M3, E5M2, Recipe, block_amax, dequantize, find_recipe
from phalanx.training.main import train
from tests.harness import parity
from tests.harness.sample import rest_in_soak
from tests.training.test_loop import make_run

OUTSIDE = Path(__file__).parent
if str(OUTSIDE) not in sys.path:
    sys.path.append(str(OUTSIDE))
SQUARES, ALL_E4M3 = "microscaled.recipes:SQUARES", "microscaled.recipes:ALL_E4M3"
STEPS = 2
SIZES = dict(vocab_size=131, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=32)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2)
MODELS = {
    "llama": LlamaConfig(**SIZES, **HEADS),
    "mixtral": MixtralConfig(**SIZES, **HEADS, num_local_experts=4, num_experts_per_tok=2),
}
LAYOUTS = {
    "tp2": ("llama", 2, SQUARES, {"tp": 2}),
    "pp2": ("llama", 2, SQUARES, {"pp": 2}),
    "dp2, sharding 3": ("llama", 2, SQUARES, {"sharding": 3, "bucket_mb": 0}),
    "cp2": ("llama", 2, SQUARES, {"cp": 2}),
    "dp2 tp2, sharding 3, scales of earlier steps": ("llama", 4, ALL_E4M3, {"tp": 2, "sharding": 3, "bucket_mb": 0}),
    "tp2 pp2, scales of earlier steps": ("llama", 4, ALL_E4M3, {"tp": 2, "pp": 2}),
    "cp2, scales of earlier steps": ("llama", 2, ALL_E4M3, {"cp": 2}),
    "dp2, experts": ("mixtral", 2, SQUARES, {"sharding": 1}),
}
USUAL = ("tp2", "pp2", "dp2 tp2, sharding 3, scales of earlier steps")


def run_of(model: str, recipe: str | None, layout: dict, precision: str = "fp64") -> Run:
    sizes = dict(global_batch=16, micro_batch=8)
    if layout.get("cp"):  # each rank has two chunks of a sequence, of whole blocks of tokens
        sizes = dict(global_batch=2, micro_batch=1, seq_length=128)
    run = parity.base_run("llama", **sizes, precision=precision)
    fp8 = None if recipe is None else Fp8Config(recipe=recipe)
    return replace(run, model=MODELS[model], train=replace(run.train, fp8=fp8), layout=LayoutConfig(**layout))


@pytest.mark.parametrize("name", rest_in_soak(LAYOUTS, USUAL))
def test_a_layout_changes_nothing(ranks, name):
    """Truth: one process in float64, whose quantized values are the same; without the recipe its loss is another."""
    model, world, recipe, layout = LAYOUTS[name]
    run = run_of(model, recipe, layout)
    truth = parity.truth_of(ranks, run, STEPS, False)
    plain = parity.truth_of(ranks, run_of(model, None, layout), STEPS, False)
    assert 1e-5 < abs(truth["losses"][1][0] / plain["losses"][1][0] - 1) < 0.1
    parity.compare(ranks.run("tests.harness.parity:run_layout", world, run, STEPS, False), truth, STEPS)


@pytest.mark.parametrize(
    "which, dtype, block",
    [(X, torch.float8_e4m3fn, (1, 32)), (W, torch.float8_e4m3fn, (32, 32)), (DY, torch.float8_e5m2, (1, 32))],
)
def test_values_are_as_it_says(which, dtype, block):
    """Formats and blocks in both directions; scales are powers of two, with which no value is clamped or far off."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 96)
    both = WeightQuantizer(find_recipe(SQUARES), "w", 0, ModelAxes(), "plain").both(which, x, 0, turn=False)
    for found, expected in zip(both, (block, block[::-1])):
        assert (found.quantized.dtype, found.block) == (dtype, expected)
        assert torch.equal(found.scales.log2(), found.scales.log2().round())
        largest = block_amax(x, expected).repeat_interleave(expected[0], 0).repeat_interleave(expected[1], 1)
        assert ((dequantize(found, torch.float32) - x).abs() <= largest * 2.0**-3).all()


def test_checkpoints_go_from_layout_to_layout(ranks, tmp_path):
    """Quantized weights of ALL_E4M3 are stored in place of the weights: the masters are what is saved."""
    saved = run_of("llama", ALL_E4M3, {"sharding": 3, "bucket_mb": 0}, "bf16")
    assert all(ranks.run("tests.harness.checkpoints:save_on_rank", 2, saved, tmp_path, {}))
    loaded = run_of("llama", SQUARES, {"tp": 2}, "bf16")
    path = tmp_path / "step-00000010"
    assert not any(ranks.run("tests.harness.checkpoints:load_on_rank", 2, loaded, path))


def test_a_plan_follows_it():
    """Quantized values with fp32 scales are also those of the transpose, so they replace the weights; values with
    powers of two stay beside them."""
    plans = {name: make_plan(run_of("llama", name, {"sharding": 3}), 2) for name in (SQUARES, ALL_E4M3)}
    assert [len(plan.fp8_names) for plan in plans.values()] == [8, 8]
    assert [any(b.coded for b in plan.rank(0).buckets) for plan in plans.values()] == [False, True]


def test_a_run_resumes_by_its_path(tmp_path):
    """The resolved config finds it in another process."""
    run = make_run(tmp_path / "run", steps=2)
    own = replace(run.train, fp8=Fp8Config(recipe=SQUARES))
    run = replace(run, model=MODELS["llama"], train=own)
    train(run, Placement())
    loaded = load_run(f"{run.dir}/config.yaml", [f"train.fp8.recipe={SQUARES}", "train.steps=3"])
    assert loaded.train.fp8 == own.fp8
    train(loaded, Placement())
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]


SMALL = ["model.family=llama", "model.vocab_size=64", "model.hidden_size=64", "model.intermediate_size=64"]
SMALL += ["model.num_hidden_layers=1", "model.num_attention_heads=2", "train.steps=8", "train.global_batch=4"]
SMALL += ["train.micro_batch=4", "train.seq_length=16", "train.precision=bf16", "data.mock=true"]


@pytest.mark.parametrize(
    "overrides, field, rule, valid",
    [
        ("train.fp8.recipe=blockwize", "recipe", 'must be one of "tensorwise", "delayed", "rowwise"', "blockwise"),
        ("train.fp8.recipe=microscaled.recipes:SQUARE", "recipe", "leads nowhere", SQUARES),
        ("train.fp8.recipe=microscaled.recipe:SQUARES", "recipe", "there is no module microscaled.recipe", SQUARES),
        ("train.fp8.recipe=microscaled.recipes:NAMES", "recipe", "must be a Recipe of phalanx.ops.quantized", None),
        (f"train.fp8.recipe={SQUARES} train.fp8.history=3", "history", "has no effect without recipe=delayed", 1024),
        (f"train.fp8.recipe={SQUARES} model.intermediate_size=80", "recipe", "whole blocks of scales", "tensorwise"),
    ],
)
def test_what_is_refused(overrides, field, rule, valid):
    loaded = read(None, [*SMALL, *overrides.split()])
    found = {p.field: p for p in loaded.problems or check(loaded.run, Facts(1))}
    assert list(found) == [f"train.fp8.{field}"]
    problem = found[f"train.fp8.{field}"]
    assert rule in problem.rule and (valid is None or valid in problem.valid)


def test_a_gpu_that_lacks_its_matmuls_is_refused():
    ampere = Facts(1, device="cuda", device_name="NVIDIA A100", capability=(8, 0))
    run = load_run(None, [*SMALL, f"train.fp8.recipe={ALL_E4M3}"])
    [problem] = [p for p in check(run, ampere) if p.field.startswith("train.fp8")]
    assert "compute capability 8.9" in problem.rule and problem.valid == ("mxfp8", "nvfp4")
    run = replace(run, train=replace(run.train, fp8=Fp8Config(recipe=SQUARES)))
    assert not [p for p in check(run, ampere) if p.field.startswith("train.fp8")]


@pytest.mark.parametrize(
    "fields, rule",
    [
        (dict(tokens=(1, 48), weight=(32, 32), emulated=True), "divide 128"),
        (dict(tokens=(4, 4), weight=(4, 4), emulated=True), "tokens must be"),
        (dict(tokens=(1, 32), weight=(0, 32), emulated=True), "weight must be"),
        (dict(tokens=(1, 32), weight=(32, 32), delayed=True, emulated=True), "scales are those of whole tensors"),
        (dict(tokens=(1, 0), weight=(1, 0), scale="power of 2", emulated=True), "must be fp32"),
        (dict(tokens=(1, 32), weight=(32, 32), at_random=True, emulated=True), "at_random needs gradients in E2M1"),
        (dict(tokens=(1, 32), weight=(32, 32)), "emulated=True"),
        (dict(tokens=(1, 0), weight=(1, 0), backward=E5M2), "emulated=True"),
        (dict(tokens=(0, 0), weight=(0, 0), forward=E2M1), "emulated=True"),
        (dict(tokens=(0, 0), weight=(0, 0), hadamard=16), "emulated=True"),
    ],
)
def test_a_recipe_that_nothing_computes_is_refused_where_it_is_made(fields, rule):
    with pytest.raises(ValueError, match=rule):
        Recipe(**{"forward": E4M3, "backward": E4M3, **fields})


def test_code_named_by_a_checkpoint_is_not_imported():
    given = {"train": {"fp8": {"recipe": "evil.module:NAME"}}}
    found = read(None, SMALL, given, base_from="a checkpoint").problems
    assert [p.field for p in found] == ["train.fp8.recipe"] and "imported only if you name it" in found[0].rule
