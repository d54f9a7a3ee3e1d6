"""What a run records of its steps: counters, and rows for its sinks. Values arrive from the device one step late."""

from __future__ import annotations

import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from phalanx.base.dataclass import dataclass
from phalanx.base.log import Log
from phalanx.base.records import Record, Row
from phalanx.comm.health.pace import Slow
from phalanx.comm.health.waits import Waited
from phalanx.engine.fp8_state import fp8_values, was_cast, worst
from phalanx.engine.step import StepResult
from phalanx.observe import run_records as records
from phalanx.observe.routing import routing_values
from phalanx.observe.sinks import Sinks

MEDIAN_OF = 51  # steps over which the median gives the remaining time
FP8_EVERY = 50  # steps between two complete tables of what FP8 casts lost


class Timestamp:
    """A moment in the device's work, taken without waiting for it: on a GPU an event in the stream, otherwise the
    clock."""

    def __init__(self, device: torch.device):
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._clock = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Timestamp) -> float:
        """Both moments must be over."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1e3
        return self._clock - earlier._clock


class Pending:
    """A step's results on their way to the host: copied beside the computation, and read when the next step is already
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
        self._clipped = None if result.clipped_heads is None else len(packed)
        if result.clipped_heads is not None:
            packed = torch.cat((packed, result.clipped_heads.double().view(1)))
        self._metrics = {name: len(packed) + i for i, name in enumerate(result.metrics)}
        if result.metrics:
            packed = torch.cat((packed, torch.stack([*result.metrics.values()]).double()))
        self._host = packed
        if packed.is_cuda:
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
        self.moment = Timestamp(packed.device)

    def read(self) -> tuple[float, float, int, int, bool]:
        """(loss, gradient norm, why the step was skipped, tokens with a loss, stop)."""
        self.moment.wait()
        loss, norm, skipped, tokens, stop = self._host[:5].tolist()
        return loss, norm, int(skipped), int(tokens), stop > 0

    def mtp_loss(self) -> float | None:
        """Mean loss of multi-token prediction, after `read`; None without such modules."""
        return self._host[5].item() if self._has_mtp else None

    def routing(self) -> dict[str, list[Any]] | None:
        """Per layer, after `read`; None without experts."""
        if self._routing is None:
            return None
        return routing_values(self._host[6 : 6 + self._routing.numel()].view(self._routing).tolist())

    def fp8(self) -> list[Any] | None:
        """What FP8 casts lost, as Fp8State.totals, after `read`; None without train.fp8."""
        return None if self._fp8 is None else self._host[self._fp8_at : self._distance_at].view(self._fp8).tolist()

    def gradient_distance(self) -> list[list[float]] | None:
        """(cosine, relative error) of each linear's gradient, after `read`; None of a step without a shadow."""
        if self._distance is None:
            return None
        return self._host[self._distance_at :][: self._distance.numel()].view(self._distance).tolist()

    def clipped_heads(self) -> int | None:
        """Heads of attention that QK-clip scaled, after `read`; None without optim.qk_clip."""
        return None if self._clipped is None else int(self._host[self._clipped].item())

    def metrics(self) -> dict[str, float]:
        """Means of the objective's metrics, by name, after `read`."""
        return {name: self._host[at].item() for name, at in self._metrics.items()}


@dataclass
class Counters:
    """What continues to count over restarts (saved in checkpoints)."""

    step: int = 0
    consumed_samples: int = 0
    tokens: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    rollbacks: int = 0


@dataclass(frozen=True)
class Speed:
    """Inputs of rates: FLOPs per token (forward and backward), ranks, the device's peak in FLOP/s if known, tokens per
    sequence; the run's last step. shared: bytes of memory that a GPU shares with others, which its count of tensors
    lacks."""

    flops_per_token: float
    ranks: int
    peak: float | None
    seq_length: int
    last_step: int
    shared: int = 0


