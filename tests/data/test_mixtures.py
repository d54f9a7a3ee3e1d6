"""From prepared tokens to the model: mixtures, the audit against a real run, text as data, sizes of a corpus,
documents kept apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx.base.errors import ConfigError, DataError
from phalanx.base.placement import Placement
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.comm.mesh import Mesh
from phalanx.config.read import explain, load_run
from phalanx.config.run import LogConfig, RampConfig, Run, TrainConfig
from phalanx.config.write import to_dict
from phalanx.data.check import check
from phalanx.data.config import DataConfig, SourceConfig
from phalanx.data.index import Corpus, CorpusWriter
from phalanx.data.loader import Prefetcher, train_loader, valid_loaders
from phalanx.engine.build import build, init_weights
from phalanx.forecast.data_table import (
    consumed_before,
    data_table,
    open_loaders,
    passages_of,
    plan_data,
    step_data,
    step_text,
)
from phalanx.forecast.decide import make_plan
from phalanx.launch.local import start
from phalanx.models.gpt2 import GPT2Config
from phalanx.models.llama import LlamaConfig
from phalanx.planning.order import eval_samples, global_batch_at, micro_batches
from phalanx.text.cache import find_text, use_text

ROOT = Path(__file__).resolve().parents[2]
MODEL = LlamaConfig(vocab_size=1200, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
BASE = {
    "model": {
        "family": "llama",
        "vocab_size": 1200,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
    "train": {"steps": 5, "global_batch": 4, "micro_batch": 2, "seq_length": 8},
}


def write(prefix: Path, documents, dtype=np.uint16) -> str:
    with CorpusWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)


def counting(prefix: Path, tokens: int, first: int = 0, document: int = 7) -> str:
    """Token n of the stream is first + n."""
    return write(prefix, np.split(np.arange(first, first + tokens), range(document, tokens, document)))


def options(samples: int, seq_length: int = 8) -> dict[str, int]:
    return {"seq_length": seq_length, "seed": 3, "vocab_size": 1200, "samples": samples}


def sources(**given) -> DataConfig:
    return DataConfig(split="1,0,0", sources={name: SourceConfig(**c) for name, c in given.items()})


# ---- the forms of a mixture


def test_megatrons_string_is_a_list_of_weights_and_paths(tmp_path):
    a, b = counting(tmp_path / "a", 401), counting(tmp_path / "b", 161, 500)
    same = [
        load_run(None, [f"data.paths=3 {a} 1 {b}", "data.split=1,0,0"], BASE).data,
        load_run(None, [f"data.paths=[3, {a}, 1.0, {b}]", "data.split=1,0,0"], BASE).data,
        DataConfig(paths=f"3 {a} 1 {b}", split="1,0,0"),
        DataConfig(paths=(a, b), weights=(3, 1), split="1,0,0"),
        sources(a={"paths": (a,), "weight": 3}, b={"paths": b, "weight": 1}),
    ]
    batches = [train_loader(config, **options(40)).batch(range(40)) for config in same]
    assert all(torch.equal(batches[0].tokens, batch.tokens) for batch in batches)
    assert (batches[0].tokens >= 500).sum() == 10 * 8
    rows = train_loader(same[-1], **options(40)).use(40)
    assert [(row.name, row.share, row.used_samples) for row in rows] == [("a", 0.75, 30), ("b", 0.25, 10)]
    unweighted = load_run(None, [f"data.paths={a} {b}", "data.split=1,0,0"], BASE).data
    assert unweighted.paths == (a, b) and train_loader(unweighted, **options(4)).blend.shares == [401, 161]
    assert load_run(base=to_dict(load_run(None, [f"data.valid.web=0.5 {a} 0.5 {b}"], BASE))).data.valid == {
        "web": ("0.5", a, "0.5", b)
    }


def test_sources_are_set_key_by_key(tmp_path):
    overrides = [
        "data.sources.web.paths=x",
        "data.sources.web.weight=2",
        "data.sources.v1.2.paths=[y, z]",
        "data.sources.v1.2.tokens=7",
    ]
    run = load_run(None, overrides, BASE)
    assert run.data.sources == {
        "web": SourceConfig(paths=("x",), weight=2.0),
        "v1.2": SourceConfig(paths=("y", "z"), tokens=7),
    }
    assert "data.sources.NAME.weight: float or null, default null\n    Its share" in explain("data.sources")
    with pytest.raises(
        ConfigError,
        match=r"data.sources.web.wieght=1: is not a key of data.sources.web. Valid near it: data.sources.web.weight",
    ):
        load_run(None, ["data.sources={web: {paths: x, wieght: 1}}"], BASE)


PROBLEMS = [
    ({"paths": "0.7 a 0.3"}, "data.paths", "a weight before each prefix"),
    ({"paths": "0.7 a 0 b"}, "data.paths", "must have weights > 0"),
    ({"paths": "0.7 a 0.3 b", "weights": (1, 2)}, "data.weights", "has no effect beside the weights in data.paths"),
    ({"paths": "a", "sources": {"x": {"paths": "b"}}}, "data.sources", "excludes data.paths"),
    ({"paths": "a", "text": "b", "tokenizer": "bytes"}, "data.text", "excludes data.paths"),
    ({"mock": True, "sources": {"x": {"paths": "b"}}}, "data.mock", "excludes data.sources"),
    ({"sources": {"x": {"paths": ()}}}, "data.sources.x.paths", "needs a path"),
    ({"sources": {"x": {"paths": "1 b"}}}, "data.sources.x.paths", "without weights"),
    ({"sources": {"x": {"paths": "b", "weight": 0.0}}}, "data.sources.x.weight", "> 0"),
    ({"sources": {"x": {"paths": "b", "weight": float("nan")}}}, "data.sources.x.weight", "> 0"),
    ({"sources": {"x": {"paths": "b", "tokens": 0}}}, "data.sources.x.tokens", ">= 1"),
    ({"sources": {"x": {"paths": "b", "tokens": 5, "weight": 1.0}}}, "data.sources.x.tokens", "excludes a weight"),
    (
        {"sources": {"x": {"paths": "b"}, "y": {"paths": "c", "weight": 1.0}}},
        "data.sources.x.weight",
        "is required where another",
    ),
    ({"text": "b"}, "data.tokenizer", "is required with data.text"),
    ({"mock": True, "cache": "x"}, "data.cache", "has no effect without data.text"),
    ({"mock": True, "text_errors": "skip"}, "data.text_errors", "has no effect without data.text"),
    ({"mock": True, "json_keys": ("a",)}, "data.json_keys", "has no effect without data.text"),
    ({"paths": "a", "valid": {"valid": "b"}}, "data.valid.valid", "is the name of the validation part"),
    ({"paths": "a", "valid": {"web": "0.5 b 1"}}, "data.valid.web", "a weight before each prefix"),
]


@pytest.mark.parametrize("given, field, rule", PROBLEMS, ids=[f"{field}-{rule[:12]}" for _, field, rule in PROBLEMS])
def test_rules(given, field, rule):
    given = {**given, "sources": {name: SourceConfig(**c) for name, c in given.get("sources", {}).items()}}
    found = check(DataConfig(**given), evaluates=True, files=False)
    assert [p.field for p in found] == [field] and rule in found[0].rule


def test_missing_files_name_the_word_and_what_is_near(tmp_path):
    counting(tmp_path / "wiki", 50)
    (tmp_path / "notes").mkdir()
    wrong = f"{tmp_path}/wkii"
    config = DataConfig(paths=f"0.7 {tmp_path}/wiki 0.3 {wrong}", valid={"v": wrong}, tokenizer="bytes")
    found = {p.field: p for p in check(config, evaluates=True)}
    assert set(found) == {"data.paths.3", "data.valid.v.0"} and found["data.paths.3"].valid == (f"{tmp_path}/wiki",)
    [source] = check(DataConfig(sources={"web": SourceConfig(paths=wrong)}), evaluates=False)
    assert source.field == "data.sources.web.paths.0" and source.valid == (f"{tmp_path}/wiki",)
    [text] = check(DataConfig(text=f"{tmp_path}/ntes", tokenizer="bytes"), evaluates=False)
    assert text.field == "data.text.0" and text.valid == (f"{tmp_path}/notes",)
    assert check(DataConfig(text=f"{tmp_path}/no*", tokenizer="bytes"), evaluates=False) == []


# ---- what a mixture gives


def test_numbers_of_tokens_are_what_a_run_takes(tmp_path):
    web, code, wiki = (
        counting(tmp_path / "web", 801),
        counting(tmp_path / "code", 161, 800),
        counting(tmp_path / "wiki", 81, 960),
    )
    mixed = sources(
        web={"paths": web, "weight": 3}, wiki={"paths": wiki, "weight": 1}, code={"paths": code, "tokens": 80}
    )
    loader = train_loader(mixed, **options(50))  # 400 tokens: 80 of code, 3/4 and 1/4 of the other 320
    assert [row.used_tokens for row in loader.use(50)] == [240, 80, 80]
    whole = train_loader(sources(web={"paths": web, "tokens": 400}, code={"paths": code, "tokens": 160}), **options(70))
    assert [row.used_tokens for row in whole.use(70)] == [400, 160]
    by_size = train_loader(
        sources(web={"paths": web}, wiki={"paths": wiki}, code={"paths": code, "tokens": 40}), **options(20)
    )
    assert [float(Fraction(s, sum(by_size.blend.shares))) for s in by_size.blend.shares] == pytest.approx(
        [0.75 * 801 / 882, 0.75 * 81 / 882, 0.25]
    )


def test_numbers_of_tokens_that_cannot_be(tmp_path):
    web, code = counting(tmp_path / "web", 801), counting(tmp_path / "code", 161, 800)
    beyond = sources(web={"paths": web}, code={"paths": code, "tokens": 320})
    with pytest.raises(
        DataError,
        match=r"code.tokens=320: beyond the source: .* 20 samples x 8 tokens = 160 \(2.00 epochs\).*max_epochs >= 2.00",
    ):
        train_loader(beyond, **options(100))
    assert train_loader(replace(beyond, max_epochs=2), **options(100))
    short = sources(web={"paths": web, "tokens": 400}, code={"paths": code, "tokens": 160})
    with pytest.raises(
        DataError, match=r"the run takes 568 tokens, the sources give web 400 \+ code 160 = 560 tokens: 8 short"
    ):
        train_loader(short, **options(71))
    with pytest.raises(
        DataError, match=r"the run takes 160 tokens, of which code 160 = 160 tokens leave nothing for web"
    ):
        train_loader(sources(web={"paths": web}, code={"paths": code, "tokens": 160}), **options(20))


def test_every_prefix_is_within_one_sample_of_the_mixture(tmp_path):
    a, b, c = counting(tmp_path / "a", 401), counting(tmp_path / "b", 161, 400), counting(tmp_path / "c", 81, 600)
    mixed = sources(a={"paths": a, "weight": 0.6}, b={"paths": b, "weight": 0.3}, c={"paths": c, "tokens": 320})
    loader = train_loader(replace(mixed, max_epochs=9), **options(200))
    ideal = [Fraction(share, sum(loader.blend.shares)) for share in loader.blend.shares]
    assert [float(x) for x in ideal] == pytest.approx([0.8 * 2 / 3, 0.8 / 3, 0.2])
    of = np.searchsorted(
        [400, 600], loader.batch(range(200)).tokens.view(200, 8)[:, 0].numpy(), side="right"
    )  # by the ids themselves
    used = [0, 0, 0]
    for n, source in enumerate(of.tolist(), 1):
        used[source] += 1
        assert all(abs(count - share * n) < 1 for count, share in zip(used, ideal))


def test_several_files_of_a_source_are_shuffled_as_one(tmp_path):
    files = [counting(tmp_path / "a", 401), counting(tmp_path / "b", 161, 500), counting(tmp_path / "c", 9, 700)]
    loader = train_loader(sources(all={"paths": files}), **options(100))
    assert [(row.tokens, row.windows) for row in loader.use(71)] == [(571, 50 + 20 + 1)]
    for epoch in range(2):
        tokens = loader.batch(range(71 * epoch, 71 * epoch + 71)).tokens.view(71, 8)
        assert sorted(tokens[:, 0].tolist()) == [*range(0, 400, 8), *range(500, 660, 8), 700]
        assert torch.equal(tokens, tokens[:, :1] + torch.arange(8))
        of = np.searchsorted([500, 700], tokens[:, 0].numpy(), side="right")
        assert 15 < (np.diff(of) != 0).sum()  # the files are interleaved, not one after the other


def test_every_token_is_used_once_an_epoch(tmp_path):
    """As an input or as the label of the one before: the windows of seq_length + 1 tokens share their ends."""
    prefix = counting(tmp_path / "a", 1001, document=13)
    loader = train_loader(DataConfig(paths=(prefix,), split="1,0,0"), **options(250))
    for epoch in range(2):
        batch = loader.batch(range(125 * epoch, 125 * epoch + 125))
        assert sorted(batch.tokens.tolist()) == list(range(1000)) and sorted(batch.labels.tolist()) == list(
            range(1, 1001)
        )


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_tokens_of_a_step_for_any_number_of_ranks(tmp_path, dp):
    a, b = counting(tmp_path / "a", 701), counting(tmp_path / "b", 301, 800)
    train = TrainConfig(steps=6, global_batch=24, micro_batch=2, seq_length=8)
    run = Run(model=MODEL, train=train, data=sources(a={"paths": a, "weight": 2}, b={"paths": b, "weight": 1}))

    def steps(dp: int, first: int, consumed: int) -> torch.Tensor:
        """(steps, tokens) from step `first`, each rank through its own prefetcher."""
        parts = []
        for rank in range(dp):
            loader, _ = open_loaders(run, run.data)
            with Prefetcher(loader, micro_batches(run, loader, consumed, first, dp, rank)) as batches:
                parts.append(torch.cat([batch.tokens for batch in batches]).view(6 - first, -1))
        return torch.cat(parts, 1)

    whole = steps(1, 0, 0)
    assert torch.equal(steps(dp, 0, 0), whole)
    assert torch.equal(steps(dp, 2, 48), whole[2:])  # continued from step 2 of another number of ranks


# ---- validation sets and the table


def test_a_small_validation_set_is_read_once(tmp_path):
    a, v = counting(tmp_path / "a", 801), counting(tmp_path / "v", 25, 900)
    data = DataConfig(paths=(a,), split="90,10,0", valid={"small": (v,), "both": f"0.25 {v} 0.75 {a}"})
    run = Run(model=MODEL, train=TrainConfig(**{**BASE["train"], "eval_interval": 2, "eval_samples": 20}), data=data)
    loader, valid = open_loaders(run, data)
    assert {name: eval_samples(run, other) for name, other in valid.items()} == {"valid": 9, "small": 3, "both": 20}
    assert [(row.name, row.share) for row in valid["both"].use(20)] == [(v, 0.25), (a, 0.75)]
    table = data_table(run, loader, valid)
    rows = {line[: line.index("  ")].strip(): line.split() for line in table.splitlines()}
    assert rows[a] == [a, "721", "160", "0.22", "1"]  # 801 less 10 %, at the nearest document; 20 of its 90 windows
    assert rows["validation small"][2:] == ["25", "24", "1.00"]
    assert plan_data(run) == table and "validation small" not in plan_data(
        replace(run, train=TrainConfig(**BASE["train"]))
    )
    assert plan_data(replace(run, data=DataConfig(paths="gone"))) == "not here: gone"


# ---- the audit


def make_run(folder: Path, **train) -> Run:
    a, b = counting(folder / "a", 701, document=5), counting(folder / "b", 301, 800, document=11)
    data = sources(a={"paths": a, "weight": 2}, b={"paths": b, "weight": 1})
    settings = {"steps": 5, "global_batch": 12, "micro_batch": 2, "seq_length": 8, "device": "cpu", **train}
    return Run(
        model=MODEL, train=TrainConfig(**settings), data=data, dir=str(folder / "run"), log=LogConfig(report=False)
    )


def record(placement: Placement, config: dict, folder: str) -> None:
    """One rank of a training run that also writes down the tokens of each of its steps."""
    from phalanx.training import loop
    from phalanx.training.main import train

    real, number = loop.train_step, 0

    def train_step(state, batches, *more):
        nonlocal number
        name = f"{placement.world_size}-{placement.rank}-{number}.pt"
        torch.save([(b.tokens, b.labels, b.samples) for b in batches], Path(folder) / name)
        number += 1
        return real(state, batches, *more)

    loop.train_step = train_step
    train(load_run(base=config), placement)


def test_the_audit_is_what_a_run_was_fed(warm, tmp_path, monkeypatch):
    """Two ranks for two steps, then three from the checkpoint, with a growing batch: each micro-batch as `data show`
    says."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(sys, "executable", warm.python)  # of ranks
    run = make_run(tmp_path, rampup=RampConfig(start=12, increment=12, samples=30), global_batch=24)
    begun = replace(run, train=replace(run.train, steps=2, rampup=run.train.rampup))
    for this, ranks in ((begun, 2), (run, 3)):
        start("tests.data.test_mixtures:record", {"config": to_dict(this), "folder": str(tmp_path)}, ranks)
    loader, _ = open_loaders(run, run.data)
    corpora = {name: Corpus(tmp_path / name) for name in "ab"}
    saved = f"{run.dir}/checkpoints/step-00000002"
    assert [consumed_before(run, step) for step in (1, 2, 3)] == [
        (0, "the config"),
        (12, "the config"),
        (24, f"checkpoint {saved}"),
    ]
    elsewhere = replace(run, dir=str(tmp_path / "other"), checkpoint=CheckpointConfig(load=saved))
    assert consumed_before(elsewhere, 4) == (24 + 24, f"checkpoint {saved}")
    for step in range(1, 6):
        ranks, first = (2, 1) if step <= 2 else (3, 3)
        said = step_data(run, loader, step, ranks)
        assert said.global_batch == global_batch_at(run, said.consumed) == (24 if step > 2 else 12)
        fed = {rank: torch.load(tmp_path / f"{ranks}-{rank}-{step - first}.pt") for rank in range(ranks)}
        assert sum(len(batches) for batches in fed.values()) == len(said.micro_batches)
        for micro in said.micro_batches:
            tokens, labels, samples = fed[micro.rank][micro.number]
            assert torch.equal(micro.batch.tokens, tokens) and torch.equal(micro.batch.labels, labels)
            for n, row in enumerate(micro.rows):
                mine = slice(8 * n, 8 * n + 8)
                assert samples[mine].tolist() == [row.place.sample] * 8
                corpus = corpora[row.source]
                assert (
                    row.file == corpus.prefix
                    and corpus.tokens(row.first, row.first + 8).tolist() == tokens[mine].tolist()
                )
                for p in row.passages:
                    begin = corpus.document_start(p.document) + p.offset
                    assert (
                        tokens[mine][p.at : p.at + p.count].tolist() == corpus.tokens(begin, begin + p.count).tolist()
                    )
                assert sum(p.count for p in row.passages) == 8
    one = step_data(run, loader, 4, 3, ranks=[1])
    assert [m.rank for m in one.micro_batches] == [1] * 4 and one.micro_batches[0].rows == step_data(
        run, loader, 4, 3
    ).micro_batches[4].rows


