"""Time of a config's real training step, and its kernels by name: what the rows of 2026-11-21 in benchmarks/results were measured with.

WARM=8 STEPS=8 [PROFILE=1] torchrun --nproc-per-node N benchmarks/steps.py CONFIG [a.b=c ...]      (or plain python for one GPU)

Fresh random tokens in every micro-batch, made on the GPU; the host's clock around each whole step, the device idle at both ends; rank 0's
times. `phalanx bench step` does the same through the data loader, over all ranks, and adds ceilings and the step budget.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict

import torch

from phalanx.base.batch import Batch
from phalanx.base.placement import Placement
from phalanx.comm.mesh import Mesh, init_world, leave_world, local_device
from phalanx.launch.env import read_placement
from phalanx.train.build import build, init_weights
from phalanx.train.flops import step_flops
from phalanx.train.load import load_run
from phalanx.train.plan import make_plan
from phalanx.train.step import train_step

PEAK = 989e12  # dense bf16 of an H200, FLOP/s


def main() -> None:
    run = load_run(sys.argv[1], sys.argv[2:])
    where = read_placement(os.environ)[0] or Placement()
    device = local_device("cuda", where.local_rank)
    init_world(where.rank, where.world_size, where.init_method, device, 120.0)
    plan = make_plan(run, where.world_size)
    mesh = Mesh(plan.grid, where.rank, device)
    state = build(plan, mesh)
    init_weights(state)
    state.train()
    t = run.train
    generator = torch.Generator(device).manual_seed(mesh.dp.index)
    positions = torch.arange(t.seq_length, device=device).repeat(t.micro_batch)

    def batch() -> Batch:
        ids = torch.randint(0, run.model.vocab_size, (t.micro_batch * t.seq_length + 1,), generator=generator, device=device)
        return Batch(ids[:-1].clone(), ids[1:].clone(), positions, torch.zeros_like(positions), t.micro_batch, t.seq_length)

    def step() -> None:
        train_step(state, [batch() for _ in range(t.global_batch // t.micro_batch // plan.grid.dp)], 1e-4)
        torch.cuda.synchronize()

    for _ in range(int(os.environ.get("WARM", 10))):
        step()
    times = []
    for _ in range(int(os.environ.get("STEPS", 10))):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    times.sort()
    median = times[len(times) // 2]
    rate = step_flops(run) / median / where.world_size
    if mesh.rank == 0:
        print(f"{' '.join(sys.argv[1:])}: median {1e3 * median:.1f} ms ({1e3 * times[0]:.1f}-{1e3 * times[-1]:.1f}), "
              f"{t.global_batch * t.seq_length / median / where.world_size:,.0f} tokens/s/GPU, {rate / 1e12:.1f} TFLOP/s, "
              f"MFU {100 * rate / PEAK:.1f} %, peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)  # fmt: skip
    if os.environ.get("PROFILE"):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
        if mesh.rank == 0:
            report(profile)
    mesh.close()
    leave_world()


def report(profile: torch.profiler.profile) -> None:
    ms, count = defaultdict(float), defaultdict(int)
    for e in profile.events():
        if e.device_type == torch.autograd.DeviceType.CUDA:
            ms[e.name] += e.time_range.elapsed_us() / 1e3
            count[e.name] += 1
    for name, spent in sorted(ms.items(), key=lambda item: -item[1])[:30]:
        print(f"  {spent:8.2f} ms {count[name]:6d}  {name[:120]}")


if __name__ == "__main__":
    main()
