"""`bench ops --only`: some ops, each by every implementation that runs here, beside two floors: the bytes that must be
read and written at least, at the rate of a copy, and the FLOP of the matmuls that cannot be avoided, at the rate of the
device's GEMM. Time cannot be shorter than the larger of the two.

Ops are taken from the calls that a config's modules make, at its shapes (bench.ops). Those that it does not call, and
all of them without a config, have the shapes of published models (bench.samples).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.dtypes import precision
from phalanx.base.text_table import table
from phalanx.bench.ceilings import copy_rate, gemm_rate
from phalanx.bench.ops import calls_of, forward_flop, tensors_of
from phalanx.bench.samples import SAMPLES, Draw, OpSample, recurrence_flop
from phalanx.bench.timing import Times, measure
from phalanx.config.run import Run
from phalanx.forecast.decide import make_plan
from phalanx.ops.op import Implementation, Op, only
from phalanx.ops.op import table as ops_here

REFERENCE = "reference"


class UnknownOp(ValueError):
    """A name that is no op which can be timed; says which are near."""


@dataclass(frozen=True)
class Rates:
    """FLOP/s of a large matmul and bytes/s of a copy, read plus written, measured now."""

    gemm: float
    copy: float

    @staticmethod
    def measured(device: torch.device, dtype: torch.dtype) -> Rates:
        return Rates(gemm_rate(device, dtype), copy_rate(device))


@dataclass(frozen=True)
class Floor:
    """Seconds that bytes and matmuls take at least."""

    nbytes: float
    matmuls: float

    @property
    def seconds(self) -> float:
        return max(self.nbytes, self.matmuls)

    @property
    def text(self) -> str:
        return f"{1e3 * self.seconds:.3f} ({'bytes' if self.nbytes >= self.matmuls else 'matmuls'})"


@dataclass(frozen=True)
class ImplementationTiming:
    """Times of one op by one implementation. both: forward and backward together; None: it has no backward."""

    name: str
    shape: str
    by: str
    forward: Times
    forward_floor: Floor
    both: Times | None
    both_floor: Floor

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"op": self.name, "shape": self.shape, "by": self.by}
        parts = ("forward", self.forward, self.forward_floor), ("forward_backward", self.both, self.both_floor)
        for key, times, floor in parts:
            if times is not None:
                seconds = {"bytes_floor": floor.nbytes, "matmul_floor": floor.matmuls}
                found[key] = {**times.as_dict(), **seconds, "share": floor.seconds / times.median}
        return found


def bench_only(
    wanted: Sequence[str],
    called: Sequence[OpSample],
    draw: Draw,
    repeats: int,
    out: str | None,
    say: Callable[[str], None],
) -> list[ImplementationTiming]:
    """Measure the ops of these names, print a table, and write `out` (JSON). called: the calls of a config. UnknownOp
    if one cannot be timed."""
    device, dtype = draw.device, draw.dtype
    samples = samples_of(wanted, called, draw)
    rates = Rates.measured(device, dtype)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    say(
        f"{name}, torch {torch.__version__}, {str(dtype).removeprefix('torch.')}; measured in this run: GEMM "
        f"{rates.gemm / 1e12:.4g} TFLOP/s, memory copy {rates.copy / 1e9:.4g} GB/s"
    )
    rows = [row for sample in samples for row in time_sample(sample, device, rates, repeats)]
    say(floors_table(rows))
    if out:
        found = {
            "device": name,
            "torch": torch.__version__,
            "gemm": rates.gemm,
            "copy": rates.copy,
            "ops": [r.as_dict() for r in rows],
        }
        Path(out).write_text(json.dumps(found, indent=1), encoding="utf-8")
    return rows


def dtype_on(device: torch.device) -> torch.dtype:
    """Of ops without a config."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def draw_for(run: Run | None, device: torch.device) -> Draw:
    """Inputs in the dtype of a config."""
    return Draw(device, precision(run.train.precision).compute if run else dtype_on(device))


def samples_of(wanted: Sequence[str], called: Sequence[OpSample], draw: Draw) -> list[OpSample]:
    """The config's own calls of each op, or the op at the shapes of a published model."""
    names = sorted({*SAMPLES, *(sample.op.name for sample in called)})
    found: list[OpSample] = []
    for name in wanted:
        made = [sample for sample in called if name in (sample.op.name, _sample_name(sample.op))]
        if not made and name in SAMPLES:
            made = [SAMPLES[name](draw)]
        if not made:
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise UnknownOp(f"no op {name!r} to time{hint} (there are {', '.join(names)})")
        found += made
    return found


