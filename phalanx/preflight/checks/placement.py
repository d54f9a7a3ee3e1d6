"""Placement: what the exchanges of a step cost in the order in which the scheduler numbered the nodes, and in the best
one. It finds nothing bad; it is a line below the table."""

from __future__ import annotations

from typing import Any

from phalanx.base.errors import PhalanxError
from phalanx.config.topology_file import with_speeds
from phalanx.forecast.host_order import seconds_text, traffic_of
from phalanx.layout.grid import Grid
from phalanx.layout.host_order import AxisTraffic, ExchangeCost, order_hosts
from phalanx.layout.positions import from_topology_addr
from phalanx.preflight.check import Finding, Looks, NodeCheck, NodeView

ADDRESS = "SLURM_TOPOLOGY_ADDR"
SHOWN = 4  # nodes of the best order


class NodeOrder(NodeCheck):
    """Under SLURM with a topology plugin, which tells each task the switches above its node."""

    name = "placement"
    limit_s = 60.0  # the plan of a large model

    def look(self, view: NodeView, order: Any) -> Any:
        """Where this node is; of the first one also the run's traffic."""
        if ADDRESS not in view.env or view.run is None:
            return None
        found: dict[str, Any] = {"address": view.env[ADDRESS], "ranks": view.ranks}
        if view.number == view.peers[0].number:
            try:
                traffic = traffic_of(view.run, view.ranks * len(view.peers))
            except (PhalanxError, ValueError):
                return None  # a layout that does not fit the ranks, which the run itself will say
            if traffic.grid.world != view.ranks * len(view.peers):
                return None  # some nodes are to spare: which order is asked for is known without them
            found["traffic"] = [vars(traffic.grid), [dict(sent) for sent in traffic.sent], traffic.wraps]
        return found

    def judge(self, looks: Looks) -> list[Finding]:
        return []

    def figures(self, looks: Looks) -> dict[str, str]:
        answers = looks.of(0)
        first = answers.get(0, {})
        if len(answers) < max(2, len(looks.names)) or "traffic" not in first:
            return {}
        grid, sent, wraps = first["traffic"]
        positions = from_topology_addr({looks.names[node]: said["address"] for node, said in answers.items()})
        speeds = with_speeds(positions, {}).speeds
        traffic = AxisTraffic(Grid(**grid), sent, wraps)
        found = order_hosts(ExchangeCost(looks.names, positions, speeds, traffic, first["ranks"]))
        before = f"exchanges of {seconds_text(found.seconds_before)} a step by assumed link speeds"
        if found.seconds_after >= found.seconds_before:
            return {"order of nodes": f"{before}, and none was found that is better"}
        more = ", ..." if len(found.hosts) > SHOWN else ""
        better = f"{seconds_text(found.seconds_after)} with {', '.join(found.hosts[:SHOWN])}{more}"
        return {"order of nodes": f"{before}; {better} (phalanx plan --hosts)"}
