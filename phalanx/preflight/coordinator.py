"""The coordinator of a preflight: it sends all nodes the same requests, check by check, and judges their answers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.preflight.agent import checks
from phalanx.preflight.channel import Channel, ChannelLost
from phalanx.preflight.check import Finding, Looks, NodeCheck
from phalanx.preflight.report import CONFIG, PreflightReport

START_S = 60.0  # of a node, until it serves probes
MEET = "meeting"  # what findings about nodes that do not take part are filed under


@dataclass
class Node:
    """A node as the coordinator sees it. channel: None once it is lost."""

    name: str
    address: str
    channel: Channel | None
    port: int = 0


@dataclass
class Coordinator:
    """One preflight. absent: names of nodes that should have come and why they did not; say: called with the name of
    each check as it begins."""

    nodes: Sequence[Node]
    absent: Mapping[str, str] = field(default_factory=dict)
    say: Callable[[str], None] = lambda name: None
    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, str] = field(default_factory=dict)

    def run(self) -> PreflightReport:
        """All checks. Nodes that are lost on the way are findings; the others go on."""
        began = time.monotonic()
        names = [*(node.name for node in self.nodes), *self.absent]
        for number, why in enumerate(self.absent.values(), len(self.nodes)):
            self.findings.append(Finding(MEET, (number,), why))
        self._introduce()
        for check in checks():
            self.say(check.name)
            looks = self._looks(check)
            self.findings += check.judge(looks)
            self.figures |= check.figures(looks)
        return PreflightReport(names, self.findings, self.figures, time.monotonic() - began)

    def end(self, code: int) -> None:
        """Tell every node how it ended."""
        for node in self.nodes:
            if node.channel is not None:
                try:
                    node.channel.send({"end": code})
                except ChannelLost:
                    node.channel = None

    def _introduce(self) -> None:
        token = secrets.token_hex(16)
        for number, said in self._ask({number: {"token": token} for number in self._there()}, START_S, MEET).items():
            self.nodes[number].port = int(said["port"])
            if said["refused"]:
                self.findings.append(Finding(CONFIG, (number,), str(said["refused"])))
        peers = [[node.name, node.address, node.port if node.channel else 0] for node in self.nodes]
        for number in self._there():
            self._send(number, {"peers": peers, "you": number}, MEET)

    def _looks(self, check: NodeCheck) -> Looks:
        names = [node.name for node in self.nodes]
        answers: list[tuple[Any, Mapping[int, Any]]] = []
        failed: set[int] = set()
        while (order := check.next_order(Looks(names, answers))) is not None:
            lost = [number for number, node in enumerate(self.nodes) if node.channel is None]
            message = {"check": check.name, "order": order, "lost": lost}
            asked = {number: message for number in self._there() if number not in failed}
            said = self._ask(asked, check.limit_s, check.name)
            for number, message in said.items():
                if "failed" in message:
                    failed.add(number)
                    self.findings.append(Finding(check.name, (number,), str(message["failed"])))
            answers.append((order, {n: message["answer"] for n, message in said.items() if "answer" in message}))
        return Looks(names, answers)

    def _there(self) -> list[int]:
        return [number for number, node in enumerate(self.nodes) if node.channel is not None]

    def _ask(self, messages: Mapping[int, Mapping[str, Any]], limit_s: float, doing: str) -> dict[int, dict[str, Any]]:
        """Send each node its message, and wait for all answers."""
        until = time.monotonic() + limit_s
        sent = [number for number, message in messages.items() if self._send(number, message, doing)]

        def receive(number: int) -> dict[str, Any] | str:
            channel = self.nodes[number].channel
            try:
                return {} if channel is None else channel.receive(max(0.01, until - time.monotonic()))
            except ChannelLost as error:
                return str(error)

        if not sent:
            return {}
        with ThreadPoolExecutor(len(sent), thread_name_prefix="phalanx-preflight") as pool:
            said = dict(zip(sent, pool.map(receive, sent)))
        for number, message in said.items():
            if isinstance(message, str):
                self._lose(number, doing, message)
        return {number: message for number, message in said.items() if isinstance(message, dict)}

    def _send(self, number: int, message: Mapping[str, Any], doing: str) -> bool:
        channel = self.nodes[number].channel
        try:
            if channel is not None:
                channel.send(message)
            return channel is not None
        except ChannelLost as error:
            self._lose(number, doing, str(error))
            return False

    def _lose(self, number: int, doing: str, why: str) -> None:
        """From here on the node takes no part."""
        self.nodes[number].channel = None
        self.findings.append(Finding(MEET, (number,), f"{why}, while it was asked about {doing}"))
