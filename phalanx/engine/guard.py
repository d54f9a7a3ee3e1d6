"""Guard: whether a step's loss and gradient norm are fit to be applied, decided on the device before the update.

The loop decides what a run does about it (train.guard.policy).
"""

from __future__ import annotations

import torch
from torch import Tensor

REASONS = ("", "the loss or the gradient norm is not finite", "the loss is a spike", "the gradient norm is a spike")
NOT_FINITE = 1
FLOOR = 0.01  # of the mean: the smallest standard deviation, so that not every change from a constant loss is a spike


class Guard:
    """The last `window` losses and norms, () float64 each, and a verdict about the next. Nothing is read by the host.

    A spike exceeds the window's mean by more than `sigmas` standard deviations, once half the window is filled; None:
    only Inf and NaN are refused. A spike enters the window as the largest value that would not have been one, so the
    window follows a level that persists; Inf and NaN never enter it, because they would make every later mean NaN. The
    guard is part of a checkpoint.
    """

    def __init__(self, window: int, sigmas: float | None, device: torch.device):
        self.window, self.sigmas = window, sigmas
        self.losses = torch.zeros(window, dtype=torch.float64, device=device)
        self.norms = torch.zeros(window, dtype=torch.float64, device=device)
        self.seen = torch.zeros((), dtype=torch.float64, device=device)
        self._places = torch.arange(window, device=device)

    def judge(self, loss: Tensor, norm: Tensor) -> Tensor:
        """() float32: index into REASONS, 0 for a step that is fit. The same on all ranks, like loss and norm."""
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        if self.sigmas is None:
            return (~finite).float() * NOT_FINITE
        limits = [self._limit(self.losses), self._limit(self.norms)]
        verdict = torch.where(norm > limits[1], 3.0, 0.0)
        verdict = torch.where(loss > limits[0], 2.0, verdict)
        place = (self.seen % self.window).long().view(1)
        for values, value, limit in zip((self.losses, self.norms), (loss, norm), limits):
            values.index_copy_(
                0, place, torch.where(finite, torch.minimum(value.double(), limit), values[place]).view(1)
            )
        self.seen.add_(finite.double())
        return torch.where(finite, verdict, float(NOT_FINITE)).float()

    def _limit(self, values: Tensor) -> Tensor:
        there = self._places < self.seen
        count = torch.clamp(self.seen, 1, self.window)
        mean = torch.where(there, values, 0.0).sum() / count
        deviation = (torch.where(there, values - mean, 0.0).square().sum() / count).sqrt()
        limit = mean + self.sigmas * torch.maximum(deviation, FLOOR * mean.abs())  # type: ignore[operator]
        return torch.where(2 * self.seen >= self.window, limit, torch.inf)

    def state(self) -> dict[str, Tensor]:
        return {"losses": self.losses, "norms": self.norms, "seen": self.seen} if self.sigmas is not None else {}
