"""The scheduler of generation: laws under random traces with a stub of a model, and small cases."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from phalanx.inference.pages import GroupSpec
from phalanx.inference.request import Request, SamplingOptions
from phalanx.inference.scheduler import DRAFTED, NO_TOKEN, SAMPLED, RequestDoesNotFit, Scheduler, SchedulerSpec, Step
from tests.harness.sample import rest_in_soak
from tests.harness.scheduler_traces import Run, draw_trace

PART = 100
FULL = (GroupSpec(None, 100),)


@pytest.mark.parametrize("part", rest_in_soak(range(100), range(3)))
def test_traces(part):
    """10,000 in all; every tenth runs twice, with the same steps."""
    counts: Counter[str] = Counter()
    for seed in range(part * PART, part * PART + PART):
        trace = draw_trace(seed)
        try:
            run = Run(trace).run()
            assert seed % 10 or Run(trace).run().journal == run.journal
        except Exception as error:
            raise AssertionError(f"trace {seed}: {error!r}") from error
        counts.update(run.counts)
    assert min(counts.values()) > 10, counts


@pytest.mark.parametrize("requests", [1_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_one_scheduler_leaks_nothing_over_many_requests(requests):
    """Requests of random traces, one trace after another on the same scheduler, which is never quite idle between."""
    spec = spec_of(most_sequences=8, most_tokens=40, longest=72, groups=(GroupSpec(None, 60), GroupSpec(9, 40)), late=1)
    scheduler, dice, number, seed, ended = Scheduler(spec), random.Random(5), 0, 0, 0
    flying: list[Step] = []
    while number < requests or not scheduler.idle:
        while number < requests and scheduler.num_waiting < 20:
            for _, drawn in draw_trace(seed).arrivals:
                if len(drawn.prompt) + (drawn.options.tokens or 1) <= spec.room:
                    scheduler.add(replace(drawn, number=number, deadline=None if dice.random() < 0.9 else seed + 3.0))
                    number += 1
            seed += 1
            ended += dice.random() < 0.3 and scheduler.cancel(dice.randrange(number)) is not None
        step = scheduler.schedule(float(seed))
        ended += len(step.finished)
        flying += [step] if len(step) else []
        if flying and (len(flying) > spec.late or not len(step)):
            first = flying.pop(0)
            ended += len(scheduler.observe(first, [dice.randrange(16) for _ in range(len(first))]).finished)
    for pool in scheduler.pages.pools:
        pool.check()
        assert pool.available == pool.num_pages - 1
    assert ended == number >= requests and scheduler.num_running == scheduler.num_waiting == 0
    assert (
        not scheduler._live and len(scheduler._waiting) + len(scheduler._deadlines) < 100
    )  # what is over is forgotten


def spec_of(**changes: Any) -> SchedulerSpec:
    values = {"most_sequences": 4, "most_tokens": 16, "longest": 64, "page_size": 4, "groups": FULL, "late": 0}
    return SchedulerSpec(**{**values, **changes})


def request(number: int, prompt: int = 6, tokens: int | None = 3, **more: Any) -> Request:
    options = SamplingOptions(tokens=tokens, end_tokens=more.pop("end_tokens", ()))
    return Request(number=number, prompt=tuple(range(100 * number, 100 * number + prompt)), options=options, **more)


def counts_of(step: Step) -> dict[int, int]:
    return dict(zip(step.requests.tolist(), step.counts.tolist()))


def test_prompts_are_cut_to_the_tokens_of_a_step_and_those_who_decode_come_first():
    scheduler = Scheduler(spec_of(most_tokens=8))
    scheduler.add(request(0, prompt=5, tokens=9))
    scheduler.add(request(1, prompt=14))
    found = []
    for _ in range(4):
        step = scheduler.schedule()
        found.append(counts_of(step))
        scheduler.observe(step, [7] * len(step))
    assert found == [{0: 5, 1: 3}, {0: 1, 1: 7}, {0: 1, 1: 4}, {0: 1, 1: 1}]


def test_the_host_reads_one_step_late():
    scheduler = Scheduler(spec_of(late=1))
    scheduler.add(request(0, tokens=4, end_tokens=(9,)))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert second.tokens.tolist() == [SAMPLED] and second.positions.tolist() == [6]
    with pytest.raises(ValueError, match="step 0 must be observed"):
        scheduler.schedule()
    assert scheduler.observe(first, [9]).finished[0].reason == "stop"
    assert scheduler.observe(second, [5]).kept == [0]  # drawn after the end
    assert scheduler.idle and len(scheduler.schedule()) == 0


def test_an_end_by_length_is_known_before():
    scheduler = Scheduler(spec_of(late=1))
    scheduler.add(request(0, tokens=2))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert scheduler.observe(first, [1]).finished == []
    assert len(scheduler.schedule()) == 0
    assert scheduler.observe(second, [1]).finished[0].reason == "length"


def test_steps_are_observed_in_order_and_whole():
    scheduler = Scheduler(spec_of(late=1))
    scheduler.add(request(0))
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(ValueError, match="step 1 is observed, but step 0"):
        scheduler.observe(second, [1])
    with pytest.raises(ValueError, match="one token at least"):
        scheduler.observe(first, [NO_TOKEN])
    with pytest.raises(ValueError, match="one token at least"):
        scheduler.observe(first, [1, 2])
    scheduler.observe(first, [1])


def test_priority_then_arrival():
    scheduler = Scheduler(spec_of(most_sequences=2, most_tokens=64))
    for number, priority in enumerate((0, 1, 0, 2)):
        scheduler.add(request(number, priority=priority))
    assert scheduler.schedule().requests.tolist() == [3, 1]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 2)


def test_a_sequence_keeps_its_row_and_says_when_it_got_it():
    scheduler = Scheduler(spec_of(most_tokens=64))
    scheduler.add(request(0, tokens=1))
    scheduler.add(request(1, tokens=4))
    step = scheduler.schedule()
    assert step.admitted == (0, 1) and step.rows.tolist() == [0, 1]
    scheduler.observe(step, [1, 1])
    scheduler.add(request(2))
    step = scheduler.schedule()
    assert step.requests.tolist() == [1, 2] and step.rows.tolist() == [1, 0] and step.admitted == (1,)


def test_answers_to_one_prompt_share_its_full_pages_in_the_same_step():
    scheduler = Scheduler(spec_of(most_tokens=64))
    prompt = tuple(range(10))
    for number in range(3):
        scheduler.add(Request(number=number, prompt=prompt, options=SamplingOptions(tokens=2, sample=number)))
    step = scheduler.schedule()
    assert step.counts.tolist() == [10, 2, 2] and step.firsts.tolist() == [0, 8, 8]
    table = step.tables[0]
    assert table[0, :2].tolist() == table[1, :2].tolist() == table[2, :2].tolist()
    assert len({*table[:3, 2].tolist()}) == 3
    scheduler.observe(step, [1, 2, 3])
    done = scheduler.observe(scheduler.schedule(), [1, 2, 3]).finished
    assert [(f.request, f.cached) for f in done] == [(0, 0), (1, 8), (2, 8)]


@pytest.mark.parametrize("length, hit", ((8, 4), (9, 8)))
def test_one_token_of_a_prompt_is_always_computed(length, hit):
    scheduler = Scheduler(spec_of())
    for number in range(2):
        scheduler.add(Request(number=number, prompt=(1,) * length, options=SamplingOptions(tokens=1)))
        step = scheduler.schedule()
        assert step.firsts.tolist() == [hit * number]
        scheduler.observe(step, [5])


def test_an_answer_is_a_prefix_of_the_next_prompt():
    scheduler = Scheduler(spec_of())
    scheduler.add(request(0, prompt=6, tokens=7))
    while not scheduler.idle:
        step = scheduler.schedule()
        scheduler.observe(step, [3] * len(step))
    scheduler.add(Request(number=1, prompt=(*range(6), *[3] * 7, 1), options=SamplingOptions(tokens=1)))
    assert scheduler.schedule().firsts.tolist() == [12]


@pytest.mark.parametrize("further, hit", [(0, 8), (1, 8), (2, 4), (5, 4), (6, 0)])
def test_a_page_is_known_when_all_depths_are_through_it(further, hit):
    """Depth k is k - 1 tokens behind; of eight computed tokens the first pages are whole."""
    scheduler = Scheduler(spec_of(most_tokens=8, further=further))
    for number in range(2):
        scheduler.add(Request(number=number, prompt=tuple(range(20)), options=SamplingOptions(tokens=1)))
        assert scheduler.schedule().firsts.tolist() == [hit * number]
        scheduler.cancel(number)
        scheduler._observed = scheduler._scheduled  # nobody hears of it


@pytest.mark.parametrize("further, hit", [(0, 12), (1, 12), (2, 8), (3, 8), (6, 4)])
def test_an_answer_is_a_prefix_where_the_tokens_after_a_page_are_the_same(further, hit):
    """Thirteen tokens of a request are known, and the prompt of the next differs in the thirteenth's successor."""
    scheduler = Scheduler(spec_of(further=further))
    scheduler.add(request(0, prompt=6, tokens=7))
    while not scheduler.idle:
        step = scheduler.schedule()
        scheduler.observe(step, [3] * len(step))
    scheduler.add(Request(number=1, prompt=(*range(6), *[3] * 7, 1, 1), options=SamplingOptions(tokens=1)))
    assert scheduler.schedule().firsts.tolist() == [hit]


