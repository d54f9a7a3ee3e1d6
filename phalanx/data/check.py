"""Rules of the `data` section: where tokens come from, how they are blended and split; what is in the files is checked when they are opened."""

from __future__ import annotations

import math
import os

from phalanx.base.errors import Problem
from phalanx.base.rules import default_of, exists, missing_data, no_effect, problem, within
from phalanx.data.config import DataConfig
from phalanx.data.index import strip_suffix
from phalanx.data.mixture import parse_split


def check(config: DataConfig, *, evaluates: bool, files: bool = True) -> list[Problem]:
    """evaluates: the run has evaluations. files: look whether the files are there (a laptop that plans may not have them)."""
    found = check_source(config) + check_blend(config) + check_split(config, evaluates) + check_valid(config, evaluates)
    found += within("data", config, "max_epochs", "(0, inf)", (1.0, None))
    if config.mock:
        found += no_effect("data", config, ("max_epochs",), "token files", {"data.mock": True})
    return found + (check_files(config) if files else [])


def check_source(config: DataConfig) -> list[Problem]:
    if config.mock and config.paths:
        return [problem("data", config, "mock", "excludes data.paths", {"data.paths": list(config.paths)}, (False,))]
    if not config.mock and not config.paths:
        return [problem("data", config, "paths", "needs a path to token files (or data.mock=true for made-up tokens)")]
    return []


def check_blend(config: DataConfig) -> list[Problem]:
    if not config.weights:
        return []
    if not config.paths:
        return no_effect("data", config, ("weights",), "data.paths", {"data.paths": []})
    found = []
    even = (1.0,) * len(config.paths)
    if len(config.weights) != len(config.paths):
        because = {"weights": len(config.weights), "paths": len(config.paths)}
        found.append(problem("data", config, "weights", "must have one number per path", because, (even, ())))
    if not all(math.isfinite(w) and w > 0 for w in config.weights):
        found.append(problem("data", config, "weights", "must be numbers > 0", {}, (even, ())))
    return found


def check_split(config: DataConfig, evaluates: bool) -> list[Problem]:
    default = default_of(DataConfig, "split")
    try:
        train, valid, _ = parse_split(config.split)
    except ValueError:
        return [problem("data", config, "split", "must be three numbers >= 0 (train,validation,test) with a sum > 0", {}, (default,))]
    if train == 0:
        return [problem("data", config, "split", "leaves no tokens for training", {"train part": 0}, (default,))]
    if evaluates and valid == 0 and not config.valid and not config.mock:
        because = {"validation part": 0, "data.valid": {}}
        return [problem("data", config, "split", "leaves no tokens for the evaluations of train.eval_interval", because, (default,))]
    return []


def check_valid(config: DataConfig, evaluates: bool) -> list[Problem]:
    found = [Problem(f"data.valid.{name}", (), "needs a path to token files") for name, paths in config.valid.items() if not paths]
    if config.valid and not evaluates:
        found += no_effect("data", config, ("valid",), "train.eval_interval", {"train.eval_interval": None})
    return found


def check_files(config: DataConfig) -> list[Problem]:
    sets = {"data.paths": config.paths, **{f"data.valid.{name}": paths for name, paths in config.valid.items()}}
    found: list[Problem] = []
    for field, paths in sets.items():
        for i, path in enumerate(paths):
            prefix = strip_suffix(path)
            absent = [prefix + suffix for suffix in (".bin", ".idx") if not exists(prefix + suffix)]
            if absent:
                found.append(missing_data(f"{field}.{i}", path, f"{' and '.join(absent)} must exist", ".idx"))
    return found + check_tokenizer(config)


def check_tokenizer(config: DataConfig) -> list[Problem]:
    path = config.tokenizer
    if path in (None, "bytes") or os.path.isfile(path) or exists(os.path.join(path, "tokenizer.json")):
        return []
    if os.path.isdir(path):
        return [missing_data("data.tokenizer", path, "must hold a tokenizer.json")]
    return [missing_data("data.tokenizer", path, "must be a tokenizer.json or a folder that holds one")]
