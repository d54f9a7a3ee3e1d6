"""Twenty steps of each family against transformers with torch.optim.AdamW: which tensors have weight decay,
clipping, learning rates.

Float64 on both sides. Gradients are clipped in every step, the learning rate warms up and falls along a cosine, the
output projection of attention has a learning rate of its own (optim.lr_scale). Which tensors decay is decided here
by their names, not by what our parameters say.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from phalanx.checkpoint.hf import to_hf
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.engine.build import build
from phalanx.engine.step import accumulate, update
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.layout.param import Piece
from phalanx.optim import sharded
from phalanx.optim.adamw import AdamWConfig
from phalanx.optim.config import OptimConfig
from phalanx.optim.schedules import learning_rate
from phalanx.sequence.batch import IGNORE, Batch
from tests.harness import hf_fuzz
from tests.harness.parity import SEQ, assemble, base_run, batch_of, parts_of, step_batches, task_of
from tests.models import test_encoders, test_gemma3, test_llava, test_models, test_moe_models, test_t5, test_whisper

STEPS, BATCH = 20, 4
FEW = 2  # steps after which wrong decay has long been seen: it is 3 % of the rate, and 1e-9 is asked for
OPTIM = AdamWConfig(
    lr=1e-2,
    beta1=0.9,
    beta2=0.95,
    eps=1e-6,
    weight_decay=0.3,
    clip_grad=0.5,
    schedule="cosine",
    warmup_steps=5,
    lr_scale={"*o_proj*": 0.25, "*attn.c_proj*": 0.25, "*Attention.o.*": 0.25},
)
MODELS = {
    "llama": test_models.CASES["llama: GQA, wide heads, llama3 scaling"],
    "mistral": test_models.CASES["mistral: window, yarn"],
    "qwen2": test_models.CASES["qwen2: window in upper layers"],
    "qwen3": test_models.CASES["qwen3"],
    "olmo2": test_models.CASES["olmo2"],
    "olmo3": test_models.CASES["olmo3: window in three layers of four, yarn in the fourth"],
    "phi3": test_models.CASES["phi3: fused, window, part of heads rotated, longrope"],
    "gemma2": test_models.CASES["gemma2"],
    "gemma3_text": test_models.CASES["gemma3_text: five windows of six, linear scaling in the sixth"],
    "gemma4_text": test_models.CASES["gemma4_text: inputs of layers, shared keys, wide MLP"],
    "gemma4_text, experts": test_models.CASES["gemma4_text: experts, one key head, shared keys of its own kind alone"],
    "smollm3": test_models.CASES["smollm3: window where nothing is rotated"],
    "gpt_neox": test_models.CASES["gpt_neox: half of each head rotated"],
    "mamba2": test_models.CASES["mamba2: limited steps"],
    "nemotron_h": test_models.CASES["nemotron_h"],
    "nemotron_h, experts": replace(test_moe_models.CASES["nemotron_h with experts"], router_bias_update_rate=0.0),
    "falcon_h1": test_models.CASES["falcon_h1: norm first, one group, biases, tied, MQA"],
    "gpt2": replace(test_models.CASES["gpt2"], num_hidden_layers=3),
    "mixtral": test_moe_models.CASES["mixtral"],
    "qwen3_moe": test_moe_models.CASES["qwen3_moe: some layers dense"],
    "gpt_oss": test_moe_models.CASES["gpt_oss"],
    "llama4_text": test_moe_models.CASES["llama4_text"],
    "minimax_m2": replace(test_moe_models.CASES["minimax_m2"], router_bias_update_rate=0.0),
    "glm4_moe": replace(test_moe_models.CASES["glm4_moe"], router_bias_update_rate=0.0),
    "deepseek_v3": replace(test_moe_models.CASES["deepseek_v3"], router_bias_update_rate=0.0),
    "bert": test_encoders.CASES["bert"],
    "modernbert": test_encoders.CASES["modernbert: biases, tanh, types"],
    "t5": test_t5.CASES["1.1: gated, untied, a deeper decoder"],
    "t5, tied": test_t5.CASES["tied without scale"],
    "whisper": test_whisper.CASES[test_whisper.FIRST],
    "gemma3": test_gemma3.CASES[test_gemma3.FIRST],
}
DENSE = {"tp2": dict(tp=2), "pp2": dict(pp=2), "dp2, sharding 3": dict(sharding=3, bucket_mb=0), "cp2": dict(cp=2)}
EXPERTS = {
    "tp2, etp2": dict(tp=2, etp=2),
    "pp2": dict(pp=2),
    "dp2, sharding 3": dict(sharding=3, bucket_mb=0),
    "ep2": dict(ep=2),
}
CASES = [(family, layout) for family in MODELS for layout in (EXPERTS if MODELS[family].routed_experts else DENSE)]
OFTEN = [
    ("gpt2", "tp2"),
    ("gpt_oss", "ep2"),
    ("deepseek_v3", "pp2"),
    ("qwen3", "dp2, sharding 3"),
]  # in each run of the tests


# As others of their kind: in the soak alone.
SELDOM = (
    "qwen2",
    "mistral",
    "smollm3",
    "olmo2",
    "glm4_moe",
    "qwen3_moe",
    "modernbert",
    "t5, tied",
    "gemma4_text",
    "gemma4_text, experts",
    "gemma3",
    "mamba2",
    "nemotron_h",
    "falcon_h1",
)


def decays(name: str) -> bool:
    """Matrices decay: linears, embeddings, routers. Norms, biases (T5's of distances, too), attention's sinks, a
    router's scales and a scan's rates and skips do not, however many dims they are stored with."""
    return not (
        name.endswith(("bias", "bias.weight", "sinks", "scale", ".A_log", ".D"))
        or "norm" in name.lower()
        or ".ln_" in name
    )


@dataclass(frozen=True)
class Truth:
    """Of transformers: tensors by the names of its files, before and after; losses, and norms before clipping."""

    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    losses: list[float]
    norms: list[float]


@lru_cache
def truth(family: str, steps: int = STEPS) -> Truth:
    config = MODELS[family]
    with wide_for(config):
        return theirs(family, config, steps)


def wide_for(config: Any) -> AbstractContextManager[None]:
    """In which transformers' model of a config computes in float64."""
    return hf_fuzz.wide() if config.both_ways or config.reads_units else test_models.wide_modules(config)


def theirs(family: str, config: Any, steps: int) -> Truth:
    """The same after so many of the steps, where transformers computes in float64 what it would in float32."""
    import transformers

    model = random_model(config)
    run = run_of(family, {})
    before = saved(model, config)
    groups: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
    for name, p in model.named_parameters():
        scale = next((s for glob, s in OPTIM.lr_scale.items() if fnmatchcase(name, glob)), 1.0)
        groups.setdefault((OPTIM.weight_decay if decays(name) else 0.0, scale), []).append(p)
    optimizer = torch.optim.AdamW(
        [
            {"params": members, "weight_decay": decay, "lr": OPTIM.lr * scale}
            for (decay, scale), members in groups.items()
        ],
        betas=(OPTIM.beta1, OPTIM.beta2),
        eps=OPTIM.eps,
    )
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, OPTIM.warmup_steps, STEPS)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(loss_of(model, run, step))
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_grad).item())
        advance(schedule)  # its first rate is 0, ours that of the first step
        optimizer.step()
    return Truth(before, saved(model, config), losses, norms)