def test_drafts_that_only_the_device_has():
    scheduler = Scheduler(spec_of())
    scheduler.add(request(0, prompt=5, tokens=7, end_tokens=(99,)))
    scheduler.observe(scheduler.schedule(), [10])
    step = scheduler.schedule(drafts={0: [DRAFTED, DRAFTED - 1]})
    assert step.tokens.tolist() == [10, DRAFTED, DRAFTED - 1]
    assert scheduler.observe(step, [[11, 12, NO_TOKEN]]).kept == [2]
    assert list(scheduler.tokens_of(0))[5:] == [10, 11, 12] and scheduler.schedule().firsts.tolist() == [7]


def test_prompts_whose_tokens_are_scored_are_computed_whole():
    scheduler = Scheduler(spec_of())
    for number in range(2):
        options = SamplingOptions(tokens=0, prompt_logprobs=0)
        scheduler.add(Request(number=number, prompt=(1,) * 9, options=options))
        step = scheduler.schedule()
        assert step.firsts.tolist() == [0] and step.samples.tolist() == [False]
        seen = scheduler.observe(step, [NO_TOKEN])
        assert seen.kept == [0] and [f.reason for f in seen.finished] == ["length"]


@pytest.mark.parametrize("first, hit", [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (10, 8)])
def test_of_a_scored_prompt_what_lies_before_is_remembered(first, hit):
    """Whole pages of 4 tokens, and never the token before the first that is scored, whose logits are needed."""
    scheduler = Scheduler(spec_of())
    for number in range(2):
        options = SamplingOptions(tokens=0, prompt_logprobs=0, scored_from=first)
        scheduler.add(Request(number=number, prompt=(1,) * 11, options=options))
        step = scheduler.schedule()
        assert step.firsts.tolist() == [hit * number] and step.lengths.tolist() == [10]
        scheduler.observe(step, [NO_TOKEN])


