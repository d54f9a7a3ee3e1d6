"""Ids of every kind of tokenizer equal those of the library that defines it, on generated lines of many scripts,
code, emoji and odd bytes."""

from __future__ import annotations

import base64
import json
import pickle
import random
import re
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from phalanx.base.errors import DataError
from phalanx.data.files import replacing
from phalanx.text import words
from phalanx.text.merges import ENCODINGS, as_onig
from phalanx.text.tokenizers import TRAINERS, JsonTokenizer, Tokenizer, byte_tokenizer, load_tokenizer
from tests.harness.sample import rest_in_soak

CODE = [
    line
    for path in sorted(Path(json.__file__).parent.glob("*.py"))
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
]
SCRIPTS = [
    (0x20, 0x7E),
    (0xA0, 0x24F),
    (0x370, 0x3FF),
    (0x400, 0x4FF),
    (0x590, 0x5FF),
    (0x600, 0x6FF),
    (0x900, 0x97F),
    (0xE00, 0xE7F),
]
SCRIPTS += [
    (0x1100, 0x11FF),
    (0x2000, 0x206F),
    (0x2190, 0x21FF),
    (0x3040, 0x30FF),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0x1F300, 0x1FAFF),
]
ENGLISH = (
    "the of and to In THAT it's we're I'd don't WE'LL they've He'M 3 42 2026 1,234.5 e-mail naïve "
    "“quoted” — … \u00a0 \u3000x \x85y".split(" ")
)
GLUE = [
    " ",
    " ",
    " ",
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    " \n ",
    "\x1c",
    "\x0b",
    "",
    "-",
    ".\n",
    "!\n\n",
    ");\n    ",
]


def make_line(dice: random.Random) -> str:
    """A line of words of several scripts, of code or of bytes that are not UTF-8 (as `errors='replace'` reads them)."""
    kind = dice.random()
    if kind < 0.2:
        return "".join(dice.choices(CODE, k=dice.randrange(1, 4)))
    if kind < 0.3:
        return dice.randbytes(dice.randrange(60)).decode("utf-8", errors="replace").replace("\0", "\ufffd")
    line = ""
    for _ in range(dice.randrange(1, 12)):
        if dice.random() < 0.5:
            word = dice.choice(ENGLISH)
        else:
            low, high = dice.choice(SCRIPTS)
            word = "".join(chr(dice.randint(low, high)) for _ in range(dice.randrange(1, 8)))
            word = word + "\u200d\ufe0f" if dice.random() < 0.05 else word
        line += word + dice.choice(GLUE)
    return line


LINES = [make_line(random.Random(n)) for n in range(10_000)]
TRAINING = [text.replace("\0", " ") for text in LINES[::4]] + CODE


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> Tokenizer:
    return TRAINERS["bpe"](TRAINING, 2000, tmp_path_factory.mktemp("bpe"))


def with_pattern(bpe: Tokenizer, pattern: str) -> tokenizers.Tokenizer:
    """The same merges with another way to split, built by the library's own classes."""
    core = tokenizers.Tokenizer.from_str(bpe._core.to_str())
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return core


