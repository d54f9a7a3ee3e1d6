"""verify: does a layout compute what one process computes? On a small copy of the user's own run, in float64, on CPU ranks.

`verify` shrinks the run and has somebody start the ranks; `verify_rank` is what each rank runs; `compare` is the comparison.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from phalanx.base.batch import IGNORE, Batch
from phalanx.base.errors import PhalanxError
from phalanx.base.part import Part
from phalanx.base.placement import Placement
from phalanx.base.rng import fill_normal_
from phalanx.comm.axis import Axis
from phalanx.comm.debug import Site
from phalanx.comm.mesh import Mesh, init_world, leave_world
from phalanx.data.config import DataConfig
from phalanx.data.loader import Loader, micro_batch_samples, train_loader
from phalanx.layout.box import Box
from phalanx.layout.config import LayoutConfig
from phalanx.layout.grid import Coords, Grid
from phalanx.models.config import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, RopeScaling
from phalanx.models.deepseek_config import DeepseekV3Config
from phalanx.models.moe_config import ExpertsConfig, GptOssConfig, Qwen3MoEConfig
from phalanx.train.build import State, build, write_slot
from phalanx.train.config import Run
from phalanx.train.plan import grid_of, make_plan, num_blocks, storing_all, without_layout
from phalanx.train.step import accumulate, update

MAX_RANKS = 8


class VerifyFailed(PhalanxError):
    """The layout computes something else than one process."""

    exit_code = 1


@dataclass(frozen=True)
class Small:
    """A run of the same structure that takes seconds. `text` says what was made smaller."""

    run: Run
    world: int
    text: str


def verify(run: Run, world: int, start: Callable[[Run, int, int], None], steps: int = 2, say: Callable[[str], None] = print) -> None:
    """Compare the layout of `run` on `world` ranks with one process. `start(run, world, steps)` must call `verify_rank` on each rank."""
    small = shrink(run, world)
    say(small.text)
    start(small.run, small.world, steps)


def verify_rank(run: Run, placement: Placement, steps: int = 2) -> None:
    """One rank's part. Rank 0 prints that all is well or raises VerifyFailed, which says what differs first."""
    init_world(placement.rank, placement.world_size, placement.init_method, torch.device("cpu"), run.train.timeout_s)
    try:
        verdict = compare(run, placement.rank, placement.world_size, steps)
    finally:
        leave_world()
    if placement.rank == 0:
        if not verdict.ok:
            raise VerifyFailed(verdict.text)
        print(verdict.text, flush=True)


# ---- a small copy of a run: smaller numbers, the same structure ---------------------------------------------------------------


def shrink(run: Run, world: int) -> Small:
    """Fewer ranks, layers, features, tokens; the same kinds of everything: what is cut, shared, uneven or tied stays so."""
    run, grid = without_budget(run, world), grid_of(run, world)
    pp, dp, cp, tp = fewer_ranks([grid.pp, grid.dp, grid.cp, grid.tp], data=4 if in_groups(run, grid) else 1)
    layout = small_layout(run, world, pp, cp, tp)
    micro_batch = min(run.train.micro_batch, 2)
    seq_length = small_length(micro_batch, cp, tp)
    model = small_model(run, layout, small_layers(run.model, layout), seq_length)
    if isinstance(model, ExpertsConfig) and run.model.routed_experts:
        layout = small_expert_view(run, world, layout, dp * cp * tp)
        model = small_experts(run, model, layout)
    layout = small_groups(run, grid, layout, dp * cp)
    m = min(make_plan(run, world).num_micro_batches(run.train.global_batch), 2 * pp * layout.virtual_stages + 1)
    train = replace(
        run.train, global_batch=m * micro_batch * dp, micro_batch=micro_batch, seq_length=seq_length, precision="fp64", device="cpu", rampup=None,
        kernels="auto", cuda_graphs="auto", fp8=None,
    )  # fmt: skip
    small = replace(run, model=model, layout=layout, train=train, data=mock_of(run.data))
    ranks = pp * dp * cp * tp
    return Small(small, ranks, describe(run, world, small, ranks))


def mock_of(data: DataConfig) -> DataConfig:
    """Made-up tokens in sequences of the same kind: packed ones end in padding."""
    return DataConfig(mock=True, document_attention=data.document_attention, packing="off" if data.packing == "off" else "online")


