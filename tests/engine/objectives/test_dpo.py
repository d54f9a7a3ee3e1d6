"""dpo: preferences between pairs of answers. The same in every layout as in one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, processors
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from phalanx.base.errors import DataError
from phalanx.base.placement import Placement
from phalanx.config.run import CheckpointConfig, Run
from phalanx.data.config import DataConfig, prefixes_of
from phalanx.data.index import CorpusWriter
from phalanx.data.loader import Loader, train_loader
from phalanx.evaluation.scoring import SCORED_PAIRS, TokenScoring
from phalanx.forecast.check import Facts, check
from phalanx.layout.config import LayoutConfig
from phalanx.models.llama import LlamaConfig
from phalanx.nn.adapter import find_adapter
from phalanx.nn.objective import TaskConfig, find_objective, make_objective
from phalanx.nn.sequence_groups import groups_of
from phalanx.optim.config import OptimConfig
from phalanx.sequence.batch import IGNORE
from phalanx.text.cache import use_text
from phalanx.training.main import train
from tests.harness import parity
from tests.models.test_models import hf_config
from tests.training.test_loop import make_run

STEPS = 2


def dpo(**fields: Any) -> TaskConfig:
    return find_objective("dpo").Config(name="dpo", **fields)


def lora(**fields: Any) -> Any:
    return find_adapter("lora").Config(method="lora", **{"rank": 3, "alpha": 5.0, **fields})


def run_of(model: str = "llama", layout: dict[str, Any] | None = None, micro_batch: int = 2, **train: Any) -> Run:
    run = parity.base_run(model, micro_batch=micro_batch, **train)
    data = DataConfig(mock=True, document_attention=True)
    targets = ["*", "lm_head.weight"]
    return replace(run, task=dpo(), lora=lora(targets=targets), layout=LayoutConfig(**(layout or {})), data=data)


LAYOUTS = [
    ("llama", 2, {"tp": 2}),
    ("llama", 2, {"pp": 2}),
    ("llama", 2, {"sharding": 3}),
    ("llama", 2, {"cp": 2}),
    ("llama", 4, {"tp": 2, "pp": 2, "virtual_stages": 2}),
    ("mixtral", 2, {"ep": 2}),
]


@pytest.mark.parametrize("model, world, layout", LAYOUTS, ids=[f"{m} {lay}" for m, _, lay in LAYOUTS])
def test_preferences_are_the_same_in_every_layout(ranks, model, world, layout):
    """Truth: one process in float64; losses, rewards, norms, gradients and weights of adapters."""
    run = run_of(model, layout)
    truth = parity.truth_of(ranks, run, STEPS, "packed")
    assert all(".lora_" in name for name in truth["grads"][0])
    chosen, rejected, margin, accuracy = truth["losses"][0][2:]
    assert 0 < abs(chosen - rejected) and margin == pytest.approx(chosen - rejected) and 0 <= accuracy <= 1
    parity.compare(ranks.run("tests.harness.parity:run_layout", world, run, STEPS, "packed"), truth, STEPS)


# ---- the losses, by their formulas


@pytest.mark.parametrize(
    "fields, formula",
    [
        ({"beta": 0.2}, lambda m: -F.logsigmoid(0.2 * m)),
        (
            {"beta": 0.2, "label_smoothing": 0.1},
            lambda m: -0.9 * F.logsigmoid(0.2 * m) - 0.1 * F.logsigmoid(-0.2 * m),
        ),
        ({"beta": 0.2, "loss": "hinge"}, lambda m: (1 - 0.2 * m).clamp(min=0)),
        ({"beta": 0.2, "loss": "ipo"}, lambda m: (m - 2.5) ** 2),
    ],
)
def test_losses_are_those_of_the_papers(fields, formula):
    policy, reference = torch.randn(2, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 9
    margin = (policy - reference)[:, 0] - (policy - reference)[:, 1]
    made = make_objective(dpo(**fields))
    torch.testing.assert_close(made.loss(policy, reference), formula(margin))
    torch.testing.assert_close(made.metrics(policy, reference)["rewards_margin"], 0.2 * margin)


# ---- the data


def write_pairs(folder: Path, records: list[Any], name: str = "pairs.jsonl") -> str:
    (folder / name).write_text("\n".join(json.dumps(r) if not isinstance(r, str) else r for r in records))
    return str(folder / name)


TEXTS = [{"prompt": "ab", "chosen": "cde", "rejected": "f"}, {"prompt": "g", "chosen": "hi", "rejected": "jklmn"}]


def opened(folder: Path, records: list[Any], length: int = 24, **data: Any) -> Loader:
    config = DataConfig(pairs=(write_pairs(folder, records),), split="100,0,0", **{"tokenizer": "bytes", **data})
    config = use_text(config, folder, 300, say=lambda line: None)
    return train_loader(config, seq_length=length, seed=1, vocab_size=300, samples=4)


def test_answers_alone_have_a_loss(tmp_path):
    """By hand: two pairs in one sequence, each answer after its prompt in a document of its own; the end of an answer
    has a loss too."""
    end = 256
    batch = opened(tmp_path, TEXTS, 26).batch([0])
    documents = [(b"ab", b"cde"), (b"ab", b"f"), (b"g", b"hi"), (b"g", b"jklmn")]
    tokens, labels, positions = list[int](), list[int](), list[int]()
    for prompt, answer in documents:
        ids = [*prompt, *answer, end]
        tokens += ids
        labels += [IGNORE] * (len(prompt) - 1) + [*answer, end, IGNORE]
        positions += range(len(ids))
    count = len(tokens)
    assert batch.tokens[:count].tolist() == tokens and batch.labels.tolist() == labels + [IGNORE] * (26 - count)
    assert batch.positions[:count].tolist() == positions and batch.real.sum() == count
    assert groups_of(batch, 2).count == 2
    assert opened(tmp_path, TEXTS, 16).num_samples == 2, "a pair is never cut"


def test_prepared_pairs_are_read_again(tmp_path):
    first = opened(tmp_path, TEXTS)
    [corpus] = first.sources[0].corpora
    again = DataConfig(pairs=(corpus.prefix,), split="100,0,0")
    assert again.inside_documents and prefixes_of(again) == [corpus.prefix]
    loader = train_loader(again, seq_length=24, seed=1, vocab_size=300, samples=4)
    assert torch.equal(loader.batch([0]).labels, first.batch([0]).labels) and loader.order == first.order
    ids = [{f"{name}_ids": [*text.encode()] for name, text in pair.items()} for pair in TEXTS]
    assert opened(tmp_path, ids, tokenizer=None).batch([0]).tokens[:5].tolist() == [97, 98, 99, 100, 101]


def test_a_prompt_begins_as_the_tokenizer_begins_texts(tmp_path):
    """Truth: transformers on prompt and answer. A tokenizer that differs in this alone has token files of its own."""
    path = tmp_path / "tokenizer"
    core = Tokenizer(models.BPE({c: i for i, c in enumerate("abcdefghijklmn")}, []))
    core.add_special_tokens(["<bos>", "<eos>"])
    theirs = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>")
    theirs.save_pretrained(path)
    plain = opened(tmp_path, TEXTS[:1], tokenizer=str(path)).batch([0])
    begins = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", core.token_to_id("<bos>"))])
    core.post_processor = begins
    theirs = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>")
    theirs.save_pretrained(path)
    batch = opened(tmp_path, TEXTS[:1], tokenizer=str(path)).batch([0])
    for found, own in ((batch, theirs("abcde")["input_ids"]), (plain, theirs("abcde")["input_ids"][1:])):
        assert found.tokens[: len(own) + 1].tolist() == [*own, theirs.eos_token_id]


def test_bad_pairs_are_named_with_file_and_line(tmp_path):
    bad = [
        TEXTS[0],
        "{no",
        {"prompt": "a", "chosen": "b"},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt_ids": [1], "chosen_ids": [2, 300], "rejected_ids": [3]},
        {"prompt": "", "chosen": "b", "rejected": "c"},
        [1],
    ]
    with pytest.raises(DataError) as caught:
        opened(tmp_path, bad)
    lines = str(caught.value).splitlines()
    assert len(lines) == 6 and lines[-1] == "... 6 bad lines in all"
    for line, (number, text) in zip(
        lines,
        (
            (2, "not JSON: Expecting property name"),
            (3, "rejected is missing"),
            (4, "are the same"),
            (5, "chosen_ids must be a list of ids in [0, 300)"),
            (6, "prompt is empty"),
        ),
    ):
        assert f"pairs.jsonl:{number}: " in line and text in line
    chat = {"prompt": [{"role": "user", "content": "a"}], "chosen": [], "rejected": []}
    with pytest.raises(DataError, match="prompt must be a text, not messages: give the ids .*, prompt_ids"):
        opened(tmp_path, [chat])
    with pytest.raises(DataError, match="1 of 2 pairs are longer than train.seq_length=10: .*pair 1 with 11 tokens"):
        opened(tmp_path, TEXTS, 10)
    with CorpusWriter(tmp_path / "plain", np.uint16) as writer:
        writer.add_document([1, 2, 3])
    with pytest.raises(DataError, match="document 0 is no pair"):
        plain = DataConfig(pairs=(str(tmp_path / "plain"),), split="100,0,0")
        train_loader(plain, seq_length=8, seed=1, vocab_size=300, samples=1)


# ---- from JSONL to the log


SIZES = {"vocab_size": 264, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}


def training_run(folder: Path, **fields: Any) -> Run:
    rng = np.random.default_rng(0)

    def word() -> str:
        return "".join(rng.choice(list("abcdefgh"), rng.integers(1, 6)))

    pairs = [{"prompt": word(), "chosen": word() + "x", "rejected": word() + "y"} for _ in range(40)]
    run = make_run(folder / "run", steps=8, global_batch=4, seq_length=32, eval_interval=8, eval_samples=4)
    data = DataConfig(pairs=(write_pairs(folder, pairs),), tokenizer="bytes", split="80,20,0")
    model = LlamaConfig(**SIZES, num_attention_heads=2)
    optim = OptimConfig(lr=0.02, schedule="constant")
    return replace(run, model=model, data=data, task=dpo(**fields), lora=lora(), optim=optim)


def rows_of(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run.dir) / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_a_preference_and_goes_on(tmp_path):
    """Adapters begin at the base, so the first loss is log 2; then chosen answers gain."""
    run = training_run(tmp_path, beta=1.0)
    assert check(run, Facts()) == []
    train(run, Placement())
    steps = [row for row in rows_of(run) if "task/rewards_margin" in row]
    assert steps[0]["loss"] == pytest.approx(np.log(2), rel=1e-5) and steps[0]["task/rewards_margin"] == 0
    assert steps[-1]["task/rewards_margin"] > 0.1 and steps[-1]["task/rewards_accuracy"] > 0.8
    assert any(row.get("valid/valid/rewards_margin", 0) > 0.05 for row in rows_of(run))
    other = replace(run, dir=str(tmp_path / "other"), checkpoint=CheckpointConfig(interval=4))
    train(replace(other, train=replace(run.train, steps=4, eval_interval=4)), Placement())
    train(other, Placement())
    again = [row["loss"] for row in rows_of(other) if "task/rewards_margin" in row]
    assert again == [row["loss"] for row in steps]


def test_the_reference_may_come_from_a_file(ranks, tmp_path):
    """The base's own scores, computed ahead, give the losses that adapters off give; without lora too."""
    run = training_run(tmp_path, beta=1.0)
    run = replace(run, data=use_text(run.data, run.dir, run.model.vocab_size, say=lambda line: None))
    base = LlamaForCausalLM(hf_config(run.model)).float()
    base.save_pretrained(tmp_path / "base")
    run = replace(run, init_from=str(tmp_path / "base"))
    out = str(tmp_path / "reference.scores")
    scored = replace(run, lora=None, task=find_objective(SCORED_PAIRS).Config(name=SCORED_PAIRS))
    ranks.run(
        "tests.engine.objectives.test_distil:score_on_rank", 1, scored, TokenScoring(str(tmp_path / "base"), 0, out)
    )
    file = replace(run, dir=str(tmp_path / "file"), task=replace(run.task, reference=out))
    assert check(file, Facts()) == []
    losses = []
    for each in (run, file):
        train(each, Placement())
        losses.append([row["loss"] for row in rows_of(each) if "task/rewards_margin" in row])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    whole = replace(file, dir=str(tmp_path / "whole"), lora=None)
    train(whole, Placement())
    assert rows_of(whole)[0]["loss"] == pytest.approx(np.log(2), rel=1e-5)


