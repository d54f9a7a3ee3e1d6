"""What ranks find on their own machines, collected once from all of them, and the one plan that follows: the same on
every rank.

Whether neighbours share memory, which kernels run, how much memory a GPU has: no rank and no group of ranks acts on its
own findings alone. `decide` is pure, so that tests can give it any mixture of machines.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Sequence
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any

import torch

from phalanx.base.dataclass import dataclass
from phalanx.base.dtypes import precision
from phalanx.base.errors import ConfigError, Problem
from phalanx.base.log import ranks_text
from phalanx.base.registry import find
from phalanx.comm.axis import Axis
from phalanx.forecast.memory import OVERHEAD, rank_uses
from phalanx.layout.grid import Coords
from phalanx.nn.relative_bias import RelativeBiasTable
from phalanx.ops import proof
from phalanx.ops.attention.attention import BIASED_ATTENTION
from phalanx.ops.dense.relu2 import RELU2
from phalanx.ops.op import SEAM, SLOWER, Op, packaged, refused, runs_triton, table, unusable
from phalanx.ops.quantized import cublaslt
from phalanx.optim.optimizer import FusedOptimizer, MatrixOptimizer, optimizers_of
from phalanx.planning.blocks import facts_of
from phalanx.planning.kernels import KernelsPlan
from phalanx.planning.plan import Plan, quantized_base

ON = "on"
EXPERTS, TP = "experts", "tp"  # uses of shared memory; the others are the axes over which buckets are sharded
ROOM_FOR_POOLS = (
    0.9  # of a GPU's memory, by the forecast: the limit up to which memory pools are used without being asked for
)
NO_GRAPHS_GPU = "not a GPU"
NO_GRAPHS_ROOM = "no room for their pools of memory, by the forecast: train.cuda_graphs=on tries"
LONG_LAYER = 25e12  # forward FLOPs of a layer: tens of milliseconds, which hide a hundred launches
NO_GRAPHS_LONG = "a layer takes far longer than its launches: train.cuda_graphs=on captures it all the same"
NO_GRAPHS_SHARDS = "layout.sharding >= 2: train.cuda_graphs=on keeps places for what comes and goes"
NO_GRAPHS_BACKWARD = "optim.in_backward: gradients have no fixed places"
NO_GRAPHS_OFFLOAD = "train.offload_layers: activations that wait on the host are not captured"
NO_GRAPHS_UNITS = "the model reads images: train.cuda_graphs=on captures what has no more than the text's rows"
NO_GRAPHS_SPLIT = "layout.schedule splits backward: weight gradients that wait are not captured"
NO_GRAPHS_ROWS = (
    "the experts' plain products count their rows on the host: train.cuda_graphs=on runs experts between graphs"
)
NO_GRAPHS_SIZES = "layout.dispatch=alltoall: the host waits for sizes; train.cuda_graphs=on runs experts between graphs"
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class LocalFacts:
    """What one rank found. `opened`: for each use of memory shared with neighbours, the outcome (Mesh.overlap).

    memory       bytes of its GPU; None on a CPU
    triton       whether Triton kernels run
    no_optional_kernels    ops whose kernels from optional packages do not run on its GPU
    wrong        ops with a kernel that is not used on its GPU because it differs from the reference there, and how
    """

    device: str = "CPU"
    memory: int | None = None
    triton: bool = False
    no_optional_kernels: tuple[str, ...] = ()
    cublaslt: bool = False
    nccl: str = ""
    driver: str = ""
    opened: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.memory is not None


@dataclass(frozen=True)
class Agreed:
    """What all ranks do. `memory`: for each use of shared memory "on", "off", or "off: " and the reason; `graphs`:
    "on", or why blocks are not replayed as CUDA graphs ("" if they were not asked for). `warnings`: where machines
    differ in what should be alike."""

    plan: Plan
    memory: dict[str, str]
    graphs: str
    warnings: tuple[str, ...] = ()


def look(world: Axis, device: torch.device, opened: dict[str, str], plan: Plan) -> LocalFacts:
    """The facts of this rank. The first time on a kind of GPU, the kernels that the plan may use are compared with
    their references (phalanx.ops.proof): each rank of a machine does a part of them."""
    if device.type != "cuda":
        return LocalFacts(opened=opened)
    number, count = among_equals(world, device)
    ops = [] if plan.kernels.mode == "plain" else used_ops(plan)[number::count]
    version: Any = torch.cuda.nccl.version() if torch.version.hip is None else ()
    return LocalFacts(
        device=torch.cuda.get_device_name(device),
        memory=torch.cuda.mem_get_info(device)[1],
        triton=runs_triton(device),
        no_optional_kernels=tuple(op for op, made in packaged().items() if unusable(made, device.index or 0)),
        cublaslt=cublaslt.library() is not None,
        nccl=".".join(map(str, version)),
        driver=driver_version(),
        opened=opened,
        wrong=refused(ops, device, compute_dtype(plan)),
    )


def among_equals(world: Axis, device: torch.device) -> tuple[int, int]:
    """This rank's number among the ranks of its machine that have the same kind of GPU, and how many they are."""
    everyone = world.all_gather_text(f"{socket.gethostname()} {proof.setting_of(device)}")
    equals = [rank for rank, text in enumerate(everyone) if text == everyone[world.index]]
    return equals.index(world.index), len(equals)


