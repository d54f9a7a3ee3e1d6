"""Inputs of a preparation: which files, how they are cut into parts of bounded size, and the texts in a part or what is wrong with them.

Lines of JSON, plain text and Parquet columns; each of the first two as it is or compressed. What the texts become is left to `prepare`.
"""

from __future__ import annotations

import codecs
import glob
import io
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from phalanx.base.errors import DataError
from phalanx.data.files import must_exist

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".parquet")
COMPRESSED = (".gz", ".zst")
LINES = (".jsonl", ".ndjson", ".json")
BLOCK = 1 << 16  # of compressed input: at most a thousand times as much comes out of it
Errors = Literal["strict", "replace", "skip"]


@dataclass(frozen=True)
class Part:
    """A file, or bytes start..stop-1 of one, cut where a line ends. `data` holds them when the file is compressed and cut."""

    path: str
    size: int
    """Bytes on disk that it stands for."""
    start: int = 0
    stop: int | None = None
    line: int | None = 1
    """Number of its first line or row; None: to be counted when someone wants to know."""
    data: bytes | None = None
    problem: str | None = None
    """What ended a compressed file too early, met after `data`."""
    groups: tuple[int, int] | None = None
    """Row groups of a Parquet file."""


@dataclass(frozen=True)
class Reading:
    """How texts are found: keys of a JSON line or a Parquet row (`a.b` is b inside a), and what to do about bad ones."""

    keys: tuple[str, ...] = ("text",)
    errors: Errors = "strict"


class Bad(Exception):
    """A document that is no text: a reason to count by, words, and the byte inside it where that was seen."""

    def __init__(self, reason: str, message: str, at: int = 0):
        super().__init__(message)
        self.reason, self.at = reason, at


def find_files(inputs: Iterable[str | os.PathLike[str]], suffixes: Sequence[str] = SUFFIXES) -> Iterator[Path]:
    """Files as they are; of folders the files with one of the suffixes (perhaps compressed) and of globs all, in order of their paths."""
    for given in inputs:
        if not os.path.exists(given) and glob.has_magic(os.fspath(given)):
            found = sorted(name for name in glob.glob(os.fspath(given), recursive=True) if os.path.isfile(name))
            if not found:
                raise DataError(f"{given}: no file matches")
            yield from map(Path, found)
        elif (path := must_exist(given)).is_dir():
            yield from sorted(file for file in path.rglob("*") if _suffixes(file)[0] in suffixes and file.is_file())
        else:
            yield path


def cut(files: Iterable[Path], size: int, wanted: Callable[[int], bool]) -> Iterator[list[Part]]:
    """Pieces of work of about `size` bytes, in order; those of which `wanted` says no to the bytes before it are left out unread."""
    piece: list[Part] = []
    before = held = 0
    for file in files:
        total = file.stat().st_size
        if total <= size or _suffixes(file)[0] not in (*LINES, ".parquet"):
            piece.append(Part(str(file), total))
            held += total
            if held >= size:
                if wanted(before):
                    yield piece
                before, held, piece = before + held, 0, []
            continue
        if piece and wanted(before):
            yield piece
        before, held, piece = before + held, 0, []
        if wanted(before) or _seekable(file):
            for part in _cut_file(file, total, size):
                at = before + part.start if _seekable(file) and part.groups is None else before
                if wanted(at):
                    yield [part]
        before += total
    if piece and wanted(before):
        yield piece


def texts(part: Part, reading: Reading, counts: Counter[str]) -> Iterator[str]:
    """The documents of a part. DataError with file, line and byte for a bad one, or a count under `skipped:<reason>`."""
    row = offset = 0
    lines = _suffixes(Path(part.path))[0] in LINES
    try:
        for row, offset, record in _records(part, reading):
            try:
                yield _text(record, offset, lines, reading, counts)
            except Bad as bad:
                _refuse(bad, part, row, offset, reading, counts)
    except Bad as bad:  # the file itself ends in the middle: nothing comes after it
        _refuse(bad, part, row + 1, offset, reading, counts)


def _refuse(bad: Bad, part: Part, row: int, offset: int, reading: Reading, counts: Counter[str]) -> None:
    if bad.reason == "blank":
        return
    if reading.errors == "skip":
        counts[f"skipped:{bad.reason}"] += 1
        return
    name = f"{part.path}: "
    if _suffixes(Path(part.path))[0] in LINES:
        name += f"line {_first_line(part) + row}: "
    elif part.groups is not None or part.path.endswith(".parquet"):
        name += f"row {row}: "
    if "at offset" in str(bad):
        raise DataError(f"{name}{bad}; errors='replace' or 'skip' go on")
    raise DataError(f"{name}{bad} (at byte {offset + bad.at}); errors='skip' goes on")


