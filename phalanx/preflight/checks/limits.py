"""Limits of a process: open files and locked memory."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch

from phalanx.preflight.check import Finding, Looks, NodeCheck, NodeView

FILES = 512  # that a rank opens for itself
FILES_EACH = 8  # for each node that it talks to
INFINIBAND = Path("/sys/class/infiniband")
UNLIMITED = -1


class Limits(NodeCheck):
    """A rank opens sockets to its peers, token files and checkpoints; RDMA locks its buffers in memory."""

    name = "limits"
    brief = True

    def look(self, view: NodeView, order: Any) -> dict[str, Any]:
        """Hard limits: phalanx raises the soft one of open files itself."""
        memory = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return {
            "files": plain(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
            "memory": plain(memory),
            "rdma": has_rdma(),
            "gpus": torch.cuda.device_count(),
        }

    def judge(self, looks: Looks) -> list[Finding]:
        answers, found = looks.of(0), []
        needed = FILES + FILES_EACH * len(looks.names)
        most = max((said["memory"] if said["memory"] >= 0 else float("inf") for said in answers.values()), default=0)
        for node, said in answers.items():
            if UNLIMITED < said["files"] < needed:
                text = f"a process may open only {said['files']:,} files, {needed:,} are needed: ulimit -n 65536"
                found.append(Finding(self.name, (node,), text))
            memory = said["memory"]
            if memory == UNLIMITED:
                continue
            if said["rdma"] and said["gpus"]:
                text = (
                    f"a process may lock only {memory // 1024:,} KiB of memory, and RDMA needs all: ulimit -l unlimited"
                )
                found.append(Finding(self.name, (node,), text))
            elif memory < most:
                text = f"a process may lock only {memory // 1024:,} KiB of memory, on other nodes more: ulimit -l"
                found.append(Finding(self.name, (node,), text, "warning"))
        return found


def plain(limit: int) -> int:
    return UNLIMITED if limit == resource.RLIM_INFINITY else limit


def has_rdma() -> bool:
    """Whether the node has InfiniBand or RoCE adapters."""
    return INFINIBAND.is_dir() and any(INFINIBAND.iterdir())
