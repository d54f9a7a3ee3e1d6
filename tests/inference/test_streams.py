"""Generation of models that read more than a text, against transformers' `generate` in float64 on the same weights:
encoder-decoders, and texts with images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.engine.build import build_for_inference
from phalanx.forecast.decide import make_plan
from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.load import InferenceModel, run_of_model, without_data, without_training
from phalanx.inference.request import SamplingOptions
from phalanx.layout.config import LayoutConfig
from tests.harness.generation import answers_of, sequences_of
from tests.models import test_t5
from tests.models.test_models import load_weights

MADE = 6
GREEDY = SamplingOptions(tokens=MADE, temperature=0, logprobs=0)
ROOM = EngineOptions(sequences=3, tokens=16, page_size=4, memory_gib=0.001)
LAYOUTS = {"one rank": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}


def run_of(model, layout: dict[str, int]) -> Run:
    run = without_data(run_of_model(model, None, gpu=False))
    return replace(run, layout=LayoutConfig(**layout), train=replace(run.train, precision="fp64"))


def answers_from(
    rank: int, world: int, run: Run, weights: dict[str, np.ndarray], prompts: Sequence, options: EngineOptions
) -> list[tuple[list[int], list[float]]]:
    """The engine's tokens and their log-probabilities, on these weights."""
    plan = make_plan(without_training(run, world), world)
    mesh = Mesh(plan.grid, rank)
    buffers, stages = build_for_inference(plan, mesh)
    load_weights(SimpleNamespace(buffers=buffers), weights)
    model = InferenceModel(plan, mesh, stages, stages.handlers())
    engine = Engine(model, options, wait_s=60)
    if rank:
        engine.follow()
        return []
    found = answers_of(engine, [(prompt, GREEDY) for prompt in prompts], arrive=2)
    engine.pause()
    return [(tokens, [score.logprob for score in scores]) for tokens, scores, _, _ in found]


def check_answer(found: tuple[list[int], list[float]], made, begins: int) -> None:
    """begins: tokens before the answer in what transformers returns."""
    tokens, logprobs = found
    assert made.sequences[0, begins:].tolist() == tokens
    wanted = torch.log_softmax(torch.stack(made.logits)[:, 0].double(), -1).gather(1, torch.tensor(tokens)[:, None])
    np.testing.assert_allclose(logprobs, wanted[:, 0], rtol=1e-5, atol=1e-5)  # logits are given in float32


HOW = {
    "max_new_tokens": MADE,
    "do_sample": False,
    "output_logits": True,
    "return_dict_in_generate": True,
    "eos_token_id": None,
    "pad_token_id": 0,
}
TEXTS = (5, 23, 1, 9, 14)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", list(test_t5.CASES)[:2])
def test_an_encoder_decoder_answers_as_transformers_does(ranks, case, layout):
    """More texts than rows, of unequal lengths, longer than pages and steps."""
    hf = test_t5.transformers_model(case)
    run = run_of(test_t5.CASES[case], LAYOUTS[layout])
    weights = {name: p.detach().numpy() for name, p in hf.named_parameters()}
    texts = sequences_of(TEXTS, run.model.vocab_size)
    world = max(1, *LAYOUTS[layout].values()) if LAYOUTS[layout] else 1
    found = ranks.run("tests.inference.test_streams:answers_from", world, run, weights, texts, ROOM)
    for text, answer in zip(texts, found[0], strict=True):
        asked = torch.tensor([text])
        # its cache has room for as many layers of the decoder as the encoder has
        made = hf.generate(asked, attention_mask=torch.ones_like(asked), use_cache=False, **HOW)
        check_answer(answer, made, 1)