def _records(part: Part, reading: Reading) -> Iterator[tuple[int, int, Any]]:
    """(number from 0, byte offset, bytes of a line or a file or a row)"""
    suffix, _ = _suffixes(Path(part.path))
    if suffix == ".parquet":
        for row, values in enumerate(_rows(part, reading), part.line or 0 if part.groups else 0):
            yield row, 0, values
    elif suffix in LINES:
        offset, row = part.start, 0
        for chunk in whole_lines(_blocks(part), 1 << 20):
            for line in io.BytesIO(chunk):
                yield row, offset, line
                row, offset = row + 1, offset + len(line)
    else:
        yield 0, 0, b"".join(_blocks(part))


def _text(record: Any, offset: int, lines: bool, reading: Reading, counts: Counter[str]) -> str:
    if isinstance(record, dict):
        text = _join(record, reading.keys)
    else:
        text = _decode(record, offset, reading.errors, counts)
        if lines:
            text = _join(_parse(text, record), reading.keys)
    if "\0" in text:
        if reading.errors != "replace":
            raise Bad("NUL", "a NUL character inside the text", record.find(b"\0") if isinstance(record, bytes) and b"\0" in record else 0)
        counts["replaced"] += 1
        text = text.replace("\0", "\ufffd")
    return text


def _decode(raw: bytes, offset: int, errors: Errors, counts: Counter[str]) -> str:
    mark = len(codecs.BOM_UTF8) if offset == 0 and raw.startswith(codecs.BOM_UTF8) else 0
    try:
        return raw[mark:].decode("utf-8")
    except UnicodeDecodeError as error:
        if errors == "replace":
            counts["replaced"] += 1
            return raw[mark:].decode("utf-8", errors="replace")
        at = mark + error.start
        raise Bad("not UTF-8", f"not UTF-8: byte {raw[at]:#04x} at offset {offset + at}", at) from None


