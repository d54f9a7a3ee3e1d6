"""Generation of a Llama of 8 billion parameters with random weights: one sequence, many sequences, prompts, and where a
decode step's time goes; beside it transformers on the same GPU, in the same call.

python benchmarks/generation.py --rows one,many,prefill,budget --peers
python benchmarks/generation.py --tiny            a small model on a CPU: that everything runs

Weights are drawn on the device; a checkpoint's would take the same time. Tokens are greedy and never end early.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from phalanx.comm.mesh import Mesh, local_device
from phalanx.config.run import Run, TrainConfig
from phalanx.engine.build import build_for_inference
from phalanx.forecast.decide import make_plan
from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.load import InferenceModel, without_training
from phalanx.inference.request import NewToken, SamplingOptions
from phalanx.models.llama import LlamaConfig

SIZES = {
    "8b": dict(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
    ),
    "tiny": dict(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    ),
}


@dataclass(frozen=True)
class Shapes:
    """Tokens before one sequence; tokens it makes; sequences at once, their prompts and answers; prompts to read."""

    before: int = 1024
    made: int = 256
    many: int = 256
    prompt: int = 512
    answer: int = 512
    reading: tuple[int, int] = (8, 4096)


def ours(size: str) -> InferenceModel:
    gpu = torch.cuda.is_available()
    config: Any = SIZES[size]
    train = TrainConfig(steps=1, global_batch=1, micro_batch=1, seq_length=1024, precision="bf16" if gpu else "fp32")
    plan = make_plan(without_training(Run(model=LlamaConfig(**config), train=train), 1), 1)
    mesh = Mesh(plan.grid, 0, local_device("cuda" if gpu else "cpu", 0))
    _, stages = build_for_inference(plan, mesh)
    model = InferenceModel(plan, mesh, stages)
    for block in model.blocks:
        for p in block.parameters():
            p.data.normal_(0, 0.02) if p.dim() > 1 else p.data.fill_(1)
    return model


def prompts_of(count: int, length: int, vocab: int) -> list[list[int]]:
    dice = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocab, (length,), generator=dice).tolist() for _ in range(count)]


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def generated(engine: Engine, prompts: list[list[int]], tokens: int) -> tuple[float, float, int]:
    """Seconds until the first and until the last token, and tokens made."""
    options = SamplingOptions(tokens=tokens, temperature=0)
    wait()
    began = time.perf_counter()
    for prompt in prompts:
        engine.submit(prompt, options)
    made, first = 0, 0.0
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, NewToken):
                made += 1
                first = first or time.perf_counter() - began
    wait()
    return first, time.perf_counter() - began, made


def row_one(model: InferenceModel, shapes: Shapes) -> dict[str, float]:
    """Tokens/s of one sequence after its prompt."""
    vocab = model.plan.run.model.vocab_size
    engine = Engine(model, EngineOptions(sequences=4, tokens=2048, length=shapes.before + shapes.made + 64))
    found = []
    for again in range(3):
        prompt = prompts_of(again + 1, shapes.before, vocab)[-1]
        first, total, made = generated(engine, [prompt], shapes.made)
        found.append((made - 1) / (total - first))
    return {"tok/s": median(found[1:]), "ms/token": 1e3 / median(found[1:])}


def row_many(model: InferenceModel, shapes: Shapes) -> dict[str, float]:
    """Tokens/s made by many sequences at once, prompts included."""
    vocab = model.plan.run.model.vocab_size
    length = shapes.prompt + shapes.answer
    engine = Engine(model, EngineOptions(sequences=shapes.many, tokens=8192, length=length))
    generated(engine, prompts_of(2 * shapes.many, shapes.prompt, vocab)[shapes.many :], 16)
    first, total, made = generated(engine, prompts_of(shapes.many, shapes.prompt, vocab), shapes.answer)
    return {"tok/s out": made / total, "s": total, "first token s": first}


def row_prefill(model: InferenceModel, shapes: Shapes) -> dict[str, float]:
    """Tokens/s of prompts that are read."""
    count, length = shapes.reading
    vocab = model.plan.run.model.vocab_size
    engine = Engine(model, EngineOptions(sequences=count, tokens=8192, length=length + 16))
    generated(engine, prompts_of(2 * count, length, vocab)[count:], 1)
    _, total, _ = generated(engine, prompts_of(count, length, vocab), 1)
    return {"tok/s in": count * length / total, "s": total}


def row_budget(model: InferenceModel, shapes: Shapes) -> dict[str, float]:
    """ms of a decode step of many sequences by kind of kernel, and of the host between steps, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    vocab = model.plan.run.model.vocab_size
    length = shapes.prompt + shapes.answer
    engine = Engine(model, EngineOptions(sequences=shapes.many, tokens=8192, length=length))
    for prompt in prompts_of(shapes.many, shapes.prompt, vocab):
        engine.submit(prompt, SamplingOptions(tokens=shapes.answer, temperature=0))
    warm = -(-shapes.many * shapes.prompt // 8192) + 12
    for _ in range(warm):
        engine.step()
    steps, wait_ = 20, wait
    wait_()
    began = time.perf_counter()
    for _ in range(steps):
        engine.step()
    wait_()
    found = {"step": 1e3 * (time.perf_counter() - began) / steps}
    if torch.cuda.is_available():
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(8):
                engine.step()
            wait_()
        kinds: dict[str, float] = {}
        for event in seen.key_averages():
            name = event.key.lower()
            attention = "paged" in name or "attend" in name or "join" in name
            kind = (
                "attention"
                if attention
                else "products"
                if "gemm" in name or "nvjet" in name or "cutlass" in name
                else event.key[:36]
            )
            kinds[kind] = kinds.get(kind, 0.0) + event.device_time_total / 8e3
        found |= dict(sorted(kinds.items(), key=lambda item: -item[1])[:12])
        found["all kernels"] = sum(kinds.values())
    engine.close()
    return found


ROWS: dict[str, Callable[[InferenceModel, Shapes], dict[str, float]]] = {
    "one": row_one,
    "many": row_many,
    "prefill": row_prefill,
    "budget": row_budget,
}


def peers(size: str, rows: list[str], shapes: Shapes) -> dict[str, dict[str, float]]:
    """transformers: a compiled static cache for one sequence, its continuous batching for many."""
    import transformers

    config: Any = SIZES[size]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        made = transformers.LlamaForCausalLM._from_config(
            transformers.LlamaConfig(**config), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model = made.eval()
    vocab = config["vocab_size"]
    found: dict[str, dict[str, float]] = {}
    if "one" in rows:
        speeds = []
        for again in range(3):
            ids = torch.tensor(prompts_of(again + 1, shapes.before, vocab)[-1:], device=device)
            times = []
            for tokens in (1, shapes.made):
                wait()
                began = time.perf_counter()
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=tokens,
                    min_new_tokens=tokens,
                    cache_implementation="static",
                    pad_token_id=0,
                )
                wait()
                times.append(time.perf_counter() - began)
            speeds.append((shapes.made - 1) / (times[1] - times[0]))
        found["one"] = {"tok/s": median(speeds[1:])}
    if "many" in rows:
        options = transformers.GenerationConfig(
            max_new_tokens=shapes.answer, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        best = 0.0
        for again in range(2):
            prompts = prompts_of((again + 1) * shapes.many, shapes.prompt, vocab)[-shapes.many :]
            wait()
            began = time.perf_counter()
            out = model.generate_batch(inputs=prompts, generation_config=options)
            wait()
            made_tokens = sum(len(each.generated_tokens) for each in out.values())
            best = max(best, made_tokens / (time.perf_counter() - began))
        found["many"] = {"tok/s out": best}
    return found


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--rows", default="one,many,prefill,budget")
    reader.add_argument("--peers", action="store_true")
    reader.add_argument("--tiny", action="store_true")
    asked = reader.parse_args()
    size, rows = ("tiny" if asked.tiny else "8b"), asked.rows.split(",")
    shapes = Shapes(64, 16, 8, 32, 16, (2, 64)) if asked.tiny else Shapes()
    model = ours(size)
    for row in rows:
        with torch.no_grad():
            figures = ROWS[row](model, shapes)
        print(json.dumps({"row": row, "by": "phalanx", **{k: round(v, 4) for k, v in figures.items()}}), flush=True)
        gc.collect()
    if asked.peers:
        del model
        gc.collect()
        torch.cuda.empty_cache()
        for row, figures in peers(size, rows, shapes).items():
            print(
                json.dumps({"row": row, "by": "transformers", **{k: round(v, 4) for k, v in figures.items()}}),
                flush=True,
            )


if __name__ == "__main__":
    main()
