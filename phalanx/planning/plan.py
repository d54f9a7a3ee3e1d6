"""plan_of: everything a run decides before any process group exists (grid, stages, segments, schedule, buckets),
computed on a laptop for any world size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property

from phalanx.base.dataclass import dataclass
from phalanx.base.dtypes import precision
from phalanx.base.rules import default_of
from phalanx.comm.axis import ModelAxes
from phalanx.config.run import Run, TrainConfig
from phalanx.layout.buckets import Bucket, cut_segments, make_buckets
from phalanx.layout.config import LayoutConfig
from phalanx.layout.grid import Coords, Grid, SumAxis
from phalanx.layout.homes import whole_matrices
from phalanx.layout.param import ParamSpec, Replica
from phalanx.layout.shards import Sharding
from phalanx.layout.stages import cut_virtual_stages, given_stages
from phalanx.nn.adapted_linear import AdaptedLinears
from phalanx.nn.adapter import find_adapter
from phalanx.nn.base_linears import BaseLinears
from phalanx.nn.env import Env, OpChoices, WeightRules
from phalanx.nn.fp8 import Fp8Linears
from phalanx.nn.linear_method import LinearMethods
from phalanx.nn.module import Block
from phalanx.nn.objective import Objective, make_objective
from phalanx.nn.parameter import Parameter
from phalanx.nn.recompute import PRESETS
from phalanx.nn.units import UnitRows
from phalanx.ops.attention.context import Form
from phalanx.ops.dense.grads import GradientQueue
from phalanx.ops.dense.row_sums import ROW_SUMS
from phalanx.ops.experts.grouped import GROUPED
from phalanx.ops.quantized.quantizer import WeightQuantizer
from phalanx.ops.quantized.recipes import find_recipe
from phalanx.optim.optimizer import optimizers_of, updater_of
from phalanx.planning.blocks import (
    BlockFacts,
    facts_of,
    lengths_beside,
    make_blocks,
    num_blocks,
    unit_rooms,
    whole_linears,
)
from phalanx.planning.experts import ExpertsPlan, experts_plan
from phalanx.planning.freeze import frozen_by, trained_also
from phalanx.planning.kernels import KernelsPlan, kernels_plan
from phalanx.planning.order import media_group
from phalanx.schedule.actions import Flow, Program, Schedule, check_order
from phalanx.schedule.generators import find_pipeline_schedule, generate, resolved
from phalanx.schedule.lower import lower
from phalanx.schedule.memory_slots import MemorySlots, fits, make_slots, prove
from phalanx.schedule.simulate import simulate
from phalanx.sequence.batch import TEXT
from phalanx.sequence.sample import UnitRoom
from phalanx.sequence.shard import SequenceShard
from phalanx.sequence.streams import Border


def fp8_linears(run: Run) -> Fp8Linears | None:
    """Which linears of a run use the recipe of train.fp8."""
    c, layers = run.train.fp8, run.model.num_hidden_layers
    if c is None:
        return None
    kept = run.layout.sharding > 0  # without ZeRO, any rank's optimizer may update the weights themselves
    return Fp8Linears(
        find_recipe(c.recipe), range(c.end_layers, layers - c.end_layers), tuple(c.exclude), c.accumulate, kept
    )


def quantized_base(run: Run) -> BaseLinears | None:
    """What keeps the frozen weights of a run with adapters as quantized values (lora.base)."""
    return None if run.lora is None or run.lora.base == "bf16" else BaseLinears(run.lora.base)


def adapted_linears(run: Run, base: LinearMethods | None = None) -> AdaptedLinears | None:
    """Which linears of a run have adapters, beside the method `base` of the frozen weights."""
    return None if run.lora is None else AdaptedLinears(find_adapter(run.lora.method), run.lora, base)


def grid_of(run: Run, world: int) -> Grid:
    layout = run.layout
    dp = world // (layout.pp * layout.cp * layout.tp)
    return Grid(
        pp=layout.pp,
        dp=dp,
        cp=layout.cp,
        tp=layout.tp,
        ep=layout.ep,
        etp=layout.etp,
        ulysses=layout.cp_ulysses,
        dynamic=layout.cp_degree == "dynamic",
        media=media_group(run, dp),
    )


@dataclass(frozen=True)
class RankPlan:
    """What the blocks of one pipeline rank, at one tp rank, determine, as values.

    buckets    its flat buffers
    quantized  each quantized weight, once for each use: how it is quantized, and its spec
    early      (stage, segment) pairs that add to gradients already in forward, as a head does
    replicas   the axes over which its parameters are replicated
    """

    buckets: tuple[Bucket, ...]
    quantized: tuple[tuple[WeightQuantizer, ParamSpec], ...]
    early: frozenset[tuple[int, int]]
    replicas: frozenset[Replica]


@dataclass(frozen=True)
class Plan:
    """The decisions of a run.

    A program (what each pipeline rank does in a step) is no field: it also depends on the number of micro-batches,
    which a growing batch, evaluation and loops of one's own choose. `proved_program` computes it from the plan alone.

    stages      the block numbers of each stage
    segments    the blocks of each stage in groups, one for each bucket
    recomputed  for each block, the ops (nn.recompute.OPS) that run again in backward
    kernels     which implementations the ops use
    """

    run: Run
    grid: Grid
    facts: tuple[BlockFacts, ...]
    stages: tuple[range, ...]
    segments: tuple[tuple[range, ...], ...]
    recomputed: tuple[frozenset[str], ...]
    kernels: KernelsPlan
    _ranks: dict[tuple[int, int], RankPlan] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def objective(self) -> Objective:
        return make_objective(self.run.task)

    @property
    def schedule_name(self) -> str:
        return resolved(self.run.layout.schedule, self.run.layout.virtual_stages)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights may wait (actions I and W)."""
        return splits_backward(self.run)

    def waits(self, block: int) -> bool:
        """Whether a block's weight gradients may wait for those of its inputs."""
        return self.splits_backward and block not in self.unsplit

    @cached_property
    def unsplit(self) -> frozenset[int]:
        """Blocks whose backward is never split: heads, which make gradients in forward."""
        early = (at for rank in self.ranks() for at in rank.early)
        return frozenset(b for stage, number in early for b in self.segments[stage][number])

    @property
    def sharding(self) -> Sharding:
        return Sharding.of(self.run.layout, self.run.train.deterministic, self.run.optim.in_backward)

    def flow(self, bucket: Bucket) -> Flow:
        """What the schedule must do for a bucket."""
        cut = self.sharding.cut(bucket, self.grid)
        if bucket.base_format is not None:
            return Flow(gathers=True, prefetched=cut.cuts_weights)  # decoded for each use, whatever is sharded
        to_homes = bucket.updater.matrix and bucket.learns
        closes = cut.cuts_gradients or cut.chained or to_homes
        if cut.applied:
            return Flow(cut.cuts_weights, opens=True, closes=cut.inner * cut.outer > 1, applies=True)
        return Flow(gathers=cut.cuts_weights, opens=cut.cuts_gradients, closes=closes)

    @property
    def segments_per_stage(self) -> tuple[int, ...]:
        return tuple(len(r) for r in self.segments)

    def num_micro_batches(self, global_batch: int) -> int:
        return global_batch // (self.run.train.micro_batch * self.grid.dp)

    @property
    def leaves(self) -> int:
        """train.deterministic: the largest number of micro-batches whose gradients one rank sums in a tree during a
        step. Otherwise 0."""
        return self.num_micro_batches(self.run.train.global_batch) if self.run.train.deterministic else 0

    @property
    def sources(self) -> int:
        """train.deterministic: how many micro-batches' tokens the experts of a rank process at once. Otherwise 0."""
        grid = self.grid
        return max(1, grid.ep * grid.etp // (grid.tp * grid.cp)) if self.run.train.deterministic else 0

    @property
    def loss_seed(self) -> bool:
        """Whether heads compute their gradients in forward. With a tree over micro-batches (train.deterministic) they
        do not, whatever the schedule, because only one may be under way."""
        return not self.run.train.deterministic

    def schedule(self, num_micro_batches: int, backward: bool = True) -> Schedule:
        name = self.schedule_name if backward else "forward"
        return generate(name, self.grid.pp, self.run.layout.virtual_stages, num_micro_batches)

    @cached_property
    def stage_rank(self) -> tuple[int, ...]:
        return self.schedule(1).stage_rank

    @cached_property
    def rank_of_block(self) -> tuple[int, ...]:
        """The pipeline rank of each block."""
        return tuple(rank for stage, rank in zip(self.stages, self.stage_rank) for _ in stage)

    def stages_of(self, pp: int) -> list[int]:
        return [s for s, rank in enumerate(self.stage_rank) if rank == pp]

    @cached_property
    def offloaded(self) -> frozenset[int]:
        """Blocks whose activations are offloaded to the host: the first layers of each stage."""
        layers = self.run.model.layer_blocks
        return frozenset(
            b for stage in self.stages for b in [b for b in stage if b in layers][: self.run.train.offload_layers]
        )

    @property
    def offloaded_segments(self) -> frozenset[tuple[int, int]]:
        """(stage, segment) pairs that contain such blocks."""
        return frozenset(
            (s, n)
            for s, stage in enumerate(self.segments)
            for n, blocks in enumerate(stage)
            if self.offloaded & set(blocks)
        )

    @cached_property
    def varying_segments(self) -> frozenset[tuple[int, int]]:
        """(stage, segment) pairs of which a micro-batch has as many rows as it happens to have images: they are never
        captured in CUDA graphs."""
        varying = varying_blocks(self.facts)
        return frozenset(
            (s, n) for s, stage in enumerate(self.segments) for n, blocks in enumerate(stage) if varying & set(blocks)
        )

    def border(self, block: int) -> Border:
        """The streams that a block takes."""
        compute, learns = precision(self.run.train.precision).compute, block > self.frozen_blocks
        return tuple(replace(spec.of(compute), learns=learns) for spec in self.facts[block].given)

    @cached_property
    def frozen_blocks(self) -> int:
        """The first so many blocks have no backward, because nothing in them is trained: a frozen vision tower."""
        if not self.run.model.reads_units or not (self.run.train.freeze or self.run.lora):
            return 0
        blocks = make_blocks(self.run.model, self.env(Coords()), range(num_blocks(self.run.model)))
        learning = (any(p.spec.learns for p in block.parameters()) for block in blocks)
        return next((number for number, learns in enumerate(learning) if learns), 0)

    @cached_property
    def borders(self) -> dict[tuple[int, int], Border]:
        """The streams that the first block of each (stage, segment) takes."""
        return {
            (stage, number): self.border(segment.start)
            for stage, segments in enumerate(self.segments)
            for number, segment in enumerate(segments)
        }

    @property
    def exchange_bytes(self) -> int:
        """Bytes of a micro-batch's activations between blocks, gathered over tp, where they are largest."""
        most = max(map(self.most_tokens_of, self.lengths.values()))
        return most * self.run.model.hidden_size * precision(self.run.train.precision).compute.itemsize

    @cached_property
    def lengths(self) -> Mapping[str, int]:
        """Tokens, or rows of numbers, of a sequence in each stream: the text, and those beside its documents."""
        return {TEXT: self.run.train.seq_length, **lengths_beside(self.run)}

    @property
    def units(self) -> tuple[UnitRoom, ...]:
        """The streams of units that the model reads, and how many rows of them a sequence has room for."""
        return unit_rooms(self.run)

    @property
    def most_tokens(self) -> int:
        """Tokens of a micro-batch on the ranks that hold its largest shard."""
        return self.most_tokens_of(self.run.train.seq_length)

    def most_tokens_of(self, length: int) -> int:
        """The same of a stream whose sequences have this length."""
        return self.run.train.micro_batch * SequenceShard(0, self.grid.cp).most(length)

    @cached_property
    def experts(self) -> ExpertsPlan:
        """How tokens travel to their experts."""
        return experts_plan(self.run, self.grid, self.most_tokens, self.exchange_bytes)

    def by_all_to_all(self) -> Plan:
        """The same plan, with tokens sent to their experts by all-to-all."""
        changed = replace(self.run.layout, dispatch="alltoall", expert_room=default_of(LayoutConfig, "expert_room"))
        return replace(self, run=replace(self.run, layout=changed))

    @property
    def cp_attention(self) -> Form:
        """How keys and values are exchanged over cp."""
        chosen = self.run.layout.cp_attention
        if chosen == "auto":
            one_by_one = (not self.run.data.inside_documents or self.grid.dynamic) and not getattr(
                self.run.model, "attention_dropout", 0.0
            )
            return "ring" if one_by_one else "allgather"
        return chosen

    @property
    def buckets_come_and_go(self) -> bool:
        """Whether weights or gradients are whole only while they are needed (ZeRO-2, ZeRO-3, a quantized base)."""
        return quantized_base(self.run) is not None or self.shards_come_and_go

    @property
    def shards_come_and_go(self) -> bool:
        """The same of what is sharded."""
        axes: tuple[SumAxis, ...] = ("dp", "edp") if self.run.model.routed_experts else ("dp",)
        return self.sharding.level >= 2 and any(self.sharding.group_size(axis, self.grid) > 1 for axis in axes)

    @cached_property
    def fp8_names(self) -> tuple[str, ...]:
        """Names of all linears of the model that use the recipe of train.fp8, in order."""
        fp8 = fp8_linears(self.run)
        if fp8 is None:
            return ()
        return tuple(dict.fromkeys(x.name for x in whole_linears(self.run.model) if fp8.takes(x.matrices)))

    @property
    def counts_rows(self) -> bool:
        """Whether the host reads how many rows each expert has: the plain implementation does."""
        plain = not self.kernels.triton or GROUPED.is_plain(self.kernels.plain_ops)
        return self.run.model.routed_experts > 0 and plain

    @property
    def uncaptured(self) -> frozenset[str]:
        """Ops that run between CUDA graphs: attention if its shapes follow the lengths of documents, experts if the
        host waits for the device."""
        waits = {"attention": self.grid.dynamic, "experts": self.experts.waits_for_sizes or self.counts_rows}
        return frozenset(name for name, waiting in waits.items() if waiting)

    @property
    def mtp_stage(self) -> int | None:
        """The pipeline rank that runs multi-token prediction: the one with the last block but one. None without it."""
        if not self.run.model.predict_layers:
            return None
        return self.rank_of_block[-2]

    @property
    def ops(self) -> OpChoices:
        """Which implementations modules ask for."""
        return OpChoices(
            kernels=self.kernels.mode,
            plain_ops=self.kernels.plain_ops,
            batch_invariant=self.run.train.batch_invariant,
            dispatch=self.experts.dispatch,
            expert_room=self.run.layout.expert_room,
            sources=self.sources,
            cp_attention=self.cp_attention,
        )

    @property
    def counted_ops(self) -> OpChoices:
        """Those that are asked for where memory is counted without data: with the kernels that the run's GPUs have,
        which before the ranks have met is what the config lets expect. Batch-invariant ones count as their
        references."""
        train, known = self.run.train, self.kernels.triton
        on_gpus = train.device != "cpu" if known is None else known
        kernels = self.kernels.mode if on_gpus and not train.batch_invariant else "plain"
        return replace(self.ops, kernels=kernels, batch_invariant=False)

    def env(self, at: Coords, axes: ModelAxes | None = None) -> Env:
        train, own = self.run.train, fp8_linears(self.run) or quantized_base(self.run)
        return Env(
            grid=self.grid,
            at=at,
            axes=axes or ModelAxes(),
            seed=train.seed,
            weights=WeightRules(
                dtype=precision(train.precision).compute,
                stages=self.rank_of_block,
                mtp_stage=self.mtp_stage,
                linears=adapted_linears(self.run, own) or own,
                freeze=frozen_by(self.run),
                also=trained_also(self.run),
                gradients=GradientQueue(self.ops.by_config(ROW_SUMS)),
            ),
            ops=self.ops,
            objective=self.objective,
        )

    def make_blocks(self, env: Env, numbers: Sequence[int]) -> list[Block]:
        """The blocks with these numbers on the meta device; each knows what it recomputes in backward."""
        blocks = make_blocks(self.run.model, env, numbers)
        for block, number in zip(blocks, numbers):
            block.recomputed, block.offloaded = self.recomputed[number], number in self.offloaded
        return blocks

    def blocks_of(self, at: Coords, axes: ModelAxes | None = None) -> dict[tuple[int, int], list[Block]]:
        """The blocks of one rank on the meta device, by (stage, segment). They are built together, so that blocks which
        share a weight hold it once."""
        numbers = [b for stage in self.stages_of(at.pp) for b in self.stages[stage]]
        blocks = dict(zip(numbers, self.make_blocks(self.env(at, axes), numbers)))
        return {
            (stage, number): [blocks[b] for b in segment]
            for stage in self.stages_of(at.pp)
            for number, segment in enumerate(self.segments[stage])
        }

    def buckets_of(self, blocks: dict[tuple[int, int], list[Block]]) -> tuple[list[Bucket], list[Parameter]]:
        """The buckets of a rank with these blocks, and its parameters in the order in which the slots of buckets number
        them."""
        params, users = users_of(blocks)
        specs = [(p.spec, u) for p, u in zip(params, users)]
        return make_buckets(specs, self.grid, updater_of(self.run.optim)), params

    @cached_property
    def matrices(self) -> tuple[dict[int, list[ParamSpec]], ...]:
        """For each pipeline rank, the matrices of its stages that each optimizer (layout.buckets.Updater) needs whole,
        in an order that is the same on all ranks of a stage."""
        takers = [number for number, each in enumerate(optimizers_of(self.run.optim)) if each.owns == "matrix"]
        if not takers:
            return ({},) * self.grid.pp
        of, found = updater_of(self.run.optim), []
        for pp in range(self.grid.pp):
            env = self.env(Coords(pp=pp))
            numbers = [b for stage in self.stages_of(pp) for b in self.stages[stage]]
            plain = replace(env.weights, linears=adapted_linears(self.run))
            uncut = replace(env, grid=Grid(pp=self.grid.pp), weights=plain, ops=replace(env.ops, sources=0))
            specs = [p.spec for block in make_blocks(self.run.model, uncut, numbers) for p in block.parameters()]
            found.append({n: whole_matrices(s for s in specs if s.learns and of(s).number == n) for n in takers})
        return tuple(found)

    def rank(self, pp: int, tp: int = 0) -> RankPlan:
        """The plan of one pipeline rank at one tp rank. Sharded blocks are built to decide something only here."""
        if (pp, tp) not in self._ranks:
            blocks = self.blocks_of(Coords(pp=pp, tp=tp))
            buckets, params = self.buckets_of(blocks)
            uses = ((p.quantizer, p.spec) for segment in blocks.values() for b in segment for p in b.parameters())
            self._ranks[pp, tp] = RankPlan(
                tuple(buckets),
                tuple((quantizer, spec) for quantizer, spec in uses if isinstance(quantizer, WeightQuantizer)),
                frozenset(at for at, segment in blocks.items() if not all(b.recomputable for b in segment)),
                frozenset(r for p in params for piece in p.spec.pieces for r in piece.replicas),
            )
        return self._ranks[pp, tp]

    def ranks(self, tp: int = 0) -> tuple[RankPlan, ...]:
        """The plans of all pipeline ranks at one tp rank. Buckets and programs follow from tp rank 0, the fullest."""
        return tuple(self.rank(pp, tp) for pp in range(self.grid.pp))

    def replicas(self, tp: int) -> set[Replica]:
        """Every axis over which a parameter is replicated, over all pipeline ranks with this tp coordinate."""
        return set[Replica]().union(*(rank.replicas for rank in self.ranks(tp)))

    def recomputing(self, recomputed: Sequence[frozenset[str]]) -> Plan:
        """The same plan with other ops recomputed. Its RankPlans do not depend on them, and are kept."""
        changed = replace(self, recomputed=tuple(recomputed))
        changed._ranks.update(self._ranks)
        return changed

    def proved_program(self, num_micro_batches: int, backward: bool = True) -> Program:
        """The lowered instruction lists of all pipeline ranks, proved by the simulator (ScheduleError if they would
        hang, or add up micro-batches in another order than train.deterministic can keep)."""
        program = self.lowered_program(num_micro_batches, backward)
        simulate(program)
        if self.leaves:
            check_order(program.schedule)
        prove(program.lists, self.slots)
        return program

    @property
    def fixed_slots(self) -> bool:
        """Whether buckets that are fetched and freed always use the same memory slot, as CUDA graphs require. A
        quantized base alone needs one, for the largest segment: it has it always."""
        if not self.buckets_come_and_go:
            return False
        return self.run.train.cuda_graphs == "on" or not (self.shards_come_and_go or self.run.optim.in_backward)

    @cached_property
    def slots(self) -> tuple[MemorySlots, ...]:
        """With fixed slots, the memory slots of each pipeline rank, enough for steps of every size in the run."""
        if not self.fixed_slots:
            return ()
        programs = [self._lowered(m, True, self.run.layout.prefetch) for m in sorted(self.step_sizes)]
        return tuple(
            make_slots([p.lists[pp] for p in programs], {b.id: b.numel for b in rank.buckets})
            for pp, rank in enumerate(self.ranks())
        )

    @property
    def step_sizes(self) -> set[int]:
        """Numbers of micro-batches that a rank has in the steps of the run."""
        train, ramp = self.run.train, self.run.train.rampup
        sizes = range(ramp.start, train.global_batch, ramp.increment) if ramp else ()
        return {self.num_micro_batches(size) for size in (*sizes, train.global_batch)}

    def lowered_program(self, num_micro_batches: int, backward: bool = True) -> Program:
        """The instruction lists of all pipeline ranks. With fixed slots, evaluation gathers only as far ahead as the
        slots allow."""
        bucket_prefetch = self.run.layout.prefetch
        program = self._lowered(num_micro_batches, backward, bucket_prefetch)
        while bucket_prefetch > 0 and not all(map(fits, program.lists, self.slots)):
            bucket_prefetch -= 1
            program = self._lowered(num_micro_batches, backward, bucket_prefetch)
        return program

    def _lowered(self, num_micro_batches: int, backward: bool, bucket_prefetch: int) -> Program:
        layout, ranks = self.run.layout, self.ranks()
        return lower(
            self.schedule(num_micro_batches, backward),
            self.segments_per_stage,
            [{b.id: b.users for b in rank.buckets} for rank in ranks],
            flows_of_rank=[{b.id: self.flow(b) for b in rank.buckets} for rank in ranks],
            early=set[tuple[int, int]]().union(*(rank.early for rank in ranks)),
            bucket_prefetch=bucket_prefetch,
            keep=not layout.reshard_after_forward,
            offloaded=self.offloaded_segments,
        )


def users_of(blocks: dict[tuple[int, int], list[Block]]) -> tuple[list[Parameter], list[frozenset[tuple[int, int]]]]:
    """Each parameter of a rank once, in order, with the (stage, segment) pairs that use it."""
    users: dict[int, set[tuple[int, int]]] = {}
    params: list[Parameter] = []
    for where, segment in blocks.items():
        for block in segment:
            for p in block.parameters():
                if id(p) not in users:
                    params.append(p)
                users.setdefault(id(p), set()).add(where)
    return params, [frozenset(users[id(p)]) for p in params]


def plan_of(run: Run, world: int) -> Plan:
    """The plan of a checked config on `world` ranks, with the ops that train.recompute names recomputed. For a
    recompute budget, see `make_plan`."""
    grid = grid_of(run, world)
    facts = facts_of(run)
    # a block's time: forward and backward are both proportional to its FLOPs; a small constant keeps empty blocks from
    # being free
    costs = [f.flops + 0.01 * facts[1].flops for f in facts]
    stages = (
        given_stages(run.layout.stages)
        if run.layout.stages
        else cut_virtual_stages(costs, grid.pp, run.layout.virtual_stages)
    )
    limit = bucket_numel(run)
    segments = []
    for stage in stages:
        cut = cut_segments(
            [(facts[b].numel - facts[b].experts) // grid.tp + facts[b].experts // (grid.ep * grid.etp) for b in stage],
            limit,
        )
        segments.append(tuple(range(stage.start + r.start, stage.start + r.stop) for r in cut))
    if splits_backward(run):
        heads = len(facts) - 1 - (run.model.predict_layers > 0)
        segments = [with_heads_alone(of_stage, heads) for of_stage in segments]
    if run.train.deterministic:
        segments = [with_users_alone(of_stage, len(facts), run.model.predict_layers > 0) for of_stage in segments]
    if run.train.cuda_graphs == "on":
        varying = varying_blocks(facts)
        segments = [with_varying_alone(of_stage, varying) for of_stage in segments]
    recomputed = (recomputed_ops(run.train),) * len(facts)
    return Plan(run, grid, facts, tuple(stages), tuple(segments), recomputed, kernels_plan(run))


def splits_backward(run: Run) -> bool:
    """Whether the schedule of a checked config has actions I and W."""
    return find_pipeline_schedule(resolved(run.layout.schedule, run.layout.virtual_stages)).splits_backward


def with_heads_alone(segments: tuple[range, ...], first: int) -> tuple[range, ...]:
    """The segments of a stage, with those blocks (the head, and multi-token prediction before it) apart from layers,
    whose backward is split: theirs is not."""
    made = []
    for segment in segments:
        at = min(max(segment.start, first), segment.stop)
        made += [part for part in (range(segment.start, at), range(at, segment.stop)) if part]
    return tuple(made)


def with_users_alone(segments: tuple[range, ...], blocks: int, mtp: bool) -> tuple[range, ...]:
    """The segments of a stage, split so that embedding, head and multi-token prediction are in different ones: where
    they share a weight, their gradients are kept separate."""
    users = {0, blocks - 1, blocks - 2} if mtp else {0, blocks - 1}
    made = []
    for segment in segments:
        mine = sorted(users & set(segment))
        starts = [segment.start, *mine[1:], segment.stop]
        made += [range(a, b) for a, b in zip(starts, starts[1:])]
    return tuple(made)


def varying_blocks(facts: Sequence[BlockFacts]) -> frozenset[int]:
    """The blocks that take or return a stream of images: a vision tower, the embedding of the text, and layers to which
    the tower's features go beside the text."""
    given = [any(isinstance(spec.rows, UnitRows) for spec in each.given) for each in facts]
    return frozenset(b for b, takes in enumerate(given) if takes or any(given[b + 1 : b + 2]))


def with_varying_alone(segments: tuple[range, ...], varying: frozenset[int]) -> tuple[range, ...]:
    """The segments of a stage, split so that none has both blocks that can be captured and such that cannot."""
    made = list[range]()
    for segment in segments:
        starts = [b for b in segment if b == segment.start or (b in varying) != (b - 1 in varying)]
        made += [range(a, b) for a, b in zip(starts, [*starts[1:], segment.stop])]
    return tuple(made)


def recomputed_ops(train: TrainConfig) -> frozenset[str]:
    """Names of what is recomputed in backward: those of a preset and any ops listed beside it."""
    return frozenset((*PRESETS[train.recompute], *train.recompute_ops))


def bucket_numel(run: Run) -> int:
    """Parameters per bucket: layout.bucket_mb MiB of gradients."""
    bytes_each = 8 if run.train.precision == "fp64" else 4
    return max(1, run.layout.bucket_mb * 2**20 // bytes_each)


def storing_all(run: Run) -> Run:
    """The same run with nothing recomputed and nothing offloaded."""
    return replace(
        run, train=replace(run.train, recompute="none", recompute_ops=[], recompute_budget_gib=None, offload_layers=0)
    )


def without_layout(run: Run) -> Run:
    """The same run on one process, with which every layout must agree."""
    layout = replace(
        run.layout,
        tp=1,
        cp=1,
        cp_attention="auto",
        cp_ulysses=1,
        cp_degree="fixed",
        ep=1,
        etp=1,
        pp=1,
        virtual_stages=1,
        schedule="auto",
        stages=None,
        shard_group=None,
        shard_across="nothing",
        media_group=None,
    )
    return replace(run, layout=layout)
