"""Which families there are, and where each is: `module:NAME` of ours, and of other packages that a config names."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from phalanx.models.family import Family
from phalanx.models.model_config import ModelConfig

FAMILIES = {
    "llama": "phalanx.models.llama:FAMILY",
    "mistral": "phalanx.models.mistral:FAMILY",
    "qwen2": "phalanx.models.qwen2:FAMILY",
    "qwen3": "phalanx.models.qwen3:FAMILY",
    "mixtral": "phalanx.models.mixtral:FAMILY",
    "qwen3_moe": "phalanx.models.qwen3_moe:FAMILY",
    "gpt_oss": "phalanx.models.gpt_oss:FAMILY",
    "deepseek_v3": "phalanx.models.deepseek_v3:FAMILY",
    "gpt2": "phalanx.models.gpt2:FAMILY",
}


@cache
def load_family(name: str) -> Family:
    """The family that model.family names."""
    module, _, member = FAMILIES[name].partition(":")
    return getattr(import_module(module), member)


def known_family(name: object) -> Family | None:
    """The same, or None for what names none."""
    return load_family(name) if isinstance(name, str) and name in FAMILIES else None


def families() -> dict[str, Family]:
    """Those known here, by the names that model.family has for them."""
    return {name: load_family(name) for name in FAMILIES}


def configs() -> dict[str, type]:
    """The `model` section of each of these families."""
    return {name: family.config for name, family in families().items()}


def family_of(config: ModelConfig) -> Family:
    return load_family(config.family)


def of_model_type(kind: object) -> tuple[str, Family] | None:
    """The family whose config.json has this `model_type`, and what model.family is for it."""
    found = (pair for pair in families().items() if kind in (pair[1].name, *pair[1].also))
    return next(found, None)
