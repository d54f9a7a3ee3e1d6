"""Every rule of a run: those of its values (`config/check.py`), those that need the model's blocks, and the search for
values that work.

`raise_problems` chooses the error: exit code 2, or 3 and 4 if only data or a checkpoint is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field, replace
from typing import Any

from phalanx.base import tree
from phalanx.base.dataclass import dataclass
from phalanx.base.errors import ConfigError, Problem
from phalanx.base.rules import MissingPath
from phalanx.config.check import check_values, continues
from phalanx.config.device_check import Facts
from phalanx.config.limits import check_limits
from phalanx.config.run import Run
from phalanx.planning.adapter_check import check_adapter_source, check_adapters
from phalanx.planning.base_check import check_base
from phalanx.planning.fp8_check import check_fp8, check_moments
from phalanx.planning.freeze import check_freeze
from phalanx.planning.optimizer_check import check_optimizer_keys
from phalanx.planning.qk_clip_check import check_qk_clip
from phalanx.planning.support_check import check_supported


def check(run: Run, facts: Facts) -> list[Problem]:
    """Every problem of a run, each with nearby values that make it go away (found by checking the run with them)."""
    too_large = check_limits(run, facts.world_size)
    if too_large:  # the rules count layers, ranks and so on one by one
        return [*facts.env, *too_large]
    found = broken_rules(run, facts)
    return [suggest(run, facts, p, found) for p in found]


def raise_problems(problems: list[Problem]) -> None:
    """Raise all problems as one ConfigError, or as DataError or CheckpointError if only paths of one kind are
    missing."""
    kinds = {p.error if isinstance(p, MissingPath) else ConfigError for p in problems}
    if not problems:
        return
    if len(kinds) == 1 and ConfigError not in kinds:
        raise kinds.pop()("\n".join(str(p).removeprefix("config error: ") for p in problems))
    raise ConfigError(problems)


def broken_rules(run: Run, facts: Facts) -> list[Problem]:
    found = check_values(run, facts)
    sound = not any(p.field.startswith(("model", "layout", "train.seq", "train.micro")) for p in found)
    frozen: list[Problem] = []
    if not any(p.field.startswith("model") for p in found):
        frozen = check_freeze(run) if run.lora is None else check_adapters(run) + check_base(run)
        frozen += check_qk_clip(run) + check_optimizer_keys(run)
        frozen += [p for p in check_supported(run) if p.field not in {each.field for each in found}]
        if facts.files and not continues(run):
            frozen += check_adapter_source(run)
    found = found + frozen + check_moments(run, facts.capability, facts.device_name)
    found += check_fp8(run, facts.capability, facts.device_name, sound)
    return found


# ---- values that would do ------------------------------------------------------------------------


def suggest(run: Run, facts: Facts, broken: Problem, found: list[Problem]) -> Problem:
    """The problem with `valid` restricted to values that end it, preferring those that cause no other."""
    try:
        tree.get(run, broken.field)
    except KeyError:
        return broken  # an option or a variable of the environment: nothing to try
    quick = replace(facts, files=False)
    before = _names(broken_rules(run, quick))
    if _name(broken) not in before:
        quick, before = facts, _names(found)
    tries = Tries(run, quick, broken, before)
    near = _outward(broken.value)
    every = (*broken.valid, *near)
    size = near and broken.field.startswith("layout.") and not facts.world_follows
    possible = [v for v in every if not size or (v and facts.world_size % v == 0)]
    grades: list[tuple[Sequence[Any], Callable[[Any], bool]]]
    grades = [(broken.valid, tries.clean), (near, tries.clean), (every, tries.fits), (possible, tries.ends)]
    offers = (_both_sides(broken.value, [v for v in values if good(v)]) for values, good in grades)
    return replace(broken, valid=tuple(next((offer for offer in offers if offer), ())))


@dataclass(frozen=True)
class Tries:
    """Other values of one field, each checked once by the whole validator."""

    run: Run
    facts: Facts
    broken: Problem
    before: set[tuple[str, str]]
    seen: dict[Any, set[tuple[str, str]]] = field(default_factory=dict)

    def after(self, value: Any) -> set[tuple[str, str]]:
        name = repr(value)
        if name not in self.seen:
            run, facts = tree.replace_at(self.run, self.broken.field, value), self.facts
            if facts.world_follows:
                world = run.layout.least_ranks
                facts = replace(facts, world_size=world, local_ranks=world)
            self.seen[name] = _names(broken_rules(run, facts))
        return self.seen[name]

    def ends(self, value: Any) -> bool:
        """The problem is gone."""
        return _name(self.broken) not in self.after(value)

    def fits(self, value: Any) -> bool:
        """It breaks no rule of its field, whatever else the old value broke, and no other rule of the layout that was
        kept."""
        after = self.after(value)
        own, new = (name for name, _ in after if name == self.broken.field), (name for name, _ in after - self.before)
        return not any(own) and not any(name.startswith("layout.") for name in new)

    def clean(self, value: Any) -> bool:
        """It fits, and causes no other problem."""
        return self.fits(value) and self.after(value) <= self.before


def _outward(value: Any, far: int = 48) -> list[int]:
    """Positive integers around a bad one, the nearest first."""
    if type(value) is not int:
        return []
    start = max(value, 0)
    return [v for d in range(1, far) for v in (start - d, start + d) if v > 0]


def _both_sides(value: Any, good: list[Any]) -> list[Any]:
    """For numbers, the nearest below and the nearest above (two above, if there is none below); for others, the first
    three."""
    if type(value) is not int or not all(type(v) is int for v in good):
        return good[:3]
    below, above = sorted(v for v in good if v < value)[-1:], sorted(v for v in good if v > value)
    return below + (above[:1] if below else above[:2])


def _name(p: Problem) -> tuple[str, str]:
    return p.field, p.rule


def _names(problems: list[Problem]) -> set[tuple[str, str]]:
    return {_name(p) for p in problems}
