"""What a Hugging Face folder supplies to a run: family, sizes and tokenizer for its config; token ids, generation
settings and chat template for its checkpoints.

`init_from: FOLDER` and `model: {from: FOLDER}` name it. A run keeps the folder's small files, so that it can
continue without the folder.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.base.errors import CheckpointError, PhalanxError, Problem
from phalanx.base.rules import exists, missing_checkpoint
from phalanx.config.run import Run

CONFIG = "config.json"
KEPT = "source"  # folder of a run that holds copies of the small files
# what a run may compute otherwise than the folder says with the folder's weights: longer contexts are trained so
MAY_DIFFER = ("model.rope_theta", "model.rope_scaling", "model.sliding_window", "model.num_nextn_predict_layers")
FROM = """model.from: str or null, default null
    A Hugging Face folder that supplies family, sizes and tokenizer where they are unset; weights start at random."""


def supply(data: dict[str, Any], origins: dict[str, str]) -> list[Problem]:
    """Fill what is unset of `model` and `data.tokenizer` in plain values of a config, from the folder that
    model.from or init_from names.

    `model_source` then names the folder, `model.from` is gone. A config that says so already is left as it is.
    """
    model = data.get("model")
    own = dict(model) if isinstance(model, dict) else {}
    named = own.pop("from", None)
    key = "init_from" if named is None else "model.from"
    folder = data.get("init_from") if named is None else named
    if named is None and own and isinstance(data.get("model_source"), str) and folder in (None, data["model_source"]):
        _use_kept(data)
        return []
    if folder is None or not (model is None or isinstance(model, dict)):
        return []
    if not isinstance(folder, str):  # of init_from the types of fields say so
        return [] if key == "init_from" else [Problem(key, folder, "must be the path of a Hugging Face folder")]
    given = {name: value for name, value in own.items() if (name, value) != ("family", None)}
    data["model"] = given
    return _fill(data, origins, key, folder, given)


def _fill(data: dict[str, Any], origins: dict[str, str], key: str, folder: str, given: dict[str, Any]) -> list[Problem]:
    from phalanx.checkpoint.hf import folder_of, model_config_from_hf  # imports torch

    path, needed = folder_of(folder), key == "model.from" or not given
    if not (path / CONFIG).is_file():
        if not needed:
            return []  # the rules say it, if the folder is still needed
        if not given:
            del data["model"]
        rule = f"must be a Hugging Face folder: it has no {CONFIG}"
        return [Problem(key, folder, rule) if exists(folder) else missing_checkpoint(key, folder)]
    try:
        found = model_config_from_hf(path)
    except CheckpointError as error:
        if not given:
            del data["model"]
        return [Problem(key, folder, f"must hold a model that Phalanx has ({error})")] if needed else []
    if given.get("family", found.family) != found.family:
        return (
            []
            if key == "init_from"
            else [Problem("model.family", given["family"], f"must be {found.family}, as {key} has it", {key: folder})]
        )
    supplied = {name: value for name, value in asdict(found).items() if name not in given}
    data["model"] = {**supplied, **given}
    origins.update({f"model.{name}": str(path / CONFIG) for name in supplied})
    data["model_source"] = folder
    section = data.setdefault("data", {})
    if isinstance(section, dict) and section.get("tokenizer") is None and has_tokenizer(path):
        section["tokenizer"] = str(path)
        origins["data.tokenizer"] = folder
    return []


def has_tokenizer(path: Path, fingerprint: str | None = None) -> bool:
    """Whether the folder holds a tokenizer that can be read, and that is this one if one is given."""
    from phalanx.text.tokenizers import load_tokenizer  # takes time to import

    try:
        found = load_tokenizer(path).fingerprint
    except PhalanxError:
        return False
    return fingerprint in (None, found)


def _use_kept(data: dict[str, Any]) -> None:
    """Take the tokenizer from the run's own copies where its folder is gone."""
    section, kept = data.get("data"), Path(str(data.get("dir") or Run.dir)) / KEPT
    tokenizer = section.get("tokenizer") if isinstance(section, dict) else None
    gone = (
        isinstance(tokenizer, str)
        and Path(tokenizer).is_relative_to(str(data["model_source"]))
        and not exists(tokenizer)
    )
    if gone and (kept / CONFIG).is_file():
        section["tokenizer"] = str(kept)  # type: ignore[index]


# ---- the rules -----------------------------------------------------------------------------------


def check_weights(run: Run) -> list[Problem]:
    """The folder of init_from holds the model that the config describes, as far as its config.json says."""
    from phalanx.checkpoint.hf import differences, folder_of, model_config_from_hf, read_config

    path = folder_of(str(run.init_from))
    if not (path / CONFIG).is_file() or read_config(path).get("model_type") is None:
        return []
    try:
        theirs = model_config_from_hf(path)
    except CheckpointError as error:
        return [Problem("init_from", run.init_from, f"must hold a model that Phalanx has ({error})")]
    found = [text for text in differences(asdict(theirs), asdict(run.model)) if text.split(" ")[0] not in MAY_DIFFER]
    if not found:
        return []
    rule = (
        f"must hold the model that the config describes; folder -> config: {', '.join(found)}. What the "
        "config leaves unset is the folder's"
    )
    return [Problem("init_from", run.init_from, rule)]


# ---- what travels --------------------------------------------------------------------------------


def keep(run: Run) -> None:
    """Copy the small files of the folder that the run comes from into the run's own folder, once."""
    from phalanx.checkpoint.hf import folder_of
    from phalanx.checkpoint.save import source_files

    named, kept = run.model_source or run.init_from, Path(run.dir) / KEPT
    if named is None or (kept / CONFIG).is_file() or not (folder_of(named) / CONFIG).is_file():
        return
    files = source_files(folder_of(named))
    kept.mkdir(parents=True, exist_ok=True)
    for name in sorted(files, key=lambda name: name == CONFIG):  # the config is last: with it the copy is whole
        partial = kept / f"{name}.partial"
        partial.write_bytes(files[name])
        os.replace(partial, kept / name)


def source_of(run: Run) -> Path | None:
    """The folder that token ids, generation settings and chat template come from: the run's copies, or where it
    began."""
    from phalanx.checkpoint.hf import folder_of

    kept, named = Path(run.dir) / KEPT, run.model_source or run.init_from
    if named is None:
        return None
    found = kept if (kept / CONFIG).is_file() else folder_of(named)
    return found if (found / CONFIG).is_file() else None
