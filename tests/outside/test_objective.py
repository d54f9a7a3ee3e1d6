"""Objectives from outside the package, each in one file that no file of ours names: smoothed labels with a z-loss, and
a preference over pairs of documents. Found by `module:NAME`; through the central test, checkpoints, plan and config."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.base.errors import ConfigError
from phalanx.base.placement import Placement
from phalanx.checkpoint.keep import latest
from phalanx.config.read import load_run, read
from phalanx.config.run import CheckpointConfig, Run
from phalanx.config.schema import config_schema
from phalanx.config.write import to_dict
from phalanx.data.config import DataConfig
from phalanx.engine.step import evaluate_step
from phalanx.forecast.check import Facts, check
from phalanx.forecast.decide import make_plan
from phalanx.forecast.text import plan_text
from phalanx.layout.config import LayoutConfig
from phalanx.nn.env import Env, WeightRules
from phalanx.nn.head import Head
from phalanx.nn.module import Block
from phalanx.nn.mtp import shifted
from phalanx.nn.objective import TaskConfig, find_objective, make_objective
from phalanx.nn.run_block import run_block
from phalanx.planning.blocks import make_blocks, num_blocks
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.training.main import train
from phalanx.verifying.compare import compare
from tests.harness import checkpoints, parity
from tests.harness.weights import with_memory
from tests.training.test_loop import make_run

OUTSIDE = Path(__file__).parent
if str(OUTSIDE) not in sys.path:
    sys.path.append(str(OUTSIDE))
SMOOTHING, PREFERENCE = "custom_losses.smoothing:Smoothing", "custom_losses.pairs:Preference"
TRIPLET = "custom_losses.embeddings:Triplet"
STEPS = 2
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
    "dp2, sharding 3": (2, {"sharding": 3}),
}


def task(name: str, **fields: Any) -> TaskConfig:
    return find_objective(name).Config(name=name, **fields)


TASKS = {
    "smoothing": task(SMOOTHING, smoothing=0.3, z=0.02),
    "weighted": task("custom_losses.smoothing:Weighted", smoothing=0.3, z=0.02),
    "preference": task(PREFERENCE),
}


def run_of(name: str, model: str = "llama", micro_batch: int = 1, layout: dict[str, Any] | None = None, **train) -> Run:
    run = parity.base_run(model, micro_batch=micro_batch, **train)
    data = DataConfig(mock=True, document_attention=name == "preference" or None)
    return replace(run, task=TASKS[name], layout=LayoutConfig(**(layout or {})), data=data)


# ---- the central test


def one_rank(rank: int, world: int, run: Run, documents: bool | str) -> dict:
    """What the central test compares; the rank imports this module, so finds the package, before it reads the run."""
    return parity.run_layout(rank, world, run, STEPS, documents)


def truth_of(ranks, run: Run, documents: bool | str) -> dict:
    alone = replace(run, layout=LayoutConfig(sharding=0))
    [truth] = ranks.run("tests.outside.test_objective:one_rank", 1, alone, documents)
    truth["weights"] = parity.assemble([truth["weights"]])
    return {**truth, "grads": [parity.assemble([g]) for g in truth["grads"]]}


def in_layouts(ranks, run: Run, layouts: dict[str, tuple[int, dict[str, Any]]], documents: bool | str = False) -> None:
    truth = truth_of(ranks, run, documents)
    assert all(max(abs(g).max() for g in grads.values()) > 1e-6 for grads in truth["grads"])
    for world, layout in layouts.values():
        found = ranks.run(
            "tests.outside.test_objective:one_rank", world, replace(run, layout=LayoutConfig(**layout)), documents
        )
        parity.compare(found, truth, STEPS)


def test_a_layout_changes_no_loss_per_token(ranks):
    """Losses, metrics, norms, gradients and weights; labels are missing, more in later samples."""
    in_layouts(ranks, run_of("smoothing"), LAYOUTS)


def test_nor_one_with_weights_and_multi_token_prediction_and_experts(ranks):
    layouts = {**LAYOUTS, "tp2 x pp2": (4, {"tp": 2, "pp": 2})}
    del layouts["tp2"]
    in_layouts(ranks, run_of("weighted", "deepseek_v3-mtp"), layouts, documents=True)


def test_nor_one_over_pairs(ranks):
    layouts = {**LAYOUTS, "cp2 x tp2 x dp2": (8, {"cp": 2, "tp": 2, "sharding": 1})}
    in_layouts(ranks, run_of("preference", micro_batch=2), layouts, documents="packed")


def test_nor_one_over_pairs_with_experts(ranks):
    in_layouts(ranks, run_of("preference", "mixtral"), {"ep2": (2, {"ep": 2}), "pp2": (2, {"pp": 2})}, documents=True)


def compared(rank: int, world: int, run: Run) -> str:
    verdict = compare(run, rank, world, 2)
    return "" if verdict.ok else verdict.text


def test_nor_one_over_embeddings(ranks):
    """Texts are those of mock data, whose samples say which they are."""
    run = replace(parity.base_run("llama"), data=DataConfig(mock=True, document_attention=True))
    run = replace(run, model=replace(run.model, head="none"), task=task(TRIPLET, margin=0.5))
    assert problems(run) == []
    for world, layout in ((2, {"sharding": 3}), (4, {"tp": 2, "pp": 2})):
        found = ranks.run("tests.outside.test_objective:compared", world, replace(run, layout=LayoutConfig(**layout)))
        assert found == [""] * world


@pytest.mark.parametrize("name", ["smoothing", "preference"])
def test_gradients_made_in_backward_are_the_same(ranks, name):
    """train.deterministic: heads make their gradients late."""
    run, documents = run_of(name), name == "preference"
    truth = truth_of(ranks, run, documents)
    late = replace(run, train=replace(run.train, deterministic=True), layout=LayoutConfig(tp=2))
    parity.compare(ranks.run("tests.outside.test_objective:one_rank", 2, late, documents), truth, STEPS)


# ---- against plain autograd on one process


def blocks_of(model: str, config: TaskConfig) -> list[Block]:
    env = Env(weights=WeightRules(dtype=torch.float64), objective=make_objective(config))
    blocks = make_blocks(parity.MODELS[model], env, range(num_blocks(parity.MODELS[model])))
    for number, block in enumerate(blocks):
        with_memory(block)
        for p in block.parameters():
            p.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(number))
    return blocks


def gradients(blocks: list[Block], loss: Tensor) -> list[Tensor]:
    """Of all parameters, which have none afterwards."""
    loss.backward()
    params = [p for block in blocks for p in block.parameters()]
    found = [p.grad.clone() for p in params]
    for p in params:
        p.grad = None
    return found


def hidden(blocks: list[Block], batch: Batch) -> tuple[Tensor, Head]:
    x = torch.empty(0, dtype=torch.float64)
    for block in blocks[:-1]:
        x = run_block(block, x, batch)
    return blocks[-1].norm(x), blocks[-1].head


def logits_of(x: Tensor, head: Head) -> Tensor:
    return (x @ head.weight.t())[:, : head.shard.size]  # the other rows are padding


def summed(blocks: list[Block], batch: Batch) -> Tensor:
    """The objective's, as a step computes it."""
    x, head = hidden(blocks, batch)
    return head.loss(x, batch)


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * b.abs().max().item())


