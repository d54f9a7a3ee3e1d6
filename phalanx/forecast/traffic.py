"""Memory that a rank's buckets need while they are gathered or open, and bytes that they send in a step: closed
formulas over the instructions of a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from phalanx.base.dtypes import Precision
from phalanx.comm.dry import ring_bytes
from phalanx.layout.buckets import Bucket
from phalanx.layout.param import ParamSpec
from phalanx.layout.shards import Cut
from phalanx.ops.quantized.base_bucket import stored_bytes
from phalanx.ops.quantized.quantizer import WeightQuantizer
from phalanx.planning.plan import Plan
from phalanx.schedule.actions import Free, Gather, Instruction, Ready, Reduce
from phalanx.schedule.buckets import fullest


def passing_bytes(
    plan: Plan, buckets: Sequence[Bucket], instructions: Sequence[Instruction], kind: Precision
) -> dict[str, int]:
    """Weights gathered and gradients open at the moment when together they are largest (ZeRO-2, ZeRO-3, a quantized
    base); with fixed slots, the quantized values of a base alone, until they are decoded into one."""
    flows, fixed = {b.id: plan.flow(b) for b in buckets}, plan.fixed_slots
    here = {
        b.id: b.weight_bytes(kind.compute.itemsize, kind.master.itemsize) + value_bytes(plan, b, kind) for b in buckets
    }
    weights = {b.id: 0 if fixed else b.numel * here[b.id] for b in buckets if flows[b.id].gathers}
    gradients = {b.id: _opened(plan, b) * kind.master.itemsize for b in buckets if flows[b.id].opens and not fixed}
    coming = {b.id: coming_bytes(plan, b) for b in buckets if b.base_format is not None}
    if fixed:
        instructions = [x for x in instructions if isinstance(x, Gather | Ready | Free)]
    gathered, opened = fullest(instructions, weights, gradients, coming)
    return {"weights": gathered, "gradients": opened}


def coming_bytes(plan: Plan, bucket: Bucket) -> int:
    """Bytes of a bucket's quantized base values while they are gathered; below ZeRO-3 all of them stay on the rank."""
    cut = plan.sharding.cut(bucket, plan.grid)
    return stored_bytes(bucket, cut.inner) if cut.cuts_weights else 0


