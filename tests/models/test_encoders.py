"""Our encoders against Hugging Face's: logits, loss and the gradient of every tensor in float64, from the same weights
by name; documents that are packed together do not read each other."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.convert import export
from phalanx.checkpoint.hf import from_hf, read_folder, to_hf
from phalanx.checkpoint.keep import latest
from phalanx.checkpoint.load import load_weights as load_weights_of
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run, TrainConfig
from phalanx.engine.build import build
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.models.encoder import EncoderHead
from phalanx.models.model_config import ModelConfig
from phalanx.models.registry import family_of
from phalanx.nn.objective import find_objective
from phalanx.sequence.batch import IGNORE, Batch
from tests.harness import hf_fuzz
from tests.harness.checkpoints import save_here
from tests.harness.parity import MODELS, SEQ, assemble, sample_batch
from tests.harness.sample import each_in_two
from tests.models.test_models import all_logits, load_weights, run_model

CASES = {
    "bert": replace(MODELS["bert"], dropout=0.0, attention_dropout=0.0),
    "bert: tanh, one segment": replace(
        MODELS["bert"],
        dropout=0.0,
        attention_dropout=0.0,
        hidden_act="gelu_new",
        type_vocab_size=1,
        num_hidden_layers=2,
    ),
    "modernbert": MODELS["modernbert"],
    "modernbert: biases, tanh, types": replace(
        MODELS["modernbert"],
        norm_bias=True,
        attention_bias=True,
        mlp_bias=True,
        classifier_bias=True,
        decoder_bias=False,
        hidden_activation="gelu_new",
        classifier_activation="gelu_new",
        layer_types=("sliding_attention", "full_attention", "sliding_attention"),
        num_hidden_layers=3,
        global_rope_theta=500.0,
        local_rope_theta=50.0,
    ),
}
NAMES = ("red", "green", "blue")
CASES |= {
    "bert: pairs of texts": replace(CASES["bert"], head="pretraining"),
    "bert: classes of sequences": replace(CASES["bert"], head="sequence", labels=NAMES),
    "bert: classes of tokens": replace(CASES["bert: tanh, one segment"], head="token", labels=NAMES),
    "modernbert: classes of sequences": replace(MODELS["modernbert"], head="sequence", labels=NAMES),
    "modernbert: classes of tokens": replace(MODELS["modernbert"], head="token", labels=NAMES, num_hidden_layers=2),
}
LAYOUTS = {"one rank": {}, "tp2": dict(tp=2), "pp2": dict(pp=2), "tp2 pp2": dict(tp=2, pp=2), "cp2": dict(cp=2)}


def with_segments(batch: Batch, kinds: int) -> Batch:
    """Some tokens belong to a second text."""
    return replace(batch, segments=(batch.positions > 6).long() * (kinds - 1))


def classes_of(batch: Batch, head: str) -> torch.Tensor:
    """The class of each token, or of each sequence at its first token."""
    classes = torch.where(batch.labelled, batch.labels % len(NAMES), IGNORE)
    return classes if head == "token" else torch.where(batch.positions == 0, batch.tokens % len(NAMES), IGNORE)


def with_pairs(batch: Batch) -> Batch:
    """A class for each sequence but the last, which weighs as much as its labels."""
    first = batch.positions == 0
    number = first.cumsum(0)
    labels = torch.where(first & (number < number[-1]), batch.tokens % 2, IGNORE)
    weights = torch.zeros_like(labels)
    weights[first] = batch.labelled.view(-1, SEQ).sum(1)
    return replace(batch, pair_labels=labels, pair_weights=weights)


def logits_of(out: Any) -> torch.Tensor:
    return out.prediction_logits if "prediction_logits" in out else out.logits


def loss_of(out: Any, labels: torch.Tensor, batches: list[Batch], head: str) -> torch.Tensor:
    """The mean of tokens (or texts) with a label; to each, the loss of its pair is added."""
    logits = logits_of(out)
    logits = logits if head == "sequence" else logits.flatten(0, 1)
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    if head == "pretraining":
        classes, weights = (torch.cat([getattr(b, f"pair_{n}") for b in batches])[::SEQ] for n in ("labels", "weights"))
        each = F.cross_entropy(out.seq_relationship_logits, classes, ignore_index=IGNORE, reduction="none")
        loss = loss + (each * weights).sum()
    return loss / (labels != IGNORE).sum()


def batches_of(config: Any) -> list[Batch]:
    kinds = getattr(config, "type_vocab_size", 1)
    found = [sample_batch(ids, documents=False) for ids in ([1, 2], [3, 4])]
    if config.head == "pretraining":
        found = [with_pairs(batch) for batch in found]
    elif config.head != "masked":
        found = [replace(batch, labels=classes_of(batch, config.head)) for batch in found]
    return [with_segments(batch, kinds) if kinds > 1 else batch for batch in found]


def theirs(config: ModelConfig) -> Any:
    """The same model of transformers, in float64, with random weights."""
    import transformers

    written = to_hf(config, torch.float64)
    cls = getattr(transformers, family_of(config).class_of(config))
    torch.manual_seed(0)
    model = cls(cls.config_class(**written, attn_implementation="sdpa")).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.0, 0.3).add_(1.0 if p.dim() == 1 else 0.0)
    return model


@lru_cache
def hugging_face(case: str) -> dict[str, Any]:
    """Weights, and Hugging Face's logits, loss and gradients."""
    config = CASES[case]
    batches = batches_of(config)
    tokens, labels = (torch.cat([getattr(b, n) for b in batches]) for n in ("tokens", "labels"))
    more = {}
    if batches[0].segments is not None:
        more["token_type_ids"] = torch.cat([b.segments for b in batches]).view(-1, SEQ)
    with hf_fuzz.wide():
        model = theirs(config)
        out = model(tokens.view(-1, SEQ), **more)
    labels = labels[::SEQ] if config.head == "sequence" else labels
    loss = loss_of(out, labels, batches, config.head)
    loss.backward()
    logits = logits_of(out) if config.head == "sequence" else logits_of(out).flatten(0, 1)
    named = {k: p for k, p in model.named_parameters() if p.grad is not None}
    return {
        "weights": {k: p.detach().numpy() for k, p in model.named_parameters()},
        "grads": {k: p.grad.numpy() for k, p in named.items()},
        "logits": logits.detach().numpy(),
        "loss": loss.item(),
    }


