"""Scaled matmuls of two quantized matrices. On a GPU: torch's own GEMMs for one scale per tensor or per line, cuBLASLt
(ops.quantized.cublaslt) for blocks and for adding to a buffer, and a Triton GEMM where neither supports them; emulated
recipes multiply dequantized values.

NVIDIA's tensor cores sum FP8 products in registers with about 14 bits of fraction ("fast"). "Precise" moves the sum to
fp32 at intervals (DeepSeek-V3, 2024, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from phalanx.base.align import begins_well
from phalanx.ops.dense.grads import account, add_product_grad
from phalanx.ops.op import ALL_KERNELS, Case, Implementation, Kernels, Op
from phalanx.ops.quantized.cublaslt import cublaslt
from phalanx.ops.quantized.recipes import (
    Scaled,
    block_amax,
    dequantize,
    find_recipe,
    multipliers,
    quantize,
    scaled_product,
)


class ScaledProducts:
    """The definition."""

    @staticmethod
    def product(a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool, out: Tensor | None = None) -> Tensor:
        """a (M, K), b (N, K) -> a b^T (M, N) in `dtype`, in `out` if given. `fast`: sums that tensor cores are fastest
        at."""
        y = scaled_product(a, b, dtype)
        return y if out is None else out.copy_(y)

    @staticmethod
    def add_grad(weight: Tensor, dy: Scaled, x: Scaled, fast: bool) -> Tensor | None:
        """Account for dy x^T as the gradient of a weight that has one; what a backward must return for it."""
        return account(weight, lambda buffer: buffer.add_(scaled_product(dy, x, buffer.dtype)))


class DequantizedProducts:
    """Matmuls of dequantized values, in the weights' dtype."""

    @staticmethod
    def product(a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool, out: Tensor | None = None) -> Tensor:
        return torch.mm(dequantize(a, dtype), dequantize(b, dtype).t(), out=out)

    @staticmethod
    def add_grad(weight: Tensor, dy: Scaled, x: Scaled, fast: bool) -> Tensor | None:
        return add_product_grad(weight, dequantize(dy, weight.dtype).t(), dequantize(x, weight.dtype).t())


class TensorCoreProducts:
    """FP8 GEMMs."""

    @staticmethod
    def product(a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool, out: Tensor | None = None) -> Tensor:
        return fast_product(a, b, dtype, fast, out)

    @staticmethod
    def add_grad(weight: Tensor, dy: Scaled, x: Scaled, fast: bool) -> Tensor | None:
        return account(weight, lambda buffer: add_fast_product_(buffer, dy, x, fast))


class DryProducts:
    """Without data: allocates what FP8 GEMMs do, which is their output."""

    @staticmethod
    def product(a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool, out: Tensor | None = None) -> Tensor:
        if out is not None:
            return out
        return torch.empty(len(a.quantized), len(b.quantized), dtype=dtype, device=a.quantized.device)

    @staticmethod
    def add_grad(weight: Tensor, dy: Scaled, x: Scaled, fast: bool) -> Tensor | None:
        return account(weight, lambda buffer: None)


def fast_product(a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool, out: Tensor | None = None) -> Tensor:
    """a (M, K), b (N, K), contiguous -> a b^T (M, N) in `dtype`, in `out` if given. Matmuls with block scales are
    always precise."""
    if 128 in (*a.block, *b.block):
        return _block_product(a, b, dtype, out)
    if dtype != torch.bfloat16 and a.block == (1, 0):  # torch's GEMM with a scale per line writes bf16
        y = fast_product(a, b, torch.bfloat16, fast)
        return y.to(dtype) if out is None else out.copy_(y)
    return _torch(a, b, a.scales.contiguous(), b.scales.t().contiguous(), dtype, fast, out)


def add_fast_product_(buffer: Tensor, a: Scaled, b: Scaled, fast: bool) -> None:
    """buffer (M, N) += a b^T. The GEMM itself adds if cuBLASLt is available, and for the fast sums with one scale and
    the blocks that torch lacks. Everything else goes through torch and one more pass over memory."""
    blocks = 128 in (*a.block, *b.block)
    if _by_cublaslt(buffer, a, b, fast and not blocks, add=True):
        return
    if (fast and a.block == (0, 0)) or (blocks and not _torch_takes(a, b)):
        from phalanx.ops.quantized.gemm_kernel import product

        product(buffer, a, b, add=True)
    else:
        buffer.add_(fast_product(a, b, torch.float32 if a.block == (0, 0) else torch.bfloat16, fast))


def _by_cublaslt(out: Tensor, a: Scaled, b: Scaled, fast: bool, add: bool) -> bool:
    library = cublaslt(out.device.index or 0)
    a, b = (replace(q, scales=_aligned(q.scales)) for q in (a, b))
    return library is not None and library.product(out, a, b, fast, add)


def _aligned(scales: Tensor) -> Tensor:
    """The same scales at an address that cuBLAS accepts; those from a step's own casts may be at any address."""
    return scales if begins_well(scales) else scales.clone()


