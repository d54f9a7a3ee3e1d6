"""Retrieval that is learned: docstrings of the standard library. A retriever finds the right one for a name and first
line; with what it finds in its prompt, a small model answers questions that it cannot answer without."""

from __future__ import annotations

import json
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from phalanx.base.placement import Placement
from phalanx.cli.main import cli
from phalanx.config.run import CheckpointConfig, LogConfig, Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.inference.embedder import embedder_alone, embedder_folder, marks_of
from phalanx.models.modernbert import ModernBertConfig
from phalanx.models.qwen3 import Qwen3Config
from phalanx.nn.objective import find_objective
from phalanx.optim.config import OptimConfig
from phalanx.text.tokenizer_base import Tokenizer
from phalanx.text.tokenizers import load_tokenizer, train_wordpiece
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


def train_retriever(folder: Path, steps: int) -> list[float]:
    """Losses of the steps. The run is at `folder`/retriever."""
    tokenizer = folder / "tokenizer"
    train_wordpiece([f"{d.query} {d.passage}" for d in split()[1]], 4000, tokenizer)
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, training_lines())))
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


def test_a_retriever_begins_to_learn(tmp_path):
    losses = train_retriever(tmp_path, 12)
    assert np.mean(losses[-3:]) < 0.8 * np.mean(losses[:2])


@pytest.mark.soak
def test_a_retriever_finds_held_out_docstrings(tmp_path):
    train_retriever(tmp_path, 150)
    found = found_in_first_ten(tmp_path / "retriever")
    print(f"the right docstring is in the first ten of {HELD_OUT}: {found:.1%}")
    assert found >= 0.8


# ---- questions

SHORT = 20  # words of a passage in a prompt
NEIGHBOURS = 4
TURNS = 6  # questions of a lesson
LESSONS = 6000
READER_STEPS = 300
CHATS = """\
{% for m in messages %}
{% if m.role == "assistant" %}
{% generation %}{{ m.content }}{% endgeneration %}

{% else %}
{{ m.content }}
{% endif %}
{% endfor %}
"""
PROMPT = "{% for p in passages %}{{ p.text }}\n{% endfor %}{{ prompt }}"


class Questions:
    """Does the text of a docstring have this word? A word is one token, seldom, and of six letters or more."""

    def __init__(self, tokenizer: Tokenizer, known: list[Docstring]):
        counts = Counter(word for each in known for word in set(self.words(each)))
        most = len(known) // 20
        self.asked = {w for w, n in counts.items() if n <= most and len(w) >= 6 and len(tokenizer.encode(w)) == 1}

    @staticmethod
    def words(each: Docstring) -> list[str]:
        return [word for word in cut(each.passage, SHORT).split() if word.isalpha() and word.islower()]

    def about(self, each: Docstring, other: Docstring, yes: bool, dice: np.random.Generator) -> str | None:
        """A word of the docstring, or one of another that it has not; None: there is no such word."""
        mine, theirs = ({w for w in self.words(d) if w in self.asked} for d in (each, other))
        choice = sorted(mine if yes else theirs - set(self.words(each)))
        return str(dice.choice(choice)) if choice else None


