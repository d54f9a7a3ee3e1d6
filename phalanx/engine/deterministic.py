"""train.deterministic: what this process sets in torch for it. The sums themselves are in data_parallel/fixed_order.py,
the layouts that it supports in config/deterministic_check.py."""

from __future__ import annotations

import os

import torch
from torch.utils import deterministic

from phalanx.comm.mesh import Mesh


def be_deterministic(mesh: Mesh) -> None:
    """Make torch choose kernels that give the same bits each time, or raise if it has none, until the mesh is closed.

    On GPUs that rules out cuDNN's attention, and makes flash attention use a fixed order of sums. cuBLAS needs separate
    workspaces for it, which it reads from the environment when it is first used.
    """
    before, filling = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]

    def restore() -> None:
        torch.use_deterministic_algorithms(before)
        deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # otherwise every torch.empty would be filled, to reveal premature reads
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    mesh.closing.append(restore)
