"""Retrieval that answers: a small Llama, given passages that a trained retriever finds, says which arguments a function
of the standard library takes that neither of them has seen in training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from phalanx.base.placement import Placement
from phalanx.cli.main import cli
from phalanx.config.run import CheckpointConfig, LogConfig, Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.models.llama import LlamaConfig
from phalanx.nn.objective import find_objective
from phalanx.optim.adamw import AdamWConfig
from phalanx.optim.muon import MuonConfig
from phalanx.retrieval.prompting import PassageTemplate
from phalanx.retrieval.retriever import Lookup, Retriever
from phalanx.text.tokenizers import train_bpe
from phalanx.training.main import train
from tests.harness.docstrings import Docstring
from tests.retrieval.test_learning import cut, losses_of, split, train_retriever

pytest.importorskip("faiss", reason="indexes need the extra index")

NEIGHBOURS = 4
LETTERS = 90  # of a passage, behind its name
LONGEST = 60  # letters of a list of arguments; longer ones are not asked for
ALONE = 0.2  # of the questions of training come without passages
CHANGED = 0.85  # of those with their passage have other functions' arguments in it
VOCABULARY = 2048


def arguments(each: Docstring) -> str:
    return each.rest[: each.rest.index(") ") + 1]


def asked(docstrings: list[Docstring]) -> list[Docstring]:
    """Those that take something beside the object they belong to."""
    said = [(each, arguments(each)) for each in docstrings]
    return [each for each, found in said if found not in ("()", "(self)", "(cls)") and len(found) <= LONGEST]


def passage(each: Docstring) -> str:
    return f"{each.words} takes {each.rest[:LETTERS]}"


def question(each: Docstring) -> str:
    return f"{each.words}: {cut(each.first, 10)}\nArguments? {each.words} takes"


def answer(each: Docstring) -> str:
    return f" {arguments(each)}"


def verb(*words: str | Path) -> None:
    found = CliRunner().invoke(cli, [str(word) for word in words])
    assert found.exit_code == 0, (found.output, found.exception)


def write_lines(path: Path, lines: list[dict[str, str]]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def index_of(folder: Path, name: str, docstrings: list[Docstring]) -> str:
    """By `phalanx embed` and `phalanx index`. A passage's id is the number of its docstring."""
    lines = [{"id": str(number), "text": passage(each)} for number, each in enumerate(docstrings)]
    texts = write_lines(folder / f"{name}.jsonl", lines)
    verb("embed", folder / "retriever", "--input", texts, "-o", folder / f"{name}-vectors")
    verb("index", folder / f"{name}-vectors", "-o", folder / name)
    return str(folder / name)


def training_chats(index: str, docstrings: list[Docstring], copies: int) -> list[dict[str, str]]:
    """Questions with what the retriever finds, or alone. In most passages the arguments are those of other functions:
    what is said must be read there, and cannot be remembered."""
    dice, lines, template = np.random.default_rng(1), list[dict[str, str]](), PassageTemplate()
    found = Retriever(Lookup(index=index, neighbours=NEIGHBOURS)).find([question(each) for each in docstrings])
    for number, each in enumerate(docstrings):
        for _ in range(copies):
            shown, said = found[number], answer(each)
            if dice.random() < ALONE:
                shown = []
            elif dice.random() < CHANGED and any(one.passage.id == str(number) for one in shown):
                others = [docstrings[i] for i in dice.choice(len(docstrings), len(shown), replace=False)]
                changed = [changed_to(docstrings[int(one.passage.id)], other) for one, other in zip(shown, others)]
                said = next(answer(c) for one, c in zip(shown, changed) if one.passage.id == str(number))
                shown = [replace(one, passage=replace(one.passage, text=passage(c))) for one, c in zip(shown, changed)]
            lines.append({"prompt": template.render(question(each), shown), "completion": said})
    return [lines[i] for i in dice.permutation(len(lines))]


def changed_to(each: Docstring, other: Docstring) -> Docstring:
    """With the arguments of another."""
    return replace(each, rest=arguments(other) + each.rest[len(arguments(each)) :])


def train_answers(folder: Path, steps: int, chats: list[dict[str, str]]) -> list[float]:
    """Losses of the steps. The run is at `folder`/answers."""
    train_bpe([f"{line['prompt']}{line['completion']}" for line in chats[:3000]], VOCABULARY, folder / "pieces")
    options = {"global_batch": 8, "micro_batch": 8, "seq_length": 256}
    run = Run(
        model=LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
        ),
        task=find_objective("sft").Config(name="sft"),
        train=TrainConfig(steps=steps, device="cpu", **options),
        data=DataConfig(
            chats=(str(write_lines(folder / "chats.jsonl", chats)),),
            tokenizer=str(folder / "pieces"),
            split="100,0,0",
            too_long="drop",
        ),
        optim=MuonConfig(
            name="muon",
            lr=1e-2,
            weight_decay=0.05,
            warmup_steps=steps // 20,
            products="master",
            fallback=AdamWConfig(lr=1e-2, weight_decay=0.05),
        ),
        log=LogConfig(report=False),
        checkpoint=CheckpointConfig(interval=steps),
        dir=str(folder / "answers"),
    )
    train(run, Placement())
    return losses_of(folder / "answers")


def share_right(folder: Path, docstrings: list[Docstring], index: str | None) -> float:
    """Of the questions about these, those that `phalanx generate` answers exactly."""
    questions = write_lines(folder / "asked.jsonl", [{"prompt": question(each)} for each in docstrings])
    found = () if index is None else ("--index", index, "--neighbours", str(NEIGHBOURS))
    verb(
        *("generate", folder / "answers", "--prompts", questions, "-o", folder / "said.jsonl", *found),
        *("--temperature", "0", "--tokens", "32"),
    )
    said = [json.loads(line)["text"] for line in (folder / "said.jsonl").read_text().splitlines()]
    return float(np.mean([text == answer(each) for text, each in zip(said, docstrings, strict=True)]))


def pairs(docstrings: list[Docstring]) -> list[dict[str, str]]:
    return [{"query": question(each), "positive": passage(each)} for each in docstrings]


def test_answers_begin_to_be_learned(tmp_path):
    some = asked(split()[1])[:150]
    train_retriever(tmp_path, 2, pairs(some))
    chats = training_chats(index_of(tmp_path, "known", some), some, 1)
    losses = train_answers(tmp_path, 20, chats)
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:3])
    assert 0 <= share_right(tmp_path, some[:4], str(tmp_path / "known")) <= 1


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.xfail(
    reason="12 points more (17 % and 5 %) on 2026-11-26: the passage is found, but arguments are seldom copied"
)
def test_neighbours_answer_questions_about_held_out_docstrings(tmp_path):
    """With passages in the prompt at least 30 points more than without."""
    held_out, known = map(asked, split())
    train_retriever(tmp_path, 50, pairs(known))
    train_answers(tmp_path, 2400, training_chats(index_of(tmp_path, "known", known), known, 12))
    alone = share_right(tmp_path, held_out, None)
    found = share_right(tmp_path, held_out, index_of(tmp_path, "held-out", held_out))
    print(f"of {len(held_out)} questions right: {found:.1%} with neighbours, {alone:.1%} without")
    assert found >= alone + 0.3
