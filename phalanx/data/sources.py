"""Sources: what a sample number within one corpus means, for token files and for made-up tokens; blending them is left to `mixture`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.base.errors import DataError
from phalanx.data.config import DataConfig
from phalanx.data.index import Corpus, check_vocab
from phalanx.data.mixture import Blend, hash64, make_key, parse_split, permute

PARTS = ("train", "validation", "test")


class Source(Protocol):
    """A numbered, endless row of samples, each a pure function of its number.

    name, tokens: for people. windows: samples before the source starts over (an epoch); None if it never does.
    """

    @property
    def name(self) -> str: ...
    @property
    def tokens(self) -> int | None: ...
    @property
    def windows(self) -> int | None: ...

    def sample(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(tokens, (seq_length + 1,) int64; ascending places in 1..seq_length where a document starts)."""
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

    def sample(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        epoch, window = divmod(number, self.windows)
        if self.key is not None:
            window = int(permute(np.array([window]), self.windows, make_key(self.key, epoch))[0])
        first = self.start + window * self.seq_length
        stop = first + self.seq_length + 1
        tokens = self.corpus.tokens(first, stop).astype(np.int64)
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size:
            check_vocab(self.corpus, self.vocab_size, first, stop)  # says which one
        return tokens, self.corpus.document_starts(first + 1, stop) - first


@dataclass(frozen=True)
class MockSource:
    """Made-up tokens, each sample a function of (key, number) alone.

    A Markov chain that a model can learn: a token is followed by the next one on a fixed cycle through the whole vocabulary,
    except that now and then (1 in 10) any token may follow. Documents are about a quarter of a sequence long.
    """

    seq_length: int
    vocab_size: int
    key: int
    number_from: int = 0  # numbers of the samples start here: validation uses others than training

    @property
    def name(self) -> str:
        return "mock"

    @property
    def tokens(self) -> int | None:
        return None

    @property
    def windows(self) -> int | None:
        return None

    def sample(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        key = make_key(self.key, self.number_from + number)
        steps = np.arange(self.seq_length + 1)
        bits = hash64(steps.astype(np.uint64), key)
        starts_document = (bits >> np.uint64(32)) % np.uint64(max(2, self.seq_length // 4)) == 0
        jumps = (bits % np.uint64(10) == 0) | starts_document
        jumps[0] = True
        last_jump = np.maximum.accumulate(np.where(jumps, steps, 0))
        landing = (hash64(steps.astype(np.uint64), make_key(key, 1)) % np.uint64(self.vocab_size)).astype(np.int64)
        place = (landing[last_jump] + steps - last_jump) % self.vocab_size
        return permute(place, self.vocab_size, self.key), np.flatnonzero(starts_document[1:]) + 1


@dataclass(frozen=True)
class SourceUse:
    """A row of the table of sources: what a run of so many samples takes from one source."""

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
        rows.append(SourceUse(source.name, share / sum(blend.shares), source.tokens, source.windows, used, used * seq_length, epochs))
    return rows


def check_epochs(rows: Sequence[SourceUse], max_epochs: float | None) -> None:
    """DataError, with the arithmetic, if a source would be read more than `max_epochs` times. No limit: never."""
    for row in rows:
        if max_epochs is not None and row.windows is not None and row.used_samples > max_epochs * row.windows:
            raise DataError(
                f"{row.name}: not enough data: the run takes {row.used_samples} samples from it ({row.share:.1%} of the blend), "
                f"{row.windows} samples x data.max_epochs {max_epochs:g} = {row.windows * max_epochs:g} are available "
                f"({row.epochs:.2f} epochs); train fewer steps, add data, lower its weight, or raise data.max_epochs"
            )


def cut_at_documents(corpus: Corpus, split: str) -> list[tuple[int, int]]:
    """Token ranges of train, validation and test: cut at the document borders nearest to the proportions of `split`."""
    train, valid, _ = parse_split(split)
    cuts = [0, *(nearest_border(corpus, round(corpus.num_tokens * f)) for f in (train, train + valid)), corpus.num_tokens]
    return list(zip(cuts, cuts[1:]))


def nearest_border(corpus: Corpus, target: int) -> int:
    """The document start (or end of the corpus) nearest to token `target`; the lower one of two."""
    after = bisect_left(range(corpus.num_documents), target, key=corpus.document_start)
    near = [corpus.document_start(d) for d in (after - 1, after) if 0 <= d <= corpus.num_documents]
    return min(near, key=lambda border: (abs(border - target), border))


def open_part(config: DataConfig, part: int, *, seq_length: int, seed: int, vocab_size: int) -> tuple[list[Source], list[float]]:
    """Sources and weights of train (0), validation (1) or test (2) of the config's own corpora, or of the made-up one.

    Training is shuffled, the others are in file order. A corpus too small to have any sample in its validation or test part
    is left out there. DataError if nothing is left, or if a corpus has no training sample.
    """
    if config.mock:
        mock = MockSource(seq_length, vocab_size, make_key(seed), number_from=part << 48)
        return [mock], [1.0]
    if config.weights and len(config.weights) != len(config.paths):
        raise DataError(f"data.weights has {len(config.weights)} entries, data.paths has {len(config.paths)}")
    sources = []
    for number, prefix in enumerate(config.paths):
        corpus = Corpus(prefix)
        start, stop = cut_at_documents(corpus, config.split)[part]
        sources.append(FileSource(corpus, start, stop, seq_length, vocab_size, make_key(seed, number) if part == 0 else None))
    weights = list(config.weights) or [float(source.tokens) for source in sources]
    return _with_samples(sources, weights, f"the {PARTS[part]} part of data.split={config.split!r}", needs_all=part == 0)


def open_whole(prefixes: Sequence[str], *, seq_length: int, vocab_size: int) -> tuple[list[Source], list[float]]:
    """Sources and weights of whole corpora in file order, as named validation sets are used."""
    corpora = [Corpus(prefix) for prefix in prefixes]
    sources = [FileSource(corpus, 0, corpus.num_tokens, seq_length, vocab_size, None) for corpus in corpora]
    return _with_samples(sources, [float(source.tokens) for source in sources], "it", needs_all=False)


def _with_samples(sources: list[FileSource], weights: list[float], what: str, needs_all: bool) -> tuple[list[Source], list[float]]:
    kept = [(source, weight) for source, weight in zip(sources, weights) if source.windows]
    too_short = [source for source in sources if not source.windows]
    if not sources:
        raise DataError("no data: data.paths is empty and data.mock is off")
    if too_short and (needs_all or not kept):
        short = too_short[0]
        raise DataError(
            f"{short.corpus.bin_path}: not enough data: {what} has {short.tokens} tokens, "
            f"one sample needs seq_length + 1 = {short.seq_length + 1} (the file has {short.corpus.num_tokens} tokens in "
            f"{short.corpus.num_documents} documents, and is cut between documents). Use a shorter train.seq_length, another "
            f"data.split (such as 80,20,0), files of their own in data.valid, or leave train.eval_interval unset"
        )
    return [source for source, _ in kept], [weight for _, weight in kept]
