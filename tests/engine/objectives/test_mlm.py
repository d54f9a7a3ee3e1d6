"""mlm: hidden tokens. Against a slow reading of the paper, rates by chi-square, the same samples in every layout and
after resume; refused before ranks meet; a run from text to a folder that transformers fills masks with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from phalanx.base.errors import DataError
from phalanx.base.placement import Placement
from phalanx.base.rng import key_of, philox
from phalanx.config.run import CheckpointConfig, LogConfig, Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.data.index import CorpusWriter
from phalanx.data.loader import Loader, micro_batch_samples, train_loader
from phalanx.engine.objectives.mlm import Masking
from phalanx.forecast.check import Facts, check
from phalanx.models.bert import BertConfig
from phalanx.models.llama import LlamaConfig
from phalanx.nn.objective import TaskConfig, find_objective
from phalanx.optim.config import OptimConfig
from phalanx.planning.reading import reading_of
from phalanx.sequence.batch import IGNORE
from phalanx.sequence.sample import Sample
from phalanx.text.tokenizers import byte_tokenizer, load_tokenizer, train_bpe, train_wordpiece
from phalanx.text.vocabulary import vocabulary_of
from phalanx.training.main import train

TEXT = (
    "Masked tokens are unforgettable, and tokenizers split uncommonly long words into pieces.",
    "A parallelogram isn't a parallelepiped: its foreshortened edges (all twelve) unquestionably differ!",
)


def mlm(**fields: Any) -> TaskConfig:
    return find_objective("mlm").Config(name="mlm", **fields)


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("wordpiece")
    train_wordpiece(TEXT * 3, 120, folder)
    return str(folder)


def masking(vocabulary: Any, **fields: Any) -> Masking:
    options = {"rate": 0.3, "some_stay": True, "whole_words": False, "seed": 5, **fields}
    return Masking(vocabulary=vocabulary, mask=vocabulary.roles["mask"], **options)


def sample_of(tokens: Sequence[int], number: int, starts: Sequence[int] = (), filled: int | None = None) -> Sample:
    ids = np.array(tokens)
    return Sample(number, ids, np.roll(ids, -1), np.array(starts, np.int64), len(ids) if filled is None else filled)


# ---- a slow reading


def slowly(m: Masking, sample: Sample, words: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Token by token. words: of each token, something that is equal for the tokens of one word and for no others; None:
    the token is special."""
    tokens, labels = [], []
    for place, token in enumerate(sample.tokens.tolist()):
        hidden = False
        if place < sample.filled and words[place] is not None:
            at = words.index(words[place]) if m.whole_words else place  # the number is drawn at the word's first token
            hidden = drawn(m.seed, sample.number, at)[0] / 2**32 < m.rate
        _, how, which = drawn(m.seed, sample.number, place)
        labels.append(token if hidden else IGNORE)
        if hidden and (not m.some_stay or how / 2**32 < 0.8):
            token = m.mask
        elif hidden and how / 2**32 < 0.9:
            token = int(m.vocabulary.text[which % len(m.vocabulary.text)])
        tokens.append(token)
    return tokens, labels


def drawn(seed: int, number: int, place: int) -> list[int]:
    words = philox((torch.tensor([place]), number & 0xFFFFFFFF, number >> 32, 0), key_of(seed, "mlm"))
    return [int(word) for word in words[:3]]


@pytest.mark.parametrize("some_stay", [True, False])
@pytest.mark.parametrize("whole_words", [True, False])
def test_masks_are_those_of_a_slow_reading(wordpiece, whole_words, some_stay):
    """Where words are is the tokenizers library's own word (Encoding.word_ids): two documents, special tokens,
    padding."""
    import tokenizers

    vocabulary = vocabulary_of(wordpiece, 128)
    core = tokenizers.Tokenizer.from_file(f"{wordpiece}/tokenizer.json")
    encoded = [core.encode(text, add_special_tokens=False) for text in TEXT]
    eod = load_tokenizer(wordpiece).eod
    tokens = [*encoded[0].ids, eod, *encoded[1].ids, eod, *encoded[0].ids[:3]]
    words = [*((0, w) for w in encoded[0].word_ids), None, *((1, w) for w in encoded[1].word_ids), None, *[None] * 3]
    m = masking(vocabulary, whole_words=whole_words, some_stay=some_stay)
    assert len(set(words)) < len(tokens) - 10  # words of several pieces
    for number in (0, 7, 2**33 + 1):
        border, end = len(encoded[0].ids) + 1, len(tokens) - 3
        sample = sample_of(tokens, number, (border, end), end)
        made = m(sample)
        assert (made.tokens.tolist(), made.labels.tolist()) == slowly(m, sample, words)
        assert made.starts is sample.starts and (made.labels != IGNORE).any()


