"""Links: bytes per second between pairs of nodes, so that a slow cable is named and not the nodes that talk over it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from phalanx.preflight.check import Finding, Looks, NodeCheck, NodeView, amount
from phalanx.preflight.probe import bytes_per_second
from phalanx.preflight.robust import slow
from phalanx.preflight.rounds import disjoint, tournament

SEND_S = 0.12  # of one measurement
REPEATS = 3
LOOKS = 4  # at a link before it is named: a machine that does something else is slow for a while, a cable always
Rates = dict[tuple[int, int], list[float]]


class Links(NodeCheck):
    """Each order is [pairs of nodes, which of a pair sends, all rounds of a later look, number of the look]. In a round
    no node is in two pairs. What looks slow is measured again before it is named, without the others, up to LOOKS
    times.

    Over TCP on the interface that training uses. What InfiniBand or NVLink carry beside it is measured by `phalanx
    bench comm`.
    """

    name = "links"
    limit_s = 20.0

    def next_order(self, looks: Looks) -> Any:
        asked = [order for order, _ in looks.answers]
        repeated, look = asked[-1][2:] if asked else ([], 0)
        rounds = repeated if look else [plain(pairs) for pairs in tournament(len(looks.names))]
        done = sum(order[3] == look for order in asked)
        if done == 2 * len(rounds):  # the next look
            rounds = repeated = [plain(pairs) for pairs in disjoint(sorted(suspects(rates(looks))))]
            look += 1
            done = 0
        if look == LOOKS or not rounds:
            return None
        return [rounds[done // 2], done % 2, repeated, look]

    def look(self, view: NodeView, order: Any) -> Any:
        """Of the node that sends: [the other's number, rates of repeats]."""
        pairs, end, *_ = order
        for pair in pairs:
            if pair[end] == view.number:
                return [pair[1 - end], measured(view, pair[1 - end], REPEATS)]
        return None

    def judge(self, looks: Looks) -> list[Finding]:
        return judged(self.name, rates(looks), looks)

    def figures(self, looks: Looks) -> dict[str, str]:
        best = [max(of) for of in rates(looks).values()]
        if not best:
            return {}
        middle, low, high = (amount(of(best) / 1e9) for of in (median, min, max))
        return {"links": f"median {middle} GB/s one way over TCP, {low} to {high}"}


def plain(pairs: Iterable[Sequence[int]]) -> list[list[int]]:
    """As JSON has them."""
    return [list(pair) for pair in pairs]


def measured(view: NodeView, to: int, repeats: int) -> list[float]:
    """Bytes per second of each repeat; none if the other node is lost, or cannot be reached, which `ports` reports."""
    peer = view.peers[to]
    if not peer.port:
        return []
    try:
        return [bytes_per_second(peer.address, peer.port, bytes.fromhex(view.token), SEND_S) for _ in range(repeats)]
    except OSError:
        return []


def rates(looks: Looks) -> Rates:
    """Repeats of each directed link, (from, to)."""
    found: Rates = {}
    for number in range(len(looks.answers)):
        for node, answer in looks.of(number).items():
            if answer[1]:
                found.setdefault((node, answer[0]), []).extend(answer[1])
    return found


def ends(rates: Rates, place: int) -> dict[int, list[float]]:
    """Repeats of each node's best link: as sender (place 0) or receiver (1). One bad cable spoils only its own node's
    best."""
    found: dict[int, list[float]] = {}
    for link, of in rates.items():
        node = link[place]
        if node not in found or max(of) > max(found[node]):
            found[node] = of
    return found


def slow_nodes(rates: Rates) -> dict[int, tuple[str, float]]:
    """Nodes all of whose links are slow one way or both: which way, and the ratio to the median."""
    sends, receives = slow(ends(rates, 0)), slow(ends(rates, 1))
    found = {}
    for node in sorted({*sends, *receives}):
        way = "sends and receives" if node in sends and node in receives else "sends" if node in sends else "receives"
        found[node] = way, min(ratio for ratio in (sends.get(node), receives.get(node)) if ratio is not None)
    return found


def slow_links(rates: Rates, named: Mapping[int, Any]) -> dict[tuple[int, int], float]:
    """Slow links between nodes that are not slow themselves."""
    return slow({link: of for link, of in rates.items() if not set(link) & set(named)})


def suspects(rates: Rates) -> set[tuple[int, int]]:
    """Pairs to measure again."""
    named = slow_nodes(rates)
    links = {*slow_links(rates, named), *(link for link in rates if set(link) & set(named))}
    return {(min(link), max(link)) for link in links}


def judged(check: str, rates: Rates, looks: Looks) -> list[Finding]:
    named = slow_nodes(rates)
    found = [
        Finding(
            check, (node,), f"{way} at {100 * ratio:.0f} % of the median: its cable or adapter", "bad", {"ratio": ratio}
        )
        for node, (way, ratio) in named.items()
    ]
    links = slow_links(rates, named)
    for a, b in sorted({(min(link), max(link)) for link in links}):
        ratios = {link: links[link] for link in ((a, b), (b, a)) if link in links}
        ratio = min(ratios.values())
        way = "both ways" if len(ratios) == 2 else f"from {looks.text([next(iter(ratios))[0]])}"
        text = f"the link between {looks.text([a, b])} is at {100 * ratio:.0f} % of the median {way}"
        found.append(Finding(check, (a, b), text, "bad", {"ratio": ratio}))
    return found