def ids_of(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """As `data prepare` gets them."""
    return [np.frombuffer(raw, tokenizer.dtype).tolist() for raw in tokenizer.encode_raw(texts)]


def first_difference(ours: list[list[int]], theirs: list[list[int]]) -> str | None:
    assert len(ours) == len(theirs) == len(LINES) >= 10_000
    return next((repr(line) for line, a, b in zip(LINES, ours, theirs) if a != b), None)


# ---- the tokenizers library ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", TRAINERS)
def test_trained_kinds(kind, tmp_path):
    ours = TRAINERS[kind](TRAINING, 1500, tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs.encode_special_tokens = True
    assert ours._words is not None
    assert (
        first_difference(ids_of(ours, LINES), [e.ids for e in theirs.encode_batch(LINES, add_special_tokens=False)])
        is None
    )
    if kind != "wordpiece":
        assert [ours.decode(ids) for ids in ids_of(ours, LINES)] == LINES


PUBLISHED = [(name, normalizer) for name in ("LLAMA3", "QWEN2", "CL100K", "O200K") for normalizer in (None, "NFC")]


@pytest.mark.parametrize("way", rest_in_soak(PUBLISHED, PUBLISHED[1:4:2] + PUBLISHED[4::2]))
def test_published_ways_to_split(bpe, way):
    name, normalizer = way
    core = with_pattern(bpe, getattr(words, name))
    core.normalizer = tokenizers.normalizers.NFC() if normalizer else None
    theirs = [e.ids for e in core.encode_batch(LINES, add_special_tokens=False)]
    ours = JsonTokenizer(core, "<|endoftext|>")
    assert ours._words is not None
    assert first_difference(ids_of(ours, LINES), theirs) is None


@pytest.mark.parametrize("name", ["GPT2", "LLAMA3", "QWEN2", "CL100K", "O200K"])
def test_words_of_ascii_text_are_the_librarys(name):
    pattern = getattr(words, name)
    library = pre_tokenizers.Split(Regex(pattern), "isolated")
    split = re.compile(words.ascii_pattern(pattern)).findall

    @settings(max_examples=400, deadline=None)
    @example("a \x1c b\n  ")
    @given(st.text(st.characters(max_codepoint=127)) | st.text(st.sampled_from("aB'sSlL1 \n\r\t\x0b\x1f./")))
    def compare(text: str) -> None:
        assert split(text) == [word for word, _ in library.pre_tokenize_str(text)]

    compare()


def test_white_space_is_never_a_word_character():
    """What Python calls a word character is no white space to the engines that split, so a border after one is a
    border for them."""
    characters = [
        chr(i)
        for i in range(sys.maxunicode + 1)
        if re.match(r"[\w!-~]", chr(i)) and unicodedata.category(chr(i)) != "Cs"
    ]
    library = pre_tokenizers.Split(Regex(r"\s"), "removed")
    assert "".join(part for part, _ in library.pre_tokenize_str("".join(characters))) == "".join(characters)


def test_long_texts_are_cut_where_words_end(bpe, monkeypatch):
    text = "".join(LINES[:3000])
    expected = bpe.encode(text)
    monkeypatch.setattr(words, "WINDOW", 1000)
    assert len(list(words.windows(text))) > 50
    assert ids_of(bpe, [text]) == [expected]
    monkeypatch.setattr(words, "MOST", 50)  # forgotten again and again
    bpe._words.clear()
    assert ids_of(bpe, [text]) == [expected] and len(bpe._words) <= 50


@pytest.mark.parametrize("unknown", ["prefix space", "other pattern", "added token", "normalizer"])
def test_other_ways_to_split_go_to_the_library(bpe, unknown):
    core = tokenizers.Tokenizer.from_str(bpe._core.to_str())
    if unknown == "prefix space":
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif unknown == "other pattern":
        core = with_pattern(bpe, r"\w+|\s+|[^\w\s]+")
    elif unknown == "added token":
        core.add_tokens(["the of"])
    else:
        core.normalizer = tokenizers.normalizers.NFKC()
    theirs = [e.ids for e in core.encode_batch(LINES, add_special_tokens=False)]
    ours = JsonTokenizer(core, "<|endoftext|>")
    assert ours._words is None
    assert first_difference(ids_of(ours, LINES), theirs) is None


# ---- bytes and null ------------------------------------------------------------------------------


def test_bytes():
    ours = byte_tokenizer()
    assert ids_of(ours, LINES) == [list(line.encode()) for line in LINES]
    assert [ours.decode(ids) for ids in ids_of(ours, LINES)] == LINES


def test_null():
    ours = load_tokenizer("null:70000")
    dice = random.Random(0)
    ids = [[dice.randrange(70_000) for _ in range(dice.randrange(50))] for _ in range(10_000)]
    texts = [dice.choice([" ", "\n", " \t "]).join(map(str, row)) for row in ids]
    assert ids_of(ours, texts) == ids == ours.encode_batch(texts)
    assert (ours.vocab_size, ours.eod, ours.kind, ours.dtype) == (70_001, 70_000, "null", np.int32)
    for text in ("1 2 70000", "x", "-1", "1.5", "٣"):
        with pytest.raises(DataError, match="cannot encode"):
            ours.encode_raw([text])
    for name in ("null:", "null:0", "null:x"):
        with pytest.raises(DataError, match="null:50257"):
            load_tokenizer(name)


# ---- tiktoken ------------------------------------------------------------------------------------


def ranks_of(bpe: Tokenizer) -> dict[bytes, int]:
    """A trained vocabulary in tiktoken's terms: bytes first, then merges in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's table, by its definition
    table = {chr(b): b for b in printable} | {
        chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in printable)
    }
    by_id = [
        token
        for token, i in sorted(bpe._core.get_vocab().items(), key=lambda item: item[1])
        if token not in bpe.special_tokens
    ]
    merged = [token for token in (bytes(table[c] for c in name) for name in by_id) if len(token) > 1]
    return {token: rank for rank, token in enumerate([*(bytes([b]) for b in range(256)), *merged])}


def write_ranks(path: Path, ranks: dict[bytes, int]) -> Path:
    with replacing(path) as file:
        file.writelines(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    return path


@pytest.mark.parametrize("name", ENCODINGS)
def test_named_encodings_are_tiktokens(bpe, name, tmp_path, monkeypatch):
    """Splitting and special tokens are those of tiktoken's own registry; only the ranks (of which it has none
    without a download) are ours."""
    tiktoken = pytest.importorskip("tiktoken")
    public = pytest.importorskip("tiktoken_ext.openai_public")
    ranks = ranks_of(bpe)
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *_, **__: ranks)
    given = {k: v for k, v in getattr(public, name)().items() if k != "explicit_n_vocab"}
    theirs = tiktoken.Encoding(**given)
    ours = load_tokenizer(write_ranks(tmp_path / f"{name}.tiktoken", ranks))
    assert first_difference(ids_of(ours, LINES), [theirs.encode_ordinary(line) for line in LINES]) is None
    assert (ours.special_tokens, ours.eod, ours.vocab_size) == (
        given["special_tokens"],
        theirs.eot_token,
        theirs.n_vocab,
    )
    assert [ours.decode(ids) for ids in ids_of(ours, LINES)] == LINES
    assert ours._words is not None


def test_own_ranks_with_a_note(bpe, tmp_path):
    """A pattern of one's own with all that the two engines spell differently; transformers reads what we save with
    the same ids."""
    tiktoken = pytest.importorskip("tiktoken")
    from transformers import AutoTokenizer

    ranks, special = ranks_of(bpe), {"<|end|>": 5000, "<|x|>": 5003}
    pattern = r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}$]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""  # noqa: E501
    assert as_onig(pattern) == pattern.replace("{1,3}+", "{1,3}").replace("++$|", r"++\z|")
    theirs = tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    path = write_ranks(tmp_path / "own.tiktoken", ranks)
    with pytest.raises(
        DataError, match=r"how this encoding splits text is not in the file.*write own.tiktoken.json beside it"
    ):
        load_tokenizer(path)
    note = tmp_path / "own.tiktoken.json"
    note.write_text(json.dumps({"pattern": pattern, "special_tokens": special, "eod": "<|end|>"}))
    ours = load_tokenizer(tmp_path)  # the folder
    assert first_difference(ids_of(ours, LINES), [theirs.encode_ordinary(line) for line in LINES]) is None
    assert (ours.eod, ours.vocab_size) == (5000, 5004)
    auto = AutoTokenizer.from_pretrained(ours.save(tmp_path / "saved"))
    assert auto.eos_token_id == 5000
    assert [auto(line, add_special_tokens=False)["input_ids"] for line in LINES[:500]] == ids_of(ours, LINES[:500])
    assert ids_of(load_tokenizer(tmp_path / "saved"), LINES[:500]) == ids_of(ours, LINES[:500])
    for bad, message in (
        ({"eod": "x"}, "KeyError"),
        ({"pattern": ".", "eod": "<|no|>"}, "none of its special_tokens"),
        ({"pattern": ".", "special_tokens": {"<|end|>": 7}}, "has the id 7, which is a token"),
    ):
        note.write_text(json.dumps(bad))
        with pytest.raises(DataError, match=message):
            load_tokenizer(path)


def test_damaged_ranks(bpe, tmp_path):
    ranks = ranks_of(bpe)
    whole = write_ranks(tmp_path / "gpt.tiktoken", ranks).read_bytes()
    lines = whole.splitlines(keepends=True)
    bad = [
        ("cut", b"".join(lines[:90]), "the byte 0x5a is no token of it"),
        ("line", b"".join([*lines[:300], b"?\n"]), r"line 301: expected .* b'\?"),
    ]
    for name, data, message in bad:
        (tmp_path / f"{name}.tiktoken").write_bytes(data)
        with pytest.raises(DataError, match=message):
            load_tokenizer(tmp_path / f"{name}.tiktoken")
    (tmp_path / "text.tiktoken").write_text("{}")
    with pytest.raises(DataError, match="not tiktoken ranks"):
        load_tokenizer(tmp_path / "text.tiktoken")


# ---- SentencePiece -------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def model(request, tmp_path_factory) -> Path:
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "text").write_text("".join(line.replace("\n", " ") + "\n" for line in TRAINING))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "m"),
        vocab_size=5000,
        model_type=request.param,
        byte_fallback=True,
        character_coverage=0.98,
        pad_id=3,
        minloglevel=2,
        num_threads=1,
    )
    return folder / "m.model"


def test_sentencepiece(model, tmp_path):
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ours = load_tokenizer(model)
    expected = [theirs.encode(line) for line in LINES]
    assert first_difference(ids_of(ours, LINES), expected) is None
    assert ours.encode_batch(LINES[:50]) == expected[:50] == [ours.encode(line) for line in LINES[:50]]
    assert [ours.decode(ids) for ids in expected[:1000]] == [theirs.decode(ids) for ids in expected[:1000]]
    assert (ours.vocab_size, ours.eod, ours.eod_token, ours.kind) == (5000, theirs.eos_id(), "</s>", "sentencepiece")
    assert ours.eod not in ours.encode("a </s> b") and ours.decode([*ours.encode("a b"), ours.eod]) == "a b</s>"
    assert ours.decode([*ours.encode("a b"), ours.eod], skip_special_tokens=True) == "a b"
    saved = load_tokenizer(ours.save(tmp_path / "saved"))
    assert saved.fingerprint == ours.fingerprint and ids_of(saved, LINES[:500]) == expected[:500]
    for text in ("a b</s>c \N{SNOWMAN} d", LINES[0]):
        ids, places = ours.encode_offsets(text)
        assert ids == ours.encode_with_special(text) and places[-1][1] >= len(text.rstrip())
        assert all(first <= after for (first, _), (after, _) in zip(places, places[1:]))
    ids, places = ours.encode_offsets("a b</s>c")
    assert [text for i, text in zip(ids, places) if i == ours.eod] == [(3, 7)]


def test_sentencepiece_errors(tmp_path, monkeypatch):
    (tmp_path / "x.model").write_bytes(b"no model")
    with pytest.raises(DataError, match=r"x\.model: neither a SentencePiece model nor a file of tiktoken ranks"):
        load_tokenizer(tmp_path / "x.model")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(DataError, match=r"pip install 'phalanx\[sentencepiece\]'"):
        load_tokenizer(tmp_path / "x.model")


# ---- every kind ----------------------------------------------------------------------------------


def test_every_kind_goes_to_other_processes_and_back_from_its_folder(bpe, tmp_path):
    kinds = [
        bpe,
        byte_tokenizer(),
        load_tokenizer("null:300"),
        load_tokenizer(write_ranks(tmp_path / "cl100k_base.tiktoken", ranks_of(bpe))),
    ]
    for n, ours in enumerate(kinds):
        texts = ["1 2 299", "7"] if ours.kind == "null" else LINES[:300]
        copy = pickle.loads(pickle.dumps(ours))
        saved = load_tokenizer(ours.save(tmp_path / str(n)))
        for other in (copy, saved):
            assert ids_of(other, texts) == ids_of(ours, texts)
            assert (other.eod, other.vocab_size, other.special_tokens) == (
                ours.eod,
                ours.vocab_size,
                ours.special_tokens,
            )
        assert (copy.kind, copy.fingerprint) == (ours.kind, ours.fingerprint)
        if ours.kind != "null":
            assert ours.eod not in copy.encode("<|endoftext|>")


def test_sentencepiece_goes_to_other_processes(model):
    ours = load_tokenizer(model)
    copy = pickle.loads(pickle.dumps(ours))
    assert copy.fingerprint == ours.fingerprint and ids_of(copy, LINES[:300]) == ids_of(ours, LINES[:300])


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(DataError, match="holds no tokenizer: none of tokenizer.json, vocab.json, tokenizer.model"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="tok.json: no such file"):
        load_tokenizer(tmp_path / "tok.json")


# ---- the way of a tokenizer through a run --------------------------------------------------------


KINDS = ("bytes", "null:300", "tiktoken", "sentencepiece")


@pytest.mark.parametrize(
    "kind, model", [*((kind, "unigram") for kind in KINDS), ("sentencepiece", "bpe")], indirect=["model"]
)
def test_the_tokenizer_travels_into_checkpoints(kind, bpe, model, tmp_path):
    """From text over a checkpoint to text again; where it is a tokenizer.json, transformers reads the same ids from
    the checkpoint."""
    from transformers import PreTrainedTokenizerFast

    from phalanx.base.placement import Placement
    from phalanx.checkpoint.keep import find
    from phalanx.config.read import load_run
    from phalanx.inference.generate import generate
    from phalanx.inference.request import SamplingOptions
    from phalanx.text.prepare import prepare
    from phalanx.training.main import train

    path = {"tiktoken": write_ranks(tmp_path / "cl100k_base.tiktoken", ranks_of(bpe)), "sentencepiece": model}.get(
        kind, kind
    )
    ours = load_tokenizer(path)
    texts = [" ".join(map(str, range(n % 200, 300))) for n in range(40)] if kind == "null:300" else LINES[:200]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([tmp_path / "text.jsonl"], tmp_path / "text", ours)
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 16}
    vocab = -(-ours.vocab_size // 128) * 128
    run = load_run(
        base={
            "model": {"family": "gpt2", "vocab_size": vocab, **size},
            "dir": str(tmp_path / "run"),
            "log": {"report": False},
            "train": {"steps": 1, "global_batch": 1, "micro_batch": 1, "seq_length": 16, "device": "cpu"},
            "data": {"paths": str(tmp_path / "text"), "tokenizer": str(path), "split": "1,0,0"},
        }
    )
    train(run, Placement())
    weights = find(str(tmp_path / "run")) / "weights"
    saved = load_tokenizer(weights)
    assert ids_of(saved, texts) == ids_of(ours, texts) and (saved.eod, saved.fingerprint) == (
        ours.eod,
        ours.fingerprint,
    )
    assert json.loads((weights / "config.json").read_text())["eos_token_id"] == ours.eod
    assert generate(str(tmp_path / "run"), "1 2", SamplingOptions(tokens=3)).startswith("1 2")
    if kind != "sentencepiece":
        theirs = PreTrainedTokenizerFast.from_pretrained(weights)
        assert [theirs(text, add_special_tokens=False)["input_ids"] for text in texts] == ids_of(ours, texts)
        assert theirs.eos_token_id == ours.eod
    wrong = replace(run, dir=str(tmp_path / "wrong"), data=replace(run.data, tokenizer="null:9"))
    with pytest.raises(DataError, match="text: made with another tokenizer"):
        train(wrong, Placement())