def test_a_word_ends_with_its_document(wordpiece):
    """A document that begins in the middle of a word has nothing to do with the word before it."""
    vocabulary = vocabulary_of(wordpiece, 128)
    ids = load_tokenizer(wordpiece).encode("unforgettable")
    assert len(ids) >= 4
    m = masking(vocabulary, whole_words=True)
    assert m._word_starts(sample_of(ids, 0), np.array(ids)).tolist() == [0] * len(ids)
    found = m._word_starts(sample_of(ids, 0, (2,)), np.array(ids))
    assert found.tolist() == [0, 0, *[2] * (len(ids) - 2)]


def test_words_of_byte_level_pieces(tmp_path):
    train_bpe(["the quick brown foxes are jumping over " * 20], 300, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokens = tokenizer.encode("the quick foxes, (jumping) overé 42nd")
    vocabulary = vocabulary_of(str(tmp_path), 300)
    starts = vocabulary.word_starts(np.array(tokens))
    words = [
        tokenizer.decode([t for t, s in zip(tokens, starts.tolist()) if s == at])
        for at in dict.fromkeys(starts.tolist())
    ]
    assert words == ["the", " quick", " foxes", ",", " ", "(", "jumping", ")", " overé", " 42nd"]


# ---- rates


def test_rates_by_chi_square():
    """Of 200,000 tokens: how many are hidden, at which positions, what stands there, and which others."""
    vocabulary = vocabulary_of("bytes", 300)
    vocabulary = replace(vocabulary, roles={"mask": 299})
    m, length, count = masking(vocabulary, rate=0.15), 500, 400
    tokens = np.arange(length) % 256
    made = [m(sample_of(tokens, number)) for number in range(count)]
    hidden = np.stack([each.labels != IGNORE for each in made])
    inputs = np.stack([each.tokens for each in made])
    total = hidden.sum()
    assert chisquare([total, hidden.size - total], np.array([0.15, 0.85]) * hidden.size).pvalue > 1e-4
    assert chisquare(hidden.sum(0)).pvalue > 1e-4 and chisquare(hidden.sum(1)).pvalue > 1e-4
    masked, kept = (hidden & (inputs == 299)).sum(), (hidden & (inputs == tokens)).sum()
    other = total - masked - kept
    right = 0.1 / 256  # one of the random tokens in 256 is the token itself
    assert chisquare([masked, other, kept], np.array([0.8, 0.1 - right, 0.1 + right]) * total).pvalue > 1e-4
    drawn = inputs[hidden & (inputs != 299) & (inputs != tokens)]
    assert chisquare(np.bincount(drawn, minlength=256)[:256]).pvalue > 1e-4
    assert (inputs == np.where(hidden, inputs, tokens)).all()
    assert not np.array_equal(hidden[0], masking(vocabulary, rate=0.15, seed=6)(sample_of(tokens, 0)).labels != IGNORE)
    alone = masking(vocabulary, rate=0.15, some_stay=False)(sample_of(tokens, 3))
    assert ((alone.tokens == 299) == (alone.labels != IGNORE)).all()


# ---- the same in every layout


def corpus(folder: Path, tokenizer: str) -> str:
    made, prefix = load_tokenizer(tokenizer), str(folder / "words")
    with CorpusWriter(prefix, made.dtype) as writer:
        for i in range(60):
            writer.add_document([*made.encode(TEXT[i % 2][: 20 + i]), made.eod])
    return prefix


def run_of(tmp_path: Path, tokenizer: str, task: TaskConfig, **data: Any) -> Run:
    return Run(
        model=BertConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
        ),
        task=task,
        train=TrainConfig(steps=6, global_batch=8, micro_batch=2, seq_length=32, device="cpu"),
        data=DataConfig(paths=(corpus(tmp_path, tokenizer),), tokenizer=tokenizer, split="1,0,0", **data),
        optim=OptimConfig(lr=3e-3),
        log=LogConfig(report=False),
        dir=str(tmp_path / "run"),
    )


