"""Helpers for config checks: ranges, options without effect, missing paths. The rules themselves are in each room."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Iterable
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError, DataError, PhalanxError, Problem


@dataclass(frozen=True)
class MissingPath(Problem):
    """A path that does not exist. If it is the only kind of problem, the run ends with `error` rather than as a bad
    config."""

    error: type[PhalanxError] = DataError


DEEP = 64  # nested folders within which a mistyped name is still searched for


def problem(
    section: str, config: Any, name: str, rule: str, because: dict[str, Any] | None = None, valid: Iterable[Any] = ()
) -> Problem:
    """A broken rule of field `name`. `rule` contains no values, so that it reads the same for every value."""
    return Problem(f"{section}.{name}", getattr(config, name), rule, because or {}, tuple(valid))


def at_least(section: str, config: Any, low: int, *names: str) -> list[Problem]:
    """Problems of the named fields that are set to less than `low`."""
    found = []
    for name in names:
        value = getattr(config, name)
        if value is not None and value < low:
            found.append(problem(section, config, name, f"must be an integer >= {low}", valid=(low, low + 1)))
    return found


def within(section: str, config: Any, name: str, interval: str, valid: Iterable[Any] = ()) -> list[Problem]:
    """The problem of a number outside an interval, written as in mathematics: `[0, 1)`, `(0, inf)`. NaN is in none."""
    value = getattr(config, name)
    if value is None or _inside(value, interval):
        return []
    default = default_of(type(config), name)
    near = tuple(valid) or ((default,) if default is not dataclasses.MISSING and default is not None else ())
    return [problem(section, config, name, f"must be a number in {interval}", valid=near)]


def _inside(value: float, interval: str) -> bool:
    low, high = (float(x) for x in interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below and not math.isnan(value)


def no_effect(section: str, config: Any, names: Iterable[str], without: str, because: dict[str, Any]) -> list[Problem]:
    """Problems of fields that were changed although nothing will read them."""
    found = []
    for name in names:
        default = default_of(type(config), name)
        if getattr(config, name) != default:
            found.append(problem(section, config, name, f"has no effect without {without}", because, (default,)))
    return found


def default_of(cls: type, name: str) -> Any:
    field = next(f for f in dataclasses.fields(cls) if f.name == name)
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def multiples(value: int, unit: int) -> tuple[int, ...]:
    """The nearest positive multiples of `unit`, below and above."""
    below = value // unit * unit
    return tuple(m for m in (below, below + unit) if m > 0 and m != value)


def powers_of_two(value: int) -> tuple[int, ...]:
    """The nearest powers of two below and above a positive number that is not one."""
    below = 1 << (value.bit_length() - 1)
    return below, 2 * below


def divisors(value: int, *of: int) -> tuple[int, ...]:
    """Common divisors of `of`, the nearest to `value` first."""
    whole = math.gcd(*of)
    found = {d for i in range(1, math.isqrt(whole) + 1) if whole % i == 0 for d in (i, whole // i)} - {value}
    return tuple(sorted(found, key=lambda d: abs(d - value)))


def missing_data(field: str, value: str, rule: str, suffix: str = "") -> MissingPath:
    """Data at `value` + `suffix` does not exist. Similar names in its folder are suggested, without their suffix."""
    return MissingPath(field, value, rule, {}, near_paths(value, suffix), error=DataError)


def missing_checkpoint(field: str, value: str) -> MissingPath:
    rule = "does not exist (and the run does not fall back to random weights)"
    owner, _, name = value.partition("/")
    if owner.strip(".~") and name and "/" not in name and not os.path.isdir(owner):  # as the Hub names its models
        rule += "; a model of the Hugging Face Hub is downloaded first: hf download OWNER/NAME --local-dir FOLDER"
    return MissingPath(field, value, rule, {}, near_paths(value), error=CheckpointError)


def near_paths(path: str, suffix: str = "") -> tuple[str, ...]:
    """Up to three existing paths with a name similar to that of `path`. If the folder is mistyped, one level up is
    searched."""
    if path.count("/") > DEEP:
        return ()
    folder, name = os.path.split(path.rstrip("/"))
    if not os.path.isdir(folder or "."):
        return tuple(found for parent in near_paths(folder) for found in _like(parent, name, suffix))[:3]
    return _like(folder, name, suffix)


def _like(folder: str, name: str, suffix: str) -> tuple[str, ...]:
    try:
        names = {n.removesuffix(suffix) for n in os.listdir(folder or ".") if n.endswith(suffix)}
    except OSError:  # not readable
        return ()
    return tuple(os.path.join(folder, n) for n in difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.5))
