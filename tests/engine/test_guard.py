"""Bad numbers: what is refused, that nothing of it is applied, what each policy does, and that silent corruption
names the rank."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import phalanx.engine.step as step_module
from phalanx.base.errors import NumericalStop
from phalanx.base.placement import Placement
from phalanx.checkpoint.config import CheckpointConfig
from phalanx.checkpoint.keep import list_checkpoints
from phalanx.checkpoint.manifest import read_manifest
from phalanx.config.read import load_run
from phalanx.config.run import GuardConfig
from phalanx.config.write import to_dict
from phalanx.engine.guard import FLOOR, Guard
from phalanx.engine.replicas import check_replicas, hash_bits
from phalanx.launch.local import start
from phalanx.launch.outcome import RankFailed
from phalanx.layout.config import LayoutConfig
from phalanx.training.main import train
from tests.harness.checkpoints import make_run as parity_run
from tests.harness.checkpoints import make_state, set_state
from tests.training.test_loop import make_run, rows_of

NAN, INF = math.nan, math.inf


def judged(guard: Guard, losses, norms=None) -> list[int]:
    norms = [1.0] * len(losses) if norms is None else norms
    return [
        int(guard.judge(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)))
        for a, b in zip(losses, norms)
    ]


def by_numpy(losses, norms, window: int, sigmas: float) -> list[int]:
    """The rule once more, over lists."""
    kept: tuple[list[float], list[float]] = ([], [])
    found = []
    for values in zip(losses, norms):
        limits = []
        for past in kept:
            last = np.array(past[-window:])
            wide = 2 * len(past) >= window
            limits.append(last.mean() + sigmas * max(last.std(), FLOOR * abs(last.mean())) if wide else INF)
        if not all(map(math.isfinite, values)):
            found.append(1)
            continue
        found.append(2 if values[0] > limits[0] else 3 if values[1] > limits[1] else 0)
        for past, value, limit in zip(kept, values, limits):
            past.append(min(value, limit))
    return found


def test_against_the_rule_written_over_lists():
    pick = random.Random(0)
    for window, sigmas in ((4, 2.0), (7, 3.0), (16, 6.0)):
        losses = [pick.gauss(3, 0.1) + (9 if pick.random() < 0.05 else 0) for _ in range(200)]
        norms = [pick.choice([NAN, INF]) if pick.random() < 0.03 else pick.lognormvariate(0, 0.3) for _ in range(200)]
        found = judged(Guard(window, sigmas, torch.device("cpu")), losses, norms)
        assert found == by_numpy(losses, norms, window, sigmas) and {0, 1, 2} <= set(found)


def test_scripted_sequences():
    def guard(sigmas=3.0):
        return Guard(8, sigmas, torch.device("cpu"))

    calm = [2.0, 2.1, 1.9, 2.0, 2.05, 1.95]
    assert judged(guard(), [NAN, INF, -INF, *calm]) == [1, 1, 1] + [0] * 6, "what comes first may be bad"
    poisoned = guard()
    assert judged(poisoned, [*calm, NAN, *calm]) == [0] * 6 + [1] + [0] * 6
    assert all(torch.isfinite(t).all() for t in poisoned.state().values())
    assert judged(guard(), [2.0] * 8 + [2.01, 2.2]) == [0] * 9 + [2], (
        "a constant loss does not make every change a spike"
    )
    assert judged(guard(), [2.0, 2.0, 2.0, 50.0]) == [0] * 4, "before half the window is there nothing is known"
    assert judged(guard(), calm, [1, 1, 1, 1, 1, 30]) == [0] * 5 + [3]
    assert judged(guard(None), [*calm, 1e30, NAN], [1.0] * 7 + [1.0]) == [0] * 7 + [1] and guard(None).state() == {}
    level = judged(guard(), [2.0] * 8 + [2.2] * 20)
    assert level[8] == 2 and level[-1] == 0, "a level that stays is accepted in the end"


def test_a_window_goes_on_where_it_was():
    losses = [2.0 + 0.1 * math.sin(i) for i in range(12)] + [2.6]
    whole, first, second = (Guard(8, 3.0, torch.device("cpu")) for _ in range(3))
    expected = judged(whole, losses)
    found = judged(first, losses[:6])
    for name, value in second.state().items():
        value.copy_(first.state()[name])
    assert found + judged(second, losses[6:]) == expected and expected[-1] == 2


# --- in a run
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gradients(monkeypatch):
    """`gradients(sample, value)`: the step that sees this sample has `value` times its gradients; NaN in one element
    only."""

    def spoil(wanted, value: float) -> None:
        real = step_module.accumulate

        def accumulate(state, batches):
            tokens = real(state, batches)
            if wanted(state, {int(s) for b in batches for s in b.samples}):
                for flat in state.buffers.flat:
                    if math.isnan(value):
                        flat.grad[0] = value
                    else:
                        flat.grad.mul_(value)
            return tokens

        monkeypatch.setattr(step_module, "accumulate", accumulate)

    return spoil


def run_in(folder: Path, steps: int = 12, interval: int | None = 3, **guard):
    run = make_run(folder, steps=steps, guard=GuardConfig(**guard))
    return replace(run, checkpoint=CheckpointConfig(interval=interval, keep_last=0))


def test_a_bad_step_changes_nothing(tmp_path, gradients):
    """8 samples a step: sample 35 is in step 5. Weights, moments and Adam's count before and after it are the same
    bits."""
    gradients(lambda state, samples: 35 in samples, NAN)
    run = run_in(tmp_path, steps=5, interval=1)
    train(run, Placement())
    before, after = (read_manifest(p) for p in list_checkpoints(tmp_path / "checkpoints")[-2:])
    assert {n: r.xxh3 for n, r in before.files.items()} == {n: r.xxh3 for n, r in after.files.items()}
    assert after.optimizer == before.optimizer and after.scalars["skipped"] == 1 and after.step == 5
    assert "step 5 is bad: the loss or the gradient norm is not finite" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("value, why", [(NAN, "not finite"), (1e4, "the gradient norm is a spike")])
def test_stop_names_the_step(tmp_path, gradients, value, why):
    gradients(lambda state, samples: 35 in samples, value)
    with pytest.raises(NumericalStop, match=rf"step 5 is bad: .*{why} .*train.guard.policy=stop") as stop:
        train(run_in(tmp_path, policy="stop", sigmas=6.0, window=8), Placement())
    assert stop.value.exit_code == 5
    assert [p.name[-1] for p in list_checkpoints(tmp_path / "checkpoints")] == ["3"], (
        "and the run can go on from before it"
    )


def test_rollback_goes_back_and_on_with_other_data(tmp_path, gradients):
    """Bad in step 5: back to the checkpoint of step 3, on with the data after step 5. Kept over a restart, and
    exact."""
    gradients(lambda state, samples: 35 in samples, 1e4)
    guard = dict(policy="rollback", sigmas=6.0, window=8)
    train(run_in(tmp_path / "a", **guard), Placement())
    rows = rows_of(run_in(tmp_path / "a"))
    assert [r["step"] for r in rows] == list(range(1, 13))
    assert [r["consumed_samples"] for r in rows] == [8, 16, 24, *range(48, 48 + 8 * 9, 8)], (
        "samples 24 to 39 are not used again"
    )
    assert all(math.isfinite(r["loss"]) and r["skipped"] == 0 for r in rows)
    said = (tmp_path / "a/log.txt").read_text()
    assert said.count("rolled back to") == 1 and "step-00000003; the data up to step 5 is not used again" in said
    last = read_manifest(list_checkpoints(tmp_path / "a/checkpoints")[-1])
    assert last.scalars["rollbacks"] == 1 and len(last.optimizer["guard.losses"].split()) == 8
    for steps in (7, 12):
        run = run_in(tmp_path / "b", steps=steps, **guard)
        train(replace(run, optim=replace(run.optim, decay_steps=12)), Placement())
    recomputed = read_manifest(list_checkpoints(tmp_path / "b/checkpoints")[-1])
    assert {n: r.xxh3 for n, r in recomputed.files.items()} == {
        n: r.xxh3 for n, r in last.files.items()
    } and recomputed.optimizer == last.optimizer


def test_a_step_that_stays_bad_goes_further_back_and_then_stops(tmp_path, gradients):
    gradients(lambda state, samples: float(state.optimizer.step) == 7, NAN)
    with pytest.raises(NumericalStop, match=r"step 8 is bad.* after 2 rollbacks"):
        train(run_in(tmp_path, policy="rollback", max_rollbacks=2), Placement())
    said = (tmp_path / "log.txt").read_text()
    assert "rolled back to" in said and said.index("step-00000006; the data") < said.index("step-00000003; the data")
    made = [read_manifest(p) for p in list_checkpoints(tmp_path / "checkpoints")]
    assert [m.step for m in made] == [3, 6] and made[1].parent == 3 and made[1].consumed_samples > 6 * 8, (
        "step 6 was done and saved anew"
    )


def test_nothing_to_roll_back_to(tmp_path, gradients):
    gradients(lambda state, samples: 11 in samples, NAN)
    with pytest.raises(NumericalStop, match="there is no checkpoint before step 2"):
        train(run_in(tmp_path, policy="rollback"), Placement())


def test_overflows_of_an_adapting_loss_scale_are_no_events(tmp_path):
    run = make_run(tmp_path, steps=6, precision="fp16", loss_scale=2.0**40, guard=GuardConfig(policy="stop"))
    train(run, Placement())
    assert rows_of(run)[-1]["skipped"] > 0


# --- replicas
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_any_flipped_bit_changes_the_hash(dtype):
    x = torch.randn(1000, dtype=torch.float64).to(dtype)
    before, pick = int(hash_bits(x)), random.Random(0)
    bits = x.view(torch.uint8)
    for _ in range(200):
        i, bit = pick.randrange(len(bits)), 1 << pick.randrange(8)
        bits[i] ^= bit
        assert int(hash_bits(x)) != before
        bits[i] ^= bit
    assert int(hash_bits(x)) == before


def flipped(rank: int, world: int, run, bad: int, what: str) -> str:
    state = make_state(run, rank, world)
    set_state(state)
    check_replicas(state)
    if rank == bad:
        tensor = (
            state.buffers.flat[0].storage.weight_kept if what == "weight" else state.optimizer.shards[0].values(what)
        )
        tensor.view(torch.uint8)[5] ^= 1
    try:
        check_replicas(state)
    except NumericalStop as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    "world, layout, bad, what, named",
    [
        (3, dict(sharding=1), 1, "weight", "rank 1 does not hold"),
        (4, dict(tp=2, sharding=0), 2, "m", "ranks 0, 2 do not hold"),
        (3, dict(sharding=0), 0, "v", "rank 0 does not hold"),
        (4, dict(pp=2, sharding=1), 3, "weight", "ranks 2, 3 do not hold"),
        (3, dict(sharding=1), 2, "m", "no error"),
        (3, dict(sharding=2), 1, "weight", "rank 1 does not hold"),
        (3, dict(sharding=3), 2, "weight", "no error"),
        (6, dict(sharding=3, shard_group=2), 3, "weight", "rank 3 does not hold"),
        (4, dict(sharding=2, shard_group=2), 2, "v", "ranks 0, 2 do not hold"),
        (4, dict(sharding=3, shard_group=2, shard_across="optimizer"), 1, "weight", "ranks 1, 3 do not hold"),
        (4, dict(sharding=2, shard_group=2, shard_across="optimizer"), 1, "m", "no error"),
    ],
)
def test_a_flipped_bit_names_the_rank(ranks, world, layout, bad, what, named):
    """Of three replicas the one that differs, of two both. What one rank holds alone has no replica."""
    found = ranks.run("tests.engine.test_guard:flipped", world, parity_run("llama", "bf16", **layout), bad, what)
    assert len(set(found)) == 1 and named in found[0], found
    if named != "no error":
        assert f"{what} of model." in found[0] and "silent corruption" in found[0]


def corrupted(placement, config) -> None:
    """A run in which a bit of rank 1's weights flips during step 3."""
    import phalanx.training.loop as loop

    real, steps = loop.train_step, 0

    def train_step(state, *rest):
        nonlocal steps
        result, steps = real(state, *rest), steps + 1
        if steps == 3 and placement.rank == 1:
            state.buffers.ready()
            state.buffers.flat[0].weight.view(torch.uint8)[7] ^= 16
        return result

    loop.train_step = train_step
    train(load_run(base=config), placement)


def test_a_run_stops_at_the_next_look(tmp_path):
    run = replace(
        make_run(tmp_path, global_batch=6, guard=GuardConfig(replicas_interval=2)), layout=LayoutConfig(sharding=0)
    )
    with pytest.raises(RankFailed, match="silent corruption: rank 1 does not hold what other replicas hold") as stop:
        start("tests.engine.test_guard:corrupted", {"config": to_dict(run)}, 3)
    assert stop.value.exit_code == 5 and [r["step"] for r in rows_of(run)] == [1, 2, 3]