def run_of(config: ModelConfig, **layout: int) -> Run:
    train = TrainConfig(steps=1, global_batch=4, micro_batch=2, seq_length=SEQ, precision="fp64")
    return Run(model=config, train=train, layout=LayoutConfig(**layout))


@pytest.mark.parametrize("case, layout", each_in_two(CASES, LAYOUTS))
def test_equal_to_hugging_face(ranks, case, layout):
    """Truth: transformers in float64, to 1e-10 of each tensor's scale; layouts through the pool of ranks."""
    truth, world = hugging_face(case), math.prod(LAYOUTS[layout].values())
    arguments = (run_of(CASES[case], **LAYOUTS[layout]), truth["weights"], batches_of(CASES[case]))
    results = (
        [run_model(0, 1, *arguments)]
        if world == 1
        else ranks.run("tests.models.test_models:run_model", world, *arguments)
    )
    for result in results:
        assert result["loss"] == pytest.approx(truth["loss"], rel=1e-12)
    every = SEQ if CASES[case].head == "sequence" else 1
    logits = [(np.concatenate(r["logits"]), r["places"]) for r in results if r["logits"]]
    assert len(logits) == LAYOUTS[layout].get("tp", 1) * LAYOUTS[layout].get("cp", 1)
    for found, places in logits:
        whole = places % every == 0  # texts have theirs at their first token
        expected = truth["logits"][places[whole] // every]
        assert np.abs(found[whole] - expected).max(initial=0) <= 1e-10 * np.abs(truth["logits"]).max()
    grads = assemble([r["grads"] for r in results])
    assert grads.keys() == truth["grads"].keys()
    largest = max(np.abs(g).max() for g in truth["grads"].values())
    for name, expected in truth["grads"].items():
        floor = 1e-5 * largest  # the bias of keys moves all scores of a query alike: its gradient is rounding alone
        off, bound = np.abs(grads[name] - expected).max(), 1e-10 * max(np.abs(expected).max(), floor)
        assert off <= bound, f"gradient of {name} is off by {off:.3g} (bound {bound:.3g})"


FEW = {name: LAYOUTS[name] for name in ("one rank", "tp2", "pp2", "cp2")}


@pytest.mark.parametrize("case", ["bert", "bert: pairs of texts", "modernbert"])
@pytest.mark.parametrize("layout", FEW)
def test_a_head_that_reads_labelled_tokens_alone(ranks, monkeypatch, case, layout):
    """Where few tokens have a label the loss and all gradients are those of a head that reads all of them, with rooms
    for as many labels as there are and for more. Ranks of tp and cp read all."""
    config, weights, read = CASES[case], hugging_face(case)["weights"], list[int]()
    reads = EncoderHead.transformed
    monkeypatch.setattr(EncoderHead, "transformed", lambda self, x: read.append(len(x)) or reads(self, x))
    all_of = batches_of(config)
    few = [replace(b, labels=torch.where(b.positions % 3 == 1, b.labels, IGNORE)) for b in all_of]
    most = max(int(b.labelled.sum()) for b in few)
    expected = run_model(0, 1, run_of(config), weights, few)
    for rows in (most, most + 4):
        read.clear()
        batches, world = [replace(b, label_rows=rows) for b in few], math.prod(FEW[layout].values())
        arguments = (run_of(config, **FEW[layout]), weights, batches)
        if world == 1:
            results = [run_model(0, 1, *arguments)]
            assert read[: len(few)] == [rows] * len(few)
        else:
            results = ranks.run("tests.models.test_models:run_model", world, *arguments)
        assert all(result["loss"] == pytest.approx(expected["loss"], rel=1e-12) for result in results)
        found, truth = assemble([r["grads"] for r in results]), assemble([expected["grads"]])
        largest = max(np.abs(g).max() for g in truth.values())
        assert found.keys() == truth.keys()
        assert all(np.abs(found[name] - g).max() <= 1e-12 * largest for name, g in truth.items())


@pytest.mark.parametrize("layout, share", [({}, 0.15), ({"tp": 2}, 1.0), ({"cp": 2}, 1.0), ({"pp": 2}, 0.15)])
def test_the_flops_of_labelled_tokens_alone(layout, share):
    """Of BERT by its formula: 2 for each weight of a matmul, and 4 S D for attention both ways; of the head that share
    of the tokens."""
    c = CASES["bert"]
    task = find_objective("mlm").Config(name="mlm", rate=0.15)
    run = replace(run_of(c, **layout), task=task)
    run = replace(run, train=replace(run.train, global_batch=128, micro_batch=128))
    facts = make_plan(run, math.prod(layout.values())).facts
    width, inner = c.hidden_size, c.intermediate_size
    layer = 2 * (4 * width**2 + 2 * width * inner) + 4 * SEQ * width
    assert [fact.flops for fact in facts[1:-1]] == [layer] * c.num_hidden_layers
    assert facts[-1].flops == pytest.approx(share * 2 * (width**2 + width * c.vocab_size))
    assert facts[-1].loss_flops == pytest.approx(share * 2 * width * c.vocab_size)


@pytest.mark.parametrize("case", CASES)
def test_packed_documents_do_not_read_each_other(case):
    """Other tokens in one document leave all logits of the others as they are, to the bit; and the logits of a document
    are those that it has alone."""
    config = CASES[case]
    plan = make_plan(run_of(config), 1)
    state = build(plan, Mesh(plan.grid, 0))
    load_weights(state, hugging_face(case)["weights"])
    batch = sample_batch([1, 2], documents="packed")
    [before] = all_logits(state, [batch])
    numbers = batch.documents.numpy()
    for document in np.unique(numbers):
        mine = numbers == document
        tokens = torch.where(torch.from_numpy(mine), (batch.tokens + 1) % config.vocab_size, batch.tokens)
        [after] = all_logits(state, [replace(batch, tokens=tokens)])
        assert np.array_equal(before[~mine], after[~mine])
        assert (before[mine] != after[mine]).any(-1).all()  # every token of it reads every other
    with torch.no_grad(), hf_fuzz.wide():
        model, places = theirs_with(case), np.flatnonzero(numbers == numbers[5])
        alone = logits_of(model(batch.tokens[places][None]))[0].numpy()
    places = places[:1] if config.head == "sequence" else places
    assert np.abs(before[places] - alone).max() <= 1e-10 * np.abs(alone).max()


def theirs_with(case: str) -> Any:
    model = theirs(CASES[case])
    weights = hugging_face(case)["weights"]
    model.load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()}, strict=False)
    return model


