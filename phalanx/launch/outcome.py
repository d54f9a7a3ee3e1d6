"""How a rank ended: written by the rank to a file of its own, and read by the launcher, which finds the rank that
failed first."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import (
    BadNode,
    CheckpointError,
    ConfigError,
    DataError,
    FolderInUse,
    NumericalStop,
    PeerLost,
    PhalanxError,
    Preempted,
)

# Ends that have a cause of their own; a lost peer is always a consequence.
CAUSES = (ConfigError, DataError, CheckpointError, NumericalStop, FolderInUse, BadNode)
CODES = tuple(cause.exit_code for cause in CAUSES)
UNCERTAIN = (signal.SIGABRT, signal.SIGTERM)  # the first can follow from a lost peer, the second from a request to stop


@dataclass(frozen=True)
class Outcome:
    rank: int
    code: int
    text: str
    time: float = 0.0

    def write(self, folder: str | Path) -> None:
        path = Path(folder) / f"rank-{self.rank}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(partial, path)


class RankFailed(PhalanxError):
    """The launcher's error: which rank failed and how; `exit_code` is that of the rank's own error."""

    kind = ""  # the text names the kind of the error that the rank met

    def __init__(self, text: str, exit_code: int):
        self.exit_code = exit_code
        super().__init__(text)


def read_outcomes(folder: str | Path) -> list[Outcome]:
    return sorted(
        (Outcome(**json.loads(p.read_text(encoding="utf-8"))) for p in Path(folder).glob("rank-*.json")),
        key=lambda o: o.rank,
    )


@dataclass(frozen=True)
class Ended:
    """The end of a rank's process: exit status (negative: killed by that signal), time, and whether the launcher ended
    it."""

    rank: int
    status: int
    time: float = 0.0
    by_launcher: bool = False


def verdict(world_size: int, outcomes: Sequence[Outcome], ended: Sequence[Ended] = ()) -> RankFailed | None:
    """How the whole run ended, or None if every rank succeeded: the earliest failure that is not a consequence of
    another.

    outcomes  what ranks reported themselves; ended: how their processes ended

    Ranks ended by the launcher are never blamed. A lost peer is always a consequence; an abort (NCCL and gloo abort
    when a peer is gone) and an exception that is not ours may be one.
    """
    said = {o.rank for o in outcomes}
    silent = sorted(
        (e for e in ended if e.rank not in said and e.status != 0 and not e.by_launcher), key=lambda e: e.time
    )
    lost = sorted((o for o in outcomes if o.code == PeerLost.exit_code), key=lambda o: o.time)
    stopped = [o for o in outcomes if o.code == Preempted.exit_code]
    certain = [(o.time, _from(world_size, outcomes, o)) for o in outcomes if o.code in CODES]
    certain += [
        (e.time, _killed(world_size, e.rank, -e.status, lost))
        for e in silent
        if e.status < 0 and -e.status not in UNCERTAIN
    ]
    likely = [
        (o.time, _from(world_size, outcomes, o))
        for o in outcomes
        if o.code not in (*CODES, PeerLost.exit_code, Preempted.exit_code)
    ]
    likely += [(e.time, _killed(world_size, e.rank, -e.status, lost)) for e in silent if -e.status == signal.SIGABRT]
    likely += [(e.time, _silent(world_size, e)) for e in silent if e.status > 0]
    for failures in (certain, likely):
        if failures:
            return min(failures, key=lambda one: one[0])[1]
    if lost:
        return _from(world_size, outcomes, lost[0])
    if ended_by_term := [e for e in silent if -e.status == signal.SIGTERM]:
        return _killed(world_size, ended_by_term[0].rank, signal.SIGTERM)
    return _from(world_size, outcomes, stopped[0]) if stopped else None


def _silent(world_size: int, ended: Ended) -> RankFailed:
    return RankFailed(
        f"rank {ended.rank} of {world_size} ended with status {ended.status} and said nothing", ended.status
    )


def _killed(world_size: int, rank: int, number: int, lost: Sequence[Outcome] = ()) -> RankFailed:
    """With the place where others last saw it, because the launcher finally kills a rank that was stopped."""
    texts = (o.text.replace("; last seen", ", last seen") for o in lost if f"rank {rank} " in o.text)
    seen = next((found[0] for text in texts if (found := re.search(r", last seen in [^;]*", text))), "")
    return RankFailed(
        f"peer lost: rank {rank} of {world_size} was killed by {signal_name(number)}{seen}", PeerLost.exit_code
    )


def _from(world_size: int, outcomes: Sequence[Outcome], chosen: Outcome) -> RankFailed:
    """The error's text, preceded by the rank unless every rank reported the same. Which machine is bad is the verdict
    of all ranks, also of those on other machines."""
    same = [o for o in outcomes if (o.code, o.text) == (chosen.code, chosen.text)]
    who = "" if len(same) == world_size or chosen.code == BadNode.exit_code else f"rank {chosen.rank} of {world_size}: "
    return RankFailed(who + chosen.text, chosen.code)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
