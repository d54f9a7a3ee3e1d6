"""Rows of tokens with a label, against boolean indexing."""

from __future__ import annotations

import pytest
import torch

from phalanx.ops.dense.labelled_rows import labelled_rows
from phalanx.sequence.batch import IGNORE


@pytest.mark.parametrize("count, rows", [(0, 3), (1, 1), (5, 5), (5, 9), (12, 12), (12, 20)])
def test_rows_with_a_label_come_in_their_order(count, rows):
    """Their gradients go back to where they came from; what fills the room has neither a label nor a gradient."""
    draw = torch.Generator().manual_seed(count)
    x = torch.randn(12, 3, generator=draw, dtype=torch.float64, requires_grad=True)
    labels = torch.full((12,), IGNORE)
    labels[torch.randperm(12, generator=draw)[:count]] = torch.arange(count)
    has = labels != IGNORE
    found, chosen = labelled_rows(x, labels, rows)
    assert found.shape == (rows, 3) and torch.equal(found[:count], x[has])
    assert torch.equal(chosen[:count], labels[has]) and (chosen[count:] == IGNORE).all()
    upstream = torch.randn(rows, 3, generator=draw, dtype=torch.float64)
    found.backward(upstream)
    assert torch.equal(x.grad[has], upstream[:count]) and not x.grad[~has].any()
