"""Checksums of token files: damage in an .idx is refused when it is opened, damage in a .bin is named by `data
verify` and by a run."""

from __future__ import annotations

import json
import os
import random
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from phalanx.base.errors import DataError
from phalanx.base.placement import Placement
from phalanx.cli.main import cli
from phalanx.data import background
from phalanx.data.background import BackgroundCheck
from phalanx.data.checksums import SegmentSums, compare, cut, read_sums
from phalanx.data.config import DataConfig
from phalanx.data.index import Corpus, CorpusWriter
from phalanx.text.prepare import PrepareOptions, merge_shards, prepare
from phalanx.text.tokenizers import byte_tokenizer
from phalanx.training.main import train
from tests.checkpoint.test_checkpoint_bytes import flip
from tests.training.test_loop import make_run

FLIPS = 200


@pytest.fixture
def lines(tmp_path) -> Path:
    """120 documents, about 6 kB."""
    words = random.Random(0)
    texts = [
        " ".join(words.choice(("arma", "virumque", "cano", "Troiae")) for _ in range(words.randrange(3, 15)))
        for _ in range(120)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path / "a.jsonl"


def bits(file: Path, count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).sample(range(8 * file.stat().st_size), count)


def verify(*words: object) -> tuple[int, str]:
    """(exit code, output) of `phalanx data verify`."""
    done = CliRunner().invoke(cli, ["data", "verify", *map(str, words)])
    return getattr(done.exception, "exit_code", done.exit_code), done.output


def small_run(folder: Path, prefix: Path, **train):
    run = make_run(folder, **{"steps": 2, "global_batch": 2, "micro_batch": 1, "seq_length": 8, **train})
    return replace(run, model=replace(run.model, vocab_size=257), data=DataConfig(paths=str(prefix), split="100,0,0"))


# ---- what is written


def test_segments_of_a_file_that_is_written_in_pieces(monkeypatch):
    monkeypatch.setattr("phalanx.data.checksums.SEGMENT", 10)
    data = bytes(range(47))
    sums = SegmentSums()
    for at in range(0, 25, 7):
        sums.update(data[at : min(at + 7, 25)])
    sums.extend(cut(data[25:40]))
    sums.update(data[40:])
    found = sums.finish()
    assert [segment.size for segment in found] == [10, 10, 5, 10, 5, 7]
    ends = np.cumsum([segment.size for segment in found]).tolist()
    assert list(found) == [cut(data[end - segment.size : end])[0] for segment, end in zip(found, ends)]


@pytest.mark.parametrize(
    "settings", [{}, {"workers": 2}, {"shuffle": 3}, {"split": {"a": 0.6, "b": 0.4}}, {"shard": (0, 1)}]
)
def test_whatever_prepare_writes_is_checked(tmp_path, lines, settings):
    prepare([lines], tmp_path / "out", byte_tokenizer(), PrepareOptions(piece_bytes=1500, **settings))
    for prefix in sorted(path.with_suffix("") for path in tmp_path.glob("out*.idx")):
        corpus = Corpus(prefix)
        [file] = corpus.bin_files
        assert corpus.is_checked and sum(segment.size for segment in file.segments) == 2 * corpus.num_tokens
        assert compare([file], 2) == []
        assert verify(prefix) == (
            0,
            f"{prefix}: good: {corpus.num_tokens:,} tokens, {sizes(2 * corpus.num_tokens)} compared with checksums\n",
        )


def sizes(count: int) -> str:
    return f"{count / 1000:.1f} kB" if count < 9950 else f"{count / 1000:.0f} kB"


@pytest.mark.parametrize("copy", [False, True])
def test_merging_carries_checksums_on(tmp_path, lines, copy):
    """Those of the shards: a shard that was damaged before the merge is still found after it."""
    for n in range(2):
        prepare([lines], tmp_path / f"s{n}", byte_tokenizer(), PrepareOptions(piece_bytes=1500, shard=(n, 2)))
    flip(tmp_path / "s1.bin", 80)
    merge_shards(tmp_path / "all", [tmp_path / "s0", tmp_path / "s1"], copy=copy)
    corpus = Corpus(tmp_path / "all")
    assert corpus.is_checked
    [problem] = compare(corpus.bin_files, 1)
    assert str(tmp_path / ("all.bin" if copy else "s1.bin")) in problem and "damaged: bytes" in problem


def test_a_merge_with_unchecked_files(tmp_path, lines):
    for n in range(2):
        prepare([lines], tmp_path / f"s{n}", byte_tokenizer(), PrepareOptions(shard=(n, 2), piece_bytes=1500))
    (tmp_path / "s0.sums").unlink()
    merge_shards(tmp_path / "all", [tmp_path / "s0", tmp_path / "s1"])
    assert [file.segments is None for file in Corpus(tmp_path / "all").bin_files] == [True, False]
    code, said = verify(tmp_path / "all")
    assert code == 0 and f"unchecked: there are no checksums of {tmp_path / 's0.bin'}" in said and "good" in said
    merge_shards(tmp_path / "one", [tmp_path / "s0", tmp_path / "s1"], copy=True)  # from now on it is checked
    assert Corpus(tmp_path / "one").is_checked and verify(tmp_path / "one")[0] == 0


def test_an_interrupted_preparation_leaves_no_valid_looking_pair(tmp_path, lines, monkeypatch):
    """Stopped before each rename and removal: what can be opened then is whole, the old files or the new ones."""
    (tmp_path / "b.jsonl").write_text(lines.read_text() * 2)
    prepare([lines], tmp_path / "old", byte_tokenizer())
    prepare([tmp_path / "b.jsonl"], tmp_path / "new", byte_tokenizer())
    whole = [(tmp_path / f"{name}.bin").read_bytes() for name in ("old", "new")]
    real = {"replace": os.replace, "unlink": Path.unlink}
    opened, stopped, number = 0, True, 0
    while stopped:
        for suffix in (".json", ".sums", ".bin", ".idx"):
            (tmp_path / f"out{suffix}").write_bytes((tmp_path / f"old{suffix}").read_bytes())
        left = number

        def counted(name, *args, **options):
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return real[name](*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda *args: counted("replace", *args))
            patch.setattr(Path, "unlink", lambda *args, **options: counted("unlink", *args, **options))
            try:
                prepare([tmp_path / "b.jsonl"], tmp_path / "out", byte_tokenizer(), PrepareOptions(overwrite=True))
                stopped = False
            except KeyboardInterrupt:
                stopped = True
        if (tmp_path / "out.idx").exists():
            assert Corpus(tmp_path / "out").is_checked and (tmp_path / "out.bin").read_bytes() in whole
            assert verify(tmp_path / "out")[0] == 0
            opened += 1
        number += 1
    assert opened >= 2 and number > opened
    assert (tmp_path / "out.bin").read_bytes() == whole[1]


# ---- what is found


@pytest.mark.trust(
    11,
    "58 of 131 flipped bits in lengths and pointers of an .idx opened as valid",
    "200 of 200 are refused when it is opened",
)
def test_every_flip_in_an_index_is_refused_at_open(tmp_path, lines):
    prepare([lines], tmp_path / "out", byte_tokenizer())
    for bit in bits(tmp_path / "out.idx", FLIPS):
        flip(tmp_path / "out.idx", bit)
        with pytest.raises(DataError, match=r"out\.idx: "):
            Corpus(tmp_path / "out")
        flip(tmp_path / "out.idx", bit)
    Corpus(tmp_path / "out")


@pytest.mark.trust(
    11,
    "a bit that flips in a .bin was trained on",
    "phalanx data verify names the file and the bytes, 200 times of 200, with exit 3",
)
def test_every_flip_in_tokens_is_named_by_verify(tmp_path, lines):
    prepare([lines], tmp_path / "out", byte_tokenizer(), PrepareOptions(piece_bytes=1500))
    [file] = Corpus(tmp_path / "out").bin_files
    starts = [place.start for place in file.ranges()]
    assert len(starts) > 3
    for bit in bits(tmp_path / "out.bin", FLIPS):
        flip(tmp_path / "out.bin", bit)
        code, said = verify(tmp_path / "out")
        [place] = [p for p in file.ranges() if p.start <= bit // 8 < p.start + p.size]
        assert (
            code == 3
            and f"{tmp_path / 'out.bin'}: damaged: bytes {place.start}..{place.start + place.size - 1} have" in said
        )
        flip(tmp_path / "out.bin", bit)
    assert verify(tmp_path / "out")[0] == 0


def test_verify_of_a_config_and_of_what_is_not_there(tmp_path, lines, monkeypatch):
    for name in ("a", "b"):
        prepare([lines], tmp_path / name, byte_tokenizer())
    flip(tmp_path / "b.bin", 8)
    monkeypatch.chdir(tmp_path)
    model = {
        "family": "llama",
        "vocab_size": 257,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    steps = {"steps": 2, "global_batch": 1, "micro_batch": 1, "seq_length": 8, "eval_interval": 1}
    config = {"model": model, "train": steps, "data": {"paths": "a", "valid": {"more": "b"}}, "dir": "run"}
    Path("run.yaml").write_text(json.dumps(config))
    code, said = verify("run.yaml")
    assert code == 3 and "a: good: " in said and "b.bin: damaged: bytes 0.." in said
    code, said = verify("run.yaml", "data.valid={}")
    assert code == 0 and "b" not in said.replace("bytes", "").replace("kB", "")
    assert verify("c")[0] == 3
    Path("a.bin").unlink()
    assert verify("run.yaml")[0] == 3
    code, said = verify("run.yaml", "data.paths=[]", "data.text=a.jsonl", "data.tokenizer=bytes", "data.valid={}")
    assert code == 2


def test_damaged_or_foreign_checksums(tmp_path, lines):
    """A .sums whose own bits flip is refused or means the same; one of other token files is refused; neither is
    ignored."""
    prepare([lines], tmp_path / "out", byte_tokenizer(), PrepareOptions(piece_bytes=1500))
    good = read_sums(tmp_path / "out")
    for bit in bits(tmp_path / "out.sums", 300):
        flip(tmp_path / "out.sums", bit)
        try:
            assert read_sums(tmp_path / "out") == good
        except DataError as error:
            assert "out.sums: " in str(error) and "remove it" in str(error)
        flip(tmp_path / "out.sums", bit)
    with CorpusWriter(tmp_path / "other", np.uint16) as writer:
        writer.add_document([1, 2, 3])
    (tmp_path / "out.sums").write_bytes((tmp_path / "other.sums").read_bytes())
    with pytest.raises(DataError, match=r"out\.idx: damaged: .* remove .*out\.sums"):
        Corpus(tmp_path / "out")


def test_files_of_other_tools_are_read_unchecked(tmp_path, lines):
    prepare([lines], tmp_path / "out", byte_tokenizer())
    (tmp_path / "out.sums").unlink()
    assert not Corpus(tmp_path / "out").is_checked
    assert verify(tmp_path / "out") == (0, f"unchecked: there are no checksums of {tmp_path / 'out.bin'}\n")
    shown = CliRunner().invoke(cli, ["data", "show", str(tmp_path / "out")])
    assert shown.exit_code == 0 and f"unchecked: there are no checksums of {tmp_path / 'out.bin'}" in shown.output


def test_the_table_of_a_run_marks_what_is_unchecked(tmp_path, lines, capfd):
    for name in ("a", "b"):
        prepare([lines], tmp_path / name, byte_tokenizer())
    run = small_run(tmp_path / "run", tmp_path / "a")
    run = replace(run, data=replace(run.data, paths=(str(tmp_path / "a"), str(tmp_path / "b"))))
    train(run, Placement())
    said = capfd.readouterr().out
    assert "checksums" not in said
    (tmp_path / "b.sums").unlink()
    train(replace(run, dir=str(tmp_path / "run2")), Placement())
    head, a, b = [
        line
        for line in capfd.readouterr().out.splitlines()
        if line.startswith(("source", str(tmp_path / "a"), str(tmp_path / "b")))
    ]
    assert head.endswith("checksums") and b.endswith("unchecked") and "unchecked" not in a


# ---- in a run


@pytest.mark.trust(11, "phalanx train with a flipped bit in text.idx", "exit 3 before the first step, naming the file")
def test_a_run_with_a_damaged_index_does_not_start(warm, tmp_path, lines):
    prepare([lines], tmp_path / "train", byte_tokenizer())
    flip(tmp_path / "train.idx", 8 * 34 + 1)
    done = warm.phalanx("train", str(config_of(tmp_path)), cwd=tmp_path)
    assert done.returncode == 3 and f"{tmp_path / 'train.idx'}: damaged: " in done.stderr, done.stderr
    assert "step=" not in done.stdout and "Traceback" not in done.stderr


def config_of(folder: Path) -> Path:
    model = {
        "family": "llama",
        "vocab_size": 257,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    steps = {"steps": 2, "global_batch": 2, "micro_batch": 1, "seq_length": 8, "device": "cpu"}
    data = {"paths": str(folder / "train"), "split": "100,0,0"}
    (folder / "run.yaml").write_text(
        json.dumps({"model": model, "train": steps, "data": data, "dir": "run", "log": {"report": False}})
    )
    return folder / "run.yaml"


def is_named(folder: Path, prefix: Path, bit: int) -> None:
    """A whole run of two steps over tokens with this bit flipped ends with DataError that names the file and the
    place."""
    flip(Path(f"{prefix}.bin"), bit)
    try:
        with pytest.raises(
            DataError, match=rf"{prefix.name}\.bin: (damaged: bytes \d+\.\.\d+ have|token id \d+ is outside)"
        ):
            train(small_run(folder, prefix), Placement())
    finally:
        flip(Path(f"{prefix}.bin"), bit)


@pytest.mark.trust(
    11, "phalanx train with a flipped bit in text.bin", "exit 3 before the run ends, naming the file and the bytes"
)
def test_a_run_finds_damaged_tokens_before_it_ends(warm, tmp_path, lines):
    """Also where two ranks run: both say the same."""
    prepare([lines], tmp_path / "train", byte_tokenizer(), PrepareOptions(piece_bytes=1500))
    for number, bit in enumerate(bits(tmp_path / "train.bin", 4)):
        is_named(tmp_path / f"run{number}", tmp_path / "train", bit)
    flip(tmp_path / "train.bin", 1)
    done = warm.phalanx("train", str(config_of(tmp_path)), "--ranks", "2", cwd=tmp_path)
    assert done.returncode == 3 and "train.bin: damaged: bytes 0.." in done.stderr and "Traceback" not in done.stderr, (
        done.stderr
    )


@pytest.mark.soak
@pytest.mark.parametrize("part", range(4))
def test_runs_find_every_flip_before_they_end(tmp_path, lines, part):
    prepare([lines], tmp_path / "train", byte_tokenizer(), PrepareOptions(piece_bytes=1500))
    for number, bit in enumerate(bits(tmp_path / "train.bin", FLIPS // 4, seed=part)):
        is_named(tmp_path / f"run{number}", tmp_path / "train", bit)


def test_the_background_check_reads_every_byte_once_from_any_place(tmp_path, lines):
    for name in ("a", "b"):
        prepare([lines], tmp_path / name, byte_tokenizer(), PrepareOptions(piece_bytes=1500))
    corpora = [Corpus(tmp_path / name) for name in "aab"]
    places = {file.path: [place for place in file.ranges()] for corpus in corpora for file in corpus.bin_files}
    for first in (0.0, 0.3, 0.999):
        check = BackgroundCheck(corpora, first)
        assert sorted(check._ranges()) == sorted(place for ranges in places.values() for place in ranges)
        with check:
            assert check.finish(60.0) is None
        check.look()
    flip(tmp_path / "b.bin", 8 * 100)
    with BackgroundCheck(corpora) as check:
        assert "b.bin: damaged: bytes 0.." in (check.finish(60.0) or "")
        with pytest.raises(DataError, match="phalanx data verify"):
            check.look()


def test_the_background_check_rests_until_the_run_ends(tmp_path, lines, monkeypatch):
    """With so low a rate that the first rest would last for hours, `finish` and `close` still come back at once."""
    monkeypatch.setattr(background, "RATE", 1.0)
    prepare([lines], tmp_path / "a", byte_tokenizer(), PrepareOptions(piece_bytes=1500))
    corpus = Corpus(tmp_path / "a")
    with BackgroundCheck([corpus]) as check:
        assert check.finish(60.0) is None and check._left == 0
    with BackgroundCheck([corpus]) as check:
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "phalanx-data-check"]
    said: list[str] = []
    with BackgroundCheck([corpus], warn=said.append) as check:
        assert check.finish(-1.0) is None
    assert len(said) == 1 and "were not compared with their checksums; `phalanx data verify CONFIG` does it" in said[0]


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_file_that_goes_away_in_a_run_is_no_damage(tmp_path, lines, how):
    prepare([lines], tmp_path / "a", byte_tokenizer())
    said: list[str] = []
    corpus = Corpus(tmp_path / "a")  # holds the file as it was
    check = BackgroundCheck([corpus], warn=said.append)
    (tmp_path / "a.bin").unlink()
    if how == "replaced":
        (tmp_path / "b").write_bytes(b"other" * 1000)
        (tmp_path / "b").rename(tmp_path / "a.bin")
    with check:
        assert check.finish(60.0) is None
    assert said == [
        f"{tmp_path / 'a.bin'} was replaced or removed while the run was going on: it is not compared with "
        "its checksums"
    ]
