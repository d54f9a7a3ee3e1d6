"""One token of each of S sequences: the convolution and the scan as they run while text is generated. The
state of a sequence is stored in a slot and updated in place.

Shapes: S sequences, C channels, K taps, H heads of P features, G groups that share B and C, N features of a state.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.ops.dense.activation import widened
from phalanx.ops.op import Case, Kernels, Op, triton
from phalanx.ops.scan.rows import StateSlots


class StepInputs(NamedTuple):
    """What a scan reads of single tokens, with the parameters that its steps and rates come from.

    x (S, H, P)   dt (S, H): before bias and softplus   b, c (S, G, N)
    bias (H,): of steps   log (H,): of rates   d (H,) or None
    limits: of steps
    """

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor
    bias: Tensor
    log: Tensor
    d: Tensor | None = None
    limits: tuple[float, float] = (0.0, math.inf)

    def some(self, tokens: slice) -> StepInputs:
        """Of some of the tokens."""
        return self._replace(x=self.x[tokens], dt=self.dt[tokens], b=self.b[tokens], c=self.c[tokens])


def conv_step(x: Tensor, slots: StateSlots, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """x (S, C), weight (C, K), bias (C,) or None -> (S, C). Kept (slots, K - 1, C): the last inputs of sequences."""
    old = slots.old()
    read = torch.cat((old, x.unsqueeze(1).to(old.dtype)), 1)
    slots.set(read[:, 1:])
    y = (widened(read) * widened(weight).t()).sum(1)
    y = y if bias is None else y + widened(bias)
    return (F.silu(y) if silu else y).to(x.dtype)


def conv1d_step(
    x: Tensor,
    slots: StateSlots,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool = True,
    kernels: Kernels = "auto",
) -> Tensor:
    """`conv1d` of one token of each sequence: x (S, C) -> (S, C). weight (C, 1, K), as torch.nn.Conv1d has it. Kept
    (slots, K - 1, C): the last inputs of sequences, updated in place."""
    given = weight.detach().flatten(1), None if bias is None else bias.detach()
    made: Tensor = CONV1D_STEP.choose(kernels, x).conv_step(x, slots, *given, silu)
    return made


def state_step(s: StepInputs, slots: StateSlots) -> Tensor:
    """As `scan_step`."""
    each, wide = s.x.shape[1] // s.b.shape[1], widened(s.x)
    b, c = (widened(t).repeat_interleave(each, 1) for t in (s.b, s.c))
    dt, a = F.softplus(widened(s.dt) + widened(s.bias)).clamp(*s.limits), -widened(s.log).exp()
    added = (dt.unsqueeze(-1) * wide).unsqueeze(-1) * b.unsqueeze(2)
    new = (dt * a).exp()[..., None, None] * slots.old().to(wide.dtype) + added
    slots.set(new)
    y = torch.einsum("shpn,shn->shp", new, c)
    y = y if s.d is None else y + widened(s.d).unsqueeze(-1) * wide
    return y.to(s.x.dtype)


def scan_step(s: StepInputs, slots: StateSlots, kernels: Kernels = "auto") -> Tensor:
    """`scan` of one token of each sequence -> (S, H, P), in the dtype of x. Kept (slots, H, P, N): updated in place."""
    given = s._replace(bias=s.bias.detach(), log=s.log.detach(), d=None if s.d is None else s.d.detach())
    made: Tensor = SCAN_STEP.choose(kernels, s.x).state_step(given, slots)
    return made


@dataclass(frozen=True)
class StepTile:
    """How states are cut: features of a head that a program has, and its warps."""

    features: int
    warps: int


TILES = (StepTile(32, 8), StepTile(16, 4), StepTile(64, 16), StepTile(8, 4))


def case_slots(kept: Tensor, count: int) -> StateSlots:
    """For cases: some slots in another order, the second of which begins."""
    slots = torch.arange(len(kept), device=kept.device).flip(0)[:count]
    return StateSlots(kept, slots, torch.arange(count, device=kept.device) == 1)


def _conv_case(x: Tensor, weight: Tensor, bias: Tensor, kept: Tensor, kernels: Kernels) -> tuple[Tensor, ...]:
    kept = kept.detach().clone()
    y = conv1d_step(x.detach(), case_slots(kept, len(x)), weight, bias, True, kernels)
    return y, kept


def _plain_conv_case(x: Tensor, weight: Tensor, kept: Tensor, kernels: Kernels) -> tuple[Tensor, ...]:
    kept, x = kept.detach().clone(), x.detach()
    slots = StateSlots(kept, torch.arange(len(x), device=x.device))
    return conv1d_step(x, slots, weight, None, False, kernels), kept


def _scan_case(*given: Tensor | Kernels) -> tuple[Tensor, ...]:
    x, dt, b, c, bias, log, d, kept = (t.detach() for t in given[:-1])  # type: ignore[union-attr]
    kept = widened(kept).clone()
    s = StepInputs(x, dt, b, c, bias, log, d, (0.05, 1.5))
    return scan_step(s, case_slots(kept, len(x)), given[-1]), kept  # type: ignore[arg-type]


def _sizes(sequences: int, head: tuple[int, int], group: tuple[int, int], slots: int) -> tuple[tuple[int, ...], ...]:
    """Of (heads, width) and (groups, features of a state)."""
    heads = head[0]
    tokens = (sequences, *head), (sequences, heads), (sequences, *group), (sequences, *group)
    return *tokens, (heads,), (heads,), (heads,), (slots, *head, group[1])


CONV1D_STEP = Op(
    "conv1d_step",
    "causal depthwise convolution of one token of each sequence, with its activation",
    __name__,
    ("conv_step",),
    (triton("phalanx.ops.scan.step_kernel"),),
    switches=("conv1d",),
    cases=(
        Case("conv1d_step", _conv_case, ((3, 21), (21, 1, 4), (21,), (5, 3, 21))),
        Case("conv1d_step, two taps", _plain_conv_case, ((2, 40), (40, 1, 2), (2, 1, 40))),
        Case(
            "conv1d_step of 10240 channels",
            _conv_case,
            ((256, 10240), (10240, 1, 4), (10240,), (257, 3, 10240)),
            large=True,
        ),
    ),
)
SCAN_STEP = Op(
    "scan_step",
    "Mamba-2's selective scan of one token of each sequence",
    __name__,
    ("state_step",),
    (triton("phalanx.ops.scan.step_kernel:StateSteps", tunings=TILES),),
    switches=("scan",),
    cases=(
        Case("scan_step", _scan_case, _sizes(3, (4, 6), (2, 5), 5)),
        Case("scan_step, one group", _scan_case, _sizes(2, (3, 70), (1, 16), 2)),
        Case("scan_step of 128 heads", _scan_case, _sizes(64, (128, 64), (8, 128), 65), large=True),
    ),
)
