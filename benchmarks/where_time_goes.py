"""Where the milliseconds of a training step go on rank 0: kernels by kind, and the time the GPU waits for the host.

torchrun --nproc-per-node N benchmarks/where_time_goes.py CONFIG [a.b=c ...]      (or plain python for one GPU)
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict

import torch

from phalanx.base.placement import Placement
from phalanx.comm.mesh import Mesh, init_world, leave_world, local_device
from phalanx.data.loader import micro_batch_samples, train_loader
from phalanx.launch.env import read_placement
from phalanx.train.build import build, init_weights
from phalanx.train.load import load_run
from phalanx.train.plan import make_plan
from phalanx.train.step import train_step

KINDS = [  # the first pattern found in a kernel's name decides
    ("communication", ("nccl",)),
    ("attention", ("cudnn", "flash", "fmha", "sdpa")),
    ("optimizer", ("adam",)),
    ("matmul", ("gemm", "nvjet", "cutlass", "matmul", "splitk", "wgmma")),
    ("memory copies and fills", ("memcpy", "memset", "copy", "fill")),
    ("reductions", ("reduce", "softmax", "logsumexp", "sum_")),
    ("pointwise", ("elementwise", "vectorized", "where", "index", "gather", "scatter")),
]


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, patterns in KINDS if any(p in lower for p in patterns)), "other")


def main() -> None:
    run = load_run(sys.argv[1], sys.argv[2:])
    where = read_placement(os.environ)[0] or Placement()
    device = local_device("cuda" if torch.cuda.is_available() else "cpu", where.local_rank)
    init_world(where.rank, where.world_size, where.init_method, device, 120.0)
    plan = make_plan(run, where.world_size)
    mesh = Mesh(plan.grid, where.rank, device)
    state = build(plan, mesh)
    init_weights(state)
    state.train()
    train = run.train
    loader = train_loader(run.data, seq_length=train.seq_length, seed=train.seed, vocab_size=run.model.vocab_size, samples=train.global_batch * 20)

    def step(number: int) -> None:
        ids = micro_batch_samples(number * train.global_batch, train.global_batch, train.micro_batch, plan.grid.dp, mesh.dp.index)
        train_step(state, [loader.batch(i).to(device) for i in ids], 1e-4)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for n in range(6):
        step(n)
    wait()
    began = time.perf_counter()
    for n in range(6, 10):
        step(n)
    wait()
    plain = (time.perf_counter() - began) / 4
    activities = [torch.profiler.ProfilerActivity.CPU] + ([torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with torch.profiler.profile(activities=activities) as profile:
        for n in range(10, 12):
            step(n)
        wait()
    if mesh.rank == 0 and device.type == "cuda":
        report(profile, plain, sys.argv[1:])
    mesh.close()
    leave_world()


def report(profile: torch.profiler.profile, seconds: float, what: list[str]) -> None:
    totals: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    names: dict[str, float] = defaultdict(float)
    spans = []
    for e in profile.events():
        if e.device_type == torch.autograd.DeviceType.CUDA:
            kind = kind_of(e.name)
            totals[kind] += e.time_range.elapsed_us() / 2e3
            counts[kind] += 1
            names[e.name] += e.time_range.elapsed_us() / 2e3
            if kind != "communication":
                spans.append((e.time_range.start, e.time_range.end))
    busy, end = 0.0, 0.0
    for a, b in sorted(spans):
        busy += max(0.0, b - max(a, end))
        end = max(end, b)
    busy /= 2e3
    print(f"\n{' '.join(what)}: {seconds * 1e3:.2f} ms a step without the profiler; the compute kernels of a step take {busy:.2f} ms")
    for kind, ms in sorted(totals.items(), key=lambda item: -item[1]):
        print(f"  {kind:26s} {ms:9.2f} ms  {counts[kind] // 2:6d} launches")
    print(f"  {'not computing':26s} {seconds * 1e3 - busy:9.2f} ms  (exposed communication, pipeline bubble, host)")
    for name, ms in sorted(names.items(), key=lambda item: -item[1])[:12]:
        print(f"    {ms:8.2f} ms  {name[:110]}")


if __name__ == "__main__":
    main()
