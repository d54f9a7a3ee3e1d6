"""bf16 and fp16 with fp32 masters: bounded against fp32, bit-equal where the arithmetic is equal, and steps that
must be skipped."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from phalanx.comm.mesh import Mesh
from phalanx.config.run import Fp8Config, Run
from phalanx.data_parallel.quantized import QuantizedStorage
from phalanx.engine.build import State, build, init_weights
from phalanx.engine.step import train_step
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from tests.harness.parity import base_run, sample_batch
from tests.harness.sample import rest_in_soak

STEPS, LR = 20, 1e-3


def precision_run(model: str, precision: str, global_batch: int = 4, train: dict | None = None, **layout) -> Run:
    run = base_run(model, global_batch, precision=precision, **(train or {}))
    return replace(run, model=replace(run.model, initializer_range=0.1), layout=LayoutConfig(bucket_mb=0, **layout))


def snapshot(state: State) -> list[torch.Tensor]:
    """Everything that a skipped step must leave as it is."""
    state.buffers.ready()
    kept = [t for s in state.optimizer.shards for t in (s.master, *s.state.values())] + [
        f.storage.weight_kept for f in state.buffers.flat
    ]
    return [t.clone() for t in [*kept, state.optimizer.step]]


def bits(tensors: list[torch.Tensor]) -> list[bytes]:
    return [
        t.contiguous().view(torch.uint8).numpy().tobytes() if t.dim() else t.view(1).view(torch.uint8).numpy().tobytes()
        for t in tensors
    ]


def check_weights(state: State) -> None:
    """Weights are the cast of the masters, on the elements whose masters are here, and whole on every rank after the
    gather (level 3: gone)."""
    state.buffers.ready()
    for f in state.buffers.flat:
        assert torch.equal(
            f.storage.weight_kept[f.lo - f.storage.weight_at : f.hi - f.storage.weight_at], f.master.to(f.weight.dtype)
        )
        coded = isinstance(f.storage, QuantizedStorage)
        assert (
            coded
            or f.level not in (1, 2)
            or torch.equal(f.weight, f.groups.inner.all_gather(f.master.to(f.weight.dtype)).wait())
        )
        assert not coded or (
            f.weight.untyped_storage().nbytes() == 0
            and (f.storage.both.untyped_storage().nbytes() == 0) == (f.level == 3)
        )
        assert coded or (f.weight.untyped_storage().nbytes() == 0) == (f.level == 3)
        assert (f.grad.untyped_storage().nbytes() == 0) == (f.level >= 2)


def train(rank: int, world: int, run: Run, steps: int, poison: dict[int, str] | None = None) -> dict:
    """`steps` steps on the same few samples. poison[step]: "weight" puts a NaN into a weight, "gradient" an inf into
    a gradient, both on one rank."""
    plan = make_plan(run, world)
    state = build(plan, Mesh(plan.grid, rank))
    init_weights(state.model)
    state.model.train()
    each, dp = run.train.global_batch // state.mesh.dp.size, state.mesh.dp.index
    found: dict = {"losses": [], "norms": [], "skipped": [], "scales": [], "same": [], "steps": []}
    for step in range(steps):
        before, where = snapshot(state), (poison or {}).get(step)
        if where and rank == world - 1:
            target = state.buffers.flat[-1]
            spoilt = target.storage.weight_kept if where == "weight" else target.grad_kept
            spoilt[: target.bucket.slots[0].numel] = math.nan if where == "weight" else math.inf
        ids = range(dp * each, (dp + 1) * each)
        result = train_step(state, [sample_batch([i], documents=False) for i in ids], LR)
        check_weights(state)
        found["losses"].append(result.loss.item())
        found["norms"].append(result.grad_norm.item())
        found["skipped"].append(int(result.skipped))
        found["scales"].append(state.scaler.scale.item())
        found["same"].append(bits(before) == bits(snapshot(state)))
        found["steps"].append(int(state.optimizer.step))
    return found


def everywhere(ranks, run: Run, world: int, steps: int = STEPS, poison: dict[int, str] | None = None) -> dict:
    """The run's results: all ranks must agree bit by bit."""
    results = ranks.run("tests.optim.test_precision:train", world, run, steps, poison)
    for result in results[1:]:
        for key in results[0]:
            assert np.array_equal(result[key], results[0][key], equal_nan=key in ("losses", "norms")), key
    return results[0]