def compute_dtype(plan: Plan) -> torch.dtype:
    return precision(plan.run.train.precision).compute


def used_ops(plan: Plan) -> list[Op]:
    """The ops that training by this plan may call. Those of generation are compared when they are first called."""
    from phalanx.nn.gated_delta import GatedDelta  # start-up time: only ranks on GPUs ask
    from phalanx.nn.state_space import StateSpace

    run, found = plan.run, list[Op]()
    fused = [o for o in optimizers_of(run.optim) if isinstance(o, FusedOptimizer | MatrixOptimizer)]
    optimizers = {name for o in fused for name in (o.op, f"{o.op}_{o.config.moments}")}
    blocks = [block for segment in plan.blocks_of(Coords()).values() for block in segment]
    modules = [module for block in blocks for module in block.modules()]
    kinds = {type(module) for module in modules}
    squared = any(getattr(module, "activation", None) == RELU2.name for module in modules)
    biased = RelativeBiasTable in kinds
    scans, deltas = StateSpace in kinds, GatedDelta in kinds
    quantized = run.train.fp8 is not None or quantized_base(run) is not None
    for op in table():
        wanted = not op.is_plain(plan.kernels.plain_ops) and not op.definition.startswith("phalanx.ops.attention.paged")
        for place, used in (
            ("experts.", run.model.routed_experts > 0),
            ("quantized.", quantized),
            ("optimizer.", op.name in optimizers),
            ("scan.", scans or deltas),
            ("scan.scan", scans),
            ("scan.carried", scans and plan.grid.cp > 1),
            ("scan.gated_norm", scans),
            ("scan.norm_gate", deltas),
            ("scan.step", False),
            ("delta.", deltas),
            ("delta.step", False),
            ("attention.largest_scores", run.optim.qk_clip > 0),
        ):
            wanted &= used or not op.definition.startswith(f"phalanx.ops.{place}")
        wanted &= biased or op is not BIASED_ATTENTION
        wanted &= squared or op is not RELU2
        found += [op] if wanted else []
    return found


def driver_version() -> str:
    """The version of the NVIDIA driver; "" if the system does not say."""
    lines = DRIVER.read_text(encoding="utf-8").splitlines() if DRIVER.is_file() else [""]
    words = lines[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "")


def collect(world: Axis, mine: LocalFacts) -> list[LocalFacts]:
    """Everyone's facts, by rank."""
    rows = (json.loads(text) for text in world.all_gather_text(json.dumps(asdict(mine))))
    return [LocalFacts(**{**row, "no_optional_kernels": tuple(row["no_optional_kernels"])}) for row in rows]


