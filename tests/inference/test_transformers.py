"""transformers as the oracle: its `generate` and its forward, in float64 on the same weights, against the engine."""

from __future__ import annotations

import math
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
from phalanx.inference.load import InferenceModel, without_training
from phalanx.inference.memory import MemoryLimits, keeping, kept_by, layer_groups, remembering, state_bytes
from phalanx.inference.request import SamplingOptions
from tests.harness.generation import Answer, answers_of, run_of, sequences_of
from tests.harness.parity import MODELS
from tests.models.test_models import load_weights, wide_modules
from tests.models.test_moe_models import saved
from tests.models.test_twenty_steps import random_model

OTHERS = ("mixtral-full", "deepseek_v3-mtp", "deepseek_v3-mtp-tied", "glm4_moe-mtp", "qwen3_next-mtp", "kimi_k25")
FAMILIES = tuple(
    name
    for name, model in MODELS.items()
    if name not in OTHERS and not (model.reads_beside or model.needs_room or model.both_ways)
)
"""All that make text and that transformers has: it computes no multi-token prediction, experts accept all tokens, and
Kimi K2.5 is DeepSeek-V3 under other names (tests/models/test_kimi.py)."""

OFTEN = ("gpt_oss", "deepseek_v3", "qwen2")  # windows and sinks, latents, windows in some layers
ROOM = EngineOptions(
    sequences=3, tokens=8, page_size=4, memory_gib=0.001
)  # more sequences than rows; prompts in pieces
LAYOUTS = {"tp2": (2, {"tp": 2}), "pp2": (2, {"pp": 2}), "tp2 pp2": (4, {"tp": 2, "pp": 2}), "ep2": (2, {"ep": 2})}
LAYOUTS["cp2"] = (2, {"cp": 2})
MADE = 6
GREEDY = SamplingOptions(tokens=MADE, temperature=0, logprobs=2, prompt_logprobs=0)


def lengths_of(family: str) -> tuple[int, ...]:
    """GPT-2 has 16 positions; the others' prompts are longer than their windows, pages and steps. Phi-3's are all
    longer than the original context (LongRoPE): transformers chooses divisors by each sequence, the engine by its
    longest."""
    return {"gpt2": (5, 10, 3, 1), "phi3": (12, 33, 9, 21, 10)}.get(family, (5, 33, 3, 21, 1))


def answers_from(
    rank: int,
    world: int,
    run: Run,
    weights: dict[str, np.ndarray],
    prompts: Sequence[list[int]],
    options: EngineOptions,
) -> list[Answer]:
    """The engine's, on these weights."""
    plan = make_plan(without_training(run, world), world)
    mesh = Mesh(plan.grid, rank)
    buffers, stages = build_for_inference(plan, mesh)
    load_weights(SimpleNamespace(buffers=buffers), weights)
    engine = Engine(InferenceModel(plan, mesh, stages, stages.handlers()), options, wait_s=60)
    if rank:
        engine.follow()
        return []
    found = answers_of(engine, [(prompt, GREEDY) for prompt in prompts], arrive=2)
    engine.pause()
    return found


