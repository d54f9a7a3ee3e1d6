"""What each pipeline rank of a plan holds and sends, before anything runs: bytes by kind, measured on the meta device
and counted in buckets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from itertools import product
from math import prod
from types import MappingProxyType
from typing import Any

import torch

from phalanx.base.dataclass import dataclass
from phalanx.base.dtypes import Precision, precision
from phalanx.base.pairwise import waiting
from phalanx.comm.axis import Axis, ModelAxes
from phalanx.comm.dry import DryAxis
from phalanx.comm.overlap import sums_bytes
from phalanx.forecast.traffic import (
    bucket_sends,
    passing_bytes,
    placed_bytes,
    scale_sends,
    shadow_bytes,
    staying_values,
)
from phalanx.layout.buckets import Bucket
from phalanx.layout.grid import Coords
from phalanx.layout.homes import home_bucket, homes_of, lies_whole
from phalanx.layout.strided import boxes_in
from phalanx.nn.dry_run import (
    ElementBytes,
    FusedAttention,
    KnownShapes,
    Use,
    bucket_bytes,
    measure,
    measure_split,
    summed_bytes,
)
from phalanx.nn.env import OpChoices
from phalanx.nn.module import Block
from phalanx.nn.objective import EmbeddingObjective
from phalanx.nn.recompute import Recompute
from phalanx.nn.run_block import run_block
from phalanx.ops.dense.grads import GradientQueue
from phalanx.ops.quantized.quantizer import WeightQuantizer
from phalanx.optim.optimizer import MatrixOptimizer, optimizers_of
from phalanx.optim.sharded import TOGETHER, master_bytes, state_bytes
from phalanx.planning.blocks import BlockFacts
from phalanx.planning.plan import Plan
from phalanx.schedule.actions import (
    Backward,
    Compute,
    Fetch,
    Forward,
    InputGrad,
    Instruction,
    Offload,
    Program,
    Send,
    Value,
    WeightGrad,
)
from phalanx.schedule.lower import lower
from phalanx.schedule.simulate import Costs, LiveChange, ScheduleTrace, simulate
from phalanx.sequence.batch import TEXT, Batch
from phalanx.sequence.shard import SequenceShard
from phalanx.sequence.streams import HIDDEN, Border, Streams, check_shapes, hidden, pack, unpack
from phalanx.sequence.units import meta_units

RANKS_SEEN = 4  # of those among which gradients of whole matrices are sharded, to see what travels to homes
MATRIX_COPIES = 4  # of matrices, that an update of them needs at once besides copies of master, gradient and state
TEXT_TOKENS = 32  # of a text on average, for objectives over embeddings
# Not our tensors: the CUDA context, buffers of NCCL and cuBLAS, what the allocator cannot reuse.
OVERHEAD = 2 * 2**30


@dataclass(frozen=True)
class BlockUse:
    """For one block and micro-batch on tp rank 0, the fullest: bytes; bytes sent over tp (and tp x cp), over cp and to
    experts (ep) in forward and backward; bytes derived from the batch and shared with similar blocks; and how often
    each op ran again in backward. split: bytes if its weight gradients wait."""

    bytes: Use
    sent: dict[str, float]
    derived: int
    reran: Counter[str]
    split: Use | None = None

    @property
    def pending(self) -> int:
        """Bytes that wait with its weight gradients."""
        return self.split.pending if self.split else 0

    @property
    def most_kept(self) -> int:
        """Bytes of a micro-batch from its forward on, till its weight gradients are there."""
        return max(self.bytes.kept, self.pending)


@dataclass(frozen=True)
class RankUse:
    """For one pipeline rank, at tp rank 0.

    memory   bytes by kind; weights and gradients at their maximum
    passing  the part of them that exists only while blocks at work need it (ZeRO-2 and ZeRO-3)
    sent     bytes that it sends in a step, by axis
    live     the largest number of (stage, micro-batch) activations at once
    numel    elements of its buckets, including padding
    host     the largest number of bytes of offloaded activations
    pools    bytes beyond `memory` if CUDA graphs are used: each micro-batch in flight has a memory pool of its own, and
             backward one, so that what forward has worked with is not there for backward
    pending  the largest number of bytes of activations that are kept for weight gradients which wait
    """

    memory: dict[str, int]
    passing: dict[str, int]
    sent: dict[str, float]
    live: int
    numel: int
    host: int = 0
    pools: int = 0
    pending: int = 0

    @property
    def total(self) -> int:
        return sum(self.memory.values())


def rank_uses(
    plan: Plan, num_micro_batches: int, blocks: Sequence[BlockUse] | None = None
) -> tuple[list[RankUse], ScheduleTrace]:
    """One RankUse for each pipeline rank, and the simulated step from which they follow (whole stages; segments and
    buckets do not change it).

    blocks: `block_uses` of the plan, if already known.
    """
    blocks, program = blocks or block_uses(plan), plan.lowered_program(num_micro_batches)
    trace = simulate(lower(plan.schedule(num_micro_batches)), step_costs(plan))
    return [_rank_use(plan, pp, blocks, trace, program, num_micro_batches) for pp in range(plan.grid.pp)], trace


def step_costs(plan: Plan) -> Costs:
    """FLOPs of a stage's forward and backward per token, as the simulator's seconds. Messages are free.

    Heads compute their gradients in forward, and are never recomputed. In a split backward, weight gradients cost as
    much as whatever has weights in forward: everything except attention over tokens.
    """
    facts = plan.facts
    unmixed = tuple(replace(f, flops=f.alone) for f in facts)  # without attention over tokens
    recomputed = [facts if "block" in names else unmixed if "layer" in names else None for names in plan.recomputed]
    forward = [sum(facts[b].flops + 2.0 * facts[b].loss_flops for b in stage) for stage in plan.stages]
    backward = [
        sum(2.0 * _passed(facts[b]) + (_passed(of[b]) if (of := recomputed[b]) else 0.0) for b in stage)
        for stage in plan.stages
    ]
    unsplit = plan.unsplit if plan.splits_backward else frozenset()
    weights = [sum(facts[b].alone for b in stage if b not in unsplit) for stage in plan.stages]
    return Costs(tuple(forward), tuple(backward), weights=tuple(weights))


def _passed(facts: BlockFacts) -> float:
    """FLOPs of a block's forward but for a head's."""
    return facts.flops - facts.loss_flops


def block_uses(plan: Plan) -> list[BlockUse]:
    """The use of every block of the model; of identical blocks only one is measured."""
    found: dict[tuple[BlockFacts, frozenset[str], frozenset[str]], BlockUse] = {}
    kinds = list(zip(plan.facts, plan.recomputed, (fp8_of_block(plan, number) for number in range(len(plan.facts)))))
    for number, kind in enumerate(kinds):
        if kind not in found:
            found[kind] = block_use(plan, number)
    return [found[kind] for kind in kinds]


def fp8_of_block(plan: Plan, number: int) -> frozenset[str]:
    """Names, without the layer's number, of its quantized linears."""
    layer = str(number - 1)
    return frozenset(name.replace(f".{layer}.", ".", 1) for name in plan.fp8_names if layer in name.split("."))