def _parse(line: str, raw: bytes) -> dict[str, Any]:
    if not line.strip():
        raise Bad("blank", "blank")
    try:
        value = json.loads(line, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise Bad("nesting", "JSON nested too deeply") from None
    except ValueError as error:
        if not raw.endswith(b"\n"):
            raise Bad("cut", f"not JSON, the file ends inside this line: {error}", len(raw)) from None
        raise Bad("not JSON", f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Bad("not JSON", "not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise Bad("duplicate key", f"key {twice!r} occurs twice")
    return found


def _no_constant(name: str) -> Any:
    raise Bad("NaN", f"{name} is not JSON")


def _join(row: dict[str, Any], keys: Sequence[str]) -> str:
    return "\n".join(_value(row, key) for key in keys)


def _value(row: dict[str, Any], key: str) -> str:
    value: Any = row
    for name in [key] if key in row else key.split("."):
        if not isinstance(value, dict) or name not in value:
            raise Bad("no key", f"no text under key {key!r}; keys: {', '.join(row)}")
        value = value[name]
    if not isinstance(value, str):
        raise Bad("no text", f"no text under key {key!r}, but {type(value).__name__}; keys: {', '.join(row)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # "\ud800" is JSON, but half a character
        raise Bad("half a character", f"not text: {error}") from None
    return value


def _blocks(part: Part) -> Iterator[bytes]:
    """The bytes of a part, decompressed. Bad where a compressed file is damaged or cut short, after all that could be read."""
    if part.data is not None:
        yield part.data
        if part.problem:
            raise Bad("damaged", part.problem)
        return
    with open(part.path, "rb") as file:
        if packed := _suffixes(Path(part.path))[1]:
            yield from _inflate(file, _engine(packed))
            return
        file.seek(part.start)
        left = (part.stop if part.stop is not None else os.fstat(file.fileno()).st_size) - part.start
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            left -= len(block)
            yield block


def _inflate(file: io.BufferedReader, make: Callable[[], Any]) -> Iterator[bytes]:
    engine, begun = make(), False
    while block := file.read(BLOCK):
        while block := block if begun else block.lstrip(b"\0"):  # zeros may follow the end of a gzip file
            try:
                data = engine.decompress(block)
            except Exception as error:  # zlib.error, or zstandard's own
                raise Bad("damaged", f"damaged near byte {file.tell()} of the compressed file: {error}") from None
            yield data
            begun = not engine.eof
            if begun:
                break
            block, engine = engine.unused_data, make()
    if begun:
        raise Bad("damaged", f"the compressed file is cut short after {file.tell()} bytes")


def _engine(packed: str) -> Callable[[], Any]:
    if packed == ".gz":
        return lambda: zlib.decompressobj(wbits=31)
    zstandard = extra("zstandard", ".zst")
    return lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


def whole_lines(blocks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Chunks of `size` bytes or more that end where a line does; what comes before an error is given out first."""
    held: list[bytes] = []
    count = 0
    problem: Bad | None = None
    source = iter(blocks)
    while True:
        try:
            block = next(source, None)
        except Bad as bad:
            problem, block = bad, None
        if block is None:
            break
        held.append(block)
        count += len(block)
        if count >= size and (end := block.rfind(b"\n") + 1):
            yield b"".join([*held[:-1], block[:end]])
            held = [block[end:]]
            count = len(held[0])
    rest = b"".join(held)
    if problem:
        rest = rest[: rest.rfind(b"\n") + 1]
    if rest:
        yield rest
    if problem:
        raise problem


def _cut_file(file: Path, total: int, size: int) -> Iterator[Part]:
    name = str(file)
    if _suffixes(file)[0] == ".parquet":
        yield from _cut_parquet(name, total, size)
    elif _seekable(file):
        start = 0
        with open(file, "rb") as stream:
            while start < total:
                stream.seek(min(start + size, total))
                stream.readline()
                stop = stream.tell()
                yield Part(name, stop - start, start, stop, None if start else 1)
                start = stop
    else:
        yield from _cut_compressed(name, total, size)


def _cut_compressed(name: str, total: int, size: int) -> Iterator[Part]:
    start, line, problem = 0, 1, None
    chunks = whole_lines(_blocks(Part(name, total)), size)
    last: Part | None = None
    while True:
        try:
            chunk = next(chunks, b"")
        except Bad as bad:
            problem, chunk = str(bad), b""
        if not chunk:
            break
        if last:
            yield last
        last = Part(name, 0, start, start + len(chunk), line, chunk)
        start, line = start + len(chunk), line + chunk.count(b"\n")
    yield replace(last or Part(name, 0, data=b""), size=total, problem=problem)


def _cut_parquet(name: str, total: int, size: int) -> Iterator[Part]:
    file = _parquet(name)
    row, first, held = 0, 0, 0
    groups = file.metadata.num_row_groups
    start = 0
    for group in range(groups):
        held += file.metadata.row_group(group).total_byte_size
        start += file.metadata.row_group(group).num_rows
        if held >= size or group == groups - 1:
            yield Part(name, total * (group + 1) // groups - total * first // groups, 0, None, row, groups=(first, group + 1))
            row, first, held = start, group + 1, 0


def _rows(part: Part, reading: Reading) -> Iterator[dict[str, Any]]:
    file = _parquet(part.path)
    names = file.schema_arrow.names
    columns = [key if key in names else key.split(".")[0] for key in reading.keys]
    if missing := [column for column in columns if column not in names]:
        raise DataError(f"{part.path}: no column {missing[0]!r}; columns: {', '.join(names)}")
    groups = list(range(*part.groups)) if part.groups else list(range(file.metadata.num_row_groups))
    try:
        for batch in file.iter_batches(256, row_groups=groups, columns=columns):
            yield from batch.to_pylist()
    except UnicodeDecodeError as error:
        raise Bad("not UTF-8", f"a column is not UTF-8: {error}") from None
    except Exception as error:  # pyarrow's own
        raise Bad("damaged", f"damaged: {error}") from None


def _parquet(name: str) -> Any:
    parquet = extra("pyarrow.parquet", ".parquet")
    try:
        return parquet.ParquetFile(name)
    except Exception as error:  # pyarrow's own
        raise DataError(f"{name}: not a Parquet file, or cut short: {error}") from None


def extra(module: str, what: str) -> Any:
    """An optional library. DataError names the extra that brings it."""
    try:
        return import_module(module)
    except ImportError:
        raise DataError(f"{what} files need {module.split('.')[0]}: pip install 'phalanx[data]'") from None


def _first_line(part: Part) -> int:
    if part.line is not None:
        return part.line
    with open(part.path, "rb") as file:
        lines, left = 1, part.start
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            lines, left = lines + block.count(b"\n"), left - len(block)
    return lines


def _seekable(file: Path) -> bool:
    return file.suffix not in COMPRESSED


def _suffixes(file: Path) -> tuple[str, str]:
    """(.jsonl, .gz) of x.jsonl.gz, (.txt, "") of x.txt"""
    if file.suffix in COMPRESSED:
        return Path(file.stem).suffix, file.suffix
    return file.suffix, ""
