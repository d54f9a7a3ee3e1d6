"""Preparing data: text files in, token files and a manifest out. Formats are `index` and `tokenizers`; order is left to `mixture`."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from phalanx.base.errors import DataError
from phalanx.data.files import must_exist, replacing
from phalanx.data.index import CorpusWriter, optimal_dtype, strip_suffix
from phalanx.data.tokenizers import Tokenizer, load_tokenizer, train_bpe

MANIFEST_VERSION = 1
SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
BATCH_BYTES = 4 << 20  # text per encode_batch: enough to keep all cores busy, little enough to stay small
MAX_NAMED = 100  # inputs that a manifest names one by one
TRAIN_BYTES = 12 << 20  # text a demo tokenizer is trained on
Errors = Literal["strict", "replace", "skip"]


@dataclass
class Summary:
    """What a preparation read and wrote; stored beside the token files as PREFIX.json."""

    sources: list[str]
    tokenizer: str
    """SHA-256 of the tokenizer's JSON."""
    vocab_size: int
    dtype: str
    files: int = 0
    text_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    """Documents without text, left out."""
    skipped: int = 0
    """Files or lines that could not be read, left out (errors='skip')."""
    replaced: int = 0
    """Files or lines in which bad bytes were replaced (errors='replace')."""
    version: int = field(default=MANIFEST_VERSION)


def prepare(
    inputs: Sequence[str | os.PathLike[str]],
    prefix: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    suffixes: Sequence[str] = SUFFIXES,
    key: str = "text",
    errors: Errors = "strict",
) -> Summary:
    """Turn texts into PREFIX.bin, PREFIX.idx and PREFIX.json; nothing appears before all of it is written.

    inputs: files, and folders that are searched for `suffixes`. A .jsonl file holds a document a line, under `key`; any other
    file is one document. Each document ends with the end-of-document token. Order: inputs as given, folders by name.
    DataError for an input that is missing or damaged, with file and byte offset or line; `errors` may ask to go on instead.
    """
    if tokenizer.eod is None:
        raise DataError(f"the tokenizer {tokenizer.fingerprint[:12]} has no end-of-document token")
    dtype = optimal_dtype(tokenizer.vocab_size)
    summary = Summary(_named(inputs), tokenizer.fingerprint, tokenizer.vocab_size, dtype.name)
    with CorpusWriter(prefix, dtype) as writer:
        texts = _texts(find_files(inputs, suffixes), key, errors, summary)
        for batch in _batches(texts, summary):
            for ids in tokenizer.encode_batch(batch):
                writer.add_document(np.array([*ids, tokenizer.eod]))
        if not writer.num_tokens:
            raise DataError(f"no text in {', '.join(summary.sources)}: {summary.files} files with a suffix of {', '.join(suffixes)}")
    summary.documents, summary.tokens = writer.num_documents, writer.num_tokens
    _write_json(Path(strip_suffix(prefix) + ".json"), asdict(summary))
    return summary


def find_files(inputs: Iterable[str | os.PathLike[str]], suffixes: Sequence[str]) -> Iterator[Path]:
    """Files as they are; the files of folders with one of the suffixes, in order of their paths."""
    for given in inputs:
        path = must_exist(given)
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*") if file.suffix in suffixes and file.is_file())
        else:
            yield path


