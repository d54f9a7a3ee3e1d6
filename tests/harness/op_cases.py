"""Cases of ops (phalanx.ops.op.Case): small for tests/ops/test_kernels.py, at the shapes of models for tests/gpu."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from phalanx.ops.op import Case, Implementation, Op, only
from phalanx.ops.proof import run_case


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


def compared(op: Op, case: Case, made: Implementation, dtype: torch.dtype, device: str | torch.device = "cpu") -> Any:
    """Pairs of what an implementation makes of a case and of what the reference makes of the same values, in float64 on
    the same device or, to be compared to the bit, in the same dtype on the CPU; None: the implementation does not take
    it."""
    interpreted = torch.device(device).type == "cpu" and "triton" in made.insisted
    watched = Watched(replace(made, checked=False))
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
