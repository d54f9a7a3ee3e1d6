"""Prefix language modelling against a slow reading of it and against transformers with a mask of its own; the same in
every layout and after resume; what cannot go with it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from phalanx.base.errors import ConfigError
from phalanx.base.placement import Placement
from phalanx.config.run import LogConfig, Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.data.loader import Loader, micro_batch_samples, train_loader
from phalanx.engine.objectives.prefix import Prefixing
from phalanx.evaluation.perplexity import base_config
from phalanx.forecast.check import Facts, check
from phalanx.forecast.decide import make_plan
from phalanx.inference.load import run_of_folder, without_training
from phalanx.inference.memory import kept_by
from phalanx.layout.config import LayoutConfig
from phalanx.models.llama import LlamaConfig
from phalanx.nn.objective import TaskConfig, find_objective
from phalanx.optim.config import OptimConfig
from phalanx.planning.reading import reading_of
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.sequence.sample import Sample
from phalanx.training.main import train
from tests.harness import parity
from tests.models import test_models

SEQ = 32


def prefix(**fields: Any) -> TaskConfig:
    config: TaskConfig = find_objective("prefix").Config(name="prefix", **fields)
    return config


def run_of(model: str = "llama", layout: dict[str, Any] | None = None, **data: Any) -> Run:
    base = parity.base_run(model, 4)
    given = DataConfig(**{"mock": True, "document_attention": True, **data})
    return replace(base, task=prefix(), data=given, layout=LayoutConfig(**(layout or {})))


def loader_of(run: Run, length: int = SEQ) -> Loader:
    how = {"seed": run.train.seed, "vocab_size": run.model.vocab_size, "samples": 64}
    return train_loader(run.data, seq_length=length, reading=reading_of(run), **how)


def sample_of(lengths: list[int], number: int, room: int, untrained: int = 0) -> Sample:
    """Documents of these lengths; the first labels of each may be missing, as those of a prompt are."""
    tokens = np.arange(room)
    ends = np.cumsum(lengths)
    labels = np.append(tokens[1:], IGNORE)
    labels[ends - 1] = IGNORE
    labels[ends[-1] :] = IGNORE
    for start in (0, *ends[:-1]):
        labels[start : start + untrained] = IGNORE
    return Sample(number, tokens, labels, ends[ends < room], int(ends[-1]))


# ---- samples


def test_the_prefix_has_no_loss_and_the_rest_has_all():
    """Of each document; a chat's prompt is its prefix; documents of one token have none, and padding neither."""
    for number in range(50):
        given = sample_of([9, 1, 14, 2], number, 30)
        made = Prefixing(3)(given)
        assert (made.tokens == given.tokens).all() and made.prefix[26:].sum() == 0
        for first, stop in given.documents:
            length = int(made.prefix[first:stop].sum())
            assert made.prefix[first : first + length].all()
            assert (0 < length < stop - first) or stop - first == length + 1 == 1
            kept = made.labels[first:stop] != IGNORE
            wanted = [max(length, 1) - 1 <= i < stop - first - 1 for i in range(stop - first)]
            assert kept.tolist() == wanted
            assert (made.labels[first:stop][kept] == given.labels[first:stop][kept]).all()
        chat = Prefixing(3)(sample_of([9, 12], number, 21, untrained=4))
        assert [int(chat.prefix[a:b].sum()) for a, b in chat.documents] == [5, 5]
        assert (chat.labels == sample_of([9, 12], number, 21, untrained=4).labels).all()


def test_lengths_are_uniform():
    """Chi-square over 1 to n - 1, of independent samples and documents, and numbers beyond 32 bits."""
    length, made = 8, Prefixing(5)
    found = Counter()
    for number in (*range(700), *range(2**33, 2**33 + 700)):
        sample = made(sample_of([length] * 3, number, 3 * length))
        found.update(sample.prefix.reshape(3, length).sum(1).tolist())
    expected = sum(found.values()) / (length - 1)
    statistic = sum((found[n] - expected) ** 2 / expected for n in range(1, length))
    assert set(found) == set(range(1, length))
    assert statistic <= (length - 2) + 5 * (2 * (length - 2)) ** 0.5


@pytest.mark.parametrize("data", [{}, {"packing": "online", "document_attention": None}], ids=["windows", "packed"])
def test_the_same_samples_at_every_number_of_ranks_and_after_resume(data):
    def rows(dp: int, consumed: int) -> dict[int, list]:
        run, found = run_of(**data), {}
        loader = loader_of(run)  # as a run that resumes there makes it
        for rank in range(dp):
            for samples in micro_batch_samples(consumed, 8, 2, dp, rank)[:2]:
                batch = loader.batch(samples)
                for row, sample in enumerate(samples):
                    streams = (batch.tokens, batch.labels, batch.prefix, batch.positions)
                    found[sample] = [x.view(2, -1)[row].tolist() for x in streams]
        return found

    truth = rows(1, 0) | rows(1, 4)
    for dp in (2, 4):
        assert all(truth.get(sample, row) == row for sample, row in rows(dp, 4).items())
    assert any(sum(row[2]) for row in truth.values())


# ---- what is computed


def whole_mask(batch: Batch) -> torch.Tensor:
    """(sequences, 1, S, S) what each query may read: earlier tokens of its document, and its document's prefix."""
    count, length = batch.num_sequences, batch.seq_length
    mask = torch.zeros(count, 1, length, length, dtype=torch.bool)
    documents, prefix_ = batch.documents.view(count, length), batch.prefix.view(count, length)
    for s in range(count):
        for i in range(length):
            for j in range(length):
                same = documents[s, i] == documents[s, j]
                mask[s, 0, i, j] = same and (j <= i or prefix_[s, j] == 1)
    return mask


