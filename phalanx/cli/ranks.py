"""From a checked run to its ranks, in this process or in new ones."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import click

from phalanx.base.errors import PhalanxError
from phalanx.launch.early import deaf, listen_early

ENOUGH_FILES, FEWEST_FILES, FILES_PER_RANK = 4096, 64, 8  # open files of a process


def allow_files(ranks: int) -> None:
    """Raise this process's limit of open files as far as allowed. PhalanxError if ranks could not even meet."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    needed = FEWEST_FILES + FILES_PER_RANK * ranks
    if max(soft, most) < needed and soft != resource.RLIM_INFINITY:
        way_out = f"raise the limit with `ulimit -n {ENOUGH_FILES}`"
        raise PhalanxError(f"a process may open only {most} files here, and {ranks} ranks need {needed}: {way_out}")


def run_ranks(target: str, ready: Any, values: dict[str, Any], logs: str | None) -> None:
    """Call a job here if this process is already a rank or the world has only one; otherwise start the ranks."""
    from phalanx.base.placement import Placement
    from phalanx.base.rules import default_of
    from phalanx.config.run import TrainConfig
    from phalanx.launch.bus import BusErrors
    from phalanx.launch.ends import ends_at
    from phalanx.launch.environment import allowed_cpus, node_settings
    from phalanx.launch.first_host import watch_first_host
    from phalanx.launch.local import SingleRank, start
    from phalanx.launch.network import settle
    from phalanx.launch.rank_log import keep_output
    from phalanx.launch.worker import find

    listen_early()
    watch_first_host(os.environ)
    allow_files(ready.ranks)
    here = ready.placement
    patience_s = default_of(TrainConfig, "timeout_s") if ready.run is None else ready.run.train.timeout_s
    if here is None and ready.ranks > 1:
        start(target, values, ready.ranks, logs)
    elif here is not None and here.starts:
        before = dict(os.environ)
        node = settle(here, os.environ, patience_s)
        graphs = ready.run is None or ready.run.train.cuda_graphs != "off"
        settings = node_settings(before, os.environ, here.starts, allowed_cpus(), cuda_graphs=graphs)
        click.echo(settings.text(os.environ.get("SLURMD_NODENAME") or os.uname().nodename, here.rank), err=True)
        start(target, values, here.starts, logs, node, settings.cpus)
    else:
        word = SingleRank()
        keep_output(os.environ, 0 if here is None else here.rank)
        placement = settle(here or Placement(), os.environ, patience_s)
        with BusErrors(word.died):
            find(target)(replace(placement, word=word, ends_at=ends_at(os.environ)), **values)
    deaf()


def prepare_text(ready: Any) -> None:
    """Prepare the token files of data.text, data.pairs or data.chats before any rank starts, so that ranks find them.
    For ranks started by others, one per machine reports."""
    from phalanx.cli.progress import progress
    from phalanx.nn.objective import make_objective
    from phalanx.text.cache import ChatUse, use_text

    run = ready.run
    speaks = ready.placement is None or ready.placement.local_rank == 0
    with progress("prepare") as show:
        use_text(
            run.data,
            run.dir,
            run.model.vocab_size,
            train_on=ChatUse(make_objective(run.task).train_on, run.model.media),
            say=lambda text: click.echo(text) if speaks else None,
            progress=show,
        )
