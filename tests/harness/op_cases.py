"""Cases of ops (phalanx.ops.op.Case): small for tests/ops/test_kernels.py, at the shapes of models for tests/gpu."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.ops.op import Case
from tests.ops.test_ops import normal


def run_case(
    case: Case,
    dtype: torch.dtype,
    kernels: str,
    exact: bool = False,
    upstream: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> list[Tensor]:
    """Output and gradients of a case with inputs of `dtype`. `exact`: the same values in float64. `upstream`: the dtype
    that the gradient from above is rounded to; None: the output's."""
    kind = torch.float64 if exact else dtype
    inputs = [normal(*s, seed=i + 1, dtype=dtype).to(device).to(kind) for i, s in enumerate(case.shapes)]
    inputs = [x.requires_grad_() for x in inputs]
    for i in case.params:
        inputs[i].grad_dtype = torch.float64 if kind == torch.float64 else torch.float32
        inputs[i].grad = torch.ones(case.shapes[i], dtype=inputs[i].grad_dtype, device=device)
    y = case.call(*inputs, kernels)
    if not y.requires_grad:
        return [y]
    y.backward(normal(*y.shape, seed=99, dtype=upstream or y.dtype).to(device).to(y.dtype))
    return [y.detach(), *(x.grad for x in inputs if x.grad is not None)]
