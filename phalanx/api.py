"""The public API: `import phalanx as px`. The same checks as on the command line, the same errors as exceptions.

`train`, `session` and `sampler` run on the ranks that this process belongs to and never start processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.base.errors import ConfigError, Problem
from phalanx.base.garbage import seldom_collected
from phalanx.base.placement import Placement
from phalanx.config.read import load_run
from phalanx.config.run import Run

if TYPE_CHECKING:  # they import torch
    from phalanx.forecast.text import PlanReport
    from phalanx.inference.engine import EngineOptions
    from phalanx.inference.generate import TextSampler
    from phalanx.training.callbacks import Callback
    from phalanx.training.session import Session


def load(config: str | Path | None = None, *overrides: str, base: Run | dict[str, Any] | None = None) -> Run:
    """A run from a YAML or Python file and `section.key=value` overrides, as on the command line, on top of `base`.

    Raises ConfigError with every problem of form: field, value, what is allowed, where it was set.
    """
    with seldom_collected():
        return load_run(config, overrides, base)


def check(run: Run, ranks: int | None = None) -> None:
    """Raise every problem of a run on this machine at once: ConfigError, or DataError or CheckpointError if only paths
    of one kind are missing. Writes nothing. `ranks` defaults to those that this process belongs to, or else to as many
    as the run's layout needs."""
    from phalanx.training.machine import check_here

    here = _placement()
    if ranks is not None:
        here = Placement(world_size=ranks)
    elif here is None:
        here = Placement(world_size=run.layout.least_ranks)
    check_here(run, here)


def plan(run: Run, ranks: int | None = None, device: str | None = None) -> PlanReport:
    """What the run would do on `ranks` ranks, by default as many as its layout needs: stages, schedule, memory,
    messages and FLOPs, without a GPU and without data. `print(px.plan(run, 1024))` shows it. `device` is the GPU that
    it should fit on, such as "H100"; `.fits` says whether it does.

    Raises ConfigError.
    """
    from phalanx.base.devices import DEVICES, find_device
    from phalanx.config.device_check import Facts
    from phalanx.forecast.check import check, raise_problems
    from phalanx.forecast.text import plan_report

    world = ranks or run.layout.least_ranks
    facts = Facts(world_size=world, local_ranks=world, world_follows=ranks is None, files=False)
    raise_problems(check(run, facts))
    wanted = find_device(device) if device else None
    if device and wanted is None:
        names = tuple(d.name for d in DEVICES)
        raise ConfigError([Problem("device", device, f"must be one of {', '.join(names)}")])
    return plan_report(run, world, wanted)


def train(run: Run, callbacks: Sequence[Callback] = ()) -> None:
    """Train from the newest checkpoint in the run's folder, or from the start, to train.steps, on the ranks that this
    process belongs to: one, or those of torchrun or SLURM.

    Raises PhalanxError: ConfigError before any file is written, Preempted once a stop request is saved, ...
    """
    with seldom_collected():
        from phalanx.training.main import train as train_here

    train_here(run, _here(run), _command(), callbacks)


@contextmanager
def session(run: Run, callbacks: Sequence[Callback] = ()) -> Iterator[Session]:
    """A run with a loop of your own:

        with px.session(run) as s:
            for batches in s.batches():
                s.train_step(batches)

    On the ranks that this process belongs to. A clean end saves what is unsaved, an exception saves nothing.
    """
    with seldom_collected():
        from phalanx.training.session import session as open_session

    with open_session(run, _here(run), _command(), callbacks) as s:
        yield s


@contextmanager
def sampler(
    path: str | Path, *overrides: str, options: EngineOptions | None = None, adapter: str | None = None
) -> Iterator[TextSampler]:
    """Text from a run, a checkpoint of any layout or a Hugging Face folder, on any layout:

        with px.sampler("runs/first", "layout.tp=2") as s:
            for answer in s.generate(["Once upon a time"], SamplingOptions(tokens=64)):
                print(answer.text)

    On the ranks that this process belongs to: all make the same calls, and answers come on rank 0. overrides: those
    that `phalanx generate` takes. options: room for sequences, and drafts; adapter: folder of a LoRA adapter, for
    everything.

    Raises ConfigError.
    """
    import torch

    from phalanx.config.write import to_dict
    from phalanx.inference.generate import sampler_on_ranks
    from phalanx.inference.load import run_of_folder, weights_alone, weights_folder, without_data
    from phalanx.inference.overrides import refuse_others
    from phalanx.training.machine import check_here

    refuse_others(overrides, "px.sampler")
    base = run_of_folder(weights_folder(str(path)), torch.cuda.is_available())
    run = load_run(None, overrides, to_dict(without_data(base)))
    here = _here(run, "phalanx generate CHECKPOINT --prompts FILE.jsonl")
    run = weights_alone(run, here.world_size)
    check_here(run, here)
    with sampler_on_ranks(str(path), run, here, options, adapter) as s:
        yield s


def _placement() -> Placement | None:
    from phalanx.launch.env import read_placement

    placement, problems = read_placement(os.environ)
    if problems:
        raise ConfigError(problems)
    if placement is not None and placement.starts:
        rule = (
            "asks for ranks that this process would have to start, and Python starts none: start one process for each "
            "rank (srun --ntasks-per-node, torchrun), or use `phalanx train`"
        )
        raise ConfigError([Problem("PHALANX_RANKS_PER_NODE", placement.starts, rule, {}, (1,), "the environment")])
    return placement


def _here(run: Run, command: str = "phalanx train CONFIG") -> Placement:
    """This process among the ranks of the run. command: that starts as many."""
    from phalanx.launch.first_host import watch_first_host
    from phalanx.launch.local import SingleRank
    from phalanx.launch.network import settle

    watch_first_host(os.environ)
    placement, needed = _placement(), run.layout.least_ranks
    if placement is None and needed > 1:
        layout = {f"layout.{name}": value for name in ("tp", "cp", "pp") if (value := getattr(run.layout, name)) > 1}
        rule = (
            f"needs {needed} ranks, and nobody started others than this process; type "
            f"torchrun --nproc-per-node {needed} {Path(sys.argv[0]).name or 'SCRIPT'}, "
            f"or {command} --ranks {needed}"
        )
        key, *others = layout
        raise ConfigError([Problem(key, layout[key], rule, {name: layout[name] for name in others})])
    return replace(settle(placement or Placement(), os.environ, run.train.timeout_s), word=SingleRank())


def _command() -> str:
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
