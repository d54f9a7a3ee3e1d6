"""The fault matrix: which faults are made, how often, and a table of what was left of the runs.

python -m tests.faults.matrix docs/faults.md [--jobs N] [--json FILE] [--only WORDS] [--part NAME] [--sample]
    [--commit HASH]
python -m tests.faults.matrix docs/faults.md --join FILE...

Parts of a section (a seed, some of a save's operations, a layout) know nothing of each other: --jobs spreads them
over processes, and
--json keeps the result of each, so that what several machines did is joined into one table. tests/faults/runs.py
makes the faults; `make test` has the samples, `make soak` the whole.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

from tests.checkpoint.test_checkpoint import TWELVE
from tests.faults import cases as fault_cases
from tests.faults.network import BETWEEN, bad_cable, cut_cable
from tests.faults.places import folder_goes, folder_moved, pauses, pauses_or_comes_late, wrong_step
from tests.faults.runs import (
    LAYOUTS,
    SEVERAL,
    Fault,
    Tally,
    damage,
    disturbed,
    full_disk,
    hangs,
    kills,
    skips,
    slow,
    stops,
    sweep,
    two_hangs,
)
from tests.faults.storage import bit_flips, requests_that_fail, twelve_by_twelve
from tests.harness import trust
from tests.harness.pool import warm_imports

Part = Callable[[Path], Tally]


@dataclass(frozen=True)
class Section:
    """shows: what, in the table. sample, whole: parts by their names; a name says which seed or piece of the work it
    is."""

    name: str
    shows: str
    sample: dict[str, Part]
    whole: dict[str, Part]


def seeds(fault: Fault, count: int, layouts: list[tuple[int, dict]] = LAYOUTS) -> dict[str, Part]:
    return {f"seed {seed}": partial(disturbed, fault=fault, seed=seed, layouts=layouts) for seed in range(count)}


def operations(how: str, parts: int) -> dict[str, Part]:
    """All operations of a save, dealt out to `parts`: of one that a thread writes, and of one that four write at the
    same time."""
    return {
        f"{what} {first}, {first + parts}...": partial(sweep, how=how, first=first, every=parts, several=several)
        for what, several in (("operations", False), ("operations of four threads", True))
        for first in range(1, parts + 1)
    }


def some_operations(how: str) -> dict[str, Part]:
    return {
        what: partial(sweep, how=how, every=9, several=several)
        for what, several in (("sample", False), ("sample of four threads", True))
    }


def one(part: Part) -> dict[str, Part]:
    return {"sample": part}


SECTIONS = [  # the longest first
    Section(
        "a rank stops (SIGSTOP), stands still, dies, or loses its connections",
        "the others exit with code 6, at once or after `train.timeout_s`, and name that rank and where in the "
        "program it was",
        seeds(two_hangs, 1, SEVERAL),
        seeds(hangs, 10, SEVERAL),
    ),
    Section(
        "kill -9 at any time",
        "one rank or all of them are killed: at the start, in steps, in saves, at the end",
        seeds(kills, 1),
        seeds(kills, 80),
    ),
    Section(
        "a rank leaves out a collective",
        "all exit with code 6 and name that rank, with the collectives that it and the others called (or gloo "
        "aborts because sizes differ)",
        {"seed 14": partial(disturbed, fault=skips, seed=14, layouts=SEVERAL)},
        seeds(skips, 20, SEVERAL),
    ),
    Section(
        "a rank is slow",
        "the log names the rank, how long it computes and where; the results are unchanged",
        {"seed 2": partial(disturbed, fault=slow, seed=2, layouts=SEVERAL)},
        seeds(slow, 10, SEVERAL),
    ),
    Section(
        "a rank pauses for 3 s, or comes late by as much",
        "the others wait, and the rank reports its pause; the results are unchanged",
        {"seed 0": partial(disturbed, fault=pauses, seed=0, layouts=SEVERAL)},
        seeds(pauses_or_comes_late, 10, SEVERAL),
    ),
    Section(
        "the same step goes wrong, once or three times",
        "a wrong gradient or an error on one rank: all ranks end; the next start says whether it repeats",
        {"seed 2": partial(disturbed, fault=wrong_step, seed=2)},
        seeds(wrong_step, 12),
    ),
    Section(
        "the run's folder is moved, replaced or made read-only",
        "exit code 4, or training continues, as checkpoint.on_error says; nothing is written to the wrong folder",
        one(partial(disturbed, fault=folder_moved, seed=0)),
        seeds(folder_goes, 12),
    ),
    Section(
        "packets between two hosts come late and get lost",
        "50 ms of delay, 1 packet in 100 lost (5 ms with tensor parallelism): the same results, later",
        {},
        seeds(bad_cable, 12, BETWEEN),
    ),
    Section(
        "no packet comes between two hosts any more",
        "both sides exit with code 6 in time and name the other; neither saves alone",
        {},
        seeds(cut_cable, 12, BETWEEN),
    ),
    Section(
        "SIGTERM or SIGUSR1 to one rank",
        "all ranks save the same step; no step is repeated",
        seeds(stops, 1),
        seeds(stops, 20),
    ),
    Section(
        "damaged checkpoint",
        "flipped bits; truncated, removed, swapped and mixed files: the previous checkpoint is used",
        seeds(damage, 2),
        seeds(damage, 40),
    ),
    Section(
        "no room on the disk",
        "exit code 4, or training continues, as checkpoint.on_error says; then the run is resumed",
        seeds(full_disk, 1),
        seeds(full_disk, 20),
    ),
    Section(
        "any of 12 layouts loads what any of 12 saved",
        "every master weight, moment and weight is bit-equal; no byte is read twice",
        one(partial(twelve_by_twelve, saved="pp2 ep2", loads=("tp2",))),
        {f"saved by {name}": partial(twelve_by_twelve, saved=name, loads=tuple(TWELVE)) for name in TWELVE},
    ),
    Section(
        "a bit flips in a file of a checkpoint",
        "loading names the file, every time, and uses nothing of it",
        one(partial(bit_flips, seed=0, count=20)),
        {f"seed {seed}": partial(bit_flips, seed=seed, count=50) for seed in range(8)},
    ),
    Section(
        "every storage operation fails",
        "during a save that also removes an old checkpoint and the remains of a failed one",
        some_operations("raise"),
        operations("raise", 4),
    ),
    Section(
        "the process dies in every storage operation",
        "partial writes included",
        some_operations("exit"),
        operations("exit", 4),
    ),
    Section(
        "power is cut at every storage operation",
        "unsynced writes, names and renames are lost",
        some_operations("lose"),
        operations("lose", 4),
    ),
    Section(
        "every request to object storage fails, once or from then on",
        "on an S3 server; an upload that fails leaves no checkpoint",
        one(partial(requests_that_fail, how="raise", first=1, every=18)),
        {
            f"{how}, requests {first}, {first + 4}...": partial(requests_that_fail, how=how, first=first, every=4)
            for how in ("raise", "refuse")
            for first in range(1, 5)
        },
    ),
]


# ---- doing it ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """Of one part. error: what went wrong, with where; empty if nothing did. where: a line on machine, versions and
    date."""

    section: str
    part: str
    faults: int = 0
    runs: int = 0
    differing: int = 0
    seconds: float = 0.0
    error: str = ""
    where: str = ""


def do(section: str, part: str, work: Part, where: str) -> Result:
    """In a folder of its own; whatever goes wrong is the result."""
    begun, tally, error = time.monotonic(), Tally(), ""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        try:
            tally = work(Path(folder))
        except (Exception, pytest.skip.Exception):
            error = traceback.format_exc()[-4000:]
    return Result(section, part, **asdict(tally), seconds=time.monotonic() - begun, error=error, where=where)


def parts_of(sections: Sequence[Section], sample: bool) -> list[tuple[str, str, Part]]:
    return [(s.name, name, work) for s in sections for name, work in (s.sample if sample else s.whole).items()]


def do_all(parts: list[tuple[str, str, Part]], jobs: int, where: str, done: Callable[[Result], None]) -> None:
    """Each in a process of its own that was forked when everything was imported, `jobs` of them at a time."""
    warm_imports()
    context, waiting = mp.get_context("fork"), parts[::-1]
    running: dict[Connection, tuple[str, str]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            section, part, work = waiting.pop()
            mine, theirs = context.Pipe(duplex=False)
            context.Process(
                target=lambda *part, to=theirs: to.send(do(*part)), args=(section, part, work, where)
            ).start()
            theirs.close()
            running[mine] = (section, part)
        for pipe in wait(list(running)):
            assert isinstance(pipe, Connection)
            names = running.pop(pipe)
            try:
                done(pipe.recv())
            except EOFError:
                done(Result(*names, error="its process died", where=where))
            pipe.close()


def where(jobs: int, commit: str) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "safetensors", "xxhash"))
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit}, {os.cpu_count()} cores, {jobs} jobs, "
        f"{platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, {versions}"
    )


def commit_here() -> str:
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return told.stdout.strip() or "unknown"


# ---- the table -----------------------------------------------------------------------------------

HEAD = """# Faults

