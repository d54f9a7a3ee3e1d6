"""Records: the numbers of a run with their units, and sinks: who writes them out.

A number is recorded once, as a Record with its value. Every sink gets it: files, trackers, the step line, or one of
your own, `@sink("name")` or `module:NAME` in log.sinks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from phalanx.base.log import Log
from phalanx.base.own_fields import NoFields
from phalanx.base.registry import find, register

SEAM = "sink"


@dataclass(frozen=True)
class Record:
    """A number (or a text, or a table of numbers) of a run.

    name       unique; of groups with the group before it: valid/NAME
    unit       such as "tokens/s"; empty: a plain number
    kind       gauge: has a value at each step; counter: grows over the whole run; text; table: many numbers
    reduction  how the values of many steps become one: last, mean, median, sum, max
    scalars    of a table: its numbers by name
    """

    name: str
    unit: str = ""
    kind: Literal["gauge", "counter", "text", "table"] = "gauge"
    reduction: Literal["last", "mean", "median", "sum", "max"] = "last"
    scalars: Callable[[Any], Mapping[str, Any]] | None = None

    def reduce(self, values: Iterable[Any]) -> Any:
        """One value of several; ValueError of none."""
        found = list(values)
        if not found:
            raise ValueError(f"{self.name}: there is no value to reduce")
        if self.reduction == "median":
            return sorted(found)[len(found) // 2]
        if self.reduction in ("sum", "max"):
            return sum(found) if self.reduction == "sum" else max(found)
        return sum(found) / len(found) if self.reduction == "mean" else found[-1]


@dataclass(frozen=True)
class Row:
    """What was recorded together, of one step of the run."""

    step: int
    values: Mapping[Record, Any]

    def plain(self) -> dict[str, Any]:
        """As metrics.jsonl has it: the step, then values by name, tables as they are."""
        return {"step": self.step, **{record.name: value for record, value in self.values.items()}}

    def scalars(self) -> dict[str, float]:
        """Every number under a name of its own: loss, valid/code, experts/load_max/layer-3, slow/rank-5."""
        return {name: value for name, value in self._leaves() if isinstance(value, (int, float))}

    def texts(self) -> dict[str, str]:
        return {name: value for name, value in self._leaves() if isinstance(value, str)}

    def _leaves(self) -> Iterator[tuple[str, Any]]:
        for record, value in self.values.items():
            if record.scalars is not None:
                yield from record.scalars(value).items()
            elif isinstance(value, Mapping):
                yield from ((f"{record.name}/{name}", inner) for name, inner in value.items())
            else:
                yield record.name, value


@dataclass(frozen=True)
class SinkStart:
    """Where a sink begins.

    folder  the run's folder
    step    the run goes on after this step: rows of later ones, of an earlier try, are no longer of the run
    config  the whole config as plain values
    log     for lines to a person
    """

    folder: Path
    step: int
    config: Mapping[str, Any]
    log: Log


class Sink(ABC):
    """Where rank 0 writes the records of a run. Subclass it, and name it with `@sink("name")` or by `module:NAME`.

    Config  a dataclass: its own fields in log.sinks

    One that raises is named once and gets nothing more; the run goes on.
    """

    Config: ClassVar[type] = NoFields

    def __init__(self, start: SinkStart, config: Any):
        self.start, self.config = start, config

    @abstractmethod
    def write(self, row: Row) -> None:
        """Of a step that is finished, of an evaluation, or of something that happened; in the order of the run."""

    def rewind(self, step: int) -> None:  # noqa: B027 - most sinks need not care
        """The run goes back to this step: later rows are no longer of it."""

    def close(self) -> None:  # noqa: B027 - as above
        """The run ends."""


T = TypeVar("T", bound=type[Sink])


def sink(name: str) -> Callable[[T], T]:
    """Name a Sink, so that log.sinks may have that name wherever its module has been imported."""

    def named(cls: T) -> T:
        register(SEAM, name, cls)
        return cls

    return named


def find_sink(name: str) -> type[Sink]:
    """The sink of a name. NotFound says what is wrong with it."""
    found: type[Sink] = find(SEAM, name, Sink)
    return found
