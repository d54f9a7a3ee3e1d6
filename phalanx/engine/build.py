"""build: everything a rank trains with, from a plan and a mesh. The one place that knows every room, one call per
line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.dtypes import precision
from phalanx.base.registry import find
from phalanx.comm.mesh import Mesh, Mode
from phalanx.data_parallel.buffers import Buffers, share_memory
from phalanx.data_parallel.flat import BufferRules, FlatBucket
from phalanx.data_parallel.homes import MatrixHome
from phalanx.engine.agree import EXPERTS, ON, TP, Agreed, collect, decide, look
from phalanx.engine.deterministic import be_deterministic
from phalanx.engine.fp8_state import Fp8State
from phalanx.engine.guard import Guard
from phalanx.engine.in_backward import InBackward
from phalanx.engine.model import Model
from phalanx.layout.buckets import Bucket, Slot
from phalanx.layout.param import ParamSpec, Piece
from phalanx.layout.shards import Sharding
from phalanx.nn.head import Head, metric_names
from phalanx.nn.module import Block
from phalanx.nn.moe import TALLIED, MoE
from phalanx.nn.mtp import MultiTokenPrediction
from phalanx.nn.objective import EmbeddingObjective
from phalanx.nn.parameter import Parameter
from phalanx.nn.pooled_head import PooledHead
from phalanx.ops.attention.largest_scores import LARGEST_SCORES
from phalanx.ops.dense.grads import queue_autograd
from phalanx.ops.op import SEAM, Op, packaged, unusable
from phalanx.ops.quantized.base_bucket import BaseMatrix
from phalanx.ops.quantized.base_weights import BASE_DECODE
from phalanx.optim.optimizer import optimizers_of
from phalanx.optim.qk_clip import QKClip
from phalanx.optim.scaler import LossScaler
from phalanx.optim.sharded import TOGETHER, ShardedOptimizer, moment_dtype
from phalanx.pipeline.execute import Stages
from phalanx.pipeline.graphs import Eager, Graphs
from phalanx.pipeline.segments import Cuda
from phalanx.planning.kernels import KernelsPlan
from phalanx.planning.plan import Plan, fp8_linears
from phalanx.schedule.actions import Apply, Backward, Ready, WeightGrad


@dataclass(slots=True)
class State:
    """What a rank trains with: a model, and what training adds to it. `before_update` is called before weights or state
    change, because a copy of them may be under way. in_backward: applies gradients during backward, if the run does;
    qk_clip: scales heads of attention after an update, if the run does."""

    model: Model
    optimizer: ShardedOptimizer
    scaler: LossScaler
    guard: Guard
    before_update: Callable[[], None] = lambda: None
    in_backward: InBackward | None = None
    qk_clip: QKClip | None = None

    @property
    def plan(self) -> Plan:
        return self.model.plan

    @property
    def mesh(self) -> Mesh:
        return self.model.mesh

    @property
    def buffers(self) -> Buffers:
        return self.model.buffers


def build(plan: Plan, mesh: Mesh) -> State:
    """Everything a rank trains with, by the plan that all ranks agree on. Weights are not set; `init_weights` or a
    checkpoint does that.

    ConfigError on every rank if the config insists on something that some machine lacks.
    """
    model = build_model(plan, mesh)
    plan, train = model.plan, model.plan.run.train
    homes = plan.matrices[mesh.at.pp]
    if homes or plan.run.optim.qk_clip > 0:
        mesh.prepare_stage()
    optimizers = optimizers_of(plan.run.optim)
    for updater, matrices in homes.items():
        model.buffers.make_home(updater, matrices, optimizers[updater].cost)
    optimizer = sharded_optimizer(plan, model.buffers, mesh)
    scales = precision(train.precision).loss_scaling
    scaler = LossScaler(
        mesh.device,
        train.loss_scale if scales else 1.0,
        train.loss_scale_window,
        train.loss_scale_hysteresis,
        train.loss_scale_min,
        scales,
    )
    guard = Guard(train.guard.window, train.guard.sigmas, mesh.device)
    mesh.warm_up()
    state = State(model, optimizer, scaler, guard)
    if plan.run.optim.in_backward:
        state.in_backward = in_backward(state)
    if plan.run.optim.qk_clip > 0:
        state.qk_clip = qk_clip(state)
    return state


def qk_clip(state: State) -> QKClip:
    """What clips scores after each update, known to the optimizer and to the layers, which measure them."""
    plan, mesh = state.plan, state.mesh
    like = torch.empty((), dtype=precision(plan.run.train.precision).master, device=mesh.device)
    made = QKClip(plan.run.optim.qk_clip, state.model.scored, mesh.stage, like, plan.ops.by_config(LARGEST_SCORES))
    state.optimizer.updated = made.apply
    return made


def in_backward(state: State) -> InBackward:
    """What applies gradients during backward, known to the model's executor."""
    model, optim = state.model, state.plan.run.optim
    made = InBackward(model.buffers, state.optimizer, model.stages, model.mesh.world, optim.clip_grad)
    model.handlers = {**model.handlers, Apply: made.apply}
    return made


