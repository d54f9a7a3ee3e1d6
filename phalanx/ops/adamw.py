"""AdamW over lists of flat tensors: torch's fused kernel, and the plain twin that the tests compare it with."""

from __future__ import annotations

import torch
from torch import Tensor


def adamw_(params: list[Tensor], grads: list[Tensor], m: list[Tensor], v: list[Tensor], step: Tensor, lr: float, beta1: float, beta2: float,
           eps: float, decay: float, skip: Tensor) -> None:  # fmt: skip
    """One step in place. `step` () float32 counts applied steps, this one included; where `skip` () float32 is 1 nothing changes.

    Loshchilov & Hutter, "Decoupled weight decay regularization", 2019: p *= 1 - lr * decay; m, v moving averages of g, g^2;
    p -= lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps).
    """
    if params:
        torch._fused_adamw_(
            params, grads, m, v, [], [step] * len(params), lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay, eps=eps,
            amsgrad=False, maximize=False, grad_scale=None, found_inf=skip,
        )  # fmt: skip


def adamw_reference_(params: list[Tensor], grads: list[Tensor], m: list[Tensor], v: list[Tensor], step: Tensor, lr: float, beta1: float, beta2: float,
                     eps: float, decay: float, skip: Tensor) -> None:  # fmt: skip
    """The slow twin of `adamw_`."""
    if skip.item() == 1:
        return
    t = step.item()
    for p, g, m_, v_ in zip(params, grads, m, v):
        p.mul_(1 - lr * decay)
        m_.lerp_(g, 1 - beta1)
        v_.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        p.addcdiv_(m_ / (1 - beta1**t), (v_ / (1 - beta2**t)).sqrt_().add_(eps), value=-lr)
