"""Data: the file format against Megatron's own code, the order against brute force, batches against their
definition."""

from __future__ import annotations

import json
import struct
import threading
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.base.errors import DataError
from phalanx.data.config import DataConfig
from phalanx.data.files import replacing
from phalanx.data.index import HEADER, MAGIC, Corpus, CorpusWriter, check_vocab, optimal_dtype
from phalanx.data.loader import Loader, Prefetcher, micro_batch_samples, train_loader, valid_loaders
from phalanx.data.mixture import Blend, parse_split, permute
from phalanx.data.sources import FileSource, MockSource, cut_at_documents, nearest_border
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.sequence.shard import WHOLE
from phalanx.text.prepare import PrepareOptions, demo_data, find_files, prepare, stdlib_files
from phalanx.text.tokenizers import byte_tokenizer, load_tokenizer, train_bpe

DOCUMENTS = [[5, 1, 2, 3, 4], [9, 8, 7], [6], [], [1, 1, 2, 3, 5, 8, 13]]
STREAM = [token for document in DOCUMENTS for token in document]


def write(prefix: Path, documents=DOCUMENTS, dtype=np.uint16) -> Corpus:
    with CorpusWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return Corpus(prefix)


def counting_corpus(prefix: Path, tokens: int, document_length: int) -> Corpus:
    """Token n of the stream is n."""
    stream = np.arange(tokens, dtype=np.int32)
    return write(prefix, np.split(stream, range(document_length, tokens, document_length)), np.int32)


# ---- token files


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
def test_same_bytes_as_megatron(tmp_path, dtype):
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    documents = [([5, 1, 2, 3, 4], [5]), ([9, 8, 7, 6], [1, 3]), ([], []), ([1, 2], [2])]
    theirs = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for tokens, lengths in documents:
        theirs.add_document(torch.tensor(tokens, dtype=torch.int64), lengths)
    theirs.finalize(str(tmp_path / "theirs.idx"))
    with CorpusWriter(tmp_path / "ours", dtype) as writer:
        for tokens, lengths in documents:
            writer.add_document(tokens, lengths)
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()
    read_by_them = megatron.IndexedDataset(str(tmp_path / "ours"))
    assert [list(read_by_them[i]) for i in range(len(read_by_them))] == [[5, 1, 2, 3, 4], [9], [8, 7, 6], [1, 2]]
    assert list(read_by_them.document_indices) == [0, 1, 3, 3, 4]
    corpus = Corpus(tmp_path / "theirs")
    assert list(corpus.tokens(0, corpus.num_tokens)) == [5, 1, 2, 3, 4, 9, 8, 7, 6, 1, 2]
    assert [list(corpus.sequence(s)) for s in range(4)] == [[5, 1, 2, 3, 4], [9], [8, 7, 6], [1, 2]]
    assert [corpus.document_start(d) for d in range(5)] == [0, 5, 9, 9, 11]
    assert corpus.dtype == np.dtype(dtype)


def test_megatron_modes_are_accepted(tmp_path):
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    theirs = megatron.IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=np.int32, multimodal=True)
    theirs.add_document(torch.tensor([1, 2, 3]), [1, 2], [0, 1])
    theirs.finalize(str(tmp_path / "m.idx"))
    assert list(Corpus(tmp_path / "m").tokens(0, 3)) == [1, 2, 3]


def test_optimal_dtype_is_megatrons():
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    for vocab_size in (1, 256, 65499, 65500, 65536, 128256):
        assert optimal_dtype(vocab_size) == np.dtype(megatron.DType.optimal_dtype(vocab_size))


def test_stream_and_documents(tmp_path):
    corpus = write(tmp_path / "c")
    assert (corpus.num_tokens, corpus.num_documents) == (16, 5)
    for start in range(17):
        for stop in range(start, 17):
            assert list(corpus.tokens(start, stop)) == STREAM[start:stop]
            assert list(corpus.document_starts(start, stop)) == [s for s in (0, 5, 8, 9) if start <= s < stop]
    assert [corpus.document_at(t) for t in range(16)] == [0] * 5 + [1] * 3 + [2] + [4] * 7
    with pytest.raises(IndexError):
        corpus.tokens(10, 17)
    with pytest.raises(ValueError):
        corpus.tokens(0, 2)[0] = 1  # a view of the file


