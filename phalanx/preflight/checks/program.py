"""Programs: versions, the code of the package itself, and the config, which must be the same on all nodes."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from phalanx.base.version import VERSION
from phalanx.preflight.check import Finding, Looks, NodeCheck, NodeView, differing

ALIKE = (
    "python",
    "numpy",
    "cuda",
    "nccl",
    "settings of NCCL and gloo",
)  # of which a difference is a warning: most of them work together
PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")
OWN = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA")  # that may differ, because interfaces do


class ProgramVersions(NodeCheck):
    """What each node is about to run."""

    name = "program"
    brief = True

    def look(self, view: NodeView, order: Any) -> dict[str, str]:
        found = {
            "phalanx": VERSION,
            "torch": torch.__version__,
            "code of phalanx": code_hash(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "cuda": str(torch.version.cuda or torch.version.hip or "none"),
            "settings of NCCL and gloo": settings(view.env),
        }
        if view.config:
            found["config"] = config_hash(view.config)
        if torch.cuda.is_available() and torch.version.hip is None:
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        return found

    def judge(self, looks: Looks) -> list[Finding]:
        answers = looks.of(0)
        found = []
        for what in dict.fromkeys(key for said in answers.values() for key in said):
            values = {node: said.get(what, "none") for node, said in answers.items()}
            found += differing(self.name, what, values, "warning" if what in ALIKE else "bad")
        return found


def code_hash() -> str:
    """Of every .py file of the package that this process would import."""
    total = xxhash.xxh3_64()
    root = Path(__file__).parents[2]
    for path in sorted(root.rglob("*.py")):
        total.update(str(path.relative_to(root)).encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def config_hash(config: Sequence[str]) -> str:
    """Of the config file's bytes and the overrides. Errors of reading it are those of the file."""
    path, *overrides = config
    total = xxhash.xxh3_64(repr(overrides).encode())
    total.update(Path(path).read_bytes() if Path(path).is_file() else path.encode())
    return total.hexdigest()


def settings(env: Mapping[str, str]) -> str:
    """Environment variables of NCCL and gloo, except those that differ between nodes for good reasons."""
    found = {name: value for name, value in env.items() if name.startswith(PREFIXES) and name not in OWN}
    return " ".join(f"{name}={found[name]}" for name in sorted(found)) or "none"
