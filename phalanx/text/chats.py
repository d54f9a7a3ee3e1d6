"""Files of chats to the token files that data/chats.py reads. What a record is, `chat_records` says; what of it is
trained, `chat_masks`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.data.chats import LINES, BadChats, left_out_text
from phalanx.data.files import replacing
from phalanx.data.index import Corpus, CorpusWriter
from phalanx.data.media_notes import MediaNote, write_notes
from phalanx.data.mixture import make_key, permute
from phalanx.text.chat_masks import ChatEncoder, ChatSample
from phalanx.text.chat_records import BadChat, Chat, Completion, is_media, read_record, without_none
from phalanx.text.media import MediaText
from phalanx.text.readers import Bad, FileSlice, cut, records
from phalanx.text.workers import ordered

SHUFFLE = 0  # seed of the order of chats, so that the validation part at the end is a random sample
PIECE_BYTES = 8 << 20  # of input, in one call of a worker
SHOWN = 5  # bad records named in an error


@dataclass
class ChatSummary:
    """What a preparation read and wrote, stored beside the token files as PREFIX.json.

    documents  samples, of which a chat may be several (chat_masks)
    trained    tokens that are trained
    skipped    bad records left out, by reason
    notes      chats with something to know about them, by what it is
    """

    files: list[str]
    tokenizer: str
    train_on: str
    records: int = 0
    documents: int = 0
    tokens: int = 0
    trained: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    chats: bool = True

    @property
    def lines(self) -> list[str]:
        """For people."""
        share = self.trained / max(1, self.tokens)
        said = [
            f"{self.records:,} chats in {self.documents:,} samples: {self.tokens:,} tokens, {self.trained:,} "
            f"({share:.1%}) trained (task.train_on={self.train_on})"
        ]
        said += [left_out_text(self.skipped)] if self.skipped else []
        return said + [f"note: of {count:,} chats: {what}" for what, count in self.notes.items()]


@dataclass
class _Piece:
    """What a worker made of some records."""

    tokens: NDArray[Any]
    lengths: list[list[int]] = field(default_factory=list)
    """Of the sequences of each document."""
    origins: list[tuple[int, int]] = field(default_factory=list)
    bad: list[tuple[str, str]] = field(default_factory=list)
    """(reason, message) of the first bad records ..."""
    skipped: Counter[str] = field(default_factory=Counter)
    """... and how many there are."""
    notes: Counter[str] = field(default_factory=Counter)
    media: list[list[MediaNote]] = field(default_factory=list)
    """Of each document."""
    size: int = 0


def prepare_chats(
    files: Sequence[Path],
    prefix: Path,
    encoder: ChatEncoder,
    bad_chats: BadChats,
    workers: int = 1,
    progress: Callable[[int, int], object] | None = None,
) -> ChatSummary:
    """Write PREFIX.bin, .idx, .sums, .lines.npy and .json of the chats in files.

    DataError names file, line and turn of the first bad records and says how many there are, or, with
    bad_chats="skip", that no good one is left. progress: called with (done, all) bytes.
    """
    if encoder.template is not None:
        encoder.template.moment = datetime.now()  # one for all of them, if the template writes the date
    summary = ChatSummary([str(file) for file in files], encoder.tokenizer.fingerprint, encoder.train_on)
    total, done = sum(file.stat().st_size for file in files), 0
    numbers = {str(file): number for number, file in enumerate(files)}
    named, skipped, notes = list[tuple[str, str]](), Counter[str](), Counter[str]()
    origins, media = list[tuple[int, int]](), list[list[MediaNote]]()
    ordered_prefix = prefix.with_name(f"{prefix.name}-in-order")
    with CorpusWriter(ordered_prefix, encoder.tokenizer.dtype) as writer:
        for piece in ordered(_encode, (encoder, numbers), cut(files, PIECE_BYTES, lambda before: True), workers):
            at = 0
            for lengths in piece.lengths:
                writer.add_document(piece.tokens[at : at + sum(lengths)], lengths)
                at += sum(lengths)
                summary.trained += sum(lengths[1::2])
            origins += piece.origins
            media += piece.media
            named += piece.bad[: SHOWN - len(named)]
            skipped, notes, done = skipped + piece.skipped, notes + piece.notes, done + piece.size
            if progress is not None:
                progress(done, total)
        count = sum(skipped.values())
        if skipped and bad_chats == "stop":
            more = f"\n... {count:,} bad chats in all" if count > SHOWN else ""
            raise DataError("\n".join(text for _, text in named) + f"{more}\ndata.bad_chats=skip leaves them out")
        if not origins:
            why = f", {count:,} bad ones: {named[0][1]}" if named else ""
            raise DataError(f"{', '.join(summary.files)}: no chats{why}")
    try:
        order = _shuffle(ordered_prefix, prefix, np.array(origins, np.int64))
        write_notes(prefix, [media[document] for document in order])
    finally:
        for suffix in (".bin", ".idx", ".sums"):
            ordered_prefix.with_suffix(suffix).unlink(missing_ok=True)
    summary.records, summary.documents, summary.tokens = len(set(origins)), len(origins), writer.num_tokens
    summary.skipped, summary.notes = dict(skipped), dict(notes)
    with replacing(prefix.with_suffix(".json")) as file:
        file.write(json.dumps(vars(summary), indent=1).encode())
    return summary


def _encode(shared: tuple[ChatEncoder, dict[str, int]], parts: list[FileSlice]) -> _Piece:
    encoder, numbers = shared
    encoder.notes.clear()
    piece, tokens = _Piece(np.empty(0)), list[int]()
    for part in parts:
        is_table = part.path.endswith((".parquet", ".arrow"))
        for line, record in records(part):
            try:
                if isinstance(record, Bad):
                    raise BadChat(record.reason, str(record))
                given = read_record(without_none(record) if is_table else record)
                samples = _with_media(encoder, given, encoder.samples(given), Path(part.path).parent)
            except DataError as error:
                raise DataError(f"{part.path}:{line}: {error}") from None
            except BadChat as error:
                piece.skipped[error.reason] += 1
                where = f"{part.path}:{line}"
                piece.bad += [(error.reason, f"{where}: {error}")] if len(piece.bad) < SHOWN else []
                continue
            for sample, media in samples:
                tokens += sample.ids
                piece.media.append(media)
                piece.lengths.append(sequence_lengths(sample))
                piece.origins.append((numbers[part.path], line))
        piece.size += part.size
    piece.tokens, piece.notes = np.array(tokens, encoder.tokenizer.dtype), Counter(encoder.notes)
    return piece


def _with_media(
    encoder: ChatEncoder, given: Chat | Completion, samples: Sequence[ChatSample], folder: Path
) -> list[tuple[ChatSample, list[MediaNote]]]:
    """The samples of a chat with all tokens of its media, whose files are below the folder."""
    media = encoder.media
    if not isinstance(media, MediaText):
        return [(sample, []) for sample in samples]
    names = given.files if isinstance(given, Chat) else ()
    made = [media.expanded(sample, names, folder) for sample in samples]
    if len(made[-1][1]) < len(names) and encoder.train_on != "last_answer":
        asked = [message for message in given.messages[: given.answers[-1]] if "parts" in message]  # type: ignore[union-attr]
        wanted = sum(is_media(part) for message in asked for part in message["parts"])
        if len(made[-1][1]) < wanted:
            plural = media.reader.plural
            rule = f"the template writes {len(made[-1][1])} placeholders for {wanted} {plural} before the last answer"
            raise BadChat(plural, rule)
    return made


def sequence_lengths(sample: ChatSample) -> list[int]:
    """Tokens read and trained, in turns."""
    lengths, at = list[int](), 0
    for first, stop in sample.spans:
        lengths += [first - at, stop - first]
        at = stop
    return lengths


def _shuffle(source: Path, target: Path, origins: NDArray[np.int64]) -> list[int]:
    """Copy token files with their chats in another order, which is returned; the samples of a chat stay together."""
    corpus = Corpus(source)
    firsts = np.flatnonzero(np.any(np.diff(origins, axis=0, prepend=-1) != 0, axis=1))
    stops = np.append(firsts[1:], len(origins))
    order = permute(np.arange(len(firsts)), len(firsts), make_key(SHUFFLE))
    documents = np.concatenate([np.arange(firsts[chat], stops[chat]) for chat in order])
    with CorpusWriter(target, corpus.dtype) as writer:
        for d in documents.tolist():
            tokens = corpus.tokens(corpus.document_start(d), corpus.document_start(d + 1))
            writer.add_document(tokens, corpus.sequence_lengths(d).tolist())
    with replacing(target.with_name(target.name + LINES)) as file:
        np.save(file, origins[documents])
    found: list[int] = documents.tolist()
    return found