def test_logits_and_gradients_are_those_of_transformers_with_a_mask():
    case = "llama: GQA, wide heads, llama3 scaling"
    config, run = test_models.CASES[case], run_of()
    batches = [loader_of(run, parity.SEQ).batch(samples) for samples in ([0, 1], [2, 3])]
    model_run = replace(
        run,
        model=config,
        train=TrainConfig(steps=1, global_batch=4, micro_batch=2, seq_length=parity.SEQ, precision="fp64"),
    )
    import transformers

    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(test_models.hf_config(config)).double().eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(0.0, 0.3).add_(1.0 if p.dim() == 1 else 0.0)
    test_models.widen(theirs, config)
    weights = {k: p.detach().numpy() for k, p in theirs.named_parameters()}
    found = test_models.run_model(0, 1, model_run, weights, batches)
    logits, loss, count = [], 0.0, 0
    for batch in batches:
        shape = (2, parity.SEQ)
        mask = torch.zeros(2, 1, parity.SEQ, parity.SEQ, dtype=torch.float64).masked_fill(
            ~whole_mask(batch), -torch.inf
        )
        out = theirs(batch.tokens.view(shape), attention_mask=mask, position_ids=batch.positions.view(shape)).logits
        logits.append(out.flatten(0, 1))
        loss = loss + F.cross_entropy(logits[-1], batch.labels, ignore_index=IGNORE, reduction="sum")
        count += int(batch.labelled.sum())
    (loss / count).backward()
    whole = torch.cat(logits).detach().numpy()
    assert np.abs(np.concatenate(found["logits"]) - whole).max() <= 1e-10 * np.abs(whole).max()
    grads = parity.assemble([found["grads"]])
    for name, p in theirs.named_parameters():
        assert np.abs(grads[name] - p.grad.numpy()).max() <= 1e-10 * max(float(p.grad.abs().max()), 1e-6), name


LAYOUTS = {
    "llama": [dict(tp=2), dict(pp=2), dict(sharding=3), dict(cp=2, cp_attention="ring"), dict(cp=2, cp_ulysses=2)],
    "gpt2": [dict(cp=2, cp_attention="allgather")],
    "deepseek_v3": [dict(cp=2), dict(ep=2)],
    "gemma3_text": [dict(cp=2)],
    "llama4_text": [dict(tp=2)],
    "deepseek_v3-mtp": [dict(pp=2)],
}


OFTEN = [("llama", LAYOUTS["llama"][i]) for i in (0, 3)] + [("deepseek_v3", LAYOUTS["deepseek_v3"][0])]
EVERY = [(model, layout) for model, every in LAYOUTS.items() for layout in every]


@pytest.mark.parametrize(
    "model, layout", [pytest.param(*c, marks=[] if c in OFTEN else pytest.mark.soak) for c in EVERY], ids=str
)
def test_a_layout_changes_nothing(ranks, model, layout):
    run = run_of(model, layout, packing="online", document_attention=None)
    found = ranks.run("tests.verifying.test_verify:rank_compare", 2, run, 2)
    assert all(each.ok for each in found)


def test_a_run_learns_and_is_evaluated_as_it_was_trained(tmp_path):
    """And generates no text, which would read its prompts otherwise."""
    model = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.1,
    )
    run = Run(
        model=model,
        task=prefix(),
        train=TrainConfig(steps=30, global_batch=8, micro_batch=4, seq_length=32, device="cpu"),
        data=DataConfig(mock=True, packing="online"),
        optim=OptimConfig(lr=1e-2),
        log=LogConfig(report=False),
        dir=str(tmp_path / "run"),
    )
    train(run, Placement())
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert np.mean(losses[-5:]) < 0.95 * np.mean(losses[:5])
    [weights] = Path(run.dir).glob("checkpoints/step-*30/weights")
    assert base_config(weights, False)["task"]["name"] == "prefix"
    with pytest.raises(ConfigError, match="does not generate text: attention to what is remembered has no prefix"):
        kept_by(make_plan(without_training(run_of_folder(weights, False), 1), 1))


# ---- bad input


def test_what_does_not_go_with_it():
    run = replace(run_of(), train=replace(run_of().train, precision="fp32"))
    facts = Facts(files=False)
    assert check(run, facts) == []
    [found] = check(replace(run, data=DataConfig(mock=True)), facts)
    assert found.field == "data.document_attention" and found.valid == (True,)
    for name, value, valid in (("batch_invariant", True, False), ("kernels", "optional", "auto")):
        found = [p for p in check(replace(run, train=replace(run.train, **{name: value})), facts) if "prefix" in p.rule]
        assert [(p.field, p.valid) for p in found] == [(f"train.{name}", (valid,))]
    asked = replace(run.train, eval_tasks=["arc_easy"], eval_interval=5)
    [found] = check(replace(run, train=asked, data=replace(run.data, tokenizer="bytes")), facts)
    assert found.field == "train.eval_tasks" and "needs causal attention" in found.rule and found.valid == ([],)
    files = replace(run, data=replace(run.data, mock=False, paths=("a",)))
    [found] = check(replace(files, task=prefix(train_on="answers")), facts)
    assert found.field == "task.train_on" and found.valid == ("last_answer",)
    encoder = replace(run, model=parity.MODELS["bert"])
    assert "task={name: mlm}" in next(p.rule for p in check(encoder, facts) if p.field == "task.name")
