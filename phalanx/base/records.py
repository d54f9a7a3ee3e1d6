"""Records: the numbers of a run with their units. Sinks: what writes them out.

Each number is recorded once, as a Record and its value, and goes to every sink: files, trackers, the step line, or one
of your own, `@sink("name")` or `module:NAME` in log.sinks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from phalanx.base.dataclass import dataclass
from phalanx.base.log import Log
from phalanx.base.own_fields import NoFields
from phalanx.base.registry import find, registers

SEAM = "sink"


@dataclass(frozen=True)
class Record:
    """A number (or a text, or a table of numbers) of a run.

    name       unique; within a group, after the group's name: valid/NAME
    unit       such as "tokens/s"; empty: a plain number
    kind       gauge: has a value at each step; counter: grows over the whole run; text; table: several numbers by name
    reduction  how the values of several steps become one: last, mean, median, sum, max
    scalars    for a table: its numbers by name
    """

    name: str
    unit: str = ""
    kind: Literal["gauge", "counter", "text", "table"] = "gauge"
    reduction: Literal["last", "mean", "median", "sum", "max"] = "last"
    scalars: Callable[[Any], Mapping[str, Any]] | None = None

    def reduce(self, values: Iterable[Any]) -> Any:
        """One value from several; ValueError if there are none."""
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
    """Everything that was recorded together, for one step of the run."""

    step: int
    values: Mapping[Record, Any]

    def plain(self) -> dict[str, Any]:
        """As in metrics.jsonl: the step, then values by name, tables as they are."""
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
    step    the run continues after this step: rows of later steps, from an earlier attempt, no longer belong to it
    config  the whole config as plain values
    log     for lines to people
    """

    folder: Path
    step: int
    config: Mapping[str, Any]
    log: Log


class Sink(ABC):
    """Where rank 0 writes the records of a run. Subclass it, and refer to it by `@sink("name")` or by `module:NAME`.

    Config  a dataclass: its own fields in log.sinks

    A sink that raises is reported once and receives nothing more; the run goes on.
    """

    Config: ClassVar[type] = NoFields

    def __init__(self, start: SinkStart, config: Any):
        self.start, self.config = start, config

    @abstractmethod
    def write(self, row: Row) -> None:
        """Write the row of a finished step, of an evaluation, or of an event; rows come in the order of the run."""

    def rewind(self, step: int) -> None:  # noqa: B027 - most sinks need not care
        """The run goes back to this step: later rows no longer belong to it."""

    def close(self) -> None:  # noqa: B027 - as above
        """The run ends."""


T = TypeVar("T", bound=type[Sink])


def sink(name: str) -> Callable[[T], T]:
    """Name a Sink: log.sinks may use that name wherever its module has been imported."""
    return registers(SEAM, name)


def find_sink(name: str) -> type[Sink]:
    """The sink of this name. NotFound says what is wrong with it."""
    found: type[Sink] = find(SEAM, name, Sink)
    return found
