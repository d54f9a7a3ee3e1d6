"""The passes over memory of an optimizer of whole matrices: `directions_` takes gradients into momentum and gives what
the update is made of; `apply_` takes the finished update into masters and weights.

On a GPU each is one pass (directions_kernel.py): in fp32 with 16-bit directions, updates and weights, 14 and 12 bytes
of an element.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.ops.op import Case, Kernels, Op, triton


@dataclass(frozen=True)
class MatrixRange:
    """The elements of a whole matrix as they are stored: master and gradient (n,) of one dtype, momentum of it or a
    narrower one; `out` (n,) the weights, if they are stored separately."""

    master: Tensor
    grad: Tensor
    momentum: Tensor
    out: Tensor | None = None


@dataclass(frozen=True)
class MomentumOptions:
    """decay: of the momentum; nesterov: whether the direction is made of the gradient and the momentum, not of the
    momentum alone."""

    decay: float
    nesterov: bool


def directions_(
    part: MatrixRange,
    to: Tensor,
    options: MomentumOptions,
    factor: Tensor,
    skip: Tensor,
    kernels: Kernels = "auto",
) -> None:
    """With g = factor * grad: momentum = decay * momentum + (1 - decay) * g, and what is written `to` (n,), in the
    dtype of grad or a narrower one, is (1 - decay) * g + decay * momentum, or momentum itself. Where `skip` () is 1,
    the momentum stays and what is written is of no use."""
    DIRECTIONS.choose(kernels, part.grad).directions(part, to, options, factor, skip)


def over_norms(matrices: Tensor, norms: Tensor, dtype: torch.dtype, kernels: Kernels = "auto") -> Tensor:
    """Matrices (B, rows, columns), of which either may be contiguous, divided by norms (B,) and rounded once, to
    `dtype`; they lie in memory as before. norms are fp32 or wider."""
    return DIRECTIONS.choose(kernels, matrices).normalized(matrices, norms, dtype)  # type: ignore[no-any-return]


def apply_(
    part: MatrixRange, update: Tensor, rates: tuple[float, float], skip: Tensor, kernels: Kernels = "auto"
) -> None:
    """rates: (lr, weight decay). master = (1 - lr * decay) * master - lr * update, out = master; update (n,) is in
    the dtype of master or a narrower one. Where `skip` () is 1, master stays, and out is it all the same."""
    DIRECTIONS.choose(kernels, part.grad).apply(part, update, rates, skip)


def directions(part: MatrixRange, to: Tensor, options: MomentumOptions, factor: Tensor, skip: Tensor) -> None:
    """As `directions_`, by torch."""
    g = part.grad * factor.to(part.grad.dtype)
    after = part.momentum.to(g.dtype).lerp(g, 1 - options.decay)
    to.copy_(g.lerp(after, options.decay) if options.nesterov else after)
    part.momentum.copy_(torch.where(skip.bool(), part.momentum, after))


def normalized(matrices: Tensor, norms: Tensor, dtype: torch.dtype) -> Tensor:
    """As `over_norms`, by torch."""
    return torch.div(matrices, norms.view(-1, 1, 1), out=torch.empty_like(matrices, dtype=dtype))


def apply(part: MatrixRange, update: Tensor, rates: tuple[float, float], skip: Tensor) -> None:
    """As `apply_`, by torch."""
    lr, decay = rates
    after = (part.master * (1 - lr * decay)).add_(update, alpha=-lr)
    part.master.copy_(torch.where(skip.bool(), part.master, after))
    if part.out is not None:
        part.out.copy_(part.master)


def _case(nesterov: bool) -> Callable[..., Tensor]:
    def steps(master: Tensor, grad: Tensor, momentum: Tensor, kernels: Kernels) -> Tensor:
        """Three steps, of which the second is skipped; the update is the direction itself."""
        master, grad, momentum = (t.detach().clone() for t in (master, grad, momentum))
        factor = torch.full((), 0.3, device=grad.device)
        found = list[Tensor]()
        for number in range(3):
            weights = torch.zeros_like(master)  # new in each step: a skipped one writes them too
            part = MatrixRange(master, grad, momentum, weights)
            skip, out = torch.full((), float(number == 1), device=grad.device), torch.empty_like(grad)
            directions_(part, out, MomentumOptions(0.9, nesterov), factor, skip, kernels)
            found.append(out if number != 1 else torch.zeros_like(out))
            apply_(part, out, (0.1, 0.2), skip, kernels)
            found += [grad.clone(), weights.clone()]
            grad.copy_(master - number)
        return torch.stack((master, momentum, *found))

    return steps


def _over_norms(across: bool) -> Callable[..., Tensor]:
    def divided(matrices: Tensor, kernels: Kernels) -> Tensor:
        matrices = matrices.detach().mT if across else matrices.detach()
        norms = torch.linspace(0.5, 2.0, len(matrices), device=matrices.device, dtype=matrices.dtype)
        return over_norms(matrices, norms, matrices.dtype, kernels)

    return divided


WIDE = (torch.float32, torch.float64)
DIRECTIONS = Op(
    "directions",
    "momentum of whole matrices, their division by norms, and their finished updates",
    __name__,
    ("directions", "normalized", "apply"),
    (triton("phalanx.ops.optimizer.directions_kernel"),),
    switches=("symmetric",),
    cases=(
        *(
            Case(name, _case(nesterov), ((2050,),) * 3, dtypes=WIDE)
            for name, nesterov in (("directions", False), ("directions of Nesterov", True))
        ),
        *(
            Case(f"directions over norms{name}", _over_norms(across), ((3, 41, 50),), dtypes=WIDE)
            for name, across in (("", False), (", transposed", True))
        ),
    ),
)
