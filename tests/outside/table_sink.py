"""A sink of another package, in one file: every number of a run with its unit, as lines of a table."""

from __future__ import annotations

from dataclasses import dataclass

import phalanx as px


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    file: str = "table.tsv"
    fail_at: int | None = None  # for the test


@px.sink("table")
class Table(px.Sink):
    Config = TableConfig

    def __init__(self, start: px.SinkStart, config: TableConfig):
        super().__init__(start, config)
        self.out = (start.folder / config.file).open("a", encoding="utf-8")

    def write(self, row: px.Row) -> None:
        if row.step == self.config.fail_at:
            raise OSError("the table is full")
        units = {record.name: record.unit for record in row.values}
        for name, number in row.scalars().items():
            self.out.write(f"{row.step}\t{name}\t{number!r}\t{units.get(name.partition('/')[0], '')}\n")

    def close(self) -> None:
        self.out.close()


class Unfinished(px.Sink):
    """Has no `write`."""
