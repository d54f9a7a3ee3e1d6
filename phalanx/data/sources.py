"""Sources: what a sample number within one corpus means, for token files and for mock data. `mixture` blends them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.data.chats import ChatRoom, LongChats, pack_chats, read_tokens
from phalanx.data.config import DataConfig, SourceConfig, prefixes_and_weights
from phalanx.data.index import Corpus, check_vocab
from phalanx.data.media_notes import MediaNotes
from phalanx.data.mixture import Blend, Weight, hash64, make_key, parse_split, permute
from phalanx.data.packing import Packing, make_packing, read_packing
from phalanx.data.pairs import pack_pairs, pair_starts, prompt_tokens
from phalanx.data.text_groups import holds_texts, pack_texts, text_ends
from phalanx.sequence.patches import PATCHES

PARTS = ("train", "validation", "test")
NO_POSITIONS = np.empty(0, np.int64)


class Source(Protocol):
    """A numbered, endless sequence of samples, each a window of tokens that is a pure function of the sample's number.

    name, tokens: for people. windows: samples before the source starts over (an epoch); None if it never does.
    packings: how the documents of each of its corpora were packed; none: windows are cut out of a stream. corpora: the
    token files that it reads.
    """

    @property
    def name(self) -> str: ...
    @property
    def tokens(self) -> int | None: ...
    @property
    def windows(self) -> int | None: ...
    @property
    def packings(self) -> tuple[Packing, ...]: ...
    @property
    def corpora(self) -> tuple[Corpus, ...]: ...

    def locate(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The windows of these samples."""
        ...

    def window(self, w: int) -> NDArray[Any]:
        """(seq_length + 1,) tokens in any integer dtype; may be a read-only view."""
        ...

    def starts(self, w: int) -> NDArray[np.int64]:
        """Ascending positions in 1..seq_length of window w at which a document starts, or the padding."""
        ...

    def filled(self, w: int) -> int:
        """Number of tokens in window w, of seq_length; the rest is padding."""
        ...

    def unlabelled(self, w: int) -> NDArray[np.int64]:
        """Positions of window w whose next token has no loss although its document goes on: those of prompts."""
        ...

    def origin(self, w: int) -> tuple[Corpus, list[tuple[int, int]]] | None:
        """The corpus that contains window w, and the ranges (first token, tokens) that make it up; None for tokens that
        are in no file."""
        ...


