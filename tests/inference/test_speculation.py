"""Speculation in the engine: the very text, scores and distribution that there are without drafts, in fewer steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from phalanx.base.errors import ConfigError
from phalanx.cli.generate import check_speculation
from phalanx.inference.drafter import NgramSpec
from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.predictor import MtpSpec
from phalanx.inference.request import Finished, SamplingOptions
from tests.harness.generation import answers, answers_of, random_model, run_of, whole_logits

PLAIN = EngineOptions(sequences=4, tokens=16, page_size=4, memory_gib=0.001)
SPEC = NgramSpec(tokens=3, longest=3, shortest=1)
DRAFTING = replace(PLAIN, drafts=SPEC)
GREEDY = SamplingOptions(tokens=14, temperature=0, logprobs=2)
SAMPLED = SamplingOptions(tokens=14, temperature=0.7, top_k=3, seed=5, logprobs=2)
PROMPTS = ([1, 2, 3, 1, 2, 3, 1, 2], [7, 7, 7, 7], [5, 6, 5, 6, 5], [9, 8, 4], [1, 2, 1, 2, 1, 3, 1, 2])
LAYOUTS = (
    ("llama", {"tp": 2}, 2),
    ("llama", {"pp": 2}, 2),
    pytest.param("gpt_oss", {"cp": 2}, 2, marks=pytest.mark.soak),
    ("llama", {}, 2),  # replicas
    pytest.param("deepseek_v3", {"tp": 2}, 2, marks=pytest.mark.soak),
)


def asked_of(*, vocab: int = 131, penalties: bool = False) -> list[tuple[list[int], SamplingOptions]]:
    """Greedy and sampled requests, with scores of prompts, bias, forbidden ends and (without drafts) penalties."""
    made = [(p, replace(GREEDY, sample=i)) for i, p in enumerate(PROMPTS)]
    made += [(p, replace(SAMPLED, sample=i)) for i, p in enumerate(PROMPTS)]
    made.append((PROMPTS[0], replace(GREEDY, prompt_logprobs=1)))
    made.append((PROMPTS[1], replace(SAMPLED, bias=((7, 6.0), (3, 4.0)), end_tokens=(3,), least_tokens=4)))
    if penalties:
        made.append((PROMPTS[2], replace(SAMPLED, frequency_penalty=0.5, seed=2)))
    return made


def same(found, wanted) -> None:
    for (tokens, scores, of_prompt, reason), (others, theirs, their_prompt, why) in zip(found, wanted, strict=True):
        assert (tokens, reason) == (others, why)
        assert [s.token for s in scores] == tokens
        for a, b in zip([*scores, *of_prompt[1:]], [*theirs, *their_prompt[1:]], strict=True):
            assert [t for t, _ in a.likeliest] == [t for t, _ in b.likeliest]
            values = [a.logprob, *(p for _, p in a.likeliest)], [b.logprob, *(p for _, p in b.likeliest)]
            np.testing.assert_allclose(*values, rtol=0, atol=1e-10)


@pytest.fixture(scope="module")
def wanted():
    """Answers without drafts, of one process; by model."""
    made = {}

    def of(model: str):
        if model not in made:
            made[model] = answers(0, 1, run_of(model), asked_of(penalties=True), PLAIN, 2)
        return made[model]

    return of


def heard(engine: Engine, asked) -> tuple[int, list[Finished]]:
    """Steps that an engine takes, and the ends of its requests."""
    steps, ends = 0, []
    for prompt, options in asked:
        engine.submit(prompt, options)
    while not engine.idle:
        ends += [event for event in engine.step() if isinstance(event, Finished)]
        steps += 1
    return steps, ends


@pytest.mark.parametrize("model", ["llama", pytest.param("gpt_oss", marks=pytest.mark.soak)])
def test_drafts_change_no_token_and_no_score(model, wanted):
    """Beside requests without drafts, with windows, and with bias, least tokens and ends among the drafts."""
    engine = Engine(random_model(0, 1, run_of(model)), DRAFTING)
    same(answers_of(engine, asked_of(penalties=True), 2), wanted(model))
    assert 0 < engine.draft_counts.accepted < engine.draft_counts.drafted


@pytest.mark.parametrize("model, layout, world", LAYOUTS, ids=str)
def test_a_layout_changes_nothing_with_drafts(ranks, model, layout, world, wanted):
    asked = asked_of(penalties=True)
    found = ranks.run("tests.harness.generation:answers", world, run_of(model, **layout), asked, DRAFTING, 2)
    same(found[0], wanted(model))


def test_sequences_that_lose_their_pages_come_back_with_drafts(wanted):
    page = 4 * 2 * 2 * 6 * 8 * 4  # tokens, keys and values, heads, features, bytes, layers
    engine = Engine(random_model(0, 1, run_of("llama")), replace(DRAFTING, memory_gib=(page * 12 + 1) / 2**30))
    preempted = []
    schedule = engine.scheduler.schedule

    def watched(now, drafts=None):
        step = schedule(now, drafts)
        preempted.extend(step.preempted)
        return step

    engine.scheduler.schedule = watched
    same(answers_of(engine, asked_of(penalties=True), 4), wanted("llama"))
    assert preempted and engine.draft_counts.accepted


def test_a_text_that_repeats_itself_takes_fewer_steps():
    model = random_model(0, 1, run_of("llama"))
    repeated = replace(GREEDY, tokens=16, bias=((7, 100.0),))  # 7 for ever
    steps, _ = heard(Engine(model, PLAIN), [([7, 7, 7], repeated)])
    fewer, [end] = heard(Engine(model, DRAFTING), [([7, 7, 7], repeated)])
    assert (steps, fewer) == (17, 5)  # the last of the first kind is read a step late; three drafts and one token each
    assert (end.drafted, end.accepted) == (11, 11) and end.reason == "length"


@pytest.mark.parametrize("name, drafts", [("llama", NgramSpec(2, 2, 1)), ("deepseek_v3-mtp", MtpSpec(2))])
def test_the_distribution_is_that_of_the_model(name, drafts):
    """Of pairs of tokens over many samples, against probabilities of the model computed whole; with drafts that are
    accepted and refused."""
    samples, prompt = 600, [5, 6, 5, 6, 5, 9, 5]
    how = SamplingOptions(tokens=3, temperature=1.3, top_k=3, seed=11, bias=((5, 8.0), (6, 8.0), (9, 8.0)))
    model = random_model(0, 1, run_of(name))
    options = replace(DRAFTING, sequences=64, tokens=512, memory_gib=0.01, drafts=drafts)
    engine = Engine(model, options)
    found = answers_of(engine, [(prompt, replace(how, sample=i)) for i in range(samples)], samples)
    whole = random_model(0, 1, run_of(name))

    def chances(tokens: list[int]) -> dict[int, float]:
        logits = whole_logits(whole, tokens)[-1].clone()
        for token, value in how.bias:
            logits[token] += value
        best = logits.topk(3)
        made = torch.softmax(best.values / how.temperature, -1)
        return dict(zip(best.indices.tolist(), made.tolist()))

    first = chances(prompt)
    pairs = {(a, b): p * q for a, p in first.items() for b, q in chances([*prompt, a]).items()}
    triples = {(*pair, c): p * q for pair, p in pairs.items() for c, q in chances([*prompt, *pair]).items()}
    counts = Counter(tuple(tokens) for tokens, *_ in found)
    large = [each for each, p in triples.items() if p * samples >= 5]
    seen = [counts[each] for each in large]
    expected = [triples[each] * samples for each in large]
    if len(large) < len(triples):
        seen.append(samples - sum(seen))
        expected.append(samples - sum(expected))
    assert len(large) > 8 and chisquare(seen, expected).pvalue > 1e-3
    assert 0.1 < engine.draft_counts.accepted / engine.draft_counts.drafted < 0.9


def test_drafts_are_made_of_known_tokens():
    with pytest.raises(ValueError, match="late=1"):
        EngineOptions(drafts=SPEC, late=1)
    late = [options.steps_late for options in (EngineOptions(), EngineOptions(drafts=SPEC), EngineOptions(late=0))]
    assert late == [1, 0, 0]


@pytest.mark.parametrize("speculate", ["ngram:2", "mtp"])
def test_a_model_with_states_takes_no_drafts_by_the_name_of_the_option(speculate):
    """Before its weights are read."""
    with pytest.raises(ConfigError, match=f"--speculate='{speculate}': must not be made for a model whose layers keep"):
        check_speculation(run_of("mamba2"), 1, speculate)
    check_speculation(run_of("llama"), 1, "ngram:2")
