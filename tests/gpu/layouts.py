"""Layouts over all GPUs of the machine against one GPU: the central test with NCCL (or gloo on the CPU)."""

from __future__ import annotations

import faulthandler
import pickle
import tempfile
import time
from collections.abc import Collection
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from phalanx.comm.mesh import Mesh, init_world, leave_world, local_device
from phalanx.config.run import Run
from phalanx.engine.build import build, init_weights
from phalanx.engine.step import accumulate, update
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.planning.plan import grid_of, without_layout
from phalanx.verifying.compare import random_weights
from tests.harness.parity import assemble, base_run, compare, parts_of, step_batches

RUN_S = 200.0  # a run that takes longer hangs; on a bare machine kernels are compiled and checked within it
STEPS = 3  # graphs are captured in the second and replayed from then on


def cases(world: int) -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    """name -> (model, layout, train); world 2 or 4 (or more: the dp of these grows)."""
    found = {
        "llama tp2": ("llama", dict(tp=2), {}),
        "gpt2 tp2, selective recompute": ("gpt2", dict(tp=2), dict(recompute="selective")),
        "llama pp2": ("llama", dict(pp=2), {}),
        "tied llama pp2 x 2 virtual stages": ("llama-tied", dict(pp=2, virtual_stages=2), dict(cuda_graphs="off")),
        "gpt2 pp2, gpipe, full recompute": ("gpt2", dict(pp=2, schedule="gpipe"), dict(recompute="full")),
        "gpt2 pp2, graphs": ("gpt2", dict(pp=2), dict(cuda_graphs="on")),
        "tied llama pp2 x 2 virtual stages, graphs": (
            "llama-tied",
            dict(pp=2, virtual_stages=2),
            dict(cuda_graphs="on"),
        ),
        "llama tp2, no overlap, no graphs": ("llama", dict(tp=2, tp_overlap="off"), dict(cuda_graphs="off")),
        "llama cp2, ring": ("llama", dict(cp=2), {}),
        "llama cp2, all-gather, no graphs": ("llama", dict(cp=2, cp_attention="allgather"), dict(cuda_graphs="off")),
        "llama cp2, heads": ("llama", dict(cp=2, cp_ulysses=2), {}),
        "llama cp2, heads, level 3, for long sequences, on the host": (
            "llama",
            dict(cp=2, cp_ulysses=2, sharding=3),
            dict(recompute="long", offload_layers=2, cuda_graphs="off"),
        ),
        "llama cp2, ring, for long sequences, on the host": (
            "llama",
            dict(cp=2),
            dict(recompute="long", offload_layers=3),
        ),
        "llama cp2, by document": ("llama", dict(cp=2, cp_degree="dynamic"), {}),
        "llama cp2, by document, graphs": ("llama", dict(cp=2, cp_degree="dynamic"), dict(cuda_graphs="on")),
        "tied llama cp2, by document, heads, full recompute": (
            "llama-tied",
            dict(cp=2, cp_ulysses=2, cp_degree="dynamic"),
            dict(recompute="full"),
        ),
        "tied llama cp2, by document, heads, full recompute, graphs": (
            "llama-tied",
            dict(cp=2, cp_ulysses=2, cp_degree="dynamic"),
            dict(recompute="full", cuda_graphs="on"),
        ),
        "mistral cp2, ring, full recompute": ("mistral", dict(cp=2), dict(recompute="full")),
        "nemotron_h cp2": ("nemotron_h", dict(cp=2), dict(cuda_graphs="off")),
        "nemotron_h cp2, graphs": ("nemotron_h", dict(cp=2), dict(cuda_graphs="on")),
        "olmo_hybrid cp2": ("olmo_hybrid", dict(cp=2), dict(cuda_graphs="off")),
        "olmo_hybrid cp2, graphs": ("olmo_hybrid", dict(cp=2), dict(cuda_graphs="on")),
        "kimi_linear cp2, full recompute": ("kimi_linear", dict(cp=2), dict(recompute="full")),
        "mamba2 tp2": ("mamba2", dict(tp=2), {}),
        "qwen2_5_vl dp, images of both replicas": ("qwen2_5_vl", dict(media_group=2), dict(cuda_graphs="off")),
        "qwen2_5_vl dp, images of both replicas, graphs": ("qwen2_5_vl", dict(media_group=2), dict(cuda_graphs="on")),
        "qwen2_5_vl tp2": ("qwen2_5_vl", dict(tp=2), {}),
        "qwen2_5_vl tp2, graphs": ("qwen2_5_vl", dict(tp=2), dict(cuda_graphs="on")),
        "llama tp2, offload": ("llama", dict(tp=2), dict(offload_layers=2, cuda_graphs="off")),
        "tied llama pp2 x 2 virtual stages, offload": (
            "llama-tied",
            dict(pp=2, virtual_stages=2),
            dict(offload_layers=1, recompute="selective", cuda_graphs="off"),
        ),
        "mixtral ep2, all-to-all, offload": ("mixtral", dict(ep=2, dispatch="alltoall"), dict(offload_layers=3)),
        "llama dp": ("llama", {}, {}),
        "llama dp, level 0": ("llama", dict(sharding=0), {}),
        "llama dp, level 2": ("llama", dict(sharding=2), {}),
        "llama dp, level 2, graphs": ("llama", dict(sharding=2), dict(cuda_graphs="on")),
        "llama dp, level 3": ("llama", dict(sharding=3), {}),
        "llama dp, no copies": ("llama", dict(dp_overlap="off"), {}),
        "llama dp, level 3, no copies": ("llama", dict(sharding=3, dp_overlap="off"), {}),
        "mixtral ep2, deterministic": ("mixtral", dict(ep=2), dict(deterministic=True)),
        "llama dp, level 3, graphs": ("llama", dict(sharding=3), dict(cuda_graphs="on")),
        "llama dp, level 3, full recompute": ("llama", dict(sharding=3), dict(recompute="full")),
        "tied llama dp, level 3, kept until the step's end": (
            "llama-tied",
            dict(sharding=3, reshard_after_forward=False),
            {},
        ),
        "mixtral ep2, all-gather, hidden, graphs": ("mixtral", dict(ep=2), {}),
        "mixtral ep2, all-to-all": ("mixtral", dict(ep=2, dispatch="alltoall"), {}),
        "mixtral ep2, all-to-all, graphs": ("mixtral", dict(ep=2, dispatch="alltoall"), dict(cuda_graphs="on")),
        "qwen3_moe etp2, all-to-all, full recompute": (
            "qwen3_moe",
            dict(etp=2, dispatch="alltoall"),
            dict(recompute="full"),
        ),
        "qwen3_moe etp2, all-to-all, full recompute, graphs": (
            "qwen3_moe",
            dict(etp=2, dispatch="alltoall"),
            dict(recompute="full", cuda_graphs="on"),
        ),
        "mixtral tp2 ep2, too little room": ("mixtral", dict(tp=2, ep=2, dispatch="allgather", expert_room=1.0), {}),
        "mixtral ep2, push, graphs": ("mixtral", dict(ep=2, dispatch="push"), {}),
        "mixtral tp2 ep2, push, too little room": ("mixtral", dict(tp=2, ep=2, dispatch="push", expert_room=1.0), {}),
        "deepseek_v3 etp2, push, full recompute": ("deepseek_v3", dict(etp=2, dispatch="push"), dict(recompute="full")),
        "qwen3_moe etp2": ("qwen3_moe", dict(etp=2), {}),
    }
    if world % 4 == 0:
        found |= {
            "llama tp4, 2 kv heads": ("llama", dict(tp=4), {}),
            "qwen3 tp2 pp2": ("qwen3", dict(tp=2, pp=2), {}),
            "gpt2 tp2 pp2": ("gpt2", dict(tp=2, pp=2), {}),
            "mixtral tp2 pp2, ep2 across tp": ("mixtral", dict(tp=2, pp=2, ep=2), {}),
            "qwen3_moe ep4": ("qwen3_moe", dict(ep=4, dispatch="allgather"), {}),
            "mixtral ep4, push without being told": ("mixtral", dict(ep=4), {}),
            "gpt_oss tp2 pp2, ep2, push, graphs": (
                "gpt_oss",
                dict(tp=2, pp=2, ep=2, dispatch="push"),
                dict(cuda_graphs="on"),
            ),
            "tied llama pp2, level 2": ("llama-tied", dict(pp=2, sharding=2), {}),
            "tied llama pp2, level 3": ("llama-tied", dict(pp=2, sharding=3), {}),
            "tied llama pp2, level 3, graphs": ("llama-tied", dict(pp=2, sharding=3), dict(cuda_graphs="on")),
            "llama tp2, level 3": ("llama", dict(tp=2, sharding=3), {}),
            "gpt2 pp2 x 2 virtual stages, level 3, prefetch 2": (
                "gpt2",
                dict(pp=2, virtual_stages=2, sharding=3, prefetch=2),
                {},
            ),
            "llama in pairs, level 3, optimizer over both": (
                "llama",
                dict(sharding=3, shard_group=2, shard_across="optimizer"),
                {},
            ),
            "mixtral ep2, level 3": ("mixtral", dict(ep=2, sharding=3), {}),
            "llama cp4, ring": ("llama", dict(cp=4), {}),
            "tied llama cp4, heads in pairs, all-gather": (
                "llama-tied",
                dict(cp=4, cp_ulysses=2, cp_attention="allgather"),
                {},
            ),
            "qwen3 cp4, by document": ("qwen3", dict(cp=4, cp_degree="dynamic"), {}),
            "qwen3 cp4, by document, graphs": ("qwen3", dict(cp=4, cp_degree="dynamic"), dict(cuda_graphs="on")),
            "mixtral cp2, by document, ep4": ("mixtral", dict(cp=2, cp_degree="dynamic", ep=4), {}),
            "mixtral cp2, by document, ep4, graphs": (
                "mixtral",
                dict(cp=2, cp_degree="dynamic", ep=4),
                dict(cuda_graphs="on"),
            ),
            "gpt_oss cp2 tp2, ep4": ("gpt_oss", dict(cp=2, tp=2, ep=4), {}),
            "deepseek_v3 cp2 pp2, graphs": ("deepseek_v3", dict(cp=2, pp=2), dict(cuda_graphs="on")),
            "tied llama pp4": ("llama-tied", dict(pp=4), {}),
            "llama tp2 pp2 x 2 virtual stages": ("llama-tied", dict(tp=2, pp=2, virtual_stages=2), dict(micro_batch=2)),
        }
    return found


