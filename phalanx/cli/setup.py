"""From a command line to a checked Run and the world it runs in. Everything here happens before any rank or file exists."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace
from typing import Any

import click

from phalanx.base.errors import PhalanxError, Problem
from phalanx.base.log import describe
from phalanx.base.placement import Placement
from phalanx.cli.torchrun import explain_end
from phalanx.launch.env import describe_machine, read_placement
from phalanx.launch.host import gpu_memory, host_memory
from phalanx.train.capacity import DoesNotFit, MachineMemory, check_capacity
from phalanx.train.checks import Facts, check, raise_problems
from phalanx.train.config import Run
from phalanx.train.load import COMMAND_LINE, Loaded, read, to_dict


@dataclass(frozen=True)
class Ready:
    """A run without problems. `placement` is set if this process is a rank of a world that someone else started."""

    run: Run
    ranks: int
    placement: Placement | None = None


def prepare(config: str | None, overrides: tuple[str, ...], ranks: int | None) -> Ready:
    """Read and check a run for this machine. Raises every problem at once; other ranks than 0 of a foreign world raise them silently."""
    return prepare_loaded(read(config, overrides), ranks)


def prepare_loaded(loaded: Loaded, ranks: int | None) -> Ready:
    """As `prepare`, of a config that is read already."""
    placement, env_problems = read_placement(os.environ)
    if loaded.run is None and not env_problems:
        return fail(loaded.problems, placement)
    if loaded.run is None:
        return fail(env_problems + loaded.problems, placement)
    machine = describe_machine(loaded.run.train.device)
    world = placement.world_size if placement else ranks or default_ranks(loaded.run, machine)
    local = local_ranks(placement, world)
    options = _rank_problems(ranks, placement, machine)
    facts = replace(machine, world_size=world, local_ranks=local, env=(*env_problems, *options))
    problems = all_problems(loaded, facts)
    if problems:
        fail(problems, placement)
    return Ready(loaded.run, world, placement)


def prepare_elsewhere(config: str | None, overrides: tuple[str, ...], ranks: int | None) -> Ready:
    """Read and check a run for a machine that is not here: no look at devices, files or the environment."""
    loaded = read(config, overrides)
    if loaded.run is None:
        return fail(loaded.problems, None)
    layout = loaded.run.layout
    world = ranks or max(1, layout.tp * layout.cp * layout.pp)
    problems = all_problems(loaded, Facts(world_size=world, local_ranks=world, files=False))
    if problems:
        fail(problems, None)
    return Ready(loaded.run, world)


def all_problems(loaded: Loaded, facts: Facts) -> list[Problem]:
    """Those of form and those of the rules; of a config that had to be repaired, none that rests on a repair."""
    if loaded.run is None:
        return loaded.problems
    found = [p for p in check(loaded.run, facts) if not ({p.field, *p.because} & loaded.repaired)]
    return loaded.problems + loaded.placed(found)


def fail(problems: list[Problem], placement: Placement | None) -> Any:
    """Raise them; where every rank finds the same, only rank 0 says so."""
    try:
        raise_problems(problems)
    except PhalanxError as error:
        if placement is not None and placement.rank > 0:
            explain_end(describe(error))
            raise SystemExit(error.exit_code) from None
        raise


def default_ranks(run: Run, machine: Facts) -> int:
    """All GPUs; on the CPU the smallest world that fits the layout."""
    if machine.device == "cuda" and machine.device_count:
        return machine.device_count
    return max(1, run.layout.tp * run.layout.cp * run.layout.pp)


def check_memory(ready: Ready, force: bool = False) -> None:
    """Refuse a run that the memory of this machine cannot hold, warn where it is tight; of ranks that others started one speaks per machine."""
    placement = ready.placement
    speaks = placement is None or placement.local_rank == 0
    try:
        warning = check_capacity(ready.run, ready.ranks, memory_here(ready), force)
    except DoesNotFit as error:
        if not speaks:
            explain_end(describe(error))
            raise SystemExit(error.exit_code) from None
        raise
    if warning is not None and speaks:
        click.echo(f"warning: {warning}", err=True)


def memory_here(ready: Ready) -> MachineMemory:
    """What the ranks on this machine may take. Of a world that others started, ranks of one machine follow each other."""
    placement = ready.placement
    machine = describe_machine(ready.run.train.device)
    gpus = machine.device_count or 0 if machine.device == "cuda" else 0
    first, count = 0, ready.ranks
    if placement is not None and placement.world_size > 1:
        first = max(0, placement.rank - placement.local_rank)
        count = placement.local_size or max(placement.local_rank + 1, min(gpus, ready.ranks - first))
    started = placement is not None or ready.ranks == 1  # one rank runs in this process
    return MachineMemory(range(first, first + count), gpu_memory(min(gpus, count)), host_memory(), started)


def local_ranks(placement: Placement | None, world: int) -> int:
    return world if placement is None else placement.local_rank + 1


def _rank_problems(ranks: int | None, placement: Placement | None, machine: Facts) -> list[Problem]:
    if ranks is not None and ranks < 1:
        return [Problem("--ranks", ranks, "must be >= 1", {}, (1,), COMMAND_LINE)]
    if placement is None:
        return []
    if ranks is not None and ranks != placement.world_size:
        rule = "has no effect where the ranks are already started"
        return [Problem("--ranks", ranks, rule, {"world size": placement.world_size}, (placement.world_size,), COMMAND_LINE)]
    if machine.device == "cuda" and machine.device_count and placement.local_rank >= machine.device_count:
        because = {"GPUs": machine.device_count, "host": socket.gethostname()}
        return [Problem("LOCAL_RANK", placement.local_rank, "must be < the number of GPUs", because, (), "the environment")]
    return []


def arguments(run: Run) -> dict[str, Any]:
    """A run as plain values, for the ranks; they read it back with `load_run`."""
    return {"config": to_dict(run)}
