"""classify: classes of texts and of words, from JSONL beside token files to folders of transformers; the same in every
layout, with accuracy; from a folder with the head for hidden tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from phalanx.base.errors import DataError
from phalanx.base.placement import Placement
from phalanx.cli.main import cli
from phalanx.comm.mesh import Mesh
from phalanx.config.run import CheckpointConfig, LogConfig, Run, TrainConfig
from phalanx.data.background import BackgroundCheck
from phalanx.data.checksums import read_sums, write_sums
from phalanx.data.config import DataConfig
from phalanx.data.index import Corpus
from phalanx.data.loader import Loader, train_loader
from phalanx.engine.build import build, init_weights
from phalanx.engine.objectives.classify import Classify
from phalanx.engine.step import accumulate, update
from phalanx.forecast.check import Facts, check
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.models.bert import BertConfig
from phalanx.models.modernbert import ModernBertConfig
from phalanx.nn.objective import TaskConfig, find_objective
from phalanx.optim.config import OptimConfig
from phalanx.planning.reading import reading_of
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.text.classes import prepare_classes
from phalanx.text.tokenizers import load_tokenizer, train_wordpiece
from phalanx.training.main import train
from tests.harness import parity
from tests.harness.same_samples import same_at_any_size_and_after_resume
from tests.models.test_models import all_logits

COLOURS = ("red", "green", "blue")
WORDS = "a the one that this of and with very quite rather stone leaf sea sky rose moss flame".split()
HINTS = {"red": "rose flame", "green": "leaf moss", "blue": "sea sky"}


def classify() -> TaskConfig:
    return find_objective("classify").Config(name="classify")


def text_of(number: int, label: str) -> str:
    dice = np.random.default_rng(number)
    words = [*dice.choice(WORDS[:11], 5 + number % 9), dice.choice(HINTS[label].split())]
    return " ".join(dice.permutation(words))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tokenizer, texts with a class and words with one, prepared."""
    at = tmp_path_factory.mktemp("classes")
    train_wordpiece([" ".join(WORDS)] * 3, 80, at / "tokenizer")
    labels = [COLOURS[i % 3] for i in range(300)]
    lines = [
        json.dumps({"text": text_of(i, label), "label": label if i % 2 else i % 3}) for i, label in enumerate(labels)
    ]
    (at / "texts.jsonl").write_text("\n".join(lines))
    words = [{"tokens": ["rose", "very", "leaf"], "labels": ["red", None, 1]}, {"tokens": ["sea"], "labels": ["blue"]}]
    (at / "words.jsonl").write_text("\n".join(map(json.dumps, words)))
    for name in ("texts", "words"):
        command = [
            "data",
            "prepare",
            str(at / f"{name}.jsonl"),
            "-o",
            str(at / name),
            "--tokenizer",
            str(at / "tokenizer"),
        ]
        found = CliRunner().invoke(cli, [*command, "--labels", ",".join(COLOURS)], catch_exceptions=False)
        assert found.exit_code == 0 and "texts" in found.output
    return at


def run_of(folder: Path, out: Path, **model: Any) -> Run:
    config = BertConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        initializer_range=0.1,
        head="sequence",
        labels=COLOURS,
    )
    data = DataConfig(
        paths=(str(folder / "texts"),), tokenizer=str(folder / "tokenizer"), packing="online", split="90,10,0"
    )
    return Run(
        model=replace(config, **model),
        task=classify(),
        train=TrainConfig(
            steps=120, global_batch=8, micro_batch=2, seq_length=32, device="cpu", eval_interval=120, eval_samples=8
        ),
        data=data,
        optim=OptimConfig(lr=3e-3),
        log=LogConfig(report=False),
        dir=str(out),
    )


def loader_of(run: Run) -> Loader:
    how = {"seq_length": run.train.seq_length, "seed": 1, "vocab_size": run.model.vocab_size, "samples": 8}
    return train_loader(run.data, **how, reading=reading_of(run))


# ---- data