def run_of(case: tuple[str, dict, dict], precision: str) -> Run:
    """In 16 bits experts are drawn: near a tie, rounding sends a token to others, on one device too (over 16 seeds
    losses are then off eight times as much), and two updates carry that into every weight. In fp64 and fp32 they are
    chosen by their scores."""
    model, layout, train = case
    run = base_run(model, 8, precision=precision, **train)
    made = replace(run.model, initializer_range=0.1)
    if precision not in ("fp64", "fp32") and hasattr(made, "router_forced_balance"):
        made = replace(made, router_forced_balance=True)
    return replace(run, model=made, layout=LayoutConfig(bucket_mb=0, **layout))


def documents_of(run: Run) -> bool | str:
    """Which documents sequences are made of."""
    return "packed" if run.layout.cp_degree == "dynamic" else False


def steps_of(run: Run, mesh: Mesh, documents: bool | str) -> dict:
    """tests.harness.parity.run_layout on a device; below fp64 with gentle weights, in which rounding stays rounding."""
    state, device = build(make_plan(run, mesh.grid.world), mesh), mesh.device
    exact = run.train.precision == "fp64"
    random_weights(state.model) if exact else init_weights(state)
    state.model.train()
    found: dict = {"losses": [], "norms": [], "grads": []}
    for step in range(STEPS):
        tokens = accumulate(state, [b.to(device) for b in step_batches(run, mesh, step, documents)])
        found["grads"].append(parts_of(state, "grad"))
        result = update(state, tokens, lr=1e-2 if exact else 1e-3)
        found["losses"].append(result.loss.item())
        found["norms"].append(result.grad_norm.item())
    state.buffers.ready()
    found["weights"] = parts_of(state, "master")
    return found