def test_passages_by_brute_force(tmp_path):
    documents = [[5, 1, 2, 3, 4], [9, 8, 7], [6], [], [1, 1, 2, 3, 5, 8, 13]]
    corpus = Corpus(write(tmp_path / "c", documents))
    of = [(d, i) for d, document in enumerate(documents) for i in range(len(document))]
    for first in range(16):
        for count in range(1, 17 - first):
            told = [(p.document, p.offset + i) for p in passages_of(corpus, first, count) for i in range(p.count)]
            assert told == of[first : first + count]
            assert all(p.length == len(documents[p.document]) for p in passages_of(corpus, first, count))


def test_the_page_of_a_step(tmp_path):
    from phalanx.text.tokenizers import byte_tokenizer

    write(tmp_path / "t", [list(b"first document") + [256], list(b"and the second one") + [256]])
    train = TrainConfig(steps=1, global_batch=1, micro_batch=1, seq_length=32)
    run = Run(model=MODEL, train=train, data=DataConfig(paths=str(tmp_path / "t"), split="1,0,0"))
    loader, _ = open_loaders(run, run.data)
    page = step_text(run, step_data(run, loader, 1, 1), 1, byte_tokenizer())
    assert (
        "[0..14] document 0 from its token 0, 15 of 15 tokens, the whole document: 'first document<|endoftext|>'"
        in page
    )
    assert "[15..31] document 1 from its token 0, 17 of 19 tokens: 'and the second on'" in page
    mock = replace(run, data=DataConfig(mock=True))
    assert "source mock" in step_text(mock, step_data(mock, open_loaders(mock, mock.data)[0], 1, 1), 1, None)


