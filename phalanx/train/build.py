"""build: from a plan and a mesh to everything a rank trains with; the one place that knows every room, one call per line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.base.dtypes import precision
from phalanx.base.rng import fill_normal_
from phalanx.comm.mesh import Mesh
from phalanx.data_parallel.buffers import Buffers
from phalanx.data_parallel.flat import FlatBucket
from phalanx.layout.buckets import Slot
from phalanx.layout.param import Piece
from phalanx.layout.shards import Sharding
from phalanx.nn.module import Block
from phalanx.nn.moe import MISSING, TALLIED, MoE
from phalanx.nn.mtp import MultiTokenPrediction
from phalanx.ops import cublaslt
from phalanx.ops.kernels import use_triton
from phalanx.ops.wheels import WHEELS, unusable
from phalanx.optim.adamw import AdamW, moment_dtype
from phalanx.optim.scaler import LossScaler
from phalanx.pipeline.execute import Handlers, Stages
from phalanx.pipeline.graphs import Eager, Graphs
from phalanx.pipeline.rows import Cuda
from phalanx.schedule.actions import Backward, Instruction, Ready
from phalanx.train.checks import unfit_for_wheels
from phalanx.train.deterministic import be_deterministic
from phalanx.train.guard import Guard
from phalanx.train.low import LowState
from phalanx.train.memory import OVERHEAD, rank_uses
from phalanx.train.plan import Plan, low_names, low_precision

NO_GRAPHS_ROOM = "no room for their pools of memory, by the forecast: train.cuda_graphs=on tries"
ROOM_FOR_POOLS = 0.9  # of a GPU's memory, at most, by the forecast, before pools are taken without being asked for
NO_GRAPHS_SHARDS = "layout.sharding >= 2: train.cuda_graphs=on keeps places for what comes and goes"
NO_GRAPHS_OFFLOAD = "train.offload_layers: train.cuda_graphs=on copies between fixed places"
NO_GRAPHS_ROWS = "the experts' plain products count their rows on the host: train.cuda_graphs=on runs experts between graphs"
NO_GRAPHS_SIZES = "layout.dispatch=alltoall: the host waits for sizes; train.cuda_graphs=on runs experts between graphs"


@dataclass
class State:
    """What a rank trains with. `routed`: its layers with experts. `ahead`: its block that predicts further tokens, if any. `programs` caches
    the instruction lists by (number of micro-batches, backward or not). `before_update` is called before weights or state change: a copy
    of them may be under way."""

    plan: Plan
    mesh: Mesh
    blocks: dict[tuple[int, int], list[Block]]
    buffers: Buffers
    optimizer: AdamW
    scaler: LossScaler
    guard: Guard
    stages: Stages
    handlers: Handlers
    routed: tuple[MoE, ...] = ()
    ahead: tuple[MultiTokenPrediction, ...] = ()
    low: LowState | None = None  # of runs in low precision (train.fp8)
    programs: dict[tuple[int, bool], tuple[Instruction, ...]] = field(default_factory=dict)
    before_update: Callable[[], None] = lambda: None

    def program(self, num_micro_batches: int, backward: bool = True) -> tuple[Instruction, ...]:
        key = (num_micro_batches, backward)
        if key not in self.programs:
            self.programs[key] = self.plan.programs(num_micro_batches, backward).lists[self.mesh.at.pp]
        return self.programs[key]

    @property
    def model(self) -> nn.ModuleList:
        """This rank's blocks, in order. At sharding level 0 any torch optimizer may update `model.parameters()`."""
        return nn.ModuleList(block for run in self.blocks.values() for block in run)

    @contextmanager
    def by_all_to_all(self) -> Iterator[None]:
        """To do a step's gradients once more: inside, tokens get to their experts by all-to-all, which always has room."""
        self.buffers.zero_grads()
        runner, self.stages.runner = self.stages.runner, Eager()
        tallies = [layer.tally for layer in self.routed if layer.tally is not None]
        missing = [tally[MISSING].clone() for tally in tallies]
        for layer, tally in zip(self.routed, tallies):
            tally.zero_()
            layer.dispatch = "alltoall"
        yield
        self.stages.runner = runner
        for layer, tally, rows in zip(self.routed, tallies, missing):
            layer.dispatch = layer.env.dispatch
            tally[MISSING] += rows  # for the log

    def train(self, mode: bool = True) -> None:
        """Dropout and recompute on or off."""
        for run in self.blocks.values():
            for block in run:
                block.train(mode)


