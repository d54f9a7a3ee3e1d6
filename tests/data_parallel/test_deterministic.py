"""train.deterministic: the same bits, of losses, norms and all state, whatever dp size, sharding level, schedule and
number of stages are."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch

from phalanx.base.pairwise import merges, pairwise_sum, waiting
from phalanx.comm.axis import Axis
from phalanx.comm.mesh import Mesh
from phalanx.config.device_check import Facts
from phalanx.config.run import Fp8Config, Run, TrainConfig
from phalanx.data_parallel.fixed_order import GradientTree, sum_of_squares
from phalanx.engine.build import build
from phalanx.engine.step import accumulate, update
from phalanx.forecast.check import check
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import rank_uses
from phalanx.layout.config import LayoutConfig
from phalanx.layout.grid import Grid
from phalanx.observe.out_of_memory import held
from tests.harness.parity import MODELS, SEQ, assemble, random_weights, step_batches
from tests.harness.sample import rest_in_soak

# --- the tree
# ---------------------------------------------------------------------------------------------------------------------


def tree(terms: list[str]) -> str:
    """What is added to what, in words."""
    return terms[0] if len(terms) == 1 else f"({tree(terms[: len(terms) // 2])}+{tree(terms[len(terms) // 2 :])})"


def by_merges(terms: list[str]) -> tuple[str, int]:
    held, most = [], 0
    for term, count in zip(terms, merges(len(terms))):
        for _ in range(count):
            term = f"({held.pop()}+{term})"
        held.append(term)
        most = max(most, len(held))
    assert len(held) == 1
    return held[0], most


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 24, 32])
def test_one_tree_however_it_is_done(n):
    """Terms one after the other, all at once, and in equal runs of 2, 4, 8 ... ranks: the same additions."""
    terms = [f"g{i}" for i in range(n)]
    found, most = by_merges(terms)
    assert found == tree(terms)
    assert waiting(n) + 1 >= most and waiting(n) == max(0, (n - 1).bit_length())
    assert all(waiting(k) <= waiting(n) for k in range(1, n))
    for ranks in (1, 2, 4, 8):
        if n % ranks == 0:
            own = n // ranks
            assert tree([by_merges(terms[r * own : (r + 1) * own])[0] for r in range(ranks)]) == tree(terms)


def summed(x: torch.Tensor) -> torch.Tensor:
    return x[0] if len(x) == 1 else summed(x[: len(x) // 2]) + summed(x[len(x) // 2 :])


@pytest.mark.parametrize("n", [1, 2, 3, 6, 8, 11, 40])
def test_sums_follow_the_tree(n):
    x = torch.randn(n, 7, generator=torch.Generator().manual_seed(n))
    assert torch.equal(pairwise_sum(x), summed(x))
    grad = torch.zeros(7)
    gradients = GradientTree(grad, most=48)
    for _ in range(2):  # two steps
        gradients.begin(n)
        grad.zero_()
        for row in x:
            grad.add_(row)
            gradients.leaf()
        assert torch.equal(grad, summed(x))
    assert len(gradients.waiting) == 6
    assert n < 6 or not torch.equal(x.sum(0), summed(x)), "another order gives other bits"


def test_squares_add_up_in_any_order():
    """Elements shuffled and cut anywhere: the same bits, and the right sum, however far apart the elements are."""
    pick = torch.Generator().manual_seed(0)
    x = torch.randn(100_000, generator=pick) * torch.exp(6 * torch.randn(100_000, generator=pick))
    one, cpu = Axis("world"), torch.device("cpu")
    whole = sum_of_squares([x], one, cpu)
    shuffled = x[torch.randperm(len(x), generator=pick)]
    assert whole.item().hex() == sum_of_squares(list(shuffled.split(777)) + [torch.empty(0)], one, cpu).item().hex()
    torch.testing.assert_close(whole, x.double().square().sum(), rtol=1e-11, atol=0)
    assert torch.isinf(sum_of_squares([torch.tensor([1.0, torch.nan])], one, cpu))
    assert torch.isinf(sum_of_squares([torch.tensor([torch.inf, 0.0])], one, cpu))
    assert sum_of_squares([torch.zeros(3)], one, cpu) == 0 and sum_of_squares([], one, cpu) == 0


# --- layouts
# ----------------------------------------------------------------------------------------------------------------------


def one_rank(rank: int, world: int, run: Run, steps: int) -> dict:
    """Losses and norms as hex, and this rank's parts of masters, moments and weights."""
    plan = make_plan(run, world)
    mesh = Mesh(plan.grid, rank)
    state = build(plan, mesh)
    random_weights(state.model)
    state.model.train()
    numbers = []
    for step in range(steps):
        result = update(state, accumulate(state, step_batches(run, mesh, step, False)), lr=1e-2)
        numbers.append((result.loss.item().hex(), result.grad_norm.item().hex(), int(result.tokens)))
    state.buffers.ready()
    parts = {what: parts_of(state, what) for what in ("master", "m", "v", "weight")}
    mesh.close()
    return {"numbers": numbers, "parts": parts}