def saved(model: torch.nn.Module, config: Any) -> dict[str, np.ndarray]:
    """Tensors by the names of the files."""
    if not config.reads_units:
        return test_moe_models.saved(model)
    return {name: p.detach().numpy().copy() for name, p in test_llava.saved_names(model).items()}


def random_model(config: Any) -> torch.nn.Module:
    """Of transformers, in float64 throughout, with random numbers in every tensor: ones and zeros would hide decay."""
    import transformers

    if config.both_ways:
        return test_encoders.theirs(config)
    if config.numbers_beside:
        return test_whisper.transformers_model(config)
    if config.reads_units:
        model = test_gemma3.transformers_model(config)
        model.get_input_embeddings().padding_idx = None  # the token of that number is one of a text here
        return model
    if config.reads_beside:
        return calm(test_t5.transformers_model(next(name for name, case in test_t5.CASES.items() if case == config)))
    torch.manual_seed(0)
    if config.routed_experts:
        model = test_moe_models.hf_model(config).double().eval()
    else:
        name = to_hf(config, torch.float64)["architectures"][0]
        model = getattr(transformers, name)(test_models.hf_config(config)).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.0, 0.3).add_(1.0 if p.dim() == 1 and not getattr(config, "offset_norms", False) else 0.0)
        for name, b in model.named_buffers():
            if name.endswith("layer_scalar"):
                b.normal_(1.0, 0.3)
    if config.family != "gpt2" and not isinstance(config, test_models.WIDE):
        (test_moe_models if config.routed_experts else test_models).widen(model, config)
    return model


