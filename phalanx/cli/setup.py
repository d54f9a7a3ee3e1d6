"""From a command line to a checked Run and its world. Everything here happens before any rank or file exists."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from typing import Any

import click

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import PhalanxError, Problem
from phalanx.base.log import describe
from phalanx.base.placement import Placement
from phalanx.cli.torchrun import explain_end
from phalanx.config.device_check import Facts
from phalanx.config.read import COMMAND_LINE, Loaded, read
from phalanx.config.run import Run
from phalanx.config.write import to_dict
from phalanx.forecast.capacity import DoesNotFit
from phalanx.forecast.check import check, raise_problems
from phalanx.launch.env import read_placement
from phalanx.training.machine import describe_machine, fit_here


@dataclass(frozen=True)
class PreparedRun:
    """A run without problems. `placement` is set if this process is a rank of a world that someone else started."""

    run: Run
    ranks: int
    placement: Placement | None = None


def prepare(config: str | None, overrides: tuple[str, ...], ranks: int | None) -> PreparedRun:
    """Read and check a run for this machine. Raises every problem at once; in a world started by others, ranks other
    than 0 raise without printing."""
    return prepare_loaded(read(config, overrides), ranks)


def prepare_loaded(loaded: Loaded, ranks: int | None, forward: bool = False) -> PreparedRun:
    """As `prepare`, of a config that is read already. Without a number of ranks there are as many as GPUs, or as the
    layout needs. `forward`: weights compute and nothing trains; what only training needs is left out, and there are as
    many ranks as the layout needs."""
    placement, env_problems = read_placement(os.environ)
    if loaded.run is None and not env_problems:
        return fail(loaded.problems, placement)
    if loaded.run is None:
        return fail(env_problems + loaded.problems, placement)
    machine = describe_machine(loaded.run.train.device)
    every_gpu = machine.device_count if machine.device == "cuda" and not forward else None
    chosen = placement.world_size if placement else ranks or every_gpu
    world = chosen or loaded.run.layout.least_ranks
    run = loaded.run
    if forward:
        from phalanx.inference.load import weights_alone

        run = weights_alone(run, world)
    options = _rank_problems(ranks, placement, machine)
    facts = replace(
        machine,
        world_size=world,
        local_ranks=local_ranks(placement, world),
        world_follows=not chosen,
        env=(*env_problems, *options),
    )
    problems = all_problems(replace(loaded, run=run), facts)
    if problems:
        fail(problems, placement)
    if placement is None or placement.rank == 0:
        say_notes(loaded)
    return PreparedRun(run, world, placement)


def prepare_elsewhere(config: str | None, overrides: tuple[str, ...], ranks: int | None) -> PreparedRun:
    """Read and check a run for another machine: devices, files and the environment are not examined."""
    loaded = read(config, overrides)
    if loaded.run is None:
        return fail(loaded.problems, None)
    world = ranks or loaded.run.layout.least_ranks
    problems = all_problems(loaded, elsewhere(world, ranks is None))
    if problems:
        fail(problems, None)
    say_notes(loaded)
    return PreparedRun(loaded.run, world)


def elsewhere(world: int, follows: bool) -> Facts:
    """Of a machine that is not examined. `follows`: the number of ranks is what the layout needs."""
    return Facts(world_size=world, local_ranks=world, world_follows=follows, files=False)


def say_notes(loaded: Loaded) -> None:
    """Print the new names of what a config calls by old ones."""
    for note in loaded.notes:
        click.echo(f"note: {note}", err=True)


def all_problems(loaded: Loaded, facts: Facts) -> list[Problem]:
    """Problems of form and of the rules; for a config that had to be repaired, none that depends on a repair."""
    if loaded.run is None:
        return loaded.problems
    found = [p for p in check(loaded.run, facts) if not ({p.field, *p.because} & loaded.repaired)]
    return loaded.problems + loaded.placed(found)


def fail(problems: list[Problem], placement: Placement | None) -> Any:
    """Raise them; if every rank finds the same, only rank 0 prints them."""
    try:
        raise_problems(problems)
    except PhalanxError as error:
        if placement is not None and placement.rank > 0:
            explain_end(describe(error))
            raise SystemExit(error.exit_code) from None
        raise


def check_memory(ready: PreparedRun, force: bool = False) -> PreparedRun:
    """Refuse a run that the memory of this machine cannot hold, and warn if it is tight; for ranks started by others,
    one per machine reports.

    Returns the run as it is to start. If ranks of other machines wait for those here, the refusal is passed to their
    meeting.
    """
    speaks = ready.placement is None or ready.placement.local_rank == 0
    try:
        fit = fit_here(ready.run, ready.ranks, ready.placement, force)
    except DoesNotFit as error:
        if not speaks:
            explain_end(describe(error))
            raise SystemExit(error.exit_code) from None
        raise
    if fit.warning is not None and speaks:
        click.echo(f"warning: {fit.warning}", err=True)
    return replace(ready, placement=fit.placement)


def local_ranks(placement: Placement | None, world: int) -> int:
    return world if placement is None else placement.starts or placement.local_rank + 1


def _rank_problems(ranks: int | None, placement: Placement | None, machine: Facts) -> list[Problem]:
    if ranks is not None and ranks < 1:
        return [Problem("--ranks", ranks, "must be >= 1", {}, (1,), COMMAND_LINE)]
    if placement is None:
        return []
    if ranks is not None and ranks != placement.world_size:
        rule = "has no effect where the ranks are already started"
        return [
            Problem("--ranks", ranks, rule, {"world size": placement.world_size}, (placement.world_size,), COMMAND_LINE)
        ]
    if machine.device == "cuda" and machine.device_count and placement.local_rank >= machine.device_count:
        because = {"GPUs": machine.device_count, "host": socket.gethostname()}
        return [
            Problem("LOCAL_RANK", placement.local_rank, "must be < the number of GPUs", because, (), "the environment")
        ]
    return []


def arguments(run: Run) -> dict[str, Any]:
    """A run as plain values, for the ranks; they read it back with `load_run`."""
    return {"config": to_dict(run)}
