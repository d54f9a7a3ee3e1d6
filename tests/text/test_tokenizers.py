"""Kinds of tokenizers: what we train, transformers reads with the same ids; GPT-2's two files give GPT-2's ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.base.errors import DataError
from phalanx.text.tokenizers import TRAINERS, load_tokenizer, train_bpe

TEXTS = [path.read_text(encoding="utf-8") for path in sorted(Path(json.__file__).parent.glob("*.py"))]
ODD = ["", " ", "naïve café, 東京 🙂", "tab\tand\r\nline", "<|endoftext|> is only text here", "\x00\x7f"]


@pytest.mark.parametrize("kind", TRAINERS)
def test_transformers_reads_what_we_train(kind, tmp_path):
    from transformers import AutoTokenizer

    ours = TRAINERS[kind](TEXTS, 700, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert ours.vocab_size == len(theirs) <= 700
    assert theirs.eos_token_id == ours.eod == theirs.convert_tokens_to_ids("<|endoftext|>")
    for text in TEXTS:
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
    assert load_tokenizer(tmp_path).fingerprint == ours.fingerprint


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_bytes_come_back(kind, tmp_path):
    ours = TRAINERS[kind](TEXTS, 700, tmp_path)
    for text in [*TEXTS, *ODD]:
        assert ours.decode(ours.encode(text)) == text
    assert ours.eod not in ours.encode(ODD[4])


def test_gpt2_vocabulary_and_merges(tmp_path):
    """The two files that GPT-2 came in, written by the library from a trained model, give the ids of its
    tokenizer.json."""
    import tokenizers

    trained = train_bpe(TEXTS, 600, tmp_path / "json")
    core = tokenizers.Tokenizer.from_file(str(tmp_path / "json" / "tokenizer.json"))
    (tmp_path / "two").mkdir()
    core.model.save(str(tmp_path / "two"))
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == ["merges.txt", "vocab.json"]
    loaded = load_tokenizer(tmp_path / "two")
    assert loaded.eod == trained.eod
    for text in [*TEXTS, *ODD]:
        assert loaded.encode(text) == trained.encode(text)
    (tmp_path / "two" / "merges.txt").unlink()
    with pytest.raises(DataError, match=r"merges\.txt"):
        load_tokenizer(tmp_path / "two")


def test_the_command(tmp_path):
    """`data train-tokenizer` on a .jsonl file and a folder gives what the function gives on the same texts."""
    from click.testing import CliRunner

    from phalanx.cli.main import cli

    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"body": {"text": text}}) + "\n" for text in TEXTS))
    done = CliRunner().invoke(
        cli,
        ["data", "train-tokenizer", str(lines), "-o", str(tmp_path / "a"), "--vocab-size", "600", "--key", "body.text"],
    )
    assert done.exit_code == 0, done.output
    assert (
        load_tokenizer(tmp_path / "a").fingerprint
        == load_tokenizer(train_bpe(TEXTS, 600, tmp_path / "b").save(tmp_path / "b")).fingerprint
    )
