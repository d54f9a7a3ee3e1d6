"""embed: retrieval. The loss and every gradient are those of one process with all texts of the step, in every layout
and however a step is cut into micro-batches; against transformers and the formula of InfoNCE; from JSONL to a folder
that says how its embeddings are made."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import phalanx
from phalanx.base.errors import CheckpointError, DataError
from phalanx.base.placement import Placement
from phalanx.checkpoint.embedder_files import read_embedder
from phalanx.checkpoint.hf import read_folder, to_hf
from phalanx.comm.debug import Site
from phalanx.comm.mesh import Mesh
from phalanx.config.read import load_run, read
from phalanx.config.run import CheckpointConfig, LogConfig, Run, TrainConfig
from phalanx.config.write import to_dict
from phalanx.data.config import DataConfig
from phalanx.data.loader import Loader, train_loader
from phalanx.engine.build import build
from phalanx.engine.embeddings import pooled_texts, with_embeddings
from phalanx.engine.evaluate import evaluate
from phalanx.engine.first_pass import first_pass
from phalanx.engine.step import accumulate, forward_backward, train_step, update
from phalanx.forecast.check import Facts, check
from phalanx.forecast.decide import make_plan
from phalanx.forecast.sample_text import document_lines, documents_of
from phalanx.forecast.text import plan_text
from phalanx.layout.config import LayoutConfig
from phalanx.layout.grid import Grid
from phalanx.models.bert import BertConfig
from phalanx.models.registry import family_of
from phalanx.nn.objective import TaskConfig, find_objective
from phalanx.nn.text_rows import pooling_weights, text_rows
from phalanx.optim.config import OptimConfig
from phalanx.pipeline.graphs import Graphs
from phalanx.planning.reading import reading_of
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.text.cache import use_text
from phalanx.text.marked import TextMarks
from phalanx.text.tokenizers import load_tokenizer, train_bpe, train_wordpiece
from phalanx.training.main import train
from phalanx.verifying.compare import compare, random_weights
from tests.harness import hf_fuzz, parity
from tests.harness.same_samples import same_at_any_size_and_after_resume
from tests.models.test_models import load_weights
from tests.pipeline.test_graphs import Recorder


def embed(**fields: Any) -> TaskConfig:
    return find_objective("embed").Config(name="embed", **fields)


def run_of(model: str, task: TaskConfig, micro_batch: int = 2, layout: dict[str, Any] | None = None, **more) -> Run:
    run = parity.base_run(model, micro_batch=micro_batch)
    config = replace(run.model, head="none", **more)
    data = DataConfig(mock=True, document_attention=True)
    return replace(run, model=config, task=task, data=data, layout=LayoutConfig(**(layout or {})))


# ---- against transformers and the formula

LENGTHS = [[3, 5, 4], [2, 6], [4, 4, 4], [5, 3]]
"""Tokens of the texts of each group: a query, its positive, and perhaps a negative; a sequence for each of them."""
CASES: dict[str, tuple[str, TaskConfig, dict[str, Any]]] = {
    "modernbert, mean": ("modernbert", embed(temperature=0.5), {}),
    "bert, first, matryoshka": (
        "bert",
        embed(pooling="first", temperature=0.3, matryoshka=(32, 8, 3), matryoshka_weights=(1.0, 0.5, 0.25)),
        {"dropout": 0.0, "attention_dropout": 0.0},
    ),
    "qwen3, last": ("qwen3", embed(pooling="last", temperature=0.4, matryoshka=(32, 16)), {}),
    "gemma3_text, mean": ("gemma3_text", embed(temperature=0.7), {"num_hidden_layers": 3}),
}


def batch_of_groups(numbers: list[int]) -> Batch:
    """A sequence for each group; what is left of it is padding."""
    batch = parity.sample_batch(numbers, documents=False)
    labels, documents = torch.full_like(batch.tokens, IGNORE), torch.zeros_like(batch.tokens)
    positions, real = torch.zeros_like(batch.tokens), torch.zeros_like(batch.tokens)
    following = 0
    for row, number in enumerate(numbers):
        at = row * parity.SEQ
        for role, length in enumerate(LENGTHS[number]):
            labels[at], documents[at : at + length], real[at : at + length] = role, following, 1
            positions[at : at + length] = torch.arange(length)
            at, following = at + length, following + 1
        end = (row + 1) * parity.SEQ
        documents[at:end], positions[at:end] = following, torch.arange(end - at)
        following += 1
    return replace(batch, labels=labels, documents=documents, positions=positions, real=real)


def texts() -> list[list[Tensor]]:
    """The ids of the texts of each group."""
    batch = batch_of_groups([0, 1, 2, 3])
    tokens = batch.tokens.view(4, parity.SEQ)
    return [list(tokens[row, : sum(lengths)].split(lengths)) for row, lengths in enumerate(LENGTHS)]


def info_nce(embedded: list[list[Tensor]], task: Any) -> Tensor:
    """Mean over queries of -log softmax of the positive among all passages: by the formula, one query after another."""
    total = torch.zeros((), dtype=torch.float64)
    widths = task.matryoshka or (embedded[0][0].numel(),)
    for width, weight in zip(widths, task.matryoshka_weights or (1.0,) * len(widths)):
        unit = [[F.normalize(e[:width], dim=0) for e in group] for group in embedded]
        passages = [(e, number) for number, group in enumerate(unit) for e in group[1:]]
        for number, group in enumerate(unit):
            scores = torch.stack([group[0] @ e for e, _ in passages]) / task.temperature
            first = next(i for i, (_, owner) in enumerate(passages) if owner == number)  # of its own: the positive
            total = total - weight * F.log_softmax(scores, 0)[first] / len(unit)
    return total


@lru_cache
def truth_of(case: str) -> dict[str, Any]:
    """transformers' hidden states of each text by itself, pooled; its weights and gradients."""
    import transformers

    model, task, more = CASES[case]
    config = run_of(model, task, **more).model
    written = to_hf(config, torch.float64)
    kind = getattr(transformers, family_of(config).class_of(config))
    torch.manual_seed(0)
    with hf_fuzz.wide():
        theirs = kind(kind.config_class(**written, attn_implementation="eager")).double().eval()
        with torch.no_grad():
            for p in theirs.parameters():
                p.normal_(0.0, 0.1).add_(1.0 if p.dim() == 1 else 0.0)
        states = [[theirs(ids[None]).last_hidden_state[0] for ids in group] for group in texts()]
        pool = {"mean": lambda x: x.mean(0), "first": lambda x: x[0], "last": lambda x: x[-1]}[task.pooling]
        loss = info_nce([[pool(x) for x in group] for group in states], task)
        loss.backward()
    prefix = family_of(config).tensors.prefix
    named = {prefix + name: p for name, p in theirs.named_parameters() if p.grad is not None}
    return {
        "weights": {name: p.detach().numpy() for name, p in named.items()},
        "grads": {name: p.grad.numpy() for name, p in named.items()},
        "loss": loss.item(),
    }