def decide(plan: Plan, everyone: Sequence[LocalFacts]) -> Agreed:
    """The plan for these ranks. ConfigError if the config insists on something that some of them lack."""
    memory = {name: outcome(name, everyone) for name in sorted({name for facts in everyone for name in facts.opened})}
    problems = [p for name, said in memory.items() if (p := insisted(plan, name, said)) is not None]
    if problems:
        raise ConfigError(problems)
    pushes = plan.run.model.routed_experts and plan.experts.dispatch == "push"
    if pushes and plan.run.layout.dispatch == "auto" and memory.get(EXPERTS) != ON:
        plan = plan.by_all_to_all()
    plan = replace(plan, kernels=agreed_kernels(plan.kernels, everyone))
    wrong = wrong_kernels(everyone)
    if wrong and plan.kernels.mode in ("triton", "optional"):
        raise ConfigError([insisted_kernels(plan, wrong)])
    plain = tuple(dict.fromkeys((*plan.kernels.plain_ops, *(name for op in wrong for name in names_of(op)))))
    plan = replace(plan, kernels=replace(plan.kernels, plain_ops=plain))
    graphs = why_no_graphs(plan, everyone) or ON if plan.run.train.cuda_graphs != "off" else ""
    return Agreed(plan, memory, graphs, (*differences(everyone), *wrong.values()))


def wrong_kernels(everyone: Sequence[LocalFacts]) -> dict[str, str]:
    """A line for each op with a kernel that is wrong on any rank: it runs its reference on all of them."""
    lines = dict[str, str]()
    for op in dict.fromkeys(name for facts in everyone for name in facts.wrong):
        ranks = [rank for rank, facts in enumerate(everyone) if op in facts.wrong]
        where = "" if len(ranks) == len(everyone) else f" ({ranks_text(ranks)})"
        costs = "; ".join(made.cost for made in find_op(op).implementations if made.checked and made.cost)
        lines[op] = (
            f"op {op} runs its reference, since its kernel differs from it on this GPU{where} "
            f"({everyone[ranks[0]].wrong[op]}); it costs time: {costs or SLOWER}"
        )
    return lines


def insisted_kernels(plan: Plan, wrong: dict[str, str]) -> Problem:
    """The problem of a config that insists on kernels of which some are wrong here."""
    rule = f"insists on kernels that fail the comparison with their reference on this GPU: {', '.join(wrong)}"
    return Problem("train.kernels", plan.run.train.kernels, rule, dict(wrong), ("auto", "plain"))


def find_op(name: str) -> Op:
    found: Op = find(SEAM, name, Op)
    return found


def names_of(op: str) -> tuple[str, ...]:
    """The names in train.plain_ops with which it runs its reference."""
    return find_op(op).switches or (op,)


def outcome(name: str, everyone: Sequence[LocalFacts]) -> str:
    """The outcome for a use of shared memory: it is on only if every group that wants it has it."""
    said = {rank: facts.opened[name] for rank, facts in enumerate(everyone) if name in facts.opened}
    failed = [rank for rank, text in said.items() if text not in (ON, "off")]
    if failed:
        why = said[failed[0]]
        return why if len(failed) == len(said) else f"{why} ({ranks_text(failed)})"
    return ON if ON in said.values() else "off"


def insisted(plan: Plan, name: str, said: str) -> Problem | None:
    """The problem of a config that explicitly asks for shared memory that not all ranks have."""
    layout = plan.run.layout
    if said in (ON, "off"):
        return None
    rule = f"needs memory that all ranks of {name} share ({said.removeprefix('off: ')})"
    if name == EXPERTS and plan.experts.dispatch == "push":
        others = ("auto", "allgather", "alltoall")
        return Problem("layout.dispatch", layout.dispatch, rule, {}, others) if layout.dispatch == "push" else None
    key = {TP: "tp_overlap", EXPERTS: "ep_overlap"}.get(name, "dp_overlap")
    value = getattr(layout, key)
    return Problem(f"layout.{key}", value, rule, {}, ("auto", "off")) if value == ON else None