def test_data_show(warm, tmp_path):
    write(tmp_path / "t", [list(b"ab"), list(b"c"), list(b"ab"), [], list(b"ab")])
    done = warm.phalanx("data", "show", "t", "--documents", "1", "--start", "2", cwd=tmp_path)
    assert (
        "min 0, median 2, max 2, empty 1" in done.stdout
        and "2 repeat an earlier one token for token (40.0%)" in done.stdout
    )
    assert (
        "3 times, 2 tokens: documents 0, 2, 4" in done.stdout
        and "tokens 3..4: document 2, 2 tokens: [97, 98]" in done.stdout
    )
    (tmp_path / "run.yaml").write_text(json.dumps({**BASE, "data": {"paths": ["t"], "split": "1,0,0"}}))
    short = warm.phalanx(
        "data", "show", "run.yaml", "train.seq_length=4", "--step", "3", "--ranks", "2", "--rank", "1", cwd=tmp_path
    )
    assert "data-parallel rank 1, micro-batch 0" in short.stdout and "rank 0" not in short.stdout, short.stderr
    for words, code, text in (
        (
            ("run.yaml", "train.seq_length=4", "--step", "6"),
            2,
            "--step=6: must be a step of the run, because train.steps=5",
        ),
        (("run.yaml", "train.seq_length=4", "--step", "1", "--rank", "1"), 2, "--rank=1: must be one of the ranks"),
        (("run.yaml", "data.paths=[u]"), 3, "u.bin and u.idx must exist"),
        (("t", "--step", "1"), 2, "belong to a CONFIG"),
    ):
        wrong = warm.phalanx("data", "show", *words, cwd=tmp_path)
        assert wrong.returncode == code and text in wrong.stderr and "Traceback" not in wrong.stderr, wrong.stderr


