"""Kimi K2.5's text model against the whole model of transformers, vision tower and all, on tokens without images."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.convert import export
from phalanx.checkpoint.hf import from_hf, read_folder, to_hf
from phalanx.checkpoint.keep import latest
from phalanx.config.run import Run, TrainConfig
from phalanx.layout.config import LayoutConfig
from phalanx.models.kimi_k25 import FAMILY, KimiK25Config
from phalanx.models.rope import RopeScaling
from phalanx.sequence.batch import IGNORE
from tests.harness.parity import MODELS, SEQ, assemble
from tests.models import test_moe_models
from tests.models.test_round_trip import BATCHES

CONFIG = replace(MODELS["kimi_k25"], router_aux_loss_coef=0.0, router_bias_update_rate=0.001)
VISION = dict(
    patch_size=2,
    pos_emb_height=4,
    pos_emb_width=4,
    pos_emb_time=2,
    num_attention_heads=2,
    num_hidden_layers=1,
    hidden_size=16,
    intermediate_size=16,
)


def their_config(config: KimiK25Config) -> dict[str, Any]:
    """config.json of the whole model."""
    return {**to_hf(config, torch.float64), "vision_config": VISION, "projection_hidden_size": 16}


def by_published_names(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """transformers saves layers of the text model as blocks, which the published folder has in its vision tower."""
    return {FAMILY.tensors.today(name): t for name, t in test_moe_models.saved(model).items()}


def text_of(model: torch.nn.Module) -> torch.nn.Module:
    return model.model.language_model


def their_model(config: KimiK25Config) -> torch.nn.Module:
    import transformers

    options = dict(attn_implementation="sdpa", experts_implementation="eager")
    made = transformers.Kimi_K25Config(**their_config(config))
    return transformers.Kimi_K25ForConditionalGeneration._from_config(made, **options).double().eval()


def logits_and_grads(model: torch.nn.Module) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """On BATCHES; gradients under the names of files, of the text model alone."""
    tokens, labels = (torch.cat([getattr(b, n) for b in BATCHES]) for n in ("tokens", "labels"))
    logits = model(input_ids=tokens.view(-1, SEQ)).logits.flatten(0, 1)
    (F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum") / (labels != IGNORE).sum()).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    saved = by_published_names(model)
    grads = {
        k: v for k, v in saved.items() if k.startswith(FAMILY.tensors.prefix) and not k.endswith("correction_bias")
    }
    return logits.detach().numpy(), grads


@lru_cache
def truth() -> tuple[dict[str, np.ndarray], np.ndarray, dict[str, np.ndarray]]:
    """All weights under the names of files, logits, gradients."""
    torch.manual_seed(0)
    model = their_model(CONFIG)
    with torch.no_grad():
        for name, t in [*model.named_parameters(), *model.named_buffers()]:
            if t.is_floating_point() and ("rotary" not in name and "inv_freq" not in name):
                t.normal_(0.0, 0.3).add_(1.0 if t.dim() == 1 and "bias" not in name else 0.0)
    weights = by_published_names(model)
    test_moe_models.widen(text_of(model), CONFIG)
    return weights, *logits_and_grads(model)


def whole_folder(folder: Path) -> Path:
    """As published: text model and vision tower."""
    folder.mkdir()
    tensors = {name: torch.from_numpy(t.copy()) for name, t in truth()[0].items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(their_config(CONFIG)))
    return folder


@pytest.mark.parametrize(
    "layout",
    [dict(tp=2), dict(ep=2), pytest.param(dict(pp=2), marks=pytest.mark.soak)],
    ids=str,
)
def test_there_and_back(ranks, tmp_path, layout):
    """From a whole folder and back into it: logits and gradients of transformers to 1e-10, and no tensor of the whole
    model missing or left over."""
    import transformers

    weights, logits, grads = truth()
    theirs = whole_folder(tmp_path / "theirs")
    assert read_folder(theirs).model == CONFIG
    train = TrainConfig(steps=1, global_batch=4, micro_batch=2, seq_length=SEQ, precision="fp64")
    run = Run(model=CONFIG, train=train, layout=LayoutConfig(**layout))
    results = ranks.run("tests.models.test_round_trip:run_and_save", 2, run, theirs, tmp_path / "run")
    dp, expected = 1 + max(r["dp"] for r in results), logits.reshape(len(BATCHES), -1, logits.shape[-1])
    for r in (r for r in results if r["logits"]):
        for found, right in zip(r["logits"], expected[r["dp"] :: dp], strict=True):
            assert np.abs(found - right).max() <= 1e-10 * np.abs(right).max()
    ours = assemble([r["grads"] for r in results])
    assert ours.keys() == grads.keys()
    largest = max(np.abs(g).max() for g in grads.values())
    for name, right in grads.items():
        assert np.abs(ours[name] - right).max() <= 1e-10 * max(np.abs(right).max(), 1e-6 * largest), name

    out = export(latest(tmp_path / "run"), tmp_path / "out", "fp64")
    exported = load_file(out / "model.safetensors")
    assert exported.keys() == {n for n in weights if n.startswith(FAMILY.tensors.prefix)}
    assert all(np.array_equal(t.numpy(), weights[name]) for name, t in exported.items())
    tower = {n: t for n, t in load_file(theirs / "model.safetensors").items() if n not in exported}
    save_file({**tower, **exported}, out / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**their_config(CONFIG), **written}))
    loaded, info = transformers.AutoModelForImageTextToText.from_pretrained(
        out, dtype=torch.float64, output_loading_info=True, experts_implementation="eager"
    )
    assert not any(info.values()), info
    test_moe_models.widen(text_of(loaded), CONFIG)
    with torch.no_grad():
        tokens = torch.cat([b.tokens for b in BATCHES]).view(-1, SEQ)
        again = loaded(input_ids=tokens).logits.flatten(0, 1)
    assert np.abs(again.numpy() - logits).max() <= 1e-10 * np.abs(logits).max()


def test_what_the_file_says_of_the_text():
    """Tied or not is said beside text_config; Kimi K2's own name of the architecture; what cannot be read, by name."""
    written = their_config(replace(CONFIG, rope_scaling=RopeScaling(rope_type="linear", factor=2.0)))
    assert from_hf(written).rope_scaling.factor == 2.0
    text = written["text_config"]
    assert from_hf({**written, "text_config": {**text, "model_type": "kimi_k2"}}) == from_hf(written)
    assert from_hf({k: v for k, v in written.items() if k != "tie_word_embeddings"}).tie_word_embeddings
    for changed, said in (
        ({"text_config": None}, "text_config=None"),
        ({"text_config": {**text, "model_type": "llama"}}, "text_config: model_type='llama'"),
        ({"text_config": {**text, "topk_method": "greedy"}}, "topk_method='greedy'"),
        ({"text_config": {**text, "quantization_config": {"quant_method": "other"}}}, "quantization_config="),
    ):
        with pytest.raises(CheckpointError, match=said):
            from_hf({**written, **changed})