def _sample_name(op: Op) -> str:
    """What the op at a published model's shape is called; "": there is none."""
    return {"conv1d": "conv", "symmetric": "muon"}.get(op.name, op.name)


def called_samples(run: Run, ranks: int, device: torch.device) -> list[OpSample]:
    """The calls that a config's modules make, of ops in the table. Functions of a file with several ops, or none, are
    left out: which implementation ran could not be said."""
    by_module: dict[str, list[Op]] = {}
    for op in ops_here():
        by_module.setdefault(op.definition.partition(":")[0], []).append(op)
    found = []
    for call in calls_of(make_plan(run, ranks), device):
        ops = by_module.get(call.function.__module__, [])
        if len(ops) == 1:
            flop = recurrence_flop(next(iter(call.args), None))
            if flop is None:
                with only(ops[0]):  # torch counts the matmuls of the reference
                    flop = forward_flop(call, run, call.run)
            found.append(OpSample(call, ops[0], flop, 2 * flop))
    return found


# ---- their times ---------------------------------------------------------------------------------


def implementations(op: Op, x: Tensor) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """By name, what computes an op on the device of x, and a context in which nothing else does: the implementation
    that would be chosen, and the reference."""
    chosen = next((made for made in op.candidates if runs(op, made, x)), None)
    found = {} if chosen is None else {chosen.name: partial(only, op, chosen)}
    return {**found, REFERENCE: partial(only, op)}


def runs(op: Op, made: Implementation, x: Tensor) -> bool:
    """Whether it would be used on x: it runs there, and was right there."""
    return "auto" in made.modes and made.runs_on(x) and op.tuned(made, x) is not None


def time_sample(sample: OpSample, device: torch.device, rates: Rates, repeats: int) -> list[ImplementationTiming]:
    found = []
    for by, alone in implementations(sample.op, sample.given).items():
        with alone():
            found.append(_timed(sample, by, device, rates, how_often(by, device, repeats)))
    return found


def how_often(by: str, device: torch.device, repeats: int) -> dict[str, int]:
    """Arguments of `measure`. On a GPU, a reference is thousands of small kernels: seconds."""
    few = by.endswith(REFERENCE) and device.type == "cuda"
    return {"warmup": 1, "repeats": min(repeats, 2), "batch": 1} if few else {"repeats": repeats}


def _timed(
    sample: OpSample, by: str, device: torch.device, rates: Rates, often: dict[str, int]
) -> ImplementationTiming:
    call = sample.call
    inputs = {t.data_ptr(): t for t in tensors_of([*call.args, *call.kwargs.values()])}.values()
    outputs = [y for y in tensors_of(call.run()) if y.is_floating_point()]
    grads = [torch.randn(y.shape, device=device).to(y.dtype) for y in outputs if y.requires_grad]

    def forward() -> Any:
        with torch.no_grad():
            return call.run()

    def both() -> None:
        for x in inputs:
            if not isinstance(x, torch.nn.Parameter):
                x.grad = None
        made = [y for y in tensors_of(call.run()) if y.requires_grad]
        torch.autograd.backward(made, grads)

    read, written = size_of(inputs), size_of(outputs)
    back = read + size_of(grads) + size_of([x for x in inputs if x.requires_grad])
    floor = Floor((read + written) / rates.copy, sample.forward_flop / rates.gemm)
    more = Floor(back / rates.copy, sample.backward_flop / rates.gemm)
    return ImplementationTiming(
        call.name,
        call.shape,
        by,
        measure(forward, device, **often),
        floor,
        measure(both, device, **often) if grads else None,
        Floor(floor.nbytes + more.nbytes, floor.matmuls + more.matmuls),
    )


def size_of(tensors: Any) -> int:
    """Bytes of these tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def floors_table(rows: list[ImplementationTiming]) -> str:
    lines = [("op", "shape", "by", "forward ms", "floor", "reached", "forward+backward ms", "floor", "reached")]
    for r in rows:
        forward, both = _cells(r.forward, r.forward_floor), _cells(r.both, r.both_floor)
        lines.append((r.name, r.shape, r.by, *forward, *both))
    return table(lines, left=(0, 1, 2))


def _cells(times: Times | None, floor: Floor) -> tuple[str, str, str]:
    if times is None:
        return "-", "-", "-"
    return times.ms, floor.text, f"{100 * floor.seconds / times.median:.0f} %"
