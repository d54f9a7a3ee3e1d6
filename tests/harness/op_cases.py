"""Cases of ops (phalanx.ops.op.Case): small for tests/ops/test_kernels.py, at the shapes of models for tests/gpu."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.ops.op import Case, Implementation, Op
from tests.ops.test_ops import normal


@dataclass
class Watched:
    """An implementation, and whether it was chosen since."""

    made: Implementation
    taken: bool = False

    def takes(self, *call: Any) -> bool:
        took = self.made.takes(*call)
        self.taken |= took
        return took

    def __getattr__(self, name: str) -> Any:
        return getattr(self.made, name)


@contextmanager
def only(op: Op, *made: Any) -> Iterator[None]:
    """Inside it an op has these implementations alone; none: its reference."""
    kept = op.candidates
    op.__dict__["candidates"] = made
    try:
        yield
    finally:
        op.__dict__["candidates"] = kept


def compared(op: Op, case: Case, made: Implementation, dtype: torch.dtype, device: str | torch.device = "cpu") -> Any:
    """Pairs of what an implementation makes of a case and of what the reference makes of the same values, in float64 on
    the same device or, to be compared to the bit, in the same dtype on the CPU; None: the implementation does not take
    it."""
    interpreted = torch.device(device).type == "cpu" and "triton" in made.insisted
    watched = Watched(made)
    kernels = "triton" if interpreted else "auto" if "auto" in made.modes else made.modes[0]
    with only(op, watched):
        found = run_case(case, dtype, kernels, device=device)
    if not watched.taken:
        return None
    with only(op):
        if case.exact:
            return list(zip(found, run_case(case, dtype, "plain"), strict=True))
        truth = run_case(case, dtype, "plain", exact=True, upstream=found[0].dtype, device=device)
    return list(zip(found, truth, strict=True))


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
    if isinstance(y, tuple):
        return list(y)
    if not y.requires_grad:
        return [y]
    y.backward(normal(*y.shape, seed=99, dtype=upstream or y.dtype).to(device).to(y.dtype))
    return [y.detach(), *(x.grad for x in inputs if x.grad is not None)]
