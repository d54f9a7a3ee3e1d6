"""The order of a run's hosts by the bytes that its plan sends: what the given order costs, and the best one found."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.base.errors import ConfigError, Problem
from phalanx.base.text_table import table
from phalanx.config.run import Run
from phalanx.config.topology_file import Topology
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import rank_uses
from phalanx.layout.host_order import AxisTraffic, ExchangeCost, HostOrder, order_hosts
from phalanx.layout.positions import unknown_hosts

SHOWN = 8  # hosts of the new order in the text


def traffic_of(run: Run, world: int) -> AxisTraffic:
    """What the run's plan sends along each axis."""
    plan = make_plan(run, world)
    uses, _ = rank_uses(plan, plan.num_micro_batches(run.train.global_batch))
    return AxisTraffic(plan.grid, [use.sent for use in uses], wraps=len(plan.stages) > plan.grid.pp)


def best_order(run: Run, world: int, hosts: Sequence[str], topology: Topology, keep_first: bool = False) -> HostOrder:
    """The order in which the run's ranks are to be put on these hosts, each with the same number of ranks.

    keep_first: the first host stays first, because the ranks meet there. ConfigError if hosts and ranks do not fit, or
    the topology does not know a host.
    """
    problems = []
    if world % len(hosts):
        rule = "must be a multiple of the number of hosts: each has the same number of ranks"
        problems.append(
            Problem("--ranks", world, rule, {"hosts": len(hosts)}, (len(hosts) * (world // len(hosts) + 1),))
        )
    unknown = unknown_hosts(hosts, topology.positions)
    if unknown:
        because = {"hosts that it lacks": len(unknown), "hosts that it has": len(topology.positions.of)}
        problems.append(Problem("--topology", unknown[0], "must say where each of the hosts is", because))
    if problems:
        raise ConfigError(problems)
    cost = ExchangeCost(hosts, topology.positions, topology.speeds, traffic_of(run, world), world // len(hosts))
    return order_hosts(cost, keep_first)


def order_text(order: HostOrder, topology: Topology) -> str:
    """A table of both orders' exchanges by axis, and the beginning of the best order."""
    rows = [("axis", "order given", "order found")]
    rows += [(axis, seconds_text(of), seconds_text(order.after[axis])) for axis, of in order.before.items()]
    rows.append(("all", seconds_text(order.seconds_before), seconds_text(order.seconds_after)))
    exact = "all orders were tried, and no order is better than the second"
    proof = exact if order.exact else "the second is the best that a search found"
    kinds = ("host", *reversed(topology.positions.levels), "cluster")
    speeds = ", ".join(f"{kind} {topology.speeds.of[kind] / 1e9:g}" for kind in kinds)
    assumed = f" ({', '.join(topology.assumed)}: assumed)" if topology.assumed else ""
    lines = [table(rows, left=(0,)), f"Links in GB/s: {speeds}{assumed}; {proof}."]
    if order.seconds_after < order.seconds_before:
        more = f" and {len(order.hosts) - SHOWN} more" if len(order.hosts) > SHOWN else ""
        lines.append(f"Put the ranks on: {', '.join(order.hosts[:SHOWN])}{more} (--write-hosts FILE writes all).")
    else:
        lines.append("The order given stays.")
    return "\n".join(lines)


def seconds_text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
