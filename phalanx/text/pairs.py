"""JSONL of preferences (prompt, chosen, rejected) to the token files that data/pairs.py reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from phalanx.base.errors import DataError
from phalanx.data.files import replacing
from phalanx.data.index import CorpusWriter, optimal_dtype
from phalanx.text.tokenizers import Tokenizer

FIELDS = ("prompt", "chosen", "rejected")
SHOWN = 5  # bad lines named in an error


def prepare_pairs(files: Sequence[Path], prefix: Path, tokenizer: Tokenizer | None, vocab_size: int) -> int:
    """Write PREFIX.bin, .idx, .sums and .json of the pairs in JSONL files; returns their number.

    A line has texts `prompt`, `chosen` and `rejected`, each encoded by itself; an answer gets the token that ends a
    document, if the tokenizer has one. Or it has lists of ids, `prompt_ids`, `chosen_ids` and `rejected_ids`, taken as
    they are. DataError names the first bad lines and says how many there are.
    """
    bad, count = list[str](), 0
    with CorpusWriter(prefix, optimal_dtype(vocab_size)) as writer:
        for where, line in _lines(files):
            try:
                prompt, chosen, rejected = _ids(json.loads(line), tokenizer, vocab_size)
            except ValueError as error:
                bad.append(f"{where}: {error}")
                continue
            lengths = [len(prompt), len(chosen), len(prompt), len(rejected)]
            writer.add_document([*prompt, *chosen, *prompt, *rejected], lengths)
            count += 1
        if bad:
            more = f"\n... {len(bad)} bad lines in all" if len(bad) > SHOWN else ""
            raise DataError("\n".join(bad[:SHOWN]) + more)
        if not count:
            raise DataError(f"{', '.join(map(str, files))}: no pairs")
    record = {"documents": count, "tokenizer": None if tokenizer is None else tokenizer.fingerprint, "pairs": True}
    with replacing(prefix.with_suffix(".json")) as file:
        file.write(json.dumps(record, indent=1).encode())
    return count


def _lines(files: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    for path in files:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", line


def _ids(record: Any, tokenizer: Tokenizer | None, vocab_size: int) -> list[list[int]]:
    """Ids of the three fields. ValueError for what is no pair."""
    if not isinstance(record, dict):
        raise ValueError("must be an object with prompt, chosen and rejected")
    given = [name for name in FIELDS if f"{name}_ids" in record]
    found = _given_ids(record, vocab_size) if given else _encoded(record, tokenizer)
    for name, ids in zip(FIELDS, found):
        if not ids and name != "prompt":
            raise ValueError(f"{name} is empty")
    if not found[0]:
        raise ValueError("prompt is empty: nothing predicts the first token of the answers")
    if found[1] == found[2]:
        raise ValueError("chosen and rejected are the same")
    return found


def _given_ids(record: dict[str, Any], vocab_size: int) -> list[list[int]]:
    found = []
    for name in FIELDS:
        ids = record.get(f"{name}_ids")
        if not isinstance(ids, list) or any(not isinstance(i, int) or not 0 <= i < vocab_size for i in ids):
            raise ValueError(f"{name}_ids must be a list of ids in [0, {vocab_size})")
        found.append(ids)
    return found


def _encoded(record: dict[str, Any], tokenizer: Tokenizer | None) -> list[list[int]]:
    if tokenizer is None:
        raise ValueError("has texts, which need data.tokenizer")
    for name in FIELDS:
        if not isinstance(record.get(name), str):
            kind = "is missing" if name not in record else "must be a text"
            raise ValueError(f"{name} {kind}")
    end = [] if tokenizer.eod is None else [tokenizer.eod]
    prompt, chosen, rejected = (tokenizer.encode(record[name]) for name in FIELDS)
    return [prompt, [*chosen, *end], [*rejected, *end]]
