"""Batch-invariant matmuls: the bits of an output depend on its row of the input and on its row of the weight alone, not
on the number of rows, on the place among them, or on how the matrices are sharded over tp.

Linears that are sharded by their inputs add over ranks. Their contraction is cut into PARTS parts of equal length, each
added up on its own, and the parts are added in one binary tree. At every tp that divides PARTS a rank holds a subtree.
What crosses is in fp32 (fp64 of fp64), and the sum is rounded once, after the last addition, at every tp alike.
He and Thinking Machines Lab, "Defeating nondeterminism in LLM inference", 2025.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.ops.in_order import sum_parts
from phalanx.ops.op import NotInvariant

PARTS = 8
ELEMENTS = 2**20
"""The reference adds up so many numbers at once, to stay in the processor's caches."""


def product(
    x: Tensor, weight: Tensor, parts: int, dtype: torch.dtype | None = None, bias: Tensor | None = None
) -> Tensor:
    """x (T, K), weight (N, K), bias (N,) of one part -> (T, N) in `dtype`, or else in fp32 (fp64 of fp64), K being cut
    into `parts` parts. Products and sums are taken element by element, so nothing depends on shapes: the library's
    matmuls choose their order by them."""
    wide, outputs, length = torch.promote_types(x.dtype, torch.float32), len(weight), x.shape[1] // parts
    w = weight.to(wide).view(outputs, parts, length).permute(2, 1, 0).contiguous()
    out = x.new_empty(len(x), outputs, dtype=dtype or wide)
    step = max(1, ELEMENTS // max(1, parts * outputs))
    for first in range(0, len(x), step):
        rows = x[first : first + step].to(wide).reshape(-1, parts, length).permute(2, 1, 0).unsqueeze(-1)
        sums = w.new_zeros(parts, rows.shape[2], outputs)
        for of_x, of_w in zip(rows, w):
            sums += of_x * of_w.unsqueeze(1)
        total = sum_parts(sums)
        out[first : first + step] = total if bias is None else total + bias
    return out


class InvariantMatmuls:
    """As ops.dense.matmul.PlainMatmuls, with `product` for the arithmetic."""

    product = staticmethod(product)

    @classmethod
    def gathered(cls, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis) -> Tensor:
        return cls.product(tp.all_gather(x).wait(), weight, 1, x.dtype, bias)

    @classmethod
    def scattered(cls, h: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis) -> Tensor:
        parts = parts_of_rank(h.shape[1] * tp.size, tp.size)
        sums = tp.all_to_all(cls.product(h, weight, parts, h.dtype if parts == PARTS else None))
        y = sum_parts(sums.view(tp.size, -1, len(weight))).to(h.dtype)
        return y if bias is None else y + bias


def parts_of_rank(inputs: int, tp: int) -> int:
    """How many of the parts of a contraction over `inputs` features each of tp ranks has. NotInvariant if ranks or
    features cannot be divided so."""
    if PARTS % tp or inputs % PARTS:
        rule = f"a sum over {inputs} features on {tp} ranks cannot be cut into {PARTS} equal parts"
        raise NotInvariant(f"{rule}, as train.batch_invariant does: both must divide, or be divided by, {PARTS}")
    return PARTS // tp
