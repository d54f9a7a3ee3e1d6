"""Hugging Face's config.json <-> our model configs. What a config asks for and we cannot compute is refused by name,
never ignored."""

from __future__ import annotations

import difflib
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import torch

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.embedder_files import is_embedder
from phalanx.checkpoint.hf_files import (
    depths_in,
    folder_of,
    has_weights,
    hf_index,
    read_config,
    read_json,
    same_in,
    two_heads,
)
from phalanx.checkpoint.readers.fp8 import block_of
from phalanx.checkpoint.tensors import Index
from phalanx.models.check import check
from phalanx.models.config_json import ConfigJson, other_values, values_of
from phalanx.models.experts import BALANCE
from phalanx.models.family import Family
from phalanx.models.model_config import ModelConfig
from phalanx.models.registry import families, family_of, known_family, of_model_type

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# fields of losses and load balancing, and others on which no shape depends
MAY_CHANGE = (
    "dropout",
    "attention_dropout",
    "initializer_range",
    "router_bias_update_rate",
    "mtp_loss_weight",
    *BALANCE,
)
# keys that transformers or code published with a model reads, whatever the family -> the only values that our models
# compute
ALWAYS_ONLY: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "per_layer_config": (None,),
    "configuration_files": (None,),
}


@dataclass(frozen=True)
class ModelFolder:
    """A Hugging Face folder as transformers reads it: the model, and what else the folder holds."""

    path: Path
    """The folder itself; in one of our checkpoints, its `weights`."""
    model: ModelConfig
    config: dict[str, Any]
    """The contents of config.json."""
    index: Index | None
    """The tensors of its files, under their names there; None: a folder without weights."""

    @property
    def generation(self) -> dict[str, Any]:
        """generation_config.json; empty where there is none."""
        path = self.path / "generation_config.json"
        return read_json(path) if path.is_file() else {}

    @property
    def token_ids(self) -> dict[str, Any]:
        """Special tokens that the folder names; its generation_config.json takes precedence, as in transformers."""
        return {
            k: v
            for found in (self.config, self.generation)
            for k, v in found.items()
            if k in TOKEN_IDS and v is not None
        }


def read_folder(path: str | Path, wanted: str | None = None) -> ModelFolder:
    """The model of a Hugging Face folder (or of one of our checkpoints), from its config.json and the tensors of its
    files. wanted: a family that may read a part of it (registry.of_model_type).

    The model of a folder that says how embeddings are made (modules.json) has no head. A head that differs from the
    embedding is kept even if the config ties both, and multi-token prediction modules that are in no file are left
    out: transformers does the same. Those that are there count even if the config does not mention them, as that of
    Qwen3-Next. Code named in the folder is never run. CheckpointError names everything that is not supported.
    """
    folder = folder_of(path)
    config = read_config(folder)
    model = from_hf(config, str(folder / "config.json"), wanted)
    if is_embedder(folder):
        model = without_head(model)
    if not has_weights(folder):
        return ModelFolder(folder, model, config, None)
    index = hf_index(folder)
    if model.tie_word_embeddings and two_heads(index, same_in(folder)):
        model = replace(model, tie_word_embeddings=False)
    with_predictors = family_of(model).with_predictors
    if with_predictors is not None:
        there = depths_in(index)
        if not (there and model.predict_layers):
            model = with_predictors(model, there)
    return ModelFolder(folder, model, config, index)


def without_head(model: ModelConfig) -> ModelConfig:
    """The same model as it ends with its hidden states. CheckpointError for a family whose head cannot be left out."""
    if not hasattr(model, "head"):
        raise CheckpointError(
            f"model.family={model.family} cannot leave its head out, so no embeddings are made of its hidden states"
        )
    changed: Any = {"head": "none"} | ({"labels": (), "classifier_dropout": 0.0} if hasattr(model, "labels") else {})
    return replace(model, **changed)


def model_config_from_hf(folder: str | Path, wanted: str | None = None) -> ModelConfig:
    """The model of a Hugging Face folder, as found by `read_folder`."""
    return read_folder(folder, wanted).model


