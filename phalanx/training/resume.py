"""Whether a run may continue from a checkpoint: every key of the config belongs to one class, and every difference is
named, old -> new.

must match   the numbers or their order would change meaning: refused, unless checkpoint.allow names the key
may change   the run continues differently from here on (rates, batch sizes, layout): reported
recorded     no number depends on it (logging, where files are, which implementations run): written in the next
             checkpoint, not reported
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash

from phalanx.base.errors import CheckpointError, ConfigError, Problem
from phalanx.base.log import Log
from phalanx.base.version import VERSION
from phalanx.checkpoint.hf import differences
from phalanx.checkpoint.manifest import Manifest
from phalanx.config.run import Run
from phalanx.config.write import to_dict
from phalanx.data.loader import Loader
from phalanx.data.sources import MockSource, Source

Class = Literal["must match", "may change", "recorded"]
SAMPLED = 16  # windows that represent the contents of a source

# The first matching glob decides. For the model, checkpoint.hf.differences knows which fields may change; for the data,
# facts() compares what is read rather than paths.
CLASSES: tuple[tuple[str, Class], ...] = (
    ("model.*", "may change"),
    ("train.seq_length", "must match"),
    ("train.seed", "must match"),
    ("facts.data*", "must match"),
    ("facts.*", "may change"),
    ("train.time*", "recorded"),
    ("train.profile*", "recorded"),
    ("train.eval_*", "recorded"),
    ("train.*", "may change"),
    ("layout.*", "may change"),
    ("optim.*", "may change"),
    ("task.*", "may change"),
    ("lora.init_from", "recorded"),
    ("lora*", "must match"),
    ("data.*", "recorded"),
    ("checkpoint.*", "recorded"),
    ("cluster*", "recorded"),
    ("log.*", "recorded"),
    ("dir", "recorded"),
    ("init_from", "recorded"),
    ("model_source", "recorded"),
)


def class_of(key: str) -> Class:
    """The class of a key. KeyError for a key that no class covers."""
    for glob, kind in CLASSES:
        if fnmatchcase(key, glob):
            return kind
    raise KeyError(key)


def facts(loader: Loader, tokenizer: str | None) -> dict[str, Any]:
    """What a position in the data, and the bits of a step, depend on besides the config; tokenizer: its fingerprint."""
    return {
        "data.order": loader.order,
        "data.sources": [f"{Path(source.name).name}: {contents_of(source)}" for source in loader.sources],
        "data.tokenizer": tokenizer,
        "versions": {"phalanx": VERSION, "torch": torch.__version__},
    }


def read_of(loaders: tuple[Loader, Mapping[str, Loader]]) -> dict[str, Any]:
    """What these loaders read, whatever its files are called: the order of samples, and samples of each source."""
    loader, valid = loaders
    sources = [source for each in (loader, *valid.values()) for source in each.sources]
    return {"order": loader.order, "windows": [contents_of(source) for source in sources]}


def contents_of(source: Source) -> str:
    """A fingerprint of some of a source's windows, evenly spread: it differs for another file of the same size, and is
    the same for a file that was moved."""
    if isinstance(source, MockSource):
        return "endless"
    count = SAMPLED if source.windows is None else min(SAMPLED, source.windows)
    last = count - 1 if source.windows is None else source.windows - 1
    total = xxhash.xxh3_64()
    for i in range(count):
        total.update(source.window(i * last // max(1, count - 1)).astype("int64").tobytes())
    return f"{'endless' if source.windows is None else f'{source.windows} windows'} {total.hexdigest()}"


def check_steps(run: Run, step: int, source: Path) -> None:
    """ConfigError if the run would end before the step at which it begins."""
    if run.train.last_step >= step:
        return
    key = "steps" if run.train.tokens is None else "tokens"
    because: dict[str, Any] = {"train.steps": run.train.last_step} if key == "tokens" else {}
    because |= {"step of the checkpoint": step, "checkpoint": str(source)}
    rule = (
        "must not end the run before the checkpoint that it continues from; train longer, or choose "
        "another `dir` for a new run"
    )
    raise ConfigError(
        [Problem(f"train.{key}", getattr(run.train, key), rule, because, (step,) if key == "steps" else ())]
    )


def check_resume(run: Run, now: dict[str, Any], manifest: Manifest, source: Path, log: Log) -> None:
    """Refuse to continue (CheckpointError with every difference), or report what has changed. `now`: facts()."""
    config = json.loads(json.dumps(to_dict(run)))
    model = differences(manifest.model, json.loads(json.dumps(asdict(run.model))))
    before = {**manifest.scalars.get("facts", {})}
    if before.get("data.tokenizer") is None:  # a tokenizer that is named later changes no token
        before.pop("data.tokenizer", None)
    found = [
        *changed_keys(manifest.config, config),
        *(("facts." + k, o, n) for k, o, n in changed_keys(before, now) if before),
    ]
    refused = model + [_shown(f) for f in found if class_of(f[0]) == "must match" and not allowed(run, f[0])]
    if refused:
        rule = "name what may differ in checkpoint.allow (such as data), or start a run of its own with init_from"
        raise CheckpointError(
            f"the run cannot continue from {source}, which differs in what must match:\n"
            + "\n".join(refused)
            + f"\n{rule}"
        )
    changed = [_shown(f) for f in found if class_of(f[0]) != "recorded"]
    if changed:
        log.info(f"changed since {source}: " + ", ".join(changed))
    if any(key.startswith("facts.data") for key, _, _ in found):
        log.warn(f"the data is not that of {source}: from here on samples may come again that were seen before")


def allowed(run: Run, key: str) -> bool:
    """Whether checkpoint.allow names a key or its section."""
    name = key.removeprefix("facts.")
    return any(name == glob or name.startswith(f"{glob}.") or fnmatchcase(name, glob) for glob in run.checkpoint.allow)


def changed_keys(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old, new) for every value that differs; a key that one side lacks (from another version) does not
    count."""
    if isinstance(old, dict) and isinstance(new, dict) and not _is_map(path):
        for key in sorted(old.keys() & new.keys()):
            yield from changed_keys(old[key], new[key], f"{path}.{key}" if path else key)
    elif old != new:
        yield path, old, new


def _is_map(path: str) -> bool:
    """Fields whose keys are the user's own; they are compared as one value."""
    maps = ("optim.lr_scale", "optim.fallback.lr_scale", "data.valid", "lora.rank_pattern", "lora.alpha_pattern")
    return path in maps


def _shown(found: tuple[str, Any, Any]) -> str:
    key, old, new = found
    return f"{key.removeprefix('facts.')} {json.dumps(old)} -> {json.dumps(new)}"
