"""What is meant for a family and is none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from phalanx.models.family import Family
from phalanx.models.model_config import ModelConfig
from tests.outside.plain import FAMILY


@dataclass(frozen=True, kw_only=True)
class Sizeless(ModelConfig):
    family: str


def without_env(config: Any) -> list[Any]:
    return []


NO_SIZES = Family("sizeless", Sizeless, FAMILY.blocks, architecture="Sizeless")
NO_ENV = replace(FAMILY, name="no_env", blocks=without_env)
AGAIN = replace(FAMILY, name="llama")