def build(plan: Plan, mesh: Mesh) -> State:
    """Weights are not set: `init_weights` or a checkpoint does that."""
    train, kind = plan.run.train, precision(plan.run.train.precision)
    if train.deterministic:
        be_deterministic(mesh)
    if plan.run.model.routed_experts:
        mesh.prepare_experts()
        plan = open_exchange(plan, mesh)
    mesh.prepare_sharding(plan.sharding)
    blocks = plan.blocks_of(mesh.at, mesh.model)
    buckets, params = plan.buckets_of(blocks)
    mesh.prepare(plan.replicas(mesh.at.tp))
    mesh.overlap(mesh.tp, "layout.tp_overlap", plan.run.layout.tp_overlap, plan.exchange_bytes)
    to_device(params, mesh.device)
    buffers = Buffers(
        buckets, params, mesh, kind, plan.sharding, leaves=plan.leaves, sources=plan.sources,
        together=1 + (plan.run.model.predict_layers > 0), places=plan.places[mesh.at.pp] if plan.places else None,
        overlap=plan.run.layout.dp_copies,
    )  # fmt: skip
    optimizer = AdamW(buffers.shards(moment_dtype(plan.run.optim)), plan.run.optim, mesh.device, plan.env(mesh.at).twin("adamw"))
    scaler = LossScaler(
        mesh.device, train.loss_scale if kind.loss_scaling else 1.0, train.loss_scale_window, train.loss_scale_hysteresis,
        train.loss_scale_min, kind.loss_scaling,
    )  # fmt: skip
    guard = Guard(train.guard.window, train.guard.sigmas, mesh.device)
    runner = graphs(plan, mesh, blocks) if uses_graphs(plan, mesh.device) else Eager()
    mesh.closing.append(runner.close)
    stages = Stages(blocks, plan.runs_per_stage, mesh, plan.run.model.hidden_size, kind.compute, runner, plan.loss_seed)
    low = low_state(plan, buffers, params, mesh.device)

    def ready(i: Ready) -> None:
        buffers.flat[i.bucket].ready()
        if low is not None:
            low.refresh(i.bucket)

    handlers: dict[type, Callable[[Any], None]] = {**stages.handlers(), **buffers.handlers(), Ready: ready}
    if plan.leaves:
        handlers[Backward] = backward_in_order(stages, buffers)
    mesh.warm_up()
    routed, ahead = routed_layers(blocks, mesh.device), ahead_blocks(blocks, mesh.device)
    return State(plan, mesh, blocks, buffers, optimizer, scaler, guard, stages, handlers, routed, ahead, low)


def low_state(plan: Plan, buffers: Buffers, params: list[nn.Parameter], device: torch.device) -> LowState | None:
    """Of a run with train.fp8: its linears in low precision count into it."""
    config, low = plan.run.train.fp8, low_precision(plan.run)
    if config is None or low is None:
        return None
    state = LowState(low_names(plan.run), low.recipe, config, device)
    for flat in buffers.flat:
        state.attach(flat.bucket.id, (params[slot.param] for slot in flat.bucket.slots))
    state.keep(buffers.flat)
    return state


def backward_in_order(stages: Stages, buffers: Buffers) -> Callable[[Backward], None]:
    """Backward of one micro-batch, whose gradients then take their place in the tree."""

    def backward(i: Backward) -> None:
        stages.backward(i)
        buffers.done_with(i.stage, i.run)

    return backward


def open_exchange(plan: Plan, mesh: Mesh) -> Plan:
    """Open the memory in which tokens get to their experts, and what is then planned: without it no automatic push."""
    layout, axis, whole = plan.run.layout, mesh.model.experts, plan.expert_exchange_bytes
    if plan.dispatch == "allgather":
        mesh.overlap(axis, "layout.ep_overlap", layout.ep_overlap, whole)
    elif layout.exchange == "push":
        others = tuple(way + "_fp8" * layout.codes_travel for way in ("auto", "allgather", "alltoall"))
        mesh.overlap(axis, "layout.dispatch", "on", whole, value=layout.dispatch, others=others)
    elif plan.dispatch == "push" and mesh.overlap(axis, "layout.dispatch", "auto", whole) != "on":
        return plan.by_all_to_all()
    return plan


def routed_layers(blocks: dict[tuple[int, int], list[Block]], device: torch.device) -> tuple[MoE, ...]:
    """The layers with experts, each with its tally at zero."""
    found = tuple(m for run in blocks.values() for block in run for m in block.modules() if isinstance(m, MoE))
    for layer in found:
        layer.tally = torch.zeros(layer.router.num_experts + len(TALLIED), dtype=torch.float64, device=device)
    return found


