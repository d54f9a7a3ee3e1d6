"""Sinks: the only writer of a run's records. metrics.jsonl always, TensorBoard and Weights & Biases if requested, and
those named in log.sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from phalanx.base.log import describe
from phalanx.base.own_fields import made_of
from phalanx.base.records import Row, Sink, SinkStart, find_sink
from phalanx.base.registry import NotFound
from phalanx.config.run import LogConfig

STEP_LINE = "the step line"
TITLES = {"jsonl": "metrics.jsonl", "tensorboard": "TensorBoard", "wandb": "Weights & Biases"}


class Sinks:
    """All sinks of a run. One that fails is reported once and receives nothing more; the run goes on."""

    def __init__(self, wanted: LogConfig, start: SinkStart):
        self._log = start.log
        self._open: dict[str, Sink] = {}
        self._begin("jsonl", lambda: find_sink("jsonl")(start, None))
        if wanted.tensorboard:
            self._begin("tensorboard", lambda: find_sink("tensorboard")(start, None))
        if wanted.wandb is not None:
            self._begin("wandb", lambda: find_sink("wandb")(start, wanted))
        for name, fields in wanted.sinks.items():
            self._begin(name, lambda name=name, fields=fields: opened(name, fields, start))  # type: ignore[misc]

    def add(self, name: str, sink: Sink) -> None:
        """Add a sink that was created elsewhere."""
        self._open[name] = sink

    def drop(self, name: str) -> None:
        """It receives nothing more."""
        self._open.pop(name, None)

    def write(self, row: Row) -> None:
        self._each(lambda sink: sink.write(row))

    def rewind(self, step: int) -> None:
        self._each(lambda sink: sink.rewind(step))

    def close(self) -> None:
        self._each(lambda sink: sink.close())

    def _begin(self, name: str, start: Callable[[], Sink]) -> None:
        try:
            self._open[name] = start()
        except Exception as error:  # code that is not ours may raise anything, which must not end a run
            self._failed(name, error)

    def _each(self, call: Callable[[Sink], None]) -> None:
        for name, sink in list(self._open.items()):
            try:
                call(sink)
            except Exception as error:  # as above
                del self._open[name]
                self._failed(name, error)

    def _failed(self, name: str, error: Exception) -> None:
        cause = error.__cause__
        if isinstance(error, NotFound) and isinstance(cause, Exception):
            error = cause  # what its import raised
        rest = "the others go on" if name == "jsonl" else "metrics.jsonl has every number"
        what = f"{TITLES.get(name, name)} failed and gets nothing more of this run, which goes on"
        self._log.warn(f"{what}; {rest}: {describe(error)}")


def opened(name: str, fields: Mapping[str, Any], start: SinkStart) -> Sink:
    """A sink of log.sinks. Raises NotFound or ConfigError, like the rules of the config."""
    cls = find_sink(name)
    return cls(start, made_of(cls.Config, f"log.sinks.{name}", fields))