def test_the_same_samples_at_every_number_of_ranks_and_after_resume(folder, tmp_path):
    found = same_at_any_size_and_after_resume(lambda: loader_of(run_of(folder, tmp_path)))
    assert all(any(label != IGNORE for label in row[row.index("labels") + 1]) for row in found.values())


def test_a_text_has_its_class_at_its_first_token(folder, tmp_path):
    run = run_of(folder, tmp_path)
    assert check(run, Facts()) == []
    batch, tokenizer = loader_of(run).batch([0, 1, 2]), load_tokenizer(folder / "tokenizer")
    first = (batch.positions == 0) & (batch.real == 1)
    assert torch.equal(batch.labelled, first) and (batch.tokens[first] == tokenizer.special_tokens["[CLS]"]).all()
    for at in first.nonzero()[:, 0].tolist():
        mine = batch.tokens[batch.documents == batch.documents[at]].tolist()
        label = COLOURS[batch.labels[at]]
        assert mine[-1] == tokenizer.special_tokens["[SEP]"]
        assert any(hint in tokenizer.decode(mine) for hint in HINTS[label].split())


def test_a_word_has_its_class_at_its_first_piece(folder):
    corpus, tokenizer = Corpus(str(folder / "words")), load_tokenizer(folder / "tokenizer")
    classes = np.load(folder / "words.classes.npy")
    cls, sep = (tokenizer.special_tokens[name] for name in ("[CLS]", "[SEP]"))
    pieces = [tokenizer.encode(word) for word in ("rose", "very", "leaf", "sea")]
    expected = [cls, *pieces[0], *pieces[1], *pieces[2], sep, cls, *pieces[3], sep]
    assert corpus.tokens(0, len(expected)).tolist() == expected
    labels = [IGNORE]
    for ids, label in zip(pieces[:3], (0, IGNORE, 1)):
        labels += [label, *[IGNORE] * (len(ids) - 1)]
    assert classes.tolist() == [*labels, IGNORE, IGNORE, 2, *[IGNORE] * (len(pieces[3]) - 1), IGNORE]


def test_a_word_of_several_pieces_has_its_class_at_the_first(tmp_path):
    """Of a vocabulary of letters, so that the first is not the last."""
    train_wordpiece(["abab baba bbaa aabb"], 12, tmp_path / "tokenizer")
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    words, labels = ["abab", "bba", "a"], ["red", "blue", "green"]
    (tmp_path / "words.jsonl").write_text(json.dumps({"tokens": words, "labels": labels}))
    prepare_classes([tmp_path / "words.jsonl"], tmp_path / "words", str(tmp_path / "tokenizer"), COLOURS)
    pieces = [len(tokenizer.encode(word if at == 0 else f" {word}")) for at, word in enumerate(words)]
    assert pieces[0] > 1 and pieces[1] > 1
    found = np.load(tmp_path / "words.classes.npy")
    firsts = 1 + np.cumsum([0, *pieces[:-1]])
    assert found[firsts].tolist() == [COLOURS.index(label) for label in labels]
    assert (np.delete(found, firsts) == IGNORE).all()


def test_what_is_wrong_with_lines_and_files_is_said(folder, tmp_path):
    bad = [{"text": "a", "label": "purple"}, {"text": "", "label": 0}, {"label": 0}, {"tokens": ["a"], "labels": []}]
    (tmp_path / "bad.jsonl").write_text("\n".join(map(json.dumps, [*bad, {"text": "a", "label": 3}])))
    with pytest.raises(DataError) as error:
        prepare_classes([tmp_path / "bad.jsonl"], tmp_path / "bad", str(folder / "tokenizer"), COLOURS)
    said = str(error.value).splitlines()
    assert len(said) == 5 and all(f"bad.jsonl:{i + 1}: " in line for i, line in enumerate(said))
    assert "'purple' is none of the classes: red, green, blue" in said[0] and "label 3 is none" in said[4]
    run = run_of(folder, tmp_path, labels=("red", "blue", "green"))
    with pytest.raises(DataError, match="name the same"):
        loader_of(run)
    (folder / "plain.bin").write_bytes((folder / "words.bin").read_bytes())
    (folder / "plain.idx").write_bytes((folder / "words.idx").read_bytes())
    with pytest.raises(DataError, match="no token of .*plain has a class"):
        loader_of(replace(run, data=replace(run.data, paths=(str(folder / "plain"),), split="1,0,0")))