def _opened(plan: Plan, bucket: Bucket) -> int:
    """Elements of the gradients that have memory only while a bucket is open: what is applied in backward is not kept
    either."""
    cut = plan.sharding.cut(bucket, plan.grid)
    return bucket.numel + (bucket.numel // cut.inner if cut.applied and cut.cuts_gradients else 0)


def value_bytes(plan: Plan, bucket: Bucket, kind: Precision) -> int:
    """Bytes for an element of quantized weights that the weights themselves take while their linears use
    train.precision."""
    fp8 = plan.run.train.fp8
    return kind.compute.itemsize if bucket.coded and fp8 is not None and fp8.may_rest else 0


def staying_values(plan: Plan, buckets: Sequence[Bucket], kind: Precision) -> int:
    """Bytes of those that stay on the rank."""
    return sum(b.numel * value_bytes(plan, b, kind) for b in buckets if plan.fixed_slots or not plan.flow(b).gathers)


def shadow_bytes(plan: Plan, buckets: Sequence[Bucket], quantizers: Iterable[ParamSpec], kind: Precision) -> int:
    """The copy of gradients that a shadow step keeps: for buckets with quantized linears, what this rank updates."""
    fp8, quantizer = plan.run.train.fp8, {id(spec) for spec in quantizers}
    if fp8 is None or fp8.shadow_interval is None:
        return 0
    cuts = [
        (b, plan.sharding.cut(b, plan.grid)) for b in buckets if any(id(slot.spec) in quantizer for slot in b.slots)
    ]
    return sum(b.numel // (cut.inner * (cut.outer if cut.outside else 1)) * kind.master.itemsize for b, cut in cuts)


def placed_bytes(plan: Plan, pp: int, kind: Precision) -> dict[str, int]:
    """Bytes of fixed memory slots, which are always there."""
    if not plan.fixed_slots:
        return {"weights": 0, "gradients": 0}
    slots = plan.slots[pp]
    return {
        "weights": sum(slots.weight_sizes) * kind.compute.itemsize,
        "gradients": sum(slots.gradient_sizes) * kind.master.itemsize,
    }


def bucket_sends(
    plan: Plan, buckets: Sequence[Bucket], instructions: Sequence[Instruction], kind: Precision
) -> dict[str, float]:
    """Bytes that a rank sends in a step for its buckets, by axis: over dp (experts over edp), and where pieces are
    replicated.

    Gradients are reduced, and weights gathered, as often as the program says; exchanges between groups happen once per
    step. For whole matrices, each rank also sends gradients that it has to their homes and, as a home, the weights
    back (data_parallel.homes); counted as dp here, and as if homes were anywhere: those near to gradients save some.
    """
    calls = Counter(i for i in instructions if isinstance(i, Gather | Reduce))
    sent = dict.fromkeys(("dp", "tp", "pp"), 0.0)
    for b in (b for b in buckets if b.trained):
        cut, reduces = plan.sharding.cut(b, plan.grid), calls[Reduce(b.id)]
        if b.base_format is not None:
            sent["dp"] += calls[Gather(b.id)] * ring_bytes("all_gather", coming_bytes(plan, b), cut.inner)
            continue
        if b.frozen:
            sent["dp"] += calls[Gather(b.id)] * _gathered(cut, kind.compute.itemsize)
            continue
        narrow = b.sent_bytes(kind.compute.itemsize)
        sent["dp"] += _within_groups(cut, reduces, calls[Gather(b.id)], narrow, kind.master.itemsize)
        sent["dp"] += _between_groups(cut, min(plan.grid.cp, cut.inner), narrow, kind.master.itemsize)
        parts = cut.inner * (cut.outer if cut.outside else 1)
        if b.updater.matrix:
            weight = kind.master.itemsize if b.coded else kind.compute.itemsize
            away = 1 - 1 / plan.grid.stage
            sent["dp"] += away * b.numel // parts * (kind.master.itemsize + weight)
        for piece in (piece for slot in b.slots for piece in slot.spec.pieces):
            for r in piece.replicas:
                nbytes = _replica_bytes(piece.box.numel * kind.master.itemsize, len(r.members), plan.leaves > 0)
                sent[r.axis] += nbytes / parts if r.axis == "pp" else nbytes * reduces
    return sent


def scale_sends(plan: Plan, quantizers: Iterable[tuple[WeightQuantizer, ParamSpec]]) -> dict[str, float]:
    """Bytes that a rank sends in a step to compare the amaxes of quantized weights, 4 for each block, by axis: over the
    ranks that update shards of them and, if scales are not known beforehand, over those that hold other parts of what
    shares one."""
    sent = dict.fromkeys(("dp", "tp", "ep"), 0.0)
    for quantizer, spec in quantizers:
        axis, nbytes = spec.summed_over, 4 * quantizer.blocks(spec.shape).room
        inner = plan.sharding.group_size(axis, plan.grid)
        sent["dp"] += ring_bytes("all_reduce", nbytes, inner)
        if plan.sharding.outside and inner > 1:
            sent["dp"] += ring_bytes("all_reduce", nbytes, plan.grid.sum_size(axis) // inner)
        if quantizer.shared is not None and not quantizer.recipe.delayed:
            sent["ep" if axis == "edp" else "tp"] += ring_bytes(
                "all_reduce", nbytes, plan.grid.etp if axis == "edp" else plan.grid.tp
            )
    return sent


def _replica_bytes(nbytes: int, ranks: int, in_order: bool) -> float:
    """An upper bound with a fixed order: with sharding, each rank adds up only what it updates."""
    return ring_bytes("all_gather", nbytes * ranks, ranks) if in_order else ring_bytes("all_reduce", nbytes, ranks)


def _within_groups(cut: Cut, reduces: int, gathers: int, narrow: int, wide: int) -> float:
    """Each reduction scatters the gradients, of `wide` bytes; weights, of `narrow` bytes, are gathered after the
    update, or at ZeRO-3 whenever blocks need them."""
    if cut.level == 0:
        return 0.0
    gathered = (gathers if cut.cuts_weights else 1) * _gathered(cut, narrow)
    return reduces * ring_bytes("reduce_scatter", cut.numel * wide, cut.inner) + gathered


def _gathered(cut: Cut, narrow: int) -> float:
    return ring_bytes("all_gather", cut.numel * narrow, cut.inner)


def _between_groups(cut: Cut, parts: int, narrow: int, wide: int) -> float:
    """With a fixed order, a group passes on a sum for each of the `parts` of a sequence that it has."""
    part = cut.numel // cut.inner
    scattered = (parts if cut.in_order else 1) * ring_bytes("reduce_scatter", part * wide, cut.outer)
    return scattered + ring_bytes("all_gather", part * (narrow if cut.outside else wide), cut.outer)