def loader_of(run: Run) -> Loader:
    t = run.train
    how = {"seq_length": t.seq_length, "seed": t.seed, "vocab_size": run.model.vocab_size, "samples": 48}
    return train_loader(run.data, **how, reading=reading_of(run))


@pytest.mark.parametrize("packing", ["off", "online"])
def test_the_same_samples_at_any_data_parallel_size_and_after_resume(tmp_path, wordpiece, packing):
    run = run_of(tmp_path, wordpiece, mlm(whole_words=True, rate=0.3), packing=packing)
    found = list[dict[int, tuple[list[int], list[int]]]]()
    for dp in (1, 2, 4):
        seen = dict[int, tuple[list[int], list[int]]]()
        for rank in range(dp):
            loader = loader_of(run)  # of a process of its own, which begins at step 2
            for numbers in micro_batch_samples(16, 8, 2, dp, rank):
                batch = loader.batch(numbers)
                for row, number in enumerate(numbers):
                    at = slice(row * 32, (row + 1) * 32)
                    seen[number] = batch.tokens[at].tolist(), batch.labels[at].tolist()
        found.append(seen)
    assert found[0] == found[1] == found[2] and sorted(found[0]) == list(range(16, 24))
    from_start = loader_of(run).batch(list(range(24)))
    assert from_start.tokens[16 * 32 :].tolist() == [t for n in range(16, 24) for t in found[0][n][0]]
    again = replace(run, train=replace(run.train, seed=1))
    assert loader_of(again).batch([16]).labels.tolist() != found[0][16][1]


@pytest.mark.parametrize("rate", [0.15, 0.3])
def test_the_room_for_hidden_tokens(tmp_path, wordpiece, rate):
    """It is known to the model's forecast and the same for all micro-batches; none of a thousand draws exceeds it, also
    of whole words. A micro-batch with more has none."""
    run = run_of(tmp_path, wordpiece, mlm(rate=rate, whole_words=True))
    room = find_objective("mlm")(run.task).label_rows(32 * 48)
    draw = np.random.default_rng(3)
    drawn = 2 * draw.binomial(32 * 48 // 2, rate, 1000)  # words of two pieces
    assert drawn.max() < room < 0.75 * 32 * 48 and room % 128 == 0
    batch = loader_of(run).batch(list(range(48)))
    assert batch.label_rows == room >= int(batch.labelled.sum())
    assert loader_of(run).batch([1, 2]).label_rows == 0  # of few tokens most may be hidden
    loader = loader_of(run)
    loader.transform = replace(loader.transform, rate=0.9)
    loader.transform.__dict__["label_rows"] = lambda tokens: room
    assert loader.batch(list(range(48))).label_rows == 0


def test_nothing_special_is_hidden_and_nothing_of_padding(tmp_path, wordpiece):
    run = run_of(tmp_path, wordpiece, mlm(rate=1.0, replace="mask"), packing="online")
    batch = loader_of(run).batch(list(range(8)))
    plain = Loader(loader_of(run).sources, [1.0], seq_length=32, document_attention=True, packed=True).batch(range(8))
    tokenizer = load_tokenizer(wordpiece)
    special = torch.isin(plain.tokens, torch.tensor(sorted(tokenizer.special_tokens.values())))
    text = (plain.real == 1) & ~special
    assert (plain.real == 0).any() and torch.equal(batch.labels != IGNORE, text)
    assert torch.equal(batch.labels[text], plain.tokens[text]) and torch.equal(batch.tokens[~text], plain.tokens[~text])
    assert (batch.tokens[text] == tokenizer.special_tokens["[MASK]"]).all()
    assert torch.equal(batch.documents, plain.documents) and torch.equal(batch.positions, plain.positions)


# ---- what cannot be


def test_a_tokenizer_without_a_mask_token_is_refused_before_ranks_meet(tmp_path, wordpiece):
    run = run_of(tmp_path, wordpiece, mlm())
    assert check(run, Facts()) == []
    bytes_only = replace(run, model=replace(run.model, vocab_size=300), data=replace(run.data, tokenizer="bytes"))
    [found] = [p for p in check(bytes_only, Facts()) if p.field == "data.tokenizer"]
    assert "no mask token" in found.rule and '"mask_token"' in found.rule
    with pytest.raises(DataError, match="no mask token"):
        reading_of(bytes_only)
    unnamed = replace(run, data=replace(run.data, tokenizer=None))
    [found] = [p for p in check(unnamed, Facts()) if p.field == "data.tokenizer"]
    assert "is required by the task" in found.rule


def test_the_mask_token_that_the_folder_names(tmp_path):
    """tokenizer_config.json goes before usual names."""
    train_bpe(list(TEXT), 300, tmp_path)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    token = {**whole["added_tokens"][0], "id": 300, "content": "<blank>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**whole, "added_tokens": [*whole["added_tokens"], token]}))
    with pytest.raises(DataError, match="no mask token"):
        vocabulary_of(str(tmp_path), 320).role("mask", "it")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"mask_token": {"content": "<blank>"}}))
    assert vocabulary_of(str(tmp_path), 320).role("mask", "it") == 300


