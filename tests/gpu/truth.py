"""How far a device's numbers may be from float64."""

from __future__ import annotations

import torch

ROUNDINGS = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 8 * 2.0**-7, torch.float16: 8 * 2.0**-10}


def off(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest error in units of the largest true value."""
    return ((found.detach().cpu().double() - truth).abs().max() / truth.abs().max().clamp_min(1e-30)).item()


def within(what: str, found: torch.Tensor, truth: torch.Tensor, bound: float) -> float:
    error = off(found, truth)
    if not error <= bound:
        raise AssertionError(f"{what} is off by {error:.2e} of its scale (bound {bound:.2e})")
    return error
