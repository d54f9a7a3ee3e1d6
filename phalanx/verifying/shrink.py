"""Small copies of a run for `phalanx verify`: smaller numbers, the same structures, at most MAX_RANKS ranks.

Every copy that the axes allow is made and asked which structures of the run it has (verifying/structures.py). The copy
with the most comes first; others follow for what it lacks. Structures that no copy has are reported.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from textwrap import fill
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.base.rules import default_of
from phalanx.config.device_check import Facts
from phalanx.config.run import RampConfig, Run
from phalanx.data.config import DataConfig
from phalanx.forecast.check import check
from phalanx.layout.config import LayoutConfig
from phalanx.layout.grid import Grid
from phalanx.models.model_config import ModelConfig, SmallExperts, SmallSizes
from phalanx.models.registry import family_of
from phalanx.nn.adapter import AdapterConfig
from phalanx.nn.objective import find_objective
from phalanx.planning.adapters import adapted_names
from phalanx.planning.blocks import num_blocks
from phalanx.planning.freeze import fits, stored_together
from phalanx.sequence.shard import SequenceShard
from phalanx.verifying.structures import STRUCTURES, RunOnRanks, Structure, cuts_inside, holds_several

MAX_RANKS = 8
MAX_COPIES = 3
SIZES = (2, 3, 4, MAX_RANKS)  # of an axis that is made smaller
SHORT = range(16, 33)  # lengths of sequences


@dataclass(frozen=True)
class SmallCopy:
    """A run of the same kind that takes seconds. `text` says what was made smaller."""

    run: Run
    world: int
    structures: tuple[Structure, ...]
    text: str


@dataclass(frozen=True)
class Copies:
    """The copies to compare, the structures of the run that at least one of them has, and those that none has."""

    copies: tuple[SmallCopy, ...]
    kept: tuple[Structure, ...]
    lost: tuple[Structure, ...]
    notes: tuple[str, ...]

    @property
    def report(self) -> str:
        """What was kept and what had to be given up, for people."""
        kept = "; ".join(s.name for s in self.kept) or "none: nothing is cut, shared or tied"
        lost = "; ".join([*(s.name for s in self.lost), *self.notes]) or "none"
        most = f" (for want of ranks: {MAX_RANKS} at most)" if self.lost else ""
        lines = (f"structures kept: {kept}", f"structures given up{most}: {lost}")
        return "\n".join(fill(line, 118, subsequent_indent="  ", break_on_hyphens=False) for line in lines)


def shrink(run: Run, world: int) -> SmallCopy:
    """The copy that has most structures of the run."""
    return small_copies(run, world).copies[0]


def small_copies(run: Run, world: int) -> Copies:
    """The copy with the most structures, then those that have what is still lacking."""
    given = RunOnRanks(keeping_gradients(without_budget(run, world)), world)
    wanted = tuple(s for s in STRUCTURES if s.has(given))
    grids = [given.grid] if world <= MAX_RANKS else smaller_grids(given.grid)
    made = [copy_of(given, wanted, *sizes_of(grid)) for grid in grids]
    made.sort(key=lambda copy: (weight(copy.structures), copy.world), reverse=True)
    first = next((copy for copy in made if is_valid(copy)), made[0])
    chosen, rest = [first], [copy for copy in made if copy is not first]
    lost = without(wanted, first)
    while lost and rest and len(chosen) < MAX_COPIES:
        best = max(rest, key=lambda copy: weight(s for s in copy.structures if s in lost))
        rest.remove(best)
        if not set(best.structures) & set(lost):
            break
        if is_valid(best):
            chosen.append(best)
            lost = without(lost, best)
    kept = tuple(s for s in wanted if s not in lost)
    return Copies(tuple(chosen), kept, lost, tuple(notes_on(run)))


def without(structures: Iterable[Structure], copy: SmallCopy) -> tuple[Structure, ...]:
    """Those that the copy lacks."""
    return tuple(s for s in structures if s not in copy.structures)


def weight(structures: Iterable[Structure]) -> int:
    return sum(s.weight for s in structures)


def sizes_of(grid: Grid) -> tuple[int, int, int, int]:
    return grid.pp, grid.dp, grid.cp, grid.tp


def smaller_grids(grid: Grid) -> list[Grid]:
    """All grids of at most MAX_RANKS ranks whose axes are no larger."""
    choices = [
        sorted({1, *(n for n in SIZES if n < size), *([size] if size <= MAX_RANKS else [])}) for size in sizes_of(grid)
    ]
    return [Grid(pp=pp, dp=dp, cp=cp, tp=tp) for pp, dp, cp, tp in product(*choices) if pp * dp * cp * tp <= MAX_RANKS]


def is_valid(copy: SmallCopy) -> bool:
    """Whether the copy breaks no rule; a bucket for each block (layout.bucket_mb=0) is allowed only here."""
    run = replace(copy.run, layout=replace(copy.run.layout, bucket_mb=max(1, copy.run.layout.bucket_mb)))
    return not check(run, Facts(world_size=copy.world, local_ranks=copy.world, files=False))


def notes_on(run: Run) -> list[str]:
    """What no small copy on CPU ranks can have."""
    notes = []
    if run.train.fp8 is not None:
        notes.append("train.fp8 (small sizes have no whole blocks of scales; tests/nn/test_fp8.py compares it)")
    if run.train.recompute_budget_gib is not None:
        notes.append("recomputation that differs between blocks (what most blocks recompute is used for all)")
    if run.optim.masters == "split" or run.optim.in_backward:
        notes.append(
            "optim.masters=split and optim.in_backward (gradients in float64 are compared before they are applied; "
            "tests/engine/test_in_backward.py and tests/optim/test_one_gpu.py compare these)"
        )
    if run.train.device != "cpu":
        notes.append(
            "GPU kernels, CUDA graphs and exchanges through shared GPU memory (CPU ranks run the reference "
            "implementations)"
        )
    return notes


def copy_of(given: RunOnRanks, wanted: Sequence[Structure], pp: int, dp: int, cp: int, tp: int) -> SmallCopy:
    """The small copy with these sizes of the axes."""
    run, ranks = given.run, pp * dp * cp * tp
    layout = small_layout(given, pp, cp, tp)
    micro_batch, seq_length = small_batch(given, cp, tp)
    model = small_model(run, layout, small_layers(run.model, layout), seq_length)
    if run.model.routed_experts:
        layout = small_expert_view(given, layout, dp * cp * tp)
        model = small_experts(run, model, layout)
    layout = small_groups(given, layout, dp * cp)
    layout = replace(layout, media_group=small_media_group(given, dp))
    unit, count = micro_batch * dp, small_count(given, pp, layout.virtual_stages)
    ramp = RampConfig(start=unit, increment=(count - 1) * unit, samples=1) if run.train.rampup and count > 1 else None
    train = replace(
        run.train,
        global_batch=count * unit,
        micro_batch=micro_batch,
        seq_length=seq_length,
        precision="fp64",
        device="cpu",
        rampup=ramp,
        kernels="auto",
        cuda_graphs="auto",
        fp8=None,
        freeze=small_freeze(run, model),
        offload_layers=min(run.train.offload_layers, len(model.layer_blocks)),
    )
    data, lora = mock_of(run.data, model), small_lora(run, model)
    task = find_objective(run.task.name).shrunk(run.task, seq_length)
    small = RunOnRanks(replace(run, model=model, layout=layout, train=train, data=data, lora=lora, task=task), ranks)
    has = tuple(s for s in wanted if s.has(small))
    return SmallCopy(small.run, ranks, has, describe(given, small))


def mock_of(data: DataConfig, model: ModelConfig) -> DataConfig:
    """Mock tokens in sequences of the same kind: packed ones end in padding. With made-up images, if the model reads
    any, as many as fit."""
    room = {stream.name: 4 * stream.largest for stream in model.needs_room}
    packing: Any = "online" if data.is_packed else "off"
    return DataConfig(mock=True, document_attention=data.document_attention, packing=packing, room=room)


def without_budget(run: Run, world: int) -> Run:
    """The run with an explicit list of ops to recompute: those that train.recompute_budget_gib chose for most of the
    blocks that recompute any."""
    if run.train.recompute_budget_gib is None:
        return run
    chosen = Counter(tuple(sorted(names)) for names in RunOnRanks(run, world).plan.recomputed if names)
    most = max(chosen, key=lambda names: chosen[names], default=())
    return replace(run, train=replace(run.train, recompute_budget_gib=None, recompute_ops=list(most)))


def keeping_gradients(run: Run) -> Run:
    """The run whose gradients can be compared, in float64: whole masters, and nothing applied in backward."""
    optim = run.optim
    kept = replace(optim, masters="whole", in_backward=False, clip_by=default_of(type(optim), "clip_by"))
    return replace(run, optim=kept)


def small_count(given: RunOnRanks, pp: int, virtual_stages: int) -> int:
    """Micro-batches: enough to fill the pipeline and continue; too few to fill it if the run has too few."""
    few = given.micro_batches < given.grid.pp
    return min(given.micro_batches, max(1, pp - 1) if few else 2 * pp * virtual_stages + 1)


def small_batch(given: RunOnRanks, cp: int, tp: int) -> tuple[int, int]:
    """(sequences in a micro-batch, their length): tensor parallelism divides a sequence if it did before, and shards
    differ in length if they did."""
    train, old = given.run.train, given.grid
    old_batch = (train.micro_batch, train.seq_length, old.cp, old.tp)
    likeness = (cuts_inside(*old_batch), holds_several(*old_batch), given.uneven_parts)

    def like(batch: int, length: int) -> tuple[Any, ...]:
        sizes = {part.size(length) for part in SequenceShard(0, cp).all}
        here = (cuts_inside(batch, length, cp, tp), holds_several(batch, length, cp, tp), len(sizes) > 1)
        return (*(a == b for a, b in zip(here, likeness)), -batch, -length)

    batches = range(2, 5) if train.micro_batch > 1 else range(1, 2)
    able = [
        (b, n)
        for b, n in product(batches, SHORT)
        if all(b * part.size(n) % tp == 0 for part in SequenceShard(0, cp).all)
    ]
    return max(able, key=lambda pair: like(*pair))


def small_groups(given: RunOnRanks, layout: LayoutConfig, ranks: int) -> LayoutConfig:
    """Several groups that shard stay several, if any group size fits the expert view; a single group becomes all
    ranks."""
    experts = layout.ep * layout.etp if given.experts else 1
    sizes = [
        g
        for g in range(2, ranks)
        if ranks % g == 0 and (g * layout.tp % experts == 0 or experts % (g * layout.tp) == 0)
    ]
    if given.groups and sizes:
        return replace(layout, shard_group=sizes[0])
    return replace(layout, shard_group=None, shard_across="nothing")


def small_layout(given: RunOnRanks, pp: int, cp: int, tp: int) -> LayoutConfig:
    """Given stages stay uneven; many buckets in a stage stay many."""
    old = given.run.layout
    virtual = old.virtual_stages if pp > 1 else 1
    stages = small_stages(old.stages, pp * virtual) if old.stages else None
    schedule = old.schedule if virtual == old.virtual_stages else "auto"
    layout = replace(
        old,
        pp=pp,
        cp=cp,
        cp_ulysses=small_ulysses(old, cp),
        tp=tp,
        stages=stages,
        bucket_mb=0 if given.buckets > 1 else old.bucket_mb,
        virtual_stages=virtual,
        schedule=schedule,
    )
    if cp == 1:
        layout = replace(layout, cp_attention="auto", cp_degree="fixed")
    return layout if layout.cp_ulysses < cp else replace(layout, cp_attention="auto")


def small_media_group(given: RunOnRanks, dp: int) -> int | None:
    """All data-parallel ranks if it was all of them; otherwise several groups, if there are enough ranks."""
    group, asked = given.grid.media, given.run.layout.media_group
    if group in (1, given.grid.dp):
        return asked if asked in (None, 1) else dp
    return dp if dp % 2 or dp == 2 else 2


def small_stages(given: tuple[int, ...], count: int) -> tuple[int, ...]:
    """`count` of the given stages, each smaller: their order by size stays, and not all become equal."""
    picked = [given[i * len(given) // count] for i in range(count)]
    if len(set(picked)) == 1 < len(set(given)):
        picked[given.index(max(given)) * count // len(given)] += 1
    stages = [min(n - min(picked) + 1, 3) for n in picked]
    stages[-1] += max(0, 3 - sum(stages))
    return tuple(stages)


def small_ulysses(given: LayoutConfig, cp: int) -> int:
    """All of cp if it was all of cp; otherwise a smaller number of neighbours, so that several groups remain."""
    if given.cp_ulysses == given.cp:
        return cp
    return max(u for u in range(1, max(cp, 2)) if cp % u == 0 and u <= given.cp_ulysses)


def small_layers(model: ModelConfig, layout: LayoutConfig) -> int:
    """Enough for every stage to have a layer and some to have more (blocks: layers, and two or three others); one layer
    has experts."""
    if layout.stages:
        return max(1, sum(layout.stages) - (num_blocks(model) - model.num_hidden_layers))
    least = family_of(model).least_layers(model)
    return min(model.num_hidden_layers, max(least, layout.pp * layout.virtual_stages + 1))


def small_model(run: Run, layout: LayoutConfig, layers: int, seq_length: int) -> ModelConfig:
    model, tp = run.model, layout.tp
    kv_heads, heads = small_heads(model, run.layout, layout)
    head_dim = small_head_dim(getattr(model, "partial_rotary_factor", 1.0) or 1.0)
    width = heads * head_dim
    given = model.intermediate_size or 4 * model.hidden_size
    sizes = SmallSizes(
        vocab_size=min(model.vocab_size, 128 if model.vocab_size % (64 * run.layout.tp) == 0 else 131),
        hidden_size=width,
        intermediate_size=-(-width * given // model.hidden_size // tp) * tp + (1 if given % run.layout.tp else 0),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        seq_length=seq_length,
        given_length=run.train.seq_length,
    )
    return family_of(model).shrink(model, sizes)


def small_head_dim(rotated: float) -> int:
    """The smallest head_dim of which a whole number of pairs is rotated."""
    return next((dim for dim in (4, 8, 16) if int(dim * rotated) >= 2 and int(dim * rotated) % 2 == 0), 32)


def small_heads(model: ModelConfig, old: LayoutConfig, layout: LayoutConfig) -> tuple[int, int]:
    """(kv heads, query heads): as many kv heads as ranks or fewer, as before; grouped if they were; some for each rank
    that exchanges them."""
    old_tp, tp = old.tp, layout.tp
    heads, kv_heads = model.num_attention_heads, model.kv_heads
    if kv_heads < old_tp:
        few = max(n for n in range(1, max(2, tp)) if tp % n == 0 and n <= kv_heads)
        return few, 2 * tp
    each = kv_heads // old_tp // old.cp_ulysses
    several = tp * layout.cp_ulysses * max(1, min(2, each))
    return several, several * min(2, heads // kv_heads)


def small_expert_view(given: RunOnRanks, layout: LayoutConfig, stage: int) -> LayoutConfig:
    """ep and etp for a stage of `stage` ranks: what is sharded stays sharded as far as there are ranks for it, and ep
    across dp stays so.

    The dispatch of tokens stays, although `auto` might choose differently for fewer ranks; there is always room for
    them.
    """
    grid = given.grid

    def likeness(ep: int, etp: int) -> tuple[Any, ...]:
        edp, across = stage // (ep * etp), (grid.ep * grid.etp > grid.tp) == (ep * etp > layout.tp)
        return (ep > 1) == (grid.ep > 1), (etp > 1) == (grid.etp > 1), across, (edp > 1) == (grid.edp > 1), ep

    views = [
        (ep, etp)
        for ep in range(1, min(grid.ep, stage) + 1)
        for etp in range(1, min(grid.etp, stage) + 1)
        if stage % (ep * etp) == 0
    ]
    ep, etp = max(views, key=lambda view: likeness(*view))
    match given.plan.experts.dispatch:
        case "alltoall":
            return replace(
                layout, ep=ep, etp=etp, dispatch="alltoall", expert_room=LayoutConfig.expert_room, ep_overlap="auto"
            )
        case "push":
            return replace(layout, ep=ep, etp=etp, dispatch="push", expert_room=math.inf, ep_overlap="auto")
    return replace(layout, ep=ep, etp=etp, dispatch="allgather", expert_room=math.inf)


def small_experts(run: Run, small: ModelConfig, layout: LayoutConfig) -> ModelConfig:
    """One or two experts on each rank as before, at least four in total; more than a token chooses, if that was so."""
    model, shrink_experts = run.model, family_of(run.model).shrink_experts
    if shrink_experts is None:
        raise TypeError(f"the family {model.family} has experts and no shrink_experts: `phalanx verify` needs it")
    each = min(2, model.routed_experts // run.layout.ep)
    count = layout.ep * max(each, -(-min(4, model.routed_experts) // layout.ep))
    chosen: int = model.num_experts_per_tok  # type: ignore[attr-defined]
    most = count if chosen == model.routed_experts else count - 1
    scaled = -(-small.hidden_size * model.expert_size // model.hidden_size // layout.etp) * layout.etp
    width = scaled + (1 if model.expert_size % run.layout.etp else 0)
    return shrink_experts(small, SmallExperts(count, width, max(1, min(chosen, most, 3))))


def small_freeze(run: Run, model: ModelConfig) -> list[str]:
    """The globs that match tensors of the small model, or else one that does."""
    names = [name for matrix in stored_together(model) for name in matrix] if run.train.freeze else []
    fitting = [glob for glob in run.train.freeze if any(fits(name, [glob]) for name in names)]
    if run.train.freeze and (not fitting or all(fits(name, fitting) for name in names)):
        return [f"{family_of(model).tensors.layer.format(0)}.*"]
    return fitting


def small_lora(run: Run, model: ModelConfig) -> AdapterConfig | None:
    """The adapters of the linears that its globs fit in the small model, or else of all."""
    if run.lora is None:
        return None
    known = adapted_names(model)
    able = [name for names in known.carriers for name in names] + [*known.embeddings, *known.heads, *known.stack_shapes]
    fitting = [glob for glob in run.lora.targets if any(fits(name, [glob]) for name in able)]
    names = [name for matrix in stored_together(model) for name in matrix]
    also = [glob for glob in run.lora.also if any(fits(name, [glob]) for name in names)]
    return replace(run.lora, targets=fitting or ["*"], also=also, init_from=None)


def describe(given: RunOnRanks, small: RunOnRanks) -> str:
    """Both in a line each."""
    return f"your run   {_in_words(given)}\nverified   {_in_words(small)}"


def _in_words(r: RunOnRanks) -> str:
    model, train, grid = r.run.model, r.run.train, r.grid
    view = f"; {r.experts} experts, edp {grid.edp} x ep {grid.ep} x etp {grid.etp}" if r.experts else ""
    return (
        f"{r.world} ranks ({grid.text}{view}), {len(model.layer_blocks)} layers of width {model.hidden_size}, "
        f"vocabulary {model.vocab_size}, {train.global_batch} sequences of {train.seq_length} tokens, {train.precision}"
    )
