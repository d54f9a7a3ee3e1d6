"""What all peers are measured on and how: the workloads, the one FLOP formula, fresh tokens, timed steps, the line
of the result."""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median

import torch
import torch.distributed as dist

PEAK = 989e12  # dense bf16 of H100 SXM and H200, FLOP/s


@dataclass(frozen=True)
class Workload:
    """A Llama of untied embeddings. Sequences: `micro` at a time on a rank, `batch` a step over all `gpus`. With
    `experts`: `chosen` of them per token, each `inner` wide."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    length: int
    micro: int
    batch: int
    gpus: int
    theta: float = 500000.0
    experts: int = 0
    chosen: int = 1

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def flop(self) -> float:
        """Of a step: 6 N T + 6 A S T. N: weights in matmuls (no embedding table, no norms); A: layers * heads *
        head; S: length; causal attention counted as half the square; recomputed work not counted."""
        q, kv = self.heads * self.head, self.kv_heads * self.head
        layer = (
            self.hidden * (q + 2 * kv)
            + q * self.hidden
            + 3 * self.hidden * self.inner * self.chosen
            + self.hidden * self.experts
        )
        weights = self.layers * layer + self.vocab * self.hidden
        return 6.0 * self.tokens * (weights + self.layers * q * self.length)


EIGHT = {
    "hidden": 4096,
    "inner": 14336,
    "heads": 32,
    "kv_heads": 8,
    "head": 128,
    "vocab": 128256,
    "length": 8192,
    "micro": 1,
}
WORKLOADS = {
    "W1": Workload(layers=8, batch=8, gpus=1, **EIGHT),
    "W2": Workload(layers=32, batch=16, gpus=4, **EIGHT),
    "W4": Workload(
        layers=8,
        hidden=2048,
        inner=768,
        heads=16,
        kv_heads=4,
        head=128,
        vocab=128256,
        length=4096,
        micro=2,
        batch=32,
        gpus=4,
        experts=64,
        chosen=8,
    ),
    "W5": Workload(
        layers=32,
        hidden=2048,
        inner=8192,
        heads=16,
        kv_heads=8,
        head=128,
        vocab=128256,
        length=4096,
        micro=1,
        batch=16,
        gpus=4,
    ),
    "small": Workload(
        layers=12,
        hidden=768,
        inner=2048,
        heads=12,
        kv_heads=12,
        head=64,
        vocab=50304,
        length=1024,
        micro=32,
        batch=64,
        gpus=1,
        theta=10000.0,
    ),
}


def arguments(description: str, workloads: tuple[str, ...]) -> argparse.ArgumentParser:
    """Options that every peer has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=workloads)
    parser.add_argument("--out", help="append the result to this file, a line of JSON")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    return parser


def start(workload: Workload) -> tuple[int, int]:
    """Join the world that torchrun started: (rank, world size)."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world != workload.gpus:
        raise SystemExit(f"this workload is for {workload.gpus} GPUs: torchrun --nproc-per-node {workload.gpus}")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    return rank, world


def fresh_tokens(
    workload: Workload, data_rank: int, micro_batches: int, device: str = "cuda"
) -> Iterator[torch.Tensor]:
    """Random (micro, length + 1) int64, others in every micro-batch; made before they are needed."""
    generator = torch.Generator(device).manual_seed(100 + data_rank)
    shape = (workload.micro, workload.length + 1)
    made = [torch.randint(workload.vocab, shape, generator=generator, device=device) for _ in range(micro_batches)]
    return iter(made)


def timed(step: Callable[[], object], warmup: int, steps: int) -> list[float]:
    """Seconds of each step after the warm-up: the host's clock around it, the GPU idle at both ends; of each the
    slowest rank's."""
    seconds = []
    for number in range(warmup + steps):
        if number == warmup:
            torch.cuda.reset_peak_memory_stats()
            gc.collect()
            gc.disable()
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if number >= warmup:
            seconds.append(time.perf_counter() - began)
    gc.enable()
    slowest = torch.tensor(seconds, dtype=torch.float64, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def report(
    name: str, workload: Workload, seconds: list[float], losses: list[float], out: str | None, **extra: object
) -> None:
    """One line for people, on rank 0, and one of JSON. losses: of the first and the last step, to see that it
    learned or at least ran."""
    peak = torch.tensor(torch.cuda.max_memory_allocated() / 2**30, dtype=torch.float64, device="cuda")
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if dist.get_rank() != 0:
        return
    middle, flops = median(seconds), workload.flop / median(seconds) / workload.gpus
    found = {
        "peer": name,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "step_ms": 1e3 * middle,
        "min_ms": 1e3 * min(seconds),
        "max_ms": 1e3 * max(seconds),
        "timed": len(seconds),
        "tokens_per_s_per_gpu": workload.tokens / middle / workload.gpus,
        "tflops_per_gpu": flops / 1e12,
        "mfu": flops / PEAK,
        "peak_gib": peak.item(),
        "losses": losses,
        "workload": asdict(workload),
        **extra,
    }
    print(
        f"{name}: {1e3 * middle:.1f} ms ({1e3 * min(seconds):.1f}-{1e3 * max(seconds):.1f}), "
        f"{found['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU, "
        f"{flops / 1e12:.1f} TFLOP/s, MFU {100 * flops / PEAK:.1f} %, peak {peak.item():.1f} GiB, losses {losses}",
        flush=True,
    )
    if out:
        with open(out, "a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
