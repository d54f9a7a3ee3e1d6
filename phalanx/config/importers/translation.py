"""What an importer of another framework's config returns: our settings, and what became of every key of theirs.

A key is set, built in (its effect comes by itself here), missing (nothing here does it) or to be set by hand. A key
that an importer forgets ends up among the missing ones, so none is dropped silently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from types import MappingProxyType
from typing import Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import ConfigError, Problem
from phalanx.config.synonyms import said_of

SEAM = "config_importer"
Kind = Literal["set", "built in", "missing", "by hand"]
NOTHING = "nothing here does this"


@dataclass(frozen=True)
class ForeignKey:
    """A key of theirs, as it is written there, and its line (0: not known)."""

    name: str
    value: Any
    line: int = 0


@dataclass(frozen=True)
class OpenValue:
    """A value that the text leaves open: how it is written, and why it is not known."""

    text: str
    why: str


@dataclass(frozen=True)
class KeyOutcome:
    """What became of a key. keys: those of ours that it decides."""

    key: ForeignKey
    kind: Kind
    keys: tuple[str, ...] = ()
    says: str = ""


@dataclass(frozen=True)
class Setting:
    """A value of a key of ours, and where it comes from."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Imported:
    """settings: our key -> value. outcomes: one per key of theirs, in their order. by_hand: our key -> what is to be
    done. differs: (their default, why it cannot be had here). ranks: those that their launcher starts."""

    framework: str
    settings: Mapping[str, Setting]
    outcomes: tuple[KeyOutcome, ...]
    by_hand: Mapping[str, str]
    differs: tuple[tuple[str, str], ...] = ()
    ranks: int | None = None


@dataclass(frozen=True)
class ForeignText:
    """A config to be imported. variables: values that the user gives to variables of a script."""

    path: str
    text: str
    ranks: int | None = None
    variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def refuse(self, rule: str, line: int = 0, valid: tuple[str, ...] = ()) -> ConfigError:
        where = f"{self.path}:{line}" if line else self.path
        return ConfigError([Problem("FILE", self.path, rule, {}, valid, where)])


class ConfigImporter(ABC):
    """Turns configs of another framework into ours: one file, found by its name in the seam `config_importer`."""

    title: str
    """The framework's name, as it writes it."""
    looks_for: str
    """What a text of it has, for the message about a text that nobody recognises."""

    @abstractmethod
    def recognises(self, source: ForeignText) -> tuple[str, ...]:
        """What in the text is this framework's; empty if nothing is."""

    @abstractmethod
    def translate(self, source: ForeignText) -> Imported:
        """The whole text. ConfigError if it is damaged."""


class Refused(Exception):
    """A value of theirs that none of ours corresponds to: what is said about it."""


class Undecided(Exception):
    """A value that the text does not decide: what is missing."""


def same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Becomes:
    """Their key is ours, after a conversion that may raise Refused. default: their value if the key is absent; None:
    then nothing is set."""

    key: str
    convert: Callable[[Any], Any] = same
    default: Any = None


@dataclass(frozen=True)
class BuiltIn:
    """The key needs none here; says: why."""

    says: str


@dataclass(frozen=True)
class Missing:
    """Nothing here does it; says: what there is instead."""

    says: str = NOTHING


@dataclass(frozen=True)
class ByHand:
    """It has a counterpart, whose value cannot be derived; says: what to do."""

    key: str
    says: str


@dataclass(frozen=True)
class ByValue:
    """A rule for each of some values, and one for all others."""

    rules: Mapping[Any, Rule]
    otherwise: Rule


Rule = Becomes | BuiltIn | Missing | ByHand | ByValue
OFF = "off there, and not done here either"


def off_or(otherwise: Rule) -> ByValue:
    """For switches: nothing is needed while they are off."""
    return ByValue({False: BuiltIn(OFF), None: BuiltIn(OFF)}, otherwise)


