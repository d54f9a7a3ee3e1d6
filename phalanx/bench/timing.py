"""Timing calls on a device: warm-up, repeats, and the median with its spread. CUDA events on a GPU, the clock on a
CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from phalanx.base.dataclass import dataclass

BATCH_S = 1e-3  # GPU: short calls are timed several at a time, so that the gaps around an event do not count


@dataclass(frozen=True)
class Times:
    """Seconds of one call: median, least and most of `repeats` measurements."""

    median: float
    low: float
    high: float
    repeats: int

    @staticmethod
    def of(seconds: Sequence[float]) -> Times:
        return Times(median(seconds), min(seconds), max(seconds), len(seconds))

    @property
    def ms(self) -> str:
        return f"{1e3 * self.median:.3f} ({1e3 * self.low:.3f}-{1e3 * self.high:.3f})"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    call: Callable[[], Any], device: torch.device, warmup: int = 3, repeats: int = 10, batch: int | None = None
) -> Times:
    """Times of `call()`, which must do the same work each time.

    batch: calls in a row that make one measurement on a GPU; None: as many as fill BATCH_S. Ranks that communicate
    must agree on it.
    """
    for _ in range(warmup):
        call()
    if device.type != "cuda":
        return Times.of([_clock(call) for _ in range(repeats)])
    times = batch or calls_in(BATCH_S, _events(call, 1))
    return Times.of([_events(call, times) for _ in range(repeats)])


def calls_in(seconds: float, each: float) -> int:
    return max(1, min(1000, round(seconds / max(each, 1e-7))))


def _clock(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _events(call: Callable[[], Any], times: int) -> float:
    """Seconds per call of `times` calls after one another."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / times