# ---- what is refused


def problems(run: Run) -> dict[str, str]:
    return {p.field: p.rule for p in check(run, Facts(files=False))}


def test_rules(tmp_path):
    run = run_of()
    assert problems(run) == {}
    assert "needs a reference: adapters (lora)" in problems(replace(run, lora=None))["task.name"]
    wrong = replace(run, task=dpo(beta=0.0, label_smoothing=0.2, loss="hinge"))
    data = DataConfig(pairs=("a.jsonl",), packing="online", document_attention=False, mock=True)
    found = problems(replace(wrong, data=data))
    assert {"task.beta", "task.label_smoothing", "data.mock", "data.packing", "data.document_attention"} <= set(found)
    alone = replace(run, task=TaskConfig(), data=DataConfig(pairs=("a.jsonl",)))
    assert "needs an objective over pairs" in problems(alone)["data.pairs"]
    packed = replace(run, data=DataConfig(paths=("a",), packing="online"))
    assert "reorders documents" in problems(packed)["data.packing"]
    missing = check(replace(run, data=DataConfig(pairs=(str(tmp_path / "a.jsonl"), str(tmp_path / "b")))), Facts())
    assert [p.field for p in missing] == ["data.pairs.0", "data.pairs.1"]
    assert all(p.rule.startswith("must exist: ") for p in missing)
