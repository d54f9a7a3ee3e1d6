"""Retrieval that is learned: a retriever finds the right docstring of the standard library for a name and first
line."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.base.placement import Placement
from phalanx.config.run import CheckpointConfig, LogConfig, Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.inference.embedder import embedder_alone, embedder_folder, marks_of
from phalanx.models.modernbert import ModernBertConfig
from phalanx.nn.objective import find_objective
from phalanx.optim.config import OptimConfig
from phalanx.text.tokenizers import train_wordpiece
from phalanx.training.main import train
from tests.harness.docstrings import Docstring, docstrings

HELD_OUT = 400
WORDS = 48  # of a passage


def cut(text: str, words: int = WORDS) -> str:
    return " ".join(text.split()[:words])


@lru_cache
def split() -> tuple[list[Docstring], list[Docstring]]:
    """Held-out docstrings, and those that are trained on."""
    every = docstrings()
    return every[:HELD_OUT], every[HELD_OUT:]


def training_lines() -> list[dict[str, str]]:
    """Each docstring, and pieces of long ones with what surrounds them."""
    dice, lines = np.random.default_rng(1), list[dict[str, str]]()
    for each in split()[1]:
        lines.append({"query": each.query, "positive": cut(each.passage)})
        words = each.passage.split()
        for _ in range(2 if len(words) > 24 else 0):
            first = int(dice.integers(0, len(words) - 8))
            stop = first + int(dice.integers(6, 16))
            around = words[:first] + words[stop:] if dice.random() < 0.5 else words[max(0, first - 20) : stop + 20]
            lines.append({"query": " ".join(words[first:stop]), "positive": cut(" ".join(around))})
    return [lines[i] for i in dice.permutation(len(lines))]


def train_retriever(folder: Path, steps: int, pairs: list[dict[str, str]]) -> list[float]:
    """Losses of the steps. The run is at `folder`/retriever."""
    tokenizer = folder / "tokenizer"
    train_wordpiece([f"{each['query']} {each['positive']}" for each in pairs], 4000, tokenizer)
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    model = ModernBertConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=512,
        head="none",
    )
    size: Any = {"global_batch": 16, "micro_batch": 8, "seq_length": 512}
    run = Run(
        model=model,
        task=find_objective("embed").Config(name="embed", temperature=0.07),
        train=TrainConfig(steps=steps, device="cpu", **size),
        data=DataConfig(pairs=(str(folder / "pairs.jsonl"),), tokenizer=str(tokenizer), split="100,0,0"),
        optim=OptimConfig(lr=3e-3),
        log=LogConfig(report=False),
        checkpoint=CheckpointConfig(interval=steps),
        dir=str(folder / "retriever"),
    )
    train(run, Placement())
    return losses_of(folder / "retriever")


def losses_of(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def found_in_first_ten(run: Path) -> float:
    """How often a held-out query's docstring is among the ten nearest of all held-out ones."""
    folder = embedder_folder(str(run))
    embedder, marks = embedder_alone(folder, 128), marks_of(folder)
    texts = [text for each in split()[0] for text in (each.query, cut(each.passage))]
    vectors = embedder.embed(len(texts), lambda number: marks.encode(texts[number], 128)).numpy()
    scores = vectors[0::2] @ vectors[1::2].T
    return float(((scores > np.diag(scores)[:, None]).sum(1) < 10).mean())


@pytest.mark.soak
def test_a_retriever_begins_to_learn(tmp_path):
    losses = train_retriever(tmp_path, 30, training_lines())
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:3])


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_retriever_finds_held_out_docstrings(tmp_path):
    train_retriever(tmp_path, 150, training_lines())
    found = found_in_first_ten(tmp_path / "retriever")
    print(f"the right docstring is in the first ten of {HELD_OUT}: {found:.1%}")
    assert found >= 0.8