# ---- text as data


def texts(folder: Path, count: int = 60) -> Path:
    folder.mkdir()
    for n in range(count):
        (folder / f"{n:03d}.txt").write_text(f"text number {n}. " * (n % 5 + 1))
    return folder


def text_config(folder: Path, **options) -> DataConfig:
    return DataConfig(text=str(folder), tokenizer="bytes", split="90,10,0", **options)


def test_text_is_prepared_once_and_found_again(tmp_path):
    folder, said, seen = texts(tmp_path / "in"), [], []
    config = text_config(folder)
    assert find_text(config, tmp_path / "run") is None and not (tmp_path / "run").exists()
    made = use_text(
        config, tmp_path / "run", 300, say=said.append, progress=lambda done, all_: seen.append((done, all_))
    )
    [prefix] = made.sources["text"].paths
    assert made.text == () and Path(prefix).is_relative_to(tmp_path / "run/data") and len(said) == 2
    assert seen[-1][0] == seen[-1][1] == sum(file.stat().st_size for file in folder.iterdir())
    stamp = Path(prefix + ".bin").stat().st_mtime_ns
    for file in folder.iterdir():
        os.utime(file, ns=(1, 1))  # looks changed, is not
    assert (
        use_text(config, tmp_path / "run", 300, say=said.append) == made == find_text(config, tmp_path / "run")
        and len(said) == 2
    )
    assert Path(prefix + ".bin").stat().st_mtime_ns == stamp
    (folder / "000.txt").write_text("other words")
    assert find_text(config, tmp_path / "run") is None
    other = use_text(config, tmp_path / "run", 300, say=said.append)
    assert other != made and len(said) == 4
    Path(other.sources["text"].paths[0] + ".json").unlink()  # as after a kill between the files
    assert (
        find_text(config, tmp_path / "run") is None
        and use_text(config, tmp_path / "run", 300, say=said.append) == other
    )


