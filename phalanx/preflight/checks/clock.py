"""Clocks: how far each node's is from the others'."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from phalanx.preflight.check import Finding, Looks, NodeCheck, NodeView
from phalanx.preflight.probe import clock_offset
from phalanx.preflight.robust import deviation, threshold, z_scores

HARMFUL_S = 1.0  # from here on times of files and lines of logs mislead; below, NTP is not at work, no more


class Clock(NodeCheck):
    """Offsets are taken to node 0, over the shortest of some ways there and back."""

    name = "clock"
    brief = True

    def look(self, view: NodeView, order: Any) -> list[float] | None:
        """(seconds ahead of node 0, how far that may be wrong); None if node 0 serves no probes."""
        first = view.peers[0]
        if view.number == first.number:
            return [0.0, time.get_clock_info("time").resolution]
        if not first.port:
            return None
        offset, half = clock_offset(first.address, first.port, bytes.fromhex(view.token))
        return [-offset, half]

    def judge(self, looks: Looks) -> list[Finding]:
        return skewed(self.name, looks)

    def figures(self, looks: Looks) -> dict[str, str]:
        offsets = [offset for offset, _ in looks.of(0).values()]
        if len(offsets) < 2:
            return {}
        return {"clocks": f"within {1e3 * (max(offsets) - min(offsets)):.2f} ms of each other"}


def skewed(check: str, looks: Looks) -> list[Finding]:
    """Nodes whose clock is an outlier: a warning, and bad from HARMFUL_S on. Of two nodes nobody knows which is
    wrong."""
    answers = looks.of(0)
    offsets = {node: offset for node, (offset, _) in answers.items()}
    if len(offsets) == 2 and abs(distance := max(offsets.values()) - min(offsets.values())) > HARMFUL_S:
        text = f"the clocks of {looks.text(list(offsets))} are {distance:.3g} s apart: start NTP on both"
        return [Finding(check, tuple(offsets), text, "bad", {"seconds": distance})]
    noise = median(half for _, half in answers.values()) if answers else 0.0
    limit = threshold(len(offsets))
    scores = z_scores(offsets, noise)
    middle = median(offsets.values()) if offsets else 0.0
    found = []
    for node, z in scores.items():
        by = offsets[node] - middle
        if abs(z) > limit and abs(by) > answers[node][1]:
            way = "ahead of" if by > 0 else "behind"
            severity = "bad" if abs(by) > HARMFUL_S else "warning"
            text = f"{abs(by):.3g} s {way} the others, which are within {deviation(list(offsets.values())):.2g} s: NTP?"
            found.append(Finding(check, (node,), text, severity, {"seconds": by, "z": z}))  # type: ignore[arg-type]
    return found
