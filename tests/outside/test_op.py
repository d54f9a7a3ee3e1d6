"""An op from outside the package (tests/outside/kernel_example), in a file that no file of ours names: chosen where it
runs, switched off by train.plain_ops, in the table, compared by the test that compares ours, through the central test
and a checkpoint."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from phalanx.base import registry
from phalanx.base.registry import RegisteredTwice
from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.forecast.check import Facts, check
from phalanx.layout.config import LayoutConfig
from phalanx.models.registry import load_family
from phalanx.ops.op import BadImplementation, Implementation, Op, declare, implement, rows, table
from tests.harness import checkpoints, parity
from tests.harness.parity import SEQ, VOCAB
from tests.ops.test_kernels import DTYPES, compare, runs_here

OUTSIDE = Path(__file__).parent
if str(OUTSIDE) not in sys.path:
    sys.path.append(str(OUTSIDE))
from kernel_example.squared_relu import SQUARED_RELU, InPlace, squared_relu  # noqa: E402

from tests.outside.plain import PlainConfig  # noqa: E402

NAME = "kernel_example.family:FAMILY"
STEPS = 2
MODEL = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=42,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
LAYOUTS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2, sharding 3": {"sharding": 3}, "cp2": {"cp": 2}}


def run_of(plain_ops: tuple[str, ...] = (), **layout: object) -> Run:
    load_family(NAME)
    train = TrainConfig(
        steps=10, global_batch=8, micro_batch=1, seq_length=SEQ, precision="fp64", plain_ops=list(plain_ops)
    )
    model = PlainConfig(family=NAME, head_dim=8, **MODEL)
    return Run(model=model, train=train, layout=LayoutConfig(**layout), data=DataConfig(mock=True))


def counted(rank: int, world: int, plain_ops: tuple[str, ...], layout: dict) -> tuple[dict, int]:
    """What tests.harness.parity compares, and how often the implementation for CPUs ran."""
    with mock.patch.object(InPlace, "forward", side_effect=InPlace.forward) as forward:
        found = parity.run_layout(rank, world, run_of(plain_ops, **layout), STEPS, False)
    return found, forward.call_count


def saved(rank: int, world: int, layout: dict, path: Path) -> bool:
    return checkpoints.save_on_rank(rank, world, run_of(**layout), path, {})


def loaded(rank: int, world: int, layout: dict, path: Path) -> list:
    return checkpoints.load_on_rank(rank, world, run_of(**layout), path)


@pytest.fixture(scope="module")
def truth(ranks):
    """One process, by the reference."""
    [(alone, count)] = ranks.run("tests.outside.test_op:counted", 1, ("squared_relu",), {"sharding": 0})
    assert count == 0
    grads, weights = [parity.assemble([g]) for g in alone["grads"]], parity.assemble([alone["weights"]])
    return {**alone, "grads": grads, "weights": weights}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_changes_nothing(ranks, truth, name):
    found = ranks.run("tests.outside.test_op:counted", 2, (), LAYOUTS[name])
    assert all(count > 0 for _, count in found)
    parity.compare([result for result, _ in found], truth, STEPS)


def test_saved_under_one_layout_and_loaded_under_another(ranks, tmp_path):
    assert all(ranks.run("tests.outside.test_op:saved", 2, {"tp": 2}, tmp_path))
    (path,) = tmp_path.glob("step-*")
    for layout in ({"sharding": 3}, {"pp": 2}):
        assert ranks.run("tests.outside.test_op:loaded", 2, layout, path) == [[], []]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("made", ["triton", "in-place"])
@pytest.mark.parametrize("case", SQUARED_RELU.cases, ids=lambda case: case.name)
def test_it_is_compared_as_ours_are(case, made, dtype):
    assert {each.name for each in SQUARED_RELU.candidates if runs_here(each)} == {"triton", "in-place"}
    compare(SQUARED_RELU, case, made, dtype)


def test_the_comparison_sees_what_is_wrong():
    with mock.patch.object(InPlace, "backward", lambda dy, x: dy), pytest.raises(AssertionError):
        compare(SQUARED_RELU, SQUARED_RELU.cases[0], "in-place", torch.float64)


def test_it_is_chosen_and_switched_off():
    x = torch.ones(3)
    assert SQUARED_RELU.choose("auto", x) is InPlace and SQUARED_RELU.choose("optional", x) is not InPlace
    assert SQUARED_RELU.fast("plain", x) is None
    assert SQUARED_RELU.choose("plain", x).__name__ == "kernel_example.squared_relu"
    assert SQUARED_RELU.choose("auto", x.to("meta")) is SQUARED_RELU.reference
    facts = Facts(files=False)
    assert not check(run_of(("squared_relu",)), facts)
    [unknown] = check(run_of(("squared_rely",)), facts)
    assert unknown.field == "train.plain_ops" and "squared_relu" in unknown.rule


def test_it_is_in_the_table():
    assert SQUARED_RELU in table()
    [row] = (row for row in rows() if row[0] == "squared_relu")
    assert "in-place: CPUs" in row[2] and "triton: GPUs of compute capability 8.0" in row[2]


class Doubled:
    """A further implementation of an op that is there already."""

    @staticmethod
    def forward(x):
        return 2 * torch.relu(x).square()

    backward = InPlace.backward


def test_an_implementation_is_added_to_an_op_that_is_there(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", dict(registry._REGISTERED))
    op = declare(Op("example of an op", "", "kernel_example.squared_relu", ("forward", "backward")))
    x = torch.ones(3)
    assert op.fast("auto", x) is None
    made = Implementation("doubled", f"{__name__}:Doubled")
    implement(op, made)
    assert op.fast("auto", x) is Doubled and op.fast("plain", x) is None
    with pytest.raises(RegisteredTwice, match="example of an op/doubled"):
        implement(op, replace(made, source="elsewhere"))
    with pytest.raises(RegisteredTwice, match="squared_relu"):
        declare(replace(SQUARED_RELU, definition="elsewhere"))
    implement(op, Implementation("empty", f"{__name__}:Empty"))
    with pytest.raises(BadImplementation, match="has no forward, no backward; kernel_example.squared_relu has them"):
        op.choose("auto", x)
    implement(op, Implementation("nowhere", "tests.nowhere"))
    with pytest.raises(BadImplementation, match="tests.nowhere cannot be imported"):
        op.choose("auto", x)
    assert torch.equal(squared_relu(x), x)


class Empty:
    """It has nothing that the op asks for."""