def test_classes_are_compared_with_their_checksums(folder, tmp_path):
    """By `data verify` and beside a run; those of an earlier version are unchecked, and lost ones are missed."""
    for file in folder.glob("words.*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    prefix, classes = str(tmp_path / "words"), tmp_path / "words.classes.npy"
    whole, sums = classes.read_bytes(), json.loads((tmp_path / "words.sums").read_text())

    def verify() -> tuple[int, str]:
        found = CliRunner().invoke(cli, ["data", "verify", prefix])
        return getattr(found.exception, "exit_code", found.exit_code), found.output

    assert verify()[0] == 0 and "unchecked" not in verify()[1]
    classes.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    code, said = verify()
    assert code == 3 and f"{classes}: damaged: bytes 0..{len(whole) - 1}" in said
    with BackgroundCheck([Corpus(prefix)]) as check_:
        check_.finish(10)
        with pytest.raises(DataError, match="words.classes.npy: damaged"):
            check_.look()
    classes.write_bytes(whole[:-1])
    assert verify()[0] == 3 and "words.classes.npy: truncated" in verify()[1]
    classes.unlink()
    assert verify()[0] == 3 and "words.classes.npy: no such file" in verify()[1]
    classes.write_bytes(whole)
    for beside, said in ({}, "unchecked: there are no checksums of"), ({"/../words.bin": []}, "damaged"):
        write_sums(tmp_path / "words.sums", replace(read_sums(folder / "words"), beside=beside))
        assert said in verify()[1]
    assert sums["beside"].keys() == {".classes.npy"}


def test_heads_and_tasks_go_together(folder, tmp_path):
    run = run_of(folder, tmp_path)
    masked = replace(run, model=replace(run.model, head="masked", labels=()))
    [found] = check(masked, Facts(files=False))
    assert found.field == "task.name" and "needs a head over classes" in found.rule
    [found] = check(replace(run, task=find_objective("mlm").Config(name="mlm")), Facts(files=False))
    assert found.field == "task.name" and "task={name: classify}" in found.rule
    apart = replace(run, data=replace(run.data, document_attention=False))
    assert [p.field for p in check(apart, Facts(files=False))] == ["data.document_attention"]


# ---- layouts


LAYOUTS = {"tp2": dict(tp=2), "pp2": dict(pp=2), "dp2, sharding 3": dict(sharding=3), "cp2": dict(cp=2)}
MODELS = {
    "bert": replace(parity.MODELS["bert"], head="sequence", labels=COLOURS, classifier_dropout=0.1),
    "modernbert": replace(parity.MODELS["modernbert"], head="token", labels=COLOURS),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_a_layout_changes_nothing(ranks, model, layout):
    run = replace(
        parity.base_run("bert", 4),
        model=MODELS[model],
        task=classify(),
        data=DataConfig(mock=True, document_attention=True),
    )
    truth = ranks.run(
        "tests.verifying.test_verify:rank_compare", 2, replace(run, layout=LayoutConfig(**LAYOUTS[layout])), 2
    )
    assert all(found.ok for found in truth)


def test_accuracy_is_how_often_the_likeliest_class_is_right(folder, tmp_path):
    """Against logits of the whole batch."""
    from phalanx.comm.axis import Axis
    from phalanx.ops.dense.token_loss import VocabularyShard, logit_stats

    logits = torch.randn(50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(50) % 3
    stats = logit_stats(logits, labels, VocabularyShard(0, 3, 3), Axis("tp"))
    found = Classify(classify()).metrics(stats)["accuracy"]
    assert torch.equal(found, (logits.argmax(-1) == labels).double()) and 0 < found.mean() < 1


def step_accuracy(rank: int, world: int, run: Run) -> tuple[float | None, list[np.ndarray]]:
    """The accuracy that a step logs, and the logits of its tokens on the ranks of the last stage."""
    mesh = Mesh(make_plan(run, world).grid, rank)
    state = build(make_plan(run, world), mesh)
    init_weights(state)
    state.model.train()
    batches = with_classes(parity.step_batches(run, mesh, 0, True))
    result = update(state, accumulate(state, batches), lr=0.0)
    return result.metrics["accuracy"].item(), all_logits(state, batches)


def with_classes(batches: list[Batch]) -> list[Batch]:
    return [replace(b, labels=torch.where(b.labelled, b.tokens % len(COLOURS), IGNORE)) for b in batches]


@pytest.mark.parametrize(
    "layout", [{}, dict(tp=2), dict(tp=4), dict(tp=2, pp=2), dict(cp=2), dict(sharding=3)], ids=str
)
def test_accuracy_of_a_step_is_that_of_the_logits(ranks, layout):
    """Classes are spread over the ranks of tp, of which with four one has none."""
    size = max(1, layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1) * (2 if "sharding" in layout else 1))
    run = replace(
        parity.base_run("modernbert", 4),
        model=MODELS["modernbert"],
        task=classify(),
        data=DataConfig(mock=True, document_attention=True),
    )
    truth, [[alone, logits]] = replace(run, layout=LayoutConfig()), ranks.run(f"{__name__}:step_accuracy", 1, run)
    labels = with_classes(parity.step_batches(truth, Mesh(make_plan(truth, 1).grid, 0), 0, True))
    right = [(torch.from_numpy(x).argmax(-1) == b.labels)[b.labelled] for x, b in zip(logits, labels, strict=True)]
    wanted = torch.cat(right).double().mean().item()
    assert 0.1 < wanted < 0.9 and alone == pytest.approx(wanted)
    found = ranks.run(f"{__name__}:step_accuracy", size, replace(run, layout=LayoutConfig(**layout)))
    assert [accuracy for accuracy, _ in found] == pytest.approx([wanted] * size)


# ---- a run


def rows_of(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run.dir) / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_its_classes_and_transformers_reads_them(folder, tmp_path):
    """From a folder with another head; every text of the validation set gets the class that transformers gives it."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    run = run_of(folder, tmp_path / "run")
    start = replace(
        run,
        model=replace(run.model, head="masked", labels=()),
        task=find_objective("mlm").Config(name="mlm"),
        dir=str(tmp_path / "start"),
    )
    start = replace(
        start,
        train=replace(start.train, steps=2, eval_interval=None, eval_samples=64),
        checkpoint=CheckpointConfig(interval=2),
    )
    train(start, Placement())
    [weights] = Path(start.dir).glob("checkpoints/step-*2/weights")
    run = replace(run, init_from=str(weights), checkpoint=CheckpointConfig(interval=120))
    train(run, Placement())
    assert "new, with random weights" in (Path(run.dir) / "log.txt").read_text()
    last = [row for row in rows_of(run) if any("accuracy" in key for key in row)][-1]
    assert max(value for key, value in last.items() if "accuracy" in key) > 0.9
    [out] = Path(run.dir).glob("checkpoints/step-*120/weights")
    model, info = AutoModelForSequenceClassification.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and model.config.id2label[2] == "blue"
    tokenizer = AutoTokenizer.from_pretrained(out)
    right = 0
    for i in range(60):
        ids = torch.tensor(
            [[tokenizer.cls_token_id, *tokenizer(text_of(1000 + i, COLOURS[i % 3])).input_ids, tokenizer.sep_token_id]]
        )
        right += int(model(ids).logits.argmax() == i % 3)
    assert right > 54


def test_modernbert_pools_its_first_token_alone():
    from phalanx.base.errors import CheckpointError
    from phalanx.checkpoint.hf import from_hf, to_hf

    config = replace(MODELS["modernbert"], head="sequence")
    assert isinstance(config, ModernBertConfig) and from_hf(to_hf(config, torch.float32)) == config
    with pytest.raises(CheckpointError, match="classifier_pooling='mean'"):
        from_hf({**to_hf(config, torch.float32), "classifier_pooling": "mean"})