def build_model(plan: Plan, mesh: Mesh) -> Model:
    """This rank's part of the model, by the plan that all ranks agree on, without what training adds. A completely
    frozen model (train.freeze) has no gradients."""
    train, kind = plan.run.train, precision(plan.run.train.precision)
    if train.deterministic:
        be_deterministic(mesh)
    if plan.run.model.routed_experts:
        mesh.prepare_experts()
    mesh.prepare_sharding(plan.sharding)
    blocks = plan.blocks_of(mesh.at, mesh.model)
    buckets, params = plan.buckets_of(blocks)
    opened = open_memory(plan, mesh, buckets)
    agreed = decide(plan, collect(mesh.world, look(mesh.world, mesh.device, opened, plan)))
    close_memory(agreed, mesh, opened)
    before, plan = plan, agreed.plan
    if plan.ops != before.ops:
        blocks = plan.blocks_of(mesh.at, mesh.model)
        buckets, params = plan.buckets_of(blocks)
    mesh.prepare(plan.replicas(mesh.at.tp))
    for p in params:
        p.to_empty(mesh.device)
        for each in (p, *p.extra_grads) if plan.splits_backward else ():
            queue_autograd(each)
    rules = BufferRules(
        kind,
        plan.sharding,
        leaves=plan.leaves,
        sources=plan.sources,
        together=1 + (plan.run.model.predict_layers > 0),
        split=plan.run.optim.masters == "split",
        decoding=plan.ops.by_config(BASE_DECODE),
    )
    buffers = Buffers(buckets, params, mesh, rules, plan.slots[mesh.at.pp] if plan.slots else None)
    runner = graphs(agreed, mesh, blocks) if agreed.graphs == ON else Eager()
    mesh.closing.append(runner.close)
    stages = Stages(blocks, plan.segments_per_stage, mesh, plan.borders, runner, plan.loss_seed)
    fp8 = fp8_state(plan, buffers, params, mesh.device)
    if isinstance(plan.objective, EmbeddingObjective) and mesh.device.type == "cuda":
        mesh.prepare_hosts()

    of_buckets = buffers.handlers()

    def ready(i: Ready) -> None:
        of_buckets[Ready](i)
        if fp8 is not None:
            fp8.refresh(i.bucket)

    handlers: dict[type, Callable[[Any], None]] = {**stages.handlers(), **of_buckets, Ready: ready}
    if plan.leaves:
        handlers[Backward] = in_order(stages.backward, buffers)
        handlers[WeightGrad] = in_order(stages.weight_grad, buffers)
    metrics = metric_names(plan.objective)
    return Model(
        plan,
        mesh,
        agreed,
        blocks,
        buffers,
        stages,
        handlers,
        routed_layers(blocks, mesh.device),
        mtp_blocks(blocks, mesh.device),
        metrics,
        counting_heads(blocks, len(metrics), mesh.device),
        fp8,
    )


def sharded_optimizer(plan: Plan, buffers: Buffers, mesh: Mesh) -> ShardedOptimizer:
    """The optimizer that the config names, and its fallback, over this rank's shards."""
    made = [
        (each, buffers.shards(number, each.state, moment_dtype(each.config)))
        for number, each in enumerate(optimizers_of(plan.run.optim))
    ]
    choices = plan.ops
    most = 0 if plan.run.train.deterministic else TOGETHER  # bits of a matrix would depend on those beside it
    return ShardedOptimizer(made, mesh.device, lambda op: choices.by_config(find(SEAM, op, Op)), most)


def fp8_state(plan: Plan, buffers: Buffers, params: list[Parameter], device: torch.device) -> Fp8State | None:
    """The FP8 state of a run with train.fp8, with its quantized linears attached."""
    config, fp8 = plan.run.train.fp8, fp8_linears(plan.run)
    if config is None or fp8 is None:
        return None
    state = Fp8State(plan.fp8_names, fp8.recipe, config, device)
    for flat in buffers.flat:
        state.attach(flat.bucket.id, (params[slot.param] for slot in flat.bucket.slots))
    state.keep(buffers.flat)
    return state


Adds = TypeVar("Adds", Backward, WeightGrad)


def in_order(add: Callable[[Adds], None], buffers: Buffers) -> Callable[[Adds], None]:
    """What adds the weight gradients of one micro-batch, which then take their place in the tree."""

    def run(i: Adds) -> None:
        add(i)
        buffers.done_with(i.stage, i.segment)

    return run