def test_pointers_out_of_order(tmp_path):
    """An index whose sequences lie in the .bin in another order, with a hole between them."""
    (tmp_path / "c.bin").write_bytes(np.array([7, 8, 9, 99, 1, 2, 3, 4], np.uint16).tobytes())
    index = HEADER.pack(MAGIC, 1, 8, 2, 3) + np.array([4, 3], np.int32).tobytes()
    (tmp_path / "c.idx").write_bytes(
        index + np.array([8, 0], np.int64).tobytes() + np.array([0, 1, 2], np.int64).tobytes()
    )
    corpus = Corpus(tmp_path / "c")
    stream = [1, 2, 3, 4, 7, 8, 9]
    for start in range(8):
        for stop in range(start, 8):
            assert list(corpus.tokens(start, stop)) == stream[start:stop]
    assert list(corpus.document_starts(1, 7)) == [4]


def test_every_truncation_is_refused(tmp_path):
    write(tmp_path / "c")
    for suffix in ("bin", "idx"):
        path = tmp_path / f"c.{suffix}"
        whole = path.read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            with pytest.raises(DataError, match=f"c.{suffix}: truncated: {size} bytes, expected"):
                Corpus(tmp_path / "c")
        path.write_bytes(whole + b"\0" * 10)
        with pytest.raises(DataError, match=f"{len(whole) + 10} bytes, expected {len(whole)}"):
            Corpus(tmp_path / "c")
        path.write_bytes(whole)
    Corpus(tmp_path / "c")


@pytest.mark.parametrize(
    ("offset", "patch", "message"),
    [
        (0, b"PK\3\4", "not a Megatron index"),
        (9, struct.pack("<Q", 2), "index version 2"),
        (17, b"\7", "float32"),
        (17, b"\x63", "dtype code 99"),
        (18, struct.pack("<Q", 2**62), "truncated"),
        (26, struct.pack("<Q", 0), "0 document indices"),
        (34, struct.pack("<i", -5), "negative length"),
        (34, struct.pack("<i", 500), "truncated"),
        (34 + 20, struct.pack("<q", -8), "negative length or byte offset"),
        (34 + 20 + 40, struct.pack("<q", 1), "document indices run from 1"),
        (34 + 20 + 40 + 8, struct.pack("<q", 4), "document indices decrease"),
        (34 + 20 + 40 + 40, struct.pack("<q", 3), "to 3, expected 0 to 5"),
    ],
)
def test_foreign_and_damaged_index(tmp_path, offset, patch, message):
    write(tmp_path / "c")
    (tmp_path / "c.sums").unlink()  # of another tool
    data = bytearray((tmp_path / "c.idx").read_bytes())
    data[offset : offset + len(patch)] = patch
    (tmp_path / "c.idx").write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        Corpus(tmp_path / "c")
    assert str(tmp_path / "c.") in str(caught.value)


def test_missing_files_name_what_is_near(tmp_path):
    write(tmp_path / "corpus_train")
    with pytest.raises(DataError, match=r"corpus_trian\.bin: no such file.*corpus_train\.bin"):
        Corpus(tmp_path / "corpus_trian")
    (tmp_path / "corpus_train.idx").unlink()
    with pytest.raises(DataError, match=r"corpus_train\.idx: no such file"):
        Corpus(tmp_path / "corpus_train.bin")
    with pytest.raises(DataError, match="its folder .*absent does not exist"):
        Corpus(tmp_path / "absent" / "x")


