"""Retrieval that answers: a small hybrid, given passages that a trained retriever finds, says which arguments a
function of the standard library takes that neither of them has seen in training."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from phalanx.base.placement import Placement
from phalanx.checkpoint.keep import latest
from phalanx.cli.main import cli
from phalanx.config.run import CheckpointConfig, LogConfig, Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.models.nemotron_h import NemotronHConfig
from phalanx.nn.objective import find_objective
from phalanx.optim.adamw import AdamWConfig
from phalanx.optim.muon import MuonConfig
from phalanx.retrieval.documents import TextPassage
from phalanx.retrieval.prompting import PassageTemplate
from phalanx.retrieval.retriever import FoundPassage, Lookup, Retriever
from phalanx.text.tokenizers import load_tokenizer, train_bpe
from phalanx.training.main import train
from tests.harness.docstrings import Docstring
from tests.retrieval.test_learning import cut, losses_of, split, train_retriever

pytest.importorskip("faiss", reason="indexes need the extra index")

NEIGHBOURS = 4
LETTERS = 90  # of a passage, behind its arguments
LONGEST = 60  # letters of a list of arguments; longer ones are not asked for
ALONE = 0.2  # of the questions of training come without passages
CHANGED = 0.85  # of those with their passage have other functions' arguments in it
VOCABULARY = 1024
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"

Chat = dict[str, list[dict[str, str]]]


def arguments(each: Docstring) -> str:
    """As a caller gives them: without the object or class that a method belongs to."""
    return re.sub(r"^(self|cls)(, |$)", "", each.rest[1 : each.rest.index(") ")])


def asked(docstrings: list[Docstring]) -> list[Docstring]:
    """Those that take arguments."""
    said = [(each, arguments(each)) for each in docstrings]
    return [each for each, found in said if found and len(found) <= LONGEST and ";" not in found]


def text_of(each: Docstring) -> str:
    return each.rest[each.rest.index(") ") + 2 :][:LETTERS]


def passage(each: Docstring) -> str:
    return written(each.words, arguments(each), text_of(each))


def written(name: str, takes: str, text: str) -> str:
    return f"Usage: {name}{answer(takes)} {text}".strip()


def question(each: Docstring) -> str:
    return f"{each.words}: {cut(each.first, 10)}\nUsage: {each.words}"


def answer(takes: str) -> str:
    return f" {takes};"


def verb(*words: str | Path) -> None:
    found = CliRunner().invoke(cli, [str(word) for word in words])
    assert found.exit_code == 0, (found.output, found.exception)


def write_lines(path: Path, lines: list[dict[str, str]] | list[Chat]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def index_of(folder: Path, name: str, docstrings: list[Docstring]) -> str:
    """By `phalanx embed` and `phalanx index`. A passage's id is the number of its docstring."""
    lines = [{"id": str(number), "text": passage(each)} for number, each in enumerate(docstrings)]
    texts = write_lines(folder / f"{name}.jsonl", lines)
    verb("embed", folder / "retriever", "--input", texts, "-o", folder / f"{name}-vectors")
    verb("index", folder / f"{name}-vectors", "-o", folder / name)
    return str(folder / name)


# ---- what is learned, lesson by lesson


def chat(shown: str, turns: list[tuple[str, str]]) -> Chat:
    """What is shown, then questions and their answers."""
    texts = [text for turn in turns for text in turn]
    texts[0] = shown + texts[0]
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]}


@dataclass(frozen=True)
class Practice:
    """Chats about functions that there are not. Names and arguments are drawn anew for each chat, so an answer can only
    be read in what is shown. names: words of names. takes: arguments. longest: words of a name, arguments of a
    function. known: whose texts follow."""

    names: list[str]
    takes: list[str]
    longest: int
    known: list[Docstring]
    dice: np.random.Generator

    def drawn(self, words: list[str], between: str) -> str:
        count = self.dice.integers(1, self.longest + 1)
        return between.join(words[i] for i in self.dice.integers(0, len(words), count))

    def functions(self, count: int) -> list[tuple[str, str]]:
        """Names, no two alike, with their arguments. Some names differ from another in one word."""
        found = dict[str, str]()
        while len(found) < count:
            words = self.drawn(self.names, " ").split()
            if found and self.longest > 1 and self.dice.random() < 0.3:
                words = [*next(reversed(found)).split()[:-1], words[-1]]
            found[" ".join(words)] = self.drawn(self.takes, ", ")
        return [list(found.items())[i] for i in self.dice.permutation(count)]

    def pairs(self) -> Chat:
        """Names and arguments of 2 or 4 functions, then each name once more."""
        found = self.functions(int(self.dice.choice((2, 4))))
        turns = [(f" {found[i][0]}", answer(found[i][1])) for i in self.dice.permutation(len(found))]
        return chat("".join(f" {name}{answer(takes)}" for name, takes in found), turns)

    def passages(self, texts: bool) -> Chat:
        """Of 1 to 4 functions, then a question about each."""
        found = self.functions(int(self.dice.choice((1, 2, NEIGHBOURS))))
        like = [self.known[i] for i in self.dice.integers(0, len(self.known), len(found))]
        shown = [written(*each, text_of(one) if texts else "") for each, one in zip(found, like)]
        turns = list[tuple[str, str]]()
        for i in self.dice.permutation(len(found)):
            name, takes = found[i]
            asks = f"{name}: {cut(like[i].first, 10)}\nUsage: {name}" if texts else f"Usage: {name}"
            turns.append((f"\n{asks}" if turns else asks, answer(takes)))
        return chat(prompt_of("", shown), turns)


