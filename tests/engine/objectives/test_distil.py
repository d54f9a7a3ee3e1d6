"""distil: a teacher's distributions, and the score files that hold them. Truth: torch's KL divergence, the logits of
transformers, and one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.base.errors import DataError
from phalanx.base.placement import Placement
from phalanx.comm.mesh import Mesh
from phalanx.config.run import CheckpointConfig, Run
from phalanx.config.task_check import scored_windows
from phalanx.data.config import DataConfig
from phalanx.data.index import Corpus, CorpusWriter
from phalanx.data.scores import ScoreFile, ScoreWriter
from phalanx.evaluation.scoring import TokenScoring, loaders_of, score, scoring_task
from phalanx.forecast.check import Facts, check
from phalanx.forecast.data_table import open_loaders
from phalanx.forecast.decide import make_plan
from phalanx.inference.load import forward_only
from phalanx.layout.config import LayoutConfig
from phalanx.nn.adapted_linear import AdaptedLinears
from phalanx.nn.adapters.lora import LoRA
from phalanx.nn.env import Env, WeightRules
from phalanx.nn.objective import TaskConfig, find_objective, make_objective
from phalanx.nn.run_block import run_block
from phalanx.optim.config import OptimConfig
from phalanx.planning.blocks import make_blocks, num_blocks
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.text.cache import use_text
from phalanx.training.main import train
from tests.harness import parity
from tests.harness.chat_model import chat_folder
from tests.harness.weights import with_memory
from tests.models.test_twenty_steps import MODELS, random_model
from tests.training.test_loop import make_run

STEPS, TOP, LENGTH = 2, 3, 16


def distil(**fields: Any) -> TaskConfig:
    return find_objective("distil").Config(name="distil", **{"teacher": "teacher.scores", **fields})


def with_targets(batch: Batch) -> Batch:
    """The batch with targets drawn from its tokens and places alone; one id is named twice at each token."""
    one = (batch.tokens * 31 + batch.positions * 7).unsqueeze(1) + torch.arange(TOP) * 5
    ids = one % parity.VOCAB
    ids[:, -1] = ids[:, 0]
    values = -0.1 - (one % 17).float() / 5
    return replace(batch, target_ids=ids, target_log_probs=values, reference=values[:, 0])


# ---- against plain autograd


ON_HEAD = AdaptedLinears(LoRA, LoRA.Config(rank=3, alpha=5.0, targets=["lm_head.weight"]))


def seeded(fields: dict[str, Any], linears: AdaptedLinears | None) -> tuple[list, Batch]:
    weights = WeightRules(dtype=torch.float64, linears=linears)
    env = Env(weights=weights, objective=make_objective(distil(**fields)))
    config = parity.MODELS["llama"]
    blocks = make_blocks(config, env, range(num_blocks(config)))
    for number, block in enumerate(blocks):
        with_memory(block)
        for p in block.parameters():
            p.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(number))
    return blocks, with_targets(parity.sample_batch([3, 4], documents=False))


def expected_of(logits: Tensor, batch: Batch, alpha: float, t: float) -> tuple[Tensor, Tensor]:
    """The loss and the divergence, summed, by torch's own functions over the whole vocabulary."""
    teacher = torch.zeros_like(logits)
    weights = (batch.target_log_probs.double() / t).softmax(-1)
    for k in range(TOP):
        teacher[torch.arange(len(teacher)), batch.target_ids[:, k]] += weights[:, k]
    # entropy of the K weights, as if ids were different: torch's divergence is of the distribution over ids
    merged = torch.special.entr(teacher).sum(-1) - torch.special.entr(weights).sum(-1)
    kl = F.kl_div((logits / t).log_softmax(-1), teacher, reduction="none").sum(-1) + merged
    nll = F.cross_entropy(logits, batch.labels, ignore_index=IGNORE, reduction="none")
    kept = batch.labelled
    return (alpha * t**2 * kl + (1 - alpha) * nll)[kept].sum(), kl[kept].sum()


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("alpha, t, linears", [(1.0, 1.0, None), (0.3, 2.5, None), (0.3, 2.5, ON_HEAD)])
def test_the_loss_is_that_of_torch(alpha, t, linears, forward, monkeypatch):
    """In one piece, and a few tokens at a time; gradients made in backward, and in forward; of a head that has an
    adapter too."""
    blocks, batch = seeded({"alpha": alpha, "temperature": t}, linears)
    params = [p for block in blocks for p in block.parameters()]
    seed = torch.tensor(0.7, dtype=torch.float64)
    x = torch.empty(0, dtype=torch.float64)
    for block in blocks[:-1]:
        x = run_block(block, x, batch)
    head = blocks[-1].head
    x = blocks[-1].norm(x)
    logits = (x @ head.weight.t())[:, : parity.VOCAB]
    if head.adapted is not None:
        first, second = (each.weight for each in head.adapted.linears)
        logits = logits + 5 / 3 * x @ first.t() @ second.t()
    expected, kl = expected_of(logits, batch, alpha, t)
    truth = torch.autograd.grad(expected * seed, params, retain_graph=True, allow_unused=True)
    for elements in (1 << 28, 5 * parity.VOCAB):
        monkeypatch.setattr("phalanx.ops.dense.cross_entropy.CHUNK_ELEMENTS", elements)
        head.tally = torch.zeros(2, dtype=torch.float64)
        loss = head.loss(x, replace(batch, loss_seed=seed, _made={}) if forward else batch)
        (loss if forward else loss * seed).backward(retain_graph=True)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(head.tally[1], kl.detach())
        for p, wanted in zip(params, truth, strict=True):
            torch.testing.assert_close(p.grad, wanted, rtol=1e-9, atol=1e-9 * wanted.abs().max().item())
            p.grad = None


