"""What this machine can do, and whether a run's ranks may start on it: the same checks for the command line and for
Python."""

from __future__ import annotations

import importlib.util
import socket
from dataclasses import replace
from typing import Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.free_memory import gpu_memory, host_memory
from phalanx.base.placement import Placement
from phalanx.comm.mesh import many_queues
from phalanx.config.device_check import Facts
from phalanx.config.run import Run
from phalanx.forecast.capacity import DoesNotFit, MachineMemory, check_capacity
from phalanx.forecast.check import check, raise_problems


def check_here(run: Run, placement: Placement) -> None:
    """Raise every problem of a run on this machine at once, as `phalanx train` does: ConfigError, or DataError or
    CheckpointError if only paths of one kind are missing. Writes nothing."""
    many_queues()
    machine = describe_machine(run.train.device)
    raise_problems(check(run, replace(machine, world_size=placement.world_size, local_ranks=placement.local_rank + 1)))


@dataclass(frozen=True)
class Fit:
    """Whether this machine's memory holds its ranks. warning: what to log before the run starts; placement: with a
    refusal that other ranks must learn."""

    placement: Placement | None
    warning: str | None = None


def fit_here(run: Run, world: int, placement: Placement | None, force: bool = False) -> Fit:
    """Compare the forecast with the memory of this machine (`capacity`). placement: None if the ranks are not started
    yet.

    Raises DoesNotFit, unless ranks on other machines would wait for those here; they learn of it when all have met.
    """
    memory = memory_here(run, world, placement)
    try:
        return Fit(placement, check_capacity(run, world, memory, force))
    except DoesNotFit as error:
        if placement is None or memory.ranks == range(world):
            raise
        return Fit(replace(placement, refused=f"{socket.gethostname()}: {error}"))


def memory_here(run: Run, world: int, placement: Placement | None) -> MachineMemory:
    """What the ranks on this machine may use. In a world started by others, ranks of one machine are consecutive."""
    machine = describe_machine(run.train.device)
    gpus = machine.device_count or 0 if machine.device == "cuda" else 0
    first, count = 0, world
    if placement is not None and placement.world_size > 1:
        first = max(0, placement.rank - placement.local_rank)
        count = placement.local_size or max(placement.local_rank + 1, min(gpus, world - first))
    # one rank runs in this process, unless it is to start those of its node
    started = world == 1 or (placement is not None and not placement.starts)
    return MachineMemory(range(first, first + count), gpu_memory(min(gpus, count)), host_memory(), started)


def describe_machine(wanted: Literal["auto", "cpu", "cuda"]) -> Facts:
    """What this machine can do, for a world of one rank. Imports torch if there may be a GPU."""
    missing = tuple(name for name in ("tensorboard", "wandb", "lm_eval") if importlib.util.find_spec(name) is None)
    if wanted == "cpu":
        return Facts(missing=missing)
    import torch

    gpus = torch.cuda.device_count()
    if gpus == 0:
        return Facts(device_count=0, missing=missing)
    from phalanx.ops.op import TRITON, absent, has_triton, packaged

    name, (major, minor) = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
    hip = torch.version.hip is not None
    capability = (major, minor)
    optional = (
        (op, made.incapable(capability, not hip) or (made.package and absent(made.package)))
        for op, made in packaged().items()
    )
    return Facts(
        device="cuda",
        device_count=gpus,
        device_name=name,
        bf16_ok=hip or major >= 8,
        fp16_ok=hip or major >= 6,
        capability=(0, 0) if hip else capability,
        triton_ok=TRITON.incapable(capability, not hip) is None and has_triton(),
        no_optional_kernels=tuple((op, why) for op, why in optional if why),
        missing=missing,
    )