def test_the_validation_part_of_text_is_made_of_whole_documents_from_anywhere(tmp_path):
    data = use_text(text_config(texts(tmp_path / "in")), tmp_path / "run", 300, say=lambda text: None)
    corpus = Corpus(data.sources["text"].paths[0])
    [part] = valid_loaders(data, seq_length=8, seed=1, vocab_size=300)["valid"].sources
    [cut] = part.parts
    held = [d for d in range(60) if corpus.document_start(d) >= cut.start]
    assert corpus.document_start(held[0]) == cut.start and cut.stop == corpus.num_tokens
    numbers = [
        int(bytes(corpus.tokens(corpus.document_start(d), corpus.document_start(d + 1))[:-1].tolist()).split()[2][:-1])
        for d in held
    ]
    assert min(numbers) < 30 and numbers != sorted(numbers)


def test_text_and_its_errors(tmp_path):
    folder = texts(tmp_path / "in", 3)
    with pytest.raises(DataError, match="data.tokenizer bytes has 257 ids, the model has model.vocab_size=256"):
        use_text(text_config(folder), tmp_path / "run", 256)
    (folder / "bad.txt").write_bytes(b"ok \xff")
    with pytest.raises(DataError, match=r"bad\.txt.*0xff"):
        use_text(text_config(folder), tmp_path / "run", 300, say=lambda text: None)
    said = []
    [prefix] = (
        use_text(text_config(folder, text_errors="skip"), tmp_path / "run", 300, say=said.append).sources["text"].paths
    )
    assert (
        Corpus(prefix).num_documents == 3
        and said[-1].startswith("prepared 4 files: 3 documents")
        and "1 skipped, 0 mended" in said[-1]
    )
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n')
    config = text_config(tmp_path / "a.jsonl", json_keys=("body",), cache=str(tmp_path / "cache"))
    [prefix] = use_text(config, tmp_path / "run", 300, say=lambda text: None).sources["text"].paths
    assert Corpus(prefix).num_documents == 2 and Path(prefix).is_relative_to(tmp_path / "cache")