def calm(model: torch.nn.Module) -> torch.nn.Module:
    """T5 does not scale its scores: large ones, and twenty steps would multiply a rounding a million times."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith((".q.weight", ".k.weight")):
                p.mul_(0.3)
    return model


def loss_of(model: torch.nn.Module, run: Run, step: int) -> float:
    """The mean loss of a step's tokens; its gradients are added."""
    ids = list(range(step * BATCH, (step + 1) * BATCH))
    batch = batch_of(run, ids, documents_of(run.model))
    logits = logits_of(model, run.model, batch, ids)
    loss = F.cross_entropy(logits, batch.labels, ignore_index=IGNORE, reduction="sum") / (batch.labels != IGNORE).sum()
    loss.backward()
    return loss.item()


def documents_of(config: Any) -> bool | str:
    """Recordings have texts of their own."""
    return "packed" if config.numbers_beside else False


def logits_of(model: torch.nn.Module, config: Any, batch: Batch, ids: list[int]) -> torch.Tensor:
    """(tokens, vocabulary): of transformers, each recording's text and each sample with images alone."""
    if config.numbers_beside:
        found = torch.empty(batch.num_tokens, config.vocab_size, dtype=torch.float64)
        for document in batch.documents.unique().tolist():
            here, frames = batch.documents == document, test_whisper.frames_of(batch, document, config)
            found[here] = model(input_features=frames, decoder_input_ids=batch.tokens[here][None]).logits[0]
        return found
    rows = batch.tokens.view(-1, SEQ)
    if config.reads_units:
        images = test_llava.pixels_in(batch, config, ids)
        types = (rows == config.image_token_id).long()
        pixels = [{"pixel_values": each} if len(each) else {} for each in images]
        made = [model(input_ids=rows[i : i + 1], token_type_ids=types[i : i + 1], **pixels[i]) for i in range(len(ids))]
        return torch.cat([each.logits[0] for each in made])
    texts = {"input_ids": rows}
    for beside in batch.beside.values():  # an encoder's text, and the model's own
        texts = {"input_ids": beside.tokens.view(BATCH, -1), "decoder_input_ids": rows}
    return model(**texts).logits.flatten(0, 1)


def advance(schedule: Any) -> None:
    with warnings.catch_warnings():  # torch wants the optimizer to step first
        warnings.simplefilter("ignore")
        schedule.step()


def run_of(family: str, layout: dict[str, Any]) -> Run:
    model = MODELS[family]
    base = base_run(model.family if model.needs_room else "llama", global_batch=BATCH, steps=STEPS)
    return replace(base, model=model, optim=OPTIM, layout=LayoutConfig(**layout), task=task_of(model))


def run_steps(rank: int, world: int, run: Run, weights: dict[str, np.ndarray], steps: int = STEPS) -> dict:
    """Twenty steps, or the first of them, as the loop takes them."""
    mesh = Mesh(make_plan(run, world).grid, rank)
    state = build(make_plan(run, world), mesh)
    test_models.load_weights(state, weights)
    state.model.train()
    losses, norms = [], []
    for step in range(steps):
        tokens = accumulate(state, step_batches(run, mesh, step, documents_of(run.model)))
        result = update(state, tokens, learning_rate(run.optim, step + 1, STEPS))
        losses.append(result.loss.item())
        norms.append(result.grad_norm.item())
    state.buffers.ready()
    return {"losses": losses, "norms": norms, "weights": parts_of(state, "master")}


