"""Layouts that `train.deterministic` does not support."""

from __future__ import annotations

from phalanx.base.errors import Problem
from phalanx.base.rules import powers_of_two, problem
from phalanx.config.run import Run


def check_deterministic(run: Run, world: int) -> list[Problem]:
    """Layouts in which the bits would depend on the layout in spite of it."""
    c, layout, model = run.train, run.layout, run.model
    if not c.deterministic:
        return []
    found, dp = [], world // max(1, layout.tp * layout.cp * layout.pp)

    def needs(rule: str, because: dict) -> None:
        found.append(problem("train", c, "deterministic", rule, because, (False,)))

    if dp & (dp - 1):
        needs(
            "needs a power of two of data-parallel ranks", {"dp": dp, "nearest": ", ".join(map(str, powers_of_two(dp)))}
        )
    group = layout.shard_group or layout.cp
    if group > 0 < layout.cp and group % layout.cp and layout.cp % group:
        because = {"layout.cp": layout.cp, "layout.shard_group": layout.shard_group}
        needs(
            "needs a shard_group that is a multiple of cp, or divides it: groups hold all or some parts of "
            "the same sequences",
            because,
        )
    if model.reads_beside:
        rule = "needs a model whose layers share no weight: their sums have no fixed order"
        needs(rule, {"model.family": model.family})
    experts, dense = layout.ep * layout.etp, layout.tp * layout.cp
    if model.routed_experts and max(experts, dense) % max(1, min(experts, dense)):
        because = {"layout.ep * layout.etp": experts, "layout.tp * layout.cp": dense}
        needs(
            "needs ep * etp that is a multiple of tp * cp, or divides it: ranks share experts with whole "
            "micro-batches or parts of one",
            because,
        )
    return found
