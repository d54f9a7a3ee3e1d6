"""Generation with layers that keep a state of each sequence instead of pages: pieces of any size, constant memory, rows
used again, and what such layers cannot do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from phalanx.base.errors import ConfigError
from phalanx.inference.drafter import NgramSpec
from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.load import InferenceModel
from phalanx.inference.memory import (
    MemoryLimits,
    keeping,
    kept_by,
    layer_groups,
    remembering,
    row_bytes,
    state_bytes,
)
from phalanx.inference.pages import first_key, page_key
from phalanx.inference.prefix_states import PrefixStates
from phalanx.inference.request import Finished, NewToken, SamplingOptions
from phalanx.inference.serving_plan import ServingPlan
from tests.harness.generation import (
    answers,
    answers_by_graphs,
    answers_of,
    cached_logits,
    random_model,
    run_of,
    sequences_of,
    whole_logits,
)
from tests.inference.test_engine import GREEDY, LENGTHS, SMALL, check_against_whole

PIECES = [*(("mamba2", n) for n in (1, 2, 7, 64)), ("falcon_h1", 1), ("falcon_h1", 7), ("nemotron_h-latent", 7)]


@pytest.mark.parametrize("model, piece", PIECES)
def test_pieces_of_any_size_are_the_whole_sequence(model, piece):
    """Logits of every token, of three sequences at once whose states begin as NaN; pages of attention lie beside the
    states, and experts read single tokens."""
    lengths = (70, 5, 33)
    steps, done = [], [0, 0, 0]
    while done != list(lengths):
        steps.append([min(piece, n - d) for n, d in zip(lengths, done)])
        done = [d + n for d, n in zip(done, steps[-1])]
    found = cached_logits(0, 1, run_of(model), lengths, steps)
    whole = random_model(0, 1, run_of(model))
    for row, logits in zip(sequences_of(lengths, 131), found, strict=True):
        torch.testing.assert_close(logits, whole_logits(whole, row), rtol=0, atol=1e-10)


def test_memory_does_not_grow_with_a_sequence():
    """Bytes are those that the layers name, whatever the length; nothing is kept in pages."""
    run = run_of("mamba2")
    for length in (16, 1024):
        engine = Engine(random_model(0, 1, run), replace(SMALL, length=length))
        layers = keeping(engine.model.blocks)
        kept = [t for layer in layers if layer.states for t in (layer.states.states, layer.states.tokens)]
        assert sum(t.nbytes for t in kept) == (1 + SMALL.sequences) * state_bytes(layers, torch.float64)
        assert engine.groups == () and all(m.memory is None for b in engine.model.blocks for m in layers)
    limits = MemoryLimits(1, 16, 1024)
    [rank] = ServingPlan.of(engine.model.plan, limits).ranks
    assert rank.states == state_bytes(layers, torch.float64) and rank.read(16) == rank.read(1024) == 2 * rank.states
    assert row_bytes(limits, 0, states=100) == 8 + 2 * 100


def test_rows_are_used_again():
    """More prompts than rows, one of a single token: a new sequence finds nothing of the one before it."""
    prompts = [[3], *sequences_of(LENGTHS, 131), [5]]
    found = answers(0, 1, run_of("mamba2"), [(p, GREEDY) for p in prompts], replace(SMALL, sequences=2), arrive=3)
    check_against_whole("mamba2", prompts, found)


def test_equal_prompts_share_nothing():
    """A state is remembered at the last token alone, so no prefix is taken from another sequence."""
    prompt = sequences_of((24,), 131)[0]
    engine = Engine(random_model(0, 1, run_of("mamba2")), SMALL)
    asked = [(prompt, replace(GREEDY, prompt_logprobs=None))] * 3
    found = answers_of(engine, asked, 1)
    assert found[0][0] == found[1][0] == found[2][0]
    check_against_whole("mamba2", [prompt] * 3, answers_of(engine, [(prompt, GREEDY)] * 3, 3))


def test_graphs_are_of_single_tokens_alone():
    """The numbers that graphs are replayed from say whose states go on; pieces of prompts run without graphs."""
    prompts = sequences_of(LENGTHS, 131)
    asked = [(p, replace(GREEDY, prompt_logprobs=None)) for p in prompts]
    found, sizes = answers_by_graphs(0, 1, run_of("mamba2"), asked, SMALL, 2)
    plain = answers(0, 1, run_of("mamba2"), asked, SMALL, arrive=2)
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in plain]
    assert sizes and not any(pieces for _, _, pieces in sizes)


@pytest.mark.parametrize(
    "options, text",
    [
        (replace(SMALL, drafts=NgramSpec(2)), "a refused draft cannot be taken out"),
        (replace(SMALL, pages="fp8"), "no layer has attention"),
        (EngineOptions(sequences=4096, tokens=4096, memory_gib=0.001), "room for the state of each sequence"),
        (replace(SMALL, prefix_states=4096), "room for the state of each sequence"),
    ],
    ids=["drafts", "fp8 pages", "too many sequences", "too many prefixes"],
)
def test_what_states_cannot_do_is_refused(options, text):
    with pytest.raises(ConfigError, match=text) as error:
        Engine(random_model(0, 1, run_of("mamba2")), options)
    for value in error.value.problems[0].valid:  # a value that works
        if isinstance(value, int):
            Engine(random_model(0, 1, run_of("mamba2")), replace(options, sequences=value))


def test_states_of_prefixes_have_no_effect_on_attention():
    with pytest.raises(ConfigError, match="has no effect without layers that keep a state"):
        Engine(random_model(0, 1, run_of("llama")), replace(SMALL, prefix_states=4))


def test_sampled_text_is_the_same_in_any_company():
    prompts = sequences_of(LENGTHS, 131)
    how = SamplingOptions(tokens=6, temperature=1.0, seed=3)
    alone = [answers(0, 1, run_of("mamba2"), [(p, how)], SMALL)[0][0] for p in prompts]
    assert [a[0] for a in answers(0, 1, run_of("mamba2"), [(p, how) for p in prompts], SMALL, arrive=4)] == alone


PREFIXED = ("mamba2", "nemotron_h", "falcon_h1", "qwen3_next", "qwen3_5_text", "kimi_linear", "olmo_hybrid")
KEPT = replace(SMALL, prefix_states=8, tokens=64, memory_gib=0.01)
ALONE = replace(GREEDY, prompt_logprobs=None)  # a prompt that is scored is computed whole
Answered = tuple[list[int], list[float], int]


def in_turn(engine: Engine, prompts: Sequence[list[int]]) -> list[Answered]:
    """Of each prompt, asked after the one before it is over: the answer, its log-probabilities, and how many tokens of
    the prompt were not computed."""
    found = []
    for prompt in prompts:
        engine.submit(prompt, ALONE)
        events = [event for _ in iter(lambda: engine.idle, True) for event in engine.step()]
        made, (over,) = ([e for e in events if isinstance(e, kind)] for kind in (NewToken, Finished))
        found.append(([e.token for e in made], [e.score.logprob for e in made], over.cached))
    return found


def check_whole(model: InferenceModel, prompts: Sequence[list[int]], found: Sequence[Answered]) -> None:
    """Answers are those of the model computed whole, 1e-10."""
    for prompt, (tokens, logprobs, _) in zip(prompts, found, strict=True):
        places = torch.log_softmax(whole_logits(model, prompt + tokens), -1)[len(prompt) - 1 : -1]
        assert tokens == places.argmax(-1).tolist() and len(tokens) == 5
        assert logprobs == pytest.approx(places.max(-1).values.tolist(), rel=0, abs=1e-10)


@pytest.mark.parametrize("page_size", [1, 7, 64])
@pytest.mark.parametrize("model", [m if m == "mamba2" else pytest.param(m, marks=pytest.mark.soak) for m in PREFIXED])
def test_a_prefix_goes_on_from_its_state(model, page_size):
    """Of three prompts that begin alike, the second leaves a state where they part, and the third one begins there;
    the same prompt once more begins after its last full page; so does what goes on from a text and its answer."""
    common = sequences_of((70,), 131)[0]
    prompts = [common + [n, *range(n)] for n in (9, 30, 21)]
    prompts += [prompts[0], common[:50] + [3] * 40]
    engine = Engine(random_model(0, 1, run_of(model)), replace(KEPT, page_size=page_size))
    found = in_turn(engine, prompts)
    prompts.append(prompts[2] + found[2][0] + [8] * 9)
    found += in_turn(engine, prompts[-1:])

    def whole(tokens: int) -> int:
        return tokens // page_size * page_size

    last = whole(len(prompts[0]) - 1)
    shared = [0, last if last == whole(70) else 0, whole(70), last, 0, whole(len(prompts[2]) - 1)]
    assert [cached for *_, cached in found] == shared
    engine.scheduler.states.pool.check()
    check_whole(random_model(0, 1, run_of(model)), prompts, found)


@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_states_of_prefixes_beside_others(late):
    """Prompts that begin alike come two at a time to three rows, with fewer states than prompts, and some lose their
    pages: the answers are those without."""
    common = sequences_of((24,), 131)[0]
    prompts = [common[: 24 - n % 3 * 5] + row for n, row in enumerate(sequences_of((5, 9, 3, 11, 2, 7, 4, 1), 131))]
    options = replace(KEPT, sequences=3, prefix_states=2, page_size=4, tokens=16, late=late)
    model = random_model(0, 1, run_of("nemotron_h"))
    layers, states = remembering(model.blocks), state_bytes(keeping(model.blocks), torch.float64)
    page = sum(group.page_bytes for group in layer_groups(layers, kept_by(model.plan), torch.float64, 4))
    engine = Engine(model, replace(options, length=40, memory_gib=(6 * states + 16 * page) / 2**30))
    made = answers_of(engine, [(p, ALONE) for p in prompts], 2)
    found = [(tokens, [s.logprob for s in scores], 0) for tokens, scores, *_ in made]
    engine.scheduler.states.pool.check()
    assert engine.scheduler.states.pool.available == 2
    check_whole(random_model(0, 1, run_of("nemotron_h")), prompts, found)


LAYOUTS = {"tp2 cp2": {"tp": 2, "cp": 2}, "pp2": {"pp": 2}}


@pytest.mark.parametrize(
    "model, layout",
    [("qwen3_next", "tp2 cp2"), *(pytest.param(m, "pp2", marks=pytest.mark.soak) for m in ("mamba2", "kimi_linear"))],
)
def test_states_of_prefixes_on_layouts(ranks, model, layout):
    common = sequences_of((24,), 131)[0]
    prompts = [common + row for row in sequences_of((5, 9, 3, 11, 2), 131)]
    split = LAYOUTS[layout]
    found = ranks.run(
        "tests.harness.generation:answers",
        math.prod(split.values()),
        run_of(model, **split),
        [(p, ALONE) for p in prompts],
        replace(KEPT, page_size=2),
        1,
    )[0]
    short = [(tokens, [s.logprob for s in scores], 0) for tokens, scores, *_ in found]
    check_whole(random_model(0, 1, run_of(model)), prompts, short)


def test_the_state_of_one_adapter_or_image_is_not_anothers():
    """What stands before the keys of pages stands before those of states; see test_pages and test_streams."""
    keys = [page_key(first_key(name), bytes(8)) for name in (None, "a", "b")]
    states = PrefixStates(2)
    assert states.leave([keys[0], keys[0], keys[1], keys[2]]) == {keys[0]: 1, keys[1]: 2}  # two slots
    assert not states.has(keys[2]) and states.use(keys[0]) == 1
    assert states.leave([keys[2]]) == {keys[2]: 2} and not states.has(keys[1])  # the one in use stays
    assert states.has(keys[0]) and states.leave([keys[0]]) == {}
    states.pool.release(1)
    states.pool.check()
    with pytest.raises(ValueError, match="no state"):
        states.use(keys[1])