def ahead_blocks(blocks: dict[tuple[int, int], list[Block]], device: torch.device) -> tuple[MultiTokenPrediction, ...]:
    """The block that predicts further tokens, if it is here, with its tally at zero."""
    found = tuple(block for run in blocks.values() for block in run if isinstance(block, MultiTokenPrediction))
    for block in found:
        block.tally = torch.zeros((), dtype=torch.float64, device=device)
    return found


def uses_graphs(plan: Plan, device: torch.device) -> bool:
    """Whether blocks are replayed as CUDA graphs. With pipeline stages each micro-batch in flight needs a pool of its own, and attention between
    graphs places for what it reads and writes: only if asked for, or where there is room. Where weights or gradients come and go only if asked
    for: they then keep their places; and so where activations wait on the host or experts cannot be captured."""
    wanted = plan.run.train.cuda_graphs
    if device.type != "cuda" or wanted == "off":
        return False
    if wanted == "auto" and ("experts" in uncaptured_ops(plan, device) or plan.offloaded or plan.buckets_come_and_go):
        return False
    one_pool = plan.grid.pp == 1 and not plan.grid.dynamic
    return wanted == "on" or one_pool or room_for_pools(plan, torch.cuda.mem_get_info(device)[1])


def graphs(plan: Plan, mesh: Mesh, blocks: dict[tuple[int, int], list[Block]]) -> Graphs:
    """Where ranks exchange tokens of different micro-batches, their hosts agree which of them are replayed."""
    between, tape = uncaptured_ops(plan, mesh.device), next(iter(blocks.values()))[0].env.tape
    hosts = mesh.prepare_hosts() if plan.mixes_batches and (plan.run.data.inside_documents or plan.grid.dynamic) else None
    if plan.grid.pp > 1:
        mesh.prepare_pp_hosts()
    return Graphs(Cuda(mesh.device, loose=bool(between)), tape, mesh.memories, between, hosts, plan.schedule if plan.grid.pp > 1 else None)


def uncaptured_ops(plan: Plan, device: torch.device) -> frozenset[str]:
    """Ops that run between CUDA graphs: attention where its shapes follow the lengths of documents, experts where the host waits for the device."""
    experts = plan.waits_for_sizes or counts_rows(plan, device)
    return frozenset(name for name, apart in (("attention", plan.grid.dynamic), ("experts", experts)) if apart)


def room_for_pools(plan: Plan, memory: int) -> bool:
    """Whether the fullest rank with pools has, by the forecast, room in `memory` bytes of a device."""
    uses, _ = rank_uses(plan, plan.num_micro_batches(plan.run.train.global_batch))
    return max(use.total + use.pools for use in uses) + OVERHEAD <= ROOM_FOR_POOLS * memory


def counts_rows(plan: Plan, device: torch.device) -> bool:
    """Whether the host reads how many rows each expert has: its plain products do."""
    train = plan.run.train
    triton = use_triton(train.kernels, torch.empty(0, device=device)) and "grouped" not in train.plain_ops
    return plan.run.model.routed_experts > 0 and not triton


def choices(state: State) -> str:
    """What was chosen for this machine where the config says auto, and why not more: a line for the log."""
    run, mesh = state.plan.run, state.mesh
    triton = use_triton(run.train.kernels, torch.empty(0, device=mesh.device))
    plain = f", but plain {', '.join(run.train.plain_ops)}" if triton and run.train.plain_ops else ""
    wheels = wheels_chosen(state.plan, mesh.device) if triton else ""
    graphs = "on" if isinstance(state.stages.runner, Graphs) else "off"
    if graphs == "off" and run.train.cuda_graphs != "off":
        graphs += f" ({why_no_graphs(state.plan, mesh.device)})"
    dispatch = f"; tokens to experts by {state.plan.dispatch}" + " as codes" * run.layout.codes_travel if state.routed else ""
    beside = mesh.overlapping.get(mesh.model.experts.name)
    if beside is not None and mesh.model.experts.size > 1:
        by_messages = state.plan.dispatch == "alltoall"
        dispatch += (f" (no push: {beside.removeprefix('off: ')})" if beside != "off" else "") if by_messages else f" through shared memory {beside}"
    order = "; sums in a fixed order, torch's deterministic algorithms" if run.train.deterministic else ""
    overlap = f"; tp exchanges in matmuls {mesh.overlapping['tp']}" if mesh.tp.size > 1 else ""
    overlap += shared_text(mesh)
    low = "; weights' gradients in 8 bits added without cuBLASLt, which is not found" if adds_apart(state.plan, mesh.device) else ""
    return f"kernels {'triton' + plain if triton else 'plain'}{wheels}{low}; CUDA graphs {graphs}{overlap}{dispatch}{order}"