def _torch(
    a: Scaled, b: Scaled, a_scales: Tensor, b_scales: Tensor, dtype: torch.dtype, fast: bool, out: Tensor | None
) -> Tensor:
    a_scales, b_scales = _aligned(a_scales), _aligned(b_scales)
    if out is None:
        return torch._scaled_mm(a.quantized, b.quantized.t(), a_scales, b_scales, out_dtype=dtype, use_fast_accum=fast)
    return torch._scaled_mm(
        a.quantized, b.quantized.t(), a_scales, b_scales, out_dtype=dtype, use_fast_accum=fast, out=out
    )


def _block_product(a: Scaled, b: Scaled, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    if out is None:
        out = torch.empty(a.quantized.shape[0], b.quantized.shape[0], dtype=dtype, device=a.quantized.device)
    if _by_cublaslt(out, a, b, fast=False, add=False):
        return out
    if dtype == torch.bfloat16 and _torch_takes(a, b):
        # the scales of 1 x 128 blocks are stored column by column, those of 128 x 128 blocks row by row
        a_scales, b_scales = (
            q.scales.contiguous() if q.block[0] == 128 else q.scales.t().contiguous().t() for q in (a, b)
        )
        return _torch(a, b, a_scales, b_scales.t(), dtype, False, out)
    from phalanx.ops.quantized.gemm_kernel import product

    product(out, a, b, add=False)
    return out


def _torch_takes(a: Scaled, b: Scaled) -> bool:
    """Whether torch's GEMM supports these blocks on this device: sizes in whole blocks, and four blocks along the
    sum."""
    k, whole = a.quantized.shape[1], a.quantized.shape[0] % 128 == 0 and b.quantized.shape[0] % 128 == 0
    return k % 512 == 0 and whole and _torch_has(a.quantized.device.index or 0, b.block[0] == 128)


@cache
def _torch_has(index: int, squares: bool) -> bool:
    """Whether torch's GEMM supports 1 x 128 by 128 x 128 (`squares`) or by 1 x 128 here. It depends on the GPU and on
    cuBLAS, so it is tried once."""
    device = torch.device("cuda", index)
    quantized = torch.zeros(128, 512, device=device).to(torch.float8_e4m3fn)
    a_scales, b_scales = (
        torch.ones(4, 128, device=device).t(),
        torch.ones(1, 4, device=device) if squares else torch.ones(4, 128, device=device).t(),
    )
    try:
        torch._scaled_mm(quantized, quantized.t(), a_scales, b_scales.t(), out_dtype=torch.bfloat16)
    except (RuntimeError, ValueError):
        return False
    return True


def _quantized(a: Tensor, b: Tensor, recipe: str, backward: bool) -> tuple[Scaled, Scaled]:
    """For cases: the operands of a forward matmul or of a weight's gradient."""
    r = find_recipe(recipe)
    sides = ((a, r.tokens, r.backward if backward else r.forward), (b, r.tokens if backward else r.weight, r.forward))
    qa, qb = (quantize(x, block, f, multipliers(block_amax(x, block), f)) for x, block, f in sides)
    return qa, qb


def _cases() -> Iterator[Case]:
    def product(recipe: str, a: Tensor, b: Tensor, kernels: Kernels) -> tuple[Tensor, ...]:
        qa, qb = _quantized(a.detach().float(), b.detach().float(), recipe, backward=False)
        return (QUANT_MATMUL.choose(kernels, qa.quantized, False).product(qa, qb, a.dtype, False),)

    def add(recipe: str, weight: Tensor, dy: Tensor, x: Tensor, kernels: Kernels) -> tuple[Tensor, ...]:
        qdy, qx = _quantized(dy.detach().float(), x.detach().float(), recipe, backward=True)
        QUANT_MATMUL.choose(kernels, qdy.quantized, False).add_grad(weight, qdy, qx, False)
        return (weight.grad,)  # type: ignore[return-value]

    for recipe in ("tensorwise", "rowwise", "blockwise"):
        for m, n, k in ((256, 512, 1024), (272, 144, 512), (4096, 1024, 2048)):
            yield Case(f"{recipe}, {m} x {n} x {k}", partial(product, recipe), ((m, k), (n, k)), large=True)
            shapes = ((m, n), (m, k), (n, k))
            yield Case(f"{recipe}, {m} x {n} += {k}", partial(add, recipe), shapes, (0,), large=True)


QUANT_MATMUL = Op(
    "quant_matmul",
    "matmuls of two matrices of FP8 values",
    f"{__name__}:ScaledProducts",
    ("product", "add_grad"),
    (
        Implementation(
            "tensor-cores",
            f"{__name__}:TensorCoreProducts",
            "cuda",
            fits=lambda emulated: not emulated,
            shapes="recipes that are not emulated",
            modes=ALL_KERNELS,
        ),
        Implementation("dequantized", f"{__name__}:DequantizedProducts", "cuda", modes=ALL_KERNELS),
        Implementation("dry", f"{__name__}:DryProducts", "meta", fits=lambda emulated: not emulated),
    ),
    switches=("quant",),
    cases=tuple(_cases()),
)
