"""Names of precisions and what they mean: the compute dtype of weights and activations, and the dtype of masters,
moments and gradients."""

from __future__ import annotations

import torch

from phalanx.base.dataclass import dataclass


@dataclass(frozen=True)
class Precision:
    compute: torch.dtype
    master: torch.dtype
    loss_scaling: bool = False


def precision(name: str) -> Precision:
    """fp32, bf16, fp16 (with dynamic loss scaling) or fp64 (for correctness checks)."""
    table = {
        "fp32": Precision(torch.float32, torch.float32),
        "bf16": Precision(torch.bfloat16, torch.float32),
        "fp16": Precision(torch.float16, torch.float32, loss_scaling=True),
        "fp64": Precision(torch.float64, torch.float64),
    }
    return table[name]
