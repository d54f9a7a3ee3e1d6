"""Machines: cores, memory and GPUs, which should be the same on all nodes of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from phalanx.preflight.check import Finding, Looks, NodeCheck, NodeView, differing
from phalanx.preflight.robust import threshold, z_scores

PAGES = 0.02  # of a node's memory: what firmware and crash kernels keep differs by about that much


class Machine(NodeCheck):
    """A node that lacks a GPU, a memory module or cores, or that runs on another CPU."""

    name = "machine"

    def look(self, view: NodeView, order: Any) -> dict[str, Any]:
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return {
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "gpus": len(gpus),
            "kinds": ", ".join(sorted(set(gpus))) or "none",
            "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "adapters": adapters(),
        }

    def judge(self, looks: Looks) -> list[Finding]:
        answers = looks.of(0)

        def values(key: str) -> dict[int, Any]:
            return {node: said[key] for node, said in answers.items()}

        found = differing(self.name, "number of GPUs", values("gpus"))
        found += differing(self.name, "GPU", values("kinds")) if not found else []
        found += differing(self.name, "usable cores", values("cores"), "warning")
        found += differing(self.name, "active network adapters", values("adapters"), "warning")
        memory = {node: float(said["memory"]) for node, said in answers.items()}
        limit, scores = threshold(len(memory)), z_scores(memory, PAGES * max(memory.values(), default=0.0))
        return found + [
            Finding(self.name, (node,), f"memory {memory[node] / 2**30:.1f} GiB, less than the others", "warning")
            for node, z in scores.items()
            if z < -limit
        ]


def adapters() -> str:
    """Active RDMA ports with their rates, as the kernel lists them."""
    found = []
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        try:
            state, rate = ((port / name).read_text(encoding="ascii").strip() for name in ("state", "rate"))
        except OSError:
            continue
        if "ACTIVE" in state:
            found.append(rate)
    return ", ".join(f"{found.count(rate)} x {rate}" for rate in dict.fromkeys(found)) or "none"
