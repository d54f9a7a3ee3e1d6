"""What the outputs of a scan read of a state before it, added to outputs that were computed without one.

Outputs are linear in the first state: a chunk of a sequence on a context-parallel rank is scanned without it
(ops.scan.context), and y_t += exp(reach_t) S c_t follows, where reach_t is the logarithm of what is left of the state S
at token t, -inf in documents that begin later. Decays being what they are, most heads have forgotten S long before the
end of a chunk: kernels leave alone what does not read it.

Shapes: R rows, L tokens of a row, H heads of P features, G groups that share C, N features of a state.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.ops.dense.activation import widened
from phalanx.ops.op import Case, Implementation, Kernels, Op, triton
from phalanx.ops.scan.scan import ScanInputs

SEGMENT = 4096  # tokens over which a program adds up the gradient of a state


def _by_group(x: Tensor, groups: int) -> Tensor:
    """(R, L, H, P) -> (R, L, G, heads of a group * P)."""
    return x.unflatten(2, (groups, -1)).flatten(3)


def _weighed(x: Tensor, reach: Tensor) -> Tensor:
    """x (R, L, H, P) times exp(reach), (R, H, L)."""
    return widened(x) * reach.exp().transpose(1, 2).unsqueeze(-1)


def _read(c: Tensor, initial: Tensor) -> Tensor:
    """(R, L, H, P): the product of the states and C."""
    states = widened(initial).unflatten(1, (c.shape[2], -1)).flatten(2, 3)
    return torch.einsum("rtgn,rgmn->rtgm", widened(c), states).reshape(*c.shape[:2], *initial.shape[1:3])


def carried_forward(y: Tensor, reach: Tensor, c: Tensor, initial: Tensor) -> None:
    """Adds to y (R, L, H, P), rounded once: reach (R, H, L) in at least fp32, c (R, L, G, N), initial (R, H, P, N)."""
    y.add_(_weighed(_read(c, initial), reach))


def carried_backward(dy: Tensor, reach: Tensor, c: Tensor, initial: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of reach, c and the states. That of y is dy."""
    weighed = _weighed(dy, reach)
    dreach = (weighed * _read(c, initial)).sum(-1).transpose(1, 2)
    by_group = _by_group(weighed, c.shape[2])
    states = widened(initial).unflatten(1, (c.shape[2], -1)).flatten(2, 3)
    dc = torch.einsum("rtgm,rgmn->rtgn", by_group, states)
    dinitial = torch.einsum("rtgm,rtgn->rgmn", by_group, widened(c)).reshape(initial.shape)
    return dreach.to(reach.dtype), dc.to(c.dtype), dinitial.to(initial.dtype)


def state_parts(length: int, initial: Tensor) -> Tensor:
    """Without values: gradients of the states, one of each segment of the tokens. How many there are is known from the
    length alone, so that sums are the same on every device."""
    shape = (-(-length // SEGMENT), *initial.shape)
    return torch.empty(shape, dtype=torch.promote_types(initial.dtype, torch.float32), device=initial.device)


class DryCarried:
    """Without data: allocates what the kernels do, which write into y."""

    @staticmethod
    def carried_forward(y: Tensor, reach: Tensor, c: Tensor, initial: Tensor) -> None:
        return None

    @staticmethod
    def carried_backward(dy: Tensor, reach: Tensor, c: Tensor, initial: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dreach, dc = (torch.empty(t.shape, dtype=t.dtype, device="meta") for t in (reach, c))
        return dreach, dc, state_parts(dy.shape[1], initial).sum(0).to(initial.dtype)


class _Carried(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, reach: Tensor, c: Tensor, initial: Tensor, by: Any) -> Tensor:  # type: ignore[override]
        by.carried_forward(y, reach, c, initial)
        ctx.mark_dirty(y)
        ctx.save_for_backward(reach, c, initial)
        ctx.by = by
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return dy, *ctx.by.carried_backward(dy, *ctx.saved_tensors), None


def carried(y: Tensor, reach: Tensor, c: Tensor, initial: Tensor, kernels: Kernels = "auto") -> Tensor:
    """y (R, L, H, P) -> y + exp(reach) initial c, in its memory: reach (R, H, L) in at least fp32, -inf where the state
    is not read, c (R, L, G, N), initial (R, H, P, N)."""
    made: Tensor = _Carried.apply(y, reach, c, initial, CARRIED.choose(kernels, y))
    return made


def carried_output(y: Tensor, s: ScanInputs, initial: Tensor, kernels: Kernels = "auto") -> Tensor:
    """y (R, L, H, P), the outputs of `s` without a first state -> as they are with `initial` (R, H, P, N), in the same
    memory."""
    # Sums run along the last dimension, those of backward too. Over another one, torch's scan has a block for some
    # hundreds of columns, of which there are only as many as heads.
    reach = (s.dt * s.a).transpose(1, 2).contiguous().cumsum(2)
    if s.numbers is not None:
        reach = reach.masked_fill((s.numbers != s.numbers[:, :1]).unsqueeze(1), -torch.inf)
    return carried(y, reach, s.c, initial, kernels)


def _case(decay: float) -> Any:
    """decay: about the mean of -log of what a token leaves of a state. The second row reads it at half of its tokens,
    the third one at a third of them."""

    def call(y: Tensor, dt: Tensor, c: Tensor, initial: Tensor, kernels: Kernels) -> Tensor:
        rows, length = y.shape[:2]
        at, row = torch.arange(length, device=y.device), torch.arange(rows, device=y.device)
        seen = at * (row.unsqueeze(1) + 1) < length
        reach = (F.softplus(widened(dt)) * -decay).cumsum(2).masked_fill(~seen.unsqueeze(1), -torch.inf)
        return carried(y.clone(), reach, c, initial, kernels)

    return call


def _shapes(tokens: tuple[int, int], head: tuple[int, int], group: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """Of (rows, length), (heads, width) and (groups, features of a state)."""
    rows, length = tokens
    return (*tokens, *head), (rows, head[0], length), (*tokens, *group), (rows, *head, group[1])


EXACT = (torch.float32, torch.float64)
NARROW = (torch.float16,)  # on GPUs bf16
CARRIED = Op(
    "carried",
    "what the outputs of a scan read of a state before it",
    __name__,
    ("carried_forward", "carried_backward"),
    (
        triton("phalanx.ops.scan.carried_kernel"),
        Implementation("dry", f"{__name__}:DryCarried", "meta"),
    ),
    switches=("scan",),
    cases=(
        Case("carried", _case(0.05), _shapes((2, 75), (4, 6), (2, 5)), (), EXACT),
        Case("carried, soon forgotten", _case(8.0), _shapes((1, 260), (2, 16), (1, 16)), (), EXACT),
        Case("carried, one token", _case(0.1), _shapes((3, 1), (2, 4), (1, 3)), (), EXACT),
        Case("carried states of 128", _case(0.01), _shapes((1, 130), (2, 64), (1, 128)), (), NARROW),
        Case("carried by 128 heads", _case(0.001), _shapes((1, 8200), (128, 64), (8, 128)), large=True),
    ),
)