# ---- the central test


def one_rank(rank: int, world: int, run: Run) -> dict:
    sample = parity.sample_batch
    with mock.patch.object(parity, "sample_batch", lambda *args: with_targets(sample(*args))):
        return parity.run_layout(rank, world, run, STEPS, True)


def run_of(layout: dict[str, Any]) -> Run:
    run = replace(parity.base_run("llama"), task=distil(alpha=0.4, temperature=1.7))
    return replace(run, layout=LayoutConfig(**layout), data=DataConfig(mock=True, document_attention=True))


def test_a_layout_changes_nothing(ranks):
    """Truth: one process in float64: losses, metrics, norms, gradients and weights."""
    where = "tests.engine.objectives.test_distil:one_rank"
    [truth] = ranks.run(where, 1, run_of({"sharding": 0}))
    truth = {
        **truth,
        "weights": parity.assemble([truth["weights"]]),
        "grads": [parity.assemble([g]) for g in truth["grads"]],
    }
    assert all(len(values) == 4 and values[3] > 0 for values in truth["losses"])
    for world, layout in ((2, {"tp": 2}), (2, {"pp": 2}), (2, {"cp": 2}), (2, {"sharding": 3})):
        parity.compare(ranks.run(where, world, run_of(layout)), truth, STEPS)


# ---- score files


def write_tokens(folder: Path, vocab: int, seed: int = 0, name: str = "tokens") -> str:
    """Documents of 5 to 40 tokens."""
    rng = np.random.default_rng(seed)
    with CorpusWriter(folder / name, np.uint16) as writer:
        for _ in range(30):
            writer.add_document(rng.integers(0, vocab, rng.integers(5, 40)))
    return str(folder / name)


def scoring_run(prefix: str, layout: dict[str, Any], **data: Any) -> Run:
    run = parity.base_run("llama", global_batch=4, micro_batch=2, eval_interval=5)
    run = replace(run, model=MODELS["llama"], layout=LayoutConfig(**layout))
    return replace(run, data=DataConfig(paths=(prefix,), split="80,20,0", **data))


def score_on_rank(rank: int, world: int, run: Run, what: TokenScoring) -> int:
    mesh = Mesh(make_plan(forward_only(run), world).grid, rank)
    return score(run, mesh, what, loaders_of(run))


