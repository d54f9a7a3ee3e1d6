"""What a Hugging Face folder supplies to a run: family, sizes and tokenizer for its config; token ids, generation
settings and chat template for its checkpoints.

The folder is named by `init_from: FOLDER` or `model: {from: FOLDER}`. A run keeps copies of its small files, so that it
can continue without the folder.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.base.errors import CheckpointError, PhalanxError, Problem
from phalanx.base.rules import missing_checkpoint
from phalanx.config.run import Run
from phalanx.models.registry import family_of

CONFIG = "config.json"
KEPT = "source"  # folder inside a run's folder with copies of the small files
# what may differ from the folder although its weights are used: models are trained for longer contexts in this way
MAY_DIFFER = ("model.rope_theta", "model.rope_scaling", "model.sliding_window", "model.num_nextn_predict_layers")
FROM = """model.from: str or null, default null
    A Hugging Face folder that supplies family, sizes and tokenizer where they are unset; weights start at random."""


def supply(data: dict[str, Any], origins: dict[str, str]) -> list[Problem]:
    """Fill unset fields of `model` and `data.tokenizer`, in the plain values of a config, from the folder named by
    model.from or init_from.

    `model_source` then names the folder, and `model.from` is removed. A config that already has it is left as it is.
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
    if not isinstance(folder, str):  # the type check of init_from reports this
        return [] if key == "init_from" else [Problem(key, folder, "must be the path of a Hugging Face folder")]
    given = {name: value for name, value in own.items() if (name, value) != ("family", None)}
    data["model"] = given
    return _fill(data, origins, key, folder, given)


def _fill(data: dict[str, Any], origins: dict[str, str], key: str, folder: str, given: dict[str, Any]) -> list[Problem]:
    from phalanx.checkpoint.hf import folder_of, model_config_from_hf  # imports torch

    path, needed = folder_of(folder), key == "model.from" or not given
    if not (path / CONFIG).is_file():
        if not needed:
            return []  # the rules report it, if the folder is still needed
        if not given:
            del data["model"]
        rule = f"must be a Hugging Face folder: it has no {CONFIG}"
        return [Problem(key, folder, rule) if os.path.exists(folder) else missing_checkpoint(key, folder)]
    try:
        found = model_config_from_hf(path, given.get("family"))
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
    """Whether the folder holds a readable tokenizer and, if a fingerprint is given, this one."""
    from phalanx.text.tokenizers import load_tokenizer  # takes time to import

    try:
        found = load_tokenizer(path).fingerprint
    except PhalanxError:
        return False
    return fingerprint in (None, found)


def _use_kept(data: dict[str, Any]) -> None:
    """Use the tokenizer in the run's own copies if its folder is gone."""
    section, kept = data.get("data"), Path(str(data.get("dir") or Run.dir)) / KEPT
    tokenizer = section.get("tokenizer") if isinstance(section, dict) else None
    gone = (
        isinstance(tokenizer, str)
        and Path(tokenizer).is_relative_to(str(data["model_source"]))
        and not os.path.exists(tokenizer)
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
        theirs = model_config_from_hf(path, run.model.family)
    except CheckpointError as error:
        return [Problem("init_from", run.init_from, f"must hold a model that Phalanx has ({error})")]
    new_head = {f"model.{name}" for name in ("head", *family_of(run.model).head_fields)}
    new_head = new_head if run.model.classes or run.model.headless or run.model.pair_head else set()
    changed = differences(asdict(theirs), asdict(run.model))
    found = [text for text in changed if text.split(" ")[0] not in {*MAY_DIFFER, *new_head}]
    if not found:
        return []
    rule = (
        f"must hold the model that the config describes; folder -> config: {', '.join(found)}. What the "
        "config leaves unset is the folder's"
    )
    return [Problem("init_from", run.init_from, rule)]


# ---- what checkpoints receive


def keep(run: Run) -> None:
    """Copy the small files of the run's source folder into the run's own folder, once."""
    from phalanx.checkpoint.hf import folder_of
    from phalanx.checkpoint.save import source_files

    named, kept = run.model_source or run.init_from, Path(run.dir) / KEPT
    if named is None or (kept / CONFIG).is_file() or not (folder_of(named) / CONFIG).is_file():
        return
    files = source_files(folder_of(named))
    kept.mkdir(parents=True, exist_ok=True)
    for name in sorted(files, key=lambda name: name == CONFIG):  # the config comes last: it marks the copy as complete
        partial = kept / f"{name}.partial"
        partial.write_bytes(files[name])
        os.replace(partial, kept / name)


def source_of(run: Run) -> Path | None:
    """The folder that supplies token ids, generation settings and chat template: the run's copies, or the original."""
    from phalanx.checkpoint.hf import folder_of

    kept, named = Path(run.dir) / KEPT, run.model_source or run.init_from
    if named is None:
        return None
    found = kept if (kept / CONFIG).is_file() else folder_of(named)
    return found if (found / CONFIG).is_file() else None