def test_writer_leaves_all_or_nothing(tmp_path):
    write(tmp_path / "c", [[1, 2, 3]])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for bad in ([70000], [-1]):
        with pytest.raises(DataError, match="document 1 has ids"), CorpusWriter(tmp_path / "c", np.uint16) as writer:
            writer.add_document([1])
            writer.add_document(bad)
    with pytest.raises(DataError, match="add up to 3"), CorpusWriter(tmp_path / "c", np.uint16) as writer:
        writer.add_document([1, 2], [3])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_replacing_leaves_all_or_nothing(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(KeyError), replacing(tmp_path / "a") as file:
        file.write(b"half")
        raise KeyError
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]
    with replacing(tmp_path / "a") as file:
        file.write(b"new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "new")]


def test_check_vocab_names_the_token(tmp_path):
    corpus = write(tmp_path / "c")
    check_vocab(corpus, 14)
    with pytest.raises(
        DataError, match="c.bin: token id 9 .*vocabulary of 9: document 1, its token 0, token 5 of the file"
    ):
        check_vocab(corpus, 9)
    loader = Loader([FileSource(corpus, 0, 16, 3, 13, None)], [1], seq_length=3)
    loader.batch([0, 1, 2])
    with pytest.raises(DataError, match="token id 13 .*document 4, its token 6, token 15"):
        loader.batch([4])


# ---- order


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection(size, key):
    image = permute(np.arange(size), size, key)
    assert np.array_equal(np.sort(image), np.arange(size))
    some = np.arange(size)[:: max(1, size // 7)]
    assert np.array_equal(permute(some, size, key), image[some])


def test_permute_shuffles_and_reaches_far():
    size = 20000
    one, two = permute(np.arange(size), size, 1), permute(np.arange(size), size, 2)
    for image in (one, two):  # a random permutation: rank correlation 0 +- 0.007, differences of neighbours spread
        assert abs(np.corrcoef(np.arange(size), image)[0, 1]) < 0.05
        assert len(np.unique(np.diff(image))) > size / 2
    assert np.mean(one == two) < 0.001
    huge = permute(np.arange(1000), 10**12 + 39, 3)
    assert huge.min() >= 0 and huge.max() < 10**12 + 39 and len(np.unique(huge)) == 1000 and huge.max() > 9 * 10**11


def chairman(shares: list[int], length: int) -> list[int]:
    """Tijdeman's rule word for word: among sources that lag by 1/(2k-2), the one that must be taken soonest."""
    total, k = sum(shares), sum(1 for share in shares if share)
    delta, uses, order = Fraction(1, max(2, 2 * k - 2)), [0] * len(shares), []
    for n in range(1, length + 1):
        lag = {i: Fraction(share, total) * n - uses[i] for i, share in enumerate(shares) if share}
        slack = {i: (1 - delta - lag[i]) // Fraction(shares[i], total) for i in lag if lag[i] >= delta}
        chosen = min(slack, key=lambda i: (slack[i], i))
        uses[chosen] += 1
        order.append(chosen)
    return order


def check_prefixes(order: list[int], shares: list[int]) -> None:
    used = [0] * len(shares)
    for n, source in enumerate(order, 1):
        used[source] += 1
        assert all(abs(count * sum(shares) - share * n) < sum(shares) for count, share in zip(used, shares)), (n, used)


weights = st.lists(st.one_of(st.integers(0, 6), st.integers(0, 5000)), min_size=1, max_size=7).filter(any)


@settings(max_examples=40, deadline=None)
@given(weights, st.integers(1, 120))
def test_blend_is_tijdemans_rule_from_any_position(shares, length):
    order = chairman(shares, length)
    check_prefixes(order, shares)
    blend = Blend(shares)
    places = blend.locate(range(length))
    assert [source for source, _ in places] == order
    assert [number for _, number in places] == [order[:n].count(source) for n, source in enumerate(order)]
    for n in range(length + 1):
        assert blend.counts(n) == [order[:n].count(i) for i in range(len(shares))]
    for n in reversed(range(length)):
        assert blend.locate([n]) == [places[n]]


@pytest.mark.parametrize(
    "weights",
    [
        [0.7, 0.3],
        [5, 3, 2],
        [1_000_007, 300_001, 17.5, 1000],
        [1] * 40,
        [1 / (n + 1) for n in range(30)],
        [1e-6, 1, 0.3, 3e-6],
    ],
)
@pytest.mark.parametrize("start", [10**9, 10**12 + 12345])
def test_blend_resumes_far_out(weights, start):
    blend = Blend(weights)
    counts = blend.counts(start)
    total = sum(blend.shares)
    assert sum(counts) == start
    assert all(abs(count * total - share * start) < total for count, share in zip(counts, blend.shares))
    places = blend.locate(range(start, start + 400))  # the rule run on from here ...
    for n in (1, 57, 400):  # ... agrees with jumping there
        jumped = Blend(weights).counts(start + n)
        assert jumped == [count + sum(source == i for source, _ in places[:n]) for i, count in enumerate(counts)]


def test_blend_takes_decimals_as_written():
    assert Blend([0.1, 0.2, 0.7]).shares == [1, 2, 7]
    assert sum(Blend([1 / 3, 2 / 7, 1e-9]).shares) == pytest.approx(2**36, abs=2)


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -1], [1, float("nan")], [1, float("inf")], [1 / 3, 1e-30]])
def test_bad_weights(weights):
    with pytest.raises(ValueError):
        Blend(weights)


@pytest.mark.parametrize(
    "text", ["", "98", "98,2", "98,2,0,0", "a,b,c", "90,-10,20", "0,0,0", "nan,1,1", "inf,1,1", "98,,2"]
)
def test_bad_split(text):
    with pytest.raises(ValueError):
        parse_split(text)


def test_split_cuts_at_the_nearest_document(tmp_path):
    corpus = write(tmp_path / "c")  # documents start at 0, 5, 8, 9, 9 and the end is 16
    assert parse_split("969,30,1") == (0.969, 0.03, 0.001)
    borders = (0, 5, 8, 9, 16)
    for target in range(17):
        assert nearest_border(corpus, target) == min(borders, key=lambda border: (abs(border - target), border))
    assert nearest_border(write(tmp_path / "even", [[1] * 4] * 2), 6) == 4  # of two equally near, the lower one
    assert cut_at_documents(corpus, "50,30,20") == [(0, 8), (8, 16), (16, 16)]
    assert cut_at_documents(corpus, "100,0,0") == [(0, 16), (16, 16), (16, 16)]


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 6])
def test_samples_of_a_step_do_not_depend_on_dp(dp):
    ranks = [micro_batch_samples(36, 24, 2, dp, rank) for rank in range(dp)]
    assert {len(rank) for rank in ranks} == {12 // dp}
    runs = [run for rank in ranks for run in rank]
    assert runs == [[n, n + 1] for n in range(36, 60, 2)]


def test_global_batch_must_divide():
    with pytest.raises(ValueError, match="104 is not a multiple of micro_batch 8 x dp 4"):
        micro_batch_samples(0, 104, 8, 4, 0)


@pytest.mark.parametrize("dp", [2, 3, 4])
def test_tokens_of_a_step_do_not_depend_on_dp(tmp_path, dp):
    counting_corpus(tmp_path / "a", 700, 30)
    counting_corpus(tmp_path / "b", 300, 7)
    config = DataConfig(paths=(str(tmp_path / "a"), str(tmp_path / "b")), weights=(0.8, 0.2))

    def step(dp):
        loaders = [train_loader(config, seq_length=8, seed=3, vocab_size=700, samples=100) for _ in range(dp)]
        return torch.cat([loaders[r].batch(s).tokens for r in range(dp) for s in micro_batch_samples(48, 24, 2, dp, r)])

    assert torch.equal(step(dp), step(1))


def test_each_window_once_an_epoch(tmp_path):
    corpus = counting_corpus(tmp_path / "c", 1001, 13)
    config = DataConfig(paths=(corpus.prefix,), split="100,0,0")
    loader = train_loader(config, seq_length=10, seed=3, vocab_size=1001, samples=200)
    epochs = [loader.batch(range(n, n + 100)).tokens.view(100, 10) for n in (0, 100)]
    for tokens in epochs:
        assert sorted(tokens[:, 0].tolist()) == list(range(0, 1000, 10))
        assert torch.equal(tokens, tokens[:, :1] + torch.arange(10))
    assert not torch.equal(*epochs) and epochs[0][:, 0].tolist() != list(range(0, 1000, 10))
    other = train_loader(config, seq_length=10, seed=4, vocab_size=1001, samples=200)
    assert not torch.equal(other.batch(range(100)).tokens.view(100, 10), epochs[0])


def test_use_of_sources_and_max_epochs(tmp_path):
    paths = tuple(counting_corpus(tmp_path / name, tokens, 10).prefix for name, tokens in (("a", 801), ("b", 201)))
    config = DataConfig(paths=paths, weights=(3, 1), split="100,0,0", max_epochs=1.5)
    rows = train_loader(config, seq_length=8, seed=1, vocab_size=900, samples=120).use(120)
    assert [(row.name, row.tokens, row.windows, row.used_samples, row.used_tokens) for row in rows] == [
        (paths[0], 801, 100, 90, 720),
        (paths[1], 201, 25, 30, 240),
    ]
    assert [row.epochs for row in rows] == [0.9, 1.2]
    with pytest.raises(
        DataError, match=r"/b: not enough data: the run takes 50 samples .*25 samples x data.max_epochs 1.5 = 37.5"
    ):
        train_loader(config, seq_length=8, seed=1, vocab_size=900, samples=200)


def test_too_short_or_mismatched(tmp_path):
    corpus = write(tmp_path / "c")
    common = {"seed": 1, "vocab_size": 20}
    with pytest.raises(DataError, match=r"c\.bin: not enough data: .*16 tokens, one sample needs seq_length \+ 1 = 17"):
        train_loader(DataConfig(paths=(corpus.prefix,), split="1,0,0"), seq_length=16, samples=1, **common)
    assert train_loader(DataConfig(paths=(corpus.prefix,), split="1,0,0"), seq_length=15, samples=1, **common)
    with pytest.raises(DataError, match="the validation part of data.split='50,50,0' has 8 tokens"):
        valid_loaders(DataConfig(paths=(corpus.prefix,), split="50,50,0"), seq_length=8, **common)
    with pytest.raises(DataError, match="data.weights has 2 entries, data.paths has 1"):
        train_loader(DataConfig(paths=(corpus.prefix,), weights=(1, 2)), seq_length=4, samples=1, **common)
    with pytest.raises(DataError, match="weight -1"):
        Loader([FileSource(corpus, 0, 16, 4, 20, None)], [-1], seq_length=4)


def test_validation_is_in_file_order_and_disjoint(tmp_path):
    corpus = counting_corpus(tmp_path / "c", 1000, 10)
    config = DataConfig(paths=(corpus.prefix,), split="80,20,0", valid={"other": (corpus.prefix,)})
    loaders = valid_loaders(config, seq_length=8, seed=1, vocab_size=1000)
    assert list(loaders) == ["valid", "other"]
    assert loaders["valid"].batch(range(5)).tokens.tolist() == list(range(800, 840))
    assert loaders["other"].batch(range(5)).tokens.tolist() == list(range(40))
    train = train_loader(config, seq_length=8, seed=1, vocab_size=1000, samples=1)
    assert train.batch(range(99)).tokens.max() < 800
    assert list(
        valid_loaders(DataConfig(valid={"other": (corpus.prefix,)}), seq_length=8, seed=1, vocab_size=1000)
    ) == ["other"]


# ---- batches


def test_batch_without_documents(tmp_path):
    corpus = write(tmp_path / "c")
    batch = Loader([FileSource(corpus, 0, 16, 5, 20, None)], [1], seq_length=5).batch([2, 0])
    assert batch.tokens.tolist() == STREAM[10:15] + STREAM[0:5]
    assert batch.labels.tolist() == STREAM[11:16] + STREAM[1:6]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4] * 2
    assert batch.samples.tolist() == [2] * 5 + [0] * 5
    assert (batch.num_sequences, batch.seq_length, batch.num_tokens, batch.documents) == (2, 5, 10, None)
    assert {t.dtype for t in (batch.tokens, batch.labels, batch.positions, batch.samples)} == {torch.int64}


