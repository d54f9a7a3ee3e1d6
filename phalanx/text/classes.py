"""Texts with classes, from JSONL to token files with the class of each text, or of each of its words, beside them
(data.classes)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.base.errors import DataError
from phalanx.data.classes import SUFFIX
from phalanx.data.files import replacing
from phalanx.data.index import CorpusWriter
from phalanx.sequence.sample import IGNORE
from phalanx.text.marked import TextMarks
from phalanx.text.tokenizer_base import Tokenizer

SHOWN = 10  # bad lines in an error


def prepare_classes(files: Sequence[Path], prefix: Path, tokenizer: str, names: Sequence[str]) -> int:
    """Write PREFIX.bin, .idx, .sums, .classes.npy and .json of the lines of JSONL files; returns their number.

    A line has a `text` and its `label`, or words (`tokens`) and a label for each (`labels`; null: none). Labels are
    names of classes, or their numbers. A document begins with the tokenizer's token for classes ([CLS]), if it has one,
    and ends with its separator or its end of document. The class of a text stands at its first token, that of a word at
    its first piece. DataError names the first bad lines and says how many there are.
    """
    marks, bad, count = TextMarks.of(tokenizer), list[str](), 0
    made = marks.tokenizer
    classes = list[np.ndarray]()
    with CorpusWriter(prefix, made.dtype) as writer:
        for where, line in _lines(files):
            try:
                record = json.loads(line)
                ids, labels = _encoded(record, made, names)
                labels = [*[IGNORE] * len(marks.opening), *labels, *[IGNORE] * len(marks.closing)]
                ids = marks.around(ids)
                if "text" in record:
                    labels[0] = _number(record.get("label"), names)
            except ValueError as error:
                bad.append(f"{where}: {error}")
                continue
            writer.add_document(ids)
            classes.append(np.array(labels, np.int32))
            count += 1
        if bad:
            more = f"\n... {len(bad)} bad lines in all" if len(bad) > SHOWN else ""
            raise DataError("\n".join(bad[:SHOWN]) + more)
        if not count:
            raise DataError(f"{', '.join(map(str, files))}: no texts")
        whole = BytesIO()
        np.save(whole, np.concatenate(classes), allow_pickle=False)
        writer.write_beside(SUFFIX, whole.getvalue())
    record = {"documents": count, "tokenizer": made.fingerprint, "classes": list(names)}
    with replacing(Path(f"{prefix}.json")) as file:
        file.write(json.dumps(record, indent=1).encode())
    return count


def _lines(files: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    for path in files:
        if not path.is_file():
            raise DataError(f"{path}: no such file")
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", line


def _encoded(record: Any, tokenizer: Tokenizer, names: Sequence[str]) -> tuple[list[int], list[int]]:
    """Ids of a line's text, and their classes. ValueError for what has none."""
    if not isinstance(record, dict) or ("text" in record) == ("tokens" in record):
        raise ValueError('must be an object with "text" and "label", or with "tokens" and "labels"')
    if "text" in record:
        if not isinstance(record["text"], str) or not record["text"]:
            raise ValueError("text must be a text that is not empty")
        ids = tokenizer.encode(record["text"])
        return ids, [IGNORE] * len(ids)
    words, given = record["tokens"], record.get("labels")
    if not isinstance(words, list) or not isinstance(given, list) or len(words) != len(given) or not words:
        raise ValueError("tokens and labels must be lists of the same length")
    found, labels = list[int](), list[int]()
    for at, (word, label) in enumerate(zip(words, given)):
        if not isinstance(word, str) or not word:
            raise ValueError(f"tokens[{at}] must be a text that is not empty")
        pieces = tokenizer.encode(word if at == 0 else f" {word}")
        number = IGNORE if label is None else _number(label, names)
        found += pieces
        labels += [number, *[IGNORE] * (len(pieces) - 1)] if pieces else []
    return found, labels


def _number(label: Any, names: Sequence[str]) -> int:
    if isinstance(label, str) and label in names:
        return list(names).index(label)
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(names):
        return label
    raise ValueError(f"label {label!r} is none of the classes: {', '.join(names)}, or 0 .. {len(names) - 1}")