def train_reader(folder: Path, steps: int) -> Questions:
    """A small decoder that learns to look words up in what it reads."""
    dice, known = np.random.default_rng(2), split()[1]
    questions = Questions(load_tokenizer(folder / "tokenizer"), known)
    chats = list[str]()
    while len(chats) < LESSONS:
        every = [known[i] for i in dice.choice(len(known), NEIGHBOURS + 2, replace=False)]
        gold, outside = every[0], every[NEIGHBOURS:]
        passages = [cut(every[i].passage, SHORT) for i in dice.permutation(NEIGHBOURS)]
        turns, asked = list[dict[str, str]](), set[str]()
        for number in range(TURNS):
            yes = bool(dice.random() < 0.5)
            word = questions.about(gold, outside[number % 2], yes, dice)
            if word is None or word in asked:
                continue
            asked.add(word)
            start = "" if turns else "\n".join([*passages, gold.query, ""])
            turns.append({"role": "user", "content": f"{start}{word} ?"})
            turns.append({"role": "assistant", "content": "yes" if yes else "no"})
        if turns:
            chats.append(json.dumps({"messages": turns}))
    (folder / "lessons.jsonl").write_text("\n".join(chats))
    (folder / "chats.jinja").write_text(CHATS)
    model = Qwen3Config(
        vocab_size=4096,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=24,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    run = Run(
        model=model,
        task=find_objective("sft").Config(name="sft", train_on="answers"),
        train=TrainConfig(steps=steps, global_batch=8, micro_batch=8, seq_length=512, device="cpu"),
        data=DataConfig(
            chats=(str(folder / "lessons.jsonl"),),
            template=str(folder / "chats.jinja"),
            tokenizer=str(folder / "tokenizer"),
            split="100,0,0",
            too_long="drop",
        ),
        optim=OptimConfig(lr=3e-3),
        log=LogConfig(report=False),
        checkpoint=CheckpointConfig(interval=steps),
        dir=str(folder / "reader"),
    )
    train(run, Placement())
    return questions


def answers(folder: Path, prompts: list[str], *more: str) -> list[str]:
    (folder / "questions.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    words = ["generate", str(folder / "reader"), "--prompts", str(folder / "questions.jsonl"), "--tokens", "1"]
    words += ["--temperature", "0", "-o", str(folder / "answers.jsonl"), *more]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, (done.output, done.exception)
    return [json.loads(line)["text"].strip() for line in (folder / "answers.jsonl").read_text().splitlines()]


def index_held_out(folder: Path) -> list[str]:
    """An index of the held-out docstrings, and the options that put four of them into a prompt."""
    lines = [{"id": each.name, "text": cut(each.passage, SHORT)} for each in split()[0]]
    (folder / "passages.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "passages.jinja").write_text(PROMPT)
    retriever, vectors, index = (str(folder / name) for name in ("retriever", "vectors", "index"))
    for words in (
        ["embed", retriever, "--input", str(folder / "passages.jsonl"), "-o", vectors],
        ["index", vectors, "-o", index],
    ):
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 0, (done.output, done.exception)
    return ["--index", index, "--neighbours", str(NEIGHBOURS), "--passage-template", str(folder / "passages.jinja")]


def asked_of_held_out(questions: Questions) -> tuple[list[str], list[str]]:
    """Questions and their answers, as many of one kind as of the other."""
    dice, held = np.random.default_rng(3), split()[0]
    found: dict[str, list[str]] = {"yes": [], "no": []}
    for number, each in enumerate(held):
        for answer, prompts in found.items():
            word = questions.about(each, held[number - 7], answer == "yes", dice)
            prompts += [] if word is None else [f"{each.query}\n{word} ?"]
    count = min(map(len, found.values()))
    return found["yes"][:count] + found["no"][:count], ["yes"] * count + ["no"] * count


def right(said: list[str], expected: list[str]) -> float:
    return float(np.mean([a == b for a, b in zip(said, expected, strict=True)]))


@pytest.mark.soak
def test_with_passages_a_small_model_answers_what_it_does_not_know(tmp_path):
    """Whether held-out docstrings have a word: at least 30 points more with four passages in the prompt."""
    pytest.importorskip("faiss", reason="indexes need the extra index")
    train_retriever(tmp_path, 150)
    prompts, expected = asked_of_held_out(train_reader(tmp_path, READER_STEPS))
    without = right(answers(tmp_path, prompts), expected)
    with_passages = right(answers(tmp_path, prompts, *index_held_out(tmp_path)), expected)
    print(f"{len(prompts)} questions: {without:.1%} without passages, {with_passages:.1%} with {NEIGHBOURS}")
    assert with_passages >= without + 0.3