def test_batch_with_documents(tmp_path):
    corpus = write(tmp_path / "c")  # documents start at 0, 5, 8, 9
    batch = Loader([FileSource(corpus, 0, 16, 7, 20, None)], [1], seq_length=7, document_attention=True).batch([0, 1])
    assert batch.tokens.tolist() == STREAM[:14]
    assert batch.labels.tolist() == [*STREAM[1:5], IGNORE, 8, 7, IGNORE, IGNORE, *STREAM[10:15]]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 0, 0, 1, 2, 3, 4]
    assert batch.documents.tolist() == [0, 0, 0, 0, 0, 1, 1, 2, 3, 4, 4, 4, 4, 4]
    batch = Loader([FileSource(corpus, 0, 16, 5, 20, None)], [1], seq_length=5, document_attention=True).batch([0])
    assert batch.labels.tolist() == [1, 2, 3, 4, IGNORE]  # the document ends with the sequence


def test_mock_is_a_function_of_seed_and_sample_and_can_be_learned():
    config = DataConfig(mock=True)
    loader = train_loader(config, seq_length=64, seed=5, vocab_size=100, samples=10)
    batch = loader.batch(range(200))
    assert torch.equal(loader.batch([17]).tokens, batch.tokens.view(200, 64)[17])
    assert not torch.equal(
        train_loader(config, seq_length=64, seed=6, vocab_size=100, samples=1).batch([17]).tokens,
        loader.batch([17]).tokens,
    )
    valid = valid_loaders(config, seq_length=64, seed=5, vocab_size=100)["valid"]
    assert not torch.equal(valid.batch([17]).tokens, loader.batch([17]).tokens)
    assert batch.tokens.unique().tolist() == list(range(100))
    follows = torch.zeros(100, 100).index_put((batch.tokens, batch.labels), torch.ones(1), accumulate=True)
    likeliest = follows.max(1).values.sum() / follows.sum()
    assert 0.8 < likeliest < 0.95  # a bigram model is right about this often; chance is 0.01
    documents = train_loader(
        DataConfig(mock=True, document_attention=True), seq_length=64, seed=5, vocab_size=100, samples=1
    ).batch(range(50))
    assert torch.equal(documents.tokens, batch.tokens[: 50 * 64])
    assert 100 < documents.documents.max() < 400 and (documents.labels == IGNORE).any()


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 1000, 128256])
def test_mock_any_vocabulary(vocab_size):
    source = MockSource(50, vocab_size, 1)
    tokens, starts = source.window(3), source.starts(3)
    assert tokens.shape == (51,) and tokens.min() >= 0 and tokens.max() < vocab_size
    assert all(1 <= start <= 50 for start in starts)


