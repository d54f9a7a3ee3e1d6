"""Drafts from n-grams: against a plain search, periods, and whole answers with a stub of a model."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from phalanx.inference.drafter import NgramSpec, ngram_drafts, ngrams_of
from phalanx.inference.pages import GroupSpec
from phalanx.inference.request import Request, SamplingOptions
from phalanx.inference.sampler import accept_same
from phalanx.inference.scheduler import Scheduler, SchedulerSpec, Step


def plain(tokens: list[int], spec: NgramSpec) -> list[int]:
    """The longest end of the sequence that stands somewhere before its end; the last such place."""
    n = len(tokens)
    for length in range(min(spec.longest, n - 1), spec.shortest - 1, -1):
        for end in range(n - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[n - length :]:
                out = list(tokens)
                for i in range(spec.tokens):
                    out.append(out[end + i])
                return out[n:]
    return []


def test_drafts_are_those_of_a_plain_search():
    rng = random.Random(3)
    found = 0
    for _ in range(2000):
        longest = rng.randint(1, 5)
        spec = NgramSpec(rng.randint(1, 6), longest, rng.randint(1, longest))
        tokens = rng.choices(range(rng.randint(1, 6)), k=rng.randint(1, 40))
        drafts = ngram_drafts(tokens, spec)
        assert drafts == plain(tokens, spec), (tokens, spec)
        found += bool(drafts)
    assert 500 < found < 1900


def test_a_period_is_continued():
    assert ngram_drafts([9, 1, 2, 3, 1, 2, 3, 1, 2, 3], NgramSpec(tokens=7)) == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize(
    "values, text", (((0, 4, 2), "tokens=0"), ((4, 2, 3), "shortest=3"), ((4, 2, 0), "shortest=0"))
)
def test_specs_that_make_no_drafts_are_refused(values, text):
    with pytest.raises(ValueError, match=text):
        NgramSpec(*values)


def song(tokens: list[int]) -> int:
    """A text that comes back with changes."""
    n = len(tokens)
    return n if n % 17 == 0 else (n % 7) + (n // 40)


def run(scheduler: Scheduler, spec: NgramSpec | None) -> tuple[dict[int, list[int]], int]:
    """Answers, and steps."""
    answers: dict[int, list[int]] = {}
    steps = 0
    while not scheduler.idle:
        step = scheduler.schedule(drafts=ngrams_of(scheduler, spec) if spec else None)
        observed = scheduler.observe(step, drawn_of(scheduler, step))
        for number, sequence in zip(step.requests.tolist(), step.sequences):
            answers[number] = list(sequence.tokens)
        assert len(observed.kept) == len(step)
        steps += 1
    return answers, steps


def drawn_of(scheduler: Scheduler, step: Step) -> np.ndarray:
    """What the stub draws after each token that may be followed by one, as far as it is accepted."""
    width = int(step.drafts.max()) + 1
    drafts, drawn = np.zeros((len(step), width - 1), np.int64), np.zeros((len(step), width), np.int64)
    for i, number in enumerate(step.requests.tolist()):
        count = int(step.drafts[i])
        given = step.tokens[step.starts[i + 1] - count : step.starts[i + 1]].tolist()
        tokens = list(scheduler.tokens_of(number))
        drafts[i, :count] = given
        drawn[i, : count + 1] = [song(tokens + given[:j]) for j in range(count + 1)]
    return accept_same(torch.from_numpy(drafts), torch.from_numpy(step.drafts), torch.from_numpy(drawn)).numpy()


def scheduler_of(**options: float) -> Scheduler:
    spec = SchedulerSpec(
        most_sequences=3, most_tokens=40, longest=200, page_size=4, groups=(GroupSpec(None, 200),), late=0
    )
    scheduler = Scheduler(spec)
    for number in range(5):
        prompt = tuple(range(10 * number + 3))
        scheduler.add(Request(number=number, prompt=prompt, options=SamplingOptions(tokens=90, **options)))
    return scheduler


def test_answers_are_those_without_drafts_in_fewer_steps():
    right, steps = run(scheduler_of(), None)
    for spec in (NgramSpec(), NgramSpec(7, 3, 1)):
        answers, fewer = run(scheduler_of(), spec)
        assert answers == right and fewer < 0.6 * steps


def test_requests_with_penalties_have_no_drafts():
    scheduler = scheduler_of(presence_penalty=0.5)
    while not scheduler.idle:
        assert ngrams_of(scheduler, NgramSpec(4, 2, 1)) == {}
        step = scheduler.schedule()
        scheduler.observe(step, [1] * len(step))
