"""Scans, the delta rule and the convolution with more sequences than a CUDA grid has programs along its second and
third axes: as rows of one token, and as documents of one token in one row."""

from __future__ import annotations

from builtins import range as whole_range
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.ops.delta.delta import DeltaInputs, delta
from phalanx.ops.op import Kernels, has_triton
from phalanx.ops.scan.conv1d import conv1d
from phalanx.ops.scan.rows import TokenRows
from phalanx.ops.scan.scan import ScanInputs, scan
from tests.ops import test_delta, test_scan
from tests.ops.test_ops import normal

MANY, AXIS = 65_537, 65_535  # sequences; programs along the second and third axes of a grid
TAPS, CHANNELS = 3, 5

Made = tuple[Tensor, ...]
Op = Callable[[dict[str, Tensor], Tensor | None, Kernels], Made]


def scanned(given: dict[str, Tensor], numbers: Tensor | None, kernels: Kernels) -> Made:
    return scan(ScanInputs(**given, numbers=numbers), kernels)


def corrected(given: dict[str, Tensor], numbers: Tensor | None, kernels: Kernels) -> Made:
    return delta(DeltaInputs(**given, numbers=numbers, scale=test_delta.SCALE, normalize=True), kernels)


def convolved(given: dict[str, Tensor], numbers: Tensor | None, kernels: Kernels) -> Made:
    rows = TokenRows(numbers, given["before"])
    return (conv1d(given["x"], given["weight"], given["bias"], rows, True, kernels),)


def scan_truth(given: dict[str, Tensor]) -> Made:
    return test_scan.recurrence(*(given[name] for name in test_scan.NAMES[:6]), None, given["initial"])


def delta_truth(given: dict[str, Tensor]) -> Made:
    return test_delta.recurrence(DeltaInputs(**given, scale=test_delta.SCALE, normalize=True))


def conv_truth(given: dict[str, Tensor]) -> Made:
    joined = torch.cat((given["before"], given["x"]), 1).transpose(1, 2)
    made = F.conv1d(joined, given["weight"], given["bias"], groups=CHANNELS)
    return (F.silu(made.transpose(1, 2)),)


def delta_inputs(by_feature: bool) -> dict[str, Tensor]:
    made = test_delta.inputs(MANY, 1, by_feature, normalize=True)
    return {name: getattr(made, name) for name in test_delta.NAMES}


def conv_inputs() -> dict[str, Tensor]:
    shapes = {"x": (MANY, 1, CHANNELS), "weight": (CHANNELS, 1, TAPS), "bias": (CHANNELS,)}
    shapes["before"] = (MANY, TAPS - 1, CHANNELS)
    return {name: normal(*shape, seed=i).requires_grad_() for i, (name, shape) in enumerate(shapes.items())}


CASES: dict[str, tuple[Op, Callable[[dict[str, Tensor]], Made], Callable[[], dict[str, Tensor]]]] = {
    "scan": (scanned, scan_truth, lambda: test_scan.inputs(MANY, 1)),
    "delta by head": (corrected, delta_truth, lambda: delta_inputs(False)),
    "delta by feature": (corrected, delta_truth, lambda: delta_inputs(True)),
    "conv1d": (convolved, conv_truth, conv_inputs),
}
OF_ROWS = {"initial", "before"}  # what a row of documents has only one of


def of_tokens(x: Tensor) -> bool:
    """Whether it has a row for each sequence."""
    return x.shape[0] == MANY


def with_grads(made: Made, given: dict[str, Tensor]) -> list[Tensor]:
    """What an op made, and the gradients of its inputs, with one gradient from above for all rows."""
    above = [normal(*y.shape[1:], seed=50 + i).expand_as(y) for i, y in enumerate(made)]
    return [*(y.detach() for y in made), *torch.autograd.grad(made, list(given.values()), above)]


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_rows_of_one_token(case):
    """Truth: the definition in float64, outputs, last states and every gradient."""
    op, truth, make = CASES[case]
    given = make()
    found, wanted = with_grads(op(given, None, "plain"), given), with_grads(truth(given), given)
    for name, mine, theirs in zip((*range(len(found) - len(given)), *given), found, wanted, strict=True):
        assert (mine - theirs).abs().max() <= 1e-10 * theirs.abs().max().clamp(min=1.0), name


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_documents_of_one_token(case):
    """In one row. Truth: the same tokens as rows that begin with nothing."""
    op, truth, make = CASES[case]
    given = {name: torch.zeros_like(x).requires_grad_() if name in OF_ROWS else x for name, x in make().items()}
    row = {}
    for name, x in given.items():
        x = x[:1] if name in OF_ROWS else x.transpose(0, 1) if of_tokens(x) else x
        row[name] = x.detach().clone().requires_grad_()
    found = op(row, torch.arange(MANY)[None], "plain")[0]
    wanted = truth(given)[0]
    above = normal(*wanted.shape)
    assert (found.transpose(0, 1) - wanted).abs().max() <= 1e-10 * wanted.abs().max()
    names = [name for name in given if name not in OF_ROWS]
    mine = torch.autograd.grad(found, [row[name] for name in names], above.transpose(0, 1))
    theirs = torch.autograd.grad(wanted, [given[name] for name in names], above)
    for name, a, b in zip(names, mine, theirs, strict=True):
        a = a.transpose(0, 1) if of_tokens(b) else a
        assert (a - b).abs().max() <= 1e-10 * b.abs().max().clamp(min=1.0), name


@pytest.fixture
def last_of_many(monkeypatch) -> list[tuple[int, ...]]:
    """The interpreter runs the last of so many programs along an axis alone. The grids that were launched."""
    from triton.runtime import interpreter

    grids, launch = list[tuple[int, ...]](), interpreter.GridExecutor.__call__

    def launched(self: Any, *call: Any, **more: Any) -> Any:
        grids.append(tuple(self.grid))
        return launch(self, *call, **more)

    def last(*bounds: int) -> range:
        return whole_range(bounds[0] - 1, bounds[0]) if bounds[0] >= MANY else whole_range(*bounds)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    monkeypatch.setattr(interpreter, "range", last, raising=False)
    return grids


@pytest.mark.skipif(not has_triton(), reason="needs triton")
@pytest.mark.parametrize("case", CASES)
def test_kernels_of_the_last_row(case, last_of_many):
    """CUDA takes the grids; and the last sequence, of which alone programs run, is at the right place of every tensor.
    Truth: the definition in float64."""
    op, truth, make = CASES[case]
    given = {name: x.detach().requires_grad_() for name, x in make().items()}
    found = with_grads(op(given, None, "triton"), given)
    assert last_of_many and all(size <= AXIS for _, *others in last_of_many for size in others)
    assert max(x for x, *_ in last_of_many) >= MANY
    row = {name: (x[-1:] if of_tokens(x) else x).detach().requires_grad_() for name, x in given.items()}
    wanted, compared = with_grads(truth(row), row), 0
    for mine, theirs in zip(found, wanted, strict=True):
        if of_tokens(mine):
            assert (mine[-1] - theirs[0]).abs().max() <= 1e-10 * theirs.abs().max().clamp(min=1.0)
            compared += 1
    assert compared >= 3
