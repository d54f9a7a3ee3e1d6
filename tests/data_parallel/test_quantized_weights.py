"""Weights kept as 8-bit codes: casts of parts against the cast of the whole, layouts against weights that every rank
casts."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.checkpoint.keep import latest
from phalanx.comm.axis import ModelAxes
from phalanx.comm.debug import Site
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.data_parallel.quantized import QuantizedStorage
from phalanx.engine.build import build
from phalanx.engine.step import accumulate, evaluate_step, update
from phalanx.forecast.decide import make_plan
from phalanx.layout.config import LayoutConfig
from phalanx.layout.grid import Grid
from phalanx.ops.quantized.expert_quantizer import ExpertQuantizer
from phalanx.ops.quantized.quantizer import WeightQuantizer
from phalanx.ops.quantized.recipes import COUNTS, E4M3, SLOTS, block_amax, find_recipe, multipliers
from phalanx.ops.quantized.scale_blocks import Blocks
from phalanx.ops.quantized.stored import STORED
from tests.checkpoint.test_checkpoint import check_weights_are_cast_masters
from tests.harness import parity
from tests.harness.checkpoints import make_state, save_here, set_state
from tests.harness.pool import RanksFailed
from tests.nn.test_fp8 import STEPS, low_run
from tests.nn.test_fp8_experts import EXPERTS

KINDS = [
    ((64, 192), "tensorwise"),
    ((256, 384), "blockwise"),
    ((3, 128, 64), "tensorwise"),
    ((2, 256, 128), "blockwise"),
]


def low_for(shape: tuple[int, ...], recipe: str, implementation: str) -> WeightQuantizer:
    kind = WeightQuantizer if len(shape) == 2 else ExpertQuantizer
    return kind(find_recipe(recipe), "w", 0, ModelAxes(), implementation)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape, recipe", KINDS, ids=str)
def test_parts_have_the_codes_of_the_whole(shape, recipe):
    """Truth: the weight in bf16 cast at once. Masters are fp32 numbers that bf16 rounds; cuts go through rows and
    blocks."""
    master = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 2, shape[-1])
    low = low_for(shape, recipe, "plain")
    low.refresh(master.bfloat16())
    straight, transposed = low.quantized(master)
    blocks, flat, by = low.blocks(shape), master.flatten(), STORED.reference
    bits, codes = torch.zeros(blocks.count, dtype=torch.int32), torch.zeros(flat.numel(), dtype=torch.uint8)
    cuts = [0, 64 * 3, 64 * 101, 64 * 102, flat.numel()]
    parts = [(slice(a, b), a) for a, b in zip(cuts, cuts[1:])]
    for where, first in parts:
        by.note_largest_(bits, flat[where], first, blocks, torch.bfloat16)
    multiplier = multipliers(bits.view(torch.float32), E4M3)
    assert torch.equal((1.0 / multiplier).view(blocks.shape), straight.scales) and torch.equal(
        straight.scales.t(), transposed.scales
    )
    counts, recomputed = torch.zeros(SLOTS, COUNTS, dtype=torch.int64), torch.zeros_like(bits)
    for where, first in parts:
        by.cast_run_(codes[where], flat[where], first, blocks, multiplier, E4M3, torch.bfloat16, counts, recomputed)
    assert torch.equal(codes.view(straight.quantized.shape), straight.quantized.view(torch.uint8)) and torch.equal(
        recomputed, bits
    )
    assert (
        counts.sum(0)[2] == flat.numel()
        and counts.sum(0)[0] == ((straight.quantized.float() == 0) & (master.view(straight.quantized.shape) != 0)).sum()
    )
    out = torch.zeros(straight.quantized.shape[::-1], dtype=torch.uint8)
    by.turn_(out, codes.view(straight.quantized.shape))
    assert torch.equal(out, transposed.quantized.view(torch.uint8))


def test_blocks_are_those_of_a_matrix():
    """Truth: ops.quantized.recipes's own walk over blocks."""
    blocks, x = Blocks(70, 192, (32, 64)), torch.randn(70, 192)
    bits = torch.zeros(blocks.count, dtype=torch.int32)
    STORED.reference.note_largest_(bits, x.flatten(), 0, blocks, torch.float32)
    assert torch.equal(bits.view(torch.float32).view(blocks.shape), block_amax(x, (32, 64)))


@pytest.mark.parametrize("implementation", ["plain", "triton"])
def test_what_is_no_number_is_seen(implementation):
    blocks, x = Blocks(2, 64, (1, 64)), torch.ones(128)
    x[70] = math.nan
    bits = torch.zeros(2, dtype=torch.int32)
    by = STORED.choose(implementation, x)
    by.note_largest_(bits, x, 0, blocks, torch.bfloat16)
    found = bits.view(torch.float32)
    assert found[0] == 1 and found[1].isnan()
    codes = torch.zeros(128, dtype=torch.uint8)
    by.cast_run_(codes, x, 0, blocks, torch.ones(2), E4M3, torch.bfloat16, None, None)
    assert (codes.view(torch.float8_e4m3fn).float().isnan() == x.isnan()).all()


# ---- layouts -------------------------------------------------------------------------------------

