"""The step line: what a person reads about a step, in log.txt and on the console."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from phalanx.base.log import Log
from phalanx.base.records import Row, Sink
from phalanx.observe.routing import routing_text
from phalanx.observe.run_records import LOSS, METRIC

WIDTH = 120  # maximum number of columns in a step line
SOON_S, LATER_S = 2.0, 10.0  # between two step lines on a terminal: in the first minute, and afterwards
FIRST_S = 60.0


def step_line(values: dict[str, Any], gpu: bool, ranks: int, width: int = WIDTH) -> str:
    """The step line: `key=value` for what exists on this machine, in a fixed order. The least important fields are
    omitted until it fits the width."""
    fields = _fields(values, gpu, ranks)
    while len(" ".join(text for _, text in fields)) > width and max(rank for rank, _ in fields) > 0:
        least = max(range(len(fields)), key=lambda i: (fields[i][0], i))
        del fields[least]
    return " ".join(text for _, text in fields)


def _fields(v: dict[str, Any], gpu: bool, ranks: int) -> list[tuple[int, str]]:
    """Each field with a number: 0 always stays, the highest is omitted first."""
    fields = [
        (0, f"step={v['step']}"),
        (0, f"loss={v['loss']:.4f}"),
        (1, f"grad_norm={v['grad_norm']:.3g}"),
        (4, f"lr={v['lr']:.3e}"),
        (2, f"tok/s={short(v['tokens_per_s'])}"),
    ]
    if "trained_tokens" in v:
        fields += [(2, f"trained={short(v['trained_tokens'])}"), (3, f"padding={100 * v['padding']:.1f}%")]
    if gpu and ranks > 1:
        fields.append((6, f"tok/s/gpu={short(v['tokens_per_s_per_gpu'])}"))
    if gpu and v["mfu"] is None:
        fields.append((6, f"tflops/gpu={v['tflops_per_gpu']:.4g}"))
    if gpu and v["mfu"] is not None:
        fields.append((3, f"mfu={100 * v['mfu']:.1f}%"))
    fields += [
        (4, f"mem={v['memory_gib']:.2f}GiB"),
        (6, f"tokens={short(v['tokens'])}"),
        (2, f"eta={duration(v['eta_s'])}"),
    ]
    if v["skipped"]:
        fields.append((1, f"skipped={v['skipped']}"))
    if "mtp_loss" in v:
        fields.append((3, f"mtp_loss={v['mtp_loss']:.4f}"))
    fields += [(3, f"{name.removeprefix(METRIC)}={v[name]:.4g}") for name in v if name.startswith(METRIC)]
    if "fp8_lost" in v:
        fields.append((5, f"fp8_lost={v['fp8_lost']:.3g}@{v['fp8_worst'].rsplit(' ', 1)[-1].removeprefix('model.')}"))
    if "experts" in v:
        fields += [(5, text) for text in routing_text(v["experts"]).split()]
    return fields + [(1, f"slow={rank}x{ratio:.1f}") for rank, ratio in list(v.get("slow", {}).items())[:3]]


def short(number: float) -> str:
    """8308, 19.3k, 153.6k, 1.93M, 15.0T: at most four digits."""
    if number < 9999.5:
        return f"{number:.0f}"
    for unit, size in (("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12)):
        if number < 999.95 * size or unit == "T":
            break
    return f"{number / size:.1f}{unit}"


def duration(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s"


class ConsolePace:
    """When a line is due on a terminal: the first at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._began: float | None = None
        self._last = 0.0

    def due(self) -> bool:
        now = self._clock()
        if self._began is None:
            self._began = now
        elif now - self._last < (SOON_S if now - self._began < FIRST_S else LATER_S):
            return False
        self._last = now
        return True


class StepLines(Sink):
    """A line every log.interval steps; by default, for each step in files, and on a terminal as often as a person can
    read."""

    def __init__(self, log: Log, interval: int | None, last_step: int, gpu: bool, ranks: int):
        self._log, self._interval, self._last_step = log, interval, last_step
        self._gpu, self._ranks = gpu, ranks
        self._pace = ConsolePace()

    def write(self, row: Row) -> None:
        if LOSS not in row.values:  # an evaluation, or what somebody else says
            return
        values, width, last = row.plain(), self._log.console_width(), row.step == self._last_step
        if self._interval is not None and row.step % self._interval and not last:
            return
        self._log.note(step_line(values, self._gpu, self._ranks))
        if width is None or self._interval is not None or self._pace.due() or last:
            self._log.say(step_line(values, self._gpu, self._ranks, min(WIDTH, width or WIDTH)))
