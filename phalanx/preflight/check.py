"""NodeCheck: one kind of check, in one file: what each node examines, and the verdict on the answers of all nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar, Literal

from phalanx.base.dataclass import dataclass
from phalanx.config.run import Run
from phalanx.preflight.rounds import partners

SEAM = "preflight_check"
Severity = Literal["bad", "warning"]


@dataclass(frozen=True)
class Peer:
    """A node as the others reach it: its number and name, the address that it listens at, and the port of its probe
    server (0: it has none, or the node is lost)."""

    number: int
    name: str
    address: str = ""
    port: int = 0


@dataclass
class NodeView:
    """What a check is given on a node.

    number     of this node among `peers`, which are all nodes in their order
    token      that this preflight's probe servers ask for (hexadecimal)
    run        the run of CONFIG; None without one
    config     the config file as it was given, and the overrides; empty without one
    interface  the network interface that the node listens at; "" if it is not known
    ranks      of the run on each node
    env        the environment variables of this node's process
    kept       what a check keeps from one order to its next
    brief      whether a run's first seconds ask: few pairs are tried, and little is read
    """

    number: int
    peers: Sequence[Peer]
    token: str = ""
    run: Run | None = None
    config: Sequence[str] = ()
    interface: str = ""
    ranks: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    brief: bool = False

    @property
    def folder(self) -> Path | None:
        """The run's folder, if it is in a file system."""
        return None if self.run is None or "://" in self.run.dir else Path(self.run.dir)

    @property
    def others(self) -> list[Peer]:
        """All nodes but this one."""
        return [peer for peer in self.peers if peer.number != self.number]

    @property
    def partners(self) -> list[Peer]:
        """The peers that this node tries to reach: all others, of many in a run's first seconds some of them."""
        return [self.peers[number] for number in partners(self.number, len(self.peers), self.brief)]


@dataclass(frozen=True)
class Finding:
    """Something wrong with some nodes: `text` says what, in words that follow the check's name. figures: its numbers,
    for programs."""

    check: str
    nodes: tuple[int, ...]
    text: str
    severity: Severity = "bad"
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Looks:
    """What the nodes answered so far. names: of the nodes; answers: for each order in turn, (order, answer by node);
    nodes that failed are missing. brief: as of NodeView."""

    names: Sequence[str]
    answers: Sequence[tuple[Any, Mapping[int, Any]]] = ()
    brief: bool = False

    def of(self, number: int) -> Mapping[int, Any]:
        """The answers to the order of this number; those of None are left out."""
        found = self.answers[number][1] if number < len(self.answers) else {}
        return {node: answer for node, answer in found.items() if answer is not None}

    def text(self, nodes: Sequence[int]) -> str:
        """Names of some nodes."""
        return ", ".join(self.names[n] for n in nodes)


class NodeCheck(ABC):
    """A check of the nodes of a run. A new one is one file with a subclass, registered as a `preflight_check`.

    name     in the table, one word
    brief    whether it is also one of the checks of a run's first seconds: a few ms on a good node, no GPU at work
    limit_s  a node that takes longer for one order is reported as not answering
    """

    name: ClassVar[str]
    brief: ClassVar[bool] = False
    limit_s: ClassVar[float] = 8.0

    def next_order(self, looks: Looks) -> Any:
        """The next thing that all nodes are asked, as a plain value; None: no more. By default one order, 0."""
        return None if looks.answers else 0

    @abstractmethod
    def look(self, view: NodeView, order: Any) -> Any:
        """Answer an order on one node, as plain values; None: nothing to say. An exception is a finding against the
        node."""

    @abstractmethod
    def judge(self, looks: Looks) -> list[Finding]:
        """What is wrong with which nodes. Pure: the same for the same answers."""

    def figures(self, looks: Looks) -> dict[str, str]:
        """Lines for the bottom of the report: what was measured, as name and text."""
        return {}


def amount(value: float) -> str:
    """Of a figure: three digits, and all those before the point: 0.0467, 5.12, 4,240."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def differing(check: str, what: str, values: Mapping[int, Any], severity: Severity = "bad") -> list[Finding]:
    """Findings against the nodes whose value is not that of most nodes; with two halves, against those unlike the first
    node."""
    texts = {node: str(value) for node, value in values.items()}
    if len(set(texts.values())) < 2:
        return []
    first = texts[min(texts)]
    most = max(dict.fromkeys(texts.values()), key=lambda text: (list(texts.values()).count(text), text == first))
    return [
        Finding(check, (node,), f"{what} {text}, on most nodes {most}", severity)
        for node, text in texts.items()
        if text != most
    ]