What the tests do to runs on purpose, and what is left of the runs afterwards. `python -m tests.faults.matrix docs/faults.md` writes this page; `make soak` does the same
checks, `make test` a sample of them. The runs have 1 to 4 ranks on gloo, in every layout that two ranks allow, in fp32 and bf16, with and without dropout. They save in the
foreground and in the background. Each is compared with a run that nothing disturbed: every loss and gradient norm bit for bit, the position in the data, every file of the
last checkpoint, and the loop's counters. No checkpoint may be damaged, and no stray file may be left.

kill -9 does not show that files are synced, because the kernel outlives the process. The power cut does: its simulated disk loses whatever was not synced.

| case | what | parts | faults | compared | values that differ | failed | seconds |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""  # noqa: E501


def table(results: list[Result]) -> str:
    rows = []
    for name, shows in dict.fromkeys((s.name, s.shows) for s in SECTIONS):
        found = [r for r in results if r.section == name]
        if found:
            sums = [sum(getattr(r, field) for r in found) for field in ("faults", "runs", "differing")]
            failed = sum(bool(r.error) for r in found)
            cells = [
                name,
                shows,
                listed([r.part for r in found]),
                *sums,
                failed,
                f"{sum(r.seconds for r in found):.0f}",
            ]
            rows.append("| " + " | ".join(map(str, cells)) + " |")
    made = "\n".join(f"- {line}" for line in sorted({r.where for r in results}))
    return (
        f"{HEAD}{chr(10).join(rows)}\n\nSeconds are summed over the parts. Measured "
        f"by:\n\n{made}\n\n{trust.section()}\n## Fault by fault\n\n"
        f"What reveals each fault (in bold: a row of the table above), and which faults nothing reveals.\n\n"
        f"{fault_cases.table()}\n"
    )


