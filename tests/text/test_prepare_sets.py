"""Splitting, merging without copying, datasets on disk, memory, outputs that exist, files that cannot be written:
`data prepare` at its edges."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from phalanx.base.errors import DataError
from phalanx.cli.main import cli
from phalanx.data.config import DataConfig
from phalanx.data.index import Corpus, CorpusWriter
from phalanx.text.prepare import PrepareOptions, check_tokenizer, check_tokenizers, merge_shards, prepare
from phalanx.text.tokenizers import byte_tokenizer, load_tokenizer, train_bpe
from tests.harness.sample import rest_in_soak

ROOT = Path(__file__).parents[2]
TEXTS = [f"document {n % 550} " + "wörter and more " * (n % 550 * 7919 % 23) for n in range(600)]  # 50 of them twice


@pytest.fixture
def lines(tmp_path) -> Path:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return tmp_path / "a.jsonl"


def documents(prefix: object) -> list[str]:
    corpus = Corpus(str(prefix))
    return [bytes(corpus.sequence(s)[:-1].astype(np.uint8)).decode() for s in range(corpus.num_sequences)]


def files(prefix: object) -> list[bytes]:
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")]


# ---- splitting -----------------------------------------------------------------------------------

SPLIT = {"train": 0.8, "valid": 0.15, "test": 0.05}


def test_a_split_is_a_partition_by_text(tmp_path, lines):
    whole = prepare([lines], tmp_path / "out", byte_tokenizer(), PrepareOptions(split=SPLIT))
    parts = {name: documents(tmp_path / f"out-{name}") for name in SPLIT}
    assert not (tmp_path / "out.bin").exists() and whole.documents == 600
    for name, found in parts.items():
        assert found == [text for text in TEXTS if text in set(found)]  # in order, and equal texts together
        assert abs(len(found) - SPLIT[name] * 600) < 4 * (600 * SPLIT[name]) ** 0.5
        note = json.loads((tmp_path / f"out-{name}.json").read_text())
        corpus = Corpus(tmp_path / f"out-{name}")
        assert (note["documents"], note["tokens"], note["part"]) == (
            len(found),
            corpus.num_tokens,
            f"{name}={SPLIT[name]:g}",
        )
        assert sum(note["lengths"].values()) == len(found) and whole.parts[name] == [note["documents"], note["tokens"]]
    assert sorted(sum(parts.values(), [])) == sorted(TEXTS)
    (tmp_path / "b.jsonl").write_text(
        json.dumps({"text": "new"}) + "\n" + lines.read_text()
    )  # a document stays where it was
    prepare([tmp_path / "b.jsonl"], tmp_path / "more", byte_tokenizer(), PrepareOptions(split=SPLIT))
    for name, found in parts.items():
        assert [text for text in documents(tmp_path / f"more-{name}") if text != "new"] == found


def test_a_split_does_not_depend_on_how_the_work_is_cut(tmp_path, lines):
    prepare([lines], tmp_path / "a", byte_tokenizer(), PrepareOptions(split=SPLIT))
    prepare(
        [lines],
        tmp_path / "b",
        byte_tokenizer(),
        PrepareOptions(split={k: 20 * v for k, v in SPLIT.items()}, piece_bytes=2000, workers=2),
    )
    for n in range(3):
        prepare(
            [lines], tmp_path / f"s{n}", byte_tokenizer(), PrepareOptions(split=SPLIT, shard=(n, 3), piece_bytes=2000)
        )
    for name in SPLIT:
        expected = files(tmp_path / f"a-{name}")
        assert files(tmp_path / f"b-{name}") == expected
        merge_shards(tmp_path / f"m-{name}", [tmp_path / f"s{n}-{name}" for n in range(3)], copy=True)
        assert files(tmp_path / f"m-{name}") == expected
    prepare([lines], tmp_path / "c", byte_tokenizer(), PrepareOptions(split=SPLIT, shuffle=3))
    for name in SPLIT:
        assert documents(tmp_path / f"c-{name}") != documents(tmp_path / f"a-{name}")
        assert sorted(documents(tmp_path / f"c-{name}")) == sorted(documents(tmp_path / f"a-{name}"))


def test_bad_splits(tmp_path, lines):
    for split, message in (
        ({"a/b": 1}, "becomes part of a file name"),
        ({"a": 0}, "a=0: a share is a number > 0"),
        ({"a": float("nan")}, "> 0"),
    ):
        with pytest.raises(DataError, match=message):
            prepare([lines], tmp_path / "out", byte_tokenizer(), PrepareOptions(split=split))
    with pytest.raises(DataError, match="valid=1e-09 of 600 documents is none; give it a larger share"):
        prepare([lines], tmp_path / "out", byte_tokenizer(), PrepareOptions(split={"train": 1, "valid": 1e-9}))
    assert not list(tmp_path.glob("out*"))
    for text in ("train", "a=1,a=2", "a=x"):
        done = CliRunner().invoke(
            cli, ["data", "prepare", str(lines), "-o", str(tmp_path / "x"), "--tokenizer", "bytes", "--split", text]
        )
        assert done.exit_code == 2 and "such as train=0.98,valid=0.02" in done.output
    done = CliRunner().invoke(
        cli,
        [
            "data",
            "prepare",
            str(lines),
            "-o",
            str(tmp_path / "x"),
            "--tokenizer",
            "bytes",
            "--split",
            "train=98,valid=2",
        ],
    )
    assert done.exit_code == 0 and f" tokens -> {tmp_path}/x-valid.bin\n" in done.output


# ---- merging -------------------------------------------------------------------------------------


def test_a_merged_set_refers_to_its_shards(tmp_path, lines):
    prepare([lines], tmp_path / "whole", byte_tokenizer())
    (tmp_path / "deep").mkdir()
    for n in range(3):
        prepare([lines], tmp_path / "deep" / f"s{n}", byte_tokenizer(), PrepareOptions(shard=(n, 3), piece_bytes=2000))
    done = CliRunner().invoke(
        cli, ["data", "merge", str(tmp_path / "m"), *(str(tmp_path / "deep" / f"s{n}") for n in range(3))]
    )
    assert done.exit_code == 0, done.output
    merge_shards(tmp_path / "again", [tmp_path / "m", tmp_path / "deep" / "s1"])  # a merged set can be merged
    assert not (tmp_path / "m.bin").exists()
    whole, merged = Corpus(tmp_path / "whole"), Corpus(tmp_path / "m")
    assert (tmp_path / "m.idx").read_bytes() == (tmp_path / "whole.idx").read_bytes()
    assert documents(tmp_path / "m") == TEXTS and documents(tmp_path / "again") == TEXTS + documents(
        tmp_path / "deep" / "s1"
    )
    dice, ends = (
        random.Random(0),
        np.cumsum([Corpus(tmp_path / "deep" / f"s{n}").num_tokens for n in range(3)]).tolist(),
    )
    starts = [0, *ends[:2], *(end - 1 for end in ends), *(dice.randrange(whole.num_tokens) for _ in range(50))]
    for start in starts:
        for stop in {start, start + 1, min(start + 700, whole.num_tokens), whole.num_tokens}:
            assert np.array_equal(merged.tokens(start, stop), whole.tokens(start, stop))
    assert np.array_equal(merged.document_starts(0, whole.num_tokens), whole.document_starts(0, whole.num_tokens))


def test_a_merged_set_that_lost_a_file_is_refused(tmp_path, lines):
    for n in range(2):
        prepare([lines], tmp_path / f"s{n}", byte_tokenizer(), PrepareOptions(shard=(n, 2), piece_bytes=2000))
    merge_shards(tmp_path / "m", [tmp_path / "s0", tmp_path / "s1"])
    size = (tmp_path / "s1.bin").stat().st_size
    with open(tmp_path / "s1.bin", "ab") as file:
        file.write(b"xx")
    with pytest.raises(DataError, match=rf"s1\.bin: {size + 2} bytes, expected {size} by m\.bins"):
        Corpus(tmp_path / "m")
    (tmp_path / "s1.bin").unlink()
    with pytest.raises(DataError, match=r"s1\.bin: no such file; .*m\.bins needs it"):
        Corpus(tmp_path / "m")
    (tmp_path / "m.bins").write_text('{"a": 1}')
    with pytest.raises(DataError, match=r"m\.bins: not a list of \.bin files"):
        Corpus(tmp_path / "m")


def test_merging_refuses_what_only_a_copy_can_do(tmp_path, lines):
    prepare([lines], tmp_path / "a", byte_tokenizer())
    corpus = Corpus(tmp_path / "a")
    with CorpusWriter(tmp_path / "odd", np.uint16) as writer:
        writer.add_document([1, 2, 3])
        writer.add_document([4, 5])
    (tmp_path / "odd.sums").unlink()
    raw = bytearray((tmp_path / "odd.idx").read_bytes())
    raw[34:42], raw[42:58] = (
        np.array([2, 3], np.int32).tobytes(),
        np.array([6, 0], np.int64).tobytes(),
    )  # the other way round in the .bin
    (tmp_path / "odd.idx").write_bytes(raw)
    with pytest.raises(
        DataError, match="odd: its sequences do not fill its .bin one after another; merge it with --copy"
    ):
        merge_shards(tmp_path / "m", [tmp_path / "a", tmp_path / "odd"])
    merge_shards(tmp_path / "m", [tmp_path / "a", tmp_path / "odd"], copy=True)
    assert Corpus(tmp_path / "m").tokens(corpus.num_tokens, corpus.num_tokens + 5).tolist() == [4, 5, 1, 2, 3]


# ---- datasets on disk ----------------------------------------------------------------------------


def save_to_disk(folder: Path, texts: list[str], shards: int) -> Path:
    """What `datasets.Dataset.save_to_disk` writes: arrow streams, and which of the files are meant."""
    arrow = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    names = [f"data-{n:05d}-of-{shards:05d}.arrow" for n in range(shards)]
    for n, name in enumerate(names):
        part = texts[n * len(texts) // shards : (n + 1) * len(texts) // shards]
        table = arrow.table({"id": list(range(len(part))), "meta": [{"text": text} for text in part], "text": part})
        with arrow.OSFile(str(folder / name), "wb") as file, arrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=40)
    (folder / "cache-0123.arrow").write_bytes(b"left by map()")
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names], "_split": "train"})
    )
    return folder


def test_datasets_on_disk(tmp_path):
    folder = save_to_disk(tmp_path / "set" / "train", TEXTS, 3)
    for size in (1000, 1 << 20):
        for key in ("text", "meta.text"):
            assert (
                prepare(
                    [folder],
                    tmp_path / "out",
                    byte_tokenizer(),
                    PrepareOptions(key=key, piece_bytes=size, overwrite=True),
                ).files
                == 3
            )
            assert documents(tmp_path / "out") == TEXTS
    with pytest.raises(DataError, match=r"data-00000-of-00003\.arrow: row 0: no text under key 'id', but int"):
        prepare([folder], tmp_path / "x", byte_tokenizer(), PrepareOptions(key="id"))
    with pytest.raises(DataError, match="no column 'txt'; columns: id, meta, text"):
        prepare([folder], tmp_path / "x", byte_tokenizer(), PrepareOptions(key="txt"))
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"several splits; name those that are meant: .*set/train, .*set/test"):
        prepare([tmp_path / "set"], tmp_path / "x", byte_tokenizer())
    (folder / "data-00001-of-00003.arrow").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"data-00001-of-00003\.arrow: not an Arrow file, or cut short"):
        prepare([folder], tmp_path / "x", byte_tokenizer())
    (folder / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00003\.arrow: no such file"):
        prepare([folder], tmp_path / "x", byte_tokenizer())
    (folder / "state.json").write_text('{"_data_files": []}x')
    with pytest.raises(DataError, match="not a dataset that save_to_disk wrote"):
        prepare([folder], tmp_path / "x", byte_tokenizer())


# ---- outputs that exist --------------------------------------------------------------------------


@pytest.mark.parametrize("split", [None, SPLIT])
def test_the_same_again_does_nothing_and_another_is_refused(tmp_path, lines, split):
    first = prepare([lines], tmp_path / "out", byte_tokenizer(), PrepareOptions(split=split))
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out*")}
    assert vars(prepare([lines], tmp_path / "out", byte_tokenizer(), PrepareOptions(split=split))) == vars(first)
    for other in ({"shuffle": 1}, {"append_eod": False}, {"errors": "skip"}):
        with pytest.raises(DataError, match=r"out.*\.bin exists, made of other inputs or with other settings"):
            prepare([lines], tmp_path / "out", byte_tokenizer(), PrepareOptions(split=split, **other))
    (tmp_path / ".out.pieces").mkdir()  # as a kill at the very end leaves it
    prepare([lines], tmp_path / "out", byte_tokenizer(), PrepareOptions(split=split))
    assert not (tmp_path / ".out.pieces").exists()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("out*")} == written
    command = ["data", "prepare", str(lines), "-o", str(tmp_path / "out"), "--tokenizer", "bytes", "--shuffle", "1"]
    command += ["--split", ",".join(f"{k}={v}" for k, v in split.items())] if split else []
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 1 and isinstance(done.exception, DataError)
    assert CliRunner().invoke(cli, [*command, "--overwrite"]).exit_code == 0
    name = "out-train" if split else "out"
    assert json.loads((tmp_path / f"{name}.json").read_text())["shuffle"] == 1


def test_foreign_files_are_not_replaced(tmp_path, lines):
    (tmp_path / "out.idx").write_bytes(b"mine")
    with pytest.raises(DataError, match="out.idx exists"):
        prepare([lines], tmp_path / "out", byte_tokenizer())
    with pytest.raises(DataError, match="out.idx exists"):
        merge_shards(tmp_path / "out", [])
    assert (tmp_path / "out.idx").read_bytes() == b"mine" and not list(tmp_path.glob(".out*"))


def test_a_crash_between_the_files_is_mended(tmp_path, lines, monkeypatch):
    """The index comes last: without it nothing is seen, and the same command writes it."""
    replace, moved = os.replace, []

    def crash(source, target):
        moved.append(str(target))
        if str(target).endswith("out-valid.bin"):
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", crash)
        prepare([lines], tmp_path / "out", byte_tokenizer(), PrepareOptions(split=SPLIT))
    assert (tmp_path / "out-train.idx").exists() and not (tmp_path / "out-valid.idx").exists()
    prepare([lines], tmp_path / "out", byte_tokenizer(), PrepareOptions(split=SPLIT))
    prepare([lines], tmp_path / "good", byte_tokenizer(), PrepareOptions(split=SPLIT))
    for name in SPLIT:
        assert files(tmp_path / f"out-{name}") == files(tmp_path / f"good-{name}")
    assert not list(tmp_path.glob(".out*"))


# ---- tokenizers ----------------------------------------------------------------------------------


def test_the_manifest_remembers_the_tokenizer(tmp_path, lines):
    tokenizer = train_bpe(TEXTS, 300, tmp_path / "tokenizer")
    prepare([lines], tmp_path / "out", tokenizer)
    note = json.loads((tmp_path / "out.json").read_text())
    special = {"<|endoftext|>": 0}
    assert note["tokenizer_facts"] == {
        "kind": "json",
        "vocab_size": 300,
        "padded_vocab_size": 384,
        "eod": 0,
        "special_tokens": special,
    }
    check_tokenizer(tmp_path / "out", load_tokenizer(tmp_path / "tokenizer"))
    with pytest.raises(
        DataError,
        match=r"out: made with another tokenizer: kind json, 300 ids, end of document 0.*this one: bytes, 257 ids, 256",
    ):
        check_tokenizer(tmp_path / "out", byte_tokenizer())
    with pytest.raises(DataError, match="out: made with another tokenizer"):
        check_tokenizers(DataConfig(valid={"v": ("0.3", str(tmp_path / "out"))}, tokenizer="bytes"))
    (tmp_path / "out.json").unlink()
    check_tokenizer(tmp_path / "out", byte_tokenizer())  # as Megatron's files come
    with pytest.raises(DataError, match=r"tokenizer/gone\.json: no such file"):
        load_tokenizer(tmp_path / "tokenizer" / "gone.json")


def test_what_a_tokenizer_cannot_encode_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("1 2 3")
    (tmp_path / "b.txt").write_text("4 five")
    for workers in (1, 2):
        with pytest.raises(
            DataError, match=r"a\.txt or one of the 1 files after it: the tokenizer cannot encode 'five'"
        ):
            prepare(
                [tmp_path / "a.txt", tmp_path / "b.txt"],
                tmp_path / "out",
                load_tokenizer("null:9"),
                PrepareOptions(workers=workers),
            )
    (tmp_path / "b.txt").write_text("4")
    prepare([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "out", load_tokenizer("null:9"))
    assert Corpus(tmp_path / "out").tokens(0, 6).tolist() == [1, 2, 3, 9, 4, 9]


# ---- inputs --------------------------------------------------------------------------------------


def test_empty_inputs(tmp_path, lines):
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "empty.txt").write_bytes(b"\xef\xbb\xbf")
    for name in ("empty.jsonl", "empty.txt"):
        with pytest.raises(DataError, match=f"no text in .*{name}: 1 files"):
            prepare([tmp_path / name], tmp_path / "out", byte_tokenizer())
        assert not list(tmp_path.glob("out*"))
    summary = prepare([tmp_path / "empty.jsonl", lines, tmp_path / "empty.txt"], tmp_path / "out", byte_tokenizer())
    assert (summary.files, summary.documents, summary.empty) == (3, 600, 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_input_that_goes_away(tmp_path, lines, workers):
    (tmp_path / "b.jsonl").write_text(lines.read_text())

    def remove(done, total):
        (tmp_path / "b.jsonl").unlink(missing_ok=True)

    with pytest.raises(DataError, match=r"b\.jsonl: (No such file|was removed while)"):
        prepare(
            [lines, tmp_path / "b.jsonl"],
            tmp_path / "out",
            byte_tokenizer(),
            PrepareOptions(piece_bytes=2000, workers=workers),
            progress=remove,
        )
    assert not list(tmp_path.glob("out*"))


# ---- in a process of its own: memory, limits, kills ----------------------------------------------

PROGRAM = """
import json, resource, sys
from phalanx.text.prepare import PrepareOptions, prepare
from phalanx.text.tokenizers import byte_tokenizer
from phalanx.base.errors import DataError
if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    if limit := settings.pop("limit", None):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        inputs, prefix = settings.pop("inputs"), settings.pop("prefix")
        prepare(inputs, prefix, byte_tokenizer(), PrepareOptions(**settings))
    except DataError as error:
        sys.exit(f"DataError: {error}")
    print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)

    def start(**settings) -> subprocess.Popen[str]:
        command = [sys.executable, str(tmp_path / "program.py"), json.dumps(settings, default=str)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


def peak(process: subprocess.Popen[str]) -> int:
    """Bytes of its own at most (what getrusage tells starts with what its parent had)."""
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    return int(out) * 1024


def write_lines(path: Path, size: int) -> Path:
    """About `size` bytes of different lines."""
    dice = random.Random(1)
    words = ["".join(dice.choices("etaoinshrdlu", k=dice.randrange(2, 9))) for _ in range(5000)]
    with open(path, "w") as file:
        while file.tell() < size:
            block = [json.dumps({"text": " ".join(dice.choices(words, k=200))}) + "\n" for _ in range(50)]
            for _ in range(20):
                file.write("".join(dice.sample(block, 50)))
    return path


@pytest.mark.parametrize("size", rest_in_soak((150_000_000, 300_000_000), (150_000_000,)))
def test_memory_does_not_grow_with_the_input(tmp_path, program, size):
    small = peak(program(inputs=[write_lines(tmp_path / "small.jsonl", 30_000_000)], prefix=tmp_path / "small"))
    large = peak(program(inputs=[write_lines(tmp_path / "large.jsonl", size)], prefix=tmp_path / "large"))
    assert Corpus(tmp_path / "large").num_tokens > 0.9 * size
    assert large < small + 40_000_000 and large < 300_000_000


def test_a_line_of_100_megabytes(tmp_path, program):
    word = "a line without an end "
    with open(tmp_path / "a.jsonl", "w") as file:
        file.write('{"text": "first"}\n{"text": "' + word * (100_000_000 // len(word)) + '"}\n{"text": "last"}\n')
    assert peak(program(inputs=[tmp_path / "a.jsonl"], prefix=tmp_path / "out")) < 1_200_000_000
    corpus = Corpus(tmp_path / "out")
    assert (
        corpus.num_documents == 3 and corpus.num_tokens == len(word) * (100_000_000 // len(word)) + len("firstlast") + 3
    )
    assert corpus.sequence(2).tolist() == [*b"last", 256]


def test_a_file_that_cannot_grow_keeps_the_pieces(tmp_path, program, lines):
    """The kernel refuses to write past a limit, as it does on a full disk; the same command goes on when there is
    room."""
    process = program(inputs=[lines], prefix=tmp_path / "out", piece_bytes=10_000, limit=60_000)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1 and "out: larger than files may be here; finished pieces are kept in" in error, error
    assert not list(tmp_path.glob("out*"))
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / ".out.pieces").iterdir() if path.name[0] == "0"}
    assert len(kept) > 5
    peak(program(inputs=[lines], prefix=tmp_path / "out", piece_bytes=10_000))
    assert documents(tmp_path / "out") == TEXTS and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("workers", rest_in_soak((1, 2), (2,)))
def test_killed_at_ten_random_moments(tmp_path, program, workers):
    source = write_lines(tmp_path / "in.jsonl", 40_000_000)
    prepare([source], tmp_path / "good", byte_tokenizer(), PrepareOptions(split=SPLIT, shuffle=2))
    settings = dict(
        inputs=[source], prefix=tmp_path / "out", split=SPLIT, shuffle=2, workers=workers, piece_bytes=400_000
    )
    dice, kills = random.Random(workers), 0
    while kills < 10:
        count = dice.randrange(100 * kills // 10, 100 * (kills + 1) // 10 + 2)  # pieces on disk at the time of the kill
        process = program(**settings)
        limit = time.monotonic() + 100
        while (
            len(list(tmp_path.glob(".out.pieces/0*"))) < count and process.poll() is None and time.monotonic() < limit
        ):
            time.sleep(0.001)
        process.kill()
        process.communicate()
        if process.returncode == 0:
            break
        kills += 1
    assert kills >= 8
    peak(program(**settings))
    for name in SPLIT:
        assert files(tmp_path / f"out-{name}") == files(tmp_path / f"good-{name}")