# ---- prefetch


class Tracing(Loader):
    """A loader that notes what it made and fails at one sample."""

    def __init__(self, bad: int | None = None):
        super().__init__([MockSource(4, 10, 1)], [1], seq_length=4)
        self.bad, self.made, self.enough = bad, [], threading.Semaphore(0)

    def read(self, places, part=WHOLE) -> Batch:
        if self.bad in [place.sample for place in places]:
            raise DataError("bad token in the thread")
        self.made.append(places[0].sample)
        self.enough.release()
        return super().read(places, part)


def test_prefetch_keeps_order_and_stays_bounded():
    loader = Tracing()
    with Prefetcher(loader, ([n] for n in range(50)), depth=3) as batches:
        for _ in range(4):  # three wait and a fourth is made, without anyone asking
            assert loader.enough.acquire(timeout=60)
        assert len(loader.made) == 4
        assert [int(batch.samples[0]) for batch in batches] == list(range(50))


def test_prefetch_raises_in_the_consumer():
    with Prefetcher(Tracing(bad=5), ([n] for n in range(50))) as batches:
        assert [int(next(batches).samples[0]) for _ in range(5)] == list(range(5))
        for _ in range(2):
            with pytest.raises(DataError, match="bad token in the thread"):
                next(batches)


def test_prefetch_closes_a_thread_that_waits():
    batches = Prefetcher(Tracing(), ([n] for n in iter(int, 1)), depth=1)  # endless
    next(batches)
    batches.close()
    assert not batches._thread.is_alive()
    assert list(batches) == []


