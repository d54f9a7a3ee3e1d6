"""A file for what each rank says, beside the place where all of them say it. Imports next to nothing, because ranks
need it first."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

FOLDER = "PHALANX_RANK_LOGS"


def log_of(folder: Path, rank: int) -> Path:
    """The file of a rank."""
    return folder / f"rank-{rank:05d}.log"


def keep_output(env: Mapping[str, str], rank: int) -> None:
    """Let what this process prints also be in its rank's file, if PHALANX_RANK_LOGS names a folder. A rank that says
    nothing has no file; all starts of a run share one."""
    if folder := env.get(FOLDER):
        file = RankLog(log_of(Path(folder), rank))
        sys.stdout, sys.stderr = KeptStream(sys.stdout, file), KeptStream(sys.stderr, file)  # type: ignore[assignment]


class RankLog:
    """The file, made with the first words. A disk that is full costs the rest of them, and not the run."""

    def __init__(self, path: Path):
        self._path, self._lost = path, False
        self._file: IO[str] | None = None

    def keep(self, text: str) -> None:
        if self._lost or not text:
            return
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self._path, "a", encoding="utf-8", buffering=1)
                self._file.write(f"--- start of {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
            self._file.write(text)
        except (OSError, ValueError):
            self._lost = True


class KeptStream:
    """A stream of text whose words are kept in a rank's file too."""

    def __init__(self, stream: Any, log: RankLog):
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        self._log.keep(text)
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
