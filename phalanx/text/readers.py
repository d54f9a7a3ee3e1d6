"""Inputs of a preparation: which files, how they are divided into parts of limited size, and the texts in a part or
what is wrong with them.

Supports lines of JSON, plain text (both optionally compressed), columns of Parquet files and of Hugging Face datasets.
"""

from __future__ import annotations

import codecs
import difflib
import glob
import io
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.data.files import extra, must_exist

SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl", ".parquet", ".arrow")
COMPRESSED = (".gz", ".zst")
LINES = (".jsonl", ".ndjson", ".json")
TABLES = (".parquet", ".arrow")
VALUES = (".csv", ".tsv")  # not read
USUAL = ("text", "content", "body", "document", "article")  # names of text, the commonest first
CHATS = ("messages", "conversations")
CHATS_ELSEWHERE = "; these are chats: data.chats reads them (docs/fine-tuning.md)"
HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
ROWS = 256  # of a table, made into Python objects at a time
BLOCK = 1 << 16  # of compressed input: it expands to at most a thousand times as much
Errors = Literal["strict", "replace", "skip"]


@dataclass(frozen=True)
class FileSlice:
    """A file, or bytes start..stop-1 of one, cut at the end of a line. `data` holds them if the file is compressed and
    cut."""

    path: str
    size: int
    """Bytes on disk that it represents."""
    start: int = 0
    stop: int | None = None
    line: int | None = 1
    """Number of its first line or row; None: counted when it is needed."""
    data: bytes | None = None
    problem: str | None = None
    """Why a compressed file ended too early, after `data`."""
    groups: tuple[int, int] | None = None
    """Row groups of a Parquet file, or record batches of an Arrow file."""


@dataclass(frozen=True)
class Hints:
    """What a user types to read other keys, or to continue after a bad document: the suggestions in messages."""

    keys: str = "--json-keys {}"
    errors: str = "--errors {}"


@dataclass(frozen=True)
class ReadOptions:
    """How texts are found: keys of a JSON line or a Parquet row (`a.b` is b inside a; for `records` none, which are
    all), and what to do with bad ones."""

    keys: tuple[str, ...] = ("text",)
    errors: Errors = "strict"
    hints: Hints = Hints()


class Bad(Exception):
    """A document that is not valid text: a reason to count by, a description, and the byte at which it was found."""

    def __init__(self, reason: str, message: str, at: int = 0):
        super().__init__(message)
        self.reason, self.at = reason, at


def find_files(inputs: Iterable[str | os.PathLike[str]], suffixes: Sequence[str] = SUFFIXES) -> Iterator[Path]:
    """Files as given; in folders, the files with one of the suffixes (optionally compressed); for globs, all matches;
    in order of their paths."""
    for given in inputs:
        if not os.path.exists(given) and glob.has_magic(os.fspath(given)):
            found = sorted(name for name in glob.glob(os.fspath(given), recursive=True) if os.path.isfile(name))
            if not found:
                raise DataError(f"{given}: no file matches")
            yield from map(_no_values, map(Path, found))
        elif (path := _there(given)).is_dir():
            wanted = (*suffixes, *VALUES)
            found_here = _dataset(path) or sorted(
                file for file in path.rglob("*") if _suffixes(file)[0] in wanted and file.is_file()
            )
            yield from map(_no_values, found_here)
        else:
            yield _no_values(path)


def _there(given: str | os.PathLike[str]) -> Path:
    """An input that exists, otherwise DataError. For what looks like a name on the Hugging Face Hub, it gives the
    command that downloads it."""
    name = os.fspath(given)
    if (
        not os.path.lexists(name)
        and HUB.fullmatch(name)
        and not os.path.isdir(os.path.dirname(name))
        and not Path(name).suffix
    ):
        folder = name.rpartition("/")[2]
        get = f"hf download {name} --repo-type dataset --local-dir {folder}"
        why = "no such file or folder, and nothing is downloaded"
        raise DataError(f"{name}: {why}; of a data set on the Hugging Face Hub: `{get}`, then give {folder}")
    return must_exist(given)