def parts_of(state, what: str) -> list:
    found, shards = [], {s.bucket.id: s for s in state.optimizer.shards}
    for flat in state.buffers.flat:
        shard = shards.get(flat.bucket.id)
        if shard is None and what != "weight":
            continue  # what follows the load of experts has no gradient
        whole = torch.full((flat.bucket.numel,), torch.nan, dtype=torch.float64)
        if what == "weight":
            whole[flat.storage.weight_at : flat.storage.weight_at + len(flat.storage.weight_kept)] = (
                flat.storage.weight_kept.double()
            )
        else:
            whole[shard.lo : shard.hi] = shard.values(what).double()
        for slot in flat.bucket.slots:
            storage = whole[slot.offset : slot.offset + slot.numel].view(slot.spec.shape)
            found += [(p.name, p.shape, p.box, p.of(storage).numpy().copy()) for p in slot.spec.pieces]
    return found


def exact(ranks, run: Run, world: int, steps: int = 2) -> tuple:
    """Everything that must not depend on the layout, as hex and hashes."""
    results = ranks.run("tests.data_parallel.test_deterministic:one_rank", world, run, steps)
    assert all(r["numbers"] == results[0]["numbers"] for r in results)
    hashes = {}
    for what in ("master", "m", "v", "weight"):
        for name, values in assemble([r["parts"][what] for r in results]).items():
            hashes[what, name] = hashlib.sha256(values.tobytes()).hexdigest()
    return results[0]["numbers"], hashes


def run_of(model: str, precision: str, deterministic: bool = True, batch: int = 8, **layout) -> Run:
    train = TrainConfig(
        steps=4, global_batch=batch, micro_batch=1, seq_length=SEQ, precision=precision, deterministic=deterministic
    )
    return Run(model=MODELS[model], train=train, layout=LayoutConfig(**layout))


def differing(found: tuple, expected: tuple) -> list:
    numbers = [(a, b) for a, b in zip(found[0], expected[0], strict=True) if a != b]
    assert found[1].keys() == expected[1].keys()
    return numbers + [k for k in expected[1] if expected[1][k] != found[1][k]]


LAYOUTS = {
    "dp2": (2, {}),
    "dp4": (4, {}),
    "dp2, level 0": (2, dict(sharding=0)),
    "dp4, level 0, small buckets": (4, dict(sharding=0, bucket_mb=0)),
    "pp2": (2, dict(pp=2)),
    "pp2 gpipe": (2, dict(pp=2, schedule="gpipe")),
    "gpipe": (1, dict(schedule="gpipe")),
    "pp2 x 2, dp2": (4, dict(pp=2, virtual_stages=2)),
    "pp4": (4, dict(pp=4)),
    "pp2 dp2, level 0, gpipe": (4, dict(pp=2, sharding=0, schedule="gpipe")),
    "dp4, level 2": (4, dict(sharding=2, bucket_mb=0)),
    "pp2 dp2, level 3": (4, dict(pp=2, sharding=3)),
    "dp4 in pairs, level 3, optimizer over both": (4, dict(sharding=3, shard_group=2, shard_across="optimizer")),
    "pp3 x 2": (3, dict(pp=3, virtual_stages=2, stages=(1, 1, 1, 1, 1, 1), bucket_mb=0)),
    "dp8, small buckets": (8, dict(bucket_mb=0)),
}


