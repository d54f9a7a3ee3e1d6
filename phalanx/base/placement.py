"""Placement: which rank this process is, and where it meets the others. Read from the environment by `launch/` only."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

MEETING = "meet://"  # scheme of init_method: a store that waits at host:port, and a name under which to use it
RANKS = "ranks"  # that name, in the store of a launcher
SECRET = "PHALANX_RUN_SECRET"  # the environment variable from which ranks have their run's secret (comm/meeting.py)


class Word:
    """What a rank says to whoever started it; nobody listens to this one."""

    def writes(self, folder: Path) -> None:
        """From here on the run's folder is this rank's: why the run died belongs there."""

    def unsaved(self) -> None:
        """From here on the rank has something to save: it is given time for it when it is to end."""

    def failed(self, error: BaseException) -> None:
        """This error ends the rank. Said as soon as it was raised, since others may lose this rank and say so."""


@dataclass(frozen=True)
class Placement:
    """rank of world_size; local_rank counts on this machine. `init_method` is for comm.meeting.open_store; a world
    of one needs none.

    secret   of the run (comm/meeting.py): no rank with another one is let in; empty: there is none
    word     to whoever started this rank
    local_size  ranks on this machine; None: unknown
    refused  why this machine cannot hold its ranks, which all are told when they have met; empty: it can
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    init_method: str = ""
    secret: str = field(default="", repr=False)
    word: Word = field(default_factory=Word, compare=False, repr=False)
    local_size: int | None = None
    refused: str = ""