def test_the_last_token_of_a_prompt_that_is_only_scored_needs_no_room():
    scheduler = Scheduler(spec_of(longest=8))
    scheduler.check(Request(number=0, prompt=(1,) * 9, options=SamplingOptions(tokens=0, prompt_logprobs=0)))
    for options in (SamplingOptions(tokens=0), SamplingOptions(tokens=1, prompt_logprobs=0)):
        with pytest.raises(RequestDoesNotFit):
            scheduler.check(Request(number=0, prompt=(1,) * 9, options=options))
    with pytest.raises(RequestDoesNotFit):
        scheduler.check(Request(number=0, prompt=(1,) * 10, options=SamplingOptions(tokens=0, prompt_logprobs=0)))


def test_pages_that_run_out_are_taken_from_the_last_and_it_ends_the_same():
    scheduler = Scheduler(spec_of(groups=(GroupSpec(None, 7),), longest=20, most_tokens=32))
    for number, priority in enumerate((0, 0, 1)):
        scheduler.add(request(number, prompt=4, tokens=12, priority=priority))
    preempted, ended = [], []
    while not scheduler.idle:
        step = scheduler.schedule()
        preempted += step.preempted
        ended += [f.request for f in scheduler.observe(step, (step.requests * 10 + step.lengths).tolist()).finished]
    assert preempted[0] == 1 and 2 not in preempted and ended[0] == 2 and set(ended) == {0, 1, 2}


def test_deadlines_and_cancelling():
    scheduler = Scheduler(spec_of(late=1))
    scheduler.add(request(0, tokens=9, deadline=5.0))
    scheduler.add(request(1, tokens=9, deadline=6.0))
    first = scheduler.schedule(4.9)
    assert first.finished == ()
    second = scheduler.schedule(5.0)
    assert [(f.request, f.reason) for f in second.finished] == [(0, "deadline")] and second.requests.tolist() == [1]
    scheduler.observe(first, [1, 1])
    ended = scheduler.cancel(1)
    assert ended is not None and ended.reason == "cancelled" and scheduler.cancel(1) is None
    assert scheduler.observe(second, [1]).kept == [0]
    assert scheduler.schedule(9.0).finished == () and scheduler.idle


def test_drafts():
    scheduler = Scheduler(spec_of())
    scheduler.add(request(0, prompt=5, tokens=7, end_tokens=(99,)))
    scheduler.observe(scheduler.schedule(), [10])
    step = scheduler.schedule(drafts={0: [11, 12, 13]})
    assert step.tokens.tolist() == [10, 11, 12, 13] and step.drafts.tolist() == [3]
    with pytest.raises(ValueError, match="accepted drafts"):
        Scheduler.observe(scheduler, step, [[11, 13, 13, NO_TOKEN]])


