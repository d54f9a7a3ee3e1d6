"""A node's part of a preflight: it serves probes, and answers the coordinator's requests with what its checks find."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from phalanx.base import registry
from phalanx.base.dataclass import dataclass
from phalanx.base.errors import PhalanxError
from phalanx.base.log import describe
from phalanx.config.run import Run
from phalanx.preflight.channel import Channel
from phalanx.preflight.check import SEAM, NodeCheck, NodeView, Peer
from phalanx.preflight.probe import ProbeServer

PATIENCE_S = 120.0  # for the next order; a coordinator that is gone longer than that ends the node's part


@dataclass(frozen=True)
class AgentStart:
    """What a node knows by itself: where it listens, the run of CONFIG (None without one), why CONFIG cannot be read,
    the words of CONFIG and its overrides, the ranks on each node, and the environment variables."""

    address: str
    interface: str = ""
    run: Run | None = None
    refused: str = ""
    config: Sequence[str] = ()
    ranks: int = 1
    env: Mapping[str, str] = field(default_factory=dict)


def checks(brief: bool = False) -> list[NodeCheck]:
    """All checks in the order of the registry: ours first. brief: those of a run's first seconds."""
    found = [registry.find(SEAM, name, NodeCheck)() for name in registry.names(SEAM)]
    return [check for check in found if check.brief or not brief]


def serve(channel: Channel, start: AgentStart) -> int:
    """Answer orders until the coordinator says how it ended; returns that exit code. ChannelLost if it is gone."""
    begin = channel.receive(PATIENCE_S)
    token = str(begin["token"])
    made = {check.name: check for check in checks()}
    with ProbeServer(start.address, bytes.fromhex(token)) as server:
        channel.send({"port": server.port, "refused": start.refused})
        roster = channel.receive(PATIENCE_S)
        peers = [Peer(number, *of) for number, of in enumerate(roster["peers"])]
        view = NodeView(
            roster["you"], peers, token, start.run, start.config, start.interface, start.ranks, dict(start.env)
        )
        while True:
            order = channel.receive(PATIENCE_S)
            if "end" in order:
                return int(order["end"])
            for number in order["lost"]:  # nobody waits for it again
                peers[number] = replace(peers[number], port=0)
            channel.send(answer(made[order["check"]], view, order["order"]))


def answer(check: NodeCheck, view: NodeView, order: object) -> dict[str, object]:
    """What a check sees, or the error that it met: one failing check must not end the others."""
    try:
        return {"answer": check.look(view, order)}
    except PhalanxError as error:
        return {"failed": describe(error)}
    except OSError as error:
        return {"failed": f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"}
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return {"failed": f"{type(error).__name__}: {error} (at {place.filename}:{place.lineno})"}
