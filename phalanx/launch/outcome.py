"""How a rank ended: written by the rank to a file of its own, read by the launcher, which finds the one that began it."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.base.errors import CheckpointError, ConfigError, DataError, FolderInUse, NumericalStop, PeerLost, PhalanxError, Preempted

# Kinds of ends that explain others come first; a lost peer is a consequence of one of them.
CAUSES = tuple(e.exit_code for e in (ConfigError, DataError, CheckpointError, NumericalStop, FolderInUse))


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
    return sorted((Outcome(**json.loads(p.read_text(encoding="utf-8"))) for p in Path(folder).glob("rank-*.json")), key=lambda o: o.rank)


def verdict(world_size: int, outcomes: list[Outcome], exits: Mapping[int, int]) -> RankFailed | None:
    """What the whole run ended with, or None if every rank is done.

    outcomes  what ranks said themselves; exits  exit status per rank that failed first, negative = killed by that signal
    """
    said = {o.rank: o for o in outcomes}
    causes = [o for o in outcomes if o.code in CAUSES]
    silent = [rank for rank in sorted(exits) if rank not in said]
    # SIGTERM is what the agent sends to the others when one failed: it explains nothing unless it is all there is
    killed = [rank for rank in silent if exits[rank] < 0 and exits[rank] != -signal.SIGTERM]
    ended = [rank for rank in silent if exits[rank] == -signal.SIGTERM]
    crashed = [o for o in outcomes if o.code == 1]
    silent = [rank for rank in silent if exits[rank] > 0]
    if causes:
        return _from(world_size, outcomes, min(causes, key=lambda o: o.time))
    lost = [o for o in outcomes if o.code == PeerLost.exit_code]
    if killed:
        return _killed(world_size, killed[0], -exits[killed[0]], lost)
    if crashed:
        return _from(world_size, outcomes, min(crashed, key=lambda o: o.time))
    if silent:
        rank = silent[0]
        return RankFailed(f"rank {rank} of {world_size} ended with status {exits[rank]} and said nothing", exits[rank])
    if lost:
        return _from(world_size, outcomes, lost[0])
    if ended:
        return _killed(world_size, ended[0], signal.SIGTERM)
    if stopped := [o for o in outcomes if o.code == Preempted.exit_code]:
        return _from(world_size, outcomes, stopped[0])
    return None


def _killed(world_size: int, rank: int, number: int, lost: Sequence[Outcome] = ()) -> RankFailed:
    """With the place where others last saw it: a rank that was stopped is killed by the launcher in the end."""
    texts = (o.text.replace("; last seen", ", last seen") for o in lost if f"rank {rank} " in o.text)
    seen = next((found[0] for text in texts if (found := re.search(r", last seen in [^;]*", text))), "")
    return RankFailed(f"peer lost: rank {rank} of {world_size} was killed by {_signal_name(number)}{seen}", PeerLost.exit_code)


def _from(world_size: int, outcomes: list[Outcome], chosen: Outcome) -> RankFailed:
    """Its text, with the rank in front unless every rank said the same."""
    same = [o for o in outcomes if (o.code, o.text) == (chosen.code, chosen.text)]
    who = "" if len(same) == world_size else f"rank {chosen.rank} of {world_size}: "
    return RankFailed(who + chosen.text, chosen.code)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