def open_memory(plan: Plan, mesh: Mesh, buckets: list[Bucket]) -> dict[str, str]:
    """Open the memory that this rank shares with neighbours; returns the outcome for each use."""
    layout, opened = plan.run.layout, dict[str, str]()
    modes: dict[str, Mode] = {"allgather": layout.ep_overlap, "push": "on" if layout.dispatch == "push" else "auto"}
    if plan.run.model.routed_experts and plan.experts.dispatch in modes:
        opened[EXPERTS] = mesh.overlap(mesh.model.experts, modes[plan.experts.dispatch], plan.experts.exchange_bytes)
    opened[TP] = mesh.overlap(mesh.tp, layout.tp_overlap, plan.exchange_bytes)
    shared = share_memory(buckets, mesh, precision(plan.run.train.precision), plan.sharding, layout.dp_copies)
    return opened | {str(axis): said for axis, said in shared.items()}


def close_memory(agreed: Agreed, mesh: Mesh, opened: dict[str, str]) -> None:
    """Free memory that this rank has but not all ranks have."""
    for name in (name for name, said in opened.items() if said == ON and agreed.memory[name] != ON):
        if name in (TP, EXPERTS):
            mesh.without_overlap(mesh.tp if name == TP else mesh.model.experts, agreed.memory[name])
        else:
            mesh.without_exchange(name, agreed.memory[name])  # type: ignore[arg-type]


def routed_layers(blocks: dict[tuple[int, int], list[Block]], device: torch.device) -> tuple[MoE, ...]:
    """The layers with experts, each with its tally at zero."""
    found = tuple(m for segment in blocks.values() for block in segment for m in block.modules() if isinstance(m, MoE))
    for layer in found:
        layer.tally = torch.zeros(layer.router.num_experts + len(TALLIED), dtype=torch.float64, device=device)
    return found


def mtp_blocks(blocks: dict[tuple[int, int], list[Block]], device: torch.device) -> tuple[MultiTokenPrediction, ...]:
    """The block of multi-token prediction, if it is here, with its tally at zero."""
    found = tuple(block for segment in blocks.values() for block in segment if isinstance(block, MultiTokenPrediction))
    for block in found:
        block.tally = torch.zeros((), dtype=torch.float64, device=device)
    return found


def counting_heads(
    blocks: dict[tuple[int, int], list[Block]], count: int, device: torch.device
) -> tuple[Head | PooledHead, ...]:
    """The heads that are here, each with a tally at zero for the objective's metrics, if it has any."""
    every = (m for segment in blocks.values() for block in segment for m in block.modules())
    found = tuple(m for m in every if isinstance(m, Head | PooledHead))
    for head in found if count else ():
        head.tally = torch.zeros(count, dtype=torch.float64, device=device)
    return found if count else ()


def graphs(agreed: Agreed, mesh: Mesh, blocks: dict[tuple[int, int], list[Block]]) -> Graphs:
    """The CUDA graphs of the blocks. If ranks exchange tokens of different micro-batches, their hosts agree on which
    are replayed."""
    plan, between, recompute = agreed.plan, agreed.plan.uncaptured, next(iter(blocks.values()))[0].env.recompute
    hosts = (
        mesh.prepare_hosts()
        if plan.experts.mixes_batches and (plan.run.data.inside_documents or plan.grid.dynamic)
        else None
    )
    if plan.grid.pp > 1:
        mesh.prepare_pp_hosts()
    made = Graphs(
        Cuda(mesh.device, loose=bool(between)),
        recompute,
        mesh.memories,
        between,
        hosts,
        plan.schedule if plan.grid.pp > 1 else None,
    )
    made.varying = plan.varying_segments
    return made


def choices(state: State) -> str:
    """What was chosen for these machines where the config says auto, and the reasons: a line for the log."""
    run, mesh, agreed, kernels = state.plan.run, state.mesh, state.model.agreed, state.plan.kernels
    plain = f", but plain {', '.join(kernels.plain_ops)}" if kernels.triton and kernels.plain_ops else ""
    optional = optional_kernels_chosen(kernels, mesh.device) if kernels.triton else ""
    graphs = agreed.graphs if agreed.graphs in (ON, "") else f"off ({agreed.graphs})"
    dispatch = f"; tokens to experts by {state.plan.experts.dispatch}" if state.model.routed else ""
    beside = agreed.memory.get(EXPERTS)
    if beside is not None and mesh.model.experts.size > 1:
        by_messages = state.plan.experts.dispatch == "alltoall"
        dispatch += (
            (f" (no push: {beside.removeprefix('off: ')})" if beside != "off" else "")
            if by_messages
            else f" through shared memory {beside}"
        )
    order = "; sums in a fixed order, torch's deterministic algorithms" if run.train.deterministic else ""
    overlap = f"; tp exchanges in matmuls {agreed.memory[TP]}" if mesh.tp.size > 1 else ""
    overlap += shared_text(state)
    no_cublaslt = run.train.fp8 is not None and mesh.device.type == "cuda" and not kernels.cublaslt
    fp8 = "; weights' gradients in 8 bits added without cuBLASLt, which is not found" if no_cublaslt else ""
    return (
        f"kernels {'triton' + plain if kernels.triton else 'plain'}{optional}{fp8}; CUDA graphs "
        f"{graphs or 'off'}{overlap}{dispatch}{order}"
    )


