"""Lines for people: `key=value` text, errors in one form, and a log that writes to the console and to a file. The
content comes from callers."""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from phalanx.base.errors import ConfigError, PhalanxError, shortened
from phalanx.base.journal import Journal


def pairs(**values: Any) -> str:
    """`a=1 b=2.5`, the form of every line that scripts read."""
    return " ".join(f"{key}={value}" for key, value in values.items())


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 4`, `ranks 0-3, 8`: these ranks, in order."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    shown = ", ".join("-".join(map(str, span)) for span in spans)
    return f"ranks {shown}" if len(spans) > 1 or len(spans[0]) > 1 else f"rank {shown}"


# errors that the system may raise for a user, and what to do
REFUSALS = {
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EMFILE: "raise the limit of open files: ulimit -n 4096",
    errno.ENFILE: "this machine has no file handles left",
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there",
    errno.EROFS: "choose a folder that can be written to",
    errno.EACCES: "choose a path that you may use",
    errno.EPERM: "choose a path that you may use",
    errno.ENOTDIR: "part of the path is a file",
    errno.ESTALE: "its file server no longer knows it",
}


def refusal(error: BaseException) -> str | None:
    """An operating-system error that is not a bug of ours, in words and with what to do; None for other errors."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and os.strerror(errno.EMFILE) in str(error):  # libraries wrap it
        number = errno.EMFILE
    if number not in REFUSALS:
        return None
    name = getattr(error, "filename", None)
    return (
        f"{shortened(os.fspath(name)) + ': ' if isinstance(name, str) else ''}{os.strerror(number)}; {REFUSALS[number]}"
    )


def describe(error: BaseException) -> str:
    """An error as users see it: its kind in words, then its text. In a ConfigError each problem names its kind
    itself."""
    text = str(error) or type(error).__name__
    if isinstance(error, ConfigError):
        return text
    if (refused := refusal(error)) is not None:
        return refused
    if not isinstance(error, PhalanxError):
        return f"{type(error).__name__}: {text}"
    if error.kind is not None:
        return f"{error.kind}{text}"
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(error).__name__).lower()
    return f"{words}: {text}"


def flush_quietly() -> None:
    """Write out what stdout and stderr still hold. If a stream refuses it, drop it, so that Python's own exit does not
    fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Log:
    """One log for each process. Rank 0 writes to the console and the file; other ranks write only through `warn` and
    `error`.

    path    a file that receives every line, with its time; None: no file

    A console or file that cannot be written (a full disk, a closed pipe) does not end the run: the file receives its
    lines once there is room again.
    """

    def __init__(
        self, rank: int = 0, path: str | Path | None = None, out: TextIO | None = None, err: TextIO | None = None
    ):
        self.rank = rank
        # unset: whatever stdout and stderr are when a line is written (a progress bar wraps them)
        self._out, self._err = (
            out,
            err,
        )
        self._said: set[str] = set()
        self._unheard = False
        self._file: Journal | None = None
        self._waiting: list[bytes] | None = None
        if path is not None:
            self.open(path)

    def wait_for_file(self) -> None:
        """From here on, keep lines for a file that may be opened later. A run that is refused leaves no file."""
        self._waiting = []

    def open(self, path: str | Path) -> None:
        """Write lines to this file too, on rank 0, starting with those that waited for it."""
        if self.rank != 0:
            return
        self._file = Journal(path, self.warn)
        waiting, self._waiting = self._waiting or [], None
        for line in waiting:
            self._file.write(line)

    def info(self, text: str) -> None:
        if self.rank == 0:
            self._write(self._out or sys.stdout, text)

    def say(self, text: str) -> None:
        """A line for rank 0's console only."""
        if self.rank == 0:
            self._print(self._out or sys.stdout, text)

    def console_width(self) -> int | None:
        """Columns of the terminal that lines go to; None if they go to a file or a pipe."""
        try:
            return os.get_terminal_size((self._out or sys.stdout).fileno()).columns
        except (OSError, ValueError, AttributeError):  # no terminal, a closed stream, or one without a number
            return None

    def note(self, text: str) -> None:
        """A line for the file only."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode(errors="replace")
        if self._file is not None:
            self._file.write(line)
        elif self._waiting is not None:
            self._waiting.append(line)

    def warn(self, text: str) -> None:
        self._write(self._err or sys.stderr, self._from_rank(f"warning: {text}"))

    def error(self, text: str) -> None:
        self._write(self._err or sys.stderr, self._from_rank(text))

    def once(self, text: str) -> None:
        """A warning that is printed only once."""
        if text not in self._said:
            self._said.add(text)
            self.warn(text)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _from_rank(self, text: str) -> str:
        return text if self.rank == 0 else f"rank {self.rank}: {text}"

    def _write(self, stream: TextIO, text: str) -> None:
        self._print(stream, text)
        self.note(text)

    def _print(self, stream: TextIO, text: str) -> None:
        try:
            print(text, file=stream, flush=True)
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self._not_heard(error)

    def _not_heard(self, error: Exception) -> None:
        if not self._unheard:
            self._unheard = True
            self.note(
                f"warning: the console cannot be written ({error}): the run goes on, and this file has every line"
            )
