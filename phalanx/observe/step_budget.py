"""The step budget: where the milliseconds of a step go, read from a trace of real steps (`observe/profile.py`). Pure: a
file in, rows out.

On a GPU, rows are sums over kernels: what ran at each moment. A moment with a compute kernel belongs to that kernel;
one with only communication is exposed communication of that axis; one with nothing at all is a host gap. On the CPU,
the same is read from the innermost operator of the main thread. So each moment belongs to exactly one row, and the rows
of a trace add up to its length.
"""

from __future__ import annotations

import gzip
import json
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.base.dataclass import dataclass
from phalanx.config.run import Run
from phalanx.observe.profile import BLOCK, COMM, INSTRUCTIONS, STEP

GEMM, ATTENTION, POINTWISE, OPTIMIZER, UNKNOWN = "GEMM", "attention", "pointwise", "optimizer", "unknown kernels"
BUBBLE, HOST, UNATTRIBUTED = "bubble", "host gap", "unattributed"
COMPUTE = (
    GEMM,
    ATTENTION,
    POINTWISE,
    OPTIMIZER,
    UNKNOWN,
)  # of two kernels at the same moment, the first in this order counts

NAMES = (  # the first row with one of these parts in a kernel's (or operator's) name is its row
    (ATTENTION, ("cudnn_generated", "cudnn::fusion", "flash", "fmha", "sdpa", "attention", "cutlassf", "cutlassb")),
    (
        GEMM,
        (
            "gemm",
            "nvjet",
            "cutlass",
            "cublas",
            "splitk",
            "wgmma",
            "::mm",
            "::addmm",
            "::bmm",
            "::baddbmm",
            "::linear",
            "::matmul",
            "::dot",
        ),
    ),
    (
        POINTWISE,
        (
            "elementwise",
            "vectorized",
            "reduce",
            "softmax",
            "logsumexp",
            "memcpy",
            "memset",
            "copy",
            "fill",
            "cat",
            "index",
            "gather",
            "scatter",
            "where",
            "sort",
            "scan",
            "cub::",
            "foreach",
            "multi_tensor",
            "norm",
            "arange",
            "philox",
            "assert_async",
            "aten::",
        ),
    ),
)


class TimeSpan(NamedTuple):
    """A span of time [start, end) in microseconds that belongs to `row`. `call` distinguishes collectives."""

    start: float
    end: float
    row: str
    call: int = -1


@dataclass
class Budget:
    """Seconds of one step by row. `rows` and `unattributed` add up to `step_s`.

    step_s       the time of which rows are shares. GPU: the step without the profiler, if known, because a profiler
                 lengthens only host gaps. CPU: the step under the profiler, which lengthens every operator
    profiled_s   the step under the profiler
    plain_s      the step without it, if known
    pointwise    GPU: (seconds, calls) of the kernels of that row by grid and name, so that sizes are separate
    unattributed step_s minus all rows: kernels of unknown names (`unknown`: seconds by name) and what no row explains.
                 Negative: kernels ran slower under the profiler than without
    """

    step_s: float
    profiled_s: float
    plain_s: float | None
    rows: dict[str, float]
    unattributed: float
    unknown: dict[str, float] = field(default_factory=dict)
    pointwise: dict[str, tuple[float, float]] = field(default_factory=dict)

    def share(self, row: str) -> float:
        return self.rows.get(row, 0.0) / self.step_s

    def lines(self) -> list[str]:
        """One line per row, the largest first, then what is unattributed."""
        rows = sorted(self.rows.items(), key=lambda item: -item[1])
        shown = [_line(name, seconds, self.step_s) for name, seconds in rows if seconds > 0]
        shown.append(_line(UNATTRIBUTED, self.unattributed, self.step_s))
        shown += [
            f"    unknown kernel {1e3 * s:.3f} ms  {name[:100]}"
            for name, s in sorted(self.unknown.items(), key=lambda i: -i[1])[:5]
        ]
        largest = sorted(self.pointwise.items(), key=lambda i: -i[1][0])[:12]
        shown += [
            f"    pointwise {1e3 * s:8.3f} ms in {calls:.0f} x {1e6 * s / calls:.1f} us  {name[:100]}"
            for name, (s, calls) in largest
        ]
        other = "" if self.plain_s is None else f", {1e3 * self.plain_s:.2f} ms without it"
        return [f"step budget of rank 0: {1e3 * self.profiled_s:.2f} ms a step under the profiler{other}", *shown]

    def as_dict(self) -> dict[str, Any]:
        return {
            "step_s": self.step_s,
            "profiled_s": self.profiled_s,
            "plain_s": self.plain_s,
            **{f"{k}_s": v for k, v in self.rows.items()},
            "unattributed_s": self.unattributed,
            "unknown": self.unknown,
            "pointwise_kernels": self.pointwise,
        }