def agreed_kernels(kernels: KernelsPlan, everyone: Sequence[LocalFacts]) -> KernelsPlan:
    """If `auto` would run different kernels on different ranks: use only those that run on all."""
    mode = kernels.mode
    if mode == "auto" and len({facts.triton for facts in everyone}) > 1:
        mode = "plain"
    elif mode == "auto" and len({facts.no_optional_kernels for facts in everyone}) > 1 and everyone[0].triton:
        mode = "triton"
    triton = all(facts.triton for facts in everyone) if mode == "auto" else mode in ("triton", "optional")
    return replace(kernels, mode=mode, triton=triton, cublaslt=all(facts.cublaslt for facts in everyone))


def differences(everyone: Sequence[LocalFacts]) -> list[str]:
    """A line for each thing that differs between machines and should not."""
    named = {"kind of device": "device", "NVIDIA driver": "driver", "NCCL": "nccl"}
    lines = []
    for title, name in named.items():
        ranks: dict[str, list[int]] = {}
        for rank, facts in enumerate(everyone):
            ranks.setdefault(getattr(facts, name) or "unknown", []).append(rank)
        if len(ranks) > 1:
            shown = "; ".join(f"{ranks_text(of)}: {value}" for value, of in ranks.items())
            lines.append(f"not all ranks have the same {title} ({shown}): the run goes by what the weakest can do")
    return lines


# ---- CUDA graphs ---------------------------------------------------------------------------------


def why_no_graphs(plan: Plan, everyone: Sequence[LocalFacts]) -> str:
    """Why blocks are not replayed as CUDA graphs; "": they are. Forward and backward need memory pools of their
    own, and so does each micro-batch in flight of several pipeline stages: only if asked for, or if there is room, and
    if launches can be what a step waits for.
    If weights or gradients are fetched and freed, only if asked for, and then in fixed slots; the same if experts
    cannot be captured, or if the model reads images, and then without what has their rows. Never if activations are
    offloaded, backward is split (config.check) or the model reads sound (config.units_check)."""
    wanted = plan.run.train.cuda_graphs
    if not all(facts.on_gpu for facts in everyone):
        return NO_GRAPHS_GPU
    if wanted != "auto":
        return "" if wanted == "on" else "off"
    if plan.offloaded:
        return NO_GRAPHS_OFFLOAD
    if plan.splits_backward:
        return NO_GRAPHS_SPLIT
    if plan.run.model.reads_units:
        return NO_GRAPHS_UNITS
    if plan.experts.waits_for_sizes:
        return NO_GRAPHS_SIZES
    if plan.counts_rows:
        return NO_GRAPHS_ROWS
    if plan.run.optim.in_backward:
        return NO_GRAPHS_BACKWARD
    if plan.buckets_come_and_go and not plan.fixed_slots:
        return NO_GRAPHS_SHARDS
    if layer_flops(plan) >= LONG_LAYER:
        return NO_GRAPHS_LONG
    return "" if room_for_pools(plan, smallest(everyone)) else NO_GRAPHS_ROOM


def layer_flops(plan: Plan) -> float:
    """Forward FLOPs of a block in a micro-batch, on average, on one rank."""
    train, facts = plan.run.train, facts_of(plan.run)
    tokens = train.micro_batch * train.seq_length / (plan.grid.tp * plan.grid.cp)
    return tokens * sum(block.flops for block in facts) / len(facts)


def smallest(everyone: Iterable[LocalFacts]) -> int:
    """Bytes of the GPU with the least memory."""
    return min(facts.memory for facts in everyone if facts.memory is not None)


def room_for_pools(plan: Plan, memory: int) -> bool:
    """Whether, by the forecast, the fullest rank with memory pools fits in `memory` bytes of a device."""
    uses, _ = rank_uses(plan, plan.num_micro_batches(plan.run.train.global_batch))
    return max(use.total + use.pools for use in uses) + OVERHEAD <= ROOM_FOR_POOLS * memory
