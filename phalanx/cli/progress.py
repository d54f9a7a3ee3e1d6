"""Progress of a long operation: a bar with the time left on a terminal, a line at intervals elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

EVERY = 10.0  # seconds between lines


@contextmanager
def progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """A function to call with (bytes done, all bytes)."""
    if not sys.stderr.isatty():
        yield _lines(name)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=max(total, done))


def _lines(name: str) -> Callable[[int, int], None]:
    start = last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= EVERY and done:
            last = now
            left = (now - start) * max(total - done, 0) / done
            click.echo(
                f"{name}: {done / 1e6:.0f} of {total / 1e6:.0f} MB, {done / 1e6 / (now - start):.1f} MB/s, "
                f"{left:.0f} s left",
                err=True,
            )

    return show


def decimal_bytes(count: float) -> str:
    """`268 kB` of 267,512 bytes, `1.5 GB` of 1,480,000,000."""
    units = iter(("bytes", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while count >= 999.5 and unit != "TB":
        unit = next(units)
        count /= 1000
    return f"{count:.1f} {unit}" if count < 9.95 and unit != "bytes" else f"{count:.0f} {unit}"
