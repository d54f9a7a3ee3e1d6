"""Preparing data: every kind of input, bad documents by name, the same bytes for any number of workers and after any
kill."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.base.errors import DataError
from phalanx.data.index import Corpus
from phalanx.text import prepare as module
from phalanx.text import shards
from phalanx.text.prepare import PrepareOptions, merge_shards
from phalanx.text.tokenizers import byte_tokenizer
from phalanx.text.workers import ordered

ROOT = Path(__file__).parents[2]
TEXTS = [f"document {n} " + "ü<|endoftext|> word " * (n * 7919 % 23) for n in range(400)]
LINES = "".join(json.dumps({"meta": {"id": n}, "text": text}) + "\n" for n, text in enumerate(TEXTS))


USUAL = PrepareOptions()


def prepare(inputs, prefix, tokenizer, options=USUAL, progress=None) -> module.Summary:
    """These tests write to the same name again and again."""
    return module.prepare(inputs, prefix, tokenizer, replace(options, overwrite=True), progress)


def documents(prefix) -> list[str]:
    corpus = Corpus(prefix)
    found = [corpus.sequence(s) for s in range(corpus.num_sequences)]
    assert all(document[-1] == 256 for document in found)
    return [bytes(document[:-1].astype(np.uint8)).decode() for document in found]


def pair(prefix) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.fixture
def lines(tmp_path) -> Path:
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.jsonl"
    path.write_text(LINES)
    return path


# ---- inputs


def test_every_kind_of_file_gives_the_same_documents(tmp_path, lines):
    zstandard = pytest.importorskip("zstandard")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    raw = LINES.encode()
    members = gzip.compress(raw[:5000]) + gzip.compress(raw[5000:]) + b"\0" * 100  # as cat makes them, and padded
    (tmp_path / "b.jsonl.gz").write_bytes(members)
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(raw[:5000]) + zstandard.compress(raw[5000:]))
    parquet.write_table(arrow.table({"text": TEXTS, "n": list(range(400))}), tmp_path / "d.parquet", row_group_size=30)
    for file in (lines, *(tmp_path / name for name in ("b.jsonl.gz", "c.jsonl.zst", "d.parquet"))):
        for size in (300, 1 << 20):  # cut in pieces, and whole
            summary = prepare([file], tmp_path / "out", byte_tokenizer(), PrepareOptions(piece_bytes=size))
            assert documents(tmp_path / "out") == TEXTS
            assert (summary.files, summary.documents, summary.inputs[0]["bytes"]) == (1, 400, file.stat().st_size)
    with pytest.raises(DataError, match="d.parquet: no column 'txt'; columns: text, n"):
        prepare([tmp_path / "d.parquet"], tmp_path / "x", byte_tokenizer(), PrepareOptions(key="txt"))
    with pytest.raises(DataError, match="d.parquet: row 0: no text under key 'n', but int"):
        prepare([tmp_path / "d.parquet"], tmp_path / "x", byte_tokenizer(), PrepareOptions(key="n"))


def test_text_folders_globs_and_line_ends(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbfbee\r\n"))
    (tmp_path / "in" / "a.txt").write_bytes(b"one\r\ntwo\r")
    (tmp_path / "in" / "c.jsonl").write_bytes(b'{"text": "three\\r\\n"}\r\n{"text": "last"}')
    expected = ["one\r\ntwo\r", "bee\r\n", "three\r\n", "last"]
    for given in (tmp_path / "in", tmp_path / "in" / "*", tmp_path / "**" / "[abc].[tj]*"):
        prepare([given], tmp_path / "out", byte_tokenizer())
        assert documents(tmp_path / "out") == expected
    with pytest.raises(DataError, match=r"\*\.html: no file matches"):
        prepare([tmp_path / "*.html"], tmp_path / "out", byte_tokenizer())


def test_keys_and_no_end_of_document(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": {"b": "in"}, "t": "title"}\n{"a.b": "dot", "t": ""}\n')
    prepare([tmp_path / "a.jsonl"], tmp_path / "out", byte_tokenizer(), PrepareOptions(key="a.b"))
    assert documents(tmp_path / "out") == ["in", "dot"]
    prepare([tmp_path / "a.jsonl"], tmp_path / "out", byte_tokenizer(), PrepareOptions(key=["t", "a.b"]))
    assert documents(tmp_path / "out") == ["title\nin", "\ndot"]
    summary = prepare(
        [tmp_path / "a.jsonl"], tmp_path / "out", byte_tokenizer(), PrepareOptions(key="t", append_eod=False)
    )
    assert bytes(Corpus(tmp_path / "out").tokens(0, 5).astype(np.uint8)) == b"title"
    assert (summary.tokens, summary.documents, summary.empty, summary.lengths) == (5, 1, 1, {"2**2": 1})


GOOD = b'{"text": "ok"}\n'


@pytest.mark.parametrize(
    ("line", "reason", "message"),
    [
        (b'{"text": "\xff"}\n', "not UTF-8", r"line 2: not UTF-8: byte 0xff at offset 25"),
        (b'{"text": "a\0b"}\n', "not JSON", r"line 2: not JSON: Invalid control.*at byte 15"),
        (b'{"text": "a\\u0000b"}\n', "NUL", r"line 2: a NUL character.*at byte 15"),
        (b'{"txt": "a"}\n', "no key", r"line 2: no text under key 'text'; keys: txt; try --json-keys txt \(at byte 15"),
        (b'{"text": 3}\n', "no text", r"line 2: no text under key 'text', but int"),
        (b'{"text": null}\n', "no text", r"line 2: no text under key 'text', but NoneType"),
        (b'{"text": "a", "x": NaN}\n', "NaN", r"line 2: NaN is not JSON"),
        (b'{"text": "a", "text": "b"}\n', "duplicate key", r"line 2: key 'text' occurs twice"),
        (
            b'{"text": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
            "nesting",
            r"line 2: JSON nested too deeply",
        ),
        (b'{"text": "a', "cut", r"line 2: not JSON, the file ends inside this line.*at byte 26"),
        (b"\xef\xbb\xbf" + GOOD, "not JSON", r"line 2: not JSON"),
        (b'{"text": "\\ud800"}\n', "half a character", r"line 2: not text"),
    ],
)
def test_bad_lines_are_named_or_counted(tmp_path, line, reason, message):
    after = b"" if reason == "cut" else GOOD
    for name, data in (("a.jsonl", GOOD + line + after), ("a.jsonl.gz", gzip.compress(GOOD + line + after))):
        (tmp_path / name).write_bytes(data)
        for size in (10, 1000):
            with pytest.raises(DataError, match=f"{name}: {message}"):
                prepare([tmp_path / name], tmp_path / "out", byte_tokenizer(), PrepareOptions(piece_bytes=size))
            assert not list(tmp_path.glob("out*")) and (size == 10 or not list(tmp_path.glob(".out*")))
            summary = prepare(
                [tmp_path / name], tmp_path / "skip", byte_tokenizer(), PrepareOptions(errors="skip", piece_bytes=size)
            )
            assert (summary.skipped, summary.skipped_by) == (1, {reason: 1})
            assert documents(tmp_path / "skip") == ["ok"] * (1 if reason == "cut" else 2)


def test_compressed_files_that_end_too_early(tmp_path):
    whole = gzip.compress(LINES.encode())
    (tmp_path / "good.jsonl").write_bytes(GOOD)
    for name, data in (
        ("a.jsonl.gz", whole[: len(whole) // 2]),
        ("b.jsonl.gz", whole[:2000] + b"\xff" * 50 + whole[2050:]),
    ):
        (tmp_path / name).write_bytes(data)
        for size in (100, 1 << 20):
            with pytest.raises(
                DataError,
                match=rf"{name}: line \d+: (the compressed file is cut short after {len(data)} bytes|damaged)",
            ):
                prepare([tmp_path / name], tmp_path / "out", byte_tokenizer(), PrepareOptions(piece_bytes=size))
            inputs = [tmp_path / name, tmp_path / "good.jsonl"]
            summary = prepare(
                inputs, tmp_path / "skip", byte_tokenizer(), PrepareOptions(errors="skip", piece_bytes=size)
            )
            assert summary.skipped_by["damaged"] == 1
            found = documents(tmp_path / "skip")
            assert (len(found) > 10 or name == "b.jsonl.gz") and found == [*TEXTS[: len(found) - 1], "ok"]


def test_missing_extras_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for name in ("a.jsonl.zst", "a.parquet"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(DataError, match=r"pip install 'phalanx\[data\]'"):
            prepare([tmp_path / name], tmp_path / "out", byte_tokenizer())


# ---- workers, kills, shuffles, shards


def undisturbed(folder: Path, inputs: list[Path], **settings) -> tuple[bytes, bytes]:
    prepare(inputs, folder / "undisturbed", byte_tokenizer(), PrepareOptions(piece_bytes=1000, **settings))
    return pair(folder / "undisturbed")


def test_any_number_of_workers_gives_the_same_bytes(tmp_path, lines):
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    inputs, seen = [lines, tmp_path / "b.jsonl.gz"], []
    expected = undisturbed(tmp_path, inputs)
    assert documents(tmp_path / "undisturbed") == TEXTS * 2
    summary = prepare(
        inputs,
        tmp_path / "out",
        byte_tokenizer(),
        PrepareOptions(piece_bytes=1000, workers=2),
        progress=lambda *at: seen.append(at),
    )
    assert pair(tmp_path / "out") == expected
    assert json.loads((tmp_path / "out.json").read_text()) == vars(summary)
    assert len(seen) > 20 and seen == sorted(seen) and seen[-1] == (sum(file.stat().st_size for file in inputs),) * 2
    lines.write_text(LINES + '{"txt": 3}\n')
    with pytest.raises(DataError, match=r"a\.jsonl: line 401: no text under key 'text'; keys: txt"):
        prepare([lines], tmp_path / "bad", byte_tokenizer(), PrepareOptions(piece_bytes=1000, workers=2))


def test_a_batch_at_a_time_is_read(tmp_path, lines, monkeypatch):
    """Workers do not make the reader run ahead of them."""
    taken = []
    ahead = []
    for result in ordered(pass_on, "x", (taken.append(n) or n for n in range(30)), 2):
        ahead.append(len(taken) - result)
    assert taken == list(range(30)) and max(ahead) <= 5


def pass_on(shared, item):
    return item


def test_stopped_anywhere_it_goes_on(tmp_path, lines, monkeypatch):
    expected = undisturbed(tmp_path, [lines], shuffle=5)
    write, assemble = shards.write_piece, shards.assemble
    dice, written, stops = random.Random(0), [], 0

    def fragile(path, *rest):
        if dice.random() < 0.2:
            raise Stop
        written.append(path.name)
        write(path, *rest)

    def fragile_assemble(*given):
        counts = assemble(*given)
        if stops < 8:
            raise Stop
        return counts

    monkeypatch.setattr(shards, "write_piece", fragile)
    monkeypatch.setattr(shards, "assemble", fragile_assemble)
    while True:
        try:
            prepare([lines], tmp_path / "out", byte_tokenizer(), PrepareOptions(piece_bytes=1000, shuffle=5))
            break
        except Stop:
            stops += 1
            assert not list(tmp_path.glob("out*"))
    assert stops >= 8 and len(written) == len(set(written)) > 20
    assert pair(tmp_path / "out") == expected and not list(tmp_path.glob(".out*"))


class Stop(BaseException):
    pass


PROGRAM = """
import sys
from phalanx.text.prepare import PrepareOptions, prepare
from phalanx.text.tokenizers import byte_tokenizer
from phalanx.text.workers import ordered
if __name__ == "__main__":
    prepare([sys.argv[1]], sys.argv[2], byte_tokenizer(), PrepareOptions(piece_bytes=1000, workers=2))
