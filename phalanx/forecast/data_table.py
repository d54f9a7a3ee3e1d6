"""A run's data as text: the table of sources, and which tokens make up a step, from the same calls as training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.checkpoint.keep import find, list_checkpoints, problem_of
from phalanx.checkpoint.manifest import read_manifest
from phalanx.config.run import Run, checkpoints_of
from phalanx.data.chats import bad_text
from phalanx.data.check import check_files
from phalanx.data.config import DataConfig
from phalanx.data.index import Corpus
from phalanx.data.loader import Loader, Place, micro_batch_samples, train_loader, valid_loaders
from phalanx.data.sources import ChatSource, Source
from phalanx.nn.objective import make_objective
from phalanx.planning.order import eval_samples, global_batch_at, total_samples, work_of
from phalanx.planning.reading import reading_of, window_length
from phalanx.sequence.batch import TEXT, Batch
from phalanx.sequence.shard import SequenceShard
from phalanx.text.cache import ChatUse, find_text
from phalanx.text.tokenizer_base import Tokenizer

COUNTED = 100  # sequences in which lost text is counted
SNIPPET = 24  # tokens shown of each end of a sequence


def open_loaders(run: Run, data: DataConfig) -> tuple[Loader, dict[str, Loader]]:
    """The loaders of training and of each validation set. `data`: the run's, with its text made into token files."""
    how: Any = {
        "seq_length": run.train.seq_length,
        "seed": run.train.seed,
        "vocab_size": run.model.vocab_size,
        "reading": reading_of(run),
    }
    loader = train_loader(data, samples=total_samples(run), **how)
    return loader, valid_loaders(data, **how) if run.train.eval_interval else {}


# ---- the table of sources


def data_table(run: Run, loader: Loader, valid: dict[str, Loader]) -> str:
    """Tokens available and used, epochs and weight of each source of the run, and the same for each validation set per
    evaluation. A last column shows which are read from files without checksums, if any."""
    rows: list[tuple[str, ...]] = [("source", "tokens", "used", "epochs", "weight")]
    unchecked = [_unchecked([source]) for source in loader.sources] + [
        _unchecked(other.sources) for other in valid.values()
    ]
    for use in loader.use(total_samples(run)):
        rows.append((use.name, _number(use.tokens), f"{use.used_tokens:,}", _epochs(use.epochs), f"{use.share:.4g}"))
    for name, other in valid.items():
        samples = eval_samples(run, other)
        tokens = [source.tokens for source in other.sources]
        there = None if None in tokens else sum(t for t in tokens if t is not None)
        epochs = samples / other.num_samples if other.num_samples else None
        rows.append((f"validation {name}", _number(there), f"{samples * run.train.seq_length:,}", _epochs(epochs), ""))
    if any(unchecked):
        rows = [(*row, mark) for row, mark in zip(rows, ("checksums", *unchecked))]
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    lines = (
        "  ".join(cell.rjust(w) if c else cell.ljust(w) for c, (cell, w) in enumerate(zip(row, widths))) for row in rows
    )
    lost = lost_lines(run, loader, valid)
    return "\n".join([*(line.rstrip() for line in lines), *packing_lines(loader, valid), *lost])


def packing_lines(loader: Loader, valid: dict[str, Loader]) -> list[str]:
    """How full the sequences of each packed corpus are, and what became of bad chats and of those that are longer than
    a sequence."""
    named = [(source.name, source) for source in loader.sources]
    named += [(f"validation {name}", source) for name, other in valid.items() for source in other.sources]
    lines = [f"packed {name}: {packing.text}" for name, source in named for packing in source.packings]
    chats = [(name, source) for name, source in named if isinstance(source, ChatSource)]
    said = [(name, t) for name, source in chats for t in (bad_text(source.corpus), source.long.text(loader.seq_length))]
    return lines + [f"chats {name}: {text}" for name, text in said if text]


def lost_lines(run: Run, loader: Loader, valid: dict[str, Loader]) -> list[str]:
    """How much of the documents the task finds no room for, counted in the first samples of training and of each
    validation set."""
    each = [("training", loader, total_samples(run))]
    each += [(f"validation {name}", other, eval_samples(run, other)) for name, other in valid.items()]
    lines = list[str]()
    for name, source, samples in each:
        count = min(COUNTED, samples)
        lost = source.lost(range(count))
        if lost is not None and lost.lost_tokens:
            share = 100 * lost.lost_tokens / lost.tokens
            lines.append(
                f"task.name={run.task.name} {name}: {lost.cut:,} of {lost.documents:,} documents are cut and "
                f"{lost.left_out:,} left out where sequences end, {share:.2g} % of their tokens (counted in "
                f"{count:,} sequences)"
            )
    return lines


