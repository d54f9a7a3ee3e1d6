"""Span corruption against slow readings of the paper: what is hidden and how often, that both texts together are the
document, and that batches have the same samples whatever the layout."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from phalanx.base.errors import DataError
from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.data.loader import Loader, Reading, micro_batch_samples, train_loader
from phalanx.engine.objectives.span import Corruption, Marks, Rooms, SpanConfig, SpanRates, noise_mask
from phalanx.forecast.data_table import data_table, open_loaders
from phalanx.nn.objective import TaskConfig, find_objective, make_objective
from phalanx.planning.reading import reading_of
from phalanx.sequence.batch import ENCODER, IGNORE
from phalanx.sequence.sample import LostText, Sample, SampleFacts
from phalanx.text.vocabulary import vocabulary_of
from tests.harness.parity import MODELS

MARKS = Marks(tuple(range(9999, 9899, -1)), end=1, start=0, padding=0)


def corruption(
    noise: float = 0.15, mean: float = 3.0, rooms: tuple[int, int] = (512, 256), seed: int = 1
) -> Corruption:
    return Corruption(seed, (SpanRates(noise, mean),), Rooms(*rooms), MARKS)


def sample_of(lengths: list[int], number: int = 0, room: int = 600) -> Sample:
    """Documents of these lengths, of ids that occur once."""
    tokens = np.zeros(room, np.int64)
    tokens[: sum(lengths)] = np.arange(2, 2 + sum(lengths))
    ends = np.cumsum(lengths)
    return Sample(number, tokens, np.append(tokens[1:], 0), ends[ends < room], int(ends[-1]))


def texts_of(sample: Sample) -> list[list[int]]:
    return [sample.tokens[a:b].tolist() for a, b in sample.documents]


def put_together(encoder: list[int], decoder: list[int]) -> list[int]:
    """The document of both texts: each sentinel of the encoder's text stands for what the decoder says after it."""
    assert encoder[-1] == decoder[-1] == MARKS.end
    said: dict[int, list[int]] = {}
    for token in decoder[:-1]:
        if token in MARKS.sentinels:
            last = said.setdefault(token, [])
        else:
            last.append(token)
    assert list(said) == list(MARKS.sentinels[: len(said)]) and all(said.values())
    assert [token for token in encoder if token in MARKS.sentinels] == list(said)
    return [t for token in encoder[:-1] for t in said.get(token, [token])]


@pytest.mark.parametrize("seed", range(5))
def test_both_texts_together_are_the_document(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 90, 6).tolist()
    given = sample_of(lengths, number=2**33 + seed)
    made = corruption(noise=rng.uniform(0.05, 0.5), mean=rng.uniform(1, 8))(given)
    decoder, encoder = made, made.beside[ENCODER]
    labels = [decoder.labels[a:b].tolist() for a, b in decoder.documents]
    assert [put_together(e, d) for e, d in zip(texts_of(encoder), labels, strict=True)] == texts_of(given)
    for inputs, said in zip(texts_of(decoder), labels):
        assert inputs == [MARKS.start, *said[:-1]]
    assert (decoder.labels[decoder.filled :] == IGNORE).all() and (encoder.labels == IGNORE).all()
    assert (len(decoder.tokens), len(encoder.tokens)) == (256, 512)


