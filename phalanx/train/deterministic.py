"""train.deterministic: what a run must be like for it, and what this process tells torch. The sums themselves are in data_parallel/fixed_order.py."""

from __future__ import annotations

import os

import torch
from torch.utils import deterministic

from phalanx.base.errors import Problem
from phalanx.base.rules import powers_of_two, problem
from phalanx.comm.mesh import Mesh
from phalanx.train.config import Run


def check_deterministic(run: Run, world: int) -> list[Problem]:
    """Where the bits would depend on the layout all the same."""
    c, layout, model = run.train, run.layout, run.model
    if not c.deterministic:
        return []
    found, dp = [], world // max(1, layout.tp * layout.cp * layout.pp)

    def needs(rule: str, because: dict) -> None:
        found.append(problem("train", c, "deterministic", rule, because, (False,)))

    if dp & (dp - 1):
        needs("needs a power of two of data-parallel ranks", {"dp": dp, "nearest": ", ".join(map(str, powers_of_two(dp)))})
    group = layout.shard_group or layout.cp
    if group > 0 < layout.cp and group % layout.cp and layout.cp % group:
        because = {"layout.cp": layout.cp, "layout.shard_group": layout.shard_group}
        needs("needs a shard_group that is a multiple of cp, or divides it: groups hold all or some parts of the same sequences", because)
    experts, dense = layout.ep * layout.etp, layout.tp * layout.cp
    if model.routed_experts and max(experts, dense) % max(1, min(experts, dense)):
        because = {"layout.ep * layout.etp": experts, "layout.tp * layout.cp": dense}
        needs("needs ep * etp that is a multiple of tp * cp, or divides it: ranks share experts with whole micro-batches or parts of one", because)
    return found


def be_deterministic(mesh: Mesh) -> None:
    """Have torch choose kernels that give the same bits each time, or raise where it has none, until the mesh is closed.

    On GPUs that rules out cuDNN's attention, and makes flash attention add up in a fixed order. cuBLAS needs workspaces of its
    own for it, which it asks the environment for when it is first used.
    """
    before, filling = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]

    def restore() -> None:
        torch.use_deterministic_algorithms(before)
        deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # else every torch.empty is filled, to show who reads too early
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    mesh.closing.append(restore)
