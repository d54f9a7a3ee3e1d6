"""Training that starts from text: `data.text`, `data.pairs` or `data.chats` is turned into token files in a cache,
once; `prepare`, `pairs` and `chats` do the encoding."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.base.errors import DataError
from phalanx.base.file_lock import FileLock
from phalanx.data.chats import chat_files, is_chat_file
from phalanx.data.checksums import SUFFIX as SUMS
from phalanx.data.config import DataConfig, SourceConfig, prefixes_and_weights
from phalanx.data.files import replacing
from phalanx.data.pairs import pair_files
from phalanx.sequence.media import MediaSpec
from phalanx.text.pairs import prepare_pairs
from phalanx.text.prepare import PrepareOptions, prepare, read_manifest
from phalanx.text.readers import Hints, find_files
from phalanx.text.tokenizer import load_tokenizer
from phalanx.text.tokenizer_base import Tokenizer, tokens_before

if TYPE_CHECKING:
    from phalanx.text.chat_masks import TrainOn

SHUFFLE = 0  # seed for the order of documents, so that the validation part at the end is a random sample
NAME = "text"
PAIRS = "pairs"
CHATS = "chats"
CHATS_VERSION = 2  # of what is made of chats: with another one they are prepared again
LITTLE = 64 << 20  # bytes
MAX_WORKERS = 8
HINTS = Hints("data.json_keys={}", "data.text_errors={}")
SUFFIXES = (".json", ".idx", ".bin")  # and checksums, but files of an older version without them remain usable


def use_text(
    config: DataConfig,
    run_folder: str | os.PathLike[str],
    vocab_size: int,
    *,
    train_on: TrainOn | ChatUse | None = None,
    say: Callable[[str], object] = print,
    progress: Callable[[int, int], None] | None = None,
) -> DataConfig:
    """The config with a source in place of `text`, or of the files of `pairs` or `chats`: token files in the cache,
    created now unless they exist. train_on: what of chats is trained (Objective.train_on), and what else is to be known
    of how they are used.

    The cache (data.cache, or `data` in the run's folder) is keyed by the contents of the texts, the tokenizer and how
    they are read. One of the processes that share its file system prepares, under a lock; the others wait, and `say`
    reports it. Call it before any process group exists. vocab_size: of the model. DataError if the tokenizer has more
    ids, or as raised by `prepare`.
    """
    if pair_files(config.pairs):
        return _use_pairs(config, run_folder, vocab_size, say)
    if config.chats:
        if sets := chat_sets(config):
            chats = _Chats(config, train_on)
            _check_size(config, chats.encoder.tokenizer, vocab_size)
            config = _use_chats(config, Path(run_folder), sets, chats, say, progress)
        check_train_on(config, chats_used(train_on).train_on)
        return config
    if not config.text:
        return config
    tokenizer = load_tokenizer(str(config.tokenizer))
    _check_size(config, tokenizer, vocab_size)
    cache = cache_folder(config, run_folder)
    cache.mkdir(parents=True, exist_ok=True)
    with _lock(cache, say):
        files = list(find_files(config.text))
        prefix = cache / _key(config, files, tokenizer, _hashes(cache, files)) / NAME
        if not _complete(prefix):
            say(f"prepare {', '.join(config.text)} into {prefix}")
            prefix.parent.mkdir(exist_ok=True)
            for suffix in (*SUFFIXES, SUMS):
                prefix.with_suffix(suffix).unlink(missing_ok=True)  # left by a start that was killed between the files
            how = PrepareOptions(
                key=config.json_keys,
                errors=config.text_errors,
                shuffle=SHUFFLE,
                workers=_workers(files),
                hints=HINTS,
            )
            made = prepare(files, prefix, tokenizer, how, progress)
            say(
                f"prepared {made.files} files: {made.documents} documents, {made.tokens} tokens, "
                f"{made.skipped} skipped, {made.replaced} mended"
            )
    return _with_source(config, prefix)


def _check_size(config: DataConfig, tokenizer: Tokenizer, vocab_size: int) -> None:
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"data.tokenizer {config.tokenizer} has {tokenizer.vocab_size} ids, the model has "
            f"model.vocab_size={vocab_size}"
        )


def find_text(
    config: DataConfig,
    run_folder: str | os.PathLike[str],
    train_on: TrainOn | ChatUse | None = None,
) -> DataConfig | None:
    """As `use_text`, but creates and writes nothing: None if the token files do not exist yet."""
    if chat_sets(config):
        return _find_chats(config, Path(run_folder), _Chats(config, train_on))
    names = pair_files(config.pairs)
    if not config.text and not names:
        return config
    cache, files = cache_folder(config, run_folder), list(find_files(config.text)) or [Path(name) for name in names]
    known = _known(cache)
    if any(_stat(file) != known.get(str(file.absolute()), [None])[:-1] for file in files):
        return None
    hashes = [str(known[str(f.absolute())][-1]) for f in files]
    if names:
        prefix = cache / _pairs_key(config, hashes) / PAIRS
        return _with_pairs(config, prefix) if _complete(prefix) else None
    prefix = cache / _key(config, files, load_tokenizer(str(config.tokenizer)), hashes) / NAME
    return _with_source(config, prefix) if _complete(prefix) else None


def _use_pairs(
    config: DataConfig, run_folder: str | os.PathLike[str], vocab_size: int, say: Callable[[str], object]
) -> DataConfig:
    """The config with prepared token files in place of the .jsonl files of data.pairs."""
    cache = cache_folder(config, run_folder)
    cache.mkdir(parents=True, exist_ok=True)
    with _lock(cache, say):
        files = [Path(name) for name in pair_files(config.pairs)]
        prefix = cache / _pairs_key(config, _hashes(cache, files)) / PAIRS
        if not _complete(prefix):
            say(f"prepare {', '.join(map(str, files))} into {prefix}")
            prefix.parent.mkdir(exist_ok=True)
            count = prepare_pairs(files, prefix, config.tokenizer, vocab_size)
            say(f"prepared {len(files)} files: {count} pairs")
    return _with_pairs(config, prefix)


def _with_pairs(config: DataConfig, prefix: Path) -> DataConfig:
    names = pair_files(config.pairs)
    others = tuple(path for path in config.pairs if path not in names)
    return replace(config, cache=None, pairs=(*others, str(prefix)))


def _pairs_key(config: DataConfig, hashes: Sequence[str]) -> str:
    tokenizer = None if config.tokenizer is None else load_tokenizer(config.tokenizer)
    deciding: list[Any] = [PAIRS, hashes, None if tokenizer is None else tokenizer.fingerprint, *_before(tokenizer)]
    return hashlib.sha256(json.dumps(deciding).encode()).hexdigest()[:16]


def _before(tokenizer: Tokenizer | None) -> list[list[int]]:
    """The tokens that a tokenizer puts before a text, which its fingerprint does not tell; nothing if it puts none."""
    before = [] if tokenizer is None else tokens_before(tokenizer)
    return [before] if before else []


# ---- chats


class ChatUse(NamedTuple):
    """How chats are used: what of them is trained (Objective.train_on; None: the objective takes none), and what the
    model reads of images or recordings in them (None: nothing)."""

    train_on: TrainOn | None
    media: MediaSpec | None = None


def chats_used(given: TrainOn | ChatUse | None) -> ChatUse:
    return given if isinstance(given, ChatUse) else ChatUse(given)


class _Chats:
    """How the chats of a config are prepared."""

    def __init__(self, config: DataConfig, use: TrainOn | ChatUse | None):
        train_on, media = chats_used(use)
        if train_on is None:
            raise DataError("data.chats needs an objective that trains on chats, such as task.name=sft")
        from phalanx.text.chat_masks import ChatEncoder  # jinja2: start-up time of runs without chats
        from phalanx.text.chat_template import template_for
        from phalanx.text.media import MediaText

        given = str(config.tokenizer)
        tokenizer = load_tokenizer(given)
        template = template_for(tokenizer, given, config.template)
        written = None if media is None else MediaText.of(media, config.processor, tokenizer)
        self.encoder = ChatEncoder(tokenizer, template, train_on, written)
        deciding = [CHATS_VERSION, tokenizer.fingerprint, template and template.fingerprint, train_on]
        deciding += _before(tokenizer)
        self._deciding = [*deciding, config.bad_chats, *([] if written is None else [written.deciding])]

    def key(self, files: Sequence[Path], hashes: Sequence[str]) -> str:
        """Names are part of it, because messages say from which file a chat comes."""
        contents = [(str(file), sha256) for file, sha256 in zip(files, hashes)]
        return hashlib.sha256(json.dumps([CHATS, contents, self._deciding]).encode()).hexdigest()[:16]


def chat_sets(config: DataConfig) -> list[tuple[str, ...]]:
    """Files of chats that are prepared together, as they are given: all of data.chats, or each that has a weight, and
    those of each set of data.valid."""
    if not config.chats:
        return []
    given = [config.chats, *config.valid.values()]
    sets = list[tuple[str, ...]]()
    for paths in given:
        prefixes, weights = prefixes_and_weights(paths)
        sets += [(path,) for path in chat_files(prefixes)] if weights else [chat_files(prefixes)]
    return [one for one in dict.fromkeys(sets) if one]


def _use_chats(
    config: DataConfig,
    run_folder: Path,
    sets: Sequence[tuple[str, ...]],
    chats: _Chats,
    say: Callable[[str], object],
    progress: Callable[[int, int], None] | None,
) -> DataConfig:
    from phalanx.text.chats import prepare_chats  # jinja2: start-up time of runs without chats

    cache = cache_folder(config, run_folder)
    cache.mkdir(parents=True, exist_ok=True)
    made = dict[tuple[str, ...], str]()
    with _lock(cache, say):
        for names in sets:
            files = list(find_files(names))
            prefix = cache / chats.key(files, _hashes(cache, files)) / CHATS
            if not _complete(prefix):
                say(f"prepare {', '.join(names)} into {prefix}")
                prefix.parent.mkdir(exist_ok=True)
                summary = prepare_chats(files, prefix, chats.encoder, config.bad_chats, _workers(files), progress)
                for line in summary.lines:
                    say(line)
            made[names] = str(prefix)
    return _with_chats(config, made)


def _find_chats(config: DataConfig, run_folder: Path, chats: _Chats) -> DataConfig | None:
    cache = cache_folder(config, run_folder)
    known, made = _known(cache), dict[tuple[str, ...], str]()
    for names in chat_sets(config):
        files = list(find_files(names))
        if any(_stat(file) != known.get(str(file.absolute()), [None])[:-1] for file in files):
            return None
        prefix = cache / chats.key(files, [str(known[str(file.absolute())][-1]) for file in files]) / CHATS
        if not _complete(prefix):
            return None
        made[names] = str(prefix)
    return _with_chats(config, made)


def check_train_on(config: DataConfig, train_on: TrainOn | None) -> None:
    """DataError for token files of chats in which something else is trained."""
    for prefix in prefixes_and_weights(config.chats)[0]:
        found = read_manifest(prefix).get("train_on")
        if found is not None and found != train_on:
            raise DataError(
                f"{prefix}: prepared with task.train_on={found}, and the run has {train_on}: name the files of chats "
                "in data.chats, and they are prepared again"
            )


def _with_chats(config: DataConfig, made: Mapping[tuple[str, ...], str]) -> DataConfig:
    """Prepared token files, by the files that they were made of, in the place of these."""

    def ready(paths: tuple[str, ...]) -> tuple[str, ...]:
        prefixes, weights = prefixes_and_weights(paths)
        if weights:
            return tuple(made[path,] if is_chat_file(path) else path for path in paths)
        files = chat_files(prefixes)
        others = tuple(path for path in prefixes if path not in files)
        return (*others, made[files]) if files else others

    valid = {name: ready(paths) for name, paths in config.valid.items()}
    return replace(config, cache=None, chats=ready(config.chats), valid=valid)


def cache_folder(config: DataConfig, run_folder: str | os.PathLike[str]) -> Path:
    return Path(config.cache) if config.cache else Path(run_folder) / "data"


def _with_source(config: DataConfig, prefix: Path) -> DataConfig:
    unused: Any = {"text": (), "json_keys": DataConfig.json_keys, "text_errors": DataConfig.text_errors, "cache": None}
    return replace(config, **unused, sources={NAME: SourceConfig(paths=(str(prefix),))})


def _complete(prefix: Path) -> bool:
    return all(prefix.with_suffix(suffix).exists() for suffix in SUFFIXES)


def _key(config: DataConfig, files: Sequence[Path], tokenizer: Tokenizer, hashes: Sequence[str]) -> str:
    """The key of a cache entry. Names are part of it only if they determine how a file is read and in which order."""
    contents = [(file.name, sha256) for file, sha256 in zip(files, hashes)]
    return hashlib.sha256(
        json.dumps([contents, tokenizer.fingerprint, config.json_keys, config.text_errors, SHUFFLE]).encode()
    ).hexdigest()[:16]


def _hashes(cache: Path, files: Sequence[Path]) -> list[str]:
    """SHA-256 of each file; for files that have not changed since, from the record of the last time."""
    known = _known(cache)
    now = {}
    for file in files:
        name, stat = str(file.absolute()), _stat(file)
        before = known.get(name)
        now[name] = before if before and before[:-1] == stat else [*stat, _sha256(file)]
    if any(known.get(name) != entry for name, entry in now.items()):
        with replacing(cache / "files.json") as note:
            note.write(json.dumps({**known, **now}, indent=1).encode())
    return [str(now[str(file.absolute())][-1]) for file in files]


def _known(cache: Path) -> dict[str, list[int | str]]:
    note = cache / "files.json"
    return json.loads(note.read_text(encoding="utf-8")) if note.exists() else {}


def _stat(file: Path) -> list[int | str]:
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _sha256(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _workers(files: Sequence[Path]) -> int:
    """Number of processes: each costs a second to start, so little text is encoded in this process."""
    return 1 if sum(file.stat().st_size for file in files) < LITTLE else min(os.cpu_count() or 1, MAX_WORKERS)


@contextmanager
def _lock(cache: Path, say: Callable[[str], object]) -> Iterator[None]:
    """Held by one process at a time, and released when that process dies."""
    lock = FileLock(cache / "lock", f"process {os.getpid()} on {socket.gethostname()}")
    try:
        if not lock.acquire():
            say(f"wait for {lock.holder() or 'another process'}, which prepares data in {cache}")
            lock.wait()
        yield
    finally:
        lock.close()
