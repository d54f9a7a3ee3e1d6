"""Out of memory as one screen: where it happened, what was asked for, who holds how much against the forecast, and the cheapest way out."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch

from phalanx.base import tree
from phalanx.base.errors import PhalanxError
from phalanx.comm.mesh import Mesh
from phalanx.nn.module import Block
from phalanx.train.build import State
from phalanx.train.checks import Facts, broken_rules
from phalanx.train.config import Run
from phalanx.train.memory import OVERHEAD, rank_uses
from phalanx.train.plan import Plan, make_plan
from phalanx.train.plan_text import contents, gib, table
from phalanx.train.profile import instruction_name

PHASES = {  # functions of ours -> what the run is doing in them; the innermost one that an error came through counts
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


class OutOfMemory(PhalanxError):
    """A device has too little memory for the run. The text is the report."""

    kind = ""


@dataclass
class Watched:
    """What a report can tell of; `state` is set once it is built."""

    plan: Plan
    mesh: Mesh
    state: State | None = None


@contextmanager
def reported(plan: Plan, mesh: Mesh) -> Iterator[Watched]:
    """Turn running out of memory inside into OutOfMemory."""
    watched = Watched(plan, mesh)
    try:
        yield watched
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(report(error, watched)) from None


def is_out_of_memory(error: BaseException) -> bool:
    """torch has a class for GPUs and only a message for the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def report(error: BaseException, watched: Watched) -> str:
    plan, mesh = watched.plan, watched.mesh
    need, room = request(error), capacity(mesh.device)
    uses, _ = rank_uses(plan, plan.num_micro_batches(plan.run.train.global_batch))
    forecast = uses[mesh.at.pp].memory
    actual = held(watched.state) if watched.state else {}
    total = allocated(mesh)
    if total is not None and actual:
        actual["activations, working, messages"] = max(0, total - sum(actual.values()))
    lines = [
        f"out of memory on rank {mesh.rank} of {mesh.grid.world} ({mesh.device}{'' if room is None else f', {gib(room)} GiB'})",
        *(f"  {name:<10}{text}" for name, text in place(error, watched).items()),
        f"  request   {'not said' if need is None else size_text(need)}" + _state_of(mesh.device, total),
        "held by this rank, GiB",
        table(_rows(forecast, actual, total), left=(0,)),
        way_out(plan, room, _ratio(sum(forecast.values()), total, need)),
    ]
    return "\n".join(lines)


# ---- where -----------------------------------------------------------------------------------------------------------------------


def place(error: BaseException, watched: Watched) -> dict[str, str]:
    """phase, instruction, block and op, read from the frames that the error came through."""
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
        found["block"] = run_name(found["schedule"], watched.plan)
    return found


def _function(frame: FrameType) -> str:
    return frame.f_code.co_qualname.lstrip("_") if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name


def block_name(block: Block, watched: Watched) -> str:
    """Such as "block 3 (layer 2)"."""
    for (stage, run), blocks in (watched.state.blocks if watched.state else {}).items():
        for number, one in zip(watched.plan.runs[stage][run], blocks):
            if one is block:
                return f"{number} of {len(watched.plan.facts)} ({contents(watched.plan, range(number, number + 1))})"
    return type(block).__name__


def run_name(schedule: str, plan: Plan) -> str:
    """In backward no frame of a block is left: the blocks whose backward it was."""
    words = schedule.split()
    if words[0] not in ("forward", "backward"):
        return "none"
    blocks = plan.runs[int(words[2])][int(words[4])]
    return f"one of {contents(plan, blocks)}"


# ---- how much --------------------------------------------------------------------------------------------------------------------


def request(error: BaseException) -> int | None:
    """Bytes that were asked for, as the error says."""
    found = REQUEST.search(str(error))
    if found is None:
        return None
    number, unit = re.fullmatch(r"([\d.]+) ?(\w+)", found[1]).groups()  # type: ignore[union-attr]
    return round(float(number) * UNITS[unit.upper() if unit != "bytes" else unit])


def capacity(device: torch.device) -> int | None:
    """Bytes of a GPU; of a CPU what is available now beyond what this process holds, which nobody counts: unknown."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None


def allocated(mesh: Mesh) -> int | None:
    return torch.cuda.memory_allocated(mesh.device) + mesh.shared_bytes if mesh.device.type == "cuda" else None


def size_text(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.1f} MiB"


def _state_of(device: torch.device, total: int | None) -> str:
    if total is None:
        return ""
    cached = torch.cuda.memory_reserved(device) - total
    free = torch.cuda.mem_get_info(device)[0]
    return f"; in tensors {gib(total)} GiB, kept by the allocator {gib(cached)} GiB, free {gib(free)} GiB"


def held(state: State) -> dict[str, int]:
    """Bytes of this rank's own tensors by kind: weights, gradients, masters, moments."""
    flat, shards = state.buffers.flat, state.optimizer.shards
    gradients = [t for f in flat for t in (f.grad, f.grad_kept)] + [t for f in flat if f.tree is not None for t in f.tree.tensors]
    kinds = {"weights": [t for f in flat for t in f.held], "gradients": gradients,
             "masters": [f.master for f in flat if f.apart], "moments": [t for s in shards for t in s.moments]}  # fmt: skip
    return {name: sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values()) for name, tensors in kinds.items()}


