"""Pairs of texts: both texts together are the document, or those of two; rates by chi-square, the same samples whatever
the layout, and what cannot go with them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from phalanx.base.errors import DataError
from phalanx.config.run import Run
from phalanx.data.config import DataConfig
from phalanx.data.loader import micro_batch_samples, train_loader
from phalanx.engine.objectives.sentence_pairs import PairMarks, SentencePairs
from phalanx.forecast.check import Facts, check
from phalanx.layout.config import LayoutConfig
from phalanx.nn.objective import TaskConfig, find_objective, make_objective
from phalanx.planning.reading import reading_of
from phalanx.sequence.batch import IGNORE
from phalanx.sequence.sample import Sample, SampleFacts, Vocabulary
from tests.harness import parity

MARKS = PairMarks(first=900, end=901, padding=0, ends=(901, 902))


def mlm(**fields: Any) -> TaskConfig:
    config: TaskConfig = find_objective("mlm").Config(**{"name": "mlm", "rate": 0.3, **fields})
    return config


def sample_of(lengths: list[int], number: int, room: int) -> Sample:
    """Documents of ids that occur once."""
    tokens = np.zeros(room, np.int64)
    tokens[: sum(lengths)] = np.arange(1, 1 + sum(lengths))
    ends = np.cumsum(lengths)
    return Sample(number, tokens, np.append(tokens[1:], 0), ends[ends < room], int(ends[-1]))


def pairs_in(made: Sample) -> list[tuple[list[int], list[int], int]]:
    """(first text, second text, class) of each document, without marks."""
    found = []
    for a, b in made.documents:
        tokens, segments = made.tokens[a:b].tolist(), made.segments[a:b].tolist()
        border = tokens.index(MARKS.end)
        assert tokens[0] == MARKS.first and tokens[-1] == MARKS.end and tokens.count(MARKS.end) == 2
        assert segments == [0] * (border + 1) + [1] * (b - a - border - 1)
        assert (made.pair_labels[a + 1 : b] == IGNORE).all()
        found.append((tokens[1:border], tokens[border + 1 : -1], int(made.pair_labels[a])))
    return found


def is_run(tokens: list[int]) -> bool:
    return tokens == list(range(tokens[0], tokens[0] + len(tokens)))


@pytest.mark.parametrize("lengths", [[12, 9, 30, 2, 8], [7, 11], [20]])
def test_order(lengths):
    """Put back in the order that the class says, both texts are the document."""
    for number in range(30):
        given = sample_of(lengths, number, sum(lengths) + 12)
        found = pairs_in(SentencePairs(3, "order", MARKS)(given))
        whole = [second + first if label else first + second for first, second, label in found]
        assert whole == [given.tokens[a:b].tolist() for a, b in given.documents]


@pytest.mark.parametrize("lengths", [[12, 9, 30, 2, 8], [7, 11], [20]])
def test_next(lengths):
    """Class 0: both texts are one document. Class 1: of two documents, which have each other's. All texts are there."""
    for number in range(30):
        given = sample_of(lengths, number, sum(lengths) + 12)
        found = pairs_in(SentencePairs(3, "next", MARKS)(given))
        documents = [given.tokens[a:b].tolist() for a, b in given.documents]
        assert sorted(t for first, second, _ in found for t in first + second) == list(range(1, sum(lengths) + 1))
        for (first, second, label), document in zip(found, documents, strict=True):
            assert is_run(first) and is_run(second) and first[0] == document[0]
            assert (first + second == document) == (label != 1)
        assert [label for *_, label in found].count(IGNORE) == (len(lengths) % 2)


@pytest.mark.parametrize("kind", ["next", "order"])
def test_half_of_the_pairs_are_not_in_order_and_borders_are_uniform(kind):
    """Chi-square; which documents exchange their texts is independent of where they stand."""
    made, length, labels, borders, places = SentencePairs(7, kind, MARKS), 6, Counter(), Counter(), Counter()
    count = 600
    for number in (*range(count), *range(2**35, 2**35 + count)):
        for place, (first, second, label) in enumerate(pairs_in(made(sample_of([length] * 4, number, 4 * length + 9)))):
            labels[label] += 1
            places[place, label] += 1
            if kind == "next" or not label:
                borders[len(first)] += 1
            assert len(second) >= 1
    assert set(labels) == {0, 1} and set(borders) == set(range(1, length))
    for found, classes in ((labels, 2), (borders, length - 1), (places, 8)):
        expected = sum(found.values()) / classes
        statistic = sum((n - expected) ** 2 / expected for n in found.values())
        assert len(found) == classes and statistic <= classes + 5 * (2 * classes) ** 0.5 * (2 if kind == "next" else 1)