def rows_of(file: ScoreFile, corpus: Corpus) -> tuple[np.ndarray, ...]:
    rows = file.rows(corpus, 0, corpus.num_tokens)
    return rows["label"], rows["ids"], rows["log_probs"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> tuple[Any, str]:
    """A model of transformers, and its folder."""
    model, folder = random_model(MODELS["llama"]), tmp_path_factory.mktemp("teacher")
    model.save_pretrained(folder)
    return model, str(folder)


@pytest.mark.parametrize("packing", ["off", "online"])
def test_scores_are_those_of_transformers_in_any_layout(ranks, teacher, tmp_path, packing):
    model, folder = teacher
    prefix = write_tokens(tmp_path, MODELS["llama"].vocab_size)
    corpus, files = Corpus(prefix), []
    for number, (world, layout) in enumerate(((1, {}), (2, {"tp": 2}), (4, {"cp": 2, "pp": 2}), (2, {}))):
        out = str(tmp_path / f"{number}.scores")
        ranks.run(
            "tests.engine.objectives.test_distil:score_on_rank",
            world,
            scoring_run(prefix, layout, packing=packing),
            TokenScoring(folder, TOP, out),
        )
        files.append(ScoreFile(out))
    label, ids, log_probs = rows_of(files[0], corpus)
    for file in files[1:]:
        other = rows_of(file, corpus)
        np.testing.assert_allclose(other[0], label, atol=1e-5)
        np.testing.assert_array_equal(other[1], ids)
        np.testing.assert_allclose(other[2], log_probs, atol=1e-5)
    loaders = loaders_of(scoring_run(prefix, {}, packing=packing))
    checked = 0
    for loader in loaders:
        batch = loader.batch(list(range(4)))
        groups = batch.documents if batch.documents is not None else batch.samples
        for group in groups.unique():
            mine = (groups == group) & (True if batch.real is None else batch.real > 0)
            if not mine.any():
                continue
            with torch.no_grad():
                wanted = model(batch.tokens[mine].unsqueeze(0)).logits[0].log_softmax(-1)
            scored = replace_scores(loader, files[0]).batch(list(range(4)))
            torch.testing.assert_close(
                scored.target_log_probs[mine].double(), wanted.topk(TOP).values, atol=1e-5, rtol=0
            )
            assert torch.equal(scored.target_ids[mine], wanted.topk(TOP).indices)
            kept = batch.labelled[mine]
            of_labels = wanted[kept].gather(1, batch.labels[mine][kept].unsqueeze(1))[:, 0]
            torch.testing.assert_close(scored.reference[mine][kept].double(), of_labels, atol=1e-5, rtol=0)
            checked += int(kept.sum())
    assert checked > 50


def replace_scores(loader: Any, scores: ScoreFile) -> Any:
    loader.scores = scores
    return loader


def test_a_run_learns_from_its_teacher_and_goes_on(ranks, teacher, tmp_path):
    """From the file to the log, through a checkpoint; the student's divergence falls."""
    prefix, out = write_tokens(tmp_path, 67), str(tmp_path / "teacher.scores")
    run = make_run(tmp_path / "run", steps=6, eval_interval=3, eval_samples=4)
    run = replace(
        run,
        data=DataConfig(paths=(prefix,), split="80,20,0", packing="online"),
        optim=OptimConfig(lr=0.03, schedule="constant"),
    )
    model = replace(MODELS["llama"], vocab_size=67)
    folder = tmp_path / "folder"
    random_model(model).save_pretrained(folder)
    scored = replace(run, model=model, train=replace(run.train, precision="fp32"))
    ranks.run("tests.engine.objectives.test_distil:score_on_rank", 1, scored, TokenScoring(str(folder), 8, out))
    run = replace(run, task=distil(teacher=out, alpha=1.0), checkpoint=CheckpointConfig(interval=3))
    assert not check(run, Facts())
    train(run, Placement())
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    kl = [row["task/kl"] for row in rows if "task/kl" in row]
    valid = [row["valid/valid/kl"] for row in rows if "valid/valid/kl" in row]
    assert len(kl) == 6 and kl[-1] < kl[0] and len(valid) == 2
    whole = replace(run, dir=str(tmp_path / "other"))
    train(replace(whole, train=replace(run.train, steps=3)), Placement())
    train(whole, Placement())  # goes on
    again = [json.loads(line) for line in (tmp_path / "other/metrics.jsonl").read_text().splitlines()]
    assert [row["task/kl"] for row in again if "task/kl" in row] == kl


def test_chats_are_distilled(ranks, tmp_path):
    """Scores of whole chats, as transformers gives them; the loss is of the answers, and falls."""
    folder, chats, out = chat_folder(tmp_path), tmp_path / "chats.jsonl", str(tmp_path / "teacher.scores")
    talks = [[("user", f"what is {n}?"), ("assistant", "fine, the lazy dog")] for n in range(12)]
    records = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    chats.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = replace(MODELS["llama"], vocab_size=400)
    model = random_model(config)
    model.save_pretrained(tmp_path / "teacher")
    data = DataConfig(chats=(str(chats),), tokenizer=str(folder), split="100,0,0")
    optim = OptimConfig(lr=0.03, schedule="constant")
    run = make_run(tmp_path / "run", steps=6, seq_length=64, global_batch=2, micro_batch=1)
    run = replace(run, data=data, model=config, optim=optim, task=distil(teacher=out, alpha=1.0))
    scored = replace(run, task=scoring_task(run), data=use_text(data, run.dir, 400, train_on="answers"))
    assert scored.task.train_on == "answers"
    where = "tests.engine.objectives.test_distil:score_on_rank"
    ranks.run(where, 2, replace(scored, layout=LayoutConfig(tp=2)), TokenScoring(str(tmp_path / "teacher"), TOP, out))
    [loader] = loaders_of(scored)
    batch = replace_scores(loader, ScoreFile(out)).batch([0, 1])
    assert batch.documents is not None and 0 < batch.labelled.sum() < (batch.real > 0).sum()
    for document in batch.documents[batch.real > 0].unique():
        mine = (batch.documents == document) & (batch.real > 0)
        with torch.no_grad():
            wanted = model(batch.tokens[mine].unsqueeze(0)).logits[0].log_softmax(-1)
        torch.testing.assert_close(batch.target_log_probs[mine].double(), wanted.topk(TOP).values, atol=1e-4, rtol=0)
    assert not check(run, Facts())
    train(run, Placement())
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    kl = [row["task/kl"] for row in rows if "task/kl" in row]
    assert len(kl) == 6 and kl[-1] < kl[0]


# ---- what is refused


def some_scores(folder: Path, run: Run, top: int = TOP) -> str:
    [loader, *_] = loaders_of(run)
    [corpus] = loader.sources[0].corpora
    out = folder / "some.scores"
    with ScoreWriter(out, [corpus], {"top": top, "windows": scored_windows(run), "teacher": "t"}) as writer:
        writer.write(corpus, 0, np.full((corpus.num_tokens, 1 + 2 * top), 1.0))
    return str(out)


def problems(run: Run) -> dict[str, str]:
    return {p.field: p.rule for p in check(run, Facts())}


def test_a_file_that_does_not_fit_is_refused_at_once(tmp_path):
    prefix = write_tokens(tmp_path, 60)
    run = replace(make_run(tmp_path / "run"), data=DataConfig(paths=(prefix,)))
    out = some_scores(tmp_path, run)
    assert problems(replace(run, task=distil(teacher=out))) == {}
    other = replace(run, task=distil(teacher=out, alpha=1.5, temperature=0.0))
    other = replace(other, train=replace(run.train, seq_length=8), data=replace(run.data, packing="online"))
    found = problems(other)
    assert list(found) == [
        "task.alpha",
        "task.temperature",
        "train.seq_length",
        "data.packing",
        "data.document_attention",
    ]
    assert "must be as it was when the scores were written" in found["data.packing"]
    assert "is required" in problems(replace(run, task=distil(teacher="")))["task.teacher"]
    assert "must be a file" in problems(replace(run, task=distil(teacher=str(tmp_path / "no"))))["task.teacher"]
    found = problems(replace(run, task=distil(teacher=out, train_on="all")))
    assert list(found) == ["task.train_on"] and "has no effect without data.chats" in found["task.train_on"]
    none = some_scores(tmp_path, run, top=0)
    assert "write it with --top" in problems(replace(run, task=distil(teacher=none)))["task.teacher"]
    mocked = replace(run, task=distil(teacher=out), data=DataConfig(mock=True))
    assert "has no tokens in files" in problems(mocked)["data.mock"]
    wide = some_scores(tmp_path, run, top=70)
    assert "has fewer ids" in problems(replace(run, task=distil(teacher=wide)))["model.vocab_size"]


def test_another_tokenizers_tokens_and_damage_are_refused(tmp_path):
    run = replace(make_run(tmp_path / "run"), data=DataConfig(paths=(write_tokens(tmp_path, 60),)))
    out = some_scores(tmp_path, run)
    task = distil(teacher=out)
    others = replace(run, task=task, data=DataConfig(paths=(write_tokens(tmp_path, 60, seed=1, name="b"),)))
    with pytest.raises(DataError, match="has no scores of .*another tokenizer"):
        open_loaders(others, others.data)
    whole = Path(out).read_bytes()
    for damaged, what in ((whole[:-1], "not a score file"), (whole[:-60] + b"0" + whole[-59:], "damaged")):
        Path(out).write_bytes(damaged)
        with pytest.raises(DataError, match=what):
            ScoreFile(out)
        assert what in problems(replace(run, task=task))["task.teacher"]
    Path(out).write_bytes(whole[5:])
    with pytest.raises(DataError, match="bytes, expected"):
        ScoreFile(out)


def test_rows_that_were_damaged_end_the_run(tmp_path):
    """The background check, which compares token files, compares score files too."""
    run = replace(make_run(tmp_path / "run", steps=1), data=DataConfig(paths=(write_tokens(tmp_path, 60),)))
    out = some_scores(tmp_path, run)
    whole = bytearray(Path(out).read_bytes())
    whole[1000] ^= 1
    Path(out).write_bytes(whole)
    with pytest.raises(DataError, match=r"some\.scores"):
        train(replace(run, task=distil(teacher=out)), Placement())


def test_tokens_without_scores_are_refused(tmp_path):
    run = replace(make_run(tmp_path / "run"), data=DataConfig(paths=(write_tokens(tmp_path, 60),)))
    [loader, *_] = loaders_of(run)
    [corpus] = loader.sources[0].corpora
    out = tmp_path / "empty.scores"
    with ScoreWriter(out, [corpus], {"top": 1, "windows": scored_windows(run), "teacher": "t"}):
        pass
    with pytest.raises(DataError, match="has no score of 16 tokens of sample 0"):
        open_loaders(replace(run, task=distil(teacher=str(out))), run.data)[0].batch([0])
    with pytest.raises(RuntimeError), ScoreWriter(tmp_path / "x", [corpus], {"top": 1}):
        raise RuntimeError
    assert not list(tmp_path.glob("x*"))


def test_the_program_scores_and_refuses(warm, teacher, tmp_path):
    _, folder = teacher
    prefix, out = write_tokens(tmp_path, 60), tmp_path / "a.scores"
    words = ["data", "score", "recipes/tiny_llama.yaml", "--teacher", folder, "-o", str(out)]
    words += ["data.mock=false", f"data.paths={prefix}", "train.seq_length=16", "layout.tp=2"]
    words += ["train.micro_batch=2", "layout.pp=1"]
    root = Path(__file__).parents[3]
    refused = warm.phalanx(*words, "--top", "9999", cwd=root)
    assert refused.returncode == 2 and "--top" in refused.stderr and "ids of the teacher" in refused.stderr
    done = warm.phalanx(*words, "--top", "4", cwd=root)
    assert done.returncode == 0, done.stderr
    assert ScoreFile(out).top == 4 and "tokens=" in done.stdout
