"""What a run says of its steps: counters, the step line and the rows for trackers. Values come from the device one
step late."""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from phalanx.base.log import Log
from phalanx.comm.health.pace import Slow
from phalanx.comm.health.waits import Waited
from phalanx.engine.fp8_state import fp8_values, was_cast, worst
from phalanx.engine.step import StepResult
from phalanx.observe.routing import routing_text, routing_values
from phalanx.observe.trackers import Trackers

WIDTH = 120  # columns of a step line, at most
SOON_S, LATER_S = 2.0, 10.0  # between two step lines on a terminal: in the first minute, and from then on
FIRST_S = 60.0
MEDIAN_OF = 51  # steps whose median gives the time that is left
FP8_EVERY = 50  # steps between two whole tables of what casts of low precision lost


class DeviceTime:
    """A point in the device's work, taken without waiting for it: on a GPU an event in the stream, else the clock."""

    def __init__(self, device: torch.device):
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._clock = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: DeviceTime) -> float:
        """Both must be over."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1e3
        return self._clock - earlier._clock


class Pending:
    """A step's results on their way to the host: copied beside the computation, read when the next step is already
    running."""

    def __init__(self, step: int, lr: float, result: StepResult, waited: Waited | None = None):
        self.step, self.lr, self.waited = step, lr, waited
        self._has_mtp = result.mtp_loss is not None
        mtp_loss = torch.zeros_like(result.loss) if result.mtp_loss is None else result.mtp_loss
        fields = (result.loss, result.grad_norm, result.skipped, result.tokens, result.stop, mtp_loss)
        packed = torch.stack([f.double() for f in fields])
        self._routing = None if result.routing is None else result.routing.shape
        if result.routing is not None:
            packed = torch.cat((packed, result.routing.flatten()))
        self._fp8 = None if result.fp8 is None else result.fp8.shape
        self._distance = None if result.gradient_distance is None else result.gradient_distance.shape
        self._fp8_at, self._distance_at = len(packed), len(packed) + (0 if result.fp8 is None else result.fp8.numel())
        packed = torch.cat(
            [packed, *(t.flatten().double() for t in (result.fp8, result.gradient_distance) if t is not None)]
        )
        self._host = packed
        if packed.is_cuda:
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
        self.moment = DeviceTime(packed.device)

    def read(self) -> tuple[float, float, int, int, bool]:
        """(loss, gradient norm, why the step was skipped, tokens with a loss, stop)."""
        self.moment.wait()
        loss, norm, skipped, tokens, stop = self._host[:5].tolist()
        return loss, norm, int(skipped), int(tokens), stop > 0

    def mtp_loss(self) -> float | None:
        """Mean loss of what predicts further tokens, after `read`; None where nothing does."""
        return self._host[5].item() if self._has_mtp else None

    def routing(self) -> dict[str, list[Any]] | None:
        """Per layer, after `read`; None without experts."""
        if self._routing is None:
            return None
        return routing_values(self._host[6 : 6 + self._routing.numel()].view(self._routing).tolist())

    def fp8(self) -> list[Any] | None:
        """What casts of low precision lost, as Fp8State.totals, after `read`; None without train.fp8."""
        return None if self._fp8 is None else self._host[self._fp8_at : self._distance_at].view(self._fp8).tolist()

    def gradient_distance(self) -> list[list[float]] | None:
        """(cosine, relative error) of each linear's gradient, after `read`; None of a step without a shadow."""
        return None if self._distance is None else self._host[self._distance_at :].view(self._distance).tolist()


@dataclass
class Counters:
    """What goes on counting over restarts (saved in checkpoints)."""

    step: int = 0
    consumed_samples: int = 0
    tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    rollbacks: int = 0


@dataclass(frozen=True)
class Speed:
    """Facts for rates: FLOPs per token (forward and backward), ranks, the device's peak in FLOP/s if known, tokens
    per sequence. shared: bytes of memory that a GPU shares with others, which its count of tensors lacks."""

    flops_per_token: float
    ranks: int
    peak: float | None
    seq_length: int
    shared: int = 0


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that tensors took on this GPU, or that this process took of main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def step_line(values: dict[str, Any], gpu: bool, ranks: int, width: int = WIDTH) -> str:
    """The step line: `key=value` of what there is on this machine, in one order. What matters least is left out
    until it fits the width."""
    fields = _fields(values, gpu, ranks)
    while len(" ".join(text for _, text in fields)) > width and max(rank for rank, _ in fields) > 0:
        least = max(range(len(fields)), key=lambda i: (fields[i][0], i))
        del fields[least]
    return " ".join(text for _, text in fields)


def _fields(v: dict[str, Any], gpu: bool, ranks: int) -> list[tuple[int, str]]:
    """Each with a number: 0 stays whatever the width, the highest goes first."""
    fields = [
        (0, f"step={v['step']}"),
        (0, f"loss={v['loss']:.4f}"),
        (1, f"grad_norm={v['grad_norm']:.3g}"),
        (4, f"lr={v['lr']:.3e}"),
        (2, f"tok/s={short(v['tokens_per_s'])}"),
    ]
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


