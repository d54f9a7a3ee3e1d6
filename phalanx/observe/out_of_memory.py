"""Out of memory on one screen: where it happened, what was requested, what holds how much compared with the forecast,
and the cheapest way out."""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Sequence
from types import FrameType

import torch

from phalanx.base.sizes import GIB, size_text
from phalanx.base.text_table import table
from phalanx.comm.mesh import Mesh
from phalanx.engine.build import State
from phalanx.forecast.memory import OVERHEAD, RankUse, rank_uses
from phalanx.forecast.smaller import Change, Demand, Search, changes
from phalanx.forecast.smaller import way_out as cheapest_change
from phalanx.forecast.text import contents
from phalanx.nn.module import Block
from phalanx.observe.profile import instruction_name
from phalanx.observe.watched import Watched
from phalanx.ops.optimizer.shard import tensors_of
from phalanx.planning.plan import Plan

PHASES = {  # our functions -> what the run is doing in them; the innermost one that an error passed through counts
    "build": "allocating weights, gradients and optimizer state",
    "init_weights": "making the initial weights",
    "start_state": "loading a checkpoint",
    "accumulate": "forward and backward",
    "update": "gradient norm and optimizer update",
    "evaluate": "evaluation",
    "save": "saving a checkpoint",
}
REQUEST = re.compile(r"tried to allocate ([\d.]+ ?(?:[KMGT]iB|bytes))", re.IGNORECASE)
UNITS = {"bytes": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def report(error: BaseException, watched: Watched) -> str:
    plan, mesh = watched.plan, watched.mesh
    need, room = request(error), capacity(mesh.device)
    pieces = fragments(need, cached(mesh))
    uses, _ = rank_uses(plan, plan.num_micro_batches(plan.run.train.global_batch))
    forecast = uses[mesh.at.pp].memory
    actual = held(watched.state) if watched.state else {}
    total = allocated(mesh)
    if total is not None and actual:
        actual["activations, working, messages"] = max(0, total - sum(actual.values()))
    lines = [
        f"out of memory on rank {mesh.rank} of {mesh.grid.world} "
        f"({mesh.device}{'' if room is None else f', {GIB.text(room)} GiB'})",
        *(f"  {name:<10}{text}" for name, text in place(error, watched).items()),
        f"  request   {'not said' if need is None else size_text(need)}" + _state_of(mesh, total),
        *([f"  fragments {pieces}"] if pieces else []),
        "held by this rank, GiB",
        table(_rows(forecast, actual, total), left=(0,)),
        way_out(plan, room, _ratio(sum(forecast.values()), total, need)),
    ]
    return "\n".join(lines)


# ---- where ---------------------------------------------------------------------------------------


def place(error: BaseException, watched: Watched) -> dict[str, str]:
    """phase, instruction, block and op, determined from the frames that the error passed through."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = {"phase": "training"}
    for frame in frames:
        name, module = frame.f_code.co_name, frame.f_globals.get("__name__", "")
        if name in PHASES and module.startswith(("phalanx.", "tests.")):
            found["phase"] = PHASES[name]
        if module == "phalanx.pipeline.execute" and name == "execute" and "instruction" in frame.f_locals:
            found["schedule"] = instruction_name(frame.f_locals["instruction"])
        if isinstance(frame.f_locals.get("self"), Block):
            found["block"] = block_name(frame.f_locals["self"], watched)
        if module.startswith("phalanx.ops."):
            found["op"] = f"{_function(frame)} ({module.removeprefix('phalanx.')})"
    if "block" not in found and "schedule" in found:
        found["block"] = segment_name(found["schedule"], watched.plan)
    return found


def _function(frame: FrameType) -> str:
    return frame.f_code.co_qualname.lstrip("_") if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name


def block_name(block: Block, watched: Watched) -> str:
    """Such as "block 3 (layer 2)"."""
    for (stage, segment), blocks in (watched.state.model.blocks if watched.state else {}).items():
        for number, one in zip(watched.plan.segments[stage][segment], blocks):
            if one is block:
                return f"{number} of {len(watched.plan.facts)} ({contents(watched.plan, range(number, number + 1))})"
    return type(block).__name__


def segment_name(schedule: str, plan: Plan) -> str:
    """In backward no frame of a block is left; the blocks to which the backward belonged."""
    words = schedule.split()
    if words[0] not in ("forward", "backward", "inputgrad", "weightgrad"):
        return "none"
    blocks = plan.segments[int(words[2])][int(words[4])]
    return f"one of {contents(plan, blocks)}"


# ---- how much ------------------------------------------------------------------------------------


def request(error: BaseException) -> int | None:
    """Bytes that were requested, according to the error."""
    found = REQUEST.search(str(error))
    if found is None:
        return None
    number, unit = re.fullmatch(r"([\d.]+) ?(\w+)", found[1]).groups()  # type: ignore[union-attr]
    return round(float(number) * UNITS[unit.upper() if unit != "bytes" else unit])


def capacity(device: torch.device) -> int | None:
    """Bytes of a GPU. None for a CPU: what is available beyond what this process holds is not known."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None


def allocated(mesh: Mesh) -> int | None:
    return torch.cuda.memory_allocated(mesh.device) + mesh.shared_bytes if mesh.device.type == "cuda" else None


def cached(mesh: Mesh) -> int:
    """Bytes that PyTorch's allocator keeps on this GPU and that no tensor holds."""
    device = mesh.device
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _state_of(mesh: Mesh, total: int | None) -> str:
    if total is None:
        return ""
    free = torch.cuda.mem_get_info(mesh.device)[0]
    kept = GIB.text(cached(mesh))
    return f"; in tensors {GIB.text(total)} GiB, kept by the allocator {kept} GiB, free {GIB.text(free)} GiB"


def fragments(need: int | None, kept: int) -> str:
    """What to do if the allocator keeps more than was requested, "" if it does not: then no smaller layout is needed
    first."""
    if not need or kept <= need:
        return ""
    return (
        f"the allocator keeps {size_text(kept)} in pieces too small for the request, or in pools of CUDA graphs: first "
        "try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True with train.cuda_graphs=off, which lets pieces be joined"
    )


def held(state: State) -> dict[str, int]:
    """Bytes of this rank's own tensors by kind: weights, gradients, masters, moments."""
    flat, shards = state.buffers.flat, state.optimizer.shards
    gradients = [t for f in flat for t in (f.grad, f.grad_kept)] + [
        t for f in flat if f.tree is not None for t in f.tree.tensors
    ]
    kinds = {
        "weights": [t for f in flat for t in f.storage.tensors],
        "gradients": gradients,
        "masters": [t for f in flat if f.storage.separate_masters for t in tensors_of(f.master)]
        + [t for s in shards if s.home is not None for t in tensors_of(s.master)],
        "moments": [t for s in shards for t in s.moments],
    }
    return {
        name: sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
        for name, tensors in kinds.items()
    }


def _rows(forecast: dict[str, int], actual: dict[str, int], total: int | None) -> list[tuple[str, str, str]]:
    """Kinds by what they hold, the largest first; everything beyond the kinds that we own is one row."""
    known = {name: n for name, n in forecast.items() if name in ("weights", "gradients", "masters", "moments")}
    rest = "activations, working, messages"
    known[rest] = sum(forecast.values()) - sum(known.values())
    size = {name: actual.get(name, known[name]) for name in known}
    rows = [
        (name, GIB.text(known[name]), GIB.text(actual[name]) if name in actual else "unknown")
        for name in sorted(known, key=lambda n: -size[n])
    ]
    whole = GIB.text(total) if total is not None else "unknown"
    return [("kind", "forecast", "actual"), *rows, ("total", GIB.text(sum(forecast.values())), whole)]


# ---- the way out ---------------------------------------------------------------------------------


def _ratio(forecast: int, total: int | None, need: int | None) -> float:
    """By how much the forecast was too low: what was needed over what was forecast, at least 1."""
    return 1.0 if total is None else max(1.0, (total + (need or 0)) / forecast)


def way_out(plan: Plan, room: int | None, ratio: float) -> str:
    """The first change that is forecast to fit, with the forecast corrected by its error."""

    def measure(_: Plan, uses: Sequence[RankUse]) -> Demand:
        if room is None:  # on a CPU, offloaded activations stay in the same memory
            return Demand(max(u.total + u.host for u in uses), math.inf)
        return Demand(ratio * max(u.total for u in uses) + OVERHEAD, room)

    search = Search(plan.run, plan.grid.world, measure)
    return _first_smaller(search) if room is None else cheapest_change(search)


def _first_smaller(search: Search) -> str:
    """If the available memory is unknown: the first valid change that is forecast to need at least a tenth less."""
    now = search.demand({})
    need = now.need if now else 0.0
    for overrides, cost in changes(search.run):
        demand = search.demand(overrides)
        if demand is not None and demand.need <= 0.9 * need:
            words = Change(overrides, cost, demand).words
            less = f"forecast {size_text(demand.need)} instead of {size_text(need)}"
            return f"the cheapest change to try: {words} ({cost}; {less})"
    return (
        "the cheapest change to try: none is forecast to need less on as many ranks; take more ranks "
        "(layout.tp, layout.pp)"
    )
