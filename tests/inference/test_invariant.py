"""train.batch_invariant: the bits of a token's logits depend on its sequence alone, and are those of training's
forward. Compared bit for bit, on the CPU; tests/gpu/invariant.py does the same on GPUs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.base.errors import ConfigError
from phalanx.checkpoint.manifest import NAME, seal
from phalanx.config.device_check import Facts
from phalanx.config.run import Fp8Config
from phalanx.forecast.check import check
from phalanx.inference.drafter import NgramSpec
from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.load import run_of_folder
from phalanx.inference.overrides import TAKEN
from phalanx.inference.request import SamplingOptions
from phalanx.nn.adapter import AdapterConfig, completed_lora
from phalanx.ops.op import NotInvariant
from tests.harness.generation import (
    answers_of,
    cached_logits,
    invariant_run,
    random_model,
    run_of,
    sequences_of,
    training_logits,
)
from tests.harness.parity import base_run, compare, truth_of

LENGTHS = (13, 9, 16)
PIECES = (
    ((13, 9, 16),),
    ((5, 1, 16), (1, 1, 0), (7, 7, 0)),
    ((1, 0, 0), (0, 9, 8), (12, 0, 8)),
)
SMALL = EngineOptions(sequences=4, tokens=8, page_size=4, memory_gib=0.001)
GREEDY = SamplingOptions(tokens=5, temperature=0, logprobs=3, prompt_logprobs=1)


def differing(found, wanted) -> int:
    """Numbers whose bits differ."""
    assert found is not None and [a.shape for a in found] == [b.shape for b in wanted]
    return sum(int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in zip(found, wanted))


@pytest.mark.parametrize(
    "model",
    ["llama", "qwen2", "qwen3", "olmo2", "gemma2", "gemma3_text", "mistral", "gpt2", "smollm3", "gpt_neox"],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_pieces_and_batches_of_any_size_have_the_bits_of_training(model, precision):
    run = invariant_run(model, precision)
    wanted = training_logits(0, 1, run, LENGTHS)
    for steps in PIECES:
        assert differing(cached_logits(0, 1, run, LENGTHS, steps), wanted) == 0
    usual = replace(run, train=replace(run.train, batch_invariant=False, precision="fp64"))
    if precision == "fp64":  # and these are the model's logits
        for a, b in zip(wanted, training_logits(0, 1, usual, LENGTHS)):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_a_sequence_has_one_set_of_bits_in_batches_of_any_size(count):
    """Read in pieces beside the others; pages of another size."""
    run, lengths = invariant_run("llama"), [9, *(1 + i % 5 for i in range(1, count))]
    alone = cached_logits(0, 1, run, lengths[:1], [(9,)], page_size=16)
    steps = [(4, *(0 if i % 2 else n for i, n in enumerate(lengths[1:])))]
    steps += [(5, *(n if i % 2 else 0 for i, n in enumerate(lengths[1:])))]
    found = cached_logits(0, 1, run, lengths, steps)
    assert found is not None and differing(found[:1], alone) == 0


@pytest.mark.parametrize(
    "model, layout",
    [("llama", {"tp": 2}), ("gpt2", {"tp": 2}), ("qwen3", {"tp": 2, "pp": 2}), ("olmo2", {"tp": 2})],
)
def test_tensor_parallelism_changes_no_bit(ranks, model, layout):
    """Of generation, and of training's forward with sequence parallelism."""
    run, split = invariant_run(model), invariant_run(model, **layout)
    world, lengths = split.layout.tp * split.layout.pp, (6, 16, 8)
    wanted = training_logits(0, 1, run, lengths)
    steps = [(5, 1, 8), (1, 7, 0), (0, 8, 0)]
    assert [len(each) for each in wanted] == [*lengths]
    generated = ranks.run("tests.harness.generation:cached_logits", world, split, lengths, steps)
    assert differing(next(each for each in generated if each is not None), wanted) == 0
    if split.layout.pp == 1:
        for each in ranks.run("tests.harness.generation:training_logits", world, split, lengths):
            assert differing(each, wanted) == 0


def test_documents_of_a_batch_have_the_bits_of_sequences(ranks):
    """Packed, as training has them: each document as if it were generated."""
    lengths = (5, 9, 12)
    wanted = cached_logits(0, 1, invariant_run("mistral"), lengths, [lengths])
    for world, layout in (1, {}), (2, {"tp": 2}):
        run = invariant_run("mistral", **layout)
        for each in ranks.run("tests.harness.generation:training_logits", world, run, lengths, 32):
            assert differing(each, wanted) == 0


