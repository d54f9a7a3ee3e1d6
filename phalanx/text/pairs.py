"""JSONL of pairs to token files: preferences (prompt, chosen, rejected), which data/pairs.py reads, or queries with
their passages (query, positive, negatives), which data/text_groups.py reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from phalanx.base.errors import DataError
from phalanx.data.files import replacing
from phalanx.data.index import CorpusWriter, optimal_dtype
from phalanx.data.text_groups import RECORDED
from phalanx.text.marked import TextMarks
from phalanx.text.tokenizer import load_tokenizer
from phalanx.text.tokenizer_base import Tokenizer, tokens_before

FIELDS = ("prompt", "chosen", "rejected")
TEXT_FIELDS = ("query", "positive", "negatives")
SHOWN = 5  # bad lines named in an error


def prepare_pairs(files: Sequence[Path], prefix: Path, tokenizer: str | None, vocab_size: int) -> int:
    """Write PREFIX.bin, .idx, .sums and .json of the pairs in JSONL files; returns their number.

    A line has texts `prompt`, `chosen` and `rejected`, each encoded by itself. If the tokenizer has such tokens, a
    prompt begins with the one before a text (BOS), and an answer ends with the one that ends a document. Or a line has
    a text `query`, a text `positive`, and perhaps a list of texts, `negatives`; each begins and ends as text.marked
    says. Or it has lists of ids in the place of texts, such as `prompt_ids`, taken as they are. All lines are of one
    kind. DataError names the first bad lines and says how many there are.
    """
    made = None if tokenizer is None else load_tokenizer(tokenizer)
    marks = None if tokenizer is None else TextMarks.of(tokenizer)
    bad, count, of_texts = list[str](), 0, list[bool]()
    with CorpusWriter(prefix, optimal_dtype(vocab_size)) as writer:
        for where, line in _lines(files):
            try:
                record = _record(json.loads(line), of_texts)
                if of_texts[0]:
                    texts = _texts(record, marks, vocab_size)
                else:
                    prompt, chosen, rejected = _ids(record, made, vocab_size)
                    texts = [prompt, chosen, prompt, rejected]
            except ValueError as error:
                bad.append(f"{where}: {'not JSON: ' * isinstance(error, json.JSONDecodeError)}{error}")
                continue
            writer.add_document([i for ids in texts for i in ids], [len(ids) for ids in texts])
            count += 1
        if bad:
            more = f"\n... {len(bad)} bad lines in all" if len(bad) > SHOWN else ""
            raise DataError("\n".join(bad[:SHOWN]) + more)
        if not count:
            raise DataError(f"{', '.join(map(str, files))}: no pairs")
    kind = RECORDED if of_texts[0] else "pairs"
    record = {"documents": count, "tokenizer": None if made is None else made.fingerprint, kind: True}
    with replacing(prefix.with_suffix(".json")) as file:
        file.write(json.dumps(record, indent=1).encode())
    return count


def _lines(files: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    for path in files:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", line


def _record(record: Any, of_texts: list[bool]) -> dict[str, Any]:
    """A line of the kind of the first one, which `of_texts` remembers: whether it has a query and passages."""
    if not isinstance(record, dict):
        raise ValueError("must be an object with prompt, chosen and rejected, or with query and positive")
    here = any(f"{name}{ids}" in record for name in TEXT_FIELDS for ids in ("", "_ids"))
    of_texts.append(here) if not of_texts else None
    if here != of_texts[0]:
        kinds = ("a preference (prompt, chosen, rejected)", "a query with passages (query, positive, negatives)")
        raise ValueError(f"is {kinds[here]}, and the first line is {kinds[of_texts[0]]}: prepare them apart")
    return record


# ---- queries and passages


def _texts(record: dict[str, Any], marks: TextMarks | None, vocab_size: int) -> list[list[int]]:
    """Ids of the query, its positive and its negatives. ValueError for what is no such group."""
    ids = "_ids" if any(f"{name}_ids" in record for name in TEXT_FIELDS) else ""
    query, positive, negatives = (record.get(f"{name}{ids}") for name in TEXT_FIELDS)
    negatives = [] if negatives is None else negatives
    if not isinstance(negatives, list):
        raise ValueError(f"negatives{ids} must be a list")
    given = {f"query{ids}": query, f"positive{ids}": positive}
    given |= {f"negatives{ids}[{i}]": text for i, text in enumerate(negatives)}
    found = [_text(name, value, marks, vocab_size, bool(ids)) for name, value in given.items()]
    if found[1] in found[2:]:
        raise ValueError(f"positive{ids} is among negatives{ids}")
    return found


def _text(name: str, given: Any, marks: TextMarks | None, vocab_size: int, as_ids: bool) -> list[int]:
    if given is None:
        raise ValueError(f"{name} is missing")
    if as_ids:
        if not isinstance(given, list) or any(type(i) is not int or not 0 <= i < vocab_size for i in given):
            raise ValueError(f"{name} must be a list of ids in [0, {vocab_size})")
        if not given:
            raise ValueError(f"{name} is empty")
        return given
    if marks is None:
        raise ValueError("has texts, which need data.tokenizer")
    if not isinstance(given, str) or not given.strip():
        raise ValueError(f"{name} must be a text that is not empty")
    return marks.encode(given)


# ---- preferences


def _ids(record: dict[str, Any], tokenizer: Tokenizer | None, vocab_size: int) -> list[list[int]]:
    """Ids of the three fields. ValueError for what is no pair."""
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
            if isinstance(record.get(name), list):
                kind += f", not messages: give the ids that the chat template makes of them, {name}_ids"
            raise ValueError(f"{name} {kind}")
    end = [] if tokenizer.eod is None else [tokenizer.eod]
    prompt, chosen, rejected = (tokenizer.encode(record[name]) for name in FIELDS)
    return [[*tokens_before(tokenizer), *prompt], [*chosen, *end], [*rejected, *end]]