class Reporter:
    """Turns finished steps into counters, lines and files. The counters are on every rank, the writing on rank 0."""

    def __init__(
        self,
        log: Log,
        trackers: Trackers | None,
        speed: Speed,
        counters: Counters,
        total_steps: int,
        interval: int | None,
        device: torch.device,
        fp8_names: tuple[str, ...] = (),
        heard: Callable[[dict[str, Any]], None] = lambda values: None,
    ):
        self.heard = heard  # is given each finished step's row
        self.quiet = False  # no step lines: somebody else says what there is to say
        self.fp8_names = fp8_names
        self.log, self.trackers, self.speed, self.counters = log, trackers, speed, counters
        self.total_steps, self.interval, self.device = total_steps, interval, device
        self._pace = ConsolePace()
        self._sample_s: deque[float] = deque(maxlen=MEDIAN_OF)  # seconds per sequence of the last steps
        self.remaining: Callable[[], int] = lambda: 0  # sequences that are still to come
        self.mark = DeviceTime(device)
        self.last_s: float | None = None  # seconds of the last finished step
        self.stepped: Callable[[float, float], None] = lambda work_s, step_s: (
            None
        )  # is told how long this rank worked in a step of so long
        self.slow: Callable[[], dict[int, tuple[str, Slow]]] = dict  # ranks that the others wait for now
        self._named: set[int] = set()

    def restart_clock(self) -> None:
        """Do not count the time since the last step (evaluation, saving) as time of the next."""
        self.mark = DeviceTime(self.device)
        self.mark.wait()

    def finished(self, pending: Pending, samples: int) -> bool:
        """Account for a step of `samples` sequences; whether any rank was asked to stop."""
        loss, norm, skipped, _, stop = pending.read()
        seconds, self.mark = pending.moment.seconds_since(self.mark), pending.moment
        self.last_s = seconds
        if pending.waited is not None:
            self.stepped(max(0.0, seconds - pending.waited.seconds()), seconds)
        self._name_slow()
        c = self.counters
        c.step, c.consumed_samples = pending.step, c.consumed_samples + samples
        c.tokens += samples * self.speed.seq_length
        c.skipped += skipped > 0
        c.skipped_in_a_row = c.skipped_in_a_row + 1 if skipped else 0
        values = self._values(pending, loss, norm, samples, seconds)
        if self.trackers is not None:
            self.trackers.write(values)
        self._show(values)
        self.heard(values)
        return stop

    def _show(self, values: dict[str, Any]) -> None:
        """A line every `interval` steps; without one, for each step in files, and as fast as a person reads on a
        terminal."""
        if self.quiet:
            return
        step, width = values["step"], self.log.console_width()
        last = step == self.total_steps
        if self.interval is not None and step % self.interval and not last:
            return
        gpu, ranks = self.device.type == "cuda", self.speed.ranks
        self.log.note(step_line(values, gpu, ranks))
        if width is None or self.interval is not None or self._pace.due() or last:
            self.log.say(step_line(values, gpu, ranks, min(WIDTH, width or WIDTH)))

    def _left_s(self, seconds: float, samples: int) -> float:
        """Seconds to the end of the run, at the median pace of the last steps."""
        self._sample_s.append(seconds / samples)
        return median(self._sample_s) * self.remaining()

    def _name_slow(self) -> None:
        """Say once of each rank that it is slow, and that it no longer is."""
        slow = self.slow()
        for rank, (who, how) in slow.items():
            if rank not in self._named:
                self.log.warn(f"{who} is slow: it {how}")
        for rank in self._named - slow.keys():
            self.log.info(f"rank {rank} is as fast as the others again")
        self._named = set(slow)

    def _values(self, pending: Pending, loss: float, norm: float, samples: int, seconds: float) -> dict[str, Any]:
        rate = samples * self.speed.seq_length / seconds
        routing, mtp_loss = pending.routing(), pending.mtp_loss()
        flops, slow = rate * self.speed.flops_per_token / self.speed.ranks, self.slow()
        return {
            "step": pending.step,
            "loss": loss,
            "grad_norm": norm,
            "lr": pending.lr,
            "tokens_per_s": rate,
            "tokens_per_s_per_gpu": rate / self.speed.ranks,
            "tflops_per_gpu": flops / 1e12,
            "mfu": None if self.speed.peak is None else flops / self.speed.peak,
            "memory_gib": (peak_memory(self.device) + self.speed.shared) / 2**30,
            "tokens": self.counters.tokens,
            "consumed_samples": self.counters.consumed_samples,
            "skipped": self.counters.skipped,
            "step_s": seconds,
            "eta_s": self._left_s(seconds, samples),
            **self._fp8_values(pending),
            **({"slow": {rank: how.ratio for rank, (_, how) in slow.items()}} if slow else {}),
            **({} if mtp_loss is None else {"mtp_loss": mtp_loss}),
            **({} if routing is None else {"experts": routing}),
        }

    def _fp8_values(self, pending: Pending) -> dict[str, Any]:
        """What casts lost: the worst tensor at every step, all of them now and then."""
        tally = pending.fp8()
        if tally is None or not was_cast(tally):
            return {}
        part, whose = worst(self.fp8_names, tally)
        every = pending.step == 1 or pending.step % FP8_EVERY == 0 or pending.step == self.total_steps
        values: dict[str, Any] = {
            "fp8_lost": part,
            "fp8_worst": whose,
            **({"fp8": fp8_values(self.fp8_names, tally)} if every else {}),
        }
        gradient_distance = pending.gradient_distance()
        if gradient_distance is not None:
            values["fp8_shadow"] = dict(zip(self.fp8_names, gradient_distance))
        return values
