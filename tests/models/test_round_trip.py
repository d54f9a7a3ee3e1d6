"""From transformers and back: a model of theirs imported, run in a layout, saved and exported computes what it did,
at every stop.

Everything in float64, so logits and the gradient of every tensor are those of transformers' own model to 1e-10 of
their scale.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file

from phalanx.checkpoint.convert import export, import_weights
from phalanx.checkpoint.hf import model_config_from_hf, to_hf
from phalanx.checkpoint.keep import latest
from phalanx.checkpoint.load import load_weights
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run, TrainConfig
from phalanx.engine.build import build
from phalanx.engine.step import accumulate
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.models.decoder_config import DecoderConfig
from phalanx.planning.blocks import exported_shapes
from phalanx.sequence.batch import IGNORE
from tests.harness.checkpoints import save_here
from tests.harness.parity import SEQ, assemble, parts_of
from tests.models import test_models, test_moe_models
from tests.models.test_models import all_logits

BATCHES = test_models.BATCHES  # the same in both
CONSTANTS = ("e_score_correction_bias", "layer_scalar")
TRIPS = [
    ("llama: GQA, wide heads, llama3 scaling", dict(tp=2)),
    ("llama: tied", dict(pp=2)),
    ("qwen3: tied, MQA", dict(tp=2)),
    ("olmo2", dict(tp=2)),
    ("gemma2", dict(tp=2)),
    ("phi3: fused, window, part of heads rotated, longrope", dict(tp=2)),
    ("olmo3: window in three layers of four, yarn in the fourth", dict(pp=2)),
    ("gemma3_text: five windows of six, linear scaling in the sixth", dict(tp=2)),
    ("gemma4_text: inputs of layers, shared keys, wide MLP", dict(pp=2)),
    ("gemma4_text: experts, one key head, shared keys of its own kind alone", dict(tp=2)),
    ("mistral: window, yarn", dict(pp=2)),
    ("qwen2: window in upper layers", dict(tp=2)),
    ("deepseek_v3: latents, yarn", dict(tp=2)),
    ("smollm3: window where nothing is rotated", dict(tp=2)),
    ("gpt_neox: half of each head rotated", dict(tp=2)),
    ("mamba2: limited steps", dict(tp=2)),
    ("nemotron_h", dict(tp=2)),
    ("falcon_h1: norm first, one group, biases, tied, MQA", dict(tp=2)),
    ("gpt2", dict(tp=2)),
    ("mixtral", dict(ep=2)),
    ("mixtral", dict(tp=2, etp=2)),
    ("qwen3_moe: some layers dense", dict(ep=2)),
    ("qwen3_moe: renormalised", dict(pp=2)),
    ("nemotron_h with experts: latents, biases, one group", dict(ep=2)),
    ("deepseek_v3", dict(ep=2)),
    ("deepseek_v3", dict(pp=2)),
    ("glm4_moe", dict(ep=2)),
    ("minimax_m2", dict(tp=2)),
    ("llama4_text", dict(ep=2)),
    ("qwen3_next", dict(tp=2)),
    ("qwen3_5_text", dict(tp=2)),
    ("qwen3_5_moe_text", dict(ep=2)),
    ("kimi_linear", dict(tp=2)),
    ("olmo_hybrid", dict(tp=2)),
    ("gpt_oss", dict(ep=2)),
    ("gpt_oss", dict(tp=2)),
]


def run_and_save(rank: int, world: int, run: Run, folder: Path, root: Path) -> dict:
    mesh = Mesh(make_plan(run, world).grid, rank)
    state = build(make_plan(run, world), mesh)
    load_weights(folder, state.buffers, mesh)
    state.model.train()
    mine = BATCHES[mesh.dp.index :: mesh.dp.size]
    accumulate(state, mine)
    grads = parts_of(state, "grad")
    save_here(state, root)
    return {"grads": grads, "logits": all_logits(state, mine), "dp": mesh.dp.index}


def theirs(folder: Path, config) -> dict:
    """Logits and gradients of transformers' model of a folder, by its own names."""
    from transformers import AutoModelForCausalLM

    wide = isinstance(config, test_models.WIDE)
    options = {"attn_implementation": "eager" if wide else "sdpa"}
    experts = config.routed_experts
    if experts:
        options["experts_implementation"] = "eager"
    if config.family == "gpt_oss":  # whose sinks transformers has in no other kernel
        options["attn_implementation"] = "eager"
    tokens, labels = (torch.cat([getattr(b, n) for b in BATCHES]) for n in ("tokens", "labels"))
    with test_models.wide_modules(config):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options).eval()
        if isinstance(config, DecoderConfig) and not wide:
            (test_moe_models if experts else test_models).widen(model, config)
        logits = model(tokens.view(-1, SEQ)).logits.flatten(0, 1)
    (F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum") / (labels != IGNORE).sum()).backward()
    if not experts:
        named = test_models.by_file_names(model, config)
        return {"grads": {k: p.grad.numpy() for k, p in named.items()}, "logits": logits.detach().numpy()}
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad)
    grads = {k: v for k, v in test_moe_models.saved(model).items() if not k.endswith(CONSTANTS)}
    return {"grads": grads, "logits": logits.detach().numpy()}


def same(found: dict[str, np.ndarray], truth: dict[str, np.ndarray]) -> None:
    assert found.keys() == truth.keys()
    largest = max(np.abs(g).max() for g in truth.values())
    for name, right in truth.items():
        assert np.abs(found[name] - right).max() <= 1e-10 * max(np.abs(right).max(), 1e-6 * largest), name


@pytest.mark.parametrize(
    "case, layout",
    [pytest.param(*trip, marks=pytest.mark.soak if number % 3 == 2 else ()) for number, trip in enumerate(TRIPS)],
    ids=str,
)
def test_there_and_back(ranks, tmp_path, case, layout):
    module = test_moe_models if case in test_moe_models.CASES else test_models
    truth, config = module.hugging_face(case), module.CASES[case]
    (tmp_path / "theirs").mkdir()
    save_file(
        {f"module.{n}": np.ascontiguousarray(t) for n, t in truth["weights"].items()},
        tmp_path / "theirs/part.safetensors",
    )
    (tmp_path / "theirs/config.json").write_text(json.dumps(to_hf(config, torch.float64)))
    wanted = exported_shapes(model_config_from_hf(tmp_path / "theirs"))
    imported = import_weights(tmp_path / "theirs", tmp_path / "imported", tmp_path / "theirs", wanted, "module.")
    train = TrainConfig(steps=1, global_batch=4, micro_batch=2, seq_length=SEQ, precision="fp64")
    run = Run(model=config, train=train, layout=LayoutConfig(**layout))
    results = ranks.run("tests.models.test_round_trip:run_and_save", 2, run, imported, tmp_path / "run")
    dp = 1 + max(r["dp"] for r in results)
    expected = truth["logits"].reshape(len(BATCHES), -1, truth["logits"].shape[-1])
    for r in (r for r in results if r["logits"]):
        for found, right in zip(r["logits"], expected[r["dp"] :: dp], strict=True):
            assert np.abs(found - right).max() <= 1e-10 * np.abs(right).max()
    same(assemble([r["grads"] for r in results]), truth["grads"])
    back = theirs(export(latest(tmp_path / "run"), tmp_path / "exported", "fp64"), config)
    assert np.abs(back["logits"] - truth["logits"]).max() <= 1e-10 * np.abs(truth["logits"]).max()
    same(back["grads"], truth["grads"])
