"""Adapters of linears: the same in every layout as in one process, and only they are trained."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from phalanx.comm.axis import Work
from phalanx.comm.debug import Site
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.engine.build import build
from phalanx.engine.step import accumulate, evaluate_step, update
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.nn.adapter import find_adapter
from phalanx.verifying.compare import random_weights
from tests.harness import parity
from tests.harness.in_flight import InFlight
from tests.harness.pool import RanksFailed
from tests.harness.sample import rest_in_soak

STEPS = 2


def lora(run: Run, method: str = "lora", **fields) -> Run:
    return replace(run, lora=find_adapter(method).Config(method=method, **fields))


LAYOUTS = [
    ("qwen2", 2, {"tp": 2}),
    ("llama", 4, {"tp": 2, "pp": 2}),
    ("llama", 4, {"tp": 4}),  # two key/value heads
    ("gpt2", 2, {"tp": 2}),  # q, k and v as one matrix
    ("phi3", 2, {"tp": 2}),  # and gate and up
    ("qwen3", 2, {"sharding": 3, "bucket_mb": 0}),
    ("mistral", 2, {"cp": 2}),
    ("deepseek_v3", 2, {"tp": 2}),
    ("mixtral", 2, {"ep": 2}),
    ("mixtral", 4, {"tp": 2, "ep": 2, "etp": 2}),
    ("qwen3_moe", 4, {"ep": 2, "etp": 2, "sharding": 3}),  # etp is no part of tp
    ("deepseek_v3-mtp", 4, {"pp": 2, "ep": 2, "dispatch": "alltoall"}),
]


def in_test(cases: list, *models: str) -> list:
    """The cases as parameters; those of other models than these are for `make soak`."""
    return [pytest.param(*case, marks=() if case[0] in models else pytest.mark.soak) for case in cases]


@pytest.mark.parametrize(
    "model, world, layout",
    in_test(LAYOUTS, "qwen2", "llama", "qwen3", "qwen3_moe", "deepseek_v3-mtp"),
    ids=[f"{m} {lay}" for m, _, lay in LAYOUTS],
)
def test_lora_is_the_same_in_every_layout(ranks, model, world, layout):
    """Truth: one process in float64: losses, norms, gradients and weights of A and B."""
    run = lora(replace(parity.base_run(model), layout=LayoutConfig(**layout)), rank=3, alpha=5.0)
    truth = parity.truth_of(ranks, run, STEPS, False)
    mine = [name for name in truth["weights"] if ".lora_" in name]
    assert mine and truth["grads"][0].keys() == set(mine)
    assert all(np.any(truth["grads"][0][name]) for name in mine if ".experts." not in name)  # some get no token
    parity.compare(ranks.run("tests.harness.parity:run_layout", world, run, STEPS, False), truth, STEPS)
    start = parity.truth_of(ranks, run, 0, False)["weights"]
    for name, value in truth["weights"].items():
        assert np.array_equal(value, start[name]) or name in mine, name


ONE_PASS = [
    (3, {"tp": 3}, {}),
    (2, {"tp": 2, "tp_overlap": "on"}, {"recompute": "full"}),  # through memory that ranks share
    (4, {"tp": 2, "tp_overlap": "on", "pp": 2, "schedule": "zb_h1"}, {}),  # weight gradients wait
]


@pytest.mark.parametrize("world, layout, train", ONE_PASS, ids=[str(layout) for _, layout, _ in ONE_PASS])
@pytest.mark.parametrize("start", rest_in_soak(("random", "pissa"), ("random",)))
def test_terms_that_are_added_in_the_pass_of_the_linear(ranks, world, layout, train, start):
    """Truth: one process in float64. One key/value head, and a sequence that three ranks can cut."""
    base = parity.base_run("llama", seq_length=24, **train)
    model = replace(base.model, num_attention_heads=6, num_key_value_heads=1)
    run = lora(replace(base, model=model, layout=LayoutConfig(**layout)), rank=3, alpha=5.0, start=start)
    truth = parity.truth_of(ranks, run, STEPS, False)
    assert all(np.any(value) for value in truth["grads"][0].values())
    parity.compare(ranks.run("tests.harness.parity:run_layout", world, run, STEPS, False), truth, STEPS)


def in_flight(rank: int, world: int, run: Run, hasty: bool) -> tuple[int, list[str]]:
    """Of a step: how many exchanges were waited for, and what was touched before. hasty: what adapters exchange is
    read at once."""
    plan = make_plan(run, world)
    mesh = Mesh(plan.grid, rank)
    state = build(plan, mesh)
    random_weights(state.model)
    state.model.train()
    batches, reduce_scatter = parity.step_batches(run, mesh, 0, False), mesh.tp.reduce_scatter

    def read_early(x: torch.Tensor, async_op: bool = False) -> Work:
        work = reduce_scatter(x, async_op)
        work.result.sum()
        return work

    early = mock.patch.object(mesh.tp, "reduce_scatter", read_early if hasty else reduce_scatter)
    with InFlight().watching() as watch, early:
        update(state, accumulate(state, batches), lr=1e-2)
    return watch.waited, watch.found + watch.unwaited


@pytest.mark.parametrize(
    "model, layout",
    [
        ("llama", {"tp": 2, "tp_overlap": "off"}),
        ("llama", {"tp": 2, "tp_overlap": "on"}),
        pytest.param("mixtral", {"tp": 2, "ep": 2}, marks=pytest.mark.soak),
        pytest.param("llama", {"cp": 2, "sharding": 3}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_nothing_in_flight_is_touched(ranks, model, layout):
    """Adapters' exchanges go on under matmuls: on a GPU, what is read before it was waited for would be a race, and
    what is never waited for the end of a capture."""
    run = lora(replace(parity.base_run(model), layout=LayoutConfig(**layout)), rank=3)
    for waited, found in ranks.run("tests.nn.test_adapters:in_flight", 2, run, False):
        assert waited > run.model.num_hidden_layers and not found
    if "tp" in layout:
        assert all(found for _, found in ranks.run("tests.nn.test_adapters:in_flight", 2, run, True))


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"cp": 2, "sharding": 3}])
def test_an_embedding_has_an_adapter_where_it_is_named(ranks, layout):
    """Truth: one process in float64."""
    run = replace(parity.base_run("qwen2"), layout=LayoutConfig(**layout))
    run = lora(run, rank=3, targets=["*.v_proj.weight", "*embed_tokens*"])
    truth = parity.truth_of(ranks, run, STEPS, False)
    mine = [name for name in truth["grads"][0] if "lora_embedding_" in name]
    assert len(mine) == 2 and all(np.any(truth["grads"][0][name]) for name in mine)
    parity.compare(ranks.run("tests.harness.parity:run_layout", 2, run, STEPS, False), truth, STEPS)


HEADS = [
    ("llama", 2, {"tp": 2}, {}, {}),
    ("qwen3", 4, {"tp": 2, "pp": 2}, {"deterministic": True}, {}),  # gradients of the head are made in backward
    ("mistral", 2, {"cp": 2, "sharding": 3}, {}, {"dropout": 0.4}),
]


@pytest.mark.parametrize("model, world, layout, train, fields", HEADS, ids=[f"{m} {lay}" for m, _, lay, *_ in HEADS])
def test_the_head_has_an_adapter_where_it_is_named(ranks, model, world, layout, train, fields):
    """Truth: one process in float64. (tests/models/test_peft.py compares with PEFT.)"""
    run = replace(parity.base_run(model, **train), layout=LayoutConfig(**layout))
    run = lora(run, rank=3, targets=["*.v_proj.weight", "lm_head.weight"], **fields)
    truth = parity.truth_of(ranks, run, STEPS, False)
    mine = [name for name in truth["grads"][0] if name.startswith("lm_head.lora_")]
    assert len(mine) == 2 and all(np.any(truth["grads"][0][name]) for name in mine)
    parity.compare(ranks.run("tests.harness.parity:run_layout", world, run, STEPS, False), truth, STEPS)


STACKED = [
    (2, {"tp": 2}, "bf16"),
    (4, {"tp": 2, "ep": 2, "etp": 2}, "bf16"),
    (4, {"ep": 2, "sharding": 3, "bucket_mb": 0}, "int4"),
]


@pytest.mark.parametrize("world, layout, base", STACKED, ids=[str(layout) for _, layout, _ in STACKED])
def test_experts_that_are_one_tensor_have_adapters_where_they_are_named(ranks, world, layout, base):
    """Truth: one process in float64. Gate and up are interleaved, and have biases."""
    run = replace(parity.base_run("gpt_oss"), layout=LayoutConfig(**layout))
    run = lora(run, rank=3, targets=["*.v_proj.weight", "*.experts.*"], base=base)
    truth = parity.truth_of(ranks, run, STEPS, False)
    mine = [name for name in truth["grads"][0] if ".experts." in name]
    assert len(mine) == 4 * run.model.num_hidden_layers and all(np.any(truth["grads"][0][name]) for name in mine)
    parity.compare(ranks.run("tests.harness.parity:run_layout", world, run, STEPS, False), truth, STEPS)


DROPPED = [
    ("qwen3", 4, {"tp": 2, "pp": 2}, {"recompute": "full"}),
    ("gpt2", 2, {"cp": 2}, {}),  # which has dropout of its own
    ("deepseek_v3-dense", 2, {"tp": 2}, {"recompute": "selective"}),  # whose down-projections are whole on each rank
    ("mistral", 2, {"sharding": 3, "bucket_mb": 0}, {"recompute_ops": ["qkv", "up"]}),
]


@pytest.mark.parametrize(
    "model, world, layout, train",
    in_test(DROPPED, "qwen3", "mistral"),
    ids=[f"{m} {lay}" for m, _, lay, _ in DROPPED],
)
def test_dropout_of_the_input_is_the_same_in_every_layout(ranks, model, world, layout, train):
    """Truth: one process in float64 that recomputes nothing. (tests/models/test_peft.py has the formula.)"""
    plain = replace(parity.base_run(model), layout=LayoutConfig(**layout))
    run = lora(plain, rank=3, dropout=0.4)
    truth = parity.truth_of(ranks, run, STEPS, False)
    without = parity.truth_of(ranks, lora(plain, rank=3), STEPS, False)
    assert all(abs(a[0] - b[0]) > 1e-6 for a, b in zip(truth["losses"], without["losses"]))
    run = replace(run, train=replace(run.train, **train))
    parity.compare(ranks.run("tests.harness.parity:run_layout", world, run, STEPS, False), truth, STEPS)


def test_nothing_is_dropped_in_evaluation():
    """Truth: the same run without dropout. Its training loss differs."""
    found = {}
    for dropout in (0.0, 0.5):
        run = lora(parity.base_run("qwen3"), rank=3, dropout=dropout)
        mesh = Mesh(make_plan(run, 1).grid, 0)
        state = build(make_plan(run, 1), mesh)
        random_weights(state.model)
        batches = parity.step_batches(run, mesh, 0, False)
        found[dropout] = evaluate_step(state.model, batches)[0].item()
        state.model.train()
        tokens = accumulate(state, batches)
        trained = update(state, tokens, 0.0).loss.item() * tokens.item()
        assert (trained == pytest.approx(found[dropout])) == (dropout == 0.0)
    assert found[0.0] == found[0.5]


DORA = [
    ("qwen2", 2, {"tp": 2}),  # biases of q, k and v
    ("llama", 4, {"tp": 4}),  # two key/value heads
    ("llama-tied", 4, {"tp": 2, "pp": 2}),
    ("gpt2", 2, {"tp": 2}),  # q, k and v as one matrix
    ("qwen3", 2, {"sharding": 3, "bucket_mb": 0}),
    ("mistral", 2, {"cp": 2}),
    ("deepseek_v3", 4, {"tp": 2, "ep": 2}),
    ("mixtral", 4, {"tp": 2, "ep": 2, "etp": 2}),
    ("qwen3_moe", 4, {"ep": 2, "etp": 2, "sharding": 3}),
    ("mixtral", 2, {"ep": 2, "dispatch": "push"}),
]
EACH = ["*norm*", "*embed_tokens*"]
CHOSEN = {  # what is trained whole
    "gpt2": ["*.ln_*", "*wte*"],
    "deepseek_v3": ["*layernorm*"],
    "llama": [*EACH, "lm_head.weight"],
}


@pytest.mark.parametrize(
    "model, world, layout",
    in_test(DORA, "gpt2", "qwen3_moe"),
    ids=[f"{m} {lay}" for m, _, lay in DORA],
)
def test_dora_is_the_same_in_every_layout(ranks, model, world, layout):
    """Truth: one process in float64. Norms, embedding and head are trained whole beside it."""
    run = replace(parity.base_run(model), layout=LayoutConfig(**layout))
    run = lora(run, "dora", rank=3, alpha=5.0, also=CHOSEN.get(model, EACH))
    truth = parity.truth_of(ranks, run, STEPS, False)
    grads = truth["grads"][0]
    assert any(name.endswith("lora_magnitude_vector") for name in grads)
    assert any("norm" in name or ".ln_" in name for name in grads)
    assert all(np.any(value) for name, value in grads.items() if ".experts." not in name)  # some get no token
    parity.compare(ranks.run("tests.harness.parity:run_layout", world, run, STEPS, False), truth, STEPS)
    start = parity.truth_of(ranks, run, 0, False)["weights"]
    for name, value in truth["weights"].items():
        assert np.array_equal(value, start[name]) or name in grads, name


PISSA = [("qwen3", 2, {"tp": 2, "sharding": 3}), ("mixtral", 4, {"tp": 2, "ep": 2, "etp": 2}), ("gpt2", 2, {"pp": 2})]


@pytest.mark.parametrize(
    "model, world, layout", in_test(PISSA, "qwen3", "gpt2"), ids=[f"{m} {lay}" for m, _, lay in PISSA]
)
def test_pissa_is_the_same_in_every_layout(ranks, model, world, layout):
    """Truth: one process in float64, in which the four matrices are random. Two of them stay as they are."""
    run = lora(replace(parity.base_run(model), layout=LayoutConfig(**layout)), rank=3, start="pissa")
    truth = parity.truth_of(ranks, run, STEPS, False)
    assert truth["grads"][0] and not any(".start_" in name for name in truth["grads"][0])
    parity.compare(ranks.run("tests.harness.parity:run_layout", world, run, STEPS, False), truth, STEPS)
    start = parity.truth_of(ranks, run, 0, False)["weights"]
    assert all(np.array_equal(value, start[n]) for n, value in truth["weights"].items() if ".start_" in n)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("model", ["llama", "mixtral", "gpt2"])
def test_frozen_bytes_stay_through_many_steps(ranks, model, method):
    run = lora(replace(parity.base_run(model, precision="bf16"), layout=LayoutConfig(tp=2)), method, rank=3)
    first, last = (
        parity.assemble(
            [r["weights"] for r in ranks.run("tests.harness.parity:run_layout", 2, run, steps, timeout=500.0)]
        )
        for steps in (0, 50)
    )
    same = {name for name, value in last.items() if np.array_equal(value, first[name])}
    assert same == {name for name in last if ".lora_" not in name}


def test_the_sum_over_cut_inputs_matters(ranks):
    """Dropping the one collective of adapters' own makes the comparison with one process fail."""
    run = replace(parity.base_run("qwen3", global_batch=2, recompute="full"), layout=LayoutConfig(tp=2))
    run = lora(run, "dora", rank=3, targets=["*.down_proj.weight"])
    truth = parity.truth_of(ranks, run, 1, False)
    results = ranks.run("tests.harness.parity:run_layout", 2, run, 1, False, None, True)
    sites = {Site(*site) for result in results for site in result["sites"]}
    (mine,) = {site for site in sites if "adapted_linear" in site.file}
    assert (mine.axis, mine.op) == ("tp", "all_reduce")
    for result in results:  # of each matrix once, for two micro-batches that are recomputed
        counts = dict(zip(map(Site._make, result["sites"]), result["counts"]))
        assert counts[mine] == run.model.num_hidden_layers
    with pytest.raises((AssertionError, RanksFailed)):
        parity.compare(ranks.run("tests.harness.parity:run_layout", 2, run, 1, False, mine), truth, 1)


@pytest.mark.parametrize(
    "model, layout, train",
    [
        ("llama", {"pp": 2}, {}),  # the first stage has nothing to train
        ("llama", {"tp": 2, "sharding": 2}, {"recompute": "full"}),
        ("mixtral", {"ep": 2}, {"deterministic": True}),  # gradients of micro-batches stay apart
    ],
)
def test_few_targets(ranks, model, layout, train):
    """Truth: one process. Linears of the last layer alone have adapters, and one of several matrices of a linear."""
    last = parity.MODELS[model].num_hidden_layers - 1
    globs = [f"*.layers.{last}.*.v_proj.*", f"*.layers.{last}.*.up_proj.*", f"*.layers.{last}.*.w3.*"]
    carried = globs[:2] if model == "llama" else globs[::2]
    run = replace(parity.base_run(model, **train), layout=LayoutConfig(**layout))
    run = lora(run, rank=2, targets=carried)
    truth = parity.truth_of(ranks, run, STEPS, False)
    kinds = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in truth["grads"][0]}
    assert kinds == ({"v_proj", "up_proj"} if model == "llama" else {"v_proj", "w3"})
    parity.compare(ranks.run("tests.harness.parity:run_layout", 2, run, STEPS, False), truth, STEPS)