# ---- tokenizers and preparation

TEXTS = [
    "def add(a, b):\n    return a + b\n",
    "Grüße, 世界! 🙂\t\0 end",
    " leading and trailing  \r\n\n",
    "<|endoftext|> is only text here",
]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return train_bpe([*TEXTS] * 20, 300, tmp_path_factory.mktemp("bpe"))


def test_tokenizers_round_trip(bpe):
    for tokenizer in (bpe, byte_tokenizer()):
        assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(TEXTS)] == TEXTS
        assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
        assert all(tokenizer.eod not in tokenizer.encode(text) for text in TEXTS)
        assert (
            tokenizer.decode([tokenizer.eod]) == "<|endoftext|>"
            and tokenizer.decode([tokenizer.eod], skip_special_tokens=True) == ""
        )
    assert (
        byte_tokenizer().encode("Aß") == list("Aß".encode())
        and byte_tokenizer().vocab_size == 257
        and byte_tokenizer().eod == 256
    )
    assert 257 < bpe.vocab_size <= 300 and len(bpe.encode(TEXTS[0])) < len(TEXTS[0])


def test_tokenizer_files(tmp_path, bpe):
    folder = bpe.save(tmp_path / "t")
    for path in (folder, folder / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert (loaded.eod, loaded.vocab_size, loaded.fingerprint) == (bpe.eod, bpe.vocab_size, bpe.fingerprint)
        assert loaded.encode_batch(TEXTS) == bpe.encode_batch(TEXTS)
    assert load_tokenizer("bytes").fingerprint == byte_tokenizer().fingerprint != bpe.fingerprint
    with pytest.raises(DataError, match=r"tokenizer\.jsn: no such file.*tokenizer\.json"):
        load_tokenizer(folder / "tokenizer.jsn")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a tokenizer.json"):
        load_tokenizer(folder)
    with pytest.raises(ValueError, match="257"):
        train_bpe(TEXTS, 100, tmp_path)


def test_end_of_document_of_a_foreign_tokenizer(tmp_path, bpe):
    folder = bpe.save(tmp_path)
    text = (folder / "tokenizer.json").read_text().replace("<|endoftext|>", "[STOP]")
    (folder / "tokenizer.json").write_text(text)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "[STOP]"}}))
    assert load_tokenizer(folder).eod_token == "[STOP]"
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(folder).eod is None
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match="no end-of-document token"):
        prepare([tmp_path / "a.txt"], tmp_path / "out", load_tokenizer(folder))


