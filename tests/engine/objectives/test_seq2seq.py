"""Sequence to sequence: the encoder reads what comes before a chat's last answer and the decoder says it; a run learns
from a file of chats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.base.placement import Placement
from phalanx.config.device_check import Facts
from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.engine.objectives.seq2seq import ReadAndSay
from phalanx.forecast.check import check
from phalanx.forecast.data_table import open_loaders
from phalanx.models.t5 import T5Config
from phalanx.nn.objective import find_objective
from phalanx.optim.config import OptimConfig
from phalanx.sequence.batch import ENCODER, IGNORE
from phalanx.sequence.sample import Sample
from phalanx.text.cache import use_text
from phalanx.training.main import train
from tests.harness.same_samples import same_at_any_size_and_after_resume

END, START = 256, 263
WORDS = [f"{a}{b}{c}" for a in "abcd" for b in "efgh" for c in "ijkl"]


def run_of(folder: Path, **train_fields: Any) -> Run:
    lines = [json.dumps({"prompt": word, "completion": word[::-1]}) for word in WORDS]
    (folder / "words.jsonl").write_text("\n".join(lines))
    options = {"steps": 30, "global_batch": 4, "micro_batch": 2, "seq_length": 32, **train_fields}
    sizes = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    return Run(
        model=T5Config(**sizes, num_attention_heads=2, head_dim=16, decoder_start_token_id=START),
        train=TrainConfig(**options),
        task=find_objective("seq2seq").Config(name="seq2seq", encoder_length=48),
        data=DataConfig(chats=(str(folder / "words.jsonl"),), tokenizer="bytes", split="100,0,0"),
        optim=OptimConfig(lr=0.01, schedule="constant"),
        dir=str(folder / "run"),
    )


def texts(tokens: np.ndarray, documents: np.ndarray, real: np.ndarray) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for token, document, kept in zip(tokens.tolist(), documents.tolist(), real.tolist()):
        if kept:
            found.setdefault(document, []).append(token)
    return found


def test_the_encoder_reads_and_the_decoder_says(tmp_path):
    """Every word of the file, once in an epoch, with its own answer and in no other's document."""
    run = run_of(tmp_path)
    assert check(run, Facts()) == []
    loader, _ = open_loaders(run, use_text(run.data, run.dir, 264, train_on="last_answer", say=lambda line: None))
    seen = list[str]()
    for sample in range(loader.num_samples):
        batch = loader.batch([sample])
        encoder = batch.beside[ENCODER]
        read = texts(encoder.tokens, encoder.documents, encoder.real)
        inputs, labels = (texts(x, batch.documents, batch.real) for x in (batch.tokens, batch.labels))
        assert read.keys() == labels.keys()
        for number, prompt in read.items():
            said = labels[number]
            word = bytes(prompt[:-1]).decode()
            assert prompt[-1] == said[-1] == END and bytes(said[:-1]).decode() == word[::-1]
            assert inputs[number] == [START, *said[:-1]]
            seen.append(word)
    assert sorted(seen) == sorted(WORDS)


def test_the_same_samples_at_every_number_of_ranks_and_after_resume(tmp_path):
    run = run_of(tmp_path)
    data = use_text(run.data, run.dir, 264, train_on="last_answer", say=lambda line: None)
    same_at_any_size_and_after_resume(lambda: open_loaders(run, data)[0])


@pytest.mark.parametrize("seed", range(4))
def test_both_texts_always_fit(seed):
    """However the tokens of a full sample are divided into documents, read and trained ones."""
    rng = np.random.default_rng(seed)
    made = ReadAndSay((24, 20), (0, 0), END)
    for number in range(200):
        length = made.reads(20)
        starts = np.unique(rng.integers(1, length, rng.integers(0, 12)))
        labels = rng.integers(2, 200, length)
        for first, stop in zip([0, *starts], [*starts, length]):
            labels[first : rng.integers(first, stop)] = IGNORE
            labels[stop - 1] = IGNORE
        text = made(Sample(number, rng.integers(2, 200, length), labels, starts, length))
        assert len(text.tokens) == 20 and len(text.beside[ENCODER].tokens) == 24
        assert len(text.documents) == len(text.beside[ENCODER].documents)
        assert (text.labels != IGNORE).sum() == (labels != IGNORE).sum()


def test_a_run_learns(tmp_path):
    run = run_of(tmp_path)
    train(run, Placement())
    rows = [json.loads(line) for line in (Path(run.dir) / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "step_s" in row]
    assert losses[-1] < 0.6 * losses[0]
