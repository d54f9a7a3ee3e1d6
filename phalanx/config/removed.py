"""Options that Phalanx once had, and what to type instead of each.

A config that still uses a removed option (a file, an override, the saved config of an old run or checkpoint) is
refused, together with all its other problems. A renamed one still works, and one line says its new name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem

ABSENT = object()


@dataclass(frozen=True)
class Removed:
    """One removed option.

    settings  dotted key -> value, or a function that says whether a value is meant; a config with all of them uses the
              option. Problems name the first key
    why       what is done now; the message reads "was removed: WHY"
    instead   the keys to change instead, if not these -> the value to type
    """

    settings: Mapping[str, Any]
    why: str
    instead: Mapping[str, Any]

    def said_by(self, data: Mapping[str, Any]) -> bool:
        return all(_fits(value_at(data, key), wanted) for key, wanted in self.settings.items())

    def problem(self, data: Mapping[str, Any]) -> Problem:
        first, *others = self.settings
        words = " ".join(f"{key}={_word(value)}" for key, value in self.instead.items())
        because = {key: value_at(data, key) for key in others}
        return Problem(first, value_at(data, first), f"was removed: {self.why}; type {words}", because)


REMOVED = tuple(
    Removed(
        {"layout.dispatch": f"{way}_fp8"},
        "tokens travel to experts in train.precision",
        {"layout.dispatch": way},
    )
    for way in ("auto", "allgather", "alltoall", "push")
) + tuple(
    Removed(
        {"train.fp8.recipe": recipe},
        "it is an emulation that no GPU runs fast",
        {"train.fp8.recipe": "nvfp4"},
    )
    for recipe in ("nvfp4_fine", "nvfp4_mixed")
)


RENAMED: Mapping[tuple[str, Any], Any] = MappingProxyType({("train.kernels", "wheels"): "optional"})
"""(Key, old value) -> new value."""


def replace_renamed(data: dict[str, Any]) -> tuple[str, ...]:
    """Replace old names by new ones in the plain values of a config; returns a line for each."""
    notes = []
    for (key, old), new in RENAMED.items():
        if value_at(data, key) == old:
            section, _, name = key.rpartition(".")
            value_at(data, section)[name] = new
            notes.append(f"{key}={_word(old)} is called {key}={_word(new)} now")
    return tuple(notes)


def replace_removed(data: dict[str, Any], options: Sequence[Removed] = REMOVED) -> tuple[list[Problem], frozenset[str]]:
    """The problems of removed options in the plain values of a config, and the keys that were set for them.

    `data` then contains what is to be typed instead, so that the other rules can be checked too.
    """
    said = [option for option in options if option.said_by(data)]
    problems = [option.problem(data) for option in said]
    for option in said:
        for key, value in option.instead.items():
            section, _, name = key.rpartition(".")
            value_at(data, section)[name] = value
    return problems, frozenset(key for option in said for key in option.instead)


def value_at(data: Any, key: str) -> Any:
    """The plain value at a dotted key, for "" all of them; ABSENT if there is none."""
    for step in filter(None, key.split(".")):
        if not isinstance(data, Mapping) or step not in data:
            return ABSENT
        data = data[step]
    return data


def _fits(value: Any, wanted: Any) -> bool:
    if value is ABSENT:
        return False
    return bool(wanted(value)) if callable(wanted) else value == wanted


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
