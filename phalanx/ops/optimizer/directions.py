"""The passes over memory of an optimizer of whole matrices: `directions_` takes gradients into momentum and gives what
the update is made of; `apply_` takes the finished update into masters and weights, and clears the gradients.

On a GPU each is one pass (directions_kernel.py): in fp32 with 16-bit weights, 16 and 18 bytes of an element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.ops.op import Case, Kernels, Op, triton


@dataclass(frozen=True)
class MomentumOptions:
    """decay: of the momentum; nesterov: whether the direction is made of the gradient and the momentum, not of the
    momentum alone."""

    decay: float
    nesterov: bool


def directions_(
    grad: Tensor,
    momentum: Tensor,
    out: Tensor,
    options: MomentumOptions,
    factor: Tensor,
    skip: Tensor,
    kernels: Kernels = "auto",
) -> None:
    """With g = factor * grad: momentum = decay * momentum + (1 - decay) * g, and out = (1 - decay) * g + decay *
    momentum, or momentum itself. grad, out (n,) of one dtype, momentum (n,) of it or a narrower one, rounded after the
    step. Where `skip` () is 1, the momentum stays and `out` is of no use."""
    DIRECTIONS.choose(kernels, grad).directions(grad, momentum, out, options, factor, skip)


def apply_(
    master: Tensor,
    grad: Tensor,
    update: Tensor,
    weights: Tensor | None,
    rates: tuple[float, float],
    skip: Tensor,
    kernels: Kernels = "auto",
) -> None:
    """rates: (lr, weight decay). master = (1 - lr * decay) * master - lr * update, weights = master, grad = 0; all
    (n,), update in the dtype of master. Where `skip` () is 1, only the gradients change."""
    DIRECTIONS.choose(kernels, grad).apply(master, grad, update, weights, rates, skip)


def directions(
    grad: Tensor, momentum: Tensor, out: Tensor, options: MomentumOptions, factor: Tensor, skip: Tensor
) -> None:
    """As `directions_`, by torch."""
    g = grad * factor.to(grad.dtype)
    after = momentum.to(grad.dtype).lerp(g, 1 - options.decay)
    out.copy_(g.lerp(after, options.decay) if options.nesterov else after)
    momentum.copy_(torch.where(skip.bool(), momentum, after))


def apply(
    master: Tensor, grad: Tensor, update: Tensor, weights: Tensor | None, rates: tuple[float, float], skip: Tensor
) -> None:
    """As `apply_`, by torch."""
    lr, decay = rates
    after = (master * (1 - lr * decay)).add_(update, alpha=-lr)
    master.copy_(torch.where(skip.bool(), master, after))
    if weights is not None:
        weights.copy_(master)
    grad.zero_()


def _case(nesterov: bool) -> Callable[..., Tensor]:
    def steps(master: Tensor, grad: Tensor, momentum: Tensor, kernels: Kernels) -> Tensor:
        """Three steps, of which the second is skipped; the update is the direction itself."""
        master, grad, momentum = (t.detach().clone() for t in (master, grad, momentum))
        factor, weights = torch.full((), 0.3, device=grad.device), torch.empty_like(master)
        found = []
        for number in range(3):
            skip, out = torch.full((), float(number == 1), device=grad.device), torch.empty_like(grad)
            directions_(grad, momentum, out, MomentumOptions(0.9, nesterov), factor, skip, kernels)
            found.append(out if number != 1 else torch.zeros_like(out))
            apply_(master, grad, out, weights, (0.1, 0.2), skip, kernels)
            found += [grad.clone(), weights.clone()]
            grad.copy_(master - number)
        return torch.stack((master, momentum, *found))

    return steps


DIRECTIONS = Op(
    "directions",
    "momentum of whole matrices, and their finished updates",
    __name__,
    ("directions", "apply"),
    (triton("phalanx.ops.optimizer.directions_kernel"),),
    switches=("symmetric",),
    cases=tuple(
        Case(name, _case(nesterov), ((2050,),) * 3, dtypes=(torch.float32, torch.float64))
        for name, nesterov in (("directions", False), ("directions of Nesterov", True))
    ),
)