def plan_data(run: Run) -> str:
    """The table for `plan`, or why there is none, since files may be on another machine. DataError if they are here and
    unusable."""
    missing = check_files(run.data)
    if missing:
        return f"not here: {', '.join(str(p.value) for p in missing)}"
    data = find_text(run.data, run.dir, ChatUse(make_objective(run.task).train_on, run.model.media))
    return (
        "the data is not prepared yet; `phalanx train` does it first"
        if data is None
        else data_table(run, *open_loaders(run, data))
    )


def _unchecked(sources: Sequence[Source]) -> str:
    return "" if all(corpus.is_checked for source in sources for corpus in source.corpora) else "unchecked"


def _number(value: int | None) -> str:
    return "endless" if value is None else f"{value:,}"


def _epochs(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


# ---- which tokens make a step


@dataclass(frozen=True)
class Passage:
    """Consecutive tokens of one document inside a sequence: sequence tokens at..at+count-1 are document tokens
    offset..offset+count-1."""

    document: int
    offset: int
    length: int
    """Of the document."""
    at: int
    count: int


@dataclass(frozen=True)
class SequenceRow:
    """One sequence of a micro-batch and where it comes from. `file` is None for mock tokens; `first` is a token number
    in the file; in a packed sequence, that of its first document. `filled`: positions that are not padding."""

    place: Place
    source: str
    epoch: int
    file: str | None
    first: int | None
    passages: tuple[Passage, ...]
    filled: int


@dataclass(frozen=True)
class MicroBatch:
    rank: int
    """Data-parallel rank."""
    number: int
    batch: Batch
    rows: tuple[SequenceRow, ...]


@dataclass(frozen=True)
class StepData:
    """The tokens of one step. `after`: how its position in the data is known, from the config or a checkpoint."""

    step: int
    consumed: int
    global_batch: int
    after: str
    micro_batches: tuple[MicroBatch, ...]


def step_data(run: Run, loader: Loader, step: int, dp: int, ranks: Sequence[int] | None = None) -> StepData:
    """What step `step` (counted from 1) trains on, on each of `ranks` of `dp` data-parallel ranks (default: all)."""
    consumed, after = consumed_before(run, step)
    size = global_batch_at(run, consumed)
    made = []
    for rank in range(dp) if ranks is None else ranks:
        for number, samples in enumerate(
            micro_batch_samples(consumed, size, run.train.micro_batch, dp, rank, work_of(run, loader))
        ):
            places = loader.locate(samples)
            made.append(MicroBatch(rank, number, loader.read(places), tuple(row_of(loader, place) for place in places)))
    return StepData(step, consumed, size, after, tuple(made))


def consumed_before(run: Run, step: int) -> tuple[int, str]:
    """Samples consumed before a step: from the run's newest earlier checkpoint, or the one that it loads, or the
    config's first step."""
    found = [p for p in list_checkpoints(checkpoints_of(run)) if problem_of(p) is None]
    loaded = [find(run.checkpoint.load)] if run.checkpoint.load else []
    for path in (*reversed(found), *loaded):
        manifest = read_manifest(path)
        if manifest.step < step:
            return total_samples(run, manifest.consumed_samples, manifest.step, stop=step - 1), f"checkpoint {path}"
    return total_samples(run, stop=step - 1), "the config"


def row_of(loader: Loader, place: Place) -> SequenceRow:
    source = loader.sources[place.source]
    epoch = place.number // source.windows if source.windows else 0
    origin, filled = source.origin(place.window), source.filled(place.window)
    if origin is None:
        return SequenceRow(place, source.name, epoch, None, None, (), filled)
    corpus, runs = origin
    passages, at = list[Passage](), 0
    for first, count in runs:
        passages += [replace(p, at=at + p.at) for p in passages_of(corpus, first, count)]
        at += count
    return SequenceRow(place, source.name, epoch, corpus.prefix, runs[0][0], tuple(passages), filled)


def passages_of(corpus: Corpus, first: int, count: int) -> tuple[Passage, ...]:
    """The documents to which tokens first..first+count-1 of a corpus belong, without empty ones."""
    passages, at = [], first
    while at < first + count:
        document = corpus.document_at(at)
        start = corpus.document_start(document)
        stop = corpus.document_start(document + 1)
        here = min(stop, first + count) - at
        passages.append(Passage(document, at - start, stop - start, at - first, here))
        at += here
    return tuple(passages)


def step_text(run: Run, data: StepData, dp: int, tokenizer: Tokenizer | None) -> str:
    """A page for people. Snippets are decoded with `tokenizer`; without one they are token ids."""
    length, window = run.train.seq_length, window_length(run)
    lines = [
        f"step {data.step}: samples {data.consumed:,}..{data.consumed + data.global_batch - 1:,} (counted "
        f"from {data.after}), "
        f"{data.global_batch} sequences of {length} tokens, data-parallel size {dp}"
    ]
    for micro in data.micro_batches:
        lines.append(f"\ndata-parallel rank {micro.rank}, micro-batch {micro.number}")
        if run.layout.cp > 1:
            part = SequenceShard(0, run.layout.cp, run.layout.cp_degree == "dynamic", run.layout.cp_ulysses)
            pairs = pairs_read(micro.batch, part, run.model.both_ways)
            most = max(pairs) * len(pairs) / sum(pairs)
            lines.append(
                f"  context-parallel ranks read {', '.join(f'{n:,}' for n in pairs)} keys, the most "
                f"{most:.2f} of the mean"
            )
        ids = micro.batch.tokens.view(-1, length).tolist()
        for number, (row, tokens) in enumerate(zip(micro.rows, ids)):
            where = where_from(row, window)
            lines.append(
                f"  sample {row.place.sample:,}: source {row.source}, its sample {row.place.number:,}, epoch "
                f"{row.epoch}, {where}"
            )
            lines += images_text(micro.batch, row.place.sample)
            if any(stream.units is None for stream in micro.batch.beside.values()):
                lines += streams_text(micro.batch, number, tokenizer)
                continue
            lines += [
                f"    {_passage_text(p)}: {_snippet(tokens[p.at : p.at + p.count], tokenizer)}" for p in row.passages
            ]
            if not row.passages:
                lines.append(f"    {_snippet(tokens, tokenizer)}")
    return "\n".join(lines)


def images_text(batch: Batch, sample: int) -> list[str]:
    """How many images and patches a sample has."""
    found = []
    for name, stream in batch.beside.items():
        if stream.units is not None and stream.real is not None:
            here = (stream.samples == sample) & (stream.real > 0)
            count = len(stream.documents[here].unique()) if stream.documents is not None else 0
            found.append(f"    {count} images, {int(here.sum()):,} {name}")
    return found


def streams_text(batch: Batch, number: int, tokenizer: Tokenizer | None) -> list[str]:
    """The documents of a sequence whose task made several texts of each: what each stream has of it."""
    rows: dict[str, dict[int, list[int]]] = {}
    streams = {name: stream for name, stream in batch.beside.items() if stream.units is None}
    for name, stream in {**streams, TEXT: batch}.items():
        parts = [x.view(stream.num_sequences, -1)[number].tolist() for x in (stream.tokens, stream.runs[0])]
        real = (
            [1] * len(parts[0]) if stream.real is None else stream.real.view(stream.num_sequences, -1)[number].tolist()
        )
        for token, document, kept in zip(*parts, real):
            if kept:
                rows.setdefault(name, {}).setdefault(document, []).append(token)
    documents = sorted({document for found in rows.values() for document in found})
    return [
        f"    {name} of document {at}, {len(found[document]):,} tokens: {_snippet(found[document], tokenizer)}"
        for at, document in enumerate(documents)
        for name, found in rows.items()
        if document in found
    ]


def where_from(row: SequenceRow, length: int) -> str:
    padding = f", {length - row.filled:,} of padding" if row.filled < length else ""
    if row.first is None:
        return f"made up{padding}"
    if row.passages[-1].at + row.passages[-1].count < length or any(
        p.offset + p.count < p.length for p in row.passages[:-1]
    ):
        return f"{row.file} {len(row.passages)} documents{padding}"
    return f"{row.file} tokens {row.first:,}..{row.first + length - 1:,}"


def pairs_read(batch: Batch, like: SequenceShard, both_ways: bool = False) -> list[int]:
    """How many keys the queries of each shard read, in a batch of whole sequences sharded like `like`, summed over
    queries: those before it in the document, and its own; both ways, all of its document."""
    parts = [batch.cut(replace(like, index=i)) for i in range(like.count)]
    if not both_ways:
        return [int((part.positions + 1).sum()) for part in parts]
    number, _ = batch.runs
    return [int(number.bincount()[part.runs[0]].sum()) for part in parts]


def _passage_text(p: Passage) -> str:
    whole = ", the whole document" if p.count == p.length else ""
    return (
        f"[{p.at}..{p.at + p.count - 1}] document {p.document:,} from its token {p.offset:,}, {p.count:,} "
        f"of {p.length:,} tokens{whole}"
    )


def _snippet(ids: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """The first and the last tokens of a passage."""

    def show(part: Sequence[int]) -> str:
        return repr(tokenizer.decode(part)) if tokenizer else " ".join(map(str, part))

    return show(ids) if len(ids) <= 2 * SNIPPET else f"{show(ids[:SNIPPET])} ... {show(ids[-SNIPPET:])}"
