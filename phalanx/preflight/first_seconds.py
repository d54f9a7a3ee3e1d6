"""The preflight of a run's first seconds: the checks that need no ports and take milliseconds, once ranks have met.

One rank of each machine looks. All ranks get all answers and come to the same verdict. Versions, config and data are
not compared here a second time: engine/meeting.py has done that.
"""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

from phalanx.base.errors import BadNode
from phalanx.base.log import Log
from phalanx.base.placement import Placement
from phalanx.comm.axis import Axis
from phalanx.comm.reach import is_loopback
from phalanx.config.run import Run
from phalanx.preflight.agent import answer, checks
from phalanx.preflight.check import Finding, Looks, NodeView, Peer


def spans_machines(placement: Placement) -> bool:
    """Whether the ranks may be on several machines, by what is known without asking them; the same on all ranks."""
    host = urlsplit(placement.init_method).hostname or ""
    return placement.world_size > 1 and not is_loopback(host) and placement.local_size != placement.world_size


def first_seconds(world: Axis, placement: Placement, run: Run, log: Log) -> None:
    """Look at each machine of a run on several, all ranks together. BadNode on all ranks if a machine is bad; warnings
    go to the log of rank 0."""
    if not spans_machines(placement):
        return
    made = {check.name: check for check in checks(brief=True)}
    mine: dict[str, object] = {"host": socket.gethostname()}
    if placement.local_rank == 0:
        view = NodeView(0, [Peer(0, socket.gethostname())], run=run)
        mine["answers"] = {name: answer(check, view, 0) for name, check in made.items()}
    said = [json.loads(text) for text in world.all_gather_text(json.dumps(mine))]
    nodes = [one for one in said if "answers" in one]
    if len({one["host"] for one in said}) < 2:
        return
    names = [str(one["host"]) for one in nodes]
    findings = []
    for name, check in made.items():
        answers = {node: one["answers"][name] for node, one in enumerate(nodes)}
        findings += [Finding(name, (n,), of["failed"]) for n, of in answers.items() if "failed" in of]
        good = {node: of["answer"] for node, of in answers.items() if "answer" in of}
        findings += check.judge(Looks(names, [(0, good)]))
    lines = {f"{', '.join(names[n] for n in f.nodes)}: {f.check}: {f.text}": f.severity for f in findings}
    bad = [line for line, severity in lines.items() if severity == "bad"]
    if bad:
        raise BadNode("\n".join([*bad, "`phalanx preflight` with the same config looks closer"]))
    if placement.rank == 0:
        for line in lines:
            log.warn(line)