def step_on_rank(rank: int, world: int, run: Run, weights: dict[str, np.ndarray]) -> dict[str, Any]:
    """One step over the four groups: loss, metrics and this rank's gradients."""
    plan = make_plan(run, world)
    mesh = Mesh(plan.grid, rank)
    state = build(plan, mesh)
    load_weights(state, weights)
    size, each = run.train.micro_batch, 4 // mesh.dp.size
    mine = range(mesh.dp.index * each, (mesh.dp.index + 1) * each, size)
    tokens = accumulate(state, [batch_of_groups([*range(i, i + size)]).cut(mesh.part) for i in mine])
    grads = parity.parts_of(state, "grad")
    result = update(state, tokens, lr=0.0)
    metrics = {name: value.item() for name, value in result.metrics.items()}
    return {"loss": result.loss.item(), "tokens": result.tokens.item(), "metrics": metrics, "grads": grads}


OFTEN = ("modernbert, mean", "bert, first, matryoshka", "qwen3, last", "modernbert tp2", "bert pp2, dropout")
OFTEN += ("modernbert pp2 dp2, sharding 3", "modernbert cp2", "qwen3 dp2, sharding 3")


def sampled(names: Iterable[str]) -> list[Any]:
    """Those of `make test`, and the others in soak."""
    return [name if name in OFTEN else pytest.param(name, marks=pytest.mark.soak) for name in names]