def test_marks_that_documents_have_are_not_doubled_and_what_finds_no_room_is_counted():
    given = sample_of([10, 10, 10], 0, 30)
    tokens = np.array(given.tokens)
    tokens[[0, 9]] = MARKS.first, 902
    marked, made = replace(given, tokens=tokens), SentencePairs(3, "order", MARKS)
    found = pairs_in(made(marked))
    assert sorted(found[0][0] + found[0][1]) == list(range(2, 10)) and len(made(marked).tokens) == 33
    kept = sum(len(first) + len(second) for first, second, _ in found)
    lost = made.lost(marked)
    assert (lost.tokens, lost.lost_tokens, lost.documents) == (28, 28 - kept, 3) and lost.cut == 1
    short = made.lost(sample_of([28, 2, 10], 0, 40))
    assert (short.cut, short.left_out, short.lost_tokens) == (1, 0, 6) and made.reads(64) == 61


def run_of(kind: str | None = "next", layout: dict[str, Any] | None = None, **model: Any) -> Run:
    base = parity.base_run("bert", 4)
    return replace(
        base,
        model=replace(base.model, **{"head": "pretraining", **model}),
        task=mlm(pairs=kind),
        data=DataConfig(mock=True, packing="online"),
        layout=LayoutConfig(**(layout or {})),
    )


@pytest.mark.parametrize("kind", ["next", "order"])
def test_the_same_samples_at_every_number_of_ranks_and_after_resume(kind):
    def rows(dp: int, consumed: int) -> dict[int, list]:
        run, found = run_of(kind), {}
        how = {"seed": 1, "vocab_size": 131, "samples": 64, "seq_length": 48, "reading": reading_of(run)}
        loader = train_loader(run.data, **how)  # as a run that resumes there makes it
        for rank in range(dp):
            for samples in micro_batch_samples(consumed, 8, 2, dp, rank)[:2]:
                batch = loader.batch(samples)
                assert ((batch.pair_labels != IGNORE) <= (batch.positions == 0)).all()
                for row, sample in enumerate(samples):
                    names = ("tokens", "labels", "segments", "pair_labels", "pair_weights", "positions")
                    found[sample] = [getattr(batch, name).view(2, -1)[row].tolist() for name in names]
        return found

    truth = rows(1, 0) | rows(1, 4)
    for dp in (2, 4):
        assert all(truth.get(sample, row) == row for sample, row in rows(dp, 4).items())
    for _, labels, _, _, weights, _ in truth.values():
        assert sum(weights) == sum(label != IGNORE for label in labels)


@pytest.mark.parametrize(
    "layout", [dict(tp=2), dict(pp=2), dict(sharding=3), dict(cp=2), dict(cp=2, cp_degree="dynamic")], ids=str
)
def test_a_layout_changes_nothing(ranks, layout):
    dropout = {"attention_dropout": 0.0} if layout.get("cp") else {}
    found = ranks.run("tests.verifying.test_verify:rank_compare", 2, run_of("next", layout, **dropout), 2)
    assert all(each.ok for each in found)


def test_what_does_not_go_together():
    facts = Facts(files=False)
    run = replace(run_of(), train=replace(run_of().train, precision="fp32"))
    assert check(run, facts) == []
    for changed, field, valid in (
        (replace(run, model=replace(run.model, head="masked")), "task.pairs", (None,)),
        (replace(run, task=mlm()), "model.head", ("masked",)),
        (replace(run, model=replace(run.model, type_vocab_size=1)), "model.type_vocab_size", (2,)),
        (replace(run, data=DataConfig(mock=True)), "data.document_attention", (True,)),
        (replace(run, model=parity.MODELS["modernbert"]), "task.pairs", (None,)),
    ):
        [found] = check(changed, facts)
        assert (found.field, found.valid) == (field, valid)
    roles = {"mask": 301, "cls": 302}
    lacking = SampleFacts(1, 32, lambda: Vocabulary(400, np.arange(300), {}, roles, source="a tokenizer"))
    with pytest.raises(DataError, match="has no sep token, which task.pairs=next needs"):
        make_objective(mlm(pairs="next")).transform(lacking)
