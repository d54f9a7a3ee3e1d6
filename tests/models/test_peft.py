"""LoRA (with the masks of its dropout given) and DoRA against PEFT on the models of transformers, in float64: PEFT
reads our adapter folder, and from there on both train alike: losses, gradients, weights; what is saved then is what
PEFT has trained."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer

from phalanx.base.rng import keep_columns, key_of
from phalanx.checkpoint.adapters import PREFIX
from phalanx.checkpoint.base import reading
from phalanx.checkpoint.load import load_weights
from phalanx.checkpoint.save import Snapshot
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.engine.adapter_start import start_adapters
from phalanx.engine.build import State, build, init_weights
from phalanx.engine.step import accumulate, update
from phalanx.forecast.decide import make_plan
from phalanx.nn.adapter import find_adapter
from phalanx.optim.adamw import AdamWConfig
from phalanx.planning.adapters import peft_config
from phalanx.planning.blocks import exported_shapes
from tests.harness.checkpoints import save
from tests.harness.parity import assemble, parts_of, step_batches
from tests.models import test_twenty_steps
from tests.models.test_twenty_steps import BATCH, MODELS, documents_of, loss_of, random_model, wide_for

STEPS, LR = 4, 1e-2
OPTIM = AdamWConfig(lr=LR, beta1=0.9, beta2=0.95, eps=1e-6, weight_decay=0.3, clip_grad=0.0)
SMALL = {"rank": 3, "alpha": 5.0}
PATTERNS = {
    "rank_pattern": {"0.self_attn.q_proj": 2, r"layers\.\d\.mlp\.down_proj": 5},
    "alpha_pattern": {"v_proj": 3.0, "down_proj": 9.0},
}
SOME = {"targets": ["*.[qv]_proj.weight", "*.1.mlp.*"]}
DORA = {**SMALL, "method": "dora"}
ATTENTION = {"targets": ["*.self_attn.*"]}  # experts of transformers 5 are one tensor, which PEFT wraps otherwise
BESIDE_SCANS = [f"*.{name}_proj.weight" for name in ("in", "[qkvo]", "gate", "up", "down")]  # PEFT refuses out_proj
CASES = {
    "llama": ("llama", SMALL),
    "gpt2": ("gpt2", SMALL),  # matrices stored as (inputs, outputs), q, k and v as one
    "qwen2 rsLoRA": ("qwen2", {"rank": 4, "alpha": 8.0, "rank_stabilised": True, **SOME}),
    "llama patterns": ("llama", {**SMALL, **PATTERNS}),
    "llama dora": ("llama", {**DORA, **PATTERNS, "also": ["*embed_tokens*", "lm_head.weight"]}),
    "gpt2 dora": ("gpt2", {**DORA, "also": ["*.ln_f.*"]}),
    "qwen2 dora": ("qwen2", {**DORA, "rank_stabilised": True, **SOME}),  # with biases
    "llama embedding": ("llama", {**SMALL, "targets": ["*_proj.weight", "*embed_tokens*"]}),
    "qwen2 dropout": ("qwen2", {**SMALL, "dropout": 0.3, **SOME}),
    "gpt2 dropout": ("gpt2", {**SMALL, "dropout": 0.6}),
    "llama head": ("llama", {**SMALL, "targets": ["*_proj.weight", "lm_head.weight"], "dropout": 0.2}),
    "gpt_oss experts": ("gpt_oss", {**SMALL, "targets": ["*", "*.experts.*"], "rank_pattern": {"down_proj": 2}}),
    "nemotron_h": ("nemotron_h", {**SMALL, "targets": BESIDE_SCANS}),
    "falcon_h1 dora": ("falcon_h1", {**DORA, "targets": BESIDE_SCANS}),
    "mixtral dora": ("mixtral", {**DORA, **ATTENTION}),
    "deepseek_v3 dora": ("deepseek_v3", {**DORA, **ATTENTION}),
}
EVERY = {
    f"{family} {method}": (family, {**SMALL, "method": method, **(ATTENTION if MODELS[family].routed_experts else {})})
    for family in MODELS
    for method in ("lora", "dora")
}


def run_of(family: str, fields: dict) -> Run:
    lora = find_adapter(fields.get("method", "lora")).Config(**fields)
    base = test_twenty_steps.run_of(family, {})
    return replace(base, optim=OPTIM, lora=lora, train=replace(base.train, steps=STEPS))


def start(run: Run, model: torch.nn.Module) -> State:
    """With the weights of a model of transformers."""
    plan = make_plan(run, 1)
    state = build(plan, Mesh(plan.grid, 0))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        assert not load_weights(folder, state.buffers, state.mesh).adapters
        init_weights(state.model, lambda spec: not spec.exported)
        with reading(folder, exported_shapes(run.model)) as read:
            start_adapters(state.model, read)
    state.buffers.publish()
    state.model.train()
    return state


def save_to(state: State, root: Path, step: int) -> Path:
    run = state.plan.run
    snapshot = Snapshot(step, 0, run.model, adapters=peft_config(run), separate=True)
    return save(root, snapshot, state).path / "adapter"


def read_by_peft(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    return peft.PeftModel.from_pretrained(model, folder, is_trainable=True, autocast_adapter_dtype=False).eval()


class Dropout(torch.nn.Module):
    """Dropout of the input of a matrix, by the mask that counters give for the samples of a step."""

    def __init__(self, run: Run, name: str):
        super().__init__()
        self.p, self.key, self.step = run.lora.dropout, key_of(run.train.seed, "dropout", name), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (samples, tokens, features)."""
        samples, places = torch.arange(self.step * BATCH, (self.step + 1) * BATCH), torch.arange(x.shape[1])
        rows = (samples.unsqueeze(1).expand(x.shape[:2]), places.expand(x.shape[:2]))
        return x * keep_columns(self.p, self.key, rows, range(x.shape[2])) / (1 - self.p)


