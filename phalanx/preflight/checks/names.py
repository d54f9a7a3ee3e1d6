"""Names of nodes: each resolves on every other node, to the address where that node listens."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from typing import Any

from phalanx.preflight.check import Finding, Looks, NodeCheck, NodeView, Peer
from phalanx.preflight.rounds import ALL_PAIRS, partners

RESOLVER_S = 5.0  # the wait for one answer of most resolvers
AT_ONCE = 32


class Names(NodeCheck):
    """Forward: every node's name means its address on every node. Back: an address whose name is known does not have
    another node's."""

    name = "names"
    limit_s = 20.0

    def look(self, view: NodeView, order: Any) -> dict[str, list[Any]]:
        """By name of a peer, if it is wrong: the number of that peer, and what is wrong here."""
        with_address = [peer for peer in view.others if peer.address]
        pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="phalanx-names")
        try:
            asked = [(peer, pool.submit(wrong_name, peer, view.peers)) for peer in with_address]
            found = {}
            for peer, future in asked:
                try:
                    text = future.result(timeout=RESOLVER_S)
                except NotInTime:
                    text = f"no answer of the resolver within {RESOLVER_S:g} s"
                if text:
                    found[peer.name] = [peer.number, text]
            return found
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def judge(self, looks: Looks) -> list[Finding]:
        return by_reporter(self.name, looks, looks.of(0))


def by_reporter(check: str, looks: Looks, wrong: Mapping[int, Mapping[str, list[Any]]]) -> list[Finding]:
    """Findings about pairs: against the node that all others complain of, else against the one that complains.
    wrong: by complaining node, by name of a peer, the peer's number and the complaint."""
    said: dict[int, list[tuple[int, str]]] = {}
    for node, of in wrong.items():
        for number, text in of.values():
            said.setdefault(number, []).append((node, text))
    count = len(looks.names)
    tried_by = {number: [n for n in wrong if number in partners(n, count, looks.brief)] for number in said}
    blamed = [number for number, by in said.items() if len(wrong) > 2 and len(by) == len(tried_by[number])]
    found = [
        Finding(check, (number,), f"{looks.names[number]} from all {others(looks)}: {said[number][0][1]}")
        for number in blamed
    ]
    for node, of in wrong.items():
        mine = [(name, text) for name, (number, text) in of.items() if number not in blamed]
        if mine:
            more = f" (and {len(mine) - 1} more)" if len(mine) > 1 else ""
            found.append(Finding(check, (node,), f"{mine[0][0]} from here: {mine[0][1]}{more}"))
    return found


def others(looks: Looks) -> str:
    return "others that tried" if looks.brief and len(looks.names) > ALL_PAIRS else "others"


def wrong_name(peer: Peer, peers: Any) -> str:
    """What is wrong with a peer's name on this node; "" if nothing is."""
    try:
        found = {str(answer[4][0]) for answer in socket.getaddrinfo(peer.name, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        return f"the name {peer.name} does not resolve ({getattr(error, 'strerror', None) or error})"
    if peer.address not in found:
        return f"the name {peer.name} means {', '.join(sorted(found))}, but it listens at {peer.address}"
    try:
        back = socket.getnameinfo((peer.address, 0), socket.NI_NAMEREQD)[0]
    except OSError:
        return ""  # addresses without names are common
    other = next((p.name for p in peers if p.number != peer.number and back.split(".")[0] == p.name.split(".")[0]), "")
    return f"the address {peer.address} has the name of {other}" if other else ""