WAITER = """
import sys
from phalanx.data.config import DataConfig
from phalanx.text.cache import use_text
print(use_text(DataConfig(text=sys.argv[1], tokenizer="bytes"), sys.argv[2], 300, say=lambda text: print(text, flush=True)).sources["text"].paths[0])
"""  # noqa: E501


def test_one_process_prepares_and_the_others_wait(warm, tmp_path):
    import fcntl

    folder, cache = texts(tmp_path / "in"), tmp_path / "run/data"
    cache.mkdir(parents=True)
    with open(cache / "lock", "w") as lock:  # this process plays the one that prepares
        lock.write("process 1 on node0")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [warm.python, "-c", WAITER, str(folder), str(tmp_path / "run")]
        waiting = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        assert all(
            p.stdout.readline() == f"wait for process 1 on node0, which prepares data in {cache}\n" for p in waiting
        )
    said = [p.communicate(timeout=60)[0].splitlines() for p in waiting]
    assert sorted(len(lines) for lines in said) == [1, 3]  # one of them prepared, both found it
    assert said[0][-1] == said[1][-1] and Corpus(said[0][-1]).num_documents == 60


def test_train_from_text(warm, tmp_path):
    texts(tmp_path / "in")
    model = {
        "family": "gpt2",
        "vocab_size": 257,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
    }
    train = {"steps": 2, "global_batch": 2, "micro_batch": 1, "seq_length": 16, "eval_interval": 1, "device": "cpu"}
    data = {"text": "in", "tokenizer": "bytes", "split": "90,10,0", "valid": {"more": "m"}}
    write(tmp_path / "m", [list(range(60))])
    (tmp_path / "run.yaml").write_text(
        json.dumps({"model": model, "train": train, "data": data, "dir": "run", "log": {"report": False}})
    )
    first = warm.phalanx("train", "run.yaml", "--ranks", "2", cwd=tmp_path)
    assert first.returncode == 0 and first.stdout.count("prepare in into") == 1, first.stderr
    assert first.stdout.index("prepare in into") < first.stdout.index("model gpt2")
    short = warm.phalanx(
        "train", "run.yaml", "--ranks", "2", "dir=other", "data.cache=run/data", "data.max_epochs=0.001", cwd=tmp_path
    )
    assert short.returncode == 3 and "text: not enough data: the run takes 4 samples from it" in short.stderr, (
        short.stderr
    )
    for text in ("validation valid", "validation more", "valid step=2 valid=", " more="):
        assert text in first.stdout
    recomputed = warm.phalanx("train", "run.yaml", "train.steps=3", cwd=tmp_path)
    assert (
        recomputed.returncode == 0
        and "prepare in into" not in recomputed.stdout
        and "is not that of" not in recomputed.stderr
    ), recomputed.stderr
    assert load_run(tmp_path / "run/config.yaml").data.text == ("in",)
    other = ("data.text=[]", "data.paths=m", "data.split=1,0,0", "data.valid={}", "train.eval_interval=null")
    mixed = warm.phalanx("train", "run.yaml", "train.steps=4", *other, cwd=tmp_path)
    assert mixed.returncode == 4 and "cannot continue from run/checkpoints/step-00000003" in mixed.stderr, mixed.stderr
    assert "data.order" in mixed.stderr and 'data.sources ["' in mixed.stderr
    mixed = warm.phalanx("train", "run.yaml", "train.steps=4", *other, "checkpoint.allow=[data]", cwd=tmp_path)
    assert mixed.returncode == 0 and "the data is not that of run/checkpoints/step-00000003" in mixed.stderr, (
        mixed.stderr
    )