@pytest.mark.parametrize("case", sampled(CASES))
def test_loss_and_gradients_are_those_of_transformers_and_the_formula(ranks, case):
    """One micro-batch, four of one sequence, and two ranks with two each; to 1e-10 of each tensor's scale."""
    model, task, more = CASES[case]
    truth = truth_of(case)
    for world, micro_batch, layout in ((1, 4, {}), (1, 1, {}), (2, 1, {"sharding": 3}), (2, 2, {"tp": 2})):
        run = run_of(model, task, micro_batch, layout, **more)
        run = replace(run, train=replace(run.train, global_batch=4))
        results = (
            [step_on_rank(0, 1, run, truth["weights"])]
            if world == 1
            else ranks.run("tests.engine.objectives.test_embed:step_on_rank", world, run, truth["weights"])
        )
        assert all(r["tokens"] == 4 and r["loss"] == pytest.approx(truth["loss"], rel=1e-11) for r in results)
        grads = parity.assemble([r["grads"] for r in results])
        assert grads.keys() == truth["grads"].keys()
        largest = max(np.abs(g).max() for g in truth["grads"].values())
        for name, expected in truth["grads"].items():
            off, bound = np.abs(grads[name] - expected).max(), 1e-10 * max(np.abs(expected).max(), 1e-5 * largest)
            assert off <= bound, f"{layout}: gradient of {name} is off by {off:.3g} (bound {bound:.3g})"


def test_what_is_no_whole_group_is_not_compared():
    """Passages before any query of their sequence, queries without a positive, and documents without a label."""
    roles = [[1, 0, 1, 2, 0, 2], [1, 2, 0, 1, IGNORE, 0]]
    documents = torch.arange(12).repeat_interleave(2)
    labels = torch.full((24,), IGNORE)
    labels[::2] = torch.tensor(roles).flatten()
    zeros = torch.zeros(24, dtype=torch.int64)
    batch = Batch(zeros, labels, zeros, zeros, num_sequences=2, seq_length=12, documents=documents, most_documents=12)
    rows = text_rows(batch)
    assert rows.query.tolist() == [-1, 1, 1, 1, -1, -1, -1, -1, 8, 8, -1, -1] and rows.count == 2
    assert rows.role.tolist() == [1, 0, 1, 2, 0, 2, 1, 2, 0, 1, -1, 0]
    whole = [pooling_weights(batch, pooling) for pooling in ("mean", "first", "last")]
    assert whole[0].tolist() == [0.5] * 24 and whole[1].tolist() == [1, 0] * 12 and whole[2].tolist() == [0, 1] * 12


# ---- layouts

LAYOUTS: dict[str, tuple[str, str, int, dict[str, Any], int]] = {
    "modernbert tp2": ("modernbert", "mean", 2, {"tp": 2}, 1),
    "modernbert pp2 dp2, sharding 3": ("modernbert", "mean", 4, {"pp": 2, "sharding": 3}, 2),
    "modernbert cp2": ("modernbert", "first", 2, {"cp": 2}, 2),
    "bert cp2 tp2, all-gather, dropout": ("bert", "mean", 4, {"cp": 2, "tp": 2, "cp_attention": "allgather"}, 1),
    "bert pp2, dropout": ("bert", "first", 2, {"pp": 2}, 2),
    "qwen3 dp2, sharding 3": ("qwen3", "last", 2, {"sharding": 3}, 1),
    "qwen3 tp2 pp2": ("qwen3", "last", 4, {"tp": 2, "pp": 2}, 2),
    "mixtral ep2": ("mixtral", "last", 2, {"ep": 2}, 1),
    "llama-tied cp2": ("llama-tied", "mean", 2, {"cp": 2}, 2),
}


