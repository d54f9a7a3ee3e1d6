"""Rules of the `checkpoint` section: ranges of numbers, and that what is to be loaded exists."""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.base.errors import CheckpointError, Problem
from phalanx.base.rules import at_least, missing_checkpoint, problem
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.hf import unknown_family
from phalanx.checkpoint.hf_files import read_config
from phalanx.checkpoint.places import is_remote
from phalanx.models.registry import of_model_type


def check(config: CheckpointConfig, *, files: bool = True) -> list[Problem]:
    """files: check that `load` exists."""
    found = []
    if config.interval is not None and config.interval < 1:
        rule = "must be an integer >= 1, or null to save only at the end"
        found.append(problem("checkpoint", config, "interval", rule, {}, (500, None)))
    if config.keep_last == 1:
        rule = "must be >= 2 (a second one may be half written), or 0 to keep all"
        found.append(problem("checkpoint", config, "keep_last", rule, {}, (2, 0)))
    found += at_least("checkpoint", config, 0, "keep_last")
    found += at_least("checkpoint", config, 1, "keep_every")
    if config.keep_every is not None and config.keep_last == 0:
        found.append(
            problem(
                "checkpoint",
                config,
                "keep_every",
                "has no effect where all are kept",
                {"checkpoint.keep_last": 0},
                (None,),
            )
        )
    if files and config.load is not None and not is_remote(config.load) and not os.path.exists(config.load):
        found.append(missing_checkpoint("checkpoint.load", config.load))
    return found


def check_source(folder: str, family: str) -> list[Problem]:
    """A Hugging Face folder from which weights are to be loaded holds a model of this family, as far as its config.json
    says."""
    if not (Path(folder) / "config.json").is_file():
        return []
    try:
        kind = read_config(folder).get("model_type")
    except CheckpointError as error:
        return [Problem("init_from", folder, f"must hold a config.json that can be read ({error})")]
    if kind is None:
        return []
    found = of_model_type(kind, family)
    if found is None:
        return [
            Problem(
                "init_from",
                folder,
                f"must hold a model that Phalanx has: {unknown_family(kind)}",
                {"model.family": family},
            )
        ]
    if found[0] != family:
        return [
            Problem(
                "init_from",
                folder,
                "must hold a model of the same family",
                {"its model_type": kind, "model.family": family},
            )
        ]
    return []