# ---- sizes


HUGE = """
import re, sys, time
import numpy as np
from phalanx.base.errors import DataError
from phalanx.data.loader import Loader, Prefetcher, micro_batch_samples
from phalanx.data.mixture import hash64
from phalanx.data.sources import FileSource, cut_at_documents

class Huge:
    \"\"\"A corpus of 1e12 tokens in 1e9 documents that is computed: document d starts at 1000 d and up to 499 tokens later.\"\"\"
    prefix = bin_path = "huge"
    num_tokens, num_documents = 10**12, 10**9

    def document_start(self, d):
        return 0 if d == 0 else self.num_tokens if d == self.num_documents else 1000 * d + d * 7919 % 500

    def document_starts(self, start, stop):
        near = (self.document_start(d) for d in range(max(0, start // 1000 - 1), min(stop // 1000 + 2, self.num_documents)))
        return np.array([s for s in near if start <= s < stop], np.int64)

    def tokens(self, start, stop):
        return (hash64(np.arange(start, stop).astype(np.uint64), 5) % np.uint64(50257)).astype(np.uint16)


def memory(name):  # kB; ru_maxrss would begin with what the parent process had
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

before, began = memory("VmRSS"), time.perf_counter()
corpus = Huge()
parts = cut_at_documents(corpus, "98,2,0")
sources = [FileSource(corpus, *parts[0], 4096, 50257, key) for key in (1, 2, 3)]
loader = Loader(sources, [0.7, 0.2, 0.1], seq_length=4096, document_attention=True)
consumed = int(sys.argv[1])
lists = micro_batch_samples(consumed, 1024, 2, 64, 63)
with Prefetcher(loader, lists) as batches:
    batch = next(batches)
    first = time.perf_counter() - began
    count = 1 + sum(1 for _ in batches)
assert count == 8 and batch.tokens.shape == (8192,) and 4 <= int(batch.documents.max()) <= 12
print(first, (memory("VmHWM") - before) / 1024)
"""  # noqa: E501


@pytest.mark.parametrize("consumed", [0, 700_000_000])
def test_a_trillion_tokens_in_a_billion_documents(tmp_path, consumed):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", HUGE, str(consumed)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    seconds, mib = map(float, done.stdout.split())
    print(f"first batch after {seconds:.3f} s, {mib:.1f} MiB more than after the imports")
    assert 0 < mib < 200 and not list(tmp_path.iterdir())


OPEN = """
import re, sys, time
from phalanx.data.config import DataConfig
from phalanx.data.loader import train_loader


def memory(name):  # kB; ru_maxrss would begin with what the parent process had
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

before, began = memory("VmRSS"), time.perf_counter()
loader = train_loader(DataConfig(paths=sys.argv[1]), seq_length=2048, seed=1, vocab_size=100, samples=1)
[place] = loader.locate([123])
batch = loader.read([place])
print(time.perf_counter() - began, (memory("VmHWM") - before) / 1024)
print(loader.sources[0].origin(place.window)[1][0][0], loader.use(1)[0].tokens, *batch.tokens.tolist())
"""


