"""WandbRun: a run's numbers in Weights & Biases, under an id that the run's folder keeps."""

from __future__ import annotations

import os
import re
import secrets
import string
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import wandb

from phalanx.base.log import Log, describe
from phalanx.base.records import Row, Sink, SinkStart
from phalanx.config.run import LogConfig

ID_FILE = "wandb-id.txt"
ID_LENGTH = 12
ID_LETTERS = string.ascii_lowercase + string.digits


class WandbRun(Sink):
    """One W&B run for all starts of a run. `step` is a separate metric and the x-axis of the others, because W&B's own
    counter never goes back and would drop the rows of a run that does. After a rollback the same steps come again, with
    a higher `rollbacks`: the later rows count.

    If W&B cannot be reached, or nobody is logged in, the run is recorded offline, to be uploaded later. Nothing is ever
    asked on the terminal.
    """

    Config = LogConfig

    def __init__(self, start: SinkStart, config: LogConfig):
        super().__init__(start, config)
        folder, log, wanted = start.folder, start.log, config
        self._rollbacks = 0
        identity = run_id(folder / ID_FILE, log)
        options: dict[str, Any] = {
            "project": wanted.wandb,
            "entity": wanted.wandb_entity,
            "name": wanted.wandb_name or folder.resolve().name,
            "group": wanted.wandb_group,
            "tags": wanted.wandb_tags or None,
            "id": identity,
            "resume": "allow",
            "dir": str(folder),
            "config": start.config,
            "allow_val_change": True,
            "settings": wandb.Settings(silent=True, console="off"),
        }
        with no_questions():
            try:
                self._run = wandb.init(**options)
            except Exception as error:
                log.warn(
                    "Weights & Biases cannot be used now, so this run is recorded offline: "
                    f"{describe(error).splitlines()[0]}"
                )
                wandb.teardown()  # its service still has the run that could not begin, and refuses its id
                self._run = wandb.init(**options, mode="offline")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        log.info(where(self._run, wanted, identity))

    def write(self, row: Row) -> None:
        self._run.log({"step": row.step, "rollbacks": self._rollbacks, **row.scalars(), **row.texts()})

    def rewind(self, step: int) -> None:
        self._rollbacks += 1

    def close(self) -> None:
        self._run.finish()
        if wandb.run is None:  # nobody else's run is going on in this process
            # `finish` returns before all is written, and a rank may end without Python's exit handlers
            wandb.teardown()


def run_id(path: Path, log: Log) -> str:
    """The id in the file; a new one if there is none."""
    with suppress(OSError):
        kept = path.read_text(encoding="utf-8").strip()
        if re.fullmatch(r"[\w-]{1,64}", kept):
            return kept
    made = "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))
    try:
        path.write_text(made, encoding="utf-8")
    except OSError as error:
        log.warn(
            f"{path} cannot be written ({error.strerror}): if the run is continued, it gets another id in "
            f"Weights & Biases than {made}"
        )
    return made


def where(run: Any, wanted: LogConfig, identity: str) -> str:
    """Where a person finds the run."""
    if run.offline:
        folder = os.path.dirname(run.dir)
        return f"wandb offline id={identity} folder={folder} (upload it with: wandb sync {folder})"
    return f"wandb project={wanted.wandb} id={identity} {run.url}"


@contextmanager
def no_questions() -> Iterator[None]:
    """Inside, wandb finds no terminal on which to ask for a login: a training run must not wait for an answer."""
    before = sys.stdin
    with open(os.devnull, encoding="utf-8") as nothing:
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = before