def compared(rank: int, world: int, run: Run) -> str:
    verdict = compare(run, rank, world, 2)
    return "" if verdict.ok else verdict.text


@pytest.mark.parametrize("layout", sampled(LAYOUTS))
def test_a_layout_changes_nothing(ranks, layout):
    """Losses, norms, gradients of every global tensor and weights after two steps; dropout is the same in both
    passes."""
    model, pooling, world, axes, micro_batch = LAYOUTS[layout]
    task = embed(pooling=pooling, temperature=0.3, matryoshka=(32, 8))
    run = run_of(model, task, micro_batch, axes)
    assert ranks.run("tests.engine.objectives.test_embed:compared", world, run) == [""] * world


def test_dropout_is_the_same_in_both_passes():
    """The embeddings that gradients are made for are those that they flow through."""
    run = run_of("bert", embed(), 2)
    plan = make_plan(run, 1)
    state = build(plan, Mesh(plan.grid, 0))
    random_weights(state.model)
    state.model.train()
    batches = [batch_of_groups([0, 1]), batch_of_groups([2, 3])]
    known, found = with_embeddings(state.model, batches), list[Tensor]()
    head = state.model.heads[0]
    loss = head.loss

    def seen(x: Tensor, batch: Batch) -> Tensor:
        found.append(head.pooled(x.detach(), batch, "mean"))
        return loss(x, batch)

    head.loss = seen
    forward_backward(state, known, torch.ones(()))
    first = first_pass(state.model, batches, partial(pooled_texts, pooling="mean"))
    assert all(torch.equal(first[number], found[number]) for number in range(2))
    state.model.train(False)
    assert not torch.equal(first_pass(state.model, batches, partial(pooled_texts, pooling="mean"))[0], first[0])


EXCHANGES = {
    "the embeddings of all ranks": ("engine/embeddings.py", "gathered", "dp.all_gather(own)", "all_gather", "dp"),
    "which texts they are": ("engine/embeddings.py", "gathered", "dp.all_gather(own_ids)", "all_gather", "dp"),
    "gradients of all ranks": ("engine/embeddings.py", "step_loss", "dp.reduce_scatter", "reduce_scatter", "dp"),
    "sums over tp": ("nn/pooled_head.py", "pooled", "batch_group.all_reduce", "all_reduce", "tp"),
}


def after_steps(rank: int, world: int, run: Run, graphs: bool) -> tuple[list[Tensor], int]:
    """Losses and weights of steps whose micro-batches have fewer texts than those of the first, and how many segments
    were captured."""
    mesh = Mesh(Grid(), rank)
    state = build(make_plan(run, 1), mesh)
    random_weights(state.model)
    runner = Graphs(Recorder(), next(iter(state.model.blocks.values()))[0].env.recompute)
    if graphs:
        state.model.stages.runner = runner
    found = []
    for numbers in ([[0, 2], [1, 3]], [[2, 0], [3, 1]], [[1, 3], [3, 3]], [[0, 1], [2, 3]]):
        batches = [batch_of_groups(each) for each in numbers]
        counted = [replace(b, most_documents=int(b.documents.max()) + 1) for b in batches]
        found.append(train_step(state, counted, 1e-3).loss.clone())
    found += [flat.master.clone() for flat in state.buffers.flat]
    return found, runner.captured


