"""Answers of a model, stored in a file so that an interrupted evaluation continues where it stopped.

One JSON object a line, {"key": ..., "answer": ...}, appended as answers come. The key is a digest of everything that an
answer depends on: the weights, the precision, the request's tokens and its options.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any

from phalanx.base.errors import DataError


def key_of(*parts: Any) -> str:
    """Of plain values."""
    return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()


BEGINS = b'{"key": "'  # each line


class AnswerFile:
    """A file of answers. Without a path nothing is kept longer than this object."""

    def __init__(self, path: str | Path | None):
        """DataError for a file that is something else. A last line that was not written to its end is dropped."""
        self._known: dict[str, Any] = {}
        self._file = None
        if path is not None:
            whole = self._read(Path(path))
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "r+b" if whole else "wb")
            self._file.seek(whole)
            self._file.truncate()

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Any:
        return self._known[key]

    def add(self, key: str, answer: Any) -> None:
        """It is handed to the system at once, so that the end of this process does not lose it."""
        self._known[key] = answer
        if self._file is not None:
            self._file.write(json.dumps({"key": key, "answer": answer}).encode() + b"\n")
            self._file.flush()

    def _read(self, path: Path) -> int:
        """Bytes of the whole lines in it."""
        if not path.exists():
            return 0
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                entry = json.loads(line)
                self._known[entry["key"]] = entry["answer"]
            except (ValueError, KeyError, TypeError):
                raise DataError(f"{path}, line {number}: not an answer that was kept; name another file") from None
        rest = data[whole : whole + len(BEGINS)]
        if not BEGINS.startswith(rest):  # somebody else's file is not cut
            raise DataError(f"{path}: its last line is not an answer that was kept; name another file")
        return whole