def prompt_of(asks: str, passages: list[str]) -> str:
    """As `generate --index` writes it."""
    found = [FoundPassage(TextPassage(text, str(number)), 1.0) for number, text in enumerate(passages)]
    return PassageTemplate().render(asks, found)


def found_chats(index: str, docstrings: list[Docstring], dice: np.random.Generator) -> Iterator[Chat]:
    """A question about each with what the retriever finds, or alone. In most passages the arguments are those of other
    functions: what is said must be read there, and cannot be remembered."""
    found = Retriever(Lookup(index=index, neighbours=NEIGHBOURS)).find([question(each) for each in docstrings])
    while True:
        for number in dice.permutation(len(docstrings)):
            shown = [docstrings[int(one.passage.id)] for one in found[number]]
            takes = {each: arguments(each) for each in (docstrings[number], *shown)}
            if dice.random() < ALONE:
                shown = []
            elif dice.random() < CHANGED and docstrings[number] in shown:
                takes = {each: arguments(docstrings[dice.integers(len(docstrings))]) for each in takes}
            texts = [written(each.words, takes[each], text_of(each)) for each in shown]
            asks, said = question(docstrings[number]), answer(takes[docstrings[number]])
            yield chat(prompt_of(asks, texts), [("", said)])


def tokens_as_words(folder: Path, dice: np.random.Generator) -> list[str]:
    """Words that are one token, or two."""
    tokenizer = load_tokenizer(str(folder))
    every = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    first = [text[1:] for text in every if re.fullmatch(r" \w\w+", text)]
    later = [text for text in every if re.fullmatch(r"\w\w+", text)]
    drawn = [dice.choice(first) + dice.choice(later) for _ in range(6 * len(first))]
    return [*first * 3, *(word for word in map(str, drawn) if len(tokenizer.encode(f" {word}")) == 2)]


@dataclass(frozen=True)
class Lesson:
    """One run. chats: to learn from, packed into sequences of seq_length, `batch` of them in a step."""

    name: str
    chats: int
    steps: int
    batch: int
    seq_length: int
    lr: float


LESSONS = (
    Lesson("pairs-of-tokens", 25000, 340, 16, 128, 1.5e-2),
    Lesson("pairs", 16000, 300, 16, 128, 1e-2),
    Lesson("passages", 9000, 300, 12, 160, 7e-3),
    Lesson("answers", 9000, 500, 8, 384, 7e-3),
)


def chats_of(folder: Path, lesson: Lesson, index: str, known: list[Docstring]) -> Iterator[Chat]:
    dice = np.random.default_rng(1)
    words = tokens_as_words(folder / "pieces", dice)
    tokens = Practice(words, words, 1, known, dice)
    names = sorted({word for each in known for word in each.words.split()})
    functions = Practice(names, sorted({one for each in known for one in arguments(each).split(", ")}), 3, known, dice)
    real = found_chats(index, known, dice) if lesson.name == "answers" else None
    while True:
        easy = dice.random() < 0.4
        if lesson.name == "pairs-of-tokens":
            yield tokens.pairs()
        elif lesson.name == "pairs":
            yield (tokens if easy else functions).pairs()
        elif real is None or easy:
            yield (tokens if easy and real is None else functions).passages(texts=real is not None)
        else:
            yield next(real)


def train_tokenizer(folder: Path, known: list[Docstring]) -> None:
    """To `folder`/pieces, with the template of its chats beside it."""
    train_bpe([f"{passage(each)}\n{question(each)}" for each in known], VOCABULARY, folder / "pieces")
    (folder / "chats.jinja").write_text(TEMPLATE)


