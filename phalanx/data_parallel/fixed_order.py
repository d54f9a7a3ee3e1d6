"""What train.deterministic adds to flat buffers: sums over micro-batches, ranks and elements whose bits do not depend on the layout.

Gradients are added up in one binary tree over the micro-batches of a step (base.pairwise), first those of a rank, then over ranks.
Squares of the norm lie otherwise on every rank and in every layout; they are added up as integers, which have no order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.base.pairwise import merges, pairwise_sum, waiting
from phalanx.comm.axis import Axis

LIMB = 20  # bits of each of the integers that a square is cut into: 2^43 of them can be added up
LIMBS = 3
PART = 1 << 24  # elements at once


class GradientTree:
    """The sums of one bucket's gradients that wait for their other half. `grad` (numel,) takes the gradient of one micro-batch at a time;
    after the last of a step it holds the sum over all. Room for the `most` micro-batches that a step may have."""

    def __init__(self, grad: Tensor, most: int):
        self.grad, self.most = grad, most
        self.waiting = grad.new_empty(waiting(most), grad.numel())
        self._merges: list[int] = []
        self._seen = self._held = 0

    def begin(self, leaves: int) -> None:
        self._merges, self._seen, self._held = merges(leaves), 0, 0

    def leaf(self) -> None:
        """One more micro-batch is complete."""
        for _ in range(self._merges[self._seen]):
            self._held -= 1
            self.grad.add_(self.waiting[self._held])
        self._seen += 1
        if self._seen < len(self._merges):
            self.waiting[self._held].copy_(self.grad)
            self._held += 1
            self.grad.zero_()


def sum_over(axis: Axis, grad: Tensor, whole: bool, inner: int = 1) -> None:
    """Add up grad (size * n,) over the ranks of an axis, in place: this rank's n elements, or the whole of it.

    As many bytes as a reduce-scatter (and an all-gather), but the order of additions is ours: runs of `inner` ranks have parts of the same
    micro-batches, and are added up last.
    """
    parts = axis.all_to_all(grad).view(axis.size // inner, inner, -1)
    n = parts.shape[-1]
    grad[axis.index * n : (axis.index + 1) * n] = pairwise_sum(pairwise_sum(parts))
    if whole:
        axis.all_gather_into(grad).wait()


def sum_replicas(axis: Axis, grad: Tensor) -> Tensor:
    """(n,) of each rank that holds the same piece -> (n,) their sum."""
    return pairwise_sum(axis.all_gather(grad).wait().view(axis.size, -1))


def sum_of_squares(views: list[Tensor], world: Axis, device: torch.device) -> Tensor:
    """() float64: over the elements of all ranks' views. Each square is taken relative to the largest one and cut into integers of
    LIMB bits, which are added up exactly; what is left out is below 2^-60 of the largest square. Infinite if any element is not finite.
    """
    views = [v for v in views if len(v)]
    largest = torch.stack([v.abs().max() for v in views]).max().double() if views else torch.zeros((), dtype=torch.float64, device=device)
    largest = world.all_reduce(torch.where(torch.isfinite(largest), largest, torch.inf), "max").wait()
    scale = torch.where(largest > 0, 1.0 / largest, 0.0)
    total = torch.zeros(LIMBS, dtype=torch.int64, device=device)
    for view in views:
        for part in view.split(PART):
            _add_limbs(total, (part.double() * scale).square_())
    world.all_reduce(total).wait()
    weights = 2.0 ** (-LIMB * torch.arange(1, LIMBS + 1, dtype=torch.float64, device=device))
    return torch.where(torch.isfinite(largest), (total.double() * weights).sum() * largest.square(), torch.inf)


def _add_limbs(total: Tensor, x: Tensor) -> None:
    """Cut x, in [0, 1], into integers, the highest bits first. What is not finite gives any number."""
    for limb in range(LIMBS):
        x = x * 2.0**LIMB
        whole = x.floor()
        total[limb] += whole.long().sum()
        x = x - whole