def with_our_masks(model: torch.nn.Module, run: Run) -> list[Dropout]:
    made = []
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and getattr(run.lora, "dropout", 0.0):
            assert module.lora_dropout["default"].p == run.lora.dropout, "adapter_config.json says so"
            made.append(Dropout(run, f"{name.removeprefix(PREFIX)}.weight"))
            module.lora_dropout["default"] = made[-1]
    return made


def adapters_of(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """By our names."""
    found = {}
    for name, p in (pair for pair in model.named_parameters() if pair[1].requires_grad):
        ours = (
            name.replace(".modules_to_save.default.", ".")
            .replace(".default.", ".")
            .removeprefix(PREFIX)
            .removesuffix(".default")
        )
        found[ours.removesuffix(".weight") if "magnitude" in ours else ours] = p
    return found


def decayed(name: str) -> bool:
    """Matrices are."""
    return not name.endswith(("magnitude_vector", "bias")) and "norm" not in name and ".ln_" not in name


@pytest.mark.parametrize("name", CASES)
def test_adapters_train_as_those_of_peft(name, tmp_path):
    compare(*CASES[name], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", EVERY)
def test_adapters_of_each_family_train_as_those_of_peft(name, tmp_path):
    compare(*EVERY[name], tmp_path)


def compare(family: str, fields: dict, tmp_path: Path) -> None:
    run, config = run_of(family, fields), MODELS[family]
    with wide_for(config):
        model = random_model(config)
    state = start(run, model)
    theirs = read_by_peft(model, save_to(state, tmp_path, 0))
    mine, dropped = adapters_of(theirs), with_our_masks(theirs, run)
    first = assemble([parts_of(state, "master")])
    grads = assemble([parts_of(state, "grad")])
    assert mine.keys() == grads.keys() and any(".lora_" in name for name in mine)
    for name, p in mine.items():
        assert np.array_equal(p.detach().numpy(), first[name]), name
    groups = [
        {"params": [p for name, p in mine.items() if decayed(name) == decays], "weight_decay": decay}
        for decays, decay in ((True, OPTIM.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, LR, (OPTIM.beta1, OPTIM.beta2), OPTIM.eps)
    for step in range(STEPS):
        optimizer.zero_grad()
        for each in dropped:
            each.step = step
        with wide_for(config):
            loss = loss_of(theirs, run, step)
        tokens = accumulate(state, step_batches(run, state.mesh, step, documents_of(config)))
        grads = assemble([parts_of(state, "grad")])
        assert grads.keys() == mine.keys()
        largest = max(p.grad.abs().max().item() for p in mine.values())
        for name, p in mine.items():
            np.testing.assert_allclose(grads[name], p.grad, rtol=0, atol=1e-9 * largest, err_msg=f"{step} {name}")
        assert update(state, tokens, LR).loss.item() == pytest.approx(loss, rel=1e-10)
        optimizer.step()
    last = assemble([parts_of(state, "master")])
    for name, p in mine.items():
        np.testing.assert_allclose(last[name], p.detach(), rtol=0, atol=1e-9, err_msg=name)
    folder = save_to(state, tmp_path, STEPS)
    again = adapters_of(read_by_peft(random_model(config), folder))
    assert all(np.array_equal(p.detach().numpy(), last[name]) for name, p in again.items())


def test_initial_weights_are_drawn_as_peft_draws_them():
    """A uniform within 1 / sqrt(inputs), B zero: the same bounds and moments; other numbers."""
    run, model = run_of("llama", SMALL), random_model(MODELS["llama"])
    ours = assemble([parts_of(start(run, model), "master")])
    config = peft.LoraConfig(r=3, lora_alpha=5.0, target_modules=["q_proj", "down_proj"])
    for name, p in adapters_of(peft.get_peft_model(model, config)).items():
        inputs = p.shape[1]
        if name.endswith("lora_B.weight"):
            assert not p.any() and not ours[name].any()
            continue
        for values in (p.detach().numpy(), ours[name]):
            assert 0.8 / inputs**0.5 < np.abs(values).max() <= 1 / inputs**0.5
            assert abs(values.mean()) < 0.25 / inputs**0.5
