"""Scaled products on a GPU: torch's own GEMMs where they have a recipe's scales, else a Triton one. ops.quant.scaled_product is their definition.

NVIDIA's tensor cores sum 8-bit products in registers of about 14 bits of fraction ("fast"); "precise" moves the sum to fp32 every so
often (DeepSeek-V3, 2024, section 3.3.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.ops.quant import Scaled


def fast_product(a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool, out: Tensor | None = None) -> Tensor:
    """a (M, K), b (N, K), codes contiguous -> a b^T (M, N) in `dtype`, in `out` if given."""
    if 128 in (*a.block, *b.block):
        from phalanx.ops.kernels.scaled_mm import product

        y = torch.empty(a.codes.shape[0], b.codes.shape[0], dtype=dtype, device=a.codes.device) if out is None else out
        product(y, a, b, add=False)
        return y
    if dtype == torch.float32 and a.block == (1, 0):  # torch's GEMM with a scale per line writes bf16
        return fast_product(a, b, torch.bfloat16, fast).float()
    scales = a.scales.contiguous(), b.scales.t().contiguous()
    if out is None:
        return torch._scaled_mm(a.codes, b.codes.t(), *scales, out_dtype=dtype, use_fast_accum=fast)
    return torch._scaled_mm(a.codes, b.codes.t(), *scales, out_dtype=dtype, use_fast_accum=fast, out=out)


def add_fast_product_(buffer: Tensor, a: Scaled, b: Scaled, fast: bool) -> None:
    """buffer (M, N) += a b^T. Scales per line go through torch and one more pass over memory; others are added in the GEMM."""
    if a.block == (1, 0):
        buffer.add_(fast_product(a, b, torch.bfloat16, fast))
        return
    from phalanx.ops.kernels.scaled_mm import product

    product(buffer, a, b, add=True)
