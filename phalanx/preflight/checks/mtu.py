"""MTU: the largest packet of each node's interface, and whether one of that size arrives at its neighbours whole."""

from __future__ import annotations

import fcntl
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from phalanx.preflight.check import Finding, Looks, NodeCheck, NodeView, differing
from phalanx.preflight.probe import packet_arrives

GET_MTU = 0x8921  # Linux' SIOCGIFMTU
LARGEST = 65507  # bytes of a UDP datagram
ASKED = 4  # neighbours in the order of nodes that are sent a packet


class Mtu(NodeCheck):
    """A path that loses large packets lets small ones through: connections open, then hang at the first tensor."""

    name = "mtu"
    brief = True
    limit_s = 15.0

    def look(self, view: NodeView, order: Any) -> dict[str, Any]:
        mtu = interface_mtu(view.interface)
        if mtu is None:
            return {"mtu": None, "lost": []}
        count = len(view.peers)
        near = [view.peers[(view.number + i) % count] for i in range(1, min(ASKED, count - 1) + 1)]
        near = [peer for peer in near if peer.port]
        with ThreadPoolExecutor(ASKED, thread_name_prefix="phalanx-mtu") as pool:
            size, token = min(mtu, LARGEST), bytes.fromhex(view.token)
            said = list(pool.map(lambda peer: packet_arrives(peer.address, peer.port, token, size), near))
            small = list(pool.map(lambda peer: packet_arrives(peer.address, peer.port, token, 512).arrived, near))
        lost = [
            [peer.number, answer.why]
            for peer, answer, reached in zip(near, said, small)
            if not answer.arrived and reached  # else the port is the trouble, not the size
        ]
        return {"mtu": mtu, "lost": lost}

    def judge(self, looks: Looks) -> list[Finding]:
        answers = looks.of(0)
        mtus = {node: said["mtu"] for node, said in answers.items() if said["mtu"] is not None}
        found = differing(self.name, "MTU", mtus)
        odd = {node for finding in found for node in finding.nodes}
        for node, said in answers.items():
            for peer, why in said["lost"]:
                if not {node, peer} & odd:  # the difference explains it
                    text = f"packets of {said['mtu']} bytes to {looks.names[peer]} do not arrive ({why})"
                    found.append(Finding(self.name, (node, peer), text))
        return found


def interface_mtu(interface: str) -> int | None:
    """Bytes; None where the system does not say (Linux does)."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            said = fcntl.ioctl(any_socket, GET_MTU, struct.pack("16si12x", interface.encode(), 0))
    except (OSError, struct.error):
        return None
    return int(struct.unpack("16si12x", said)[1])