def listed(parts: list[str]) -> str:
    """Seeds by their numbers, other parts by their count."""
    numbers = sorted(int(part.removeprefix("seed ")) for part in parts if part.startswith("seed "))
    if not numbers:
        return str(len(parts))
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    return (
        f"seeds {numbers[0]} to {numbers[-1]}"
        if whole and len(numbers) > 1
        else f"seeds {', '.join(map(str, numbers))}"
    )


def joined(files: Sequence[str]) -> list[Result]:
    """Of several runs of this program; a part that two of them did is the later file's."""
    found = {(r["section"], r["part"]): Result(**r) for file in files for r in json.loads(Path(file).read_text())}
    order = [(section, part) for section, part, _ in parts_of(SECTIONS, False)]
    return sorted(
        found.values(), key=lambda r: order.index((r.section, r.part)) if (r.section, r.part) in order else len(order)
    )


def missing(results: list[Result]) -> list[str]:
    done = {(r.section, r.part) for r in results}
    return [f"{section}: {part}" for section, part, _ in parts_of(SECTIONS, False) if (section, part) not in done]


def main(arguments: Sequence[str]) -> int:
    asked = argparse.ArgumentParser(prog="python -m tests.faults.matrix", description=__doc__.split("\n")[0])
    asked.add_argument("out", help="the table, as Markdown")
    asked.add_argument("--jobs", type=int, default=1)
    asked.add_argument("--json", help="the result of each part so far, to be joined")
    asked.add_argument("--join", nargs="+", help="do nothing but write the table of these files")
    asked.add_argument("--only", action="append", help="sections with these words in their names")
    asked.add_argument("--without", action="append", default=[], help="no sections with these words in their names")
    asked.add_argument("--part", action="append", help="parts of these names, such as 'seed 9'")
    asked.add_argument("--sample", action="store_true", help="what `make test` does")
    asked.add_argument("--commit", help="where there is no git to say it")
    given = asked.parse_args(arguments)
    if given.join:
        results = joined(given.join)
        print("\n".join(["not done:", *missing(results)]) if missing(results) else "all parts are there")
    else:
        results = []
        wanted = [
            s
            for s in SECTIONS
            if (not given.only or any(w in s.name for w in given.only)) and not any(w in s.name for w in given.without)
        ]
        parts = [p for p in parts_of(wanted, given.sample) if not given.part or p[1] in given.part]

        def done(result: Result) -> None:
            results.append(result)
            print(
                f"{len(results)}/{len(parts)} {result.section}: {result.part}: {result.faults} faults, "
                f"{result.runs} compared, "
                f"{result.differing} differ, {result.seconds:.0f} s {result.error}",
                flush=True,
            )
            if given.json:
                Path(given.json).write_text(json.dumps([asdict(r) for r in results], indent=1))

        do_all(parts, given.jobs, where(given.jobs, given.commit or commit_here()), done)
    Path(given.out).write_text(table(results))
    return int(any(r.error or r.differing for r in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