@pytest.mark.parametrize(
    ("length", "noise", "mean"), [(9, 0.34, 1.5), (8, 0.5, 2.0), (12, 0.25, 1.0), (10, 0.1, 3.0), (2, 0.15, 3.0)]
)
def test_all_ways_to_cut_are_equally_likely(length, noise, mean):
    """Chi-square over all masks that the paper's recipe has: round(length * noise) tokens in round(noise / mean) spans,
    each after a span that stays. Independent documents, samples and seeds."""
    hidden = min(max(round(length * noise), 1), length - 1)
    count = min(max(round(hidden / mean), 1), hidden, length - hidden)

    def cuts(items: int) -> list[tuple[int, ...]]:
        borders = itertools.combinations(range(1, items), count - 1)
        return [tuple(b - a for a, b in itertools.pairwise([0, *cut, items])) for cut in borders]

    ways = {
        tuple(x for s, g in zip(stays, goes) for x in (*[False] * s, *[True] * g))
        for stays in cuts(length - hidden)
        for goes in cuts(hidden)
    }
    made = corruption(noise, mean)
    each = 120
    found = Counter(
        tuple(noise_mask(made.rates[0].of(length), length, made.draws(length, sample, document)).tolist())
        for sample, document in itertools.product(range(each * len(ways) // 4), range(4))
    )
    assert set(found) <= ways
    expected = sum(found.values()) / len(ways)
    statistic = sum((found[way] - expected) ** 2 / expected for way in ways)
    degrees = max(1, len(ways) - 1)
    assert statistic <= degrees + 5 * (2 * degrees) ** 0.5, (statistic, degrees)


def test_rates_and_lengths_are_those_asked_for():
    made = corruption(0.15, 3.0, (2000, 1000))
    text = made(sample_of([570] * 3, room=2000))
    labels = text.labels[: text.filled]
    sentinels = int((labels >= 9900).sum())
    hidden = len(labels) - sentinels - 3  # an end for each document
    assert hidden == 3 * round(570 * 0.15) and sentinels == 3 * round(hidden / 3 / 3.0)


def test_the_longest_document_just_fits():
    """T5's own numbers: 512 tokens for the encoder and 114 for the decoder hold 568 of a text."""
    made = corruption(0.15, 3.0, (512, 114))
    assert made.longest == made.reads(114) == 568
    whole = made(sample_of([568]))
    assert (whole.filled, whole.beside[ENCODER].filled) == (114, 512)


def test_what_finds_no_room_is_cut_at_the_end():
    made = corruption(0.15, 3.0, (40, 20))
    given = sample_of([30, 30, 30], room=100)
    kept = texts_of(made(given).beside[ENCODER])
    assert len(kept) == 2 and len(kept[0]) > len(kept[1])
    assert made(given).filled <= 20 and made(given).beside[ENCODER].filled <= 40


def test_what_is_lost_is_counted():
    """Against the texts themselves: what both have of a document is what is left of it."""
    made = corruption(0.15, 3.0, (40, 20))
    for number, lengths in enumerate([[30, 30, 30], [1, 20], [9, 9, 9], [30, 8, 1, 6]]):
        given = sample_of(lengths, number, room=100)
        sample = made(given)
        kept = [
            len(put_together(e, sample.labels[a:b].tolist()))
            for e, (a, b) in zip(texts_of(sample.beside[ENCODER]), sample.documents)
        ]
        lost = made.lost(given)
        assert (lost.documents, lost.tokens) == (len(lengths), sum(lengths))
        assert lost.left_out == len(lengths) - len(kept) and lost.lost_tokens == sum(lengths) - sum(kept)
        assert lost.cut == sum(length not in lengths for length in kept)
    whole = made.lost(sample_of([9, 9]))
    assert whole == LostText(2, 0, 0, 18, 0) and whole.plus(lost).documents == 6


def test_the_table_of_data_says_what_is_lost():
    """As the log and `phalanx plan` show it; nothing where there is room for all, and nothing of other tasks."""
    run = run_of(eval_interval=2, eval_samples=8)
    loader, valid = open_loaders(run, run.data)
    text = data_table(run, loader, valid)
    found = re.search(
        r"task.name=span training: (\d+) of (\d+) documents are cut and (\d+) left out .* in 32 seq", text
    )
    lost = loader.lost(range(32))
    assert found and tuple(map(int, found.groups())) == (lost.cut, lost.documents, lost.left_out) and lost.lost_tokens
    assert loader_of(replace(run, task=TaskConfig(), model=MODELS["llama"])).lost(range(4)) is None


def test_an_end_that_the_document_has_is_not_doubled():
    given = sample_of([10])
    tokens = np.array(given.tokens)
    tokens[9] = MARKS.end
    encoder = corruption()(replace(given, tokens=tokens)).beside[ENCODER]
    assert encoder.tokens[: encoder.filled].tolist().count(MARKS.end) == 1


def run_of(**train) -> Run:
    options = {"steps": 4, "global_batch": 8, "micro_batch": 2, "seq_length": 32, **train}
    task = SpanConfigured(name="span", encoder_length=64)
    data = DataConfig(mock=True, packing="online")
    return Run(model=MODELS["t5"], train=TrainConfig(**options), task=task, data=data)


SpanConfigured = find_objective("span").Config


def loader_of(run: Run) -> Loader:
    how = {"seed": run.train.seed, "vocab_size": run.model.vocab_size, "samples": 64}
    return train_loader(run.data, seq_length=run.train.seq_length, reading=reading_of(run), **how)


def rows_of(batch) -> dict[int, tuple]:
    """By sample: both texts, with documents counted from the sample's first."""
    found, encoder = {}, batch.beside[ENCODER]
    for row in range(batch.num_sequences):
        texts = []
        for stream in (batch, encoder):
            each = [t.view(batch.num_sequences, -1)[row] for t in (stream.tokens, stream.positions, stream.real)]
            numbers = stream.documents.view(batch.num_sequences, -1)[row]
            texts.append([*(t.tolist() for t in each), (numbers - numbers[0]).tolist()])
        found[int(batch.samples[row * batch.length])] = (
            texts,
            batch.labels.view(batch.num_sequences, -1)[row].tolist(),
        )
    return found


def test_the_same_samples_at_every_number_of_ranks_and_after_resume():
    loader = loader_of(run_of())
    truth = {}
    for consumed in (0, 8):
        for samples in micro_batch_samples(consumed, 8, 2, 1, 0):
            truth |= rows_of(loader.batch(samples))
    for dp in (2, 4):
        later = loader_of(run_of())  # as a run that resumes after 8 samples makes it
        for rank in range(dp):
            for samples in micro_batch_samples(8, 8, 2, dp, rank):
                for number, row in rows_of(later.batch(samples)).items():
                    assert row == truth[number]
    assert loader.batch([3]).beside[ENCODER].seq_length == 64


def test_documents_of_both_streams_have_one_number():
    """Whatever padding either has, in every sequence of a micro-batch."""
    made = corruption(0.15, 3.0, (1600, 40))
    samples = [made(sample_of([20, 30], number=0, room=1600)), made(sample_of([25], number=1, room=1600))]
    loader = object.__new__(Loader)
    loader.document_attention, loader.packed = True, True
    text = loader._stream(samples)
    encoder = loader._stream([s.beside[ENCODER] for s in samples], samples)
    for row, sample in enumerate(samples):
        numbers = [
            stream.documents.view(2, -1)[row][torch.tensor([a for a, _ in each.documents])].tolist()
            for stream, each in ((text, sample), (encoder, sample.beside[ENCODER]))
        ]
        assert numbers[0] == numbers[1]
    padding = {int(n) for s in (text, encoder) for n, real in zip(s.documents, s.real) if not real}
    there = {int(n) for s in (text, encoder) for n, real in zip(s.documents, s.real) if real}
    assert not padding & there and len(there) == 3
    assert int(text.documents.view(2, -1)[1, 0]) > int(encoder.documents.view(2, -1)[0].max())


def tokenizer_with(folder, sentinels: int) -> str:
    words = {f"w{i}": i for i in range(10)} | {"</s>": 10, "<pad>": 11, "[UNK]": 12}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["</s>", "<pad>", *(f"<extra_id_{i}>" for i in reversed(range(sentinels)))])
    path = folder / f"with-{sentinels}.json"
    tokenizer.save(str(path))
    return str(path)


def test_sentinels_are_counted_from_the_top(tmp_path):
    found = vocabulary_of(tokenizer_with(tmp_path, 20), 40)
    assert found.sentinels == tuple(range(32, 12, -1)) and found.role("eos", "") == 10


@pytest.mark.parametrize("count, said", [(0, "has no sentinels"), (2, "has 2 sentinels")])
def test_a_tokenizer_without_sentinels_is_refused(tmp_path, count, said):
    path = tokenizer_with(tmp_path, count)
    task = make_objective(SpanConfigured(name="span", encoder_length=64))
    with pytest.raises(DataError, match=said):
        task.transform(SampleFacts(1, 32, lambda: vocabulary_of(path, 40), decoder_start=11))


def test_the_reading_is_a_part_of_the_order_of_samples():
    run = run_of()
    other = replace(run, task=SpanConfigured(name="span", encoder_length=48))
    assert loader_of(run).order != loader_of(other).order
    assert isinstance(reading_of(run), Reading) and SpanConfig().noise == 0.15