@dataclass(frozen=True)
class FileSource:
    """Tokens [start, stop) of a corpus, cut into windows of seq_length + 1 tokens that begin every seq_length tokens.

    With a `key` each epoch has its own permutation of the windows; without one they come in file order.
    """

    corpus: Corpus
    start: int
    stop: int
    seq_length: int
    vocab_size: int
    key: int | None

    @property
    def name(self) -> str:
        return self.corpus.prefix

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def windows(self) -> int:
        return max(0, self.tokens - 1) // self.seq_length

    @property
    def packings(self) -> tuple[Packing, ...]:
        return ()

    @property
    def corpora(self) -> tuple[Corpus, ...]:
        return (self.corpus,)

    def locate(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return locate(numbers, self.windows, self.key)

    def window(self, w: int) -> NDArray[Any]:
        first = self.start + w * self.seq_length
        return checked_tokens(self.corpus, self.vocab_size, first, first + self.seq_length + 1)

    def starts(self, w: int) -> NDArray[np.int64]:
        first = self.start + w * self.seq_length
        return self.corpus.document_starts(first + 1, first + self.seq_length + 1) - first

    def filled(self, w: int) -> int:
        return self.seq_length

    def unlabelled(self, w: int) -> NDArray[np.int64]:
        return NO_POSITIONS

    def origin(self, w: int) -> tuple[Corpus, list[tuple[int, int]]] | None:
        return self.corpus, [(self.start + w * self.seq_length, self.seq_length)]


def checked_tokens(corpus: Corpus, vocab_size: int, first: int, stop: int) -> NDArray[Any]:
    """Tokens first .. stop - 1 of a corpus. DataError if one is outside the vocabulary."""
    tokens = corpus.tokens(first, stop)
    if len(tokens) and (int(tokens.max()) >= vocab_size or (tokens.dtype.kind == "i" and int(tokens.min()) < 0)):
        check_vocab(corpus, vocab_size, first, stop)  # says which one
    return tokens


@dataclass(frozen=True)
class PackedSource:
    """Documents of a corpus as a packing arranges them: window w is bin w, padded with tokens 0. `key` as in
    FileSource."""

    corpus: Corpus
    packing: Packing
    vocab_size: int
    key: int | None

    @property
    def name(self) -> str:
        return self.corpus.prefix

    @property
    def seq_length(self) -> int:
        return self.packing.capacity

    @property
    def tokens(self) -> int:
        return self.packing.tokens

    @property
    def windows(self) -> int:
        return self.packing.num_bins

    @property
    def packings(self) -> tuple[Packing, ...]:
        return (self.packing,)

    @property
    def corpora(self) -> tuple[Corpus, ...]:
        return (self.corpus,)

    def locate(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return locate(numbers, self.windows, self.key)

    def window(self, w: int) -> NDArray[Any]:
        tokens, at = np.zeros(self.seq_length + 1, np.int64), 0
        for first, count, goes_on in self.packing.pieces(w):
            more = count + goes_on  # the label of the last token is the token that follows the piece in its document
            tokens[at : at + more] = checked_tokens(self.corpus, self.vocab_size, first, first + more)
            at += count
        return tokens

    def starts(self, w: int) -> NDArray[np.int64]:
        pieces = self.packing.pieces(w)
        ends = np.cumsum([count for _, count, _ in pieces])
        return ends[~np.array([goes_on for _, _, goes_on in pieces])]

    def filled(self, w: int) -> int:
        return sum(count for _, count, _ in self.packing.pieces(w))

    def unlabelled(self, w: int) -> NDArray[np.int64]:
        return NO_POSITIONS

    def origin(self, w: int) -> tuple[Corpus, list[tuple[int, int]]] | None:
        return self.corpus, [(first, count) for first, count, _ in self.packing.pieces(w)]


@dataclass(frozen=True)
class PairSource(PackedSource):
    """Pairs of a corpus: a window holds whole pairs, each of two documents, and padding."""

    def starts(self, w: int) -> NDArray[np.int64]:
        return pair_starts(self.corpus, self.packing.pieces(w))

    def unlabelled(self, w: int) -> NDArray[np.int64]:
        return prompt_tokens(self.corpus, self.packing.pieces(w))


@dataclass(frozen=True)
class TextGroupSource(PackedSource):
    """Groups of texts of a corpus: a window holds whole groups, each text a document, and padding."""

    def starts(self, w: int) -> NDArray[np.int64]:
        return text_ends(self.corpus, self.packing.pieces(w))


@dataclass(frozen=True)
class ChatSource(PackedSource):
    """Chats of a corpus: a window holds whole chats, or what of them fits, and padding."""

    long: LongChats

    def unlabelled(self, w: int) -> NDArray[np.int64]:
        return read_tokens(self.corpus, self.packing.pieces(w))


@dataclass(frozen=True)
class JoinedSource:
    """The windows of several corpora as one sequence, with one permutation over all of them (with a single corpus, like
    FileSource)."""

    name: str
    parts: tuple[FileSource | PackedSource, ...]
    key: int | None

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(part.windows for part in self.parts))

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    @property
    def windows(self) -> int:
        return self._ends[-1]

    @property
    def packings(self) -> tuple[Packing, ...]:
        return tuple(packing for part in self.parts for packing in part.packings)

    @property
    def corpora(self) -> tuple[Corpus, ...]:
        return tuple(part.corpus for part in self.parts)

    def locate(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return locate(numbers, self.windows, self.key)

    def window(self, w: int) -> NDArray[Any]:
        part, own = self._part(w)
        return part.window(own)

    def starts(self, w: int) -> NDArray[np.int64]:
        part, own = self._part(w)
        return part.starts(own)

    def filled(self, w: int) -> int:
        part, own = self._part(w)
        return part.filled(own)

    def unlabelled(self, w: int) -> NDArray[np.int64]:
        part, own = self._part(w)
        return part.unlabelled(own)

    def origin(self, w: int) -> tuple[Corpus, list[tuple[int, int]]] | None:
        part, own = self._part(w)
        return part.origin(own)

    def _part(self, w: int) -> tuple[FileSource | PackedSource, int]:
        """The corpus of window w, and the window's number there."""
        i = bisect_right(self._ends, w)
        return self.parts[i], w - (self._ends[i - 1] if i else 0)


@dataclass(frozen=True)
class MockSource:
    """Mock tokens, each sample a function of (key, number) alone.

    A Markov chain that a model can learn: a token is followed by the next one on a fixed cycle through the whole
    vocabulary, except that in 1 of 10 cases any token may follow. Documents are about a quarter of a sequence long.
    """

    seq_length: int
    vocab_size: int
    key: int
    number_from: int = 0  # numbers of the samples start here: validation uses others than training
    packed: bool = (
        False  # of whole documents: where one would begin that does not end in the sequence, there is padding
    )

    @property
    def name(self) -> str:
        return "mock"

    @property
    def tokens(self) -> int | None:
        return None

    @property
    def windows(self) -> int | None:
        return None

    @property
    def packings(self) -> tuple[Packing, ...]:
        return ()

    @property
    def corpora(self) -> tuple[Corpus, ...]:
        return ()

    def locate(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return numbers

    def window(self, w: int) -> NDArray[Any]:
        key, steps = self._key(w), np.arange(self.seq_length + 1)
        bits = hash64(steps.astype(np.uint64), key)
        jumps = (bits % np.uint64(10) == 0) | self._begins(bits)
        jumps[0] = True
        last_jump = np.maximum.accumulate(np.where(jumps, steps, 0))
        target = (hash64(steps.astype(np.uint64), make_key(key, 1)) % np.uint64(self.vocab_size)).astype(np.int64)
        place = (target[last_jump] + steps - last_jump) % self.vocab_size
        return permute(place, self.vocab_size, self.key)

    def starts(self, w: int) -> NDArray[np.int64]:
        bits = hash64(np.arange(self.seq_length + 1).astype(np.uint64), self._key(w))
        return np.flatnonzero(self._begins(bits)[1:]) + 1

    def filled(self, w: int) -> int:
        return int(self.starts(w).max(initial=0)) or self.seq_length if self.packed else self.seq_length

    def unlabelled(self, w: int) -> NDArray[np.int64]:
        return NO_POSITIONS

    def origin(self, w: int) -> tuple[Corpus, list[tuple[int, int]]] | None:
        return None

    def _key(self, w: int) -> int:
        return make_key(self.key, self.number_from + w)

    def _begins(self, bits: NDArray[np.uint64]) -> NDArray[np.bool_]:
        return (bits >> np.uint64(32)) % np.uint64(max(2, self.seq_length // 4)) == 0


def locate(numbers: NDArray[np.int64], windows: int, key: int | None) -> NDArray[np.int64]:
    """The windows of some samples of a source with `windows` windows: each epoch permuted by its own key, or in order
    without a key."""
    epochs, places = np.divmod(numbers, windows)
    if key is None:
        return places
    for epoch in np.unique(epochs):
        mine = epochs == epoch
        places[mine] = permute(places[mine], windows, make_key(key, int(epoch)))
    return places


@dataclass(frozen=True)
class SourceUse:
    """A row of the table of sources: what a run takes from one source."""

    name: str
    share: float
    tokens: int | None
    """Available; None: without end."""
    windows: int | None
    used_samples: int
    used_tokens: int
    epochs: float | None


def use_of_sources(sources: Sequence[Source], blend: Blend, samples: int, seq_length: int) -> list[SourceUse]:
    """What the first `samples` samples take from each source."""
    rows = []
    for source, share, used in zip(sources, blend.shares, blend.counts(samples)):
        epochs = used / source.windows if source.windows else None
        places = sum(packing.num_bins for packing in source.packings) * seq_length
        fill = Fraction(source.tokens or 0, places) if places else 1
        tokens = round(used * seq_length * fill)
        rows.append(
            SourceUse(source.name, share / sum(blend.shares), source.tokens, source.windows, used, tokens, epochs)
        )
    return rows


def check_epochs(rows: Sequence[SourceUse], max_epochs: float | None) -> None:
    """DataError, with the arithmetic, if a source would be read more than `max_epochs` times; None: no limit."""
    for row in rows:
        if max_epochs is not None and row.windows is not None and row.used_samples > max_epochs * row.windows:
            raise DataError(
                f"{row.name}: not enough data: the run takes {row.used_samples} samples from it "
                f"({row.share:.1%} of the blend), "
                f"{row.windows} samples x data.max_epochs {max_epochs:g} = {row.windows * max_epochs:g} are available "
                f"({row.epochs:.2f} epochs); train fewer steps, add data, lower its weight, or raise data.max_epochs"
            )


def cut_at_documents(corpus: Corpus, split: str) -> list[tuple[int, int]]:
    """Token ranges of train, validation and test, cut at the document borders nearest to the proportions of `split`."""
    train, valid, _ = parse_split(split)
    cuts = [
        0,
        *(nearest_border(corpus, round(corpus.num_tokens * f)) for f in (train, train + valid)),
        corpus.num_tokens,
    ]
    return list(zip(cuts, cuts[1:]))


def nearest_border(corpus: Corpus, target: int) -> int:
    """The document start (or end of the corpus) nearest to token `target`; the lower one of two."""
    after = bisect_left(range(corpus.num_documents), target, key=corpus.document_start)
    near = [corpus.document_start(d) for d in (after - 1, after) if 0 <= d <= corpus.num_documents]
    return min(near, key=lambda border: (abs(border - target), border))


# ---- from the config to sources and weights


def open_part(
    config: DataConfig, part: int, *, seq_length: int, seed: int, vocab_size: int, samples: int | None = None
) -> tuple[list[Source], list[Weight]]:
    """Sources and weights of train (0), validation (1) or test (2), from the config's own corpora or mock data.

    Training is shuffled, the others are in file order. `samples`: length of the run, of which numbers of tokens are a
    share. A source too small to have any sample in its validation or test part is left out there. DataError if nothing
    is left, if a source has no training sample, or if numbers of tokens do not fit the sources or the run.
    """
    if config.mock:
        mock = MockSource(seq_length, vocab_size, make_key(seed), part << 48, config.packing != "off")
        return [mock], [1.0]

    def cut(prefix: str, key: int | None) -> FileSource | PackedSource:
        corpus = Corpus(prefix)
        return open_source(config, corpus, *cut_at_documents(corpus, config.split)[part], seq_length, vocab_size, key)

    prefixes, inline = prefixes_and_weights(config.paths or config.pairs or config.chats)
    given = inline or config.weights
    if given and len(given) != len(prefixes):
        raise DataError(f"data.weights has {len(given)} entries, data.paths has {len(prefixes)}")
    keys = [make_key(seed, number) if part == 0 else None for number in range(max(len(prefixes), len(config.sources)))]
    sources: Sequence[FileSource | PackedSource | JoinedSource]
    if config.sources:
        joined = [
            JoinedSource(name, tuple(cut(p, None) for p in c.paths), key)
            for (name, c), key in zip(config.sources.items(), keys)
        ]
        sources = joined
        total = None if samples is None or part else samples * seq_length
        weights = source_weights(list(config.sources.values()), [s.tokens for s in joined], total)
        check_budgets(config, joined, total)
    else:
        sources = [cut(prefix, key) for prefix, key in zip(prefixes, keys)]
        weights = list(given) or [s.tokens for s in sources]
    return _with_samples(
        sources, weights, seq_length, f"the {PARTS[part]} part of data.split={config.split!r}", needs_all=part == 0
    )


def corpus_parts(config: DataConfig, valid: bool) -> list[tuple[Corpus, int, int]]:
    """Each range of tokens from which a run draws samples: the training part of each corpus and, with `valid`, what
    evaluations read."""
    prefixes = [
        *prefixes_and_weights(config.paths or config.pairs or config.chats)[0],
        *(p for source in config.sources.values() for p in source.paths),
    ]
    parts = []
    for corpus in map(Corpus, dict.fromkeys(prefixes)):
        train, validation, _ = cut_at_documents(corpus, config.split)
        parts += [(corpus, *part) for part in ((train, validation) if valid else (train,)) if part[1] > part[0]]
    if valid:
        named = dict.fromkeys(p for given in config.valid.values() for p in prefixes_and_weights(given)[0])
        parts += [(corpus, 0, corpus.num_tokens) for corpus in map(Corpus, named) if corpus.num_tokens]
    return parts


def open_source(
    config: DataConfig, corpus: Corpus, start: int, stop: int, seq_length: int, vocab_size: int, key: int | None
) -> FileSource | PackedSource:
    """Tokens [start, stop) of a corpus, both document borders, packed as data.packing says, or pairs or chats of
    them."""
    if config.chats:
        room = chat_room(config, corpus, seq_length)
        packing, long = pack_chats(corpus, start, stop, room, config.too_long, config.bad_chats)
        return ChatSource(corpus, packing, vocab_size, key, long)
    if config.pairs and holds_texts(corpus):
        return TextGroupSource(corpus, pack_texts(corpus, start, stop, seq_length), vocab_size, key)
    if config.pairs:
        return PairSource(corpus, pack_pairs(corpus, start, stop, seq_length), vocab_size, key)
    if config.packing == "off":
        return FileSource(corpus, start, stop, seq_length, vocab_size, key)
    if config.packing == "offline" and stop > start:
        return PackedSource(corpus, read_packing(corpus, start, stop, seq_length), vocab_size, key)
    return PackedSource(corpus, make_packing(corpus, start, stop, seq_length, decreasing=False), vocab_size, key)


def chat_room(config: DataConfig, corpus: Corpus, seq_length: int) -> ChatRoom:
    """What a sequence of a corpus of chats has room for."""
    notes = MediaNotes(corpus)
    if notes.places is None:
        return ChatRoom(seq_length)
    name, capacity = next(iter(config.room.items()), (PATCHES, 0))  # a model reads media of one kind
    return ChatRoom(seq_length, notes.rows(), capacity, name)


def source_weights(configs: Sequence[SourceConfig], sizes: Sequence[int], total: int | None) -> list[Weight]:
    """Weights of named sources: by `tokens` (out of `total`, the tokens of the run), the remainder by `weight`, or by
    size.

    total None: there is no run from which numbers of tokens are taken (validation), so if any source has one, all count
    by size.
    """
    budgets = [c.tokens for c in configs]
    if not any(budgets):
        return [size if c.weight is None else c.weight for c, size in zip(configs, sizes)]
    if total is None:
        return list(sizes)
    rest = total - sum(b or 0 for b in budgets)
    loose = [
        Fraction(0) if c.tokens else Fraction(repr(c.weight)) if c.weight is not None else Fraction(size)
        for c, size in zip(configs, sizes)
    ]
    return [Fraction(c.tokens) if c.tokens else max(rest, 0) * share / sum(loose) for c, share in zip(configs, loose)]


def check_budgets(config: DataConfig, sources: Sequence[JoinedSource], total: int | None) -> None:
    """DataError, with the arithmetic, if a number of tokens is more than its source has, or they do not fit the run
    of `total` tokens."""
    budgets = {name: c.tokens for name, c in config.sources.items() if c.tokens}
    if total is None or not budgets:
        return
    for source in sources:
        wanted, there = budgets.get(source.name, 0), source.windows * source.parts[0].seq_length
        if wanted > there * (config.max_epochs or 1) and there:
            raise DataError(
                f"data.sources.{source.name}.tokens={wanted:,}: beyond the source: its {PARTS[0]} part has "
                f"{source.windows:,} samples x "
                f"{source.parts[0].seq_length:,} tokens = {there:,} ({wanted / there:.2f} epochs); ask for "
                "fewer tokens, add data, "
                f"or allow repeats with data.max_epochs >= {wanted / there:.2f}"
            )
    asked = sum(budgets.values())
    sums = f"{' + '.join(f'{name} {tokens:,}' for name, tokens in budgets.items())} = {asked:,} tokens"
    if len(budgets) == len(sources) and total > asked:
        raise DataError(
            f"data.sources: not enough data: the run takes {total:,} tokens, the sources give {sums}: "
            f"{total - asked:,} short; "
            f"train fewer steps, raise a number of tokens, or give one source a weight in its place"
        )
    if len(budgets) < len(sources) and total <= asked:
        others = ", ".join(source.name for source in sources if source.name not in budgets)
        raise DataError(f"data.sources: the run takes {total:,} tokens, of which {sums} leave nothing for {others}")


def open_whole(
    config: DataConfig, given: Sequence[str], *, seq_length: int, vocab_size: int
) -> tuple[list[Source], list[Weight]]:
    """Sources and weights of whole corpora in file order, as named validation sets are used; packed if the config
    says so."""
    prefixes, weights = prefixes_and_weights(given)
    corpora = [Corpus(prefix) for prefix in prefixes]
    sources = [open_source(config, corpus, 0, corpus.num_tokens, seq_length, vocab_size, None) for corpus in corpora]
    return _with_samples(
        sources, list(weights) or [source.tokens for source in sources], seq_length, "it", needs_all=False
    )


def _with_samples(
    sources: Sequence[FileSource | PackedSource | JoinedSource],
    weights: Sequence[Weight],
    seq_length: int,
    what: str,
    needs_all: bool,
) -> tuple[list[Source], list[Weight]]:
    kept = [(source, weight) for source, weight in zip(sources, weights) if source.windows]
    too_short = [source for source in sources if not source.windows]
    if not sources:
        raise DataError("no data: data.paths is empty and data.mock is off")
    if too_short and (needs_all or not kept):
        short = too_short[0]
        corpora = [part.corpus for part in short.parts] if isinstance(short, JoinedSource) else [short.corpus]
        holds = (
            f"the file has {corpora[0].num_tokens} tokens in {corpora[0].num_documents} documents, and "
            "is cut between documents"
        )
        raise DataError(
            f"{', '.join(str(corpus.bin_path) for corpus in corpora)}: not enough data: {what} has "
            f"{short.tokens} tokens, "
            f"one sample needs seq_length + 1 = {seq_length + 1} ({holds}). Use a shorter train.seq_length, another "
            f"data.split, files of their own in data.valid, or leave train.eval_interval unset"
        )
    return [source for source, _ in kept], [weight for _, weight in kept]
