"""Axes: all groups of an axis of the run's grid send in rings at once, as in a step, so that shared links show up."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from phalanx.layout.grid import Grid
from phalanx.layout.host_order import AxisTraffic, host_links
from phalanx.planning.plan import grid_of
from phalanx.preflight.check import Finding, Looks, NodeCheck, NodeView, amount
from phalanx.preflight.checks.links import LOOKS, REPEATS, Rates, measured
from phalanx.preflight.robust import slow


class Axes(NodeCheck):
    """The first order asks which axes cross nodes; then each axis in turn, up to LOOKS times if something is slow."""

    name = "axes"
    limit_s = 20.0

    def next_order(self, looks: Looks) -> Any:
        if not looks.answers:
            return ""
        axes = list(dict.fromkeys(axis for said in looks.of(0).values() for axis in said))
        asked = [order for order, _ in looks.answers[1:]]
        for axis in axes:
            if asked.count(axis) == 0 or (asked.count(axis) < LOOKS and slow(by_link(looks, axis))):
                return axis
        return None

    def look(self, view: NodeView, order: Any) -> Any:
        """The axes that cross nodes, or for one axis [[to, rates of repeats], ...] of this node's links in it."""
        links = {} if view.run is None else links_of(grid_of(view.run, len(view.peers) * view.ranks), view.ranks)
        if not order:
            return sorted(links)
        to = sorted({b for a, b in links.get(order, ()) if a == view.number})
        if not to:
            return None
        with ThreadPoolExecutor(len(to), thread_name_prefix="phalanx-axes") as pool:
            return list(zip(to, pool.map(lambda other: measured(view, other, REPEATS), to)))

    def judge(self, looks: Looks) -> list[Finding]:
        axes = dict.fromkeys(order for order, _ in looks.answers[1:])
        return [finding for axis in axes for finding in judged(self.name, axis, by_link(looks, axis), looks)]

    def figures(self, looks: Looks) -> dict[str, str]:
        lines = {}
        for axis in dict.fromkeys(order for order, _ in looks.answers[1:]):
            best = [max(of) for of in by_link(looks, axis).values()]
            if best:
                lines[f"links of {axis}"] = f"median {amount(median(best) / 1e9)} GB/s with all groups at work"
        return lines


def links_of(grid: Grid, ranks: int) -> dict[str, set[tuple[int, int]]]:
    """For each axis whose groups cross nodes, the directed links between nodes; ranks: of each node."""
    sent = dict.fromkeys(("tp", "cp", "dp", "pp", "ep"), 1.0)
    links = host_links(AxisTraffic(grid, [sent] * grid.pp), ranks)
    crossing = {axis: {link for link in of if link[0] != link[1]} for axis, of in links.items()}
    return {axis: of for axis, of in crossing.items() if of}


def by_link(looks: Looks, axis: str) -> Rates:
    found: Rates = {}
    for number, (order, _) in enumerate(looks.answers):
        for node, said in looks.of(number).items() if order == axis and number else ():
            for to, of in said:
                if of:
                    found.setdefault((node, to), []).extend(of)
    return found


def judged(check: str, axis: str, rates: Rates, looks: Looks) -> list[Finding]:
    """A node that is slow towards one neighbour and from another is named itself; other slow links are."""
    links, found = dict(slow(rates)), []
    senders, receivers = {a: b for a, b in links}, {b: a for a, b in links}
    for node in sorted(set(senders) & set(receivers)):
        if senders[node] != receivers[node] and node in {end for link in links for end in link}:
            ratio = min(of for link, of in links.items() if node in link)
            text = f"{axis}: at {100 * ratio:.0f} % of the median with all groups of the axis at work"
            found.append(Finding(check, (node,), text, "bad", {"ratio": ratio}))
            links = {link: of for link, of in links.items() if node not in link}
    for a, b in sorted({(min(link), max(link)) for link in links}):
        ratio = min(of for link, of in links.items() if set(link) == {a, b})
        link = f"the link between {looks.text([a, b])}"
        text = f"{axis}: {link} at {100 * ratio:.0f} % of the median with all groups at work"
        found.append(Finding(check, (a, b), text, "bad", {"ratio": ratio}))
    return found