@pytest.mark.parametrize("seeded", [False, True])
def test_smoothing_is_that_of_torch(seeded, monkeypatch):
    """Truth: torch.nn.functional.cross_entropy(label_smoothing) and a z term; in one piece, and a few tokens at a time;
    gradients made in backward, and in forward."""
    blocks, batch = blocks_of("llama", TASKS["smoothing"]), parity.sample_batch([3, 4], documents=False)
    seed = torch.tensor(0.7, dtype=torch.float64)
    x, head = hidden(blocks, batch)
    logits = logits_of(x, head)
    z = torch.logsumexp(logits, -1)[batch.labelled]
    expected = F.cross_entropy(logits, batch.labels, ignore_index=IGNORE, reduction="sum", label_smoothing=0.3)
    expected = expected + 0.02 * z.square().sum()
    truth = gradients(blocks, expected * seed)
    for elements in (1 << 28, 5 * parity.VOCAB):
        monkeypatch.setattr("phalanx.ops.dense.cross_entropy.CHUNK_ELEMENTS", elements)
        head.tally = torch.zeros(2, dtype=torch.float64)
        if seeded:  # backward does not look at what it is given
            loss = summed(blocks, replace(batch, loss_seed=seed, _made={}))
            found = gradients(blocks, loss)
        else:
            loss = summed(blocks, batch)
            found = gradients(blocks, loss * seed)
        torch.testing.assert_close(loss, expected)
        same(found, truth)
        nll = F.cross_entropy(logits, batch.labels, ignore_index=IGNORE, reduction="sum")
        torch.testing.assert_close(head.tally, torch.stack((nll, z.sum())).detach())


