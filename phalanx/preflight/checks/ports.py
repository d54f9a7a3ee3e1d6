"""Ports: every node reaches the port at which every other node listens, as gloo and NCCL will."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from phalanx.preflight.check import Finding, Looks, NodeCheck, NodeView, Peer
from phalanx.preflight.checks.names import by_reporter
from phalanx.preflight.probe import CONNECT_S, clock_offset

AT_ONCE = 64


class Ports(NodeCheck):
    """All pairs both ways, because gloo's world group connects each rank with each. The ports are ones that the kernel
    chose, as theirs are: a firewall that opens a single port is found. In a run's first seconds some pairs of
    many (rounds.partners)."""

    name = "ports"
    brief = True
    limit_s = 4 * CONNECT_S

    def look(self, view: NodeView, order: Any) -> dict[str, list[Any]]:
        with_port = [peer for peer in view.partners if peer.port]
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="phalanx-ports") as pool:
            said = list(pool.map(lambda peer: unreachable(peer, view.token), with_port))
        return {peer.name: [peer.number, text] for peer, text in zip(with_port, said) if text}

    def judge(self, looks: Looks) -> list[Finding]:
        return by_reporter(self.name, looks, looks.of(0))


def unreachable(peer: Peer, token: str) -> str:
    """Why a peer's port cannot be reached from here; "" if it can."""
    try:
        clock_offset(peer.address, peer.port, bytes.fromhex(token))
    except TimeoutError:
        return f"no connection to {peer.address}, port {peer.port}: no answer in {CONNECT_S:g} s (a firewall?)"
    except OSError as error:
        return f"no connection to {peer.address}, port {peer.port}: {error.strerror or error}"
    return ""
