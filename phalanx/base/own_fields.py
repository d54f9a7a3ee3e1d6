"""Fields that a registered class adds to a config (its `Config` dataclass): the section that has them, and objects
made of their values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import ConfigError, Problem
from phalanx.base.registry import near
from phalanx.base.tree import type_text


@dataclass(frozen=True)
class NoFields:
    """The `Config` of a class without settings."""


def made_of(config: type, at: str, given: Mapping[str, Any]) -> Any:
    """The dataclass `config` made from these values. ConfigError with every problem. `at`: the key above them."""
    from pydantic import ConfigDict, ValidationError, create_model  # start-up time: most runs have none of these

    known = {f.name: f for f in fields(config)}
    hint: Any = config
    section = create_model("Section", __config__=ConfigDict(strict=True, extra="forbid"), fields=(hint, ...))
    try:  # through JSON, because pydantic's strict mode takes lists for tuples only there
        return section.model_validate_json(json.dumps({"fields": dict(given)})).fields  # type: ignore[attr-defined]
    except ValidationError as error:
        problems = []
        for one in error.errors(include_url=False):
            name = str(one["loc"][1]) if len(one["loc"]) > 1 else ""
            field = f"{at}.{name}" if name else at
            if name not in known:
                others = near(name, tuple(known)) or tuple(known)
                rule = f"is not a field of {config.__name__}, which has " + (", ".join(known) or "none")
                problems.append(Problem(field, given.get(name), rule, {}, tuple(f"{at}.{n}" for n in others)))
            elif one["type"] == "missing":
                problems.append(Problem(field, None, f"is required by {config.__name__}"))
            else:
                hinted = known[name].type
                wanted = hinted if isinstance(hinted, str) else type_text(hinted)
                problems.append(Problem(field, given.get(name), f"must be {wanted}"))
        raise ConfigError(problems) from error


@cache
def section_of(config: type, base: type) -> type:
    """The section with a member's own fields (`config`) and those that all members of its seam share (`base`), as one
    frozen dataclass. TypeError if `config` is no frozen dataclass, or has a field of `base`."""
    if config is base or issubclass(config, base):
        return config
    if not is_dataclass(config) or not config.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TypeError(f"{config.__qualname__} must be a frozen dataclass: @dataclass(frozen=True, kw_only=True)")
    for taken in {f.name for f in fields(config)} & {f.name for f in fields(base)}:
        seam = vars(base)["seam"]
        raise TypeError(
            f"{config.__qualname__} has a field `{taken}`, which every {seam} has already: give it another name"
        )

    def reduced(section: Any) -> tuple[Any, ...]:  # for pickle, which finds classes by their place in a module
        return _section, (config, base, {f.name: getattr(section, f.name) for f in fields(section)})

    body = {"__module__": config.__module__, "__doc__": config.__doc__, "__reduce__": reduced}
    return dataclass(frozen=True, kw_only=True)(type(config.__name__, (config, base), body))


def _section(config: type, base: type, values: Mapping[str, Any]) -> Any:
    return section_of(config, base)(**values)