def peak_memory(device: torch.device) -> int:
    """Bytes: the maximum that tensors took on this GPU, or that this process took of main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Reporter:
    """Turns finished steps into counters and records. The counters are on every rank, the sinks on rank 0."""

    def __init__(
        self,
        log: Log,
        sinks: Sinks | None,
        speed: Speed,
        counters: Counters,
        device: torch.device,
        fp8_names: tuple[str, ...] = (),
    ):
        self.log, self.sinks, self.speed, self.counters = log, sinks, speed, counters
        self.device, self.fp8_names = device, fp8_names
        self.heard: Callable[[dict[str, Any]], None] = lambda values: None  # called with each finished step's row
        self._sample_s: deque[float] = deque(maxlen=MEDIAN_OF)  # seconds per sequence of the last steps
        self.remaining: Callable[[], int] = lambda: 0  # sequences that are still to come
        self.mark = Timestamp(device)
        self.last_s: float | None = None  # seconds of the last finished step
        # called with the time that this rank worked in a step, and the step's time
        self.stepped: Callable[[float, float], None] = lambda work_s, step_s: None
        self.slow: Callable[[], dict[int, tuple[str, Slow]]] = dict  # ranks for which the others are waiting now
        self._named: set[int] = set()
        # of chats: the tokens of some samples that are not padding; None: neither these nor trained tokens are recorded
        self.filled: Callable[[Sequence[int]], int] | None = None

    def restart_clock(self) -> None:
        """Do not count the time since the last step (evaluation, saving) as part of the next."""
        self.mark = Timestamp(self.device)
        self.mark.wait()

    def finished(self, pending: Pending, samples: int) -> bool:
        """Account for a step of `samples` sequences; returns whether any rank was asked to stop."""
        loss, norm, skipped, trained, stop = pending.read()
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
        values = self._values(pending, loss, norm, samples, seconds) | self._chat_values(trained, samples)
        self.record(pending.step, values)
        self.heard(Row(pending.step, values).plain())
        return stop

    def record(self, step: int, values: Mapping[Record, Any]) -> None:
        """Give what belongs to a step to all sinks; only rank 0 has any."""
        if self.sinks is not None:
            self.sinks.write(Row(step, values))

    def _left_s(self, seconds: float, samples: int) -> float:
        """Seconds to the end of the run, at the median pace of the last steps."""
        self._sample_s.append(seconds / samples)
        return median(self._sample_s) * self.remaining()

    def _name_slow(self) -> None:
        """Report once for each rank that it is slow, and once that it no longer is."""
        slow = self.slow()
        for rank, (who, how) in slow.items():
            if rank not in self._named:
                self.log.warn(f"{who} is slow: it {how}")
        for rank in self._named - slow.keys():
            self.log.info(f"rank {rank} is as fast as the others again")
        self._named = set(slow)

    def _values(self, pending: Pending, loss: float, norm: float, samples: int, seconds: float) -> dict[Record, Any]:
        rate = samples * self.speed.seq_length / seconds
        routing, mtp_loss, clipped_heads = pending.routing(), pending.mtp_loss(), pending.clipped_heads()
        flops, slow = rate * self.speed.flops_per_token / self.speed.ranks, self.slow()
        return {
            records.LOSS: loss,
            records.GRAD_NORM: norm,
            records.LR: pending.lr,
            records.TOKENS_PER_S: rate,
            records.TOKENS_PER_S_PER_GPU: rate / self.speed.ranks,
            records.TFLOPS_PER_GPU: flops / 1e12,
            records.MFU: None if self.speed.peak is None else flops / self.speed.peak,
            records.MEMORY: (peak_memory(self.device) + self.speed.shared) / 2**30,
            records.TOKENS: self.counters.tokens,
            records.CONSUMED_SAMPLES: self.counters.consumed_samples,
            records.SKIPPED: self.counters.skipped,
            records.STEP_S: seconds,
            records.ETA_S: self._left_s(seconds, samples),
            **self._fp8_values(pending),
            **({records.SLOW: {rank: how.ratio for rank, (_, how) in slow.items()}} if slow else {}),
            **({} if mtp_loss is None else {records.MTP_LOSS: mtp_loss}),
            **({} if clipped_heads is None else {records.CLIPPED_HEADS: clipped_heads}),
            **{records.task_metric(name): value for name, value in pending.metrics().items()},
            **({} if routing is None else {records.EXPERTS: routing}),
        }

    def _chat_values(self, trained: int, samples: int) -> dict[Record, Any]:
        """Of the step whose samples were consumed last."""
        if self.filled is None:
            return {}
        stop = self.counters.consumed_samples
        padding = 1 - self.filled(range(stop - samples, stop)) / (samples * self.speed.seq_length)
        return {records.TRAINED_TOKENS: trained, records.PADDING: padding}

    def _fp8_values(self, pending: Pending) -> dict[Record, Any]:
        """What casts lost: the worst tensor at every step, all of them now and then."""
        tally = pending.fp8()
        if tally is None or not was_cast(tally):
            return {}
        part, whose = worst(self.fp8_names, tally)
        every = pending.step == 1 or pending.step % FP8_EVERY == 0 or pending.step == self.speed.last_step
        values: dict[Record, Any] = {
            records.FP8_LOST: part,
            records.FP8_WORST: whose,
            **({records.FP8: fp8_values(self.fp8_names, tally)} if every else {}),
        }
        gradient_distance = pending.gradient_distance()
        if gradient_distance is not None:
            values[records.FP8_SHADOW] = dict(zip(self.fp8_names, gradient_distance))
        return values