def test_accepted_drafts_and_the_end_among_them():
    scheduler = Scheduler(spec_of())
    scheduler.add(request(0, prompt=5, tokens=7, end_tokens=(99,)))
    scheduler.observe(scheduler.schedule(), [10])
    step = scheduler.schedule(drafts={0: [11, 12, 13]})
    assert scheduler.observe(step, [[11, 20, NO_TOKEN, NO_TOKEN]]).kept == [2]
    step = scheduler.schedule(drafts={0: [21, 99, 23]})
    assert step.firsts.tolist() == [7] and step.tokens.tolist()[0] == 20
    seen = scheduler.observe(step, [[21, 99, 23, 24]])
    assert seen.kept == [2] and seen.finished[0].reason == "stop"


def test_drafts_never_pass_the_length_nor_the_tokens_of_a_step():
    scheduler = Scheduler(spec_of(most_sequences=2, most_tokens=5))
    scheduler.add(request(0, prompt=2, tokens=3))
    scheduler.add(request(1, prompt=2, tokens=30))
    scheduler.observe(scheduler.schedule(), [1, 1])
    step = scheduler.schedule(drafts={0: [1] * 9, 1: [1] * 9})
    assert step.counts.tolist() == [2, 3]


def test_drafts_are_refused_if_tokens_are_read_late():
    with pytest.raises(ValueError, match="late < in_flight"):
        Scheduler(spec_of(late=1)).schedule(drafts={0: [1]})


@pytest.mark.parametrize(
    "prompt, tokens, text",
    (
        (0, 1, "empty prompt"),
        (40, None, "leaves no room"),
        (38, 3, "38 tokens of a prompt and 3"),
        (41, 0, "41 tokens"),
    ),
)
def test_requests_that_never_fit_are_refused_with_what_fits(prompt, tokens, text):
    scheduler = Scheduler(spec_of(groups=(GroupSpec(None, 11), GroupSpec(8, 4))))
    with pytest.raises(RequestDoesNotFit, match=text) as refused:
        scheduler.add(request(0, prompt, tokens))
    assert refused.value.room == 40 and (refused.value.prompt, refused.value.tokens) == (prompt, tokens)
    scheduler.add(request(0, 37, 3))
    with pytest.raises(ValueError, match="numbers must grow"):
        scheduler.add(request(0, 3, 3))


@pytest.mark.parametrize(
    "changes, text",
    (
        ({"late": 2}, "late=2: must be from 0 to in_flight=1"),
        ({"late": -1, "in_flight": 4}, "late=-1: must be from 0 to in_flight=4"),
        ({"most_tokens": 3}, "most_tokens=3: must be at least most_sequences=4"),
        ({"most_sequences": 0}, "most_sequences=0"),
        ({"groups": (GroupSpec(8, 3),)}, "num_pages=3: must be at least 4 for a window of 8"),
        ({"groups": (GroupSpec(None, 1),)}, "num_pages=1: must be at least 2"),
    ),
)
def test_specs_in_which_nobody_could_run_are_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        spec_of(**changes)


def test_tokens_of_a_request():
    scheduler = Scheduler(spec_of())
    scheduler.add(request(0, 3))
    scheduler.observe(scheduler.schedule(), np.array([8]))
    assert list(scheduler.tokens_of(0)) == [0, 1, 2, 8]


def test_a_request_that_found_no_pages_is_admitted_when_some_are_given_back():
    scheduler = Scheduler(spec_of(groups=(GroupSpec(None, 9),), longest=32, most_tokens=64))
    scheduler.add(request(0, prompt=8, tokens=3))
    scheduler.add(request(1, prompt=9, tokens=9))
    scheduler.add(request(2, prompt=12, tokens=2))
    found = []
    for _ in range(4):
        step = scheduler.schedule()
        found.append(step.requests.tolist())
        scheduler.observe(step, [1] * len(step))
    assert found == [[0, 1], [0, 1], [0, 1], [1, 2]]


def test_those_who_decode_take_turns_in_a_pipeline():
    scheduler = Scheduler(spec_of(most_tokens=64, in_flight=2, late=2))
    for number in range(4):
        scheduler.add(request(number, tokens=9))
    steps = [scheduler.schedule(), scheduler.schedule()]
    assert [len(step) for step in steps] == [4, 0]  # nobody's token is there yet
    scheduler.observe(steps[0], [1] * 4)
    steps = [scheduler.schedule() for _ in range(2)]
    assert [step.requests.tolist() for step in steps] == [[0, 1], [2, 3]]
    third = scheduler.schedule()
    assert third.requests.tolist() == [0, 1] and third.tokens.tolist() == [SAMPLED] * 2
