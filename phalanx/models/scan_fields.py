"""What families with scans share: rules of their steps and heads, and limits of steps in config.json."""

from __future__ import annotations

import math
from typing import Any

from phalanx.base.errors import Problem
from phalanx.base.rules import divisors, problem, within
from phalanx.models.config_json import ConfigJson

WHOLE = (0.0, math.inf)


def check_steps(config: Any) -> list[Problem]:
    """time_step_min, time_step_max, time_step_floor and, if there is one, time_step_limit of a `model` section."""
    found = []
    for name in ("time_step_min", "time_step_max", "time_step_floor"):
        found += within("model", config, name, "(0, inf)")
    found += check_limits(config) if hasattr(config, "time_step_limit") else []
    if not found and config.time_step_min > config.time_step_max:
        because, valid = {"model.time_step_max": config.time_step_max}, (config.time_step_max,)
        found.append(problem("model", config, "time_step_min", "must be <= time_step_max", because, valid))
    return found


def check_limits(config: Any) -> list[Problem]:
    """time_step_limit of a `model` section."""
    low, high = config.time_step_limit
    if 0 <= low < high:
        return []
    rule = "must be two numbers, the first at least 0 and less than the second"
    return [problem("model", config, "time_step_limit", rule, {}, (WHOLE,))]


def check_shares(config: Any, *pairs: tuple[str, str]) -> list[Problem]:
    """Each pair of fields: groups or key-value heads, and the heads that share them, which they must divide."""
    found = []
    for field, heads in pairs:
        own, all_heads = getattr(config, field), getattr(config, heads)
        if all_heads >= 1 and all_heads % own:
            because, valid = {f"model.{heads}": all_heads}, divisors(own, all_heads)
            found.append(problem("model", config, field, f"must divide {heads}", because, valid))
    return found


def check_scan_ranks(config: Any, tp: int, heads: str, groups: str) -> list[Problem]:
    """What the heads of scans and their groups, the fields of these names, say of layout.tp."""
    all_heads, all_groups, found = getattr(config, heads), getattr(config, groups), list[Problem]()
    valid = divisors(tp, all_heads, config.num_attention_heads)
    if all_heads % tp:
        rule = f"must divide {heads}"
        found.append(Problem("layout.tp", tp, rule, {f"model.{heads}": all_heads}, valid))
    if all_groups % tp and tp % all_groups:
        rule = f"must divide {groups} or be a multiple of it"
        found.append(Problem("layout.tp", tp, rule, {f"model.{groups}": all_groups}, valid))
    return found


def limits_of(found: ConfigJson) -> tuple[float, float]:
    """time_step_limit; recorded as unsupported if it is not two numbers."""
    given = found.values["time_step_limit"]
    numbers = [number_of(each) for each in given]
    low, high = numbers if len(numbers) == 2 else (None, None)
    if low is None or high is None:
        found.odd.append(f"time_step_limit={given!r} (it must be two numbers)")
        return WHOLE
    return low, high


def number_of(value: Any) -> float | None:
    """A limit of config.json as a number; transformers writes an infinite one as {"__float__": "Infinity"}."""
    if isinstance(value, dict) and set(value) == {"__float__"}:
        value = value["__float__"]
        return float(value) if value in ("Infinity", "-Infinity") else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
