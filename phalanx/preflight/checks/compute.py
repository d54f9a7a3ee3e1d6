"""Compute: matmuls and memory copies per second, of each GPU against all others, or of the CPU where there are none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch

from phalanx.preflight.check import Finding, Looks, NodeCheck, NodeView, amount
from phalanx.preflight.robust import slow

MACHINE = Path("/proc/sys/kernel/random/boot_id")
REPEATS = 3
LOOKS = 4
GPU_SIZE = 8192  # of matrices in bf16
GPU_CALLS = 10  # of a measurement
CPU_SIZE = 384  # of matrices in fp32
CPU_S = 0.05  # of a measurement
COPY = {"cuda": 2**30, "cpu": 2**24}  # bytes
MEASURES = {"matmuls": ("TFLOP/s", 1e12), "copies": ("GB/s", 1e9)}


class Compute(NodeCheck):
    """Nodes that share a machine (containers) take turns. A slow one is measured again before it is named, up to
    LOOKS times: something else may have run there.

    The first order asks for machines; the others list nodes that measure at the same time.
    """

    name = "compute"
    limit_s = 30.0

    def next_order(self, looks: Looks) -> Any:
        if not looks.answers:
            return "machine"
        turns = turns_of(looks.of(0))
        done = [order for order, _ in looks.answers[1:]]
        if len(done) < len(turns):
            return turns[len(done)]
        count = {node: sum(node in order for order in done) for node in looks.of(0)}
        suspects = {node for node, _, _ in slow_devices(looks) if count[node] < LOOKS}
        least = min((count[node] for node in suspects), default=0)
        repeated = turns_of({node: looks.of(0)[node] for node in suspects if count[node] == least})
        return repeated[0] if repeated else None

    def look(self, view: NodeView, order: Any) -> Any:
        """By device ("0" is the first GPU, "cpu"), by measure: rates of repeats, per second."""
        if order == "machine":
            return MACHINE.read_text(encoding="ascii").strip() if MACHINE.exists() else f"node {view.number}"
        if view.number not in order:
            return None
        if not torch.cuda.is_available():
            return {"cpu": measured(torch.device("cpu"))}
        return {str(i): measured(torch.device("cuda", i)) for i in range(torch.cuda.device_count())}

    def judge(self, looks: Looks) -> list[Finding]:
        found = []
        for (node, device, what), ratio in slow_devices(looks).items():
            where = "CPU" if device == "cpu" else f"GPU {device}"
            text = f"{where}: {what} at {100 * ratio:.0f} % of the median"
            found.append(Finding(self.name, (node,), text, "bad", {"ratio": ratio}))
        return found

    def figures(self, looks: Looks) -> dict[str, str]:
        lines = {}
        for what, (unit, size) in MEASURES.items():
            best = [max(of) for key, of in rates(looks).items() if key[2] == what]
            if best:
                middle, low, high = (amount(of(best) / size) for of in (median, min, max))
                lines[what] = f"median {middle} {unit}, {low} to {high}"
        return lines


def turns_of(machines: Mapping[int, str]) -> list[list[int]]:
    """Nodes that measure at the same time: one of each machine."""
    by: dict[str, list[int]] = {}
    for node, machine in sorted(machines.items()):
        by.setdefault(machine, []).append(node)
    return [[nodes[i] for nodes in by.values() if i < len(nodes)] for i in range(max(map(len, by.values()), default=0))]


def rates(looks: Looks) -> dict[tuple[int, str, str], list[float]]:
    """By node, device and measure: all repeats so far."""
    found: dict[tuple[int, str, str], list[float]] = {}
    for number in range(1, len(looks.answers)):
        for node, devices in looks.of(number).items():
            for device, measures in devices.items():
                for what, values in measures.items():
                    found.setdefault((node, device, what), []).extend(values)
    return found


def slow_devices(looks: Looks) -> dict[tuple[int, str, str], float]:
    """Devices that are slow, each measure compared with itself, and their ratio to the median."""
    everything = rates(looks)
    found: dict[tuple[int, str, str], float] = {}
    for what in MEASURES:
        found |= slow({key: of for key, of in everything.items() if key[2] == what})
    return found


def measured(device: torch.device) -> dict[str, list[float]]:
    """FLOP per second of matmuls, and bytes per second read and written by copies."""
    gpu = device.type == "cuda"
    size = GPU_SIZE if gpu else CPU_SIZE
    x = torch.ones(size, size, device=device, dtype=torch.bfloat16 if gpu else torch.float32)
    out = torch.empty_like(x)
    source = torch.zeros(COPY[device.type], dtype=torch.uint8, device=device)
    to = torch.empty_like(source)
    timed = gpu_rates if gpu else cpu_rates
    with torch.cuda.device(device) if gpu else nullcontext():  # events are recorded on the current device
        return {
            "matmuls": [2.0 * size**3 * rate for rate in timed(lambda: torch.matmul(x, x, out=out))],
            "copies": [2.0 * source.numel() * rate for rate in timed(lambda: to.copy_(source))],
        }


def cpu_rates(call: Callable[[], Any]) -> list[float]:
    """Calls per second; a machine that gives this process only part of its time shows that."""
    call()
    found = []
    for _ in range(REPEATS):
        began, count = time.perf_counter(), 0
        while (took := time.perf_counter() - began) < CPU_S:
            call()
            count += 1
        found.append(count / took)
    return found


def gpu_rates(call: Callable[[], Any]) -> list[float]:
    """The same by CUDA events, on the current device."""
    call()
    found = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(GPU_CALLS):
            call()
        end.record()
        end.synchronize()
        found.append(GPU_CALLS / (start.elapsed_time(end) / 1e3))
    return found
