"""The result of a preflight: a verdict for each node with its reasons, as a table of 80 columns or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import BadNode, ConfigError
from phalanx.preflight.check import Finding, Severity

WIDTH = 80
CONFIG = "config"  # what a config that a node cannot read is filed under
MOST_NAMES = 24  # characters of a node's name in the table
GOOD_SHOWN = 8  # nodes without findings that get a row of their own


@dataclass(frozen=True)
class PreflightReport:
    """names: of the nodes, which findings name by number; figures: what was measured, as name and text."""

    names: Sequence[str]
    findings: Sequence[Finding]
    figures: Mapping[str, str]
    seconds: float

    def of(self, node: int, severity: Severity) -> list[Finding]:
        """The findings of a severity that name a node."""
        return [finding for finding in self.findings if finding.severity == severity and node in finding.nodes]

    def verdict(self, node: int) -> str:
        """ok, warning or bad."""
        return "bad" if self.of(node, "bad") else "warning" if self.of(node, "warning") else "ok"

    @property
    def bad(self) -> list[int]:
        """Nodes that a bad finding names."""
        return [node for node in range(len(self.names)) if self.of(node, "bad")]

    @property
    def exit_code(self) -> int:
        """0, or 8 if a node is bad; 2 if no node can read the config, and all for the same reason."""
        refused = [f.text for f in self._bad() if f.check == CONFIG]
        if len(refused) == len(self.names) and len(set(refused)) == 1:
            return ConfigError.exit_code
        return BadNode.exit_code if self.bad else 0

    @property
    def text(self) -> str:
        """A row for each node with findings; good nodes of a large cluster in one line."""
        width = min(MOST_NAMES, max(map(len, ("node", *self.names))))
        good = [node for node in range(len(self.names)) if self.verdict(node) == "ok"]
        rows = [row("node", "verdict", "reason", width)]
        for node, name in enumerate(self.names):
            reasons = [f"{f.check}: {f.text}" for f in (*self.of(node, "bad"), *self.of(node, "warning"))]
            if reasons or len(good) <= GOOD_SHOWN:
                rows.append(row(name, self.verdict(node), "\n".join(dict.fromkeys(reasons)), width))
        if len(good) > GOOD_SHOWN:
            rows.append(f"{len(good):,} nodes are ok")
        return "\n".join([*rows, *self._figures(), self.summary])

    def _figures(self) -> list[str]:
        if not self.figures:
            return []
        left = max(map(len, self.figures)) + 2
        return ["", *(hanging(f"{name:<{left}}", text) for name, text in self.figures.items())]

    @property
    def summary(self) -> str:
        """One line for the end."""
        count, bad = len(self.names), len(self.bad)
        said = (
            f"{bad} of {count} nodes {'is' if bad == 1 else 'are'} bad"
            if bad
            else f"{count} node{'s' * (count > 1)}, none is bad"
        )
        return f"\npreflight: {said} ({self.seconds:.1f} s)"

    def as_json(self) -> str:
        """The same for programs."""
        nodes = [{"name": name, "verdict": self.verdict(node)} for node, name in enumerate(self.names)]
        found: list[dict[str, Any]] = [
            {**asdict(finding), "nodes": [self.names[n] for n in finding.nodes]} for finding in self.findings
        ]
        values = {"nodes": nodes, "findings": found, "figures": dict(self.figures), "seconds": round(self.seconds, 3)}
        return json.dumps(values, indent=1)

    def starters(self, spares: int) -> list[str]:
        """The hosts to start with: as many as there are less the spares, in their order, without bad ones.

        A link between two nodes that is bad by itself costs one of them, the one with more such links. BadNode if too
        few are left.
        """
        dropped = {node for node in self.bad if any(len(f.nodes) == 1 and node in f.nodes for f in self._bad())}
        pairs = [set(f.nodes) for f in self._bad() if len(f.nodes) > 1]
        while left := [pair for pair in pairs if not pair & dropped]:
            nodes = sorted({node for pair in left for node in pair}, reverse=True)
            dropped.add(max(nodes, key=lambda node: sum(node in pair for pair in left)))
        good = [name for node, name in enumerate(self.names) if node not in dropped]
        wanted = len(self.names) - spares
        if len(good) < wanted:
            raise BadNode(
                f"{len(dropped)} of {len(self.names)} nodes are bad, but only {spares} are spares: {wanted} are "
                f"needed and {len(good)} are good"
            )
        return good[:wanted]

    def _bad(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "bad"]


def row(name: str, verdict: str, reasons: str, width: int) -> str:
    """A node's row: its reasons one below the other."""
    shown = name if len(name) <= width else f"{name[: width - 3]}..."
    head = f"{shown:<{width}}  {verdict:<7}  "
    first, *more = reasons.split("\n")
    rest = [hanging(" " * len(head), text) for text in more]
    return "\n".join([hanging(head, first), *rest]).rstrip()


def hanging(head: str, text: str) -> str:
    """Text after a head, wrapped below itself."""
    return "\n".join(wrap(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head))) or head.rstrip()
