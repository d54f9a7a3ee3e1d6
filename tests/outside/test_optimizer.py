"""An optimizer from outside the package, in one file that no file of ours names: Lion, found by `module:NAME`, through
the central test, checkpoints, the forecast and the config."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx.base.errors import CheckpointError, ConfigError
from phalanx.base.placement import Placement
from phalanx.checkpoint.contents import Contents
from phalanx.checkpoint.keep import latest
from phalanx.checkpoint.tools import diff, reshard
from phalanx.comm.mesh import Mesh
from phalanx.config.read import load_run, read
from phalanx.config.run import CheckpointConfig, Run
from phalanx.engine.build import build
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import rank_uses
from phalanx.layout.config import LayoutConfig
from phalanx.observe.out_of_memory import held
from phalanx.optim.config import OptimConfig
from phalanx.optim.optimizer import find_optimizer
from phalanx.optim.sharded import ShardedOptimizer
from phalanx.training.main import train
from tests.harness import checkpoints, parity
from tests.harness.sample import rest_in_soak
from tests.optim.test_optim import CPU, make_shards, one_bucket
from tests.training.test_loop import make_run

OUTSIDE = Path(__file__).parent
if str(OUTSIDE) not in sys.path:
    sys.path.append(str(OUTSIDE))
LION = "lion_example.lion:Lion"
STEPS, LR, CLIP = 3, 1e-2, 0.05
LAYOUT = {"tp": 2, "pp": 2, "sharding": 3, "bucket_mb": 0}
LAYOUTS = {
    "tp2 pp2 dp2, sharding 3": (8, LAYOUT),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
    "dp2, sharding 0": (2, {"sharding": 0}),
    "dp2, sharding 1": (2, {"sharding": 1}),
    "dp2, sharding 2": (2, {"sharding": 2}),
}


def lion(**fields) -> OptimConfig:
    return find_optimizer(LION).Config(name=LION, **fields)


def run_of(precision: str = "fp64", layout: dict | None = None, **fields) -> Run:
    run = parity.base_run("llama", precision=precision)
    return replace(run, optim=lion(**fields), layout=LayoutConfig(**(layout or {})))


def one_rank(rank: int, world: int, layout: dict) -> dict:
    """What the central test compares; the rank imports this module, so finds the package, before it makes the run."""
    return parity.run_layout(rank, world, run_of(layout=layout, clip_grad=CLIP), STEPS)


def undecided(truth: dict, name: str) -> np.ndarray:
    """Elements whose direction is, at some step, nothing but rounding: their sign follows the order of sums."""
    momentum = found = np.zeros_like(truth["weights"][name])
    for grads, norm in zip(truth["grads"], truth["norms"]):
        grad = grads[name] * min(1.0, CLIP / (norm + 1e-6))
        direction = np.abs(0.9 * momentum + 0.1 * grad)
        found = found + ((direction > 0) & (direction < 1e-12 * direction.max()))
        momentum = 0.99 * momentum + 0.01 * grad
    return found > 0


@pytest.mark.parametrize("name", rest_in_soak(LAYOUTS, ("tp2 pp2 dp2, sharding 3",)))
def test_lion_is_the_same_in_every_layout(ranks, name):
    """Truth: one process. At most one element in a thousand is undecided."""
    world, layout = LAYOUTS[name]
    [alone] = ranks.run("tests.outside.test_optimizer:one_rank", 1, {"bucket_mb": 0, "sharding": 0})
    truth = {**alone, "grads": [parity.assemble([g]) for g in alone["grads"]]}
    truth["weights"] = parity.assemble([alone["weights"]])
    assert min(truth["norms"]) > CLIP
    left_out = {name: undecided(truth, name) for name in truth["weights"]}
    count, total = sum(int(out.sum()) for out in left_out.values()), sum(out.size for out in left_out.values())
    assert count <= total / 1000, f"{count} of {total} elements are undecided"
    results = ranks.run("tests.outside.test_optimizer:one_rank", world, layout)
    for name, _, box, values in (part for result in results for part in result["weights"]):
        out = left_out[name][box.slices()]
        values[out] = truth["weights"][name][box.slices()][out]
    parity.compare(results, truth, STEPS)


def test_lion_by_its_formula():
    """Truth: the paper's algorithm in numpy, over chunks, groups and a skipped step that changes no bit."""
    bucket, generator = one_bucket(1), torch.Generator().manual_seed(0)
    values = torch.randn(bucket.numel, dtype=torch.float64, generator=generator)
    config = lion(weight_decay=0.3, lr_scale={"embed*": 0.1})
    for chunk in (32, 1 << 22):
        (shard,) = make_shards(bucket, 1, values)
        shard.state = {"momentum": torch.zeros_like(values)}
        optimizer = ShardedOptimizer([(find_optimizer(LION)(config), [shard])], CPU)
        weights, momentum = values.numpy().copy(), np.zeros(bucket.numel)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("phalanx.optim.sharded.CHUNK", chunk)
            for step in range(4):
                grad = torch.randn(bucket.numel, dtype=torch.float64, generator=generator)
                shard.grad.copy_(grad if step != 2 else torch.nan)
                before = [shard.master.clone(), shard.state["momentum"].clone()]
                optimizer.update(0.1, torch.tensor(float(step == 2)), torch.tensor(0.5))
                assert not shard.grad.any()
                if step == 2:
                    assert torch.equal(before[0], shard.master) and torch.equal(before[1], shard.state["momentum"])
                    continue
                g = 0.5 * grad.numpy()
                for slot in bucket.slots:
                    at = slice(slot.offset, slot.offset + slot.numel)
                    rate = 0.1 * (0.1 if slot.spec.name.startswith("embed") else 1.0)
                    decay = 0.3 if len(slot.spec.shape) > 1 else 0.0
                    direction = np.sign(0.9 * momentum[at] + 0.1 * g[at])
                    weights[at] = weights[at] * (1 - rate * decay) - rate * direction
                    momentum[at] = 0.99 * momentum[at] + 0.01 * g[at]
        for slot in bucket.slots:
            at = slice(slot.offset, slot.offset + slot.numel)
            np.testing.assert_allclose(shard.master.numpy()[at], weights[at], rtol=1e-12)
        assert optimizer.step == 3


