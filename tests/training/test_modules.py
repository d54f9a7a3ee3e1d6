"""A real task for an encoder: a small BERT that begins at random is pretrained on the source of the standard library,
and learns from a few paragraphs of each module to say of others which module they are of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import phalanx as px
from phalanx.checkpoint.keep import latest
from phalanx.config.run import CheckpointConfig, LogConfig, Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.data.loader import train_loader
from phalanx.engine.build import State
from phalanx.models.bert import BertConfig
from phalanx.nn.objective import find_objective
from phalanx.optim.adamw import AdamWConfig
from phalanx.optim.config import OptimConfig
from phalanx.optim.muon import MuonConfig
from phalanx.planning.reading import reading_of
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.text.classes import prepare_classes
from phalanx.text.tokenizers import train_wordpiece
from tests.harness.docstrings import library_files
from tests.models.test_models import all_logits

WORDS = 64  # of a paragraph, at most
MODULES = 40  # those with the most paragraphs
LABELLED, TESTS = 8, 15  # paragraphs of each module
VOCABULARY = 2048
SEQ = 256


@dataclass(frozen=True)
class Paragraph:
    module: str
    text: str


def paragraphs() -> Iterator[Paragraph]:
    """Of source files: what stands between empty lines, short ones together, long ones in parts; in single words."""
    for module, source in library_files():
        block = list[str]()
        for part in re.split(r"\n\s*\n", source):
            block += re.findall(r"\w+|[^\w\s]", part)
            while len(block) >= WORDS // 2:
                yield Paragraph(module.partition(".")[0], " ".join(block[:WORDS]))
                block = block[WORDS:]


@dataclass(frozen=True)
class Corpus:
    """modules: names of the classes. labelled and held_out: so many of each. text: all but those that are held out."""

    modules: tuple[str, ...]
    labelled: list[Paragraph]
    held_out: list[Paragraph]
    text: list[Paragraph]


@lru_cache
def corpus() -> Corpus:
    """Drawn from all paragraphs, in an order that says nothing."""
    every = list(paragraphs())
    by_module = dict[str, list[Paragraph]]()
    for i in np.random.default_rng(0).permutation(len(every)):
        by_module.setdefault(every[i].module, []).append(every[i])
    largest = sorted(by_module, key=lambda module: (-len(by_module[module]), module))[:MODULES]
    modules = tuple(sorted(largest))
    labelled = [each for module in modules for each in by_module[module][TESTS : TESTS + LABELLED]]
    held_out = [each for module in modules for each in by_module[module][:TESTS]]
    text = [p for module, found in by_module.items() for p in found[TESTS if module in modules else 0 :]]
    return Corpus(modules, labelled, held_out, text)


def model_of(head: Any, **more: Any) -> BertConfig:
    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.05,
        head=head,
        **more,
    )


def write_classes(folder: Path, name: str, some: list[Paragraph], modules: tuple[str, ...]) -> str:
    """Token files of paragraphs, [CLS] paragraph [SEP], with their modules beside them."""
    lines = [json.dumps({"text": each.text, "label": each.module}) for each in some]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    prepare_classes([folder / f"{name}.jsonl"], folder / name, str(folder / "tokenizer"), modules)
    return str(folder / name)


@dataclass(frozen=True)
class Amount:
    """How much is trained: sequences in a step, steps, and by which optimizer."""

    batch: int
    steps: int
    optim: OptimConfig


def adamw(steps: int) -> OptimConfig:
    return AdamWConfig(lr=2e-3, weight_decay=0.05, warmup_steps=steps // 10, schedule="linear")


def muon(steps: int) -> OptimConfig:
    return MuonConfig(
        name="muon",
        lr=4e-3,
        weight_decay=0.05,
        warmup_steps=steps // 20,
        schedule="linear",
        products="master",
        fallback=AdamWConfig(lr=4e-3, weight_decay=0.05),
    )


def run_of(path: Path, prefix: str, amount: Amount, model: BertConfig, task: Any) -> Run:
    """path: of the run's folder, beside the tokenizer's. prefix: of token files."""
    batch = amount.batch
    return Run(
        model=model,
        task=task,
        train=TrainConfig(steps=amount.steps, global_batch=batch, micro_batch=batch, seq_length=SEQ, device="cpu"),
        data=DataConfig(paths=(prefix,), tokenizer=str(path.parent / "tokenizer"), split="100,0,0", packing="online"),
        optim=amount.optim,
        log=LogConfig(report=False),
        checkpoint=CheckpointConfig(interval=None),
        dir=str(path),
    )


def pretrain(folder: Path, steps: int, texts: list[Paragraph]) -> list[float]:
    """As BERT was: hidden tokens, and whether the second part of a paragraph follows the first. Losses of the steps,
    both together. The run is at `folder`/pretrained."""
    train_wordpiece([each.text for each in texts], VOCABULARY - 64, folder / "tokenizer")
    every = tuple(sorted({each.module for each in texts}))
    mixed = [texts[i] for i in np.random.default_rng(3).permutation(len(texts))]
    prefix = write_classes(folder, "text", mixed, every)
    task = find_objective("mlm").Config(name="mlm", rate=0.3, pairs="next")
    run = run_of(folder / "pretrained", prefix, Amount(8, steps, muon(steps)), model_of("pretraining"), task)
    losses = []
    with px.session(run) as session:
        for batches in session.batches():
            losses.append(session.train_step(batches).loss.item())
    return losses


def share_right(folder: Path, pretrained: bool, steps: int, seed: int) -> float:
    """Of paragraphs that are held out, those whose module is said after fine-tuning on the labelled ones, from the
    pretrained net or from a new one. seed: of the head, of the order of texts and of dropout."""
    known = corpus()
    prefix, held_out = (
        write_classes(folder, name, some, known.modules)
        for name, some in (("labelled", known.labelled), ("held-out", known.held_out))
    )
    model = model_of("sequence", labels=known.modules, classifier_dropout=0.1, dropout=0.1)
    task = find_objective("classify").Config(name="classify")
    run = run_of(folder / f"classes-{pretrained}-{seed}", prefix, Amount(4, steps, adamw(steps)), model, task)
    run = replace(run, train=replace(run.train, seed=seed))
    if pretrained:
        run = replace(run, init_from=str(latest(folder / "pretrained" / "checkpoints") / "weights"))
    with px.session(run) as session:
        for batches in session.batches():
            session.train_step(batches)
        return share_of(session.state, batches_of(run, held_out))


def batches_of(run: Run, prefix: str) -> list[Batch]:
    run = replace(run, data=replace(run.data, paths=(prefix,)))
    loader = train_loader(run.data, seq_length=SEQ, seed=1, vocab_size=VOCABULARY, samples=1, reading=reading_of(run))
    return [loader.batch([number]) for number in range(loader.num_samples)]


def share_of(state: State, batches: list[Batch]) -> float:
    right = list[bool]()
    for batch, said in zip(batches, all_logits(state, batches)):
        labels = batch.labels.numpy()
        right += (said.argmax(-1) == labels)[labels != IGNORE].tolist()
    state.model.stages.finish = None
    state.model.train()
    if len(right) != len(corpus().held_out):
        raise AssertionError(f"{len(right)} paragraphs were read of {len(corpus().held_out)}")
    return float(np.mean(right))


def test_an_encoder_begins_to_learn_the_standard_library(tmp_path):
    """Truth: a guess among all tokens and both classes of a pair has a loss of log VOCABULARY + log 2 = 8.3."""
    losses = pretrain(tmp_path, 40, corpus().text[:3000])
    assert np.mean(losses[-5:]) < 0.9 * np.log(2 * VOCABULARY)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_pretraining_helps_to_tell_modules(tmp_path):
    """By 20 points more than the same fine-tuning of the same net untrained. Each is tuned twice: one tuning is off by
    some points by chance."""
    losses = pretrain(tmp_path, 3500, corpus().text)
    found, alone = (
        float(np.mean([share_right(tmp_path, pretrained, 250, seed) for seed in (1, 2)]))
        for pretrained in (True, False)
    )
    print(f"of {len(corpus().held_out)} paragraphs right: {found:.1%} pretrained, {alone:.1%} not; {losses[-1]:.2f}")
    assert found >= alone + 0.2
