"""Data of a new user: what is almost right is answered with what to type."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from phalanx.base.errors import DataError
from phalanx.cli.main import cli
from phalanx.data.config import DataConfig
from phalanx.text.cache import use_text
from phalanx.text.prepare import PrepareOptions, prepare
from phalanx.text.tokenizers import byte_tokenizer


def refused(folder, *inputs) -> str:
    with pytest.raises(DataError) as caught:
        prepare(inputs, folder / "out", byte_tokenizer())
    return str(caught.value)


@pytest.mark.trust(
    24, "phalanx data prepare of records with the text under content", "it says --json-keys content, not --errors skip"
)
@pytest.mark.parametrize(
    "row, key",
    [
        ({"id": "7", "content": "arma"}, "content"),
        ({"txt": "arma", "id": "12345678"}, "txt"),
        ({"id": "7", "story": "arma virumque"}, "story"),
    ],
)
def test_a_wrong_key_suggests_the_right_one(tmp_path, row, key):
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    said = refused(tmp_path, tmp_path / "a.jsonl")
    assert f"try --json-keys {key}" in said and "--errors" not in said


@pytest.mark.trust(
    24, "phalanx data prepare of a .parquet file without a column text", "it suggests the column that holds text"
)
@pytest.mark.parametrize(
    "columns, key",
    [
        ({"id": ["7"], "content": ["arma"]}, "content"),
        ({"n": [7], "story": ["arma"]}, "story"),
        ({"n": [7]}, None),
    ],
)
def test_a_wrong_column_suggests_the_right_one(tmp_path, columns, key):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, pa.table(columns).schema) as writer,
    ):
        writer.write_table(pa.table(columns))
    for name in ("a.parquet", "a.arrow"):
        said = refused(tmp_path, tmp_path / name)
        assert f"no column 'text'; columns: {', '.join(columns)}" in said
        assert said.endswith(f"; try --json-keys {key}") if key else "try" not in said


@pytest.mark.trust(
    24, "data.text of records with the text under content", "it says data.json_keys, which is what a config has"
)
def test_a_wrong_key_of_a_run(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "arma"}\n')
    with pytest.raises(
        DataError, match=r"no text under key 'text'; keys: content; try data\.json_keys=content \(at byte 0\)$"
    ):
        use_text(
            DataConfig(text=str(tmp_path / "a.jsonl"), tokenizer="bytes"), tmp_path / "run", 300, say=lambda text: None
        )
    (tmp_path / "a.jsonl").write_text('{"text": "arma"}\n{"text": 7}\n')
    with pytest.raises(DataError, match=r"data\.text_errors=skip goes on$"):
        use_text(
            DataConfig(text=str(tmp_path / "a.jsonl"), tokenizer="bytes"), tmp_path / "run", 300, say=lambda text: None
        )


def test_chats_are_told_from_texts(tmp_path):
    chat = [{"role": "user", "content": "x"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    assert "data.chats reads them" in refused(tmp_path, tmp_path / "a.jsonl")
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"messages": [chat]}), tmp_path / "a.parquet")
    assert "data.chats reads them" in refused(tmp_path, tmp_path / "a.parquet")


@pytest.mark.trust(
    24, "phalanx data prepare own.json -o own --overwrite", "an input is never replaced by what is written"
)
@pytest.mark.parametrize("name", ["own.json", "own.bin", "own.idx", "own-train.json"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_input_is_not_overwritten(tmp_path, name, overwrite):
    file = tmp_path / name
    file.write_text('{"text": "arma"}\n')
    (tmp_path / "linked").symlink_to(tmp_path, target_is_directory=True)
    split = {"train": 0.5, "valid": 0.5} if "-" in name else {}
    for prefix in (tmp_path / "own", tmp_path / "linked/own"):
        with pytest.raises(DataError, match=f"{name}: this input would be replaced"):
            prepare([file], prefix, byte_tokenizer(), PrepareOptions(overwrite=overwrite, split=split))
    assert file.read_text() == '{"text": "arma"}\n' and sorted(path.name for path in tmp_path.iterdir()) == [
        "linked",
        name,
    ]


@pytest.mark.trust(24, "phalanx data prepare: its last line", "a line for a person; the full record goes to the .json")
def test_the_last_line_is_for_a_person(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "arma virumque"}\n{"text": ""}\nno\n{"text": "cano"}\n' * 500)
    words = [
        "data",
        "prepare",
        str(tmp_path / "a.jsonl"),
        "-o",
        str(tmp_path / "o"),
        "--tokenizer",
        "bytes",
        "--errors",
        "skip",
    ]
    done = CliRunner().invoke(cli, words)
    first, *rest = done.output.splitlines()
    assert re.fullmatch(
        rf"1,000 documents, 9,500 tokens \(8\.5 kB\) -> {tmp_path}/o\.bin in \d+\.\d s, [\d.]+ [kM]B/s", first
    ), done.output
    assert rest == ["skipped: 500 (not JSON)", "left out: 500 without text"]
    words = ["data", "merge", str(tmp_path / "two"), str(tmp_path / "o"), str(tmp_path / "o")]
    assert CliRunner().invoke(cli, words).output == f"2,000 documents, 19,000 tokens -> {tmp_path}/two.idx\n"
    assert (
        CliRunner().invoke(cli, [*words, "--copy", "--overwrite"]).output
        == f"2,000 documents, 19,000 tokens -> {tmp_path}/two.bin\n"
    )


@pytest.mark.trust(
    24, "phalanx data prepare of a .csv file", "it is refused with a way to convert it, named or in a folder alike"
)
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz"])
def test_tables_of_values_are_refused(tmp_path, name):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(b"text\narma\n")
    for given in (tmp_path / "in" / name, tmp_path / "in", tmp_path / "in/*"):
        assert f"{name}: tables of this kind are not read: make a .jsonl or .parquet" in refused(tmp_path, given)


@pytest.mark.trust(
    24, "phalanx data prepare org/name", "it says that nothing is downloaded, and the command that does it"
)
def test_names_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refused(tmp_path, "roneneldan/TinyStories")
    assert (
        "nothing is downloaded" in said
        and "hf download roneneldan/TinyStories --repo-type dataset --local-dir TinyStories" in said
    )
    assert "nothing is downloaded" not in refused(tmp_path, "absent/a.txt") and "nothing is downloaded" not in refused(
        tmp_path, "absent"
    )