def stdlib_files(max_bytes: int) -> list[Path]:
    """Source files of Python's standard library, `max_bytes` at most: a text that every machine with Python has.

    Installed packages are left out, tests come in only if there is room. The order is the same everywhere and has nothing to
    do with names, so that the validation part at the end is like the rest.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - {"site-packages", "dist-packages", "__pycache__"})
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    named = [(file.relative_to(root), file) for file in found]
    named.sort(key=lambda pair: (_is_test(pair[0]), pair[0].as_posix()))
    chosen, total = [], 0
    for name, file in named:
        total += file.stat().st_size
        if total > max_bytes:
            break
        chosen.append((hashlib.sha256(name.as_posix().encode()).digest(), file))
    return [file for _, file in sorted(chosen)]


def demo_data(
    folder: str | os.PathLike[str],
    text_paths: Sequence[str | os.PathLike[str]] | None = None,
    vocab_size: int = 4096,
    max_bytes: int = 30_000_000,
) -> tuple[str, str]:
    """Train a tokenizer and prepare token files, from `text_paths` or Python's standard library: (prefix, tokenizer.json).

    Idempotent: when the folder already holds what these inputs give, nothing is done. The manifest is written last. Files that
    are not UTF-8 are left out and counted in it.
    """
    folder = Path(folder)
    files = stdlib_files(max_bytes) if text_paths is None else list(find_files(text_paths, SUFFIXES))
    prefix, tokenizer_path, manifest = str(folder / "text"), folder / "tokenizer" / "tokenizer.json", folder / "manifest.json"
    inputs = _fingerprint(files, vocab_size)
    outputs = [Path(prefix + ".bin"), Path(prefix + ".idx"), tokenizer_path]
    if manifest.exists() and all(file.exists() for file in outputs):
        if json.loads(manifest.read_text(encoding="utf-8")).get("inputs") == inputs:
            return prefix, str(tokenizer_path)
    manifest.unlink(missing_ok=True)
    sample = Summary([], "", vocab_size, "")
    train_bpe(_first_bytes(_texts(files, "text", "skip", sample), TRAIN_BYTES), vocab_size, tokenizer_path.parent)
    summary = prepare(files, prefix, load_tokenizer(tokenizer_path), errors="skip")
    _write_json(manifest, {"inputs": inputs, "files": summary.files, "tokens": summary.tokens, "skipped": summary.skipped})
    return prefix, str(tokenizer_path)


def _texts(files: Iterable[Path], key: str, errors: Errors, summary: Summary) -> Iterator[str]:
    """The documents of the files; counts what it meets in `summary`."""
    for file in files:
        summary.files += 1
        with open(file, "rb") as stream:
            lines = enumerate(stream, 1) if file.suffix == ".jsonl" else [(0, stream.read())]
            offset = 0
            for number, raw in lines:
                text = _decode(raw, file, offset, errors, summary)
                offset += len(raw)
                if text is not None and number:
                    text = _field(text, file, number, key, errors, summary)
                if text is not None:
                    yield text


def _decode(raw: bytes, file: Path, offset: int, errors: Errors, summary: Summary) -> str | None:
    mark = codecs.BOM_UTF8 if offset == 0 and raw.startswith(codecs.BOM_UTF8) else b""
    try:
        return raw[len(mark) :].decode("utf-8")
    except UnicodeDecodeError as error:
        if errors == "skip":
            summary.skipped += 1
            return None
        if errors == "replace":
            summary.replaced += 1
            return raw[len(mark) :].decode("utf-8", errors="replace")
        at = len(mark) + error.start
        raise DataError(f"{file}: not UTF-8: byte {raw[at]:#04x} at offset {offset + at}; errors='replace' or 'skip' go on") from None


def _field(line: str, file: Path, number: int, key: str, errors: Errors, summary: Summary) -> str | None:
    """The text of a line of JSON; None for a blank line."""
    if not line.strip():
        return None
    try:
        value = json.loads(line)
        if isinstance(value, dict) and isinstance(value.get(key), str):
            value[key].encode()
            return value[key]
        problem = f"no text under key {key!r}; keys: {', '.join(value)}" if isinstance(value, dict) else "not a JSON object"
    except UnicodeEncodeError as error:  # "\ud800" is JSON, but half a character
        problem = f"not text: {error}"
    except ValueError as error:
        problem = f"not JSON: {error}"
    if errors != "skip":
        raise DataError(f"{file}: line {number}: {problem}")
    summary.skipped += 1
    return None


def _batches(texts: Iterable[str], summary: Summary) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in texts:
        if not text:
            summary.empty += 1
            continue
        batch.append(text)
        size += len(text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
        summary.text_bytes += len(text.encode())
    yield batch


def _first_bytes(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        if limit <= 0:
            return
        limit -= len(text)
        yield text


def _named(inputs: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The inputs, or the first ones of very many and how many more there are."""
    names = [os.fspath(path) for path in inputs]
    return names if len(names) <= MAX_NAMED else [*names[:MAX_NAMED], f"... and {len(names) - MAX_NAMED} more"]


def _is_test(name: Path) -> bool:
    return any(part in ("test", "tests", "idle_test") for part in name.parts)


def _fingerprint(files: Sequence[Path], vocab_size: int) -> str:
    """Changes whenever a file is added, removed or rewritten."""
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps([MANIFEST_VERSION, vocab_size, TRAIN_BYTES, stats]).encode()).hexdigest()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with replacing(path) as file:
        file.write(json.dumps(value, indent=2).encode())
