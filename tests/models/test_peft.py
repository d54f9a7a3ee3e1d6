"""LoRA (with the masks of its dropout given) and DoRA against PEFT on the models of transformers, in float64: PEFT
reads our adapter folder, and from there on both train alike: losses, gradients, weights; what is saved then is what
PEFT has trained, and what PEFT saves is read again."""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer

from phalanx.base.rng import keep_columns, key_of
from phalanx.checkpoint.adapters import PREFIX, adapter_source
from phalanx.checkpoint.base import reading
from phalanx.checkpoint.load import load_adapters, load_weights
from phalanx.checkpoint.merge import merge_folder
from phalanx.checkpoint.save import Snapshot
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.engine.adapter_start import start_adapters
from phalanx.engine.build import State, build, init_weights
from phalanx.engine.step import accumulate, evaluate_step, update
from phalanx.forecast.decide import make_plan
from phalanx.models.registry import family_of
from phalanx.nn.adapter import find_adapter
from phalanx.optim.adamw import AdamWConfig
from phalanx.planning.adapters import peft_config
from phalanx.planning.blocks import exported_shapes
from phalanx.planning.merging import merging_of
from phalanx.sequence.batch import IGNORE, Batch
from tests.harness import hf_fuzz, parity
from tests.harness.checkpoints import save
from tests.harness.parity import SEQ, assemble, base_run, batch_of, parts_of, step_batches, task_of
from tests.harness.sample import rest_in_soak
from tests.models import test_llava, test_models, test_moe_models, test_qwen_vl
from tests.models.test_models import wide_modules
from tests.models.test_twenty_steps import BATCH, documents_of, logits_of, random_model
from tests.models.test_twenty_steps import MODELS as TWENTY

STEPS, LR = 4, 1e-2
MODELS = {
    **TWENTY,
    **{name: test_moe_models.CASES[name] for name in ("qwen3_next", "kimi_linear", "qwen3_5_moe_text")},
    **{name: test_models.CASES[name] for name in ("qwen3_5_text", "olmo_hybrid")},
    **{name: parity.MODELS[name] for name in ("llava", "qwen2_5_vl", "qwen3_vl")},
}
OPTIM = AdamWConfig(lr=LR, beta1=0.9, beta2=0.95, eps=1e-6, weight_decay=0.3, clip_grad=0.0)
SMALL = {"rank": 3, "alpha": 5.0}
PATTERNS = {
    "rank_pattern": {"0.self_attn.q_proj": 2, r"layers\.\d\.mlp\.down_proj": 5},
    "alpha_pattern": {"v_proj": 3.0, "down_proj": 9.0},
}
SOME = {"targets": ["*.[qv]_proj.weight", "*.1.mlp.*"]}
DORA = {**SMALL, "method": "dora"}
# experts are trained together with gate and up as one matrix by PEFT: they have a test of their own
ATTENTION = {"targets": ["*.self_attn.*", "*.mixer.[qkvo]_proj.weight"]}
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
}
SCANS = {family: {"targets": BESIDE_SCANS} for family in ("mamba2", "nemotron_h", "falcon_h1")}
EVERY = {
    f"{family} {method}": (
        family,
        {**SMALL, "method": method, **SCANS.get(family, ATTENTION if MODELS[family].routed_experts else {})},
    )
    for family in MODELS
    for method in ("lora", "dora")
}
SHOWN = ("t5 dora", "llava lora")  # of those, in each run of the tests


def run_of(family: str, fields: dict) -> Run:
    model = MODELS[family]
    base = base_run(model.family if model.needs_room else "llama", global_batch=BATCH, steps=STEPS)
    lora = find_adapter(fields.get("method", "lora")).Config(**fields)
    return replace(base, model=model, optim=OPTIM, lora=lora, task=task_of(model))


def wide(config: Any) -> AbstractContextManager[None]:
    """Where transformers computes in float64 what it would in float32."""
    if config.family in test_qwen_vl.CASES:
        return test_qwen_vl.wide()
    return hf_fuzz.wide() if config.both_ways or config.reads_units else wide_modules(config)


def model_of(config: Any) -> torch.nn.Module:
    if config.family in test_qwen_vl.CASES:
        return test_qwen_vl.transformers_model(config.family)
    return test_llava.transformers_model(config) if config.family == "llava" else random_model(config)