def without_budget(run: Run, world: int) -> Run:
    """With the ops to make again named that train.recompute_budget_gib chose for most of the blocks that make any again."""
    if run.train.recompute_budget_gib is None:
        return run
    chosen = Counter(tuple(sorted(names)) for names in make_plan(run, world).again if names)
    most = max(chosen, key=lambda names: chosen[names], default=())
    return replace(run, train=replace(run.train, recompute_budget_gib=None, recompute_ops=list(most)))


def in_groups(run: Run, grid: Grid) -> bool:
    group = run.layout.shard_group
    return group is not None and group < grid.dp * grid.cp


def fewer_ranks(sizes: list[int], data: int = 1) -> list[int]:
    """Halve the largest axis (of pp, dp, cp, tp) until there are at most MAX_RANKS ranks; an axis that was there stays, but for dp beside three
    others: what is summed over it is summed over cp too. `data`: ranks that dp and cp must have together, even if that makes more."""
    sizes = list(sizes)
    while prod(sizes) > MAX_RANKS:
        smaller = [max(2, n // 2) if n > 2 else n for n in sizes]
        able = [i for i, n in enumerate(sizes) if smaller[i] < n and (i not in (1, 2) or sizes[1] * sizes[2] // n * smaller[i] >= data)]
        if able:
            largest = max(able, key=lambda i: sizes[i])
            sizes[largest] = smaller[largest]
        elif sizes[1] > 1 and sizes[2] >= data:
            sizes[1] = 1
        else:
            break
    return sizes


def small_length(micro_batch: int, cp: int, tp: int) -> int:
    """16 tokens, or the next number of which each rank has a multiple of tp."""
    unit = cp * tp
    return 16 if all(micro_batch * part.size(16) % tp == 0 for part in Part(0, cp).all) else -(-16 // unit) * unit


def small_groups(run: Run, grid: Grid, layout: LayoutConfig, ranks: int) -> LayoutConfig:
    """Several groups that shard stay several, if any size of them fits the experts' view; one group is all ranks."""
    experts = layout.ep * layout.etp if run.model.routed_experts else 1
    sizes = [g for g in range(2, ranks) if ranks % g == 0 and (g * layout.tp % experts == 0 or experts % (g * layout.tp) == 0)]
    if in_groups(run, grid) and sizes:
        return replace(layout, shard_group=sizes[0])
    return replace(layout, shard_group=None, shard_across="nothing")


def small_layout(run: Run, world: int, pp: int, cp: int, tp: int) -> LayoutConfig:
    """Given stages keep who is larger than whom while their number stays; many buckets per stage stay many."""
    given = run.layout
    stages = tuple(min(n - min(given.stages) + 1, 3) for n in given.stages) if given.stages and pp == given.pp else None
    if stages and sum(stages) < 3:
        stages = (*stages[:-1], 3 - sum(stages[:-1]))
    many = max(make_plan(run, world).runs_per_stage) > 1
    ulysses = small_ulysses(given, cp)
    return replace(given, pp=pp, cp=cp, cp_ulysses=ulysses, tp=tp, stages=stages, bucket_mb=0 if many else given.bucket_mb)


def small_ulysses(given: LayoutConfig, cp: int) -> int:
    """All of cp if it was; else as many neighbours as there are, with other parts beside them."""
    if given.cp_ulysses == given.cp:
        return cp
    return max(u for u in range(1, max(cp, 2)) if cp % u == 0 and u <= given.cp_ulysses)


def small_layers(model: LlamaConfig | GPT2Config, layout: LayoutConfig) -> int:
    """Enough for every stage to have a layer and some to have more (blocks: layers, and two or three others); one has experts."""
    if layout.stages:
        return sum(layout.stages) - (num_blocks(model) - model.num_hidden_layers)
    with_experts = [i for i in range(model.num_hidden_layers) if isinstance(model, Qwen3MoEConfig) and model.has_experts(i)] or [0]
    return min(model.num_hidden_layers, max(2, with_experts[0] + 1, layout.pp * layout.virtual_stages + 1))


def small_model(run: Run, layout: LayoutConfig, layers: int, seq_length: int) -> LlamaConfig | GPT2Config:
    model = run.model
    vocab = min(model.vocab_size, 128 if model.vocab_size % (64 * run.layout.tp) == 0 else 131)
    tp = layout.tp
    kv_heads, heads = small_heads(model, run.layout, layout)
    head_dim = 4
    width = heads * head_dim
    given = model.intermediate_size or 4 * model.hidden_size
    inner = -(-width * given // model.hidden_size // tp) * tp + (1 if given % run.layout.tp else 0)
    if isinstance(model, GPT2Config):
        inner_or_default = inner if model.intermediate_size else None
        return replace(model, vocab_size=vocab, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
                       intermediate_size=inner_or_default, max_position_embeddings=seq_length)  # fmt: skip
    if isinstance(model, DeepseekV3Config):
        return small_latent(replace(model, vocab_size=vocab, hidden_size=width, intermediate_size=inner, num_attention_heads=heads), layers)
    own_dim = model.head_dim is not None and model.head_dim * model.num_attention_heads != model.hidden_size
    own = head_dim + 2 if own_dim else None
    return replace(
        model, vocab_size=vocab, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=own, rope_scaling=small_scaling(model.rope_scaling, (own or head_dim) // 2),
        **small_window(model, run.train.seq_length, layers),
    )  # fmt: skip


def small_latent(model: DeepseekV3Config, layers: int) -> DeepseekV3Config:
    """Latents and all three kinds of features of a head stay; layers with a dense MLP and without stay."""
    dense = layers if model.first_k_dense_replace >= model.num_hidden_layers else min(model.first_k_dense_replace, layers - 1)
    return replace(
        model, num_hidden_layers=layers, first_k_dense_replace=dense, q_lora_rank=6 if model.q_lora_rank else None, kv_lora_rank=5,
        qk_nope_head_dim=3, qk_rope_head_dim=4, v_head_dim=5, rope_scaling=small_scaling(model.rope_scaling, 2),
    )  # fmt: skip


def small_expert_view(run: Run, world: int, layout: LayoutConfig, stage: int) -> LayoutConfig:
    """ep and etp for a stage of so many ranks: what is cut stays cut as far as there are ranks for it, and ep across dp stays so.

    How tokens go to their experts stays, although fewer ranks might choose otherwise; there is always room for them.
    """
    grid = grid_of(run, world)

    def likeness(ep: int, etp: int) -> tuple[Any, ...]:
        edp, across = stage // (ep * etp), (grid.ep * grid.etp > grid.tp) == (ep * etp > layout.tp)
        return (ep > 1) == (grid.ep > 1), (etp > 1) == (grid.etp > 1), across, (edp > 1) == (grid.edp > 1), ep

    views = [(ep, etp) for ep in range(1, min(grid.ep, stage) + 1) for etp in range(1, min(grid.etp, stage) + 1) if stage % (ep * etp) == 0]
    ep, etp = max(views, key=lambda view: likeness(*view))
    match make_plan(run, world).dispatch:
        case "alltoall":
            return replace(layout, ep=ep, etp=etp, dispatch="alltoall", expert_room=LayoutConfig.expert_room, ep_overlap="auto")
        case "push":
            return replace(layout, ep=ep, etp=etp, dispatch="push", expert_room=math.inf, ep_overlap="auto")
    return replace(layout, ep=ep, etp=etp, dispatch="allgather", expert_room=math.inf)


def small_experts(run: Run, small: ExpertsConfig, layout: LayoutConfig) -> ExpertsConfig:
    """One or two experts on each rank as before, at least four in all; more than a token chooses, if there were; groups stay groups.

    Dense layers stay dense as long as there is one with experts: given stages may leave too few.
    """
    model = run.model
    each = min(2, model.routed_experts // run.layout.ep)
    count = layout.ep * max(each, -(-min(4, model.routed_experts) // layout.ep))
    chosen = model.num_experts_per_tok  # type: ignore[union-attr]
    most = count if chosen == model.routed_experts else count - 1
    number = next(n for n in ("num_local_experts", "num_experts", "n_routed_experts") if hasattr(small, n))
    own: dict[str, Any] = {number: count}
    if model.expert_size != model.intermediate_size:
        scaled = -(-small.hidden_size * model.expert_size // model.hidden_size // layout.etp) * layout.etp
        own["moe_intermediate_size"] = scaled + (1 if model.expert_size % run.layout.etp else 0)
    if isinstance(small, Qwen3MoEConfig):
        own["mlp_only_layers"] = tuple(i for i in small.mlp_only_layers if i < small.num_hidden_layers - 1)
        own["decoder_sparse_step"] = min(small.decoder_sparse_step, small.num_hidden_layers)
    if isinstance(small, DeepseekV3Config) and small.n_group > 1:
        groups = 2 if count % 2 == 0 else count
        own["n_group"], own["topk_group"] = groups, 1 if small.topk_group < small.n_group else groups
        most = min(most, count // groups * own["topk_group"])
    if isinstance(small, GptOssConfig) and small.layer_types:
        own["layer_types"] = small.layer_types[: small.num_hidden_layers]
    return replace(small, num_experts_per_tok=max(1, min(chosen, most, 3)), **own)


def small_scaling(scaling: RopeScaling | None, pairs: int) -> RopeScaling | None:
    """longrope has a number per pair of features."""
    if scaling is None or scaling.short_factor is None or scaling.long_factor is None:
        return scaling
    return replace(scaling, short_factor=scaling.short_factor[:pairs], long_factor=scaling.long_factor[:pairs])


def small_window(model: LlamaConfig, seq_length: int, layers: int) -> dict[str, Any]:
    """A window that is shorter than the sequence stays so; layers with and without one stay."""
    if not isinstance(model, MistralConfig | Qwen2Config | GptOssConfig) or model.sliding_window is None:
        return {}
    window = 5 if model.sliding_window < seq_length else model.sliding_window
    if not isinstance(model, Qwen2Config):
        return {"sliding_window": window}
    without = min(model.max_window_layers, layers if model.max_window_layers >= model.num_hidden_layers else layers - 1)
    return {"sliding_window": window, "max_window_layers": without}


def small_heads(model: LlamaConfig | GPT2Config, old: LayoutConfig, layout: LayoutConfig) -> tuple[int, int]:
    """(kv heads, query heads): as many or fewer kv heads than ranks, as before; grouped if they were; some for each that exchanges them."""
    old_tp, tp = old.tp, layout.tp
    heads = model.num_attention_heads
    kv_heads = heads if isinstance(model, GPT2Config) else model.num_key_value_heads or heads
    if kv_heads < old_tp:
        few = max(1, tp * kv_heads // old_tp)
        return few, 2 * tp
    each = kv_heads // old_tp // old.cp_ulysses
    several = tp * layout.cp_ulysses * max(1, min(2, each))
    return several, several * min(2, heads // kv_heads)


def describe(run: Run, world: int, small: Run, small_world: int) -> str:
    def view(r: Run, g: Grid) -> str:
        m = r.model
        return f"; {m.routed_experts} experts, edp {g.edp} x ep {g.ep} x etp {g.etp}" if m.routed_experts else ""

    def text(r: Run, n: int) -> str:
        g, m = grid_of(r, n), r.model
        return (
            f"{n} ranks ({g.text}{view(r, g)}), {m.num_hidden_layers} layers of width {m.hidden_size}, "
            f"vocabulary {m.vocab_size}, {r.train.global_batch} sequences of {r.train.seq_length} tokens, {r.train.precision}"
        )

    more = ""
    if run.layout.stages and not small.layout.stages:
        more = "\n          (layout.stages has no meaning with fewer pipeline ranks: stages are cut by cost)"
    if run.train.fp8 is not None:
        more += "\n          (train.fp8 is left out: small sizes have no whole blocks of scales; tests/test_low.py compares it)"
    if in_groups(run, grid_of(run, world)) and small.layout.shard_group is None:
        more += "\n          (layout.shard_group has no meaning with fewer ranks: all of them shard)"
    return f"your run   {text(run, world)}\nverified   {text(small, small_world)}{more}"


# ---- what is compared ---------------------------------------------------------------------------------------------------------

Boxes = dict[str, list[tuple[Box, Tensor]]]
"""Global tensor -> this rank's boxes of it, float64; elements that belong to other ranks are NaN."""


@dataclass
class Record:
    """What some steps computed: () losses and norms, and this rank's boxes of each step's gradients and of the last weights."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    tensors: list[tuple[str, Boxes]] = field(default_factory=list)


def follow(run: Run, mesh: Mesh, steps: int, drop: Site | None = None) -> Record:
    """Train `steps` steps from weights that are random everywhere. `drop`: replace this collective by nothing (for tests)."""
    state = build(make_plan(run, mesh.grid.world), mesh)
    random_weights(state)
    mesh.watch.on, mesh.watch.drop = drop is not None, drop
    state.train()
    loader = train_loader(run.data, seq_length=run.train.seq_length, seed=run.train.seed, vocab_size=run.model.vocab_size,
                          samples=steps * run.train.global_batch)  # fmt: skip
    record = Record()
    for step in range(steps):
        tokens = accumulate(state, step_batches(run, loader, mesh, step))
        record.tensors.append((f"step {step + 1}, gradient of", boxes_of(state, "grad")))
        result = update(state, tokens, lr=1e-2)
        record.losses.append(result.loss)
        record.norms.append(result.grad_norm)
    state.buffers.ready()
    record.tensors.append((f"after step {steps}, weights of", boxes_of(state, "master")))
    mesh.watch.on, mesh.watch.drop = False, None
    return record


def step_batches(run: Run, loader: Loader, mesh: Mesh, step: int) -> list[Batch]:
    """This rank's micro-batches. Samples differ in how many tokens have a loss, so that wrong weights between them show."""
    train = run.train
    lists = micro_batch_samples(step * train.global_batch, train.global_batch, train.micro_batch, mesh.dp.size, mesh.dp.index)
    batches = []
    for samples in lists:
        batch = loader.batch(samples)
        labels = batch.labels.view(len(samples), -1).clone()
        for row, sample in enumerate(samples):
            labels[row, : sample % 5] = IGNORE
        batches.append(replace(batch, labels=labels.view(-1)).cut(mesh.part))
    return batches


def random_weights(state: State) -> None:
    """Random values for every tensor, norms and biases too: ones and zeros would hide errors."""
    for flat in state.buffers.flat:
        for slot in flat.bucket.slots:
            storage = torch.zeros(slot.spec.shape, dtype=flat.master.dtype)
            for piece in slot.spec.pieces:
                view = piece.of(storage)
                fill_normal_(view, 0.3, piece.shape, piece.box.start, 7, piece.name)
                view.add_(1.0 if piece.init.kind == "ones" else 0.0)
            write_slot(flat, slot, storage)


def boxes_of(state: State, what: Literal["grad", "master"]) -> Boxes:
    """This rank's boxes of every global tensor in its shards."""
    found: Boxes = {}
    for flat in (f for f in state.buffers.flat if f.bucket.learns or what == "master"):
        whole = torch.full((flat.bucket.numel,), torch.nan, dtype=torch.float64)
        whole[flat.lo : flat.hi] = flat.own_grad if what == "grad" else flat.master
        for slot in flat.bucket.slots:
            storage = whole[slot.offset : slot.offset + slot.numel].view(slot.spec.shape)
            for piece in slot.spec.pieces:
                found.setdefault(piece.name, []).append((piece.box, piece.of(storage).clone()))
    return found


# ---- the comparison -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A tensor of `what` that is off by `off` where `bound` is allowed; ranks: those that are off. missing: elements no rank holds."""

    what: str
    name: str
    off: float
    bound: float
    ranks: tuple[int, ...]
    missing: int = 0

    @property
    def wrong(self) -> bool:
        return self.missing > 0 or not self.off <= self.bound

    def __str__(self) -> str:
        if self.missing:
            return f"{self.what} {self.name}: {self.missing} elements are NaN or on no rank"
        where = f" on ranks {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return f"{self.what} {self.name} is off by {self.off:.3g} (allowed {self.bound:.3g}){where}"


@dataclass(frozen=True)
class Verdict:
    """`text` is for people; `differences` in the order of steps and of the model."""

    text: str
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        return not self.differences


def compare(run: Run, rank: int, world: int, steps: int = 2, drop: Site | None = None) -> Verdict:
    """Train on this layout, and alone on rank 0; every rank compares its own boxes with rank 0's tensors. The same on all ranks."""
    alone = without_layout(replace(storing_all(run), layout=replace(run.layout, sharding=0)))
    truth = follow(alone, Mesh(make_plan(alone, 1).grid), steps) if rank == 0 else Record()
    mesh = Mesh(make_plan(run, world).grid, rank)
    mine = follow(run, mesh, steps, drop)
    shapes, kept = global_shapes(alone), global_shapes(alone, untrained=True)
    last = len(mine.tensors) - 1  # the weights
    found = [d for number in range(last + 1) for d in compare_tensors(mine, truth, number, kept if number == last else shapes, mesh.world)]
    found += compare_scalars("loss", mine.losses, truth.losses, mesh.world)
    found += compare_scalars("gradient norm", mine.norms, truth.norms, mesh.world)
    wrong = tuple(d for d in found if d.wrong)
    text = failure_text(wrong, len(found), mine, mesh) if wrong else success_text(found, steps, len(shapes))
    mesh.close()
    return Verdict(text, wrong)


def global_shapes(alone: Run, untrained: bool = False) -> dict[str, tuple[int, ...]]:
    """Every global tensor in model order; those that follow from what the model sees, and so have no gradient, only if `untrained`."""
    blocks = (b for run in make_plan(alone, 1).blocks_of(Coords()).values() for b in run)
    specs = (p.spec for block in blocks for p in block.parameters())  # type: ignore[attr-defined]
    return {piece.name: piece.shape for spec in specs if spec.learns or untrained for piece in spec.pieces}


def compare_tensors(mine: Record, truth: Record, number: int, shapes: dict[str, tuple[int, ...]], world: Axis) -> Iterator[Difference]:
    """Per tensor within 1e-9 x max(its own scale, 1e-6 x the largest of all): some true gradients are zero (key biases)."""
    what, boxes = mine.tensors[number]
    expected, covered = packed(shapes), packed(shapes)
    if world.index == 0:
        for name, whole in expected.views.items():
            for box, values in truth.tensors[number][1][name]:
                whole[box.slices()] = values
    world.broadcast(expected.flat, 0)
    offs = torch.zeros(len(shapes), dtype=torch.float64)
    for i, (name, right) in enumerate(expected.views.items()):
        for box, values in boxes.get(name, ()):
            here = ~values.isnan()
            covered.views[name][box.slices()] += here
            if here.any():
                offs[i] = torch.maximum(offs[i], (values - right[box.slices()])[here].abs().max())
    world.all_reduce(covered.flat).wait()
    per_rank = world.all_gather(offs).wait().view(world.size, -1).t().tolist()
    largest = expected.flat.abs().max().item()
    for (name, right), off in zip(expected.views.items(), per_rank):
        bound = 1e-9 * max(right.abs().max().item(), 1e-6 * largest)
        wrong = tuple(rank for rank, o in enumerate(off) if not o <= bound)
        yield Difference(what, name, max(off), bound, wrong, int((covered.views[name] == 0).sum()))


@dataclass(frozen=True)
class Packed:
    """Tensors by name in one flat tensor, so that one collective serves them all."""

    flat: Tensor
    views: dict[str, Tensor]


def packed(shapes: dict[str, tuple[int, ...]]) -> Packed:
    sizes = [prod(shape) for shape in shapes.values()]
    flat = torch.zeros(sum(sizes), dtype=torch.float64)
    return Packed(flat, {name: part.view(shape) for (name, shape), part in zip(shapes.items(), flat.split(sizes))})


def compare_scalars(what: str, mine: list[Tensor], truth: list[Tensor], world: Axis) -> Iterator[Difference]:
    """One value per step, on every rank."""
    for step, value in enumerate(mine):
        right = world.broadcast((truth[step] if world.index == 0 else torch.zeros_like(value)).clone(), 0)
        offs = world.all_gather((value - right).abs().view(1)).wait().tolist()
        bound = 1e-9 * right.abs().item()
        yield Difference(f"step {step + 1},", what, max(offs), bound, tuple(r for r, o in enumerate(offs) if not o <= bound))


def success_text(found: list[Difference], steps: int, tensors: int) -> str:
    worst = max(found, key=lambda d: d.off / d.bound if d.bound else 0.0)
    return (
        f"OK: losses, norms, gradients of {tensors} tensors over {steps} steps and the weights after them are those of one process.\n"
        f"Largest deviation: {worst.what} {worst.name}, {worst.off:.2g} (allowed {worst.bound:.2g})"
    )


def failure_text(wrong: tuple[Difference, ...], compared: int, mine: Record, mesh: Mesh) -> str:
    """The first difference with the boxes of its tensor, and the last of the same step (a wrong backward spreads towards the input)."""
    first = wrong[0]
    same = [d for d in wrong if d.what == first.what]
    boxes = next((b.get(first.name, []) for what, b in mine.tensors if what == first.what), [])
    told = json.dumps([",".join(f"{a}:{b}" for a, b in zip(box.start, box.stop)) for box, values in boxes if not values.isnan().all()])
    lines = [f"DIFFERS from one process: {first}", *_box_lines(mesh.world.all_gather_text(told), mesh)]
    if len(same) > 1:
        lines.append(f"The last in model order: {same[-1]}")
    lines.append(f"{len(wrong)} of {compared} compared values differ, {len(same)} of them at this point.")
    return "\n".join(lines)


def _box_lines(told: list[str], mesh: Mesh) -> list[str]:
    lines = []
    for rank, text in enumerate(told):
        at = mesh.grid.coords(rank)
        if json.loads(text):
            lines.append(f"  rank {rank} (pp {at.pp}, dp {at.dp}, cp {at.cp}, tp {at.tp}) holds [{'] ['.join(json.loads(text))}]")
    return lines
