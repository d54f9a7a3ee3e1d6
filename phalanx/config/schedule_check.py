"""Rules of `layout.schedule`: that it exists, fits the other sizes, and can be proved."""

from __future__ import annotations

from phalanx.base.errors import Problem
from phalanx.base.registry import BUILT_IN, NotFound
from phalanx.base.rules import problem
from phalanx.config.run import Run
from phalanx.schedule.actions import ScheduleError, check_order
from phalanx.schedule.generators import SEAM, PipelineSchedule, find_pipeline_schedule, generate, resolved
from phalanx.schedule.lower import lower
from phalanx.schedule.simulate import simulate


def check_schedule(run: Run, world: int) -> list[Problem]:
    layout = run.layout
    if min(layout.pp, layout.virtual_stages) < 1:
        return []
    name = resolved(layout.schedule, layout.virtual_stages)
    try:
        schedule = find_pipeline_schedule(name)
    except NotFound as error:
        return [error.problem("layout.schedule", layout.schedule)]
    found = check_stages_per_rank(run, schedule) + check_split(run, schedule)
    return found or check_own(run, name, world)


def check_stages_per_rank(run: Run, schedule: PipelineSchedule) -> list[Problem]:
    layout = run.layout
    because = {"layout.virtual_stages": layout.virtual_stages}
    if layout.virtual_stages > 1 and schedule.virtual_stages == "one":
        return [problem("layout", layout, "schedule", "runs one stage per rank", because, ("auto", "interleaved"))]
    if layout.virtual_stages == 1 and schedule.virtual_stages == "several":
        return [problem("layout", layout, "schedule", "needs virtual_stages >= 2", because, ("auto", "1f1b"))]
    return []


def check_split(run: Run, schedule: PipelineSchedule) -> list[Problem]:
    """A split backward fills idle times of a pipeline; its weight gradients wait outside CUDA graphs."""
    layout, found = run.layout, list[Problem]()
    if not schedule.splits_backward:
        return []
    if layout.pp == 1:
        rule = "splits backward, which has no effect without pp >= 2"
        found.append(problem("layout", layout, "schedule", rule, {"layout.pp": 1}, ("auto",)))
    if run.train.cuda_graphs == "on":
        rule = "excludes a schedule that splits backward: type train.cuda_graphs=off or layout.schedule=auto"
        because = {"layout.schedule": layout.schedule}
        found.append(problem("train", run.train, "cuda_graphs", rule, because, ("off", "auto")))
    return found


def check_own(run: Run, name: str, world: int) -> list[Problem]:
    """A schedule of somebody else's is tried on a few micro-batches. (Every program is proved before it runs.)"""
    layout, train = run.layout, run.train
    if name in BUILT_IN[SEAM]:
        return []
    unit = train.micro_batch * (world // max(1, layout.pp * layout.tp * layout.cp))
    micro_batches = min(max(1, train.global_batch // unit), 2 * layout.pp + 1) if unit > 0 else 1
    because = {"layout.pp": layout.pp, "layout.virtual_stages": layout.virtual_stages, "micro-batches": micro_batches}

    def problem_of(rule: str) -> list[Problem]:
        return [problem("layout", layout, "schedule", rule, because, ("auto",))]

    try:
        made = generate(name, layout.pp, layout.virtual_stages, micro_batches)
        simulate(lower(made))
        if train.deterministic:
            check_order(made)
    except ScheduleError as error:
        return problem_of(f"is refused by the simulator: {error}")
    except Exception as error:
        return problem_of(f"cannot be made: {type(error).__name__}: {error}")
    return []
