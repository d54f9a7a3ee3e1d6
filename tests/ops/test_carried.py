"""What outputs of a scan read of a state before it, by the reference and by the kernels in Triton's interpreter,
against the formula in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.ops import op as ops
from phalanx.ops.scan.carried import SEGMENT, carried, carried_output
from phalanx.ops.scan.scan import ScanInputs, scan
from tests.ops.test_ops import normal
from tests.ops.test_scan import inputs

TRITON = pytest.mark.skipif(not ops.has_triton(), reason="needs triton")
KERNELS = ["plain", pytest.param("triton", marks=TRITON)]
NAMES = ("y", "dt", "a", "c", "initial")


def formula(y: Tensor, dt: Tensor, a: Tensor, c: Tensor, initial: Tensor, numbers: Tensor | None) -> Tensor:
    """Head by head, a state that no token adds to."""
    each, made = y.shape[2] // c.shape[2], []
    for head in range(y.shape[2]):
        left = (dt[:, :, head] * a[head]).cumsum(1).exp()
        left = left if numbers is None else torch.where(numbers == numbers[:, :1], left, 0)
        read = c[:, :, head // each] @ initial[:, head].transpose(1, 2)
        made.append(y[:, :, head] + left.unsqueeze(-1) * read)
    return torch.stack(made, 2)


def given_of(rows: int, length: int, decay: float) -> list[Tensor]:
    found = inputs(rows, length, decay)
    return [found["x" if name == "y" else name] for name in NAMES]


def documents(rows: int, length: int) -> Tensor:
    """Of the first row all tokens belong to the first one, of the next half of them, then a third ..."""
    return (torch.arange(1, rows + 1).unsqueeze(1) * torch.arange(length)) // length


def output_of(given: list[Tensor], numbers: Tensor | None, kernels: ops.Kernels) -> Tensor:
    y, dt, a, c, initial = given
    return carried_output(y.clone(), ScanInputs(y, dt, a, c, c, numbers=numbers), initial, kernels)


def compared(given: list[Tensor], numbers: Tensor | None, kernels: ops.Kernels) -> None:
    made, truth = output_of(given, numbers, kernels), formula(*given, numbers)
    above = normal(*truth.shape, seed=50)
    found, wanted = (torch.autograd.grad(out, given, above) for out in (made, truth))
    for name, mine, theirs in zip(("output", *NAMES), (made, *found), (truth, *wanted), strict=True):
        assert (mine - theirs).abs().max() <= 1e-11 * theirs.abs().max().clamp(min=1.0), name


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", ["whole rows", "documents"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 257])
def test_equals_its_formula(length, kind, kernels):
    compared(given_of(3, length, 0.05), documents(3, length) if kind == "documents" else None, kernels)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("decay", [1e-9, 3.0, 1e3], ids=["keeps all", "forgets", "forgets at once"])
def test_extreme_decays(decay, kernels):
    compared(given_of(2, 257, decay), documents(2, 257), kernels)


@TRITON
def test_gradients_of_states_over_several_segments():
    """A longer row than one program adds up."""
    compared([t.detach().requires_grad_() for t in given_of(1, SEGMENT + 70, 1e-4)], None, "triton")


@TRITON
def test_where_nothing_is_left_nothing_is_read():
    """NaN in what would be read there changes no bit of the outputs, and of the gradients none but its own."""
    y, c, initial = normal(1, 200, 4, 3), normal(1, 200, 2, 5, seed=1), normal(1, 4, 3, 5, seed=2)
    reach = torch.full((1, 4, 200), -torch.inf, dtype=y.dtype)
    reach[:, :, :60] = -F.softplus(normal(1, 4, 60, seed=3))
    found = []
    for dead in (0.0, torch.nan):
        above = normal(1, 200, 4, 3, seed=4)
        above[:, 64:], c[:, 64:] = dead, dead
        leaves = [t.clone().requires_grad_() for t in (y, reach, c, initial)]
        begun = leaves[0].clone()
        made = carried(begun, *leaves[1:], "triton")
        assert made.data_ptr() == begun.data_ptr()
        found.append((made.detach(), *torch.autograd.grad(made, leaves[1:], above)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other) and one.isfinite().all()
    assert torch.equal(made[:, 64:], y[:, 64:]) and not torch.equal(made[:, :60], y[:, :60])
    assert found[0][1][..., :60].all() and found[0][2][:, :60].all() and not found[0][2][:, 60:].any()


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_is_not_a_number_stays_known(kernels):
    """A step of NaN must not be taken for a state that is forgotten."""
    given = [t.detach() for t in given_of(1, 130, 0.1)]
    given[1][:, 70, 1] = torch.nan
    made = output_of(given, None, kernels)
    assert made[:, 70:, 1].isnan().all() and made.isnan().sum() == made[:, 70:, 1].numel()


@pytest.mark.parametrize("kernels", KERNELS)
def test_with_a_scan_that_began_without_it(kernels):
    """It is the scan that began with it, gradients included, for views of longer rows."""
    given = inputs(2, 150, 0.03)
    rows, numbers = slice(30, 140), documents(2, 110)
    x, dt, a, b, c, d, initial = given.values()
    piece = ScanInputs(x[:, rows], dt[:, rows], a, b[:, rows], c[:, rows], d, numbers)
    found = []
    for made in (
        scan(piece._replace(initial=initial), "plain")[0],
        carried_output(scan(piece, kernels)[0], piece, initial, kernels),
    ):
        whole = torch.cat((x[:, :30], made, x[:, 140:]), 1)
        found.append((made, *torch.autograd.grad(whole, list(given.values()), normal(*whole.shape, seed=9))))
    torch.testing.assert_close(found[0], found[1], rtol=1e-11, atol=1e-11)