def test_graphs_change_no_bit(ranks):
    run = run_of("modernbert", embed(temperature=0.5), num_hidden_layers=3)
    ((plain, _),) = ranks.run("tests.engine.objectives.test_embed:after_steps", 1, run, False)
    ((found, captured),) = ranks.run("tests.engine.objectives.test_embed:after_steps", 1, run, True)
    assert captured and all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


def dropped(rank: int, world: int, run: Run, exchange: str) -> bool:
    file, function, words, op, axis = EXCHANGES[exchange]
    lines = (Path(phalanx.__file__).parent / file).read_text().splitlines()
    [line] = [number for number, text in enumerate(lines, 1) if words in text]
    return compare(run, rank, world, 1, Site(file, function, line, op, axis)).ok


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_every_exchange_matters(ranks, exchange):
    """Dropping any one is seen."""
    layout = {"tp": 2} if exchange.endswith("tp") else {}
    run = run_of("modernbert", embed(temperature=0.3), 1, layout)
    assert ranks.run("tests.engine.objectives.test_embed:dropped", 2, run, exchange) == [False, False]


def evaluated(rank: int, world: int, run: Run) -> dict[str, float]:
    plan = make_plan(run, world)
    mesh = Mesh(plan.grid, rank)
    state = build(plan, mesh)
    random_weights(state.model)
    found = evaluate(state.model, {"valid": loader_of(run)})
    mesh.close()
    return found


def test_evaluation_compares_the_same_texts_in_every_layout(ranks):
    run = run_of("modernbert", embed(temperature=0.5))
    run = replace(run, train=replace(run.train, eval_samples=13))
    [alone] = ranks.run("tests.engine.objectives.test_embed:evaluated", 1, run)
    assert alone.keys() == {"valid", "valid/accuracy"} and alone["valid"] > 0
    for world, layout in ((2, {}), (2, {"cp": 2}), (4, {"tp": 2, "pp": 2})):
        other = replace(run, layout=LayoutConfig(**layout), train=replace(run.train, micro_batch=1))
        for found in ranks.run("tests.engine.objectives.test_embed:evaluated", world, other):
            assert found == pytest.approx(alone, rel=1e-10)


# ---- data

WORDS = "a the one that this of and with very quite rather stone leaf sea sky rose moss flame".split()


def line_of(number: int) -> dict[str, Any]:
    """A query of two words that its positive has, in other company."""
    dice = np.random.default_rng(number)
    own = dice.choice(WORDS[11:], 2, replace=False).tolist()
    found = {"query": " ".join(own), "positive": " ".join(dice.permutation([*dice.choice(WORDS[:11], 4), *own]))}
    return found if number % 3 else {**found, "negatives": [" ".join(dice.choice(WORDS[:11], 3 + number % 2))]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    at = tmp_path_factory.mktemp("embed")
    train_wordpiece([" ".join(WORDS)] * 3, 80, at / "tokenizer")
    (at / "pairs.jsonl").write_text("\n".join(json.dumps(line_of(i)) for i in range(300)))
    return at


def trained_run(folder: Path, out: Path, **task: Any) -> Run:
    config = BertConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=48,
        initializer_range=0.1,
        head="none",
    )
    return Run(
        model=config,
        task=embed(**task),
        train=TrainConfig(
            steps=60, global_batch=8, micro_batch=2, seq_length=48, device="cpu", eval_interval=60, eval_samples=4
        ),
        data=DataConfig(pairs=(str(folder / "pairs.jsonl"),), tokenizer=str(folder / "tokenizer"), split="90,10,0"),
        optim=OptimConfig(lr=3e-3),
        log=LogConfig(report=False),
        checkpoint=CheckpointConfig(interval=60),
        dir=str(out),
    )


def loader_of(run: Run) -> Loader:
    how: Any = {"seq_length": run.train.seq_length, "seed": 1, "vocab_size": run.model.vocab_size, "samples": 16}
    data = use_text(run.data, run.dir, run.model.vocab_size, say=lambda line: None)
    return train_loader(data, **how, reading=reading_of(run))