def test_transformers_loads_our_tokenizer(tmp_path, bpe):
    transformers = pytest.importorskip("transformers")
    for tokenizer, name in ((bpe, "bpe"), (byte_tokenizer(), "bytes")):
        theirs = transformers.AutoTokenizer.from_pretrained(tokenizer.save(tmp_path / name))
        assert theirs.eos_token_id == tokenizer.eod and len(theirs) == tokenizer.vocab_size
        for text in TEXTS[:3]:
            assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text)
            assert theirs.decode(tokenizer.encode(text)) == text


def documents_of(prefix) -> list[str]:
    corpus, tokenizer = Corpus(prefix), byte_tokenizer()
    documents = [corpus.sequence(s).tolist() for s in range(corpus.num_sequences)]
    assert all(document[-1] == 256 for document in documents)
    return [tokenizer.decode(document[:-1]) for document in documents]


def test_prepare_reads_files_folders_and_lines(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "b.txt").write_text("bee", encoding="utf-8-sig")
    (tmp_path / "in" / "deep" / "a.py").write_text("x = 'ü'\n")
    (tmp_path / "in" / "c.bin").write_text("not me")
    (tmp_path / "in" / "empty.txt").write_text("")
    (tmp_path / "lines.jsonl").write_text('{"text": "one"}\n\n{"text": "two\\n", "id": 2}\n')
    summary = prepare([tmp_path / "lines.jsonl", tmp_path / "in"], tmp_path / "out", byte_tokenizer())
    assert documents_of(tmp_path / "out") == ["one", "two\n", "bee", "x = 'ü'\n"]
    manifest = json.loads((tmp_path / "out.json").read_text())
    assert manifest == {**vars(summary)} and manifest["tokenizer"] == byte_tokenizer().fingerprint
    assert (summary.files, summary.documents, summary.empty, summary.skipped, summary.replaced) == (4, 4, 1, 0, 0)
    assert (
        summary.text_bytes == 3 + 4 + 3 + 9
        and summary.tokens == summary.text_bytes + 4 == Corpus(tmp_path / "out").num_tokens
    )
    assert [path.name for path in find_files([tmp_path / "in"], (".bin",))] == ["c.bin"]
    assert not [path for path in tmp_path.iterdir() if ".tmp-" in path.name]