def test_multi_token_prediction_takes_the_same_loss():
    """Truth: torch's, of the state of each depth and the labels further on."""
    blocks, batch = blocks_of("deepseek_v3-mtp", TASKS["smoothing"]), parity.sample_batch([3, 4], documents=False)
    mtp, states = blocks[-2], []
    mtp.tally = torch.zeros((), dtype=torch.float64)
    for depth in mtp.depths:
        depth.register_forward_hook(lambda module, given, state: states.append(state.detach()))
    summed(blocks, batch).backward()
    expected = torch.zeros((), dtype=torch.float64)
    for k, state in enumerate(states, 1):
        logits, (_, labels) = logits_of(state, mtp.head).detach(), shifted(batch, k)
        expected += F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum", label_smoothing=0.3)
        expected += 0.02 * torch.logsumexp(logits, -1)[labels != IGNORE].square().sum()
    assert len(states) == 2
    torch.testing.assert_close(mtp.tally, expected)


def test_weights_of_tokens():
    """The fused cross entropy with weights, and any loss with weights, are weighted sums."""
    batch = parity.sample_batch([3, 4], documents=False)
    weights = 1 + 0.25 * (torch.arange(parity.SEQ).repeat(2) % 3)
    name = "custom_losses.smoothing:WeightedPretraining"
    for fused in (False, True):
        blocks = blocks_of("llama", task(name))
        if fused:
            blocks[-1].head.env.objective.token_loss = make_objective(TaskConfig()).token_loss
        x, head = hidden(blocks, batch)
        losses = F.cross_entropy(logits_of(x, head), batch.labels, ignore_index=IGNORE, reduction="none")
        expected = (losses * weights).sum()
        truth = gradients(blocks, expected)
        loss = summed(blocks, batch)
        torch.testing.assert_close(loss, expected)
        same(gradients(blocks, loss), truth)
        counted = head.env.objective.divisor(batch)
        torch.testing.assert_close(counted, weights[batch.labelled].sum().double())


PAIRS = [[(0, 4), (4, 9)], [(9, 12), (12, 15)], [(16, 18), (18, 27)]]
"""Tokens of the pairs' documents. After the second a document of one token is left over; in the second sequence two
documents follow of which one has no labels."""


def batch_of_pairs() -> Batch:
    batch = parity.sample_batch([0, 5], documents=False)
    starts = [0, 4, 9, 12, 15, 16, 18, 27, 30]
    documents = torch.zeros(32, dtype=torch.int64)
    documents[starts[1:]] = 1
    labels = batch.labels.clone()
    labels[[4, 20]] = IGNORE
    labels[27:30] = IGNORE
    return replace(batch, documents=documents.cumsum(0), labels=labels)


@pytest.mark.parametrize("masked", [False, True])
def test_pairs_are_those_of_plain_autograd(masked):
    config = task("custom_losses.pairs:Masked") if masked else TASKS["preference"]
    blocks, batch = blocks_of("llama", config), batch_of_pairs()
    x, head = hidden(blocks, batch)
    logs = -F.cross_entropy(logits_of(x, head), batch.labels, ignore_index=IGNORE, reduction="none")
    logs = logs * (torch.arange(32) % 2) if masked else logs
    sums = torch.stack([torch.stack([logs[a:b].sum() for a, b in pair]) for pair in PAIRS])
    gaps = sums[:, 0] - sums[:, 1]
    expected = -F.logsigmoid(0.1 * gaps - 0.5).sum()
    truth = gradients(blocks, expected)
    head.tally = torch.zeros(2, dtype=torch.float64)
    loss = summed(blocks, batch)
    torch.testing.assert_close(loss, expected)
    same(gradients(blocks, loss), truth)
    torch.testing.assert_close(head.tally, torch.stack(((gaps > 0).double().sum(), gaps.sum().detach())))
    assert head.env.objective.divisor(batch) == 3


