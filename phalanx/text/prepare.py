"""Preparing data: texts in, token files and a manifest out, in pieces that survive a kill.

`index` and `tokenizers` define the formats, `readers` what is in the inputs, `shards` the pieces, `workers` the
processes, and `mixture` the order.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import sysconfig
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.base.file_lock import FileLock
from phalanx.data.checksums import SUFFIX
from phalanx.data.config import DataConfig, prefixes_of
from phalanx.data.files import replacing, sync_folder
from phalanx.data.index import strip_suffix
from phalanx.text import shards
from phalanx.text.readers import SUFFIXES, Errors, FileSlice, Hints, ReadOptions, cut, find_files, texts
from phalanx.text.tokenizer import load_tokenizer
from phalanx.text.tokenizer_base import Tokenizer
from phalanx.text.workers import ordered

MANIFEST_VERSION = 3
BATCH_BYTES = 1 << 20  # text per encode_batch: enough to keep its threads busy, little enough to stay small
PIECE_BYTES = 8 << 20  # input per piece: what a kill can cost each worker
MAX_PIECES = 1 << 14  # so that a shuffle can map all of them
MAX_NAMED = 100  # inputs that a manifest names one by one
TRAIN_BYTES = 12 << 20  # text a demo tokenizer is trained on


class BeingWritten(DataError):
    """Another process is at work on the same token files."""

    kind = "data error: "


@dataclass
class Summary:
    """What a preparation read and wrote; stored beside the token files as PREFIX.json."""

    sources: list[str]
    tokenizer: str
    """SHA-256 of the data that defines the tokenizer."""
    vocab_size: int
    dtype: str
    tokenizer_facts: dict[str, Any] = field(default_factory=dict)
    """Kind, sizes, end-of-document id and special tokens of the tokenizer."""
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
    skipped_by: dict[str, int] = field(default_factory=dict)
    """`skipped` by reason."""
    lengths: dict[str, int] = field(default_factory=dict)
    """Documents by length: under "2**k" those of 2**k to 2**(k+1) - 1 tokens."""
    inputs: list[dict[str, Any]] = field(default_factory=list)
    """Path, bytes and SHA-256 of each file; of very many only the first ones."""
    inputs_hash: str = ""
    """SHA-256 of the SHA-256s of all files, in order."""
    append_eod: bool = True
    shuffle: int | None = None
    """Seed of the order of documents; None: as they were read."""
    shard: str = "0/1"
    part: str = ""
    """Name of this part of a split, and its share; documents, tokens and lengths are for this part, everything else for
    the whole."""
    parts: dict[str, list[int]] = field(default_factory=dict)
    """Documents and tokens of each part of the split."""
    settings: str = ""
    """SHA-256 of everything that determines what is written."""
    version: int = field(default=MANIFEST_VERSION)


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """What token files hold, and how they are made. The output is the same for any number of `workers`."""

    suffixes: Sequence[str] = SUFFIXES
    """Of the files that are looked for in folders."""
    key: str | Sequence[str] = "text"
    """Where the text of a JSON line or row is: `a.b` is b inside a. Texts of several keys are joined by line breaks."""
    errors: Errors = "strict"
    """Whether to stop at what is damaged, or to continue."""
    append_eod: bool = True
    """Each document ends with the end-of-document token."""
    shuffle: int | None = None
    """A seed for the order of the documents."""
    split: Mapping[str, float] | None = None
    """{"train": 0.98, "valid": 0.02} writes PREFIX-train and PREFIX-valid. A hash of its text decides where a document
    goes, so equal documents stay together and a document keeps its place when others are added."""
    shard: tuple[int, int] = (0, 1)
    """(i, n): the i-th of n runs that share the work; `merge_shards` joins them."""
    overwrite: bool = False
    """Replace other token files of this name."""
    workers: int = 1
    """Processes; with 1, the work is done in this one."""
    piece_bytes: int = PIECE_BYTES
    """Bytes of text that are encoded at once."""
    hints: Hints = ReadOptions.hints
    """What messages say is to be typed."""


def prepare(
    inputs: Sequence[str | os.PathLike[str]],
    prefix: str | os.PathLike[str],
    tokenizer: Tokenizer,
    options: PrepareOptions = PrepareOptions(),
    progress: Callable[[int, int], None] | None = None,
) -> Summary:
    """Turn texts into PREFIX.bin, PREFIX.idx, their checksums PREFIX.sums and the record PREFIX.json; nothing appears
    before all of it is written.

    inputs: files, globs, folders, each file optionally .gz or .zst, and Hugging Face datasets on disk. A .jsonl file
    holds one document per line, a .parquet or .arrow file one per row; any other file is one document. Order: inputs as
    given, folders by name. progress: called with (done, all) bytes.

    If everything was already done with the same inputs and options, nothing happens. Finished pieces are kept in a
    hidden folder beside PREFIX until the end, so that the same call after a kill continues. DataError for an input that
    is missing or damaged, with file, line and byte, and for other token files of this name.

    Memory: a few times `piece_bytes` for each worker, or what the longest document needs.
    """
    o, shard = options, options.shard
    if o.append_eod and tokenizer.eod is None:
        raise DataError(f"the tokenizer {tokenizer.fingerprint[:12]} has no end-of-document token")
    if not 0 <= shard[0] < shard[1]:
        raise DataError(f"shard {shard[0]}/{shard[1]}: the first is 0/{shard[1]}, the last {shard[1] - 1}/{shard[1]}")
    shares = check_split(o.split or {})
    files = list(find_files(inputs, o.suffixes))
    stats = _stats(files)
    total = sum(size for _, size, _ in stats)
    piece_bytes = max(o.piece_bytes, total // MAX_PIECES)
    reading = ReadOptions((o.key,) if isinstance(o.key, str) else tuple(o.key), o.errors, o.hints)
    of_pieces = _hash([MANIFEST_VERSION, stats, tokenizer.fingerprint, reading.keys, o.append_eod, shard, piece_bytes])
    summary = Summary(
        _named(inputs), tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.dtype.name, tokenizer.facts()
    )
    summary.append_eod, summary.shuffle, summary.shard = o.append_eod, o.shuffle, f"{shard[0]}/{shard[1]}"
    summary.settings = _hash([of_pieces, o.errors, o.shuffle, shares])
    places = {name: f"{strip_suffix(prefix)}-{name}" for name in shares} or {"": strip_suffix(prefix)}
    _check_distinct(files, places)
    if done := _done(places, summary.settings, o.overwrite):
        if _pieces(strip_suffix(prefix)).exists():  # the earlier run was killed while tidying up
            with _folder(Path(strip_suffix(prefix)), of_pieces):
                pass
        return done
    with _folder(Path(strip_suffix(prefix)), of_pieces) as folder:
        wanted = cut(
            files, piece_bytes, lambda before: min(before * shard[1] // max(total, 1), shard[1] - 1) == shard[0]
        )
        shared = (tokenizer, reading, tokenizer.eod if o.append_eod else None)
        processes = o.workers if total > piece_bytes else 1  # starting a process takes longer than a little work
        pieces = _make_pieces(
            wanted, folder, shared, processes, lambda done: progress and progress(done, total // shard[1])
        )
        _check_unchanged(stats)
        _sum_up(pieces, summary)
        if not summary.tokens and shard[1] == 1:  # with little input, some shards have no work
            kinds = ", ".join(o.suffixes)
            raise DataError(f"no text in {', '.join(summary.sources)}: {summary.files} files with a suffix of {kinds}")
        made = {name: folder / f"all-{name}" for name in places}
        counts = shards.assemble(pieces, list(made.values()), tokenizer.dtype, o.shuffle, list(shares.values()))
        summary.lengths = dict(sum((Counter(count.lengths) for count in counts), Counter()))
        summary.parts = {name: [count.documents, count.tokens] for name, count in zip(shares, counts)}
        if shard[1] == 1 and (empty := [name for name, (documents, _) in summary.parts.items() if not documents]):
            raise DataError(
                f"split: {empty[0]}={shares[empty[0]]:g} of {summary.documents} documents is none; give it a "
                "larger share"
            )
        for name, count in zip(places, counts):
            _publish(made[name], places[name], summary if not name else _part_of(summary, name, shares[name], count))
    return summary


def check_split(split: Mapping[str, float]) -> dict[str, float]:
    """The shares of a split, made to sum to one. DataError for a name that cannot be part of a file name, or a share
    that is none."""
    for name, share in split.items():
        if not re.fullmatch(r"[A-Za-z0-9_]+", name):
            raise DataError(f"split: {name!r} becomes part of a file name: use letters, digits and _")
        if not (math.isfinite(share) and share > 0):
            raise DataError(f"split: {name}={share}: a share is a number > 0")
    return {name: share / sum(split.values()) for name, share in split.items()}


def check_tokenizer(prefix: str | os.PathLike[str], tokenizer: Tokenizer) -> None:
    """DataError if the manifest beside PREFIX says that another tokenizer made it. Files without a manifest
    (Megatron's) are accepted."""
    note = read_manifest(prefix)
    if note.get("tokenizer") and note["tokenizer"] != tokenizer.fingerprint:
        facts = {"kind": "unknown", "eod": "unknown", **note.get("tokenizer_facts", {})}
        raise DataError(
            f"{strip_suffix(prefix)}: made with another tokenizer: kind {facts['kind']}, "
            f"{note.get('vocab_size')} ids, end of document "
            f"{facts['eod']}, SHA-256 {note['tokenizer'][:12]}; this one: {tokenizer.kind}, "
            f"{tokenizer.vocab_size} ids, "
            f"{tokenizer.eod}, {tokenizer.fingerprint[:12]}; name the one that made it, or prepare the texts anew"
        )


def check_tokenizers(config: DataConfig) -> None:
    """`check_tokenizer` for all token files that a run reads, with its data.tokenizer if it has one."""
    if config.tokenizer is None:
        return
    tokenizer = load_tokenizer(config.tokenizer)
    for prefix in prefixes_of(config):
        check_tokenizer(prefix, tokenizer)


def read_manifest(prefix: str | os.PathLike[str]) -> dict[str, Any]:
    """PREFIX.json, or nothing where there is none."""
    path = Path(strip_suffix(prefix) + ".json")
    try:
        note = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise DataError(f"{path}: not a manifest: {error}") from None
    return note if isinstance(note, dict) else {}


def merge_shards(
    prefix: str | os.PathLike[str],
    parts: Sequence[str | os.PathLike[str]],
    *,
    copy: bool = False,
    overwrite: bool = False,
) -> Summary:
    """One set of token files from several, such as `prepare` made of shards, in the order given. DataError if their
    tokenizers differ.

    No token is copied: PREFIX.idx is as if all were in one file, and PREFIX.bins names the .bin files. copy: write
    PREFIX.bin instead, which Megatron needs.
    """
    notes = [note for part in parts if (note := read_manifest(part))]
    for name in ("tokenizer", "append_eod"):
        if len({note.get(name) for note in notes}) > 1:
            raise DataError(
                f"{', '.join(map(str, parts))}: made with different settings: {name} is "
                f"{[note.get(name) for note in notes]}"
            )
    first: dict[str, Any] = notes[0] if notes else {}
    facts = first.get("tokenizer_facts", {})
    summary = Summary(
        _named(parts), first.get("tokenizer", ""), first.get("vocab_size", 0), first.get("dtype", ""), facts
    )
    summary.append_eod = first.get("append_eod", True)
    for name in ("files", "text_bytes", "empty", "skipped", "replaced"):
        setattr(summary, name, sum(note.get(name, 0) for note in notes))
    for name in ("skipped_by", "lengths"):
        setattr(summary, name, dict(sum((Counter(note.get(name, {})) for note in notes), Counter())))
    summary.inputs = [entry for note in notes for entry in note.get("inputs", [])][:MAX_NAMED]
    places = {"": strip_suffix(prefix)}
    summary.settings = _hash(
        [
            "merge",
            copy,
            _stats([Path(strip_suffix(part) + ".idx") for part in parts]),
            [note.get("settings") for note in notes],
        ]
    )
    if done := _done(places, summary.settings, overwrite):
        return done
    with _folder(Path(places[""]), summary.settings) as folder:
        summary.documents, summary.tokens = shards.merge(folder / "all", places[""], parts, copy)
        _publish(folder / "all", places[""], summary)
    return summary


def _make_pieces(
    work: Iterable[list[FileSlice]], folder: Path, shared: tuple[Any, ...], workers: int, progress: Callable[[int], Any]
) -> list[Path]:
    """Encode what has not been encoded before; returns all pieces, in order."""
    pieces: list[Path] = []
    done = 0

    def missing() -> Iterator[tuple[Path, list[FileSlice]]]:
        nonlocal done
        for number, parts in enumerate(work):
            clean = folder / f"{number:08d}"
            known = next((path for path in (clean, _mended(clean, shared[1].errors)) if path.exists()), None)
            pieces.append(known or clean)
            if known is None:
                yield clean, parts
            else:
                done += sum(part.size for part in parts)
                progress(done)

    for path, size in ordered(_encode, shared, missing(), workers):
        pieces[int(path.name[:8])] = path
        done += size
        progress(done)
    return pieces


def _encode(shared: tuple[Tokenizer, ReadOptions, int | None], item: tuple[Path, list[FileSlice]]) -> tuple[Path, int]:
    """Write a piece: (its path, bytes of input). Its name says whether anything was skipped or replaced, which a strict
    run must know."""
    tokenizer, reading, eod = shared
    path, parts = item
    width, end = tokenizer.dtype.itemsize, b"" if eod is None else np.array([eod], tokenizer.dtype).tobytes()
    tokens, lengths, hashes, counts = bytearray(), array("q"), bytearray(), Counter[str]()
    for batch in _batches(chain.from_iterable(texts(part, reading, counts) for part in parts), counts, hashes):
        for ids in _ids(tokenizer, batch, parts):
            tokens += ids
            tokens += end
            lengths.append((len(ids) + len(end)) // width)
    begun = [part.path for part in parts if part.start == 0 and (part.groups is None or part.groups[0] == 0)]
    inputs = [{"path": name, "bytes": os.path.getsize(name), "sha256": _sha256(name)} for name in begun]
    counts["documents"], counts["tokens"] = len(lengths), len(tokens) // width
    mended = counts["replaced"] or any(name.startswith("skipped:") for name in counts)
    path = _mended(path, reading.errors) if mended else path
    shards.write_piece(path, {"counts": counts, "inputs": inputs}, np.array(lengths, np.int64), hashes, tokens)
    return path, sum(part.size for part in parts)


def _ids(tokenizer: Tokenizer, batch: list[str], parts: list[FileSlice]) -> list[bytes]:
    try:
        return tokenizer.encode_raw(batch)
    except DataError as error:
        others = f" or one of the {len(parts) - 1} files after it" if len(parts) > 1 else ""
        raise DataError(f"{parts[0].path}{others}: {error}") from None


def _mended(path: Path, errors: Errors) -> Path:
    return path.with_name(f"{path.name}-{errors}")


def _sum_up(pieces: Sequence[Path], summary: Summary) -> None:
    counts, files = Counter[str](), hashlib.sha256()
    for piece in pieces:
        note = shards.read_note(piece)
        counts.update(note["counts"])
        for entry in note["inputs"]:
            files.update(entry["sha256"].encode())
            summary.files += 1
            if len(summary.inputs) < MAX_NAMED:
                summary.inputs.append(entry)
    for name in ("documents", "tokens", "text_bytes", "empty", "replaced"):
        setattr(summary, name, counts[name])
    summary.skipped_by = {
        name.removeprefix("skipped:"): n for name, n in sorted(counts.items()) if name.startswith("skipped:")
    }
    summary.skipped = sum(summary.skipped_by.values())
    summary.inputs_hash = files.hexdigest()


def _pieces(prefix: str | Path) -> Path:
    return Path(prefix).with_name(f".{Path(prefix).name}.pieces")


@contextmanager
def _folder(prefix: Path, settings: str) -> Iterator[Path]:
    """The hidden folder beside `prefix`, with what an earlier run with the same settings left in it; removed when the
    block ends without an error."""
    folder = _pieces(prefix)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "lock", f"process {os.getpid()}")
    try:
        if not lock.acquire():
            raise BeingWritten(f"{prefix}: another process is writing it (lock {folder / 'lock'})")
        note = folder / "settings"
        old = note.read_text() if note.exists() else ""
        for path in folder.iterdir():
            if not path.name.startswith("lock") and (
                old != settings or not path.name[:8].isdigit() or ".tmp-" in path.name
            ):
                path.unlink()
        note.write_text(settings)
        try:
            yield folder
        except DataError:
            if not any(path.name[:8].isdigit() for path in folder.iterdir()):
                shutil.rmtree(folder)
            raise
        except (FileNotFoundError, PermissionError) as error:
            raise DataError(f"{error.filename}: {error.strerror}") from None
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            why = "disk full" if error.errno != errno.EFBIG else "larger than files may be here"
            raise DataError(
                f"{prefix}: {why}; finished pieces are kept in {folder}: make room and run the same again"
            ) from None
        shutil.rmtree(folder)
    finally:
        lock.close()


def _done(places: Mapping[str, str], settings: str, overwrite: bool) -> Summary | None:
    """The record of an earlier run with the same settings, if it was completed. DataError if something else is there
    and may not be replaced."""
    if overwrite:
        return None
    notes = [read_manifest(place) for place in places.values()]
    for place, note in zip(places.values(), notes):
        there = [place + suffix for suffix in (".bin", ".bins", ".idx") if os.path.exists(place + suffix)]
        if there and note.get("settings") != settings:
            raise DataError(
                f"{there[0]} exists, made of other inputs or with other settings; choose another name, or --overwrite"
            )
    if not all(note and os.path.exists(place + ".idx") for place, note in zip(places.values(), notes)):
        return None
    whole = {**notes[0], "part": ""}
    if whole["parts"]:
        whole["documents"], whole["tokens"] = (sum(counts) for counts in zip(*whole["parts"].values()))
        whole["lengths"] = dict(sum((Counter(note["lengths"]) for note in notes), Counter()))
    return Summary(**whole)


def _publish(made: Path, place: str, summary: Summary) -> None:
    """Move finished token files to their place: the manifest first; last the index, without which they are not
    visible."""
    for suffix in (".idx", ".bin", ".bins", SUFFIX):
        Path(place + suffix).unlink(missing_ok=True)
    with replacing(place + ".json") as file:
        file.write(json.dumps(asdict(summary), indent=2).encode())
    for suffix in (".bin", ".bins", SUFFIX, ".idx"):
        if os.path.exists(f"{made}{suffix}"):
            os.replace(f"{made}{suffix}", place + suffix)
    sync_folder(Path(place).parent)


def _part_of(summary: Summary, name: str, share: float, count: shards.Count) -> Summary:
    return replace(
        summary, part=f"{name}={share:g}", documents=count.documents, tokens=count.tokens, lengths=count.lengths
    )


def _check_distinct(files: Sequence[Path], places: Mapping[str, str]) -> None:
    """DataError if what is to be written would replace an input."""
    written = {
        os.path.realpath(place + suffix): place
        for place in places.values()
        for suffix in (".bin", ".bins", ".idx", SUFFIX, ".json")
    }
    for file in files:
        if (place := written.get(os.path.realpath(file))) is not None:
            name = f"{Path(place).name}{file.suffix}"
            raise DataError(
                f"{file}: this input would be replaced: the files of {place} include {name}; choose another "
                "name for the output"
            )


def _check_unchanged(before: list[tuple[str, int, int]]) -> None:
    for name, *old in before:
        try:
            now = _stats([Path(name)])[0]
        except FileNotFoundError:
            raise DataError(f"{name}: was removed while it was read; run again") from None
        if [*now[1:]] != old:
            raise DataError(f"{name}: changed while it was read: {old[0]} bytes before, {now[1]} now; run again")


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _stats(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    return [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stdlib_files(max_bytes: int) -> list[Path]:
    """Source files of Python's standard library, at most `max_bytes`: a text that every machine with Python has.

    Installed packages are left out, and tests are included only if there is room. The order is the same everywhere and
    independent of names, so that the validation part at the end resembles the rest.
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
    """Train a tokenizer and prepare token files, from `text_paths` or Python's standard library: (prefix,
    tokenizer.json).

    Idempotent: if the folder already holds the result for these inputs, nothing is done. The manifest is written last.
    Files that are not UTF-8 are left out and counted in it.
    """
    from phalanx.text.tokenizers import train_bpe  # start-up time: the library of the same name

    folder = Path(folder)
    files = stdlib_files(max_bytes) if text_paths is None else list(find_files(text_paths, SUFFIXES))
    prefix, tokenizer_path, manifest = (
        str(folder / "text"),
        folder / "tokenizer" / "tokenizer.json",
        folder / "manifest.json",
    )
    inputs = _fingerprint(files, vocab_size)
    outputs = [Path(prefix + ".bin"), Path(prefix + ".idx"), tokenizer_path]
    if manifest.exists() and all(file.exists() for file in outputs):
        if json.loads(manifest.read_text(encoding="utf-8")).get("inputs") == inputs:
            return prefix, str(tokenizer_path)
    manifest.unlink(missing_ok=True)
    parts = (FileSlice(str(file), file.stat().st_size) for file in files)
    sample = chain.from_iterable(texts(part, ReadOptions(errors="skip"), Counter()) for part in parts)
    train_bpe(_first_bytes(sample, TRAIN_BYTES), vocab_size, tokenizer_path.parent)
    summary = prepare(files, prefix, load_tokenizer(tokenizer_path), PrepareOptions(errors="skip", overwrite=True))
    _write_json(
        manifest, {"inputs": inputs, "files": summary.files, "tokens": summary.tokens, "skipped": summary.skipped}
    )
    return prefix, str(tokenizer_path)


def _batches(documents: Iterable[str], counts: Counter[str], hashes: bytearray) -> Iterator[list[str]]:
    """Texts in lists of about BATCH_BYTES; a hash of each goes to `hashes`."""
    batch, size = [], 0
    for text in documents:
        if not text:
            counts["empty"] += 1
            continue
        raw = text.encode()
        hashes += hashlib.blake2b(raw, digest_size=8, person=b"split").digest()
        counts["text_bytes"] += len(raw)
        batch.append(text)
        size += len(raw)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
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