def learn(folder: Path, lesson: Lesson, before: Lesson | None, chats: Iterator[Chat]) -> list[float]:
    """Losses of the steps. The run is at `folder`/NAME; it begins with the weights of the one before it."""
    weights = None if before is None else str(latest(folder / before.name / "checkpoints") / "weights")
    file = write_lines(folder / f"{lesson.name}.jsonl", list(islice(chats, lesson.chats)))
    run = Run(
        model=NemotronHConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            layers_block_type=("linear_attention", "full_attention", "full_attention"),
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            mamba_num_heads=4,
            mamba_head_dim=32,
            ssm_state_size=8,
            n_groups=1,
            initializer_range=0.1,
        ),
        task=find_objective("sft").Config(name="sft"),
        train=TrainConfig(
            steps=lesson.steps,
            global_batch=lesson.batch,
            micro_batch=lesson.batch,
            seq_length=lesson.seq_length,
            device="cpu",
        ),
        data=DataConfig(
            chats=(str(file),),
            tokenizer=str(folder / "pieces"),
            template=str(folder / "chats.jinja"),
            split="100,0,0",
            too_long="drop",
        ),
        optim=MuonConfig(
            name="muon",
            lr=lesson.lr,
            weight_decay=0.05,
            warmup_steps=min(30, lesson.steps // 2),
            schedule="linear" if lesson.name == LESSONS[-1].name else "constant",
            products="master",
            fallback=AdamWConfig(lr=2 * lesson.lr, weight_decay=0.05),
        ),
        log=LogConfig(report=False),
        checkpoint=CheckpointConfig(interval=None),
        dir=str(folder / lesson.name),
        init_from=weights,
    )
    train(run, Placement())
    return losses_of(folder / lesson.name)


def share_right(folder: Path, run: str, docstrings: list[Docstring], index: str | None) -> float:
    """Of the questions about these, those that `phalanx generate` answers exactly."""
    questions = write_lines(folder / "asked.jsonl", [{"prompt": question(each)} for each in docstrings])
    found = () if index is None else ("--index", index, "--neighbours", str(NEIGHBOURS))
    verb(
        *("generate", folder / run, "--prompts", questions, "-o", folder / "said.jsonl", *found),
        *("--temperature", "0", "--tokens", "48"),
    )
    said = [json.loads(line)["text"] for line in (folder / "said.jsonl").read_text().splitlines()]
    return float(np.mean([text == answer(arguments(each)) for text, each in zip(said, docstrings, strict=True)]))


def retriever_pairs(docstrings: list[Docstring]) -> list[dict[str, str]]:
    return [{"query": question(each), "positive": passage(each)} for each in docstrings]


@pytest.mark.soak
def test_answers_begin_to_be_learned(tmp_path):
    """Each part once, and the beginning of the first lesson. Truth: a guess among all tokens has a loss of
    log VOCABULARY = 6.9."""
    some = asked(split()[1])[:300]
    train_retriever(tmp_path, 2, retriever_pairs(some))
    index = index_of(tmp_path, "known", some)
    train_tokenizer(tmp_path, some)
    first, last = replace(LESSONS[0], chats=4000, steps=40), replace(LESSONS[-1], chats=200, steps=2)
    losses = learn(tmp_path, first, None, chats_of(tmp_path, first, index, some))
    assert np.mean(losses[-5:]) < 0.7 * np.log(VOCABULARY)
    learn(tmp_path, last, first, chats_of(tmp_path, last, index, some))
    assert 0 <= share_right(tmp_path, last.name, some[:4], index) <= 1


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_neighbours_answer_questions_about_held_out_docstrings(tmp_path):
    """With passages in the prompt at least 30 points more than without, or with passages about other functions."""
    held_out, known = map(asked, split())
    train_retriever(tmp_path, 50, retriever_pairs(known))
    index = index_of(tmp_path, "known", known)
    train_tokenizer(tmp_path, known)
    for before, lesson in zip((None, *LESSONS), LESSONS):
        losses = learn(tmp_path, lesson, before, chats_of(tmp_path, lesson, index, known))
        print(f"{lesson.name}: loss {np.mean(losses[-20:]):.3f}")
    indexes = {"neighbours": index_of(tmp_path, "held-out", held_out), "others": index, "none": None}
    right = {name: share_right(tmp_path, LESSONS[-1].name, held_out, index) for name, index in indexes.items()}
    print(f"right of {len(held_out)} questions, by passages: {right}")
    assert right["neighbours"] >= max(right["none"], right["others"]) + 0.3