@pytest.mark.soak
def test_files_of_a_trillion_tokens(tmp_path):
    """Real files of 1e7 documents with 1e5 tokens each; the .bin is sparse, zeros but for the tokens that are
    written where they will be read."""
    prefix, length, count = tmp_path / "t", 10**5, 10**7
    write(prefix, [[1]])
    (tmp_path / "t.sums").unlink()
    pointers, documents = np.arange(count, dtype=np.int64) * 2 * length, np.arange(count + 1, dtype=np.int64)
    with open(tmp_path / "t.idx", "r+b") as index:
        index.seek(18)  # after magic, version and dtype
        for part in (np.array([count, count + 1]), np.full(count, length, np.int32), pointers, documents):
            part.tofile(index)
    try:
        os.truncate(tmp_path / "t.bin", 2 * length * count)
    except OSError:
        pytest.skip("this file system has no sparse files of 2 TB")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def first_batch() -> tuple[float, float, int, int, list[int]]:
        done = subprocess.run(
            [sys.executable, "-c", OPEN, str(prefix)], env=env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        (seconds, mib), (first, tokens, *ids) = (line.split() for line in done.stdout.splitlines())
        return float(seconds), float(mib), int(first), int(tokens), [int(n) for n in ids]

    _, _, first, _, ids = first_batch()
    assert ids == [0] * 2048
    with open(tmp_path / "t.bin", "r+b") as file:
        file.seek(2 * first)
        (np.arange(2049) % 90).astype(np.uint16).tofile(file)
    seconds, mib, recomputed, tokens, ids = first_batch()
    print(
        f"first batch after {seconds:.3f} s, {mib:.1f} MiB more than after the imports, index of "
        f"{20 * count / 2**20:.0f} MiB"
    )
    assert recomputed == first and tokens == 98 * 10**10 and ids == [n % 90 for n in range(2048)]
    assert 0 < mib < 100  # the index is twice as large, and none of it stays
    assert (tmp_path / "t.bin").stat().st_blocks * 512 < 1 << 20 and len(
        list(tmp_path.iterdir())
    ) == 2  # still sparse: nothing was built


# ---- documents kept apart


def logits_of(model, precision: str, data: DataConfig) -> torch.Tensor:
    """(2 sequences, 24, vocabulary) logits of the first two windows, with weights large enough for every token to
    matter."""
    run = Run(
        model=model,
        train=TrainConfig(steps=1, global_batch=2, micro_batch=2, seq_length=24, precision=precision, device="cpu"),
        data=data,
    )
    plan = make_plan(run, 1)
    mesh = Mesh(plan.grid, 0, torch.device("cpu"))
    state = build(plan, mesh)
    init_weights(state.model)
    state.model.train(False)
    batch = valid_loaders(replace(data, paths=(), valid={"v": data.paths}), seq_length=24, seed=1, vocab_size=64)[
        "v"
    ].batch([0, 1])
    with torch.no_grad():
        x = torch.empty(0)
        *blocks, head = state.model.modules
        for block in blocks:
            x = block(x, batch)
        logits = head.logits(x, torch.arange(48))
    mesh.close()
    return logits.view(2, 24, -1)


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.5,
}
FAMILIES = {
    "llama": LlamaConfig(**SMALL, intermediate_size=48, num_key_value_heads=2),
    "gpt2": GPT2Config(**SMALL, max_position_embeddings=24),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_does_not_see_another(tmp_path, family, precision):
    """Documents of 5, 9, 17 (over the border of two windows) and 20 tokens: change one, and the logits of the others
    stay bit for bit."""
    dice = np.random.default_rng(0)
    documents = [dice.integers(0, 64, n) for n in (5, 9, 17, 20)]
    owner = np.repeat(range(4), [len(d) for d in documents])[:48].reshape(2, 24)
    before = {}
    for kept in (True, False):
        before[kept] = logits_of(
            FAMILIES[family],
            precision,
            DataConfig(paths=write(tmp_path / f"o{kept}", documents), document_attention=kept),
        )
    for changed in range(4):
        others = [(d + 1) % 64 if n == changed else d for n, d in enumerate(documents)]
        prefix = write(tmp_path / f"c{changed}", others)
        same = {}
        for kept in (True, False):
            after = logits_of(FAMILIES[family], precision, DataConfig(paths=prefix, document_attention=kept))
            same[kept] = (after == before[kept]).all(-1).numpy()
        assert same[True][owner != changed].all() and not same[True][owner == changed].any()
        if changed < 3:  # without document attention what comes later in the same sequence does see it
            later = (owner > changed) & (owner[:, :1] <= changed) & (owner == changed).any(1, keepdims=True)
            assert not same[False][later].any() and later.any()
