"""Drafts from multi-token prediction modules: those that the modules make of whole sequences, in any layout; the text
is the one without them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from phalanx.base.errors import ConfigError
from phalanx.forecast.decide import make_plan
from phalanx.inference.drafter import drafts_named
from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.load import without_training
from phalanx.inference.predictor import MtpSpec, check_modules
from phalanx.inference.request import SamplingOptions
from tests.harness.generation import answers_of, random_model, run_of, uncaptured
from tests.harness.predictor import counted_answers, knowing_model, whole_drafts
from tests.harness.sample import rest_in_soak

PLAIN = EngineOptions(sequences=4, tokens=16, page_size=4, memory_gib=0.001)
GREEDY = SamplingOptions(tokens=9, temperature=0, logprobs=2)
SAMPLED = SamplingOptions(tokens=9, temperature=0.8, seed=5, logprobs=2)
LONG = [1, 2, 3, 1, 2, 3, 1, 2, 9, 8, 7, 6, 5, 4, 3, 2, 1, 7, 7, 7]
PROMPTS = ([1, 2, 3, 1, 2, 3, 1, 2], [9], LONG, [1, 2, 3, 1, 2, 3, 1, 2, 9, 5], [5] * 23)
LAYOUTS = {  # and ranks; ep: replicas that share experts
    "tp2": ({"tp": 2}, 2),
    "pp2": ({"pp": 2}, 2),
    "cp2": ({"cp": 2}, 2),
    "ep2": ({"ep": 2}, 2),
    "dp2": ({}, 2),
    "tp2 pp2": ({"tp": 2, "pp": 2}, 4),
    "tp2 ep2": ({"tp": 2, "ep": 2}, 2),
    "cp2 pp2": ({"cp": 2, "pp": 2}, 4),
}
CASES = [(name, knows) for name in LAYOUTS for knows in (True, False)]
QUICK = [("tp2", False), ("pp2", True), ("pp2", False), ("cp2", True), ("ep2", True)]


def model_run(modules: int = 2, **layout):
    run = run_of("deepseek_v3-mtp", **layout)
    return replace(run, model=replace(run.model, num_nextn_predict_layers=modules))


def asked_of(tokens: int = 9) -> list[tuple[list[int], SamplingOptions]]:
    """Greedy and sampled requests, some with scores of prompts or penalties, which have no drafts."""
    made = [(p, replace(how, sample=i, tokens=tokens)) for how in (GREEDY, SAMPLED) for i, p in enumerate(PROMPTS)]
    made.append((PROMPTS[0], replace(GREEDY, prompt_logprobs=1, tokens=tokens)))
    made.append((PROMPTS[1], replace(SAMPLED, end_tokens=(3, 50, 60), least_tokens=4, bias=((3, 2.0),))))
    return [*made, (PROMPTS[4], replace(SAMPLED, frequency_penalty=0.5, tokens=tokens))]


def same(found, wanted) -> None:
    for (tokens, scores, of_prompt, reason), (others, theirs, their_prompt, why) in zip(found, wanted, strict=True):
        assert (tokens, reason) == (others, why)
        for a, b in zip([*scores, *of_prompt[1:]], [*theirs, *their_prompt[1:]], strict=True):
            assert (a.token, [t for t, _ in a.likeliest]) == (b.token, [t for t, _ in b.likeliest])
            np.testing.assert_allclose(a.logprob, b.logprob, rtol=0, atol=1e-10)


def watch_drafts(engine: Engine, width: int) -> list[int]:
    """From here on, drafts that the engine makes are compared with those that the modules make of the whole sequences,
    and the hidden states behind them. How many drafts there were in each place of a step."""
    whole, places, observe = random_model(0, 1, engine.model.plan.run), list[int](), engine._observe
    predictor, made = engine.runner.predictor, []
    drawn_of = predictor._drawn
    predictor._drawn = lambda states, *how: made.append(states) or drawn_of(states, *how)

    def observing(step, drawn):
        events = observe(step, drawn)
        for i, sequence in enumerate(step.sequences):
            if step.samples[i] and not sequence.ended:
                drafts, hidden = whole_drafts(whole, list(sequence.tokens), width)
                assert drawn.drafts[i].tolist() == drafts
                found = torch.stack([states[i] for states in made[-width:]])
                np.testing.assert_allclose(found, hidden, rtol=0, atol=1e-10)
                places.append(i)
        return events

    engine._observe = observing
    return places


@pytest.mark.parametrize(
    "modules, width, page_size",
    [(1, 1, 4), pytest.param(2, 2, 4, marks=pytest.mark.soak), (3, 3, 4), (1, 3, 64), (2, 4, 64)],
)
def test_drafts_are_those_of_the_modules_over_the_whole_sequence(modules, width, page_size):
    """Of prompts in pieces, of prefixes found in memory, after refused drafts; more drafts than modules too."""
    options = replace(PLAIN, page_size=page_size, drafts=MtpSpec(width))
    engine = Engine(random_model(0, 1, model_run(modules)), options)
    found = watch_drafts(engine, width)
    answers_of(engine, [(p, replace(GREEDY, tokens=5)) for p in PROMPTS], 2)
    assert len(found) > 12 and max(found) > 1


def test_drafts_are_right_after_pages_were_lost():
    page = 4 * 18 * 8 * 4  # tokens, features of a latent, bytes, layers
    engine = Engine(random_model(0, 1, model_run()), replace(PLAIN, drafts=MtpSpec(), memory_gib=page * 12.5 / 2**30))
    found, preempted, schedule = watch_drafts(engine, 2), [], engine.scheduler.schedule

    def watched(now, drafts=None):
        step = schedule(now, drafts)
        preempted.extend(step.preempted)
        return step

    engine.scheduler.schedule = watched
    answers_of(engine, [(p, replace(GREEDY, tokens=7)) for p in PROMPTS], 4)
    assert preempted and len(found) > 12


@pytest.fixture(scope="module")
def wanted():
    """Answers without drafts, of one process: of a model with random modules, and of one whose modules know."""
    return {knows: counted_answers(0, 1, model_run(), asked_of(), PLAIN, 2, knows)[0] for knows in (False, True)}


@pytest.mark.parametrize("width", [1, 2, 4])
def test_modules_that_are_always_right(width, wanted):
    """Every draft is accepted, greedy or sampled, and the text takes fewer steps."""
    engine = Engine(knowing_model(0, 1, model_run()), replace(PLAIN, drafts=MtpSpec(width)))
    steps, step = [], engine.step
    engine.step = lambda: steps.append(step()) or steps[-1]
    same(answers_of(engine, asked_of(), 2), wanted[True])
    counts = engine.draft_counts
    assert counts.accepted == counts.drafted > 30
    assert len(steps) < sum(9 for _ in asked_of()) / 4


def test_modules_that_are_wrong_change_no_text(wanted):
    engine = Engine(random_model(0, 1, model_run()), replace(PLAIN, drafts=MtpSpec(3)))
    same(answers_of(engine, asked_of(), 2), wanted[False])
    assert engine.draft_counts.accepted < engine.draft_counts.drafted / 4


@pytest.mark.parametrize("case", rest_in_soak(CASES, QUICK), ids=str)
def test_a_layout_changes_neither_text_nor_drafts(ranks, case, wanted):
    """Whether modules are always right or hardly ever."""
    (layout, world), knows = LAYOUTS[case[0]], case[1]
    options = replace(PLAIN, drafts=MtpSpec(3), page_size=4 // layout.get("cp", 1))
    target, some = "tests.harness.predictor:counted_answers", slice(None, None, 1 if knows else 2)
    (found, counts), *_ = ranks.run(target, world, model_run(**layout), asked_of()[some], options, 2, knows)
    same(found, wanted[knows][some])
    assert (counts.accepted == counts.drafted) == knows and counts.drafted > 20


def test_drafts_come_from_the_numbers_that_graphs_are_replayed_from(wanted):
    asked = [(p, how) for p, how in asked_of() if how.prompt_logprobs is None]
    plain = [answer for answer, (_, how) in zip(wanted[True], asked_of()) if how.prompt_logprobs is None]
    with uncaptured() as sizes:
        engine = Engine(knowing_model(0, 1, model_run()), replace(PLAIN, drafts=MtpSpec()))
        same(answers_of(engine, asked, 2), plain)
    assert engine.draft_counts.accepted == engine.draft_counts.drafted > 30
    assert {pieces for _, _, pieces in sizes} == {True, False}


@pytest.mark.parametrize("pp, stages", [(4, (1, 1, 1, 2)), (3, (2, 1, 2))])
def test_modules_on_another_stage_than_the_head_are_refused_with_stages_that_do(pp, stages):
    def plan_of(**layout):
        return make_plan(without_training(model_run(pp=pp, **layout), pp), pp)

    with pytest.raises(ConfigError, match="needs the modules on the pipeline stage") as caught:
        check_modules(plan_of(), MtpSpec(), "--speculate")
    assert f"layout.stages=[{','.join(map(str, stages))}]" in str(caught.value)
    check_modules(plan_of(stages=stages), MtpSpec(), "--speculate")
    with pytest.raises(ConfigError, match="set layout.pp=4,"):
        check_modules(make_plan(without_training(model_run(pp=5), 5), 5), MtpSpec(), "--speculate")


def test_what_cannot_draft_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"drafts='mtp:2': needs a model with multi-token prediction modules"):
        Engine(random_model(0, 1, run_of("llama")), replace(PLAIN, drafts=MtpSpec(2)))
    beside = replace(random_model(0, 1, model_run()), trains=True)
    with pytest.raises(ConfigError, match="must not be made by a model that trains"):
        Engine(beside, replace(PLAIN, drafts=MtpSpec()))
    for text in ("mtp:0", "mtp:x", "mtpx", "ngram", "ngram:0"):
        with pytest.raises(ValueError, match="tokens=0|must be ngram:N, mtp or mtp:N"):
            drafts_named(text)
    assert drafts_named("mtp") == MtpSpec() and drafts_named("mtp:3") == MtpSpec(3)
