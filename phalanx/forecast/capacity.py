"""Whether the memory of a machine holds its ranks, by the forecast of `phalanx plan`. What certainly does not fit is
refused before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import PhalanxError
from phalanx.base.sizes import size_text
from phalanx.config.run import Run
from phalanx.forecast.decide import make_plan
from phalanx.forecast.memory import OVERHEAD, RankUse, rank_uses
from phalanx.forecast.smaller import Demand, Search, way_out
from phalanx.planning.plan import Plan, plan_of

FORECAST_ERROR = 0.07
"""The largest difference measured so far between the forecast and the peak of tensors on a GPU: Llama-3-8B with
layout.tp=4, forecast 46.00 GiB, measured 42.9 GiB (benchmarks/results/README.md, "Memory: forecast against
measured")."""

PROCESS = 340 * 2**20
"""Resident bytes of a rank on a CPU besides its tensors: Python, torch and its libraries. Measured 2026-11-23 with
torch 2.13 as the peak of VmHWM minus the forecast, 334 to 342 MiB for models of 9 MiB to 2.7 GiB (with the heap set to
return what it frees: MALLOC_MMAP_THRESHOLD_)."""


class DoesNotFit(PhalanxError):
    """A run that needs more memory than a machine has."""

    exit_code = 2
    kind = "does not fit: "


@dataclass(frozen=True)
class MachineMemory:
    """What the ranks of one machine may use before the run starts.

    ranks    the ranks that run there
    gpus     free bytes on each GPU, in the order of local ranks; empty: the ranks run on the CPU
    host     free bytes of main memory for all of them together; None: unknown
    started  the ranks are already running, so what their processes use is no longer free
    """

    ranks: range
    gpus: tuple[int, ...] = ()
    host: int | None = None
    started: bool = False


@dataclass(frozen=True)
class Holder:
    """One memory of a machine (a GPU, or the host), the ranks that share it, their demand on it, and the rank that
    needs most."""

    name: str
    ranks: Sequence[int]
    demand: Demand
    fullest: int
    fullest_bytes: float

    @property
    def part(self) -> float:
        return self.demand.need / self.demand.room if self.demand.room > 0 else float("inf")


def holders(plan: Plan, uses: Sequence[RankUse], machine: MachineMemory) -> list[Holder]:
    """Every memory of the machine with the needs of its ranks."""
    of_rank = {rank: uses[plan.grid.coords(rank).pp] for rank in machine.ranks}
    on_gpu = {rank: use.total + OVERHEAD + _pools(plan, use) for rank, use in of_rank.items()}
    found = []
    for number, (rank, room) in enumerate(zip(machine.ranks, machine.gpus)):
        found.append(Holder(f"GPU {number}", [rank], Demand(on_gpu[rank], room), rank, on_gpu[rank]))
    if machine.host is not None:
        process = 0 if machine.started else PROCESS
        on_host = {rank: process + use.host + (0 if machine.gpus else use.total) for rank, use in of_rank.items()}
        fullest = max(on_host, key=lambda rank: on_host[rank])
        found.append(
            Holder(
                "this host", list(machine.ranks), Demand(sum(on_host.values()), machine.host), fullest, on_host[fullest]
            )
        )
    return found


def _pools(plan: Plan, use: RankUse) -> int:
    """CUDA graphs of several stages keep a memory pool for each micro-batch in flight, if the config asks for them."""
    return use.pools if plan.run.train.cuda_graphs == "on" and plan.grid.pp > 1 else 0


def generous_bytes(run: Run, world: int) -> float:
    """More than a rank can need, from sizes alone, within a millisecond. The forecast runs blocks on the meta device,
    for which torch imports its compiler (seconds), and a small run on a large machine need not wait for that.

    64 bytes a parameter, as if nothing were sharded; activations as if every block were here, for all micro-batches of
    a step. A matmul from `width` features computes FLOPs / (2 width) elements a token; ops around it save a few times
    as many, and the smallest width of all counts.
    """
    plan = plan_of(run, world)
    model, train, layout = run.model, run.train, run.layout
    weights = 64.0 * sum(block.numel for block in plan.facts)
    heads = model.num_attention_heads
    elements = sum(8.0 * block.flops / (2.0 * model.hidden_size / heads) for block in plan.facts)
    longest = max(plan.lengths.values())  # of the streams of tokens; below, scores where attention is not one kernel
    elements += 8.0 * heads * longest * len(model.layer_blocks) * longest / train.seq_length
    tokens = train.micro_batch * train.seq_length * plan.num_micro_batches(train.global_batch)
    return weights + 8.0 * tokens * elements * layout.ep * layout.etp


def check_capacity(run: Run, world: int, machine: MachineMemory, force: bool = False) -> str | None:
    """None if the run fits, a warning if the forecast is too close to tell. Raises DoesNotFit if it certainly does not
    fit.

    force: warn instead of refusing.
    """
    rooms = [*machine.gpus, *([machine.host / len(machine.ranks)] if machine.host is not None else [])]
    if rooms and generous_bytes(run, world) + OVERHEAD <= (1 - FORECAST_ERROR) * min(rooms):
        return None
    if not machine.gpus:
        run = replace(run, train=replace(run.train, device="cpu"))  # `auto` is forecast as a GPU
    plan = make_plan(run, world)
    uses, _ = rank_uses(plan, plan.num_micro_batches(run.train.global_batch))
    found = holders(plan, uses, machine)
    if not found:
        return None
    worst = max(found, key=lambda holder: holder.part)
    if worst.part <= 1 - FORECAST_ERROR:
        return None
    if worst.part <= 1 + FORECAST_ERROR:
        return f"memory is tight: {_needs(worst)}, and the forecast may be off by {FORECAST_ERROR:.0%}"
    missing = f"{_needs(worst)}: {size_text(worst.demand.need - worst.demand.room)} are missing"
    if force:
        return f"{missing}; --force starts it all the same"
    search = Search(run, world, lambda plan, uses: _worst_of(plan, uses, machine))
    lines = [
        missing,
        way_out(search, fewer_ranks=not machine.gpus and len(machine.ranks) == world),
        "--force starts it all the same",
    ]
    raise DoesNotFit("\n".join(lines))


def _needs(holder: Holder) -> str:
    """Such as: this host has 22.40 GiB free, and its 2 ranks need 262.20 GiB by the forecast (the fullest, rank 0,
    131.10 GiB)."""
    free = f"{holder.name} has {size_text(holder.demand.room)} free"
    need = f"{size_text(holder.demand.need)} by the forecast"
    if len(holder.ranks) == 1:
        return f"{free}, and rank {holder.fullest} needs {need}"
    return (
        f"{free}, and its {len(holder.ranks)} ranks need {need} (the fullest, rank {holder.fullest}, "
        f"{size_text(holder.fullest_bytes)})"
    )


def _worst_of(plan: Plan, uses: Sequence[RankUse], machine: MachineMemory) -> Demand:
    """The demand closest to its limit, or furthest beyond it, on this machine or on machines like it that hold the
    other ranks."""
    each = min(len(machine.ranks), plan.grid.world)
    starts = range(0, plan.grid.world - each + 1, each)
    alike = (replace(machine, ranks=range(start, start + each)) for start in starts)
    return max((holder for one in alike for holder in holders(plan, uses, one)), key=lambda holder: holder.part).demand