def test_the_same_samples_at_every_number_of_ranks_and_after_resume(folder, tmp_path):
    run = trained_run(folder, tmp_path)
    same_at_any_size_and_after_resume(lambda: loader_of(run))


def test_groups_are_whole_and_each_text_has_its_number(folder, tmp_path):
    run = trained_run(folder, tmp_path)
    assert check(run, Facts()) == []
    loader, tokenizer = loader_of(run), load_tokenizer(folder / "tokenizer")
    seen = set[tuple[str, ...]]()
    for first in range(0, 16, 4):
        batch = loader.batch(list(range(first, first + 4)))
        starts = ((batch.positions == 0) & (batch.real == 1)).nonzero()[:, 0].tolist()
        assert starts == batch.labelled.nonzero()[:, 0].tolist()
        groups: list[list[str]] = []
        for at in starts:
            ids = batch.tokens[batch.documents == batch.documents[at]].tolist()
            assert ids[0] == tokenizer.special_tokens["[CLS]"] and ids[-1] == tokenizer.special_tokens["[SEP]"]
            assert batch.labels[at] == (0 if batch.labels[at] == 0 else len(groups[-1]))
            groups += [[]] if batch.labels[at] == 0 else []
            groups[-1].append(tokenizer.decode(ids[1:-1]))
        seen |= {tuple(group) for group in groups}
    lines = [line_of(i) for i in range(300)]
    known = {(x["query"], x["positive"], *x.get("negatives", ())) for x in lines}
    assert seen <= known and len(seen) > 30 and {len(group) for group in seen} == {2, 3}


def test_what_is_wrong_with_lines_and_files_is_said(folder, tmp_path):
    bad: list[Any] = [
        {"query": "rose"},
        {"query": "", "positive": "sea"},
        {"query": "sea", "positive": "sea", "negatives": "sky"},
        {"query": "sea", "positive": "a sea", "negatives": ["sky", "a sea"]},
        {"prompt": "a", "chosen": "sea", "rejected": "sky"},
    ]
    (tmp_path / "bad.jsonl").write_text("\n".join(map(json.dumps, bad)))
    run = trained_run(folder, tmp_path)
    with pytest.raises(DataError) as error:
        loader_of(replace(run, data=replace(run.data, pairs=(str(tmp_path / "bad.jsonl"),))))
    said = str(error.value).splitlines()
    for line, words in zip(
        said,
        (
            "bad.jsonl:1: positive is missing",
            "bad.jsonl:2: query must be a text that is not empty",
            "bad.jsonl:3: negatives must be a list",
            "bad.jsonl:4: positive is among negatives",
            "bad.jsonl:5: is a preference (prompt, chosen, rejected), and the first line is a query with passages",
        ),
        strict=True,
    ):
        assert words in line
    (tmp_path / "answers.jsonl").write_text(json.dumps(bad[-1]))
    with pytest.raises(DataError, match=r'prepared from lines with "prompt".*, and the task needs lines with "query"'):
        loader_of(replace(run, data=replace(run.data, pairs=(str(tmp_path / "answers.jsonl"),), split="1,0,0")))
    with pytest.raises(DataError, match="groups are longer than train.seq_length=12: .* raise train.seq_length"):
        loader_of(replace(run, train=replace(run.train, seq_length=12)))
    dpo = replace(run, task=find_objective("dpo").Config(name="dpo"))
    with pytest.raises(DataError, match=r'prepared from lines with "query".*, and the task needs lines with "prompt"'):
        loader_of(dpo)


