"""QK-clip: the largest scores, what is made of them, and the same in every layout. Truth: the scores themselves, pair
by pair, and the rule of the paper by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from phalanx.comm.mesh import Mesh
from phalanx.config.read import read
from phalanx.engine.build import State, build
from phalanx.engine.step import accumulate, train_step, update
from phalanx.forecast.check import Facts, check
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.ops.attention import attention as whole
from phalanx.ops.attention.attention import _visible
from phalanx.ops.attention.kind import AttentionKind
from phalanx.ops.attention.reach import reach_of
from phalanx.optim.adamw import AdamWConfig
from phalanx.optim.muon import MuonConfig
from phalanx.sequence.batch import Batch
from phalanx.sequence.shard import SequenceShard
from phalanx.verifying.compare import random_weights
from tests.harness import parity
from tests.harness.sample import rest_in_soak

HERE = __name__
STEPS = 3


# ---- which keys a query reads

KINDS = [
    AttentionKind(direction, window=window, together=together)
    for direction in ("causal", "both", "prefix")
    for window in (None, 1, 5)
    for together in ((None, 3) if direction == "causal" else (None,))
]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: f"{k.direction}-{k.window}-{k.together}")
def test_a_reach_is_the_mask(kind, documents):
    """In two sequences of 37 tokens, cut into 1 to 3 shards: truth is attention's own mask of all pairs."""
    sequences, length, draw = 2, 37, torch.Generator().manual_seed(0)
    ids = torch.arange(sequences * length)
    tokens = torch.randint(3, 5, ids.shape, generator=draw)
    batch = Batch(tokens, ids, ids % length, ids // length, sequences, length)
    if documents:
        starts = (ids % length == 0) | (torch.rand(ids.shape, generator=draw) < 0.2)
        batch = replace(batch, documents=starts.cumsum(0) - 1)
    if kind.direction == "prefix":
        number = batch.runs[0]
        place = ids - torch.tensor([int(ids[number == n].min()) for n in number.tolist()])
        batch = replace(batch, prefix=(place < number * 7 % 5).long())
    for part in (SequenceShard(i, count) for count in (1, 2, 3) for i in range(count)):
        shard = batch.cut(part)
        seen = _visible(shard, kind).expand(sequences, 1, -1, length)[:, 0]
        for source in part.all:
            keys = [i for run in source.runs(length) for i in run]
            reach, at = reach_of(shard, kind, source), torch.arange(len(keys))
            found = (reach.first.unsqueeze(-1) <= at) & (at < reach.stop.unsqueeze(-1))
            assert torch.equal(found.expand(sequences, -1, -1), seen[..., keys])


# ---- what a step does

MODELS = ("llama", "llama-tied", "gpt_neox", "qwen2", "deepseek_v3", "deepseek_v3-mtp", "gemma2", "nemotron_h", "phi3")


def run_of(model: str, threshold: float, layout: dict | None = None, **fields):
    run = parity.base_run(model, precision="fp64", **fields.pop("train", {}))
    optim = MuonConfig(name="muon", lr=1e-2, coefficients="polar_express", fallback=AdamWConfig(lr=1e-2), **fields)
    return replace(run, optim=replace(optim, qk_clip=threshold), layout=LayoutConfig(**(layout or {})))


def alone(model: str, threshold: float, **fields) -> tuple[State, list[Batch]]:
    run = run_of(model, threshold, **fields)
    plan = make_plan(run, 1)
    state = build(plan, Mesh(plan.grid, 0))
    random_weights(state.model)
    state.model.train()
    return state, parity.step_batches(run, state.mesh, 0, documents=True)


def scores_of(monkeypatch, state: State, batches: list[Batch]) -> list[torch.Tensor]:
    """By hand: for each layer in its order the largest scores (heads,) of all pairs that attention's own mask lets
    through, from the queries and keys that attention is given."""
    given, attend = [], whole.attention

    def watched(q, k, v, batch, kind, *rest):
        keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = torch.einsum("bhik,bhjk->bhij", q, keys) * (kind.scale or q.shape[-1] ** -0.5)
        given.append(scores.masked_fill(~_visible(batch, kind), -torch.inf).amax((0, 2, 3)).detach())
        return attend(q, k, v, batch, kind, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(whole, "attention", watched)
        accumulate(state, batches)
    state.buffers.zero_grads()
    state.model.forget_scores()
    layers = len(given) // len(batches)
    return [torch.stack(given[layer::layers]).amax(0) for layer in range(layers)]


def weights_of(state: State) -> dict[str, np.ndarray]:
    state.buffers.ready()
    return parity.assemble([parity.parts_of(state, "master")])


@pytest.mark.parametrize("model", MODELS)
def test_scores_then_just_reach_the_threshold(monkeypatch, model):
    """A step with a rate of zero only clips. The first layer reads what it read before: its heads then reach the
    threshold or, if they were below, what they reached; half of them are clipped."""
    state, batches = alone(model, 1e9, train={"global_batch": 4})
    before = scores_of(monkeypatch, state, batches)[0]
    threshold = float(before.sort().values[: len(before) // 2 + 1].mean())
    assert 0 < threshold < before.max()
    state, batches = alone(model, threshold, train={"global_batch": 4})
    result = update(state, accumulate(state, batches), lr=0.0)
    state.buffers.ready()
    after = scores_of(monkeypatch, state, batches)
    torch.testing.assert_close(after[0], before.clamp(max=threshold), rtol=1e-11, atol=0)
    every = scores_of(monkeypatch, *alone(model, 1e9, train={"global_batch": 4}))
    assert result.clipped_heads == sum(int((layer > threshold).sum()) for layer in every)


def by_the_paper(weights: dict[str, np.ndarray], model: str, scores: list[torch.Tensor], threshold: float) -> None:
    """Algorithm 1, head by head: of latent attention the parts of a head alone by the root, the queries of the part of
    keys that heads share by the whole ratio; of plain attention both by the root."""
    c = parity.MODELS[model]
    for layer, largest in enumerate(scores):
        for head, score in enumerate(largest.tolist()):
            ratio, at = min(1.0, threshold / score), f"model.layers.{layer}.self_attn"
            if model == "deepseek_v3":
                nope, wide = c.qk_nope_head_dim, c.qk_nope_head_dim + c.qk_rope_head_dim
                q = weights[f"{at}.q_b_proj.weight"][head * wide : (head + 1) * wide]
                q[:nope] *= ratio**0.5
                q[nope:] *= ratio
                both = nope + c.v_head_dim
                weights[f"{at}.kv_b_proj.weight"][head * both : head * both + nope] *= ratio**0.5
            else:
                width = c.hidden_size // c.num_attention_heads
                for name in ("q_proj", "k_proj"):
                    weights[f"{at}.{name}.weight"][head * width : (head + 1) * width] *= ratio**0.5


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("model", ["deepseek_v3", "llama-tied"])
def test_it_is_the_rule_of_the_paper(monkeypatch, model, optimizer):
    """After an update, which is the one without it."""

    def made(threshold: float) -> tuple[State, list[Batch]]:
        run = run_of(model, threshold)
        if optimizer == "adamw":
            run = replace(run, optim=AdamWConfig(lr=1e-2, qk_clip=threshold))
        plan = make_plan(run, 1)
        state = build(plan, Mesh(plan.grid, 0))
        random_weights(state.model)
        state.model.train()
        return state, parity.step_batches(run, state.mesh, 0, documents=False)

    state, batches = made(0.0)
    scores = scores_of(monkeypatch, state, batches)
    update(state, accumulate(state, batches), lr=1e-2)
    truth = weights_of(state)
    threshold = float(torch.cat(scores).median())
    by_the_paper(truth, model, scores, threshold)
    state, batches = made(threshold)
    update(state, accumulate(state, batches), lr=1e-2)
    for name, values in weights_of(state).items():
        np.testing.assert_allclose(values, truth[name], rtol=1e-12, atol=1e-15, err_msg=name)


def test_a_threshold_that_nothing_reaches_changes_no_bit():
    found = []
    for threshold in (0.0, 1e9):
        state, batches = alone("llama", threshold)
        result = update(state, accumulate(state, batches), lr=1e-2)
        assert (result.clipped_heads is None) == (threshold == 0) and not result.clipped_heads
        found.append(weights_of(state))
    assert all(np.array_equal(values, found[1][name]) for name, values in found[0].items())


def test_a_skipped_step_clips_nothing():
    state, batches = alone("llama", 1e-3)
    before = weights_of(state)
    accumulated = accumulate(state, batches)
    state.buffers.flat[0].own_grad[0] = torch.nan
    result = update(state, accumulated, lr=1e-2)
    assert result.skipped > 0 and result.clipped_heads == 0
    after = weights_of(state)
    assert all(np.array_equal(values, after[name]) for name, values in before.items())
    assert (state.qk_clip.largest == 1e-3).all(), "the next step measures anew"


def test_evaluation_is_not_measured():
    from phalanx.engine.step import evaluate_step

    state, batches = alone("llama", 1e-3)
    evaluate_step(state.model, batches)
    assert (state.qk_clip.largest == 1e-3).all()
    train_step(state, batches, lr=0.0)
    evaluate_step(state.model, batches)
    assert (state.qk_clip.largest == 1e-3).all()


# ---- layouts

# about half of the heads reach them
THRESHOLD = {"llama": 10.0, "deepseek_v3": 6.0, "gpt_neox": 10.0, "qwen2": 9.0, "nemotron_h": 9.0}
LAYOUTS = {
    "tp2": ("llama", 2, {"tp": 2, "sharding": 0}, False),
    "tp4 with 2 kv heads": ("llama", 4, {"tp": 4, "sharding": 1}, False),
    "pp2 dp2 ZeRO-3": ("llama", 4, {"pp": 2, "sharding": 3}, True),
    "cp2 ring": ("llama", 2, {"cp": 2, "sharding": 2, "cp_attention": "ring"}, True),
    "cp2 all-gather": ("llama", 2, {"cp": 2, "sharding": 2, "cp_attention": "allgather"}, False),
    "ulysses": ("llama", 4, {"cp": 4, "cp_ulysses": 2, "sharding": 0}, True),
    "dynamic": ("llama", 2, {"cp": 2, "cp_degree": "dynamic"}, "filling"),
    "latents": ("deepseek_v3", 4, {"ep": 2, "tp": 2, "sharding": 3}, False),
    "latents cp2": ("deepseek_v3", 2, {"cp": 2, "sharding": 0}, True),
    "fused": ("gpt_neox", 4, {"tp": 2, "sharding": 3}, False),
    "biases": ("qwen2", 4, {"pp": 2, "sharding": 2}, True),
    "hybrid": ("nemotron_h", 4, {"tp": 2, "cp": 2, "sharding": 1}, True),
    "one bucket each": ("llama", 8, {"tp": 2, "pp": 2, "sharding": 3, "bucket_mb": 0}, False),
}
SAMPLE = {"pp2 dp2 ZeRO-3", "cp2 ring", "latents"}


def one_rank(rank: int, world: int, model: str, layout: dict, documents, optimizer: str = "muon") -> dict:
    run = run_of(model, THRESHOLD[model], layout)
    if optimizer == "adamw":
        run = replace(run, optim=AdamWConfig(lr=1e-2, qk_clip=THRESHOLD[model]))
    return parity.run_layout(rank, world, run, STEPS, documents)


@cache
def truth_of(ranks, model: str, documents, optimizer: str = "muon") -> dict:
    layout = {"bucket_mb": 0, "sharding": 0}
    [found] = ranks.run(f"{HERE}:one_rank", 1, model, layout, documents, optimizer)
    grads = [parity.assemble([g]) for g in found["grads"]]
    return {**found, "grads": grads, "weights": parity.assemble([found["weights"]])}


@pytest.mark.parametrize("case", rest_in_soak(LAYOUTS, SAMPLE))
def test_the_same_in_every_layout(ranks, case):
    model, world, layout, documents = LAYOUTS[case]
    truth = truth_of(ranks, model, documents)
    parity.compare(ranks.run(f"{HERE}:one_rank", world, model, layout, documents), truth, STEPS)


@pytest.mark.parametrize("layout", [{"sharding": 3}, pytest.param({"tp": 2, "sharding": 1}, marks=pytest.mark.soak)])
def test_with_adamw_too(ranks, layout):
    """Which updates ranges of elements, whatever rows they are of."""
    truth = truth_of(ranks, "qwen2", False, "adamw")
    world = 2 * layout.get("tp", 1)
    parity.compare(ranks.run(f"{HERE}:one_rank", world, "qwen2", layout, False, "adamw"), truth, STEPS)


# ---- the config

SMALL = ["model.vocab_size=64", "model.hidden_size=16", "model.num_hidden_layers=1", "train.steps=1"]
SMALL += ["train.global_batch=1", "train.micro_batch=1", "train.seq_length=8", "data.mock=true", "optim.qk_clip=100"]
LLAMA = ["model.family=llama", "model.intermediate_size=32", "model.num_attention_heads=2"]
QWEN3 = ["model.family=qwen3", *LLAMA[1:]]
MAMBA2 = ["model.family=mamba2", "model.num_heads=4", "model.head_dim=8", "model.n_groups=1"]
LORA = ["lora.method=lora", "lora.targets=['*q_proj*']"]


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        ([*LLAMA, "optim.qk_clip=-1"], "must be a number in [0, inf)"),
        ([*LLAMA, "optim.qk_clip=.inf"], "must be a number in [0, inf)"),
        (MAMBA2, "has no effect without layers of attention"),
        (QWEN3, "normalized after their projections"),
        ([*LLAMA, *LORA], "must be 0 with adapters"),
        ([*LLAMA, "train.freeze=['*self_attn*']"], "weights that it scales are frozen"),
        ([*LLAMA, "train.precision=bf16", "optim.masters=split"], "scales whole masters"),
        ([*LLAMA, "optim.in_backward=true", "optim.clip_grad=0"], "needs the scores of all layers"),
    ],
)
def test_refused(overrides, rule):
    loaded = read(None, [*SMALL, *overrides])
    problems = loaded.problems or check(loaded.run, Facts(1))
    assert [p.field for p in problems] == ["optim.qk_clip"] and rule in problems[0].rule
    assert 0.0 in problems[0].valid


def test_a_fallback_has_none_of_its_own():
    loaded = read(None, [*SMALL, *LLAMA, "optim.name=muon", "optim.fallback.qk_clip=50"])
    problems = loaded.problems or check(loaded.run, Facts(1))
    assert "optim.fallback.qk_clip" in [p.field for p in problems]
