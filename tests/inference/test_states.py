"""Generation with layers that keep a state of each sequence instead of pages: pieces of any size, constant memory, rows
used again, and what such layers cannot do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.base.errors import ConfigError
from phalanx.inference.drafter import NgramSpec
from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.memory import MemoryLimits, keeping, row_bytes, state_bytes
from phalanx.inference.request import SamplingOptions
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
    ],
    ids=["drafts", "fp8 pages", "too many sequences"],
)
def test_what_states_cannot_do_is_refused(options, text):
    with pytest.raises(ConfigError, match=text) as error:
        Engine(random_model(0, 1, run_of("mamba2")), options)
    for value in error.value.problems[0].valid:  # a value that works
        if isinstance(value, int):
            Engine(random_model(0, 1, run_of("mamba2")), replace(options, sequences=value))


def test_sampled_text_is_the_same_in_any_company():
    prompts = sequences_of(LENGTHS, 131)
    how = SamplingOptions(tokens=6, temperature=1.0, seed=3)
    alone = [answers(0, 1, run_of("mamba2"), [(p, how)], SMALL)[0][0] for p in prompts]
    assert [a[0] for a in answers(0, 1, run_of("mamba2"), [(p, how) for p in prompts], SMALL, arrive=4)] == alone