"""


def test_killed_and_run_again(tmp_path, lines):
    expected = undisturbed(tmp_path, [lines])
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), str(lines), str(tmp_path / "out")]
    for count in (1, 12):
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
        limit = time.monotonic() + 60
        while (
            len(list(tmp_path.glob(".out.pieces/0*"))) < count and process.poll() is None and time.monotonic() < limit
        ):
            time.sleep(0.002)
        process.kill()
        process.wait()
        assert not list(tmp_path.glob("out*")) or process.returncode == 0
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=60)
    assert pair(tmp_path / "out") == expected and not list(tmp_path.glob(".out*"))


def test_pieces_of_other_inputs_or_policies_are_not_used(tmp_path, lines):
    lines.write_text(LINES + '{"txt": 3}\n')
    for _ in range(2):
        with pytest.raises(DataError, match="line 401"):
            prepare([lines], tmp_path / "out", byte_tokenizer(), PrepareOptions(piece_bytes=1000))
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / ".out.pieces").iterdir() if path.name[0] == "0"}
    assert len(kept) > 20
    lines.write_text(LINES[: len(LINES) // 2].rpartition("\n")[0] + "\n")
    prepare([lines], tmp_path / "out", byte_tokenizer(), PrepareOptions(piece_bytes=1000))
    assert pair(tmp_path / "out") == undisturbed(tmp_path, [lines])
    with module._folder(tmp_path / "out", "x"), pytest.raises(DataError, match="another process is writing it"):
        prepare([lines], tmp_path / "out", byte_tokenizer())


def test_an_input_that_changes_is_refused(tmp_path, lines):
    def grow(done, total):
        lines.write_text(LINES * 2)

    with pytest.raises(DataError, match=r"a\.jsonl: changed while it was read"):
        prepare([lines], tmp_path / "out", byte_tokenizer(), PrepareOptions(piece_bytes=1000), progress=grow)
    assert not list(tmp_path.glob("out*"))


def test_a_full_disk_keeps_the_pieces(tmp_path, lines, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        monkeypatch.context() as patch,
        pytest.raises(DataError, match="disk full; finished pieces are kept in .*out.pieces"),
    ):
        patch.setattr(shards, "assemble", full)
        prepare([lines], tmp_path / "out", byte_tokenizer(), PrepareOptions(piece_bytes=1000))
    monkeypatch.setattr(shards, "write_piece", full)  # nothing is encoded again
    prepare([lines], tmp_path / "out", byte_tokenizer(), PrepareOptions(piece_bytes=1000))
    assert documents(tmp_path / "out") == TEXTS


def test_shuffle_is_a_permutation_by_seed_alone(tmp_path, lines):
    orders = []
    for seed, size in ((1, 1000), (1, 1 << 20), (2, 1000)):
        prepare([lines], tmp_path / "out", byte_tokenizer(), PrepareOptions(piece_bytes=size, shuffle=seed))
        orders.append(documents(tmp_path / "out"))
    assert orders[0] == orders[1] != orders[2] and sorted(orders[0]) == sorted(orders[2]) == sorted(TEXTS)
    assert sum(a == b for a, b in zip(orders[0], TEXTS)) < 10


@pytest.mark.parametrize("count", [1, 3, 200])
def test_shards_merged_are_the_whole(tmp_path, lines, count):
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    (tmp_path / "c.txt").write_text("")
    inputs = [lines, tmp_path / "b.jsonl.gz", tmp_path / "c.txt"]
    expected = undisturbed(tmp_path, inputs)
    done = [tmp_path / f"s{n}" for n in range(count)]
    for n in range(count):
        prepare(inputs, done[n], byte_tokenizer(), PrepareOptions(piece_bytes=1000, shard=(n, count)))
    assert count < 200 or not all(Corpus(shard).num_tokens for shard in done)  # more shards than pieces
    summary = merge_shards(tmp_path / "out", done, copy=True)
    whole = json.loads((tmp_path / "undisturbed.json").read_text())
    assert pair(tmp_path / "out") == expected
    for name in ("files", "documents", "tokens", "text_bytes", "lengths", "inputs", "tokenizer"):
        assert getattr(summary, name) == whole[name]
    note = json.loads((tmp_path / "s0.json").read_text())
    (tmp_path / "s0.json").write_text(json.dumps({**note, "tokenizer": "other"}))
    if len(done) > 1:
        with pytest.raises(DataError, match="made with different settings: tokenizer is"):
            merge_shards(tmp_path / "x", done)


def test_same_bytes_as_megatron(tmp_path, lines):
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    torch = pytest.importorskip("torch")
    prepare([lines], tmp_path / "ours", byte_tokenizer(), PrepareOptions(piece_bytes=1000))
    theirs = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for text in TEXTS:
        ids = [*text.encode(), 256]
        theirs.add_document(torch.tensor(ids), [len(ids)])
    theirs.finalize(str(tmp_path / "theirs.idx"))
    assert pair(tmp_path / "ours") == pair(tmp_path / "theirs")


def test_megatron_reads_a_copied_merge(tmp_path, lines):
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    for n in range(2):
        prepare([lines], tmp_path / f"s{n}", byte_tokenizer(), PrepareOptions(shard=(n, 2), piece_bytes=2000))
    merge_shards(tmp_path / "m", [tmp_path / "s0", tmp_path / "s1"], copy=True)
    theirs = megatron.IndexedDataset(str(tmp_path / "m"))
    assert [bytes(theirs[i][:-1].astype(np.uint8)).decode() for i in range(len(theirs))] == TEXTS