def _rows(forecast: dict[str, int], actual: dict[str, int], total: int | None) -> list[tuple[str, str, str]]:
    """Kinds by what they hold, the largest first; what is beyond the kinds we own is one row."""
    known = {name: n for name, n in forecast.items() if name in ("weights", "gradients", "masters", "moments")}
    rest = "activations, working, messages"
    known[rest] = sum(forecast.values()) - sum(known.values())
    size = {name: actual.get(name, known[name]) for name in known}
    rows = [(name, gib(known[name]), gib(actual[name]) if name in actual else "unknown") for name in sorted(known, key=lambda n: -size[n])]
    whole = gib(total) if total is not None else "unknown"
    return [("kind", "forecast", "actual"), *rows, ("total", gib(sum(forecast.values())), whole)]


# ---- the way out -----------------------------------------------------------------------------------------------------------------


def _ratio(forecast: int, total: int | None, need: int | None) -> float:
    """How far the forecast was too low: what was needed over what was forecast, at least 1."""
    return 1.0 if total is None else max(1.0, (total + (need or 0)) / forecast)


def changes(run: Run, world: int) -> Iterator[tuple[dict[str, object], str]]:
    """Overrides that need less memory, the cheapest first, and what each costs."""
    t, layout = run.train, run.layout
    if layout.sharding == 0:
        yield {"layout.sharding": 1}, "optimizer state cut over the data-parallel ranks; the same bytes sent"
    if layout.sharding < 2:
        yield {"layout.sharding": 2}, "gradients cut too; they are reduced after each micro-batch"
    if layout.sharding < 3:
        yield {"layout.sharding": 3}, "weights cut too; they are gathered for each forward and backward"
    if t.recompute_budget_gib is not None:
        yield {"train.recompute_budget_gib": round(0.9 * t.recompute_budget_gib, 2)}, "more is computed again in backward"
    elif t.recompute == "none":
        yield {"train.recompute": "pointwise"}, "norms and MLP activations are computed again in backward"
    if t.recompute in ("none", "pointwise") and t.recompute_budget_gib is None:
        yield {"train.recompute": "selective"}, "attention is computed again in backward"
    smaller = [m for m in range(t.micro_batch // 2, 0, -1) if t.micro_batch % m == 0]
    for m in smaller:
        yield {"train.micro_batch": m}, "smaller matmuls, more of them"
    if t.recompute != "full" and t.recompute_budget_gib is None:
        yield {"train.recompute": "full"}, "every block's forward is computed again"
        for m in smaller:
            yield {"train.recompute": "full", "train.micro_batch": m}, "forward is computed again, in smaller matmuls"
    tp, pp = layout.tp, layout.pp
    for factor in (2, 4, 8):
        yield {"layout.tp": tp * factor}, "every layer communicates with more ranks"
        yield {"layout.pp": pp * factor}, "more pipeline stages, a larger bubble"
        yield {"layout.tp": tp * factor, "train.recompute": "full"}, "more communication, and forward is computed again"
        yield {"layout.cp": layout.cp * factor}, "every layer's attention reads keys of more ranks"


def way_out(plan: Plan, room: int | None, ratio: float) -> str:
    """The first change that is forecast to fit, the forecast corrected by how far it was off."""
    if room is None:
        return "the cheapest change to try: " + _first_smaller(plan)
    for overrides, cost in changes(plan.run, plan.grid.world):
        need = _need(plan, overrides, ratio)
        if need is not None and need <= room:
            return f"the cheapest change that fits: {_words(overrides)} ({cost}; then {gib(need)} GiB of {gib(room)})"
    more = more_ranks(plan, room, ratio)
    tail = f"; the cheapest on more: {more}" if more else " nor on 8 times as many with layout.tp or layout.pp"
    return f"no change fits on {plan.grid.world} ranks{tail}"


def more_ranks(plan: Plan, room: int, ratio: float) -> str | None:
    """Such as "16 ranks with layout.tp=8": the fewest ranks, in doublings, on which cutting each layer or the layers further fits."""
    for factor in (2, 4, 8):
        for key, now in (("layout.tp", plan.grid.tp), ("layout.pp", plan.grid.pp)):
            need = _need(plan, {key: now * factor}, ratio, plan.grid.world * factor)
            if need is not None and need <= room:
                return f"{plan.grid.world * factor} ranks with {key}={now * factor} ({gib(need)} GiB of {gib(room)})"
    return None


def _first_smaller(plan: Plan) -> str:
    """Where the room is not known: the first legal change that is forecast to hold at least a tenth less."""
    now = _need(plan, {}, 1.0) or 0.0
    for overrides, cost in changes(plan.run, plan.grid.world):
        need = _need(plan, overrides, 1.0)
        if need is not None and need - OVERHEAD <= 0.9 * (now - OVERHEAD):
            return f"{_words(overrides)} ({cost}; forecast {(need - OVERHEAD) / 2**30:.3g} GiB instead of {(now - OVERHEAD) / 2**30:.3g})"
    return "none is forecast to need less on as many ranks; take more ranks (layout.tp, layout.pp)"


def _need(plan: Plan, overrides: dict[str, object], ratio: float, world: int | None = None) -> float | None:
    """Bytes of the fullest rank with these overrides; None if the config would not be legal."""
    run, world = plan.run, world or plan.grid.world
    for key, value in overrides.items():
        run = tree.replace_at(run, key, value)
    if broken_rules(run, Facts(world_size=world, files=False)):
        return None
    changed = make_plan(run, world)
    uses, _ = rank_uses(changed, changed.num_micro_batches(run.train.global_batch))
    return ratio * max(u.total for u in uses) + OVERHEAD


def _words(overrides: dict[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in overrides.items())
