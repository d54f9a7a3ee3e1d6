"""Training with split masters and moments in 8 bits: what comes out, what it takes, what checkpoints hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.engine.build import build
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import rank_uses
from phalanx.layout.config import LayoutConfig
from phalanx.observe.out_of_memory import held
from phalanx.optim.adamw import AdamWConfig
from tests.harness import checkpoints, parity

SMALL = AdamWConfig(masters="split", moments="8bit")


def bf16_run(optim: AdamWConfig, **layout) -> Run:
    run = parity.base_run("llama", global_batch=4, precision="bf16")
    return replace(run, optim=optim, layout=LayoutConfig(**layout))


LAYOUTS = [
    (1, {}),
    (2, {"tp": 2}),
    (2, {"sharding": 1}),
    (2, {"sharding": 3}),
    (4, {"pp": 2, "sharding": 2}),
    (4, {"sharding": 2, "shard_group": 2, "shard_across": "optimizer"}),
]


@pytest.mark.parametrize(
    "world, layout, moments", [*((*each, "master") for each in LAYOUTS), (*LAYOUTS[-1], "8bit")], ids=str
)
def test_split_masters_train_as_whole_ones_to_the_bit(ranks, world, layout, moments):
    """Losses, norms, gradients and masters of three steps in bf16."""
    whole, split = (
        ranks.run(
            "tests.harness.parity:run_layout", world, bf16_run(AdamWConfig(masters=m, moments=moments), **layout), 3
        )
        for m in ("whole", "split")
    )
    for a, b in zip(whole, split):
        assert a["losses"] == b["losses"] and a["norms"] == b["norms"]
        for of_a, of_b in [(a["weights"], b["weights"]), *zip(a["grads"], b["grads"])]:
            for (name, *at, x), (other, *there, y) in zip(of_a, of_b, strict=True):
                assert (name, at) == (other, there) and np.array_equal(x, y, equal_nan=True)


@pytest.mark.parametrize("sharding", [0, 1, 2, 3])
@pytest.mark.parametrize("optim", [AdamWConfig(masters="split"), AdamWConfig(moments="8bit"), SMALL], ids=str)
def test_the_plan_counts_what_is_stored(ranks, optim, sharding):
    for found, planned in ranks.run("tests.optim.test_one_gpu:bytes_of", 2, bf16_run(optim, sharding=sharding)):
        assert found["masters"] == planned["masters"] > 0 and found["moments"] == planned["moments"]


def bytes_of(rank: int, world: int, run: Run) -> tuple[dict[str, int], dict[str, int]]:
    plan = make_plan(run, world)
    state = build(plan, Mesh(plan.grid, rank))
    return held(state), rank_uses(plan, plan.num_micro_batches(run.train.global_batch))[0][0].memory


# ---- checkpoints


def saved_and_loaded(ranks, folder: Path, saved: tuple[int, Run], loaded: tuple[int, Run]) -> None:
    ranks.run("tests.harness.checkpoints:save_on_rank", saved[0], saved[1], folder, {})
    for wrong in ranks.run("tests.harness.checkpoints:load_on_rank", loaded[0], loaded[1], folder / "step-00000010"):
        assert not wrong


@pytest.mark.parametrize("to_split", [True, False])
def test_checkpoints_of_split_masters_are_those_of_whole_ones(ranks, tmp_path, to_split):
    """Saved under one and loaded under the other, in another layout, with every bit; the same bytes in the files."""
    whole, split = (bf16_run(AdamWConfig(masters=m), sharding=2) for m in ("whole", "split"))
    other = bf16_run(AdamWConfig(masters="split" if to_split else "whole"), tp=2)
    saved_and_loaded(ranks, tmp_path / "a", (2, whole if to_split else split), (2, other))
    if to_split:
        ranks.run("tests.harness.checkpoints:save_on_rank", 2, split, tmp_path / "b", {})
        files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.safetensors"))
        assert len(files) > 2 and any("state" in p.parts for p in files)
        assert all((tmp_path / "a" / p).read_bytes() == (tmp_path / "b" / p).read_bytes() for p in files)


def values_of(rank: int, world: int, run: Run, path: Path) -> list[tuple[str, bool, float]]:
    """Of each moment of each shard, loaded from a checkpoint whose numbers `checkpoints.values` gives: whether it is
    what these give when they are stored here, and how far that is from them."""
    from phalanx.ops.optimizer.packed import PackedTensor

    state = checkpoints.make_state(run, rank, world)
    checkpoints.load_here(state, path, model=run.model)
    found = []
    for shard in state.optimizer.shards:
        for kind in shard.state:
            kept, right = shard.state[kind], checkpoints.expected(shard, kind)
            got = shard.values(kind).clone()
            off = ((got - right).abs().max() / right.abs().max()).item()
            if isinstance(kept, PackedTensor):
                kept.store_(right)
            found.append((kind, bool((got == shard.values(kind)).all()), off))
    return found


def test_moments_in_8_bits_are_loaded_from_wide_ones(ranks, tmp_path):
    """By every layout: the numbers of a checkpoint are stored block by block, wherever the blocks are."""
    ranks.run("tests.harness.checkpoints:save_on_rank", 2, bf16_run(AdamWConfig(), sharding=1), tmp_path, {})
    for world, layout in ((1, {}), (2, {"tp": 2}), (2, {"sharding": 3})):
        run = bf16_run(AdamWConfig(moments="8bit"), **layout)
        for found in ranks.run("tests.optim.test_one_gpu:values_of", world, run, tmp_path / "step-00000010"):
            assert found and all(same for _, same, _ in found)
            assert max(off for kind, _, off in found if kind == "m") < 0.01
