"""The settings of a router: how the logits of a token become its choice of experts."""

from __future__ import annotations

from typing import Literal

from phalanx.base.dataclass import dataclass


@dataclass(frozen=True)
class Router:
    """How the logits of a token become its choice of experts. `num_experts` is a multiple of `groups`."""

    top_k: int
    num_experts: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    order: Literal["before", "after"] = "before"
    """The score function is applied to all experts before choosing, or to the chosen logits afterwards."""
    renormalize: bool = True
    """Divide the chosen scores by their sum."""
    scale: float = 1.0
    groups: int = 1
    """Experts form this many equal groups in order. A token chooses within its `top_groups` best groups, ranked by the
    sum of a group's two highest scores."""
    top_groups: int = 1
    forced: Literal["none", "balanced"] = "none"
    """balanced: experts are drawn at random, all equally likely (for benchmarks); the weights are still the scores of
    those drawn."""
