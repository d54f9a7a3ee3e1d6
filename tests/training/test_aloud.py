"""A real task for an encoder and a decoder: a small T5 that begins at random reads words aloud. It is given letters and
says phonemes (the CMU Pronouncing Dictionary)."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import tokenizers

import phalanx as px
from phalanx.config.run import CheckpointConfig, LogConfig, Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.data.loader import train_loader
from phalanx.engine.build import State
from phalanx.inference.generate import TextSampler
from phalanx.inference.request import SamplingOptions
from phalanx.models.t5 import T5Config
from phalanx.nn.objective import find_objective
from phalanx.optim.adamw import AdamWConfig
from phalanx.optim.muon import MuonConfig
from phalanx.planning.reading import reading_of
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.sequence.sample import ENCODER
from phalanx.text.cache import ChatUse, use_text
from tests.harness.pronunciations import pronunciations
from tests.models.test_models import all_logits

HELD_OUT = 2000
SEQ = 64  # a sequence has room for some words
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@lru_cache
def symbols() -> dict[str, str]:
    """phoneme -> the character that stands for it in texts."""
    names = sorted({sound for ways in pronunciations().values() for way in ways for sound in way})
    return {name: chr(ord("À") + number) for number, name in enumerate(names)}


def written(way: tuple[str, ...]) -> str:
    return "".join(symbols()[sound] for sound in way)


def split() -> tuple[list[str], list[str]]:
    """Words that are held out, and those that are trained on."""
    words = list(pronunciations())
    return words[:HELD_OUT], words[HELD_OUT:]


def chats(path: Path, words: list[str], most: int | None = None) -> str:
    """Each word with each of its pronunciations, or with the first `most` of them."""
    lines = [
        json.dumps({"prompt": word, "completion": written(way)})
        for word in words
        for way in pronunciations()[word][:most]
    ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def tokenizer_folder(folder: Path) -> str:
    """Letters and phonemes, each a token."""
    folder.mkdir()
    core = tokenizers.Tokenizer(
        tokenizers.models.BPE({c: i for i, c in enumerate([*LETTERS, *symbols().values()])}, [])
    )
    core.decoder = tokenizers.decoders.Fuse()  # without one, decoding puts spaces between tokens
    core.add_special_tokens(["<pad>", "</s>"])
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "pad_token": "<pad>"}))
    return str(folder)


def run_of(folder: Path, steps: int, words: list[str]) -> Run:
    signs = len(LETTERS) + len(symbols())
    model = T5Config(
        vocab_size=signs + 2,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=32,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=20,
        decoder_start_token_id=signs,
    )
    return Run(
        model=model,
        task=find_objective("seq2seq").Config(name="seq2seq", encoder_length=SEQ),
        train=TrainConfig(steps=steps, global_batch=32, micro_batch=32, seq_length=SEQ, device="cpu"),
        data=DataConfig(
            chats=(chats(folder / "train.jsonl", words, 1),),
            tokenizer=tokenizer_folder(folder / "words"),
            split="100,0,0",
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
        checkpoint=CheckpointConfig(interval=None),
        dir=str(folder / "run"),
    )


def batches_of(run: Run, file: str) -> list[Batch]:
    data, size = replace(run.data, chats=(file,)), run.model.vocab_size
    use = ChatUse("last_answer", run.model.media)
    data = use_text(data, run.dir, size, train_on=use, say=lambda line: None)
    reading = reading_of(replace(run, data=data))
    loader = train_loader(data, seq_length=SEQ, seed=1, vocab_size=size, samples=1, reading=reading)
    return [loader.batch([number]) for number in range(loader.num_samples)]


def read_right(state: State, batches: list[Batch]) -> dict[str, bool]:
    """Of each word: whether greedy decoding says one of its pronunciations, which is so if each token of that one is
    the likeliest after those before it."""
    logits, found = all_logits(state, batches), dict[str, bool]()
    state.model.stages.finish = None
    state.model.train()
    for batch, said in zip(batches, logits):
        read, labels, documents = batch.beside[ENCODER], batch.labels.numpy(), batch.documents.numpy()
        right = (said.argmax(-1) == labels) | (labels == IGNORE)
        for number in np.unique(documents[labels != IGNORE]):
            letters = read.tokens[read.documents == number].tolist()
            word = "".join(LETTERS[i] for i in letters if i < len(LETTERS))
            found[word] = found.get(word, False) or bool(right[documents == number].all())
    return found


def generated_right(run: str, words: list[str]) -> dict[str, bool]:
    """The same by `generate`."""
    with TextSampler(run) as sampler:
        answers = {a.prompt: a.text for a in sampler.generate(words, SamplingOptions(tokens=32, temperature=0))}
    return {word: answers[i] in map(written, pronunciations()[word]) for i, word in enumerate(words)}


def test_words_begin_to_be_read_aloud(tmp_path):
    losses = []
    with px.session(run_of(tmp_path, 24, split()[1][:3000])) as session:
        for batches in session.batches():
            losses.append(session.train_step(batches).loss.item())
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_words_are_read_aloud(tmp_path):
    """At least half of the words that it has never seen, exactly."""
    run = run_of(tmp_path, 1600, split()[1])
    with px.session(run) as session:
        for batches in session.batches():
            session.train_step(batches)
        right = read_right(session.state, batches_of(run, chats(tmp_path / "test.jsonl", split()[0])))
    share = np.mean(list(right.values()))
    print(f"read aloud exactly, of {len(right)} held-out words: {share:.1%}")
    some = dict(islice(right.items(), 100))
    assert generated_right(run.dir, list(some)) == some
    assert len(right) == HELD_OUT and share >= 0.5
