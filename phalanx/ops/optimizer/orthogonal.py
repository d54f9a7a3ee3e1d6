"""Orthogonalisation by polynomials: matrices U S V^T become nearly U V^T, by odd polynomials a x + b x^3 + c x^5 of
their singular values, which matmuls compute.

Directly, an iteration is X <- (a I + b G + c G^2) X with G = X X^T, of the shorter side. In Gram form several
iterations work on G alone, which is small for oblong matrices: with P = a I + b G + c G^2, the next G is P G P, and the
P are multiplied up before X is. All of these commute and are symmetric, so only halves are computed (ops.optimizer.
symmetric). Rounding makes small eigenvalues of G negative in time, which the polynomials then blow up: after
TOGETHER iterations X is brought up to date and G is computed anew. In 16 bits everything is fp16, whose numbers have
three more bits than bf16's and suffice, since no singular value is larger than 1.3: an eighth of the error, with a on
the diagonal of P instead of a X added to P X in a further pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.ops.op import Kernels
from phalanx.ops.optimizer.directions import over_norms
from phalanx.ops.optimizer.symmetric import SymmetricTerms, symmetric_matmul

Polynomial = tuple[float, float, float]
"""a, b and c."""

LEAST = 1e-7  # a matrix of zeros is divided by this
TOGETHER = 3
"""Iterations in Gram form between two products with X. In fp16, five overflow where singular values span a factor of a
thousand."""


def orthogonalized(
    matrices: Tensor, polynomials: Sequence[Polynomial], narrow: bool, kernels: Kernels = "auto", scale: float = 1.0
) -> Tensor:
    """Matrices (B, rows, columns) with singular values near `scale`. Each polynomial is applied once, in this order.
    narrow: with products of 16 bits (`products_in`); the result is in their dtype."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    wide = torch.promote_types(matrices.dtype, torch.float32)
    norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), dtype=wide).clamp(min=LEAST)
    x = over_norms(matrices, norms, products_in(matrices, narrow), kernels)
    together = together_of(*sorted(matrices.shape[-2:]))
    for first in range(0, len(polynomials), together):
        flat = x.mT if tall else x  # (B, short, long), however it lies in memory: nothing is transposed
        gram = symmetric_matmul(flat, flat, kernels=kernels)
        by = scale if first + together >= len(polynomials) else 1.0
        p = _factor(gram, polynomials[first : first + together], by, kernels)
        x = torch.bmm(x, p) if tall else torch.bmm(p, x)
    return x


def products_in(matrices: Tensor, narrow: bool) -> torch.dtype:
    """Dtype of the products. On a CPU, where matmuls in fp16 take a hundred times as long, narrow ones have fp32."""
    if not narrow:
        return matrices.dtype
    return torch.promote_types(matrices.dtype, torch.float32) if matrices.device.type == "cpu" else torch.float16


def together_of(short: int, long: int) -> int:
    """How many iterations a matrix with these sides takes in Gram form at once; 1: directly."""
    return TOGETHER if long > short else 1


def _factor(gram: Tensor, polynomials: Sequence[Polynomial], scale: float, kernels: Kernels) -> Tensor:
    """P, where P x is `scale` times x after these iterations, the first of which has this Gram matrix."""
    factor: Tensor | None = None
    for number, (a, b, c) in enumerate(polynomials, 1):
        by = scale if number == len(polynomials) else 1.0
        p = symmetric_matmul(gram, gram, gram, SymmetricTerms(by * c, by * b, by * a), kernels)
        if number < len(polynomials):
            gram = symmetric_matmul(p, symmetric_matmul(p, gram, kernels=kernels), kernels=kernels)
        factor = p if factor is None else symmetric_matmul(p, factor, kernels=kernels)
    return factor  # type: ignore[return-value]


def flops(rows: int, columns: int, iterations: int) -> float:
    """Of one matrix, where symmetric products take half."""
    short, long = min(rows, columns), max(rows, columns)
    together = together_of(short, long)
    found = 0.0
    for first in range(0, iterations, together):
        count = min(together, iterations - first)
        found += 3.0 * short**2 * long + (4 * count - 3) * short**3
    return found
