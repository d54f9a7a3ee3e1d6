"""The batch-invariant matmul: by its kernel in Triton's interpreter against the reference, and what its order of
additions promises of the reference, bit by bit."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial

import pytest
import torch

from phalanx.ops.dense.activation import GatedByExp, gelu_by_formula
from phalanx.ops.dense.gate import SWIGLU
from phalanx.ops.dense.invariant import PARTS, parts_of_rank, product
from phalanx.ops.dense.relu2 import relu2
from phalanx.ops.in_order import sum_in_order, sum_parts
from phalanx.ops.op import NotInvariant
from tests.ops.test_ops import normal


def test_an_element_does_not_depend_on_what_is_computed_beside_it():
    """Rows and outputs alone, elsewhere, among others; the parts of a contraction on as many ranks as divide them."""
    x, weight = normal(37, 48, seed=1, dtype=torch.float32), normal(29, 48, seed=2, dtype=torch.float32)
    for parts in (1, PARTS):
        whole = product(x, weight, parts)
        for rows, outputs in ((slice(3, 4), slice(0, 29)), (slice(20, 37), slice(7, 9)), (slice(0, 1), slice(28, 29))):
            assert torch.equal(product(x[rows], weight[outputs], parts), whole[rows, outputs])
    for ranks in (2, 4, 8):
        halves = zip(x.chunk(ranks, 1), weight.chunk(ranks, 1))
        sums = torch.stack([product(a, b, parts_of_rank(48, ranks)) for a, b in halves])
        assert torch.equal(sum_parts(sums), whole)
    assert not torch.equal(product(x, weight, 1), whole)  # another order has other bits


def test_sums_do_not_depend_on_the_zeros_behind_them():
    x = normal(5, 13, seed=3, dtype=torch.float32)
    assert torch.equal(sum_in_order(torch.nn.functional.pad(x, (0, 100))), sum_in_order(x))
    (zero,) = sum_in_order(torch.tensor([[-0.0]]))
    assert not zero.signbit()


@pytest.mark.parametrize("inputs, tp", [(42, 1), (48, 3), (48, 16)])
def test_what_cannot_be_cut_is_refused(inputs, tp):
    with pytest.raises(NotInvariant, match=f"{inputs} features on {tp} ranks"):
        parts_of_rank(inputs, tp)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "rows, outputs, inputs, parts",
    [(3, 70, 136, 1), (3, 20, 136, 8), (70, 33, 80, 8), (9, 5, 512, 4), (65, 130, 64, 1), (5, 9, 20, 2)],
)
def test_the_kernel_computes_the_reference(monkeypatch, dtype, rows, outputs, inputs, parts):
    """Parts on programs of their own, and all on one; loads of tiles, and of elements where rows are no multiple of 16
    bytes or parts none of a step."""
    kernel = importlib.import_module("phalanx.ops.dense.invariant_kernel")
    x, weight = normal(rows, inputs, seed=1, dtype=dtype), normal(outputs, inputs, seed=2, dtype=dtype)
    bias = normal(outputs, seed=3, dtype=dtype) if parts == 1 else None
    truth = product(x.double(), weight.double(), parts, bias=None if bias is None else bias.double())
    found = []
    tiles = kernel.tiles_of(rows, outputs, inputs, parts, dtype)
    for together in (False, True):
        monkeypatch.setattr(kernel, "tiles_of", lambda *_, t=together: replace(tiles, together=t))
        found.append(kernel.product(x, weight, parts, bias=bias))
        assert found[-1].dtype == torch.float32
        assert (found[-1] - truth).abs().max() <= 2e-6 * truth.abs().max()
    rounded = kernel.product(x, weight, parts, dtype, bias)
    assert rounded.dtype == dtype
    if dtype != torch.bfloat16:  # the interpreter cuts bf16 off
        assert torch.equal(rounded, found[-1].to(dtype))
    assert product(x, weight, parts, dtype, bias).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_activations_have_the_same_bits_in_every_place(dtype):
    """Rows that fill no vector of the processor, alone and among others."""
    x = normal(200, 26, seed=4, dtype=dtype)
    gated = partial(GatedByExp.gated_forward, gate=SWIGLU)
    for call in (gelu_by_formula, partial(gelu_by_formula, exact=True), gated, partial(relu2, kernels="invariant")):
        assert torch.equal(torch.cat([call(rows) for rows in x.split(1)]), call(x))
