"""plan_text: what every rank of a run will hold and do, as text of 100 columns; on a laptop, for any number of
ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import groupby
from textwrap import wrap

from phalanx.base.dataclass import dataclass
from phalanx.base.devices import DEVICES, Device
from phalanx.base.sizes import Unit, size_text, unit_for
from phalanx.base.text_table import table
from phalanx.config.run import Run
from phalanx.forecast.data_table import plan_data
from phalanx.forecast.decide import make_plan
from phalanx.forecast.flops import flops_of
from phalanx.forecast.memory import OVERHEAD, BlockUse, RankUse, block_uses, most_rows, rank_uses
from phalanx.forecast.recompute import Saving, savings_of
from phalanx.forecast.smaller import Demand, Search, way_out
from phalanx.layout.grid import Grid
from phalanx.nn.dry_run import base_bytes
from phalanx.nn.objective import EmbeddingObjective, TaskConfig
from phalanx.ops.quantized.base_formats import FORMATS
from phalanx.planning.adapters import num_adapters
from phalanx.planning.freeze import num_frozen
from phalanx.planning.order import total_samples
from phalanx.planning.plan import Plan, quantized_base
from phalanx.schedule.draw import draw
from phalanx.schedule.simulate import ScheduleTrace
from phalanx.sequence.balance import degrees_of
from phalanx.sequence.shard import SequenceShard

WIDTH = 100
FITS_ON = ("L4", "L40S", "A100", "H100", "H200", "B200")


@dataclass(frozen=True)
class PlanReport:
    """The text of a plan; `fits` is False if the named device has too little memory for it."""

    text: str
    fits: bool

    def __str__(self) -> str:
        return self.text


def plan_text(run: Run, world: int, device: Device | None = None) -> str:
    return plan_report(run, world, device).text


def plan_report(run: Run, world: int, device: Device | None = None) -> PlanReport:
    """The plan of a checked config on `world` ranks. `device`: the GPU that it should fit on; None: says which
    well-known ones would do."""
    plan = make_plan(run, world)
    m = plan.num_micro_batches(run.train.global_batch)
    blocks = block_uses(plan)
    uses, trace = rank_uses(plan, m, blocks)
    memory = unit_for(max(use.total for use in uses))
    sent = unit_for(max(nbytes for use in uses for nbytes in use.sent.values()))
    parts = {
        "": summary(plan, m, trace),
        "Stages (a block is the embedding, a layer or the head; parameters are those of the whole stage)": stage_table(
            plan
        ),
        f"Schedule {plan.schedule_name} (lengths by FLOPs; simulated with unbuffered sends: no deadlock)": draw(
            trace, WIDTH
        ),
        "Data (tokens of each source, and how many this run uses)": plan_data(run),
        f"Memory per rank ({memory.name})": memory_table(plan, uses, memory) + "\n" + fits(plan, uses, device),
        "Recomputed in backward (of each stage's micro-batch and rank)": recomputed_text(plan, blocks),
        "Of the activations, kept for weight gradients that wait (W)": pending_text(uses, trace),
        "In host memory, per rank": host_text(uses),
        f"Sent by each rank per step ({sent.name})": sent_table(plan, uses, sent),
    }
    text = "\n\n".join(f"{title}\n{text}" if title else text for title, text in parts.items() if text)
    return PlanReport(text, device is None or demand_of(uses, device).fits)


FIRST_PASS = "a forward of all micro-batches before, for embeddings alone (GradCache); its FLOPs are not counted"


def summary(plan: Plan, m: int, trace: ScheduleTrace) -> str:
    run, grid, train = plan.run, plan.grid, plan.run.train
    step_tokens = train.global_batch * train.seq_length
    samples = total_samples(run)
    flops = flops_of(run)
    ramp = f", from {train.rampup.start:,} at the start" if train.rampup else ""
    rows = {
        "model": f"{run.model.family}: {len(run.model.layer_blocks)} layers, width "
        f"{run.model.hidden_size:,}, vocabulary {run.model.vocab_size:,}",
        **({"task": task_text(run.task)} if run.task != TaskConfig() else {}),
        "parameters": f"{num_parameters(plan):,}"
        + (f", {frozen:,} of them frozen" if (frozen := num_frozen(run)) else ""),
        "ranks": f"{grid.world:,} = {grid.text}, sharding {sharding_text(run)}{expert_view(run, grid)}",
        **({"context": context_text(plan)} if grid.cp > 1 else {}),
        **({"images": images_text(plan)} if grid.media > 1 else {}),
        "precision": f"{train.precision}{fp8_text(plan)}, recompute {recompute_text(run)}",
        **({"base": base_text(plan)} if quantized_base(run) is not None else {}),
        **({"kernels": plan.kernels.text} if plan.kernels.text != "auto" else {}),
        "step": f"{train.global_batch:,} sequences x {train.seq_length:,} = {step_tokens:,} tokens{ramp}",
        "micro-batches": f"{m:,} of {train.micro_batch} x {train.seq_length:,} tokens per rank, bubble "
        f"{100 * trace.bubble:.1f} %",
        **({"first pass": FIRST_PASS} if isinstance(plan.objective, EmbeddingObjective) else {}),
        "run": f"{train.last_step:,} steps, {samples:,} sequences, {count(samples * train.seq_length)} tokens",
        "FLOP per step": flops.text(step_tokens),
        "": "(N weights in matmuls, A layers*heads*head_dim, half the square; "
        f"{flops.per_token * step_tokens / grid.world:.4g} per rank)",
        "FLOP of the run": f"{flops.per_token * samples * train.seq_length:.4g}",
    }
    return "\n".join(f"{name:<16}{text}" for name, text in rows.items())


def task_text(config: TaskConfig) -> str:
    """The objective and its fields."""
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    own = ", ".join(f"{name}={value}" for name, value in values.items() if name != "name")
    return f"{config.name}{f' ({own})' if own else ''}"


def fp8_text(plan: Plan) -> str:
    fp8 = plan.run.train.fp8
    return f", {len(plan.fp8_names)} linears in train.fp8.recipe={fp8.recipe}" if fp8 else ""


def base_text(plan: Plan) -> str:
    """How the frozen weights of linears are kept, and in how many bytes on the fullest rank."""
    format = FORMATS[str(plan.run.lora.base)]  # type: ignore[union-attr]
    of_ranks = [
        sum(base_bytes(b, plan.sharding.cut(b, plan.grid)) for b in rank.buckets if b.base_format is not None)
        for rank in plan.ranks()
    ]
    return (
        f"linears in {format.name}, {format.bits_per_weight:.2f} bits a weight, {size_text(max(of_ranks))} "
        "per rank; decoded for each use"
    )


def sharding_text(run: Run) -> str:
    layout = run.layout
    groups = "" if layout.shard_group is None else f" in groups of {layout.shard_group}"
    return f"{layout.sharding}{groups}{', optimizer over all' if layout.shard_across == 'optimizer' else ''}"


def context_text(plan: Plan) -> str:
    """How many tokens of a sequence a rank has, and how it reads the others."""
    grid, length = plan.grid, plan.run.train.seq_length
    sizes = {part.size(length) for part in SequenceShard(0, grid.cp).all}
    tokens = f"{max(sizes):,}" if len(sizes) == 1 else f"{min(sizes):,} to {max(sizes):,}"
    parts = grid.cp // grid.ulysses
    how = [f"heads exchanged among {grid.ulysses}"] if grid.ulysses > 1 else []
    how += [f"keys by {plan.cp_attention} over {parts} parts"] if parts > 1 else []
    if grid.dynamic:
        degrees = ", ".join(map(str, degrees_of(grid.cp, grid.ulysses)))
        how += [f"documents shared by {degrees} ranks as their lengths need"]
    return f"{tokens} tokens of each sequence on a rank, {', '.join(how)}"


def images_text(plan: Plan) -> str:
    """Who computes the images of a micro-batch, and how many rows that may be on a rank."""
    grid, most = plan.grid, ", ".join(f"{rows:,} {name}" for name, rows in most_rows(plan).items())
    ranks = " x ".join(f"{name} {n}" for name, n in (("dp", grid.media), ("cp", grid.cp), ("tp", grid.tp)) if n > 1)
    return f"each whole on one of {grid.media * grid.cp * grid.tp} ranks ({ranks}), at most {most} on a rank"


def expert_view(run: Run, grid: Grid) -> str:
    return f"; experts edp {grid.edp} x ep {grid.ep} x etp {grid.etp}" if run.model.routed_experts else ""


def num_parameters(plan: Plan) -> int:
    """Of the model, and of its adapters."""
    return sum(f.numel for f in plan.facts) + (0 if plan.run.lora is None else num_adapters(plan.run))


def stage_table(plan: Plan) -> str:
    total = sum(f.flops for f in plan.facts)
    rows = [("pp rank", "stage", "blocks", "holds", "parameters", "FLOPs")]
    for pp in range(plan.grid.pp):
        for stage in plan.stages_of(pp):
            mine = [plan.facts[b] for b in plan.stages[stage]]
            share = f"{100 * sum(f.flops for f in mine) / total:.1f} %"
            rows.append(
                (
                    str(pp),
                    str(stage),
                    str(len(mine)),
                    contents(plan, plan.stages[stage]),
                    f"{sum(f.numel for f in mine):,}",
                    share,
                )
            )
    return table(rows, left=(3,))


def contents(plan: Plan, blocks: range) -> str:
    """Such as "embedding, layers 0-17"."""
    model, last = plan.run.model, len(plan.facts) - 1
    layers = [number for number, block in enumerate(model.layer_blocks) if block in blocks]
    others = {*blocks} - {*model.layer_blocks, 0, last}
    between = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}" if layers else ""
    other = "multi-token prediction" if model.predict_layers else "the decoder's embedding"
    inner = [between, other if others else ""]
    if others and layers and min(others) < min(set(blocks) & {*model.layer_blocks}):
        inner.reverse()
    names = ("embedding" if 0 in blocks else "", *inner, "head" if last in blocks else "")
    return ", ".join(n for n in names if n)


def memory_table(plan: Plan, uses: Sequence[RankUse], unit: Unit) -> str:
    kinds = max((use.memory for use in uses), key=len)  # a stage without linears in low precision has fewer
    rows = [("pp rank", *kinds, "total", "in flight")]
    for pp, use in enumerate(uses):
        rows.append(
            (str(pp), *(unit.text(use.memory.get(kind, 0)) for kind in kinds), unit.text(use.total), str(use.live))
        )
    return "\n".join([table(rows), *passing_text(uses), *pools_text(plan, uses)])


def pools_text(plan: Plan, uses: Sequence[RankUse]) -> list[str]:
    """Memory that CUDA graphs need beyond the table if there are pipeline stages."""
    most = max(use.pools for use in uses)
    if plan.grid.pp == 1 or not most or plan.run.train.cuda_graphs == "off":
        return []
    when = "" if plan.run.train.cuda_graphs == "on" else ", if a tenth stays free"
    return [f"CUDA graphs take up to {size_text(most)} more, pools of micro-batches in flight{when}."]


def passing_text(uses: Sequence[RankUse]) -> list[str]:
    """What the table counts that is not there all the time."""
    most = max(uses, key=lambda u: sum(u.passing.values()))
    if not sum(most.passing.values()):
        return []
    what = " and ".join(f"{name} of {size_text(n)}" for name, n in most.passing.items() if n)
    return [f"At the fullest moment of a step. Of that, only while blocks work: {what}."]


def host_text(uses: Sequence[RankUse]) -> str:
    """What waits in host memory, if anything."""
    if not any(u.host for u in uses):
        return ""
    return "\n".join(f"pp rank {pp}: {size_text(u.host)} of activations" for pp, u in enumerate(uses) if u.host)


def pending_text(uses: Sequence[RankUse], trace: ScheduleTrace) -> str:
    """What waits between the gradients of inputs and of weights, if the schedule splits backward."""
    return "\n".join(
        f"pp rank {pp}: {size_text(use.pending)} of {count} micro-batches at most"
        for pp, (use, count) in enumerate(zip(uses, trace.peak_pending))
        if count
    )


def recompute_text(run: Run) -> str:
    train = run.train
    if train.recompute_budget_gib is not None:
        return f"within {train.recompute_budget_gib:g} GiB a rank"
    names = [train.recompute, *train.recompute_ops]
    return ", ".join(names[1:] if len(names) > 1 and train.recompute == "none" else names)


def recomputed_text(plan: Plan, blocks: Sequence[BlockUse]) -> str:
    """What is recomputed where, and what that saves and costs; empty if everything is stored."""
    if not any(plan.recomputed):
        return ""
    savings = savings_of(plan, blocks)
    unit = unit_for(max(sum(savings[b].bytes for b in stage) for stage in plan.stages))
    rows = [("pp rank", "stage", "what", f"{unit.name} less", "GFLOP more", "of all")]
    for pp in range(plan.grid.pp):
        for stage in plan.stages_of(pp):
            mine = [savings[b] for b in plan.stages[stage]]
            flops = (
                3
                * sum(plan.facts[b].flops for b in plan.stages[stage])
                * plan.run.train.micro_batch
                * plan.run.train.seq_length
                / plan.grid.tp
            )
            more = sum(s.price.flops for s in mine)
            less = unit.text(sum(s.bytes for s in mine))
            for n, what in enumerate(runs_alike(plan, stage, savings)):
                of_all = f"{100 * more / flops:.1f} %" if flops else "-"  # the embedding alone has none
                rows.append(
                    (str(pp), str(stage), what, less, f"{more / 1e9:.4g}", of_all)
                    if n == 0
                    else ("", "", what, "", "", "")
                )
    return table(rows, left=(2,))


def runs_alike(plan: Plan, stage: int, savings: Sequence[Saving]) -> list[str]:
    """Such as "layers 0-5: activation, norm"; blocks that recompute none of the ops are not named."""
    found, blocks = [], plan.stages[stage]
    for names, run in groupby(blocks, key=lambda b: plan.recomputed[b] if savings[b].price.cost else frozenset()):
        numbers = list(run)
        if names:
            found.append(f"{contents(plan, range(numbers[0], numbers[-1] + 1))}: {', '.join(sorted(names))}")
    return found or ["nothing"]


def demand_of(uses: Sequence[RankUse], device: Device) -> Demand:
    return Demand(max(u.total for u in uses) + OVERHEAD, device.memory)


def fits(plan: Plan, uses: Sequence[RankUse], device: Device | None) -> str:
    need = max(u.total for u in uses) + OVERHEAD
    text = (
        f"The fullest rank needs {need / 2**30:.1f} GiB, with {OVERHEAD / 2**30:.0f} GiB for CUDA, NCCL "
        "and the allocator.\n"
    )
    if device is not None:
        return text + fits_device(plan, uses, device)
    known = sorted((d for d in DEVICES if d.name in FITS_ON), key=lambda d: d.memory)
    good = [f"{d.name} ({d.memory / 1e9:.0f} GB)" for d in known if need <= d.memory]
    return text + (
        f"It fits {', '.join(good)}."
        if good
        else f"It fits none of {', '.join(FITS_ON)}: cut further (tp, pp), or train.recompute=full."
    )


def fits_device(plan: Plan, uses: Sequence[RankUse], device: Device) -> str:
    """Whether it fits; if not, what is missing and the cheapest change that would do, which `train` suggests too."""
    demand, room = demand_of(uses, device), f"{device.name} ({device.memory / 2**30:.1f} GiB)"
    if demand.fits:
        return f"It fits {room}."
    fullest = max(range(len(uses)), key=lambda pp: uses[pp].total)
    search = Search(plan.run, plan.grid.world, lambda _, changed: demand_of(changed, device))
    missing = size_text(demand.need - demand.room)
    return f"It DOES NOT FIT {room}: pp rank {fullest}, the fullest, lacks {missing}.\n" + wrapped(way_out(search))


def wrapped(text: str) -> str:
    return "\n".join(wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False))


def sent_table(plan: Plan, uses: Sequence[RankUse], unit: Unit) -> str:
    grid, images = plan.grid, ", features of images" if plan.grid.media > 1 else ""
    what = {
        "tp": "tokens gathered and scattered around each matmul",
        "pp": "activations and their gradients between stages",
        "dp": f"gradients reduced, weights gathered ({'over dp x cp, ' if grid.cp > 1 else ''}of experts over edp)"
        f"{images}",
        "cp": "keys and values to other parts of their sequences",
        "ep": "tokens to their experts and back",
    }
    unused = {"cp": grid.cp, "ep": grid.ep * grid.etp}
    what = {axis: text for axis, text in what.items() if unused.get(axis) != 1}
    rows = [("pp rank", *(f"{axis} (of {grid.size(axis)})" for axis in what))]  # type: ignore[arg-type]
    rows += [(str(pp), *(unit.text(use.sent[axis]) for axis in what)) for pp, use in enumerate(uses)]
    return table(rows) + "\n" + "\n".join(f"{axis}: {text}" for axis, text in what.items())


def count(number: float) -> str:
    """1.23 T, 4.5 B, 6 M or the number itself."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:,.0f}"
