"""InBackward: gradients of a bucket are applied as soon as they are complete, in the middle of backward, and freed
(optim.in_backward).

What a step does with all gradients at once (norm, verdict, update), it does here with each bucket's. The norm of the
model is known at the end, when nothing can be clipped by it any more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.data_parallel.buffers import Buffers
from phalanx.optim.sharded import ShardedOptimizer
from phalanx.pipeline.execute import Stages
from phalanx.schedule.actions import Apply


class InBackward:
    """Updates buckets during a step.

    clip    largest norm of a bucket's gradient; 0: any

    A bucket whose gradient is not finite is skipped on all ranks, and so are those that are complete after it in the
    same step. If the loss is not finite, that is all of them, and the step does not count. Nothing here waits for the
    device.
    """

    def __init__(self, buffers: Buffers, optimizer: ShardedOptimizer, stages: Stages, world: Axis, clip: float):
        self.buffers, self.optimizer, self.stages, self.world, self.clip = buffers, optimizer, stages, world, clip
        self.lr, self._squares, self._skip, self._counted = 0.0, *self._zeros(), False

    def _zeros(self) -> tuple[Tensor, Tensor]:
        device = self.optimizer.step.device
        return torch.zeros((), dtype=torch.float64, device=device), torch.zeros((), device=device)

    def begin(self, lr: float) -> None:
        """A step begins whose gradients are applied at this rate."""
        self._squares, self._skip = self._zeros()
        self.lr, self._counted = lr, False

    @property
    def norm(self) -> Tensor:
        """() float64: of the gradients of all buckets that were applied in this step, before clipping; not finite if
        any bucket was skipped."""
        return self._squares.sqrt()

    @torch.no_grad()
    def apply(self, i: Apply) -> None:
        """Update a bucket, and free its gradients."""
        flat = self.buffers.settle(i.bucket)
        norms = torch._foreach_norm(flat.counted(), 2, dtype=torch.float64)
        # a loss that is not finite makes every bucket so
        square = sum((n.square() for n in norms), 0.0 * self.stages.loss_sum)
        square = self.world.all_reduce(square).wait()
        self._squares += square
        self._skip = torch.maximum(self._skip, (~torch.isfinite(square)).float())
        if not self._counted:
            self.optimizer.step.add_(1.0 - self._skip)
            self._counted = True
        factor = torch.ones_like(square)
        if self.clip > 0:
            factor = torch.clamp(self.clip / (square.sqrt() + 1e-6), max=1.0)
        self.optimizer.update_bucket(i.bucket, self.lr, self._skip, factor)
        flat.forget()
