"""One token of each of S sequences: the gated delta rule as it runs while text is generated. The state of a sequence is
stored in a slot and updated in place.

Shapes: S sequences, HK heads of queries and keys of K features, HV heads of values of V features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.ops.delta.delta import DeltaInputs, of_value_heads
from phalanx.ops.dense.activation import widened
from phalanx.ops.op import Case, Kernels, Op, triton
from phalanx.ops.scan.rows import StateSlots
from phalanx.ops.scan.step import case_slots


def rule_step(s: DeltaInputs, slots: StateSlots) -> Tensor:
    """As `delta_step`."""
    q, k = (t.squeeze(1) for t in of_value_heads(s._replace(q=widened(s.q).unsqueeze(1), k=widened(s.k).unsqueeze(1))))
    decay = s.decay if s.decay.dim() == 3 else s.decay.unsqueeze(-1)
    state = widened(decay).exp().unsqueeze(-1) * slots.old().to(k.dtype)
    held = torch.einsum("shk,shkv->shv", k, state)
    u = widened(s.beta).unsqueeze(-1) * (widened(s.v) - held)
    new = state + k.unsqueeze(-1) * u.unsqueeze(2)
    slots.set(new)
    return torch.einsum("shk,shkv->shv", q, new).to(s.v.dtype)


def delta_step(s: DeltaInputs, slots: StateSlots, kernels: Kernels = "auto") -> Tensor:
    """`delta` of one token of each sequence: q, k (S, HK, K), v (S, HV, V), decay (S, HV) or (S, HV, K), beta (S, HV)
    -> (S, HV, V), in the dtype of v. numbers and initial of `s` are not read. Kept (slots, HV, K, V): updated in
    place."""
    made: Tensor = DELTA_STEP.choose(kernels, s.v).rule_step(s, slots)
    return made


@dataclass(frozen=True)
class DeltaStepTile:
    """How states are cut: features of values that a program has, and its warps."""

    values: int
    warps: int


TILES = (DeltaStepTile(32, 4), DeltaStepTile(64, 8), DeltaStepTile(16, 4), DeltaStepTile(8, 4))


def _case(normalize: bool) -> Any:
    """States are in other slots than sequences; the second one begins."""

    def call(*given: Any) -> tuple[Tensor, Tensor]:
        q, k, v, decay, beta, kept = (t.detach() for t in given[:-1])
        kept = widened(kept).clone()
        logs, strength = -F.softplus(widened(decay) - 1), widened(beta).sigmoid()
        s = DeltaInputs(q, k, v, logs, strength, scale=q.shape[-1] ** -0.5, normalize=normalize)
        return delta_step(s, case_slots(kept, len(v)), given[-1]), kept

    return call


def _shapes(
    sequences: int, keys: tuple[int, int], values: tuple[int, int], by_feature: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Of heads and features of keys, heads and features of values."""
    of_heads = (sequences, values[0])
    decay = (*of_heads, keys[1]) if by_feature else of_heads
    tokens = (sequences, *keys), (sequences, *keys), (sequences, *values)
    return *tokens, decay, of_heads, (sequences + 1, values[0], keys[1], values[1])


DELTA_STEP = Op(
    "delta_step",
    "the gated delta rule of one token of each sequence",
    __name__,
    ("rule_step",),
    (triton("phalanx.ops.delta.step_kernel:DeltaSteps", tunings=TILES),),
    switches=("delta",),
    cases=(
        Case("delta_step", _case(True), _shapes(3, (2, 5), (4, 6))),
        Case("delta_step, long keys", _case(False), _shapes(2, (3, 70), (3, 16))),
        Case("delta_step by feature", _case(True), _shapes(3, (2, 16), (4, 70), True)),
        Case("delta_step of 32 heads", _case(True), _shapes(64, (16, 128), (32, 128)), large=True),
        Case("delta_step of 32 heads by feature", _case(True), _shapes(64, (32, 128), (32, 128), True), large=True),
    ),
)
