"""Parameter: a weight that knows how it is sharded, what holds its quantized values, and where more gradients go."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from phalanx.layout.param import ParamSpec
from phalanx.ops.dense.grads import GradientQueue


class Quantizer(Protocol):
    """What keeps the quantized values of a weight (for FP8: ops.quantized.quantizer.WeightQuantizer)."""

    on: bool
    """Whether matmuls use the quantized values; off: the weight itself."""

    def keeps_quantized(self, shape: tuple[int, ...]) -> bool:
        """Whether a weight of this shape can be stored as quantized values alone."""
        ...


class Parameter(nn.Parameter):
    """A torch parameter whose storage is part of a flat buffer.

    spec         the global tensors in it and how they are sharded
    quantizer    of a quantized linear; None: matmuls use the weight itself
    queue        where its gradients wait while the queue is open; None: they are added at once
    extra_grads  parameters that share its values, each with its own gradient: one for every further micro-batch whose
                 gradients are kept separate (train.deterministic)
    source       number of the micro-batch whose gradients it has; 0 unless it is one of the extra ones
    """

    spec: ParamSpec
    quantizer: Quantizer | None
    queue: GradientQueue | None
    extra_grads: list[Parameter]
    source: int
    grad_dtype: torch.dtype | None  # torch's own, which its stubs lack

    def __new__(
        cls, data: Tensor, spec: ParamSpec, requires_grad: bool = True, queue: GradientQueue | None = None
    ) -> Parameter:
        made: Parameter = super().__new__(cls, data, requires_grad)  # type: ignore[assignment]
        made.spec, made.quantizer, made.queue, made.extra_grads = spec, None, queue, []
        made.source = 0
        return made

    def add_extra_grads(self, count: int) -> None:
        """Create `count` more parameters with these values, each with a gradient of its own; the flat buffers give them
        memory (FlatBucket.attach)."""
        for _ in range(count):
            extra = Parameter(torch.empty_like(self), self.spec, self.requires_grad, self.queue)
            extra.quantizer, extra.source = self.quantizer, len(self.extra_grads) + 1
            self.extra_grads.append(extra)

    def to_empty(self, device: torch.device) -> None:
        """Move to a device, without values and without memory: its storage will be a flat buffer."""
        for each in (self, *self.extra_grads):
            empty = torch.empty(0, dtype=each.dtype, device=device)
            moved = Parameter(empty, each.spec, each.requires_grad, each.queue)
            moved.quantizer, moved.extra_grads = each.quantizer, each.extra_grads
            moved.source = each.source
            torch.utils.swap_tensors(each, moved)
