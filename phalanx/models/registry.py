"""Which families exist: ours, and those of other packages that a config names (base/registry.py, seam "family")."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from functools import cache

from phalanx.base import registry
from phalanx.base.registry import NotFound, RegisteredTwice
from phalanx.models.family import Family
from phalanx.models.model_config import ModelConfig

SEAM = "family"
# the names by which facts about a model are read; every `model` section has them, as fields or as properties
FIELDS = {
    "family": "str",
    "vocab_size": "int",
    "hidden_size": "int",
    "intermediate_size": "int",
    "num_hidden_layers": "int",
    "num_attention_heads": "int",
    "max_position_embeddings": "int",
    "tie_word_embeddings": "bool",
    "initializer_range": "float",
}


def load_family(name: str) -> Family:
    """The family that model.family names: ours, one of an installed package, or `package.module:NAME`, which is
    imported and known from then on. NotFound says why there is none, or what it lacks."""
    if name in registry.BUILT_IN[SEAM]:
        return _ours(name)
    family: Family | None = registry.registered(SEAM).get(name)
    return _theirs(name) if family is None else family


@cache
def _ours(name: str) -> Family:
    return registry.find(SEAM, name)


def _theirs(name: str) -> Family:
    known = families()
    family: Family = registry.find(SEAM, name, Family)
    _check(family)
    for other, one in known.items():
        if {family.name, *family.also} & {one.name, *one.also}:
            raise RegisteredTwice(
                f"model_type {family.name!r} is of two families: {registry.path_of(SEAM, other)} and "
                f"{registry.path_of(SEAM, name)}; rename one of them"
            )
    registry.register(SEAM, name, family, registry.path_of(SEAM, name))
    return family


def _check(family: Family) -> None:
    """NotFound if the family's config or blocks lack what other code relies on."""
    config = family.config
    if not (isinstance(config, type) and issubclass(config, ModelConfig) and is_dataclass(config)):
        raise NotFound(f"is no Family: its config, {config!r}, must be a dataclass derived from ModelConfig")
    there = {f.name for f in fields(config)} | {n for n in FIELDS if isinstance(getattr(config, n, None), property)}
    lacking = [f"{field}: {kind}" for field, kind in FIELDS.items() if field not in there]
    if lacking:
        raise NotFound(f"is no Family: its config {config.__name__} has no {', no '.join(lacking)}")
    try:
        inspect.signature(family.blocks).bind(config, None)
    except TypeError as error:
        raise NotFound(f"is no Family: its blocks must be a function of (config, env): {error}") from error


def is_known(name: str) -> bool:
    """Whether the family is ours or a config of this process has named it. Nothing is imported."""
    return name in registry.BUILT_IN[SEAM] or name in registry.registered(SEAM)


def known_family(name: object) -> Family | None:
    """The family, if it is ours or a config of this process has named it; otherwise None. No other code is imported,
    because names in checkpoints and folders may come from anybody."""
    return load_family(name) if isinstance(name, str) and is_known(name) else None


def families() -> dict[str, Family]:
    """Our families and those of other packages named in this process, by the value of model.family."""
    ours = {name: _ours(name) for name in registry.BUILT_IN[SEAM]}
    return {**ours, **registry.registered(SEAM)}


def configs() -> dict[str, type]:
    """The `model` section of each of these families."""
    return {name: family.config for name, family in families().items()}


def family_of(config: ModelConfig) -> Family:
    return load_family(config.family)


def of_model_type(kind: object, wanted: str | None = None) -> tuple[str, Family] | None:
    """The family whose config.json has this `model_type`, and the value of model.family for it. wanted: a family that
    may read it although it has another name (the text of a folder with a vision tower)."""
    known = families()
    if wanted in known and kind in known[wanted].also:
        return wanted, known[wanted]
    found = [pair for pair in known.items() if kind in (pair[1].name, *pair[1].also)]
    return next((pair for pair in found if pair[1].name == kind), found[0] if found else None)