def test_groups_are_shown_as_they_are_compared(folder, tmp_path):
    """`phalanx data show`, and the first lines of a run: tokens of the query, of the passage, of hard negatives."""
    run, tokenizer = trained_run(folder, tmp_path), load_tokenizer(folder / "tokenizer")
    shown = next(each for each in documents_of(loader_of(run), 0) if "hard" in each.kinds)
    texts = [
        tokenizer.decode([i for i, kind in zip(shown.tokens, shown.kinds) if kind == name], skip_special_tokens=True)
        for name in ("query", "passage", "hard")
    ]
    known = [[x["query"], x["positive"], *x.get("negatives", ())] for x in map(line_of, range(300))]
    assert texts in known and " passage, " in shown.title
    assert [line.split(" |")[0].strip() for line in document_lines(shown, tokenizer, 200, False)[1:]] == [
        "query",
        "passage",
        "hard",
    ]


# ---- rules

SMALL = ["model.family=qwen3", "model.vocab_size=64", "model.hidden_size=16", "model.intermediate_size=32"]
SMALL += ["model.num_hidden_layers=1", "model.num_attention_heads=2", "train.steps=1", "train.global_batch=1"]
SMALL += ["train.micro_batch=1", "train.seq_length=8", "data.mock=true", "data.document_attention=true"]


def test_rules():
    def refused(*overrides: str) -> dict[str, tuple[str, tuple]]:
        loaded = read(None, [*SMALL, "task.name=embed", *overrides])
        problems = loaded.problems or check(loaded.run, Facts(files=False))
        return {p.field: (p.rule, p.valid) for p in problems}

    assert refused("model.head=none") == {}
    assert refused()["model.head"][1] == ("none",)
    assert "needs a head, and the model has none" in refused("model.head=none", "task.name=pretrain")["task.name"][0]
    found = refused("model.head=none", "task.temperature=0", "task.matryoshka=[8,8]", "task.matryoshka_weights=[1.0]")
    assert found.keys() == {"task.temperature", "task.matryoshka", "task.matryoshka_weights"}
    rule, valid = refused("model.head=none", "task.matryoshka=[8,32]")["task.matryoshka"]
    assert rule == "must be widths <= model.hidden_size" and valid == ((8,),)
    assert refused("model.head=none", "data.document_attention=false")["data.document_attention"][1] == (True,)
    assert refused("model.head=none", "train.deterministic=true")["train.deterministic"][1] == (False,)
    assert "data.pairs" in refused("model.head=none", "data.mock=false", "data.paths=[a]")
    gpt2 = [*SMALL[1:], "model.family=gpt2", "task.name=embed", "model.max_position_embeddings=8"]
    loaded = read(None, gpt2)
    [problem] = [p for p in check(loaded.run, Facts(files=False)) if p.field == "task.name"]
    assert "gpt2 cannot leave its head out" in problem.rule
    run = load_run(None, [*SMALL, "task.name=embed", "model.head=none", "task.matryoshka=[8,16]"])
    assert load_run(None, (), to_dict(run)) == run
    assert "embed" in plan_text(run, 1) and "\nfirst pass" in plan_text(run, 1)


# ---- a run, and what its checkpoints are


@pytest.mark.parametrize("pooling", ["mean", pytest.param("first", marks=pytest.mark.soak)])
def test_a_run_learns_and_its_folder_says_how_embeddings_are_made(folder, tmp_path, pooling):
    run = trained_run(folder, tmp_path / "run", pooling=pooling)
    train(run, Placement())
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:5])
    [accuracy] = [row["valid/valid/accuracy"] for row in rows if "valid/valid/accuracy" in row]
    assert accuracy > 0.5
    weights = tmp_path / "run/checkpoints/step-00000060/weights"
    facts = read_embedder(weights)
    assert (facts.pooling, facts.normalized, facts.most_tokens) == (pooling, True, 48)
    assert read_folder(weights).model == run.model
    from transformers import AutoModel, AutoTokenizer

    config = json.loads((weights / "config.json").read_text())
    assert config["architectures"] == ["BertModel"]
    model, info = AutoModel.from_pretrained(weights, output_loading_info=True, add_pooling_layer=False)
    assert type(model).__name__ == "BertModel"
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = AutoTokenizer.from_pretrained(weights)("rose of the sea").input_ids
    assert ids == TextMarks.of(str(folder / "tokenizer")).encode("rose of the sea") == marks_of_folder(weights)
    further = replace(run, init_from=str(weights), dir=str(tmp_path / "further"))
    further = replace(further, train=replace(run.train, steps=1, eval_interval=None, eval_samples=64))
    train(further, Placement())
    rows = [json.loads(line) for line in (tmp_path / "further/metrics.jsonl").read_text().splitlines()]
    assert next(row["loss"] for row in rows if "loss" in row) < 0.5 * losses[0]


