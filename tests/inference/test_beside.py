"""Text from a model that trains: that of the same weights computed whole, in the layout that trains, and training
goes on as if there had been none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phalanx.config.run import Fp8Config, Run
from phalanx.inference.engine import EngineOptions
from phalanx.inference.request import SamplingOptions
from tests.harness.generation import Answer, sequences_of
from tests.harness.parity import base_run
from tests.inference.test_engine import GREEDY, check_against_whole

PROMPTS = sequences_of((5, 9, 3, 11, 2), 131)
ROOM = EngineOptions(sequences=2, tokens=8, page_size=4, memory_gib=0.001)
LAYOUTS = (
    pytest.param("gpt2", 2, {"sharding": 3}, marks=pytest.mark.soak),
    ("gpt_oss", 4, {"tp": 2, "pp": 2, "sharding": 1}),
    ("llama-tied", 2, {"pp": 2, "virtual_stages": 2}),
    ("qwen3_moe", 4, {"tp": 2, "ep": 2, "sharding": 3}),
    ("deepseek_v3-mtp", 2, {"ep": 2, "sharding": 2}),
    pytest.param("gpt_oss", 2, {"cp": 2}, marks=pytest.mark.soak),
)


def run_of(model: str, layout: dict[str, int], **train) -> Run:
    run = base_run(model, **train)
    return replace(run, layout=replace(run.layout, **layout))


def same_answers(found: list[Answer], wanted: list[Answer]) -> None:
    """The same tokens, and log-probabilities within 1e-8: the weights of a layout's steps differ by roundings."""
    for (tokens, scores, _, reason), (others, other_scores, _, why) in zip(found, wanted, strict=True):
        assert (tokens, reason) == (others, why)
        np.testing.assert_allclose([s.logprob for s in scores], [s.logprob for s in other_scores], rtol=0, atol=1e-8)


def same_training(found: list[dict], wanted: list[dict]) -> None:
    """The same bits."""
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine["numbers"] == theirs["numbers"]
        for (name, _, _, values), (other, _, _, expected) in zip(mine["weights"], theirs["weights"], strict=True):
            assert name == other
            np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("model, world, layout", LAYOUTS, ids=lambda value: str(value))
def test_text_in_the_layout_that_trains(ranks, model, world, layout):
    """Before the first step that of the model computed whole; after two steps that of one process; and training's
    bits are those without any text."""
    asked = [(prompt, GREEDY) for prompt in PROMPTS]
    train, run = "tests.harness.beside:train_and_answer", run_of(model, layout)
    with_text = ranks.run(train, world, run, asked, ROOM)
    first, _, last = with_text[0]["texts"]
    check_against_whole(model, PROMPTS, first)
    same_training(with_text, ranks.run(train, world, run, [], ROOM))
    (alone,) = ranks.run(train, 1, run_of(model, {}), asked, ROOM)
    same_answers(last, alone["texts"][-1])


def test_fp8_training_generates_in_train_precision(ranks):
    """A few tokens do not fill scaling blocks; scales and their histories are as if there had been no text."""
    fp8 = Fp8Config(recipe="delayed")
    run = run_of("llama", {"sharding": 3}, precision="bf16", fp8=fp8)
    asked = [(PROMPTS[0], SamplingOptions(tokens=3, temperature=0))]
    train = "tests.harness.beside:train_and_answer"
    with_text = ranks.run(train, 2, run, asked, ROOM)
    assert [len(text[0][0]) for text in with_text[0]["texts"]] == [3, 3, 3]
    same_training(with_text, ranks.run(train, 2, run, [], ROOM))


def test_an_encoder_decoder_answers_while_it_trains(ranks):
    """The same before the first step and after two in a pipeline as on one process, and training's bits are its own."""
    asked = [(prompt, replace(GREEDY, prompt_logprobs=None)) for prompt in PROMPTS]
    train, run = "tests.harness.beside:train_and_answer", run_of("t5-dropout", {"pp": 2, "sharding": 1})
    with_text = ranks.run(train, 2, run, asked, ROOM)
    (alone,) = ranks.run(train, 1, run_of("t5-dropout", {}), asked, ROOM)
    for mine, other in zip(with_text[0]["texts"], alone["texts"], strict=True):
        same_answers(mine, other)
    same_training(with_text, ranks.run(train, 2, run, [], ROOM))
