"""Generation of a Llama of 8 billion parameters with random weights: one sequence, many sequences, prompts, and where a
decode step's time goes; beside it transformers on the same GPU, in the same call.

python benchmarks/generation.py --rows one,many,prefill,arrivals,budget --peers
python benchmarks/generation.py --tiny            a small model on a CPU: that everything runs
torchrun --nproc-per-node 2 benchmarks/generation.py --tp 2 --rows one,many

Weights are drawn on the device; a checkpoint's would take the same time. Tokens are greedy and never end early.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from phalanx.comm.mesh import Mesh, init_world, leave_world, local_device
from phalanx.config.run import Run, TrainConfig
from phalanx.engine.build import build_for_inference
from phalanx.forecast.decide import make_plan
from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.load import InferenceModel, without_training
from phalanx.inference.memory import remembering
from phalanx.inference.request import NewToken, SamplingOptions
from phalanx.launch.env import read_placement
from phalanx.layout.config import LayoutConfig
from phalanx.models.llama import LlamaConfig
from phalanx.pipeline.execute import execute
from phalanx.sequence.batch import IGNORE, Batch

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
    """Tokens before one sequence; tokens it makes; sequences at once, their prompts and answers; prompts to read;
    requests a second that arrive, for so many seconds, and tokens that each makes."""

    before: int = 1024
    made: int = 256
    many: int = 256
    prompt: int = 512
    answer: int = 512
    reading: tuple[int, int] = (8, 4096)
    rate: float = 25.0
    seconds: float = 12.0
    arriving: int = 128


def ours(size: str, tp: int = 1) -> InferenceModel:
    gpu = torch.cuda.is_available()
    config: Any = SIZES[size]
    train = TrainConfig(steps=1, global_batch=1, micro_batch=1, seq_length=1024, precision="bf16" if gpu else "fp32")
    run = Run(model=LlamaConfig(**config), train=train, layout=LayoutConfig(tp=tp))
    return with_random_weights(without_training(run, tp))


def with_random_weights(run: Run) -> InferenceModel:
    """On this rank of a world that has been joined, of run.layout.tp ranks."""
    plan = make_plan(run, run.layout.tp)
    rank = int(os.environ.get("RANK", "0"))
    mesh = Mesh(plan.grid, rank, local_device("cuda" if torch.cuda.is_available() else "cpu", rank))
    _, stages = build_for_inference(plan, mesh)
    model = InferenceModel(plan, mesh, stages, stages.handlers())
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
    """Seconds until the first and until the last token, and tokens made; on ranks beyond the first, which are not
    asked, no figures."""
    if engine.model.mesh.rank:
        engine.follow()
        return 0.0, 1.0, 2
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
    took = time.perf_counter() - began
    engine.pause()
    return first, took, made


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
    generated(engine, prompts_of(2 * shapes.many, shapes.prompt, vocab)[shapes.many :], min(16, shapes.answer))
    first, total, made = generated(engine, prompts_of(shapes.many, shapes.prompt, vocab), shapes.answer)
    return {"tok/s out": made / total, "s": total, "first token s": first}


def row_prefill(model: InferenceModel, shapes: Shapes) -> dict[str, float]:
    """Tokens/s of prompts that are read."""
    count, length = shapes.reading
    vocab = model.plan.run.model.vocab_size
    engine = Engine(model, EngineOptions(sequences=count, tokens=8192, length=length + 16))
    generated(engine, prompts_of(2 * count, length, vocab)[count:], 1)
    _, total, _ = generated(engine, prompts_of(count, length, vocab), 1)
    plain = whole_forward(model, count, length)
    return {"tok/s in": count * length / total, "s": total, "forward of training": count * length / plain}


def whole_forward(model: InferenceModel, count: int, length: int) -> float:
    """Seconds of the forward that training runs over as many tokens, up to the last norm."""
    device, vocab = model.mesh.device, model.plan.run.model.vocab_size
    row = torch.tensor(prompts_of(count, length, vocab), device=device).flatten()
    positions = torch.arange(length, device=device).repeat(count)
    samples = torch.arange(count, device=device).repeat_interleave(length)
    stages, times = model.stages, []
    stages.finish = lambda block, x, _: block.logits(x[length - 1 :: length], torch.arange(count, device=device))
    for _ in range(3):
        wait()
        began = time.perf_counter()
        stages.begin([Batch(row, torch.full_like(row, IGNORE), positions, samples, count, length)], seed=None)
        execute(model.program(1), stages.handlers())
        stages.end()
        wait()
        times.append(time.perf_counter() - began)
    return min(times)


def row_arrivals(model: InferenceModel, shapes: Shapes) -> dict[str, float]:
    """ms until the first token of requests that arrive at random moments (a Poisson process), and between tokens."""
    vocab = model.plan.run.model.vocab_size
    length = shapes.prompt + shapes.arriving
    wait()
    began = time.perf_counter()
    engine = Engine(model, EngineOptions(sequences=shapes.many, tokens=2048, length=length, capture=True))
    captured = time.perf_counter() - began
    generated(engine, prompts_of(2 * shapes.many, shapes.prompt, vocab)[shapes.many :], 4)
    count = int(shapes.rate * shapes.seconds)
    prompts = prompts_of(count, shapes.prompt, vocab)
    gaps = torch.empty(count, dtype=torch.float64).exponential_(shapes.rate, generator=torch.Generator().manual_seed(1))
    moments, options = gaps.cumsum(0).tolist(), SamplingOptions(tokens=shapes.arriving, temperature=0)
    asked: dict[int, float] = {}
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    began = time.perf_counter()
    while len(asked) < count or not engine.idle:
        now = time.perf_counter() - began
        while len(asked) < count and moments[len(asked)] <= now:
            at = len(asked)
            asked[engine.submit(prompts[at], options)] = moments[at]
        if engine.idle:
            time.sleep(max(0.0, moments[len(asked)] - now))
            continue
        for event in engine.step():
            if isinstance(event, NewToken):
                last[event.request] = time.perf_counter() - began
                first.setdefault(event.request, last[event.request])
    waits = sorted(1e3 * (first[n] - asked[n]) for n in asked)
    paces = sorted(1e3 * (last[n] - first[n]) / (shapes.arriving - 1) for n in asked)
    places = {"p50": count // 2, "p99": min(count - 1, count * 99 // 100)}
    found = {f"first token ms {p}": waits[i] for p, i in places.items()}
    return (
        found
        | {f"ms a token {p}": paces[i] for p, i in places.items()}
        | {"requests/s": count / max(last.values()), "s until ready": captured}
    )


def row_invariant(model: InferenceModel, shapes: Shapes) -> dict[str, float]:
    """ms of a decode step of many sequences without train.batch_invariant and with it, and its kernels."""
    run = model.plan.run
    usual = budget(model, shapes, shapes.many, shapes.prompt)["step"]
    for layer in remembering(model.blocks):  # room for the other's pages
        layer.memory = None
    gc.collect()
    torch.cuda.empty_cache()
    other = with_random_weights(replace(run, train=replace(run.train, batch_invariant=True)))
    found = budget(other, shapes, shapes.many, shapes.prompt)
    invariant = found.pop("step")
    return {"default": usual, "invariant": invariant, "times slower": invariant / usual} | found


def row_budget(model: InferenceModel, shapes: Shapes) -> dict[str, float]:
    """Of many sequences."""
    return budget(model, shapes, shapes.many, shapes.prompt)


def row_budget_one(model: InferenceModel, shapes: Shapes) -> dict[str, float]:
    """Of one sequence."""
    return budget(model, shapes, 1, shapes.before)


def budget(model: InferenceModel, shapes: Shapes, count: int, prompt_length: int) -> dict[str, float]:
    """ms of a decode step by kind of kernel, and when no kernel runs, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    vocab = model.plan.run.model.vocab_size
    length = prompt_length + shapes.answer
    engine = Engine(model, EngineOptions(sequences=count, tokens=8192, length=length))
    for prompt in prompts_of(count, prompt_length, vocab):
        engine.submit(prompt, SamplingOptions(tokens=shapes.answer, temperature=0))
    for _ in range(-(-count * prompt_length // 8192) + 12):
        engine.step()
    steps = 20
    wait()
    began = time.perf_counter()
    for _ in range(steps):
        engine.step()
    wait()
    found = {"step": 1e3 * (time.perf_counter() - began) / steps}
    if torch.cuda.is_available():
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(8):
                engine.step()
            wait()
        kinds: dict[str, float] = {}
        for event in seen.key_averages():
            kind = kind_of(event.key)
            kinds[kind] = kinds.get(kind, 0.0) + event.device_time_total / 8e3
        found |= dict(sorted(kinds.items(), key=lambda item: -item[1])[:14])
        found["all kernels"] = sum(kinds.values())
        found |= {name: ms / 8 for name, ms in idle_ms(seen).items()}
    engine.close()
    return found


def idle_ms(seen: Any) -> dict[str, float]:
    """ms in which the device did nothing: between launches, where it waits for the host, and inside captured graphs,
    all of whose kernels have the number of the one launch."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    ran = sorted(
        (e["ts"], e["ts"] + e["dur"], e["args"].get("correlation"))
        for e in events
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    idle, until, launch = {"host exposed": 0.0, "gaps in graphs": 0.0}, ran[0][0], ran[0][2]
    for began, ended, by in ran:
        idle["gaps in graphs" if by == launch else "host exposed"] += max(0.0, began - until) / 1e3
        until, launch = max(until, ended), by
    return idle


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    if "attend" in name or "paged" in name or name.startswith(("_decode", "_prompt", "_join")):
        return "attention"
    if any(part in name for part in ("gemm", "nvjet", "cutlass", "gemv", "_matmul", "_add_parts")):
        return "products"
    return kernel[:36]


ROWS: dict[str, Callable[[InferenceModel, Shapes], dict[str, float]]] = {
    "one": row_one,
    "many": row_many,
    "prefill": row_prefill,
    "arrivals": row_arrivals,
    "invariant": row_invariant,
    "budget": row_budget,
    "budget_one": row_budget_one,
}


class Clock:
    """When each token came, after the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


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
            clock = Clock()
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=shapes.made,
                min_new_tokens=shapes.made,
                cache_implementation="static",
                pad_token_id=0,
                streamer=clock,
            )
            speeds.append((shapes.made - 1) / (clock.times[-1] - clock.times[1]))
        found["one"] = {"tok/s": median(speeds[1:])}
    if "many" in rows:
        options = transformers.GenerationConfig(
            max_new_tokens=shapes.answer, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        prompts = prompts_of(shapes.many, shapes.prompt, vocab)
        began = time.perf_counter()
        out = model.generate_batch(inputs=prompts, generation_config=options, record_timestamps=True)
        wait()
        total = time.perf_counter() - began
        made_tokens = sum(len(each.generated_tokens) for each in out.values())
        times = [moment for each in out.values() for moment in each.timestamps]
        # its warm-up, and the first prompts, are left out
        found["many"] = {"tok/s out": made_tokens / (max(times) - min(times)), "s with warm-up": total}
    return found


def join(ranks: int) -> None:
    """The world that torchrun has started."""
    placement, problems = read_placement(os.environ)
    if placement is None or placement.world_size != ranks:
        raise SystemExit(f"start it with torchrun --nproc-per-node {ranks} {'; '.join(map(str, problems))}")
    device = local_device("cuda" if torch.cuda.is_available() else "cpu", placement.local_rank)
    init_world(placement.rank, placement.world_size, placement.init_method, device, 120.0)


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--rows", default=",".join(ROWS))
    reader.add_argument("--peers", action="store_true")
    reader.add_argument("--tiny", action="store_true")
    reader.add_argument("--only-peers", action="store_true")
    reader.add_argument("--tp", type=int, default=1, help="ranks, which torchrun starts; rows one and many")
    reader.add_argument("--answer", type=int, help="tokens that each of many sequences makes")
    asked = reader.parse_args()
    size, rows = ("tiny" if asked.tiny else "8b"), asked.rows.split(",")
    shapes = Shapes(64, 16, 8, 32, 16, (2, 64), 20.0, 2.0, 8) if asked.tiny else Shapes()
    shapes = replace(shapes, answer=asked.answer or shapes.answer)
    if asked.tp > 1:
        if not set(rows) <= {"one", "many"} or asked.peers:
            reader.error("--tp: rows one and many, without peers")
        join(asked.tp)
    model = None if asked.only_peers else ours(size, asked.tp)
    for row in rows if model is not None else ():
        with torch.no_grad():
            figures = ROWS[row](model, shapes)
        if model is not None and model.mesh.rank:
            continue
        print(
            json.dumps({"row": row, "by": "phalanx", "tp": asked.tp, **{k: round(v, 4) for k, v in figures.items()}}),
            flush=True,
        )
        gc.collect()
    if asked.peers or asked.only_peers:
        del model
        gc.collect()
        torch.cuda.empty_cache()
        for row, figures in peers(size, rows, shapes).items():
            print(
                json.dumps({"row": row, "by": "transformers", **{k: round(v, 4) for k, v in figures.items()}}),
                flush=True,
            )
    leave_world()


if __name__ == "__main__":
    main()