def from_hf(config: dict[str, Any], where: str = "config.json", wanted: str | None = None) -> ModelConfig:
    """The model that a config.json describes, as transformers 5 reads it; `where` names it in errors. wanted: as in
    `read_folder`."""
    found = of_model_type(config.get("model_type"), wanted)
    if found is None:
        raise CheckpointError(f"{where}: {unknown_family(config.get('model_type'))}")
    name, family = found
    try:
        config = family.text_keys(config)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    if block_of(config) is not None or _is_packed(config, family):  # these are unpacked while they are read
        config = {**config, "quantization_config": None}
    values = values_of(config, family.json_keys, family.other_names, where)
    odd = [*other_values(values, family.only), *other_values(config, ALWAYS_ONLY)]
    stated = ConfigJson(name, family.config, config, values, odd)
    model = family.from_hf(stated) if not odd else None
    if model is None or odd:
        raise CheckpointError(
            f"{where}: not supported: {'; '.join(odd)}. Change the file only if the weights were trained so"
        )
    problems = check(model, tp=1, seq_length=1)
    if problems:
        raise CheckpointError(f"{where}: " + "; ".join(str(p).removeprefix("config error: ") for p in problems))
    return model


def _is_packed(config: dict[str, Any], family: Family) -> bool:
    stated = config.get("quantization_config")
    return isinstance(stated, dict) and stated.get("quant_method") in family.packed


def unknown_family(name: Any) -> str:
    """What to say about a model_type that is not one of ours: the nearest ones, and what can be done."""
    known = [kind for family in families().values() for kind in (family.name, *family.also)]
    near = difflib.get_close_matches(str(name).lower().replace("-", "_"), known, n=3, cutoff=0.5) or sorted(known)
    return (
        f"model_type={name!r} is no family of Phalanx (nearest: {', '.join(near)}). Code of a model folder "
        "is never run; a package's family is named in the config, model.family=PACKAGE.MODULE:NAME; "
        'to add a family see "Adding a model family" in docs/ops-and-modules.md'
    )


def to_hf(model: ModelConfig, dtype: torch.dtype, token_ids: dict[str, Any] | None = None) -> dict[str, Any]:
    """config.json for a model whose weights have this dtype. Special tokens that are not given are set to none (not to
    Hugging Face's defaults)."""
    family = known_family(model.family)
    if family is None or type(model) is not family.config:
        known = ", ".join(one.config.__name__ for one in families().values())
        raise CheckpointError(
            f"no config.json is known for {type(model).__name__} (there is one for {known}): give it a Family"
        )
    kind_of = {"architectures": [family.class_of(model)], "model_type": family.name}
    ids = {name: (token_ids or {}).get(name) for name in TOKEN_IDS}
    kind = str(dtype).removeprefix("torch.")
    return {**kind_of, **family.to_hf(model), **ids, "dtype": kind, "torch_dtype": kind, "use_cache": True}


def generation_config(token_ids: dict[str, Any] | None = None, start: int | None = None) -> dict[str, Any]:
    """generation_config.json. start: the token with which texts of a decoder beside an encoder begin; transformers
    reads it here."""
    found = {k: v for k, v in (token_ids or {}).items() if k in TOKEN_IDS}
    return {"_from_model_config": True, **found, **({} if start is None else {"decoder_start_token_id": start})}


def resolved(model: dict[str, Any]) -> dict[str, Any]:
    """A model config's dict with all defaults filled in, including those of fields added after it was written, so that
    two spellings are equal."""
    family = known_family(model.get("family"))
    if family is None:
        m = dict(model)
    else:
        later = {f.name: f.default for f in fields(family.config) if f.default is not MISSING}
        m = family.fill({**later, **model})
    if isinstance(m.get("rope_scaling"), dict):
        m["rope_scaling"] = {k: v for k, v in m["rope_scaling"].items() if v is not None}
    return m


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """`field old -> new` for every field in which two model configs differ, except those that a run may change."""
    family = known_family(new.get("family"))
    may_change = {*MAY_CHANGE, *(("max_position_embeddings",) if family is None else family.may_change)}
    a, b = resolved(old), resolved(new)
    return [
        f"model.{k} {a.get(k)} -> {b.get(k)}"
        for k in sorted(a.keys() | b.keys())
        if a.get(k) != b.get(k) and k not in may_change
    ]