class Translation:
    """Collects settings and accounts for every key of theirs exactly once."""

    def __init__(self, framework: str, keys: Sequence[ForeignKey]):
        self.framework = framework
        self._all = tuple(keys)
        self._last = {key.name: key for key in keys}  # of a key that is given twice, the last one counts
        self._settings: dict[str, Setting] = {}
        self._outcomes: dict[str, KeyOutcome] = {}
        self._waiting: dict[str, tuple[str, str]] = {}  # known keys of a value that another key leaves open
        self._by_hand: dict[str, str] = {}
        self._differs: list[tuple[str, str]] = []

    # ---- looking at theirs

    def has(self, name: str) -> bool:
        return name in self._last

    def is_open(self, name: str) -> bool:
        return self.has(name) and isinstance(self._last[name].value, OpenValue)

    def value(self, name: str, default: Any = None) -> Any:
        """Their value, or `default` if the key is absent or its value is open."""
        return default if not self.has(name) or self.is_open(name) else self._last[name].value

    def first(self, *names: str) -> str:
        """The first of some names of one thing that is given; the first of all if none is."""
        return next((name for name in names if self.has(name)), names[0])

    def names(self) -> tuple[str, ...]:
        return tuple(self._last)

    def settled(self, name: str) -> bool:
        """Whether it is known already what becomes of a key."""
        return name in self._outcomes

    def setting(self, key: str) -> Any:
        """A value of ours that was set already, or None."""
        return self._settings[key].value if key in self._settings else None

    # ---- what becomes of them

    def set(self, key: str, value: Any, *theirs: str, origin: str = "") -> None:
        """Set a key of ours from keys of theirs; those that are absent stand for their defaults. value: a function is
        called only if none of them is open, and may raise Refused."""
        used = [name for name in theirs if self.has(name)]
        unknown = [name for name in used if self.is_open(name)]
        if unknown:
            for name in unknown:
                found = self._last[name].value
                self.by_hand(key, f"{name} {found.text}: {found.why}", name)
            for name in used:
                self._waiting.setdefault(name, (key, f"depends on {unknown[0]}"))
            return
        try:
            made = value() if callable(value) else value
        except Undecided as undecided:
            return self.by_hand(key, str(undecided), *used)
        except Refused as refused:
            for name in used:
                self.missing(name, str(refused))
            if not used:
                self.differ(theirs[0] if theirs else key, str(refused))
            return
        if key in self._settings:
            raise ValueError(f"{key} is set twice, by {', '.join(theirs)} and {self._settings[key].origin}")
        self._settings[key] = Setting(made, origin or ", ".join(used) or f"default of {self.framework}")
        for name in used:
            self._settle(name, "set", key)

    def built_in(self, name: str, says: str) -> None:
        self._settle(name, "built in", says=says)

    def missing(self, name: str, says: str = "") -> None:
        self._settle(name, "missing", says=says or said_of(name.strip("-").replace("-", "_")) or NOTHING)

    def by_hand(self, key: str, says: str, *theirs: str) -> None:
        """A key of ours that the user has to set."""
        self._by_hand.setdefault(key, says)
        for name in theirs:
            if self.has(name):
                self._settle(name, "by hand", key, says)

    def differ(self, what: str, says: str) -> None:
        """A default of theirs that cannot be had here."""
        self._differs.append((what, says))

    def apply(self, rules: Mapping[str, Rule]) -> None:
        """Apply a table to all keys that are not settled yet."""
        for name, rule in rules.items():
            if not self.settled(name):
                self._apply(name, rule)

    def finish(self, ranks: int | None = None) -> Imported:
        """Keys that nobody settled are missing."""
        for name in self._last:
            if name in self._waiting and not self.settled(name):
                key, says = self._waiting[name]
                self._settle(name, "by hand", key, says)
            elif not self.settled(name):
                self.missing(name)
        outcomes = tuple(self._outcome(key) for key in self._all)
        return Imported(self.framework, self._settings, outcomes, self._by_hand, tuple(self._differs), ranks)

    def _outcome(self, key: ForeignKey) -> KeyOutcome:
        counts = self._last[key.name]
        if key is counts:
            return self._outcomes[key.name]
        return KeyOutcome(key, "built in", (), f"given again on line {counts.line}, and the last one counts")

    def _apply(self, name: str, rule: Rule) -> None:
        if isinstance(rule, Becomes):
            if self.has(name) or rule.default is not None:
                self.set(rule.key, lambda: rule.convert(self.value(name, rule.default)), name)
        elif not self.has(name):
            return
        elif isinstance(rule, ByValue):
            value = self.value(name)
            known = isinstance(value, (str, int, float, type(None))) and not self.is_open(name)
            self._apply(name, rule.rules.get(value, rule.otherwise) if known else rule.otherwise)
        elif isinstance(rule, BuiltIn):
            self.built_in(name, rule.says)
        elif isinstance(rule, ByHand):
            self.by_hand(rule.key, rule.says, name)
        else:
            self.missing(name, rule.says)

    def _settle(self, name: str, kind: Kind, key: str = "", says: str = "") -> None:
        before = self._outcomes.get(name)
        if before is not None and before.kind != kind:
            if {before.kind, kind} == {"set", "by hand"}:  # of several settings of one key, those that are known count
                kind, says = "set", before.says or says
            else:
                raise ValueError(f"{name} is {kind}, but it was {before.kind} already")
        keys = (*(before.keys if before else ()), *((key,) if key else ()))
        self._outcomes[name] = KeyOutcome(self._last[name], kind, tuple(dict.fromkeys(keys)), says)


# ---- conversions that several importers need


def whole(value: Any) -> int:
    """An integer, also if it is written as 1e9 or 1_000. Refused otherwise."""
    made = number(value)
    if made != int(made):
        raise Refused(f"must be a whole number, not {value}")
    return int(made)


def number(value: Any) -> int | float:
    """A number, also if it is a text."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    text = str(value).replace("_", "").strip("'\"")
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            raise Refused(f"must be a number, not {value!r}") from None


def real(value: Any) -> float:
    return float(number(value))


def one_of(values: Mapping[str, Any], says: str = "there is no such choice here") -> Callable[[Any], Any]:
    """A conversion by a table of their values; Refused for others, with what there is."""

    def convert(value: Any) -> Any:
        if str(value) not in values:
            raise Refused(says)
        return values[str(value)]

    return convert


def mebibytes(elements: Any, size: int) -> int:
    """Whole MiB, at least one, of a number of elements of `size` bytes."""
    return max(1, round(number(elements) * size / 2**20))