EIGHT = dict(global_batch=8)
LAYOUTS = {  # run, and the same on one process
    "tensorwise, dp4 in pairs, level 2, optimizer over both": (
        4,
        low_run("tensorwise", train=EIGHT, sharding=2, shard_group=2, shard_across="optimizer"),
    ),
    "delayed, dp2 tp2, level 3": (4, low_run("delayed", train=EIGHT, tp=2, sharding=3)),
    "delayed, dp2, level 3, places of CUDA graphs": (2, low_run("delayed", train=dict(cuda_graphs="on"), sharding=3)),
    "blockwise, dp4, level 3": (4, low_run("blockwise", "low-wide", train=EIGHT, sharding=3)),
    "tensorwise, experts, etp2 in tp2, dp2, level 2": (
        4,
        low_run("tensorwise", "low-mixtral-wide", fp8=EXPERTS, tp=2, etp=2, sharding=2),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_agree_with_one_process(ranks, name):
    """Truth: one process at level 0, whose weights are there and are cast whole. Emulated in float64: a code that
    differs shows."""
    world, run = LAYOUTS[name]
    truth = parity.truth_of(ranks, replace(run, layout=LayoutConfig(sharding=0)), STEPS, False)
    parity.compare(ranks.run("tests.harness.parity:run_layout", world, run, STEPS), truth, STEPS)


def test_each_collective_matters(ranks):
    """Each site in the new file, found by tracing, is dropped once in each of these layouts that has it: the
    comparison must fail."""
    homes: dict[Site, list[str]] = {}
    names = [n for n in LAYOUTS if "places" not in n and "blockwise" not in n]
    truths = {
        n: parity.truth_of(ranks, replace(LAYOUTS[n][1], layout=LayoutConfig(sharding=0)), STEPS, False) for n in names
    }
    for name in names:
        world, run = LAYOUTS[name]
        for result in ranks.run("tests.harness.parity:run_layout", world, run, STEPS, False, None, True):
            for site in (s for s in map(Site._make, result["sites"]) if s.file == "data_parallel/quantized.py"):
                homes.setdefault(site, [])
                homes[site] += [name] if name not in homes[site] else []
    assert {site.op for site in homes} == {"all_reduce", "all_gather"} and len(homes) >= 8
    survivors = []
    for site, where in homes.items():
        name = random.Random(1).choice(where)
        world, run = LAYOUTS[name]
        try:
            parity.compare(
                ranks.run("tests.harness.parity:run_layout", world, run, STEPS, False, site, timeout=60.0),
                truths[name],
                STEPS,
            )
            survivors.append((site, name))
        except (AssertionError, RanksFailed):
            pass
    assert not survivors


def codes_of(rank: int, world: int, run: Run) -> dict[str, torch.Tensor]:
    """Codes and scales of every matrix after a step, as a rank's products use them."""
    plan = make_plan(run, world)
    state = build(plan, mesh := Mesh(plan.grid, rank))
    parity.random_weights(state.model)
    state.model.train()
    for step in range(2):
        update(state, accumulate(state, parity.step_batches(run, mesh, step, False)), lr=1e-2)
    evaluate_step(state.model, parity.step_batches(run, mesh, 2, False))
    if state.buffers.flat[0].cut.cuts_weights:
        for f in state.buffers.flat:
            f.storage.fetch()
    state.buffers.ready()
    made = any(isinstance(f.storage, QuantizedStorage) for f in state.buffers.flat)
    assert made == (run.layout.sharding > 0)
    found = {}
    for low, p in state.model.fp8.here:
        for side, q in zip(("straight", "turned"), low.quantized(p)):
            found[f"{low.name} {side}"] = torch.cat(
                (q.quantized.view(torch.uint8).flatten().float(), q.scales.flatten())
            )
    return found


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_codes_are_those_of_gathered_weights(ranks, recipe):
    """bf16 with fp32 masters, dp2: the same bits as at level 0, where every rank casts the weights themselves."""
    run = low_run(recipe, "low-wide", train=dict(precision="bf16", deterministic=True, global_batch=4))
    exact = ranks.run(
        "tests.data_parallel.test_quantized_weights:codes_of",
        2,
        replace(run, layout=LayoutConfig(bucket_mb=0, sharding=0)),
    )
    for level in (1, 3):
        for found in ranks.run(
            "tests.data_parallel.test_quantized_weights:codes_of",
            2,
            replace(run, layout=LayoutConfig(bucket_mb=0, sharding=level)),
        ):
            assert found.keys() == exact[0].keys() and all(
                torch.equal(found[name], exact[0][name]) for name in exact[0]
            )


def test_scales_begin_where_cublas_takes_them():
    """At 16 bytes: the second of many scales beside each other, 4 bytes on, was refused on a GPU."""
    plan = make_plan(low_run("tensorwise"), 1)
    state = build(plan, Mesh(Grid()))
    weights = [
        p
        for block in state.model.blocks.values()
        for b in block
        for p in b.parameters()
        if getattr(p, "quantizer", None) is not None
    ]
    assert len(weights) > 2 and any(isinstance(f.storage, QuantizedStorage) for f in state.buffers.flat)
    assert all(scaled.scales.data_ptr() % 16 == 0 for p in weights for scaled in p.quantizer.quantized(p))


def save_counting(rank: int, world: int, run: Run, folder: Path) -> tuple[int, int]:
    """Coded buckets, and copies of their weights that a save made."""
    state, made = make_state(run, rank, world), list[torch.Tensor]()
    set_state(state)
    original = QuantizedStorage.weight_kept
    QuantizedStorage.weight_kept = property(lambda f: made.append(original.fget(f)) or made[-1])  # type: ignore[assignment,method-assign]
    try:
        save_here(state, folder)
    finally:
        QuantizedStorage.weight_kept = original  # type: ignore[method-assign]
    return sum(isinstance(f.storage, QuantizedStorage) for f in state.buffers.flat), len(made)


def test_saving_makes_no_copy_of_all_weights(ranks, tmp_path):
    """Each is rounded from its masters as it goes to its file."""
    run = low_run("tensorwise", train=dict(precision="bf16"), tp=2, sharding=2)
    found = ranks.run("tests.data_parallel.test_quantized_weights:save_counting", 4, run, tmp_path)
    assert all(coded > 0 and copies == 0 for coded, copies in found)
    check_weights_are_cast_masters(latest(tmp_path))