def loss_of(model: torch.nn.Module, run: Run, step: int) -> float:
    """The mean loss of a step's tokens; its gradients are added."""
    ids = list(range(step * BATCH, (step + 1) * BATCH))
    batch = batch_of(run, ids, documents_of(run.model))
    shown = run.model.family in ("llava", *test_qwen_vl.CASES)
    logits = with_images(model, run.model, batch, ids) if shown else logits_of(model, run.model, batch, ids)
    loss = torch.nn.functional.cross_entropy(logits, batch.labels, ignore_index=IGNORE)
    loss.backward()
    return loss.item()


def with_images(model: torch.nn.Module, config: Any, batch: Batch, ids: list[int]) -> torch.Tensor:
    """(tokens, vocabulary), each sample alone with its images."""
    rows = batch.tokens.view(-1, SEQ)
    if config.family == "llava":
        pixels = test_llava.pixels_in(batch, config, ids)
        given = [{"input_ids": row[None], **({"pixel_values": p} if len(p) else {})} for row, p in zip(rows, pixels)]
    else:
        given = [test_qwen_vl.inputs_of(config.family, row[None], sample) for row, sample in zip(rows, ids)]
    return torch.cat([model(**each).logits[0] for each in given])


def start(run: Run, model: torch.nn.Module | Path) -> State:
    """With the weights of a model of transformers, or of a folder."""
    plan = make_plan(run, 1)
    state = build(plan, Mesh(plan.grid, 0))
    with tempfile.TemporaryDirectory() as made:
        folder = model if isinstance(model, Path) else Path(made)
        if isinstance(model, torch.nn.Module):
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


def adapters_of(model: torch.nn.Module, config: Any = None) -> dict[str, torch.nn.Parameter]:
    """By our names. config: of a model whose files have other names than transformers has in memory."""
    found, in_files = {}, (lambda name: name) if config is None else family_of(config).tensors.in_files
    for name, p in (pair for pair in model.named_parameters() if pair[1].requires_grad):
        ours = (
            name.replace(".modules_to_save.default.", ".")
            .replace(".default.", ".")
            .removeprefix(PREFIX)
            .removesuffix(".default")
        )
        ours = in_files(ours)
        found[ours.removesuffix(".weight") if "magnitude" in ours else ours] = p
    return found


def decayed(name: str) -> bool:
    """Matrices are."""
    return not name.endswith(("magnitude_vector", "bias")) and "norm" not in name and ".ln_" not in name


@pytest.mark.parametrize("name", rest_in_soak(CASES, list(CASES)[::2]))
def test_adapters_train_as_those_of_peft(name, tmp_path):
    compare(*CASES[name], tmp_path)


@pytest.mark.parametrize("name", rest_in_soak(EVERY, SHOWN))
def test_adapters_of_each_family_train_as_those_of_peft(name, tmp_path):
    compare(*EVERY[name], tmp_path)


def compare(family: str, fields: dict, tmp_path: Path) -> None:
    run, config = run_of(family, fields), MODELS[family]
    with wide(config):
        model = model_of(config)
    state = start(run, model)
    theirs = read_by_peft(model, save_to(state, tmp_path, 0))
    mine, dropped = adapters_of(theirs, config), with_our_masks(theirs, run)
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
        with wide(config):
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
    with wide(config):
        again = read_by_peft(model_of(config), folder)
    assert all(np.array_equal(p.detach().numpy(), last[name]) for name, p in adapters_of(again, config).items())
    again.save_pretrained(tmp_path / "theirs")
    source = adapter_source(str(tmp_path / "theirs"), family_of(config).tensors)
    assert source.index.keys() == mine.keys()
    with torch.no_grad():
        for flat in state.buffers.masters:
            flat.master.zero_()
    load_adapters(source.placed, source.files, state.buffers, state.mesh)
    read = assemble([parts_of(state, "master")])
    assert all(np.array_equal(read[name], last[name]) for name in mine)