def _no_values(file: Path) -> Path:
    """DataError for a table of values, whose commas and quotes would be read as text."""
    if _suffixes(file)[0] not in VALUES:
        return file
    convert = "pandas.read_csv(FILE).to_json(OUT, orient='records', lines=True)"
    raise DataError(
        f"{file}: tables of this kind are not read: make a .jsonl or .parquet file of it (such as "
        f"`{convert}`) or move it away"
    )


def _dataset(folder: Path) -> list[Path]:
    """The files of a Hugging Face dataset that `save_to_disk` wrote (its folder may also hold caches); nothing for any
    other folder."""
    splits, state = folder / "dataset_dict.json", folder / "state.json"
    try:
        if splits.exists():
            names = ", ".join(f"{folder / name}" for name in json.loads(splits.read_text(encoding="utf-8"))["splits"])
            raise DataError(f"{folder}: a dataset with several splits; name those that are meant: {names}")
        if not (state.exists() and (folder / "dataset_info.json").exists()):
            return []
        note = json.loads(state.read_text(encoding="utf-8"))
        if note.get("_indices_data_files"):
            raise DataError(
                f"{folder}: a dataset whose rows are chosen by an index file; save it anew after flatten_indices()"
            )
        return [must_exist(folder / entry["filename"]) for entry in note["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder}: not a dataset that save_to_disk wrote: {error!r}") from None


def cut(files: Iterable[Path], size: int, wanted: Callable[[int], bool]) -> Iterator[list[FileSlice]]:
    """Pieces of work of about `size` bytes, in order. Pieces for which `wanted`, given the number of bytes before them,
    is false are left out unread."""
    piece: list[FileSlice] = []
    before = held = 0
    for file in files:
        total = file.stat().st_size
        if total <= size or _suffixes(file)[0] not in (*LINES, *TABLES):
            piece.append(FileSlice(str(file), total))
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


def texts(part: FileSlice, reading: ReadOptions, counts: Counter[str]) -> Iterator[str]:
    """The documents of a part. For a bad one, DataError with file, line and byte, or a count under
    `skipped:<reason>`."""
    row = offset = 0
    lines = _suffixes(Path(part.path))[0] in LINES
    try:
        for row, offset, record in _records(part, reading):
            try:
                yield _text(record, offset, lines, reading, counts)
            except Bad as bad:
                _refuse(bad, part, row, offset, reading, counts)
    except Bad as bad:  # the file itself is truncated, so nothing follows
        _refuse(bad, part, row + 1, offset, reading, counts)


def records(part: FileSlice) -> Iterator[tuple[int, dict[str, Any] | Bad]]:
    """(line or row, record or what is wrong with it) of a part of a file of JSON lines or of a table. Lines count from
    1, rows from 0."""
    path = Path(part.path)
    lines, row, reading = _suffixes(path)[0] in LINES, -1, ReadOptions(keys=())
    first = _first_line(part) if lines else 0
    try:
        for row, offset, record in _records(part, reading):
            if isinstance(record, dict):
                yield row, record
                continue
            try:
                text = _decode(record, offset, "strict", Counter())
                if row == part.start == 0 and text.lstrip().startswith("["):
                    raise Bad("not lines", f"an array, not lines of JSON: jq -c '.[]' {path.name} > {path.stem}.jsonl")
                yield first + row, _parse(text, record)
            except Bad as bad:
                if bad.reason != "blank":
                    yield first + row, bad
    except Bad as bad:  # the file itself is truncated, so nothing follows
        yield first + row + 1, bad


def _refuse(bad: Bad, part: FileSlice, row: int, offset: int, reading: ReadOptions, counts: Counter[str]) -> None:
    if bad.reason == "blank":
        return
    if reading.errors == "skip":
        counts[f"skipped:{bad.reason}"] += 1
        return
    name = f"{part.path}: "
    if _suffixes(Path(part.path))[0] in LINES:
        name += f"line {_first_line(part) + row}: "
    elif part.path.endswith(TABLES):
        name += f"row {row}: "
    if "at offset" in str(bad):
        raise DataError(f"{name}{bad}; {reading.hints.errors.format('replace')} or skip goes on")
    # if only a later record fails, the key is right and the record is wrong
    wrong_key = bad.reason == "no key" and row == part.start == 0
    way_out = "" if wrong_key else f"; {reading.hints.errors.format('skip')} goes on"
    raise DataError(f"{name}{bad} (at byte {offset + bad.at}){way_out}")


def _records(part: FileSlice, reading: ReadOptions) -> Iterator[tuple[int, int, Any]]:
    """(number from 0, byte offset, bytes of a line or a file or a row)"""
    suffix, _ = _suffixes(Path(part.path))
    if suffix in TABLES:
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


def _text(record: Any, offset: int, lines: bool, reading: ReadOptions, counts: Counter[str]) -> str:
    if isinstance(record, dict):
        text = _join(record, reading)
    else:
        text = _decode(record, offset, reading.errors, counts)
        if lines:
            text = _join(_parse(text, record), reading)
    if "\0" in text:
        if reading.errors != "replace":
            raise Bad(
                "NUL",
                "a NUL character inside the text",
                record.find(b"\0") if isinstance(record, bytes) and b"\0" in record else 0,
            )
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


def _join(row: dict[str, Any], reading: ReadOptions) -> str:
    return "\n".join(_value(row, key, reading.hints) for key in reading.keys)


def _value(row: dict[str, Any], key: str, hints: Hints) -> str:
    value: Any = row
    for name in [key] if key in row else key.split("."):
        if not isinstance(value, dict) or name not in value:
            raise Bad("no key", f"no text under key {key!r}; keys: {', '.join(row)}{_meant(row, key, hints)}")
        value = value[name]
    if not isinstance(value, str):
        raise Bad("no text", f"no text under key {key!r}, but {type(value).__name__}; keys: {', '.join(row)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # "\ud800" is JSON, but half a character
        raise Bad("half a character", f"not text: {error}") from None
    return value


def _meant(row: dict[str, Any], key: str, hints: Hints) -> str:
    """What to type if a record has no text under a key."""
    texts = [name for name, value in row.items() if isinstance(value, str)]
    if any(isinstance(row.get(name), list) for name in CHATS):
        return CHATS_ELSEWHERE
    return _try(key, sorted(texts, key=lambda name: -len(row[name])), hints)


def _try(key: str, texts: Sequence[str], hints: Hints) -> str:
    """The likeliest of the keys that hold text: one with a similar name, a usual one, or the first."""
    near = difflib.get_close_matches(key, texts, n=1) or [name for name in USUAL if name in texts] or texts
    return f"; try {hints.keys.format(near[0])}" if near else ""


def _blocks(part: FileSlice) -> Iterator[bytes]:
    """The bytes of a part, decompressed. If a compressed file is damaged or truncated, Bad after everything that could
    be read."""
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
    zstandard = extra("zstandard", ".zst files need", "data")
    return lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


def whole_lines(blocks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Chunks of at least `size` bytes that end at the end of a line; what comes before an error is yielded first."""
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


def _cut_file(file: Path, total: int, size: int) -> Iterator[FileSlice]:
    name = str(file)
    if _suffixes(file)[0] in TABLES:
        yield from _cut_table(name, total, size)
    elif _seekable(file):
        start = 0
        with open(file, "rb") as stream:
            while start < total:
                stream.seek(min(start + size, total))
                stream.readline()
                stop = stream.tell()
                yield FileSlice(name, stop - start, start, stop, None if start else 1)
                start = stop
    else:
        yield from _cut_compressed(name, total, size)


def _cut_compressed(name: str, total: int, size: int) -> Iterator[FileSlice]:
    start, line, problem = 0, 1, None
    chunks = whole_lines(_blocks(FileSlice(name, total)), size)
    last: FileSlice | None = None
    while True:
        try:
            chunk = next(chunks, b"")
        except Bad as bad:
            problem, chunk = str(bad), b""
        if not chunk:
            break
        if last:
            yield last
        last = FileSlice(name, 0, start, start + len(chunk), line, chunk)
        start, line = start + len(chunk), line + chunk.count(b"\n")
    yield replace(last or FileSlice(name, 0, data=b""), size=total, problem=problem)


def _cut_table(name: str, total: int, size: int) -> Iterator[FileSlice]:
    groups = list(_open_table(name).sizes())
    row, first, held, start = 0, 0, 0, 0
    for group, (count, rows) in enumerate(groups):
        held += count
        start += rows
        if held >= size or group == len(groups) - 1:
            share = total * (group + 1) // len(groups) - total * first // len(groups)
            yield FileSlice(name, share, 0, None, row, groups=(first, group + 1))
            row, first, held = start, group + 1, 0


def _rows(part: FileSlice, reading: ReadOptions) -> Iterator[dict[str, Any]]:
    table = _open_table(part.path)
    columns = [key if key in table.names else key.split(".")[0] for key in reading.keys] or table.names
    if missing := [column for column in columns if column not in table.names]:
        chats = any(name in CHATS for name in table.names)
        hint = CHATS_ELSEWHERE if chats else _try(missing[0], table.texts(), reading.hints)
        raise DataError(f"{part.path}: no column {missing[0]!r}; columns: {', '.join(table.names)}{hint}")
    try:
        for batch in table.batches(part.groups, list(dict.fromkeys(columns))):
            yield from batch.to_pylist()
    except UnicodeDecodeError as error:
        raise Bad("not UTF-8", f"a column is not UTF-8: {error}") from None
    except Exception as error:  # pyarrow's own
        raise Bad("damaged", f"damaged: {error}") from None


def _open_table(name: str) -> _Parquet | _Arrow:
    try:
        return _Parquet(name) if name.endswith(".parquet") else _Arrow(name)
    except DataError:
        raise
    except Exception as error:  # pyarrow's own
        kind = "a Parquet file" if name.endswith(".parquet") else "an Arrow file"
        raise DataError(f"{name}: not {kind}, or cut short: {error}") from None


class _Parquet:
    def __init__(self, name: str):
        self._file = extra("pyarrow.parquet", ".parquet files need", "data").ParquetFile(name)
        self.names: list[str] = self._file.schema_arrow.names

    def texts(self) -> list[str]:
        """Columns that hold text."""
        return _text_columns(self._file.schema_arrow)

    def sizes(self) -> Iterator[tuple[int, int]]:
        """(bytes, rows) of each row group."""
        for group in range(self._file.metadata.num_row_groups):
            found = self._file.metadata.row_group(group)
            yield found.total_byte_size, found.num_rows

    def batches(self, groups: tuple[int, int] | None, columns: list[str]) -> Iterator[Any]:
        first, last = groups or (0, self._file.metadata.num_row_groups)
        yield from self._file.iter_batches(ROWS, row_groups=list(range(first, last)), columns=columns)


class _Arrow:
    """The streams of record batches that `datasets` writes, memory-mapped."""

    def __init__(self, name: str):
        arrow = extra("pyarrow", ".arrow files need", "data")
        self._open = lambda: arrow.ipc.open_stream(arrow.memory_map(name))
        self.names: list[str] = self._open().schema.names

    def texts(self) -> list[str]:
        """Columns that hold text."""
        return _text_columns(self._open().schema)

    def sizes(self) -> Iterator[tuple[int, int]]:
        """(bytes, rows) of each record batch."""
        for batch in self._open():
            yield batch.nbytes, batch.num_rows

    def batches(self, groups: tuple[int, int] | None, columns: list[str]) -> Iterator[Any]:
        first, last = groups or (0, None)
        for batch in islice(self._open(), first, last):
            for row in range(0, batch.num_rows, ROWS):
                yield batch.slice(row, ROWS).select(columns)


def _text_columns(schema: Any) -> list[str]:
    return [column.name for column in schema if str(column.type) in ("string", "large_string", "string_view")]


def _first_line(part: FileSlice) -> int:
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