def test_the_engine_answers_with_the_same_bits_in_any_company(ranks):
    """Log-probabilities of prompts and answers: alone; beside others, in pieces; without room, so that sequences are
    preempted; with prefixes found in memory; with drafts; on two ranks."""
    run = invariant_run("llama")
    model, prompts = random_model(0, 1, run), sequences_of((5, 9, 3, 11, 2, 7), 131)
    asked = [(p, GREEDY) for p in prompts]
    alone = [answers_of(Engine(model, replace(SMALL, tokens=64)), [each])[0] for each in asked]
    assert answers_of(Engine(model, SMALL), asked, arrive=2) == alone
    page = 4 * 2 * 2 * 6 * 4 * 2  # tokens, keys and values, heads, features, bytes, layers
    tight = Engine(model, replace(SMALL, memory_gib=(page * 9 + 1) / 2**30))
    assert tight.groups[0].num_pages == 9 and answers_of(tight, asked) == alone
    plain = [(p, replace(GREEDY, prompt_logprobs=None)) for p in prompts]
    again = Engine(model, SMALL)
    first, second = (answers_of(again, plain, arrive=1) for _ in range(2))
    assert [a[:2] for a in first] == [a[:2] for a in second] == [a[:2] for a in alone]
    drafted = answers_of(Engine(model, replace(SMALL, drafts=NgramSpec())), plain)
    assert [a[:2] for a in drafted] == [a[:2] for a in alone]
    split = invariant_run("llama", tp=2)
    assert ranks.run("tests.harness.generation:answers", 2, split, asked, SMALL, 2)[0] == alone


@pytest.mark.parametrize("model, documents", [("llama", "packed"), ("gpt2", False)])
def test_training_is_the_same_training(ranks, model, documents):
    """Losses, norms, the gradient of every tensor and weights in float64, against one process without it."""
    run = invariant_run(model, "fp64", tp=2)
    run = replace(
        base_run(model), model=run.model, layout=run.layout, train=replace(base_run(model).train, batch_invariant=True)
    )
    usual = replace(run, train=replace(run.train, batch_invariant=False))
    found = ranks.run("tests.harness.parity:run_layout", 2, run, 2, documents)
    compare(found, truth_of(ranks, usual, 2, documents), 2)


REFUSED = (
    ("mixtral", {}, "experts"),
    ("llama", {"layout": {"cp": 2}}, "context parallelism"),
    ("llama", {"layout": {"tp": 4}}, "kv heads"),
    ("llama", {"train": {"kernels": "plain"}}, "implementations"),
    ("llama", {"train": {"plain_ops": ["norm"]}}, "implementations"),
    ("llama", {"train": {"fp8": Fp8Config(recipe="delayed")}}, "FP8"),
    ("llama", {"lora": True}, "adapters"),
)


@pytest.mark.parametrize("model, changes, rule", REFUSED, ids=str)
def test_what_is_not_invariant_is_refused_by_name(model, changes, rule):
    run = run_of(model)
    run = replace(run, train=replace(run.train, batch_invariant=True, precision="bf16", **changes.get("train", {})))
    run = replace(run, layout=replace(run.layout, **changes.get("layout", {})))
    run = replace(run, lora=completed_lora(AdapterConfig())) if "lora" in changes else run
    found = check(run, Facts(world_size=run.layout.tp * run.layout.cp, files=False))
    assert any(p.field == "train.batch_invariant" and rule in p.rule for p in found), found


def test_generation_takes_it_from_the_run(tmp_path):
    """Of a checkpoint's config; a Hugging Face folder says nothing of it."""
    kept = Path(__file__).parents[1] / "fixtures/6ff7580/dense/checkpoints/step-00000003"
    for name in (NAME, "weights/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((kept / name).read_bytes())
    manifest = json.loads((kept / NAME).read_text())
    manifest["config"]["train"]["batch_invariant"] = True
    text = json.dumps({name: value for name, value in manifest.items() if name != "sha256"})
    assert not run_of_folder(tmp_path / "weights", gpu=False).train.batch_invariant
    (tmp_path / NAME).write_text(seal(text[:-1]))
    assert run_of_folder(tmp_path / "weights", gpu=False).train.batch_invariant
    assert "train.batch_invariant" in TAKEN


def test_modules_refuse_what_the_config_cannot_see():
    with pytest.raises(NotInvariant, match="42 features"):
        run = run_of("llama")
        random_model(0, 1, replace(run, train=replace(run.train, batch_invariant=True)))
    run = invariant_run("gpt2")
    with pytest.raises(NotInvariant, match="dropout"):
        training_logits(0, 1, replace(run, model=replace(run.model, attention_dropout=0.1)), (3,))
    model = random_model(0, 1, invariant_run("llama"))
    with pytest.raises(ConfigError, match="batch_invariant"):
        Engine(model, replace(SMALL, pages="fp8"))