def shared_text(mesh: Mesh) -> str:
    """How what is sharded is exchanged, by axis, where there is anything to exchange."""
    found = [(axis, said) for axis, said in sorted(mesh.sharing.items()) if mesh.groups(axis).inner.size > 1]
    return "".join(f"; what is sharded over {axis} exchanged by copies {said}" for axis, said in found)


def adds_apart(plan: Plan, device: torch.device) -> bool:
    return plan.run.train.fp8 is not None and device.type == "cuda" and cublaslt.library() is None


def why_no_graphs(plan: Plan, device: torch.device) -> str:
    if device.type != "cuda":
        return "not a GPU"
    if plan.waits_for_sizes:
        return NO_GRAPHS_SIZES
    if plan.offloaded:
        return NO_GRAPHS_OFFLOAD
    if counts_rows(plan, device):
        return NO_GRAPHS_ROWS
    return NO_GRAPHS_SHARDS if plan.buckets_come_and_go else NO_GRAPHS_ROOM


def wheels_chosen(plan: Plan, device: torch.device) -> str:
    """Which ops run twins from optional packages, and why others do not."""
    train, said = plan.run.train, []
    for op, unfit in unfit_for_wheels(plan.run).items():
        wheel = WHEELS[op]
        if train.kernels == "triton" or op in train.plain_ops:
            continue
        why = unusable(op, device.index or 0) if device.type == "cuda" else "not a GPU"
        why = why or (f"not for {', '.join(f'{k}={v}' for k, v in unfit.items())}" if unfit else None)
        said.append(f"{op} from {wheel.package} {wheel.version}" if why is None else f"{op} not from a wheel ({why})")
    return "".join(f"; {text}" for text in said)


def build_for_inference(plan: Plan, mesh: Mesh) -> tuple[Buffers, Stages]:
    """Weights and stages alone: no gradients, masters or moments."""
    if plan.run.model.routed_experts:
        mesh.prepare_experts()
    mesh.prepare_sharding(Sharding())
    blocks = plan.blocks_of(mesh.at, mesh.model)
    buckets, params = plan.buckets_of(blocks)
    mesh.prepare(plan.replicas(mesh.at.tp))
    to_device(params, mesh.device)
    for p in params:
        p.low = None  # type: ignore[attr-defined]  # a few tokens at a time make no whole blocks of scales
    kind = precision(plan.run.train.precision)
    for run in blocks.values():
        for block in run:
            block.eval()
    buffers = Buffers(buckets, params, mesh, kind, Sharding(), training=False)
    return buffers, Stages(blocks, plan.runs_per_stage, mesh, plan.run.model.hidden_size, kind.compute)


def to_device(params: list[nn.Parameter], device: torch.device) -> None:
    """Swap meta parameters for empty ones of the device: their storage will be the flat buffers."""
    for p in params:
        spec, low, further = p.spec, getattr(p, "low", None), getattr(p, "further", [])  # type: ignore[attr-defined]
        for each in (p, *further):
            torch.utils.swap_tensors(each, nn.Parameter(torch.empty(0, dtype=p.dtype, device=device), requires_grad=spec.learns))
            each.low = low  # type: ignore[attr-defined]
        p.spec, p.further = spec, further  # type: ignore[attr-defined]


def init_weights(state: State, exported: bool = True) -> None:
    """Fill masters and weights from (seed, global name, position): the same bits in every layout. Without `exported` those alone that no
    Hugging Face folder has."""
    for flat in state.buffers.flat:
        for slot in (s for s in flat.bucket.slots if exported or not s.spec.exported):
            storage = torch.zeros(slot.spec.shape, dtype=flat.master.dtype, device=flat.weight.device)
            for piece in slot.spec.pieces:
                fill(piece.of(storage), piece, state.plan.run.train.seed)
            write_slot(flat, slot, storage)


def fill(out: Tensor, piece: Piece, seed: int) -> None:
    """Initial values of a piece, `out` in global orientation."""
    if piece.init.kind == "normal":
        fill_normal_(out, piece.init.std, piece.shape, piece.box.start, seed, piece.name)
    else:
        out.fill_(1.0 if piece.init.kind == "ones" else 0.0)


def write_slot(flat: FlatBucket, slot: Slot, storage: Tensor) -> None:
    """Set what this rank keeps of a parameter's weights and masters from its whole storage in the master dtype."""
    flat.write(slot.offset, storage.flatten())