# ---- checkpoints


def save_on_rank(rank: int, world: int, layout: dict, root: Path) -> bool:
    return checkpoints.save_on_rank(rank, world, run_of("bf16", layout), root, {})


def load_on_rank(rank: int, world: int, layout: dict, path: Path) -> list[str]:
    return checkpoints.load_on_rank(rank, world, run_of("bf16", layout), path)


def test_checkpoints_go_from_layout_to_layout(ranks, tmp_path):
    assert all(ranks.run("tests.outside.test_optimizer:save_on_rank", 4, {"tp": 2, "sharding": 3}, tmp_path))
    path = tmp_path / "step-00000010"
    for world, layout in ((2, {"pp": 2, "sharding": 1}), (1, {"sharding": 0})):
        assert not any(ranks.run("tests.outside.test_optimizer:load_on_rank", world, layout, path))
    with Contents(path) as contents:
        assert contents.kinds == ("weights", "master", "momentum")
    anew = reshard(path, tmp_path / "anew", files=3)
    assert not list(diff(path, anew))
    assert not any(ranks.run("tests.outside.test_optimizer:load_on_rank", 1, {"sharding": 0}, anew))


def test_a_run_goes_on_by_its_own_config_and_not_with_another_optimizer(tmp_path):
    run = make_run(tmp_path / "run", steps=2)
    run = replace(run, optim=lion(lr=1e-3, beta2=0.95), checkpoint=CheckpointConfig(interval=2))
    train(run, Placement())
    again = load_run(run.dir, ["train.steps=4"])
    assert again.optim == run.optim and again.optim.name == LION
    train(again, Placement())
    assert latest(Path(run.dir) / "checkpoints").name == "step-00000004"
    other = replace(again, optim=OptimConfig(), train=replace(again.train, steps=6))
    with pytest.raises(CheckpointError, match="whose state is momentum; adamw needs m, v.*init_from="):
        train(other, Placement())


# ---- memory