# ---- evaluation, checkpoints, the log


def evaluated(rank: int, world: int, run: Run) -> list[float]:
    from phalanx.comm.mesh import Mesh
    from phalanx.engine.build import build
    from phalanx.verifying.compare import random_weights

    plan = make_plan(run, world)
    mesh = Mesh(plan.grid, rank)
    state = build(plan, mesh)
    random_weights(state.model)
    return evaluate_step(state.model, parity.step_batches(run, mesh, 0, True)).tolist()


@pytest.mark.parametrize("name", ["smoothing", "preference"])
def test_evaluation_sums_the_same(ranks, name):
    [alone] = ranks.run("tests.outside.test_objective:evaluated", 1, run_of(name))
    assert len(alone) == 4 and alone[1] > 0
    for world, layout in ((2, {"cp": 2}), (4, {"tp": 2, "pp": 2})):
        for found in ranks.run("tests.outside.test_objective:evaluated", world, run_of(name, layout=layout)):
            assert found == pytest.approx(alone, rel=1e-10)


def save_on_rank(rank: int, world: int, run: Run, root: Path) -> bool:
    return checkpoints.save_on_rank(rank, world, run, root, {})


def load_on_rank(rank: int, world: int, run: Run, path: Path) -> list[str]:
    return checkpoints.load_on_rank(rank, world, run, path)


@pytest.mark.parametrize("name", ["smoothing", "preference"])
def test_saved_under_one_layout_and_loaded_under_another(ranks, tmp_path, name):
    run = run_of(name, layout={"tp": 2}, precision="bf16")
    assert all(ranks.run("tests.outside.test_objective:save_on_rank", 2, run, tmp_path))
    for layout in (LayoutConfig(pp=2), LayoutConfig(sharding=3)):
        other = replace(run, layout=layout)
        assert ranks.run("tests.outside.test_objective:load_on_rank", 2, other, tmp_path / "step-00000010") == [[], []]


def test_a_run_logs_what_the_objective_sums_and_goes_on(tmp_path):
    run = replace(make_run(tmp_path / "run", steps=2), task=TASKS["smoothing"], checkpoint=CheckpointConfig(interval=2))
    run = replace(run, train=replace(run.train, eval_interval=2, eval_samples=4))
    train(run, Placement())
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert all(row["loss"] > row["task/nll"] * 0.7 and row["task/log_z"] > 0 for row in steps) and len(steps) == 2
    [of_set] = [row for row in rows if any(name.startswith("valid/") for name in row)]
    assert any(name.endswith("/nll") for name in of_set)
    assert "nll=" in (tmp_path / "run/log.txt").read_text()
    again = load_run(run.dir, ["train.steps=4"])
    assert again.task == run.task
    train(again, Placement())
    assert latest(Path(run.dir) / "checkpoints").name == "step-00000004"


# ---- the config

SMALL = ["model.family=llama", "model.vocab_size=64", "model.hidden_size=16", "model.intermediate_size=32"]
SMALL += ["model.num_hidden_layers=1", "model.num_attention_heads=2", "train.steps=1", "train.global_batch=1"]
SMALL += ["train.micro_batch=1", "train.seq_length=8", "data.mock=true"]


def refused(*overrides: str) -> dict[str, tuple[str, tuple]]:
    return {p.field: (p.rule, p.valid) for p in read(None, [*SMALL, *overrides]).problems}


