"""Placement: which rank this process is, and where it meets the others. Only `launch/` reads it from the
environment."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path

from phalanx.base.dataclass import dataclass

MEETING = "meet://"  # scheme of init_method: a store at host:port, and the name under which to use it
RANKS = "ranks"  # that name in the store of a launcher
SECRET = "PHALANX_RUN_SECRET"  # the environment variable with the run's secret (comm/meeting.py)


class Word:
    """What a rank reports to the process that started it. This base class ignores it all."""

    def writes(self, folder: Path) -> None:
        """From here on this rank writes the run's folder, so the reason of a failure should be recorded there."""

    def unsaved(self) -> None:
        """From here on this rank has something to save, so it must be given time for that when it is asked to end."""

    def failed(self, error: BaseException) -> None:
        """This error ends the rank. Reported as soon as it is raised, because others may lose this rank and report
        that."""


@dataclass(frozen=True)
class Placement:
    """rank of world_size; local_rank counts on this machine. `init_method` is for comm.meeting.open_store; a world of
    one rank needs none.

    secret      of the run (comm/meeting.py): ranks with another one are rejected; empty: there is none
    word        receives reports for the process that started this rank
    local_size  ranks on this machine; None: unknown
    refused     why this machine cannot hold its ranks, which all ranks learn when they meet; empty: it can
    starts      ranks that this process is to start on its machine, the first of which is `rank`; 0: it is a rank itself
    ends_at     Unix time at which a scheduler ends this process, whatever it is doing; None: unknown
    check_nodes whether machines are checked before ranks connect (preflight/first_seconds.py); that of rank 0 counts
    interface   by which ranks on other machines reach this one, and `address`, its address; empty: not known
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    init_method: str = ""
    secret: str = field(default="", repr=False)
    word: Word = field(default_factory=Word, compare=False, repr=False)
    local_size: int | None = None
    refused: str = ""
    starts: int = 0
    ends_at: float | None = None
    check_nodes: bool = True
    interface: str = ""
    address: str = ""