@pytest.mark.parametrize("method", rest_in_soak(("lora", "dora"), ("lora",)))
@pytest.mark.parametrize("family", rest_in_soak(MODELS, ("olmo_hybrid",)))  # whose base has one matrix in three tensors
def test_merged_is_unmerged(family, method, tmp_path):
    """Truth: base and adapters as they are trained, of all linears of layers, experts among them, in float64."""
    run, config = run_of(family, {**SMALL, "method": method}), MODELS[family]
    with wide(config):
        model = model_of(config)
    state = start(run, model)
    for step in range(2):  # so that nothing that is added is zero
        update(state, accumulate(state, step_batches(run, state.mesh, step, documents_of(config))), LR)
    adapter, base, merged = save_to(state, tmp_path, 2), tmp_path / "base", tmp_path / "merged"
    model.save_pretrained(base)
    merge_folder(str(adapter), str(base), merged, merging_of(config, run.lora))
    batches = step_batches(run, state.mesh, 3, documents_of(config))
    found = []
    for folder in (merged, base):
        plain = start(replace(run, lora=None), folder)
        found.append(evaluate_step(plain.model, batches)[0].item())
    wanted = evaluate_step(state.model, batches)[0].item()
    assert found[0] == pytest.approx(wanted, rel=1e-12) and abs(found[1] - wanted) > 1e-6 * wanted


GATED = {  # names of an expert's matrices; a layer without experts has linears of the same names, which PEFT would lose
    "mixtral": (MODELS["mixtral"], ("w1", "w3", "w2")),
    "qwen3_moe": (replace(MODELS["qwen3_moe"], decoder_sparse_step=1), ("gate_proj", "up_proj", "down_proj")),
    "minimax_m2": (MODELS["minimax_m2"], ("w1", "w3", "w2")),
}


@pytest.mark.parametrize("family", rest_in_soak(GATED, ("qwen3_moe",)))
def test_adapters_of_experts_are_those_of_peft(family, tmp_path, monkeypatch):
    """transformers has the experts of a layer as two tensors, gate and up as one matrix: PEFT reads our folder as one
    adapter of twice the rank for both, in blocks, with the same loss and the same gradients in them."""
    config, (gate, up, down) = GATED[family]
    monkeypatch.setitem(MODELS, family, config)
    run, model = run_of(family, SMALL), random_model(config)
    state = start(run, model)
    accumulate_and_update(state, run, 0)  # so that B is not zero
    theirs = read_by_peft(model, save_to(state, tmp_path, 1))
    loss = loss_of(theirs, run, 1)
    tokens = accumulate(state, step_batches(run, state.mesh, 1, False))
    grads = assemble([parts_of(state, "grad")])
    assert update(state, tokens, 0.0).loss.item() == pytest.approx(loss, rel=1e-10)
    layers = [module for name, module in theirs.named_modules() if name.endswith(".experts")]
    assert len(layers) == config.num_hidden_layers
    count, rank = config.routed_experts, SMALL["rank"]
    largest, seen = max(np.abs(grad).max() for grad in grads.values()), 0
    for number, layer in enumerate(layers):

        def ours(expert: int, matrix: str, kind: str, number: int = number) -> np.ndarray:
            end = f"layers.{number}.{'block_sparse_moe' if gate == 'w1' else 'mlp'}.experts.{expert}.{matrix}.{kind}"
            [name] = [name for name in grads if name.endswith(f"{end}.weight")]
            return grads[name]

        joint = [layer.base_layer.lora_A["default"].weight.grad.view(count, 2 * rank, -1)]
        joint += [layer.base_layer.lora_B["default"].weight.grad.unflatten(1, (2 * rank, count))]
        single = [layer.lora_A["default"].weight.grad.view(count, rank, -1)]
        single += [layer.lora_B["default"].weight.grad.unflatten(1, (rank, count))]
        half = config.expert_size
        for expert in range(count):
            pairs = [
                (ours(expert, gate, "lora_A"), joint[0][expert, :rank]),
                (ours(expert, up, "lora_A"), joint[0][expert, rank:]),
                (ours(expert, gate, "lora_B"), joint[1][:half, :rank, expert]),
                (ours(expert, up, "lora_B"), joint[1][half:, rank:, expert]),
                (ours(expert, down, "lora_A"), single[0][expert]),
                (ours(expert, down, "lora_B"), single[1][:, :, expert]),
            ]
            for found, expected in pairs:
                np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9 * largest)
                seen += bool(np.any(found))
    assert seen > 3 * count


def accumulate_and_update(state: State, run: Run, step: int) -> None:
    update(state, accumulate(state, step_batches(run, state.mesh, step, False)), LR)


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