def bytes_on_rank(rank: int, world: int, moments: str) -> tuple[int, int]:
    """(forecast, held) bytes of the optimizer's state."""
    plan = make_plan(run_of("bf16", LAYOUT, moments=moments), world)
    state = build(plan, Mesh(plan.grid, rank))
    uses, _ = rank_uses(plan, 4)
    return uses[state.mesh.at.pp].memory["moments"], held(state)["moments"]


@pytest.mark.parametrize("moments", ["master", "bf16", "fp8"])
def test_the_forecast_is_what_is_held(ranks, moments):
    found = ranks.run("tests.outside.test_optimizer:bytes_on_rank", 8, moments)
    assert all(forecast == actual > 0 for forecast, actual in found)
    adamw = rank_uses(make_plan(replace(run_of("bf16", LAYOUT), optim=OptimConfig(moments=moments)), 8), 4)[0]
    assert 2 * found[0][0] == adamw[0].memory["moments"]


# ---- the config

SMALL = ["model.family=llama", "model.vocab_size=64", "model.hidden_size=16", "model.intermediate_size=32"]
SMALL += ["model.num_hidden_layers=1", "model.num_attention_heads=2", "train.steps=1", "train.global_batch=1"]
SMALL += ["train.micro_batch=1", "train.seq_length=8", "data.mock=true"]


def refused(*overrides: str) -> dict[str, tuple[str, tuple]]:
    return {p.field: (p.rule, p.valid) for p in read(None, [*SMALL, *overrides]).problems}


def test_the_config_has_the_fields_of_the_optimizer():
    run = load_run(None, [*SMALL, f"optim.name={LION}", "optim.beta2=0.5", "optim.lr=1e-3"])
    assert run.optim == lion(beta2=0.5, lr=1e-3)
    assert load_run(None, [*SMALL, "optim.name=example_lion"]).optim.name == LION, "another process must find it"
    assert load_run(None, SMALL).optim.name == "adamw"


def test_wrong_paths_and_classes_are_refused():
    found = refused("optim.name=lion_exmple.lion:Lion", "optim.beta2=0.5", "train.stepz=1")
    assert list(found) == ["optim.name", "train.stepz"]
    rule, valid = found["optim.name"]
    assert "there is no module lion_exmple on Python's path" in rule and valid[0] == LION
    assert refused("optim.name=lion_example.lion:Loin")["optim.name"][1][0] == LION
    for name, text in (
        ("Unfinished", "lion_example.lion:Unfinished has no update(self, p: Any) -> None"),
        ("Shadowing", "names a state 'grad', which is no free attribute name of a range"),
        ("Whole", 'has owns=\'tensor\'; what exists is "range" and "matrix"'),
        ("LionConfig", "has no update(self, p: Any) -> None"),
    ):
        assert text in refused(f"optim.name=lion_example.lion:{name}")["optim.name"][0]
    rule, valid = refused(f"optim.name={LION}", "optim.betta2=0.5")["optim.betta2"]
    assert rule == "is not a key of optim" and "optim.beta2" in valid
    rule, valid = refused(f"optim.name={LION}", "optim.eps=0.5")["optim.eps"]
    assert rule == "is a key of optim only with name adamw" and "optim.eps" not in valid
    assert refused(f"optim.name={LION}", "optim.beta2=fast")["optim.beta2"] == ("must be float, got string", (0.99,))
    with pytest.raises(ConfigError, match="takes the fields of AdamWConfig, not of LionConfig"):
        replace(run_of(), optim=replace(lion(), name="adamw"))


def test_the_program_finds_it_by_path(warm, tmp_path):
    root = Path(__file__).parents[2]
    words = ["train", "recipes/tiny_llama.yaml", "train.steps=1"]
    words += [f"optim.name={LION}", "optim.beta2=0.9", f"dir={tmp_path}/run"]
    done = warm.phalanx(*words, cwd=root, env={"PYTHONPATH": f"{root}:{OUTSIDE}"})
    assert done.returncode == 0, done.stderr
    assert f"name: {LION}" in (tmp_path / "run/config.yaml").read_text(encoding="utf-8")