@pytest.mark.parametrize(
    "precision, names",
    [
        ("fp32", tuple(LAYOUTS)),
        pytest.param("bf16", ("dp4", "pp2 dp2, level 0, gpipe", "pp2 x 2, dp2", "pp4"), marks=pytest.mark.soak),
    ],
)
def test_bits_do_not_depend_on_the_layout(ranks, precision, names):
    run = run_of("llama", precision)
    alone = exact(ranks, run, 1)
    for name in names:
        world, layout = LAYOUTS[name]
        assert differing(exact(ranks, replace(run, layout=LayoutConfig(**layout)), world), alone) == [], name


def test_tensor_parallel_ranks_keep_their_bits_too(ranks):
    """With tp the same, the rest may change; key and value heads that two tp ranks share and norms are added up over
    tp, whole or in shards."""
    run = run_of("llama", "bf16", tp=4)
    few = exact(ranks, run, 4, steps=1)
    assert differing(exact(ranks, replace(run, layout=LayoutConfig(tp=4, bucket_mb=0)), 8, steps=1), few) == []
    assert differing(exact(ranks, replace(run, layout=LayoutConfig(tp=4, pp=2)), 8, steps=1), few) == []


def test_context_parallel_ranks_keep_their_bits_too(ranks):
    run = run_of("llama", "fp32", cp=2)
    few = exact(ranks, run, 2)
    assert differing(exact(ranks, replace(run, layout=LayoutConfig(cp=2)), 4), few) == []
    assert (
        differing(exact(ranks, replace(run, layout=LayoutConfig(cp=2, sharding=0, pp=2, schedule="gpipe")), 4), few)
        == []
    )


@pytest.mark.parametrize(
    "cp, groups",
    [
        (2, (dict(shard_group=2), dict(shard_group=4, sharding=3), dict(shard_group=4, shard_across="optimizer"))),
        pytest.param(
            4, (dict(shard_group=2), dict(shard_group=4, shard_across="optimizer", sharding=2)), marks=pytest.mark.soak
        ),
    ],
)
def test_groups_of_context_parallel_ranks_keep_their_bits_too(ranks, cp, groups):
    """A group holds several sequences, one, or some parts of one: parts of the same tokens are added up last
    everywhere."""
    run = run_of("llama-tied", "fp32", cp=cp)
    few = exact(ranks, run, cp, steps=1)
    for options in groups:
        assert differing(exact(ranks, replace(run, layout=LayoutConfig(cp=cp, **options)), 8, steps=1), few) == [], (
            options
        )


@pytest.mark.parametrize("recipe", rest_in_soak(["tensorwise", "delayed"], ["delayed"]))
def test_low_precision(ranks, recipe):
    run = run_of("llama", "bf16")
    run = replace(run, train=replace(run.train, fp8=Fp8Config(recipe=recipe)))
    alone = exact(ranks, run, 1)
    for world, layout in ((4, {}), (4, dict(pp=2, schedule="gpipe"))):
        assert differing(exact(ranks, replace(run, layout=LayoutConfig(**layout)), world), alone) == []


def test_tied_embeddings_and_dropout(ranks):
    """12 micro-batches: halves that are not powers of two. What head and embedding add to one weight is added up
    last, on one rank and on two."""
    run = run_of("gpt2", "fp32", batch=12)
    alone = exact(ranks, run, 1)
    for world, layout in (
        (2, dict(bucket_mb=0)),
        (4, dict(sharding=0)),
        (2, dict(pp=2)),
        (4, dict(pp=2, sharding=2, schedule="gpipe")),
        (3, dict(pp=3, virtual_stages=2)),
        (2, dict(bucket_mb=0, sharding=3)),
    ):
        assert differing(exact(ranks, replace(run, layout=LayoutConfig(**layout)), world), alone) == []


FEW = replace(MODELS["mixtral"], num_hidden_layers=2, num_local_experts=4)
EXPERTS = {
    "every rank has all": (FEW, 1, {}, {2: {}, 4: dict(pp=2, sharding=2)}),
    "all-to-all": (
        FEW,
        2,
        dict(ep=2, dispatch="alltoall"),
        {4: dict(sharding=3, bucket_mb=0), 8: dict(pp=2, schedule="gpipe")},
    ),
    "all-gather": (FEW, 2, dict(ep=2, dispatch="allgather"), {4: dict(sharding=2), 8: dict(pp=2)}),
    "push": (FEW, 2, dict(ep=2, dispatch="push"), {4: {}, 8: dict(pp=2)}),
    "all-gather over four, little room": (FEW, 4, dict(ep=4, dispatch="allgather", expert_room=1.0), {8: {}}),
    "experts cut in four": (FEW, 4, dict(etp=4), {8: {}}),
    "experts cut, all-to-all": (MODELS["gpt_oss"], 4, dict(ep=2, etp=2, dispatch="alltoall"), {8: {}}),
    "tp and ep": (MODELS["deepseek_v3"], 4, dict(tp=2, ep=4), {8: {}}),
    "parts of a micro-batch": (MODELS["mixtral-full"], 4, dict(tp=2, cp=2, ep=2), {8: dict(shard_group=2)}),
}


