"""Watching communication: a rank's last calls, counts of calls and bytes for each axis, and dropped calls for tests
that prove that each collective matters."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field
from typing import NamedTuple

from phalanx.base.dataclass import dataclass
from phalanx.comm.health.calls import Calls
from phalanx.comm.health.waits import Waits


class Site(NamedTuple):
    """A place in the library that communicates: file, function and line of the caller, the operation and its axis."""

    file: str
    function: str
    line: int
    op: str
    axis: str


@dataclass
class Watch:
    """Owned by one mesh. Off by default: then a collective only adds a line to `last`.

    last   this rank's calls, to find out why ranks wait for each other
    waits  how long this rank waits in them
    calls  number of calls and bytes passed in, by site
    drop   a site whose calls are replaced by local stand-ins (a rank then sees only its own share)
    """

    on: bool = False
    drop: Site | None = None
    calls: dict[Site, tuple[int, int]] = field(default_factory=dict)
    last: Calls = field(default_factory=Calls)
    waits: Waits = field(default_factory=Waits)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Calls inside are neither recorded nor dropped."""
        on, self.on = self.on, False
        try:
            yield
        finally:
            self.on = on

    def dropped(self, op: str, axis: str, nbytes: int) -> bool:
        """Record a call; True if it is to be dropped."""
        frame = sys._getframe(2)
        while frame.f_back is not None and "/comm/" in frame.f_code.co_filename.replace("\\", "/"):
            frame = frame.f_back
        file = frame.f_code.co_filename.replace("\\", "/").rsplit("phalanx/", 1)[-1]
        site = Site(file, frame.f_code.co_name, frame.f_lineno, op, axis)
        count, total = self.calls.get(site, (0, 0))
        self.calls[site] = (count + 1, total + nbytes)
        return site == self.drop
