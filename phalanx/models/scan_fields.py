"""What families with scans share: rules of their steps, and limits of steps in config.json."""

from __future__ import annotations

import math
from typing import Any

from phalanx.base.errors import Problem
from phalanx.base.rules import problem, within
from phalanx.models.config_json import ConfigJson

WHOLE = (0.0, math.inf)


def check_steps(config: Any) -> list[Problem]:
    """time_step_min, time_step_max, time_step_floor and, if there is one, time_step_limit of a `model` section."""
    found = []
    for name in ("time_step_min", "time_step_max", "time_step_floor"):
        found += within("model", config, name, "(0, inf)")
    low, high = getattr(config, "time_step_limit", WHOLE)
    if not 0 <= low < high:
        rule = "must be two numbers, the first at least 0 and less than the second"
        found.append(problem("model", config, "time_step_limit", rule, {}, (WHOLE,)))
    if not found and config.time_step_min > config.time_step_max:
        because, valid = {"model.time_step_max": config.time_step_max}, (config.time_step_max,)
        found.append(problem("model", config, "time_step_min", "must be <= time_step_max", because, valid))
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
