"""Muon needs fewer steps than AdamW on real text: the source of Python's standard library, byte by byte."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from phalanx.base.placement import Placement
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.config.run import LogConfig, Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.models.llama import LlamaConfig
from phalanx.models.model_config import ModelConfig
from phalanx.optim.adamw import AdamWConfig
from phalanx.optim.config import OptimConfig
from phalanx.optim.muon import MuonConfig
from phalanx.text.prepare import prepare, stdlib_files
from phalanx.text.tokenizers import byte_tokenizer
from phalanx.training.main import train

MODEL = LlamaConfig(
    vocab_size=257,
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
RATES = {"adamw": (7.5e-4, 1.5e-3, 3e-3), "muon": (3e-3, 6e-3, 1.2e-2)}
SEEDS = (1, 2, 3)
STEPS = 300


def text(folder: Path) -> Path:
    """A prefix of token files."""
    prepare([str(file) for file in stdlib_files(6 << 20)], folder / "text", byte_tokenizer())
    return folder / "text"


def optimizer(name: str, lr: float, steps: int) -> OptimConfig:
    shared = {"lr": lr, "warmup_steps": 20, "decay_steps": steps, "weight_decay": 0.1}
    if name == "adamw":
        return AdamWConfig(**shared)
    return MuonConfig(name="muon", products="master", fallback=AdamWConfig(lr=lr), **shared)


def loss_after(
    folder: Path, prefix: Path, name: str, lr: float, seed: int, steps: int, model: ModelConfig = MODEL
) -> float:
    """On text that is held out, of a run whose rate has decayed to nothing by then."""
    run = Run(
        model=model,
        train=TrainConfig(
            steps=steps,
            global_batch=8,
            micro_batch=8,
            seq_length=128,
            device="cpu",
            seed=seed,
            eval_interval=steps,
            eval_samples=128,
        ),
        data=DataConfig(paths=(str(prefix),), split="95,5,0"),
        optim=optimizer(name, lr, steps),
        log=LogConfig(report=False),
        checkpoint=CheckpointConfig(interval=None),
        dir=str(folder / f"{model.family}-{name}-{lr}-{seed}-{steps}"),
    )
    train(run, Placement())
    rows = [json.loads(line) for line in (Path(run.dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["valid/valid"] for row in rows if "valid/valid" in row][-1]


def best(folder: Path, prefix: Path, name: str, steps: int, model: ModelConfig = MODEL) -> tuple[float, float]:
    """(mean loss over the seeds at the best of three rates, that rate)"""
    runs = {lr: [loss_after(folder, prefix, name, lr, seed, steps, model) for seed in SEEDS] for lr in RATES[name]}
    found = {lr: mean(losses) for lr, losses in runs.items()}
    print(model.family, name, steps, found, flush=True)
    rate = min(found, key=lambda lr: found[lr])
    return found[rate], rate


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_fewer_steps_to_the_loss_of_adamw(tmp_path):
    """Each at the best of three rates, mean of three seeds, rates decayed to zero at the end: with a quarter fewer
    steps Muon is at least where AdamW is."""
    prefix = text(tmp_path)
    loss, rate = best(tmp_path, prefix, "adamw", STEPS)
    assert rate == RATES["adamw"][1] and loss < 2.5  # a slower and a faster rate are worse: it is tuned
    fewer, _ = best(tmp_path, prefix, "muon", STEPS * 3 // 4)
    assert fewer <= loss
