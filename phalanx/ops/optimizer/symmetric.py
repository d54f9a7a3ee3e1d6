"""Batched matmuls whose results are known to be symmetric: only one half is computed, the other is its mirror image."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.ops.op import Case, Kernels, Op, triton


@dataclass(frozen=True)
class SymmetricTiles:
    """How the Triton kernel is cut: the result into tiles of (side, side), the sum into steps of `k`; stages of its
    pipeline, warps of a program. tall: stages where tiles are twice as tall, as those of products are to which nothing
    is added (an H200 has others faster in low ones) and that have such tiles for all processors; 0: there are no such
    tiles."""

    side: int
    k: int
    stages: int
    warps: int
    tall: int = 0


TILES = (
    SymmetricTiles(128, 64, 3, 8, 4),
    SymmetricTiles(128, 64, 3, 8),
    SymmetricTiles(128, 32, 4, 8),
    SymmetricTiles(64, 64, 3, 4),
    SymmetricTiles(64, 32, 2, 4),
    SymmetricTiles(32, 32, 2, 4),
)
"""The preferred ones first. phalanx.ops.proof decides which is taken."""


@dataclass(frozen=True)
class SymmetricTerms:
    """What is added up: alpha a b^T + beta c + diagonal I."""

    alpha: float = 1.0
    beta: float = 1.0
    diagonal: float = 0.0


PRODUCT = SymmetricTerms()


def symmetric_matmul(
    a: Tensor, b: Tensor, c: Tensor | None = None, terms: SymmetricTerms = PRODUCT, kernels: Kernels = "auto"
) -> Tensor:
    """alpha a b^T + beta c + diagonal I, (B, M, M), for a and b (B, M, K) and symmetric c (B, M, M), where a b^T is
    symmetric: b is a, or both are polynomials of one symmetric matrix. Sums are in fp32 or wider; the result is in a's
    dtype. Of a and b either K or M may be what is contiguous."""
    return SYMMETRIC.choose(kernels, a).matmul(a, b, c, terms)  # type: ignore[no-any-return]


def matmul(a: Tensor, b: Tensor, c: Tensor | None, terms: SymmetricTerms) -> Tensor:
    """As `symmetric_matmul`, by torch: both halves are computed, and the diagonal is added to what is rounded."""
    if c is not None:
        found = torch.baddbmm(c, a, b.mT, beta=terms.beta, alpha=terms.alpha)
    else:
        found = torch.bmm(a, b.mT)
        if terms.alpha != 1.0:
            found.mul_(terms.alpha)
    if terms.diagonal:
        diagonal, wide = found.diagonal(dim1=-2, dim2=-1), torch.promote_types(found.dtype, torch.float32)
        diagonal.copy_(diagonal.to(wide) + terms.diagonal)  # on CPUs `add_` rounds what it adds to 16 bits
    return found


def _gram(a: Tensor, kernels: Kernels) -> Tensor:
    a = a.detach()
    return symmetric_matmul(a, a, terms=SymmetricTerms(0.5), kernels=kernels)


def _gram_and_diagonal(a: Tensor, kernels: Kernels) -> Tensor:
    a = a.detach()
    return symmetric_matmul(a, a, terms=SymmetricTerms(0.5, diagonal=37.0), kernels=kernels)


def _square(a: Tensor, kernels: Kernels) -> Tensor:
    """A symmetric matrix, its square, and more of it."""
    a = a.detach()
    a = (a + a.mT).mul_(0.5)
    return symmetric_matmul(a, a, a, SymmetricTerms(-4.775, 3.4445), kernels)


def _polynomial(a: Tensor, kernels: Kernels) -> Tensor:
    """The same, and the identity."""
    a = a.detach()
    a = (a + a.mT).mul_(0.5)
    return symmetric_matmul(a, a, a, SymmetricTerms(-4.775, 3.4445, 37.0), kernels)


def _gram_of_columns(a: Tensor, kernels: Kernels) -> Tensor:
    return _gram(a.mT, kernels)


NARROW = (torch.bfloat16,)
WIDE = (torch.float16, torch.float32, torch.float64)  # interpreted, tl.dot multiplies bf16 as integers
SYMMETRIC = Op(
    "symmetric",
    "Batched matmuls with symmetric results",
    __name__,
    ("matmul",),
    (
        triton(
            "phalanx.ops.optimizer.symmetric_kernel:SymmetricProducts",
            dtypes=(torch.bfloat16, torch.float16),  # of others torch's are as fast: tensor cores are for these two
            tunings=TILES,
            cost="Muon computes both halves of symmetric products",
        ),
    ),
    cases=(
        Case("gram matrix", _gram, ((2, 70, 136),), dtypes=WIDE),
        Case("square of a symmetric matrix", _square, ((1, 144, 144),), dtypes=WIDE),
        Case("polynomial of a symmetric matrix", _polynomial, ((2, 77, 77),), dtypes=WIDE),
        Case("gram matrix of columns", _gram_of_columns, ((2, 136, 328),), dtypes=WIDE),
        Case("gram matrices of columns, odd sizes", _gram_of_columns, ((2, 51, 37),), dtypes=WIDE),
        Case("gram matrices, odd sizes", _gram, ((3, 37, 51),), dtypes=WIDE),
        Case("gram matrix in tall tiles", _gram, ((1, 3100, 48),), dtypes=(torch.float16,)),  # of all processors
        Case(
            "gram matrix in tall tiles, and a diagonal", _gram_and_diagonal, ((1, 3100, 48),), dtypes=(torch.float16,)
        ),
        Case("gram matrix of a model", _gram, ((2, 4096, 11008),), dtypes=(torch.bfloat16,), large=True),
        Case(
            "gram matrix of a model's columns",
            _gram_of_columns,
            ((2, 11008, 4096),),
            dtypes=(torch.bfloat16,),
            large=True,
        ),
    ),
)
