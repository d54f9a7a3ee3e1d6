"""train.freeze: frozen weights keep every bit, cost no gradient and no moments, and come and go between checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx.checkpoint.contents import Contents
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.engine.build import build
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import rank_uses
from phalanx.layout.config import LayoutConfig
from phalanx.layout.grid import Coords
from tests.harness.checkpoints import load_here, save_here
from tests.harness.parity import assemble, base_run, parts_of, random_weights, truth_of

GLOBS = ["*attn*", "model.layers.0.*", "*embed_tokens*"]


def frozen(run: Run, globs: list[str] | None = None) -> Run:
    return replace(run, train=replace(run.train, freeze=GLOBS if globs is None else globs))


def is_frozen(name: str) -> bool:
    return "attn" in name or "layers.0." in name or "embed_tokens" in name


@pytest.mark.parametrize("model", ["llama", "llama-tied", "mixtral", "deepseek_v3"])
def test_the_rest_trains_as_it_would(ranks, model):
    """Truth: the same run with nothing frozen. Its gradients of the others, norms of those, and of what is frozen
    the weights it began with."""
    run = base_run(model)
    whole, part = truth_of(ranks, run, 1, False), truth_of(ranks, frozen(run), 1, False)
    start = truth_of(ranks, frozen(run), 0, False)["weights"]
    rest = {name: g for name, g in whole["grads"][0].items() if not is_frozen(name)}
    assert part["grads"][0].keys() == rest.keys() != whole["grads"][0].keys()
    for name, expected in rest.items():
        np.testing.assert_array_equal(part["grads"][0][name], expected, err_msg=name)
    np.testing.assert_allclose(part["norms"][0], np.sqrt(sum((g**2).sum() for g in rest.values())), rtol=1e-12)
    for name, weights in part["weights"].items():
        assert np.array_equal(weights, start[name]) == is_frozen(name), name


def test_a_frozen_bias_of_a_router_stays(ranks):
    run = base_run("deepseek_v3")
    start, still = (truth_of(ranks, frozen(run, ["*correction_bias"]), n, False)["weights"] for n in (0, 2))
    moved = truth_of(ranks, run, 2, False)["weights"]
    names = [name for name in start if name.endswith("correction_bias")]
    assert names
    for name in names:
        assert np.array_equal(still[name], start[name]) and not np.array_equal(moved[name], start[name])


def save_on_rank(rank: int, world: int, run: Run, root: Path) -> list:
    plan = make_plan(run, world)
    state = build(plan, Mesh(plan.grid, rank))
    random_weights(state.model)
    for shard in state.optimizer.shards:
        shard.state["m"].fill_(3.0)
    state.buffers.publish()
    save_here(state, root)
    return parts_of(state, "master")


def load_on_rank(rank: int, world: int, run: Run, path: Path) -> tuple[list, list]:
    """Masters, and the values of the first moments by name, after loading."""
    plan = make_plan(run, world)
    state = build(plan, Mesh(plan.grid, rank))
    load_here(state, path, model=run.model)
    state.buffers.ready()
    moments = []
    for shard in state.optimizer.shards:
        whole = torch.full((shard.bucket.numel,), torch.nan)
        whole[shard.lo : shard.hi] = shard.state["m"]
        for slot in shard.bucket.slots:
            storage = whole[slot.offset : slot.offset + slot.numel].view(slot.spec.shape)
            moments += [
                (piece.name, set(piece.of(storage).nan_to_num(-1.0).flatten().tolist()) - {-1.0})
                for piece in slot.spec.pieces
            ]
    return parts_of(state, "master"), moments


@pytest.mark.parametrize(
    "before, after", [(GLOBS, []), ([], GLOBS), (GLOBS, ["*norm*"])], ids=["thaw", "freeze", "change"]
)
def test_a_checkpoint_does_not_know_what_is_frozen(ranks, tmp_path, before, after):
    """Weights come back to the bit in another layout; who was frozen starts with moments of zero, the others with
    theirs."""
    run = base_run("deepseek_v3", precision="fp32")
    saving = replace(frozen(run, before), layout=LayoutConfig(bucket_mb=0, sharding=3))
    loading = replace(frozen(run, after), layout=LayoutConfig(bucket_mb=0, tp=2, sharding=2))
    saved = assemble(ranks.run("tests.nn.test_freeze:save_on_rank", 2, saving, tmp_path))
    found = ranks.run("tests.nn.test_freeze:load_on_rank", 4, loading, tmp_path / "step-00000010")
    loaded = assemble([parts for parts, _ in found])
    assert loaded.keys() == saved.keys() and all(np.array_equal(loaded[name], saved[name]) for name in saved)
    for name, values in (m for _, moments in found for m in moments):
        assert values <= ({0.0} if before and is_frozen(name) else {3.0}), name
    with Contents(tmp_path / "step-00000010") as contents:
        assert set(contents.shapes("weights")) == {name for name in saved if not name.endswith(".load")}
        assert not any(is_frozen(name) for name in contents.shapes("m")) or not before


def test_the_plan_has_no_gradients_and_moments_of_them():
    """By hand: of the embedding gradients, masters and two moments go, in fp32."""
    run = replace(base_run("llama", precision="bf16"), layout=LayoutConfig(bucket_mb=0, sharding=0))
    (whole,), (less,) = (rank_uses(make_plan(r, 1), 8)[0] for r in (run, frozen(run, ["*embed_tokens*"])))
    plan = make_plan(run, 1)
    bucket = next(b for b in plan.buckets_of(plan.blocks_of(Coords()))[0] if "embed_tokens" in b.slots[0].spec.name)
    assert whole.memory["weights"] == less.memory["weights"]
    for kind, times in (("gradients", 4), ("masters", 4), ("moments", 8)):
        assert whole.memory[kind] - less.memory[kind] == times * bucket.numel, kind