def in_order(runs: dict[str, Run], world: int) -> list[tuple[Any, list[tuple[str, Run]]]]:
    """By grid: NCCL takes about a second to open each communicator."""
    sizes = lambda item: repr(grid_of(item[1], world))  # noqa: E731
    return [
        (grid_of(members[0][1], world), members)
        for _, group in groupby(sorted(runs.items(), key=sizes), key=sizes)
        if (members := list(group))
    ]


def rank_main(rank: int, world: int, kind: str, folder: str, runs: dict[str, Run]) -> None:
    """Run them all, those of one grid in one world, and leave what was found in a file of the name of each."""
    torch.set_num_threads(1)
    device = local_device(kind, rank)
    for number, (grid, members) in enumerate(in_order(runs, world)):
        init_world(rank, world, f"file://{folder}/store-{number}", device, timeout_s=RUN_S + 20)
        mesh = Mesh(grid, rank, device)
        for name, run in members:
            with hang_of(folder, rank).open("w") as where:
                faulthandler.dump_traceback_later(RUN_S, exit=True, file=where)
                found = steps_of(run, mesh, documents_of(run))
                faulthandler.cancel_dump_traceback_later()
            part = file_of(folder, name, rank)
            part.with_suffix(".part").write_bytes(pickle.dumps(found))
            part.with_suffix(".part").rename(part)
        mesh.close()
        leave_world()


def file_of(folder: str, name: str, rank: int) -> Path:
    return Path(folder) / f"{name}-{rank}.found"


def hang_of(folder: str, rank: int) -> Path:
    return Path(folder) / f"{rank}.hang"


def hangs(folder: str, world: int) -> str:
    """Where ranks were when RUN_S had passed: the newest frames of each."""
    texts = [(rank, hang_of(folder, rank).read_text()) for rank in range(world) if hang_of(folder, rank).exists()]
    return "".join(f"\nrank {rank} after {RUN_S:.0f} s:\n{text[:1200]}" for rank, text in texts if text)