def marks_of_folder(weights: Path) -> list[int]:
    """As `phalanx embed` reads the folder."""
    return TextMarks.of(str(weights)).encode("rose of the sea")


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_tokenizer_without_marks_ends_texts_in_its_file(tmp_path, kind):
    """Byte-level vocabularies: what the file has beside (offsets) stays."""
    from transformers import AutoTokenizer

    made = train_bpe([" ".join(WORDS)] * 3, 300, tmp_path) if kind == "bpe" else load_tokenizer("bytes")
    made.save(tmp_path)
    marks, file = TextMarks.of(str(tmp_path)), tmp_path / "tokenizer.json"
    file.write_bytes(marks.written_into(file.read_bytes()))
    assert marks.written_into(file.read_bytes()) and made.eod is not None
    for text in ("rose of the sea", " a  b"):
        ids = AutoTokenizer.from_pretrained(tmp_path)(text).input_ids
        assert ids == marks.encode(text) == [*made.encode(text), made.eod]
    again = TextMarks.of(str(tmp_path))
    assert again.written_into(file.read_bytes()) == file.read_bytes()


def test_it_starts_from_a_model_with_a_head(folder, tmp_path):
    """The head of a decoder of transformers, tied or its own, is left out."""
    import transformers

    for tied in (False, True):
        config = parity.MODELS["qwen3"]
        written = to_hf(replace(config, tie_word_embeddings=tied), torch.float32)
        at = tmp_path / f"tied-{tied}"
        transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**written)).save_pretrained(at)
        options = [f"init_from={at}", "model.head=none", "task.name=embed", f"dir={tmp_path}/run-{tied}"]
        options += ["train.steps=1", "train.global_batch=4", "train.micro_batch=2", "train.seq_length=48"]
        options += [f"data.pairs=[{folder}/pairs.jsonl]", f"data.tokenizer={folder}/tokenizer", "train.device=cpu"]
        run = load_run(None, options)
        assert check(run, Facts()) == []
        train(run, Placement())
        weights = next((tmp_path / f"run-{tied}/checkpoints").iterdir()) / "weights"
        assert json.loads((weights / "config.json").read_text())["architectures"] == ["Qwen3Model"]


def test_folders_of_others_with_unknown_modules_are_refused(folder, tmp_path):
    (tmp_path / "1_Pooling").mkdir()
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in MODULES]
    (tmp_path / "modules.json").write_text(json.dumps([*modules, {"type": "x.Dense", "path": "2_Dense"}]))
    with pytest.raises(CheckpointError, match="its modules are Transformer, Pooling, Dense"):
        read_embedder(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    for stated, words in (
        ({"pooling_mode_max_tokens": True}, "pools by max_tokens"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "pools by mean_tokens, cls_token"),
    ):
        (tmp_path / "1_Pooling/config.json").write_text(json.dumps(stated))
        with pytest.raises(CheckpointError, match=words):
            read_embedder(tmp_path)
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    facts = read_embedder(tmp_path)
    assert (facts.pooling, facts.normalized, facts.most_tokens) == ("last", False, None)


MODULES = (("Transformer", ""), ("Pooling", "1_Pooling"))