def steps_of(family: str) -> int:
    """The experts of Gemma 4 read an unscaled residual stream: random ones multiply a rounding by ten in each step."""
    return 5 if family == "gemma4_text, experts" else STEPS


def assert_equal(family: str, results: list[dict]) -> None:
    right = truth(family, steps_of(family))
    assert min(right.norms) > OPTIM.clip_grad, "clipping was not active in every step"
    for result in results:
        np.testing.assert_allclose(result["losses"], right.losses, rtol=1e-9, err_msg="losses")
        np.testing.assert_allclose(result["norms"], right.norms, rtol=1e-8, err_msg="norms")
    assert wrong(family, results, steps_of(family)) == []


def wrong(family: str, results: list[dict], steps: int = STEPS) -> list[str]:
    """Names of the tensors that are not those of transformers after so many steps."""
    right = truth(family, steps)
    weights = assemble([r["weights"] for r in results])
    assert weights.keys() == right.after.keys()
    return [
        name
        for name, expected in right.after.items()
        if np.abs(weights[name] - expected).max() > 1e-9 * max(1.0, np.abs(expected).max())
    ]


@pytest.mark.trust(
    9,
    "weight decay on every norm",
    "twenty steps of each family must equal those of transformers with torch.optim.AdamW",
)
@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.soak if f in SELDOM else []) for f in MODELS])
def test_twenty_steps_equal_transformers(family):
    steps = steps_of(family)
    assert_equal(family, [run_steps(0, 1, run_of(family, {}), truth(family, steps).before, steps)])


@pytest.mark.parametrize(
    "family, layout", [pytest.param(*case, marks=[] if case in OFTEN else pytest.mark.soak) for case in CASES]
)
def test_twenty_steps_on_layouts(ranks, family, layout):
    options = (EXPERTS if MODELS[family].routed_experts else DENSE)[layout]
    steps = steps_of(family)
    arguments = run_of(family, options), truth(family, steps).before, steps
    assert_equal(family, ranks.run("tests.models.test_twenty_steps:run_steps", 2, *arguments))


def with_decay(family: str, changes: Callable[[Piece], bool]) -> list[str]:
    """What is wrong when the tensors that `changes` is true of decay if they should not, and do not if they should."""
    real = sharded.group_of

    def group_of(piece: Piece, config: OptimConfig) -> tuple[float, float]:
        return real(replace(piece, decay=piece.decay != changes(piece)), config)

    with mock.patch.object(sharded, "group_of", group_of):
        return wrong(family, [run_steps(0, 1, run_of(family, {}), truth(family, FEW).before, FEW)], FEW)


def kinds_of(family: str) -> list[str]:
    """Names with a star for the numbers of layers and experts; a rate of 0 keeps the bias of choice where it is, and
    factors of layers and sines of positions are not trained."""
    constants = ("e_score_correction_bias", "layer_scalar", "encoder.embed_positions.weight")
    names = (re.sub(r"\.\d+\.", ".*.", name) for name in truth(family, FEW).before)
    return [kind for kind in dict.fromkeys(names) if not kind.endswith(constants)]


def test_decay_of_all_norms_is_found():
    assert with_decay("qwen3", lambda piece: "norm" in piece.name)


@pytest.mark.soak
@pytest.mark.parametrize("family", MODELS)
def test_decay_of_any_kind_of_tensor_is_found(family):
    """One kind at a time has decay that should have none, or none that should have it."""
    assert with_decay(family, lambda piece: False) == []
    for kind in kinds_of(family):
        assert with_decay(family, lambda piece, kind=kind: fnmatchcase(piece.name, kind)), (
            f"the decay of {kind} makes no difference"
        )