def test_prepare_and_bad_bytes(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfgood \xff bad")
    (tmp_path / "b.txt").write_text("fine")
    inputs = [tmp_path / "a.txt", tmp_path / "b.txt"]
    with pytest.raises(DataError, match=r"a\.txt: not UTF-8: byte 0xff at offset 8"):
        prepare(inputs, tmp_path / "out", byte_tokenizer())
    assert not list(tmp_path.glob("out*"))
    assert prepare(inputs, tmp_path / "out", byte_tokenizer(), PrepareOptions(errors="skip")).skipped == 1
    assert documents_of(tmp_path / "out") == ["fine"]
    assert (
        prepare(inputs, tmp_path / "out", byte_tokenizer(), PrepareOptions(errors="replace", overwrite=True)).replaced
        == 1
    )
    assert documents_of(tmp_path / "out") == ["good \ufffd bad", "fine"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"txt": "a"}', "line 2: no text under key 'text'; keys: txt"),
        (b'{"text": 3}', "line 2: no text under key 'text'"),
        (b'{"text": "a', "line 2: not JSON"),
        (b"[1]", "line 2: not a JSON object"),
        (b'{"text": "\\ud800"}', "line 2: not text"),
        (b'{"text": "\xff"}', "byte 0xff at offset 25"),
    ],
)
def test_prepare_and_bad_lines(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "ok"}\n' + line + b"\n")
    with pytest.raises(DataError, match=message):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", byte_tokenizer())
    assert (
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", byte_tokenizer(), PrepareOptions(errors="skip")).skipped == 1
    )
    assert documents_of(tmp_path / "out") == ["ok"]


def test_prepare_nothing(tmp_path):
    with pytest.raises(DataError, match="no text in"):
        prepare([tmp_path], tmp_path / "out", byte_tokenizer())
    with pytest.raises(DataError, match="no such file"):
        prepare([tmp_path / "absent.txt"], tmp_path / "out", byte_tokenizer())


def test_stdlib_files_are_bounded_and_not_in_name_order():
    files = stdlib_files(1_000_000)
    assert files == stdlib_files(1_000_000) and len(files) > 20
    assert 500_000 < sum(file.stat().st_size for file in files) <= 1_000_000
    assert files != sorted(files)
    everything = stdlib_files(10**9)
    without_tests = [file for file in everything if not {"test", "tests", "idle_test"} & set(file.parts)]
    assert not any("site-packages" in file.parts for file in everything) and len(without_tests) < len(everything)
    assert stdlib_files(sum(file.stat().st_size for file in without_tests)) == without_tests


def test_demo_data_is_made_once(tmp_path):
    prefix, tokenizer_path = demo_data(tmp_path / "d", None, vocab_size=512, max_bytes=200_000)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert load_tokenizer(tokenizer_path).vocab_size == 512
    assert demo_data(tmp_path / "d", None, vocab_size=512, max_bytes=200_000) == (prefix, tokenizer_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == written
    check_vocab(Corpus(prefix), 512)
    assert loader_reads(prefix)
    demo_data(tmp_path / "d", None, vocab_size=300, max_bytes=200_000)
    assert load_tokenizer(tokenizer_path).vocab_size == 300
    Path(prefix + ".idx").unlink()
    demo_data(tmp_path / "d", None, vocab_size=300, max_bytes=200_000)
    check_vocab(Corpus(prefix), 300)


def loader_reads(prefix: str) -> bool:
    loader = train_loader(DataConfig(paths=(prefix,)), seq_length=32, seed=1, vocab_size=512, samples=10)
    return loader.batch(range(4)).tokens.shape == (128,)
