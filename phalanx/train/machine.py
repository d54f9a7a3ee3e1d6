"""What this machine can do, and whether a run's rank may start on it: the same check for the command line and for Python."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Literal

from phalanx.base.placement import Placement
from phalanx.comm.mesh import many_queues
from phalanx.train.checks import Facts, check, raise_problems
from phalanx.train.config import Run


def check_here(run: Run, placement: Placement) -> None:
    """Every problem of a run on this machine at once, as `phalanx train` finds them; ConfigError, or DataError or CheckpointError where nothing
    but paths of one kind is missing. Writes nothing."""
    many_queues()
    machine = describe_machine(run.train.device)
    raise_problems(check(run, replace(machine, world_size=placement.world_size, local_ranks=placement.local_rank + 1)))


def describe_machine(wanted: Literal["auto", "cpu", "cuda"]) -> Facts:
    """What this machine can do, for a world of one. Imports torch if there may be a GPU."""
    missing = tuple(name for name in ("tensorboard", "wandb") if importlib.util.find_spec(name) is None)
    if wanted == "cpu":
        return Facts(missing=missing)
    import torch

    gpus = torch.cuda.device_count()
    if gpus == 0:
        return Facts(device_count=0, missing=missing)
    from phalanx.ops.kernels import has_triton
    from phalanx.ops.wheels import WHEELS, absent, incapable

    name, (major, minor) = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
    hip = torch.version.hip is not None
    wheels = ((op, incapable((major, minor), not hip) or absent(op)) for op in WHEELS)
    return Facts(
        device="cuda", device_count=gpus, device_name=name, bf16_ok=hip or major >= 8, fp16_ok=hip or major >= 6,
        capability=(0, 0) if hip else (major, minor),
        triton_ok=not hip and major >= 8 and has_triton(), no_wheels=tuple((op, why) for op, why in wheels if why), missing=missing,
    )  # fmt: skip