@dataclass(frozen=True)
class DryBlock:
    """A block of tp rank 0 on the meta device with a micro-batch, over axes that only count what is sent."""

    block: Block
    batch: Batch
    axes: ModelAxes
    given: Border
    passed: Border | None  # None: it is the last block
    known: KnownShapes = field(default_factory=KnownShapes)

    @staticmethod
    def of(plan: Plan, number: int, recompute: Recompute | None = None, ops: OpChoices | None = None) -> DryBlock:
        """ops: how its ops are counted; None: as the plan says (Plan.counted_ops)."""
        grid, batch = plan.grid, _batch(plan)
        keys, heads = divmod(batch.part.index, grid.ulysses)
        axes = ModelAxes(
            DryAxis("tp", grid.tp),
            DryAxis("ep", grid.ep),
            DryAxis("etp", grid.etp),
            DryAxis("ep x etp", grid.ep * grid.etp),
            DryAxis("cp", grid.cp, batch.part.index),
            DryAxis("cp heads", grid.ulysses, heads),
            DryAxis("cp keys", grid.cp // grid.ulysses, keys),
            DryAxis("tp x cp", grid.tp * grid.cp),
            DryAxis("tp x cp x dp", grid.tp * grid.cp * grid.media if grid.media > 1 else 1),
        )
        env = plan.env(Coords(), axes)
        ops = ops or plan.counted_ops
        rules = replace(env.weights, gradients=GradientQueue(ops.kernels))
        env = replace(env, ops=ops, weights=rules, recompute=recompute or Recompute())
        (block,) = plan.make_blocks(env, range(number, number + 1))
        given, last = plan.border(number) if number else (), number == len(plan.facts) - 1
        dry = DryBlock(block, batch, axes, given, None if last else plan.border(number + 1))
        with torch.no_grad(), dry.known, FusedAttention():
            for p in block.parameters():
                if isinstance(p.quantizer, WeightQuantizer):
                    p.quantizer.refresh(p)  # counted with the weights
            dry.forward(
                dry.new_input()
            )  # computes what all layers share for a batch, which does not count as this block's
        return dry.forgetting()

    def new_input(self) -> Streams:
        """What the previous block passes on; nothing for the first."""
        tp = self.axes.tp.size
        return {spec.name: spec.empty(self.batch, tp, "meta") for spec in self.given} or {
            HIDDEN: torch.empty(0, dtype=self.block.env.weights.dtype, device="meta")
        }

    def forward(self, streams: Streams) -> tuple[torch.Tensor, ...]:
        """What the block passes on. TypeError if that is not what it declares."""
        x = unpack(tuple(streams.values()), self.given) if self.given else streams[HIDDEN]
        y = run_block(self.block, x, self.batch)
        if self.passed is None:
            return (hidden(y),)
        tensors = pack(y, self.passed)
        check_shapes(tensors, self.passed, self.batch, self.axes.tp.size)
        return tensors

    def forgetting(self) -> DryBlock:
        """The same, with nothing sent or run again yet."""
        for axis in (a for group in self._axes.values() for a in group):
            axis.sent.clear()  # type: ignore[attr-defined]
        self.block.env.recompute.reran.clear()
        return self

    @property
    def _axes(self) -> dict[str, tuple[Axis, ...]]:
        axes = self.axes
        return {
            "tp": (axes.tp, axes.batch_group),
            "cp": (axes.cp, axes.heads, axes.keys),
            "ep": (axes.ep, axes.etp, axes.experts),
            "dp": (axes.media,),
        }

    @property
    def sent(self) -> dict[str, float]:
        return {name: float(sum(n for axis in group for n in axis.sent.values())) for name, group in self._axes.items()}  # type: ignore[attr-defined]

    def use(self, grad_dtype: torch.dtype, split: bool = False) -> BlockUse:
        """split: with what weight gradients of a split backward keep till they are made."""
        params, queue = list(self.block.parameters()), self.block.env.weights.gradients
        with self.known:
            use = measure(self.forward, self.new_input, params, grad_dtype)
        made = BlockUse(use, self.sent, self.batch.derived_bytes, Counter(self.block.env.recompute.reran))
        if not split:
            return made
        with self.known:
            return replace(made, split=measure_split(self.forward, self.new_input, params, grad_dtype, queue))


def block_use(plan: Plan, number: int) -> BlockUse:
    return DryBlock.of(plan, number).use(precision(plan.run.train.precision).master, plan.waits(number))


def _batch(plan: Plan) -> Batch:
    """The largest shard of a micro-batch on the meta device; of several, the last, which reads the most keys.

    Its tensors exist once per micro-batch of a step, as do those of the whole sequences with context parallelism.
    """
    seed, late, grid = torch.empty((), device="meta"), not plan.loss_seed, plan.grid
    streams = {name: _stream(plan, name, length) for name, length in plan.lengths.items()}
    streams |= {r.stream.name: meta_units(r.stream, plan.run.train.micro_batch * r.capacity) for r in plan.units}
    text = streams.pop(TEXT)
    few = plan.objective.label_rows(text.all_tokens)
    batch = replace(text, loss_seed=seed, late=late, beside=streams, label_rows=few)
    if isinstance(plan.objective, EmbeddingObjective):
        batch = with_texts(plan, batch)
    parts = [
        batch.cut(replace(part, dynamic=grid.dynamic, heads=grid.ulysses, ranks=grid.tp, replicas=grid.media))
        for part in SequenceShard(0, grid.cp).all
    ]
    return max(reversed(parts), key=lambda b: b.num_tokens)


def most_rows(plan: Plan) -> dict[str, int]:
    """Rows that a rank may have of each stream of units, by its name."""
    batch = _batch(plan)
    return {unit.stream.name: batch.beside[unit.stream.name].num_tokens for unit in plan.units}


def with_texts(plan: Plan, batch: Batch) -> Batch:
    """The batch with what a step knows of its texts before it makes gradients."""
    wide = precision(plan.run.train.precision).master
    rows = texts_of(batch.num_tokens)
    gradients = torch.empty(rows, plan.run.model.hidden_size, dtype=wide, device="meta")
    return replace(batch, text_gradients=gradients, text_sums=torch.empty(1, device="meta"), most_documents=rows)


def texts_of(tokens: int) -> int:
    """The number of texts in so many tokens, if each has TEXT_TOKENS."""
    return max(1, tokens // TEXT_TOKENS)


def text_bytes(plan: Plan, num_micro_batches: int) -> tuple[int, int]:
    """Bytes of an objective over embeddings: what a step keeps of its texts, and the most that its loss takes before:
    embeddings of all ranks, their directions and both gradients, and three matrices of scores."""
    if not isinstance(plan.objective, EmbeddingObjective):
        return 0, 0
    train = plan.run.train
    own = num_micro_batches * texts_of(train.micro_batch * train.seq_length)
    each, everyone = precision(train.precision).master.itemsize, own * plan.grid.dp
    width = plan.run.model.hidden_size
    return own * width * each, each * everyone * (4 * width + 3 * own)


def _stream(plan: Plan, name: str, length: int) -> Batch:
    """A stream of tokens, or of numbers, of a micro-batch whose sequences have this length."""
    count, data = plan.run.train.micro_batch, plan.run.data
    ids = torch.empty(count * length, dtype=torch.int64, device="meta")
    documents, real = ids if data.inside_documents else None, ids if data.is_packed else None
    prefix = ids if plan.objective.makes_prefix else None
    numbers = next((stream for stream in plan.run.model.numbers_beside if stream.name == name), None)
    values = None if numbers is None else torch.empty(len(ids), numbers.width, dtype=torch.float32, device="meta")
    return Batch(ids, ids, ids, ids, count, length, documents, real=real, prefix=prefix, values=values)


def _rank_use(
    plan: Plan, pp: int, blocks: Sequence[BlockUse], trace: ScheduleTrace, program: Program, num_micro_batches: int
) -> RankUse:
    run, kind, grid = plan.run, precision(plan.run.train.precision), plan.grid
    buckets, quantizers = plan.rank(pp).buckets, plan.rank(pp).quantized
    passing = passing_bytes(plan, buckets, program.lists[pp], kind)
    of_buckets = bucket_sends(plan, buckets, program.lists[pp], kind)
    mine = [b for s in plan.stages_of(pp) for b in plan.stages[s]]
    messages = message_bytes(plan)
    sends = sum(messages[i.value._replace(mb=0)] for i in trace.program.lists[pp] if isinstance(i, Send))
    rows = 4 + run.data.inside_documents + run.data.is_packed + plan.objective.makes_prefix
    lengths, units = plan.lengths.values(), [each.stream.name for each in plan.units]
    tokens = sum(plan.most_tokens_of(n) + (run.train.micro_batch * n if grid.cp > 1 else 0) for n in lengths)
    batches = num_micro_batches * 8 * rows * tokens
    beside = run.model.numbers_beside
    batches += num_micro_batches * sum(4 * s.width * plan.most_tokens_of(plan.lengths[s.name]) for s in beside)
    batches += num_micro_batches * 8 * whole_tokens(plan) * grid.dynamic
    batches += num_micro_batches * sum(t.nbytes for name in units for t in _batch(plan).beside[name].tensors)
    layout = run.layout
    shared = 4 * plan.exchange_bytes if grid.tp > 1 and layout.tp_overlap != "off" else 0  # comm.symmetric
    if plan.run.model.routed_experts and grid.ep * grid.etp > 1 and plan.experts.in_memory:
        shared += 4 * plan.experts.exchange_bytes
    shared += sum_pieces(plan, buckets, kind.master.itemsize)
    quantized = 2 * sum(prod(spec.shape) for _, spec in quantizers if not spec.coded)
    wide = kind.master.itemsize
    sizes = ElementBytes(kind.compute.itemsize, wide, master_bytes(run.optim, wide), state_bytes(run.optim, wide))
    held = bucket_bytes(buckets, sizes, grid, plan.sharding)
    at_homes = home_bytes(plan, pp, kind)
    for name in ("masters", "moments"):
        held[name] += at_homes[name]
    held["weights"] += staying_values(plan, buckets, kind)
    shadow = shadow_bytes(plan, buckets, (spec for _, spec in quantizers), kind)
    for name, nbytes in placed_bytes(plan, pp, kind).items():
        held[name] += nbytes
    if (
        plan.leaves
    ):  # data_parallel.fixed_order: sums that wait for their other half; a bucket of all ranks, with its sums
        together = {b.id: plan.sources if b.axis == "edp" else 1 for b in buckets}  # micro-batches under way at once
        shared += 2 * max((b.numel * together[b.id] for b in buckets if b.learns), default=0) * kind.master.itemsize
        for b in (b for b in buckets if b.learns):
            several = len(b.users) > 1  # sums of their own for each
            trees = len(b.users) * (waiting(plan.leaves) + several) * together[b.id]
            held["gradients"] += b.numel * kind.master.itemsize * (trees + together[b.id] - 1)
    offloaded = {s: offloaded_bytes(plan, s, blocks) for s in plan.stages_of(pp)}
    split = {s: pending_bytes(plan, s, blocks) for s in plan.stages_of(pp)}
    activations, working = fullest_moment(
        program.lists[pp], {s: segment_bytes(plan, s, blocks) for s in plan.stages_of(pp)}, offloaded, split
    )
    memory = {
        **held,
        **({"quantized": quantized} if quantized else {}),
        **({"shadow": shadow} if shadow else {}),
        "activations": activations,
        "working": working,
        "messages": batches
        + max(messages.values(), default=0) * (trace.peak_sends[pp] + trace.peak_receives[pp])
        + shared,
    }
    for name, nbytes in passing.items():
        memory[name] += nbytes
    for_scales = scale_sends(plan, ((fp8, spec) for fp8, spec in quantizers if spec.coded))
    sent = {
        "ep": for_scales["ep"] + num_micro_batches * sum(blocks[b].sent["ep"] for b in mine),
        "cp": num_micro_batches * sum(blocks[b].sent["cp"] for b in mine),
        "tp": num_micro_batches * sum(blocks[b].sent["tp"] for b in mine) + of_buckets["tp"] + for_scales["tp"],
        "pp": sends + of_buckets["pp"],
        "dp": num_micro_batches * sum(blocks[b].sent["dp"] for b in mine) + of_buckets["dp"] + for_scales["dp"],
    }
    kept_texts, of_texts = text_bytes(plan, num_micro_batches) if pp == plan.rank_of_block[-1] else (0, 0)
    memory["messages"] += kept_texts
    other = max(at_homes["update"], of_texts)  # of an update, or of a loss over texts, when these are gone
    memory["working"] += max(0, other - activations - working)
    away = peak_on_host(program.lists[pp], offloaded)
    pools = 0
    if not plan.offloaded and not plan.splits_backward:  # else there are no CUDA graphs
        kept = {
            s: sum(blocks[b].bytes.kept for b in plan.stages[s]) + fixed_bytes(plan, s, blocks)
            for s in plan.stages_of(pp)
        }
        of_heads = max(blocks[b].bytes.working for b in plan.stages[-1])
        head = plan.stages[-1][-1]  # works in forward alone
        of_layers = max((blocks[b].bytes.working for s in kept for b in plan.stages[s] if b != head), default=0)
        pools = max(0, pool_bytes(plan, trace.live[pp], kept, of_heads) - activations) + of_layers
    pending = most_pending(program.lists[pp], split)
    return RankUse(memory, passing, sent, trace.peak_live[pp], sum(b.numel for b in buckets), away, pools, pending)


def message_bytes(plan: Plan) -> dict[Value, int]:
    """Bytes that stages send each other: what a micro-batch's forward of a stage reads, and its backward."""
    batch, tp, found = _batch(plan), plan.grid.tp, dict[Value, int]()
    for stage in range(1, len(plan.stages)):
        sizes = {s: s.rows(batch, tp) * s.width_on(tp) * s.dtype.itemsize for s in plan.borders[stage, 0]}  # type: ignore[union-attr]
        found[Value("act", stage, 0)] = sum(sizes.values())
        found[Value("grad", stage - 1, 0)] = sum(n for spec, n in sizes.items() if spec.has_gradient)
    return found


def home_bytes(plan: Plan, pp: int, kind: Precision) -> dict[str, int]:
    """Bytes of whole matrices at their homes (data_parallel.homes), on the rank with the most of them: masters and
    moments, which stay; update: gradients that left and arrived, and working copies of the largest matrix, or of as
    many as are updated together, once in place and once on their way."""
    found, states = {"masters": 0, "moments": 0, "update": 0}, state_bytes(plan.run.optim, kind.master.itemsize)
    wide, ranks = kind.master.itemsize, plan.grid.stage
    for updater, matrices in plan.matrices[pp].items():
        optimizer = optimizers_of(plan.run.optim)[updater]
        homes = homes_of(matrices, ranks, optimizer.cost)
        loads = [home_bucket([m for m, home in zip(matrices, homes) if home == rank]).numel for rank in range(ranks)]
        copies = 2 + 2 * len(optimizer.state) + MATRIX_COPIES
        largest = max((prod(m.shape) for m in matrices), default=0)
        if isinstance(optimizer, MatrixOptimizer):
            largest = max(largest, min(max(loads), TOGETHER))
        found["masters"] += max(loads) * wide
        found["moments"] += round(max(loads) * states[updater])
        found["update"] = max(found["update"], (2 * most_travelling(plan, pp, updater) + (copies + 2) * largest) * wide)
    return found


def most_travelling(plan: Plan, pp: int, updater: int) -> int:
    """Elements of gradients that a rank sends to homes of whole matrices: the most of a few ranks, the first and the
    last among them. Of what a rank has whole, as many of each kind stay as any rank is home to at least."""
    cost, matrices = optimizers_of(plan.run.optim)[updater].cost, plan.matrices[pp][updater]
    mine = [b for b in plan.rank(pp).buckets if b.learns and b.updater.matrix and b.updater.number == updater]
    bucket = {piece.name: b.id for b in mine for slot in b.slots for piece in slot.spec.pieces}
    kinds = {m.pieces[0].name: (bucket.get(m.pieces[0].name), cost(m)) for m in matrices}
    homes, ranks = homes_of(matrices, plan.grid.stage, cost), range(plan.grid.stage)
    at_home = Counter((kinds[m.pieces[0].name], home) for m, home in zip(matrices, homes))
    least = {kind: min(at_home[kind, rank] for rank in ranks) for kind in set(kinds.values())}
    found = [0] * RANKS_SEEN
    for b, number in product(mine, range(RANKS_SEEN)):
        cut, whole = plan.sharding.cut(b, plan.grid), dict[Any, list[int]]()
        inner, outer = (number * (size - 1) // (RANKS_SEEN - 1) for size in (cut.inner, cut.outer))
        for part in (part for box in boxes_in(b, *cut.own(inner, outer)) for part in box.matrices()):
            found[number] += part.box.numel
            if lies_whole(part):
                whole.setdefault(kinds[part.piece.name], []).append(part.box.numel)
        found[number] -= sum(sum(sorted(sizes)[: least[kind]]) for kind, sizes in whole.items())
    return max(found)


def sum_pieces(plan: Plan, buckets: Sequence[Bucket], master: int) -> int:
    """Bytes for pieces of gradients on their way to the rank that sums them, if ranks share memory (comm.overlap)."""
    if plan.run.layout.dp_copies == "off":
        return 0
    largest: dict[tuple[str, int], int] = {}
    for b, cut in ((b, plan.sharding.cut(b, plan.grid)) for b in buckets):
        if cut.level > 0:
            largest[b.axis, cut.inner] = max(largest.get((b.axis, cut.inner), 0), summed_bytes(b, cut, master))
    return sum(sums_bytes(size, nbytes) for (_, size), nbytes in largest.items())


def whole_tokens(plan: Plan) -> int:
    """Tokens of a micro-batch, over all its shards."""
    return plan.run.train.micro_batch * plan.run.train.seq_length


def fixed_bytes(plan: Plan, stage: int, blocks: Sequence[BlockUse]) -> int:
    """Bytes of one micro-batch that no choice changes: the stage's output, and what its layers derive from the
    batch."""
    mine = plan.stages[stage]
    return blocks[mine[-1]].bytes.output + max(blocks[b].derived for b in mine)


def offloaded_bytes(plan: Plan, stage: int, blocks: Sequence[BlockUse]) -> dict[int, int]:
    """By segment of a stage, offloaded bytes of one micro-batch: what its offloaded blocks save."""
    return {
        number: sum(blocks[b].bytes.kept for b in segment if b in plan.offloaded)
        for number, segment in enumerate(plan.segments[stage])
    }


def segment_bytes(plan: Plan, stage: int, blocks: Sequence[BlockUse]) -> list[tuple[int, int]]:
    """For each segment of a stage and one micro-batch: bytes that it saves, and the largest number of working bytes
    beyond that. While a block works, the blocks after it have saved nothing yet, or nothing any more. What all layers
    derive from a batch counts with the first segment, the stage's output with the last."""
    found = []
    for segment in plan.segments[stage]:
        most, after = 0, 0
        for b in reversed(segment):
            most, after = max(most, blocks[b].bytes.working - after), after + blocks[b].bytes.kept
        found.append((after, most))
    derived, output = max(blocks[b].derived for b in plan.stages[stage]), blocks[plan.stages[stage][-1]].bytes.output
    found[0] = (found[0][0] + derived, found[0][1])
    found[-1] = (found[-1][0] + output, found[-1][1])
    return found


def pending_bytes(plan: Plan, stage: int, blocks: Sequence[BlockUse]) -> list[tuple[int, int]]:
    """Of each segment of a stage and one micro-batch whose weight gradients wait: bytes that wait with them, and most
    bytes at work beyond what the segment keeps (segment_bytes) while they begin to: while a block works, those after it
    keep what waits."""
    found = []
    for segment in plan.segments[stage]:
        most = after = waiting = 0
        for b in reversed(segment):
            use = blocks[b].split or blocks[b].bytes
            most, after, waiting = (
                max(most, use.working - after + waiting),
                after + blocks[b].bytes.kept,
                waiting + use.pending,
            )
        found.append((waiting, most))
    return found


def most_pending(instructions: Sequence[Instruction], split: dict[int, list[tuple[int, int]]]) -> int:
    """Most bytes at once that wait with weight gradients."""
    waiting = most = 0
    for i in instructions:
        if isinstance(i, InputGrad | WeightGrad):
            waiting += split[i.stage][i.segment][0] * (1 if isinstance(i, InputGrad) else -1)
            most = max(most, waiting)
    return most


def fullest_moment(
    instructions: Sequence[Instruction],
    segments: dict[int, list[tuple[int, int]]],
    offloaded: dict[int, dict[int, int]],
    split: Mapping[int, list[tuple[int, int]]] = MappingProxyType({}),
) -> tuple[int, int]:
    """Bytes saved and working bytes at the moment when both together are largest. Activations that are being offloaded
    count until the next compute instruction is done. split: as of pending_bytes, of stages whose backward is split."""
    live = leaving = 0
    fullest = (0, 0)
    for i in instructions:
        if isinstance(i, Compute):
            kept, working = segments[i.stage][i.segment]
            waiting = 0
            if isinstance(i, InputGrad | WeightGrad):
                waiting, at_first = split[i.stage][i.segment]
                working = at_first if isinstance(i, InputGrad) else 0
            live += kept if isinstance(i, Forward) else 0
            fullest = max(fullest, (live, working), key=sum)
            live -= leaving + (kept if isinstance(i, Backward | InputGrad) else 0)
            live += waiting if isinstance(i, InputGrad) else -waiting
            leaving = 0
        elif isinstance(i, Offload):
            leaving += offloaded[i.stage][i.segment]
        elif isinstance(i, Fetch):
            live += offloaded[i.stage][i.segment]
    return fullest


def peak_on_host(instructions: Sequence[Instruction], offloaded: dict[int, dict[int, int]]) -> int:
    """The largest number of offloaded bytes on the host. A copy that comes back counts until the next compute
    instruction is done."""
    away = most = coming = 0
    for i in instructions:
        if isinstance(i, Compute):
            away -= coming
            coming = 0
        elif isinstance(i, Offload):
            away += offloaded[i.stage][i.segment]
            most = max(most, away)
        elif isinstance(i, Fetch):
            coming += offloaded[i.stage][i.segment]
    return most


def pool_bytes(plan: Plan, changes: Sequence[LiveChange], kept: dict[int, int], of_heads: int) -> int:
    """Bytes of the memory pools of pipeline.graphs: a stage has one for each of the largest number of micro-batches
    that are ever alive in it. The memory with which backward works exists once; the head works in forward."""
    most: Counter[int] = Counter()
    for change in changes:
        most[change.stage] = max(most[change.stage], change.live)
    heads = len(plan.stages) - 1
    return sum(count * kept[stage] + (count - 1) * of_heads * (stage == heads) for stage, count in most.items())
