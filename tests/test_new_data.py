"""Data of a new user: what is almost right is answered with what to type."""

from __future__ import annotations

import json

import pytest

from phalanx.base.errors import DataError
from phalanx.data.prepare import prepare
from phalanx.data.tokenizers import byte_tokenizer


def refused(folder, *inputs) -> str:
    with pytest.raises(DataError) as caught:
        prepare(inputs, folder / "out", byte_tokenizer())
    return str(caught.value)


@pytest.mark.trust(24, "phalanx data prepare of records with the text under content", "it says --json-keys content, not --errors skip")
@pytest.mark.parametrize("row, key", [
    ({"id": "7", "content": "arma"}, "content"), ({"txt": "arma", "id": "12345678"}, "txt"), ({"id": "7", "story": "arma virumque"}, "story"),
])  # fmt: skip
def test_a_wrong_key_suggests_the_right_one(tmp_path, row, key):
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    said = refused(tmp_path, tmp_path / "a.jsonl")
    assert f"try --json-keys {key}" in said and "--errors" not in said


def test_chats_are_told_from_texts(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "x"}]}) + "\n")
    assert "chat data is not supported yet" in refused(tmp_path, tmp_path / "a.jsonl")


@pytest.mark.trust(24, "phalanx data prepare of a .csv file", "it is refused with a way to convert it, named or in a folder alike")
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz"])
def test_tables_of_values_are_refused(tmp_path, name):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(b"text\narma\n")
    for given in (tmp_path / "in" / name, tmp_path / "in", tmp_path / "in/*"):
        assert f"{name}: tables of this kind are not read: make a .jsonl or .parquet" in refused(tmp_path, given)


@pytest.mark.trust(24, "phalanx data prepare org/name", "it says that nothing is downloaded, and the command that does it")
def test_names_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refused(tmp_path, "roneneldan/TinyStories")
    assert "nothing is downloaded" in said and "hf download roneneldan/TinyStories --repo-type dataset --local-dir TinyStories" in said
    assert "nothing is downloaded" not in refused(tmp_path, "absent/a.txt") and "nothing is downloaded" not in refused(tmp_path, "absent")
