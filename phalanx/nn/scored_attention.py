"""ScoredAttention: layers of attention whose heads' scores can be measured, and made smaller by their weights.

For QK-clip (Kimi Team, "Kimi K2", 2025, algorithm 1): where the largest score of a head is above a threshold, the
outputs of the linears that its scores are made of are multiplied by the ratio of the two to a power. The powers of a
query and a key add up to 1. What several heads share is left as it is, and what it is multiplied with takes all of it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from phalanx.base.dataclass import dataclass
from phalanx.nn.env import Env
from phalanx.nn.module import Module
from phalanx.ops.attention.attention import ATTENTION, BIASED_ATTENTION
from phalanx.ops.attention.context import AttentionPlan
from phalanx.ops.attention.kind import AttentionKind
from phalanx.ops.attention.largest_scores import LargestScores


@dataclass(frozen=True)
class ScoreOutputs:
    """Outputs of a global tensor, a matrix or a bias, that the scores of each head are made of: those of head h are
    `count` from start + h * step on.

    power  to which the ratio is raised that they are multiplied by
    dim    0 if rows of the tensor are outputs, 1 if columns are
    """

    name: str
    start: int
    step: int
    count: int
    power: float
    dim: int = 0


def attention_plan(env: Env, kind: AttentionKind) -> AttentionPlan:
    """How layers of a kind attend on this rank."""
    kernels = env.kernels_for(ATTENTION)
    if kind.bias is not None and kernels != "plain":
        kernels = env.kernels_for(BIASED_ATTENTION)
    return AttentionPlan(kind, env.axes, env.ops.cp_attention, kernels, env.recompute.keep)


class ScoredAttention(Module):
    """Its heads on this rank are numbers first_head .. first_head + heads of all_heads.

    largest        where their largest scores are kept in training; None: they are not measured
    score_outputs  what their scores are made of
    unclippable    why smaller weights would not make scores smaller, or scores are not measured; None: they would
    """

    heads: int
    all_heads: int
    first_head: int
    kind: AttentionKind
    largest: LargestScores | None = None
    score_outputs: tuple[ScoreOutputs, ...] = ()
    unclippable: str | None = None

    @cached_property
    def plan(self) -> AttentionPlan:
        return attention_plan(self.env, self.kind)

    @property
    def plan_here(self) -> AttentionPlan:
        """The plan of attention now: it takes the largest scores where training measures them."""
        return self.plan if self.largest is None or not self.training else self._measuring

    @cached_property
    def _measuring(self) -> AttentionPlan:
        return replace(self.plan, largest=self.largest)
