"""Documents to retrieve, from JSONL: a line has a `text`, and optionally an `id` and a `source`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError

SHOWN = 5  # bad lines in an error


@dataclass(frozen=True)
class TextPassage:
    """A text, its id (else the number of its line), and where it comes from (None: it does not say)."""

    text: str
    id: str
    source: str | None = None

    @property
    def line(self) -> str:
        source = {} if self.source is None else {"source": self.source}
        return json.dumps({"id": self.id, "text": self.text, **source}, ensure_ascii=False)


class PassageFile:
    """The lines of a JSONL file, looked up by number; the whole file is never in memory.

    count    lines with a text
    sha256   of its bytes
    """

    def __init__(self, path: str | Path):
        """DataError names the first lines that are no passages, and says how many there are."""
        self.path = Path(path)
        if not self.path.is_file():
            raise DataError(f"{path}: no such file")
        bad, total = list[str](), hashlib.sha256()
        self._starts, at = list[int](), 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                total.update(line)
                if line.strip():
                    try:
                        passage_of(line, number)
                        self._starts.append(at)
                    except ValueError as error:
                        bad.append(f"{path}:{number}: {error}")
                at += len(line)
        if bad:
            more = f"\n... {len(bad)} bad lines in all" if len(bad) > SHOWN else ""
            raise DataError("\n".join(bad[:SHOWN]) + more)
        if not self._starts:
            raise DataError(f"{path}: no texts")
        self.count, self.sha256 = len(self._starts), total.hexdigest()

    def passages(self, first: int, stop: int) -> Iterator[TextPassage]:
        """Those with these numbers, counted from 0 without empty lines."""
        with self.path.open("rb") as file:
            for number in range(first, stop):
                file.seek(self._starts[number])
                yield passage_of(file.readline(), number + 1)


def passage_of(line: bytes, number: int) -> TextPassage:
    """ValueError for a line that is no passage. number: its id, if it has none."""
    try:
        record: Any = json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: {error}") from None
    if not isinstance(record, dict):
        raise ValueError('must be an object with a "text"')
    text, name, source = record.get("text"), record.get("id", number), record.get("source")
    if not isinstance(text, str) or not text.strip():
        raise ValueError("text is missing" if text is None else "text must be a text that is not empty")
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise ValueError("id must be a text or an integer")
    if source is not None and not isinstance(source, str):
        raise ValueError("source must be a text")
    return TextPassage(text, str(name), source)