LAYOUTS = {
    "one rank": (1, {}),
    "tp2": (2, dict(tp=2)),
    "pp2": (2, dict(pp=2)),
    "dp2": (2, {}),
    "dp2, level 0": (2, dict(sharding=0)),
    "dp2, level 2": (2, dict(sharding=2)),
    "dp2, level 3": (2, dict(sharding=3)),
}
BOUND = {
    "bf16": 2.0**-7,
    "fp16": 2.0**-10,
}  # of the fp32 loss: one rounding of the format, over 20 steps that halve the loss


def some(cases: Iterable[tuple], fast: Callable[..., bool]) -> list:
    """All cases; those that are not fast are for `make soak`."""
    return [pytest.param(*c, marks=() if fast(*c) else pytest.mark.soak) for c in cases]


LEAST = ("tp2", "pp2", "dp2, level 3")  # each way to cut a model
NEAR = some(
    product(["llama", "gpt2"], BOUND, LAYOUTS),
    lambda model, p, layout: (model, p, layout) in (("llama", "bf16", "dp2, level 3"), ("gpt2", "fp16", "tp2")),
)


@pytest.mark.parametrize("model, precision, layout", NEAR)
def test_losses_stay_near_fp32(ranks, model, precision, layout):
    """Truth: the same run in fp32 on one rank. Weights equal the cast of the masters after every step."""
    world, options = LAYOUTS[layout]
    truth = fp32_losses(ranks, model)
    assert truth[-1] < 0.7 * truth[0]
    found = everywhere(ranks, precision_run(model, precision, train=dict(loss_scale=1024.0), **options), world)
    off = np.abs(np.array(found["losses"]) / truth - 1).max()
    assert off <= BOUND[precision], off
    assert not any(found["skipped"]) and found["steps"] == list(range(1, STEPS + 1)) and not any(found["same"])


CACHE: dict[str, np.ndarray] = {}


def fp32_losses(ranks, model: str) -> np.ndarray:
    if model not in CACHE:
        CACHE[model] = np.array(everywhere(ranks, precision_run(model, "fp32"), 1)["losses"])
    return CACHE[model]