def test_the_config_has_the_fields_of_the_objective():
    run = load_run(None, [*SMALL, f"task.name={SMOOTHING}", "task.z=0.5"])
    assert run.task == task(SMOOTHING, z=0.5) and to_dict(run)["task"] == {
        "name": SMOOTHING,
        "smoothing": 0.1,
        "z": 0.5,
    }
    assert load_run(None, (), to_dict(run)) == run and pickle.loads(pickle.dumps(run)) == run
    assert load_run(None, [*SMALL, "task.name=smoothing"]).task.name == SMOOTHING, "another process must find it"
    assert load_run(None, SMALL).task == TaskConfig()
    assert f"{SMOOTHING} (smoothing=0.1, z=0.5)" in plan_text(run, 1)
    assert "\ntask " not in plan_text(load_run(None, SMALL), 1)
    assert config_schema()["properties"]["task"]["anyOf"]


def test_wrong_paths_and_classes_are_refused():
    found = refused("task.name=custom_losss.smoothing:Smoothing", "task.z=0.5", "train.stepz=1")
    assert list(found) == ["task.name", "train.stepz"]
    rule, valid = found["task.name"]
    assert "there is no module custom_losss on Python's path" in rule and valid[0] == SMOOTHING
    assert refused("task.name=custom_losses.smoothing:Smoothin")["task.name"][1][0] == SMOOTHING
    assert refused("task.name=pretran")["task.name"][1] == ("pretrain",)
    for name, text in (
        (
            "smoothing:Lossless",
            "custom_losses.smoothing:Lossless has no token_loss(self, logits: LogitStats) -> Tensor",
        ),
        ("pairs:Lossless", "custom_losses.pairs:Lossless has no loss(self, policy_P2: Tensor) -> Tensor"),
        (
            "smoothing:SmoothingConfig",
            "must be derived from one of phalanx.TokenObjective, SequenceObjective, EmbeddingObjective",
        ),
    ):
        assert text in refused(f"task.name=custom_losses.{name}")["task.name"][0]
    rule, valid = refused(f"task.name={SMOOTHING}", "task.smothing=0.5")["task.smothing"]
    assert rule == "is not a key of task" and "task.smoothing" in valid
    assert refused(f"task.name={SMOOTHING}", "task.z=much")["task.z"] == ("must be float, got string", (0.0001,))
    with pytest.raises(ConfigError, match="takes the fields of TaskConfig, not of SmoothingConfig"):
        replace(load_run(None, SMALL), task=replace(TASKS["smoothing"], name="pretrain"))
    with pytest.raises(TypeError, match="metrics of .*:TwoValues must return a dict of tensors, a value for each"):
        from phalanx.nn.head import metric_names

        metric_names(make_objective(task("custom_losses.smoothing:TwoValues")))


def problems(run: Run) -> list[str]:
    return [f"{p.field}: {p.rule}" for p in check(run, Facts(files=False))]


def test_rules_between_objective_model_and_data():
    assert problems(run_of("preference")) == problems(run_of("smoothing")) == []
    assert problems(replace(run_of("smoothing"), task=task(SMOOTHING, smoothing=1.0))) == [
        "task.smoothing: must be a number in [0, 1)"
    ]
    referred = replace(run_of("preference"), task=task("custom_losses.pairs:Referred"))
    assert "needs a reference: adapters" in problems(referred)[0]
    assert "has no loss per token" in problems(run_of("preference", "deepseek_v3-mtp"))[0]
    without = replace(run_of("preference"), data=DataConfig(mock=True))
    assert "data.document_attention: must be true" in problems(without)[0]
    packed = replace(run_of("preference"), data=DataConfig(paths=("a",), packing="online"))
    assert any(text.startswith("data.packing: reorders documents") for text in problems(packed))


def test_the_program_finds_it_by_path(warm, tmp_path):
    root = Path(__file__).parents[2]
    words = ["train", "recipes/tiny_llama.yaml", "train.steps=1"]
    words += [f"task.name={PREFERENCE}", "task.beta=0.2", "data.document_attention=true", f"dir={tmp_path}/run"]
    done = warm.phalanx(*words, cwd=root, env={"PYTHONPATH": f"{root}:{OUTSIDE}"})
    assert done.returncode == 0, done.stderr
    assert f"name: {PREFERENCE}" in (tmp_path / "run/config.yaml").read_text(encoding="utf-8")