# ---- folders


@pytest.mark.parametrize("case", CASES)
def test_a_folder_there_and_back(tmp_path, case):
    """Written by transformers, loaded, saved and exported: each tensor to the byte, and the same config."""
    from transformers import AutoConfig

    config = CASES[case]
    theirs(config).save_pretrained(tmp_path / "theirs")
    assert read_folder(tmp_path / "theirs").model == config
    out = saved_again(tmp_path / "theirs", config, tmp_path)
    before, after = load_file(tmp_path / "theirs/model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    cls = type(theirs(config))
    model, info = cls.from_pretrained(out, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found = [AutoConfig.from_pretrained(folder).to_dict() for folder in (tmp_path / "theirs", out)]
    assert {k for k in found[0] if found[0][k] != found[1].get(k)} <= {"_name_or_path", "transformers_version"}


def saved_again(folder: Path, config: ModelConfig, root: Path) -> Path:
    plan = make_plan(run_of(config), 1)
    mesh = Mesh(plan.grid, 0)
    state = build(plan, mesh)
    load_weights_of(folder, state.buffers, mesh)
    save_here(state, root / "run")
    return export(latest(root / "run"), root / "out", "fp64")


def test_published_bert_folders_with_other_heads_and_former_names(tmp_path):
    """google-bert's files: pooler and next sentence beside the head, norms with gamma and beta, copies of the
    decoder."""
    config = CASES["bert"]
    theirs(config).save_pretrained(tmp_path / "plain")
    tensors = load_file(tmp_path / "plain/model.safetensors")
    wanted = saved_again(tmp_path / "plain", config, tmp_path)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    width = config.hidden_size
    old["bert.pooler.dense.weight"], old["bert.pooler.dense.bias"] = torch.ones(width, width), torch.ones(width)
    old["cls.seq_relationship.weight"], old["cls.seq_relationship.bias"] = torch.ones(2, width), torch.ones(2)
    old["bert.embeddings.position_ids"] = torch.arange(SEQ)[None]
    old["cls.predictions.decoder.bias"] = old["cls.predictions.bias"].clone()
    decoder = old["bert.embeddings.word_embeddings.weight"].clone()
    shutil.copytree(tmp_path / "plain", tmp_path / "old")
    save_file({**old, "cls.predictions.decoder.weight": decoder}, tmp_path / "old/model.safetensors")
    found = saved_again(tmp_path / "old", config, tmp_path / "again")
    assert (found / "model.safetensors").read_bytes() == (wanted / "model.safetensors").read_bytes()
    save_file({**old, "cls.predictions.decoder.weight": decoder + 1}, tmp_path / "old/model.safetensors")
    with pytest.raises(CheckpointError, match="must be true|differs from its|decoder.weight"):
        read_folder(tmp_path / "old")
        saved_again(tmp_path / "old", config, tmp_path / "other")


def test_a_folder_with_dropout_and_a_head_over_pairs_is_read_as_it_was_written():
    config = replace(MODELS["bert"], head="pretraining")
    assert from_hf(to_hf(config, torch.float64)) == config


def test_an_encoder_without_a_head_lacks_it(tmp_path):
    """BertModel's folder: names without a prefix, a pooler, and no head, which is said tensor by tensor."""
    import transformers

    config = CASES["bert"]
    transformers.BertModel(theirs(config).config).double().save_pretrained(tmp_path / "base")
    with pytest.raises(CheckpointError) as error:
        saved_again(tmp_path / "base", config, tmp_path)
    assert "missing: cls.predictions.bias" in str(error.value) and "not in the model" not in str(error.value)