@pytest.mark.parametrize("layout", rest_in_soak(LAYOUTS, LEAST[1:]))  # over tp its 40 steps take long
def test_overflow_skips_the_step_and_halves_the_scale(ranks, layout):
    """fp16 with a scale far too large: skipped with no bit changed until it fits, two overflows per halving, then
    training goes on."""
    world, options = LAYOUTS[layout]
    scaling = dict(loss_scale=2.0**25, loss_scale_hysteresis=2, loss_scale_window=4)
    found = everywhere(ranks, precision_run("llama", "fp16", train=scaling, **options), world, 40)
    first = found["skipped"].index(0)
    assert 2 <= first < 36 and first % 2 == 0 and all(found["skipped"][:first])
    assert found["scales"][:first] == [2.0 ** (25 - (i + 1) // 2) for i in range(first)]
    assert found["same"] == [bool(s) for s in found["skipped"]]
    assert found["steps"] == np.cumsum([1 - s for s in found["skipped"]]).tolist()
    good = [n for n, s in zip(found["norms"], found["skipped"]) if not s]
    assert np.isfinite(good).all() and max(found["scales"][first:]) > found["scales"][first]  # grows again


def test_scale_never_goes_below_its_minimum(ranks):
    run = precision_run(
        "llama", "fp16", train=dict(loss_scale=2.0**40, loss_scale_min=2.0**38, loss_scale_hysteresis=1)
    )
    assert everywhere(ranks, run, 1, 5)["scales"] == [2.0**39] + [2.0**38] * 4


POISONS = [("bf16", "weight"), ("bf16", "gradient"), ("fp16", "gradient"), ("fp32", "gradient")]
TAKEN = set(zip(itertools.cycle(POISONS), LAYOUTS))  # each layout once, and each poison


@pytest.mark.parametrize("poison, layout", some(product(POISONS, LAYOUTS), lambda *case: case in TAKEN))
def test_one_bad_value_skips_the_step_on_all_ranks(ranks, poison, layout):
    """NaN or inf on one rank: all skip, no master, moment or count changes, and the steps after are those of a run
    that never saw it."""
    (precision, where), (world, options) = poison, LAYOUTS[layout]
    run = precision_run("llama", precision, train=dict(loss_scale=1024.0), **options)
    clean = everywhere(ranks, run, world, 5)
    found = everywhere(ranks, run, world, 6, {2: where})
    assert found["skipped"] == [0, 0, 1, 0, 0, 0] and found["same"] == [False, False, True, False, False, False]
    assert found["steps"] == [1, 2, 2, 3, 4, 5] and not math.isfinite(found["norms"][2])
    assert found["losses"][:2] + found["losses"][3:] == clean["losses"]


SCALE = dict(loss_scale=1024.0)
PIPELINES = {
    "pp2, gpipe": (2, dict(pp=2, schedule="gpipe")),
    "pp2, 1f1b": (2, dict(pp=2)),
    "pp2, uneven": (2, dict(pp=2, stages=(1, 5))),
    "pp2, interleaved": (2, dict(pp=2, virtual_stages=2)),
    "pp4": (4, dict(pp=4)),
}


@pytest.mark.parametrize(
    "precision", [pytest.param("fp32", marks=pytest.mark.soak), "bf16", pytest.param("fp16", marks=pytest.mark.soak)]
)
def test_pipelines_recompute_and_buckets_change_no_bit(ranks, precision):
    """Truth: one rank with the same micro-batches. Without clipping: the norm's parts are summed in another order,
    then it scales all."""

    def losses(world: int, train: dict | None = None, bucket_mb: int = 0, **layout) -> list[float]:
        run = precision_run("llama", precision, train={**SCALE, **(train or {})}, **layout)
        run = replace(run, optim=replace(run.optim, clip_grad=0.0), layout=replace(run.layout, bucket_mb=bucket_mb))
        return everywhere(ranks, run, world, 4)["losses"]

    truth = losses(1)
    for recompute in ("selective", "full"):
        assert losses(1, dict(recompute=recompute)) == truth, recompute
    assert losses(1, bucket_mb=100) == truth
    for name, (world, layout) in PIPELINES.items():
        assert losses(world, **layout) == truth, name
    assert losses(2, sharding=1) == losses(2, sharding=0)


LEVELS = some(
    product(["llama", "llama-tied"], ["fp32", "bf16", "fp16"]),
    lambda model, p: (model, p) == ("llama", "bf16"),
)


@pytest.mark.parametrize("model, precision", LEVELS)
def test_sharding_levels_change_no_bit(ranks, model, precision):
    """With one micro-batch per rank all levels make the same sums; with more, those that reduce after each are alike
    among themselves.

    Truth: level 0, and level 2. Without clipping, whose norm is summed in another order.
    """

    def losses(global_batch: int, train: dict = SCALE, **layout) -> list[float]:
        run = precision_run(model, precision, global_batch, train=train, **layout)
        return everywhere(ranks, replace(run, optim=replace(run.optim, clip_grad=0.0)), 2, 4)["losses"]

    truth = losses(2, sharding=0)
    for layout in (
        dict(sharding=1),
        dict(sharding=2),
        dict(sharding=2, prefetch=0),
        dict(sharding=3),
        dict(sharding=3, prefetch=3),
    ):
        assert losses(2, **layout) == truth, layout
    if precision == "bf16" and model == "llama":  # codes of weights are made when these are here
        eight = dict(train={**SCALE, "fp8": Fp8Config(recipe="tensorwise")})
        assert len({tuple(losses(2, sharding=level, **eight)) for level in (1, 2, 3)}) == 1
    truth = losses(6, sharding=2)
    for layout in (dict(sharding=3), dict(sharding=3, reshard_after_forward=False), dict(sharding=3, prefetch=2)):
        assert losses(6, **layout) == truth, layout


@pytest.mark.parametrize(
    "model, precision",
    some(product(["llama", "gpt2"], ["fp32", "bf16"]), lambda m, p: (m, p) in (("llama", "fp32"), ("gpt2", "bf16"))),
)
def test_schedules_change_no_bit(ranks, model, precision):
    """GPipe, 1F1B and ZB-H1 on the same stages, with clipping, and tied weights in gpt2 (two sums there that one rank
    makes as one)."""
    names = ("gpipe", "1f1b", "zb_h1")
    found = [everywhere(ranks, precision_run(model, precision, pp=2, schedule=s), 2, 4) for s in names]
    assert found[0] == found[1] == found[2]
