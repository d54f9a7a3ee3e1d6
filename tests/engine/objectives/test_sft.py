"""sft: the answers of chats. The same in every layout as in one process, packed or padded, however the batch is cut;
from JSONL to a checkpoint that can chat."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from click.testing import CliRunner

from phalanx.base.placement import Placement
from phalanx.cli.main import cli
from phalanx.comm.mesh import Mesh
from phalanx.config.run import CheckpointConfig, Run
from phalanx.config.write import save_run
from phalanx.data.config import DataConfig
from phalanx.data.loader import Loader
from phalanx.data.packing import Packing
from phalanx.data.sources import ChatSource
from phalanx.engine.build import build
from phalanx.engine.step import accumulate, update
from phalanx.forecast.check import Facts, check
from phalanx.forecast.data_table import open_loaders
from phalanx.forecast.decide import make_plan
from phalanx.forecast.sample_text import CUT, READ, TRAINED, ShownDocument, document_lines, documents_of
from phalanx.layout.config import LayoutConfig
from phalanx.models.llama import LlamaConfig
from phalanx.nn.objective import TaskConfig, find_objective
from phalanx.observe.report import write_report
from phalanx.optim.config import OptimConfig
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.text.cache import use_text
from phalanx.text.chat_template import load_chat_template
from phalanx.text.tokenizers import byte_tokenizer
from phalanx.training.main import train
from phalanx.verifying.compare import random_weights
from tests.harness import parity
from tests.harness.same_samples import same_at_any_size_and_after_resume
from tests.training.test_loop import make_run

STEPS = 2


def sft(**fields: Any) -> TaskConfig:
    return find_objective("sft").Config(name="sft", **fields)


# ---- the central test


def masked(batch: Batch) -> Batch:
    """Labels of some spans of each sequence alone; none at all in the second half of a step, which is all that the
    second of two data-parallel ranks has."""
    answered = (batch.positions // 3 + batch.samples) % 2 == 0
    return replace(batch, labels=batch.labels.where(answered & (batch.samples % 8 < 4), IGNORE))


def one_rank(rank: int, world: int, run: Run) -> dict[str, Any]:
    sample = parity.sample_batch
    with mock.patch.object(parity, "sample_batch", lambda *args: masked(sample(*args))):
        return parity.run_layout(rank, world, run, STEPS, "packed")


def run_of(layout: dict[str, Any], micro_batch: int = 1) -> Run:
    run = replace(parity.base_run("llama", micro_batch=micro_batch), task=sft())
    return replace(run, layout=LayoutConfig(**layout), data=DataConfig(mock=True, document_attention=True))


def test_a_layout_and_a_cut_change_nothing(ranks):
    """Truth: one process in float64: losses, norms, gradients and weights; with ranks and micro-batches without a
    trained token."""
    where = "tests.engine.objectives.test_sft:one_rank"
    [truth] = ranks.run(where, 1, run_of({"sharding": 0}))
    truth = {
        **truth,
        "weights": parity.assemble([truth["weights"]]),
        "grads": [parity.assemble([grads]) for grads in truth["grads"]],
    }
    assert masked(parity.sample_batch([5], "packed")).labelled.sum() == 0
    assert 0 < masked(parity.sample_batch([2], "packed")).labelled.sum() < 10
    parity.compare(ranks.run(where, 1, run_of({}, micro_batch=4)), truth, STEPS)
    for layout in ({"tp": 2}, {"pp": 2}, {"cp": 2}, {"sharding": 3}):
        parity.compare(ranks.run(where, 2, run_of(layout)), truth, STEPS)


# ---- packed and padded

TEMPLATE = """\
{% for m in messages %}
{% if m.role == 'assistant' %}A: {{ m.content }}{{ eos_token }}{% else %}Q: {{ m.content }}{{ '\\n' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}A: {% endif %}"""
SIZES = {"vocab_size": 264, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}


def chats(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Of one to three answers: how many letters were asked for."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        turns: list[dict[str, str]] = []
        for _ in range(rng.integers(1, 4)):
            word = "".join(rng.choice(list("abcd"), rng.integers(1, 4)))
            turns += [{"role": "user", "content": word}, {"role": "assistant", "content": str(len(word))}]
        made.append({"messages": turns})
    return made


def data_of(folder: Path, count: int = 40, **fields: Any) -> DataConfig:
    (folder / "chats.jsonl").write_text("\n".join(json.dumps(chat) for chat in chats(count)))
    (folder / "t.jinja").write_text(TEMPLATE)
    files: dict[str, Any] = {"chats": (str(folder / "chats.jsonl"),), "template": str(folder / "t.jinja")}
    return DataConfig(**files, **{"tokenizer": "bytes", "split": "100,0,0", **fields})


def gradients(run: Run, batches: list[Batch]) -> tuple[float, float, dict[str, np.ndarray]]:
    plan = make_plan(run, 1)
    state = build(plan, Mesh(plan.grid, 0))
    random_weights(state.model)
    state.model.train()
    tokens = accumulate(state, batches)
    grads = parity.assemble([parity.parts_of(state, "grad")])
    return tokens.item(), update(state, tokens, 0.0).loss.item(), grads


def alone(loader: Loader) -> Loader:
    """The same chats, each alone in a sequence with padding."""
    [source] = loader.sources
    assert isinstance(source, ChatSource)
    packed = source.packing
    one_each = Packing(
        packed.capacity, packed.starts, packed.lengths, packed.goes_on, np.arange(len(packed.starts) + 1)
    )
    apart = replace(source, packing=one_each, key=None)
    return Loader([apart], [1.0], seq_length=loader.seq_length, document_attention=True, packed=True)


def test_packed_is_padded(tmp_path):
    run = parity.base_run("llama", global_batch=4, seq_length=64, steps=1)
    run = replace(run, model=LlamaConfig(**SIZES, num_attention_heads=2), task=sft(), data=data_of(tmp_path, 30))
    run = replace(run, data=use_text(run.data, tmp_path, 264, train_on="answers", say=lambda line: None))
    packed, _ = open_loaders(run, run.data)
    padded = alone(packed)
    counts = packed.num_samples, padded.num_samples
    assert 2 * counts[0] < counts[1] == 30
    tokens, loss, grads = gradients(run, [packed.batch([n]) for n in range(counts[0])])
    other = gradients(run, [padded.batch([n, n + 1]) for n in range(0, 30, 2)])
    assert other[0] == tokens and other[1] == pytest.approx(loss, rel=1e-12)
    parity.same_tensors(other[2], grads, "padded: gradient of")


def test_the_same_samples_at_every_number_of_ranks_and_after_resume(tmp_path):
    run = parity.base_run("llama", global_batch=4, seq_length=64, steps=8)
    run = replace(run, model=LlamaConfig(**SIZES, num_attention_heads=2), task=sft(), data=data_of(tmp_path, 30))
    data = use_text(run.data, tmp_path, 264, train_on="answers", say=lambda line: None)
    same_at_any_size_and_after_resume(lambda: open_loaders(run, data)[0])


# ---- from JSONL to a checkpoint


def training_run(folder: Path, **data: Any) -> Run:
    run = make_run(folder / "run", steps=8, global_batch=4, seq_length=48, eval_interval=8, eval_samples=4)
    config = data_of(folder, 80, split="80,20,0", **data)
    optim = OptimConfig(lr=0.02, schedule="constant")
    return replace(run, model=LlamaConfig(**SIZES, num_attention_heads=2), data=config, task=sft(), optim=optim)


def rows_of(run: Run) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (Path(run.dir) / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "step_s" in row]


def test_a_run_learns_and_goes_on(tmp_path):
    run = training_run(tmp_path)
    assert check(run, Facts()) == []
    train(run, Placement())
    rows = rows_of(run)
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]
    loader, _ = open_loaders(run, use_text(run.data, run.dir, 264, train_on="answers"))
    first = loader.batch([0, 1, 2, 3])
    assert rows[0]["trained_tokens"] == first.labelled.sum() < rows[0]["tokens"] / 3
    assert rows[0]["padding"] == pytest.approx(1 - first.real.double().mean().item())
    log = (Path(run.dir) / "log.txt").read_text()
    assert "trained | " in log and f"trained={rows[0]['trained_tokens']} padding=" in log
    assert log.count(" | ") <= 13 and "chats in 80 samples" in log
    weights = Path(run.dir) / "checkpoints/step-00000008/weights"
    template = load_chat_template(weights)
    assert template is not None and template.source == TEMPLATE
    talk = chats(1)[0]["messages"][:1]
    prompt = template.prompt(byte_tokenizer(), talk)
    assert prompt.text == f"Q: {talk[0]['content']}\nA: "
    other = replace(run, dir=str(tmp_path / "other"), checkpoint=CheckpointConfig(interval=4))
    train(replace(other, train=replace(run.train, steps=4, eval_interval=4)), Placement())
    train(other, Placement())
    assert [row["loss"] for row in rows_of(other)] == [row["loss"] for row in rows]


# ---- what people see


def test_the_report_counts_bad_and_long_chats(tmp_path):
    run = training_run(tmp_path, bad_chats="skip", too_long="drop")
    long = {"prompt": [{"role": "user", "content": "a" * 60}], "completion": [{"role": "assistant", "content": "60"}]}
    with (tmp_path / "chats.jsonl").open("a") as file:
        file.write("\n{no\n" + json.dumps(long) + "\n")
    run = replace(run, train=replace(run.train, steps=1, eval_interval=None, eval_samples=64))
    run = replace(run, data=replace(run.data, split="100,0,0"))
    train(run, Placement())
    report = write_report(Path(run.dir)).read_text()
    assert "bad chats left out (data.bad_chats=skip): 1 (not JSON 1)" in report
    assert "longer than train.seq_length=48: 1 dropped" in report


def test_samples_are_shown(tmp_path, monkeypatch):
    run = replace(training_run(tmp_path, too_long="cut"), dir=str(tmp_path / "shown"))
    run = replace(run, train=replace(run.train, seq_length=16))
    save_run(run, tmp_path / "sft.yaml")
    monkeypatch.setenv("COLUMNS", "80")
    found = CliRunner().invoke(cli, ["data", "show", str(tmp_path / "sft.yaml"), "--samples", "12"])
    assert found.exit_code == 0, found.output
    shown = found.output[found.output.index(f"{tmp_path}/chats.jsonl:") :]
    assert len(shown.split("\n\n")) == 12 and "\x1b" not in shown
    assert max(map(len, shown.splitlines()[2:9])) <= 80
    kinds = {line[:7].strip() for line in shown.splitlines() if line[7:10] == " | "}
    assert kinds - {""} == {"read", "trained", "cut off"}
    wrong = CliRunner().invoke(cli, ["data", "show", str(tmp_path / "sft.yaml"), "--samples", "1", "--step", "1"])
    assert wrong.exit_code == 2 and "goes without --step" in wrong.output
    table = CliRunner().invoke(cli, ["data", "show", str(tmp_path / "sft.yaml")])
    assert "longer than train.seq_length=16: " in table.output and "cut after the last answer that fits" in table.output


def test_what_is_shown_is_what_is_trained(tmp_path):
    run = training_run(tmp_path)
    loader, _ = open_loaders(run, use_text(run.data, run.dir, 264, train_on="answers", say=lambda line: None))
    batch, at = loader.batch([0]), 0
    for document in documents_of(loader, 0):
        if document.sample != 0:
            break
        for kind, label in zip(document.kinds[1:], batch.labels[document.at :].tolist()):
            assert (kind == TRAINED) == (label != IGNORE)
        at += len(document.tokens)
    assert at == batch.real.sum()


def test_lines_of_a_document():
    """Read without colour and with it; control characters and long lines do no harm; the middle may be left out."""
    tokens = [*b"ab\x1b\nc", *"\N{SNOWMAN}\u4e2d".encode(), 256]
    kinds = [READ] * 4 + [TRAINED] * 7 + [CUT]
    document = ShownDocument("a.jsonl:1", 0, 0, tuple(tokens), tuple(kinds))
    title, *lines = document_lines(document, byte_tokenizer(), 80, colour=False)
    assert title == "a.jsonl:1, 12 tokens (7 trained, 4 read, 1 cut off), in sequence 0 from 0"
    assert lines == ["   read | ab\\x1b↵", "trained | c\N{SNOWMAN}\u4e2d", "cut off | <|endoftext|>"]
    coloured = document_lines(document, byte_tokenizer(), 80, colour=True)
    assert coloured[1].startswith("   read | \x1b[2ma\x1b[0m\x1b[0mb\x1b[0m") and "\\x1b" in coloured[1]
    long = ShownDocument("a", 0, 0, tuple(b"x" * 100 + b"\n" * 30), (READ,) * 130)
    lines = document_lines(long, byte_tokenizer(), 40, colour=False)
    assert max(map(len, lines)) == 40
    assert document_lines(long, byte_tokenizer(), 40, colour=False, most=5)[4] == "    ... | 29 lines more"
    assert document_lines(document, None, 80, colour=False)[1] == "   read | 97 98 27 10 "


# ---- what is refused


def problems(run: Run) -> dict[str, str]:
    return {p.field: p.rule for p in check(run, Facts(files=False))}


def test_rules(tmp_path):
    run = training_run(tmp_path)
    assert problems(run) == {}
    assert "needs an objective that trains on chats" in problems(replace(run, task=TaskConfig()))["data.chats"]
    without = replace(run, data=DataConfig(paths=("a",)))
    assert "is required: files of chats" in problems(without)["data.chats"]
    assert problems(replace(run, data=DataConfig(mock=True))) == {}
    data = DataConfig(
        chats=("a.jsonl",), text=("b",), packing="online", document_attention=False, json_keys=("a",), split="80,20,0"
    )
    found = problems(replace(run, data=data))
    assert {"data.chats", "data.packing", "data.document_attention", "data.json_keys", "data.tokenizer"} <= set(found)
    unused = DataConfig(paths=("a",), template="b", bad_chats="skip", too_long="drop", split="80,20,0")
    found = problems(replace(run, task=TaskConfig(), data=unused))
    assert {"data.template", "data.bad_chats", "data.too_long"} == set(found)
    missing = {"chats": (str(tmp_path / "no*.jsonl"), str(tmp_path / "a")), "template": str(tmp_path / "no.jinja")}
    files = check(replace(run, data=DataConfig(**missing, tokenizer="bytes", split="80,20,0")), Facts())
    assert [p.field for p in files] == ["data.chats.0", "data.chats.1", "data.template"]