@pytest.mark.parametrize(
    "name", rest_in_soak(EXPERTS, ("all-to-all", "all-gather over four, little room", "parts of a micro-batch"))
)
def test_experts(ranks, name):
    """With ep and etp the same; of how many micro-batches a rank's experts get tokens at once, and of which, changes
    with dp."""
    model, least, layout, others = EXPERTS[name]
    run = replace(run_of("llama", "fp32", **layout), model=model)
    few = exact(ranks, run, least)
    for world, more in others.items():
        assert differing(exact(ranks, replace(run, layout=LayoutConfig(**layout, **more)), world), few) == [], more


def test_experts_in_low_precision(ranks):
    run = run_of("mixtral", "bf16", batch=4, ep=2)
    run = replace(
        run, train=replace(run.train, fp8=Fp8Config(recipe="tensorwise")), model=replace(FEW, intermediate_size=32)
    )
    assert differing(exact(ranks, run, 4, steps=1), exact(ranks, run, 2, steps=1)) == []


@pytest.mark.soak
@pytest.mark.parametrize("model", ["deepseek_v3-mtp", "deepseek_v3-mtp-tied"])
def test_further_tokens(ranks, model):
    """Embedding and head are used by the block that predicts further tokens, too: on one rank, on two, on three."""
    run = run_of(model, "fp32")
    alone = exact(ranks, run, 1)
    for world, layout in (
        (2, {}),
        (2, dict(pp=2)),
        (2, dict(pp=2, stages=(4, 1), bucket_mb=0)),
        (3, dict(pp=3, stages=(2, 2, 1))),
        (4, dict(pp=2, sharding=2, schedule="gpipe")),
    ):
        assert differing(exact(ranks, replace(run, layout=LayoutConfig(**layout)), world), alone) == [], layout


def test_without_it_bits_differ(ranks):
    """So the comparison can fail: in the usual order sums over four ranks are not those of one."""
    run = run_of("llama", "fp32", deterministic=False)
    alone = exact(ranks, run, 1)
    assert exact(ranks, run, 1) == alone, "the same layout is always exact"
    assert differing(exact(ranks, run, 4), alone)


# --- rules, memory
# ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model, world, layout, rule",
    [
        ("llama", 3, {}, "needs a power of two of data-parallel ranks"),
        ("mixtral", 12, dict(tp=3, ep=2), "needs ep * etp that is a multiple of tp"),
        ("llama", 12, dict(cp=3, sharding=2, shard_group=2), "needs a shard_group that is a multiple of cp"),
    ],
)
def test_rules(model, world, layout, rule):
    run = run_of(model, "fp32", batch=12, **layout)
    problems = [p for p in check(run, Facts(world_size=world)) if p.field == "train.deterministic"]
    assert any(p.rule.startswith(rule) and p.valid == (False,) for p in problems)
    assert not [
        p for p in check(run_of("llama-tied", "fp32", pp=2), Facts(world_size=2)) if p.field.startswith("train")
    ]


def test_the_forecast_has_the_sums_that_wait():
    """8 micro-batches on a rank: three more gradient buffers, and they are what a rank holds."""
    run = run_of("llama", "bf16", batch=16)
    (use,), _ = rank_uses(make_plan(run, 2), 8)
    (plain,), _ = rank_uses(make_plan(replace(run, train=replace(run.train, deterministic=False)), 2), 8)
    assert use.memory["gradients"] == 4 * plain.memory["gradients"]
    mesh = Mesh(Grid())
    alone = build(make_plan(replace(run, train=replace(run.train, global_batch=8)), 1), mesh)
    (alone_use,), _ = rank_uses(alone.plan, 8)
    mesh.close()
    assert held(alone)["gradients"] == alone_use.memory["gradients"]
    assert not torch.are_deterministic_algorithms_enabled()