def test_whole_words_need_pieces_that_say_where_they_begin():
    vocabulary = replace(vocabulary_of("bytes", 300), roles={"mask": 299})
    assert byte_tokenizer().vocab_size == 257 and vocabulary.continues is None
    with pytest.raises(DataError, match="where words begin"):
        vocabulary.word_starts(np.array([1]))


def test_tasks_go_with_models_that_read_so():
    decoder = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    mock, train = DataConfig(mock=True), TrainConfig(steps=1, global_batch=4, micro_batch=1, seq_length=64)
    [found] = check(Run(model=decoder, task=mlm(), train=train, data=mock), Facts(files=False))
    assert found.field == "task.name" and "reads what comes before" in found.rule and "pretrain" in found.rule
    encoder = BertConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    [found] = check(Run(model=encoder, train=train, data=mock), Facts(files=False))
    assert found.field == "task.name" and "reads both ways sees" in found.rule and "mlm" in found.rule
    assert check(Run(model=encoder, task=mlm(), train=train, data=mock), Facts(files=False)) == []


# ---- a run


def test_a_run_learns_goes_on_and_transformers_fills_its_masks(tmp_path, wordpiece):
    """The loss falls; half and half a run are the whole; the folder is transformers' own, with the same loss."""
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    whole = run_of(tmp_path, wordpiece, mlm(rate=0.3), packing="online")
    optim = OptimConfig(lr=3e-3, decay_steps=40)
    whole = replace(whole, train=replace(whole.train, steps=40), optim=optim, checkpoint=CheckpointConfig(interval=20))
    halves = replace(whole, dir=str(tmp_path / "halves"))
    train(whole, Placement())
    train(replace(halves, train=replace(halves.train, steps=20)), Placement())
    train(halves, Placement())
    rows = [
        [json.loads(line) for line in (Path(r.dir) / "metrics.jsonl").read_text().splitlines()] for r in (whole, halves)
    ]
    losses = [[row["loss"] for row in each if "loss" in row] for each in rows]
    assert losses[0] == losses[1] and np.mean(losses[0][-5:]) < 0.8 * np.mean(losses[0][:5])
    [folder] = Path(whole.dir).glob("checkpoints/step-*40/weights")
    model, info = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert AutoTokenizer.from_pretrained(folder).mask_token == "[MASK]"
    text = TEXT[0].replace("words", "[MASK]")
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[:, :32]
    assert model(ids).logits.shape[-1] == 128
