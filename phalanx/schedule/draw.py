"""Draws a simulated schedule as plain text: one row per rank, time to the right."""

from __future__ import annotations

from statistics import median_low

from phalanx.schedule.actions import Backward, Compute, Forward, InputGrad, Schedule, WeightGrad
from phalanx.schedule.simulate import ScheduleTrace


def draw(trace: ScheduleTrace, width: int = 100, max_rows: int = 32) -> str:
    """At most `max_rows` rows of `width` characters, and two lines of legend.

    F0 is the forward of micro-batch 0, B0=== its backward, dots are idle time (the bubble). Of a backward that is split
    I0=== are the gradients of the inputs, W0+++ those of the weights. With virtual stages a0, b0, ... are forwards and
    A0==, B0==, ... backwards of a rank's first, second, ... stage (A0++ the weights' part of a split one). If the
    picture is too wide, its middle is replaced by `…`.
    """
    schedule = trace.program.schedule
    labels = [f"rank {rank}" for rank in range(schedule.pp)]
    margin = max(len(label) for label in labels)
    room = max(width - margin - 2, 20)
    cells = [_cells(trace, rank) for rank in range(schedule.pp)]
    scale = _scale(cells, trace.makespan, room)
    rows = [f"{label:<{margin}} |{_cut(_row(row, scale, trace.makespan), room)}" for label, row in zip(labels, cells)]
    if len(rows) > max_rows:
        first = max_rows // 2
        rows = [*rows[:first], f"{'…':<{margin}} |", *rows[len(rows) - (max_rows - first - 1) :]]
    return "\n".join([*rows, _legend(trace)])


Cell = tuple[float, float, str, str]
"""Start and end in seconds, label, filling."""
LOOKS: dict[type[Compute], tuple[str, str]] = {
    Forward: ("F", "-"),
    Backward: ("B", "="),
    InputGrad: ("I", "="),
    WeightGrad: ("W", "+"),
}
"""Letter (of a rank's only stage) and filling."""


def _cells(trace: ScheduleTrace, rank: int) -> list[Cell]:
    """The actions of a rank: consecutive segments of one stage and micro-batch are one cell."""
    schedule = trace.program.schedule
    cells: list[Cell] = []
    last = None
    for span in trace.spans[rank]:
        do = span.instruction
        key = (type(do), do.stage, do.mb)
        if key == last:
            cells[-1] = (cells[-1][0], span.end, *cells[-1][2:])
        else:
            cells.append((span.start, span.end, f"{_letter(schedule, rank, do)}{do.mb}", LOOKS[type(do)][1]))
        last = key
    return cells


def _letter(schedule: Schedule, rank: int, do: Compute) -> str:
    stages = schedule.stages_of(rank)
    if len(stages) == 1:
        return LOOKS[type(do)][0]
    letter = chr(ord("a") + stages.index(do.stage) % 26)
    return letter if isinstance(do, Forward) else letter.upper()


def _scale(cells: list[list[Cell]], makespan: float, room: int) -> float:
    """Columns per second: as many as a typical forward needs for its label, or fewer if the whole picture then fits.

    If even one column per forward is too wide, the left part of the picture should still show every rank's start.
    """
    durations = [end - start for row in cells for start, end, _, filling in row if filling == "-" and end > start]
    if not durations:
        return 1.0
    typical = median_low(durations)
    roomy = max(len(label) for row in cells for _, _, label, _ in row)
    last_start = max(row[0][0] for row in cells if row)
    choices = range(roomy, 0, -1)
    whole = [columns for columns in choices if makespan / typical * columns <= room]
    cut = [columns for columns in choices if 2 * last_start / typical * columns <= room / 2]
    return (whole or cut or [1])[0] / typical


def _row(cells: list[Cell], scale: float, makespan: float) -> str:
    row = ["."] * round(makespan * scale)
    for start, end, label, filling in cells:
        first, last = round(start * scale), round(end * scale)
        row[first:last] = _fit(label, last - first).ljust(last - first, filling)
    return "".join(row)


def _fit(label: str, columns: int) -> str:
    """The label if there is room for it, else its letter."""
    return label if len(label) <= columns else label[:columns][:1]


def _cut(row: str, room: int) -> str:
    if len(row) <= room:
        return row
    head = (room - 1) // 2
    return row[:head] + "…" + row[len(row) - (room - 1 - head) :]


def _legend(trace: ScheduleTrace) -> str:
    schedule = trace.program.schedule
    v = schedule.num_stages // schedule.pp
    size = [_count(schedule.pp, "rank"), _count(schedule.num_micro_batches, "micro-batch", "micro-batches")]
    forward, backward = ("F0", "B0==") if v == 1 else ("a0 b0 ..", "A0== B0== ..")
    split = "I0== W0++ its gradients of inputs and of weights" if v == 1 else "A0++ B0++ .. gradients of weights alone"
    whole = any(action.kind == "B" for order in schedule.orders for action in order)
    key = [
        f"{forward} forward of micro-batch 0",
        *([f"{backward} its backward"] if whole or v > 1 and schedule.has_backward else []),
        *([split] if schedule.splits_backward else []),
        ". idle",
    ]
    if v > 1:
        size.insert(1, _count(v, "virtual stage"))
        key.insert(-1, "a letter per virtual stage")
    return f"{schedule.name}: {', '.join(size)}, bubble {100 * trace.bubble:.1f} % of the time\n{', '.join(key)}"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
