"""make_plan: the plan of a run, with what is recomputed in backward chosen to fit train.recompute_budget_gib."""

from __future__ import annotations

from phalanx.config.run import Run
from phalanx.planning.plan import Plan, plan_of


def make_plan(run: Run, world: int) -> Plan:
    """Decide everything of a checked config on `world` ranks. Pure: the same on every rank and on a laptop."""
    plan, budget_gib = plan_of(run, world), run.train.recompute_budget_gib
    if budget_gib is None:
        return plan
    from phalanx.forecast.recompute import within_budget  # start-up time: few runs have a budget

    return plan.recomputing(within_budget(plan, budget_gib * 2**30))
