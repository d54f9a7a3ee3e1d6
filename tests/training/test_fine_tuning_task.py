"""A task that can be checked: a base that knows ten operations in symbols is taught to do them when asked in English.
Held-out words are asked about; the base stays as it was."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.base.placement import Placement
from phalanx.config.run import LogConfig, Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.inference.engine import EngineOptions
from phalanx.inference.generate import TextSampler
from phalanx.inference.request import SamplingOptions
from phalanx.models.llama import LlamaConfig
from phalanx.nn.adapter import find_adapter
from phalanx.nn.objective import find_objective
from phalanx.optim.config import OptimConfig
from phalanx.text.chat_template import load_chat_template
from phalanx.training.main import train
from tests.harness.symbols import OPERATIONS, asked, instructions, notation, split

MODEL = LlamaConfig(
    vocab_size=257,
    hidden_size=64,
    intermediate_size=168,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=256,
)
BASE_STEPS = 500


def run_of(folder: Path, name: str, steps: int, batch: int, lr: float, **fields: Any) -> Run:
    return Run(
        model=MODEL,
        train=TrainConfig(steps=steps, global_batch=batch, micro_batch=batch, seq_length=128),
        optim=OptimConfig(lr=lr, warmup_steps=steps // 10, schedule="cosine"),
        log=LogConfig(report=False),
        dir=str(folder / name),
        **fields,
    )


def base_of(folder: Path, steps: int, batch: int = 16) -> Run:
    """Trained on symbols."""
    data = DataConfig(text=(notation(folder),), tokenizer="bytes", split="100,0,0", packing="online")
    run = run_of(folder, "base", steps, batch, 3e-3, data=data)
    train(run, Placement())
    return run


def tuned(folder: Path, base: Run, steps: int, lr: float, adapters: bool) -> Run:
    """Fine-tuned on instructions, with all weights or with adapters of rank 16."""
    chats = (instructions(folder),)
    data = DataConfig(chats=chats, template=str(folder / "template.jinja"), tokenizer="bytes", split="100,0,0")
    run = run_of(folder, "lora" if adapters else "full", steps, 8, lr, data=data)
    lora = find_adapter("lora").Config(method="lora", rank=16, alpha=32.0) if adapters else None
    run = replace(run, task=find_objective("sft").Config(name="sft"), lora=lora, init_from=str(weights_of(base)))
    train(run, Placement())
    return run


def weights_of(run: Run) -> Path:
    return Path(run.dir) / f"checkpoints/step-{run.train.last_step:08d}/weights"


def exact(path: str | Path, questions: list[tuple[str, str]]) -> float:
    """The fraction of texts that the model goes on with exactly the answer."""
    with TextSampler(str(path), EngineOptions(sequences=64, length=96)) as sampler:
        how = SamplingOptions(tokens=12, temperature=0)
        found = {each.prompt: each.text for each in sampler.generate([q for q, _ in questions], how, stop=["\n"])}
    return sum(found[number].strip() == answer for number, (_, answer) in enumerate(questions)) / len(questions)


def in_english(run: Run) -> list[tuple[str, str]]:
    """Questions about words that no instruction had, as the checkpoint's own template writes them."""
    template = load_chat_template(weights_of(run))
    assert template is not None
    return [(template.text([{"role": "user", "content": q}]), answer) for q, answer in asked(split()[1])]


def in_symbols() -> list[tuple[str, str]]:
    return [(f"{name}({word})=", do(word)) for name, (do, _) in OPERATIONS.items() for word in split()[1]]


def losses(run: Run) -> list[float]:
    rows = [json.loads(line) for line in (Path(run.dir) / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "step_s" in row]


def test_losses_fall(tmp_path):
    """The whole in small: both losses fall, and the base's bytes stay: the adapters' checkpoint holds none of them."""
    base = base_of(tmp_path, 60, batch=4)
    assert losses(base)[-1] < 0.7 * losses(base)[0]
    before = (weights_of(base) / "model.safetensors").read_bytes()
    run = tuned(tmp_path, base, 30, 6e-3, adapters=True)
    assert losses(run)[-1] < 0.8 * losses(run)[0]
    assert (weights_of(base) / "model.safetensors").read_bytes() == before
    assert not (weights_of(run) / "model.safetensors").exists()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_instructions_are_learned(tmp_path):
    """From below 5 % to above 90 % with all weights, and above 80 % with LoRA of rank 16, under which the base is what
    it was, and as good at symbols."""
    base = base_of(tmp_path, BASE_STEPS)
    assert exact(base.dir, in_symbols()) > 0.95
    before = (weights_of(base) / "model.safetensors").read_bytes()
    full = tuned(tmp_path, base, 900, 2e-3, adapters=False)
    questions = in_english(full)
    assert exact(base.dir, questions) < 0.05
    assert exact(full.dir, questions) > 0.9
    lora = tuned(tmp_path, base, 900, 4e-3, adapters=True)
    assert exact(lora.dir, questions) > 0.8
    assert (weights_of(base) / "model.safetensors").read_bytes() == before
    assert exact(weights_of(base), in_symbols()) > 0.95
