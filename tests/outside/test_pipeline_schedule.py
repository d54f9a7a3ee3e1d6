"""Pipeline schedules from outside the package, in one file that no file of ours names (outside/zero_bubble/orders.py):
they compute what one process computes, and are planned, forecast and drawn; and what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.base.placement import Placement
from phalanx.config.read import load_run, read
from phalanx.forecast.check import Facts, check
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import rank_uses
from phalanx.layout.config import LayoutConfig
from phalanx.schedule.generators import generate
from phalanx.schedule.lower import lower
from phalanx.schedule.simulate import Costs, simulate
from phalanx.training.main import train
from tests.harness.parity import base_run, compare, truth_of
from tests.harness.sample import rest_in_soak
from tests.training.test_loop import make_run

OUTSIDE = Path(__file__).parent
if str(OUTSIDE) not in sys.path:
    sys.path.append(str(OUTSIDE))
ZB_H2, LATE = "zero_bubble.orders:zb_h2", "zero_bubble.orders:late"
STEPS = 2
LAYOUTS = {
    "pp2": ("llama-tied", 2, dict(pp=2, schedule=ZB_H2)),
    "pp4, a segment per block": ("llama", 4, dict(pp=4, schedule=ZB_H2, bucket_mb=0)),
    "pp2 dp2, sharding 3, a segment per block": ("llama", 4, dict(pp=2, schedule=ZB_H2, sharding=3, bucket_mb=0)),
    "pp2 tp2": ("mixtral", 4, dict(pp=2, tp=2, ep=2, schedule=LATE)),
    "pp2 x 2 virtual stages": ("gpt2", 2, dict(pp=2, virtual_stages=2, schedule=LATE, bucket_mb=0)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_changes_nothing(ranks, name):
    model, world, layout = LAYOUTS[name]
    run = replace(base_run(model, 8 if world == 4 else 5), layout=LayoutConfig(**layout))
    compare(
        ranks.run("tests.harness.parity:run_layout", world, run, STEPS, False),
        truth_of(ranks, run, STEPS, False),
        STEPS,
    )


@pytest.mark.parametrize("counts", rest_in_soak((range(1, 20, 6), range(1, 20)), (range(1, 20, 6),)), ids=len)
def test_of_any_shape_the_simulator_proves_it(counts):
    """And its memory: 2 (p - r) - 1 micro-batches in flight and 2 r whose weight gradients wait."""
    for pp in range(2, 7):
        for m in counts:
            trace = simulate(lower(generate(ZB_H2, pp, 1, m)), Costs.uniform(pp, 1.0, 2.0))
            assert max(trace.peak_live) == min(m, 2 * pp - 1)
            assert trace.bubble < simulate(lower(generate("1f1b", pp, 1, m)), Costs.uniform(pp, 1.0, 2.0)).bubble
            for v in (1, 2, 3):
                simulate(lower(generate(LATE, pp, v, m)))


def test_a_plan_counts_what_waits():
    run = replace(base_run("llama", 8, precision="bf16"), layout=LayoutConfig(pp=2, schedule=ZB_H2))
    plan = make_plan(run, 2)
    uses, trace = rank_uses(plan, 8)
    assert trace.program.schedule.name == ZB_H2 and trace.peak_pending == (1, 3)
    assert 0 < uses[0].pending < uses[1].pending < uses[1].memory["activations"] + uses[1].memory["working"]


def test_a_run_resumes_by_its_path(tmp_path):
    """The resolved config finds it in another process."""
    run = make_run(tmp_path / "run", steps=2)
    run = replace(run, layout=replace(run.layout, pp=1, schedule="auto"))
    train(run, Placement())
    loaded = load_run(run.dir + "/config.yaml", ["layout.pp=2", f"layout.schedule={ZB_H2}"])
    assert loaded.layout.schedule == ZB_H2
    generate(ZB_H2, 2, 1, 1)  # registers its short name
    assert replace(loaded, layout=replace(loaded.layout, schedule="zb_h2")).layout.schedule == ZB_H2


SMALL = ["model.family=llama", "model.vocab_size=64", "model.hidden_size=16", "model.intermediate_size=32"]
SMALL += ["model.num_hidden_layers=2", "model.num_attention_heads=2", "train.steps=8", "train.global_batch=4"]
SMALL += ["train.micro_batch=1", "train.seq_length=8", "data.mock=true", "layout.pp=2"]


@pytest.mark.parametrize(
    "overrides, field, rule, valid",
    [
        ("layout.schedule=zb_h3", "layout.schedule", 'must be one of "gpipe", "1f1b", "interleaved", "zb_h1"', "zb_h1"),
        ("layout.schedule=zero_bubble.orders:zb_h", "layout.schedule", "leads nowhere", ZB_H2),
        ("layout.schedule=zero_bubble.orders:plain", "layout.schedule", "put @px.pipeline_schedule(NAME)", None),
        ("layout.schedule=zero_bubble.orders:undeclared", "layout.schedule", "splits_backward=True", "auto"),
        ("layout.schedule=zero_bubble.orders:forgetful", "layout.schedule", "never runs WeightGrad", "auto"),
        ("layout.schedule=zero_bubble.orders:elsewhere", "layout.schedule", "rank 1 has stages [1]", "auto"),
        ("layout.schedule=zero_bubble.orders:broken", "layout.schedule", "cannot be made: ZeroDivisionError", "auto"),
        (f"layout.schedule={LATE} train.deterministic=true", "layout.schedule", "in their order", "auto"),
        (f"layout.schedule={ZB_H2} layout.virtual_stages=2", "layout.schedule", "runs one stage per rank", "auto"),
        (f"layout.schedule={ZB_H2} train.cuda_graphs=on", "train.cuda_graphs", "excludes a schedule that spl", "off"),
        (f"layout.schedule={ZB_H2} layout.pp=1", "layout.schedule", "no effect without pp >= 2", "auto"),
    ],
)
def test_a_wrong_schedule_is_refused(overrides, field, rule, valid):
    loaded = read(None, [*SMALL, *overrides.split()])
    world = 1 if "layout.pp=1" in overrides else 2
    found = {p.field: p for p in loaded.problems or check(loaded.run, Facts(world))}
    assert list(found) == [field]
    assert rule in found[field].rule and (valid is None or valid in found[field].valid)


def test_code_named_by_a_checkpoint_is_not_imported():
    found = read(None, SMALL, {"layout": {"schedule": "evil.module:NAME"}}, base_from="a checkpoint").problems
    assert [p.field for p in found] == ["layout.schedule"] and "imported only if you name it" in found[0].rule