def _line(name: str, seconds: float, whole: float) -> str:
    return f"  {name:<28}{1e3 * seconds:10.2f} ms {100 * seconds / whole:6.1f} %"


def read_budget(path: str | Path, plain_s: float | None = None) -> Budget:
    """The budget of the steps in a trace, per step. plain_s: seconds of a step without the profiler."""
    opened = gzip.open(path, "rt") if str(path).endswith(".gz") else open(path, encoding="utf-8")
    with opened as file:
        return budget_of(json.load(file)["traceEvents"], plain_s)


def budget_of(events: Iterable[Mapping[str, Any]], plain_s: float | None = None) -> Budget:
    """The same from the events of a Chrome trace."""
    trace = ProfileTrace([e for e in events if e.get("ph") == "X" and "dur" in e])
    spans, unknown = trace.gpu_spans() if trace.kernels else (trace.cpu_spans(), {})
    count = len(trace.steps)
    rows, calls = sweep(spans, trace.steps)
    rows = {name: us / 1e6 / count for name, us in with_bubble(rows, calls, spans).items()}
    profiled = sum(end - start for start, end in trace.steps) / 1e6 / count
    unknown = {name: us / 1e6 / count for name, us in unknown.items()}
    step = plain_s if plain_s and trace.kernels else profiled
    gap = step - sum(s for name, s in rows.items() if name != HOST)
    rows[HOST] = min(rows.get(HOST, 0.0), max(0.0, gap))
    rows.pop(UNKNOWN, None)
    pointwise = {name: (us / 1e6 / count, calls / count) for name, (us, calls) in trace.pointwise.items()}
    return Budget(step, profiled, plain_s, rows, step - sum(rows.values()), unknown, pointwise)


