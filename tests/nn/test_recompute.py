"""What is recomputed in backward: the same bits whatever the set of ops, forecast bytes as they are, and the
cheapest set within a budget."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phalanx.base.errors import ConfigError
from phalanx.config.read import load_run
from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import OVERHEAD, DryBlock, rank_uses
from phalanx.forecast.recompute import Option, Price, cheapest, options, traced
from phalanx.forecast.text import plan_text
from phalanx.layout.config import LayoutConfig
from phalanx.nn.dry_run import Allocations, FusedAttention, measure
from phalanx.nn.env import Env, WeightRules
from phalanx.nn.module import Block
from phalanx.nn.recompute import OPS, PRESETS, Recompute
from phalanx.nn.run_block import run_block
from phalanx.planning.blocks import make_blocks, num_blocks
from phalanx.planning.plan import Plan
from phalanx.sequence.batch import Batch, PerBatch
from phalanx.sequence.streams import hidden
from tests.harness.parity import MODELS, base_run, batch_of, sample_batch
from tests.harness.sample import rest_in_soak
from tests.harness.weights import with_memory
from tests.planning.test_plan import MODELS as WIDER

FAMILIES = [name for name in MODELS if name not in ("llama-tied", "deepseek_v3-mtp-tied", "qwen3_next-mtp")]
BEHIND = ("olmo2", "olmo3")  # norms come behind their sub-layers


def blocks_of(model: str) -> list[Block]:
    """All blocks of a small model in float64, with random weights."""
    blocks = make_blocks(MODELS[model], Env(weights=WeightRules(dtype=torch.float64)), range(num_blocks(MODELS[model])))
    source, done = torch.Generator().manual_seed(1), set()
    for block in blocks:
        with_memory(block)
    for p in (p for block in blocks for p in block.parameters() if id(p) not in done):
        done.add(id(p))
        p.data.copy_(0.3 * torch.randn(p.shape, generator=source, dtype=p.dtype))
    return blocks


def loss_and_gradients(model: str, recomputed: frozenset[str]) -> tuple[Tensor, list[Tensor | None], Recompute]:
    blocks, x = blocks_of(model), torch.empty(0, dtype=torch.float64)
    batch = batch_of(base_run(model), [3, 4], documents=True)
    for block in blocks:
        block.recomputed = recomputed
        x = run_block(block, x, batch)
    loss = hidden(x)
    loss.backward()
    return loss.detach(), [p.grad for block in blocks for p in block.parameters()], blocks[0].env.recompute


@pytest.mark.parametrize("model", rest_in_soak(FAMILIES, tuple(FAMILIES)[::2]))
def test_the_same_bits_whatever_is_made_again(model):
    """Each op alone, the presets, chains of ops, all but the whole layer: loss and gradients of the run that stores
    all, dropout included."""
    loss, gradients, recompute = loss_and_gradients(model, frozenset())
    names, every = recompute.names, {"norm", "qkv", "rope", "attention", "up", "activation", "block"}
    if "falcon" in model:
        every |= {"conv", "scan"}
    if model == "mamba2":
        every = {"norm", "qkv", "conv", "scan", "block"}
    # behind its sub-layers, a norm has nobody to read it again
    assert every - ({"norm"} if model in BEHIND else set()) <= names <= set(OPS) and not recompute.reran
    sets = {frozenset({n}) for n in names - {"mlp"}} | {frozenset(p) - {"mlp"} for p in PRESETS.values()}
    sets |= {frozenset(names - {"block", "mlp"})}
    sets |= {frozenset({"qkv", "conv"}), frozenset({"norm", "qkv", "conv", "scan"})} if "scan" in names else set()
    sets |= {frozenset({"norm", "qkv"}), frozenset({"norm", "qkv", "rope"}), frozenset({"norm", "up", "activation"})}
    for recomputed in sets:
        loss_again, gradients_again, recompute = loss_and_gradients(model, recomputed)
        assert torch.equal(loss_again, loss), sorted(recomputed)
        for a, b in zip(gradients, gradients_again):
            assert (a is None and b is None) or torch.equal(a, b), sorted(recomputed)  # type: ignore[arg-type]
        assert set(recompute.reran) <= recomputed


def test_each_op_runs_again_once():
    """Of four layers: two norms each; an op whose outputs nobody stores (qkv, while rope's are stored) does not run
    at all."""
    assert loss_and_gradients("llama", frozenset({"norm", "attention"}))[2].reran == {"norm": 8, "attention": 4}
    assert not loss_and_gradients("llama", frozenset({"qkv"}))[2].reran
    assert loss_and_gradients("llama", frozenset({"norm", "qkv", "rope"}))[2].reran == {"norm": 8, "qkv": 4, "rope": 4}
    assert loss_and_gradients("llama", frozenset({"block"}))[2].reran == {"block": 5}


@pytest.mark.parametrize("model", ["llama", "gpt2", "qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("recomputed", [{"mlp"}, {"mlp", "norm", "up"}, {"layer", "mlp"}, {"block", "mlp"}], ids=sorted)
def test_mlps_in_pieces(model, recomputed):
    """Truth: all stored, all tokens at once. Weights' gradients are the same sums in another order."""
    loss, gradients, _ = loss_and_gradients(model, frozenset())
    loss_again, gradients_again, _ = loss_and_gradients(model, frozenset(recomputed))
    assert loss_again.item() == pytest.approx(loss.item(), rel=1e-14)
    for a, b in zip(gradients, gradients_again):
        assert (a is None and b is None) or (a - b).abs().max() <= 1e-13 * a.abs().max()  # type: ignore[union-attr,operator]


def test_what_runs_again_of_a_layer():
    """Attention over tokens does not. Of an MLP in pieces, whose input a layer saves last, nothing does before its
    own backward."""
    calls: Counter[str] = Counter()

    class Counting(Recompute):
        def keep(self, make, *inputs):
            def counted(*inputs):
                calls["attention"] += 1
                return make(*inputs)

            return super().keep(counted, *inputs)

        def in_pieces(self, make, x, params):
            def counted(x):
                calls["mlp"] += len(x)
                return make(x)

            return super().in_pieces(counted, x, params)

    for recomputed, expected in (
        ({"block"}, (8, 2)),
        ({"layer"}, (4, 2)),
        ({"layer", "mlp"}, (4, 2)),
        ({"mlp"}, (4, 2)),
    ):
        calls.clear()
        blocks, batch, x = blocks_of("llama"), sample_batch([3, 4], documents=True), torch.empty(0, dtype=torch.float64)
        recompute = Counting()
        for block in blocks:
            block.recomputed = frozenset(recomputed)
            for module in block.modules():
                module.env = replace(module.env, recompute=recompute)  # type: ignore[union-attr,operator]
            x = run_block(block, x, batch)
        x.backward()
        assert (calls["attention"], calls["mlp"] / (4 * batch.num_tokens)) == expected, recomputed


def test_an_op_that_runs_differently_the_second_time_is_an_error():
    recompute, times = Recompute(), []

    def unsteady(x: Tensor) -> Tensor:
        times.append(1)
        return x.exp() if len(times) == 1 else x.exp().exp()

    x = torch.randn(3, requires_grad=True)
    with recompute.block({"up"}):
        y = recompute.op("up", unsteady, x).square().sum()
    with pytest.raises(RuntimeError, match="saved 2 tensors, the first time 1"):
        y.backward()


def test_memory_used_anew_is_not_mistaken_for_what_was_dropped():
    """An output dies, and another tensor of its shape gets its memory: it is stored as it is."""
    recompute, x = Recompute(), torch.randn(5, requires_grad=True)
    with recompute.block({"up"}):
        for _ in range(50):
            recompute.op("up", torch.exp, x)
            z = (x + 1).square().sum()
    z.backward()
    assert torch.equal(x.grad, 2 * (x + 1)) and not recompute.reran  # type: ignore[arg-type]


# ---- bytes


def kept_bytes(family: str, recomputed: frozenset[str], device: str) -> int:
    """What a layer keeps for its backward: tensors alive after its forward on a real device, or as the plan measures
    it on meta."""
    (block,) = make_blocks(WIDER[family], Env(weights=WeightRules(dtype=torch.float32)), range(1, 2))
    block.recomputed = recomputed
    if device == "cpu":
        with_memory(block)
    ids = torch.zeros(256, dtype=torch.int64, device=device)
    batch = Batch(ids, ids, ids, ids, 2, 128)

    def new_input() -> Tensor:
        return torch.zeros(256, 64, device=device)

    with torch.no_grad(), FusedAttention() if device == "meta" else nullcontext():
        run_block(block, new_input(), batch)  # what all layers share (rotary table) is not this block's
    if device == "meta":
        return measure(lambda x: run_block(block, x, batch), new_input, block.parameters(), torch.float32).kept
    with Allocations() as seen:
        y = run_block(block, new_input().requires_grad_(), batch)
        return seen.live - y.untyped_storage().nbytes()


@pytest.mark.parametrize("family", WIDER)
def test_forecast_bytes_are_those_kept(family):
    names = [n for n in OPS if n not in ("experts", "dropout", "layer", "block")]
    pairs = list(itertools.combinations(names, 2))
    sets = [frozenset(c) for c in random.Random(family).sample(pairs, 5)] + [
        frozenset(names),
        frozenset({"norm", "qkv", "rope"}),
    ]
    for recomputed in (*sets, frozenset({"layer"}), frozenset({"layer", "mlp"})):
        assert kept_bytes(family, recomputed, "meta") == pytest.approx(
            kept_bytes(family, recomputed, "cpu"), rel=0.02
        ), sorted(recomputed)
    assert kept_bytes(family, frozenset({"block"}), "cpu") == 256 * 64 * 4
    everything = kept_bytes(family, frozenset(names), "cpu")
    assert everything < 256 * 64 * 4 * 2.2  # the two inputs of norms, and a few numbers a token


# ---- the choice


def brute(blocks: list[list[Option]], in_flight: list[int], room: float) -> float | None:
    fits = [
        sum(o.cost for o in chosen)
        for chosen in itertools.product(*blocks)
        if sum(o.kept * n for o, n in zip(chosen, in_flight)) + max(o.working for o in chosen) <= room
    ]
    return min(fits, default=None)


@pytest.mark.parametrize("seed", range(40))
def test_the_cheapest_choice_is_that_of_trying_all(seed):
    pick = random.Random(seed)
    blocks = [
        [
            Option(frozenset(), pick.randrange(1, 100), pick.randrange(1, 60), Price(pick.randrange(50)))
            for _ in range(pick.randrange(1, 5))
        ]
        for _ in range(pick.randrange(1, 6))
    ]
    in_flight = [pick.randrange(1, 4) for _ in blocks]
    for room in (pick.randrange(30, 1200) for _ in range(10)):
        found, truth = cheapest(blocks, in_flight, room), brute(blocks, in_flight, room)
        assert (found is None) == (truth is None)
        if found is not None:
            assert sum(o.cost for o in found) == truth
            assert sum(o.kept * n for o, n in zip(found, in_flight)) + max(o.working for o in found) <= room
            few = cheapest(blocks, in_flight, room, most=3)
            assert (
                few is not None
                and sum(o.kept * n for o, n in zip(few, in_flight)) + max(o.working for o in few) <= room
            )


def tall(budget_gib: float | None, device: str = "cpu", **layout) -> Run:
    """Eight layers whose activations are most of a rank's memory."""
    model = replace(WIDER["llama"], num_hidden_layers=8)
    train = TrainConfig(
        steps=1,
        global_batch=32,
        micro_batch=16,
        seq_length=512,
        precision="bf16",
        recompute_budget_gib=budget_gib,
        device=device,
    )
    return Run(model=model, train=train, layout=LayoutConfig(**layout), data=DataConfig(mock=True))


def forecast(plan: Plan) -> int:
    return max(u.total for u in rank_uses(plan, plan.num_micro_batches(32))[0]) + OVERHEAD


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("layout, world", [({"tp": 2, "pp": 2}, 4), ({"pp": 2, "virtual_stages": 2}, 2)], ids=str)
def test_a_budget_is_kept(layout, world, device):
    """Halfway between storing everything and storing the least."""
    run = tall(None, device, **layout)
    full = replace(run, train=replace(run.train, recompute="full"))
    budget = sum(forecast(make_plan(each, world)) for each in (run, full)) / 2
    plan = make_plan(tall(budget / 2**30, device, **layout), world)
    assert any(plan.recomputed) and forecast(plan) <= budget
    with pytest.raises(ConfigError, match="recompute_budget_gib") as failed:
        make_plan(tall(2.0, device, **layout), world)
    (problem,) = failed.value.problems
    assert forecast(make_plan(tall(problem.valid[0], device, **layout), world)) <= problem.valid[0] * 2**30


def test_a_budget_that_needs_no_recompute_has_none():
    """The forecast itself is the budget, to the byte: with a split backward too, whose blocks kept one by one would add
    up to more."""
    layout = {"pp": 2, "schedule": "zb_h1"}
    budget = forecast(make_plan(tall(None, **layout), 2))
    assert not any(make_plan(tall(budget / 2**30, **layout), 2).recomputed)
    with pytest.raises(ConfigError, match="recompute_budget_gib"):
        make_plan(tall(budget / 2**30 / 2, **layout), 2)


def test_a_budget_in_the_plan():
    """Where all fits, nothing is recomputed; where it does not, the plan says what is."""
    run = tall(None)
    free = forecast(make_plan(run, 1))
    assert not any(make_plan(tall(free / 2**30 + 0.001), 1).recomputed)
    text = plan_text(tall((OVERHEAD + 0.7 * (free - OVERHEAD)) / 2**30), 1)
    assert "Recomputed in backward" in text and "within 2." in text and max(map(len, text.splitlines())) <= 140


def test_ops_of_a_fused_mlp_are_options():
    """If one of them is recomputed they run one by one. Truth: what the fused one stores, which is the hidden tokens
    less."""
    run = tall(None, "cuda")
    plans = [make_plan(replace(run, train=replace(run.train, kernels=k)), 1) for k in ("triton", "optional")]
    (plain, fused) = (options(plan, 1) for plan in plans)
    assert any("up" in o.recomputed for o in fused)
    kept = [next(o.kept for o in found if not o.recomputed) for found in (plain, fused)]
    assert kept[0] - kept[1] == 16 * 512 * run.model.intermediate_size * 2


def test_options_are_measured_and_none_is_worse_in_all():
    found = options(make_plan(tall(None), 1), 1)
    assert frozenset() in {o.recomputed for o in found} and frozenset({"block"}) in {o.recomputed for o in found}
    for a, b in itertools.permutations(found, 2):
        assert not (a.kept <= b.kept and a.cost <= b.cost), (a, b)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_what_is_kept_follows_from_one_forward(family):
    """Truth: the bytes measured for the set, less what no set of ops changes (and what is kept beside saved
    tensors)."""
    plan = make_plan(replace(tall(None), model=WIDER[family]), 1)
    trace, dry, beside = traced(plan, 1), DryBlock.of(plan, 1), set()
    names = sorted(set(trace.prices) - {"layer"})
    for n in range(12):
        dry.block.recomputed = frozenset(random.Random(n).sample(names, n % len(names)) if n < 11 else ["block"])
        beside.add(dry.use(torch.float32).bytes.kept - trace.kept_of(dry.block.recomputed))
    assert max(beside) - min(beside) <= 0.02 * trace.kept_of(frozenset()), beside


def test_extra_flops_of_the_plan():
    """Truth: the matmul of gate and up again is 2 * T * D * 2F a layer; whole layers again are one forward of all
    layers."""
    run = load_run("recipes/tiny_llama.yaml", ["train.recompute_ops=[up]"])
    m, tokens = run.model, run.train.micro_batch * run.train.seq_length
    line = next(line for line in plan_text(run, 1).splitlines() if line.endswith("%") and ": up" in line)
    by_hand = m.num_hidden_layers * 2 * tokens * m.hidden_size * 2 * m.intermediate_size / 1e9
    assert f" {by_hand:.4g} " in line
    full = replace(run, train=replace(run.train, recompute="full", recompute_ops=[]))
    line = next(line for line in plan_text(full, 1).splitlines() if line.endswith("%") and ": block" in line)
    layers = sum(f.flops for f in make_plan(full, 1).facts[1:-1]) * tokens / 1e9
    assert f" {layers:.4g} " in line


@pytest.mark.parametrize("room", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("layout", [{}, {"ep": 2}, {"ep": 4, "tp": 2}, {"ep": 2, "etp": 2, "tp": 2}], ids=str)
def test_room_for_experts_costs_no_flops(layout, room):
    """Truth: what a layer computes for each token (forecast/flops.py); rows that nobody sent are not computed,
    however many there is room for."""
    run = load_run("recipes/tiny_mixtral.yaml")
    run = replace(
        run,
        layout=LayoutConfig(**layout, dispatch="allgather", expert_room=room),
        train=replace(run.train, device="cpu"),
    )
    plan = make_plan(run, 8)
    prices, tokens = traced(plan, 1).prices, run.train.micro_batch * run.train.seq_length
    assert prices["block"].flops == pytest.approx(plan.facts[1].flops * tokens / plan.grid.tp, rel=1e-9)
    m = run.model
    assert prices["experts"].flops == pytest.approx(
        6 * tokens * m.num_experts_per_tok * m.hidden_size * m.intermediate_size / plan.grid.tp, rel=1e-9
    )
    assert prices["up"].flops == pytest.approx(2 / 3 * prices["experts"].flops, rel=1e-9)


# ---- layouts


@pytest.mark.parametrize(
    "model, world, layout",
    [
        pytest.param("gpt2", 4, {"tp": 2, "pp": 2}, marks=pytest.mark.soak),
        ("qwen3_moe", 4, {"tp": 2, "ep": 4}),
        ("llama-tied", 4, {"pp": 2, "virtual_stages": 2}),
    ],
)
def test_layouts_give_the_same_bits_with_everything_made_again(ranks, model, world, layout):
    """Truth: the same layout storing all, bit by bit, and with the tightest budget that fits."""
    run = replace(base_run(model), layout=LayoutConfig(**layout))
    ops = ["norm", "qkv", "attention", "up", "activation"] + (["dropout"] if model == "gpt2" else ["rope"])
    truth = ranks.run("tests.harness.parity:run_layout", world, run, 2, True)
    for train in (
        dict(recompute_ops=ops),
        dict(recompute_ops=["experts"]) if model == "qwen3_moe" else dict(recompute="full"),
    ):
        found = ranks.run(
            "tests.harness.parity:run_layout", world, replace(run, train=replace(run.train, **train)), 2, True
        )
        for a, b in zip(truth, found):
            assert a["losses"] == b["losses"] and a["norms"] == b["norms"]
            assert all(
                (x[3] == y[3])[~torch.from_numpy(x[3]).isnan().numpy()].all()
                for x, y in zip(a["weights"], b["weights"])
            )


def test_a_budget_in_a_layout(ranks):
    """Blocks that make different things again train as those that store all."""
    run = replace(base_run("llama", 4), layout=LayoutConfig(tp=2))
    plan = make_plan(run, 2)
    need = max(u.total for u in rank_uses(plan, 4)[0])
    tight = replace(run, train=replace(run.train, recompute_budget_gib=(OVERHEAD + need * 0.97) / 2**30))
    assert len(set(make_plan(tight, 2).recomputed)) > 1
    truth, found = (ranks.run("tests.harness.parity:run_layout", 2, r, 2) for r in (run, tight))
    assert [r["losses"] for r in truth] == [r["losses"] for r in found] and [r["norms"] for r in truth] == [
        r["norms"] for r in found
    ]


def test_what_is_made_of_a_batch_is_made_once_for_its_owner():
    batch, one, other = sample_batch([0], False), PerBatch[list[int]](), PerBatch[list[int]]()
    made = one.of(batch, lambda: [1], "by")
    assert one.of(batch, lambda: [2], "by") is made and one.of(batch, lambda: [3], "else") == [3]
    assert other.of(batch, lambda: [4], "by") == [4] and one.of(sample_batch([0], False), lambda: [5], "by") == [5]
    batch.forget()
    assert one.of(batch, lambda: [6], "by") == [6]
