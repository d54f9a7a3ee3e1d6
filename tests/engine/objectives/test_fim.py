"""Fill-in-the-middle: the parts put back in order are the document, rates and borders are those of the paper, and
labels are the next tokens; UL2's mixture of denoisers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from phalanx.base.errors import DataError
from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.data.loader import micro_batch_samples, train_loader
from phalanx.engine.objectives.fim import GapMarks, MiddleLast
from phalanx.engine.objectives.ul2 import DENOISERS
from phalanx.nn.objective import find_objective, make_objective
from phalanx.planning.reading import reading_of
from phalanx.sequence.batch import ENCODER, IGNORE
from phalanx.sequence.sample import Sample, SampleFacts, Vocabulary
from tests.harness.parity import MODELS

MARKS = GapMarks(900, 901, 902)


def put_back(tokens: list[int]) -> tuple[list[int], str]:
    """A document from its parts, and the order that they had."""
    if MARKS.prefix not in tokens:
        return tokens, "as it was"
    suffix, middle = tokens.index(MARKS.suffix), tokens.index(MARKS.middle)
    assert tokens[0] == MARKS.prefix and sum(t >= 900 for t in tokens) == 3
    if suffix == 1:
        return tokens[middle + 1 :] + tokens[2:middle], "SPM"
    return tokens[1:suffix] + tokens[middle + 1 :] + tokens[suffix + 1 : middle], "PSM"


def sample_of(lengths: list[int], number: int, room: int) -> Sample:
    tokens = np.zeros(room, np.int64)
    tokens[: sum(lengths)] = np.arange(1, 1 + sum(lengths))
    ends = np.cumsum(lengths)
    labels = np.append(tokens[1:], 0)
    labels[ends - 1] = IGNORE
    labels[ends[-1] :] = IGNORE
    return Sample(number, tokens, labels, ends[ends < room], int(ends[-1]))


def test_the_parts_put_back_are_the_document():
    """In SPM the suffix comes first: what stands behind the middle mark is prefix and middle."""
    orders = Counter()
    for number in range(200):
        given = sample_of([17, 9, 30], number, 80)
        made = MiddleLast(3, MARKS, 0.7, 0.5)(given)
        assert len(made.tokens) == 83
        for (first, stop), (a, b) in zip(made.documents, given.documents, strict=True):
            tokens, labels = made.tokens[first:stop].tolist(), made.labels[first:stop].tolist()
            document, order = put_back(tokens)
            orders[order] += 1
            assert document == given.tokens[a:b].tolist()
            assert labels == [*tokens[1:], IGNORE]
    count = sum(orders.values())
    for order, share in (("as it was", 0.3), ("PSM", 0.35), ("SPM", 0.35)):
        assert abs(orders[order] - share * count) <= 5 * (count * share * (1 - share)) ** 0.5, orders


def test_borders_are_uniform():
    """Chi-square of both borders over all places between two tokens and at the ends, for each pair alike."""
    length, found = 5, Counter()
    for number in range(3000):
        tokens = MiddleLast(1, MARKS, 1.0, 0.0).moved(np.arange(1, length + 1), number, 0)
        suffix, middle = (tokens.tolist().index(mark) for mark in (MARKS.suffix, MARKS.middle))
        found[suffix - 1, length - (middle - suffix - 1)] += 1
    pairs = {(a, b): (1 + (a != b)) / (length + 1) ** 2 for a in range(length + 1) for b in range(a, length + 1)}
    statistic = sum((found[pair] - 3000 * p) ** 2 / (3000 * p) for pair, p in pairs.items())
    assert set(found) <= set(pairs) and statistic <= len(pairs) + 5 * (2 * len(pairs)) ** 0.5


def test_the_end_of_a_document_stays_its_end():
    tokens = np.array([5, 6, 7, 8, 1])
    for number in range(20):
        moved = MiddleLast(1, MARKS, 1.0, 0.5, end=1).moved(tokens, number, 0)
        assert moved.tolist().count(1) == 1
        if moved[-1] != 1:  # it is in the prefix or the middle, which is the whole rest
            assert put_back(moved.tolist())[0] == tokens.tolist()


def test_documents_without_room_for_marks_stay():
    made = MiddleLast(1, MARKS, 1.0, 0.5)(sample_of([20, 20, 20], 7, 60))
    orders = [put_back(made.tokens[a:b].tolist())[1] for a, b in made.documents]
    assert orders[1:] == ["as it was"] * 2 and orders[0] != "as it was" and made.filled == 63


def run_of(model: str, task: dict, **data) -> Run:
    config = find_objective(task["name"]).Config(**task)
    train = TrainConfig(steps=4, global_batch=8, micro_batch=2, seq_length=32)
    return Run(
        model=replace(MODELS[model], vocab_size=512), train=train, task=config, data=DataConfig(mock=True, **data)
    )


@pytest.mark.parametrize(
    "run",
    [
        run_of("llama", {"name": "fim"}),
        run_of("llama", {"name": "fim", "rate": 0.9}, packing="online"),
        run_of("t5", {"name": "ul2", "encoder_length": 64, "modes": False}, packing="online"),
    ],
    ids=["windows", "packed", "ul2"],
)
def test_the_same_samples_at_every_number_of_ranks(run):
    def rows(dp: int) -> dict[int, list]:
        how = {"seed": 1, "vocab_size": 512, "samples": 64, "seq_length": 32, "reading": reading_of(run)}
        loader, found = train_loader(run.data, **how), {}
        for rank in range(dp):
            for samples in micro_batch_samples(8, 8, 2, dp, rank):
                batch = loader.batch(samples)
                streams = [batch.tokens, batch.labels, batch.positions, *(b.tokens for b in batch.beside.values())]
                for row, sample in enumerate(samples):
                    found[sample] = [x.view(2, -1)[row].tolist() for x in streams]
        return found

    assert rows(1) == rows(2) == rows(4)


def vocabulary(special: dict[str, int], roles: dict[str, int]) -> Vocabulary:
    return Vocabulary(400, np.arange(300), special, roles, source="a tokenizer")


def test_a_tokenizer_without_the_marks_is_refused():
    facts = SampleFacts(1, 32, lambda: vocabulary({}, {"fim_prefix": 301, "fim_suffix": 302}))
    with pytest.raises(DataError, match="has no fim_middle token"):
        make_objective(find_objective("fim").Config(name="fim")).transform(facts)


def test_ul2_says_how_a_text_is_hidden():
    """Each pair of rates comes as often as any other, begins with its mode, and a whole end is hidden where the mode is
    [S]."""
    sentinels = {f"<extra_id_{i}>": 399 - i for i in range(60)}
    modes = {mode: 310 + i for i, mode in enumerate(DENOISERS)}
    facts = SampleFacts(1, 120, lambda: vocabulary({**sentinels, **modes}, {"eos": 309}), decoder_start=308)
    task = find_objective("ul2").Config(name="ul2", encoder_length=240)
    made, found, kinds = make_objective(task).transform(facts), Counter(), Counter()
    for number in range(700):
        text = made(Sample(number, np.arange(1, 101), np.zeros(100, np.int64), np.empty(0, np.int64), 100))
        encoder = text.beside[ENCODER]
        mode = next(name for name, token in modes.items() if encoder.tokens[0] == token)
        spans = int((encoder.tokens >= 340).sum())
        found[mode] += 1
        kinds[mode, spans, text.filled] += 1
        if mode == "[S]":
            assert encoder.tokens[: encoder.filled].tolist() == [modes[mode], *range(1, 76), 399, 309]
    for mode, every in DENOISERS.items():
        expected = 700 * len(every) / 7
        assert abs(found[mode] - expected) <= 5 * expected**0.5
    assert len(kinds) == 7
    with pytest.raises(DataError, match=r"has no \[S\], \[X\]"):
        short = SampleFacts(1, 120, lambda: vocabulary({**sentinels, "[R]": 310}, {"eos": 309}), decoder_start=308)
        make_objective(task).transform(short)