class ProfileTrace:
    """The events of a trace, sorted by what they are."""

    def __init__(self, events: list[Mapping[str, Any]]):
        names = [
            e for e in events if e.get("cat") == "cpu_op" or (e.get("cat") == "user_annotation" and is_ours(e["name"]))
        ]
        self.steps = sorted((e["ts"], e["ts"] + e["dur"]) for e in names if e["name"].startswith(STEP))
        if not self.steps:
            raise ValueError("the trace holds no step: it was not recorded by phalanx.observe.profile")
        main = next(e["tid"] for e in names if e["name"].startswith(STEP))
        self.main = sorted((e for e in names if e["tid"] == main), key=lambda e: (e["ts"], -e["dur"]))
        self.instructions = [
            (e["ts"], e["ts"] + e["dur"]) for e in self.main if e["name"].split(" ", 1)[0] in INSTRUCTIONS
        ]
        self.comm: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)  # by thread
        for e in sorted((e for e in names if e["name"].startswith(COMM)), key=lambda e: e["ts"]):
            self.comm[e["tid"]].append((e["ts"], e["ts"] + e["dur"], e["name"].split()[1]))
        self.kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        runtime = (e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver"))
        self.pointwise: dict[str, tuple[float, int]] = {}  # microseconds and calls, as `gpu_spans` finds them
        self.launches = {e["args"]["correlation"]: e for e in runtime if "correlation" in e.get("args", {})}

    def in_instruction(self, ts: float) -> bool:
        """Whether the main thread was running an instruction of the schedule (otherwise it is the update, once a
        step)."""
        return _within(self.instructions, ts)

    def gpu_spans(self) -> tuple[list[TimeSpan], dict[str, float]]:
        """A span for each kernel; and microseconds by name of kernels of unknown kinds."""
        ours = triton_names()
        spans: list[TimeSpan] = []
        unknown: dict[str, float] = defaultdict(float)
        for number, kernel in enumerate(self.kernels):
            # the profiler's first step is in the trace too
            row, counts = (
                self._kernel_row(kernel, ours),
                _within(self.steps, kernel["ts"]),
            )
            if row == UNKNOWN and counts:
                unknown[kernel["name"]] += kernel["dur"]
            elif row == POINTWISE and counts:
                name = f"{kernel.get('args', {}).get('grid', '')} {kernel['name']}"
                us, calls = self.pointwise.get(name, (0.0, 0))
                self.pointwise[name] = us + kernel["dur"], calls + 1
            spans.append(TimeSpan(kernel["ts"], kernel["ts"] + kernel["dur"], row, number))
        return spans, unknown

    def _kernel_row(self, kernel: Mapping[str, Any], ours: set[str]) -> str:
        launch = self.launches.get(kernel.get("args", {}).get("correlation"))
        name = kernel["name"].lower()
        if launch is not None:
            axis = _axis_at(self.comm[launch["tid"]], launch["ts"])
            if axis is not None:
                return comm_row(axis)
        if any(
            part in name for part in ("nccl", "ptop", "barrier")
        ):  # copies between GPUs and waits for them, in a graph too
            return comm_row("other")
        if launch is not None and not self.in_instruction(launch["ts"]):
            return OPTIMIZER
        return row_of(name) or (POINTWISE if kernel["name"] in ours else UNKNOWN)

    def cpu_spans(self) -> list[TimeSpan]:
        """The main thread's time, cut where its innermost event changes."""
        spans: list[TimeSpan] = []
        stack: list[tuple[float, str, int]] = []  # (end, row, call)
        at = self.main[0]["ts"] if self.main else 0.0

        def close(until: float) -> float:
            now = at
            while stack and stack[-1][0] <= until:
                end, row, call = stack.pop()
                if end > now:
                    spans.append(TimeSpan(now, end, row, call))
                    now = end
            return now

        for number, e in enumerate(self.main):
            at = close(e["ts"])
            if stack and e["ts"] > at:
                spans.append(TimeSpan(at, e["ts"], *stack[-1][1:]))
            at = e["ts"]
            row, call = self._operator_row(e, stack[-1][1:] if stack else (HOST, -1), number)
            stack.append((e["ts"] + e["dur"], row, call))
        close(float("inf"))
        return [s for s in spans if s.row != HOST]

    def _operator_row(self, e: Mapping[str, Any], outer: tuple[str, int], number: int) -> tuple[str, int]:
        """Everything inside communication is communication; Python around operators is host time."""
        if e["name"].startswith(COMM):
            return comm_row(e["name"].split()[1]), number
        if outer[0].startswith(COMM):
            return outer
        if not e["name"].startswith("aten::"):
            return HOST, -1
        if not self.in_instruction(e["ts"]):
            return OPTIMIZER, -1
        return row_of(e["name"].lower()) or POINTWISE, -1


def is_ours(name: str) -> bool:
    """torch's own ranges (gloo:send) last until a transfer is complete and so do not nest."""
    return name.startswith((STEP, COMM, BLOCK)) or name.split(" ", 1)[0] in INSTRUCTIONS


def comm_row(axis: str) -> str:
    return f"{COMM}{axis} (exposed)"


def row_of(name: str) -> str | None:
    return next((row for row, parts in NAMES if any(p in name for p in parts)), None)


def triton_names() -> set[str]:
    """Names of our Triton kernels that this process has imported: pointwise, unless their name says otherwise."""
    modules = [m for name, m in list(sys.modules.items()) if name.startswith(("phalanx.ops", "phalanx.comm"))]
    things = ((name, thing) for m in modules for name, thing in vars(m).items())
    return {getattr(thing, "__name__", name) for name, thing in things if type(thing).__module__.startswith("triton.")}


def sweep(spans: list[TimeSpan], windows: list[tuple[float, float]]) -> tuple[dict[str, float], dict[int, float]]:
    """Give each moment of the windows to one row: (microseconds by row, microseconds of exposed communication by
    call)."""
    cuts = sorted(
        [(s.start, 1, i) for i, s in enumerate(spans)]
        + [(s.end, 0, i) for i, s in enumerate(spans)]
        + [(a, 3, -1) for a, _ in windows]
        + [(b, 2, -1) for _, b in windows]
    )
    rows: dict[str, float] = defaultdict(float)
    calls: dict[int, float] = defaultdict(float)
    active: dict[int, None] = {}
    inside, at = False, 0.0
    for ts, kind, i in cuts:
        if inside and ts > at:
            chosen = min(active, key=lambda j: _rank(spans[j].row), default=-1)
            row = spans[chosen].row if chosen >= 0 else HOST
            rows[row] += ts - at
            if row.startswith(COMM):
                calls[chosen] += ts - at
        at = ts
        if kind >= 2:
            inside = kind == 3
        elif kind == 1:
            active[i] = None
        else:
            active.pop(i, None)
    return dict(rows), dict(calls)


def with_bubble(rows: dict[str, float], calls: dict[int, float], spans: list[TimeSpan]) -> dict[str, float]:
    """Separate waiting for other stages from moving bytes: the time of a transfer between stages beyond the fastest of
    its kind is waiting.

    With stages, the sum over the world at the end of a step waits for the slowest of them in the same way.
    """
    if comm_row("pp") not in rows:
        return rows
    for row in (comm_row("pp"), comm_row("world")):
        lasted: dict[int, float] = defaultdict(float)
        exposed: dict[int, float] = defaultdict(float)
        for i, span in enumerate(spans):
            if span.row == row:
                lasted[span.call] += span.end - span.start
                exposed[span.call] += calls.get(i, 0.0)
        if lasted:
            fastest = min(lasted.values())
            waited = sum(max(0.0, e - fastest) for e in exposed.values())
            rows[row] -= waited
            rows[BUBBLE] = rows.get(BUBBLE, 0.0) + waited
    return rows


def _rank(row: str) -> int:
    return COMPUTE.index(row) if row in COMPUTE else len(COMPUTE)


def _within(ranges: list[tuple[float, float]], ts: float) -> bool:
    """Whether ts lies in one of these ranges, sorted and without overlap."""
    i = bisect_right(ranges, (ts, float("inf"))) - 1
    return i >= 0 and ts < ranges[i][1]


def _axis_at(ranges: list[tuple[float, float, str]], ts: float) -> str | None:
    i = bisect_right(ranges, (ts, float("inf"), "")) - 1
    return ranges[i][2] if i >= 0 and ts < ranges[i][1] else None


# ---- advice --------------------------------------------------------------------------------------


def advice(budget: Budget, run: Run) -> str:
    """One line: the largest row that a config can shrink, and the key that does."""
    avoidable = {name: s for name, s in budget.rows.items() if name not in (GEMM, ATTENTION) and s > 0}
    name = max(avoidable, key=lambda n: avoidable[n], default=HOST)
    share = 100 * budget.share(name)
    if share < 5:
        return (
            "advice: nothing large to avoid; GEMM and attention are "
            f"{100 * (budget.share(GEMM) + budget.share(ATTENTION)):.0f} % of the step"
        )
    return f"advice: {name} is {share:.0f} % of the step: {_remedy(name, run)}"


def _remedy(row: str, run: Run) -> str:
    t, layout = run.train, run.layout
    if row.startswith(COMM):
        axis = row.split()[1]
        if axis == "tp" and layout.tp_overlap == "off":
            return "layout.tp_overlap=auto hides it in the matmuls"
        if axis in ("dp", "edp") and layout.dp_overlap == "off":
            return "layout.dp_overlap=auto moves it by copies beside the matmuls"
        return {
            "tp": f"a smaller layout.tp than {layout.tp} if memory allows (`phalanx plan` says)",
            "cp": f"a smaller layout.cp than {layout.cp} if memory allows (`phalanx plan` says)",
            "pp": f"a larger train.micro_batch than {t.micro_batch}, or a smaller layout.pp than {layout.pp}",
            "dp": f"a larger train.global_batch than {t.global_batch}: gradients are summed once a step",
        }.get(
            axis,
            f"ranks wait for each other: an uneven layout.stages, or a larger train.global_batch than {t.global_batch}",
        )
    if row == BUBBLE:
        return (
            f"more micro-batches a step (train.global_batch > {t.global_batch}), or layout.virtual_stages "
            f"> {layout.virtual_stages}"
        )
    if row == OPTIMIZER:
        return f"a larger train.global_batch than {t.global_batch}: the update is done once a step"
    if row == HOST and t.cuda_graphs == "off" and t.offload_layers == 0:
        return "the device waits for Python: train.cuda_graphs=auto"
    if row == HOST:
        return f"the device waits for Python: a larger train.micro_batch than {t.micro_batch}"
    if t.kernels == "plain":
        return "train.kernels=auto takes fused kernels where they run"
    if t.recompute != "none" or t.recompute_ops:
        return (
            f"train.recompute=none instead of {', '.join((t.recompute, *t.recompute_ops))} if memory "
            "allows (`phalanx plan` says)"
        )
    if t.precision in ("fp32", "fp64"):
        return f"train.precision=bf16 instead of {t.precision} moves half the bytes"
    return "`phalanx doctor` says which fused kernels run here and which are missing"