def check_layouts(
    kind: str, world: int, precisions: tuple[str, ...] = ("fp64", "fp32", "bf16"), parts: Collection[str] = ("",)
) -> dict[str, str]:
    """name (that contains one of `parts`) -> "ok ..." or what is wrong. fp64: as the central test. Below: losses
    against one device's fp32.

    Each is judged, and printed, while the next ones run: what a limit of time, or a rank that dies, leaves counts.
    """
    runs = {
        f"{name}, {p}": run_of(case, p)
        for name, case in cases(world).items()
        if any(part in name for part in parts)
        for p in precisions
    }
    table: dict[str, str] = {}
    every: dict[str, list[dict]] = {}
    truths: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        ranks = torch.multiprocessing.spawn(rank_main, args=(world, kind, folder, runs), nprocs=world, join=False)
        for name, run in (member for _, members in in_order(runs, world) for member in members):
            try:
                every[name] = results = results_of(ranks, folder, name, world)
                found = {name: judge(run, results, local_device(kind, 0), truths)}
            except (AssertionError, ProcessExitedException, ProcessRaisedException) as error:
                where = hangs(folder, world) if isinstance(error, ProcessExitedException) else ""
                found = {name: f"FAILED {str(error)[-300:]}{where}"}
            found |= {
                f"{a}, bits": same_bits(every[a], every[b])
                for a, b in with_graphs(every)
                if f"{a}, bits" not in table and name in (a, b)
            }
            for what, text in found.items():
                print(f"{time.strftime('%X')} {what}: {text}", flush=True)
            table |= found
    return {f"{world} ranks: {name}": text for name, text in table.items()}


def results_of(ranks: Any, folder: str, name: str, world: int) -> list[dict]:
    """What each rank found, when all have. Raises what ended a rank before."""
    files = [file_of(folder, name, rank) for rank in range(world)]
    while not all(f.exists() for f in files):
        if ranks.join(timeout=0.05) and not all(f.exists() for f in files):
            raise AssertionError("the ranks ended before it")
    found = [pickle.loads(f.read_bytes()) for f in files]
    for f in files:
        f.unlink()
    return found


def with_graphs(names: Collection[str]) -> list[tuple[str, str]]:
    """Runs with graphs, each with the same run without."""
    return [(name, other) for name in names if (other := name.replace(", graphs", "")) != name and other in names]


def same_bits(found: list[dict], others: list[dict]) -> str:
    for rank, (a, b) in enumerate(zip(found, others)):
        parts = [part for step in range(STEPS) for part in zip(a["grads"][step], b["grads"][step])] + list(
            zip(a["weights"], b["weights"])
        )
        wrong = [x[0] for x, y in parts if not np.array_equal(x[3], y[3], equal_nan=True)]
        if wrong or a["losses"] != b["losses"] or a["norms"] != b["norms"]:
            return f"FAILED rank {rank}: graphs change {wrong[:3]}, losses {a['losses']} against {b['losses']}"
    return "ok same bits"


def judge(run: Run, results: list[dict], device: torch.device, truths: dict[str, dict]) -> str:
    """`truths`: of runs on one device, which many layouts share."""
    alone = without_layout(run)
    exact = run.train.precision == "fp64"
    train = replace(
        alone.train,
        precision="fp64" if exact else "fp32",
        recompute="none",
        recompute_ops=[],
        cuda_graphs="auto",
        offload_layers=0,
    )
    truth_run = replace(alone, train=train)
    key = repr((truth_run, documents_of(run)))
    if key not in truths:
        truths[key] = steps_of(truth_run, Mesh(grid_of(truth_run, 1), 0, device), documents_of(run))
    truth = truths[key]
    if exact:
        whole = {**truth, "grads": [assemble([g]) for g in truth["grads"]], "weights": assemble([truth["weights"]])}
        compare(results, whole, STEPS)
        return "ok, fp64 parity"
    keys, bound = (("losses", "norms"), 1e-4) if run.train.precision == "fp32" else (("losses",), 2.0**-7)
    worst = max(off(r, truth, keys) for r in results)
    if not worst <= bound:
        own = steps_of(alone, Mesh(grid_of(alone, 1), 0, device), documents_of(run))
        raise AssertionError(
            f"{' and '.join(keys)} are off by {worst:.2e} (bound {bound:.0e}; one device in the same precision is off "
            f"by {off(own, truth, keys):.2e})"
        )
    return f"ok, {worst:.1e}"


def off(found: dict, truth: dict, keys: Collection[str]) -> float:
    """The largest relative difference."""
    return max(abs(a / b - 1) for key in keys for a, b in zip(found[key], truth[key]))
