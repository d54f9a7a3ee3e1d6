"""What a run of tests was, as a page of Markdown: `make soak` writes it, from the reports that pytest has at its
end."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

OUTCOMES = ("passed", "failed", "skipped")
HEAD = """# The large sets of tests

| what | tests | passed | failed | skipped | seconds | longest |
| --- | --- | --- | --- | --- | --- | --- |
"""


def table(stats: Mapping[str, Sequence[Any]], workers: int) -> str:
    """stats: pytest's reports by outcome. A row a test function, the longest first; failed ones and reasons to skip
    below. Errors are failures."""
    counts: dict[str, Counter] = defaultdict(Counter)
    seconds: dict[str, Counter] = defaultdict(Counter)
    for outcome in (*OUTCOMES, "error"):
        for report in stats.get(outcome, ()):
            counts[section(report.nodeid)][outcome if outcome in OUTCOMES else "failed"] += 1
    for report in (r for reports in stats.values() for r in reports if hasattr(r, "duration")):
        seconds[section(report.nodeid)][report.nodeid] += report.duration
    total, took = Counter(), {name: sum(times.values()) for name, times in seconds.items()}
    rows = []
    for name in sorted(counts, key=lambda name: -took.get(name, 0.0)):
        total.update(counts[name])
        rows.append(row(f"`{name}`", counts[name], took.get(name, 0.0), max(seconds[name].values(), default=0.0)))
    rows.append(
        row(
            "all",
            total,
            sum(took.values()),
            max((s for times in seconds.values() for s in times.values()), default=0.0),
        )
    )
    failed = sorted({r.nodeid for outcome in ("failed", "error") for r in stats.get(outcome, ())})
    reasons = Counter(
        str(r.longrepr[2] if isinstance(r.longrepr, tuple) else r.longrepr) for r in stats.get("skipped", ())
    )
    parts = [HEAD + "\n".join(rows), f"Seconds are summed over {workers} workers. {where()}"]
    parts += [f"Failed:\n\n{bullets(failed)}"] if failed else []
    parts += (
        [f"Skipped:\n\n{bullets(f'{count}: {reason}' for reason, count in reasons.most_common())}"] if reasons else []
    )
    return "\n\n".join(parts) + "\n"


def section(nodeid: str) -> str:
    """Its file and function; parts of the fault matrix by their section too."""
    name, _, parameters = nodeid.partition("[")
    case = parameters.removeprefix("all, ").rpartition(": ")[0] if "nothing_is_lost" in name else ""
    return f"{name.removeprefix('tests/')} {case}".strip()


def row(name: str, counts: Counter, seconds: float, longest: float) -> str:
    return (
        f"| {name} | {sum(counts.values())} | "
        + " | ".join(str(counts[o]) for o in OUTCOMES)
        + f" | {seconds:.0f} | {longest:.0f} |"
    )


def bullets(lines: Any) -> str:
    return "\n".join(f"- {line}" for line in lines)


def where() -> str:
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    commit = told.stdout.strip() or "unknown"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy"))
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, {versions}."
    )