def check(hf: torch.nn.Module, prompts: Sequence[list[int]], found: Sequence[Answer]) -> None:
    """Ids of its `generate`, which goes on from a cache of its own; its log-probabilities, which it gives in float32;
    and those of its whole forward in float64, the prompt's too, to 1e-10."""
    # with a cache, transformers leaves time_step_limit out of the steps of a scan, which its whole forward has
    limits = getattr(hf.config, "time_step_limit", None) or (0.0, math.inf)
    for prompt, (tokens, scores, of_prompt, _) in zip(prompts, found, strict=True):
        asked = torch.tensor([prompt])
        made = hf.generate(
            asked,
            attention_mask=torch.ones_like(asked),  # else the padding token would be hidden where a prompt has it
            max_new_tokens=MADE,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=tuple(limits) == (0.0, math.inf),
        )
        assert made.sequences[0].tolist() == prompt + tokens
        cached = torch.log_softmax(torch.stack(made.logits)[:, 0].double(), -1).gather(1, torch.tensor(tokens)[:, None])
        logprobs = [score.logprob for score in scores]
        np.testing.assert_allclose(logprobs, cached[:, 0], rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            whole = torch.log_softmax(hf(torch.tensor([prompt + tokens])).logits[0], -1)
        wanted = whole[:-1].gather(1, torch.tensor([*prompt, *tokens][1:])[:, None])[:, 0]
        assert whole.dtype == torch.float64
        every = [score.logprob for score in of_prompt[1:]] + logprobs
        np.testing.assert_allclose(every, wanted, rtol=0, atol=1e-10)
        for score, place in zip(scores, whole[len(prompt) - 1 : -1], strict=True):
            best = place.topk(2)
            assert [token for token, _ in score.likeliest] == best.indices.tolist()
            np.testing.assert_allclose([p for _, p in score.likeliest], best.values, rtol=0, atol=1e-10)


def config_of(family: str) -> Run:
    run = run_of(family)
    dropout = {"dropout": 0.0, "attention_dropout": 0.0} if family == "gpt2" else {}
    return replace(run, model=replace(run.model, **dropout))


def compare(
    ranks,
    family: str,
    world: int,
    layout: dict[str, int],
    options: EngineOptions,
    lengths: tuple[int, ...] | None = None,
) -> None:
    run = config_of(family)
    with wide_modules(run.model):
        hf = random_model(run.model)
    prompts = sequences_of(lengths or lengths_of(family), run.model.vocab_size)
    run = replace(run, layout=replace(run.layout, **layout))
    weights = weights_of(hf)
    found = ranks.run("tests.inference.test_transformers:answers_from", world, run, weights, prompts, options)
    with wide_modules(run.model):
        check(hf, prompts, found[0])


def weights_of(hf: torch.nn.Module) -> dict[str, np.ndarray]:
    """Of files; OLMo Hybrid's hold its convolutions in three tensors, which have other names in memory."""
    if hf.config.model_type == "olmo_hybrid":
        return {name: tensor.numpy() for name, tensor in hf.state_dict().items()}
    return saved(hf)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.soak) for name in FAMILIES]
)
def test_greedy_text_is_that_of_transformers(ranks, family):
    compare(ranks, family, 1, {}, ROOM)


def test_longrope_takes_the_divisors_of_the_longest_sequence_that_was_asked_for(ranks):
    """Within the original context those of short sequences (above, in phi3, those of long ones)."""
    original = MODELS["phi3"].rope_scaling.original_max_position_embeddings
    compare(ranks, "phi3", 1, {}, replace(ROOM, length=original), lengths=(original - MADE, 1))


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_on_layouts_is_that_of_transformers(ranks, family, layout):
    if "ep" in LAYOUTS[layout][1] and not MODELS[family].routed_experts:
        pytest.skip("it has no experts")
    compare(ranks, family, *LAYOUTS[layout], ROOM)


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("late", [0, 1])
def test_greedy_text_of_sequences_that_lost_their_pages_is_that_of_transformers(ranks, family, late):
    """Room for little more than one of the longest."""
    run = config_of(family)
    longest = max(lengths_of(family)) + MADE
    compare(ranks, family, 1, {}, replace(ROOM, memory_gib=little_memory(run, longest) / 2**30, late=late))


def little_memory(run: Run, longest: int) -> int:
    """Bytes of the pages of one and a half sequences of this length, and of the states of all at once."""
    plan = make_plan(without_training(run, 1), 1)
    blocks = [block for segment in plan.blocks_of(Mesh(plan.grid, 0).at).values() for block in segment]
    layers, states = remembering(blocks), state_bytes(keeping(blocks), torch.float64)
    groups = layer_groups(layers, kept_by(plan), torch.float64, ROOM.page_size)
    limits = MemoryLimits(1, ROOM.tokens, longest, ROOM.page_size)
    pages = sum(limits.most_pages(group.window) * group.page_bytes for group in groups) * 3 // 2
    return pages + (ROOM.sequences + 1) * states