def shared_text(state: State) -> str:
    """How shards are exchanged, by axis, if there is anything to exchange."""
    mesh, memory = state.mesh, state.model.agreed.memory
    found = [(axis, memory[axis]) for axis in sorted(mesh.exchanges) if mesh.groups(axis).inner.size > 1]
    return "".join(f"; what is sharded over {axis} exchanged by copies {said}" for axis, said in found)


def optional_kernels_chosen(kernels: KernelsPlan, device: torch.device) -> str:
    """Which ops run implementations from optional packages, and why others do not."""
    said, made = [], packaged()
    for op, unfit in kernels.unfit.items():
        package = made[op].package
        if kernels.mode == "triton" or op in kernels.plain_ops or package is None:
            continue
        why = unusable(made[op], device.index or 0) if device.type == "cuda" else "not a GPU"
        why = why or (f"not for {', '.join(f'{k}={v}' for k, v in unfit.items())}" if unfit else None)
        said.append(
            f"{op} from {package.name} {package.version}"
            if why is None
            else f"{op} not from an optional package ({why})"
        )
    return "".join(f"; {text}" for text in said)


def build_for_inference(plan: Plan, mesh: Mesh) -> tuple[Buffers, Stages]:
    """Weights and stages only: no gradients, masters or moments."""
    if plan.run.model.routed_experts:
        mesh.prepare_experts()
    mesh.prepare_sharding(Sharding())
    blocks = plan.blocks_of(mesh.at, mesh.model)
    buckets, params = plan.buckets_of(blocks)
    mesh.prepare(plan.replicas(mesh.at.tp))
    for p in params:
        p.to_empty(mesh.device)
        p.quantizer = None  # a few tokens do not fill whole scaling blocks
    kind = precision(plan.run.train.precision)
    for segment in blocks.values():
        for block in segment:
            block.eval()
    buffers = Buffers(buckets, params, mesh, BufferRules(kind, Sharding(), training=False))
    open_small_exchanges(mesh)
    return buffers, Stages(blocks, plan.segments_per_stage, mesh, plan.borders)


def open_small_exchanges(mesh: Mesh) -> None:
    """For steps of a few tokens over tp, if all ranks have such exchanges: on GPUs of one host."""
    everyone = mesh.world.all_gather_text(mesh.small_exchanges(mesh.tp))
    failed = [said for said in everyone if said != ON]
    if failed:
        mesh.without_overlap(mesh.tp, failed[0])


def init_weights(model: Model, which: Callable[[ParamSpec], bool] = lambda spec: True) -> None:
    """Fill masters and weights from (seed, global name, position): the same bits in every layout. which: the
    parameters to fill."""
    seed = model.plan.run.train.seed
    draw_weights(model.buffers, lambda out, piece: piece.init.fill(out, piece, seed), which)


def draw_weights(
    buffers: Buffers, draw: Callable[[Tensor, Piece], None], which: Callable[[ParamSpec], bool] = lambda spec: True
) -> None:
    """Fill masters and weights with what `draw` writes: it is given zeros for a piece, in global orientation. Of frozen
    weights that are kept as quantized values, one matrix at a time is there as a whole."""
    for holder in buffers.holders:
        if isinstance(holder, FlatBucket) and holder.bucket.base_format is not None:
            continue
        for slot in (s for s in holder.bucket.slots if which(s.spec)):
            storage = torch.zeros(slot.spec.shape, dtype=holder.values_dtype, device=holder.master.device)
            for piece in slot.spec.pieces:
                draw(piece.of(storage), piece)
            write_slot(holder, slot, storage)
    for keeper, matrix in buffers.encoded:
        if which(matrix.slot.spec):
            keeper.encode(matrix, drawn(matrix, keeper.weight, draw))  # no name holds it while the next is drawn


def drawn(matrix: BaseMatrix, like: Tensor, draw: Callable[[Tensor, Piece], None]) -> Tensor:
    piece = matrix.source_piece
    values = torch.zeros(piece.box.shape, dtype=like.dtype, device=like.device)
    draw(values, piece)
    return values


def write_slot(holder: FlatBucket | MatrixHome, slot: Slot, storage: Tensor) -> None:
    """Set what this rank keeps of a parameter's weights and masters from its whole storage in the master dtype."""
    holder.write(slot.offset, storage.flatten())
