"""`bench ops`: every op of phalanx.ops as a config's own modules call it, forward and forward+backward, compared with
measured ceilings.

One embedding, one layer and the head are built as one rank of the layout would hold them, and run once while calls of
ops are recorded with their arguments. Each call is then timed by itself. So the shapes are the config's, the
implementation is the one that the op chooses on this device, and an op that is added to a model is measured without a
change here. Communication is left out: over an axis of several ranks, an op gets copies of its own shard where data
would be gathered.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from phalanx.base.dataclass import dataclass
from phalanx.base.dtypes import precision
from phalanx.base.text_table import table
from phalanx.bench.ceilings import Ceilings, measure_ceilings
from phalanx.bench.timing import Times, measure
from phalanx.comm.axis import Axis, ModelAxes, Work
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.data_parallel.base_storage import BaseStorage
from phalanx.engine.build import build, init_weights
from phalanx.engine.step import update
from phalanx.forecast.decide import make_plan
from phalanx.layout.grid import Coords
from phalanx.nn.linear import Linear
from phalanx.nn.module import Block
from phalanx.nn.run_block import run_block
from phalanx.ops.attention.context import AttentionPlan
from phalanx.ops.attention.kind import CAUSAL, AttentionKind
from phalanx.optim.optimizer import MatrixOptimizer, optimizers_of
from phalanx.planning.blocks import make_blocks, num_blocks
from phalanx.planning.plan import Plan, quantized_base, without_layout
from phalanx.sequence.batch import Batch
from phalanx.sequence.streams import hidden


class LocalAxis(Axis):
    """An axis of any size on one process: data from other ranks is replaced by copies of this rank's own."""

    def __init__(self, name: str, size: int):
        super().__init__(name, tuple(range(size)), 0)

    def all_reduce(self, x: Tensor, op: str = "sum", async_op: bool = False) -> Work:
        return Work(x)

    def all_gather(self, x: Tensor, async_op: bool = False) -> Work:
        return Work(x if self.size == 1 else x.repeat(self.size, *(1,) * (x.dim() - 1)))

    def reduce_scatter(self, x: Tensor, async_op: bool = False) -> Work:
        # no view, which an op could not write to
        return Work(x if self.size == 1 else x[: x.shape[0] // self.size].clone())

    def all_to_all(self, x: Tensor, send: Sequence[int] | None = None, receive: Sequence[int] | None = None) -> Tensor:
        return x


@dataclass(frozen=True)
class OpCall:
    """One call of an op: its name, the block that called it, the function, its arguments, and which of these it writes
    in place."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: frozenset[int] = frozenset()

    def run(self) -> Any:
        """Call it. What it writes is no leaf with a gradient, which could not be written: the gradient of that goes on
        as it is."""
        args = (a.detach() if i in self.written else a for i, a in enumerate(self.args))
        return self.function(*args, **self.kwargs)

    @property
    def shape(self) -> str:
        """Shapes of the first two tensors."""
        tensors = tensors_of([*self.args, *self.kwargs.values()])
        return " ".join("x".join(map(str, t.shape)) or "()" for t in tensors[:2])


@dataclass(frozen=True)
class OpTiming:
    """Times and rates of one call. flop: of forward. nbytes: of its inputs and outputs, once. computes: by its FLOP per
    byte, it is limited by the device's GEMM (or attention) rather than its memory (Williams et al., "Roofline", 2009);
    `ceiling` is the rate of that limit, in FLOP/s or bytes/s."""

    name: str
    shape: str
    forward: Times
    both: Times | None
    flop: float
    nbytes: int
    computes: bool
    ceiling: float
    backward_flop: float

    def rate(self, times: Times, backward: bool) -> float:
        """FLOP/s or bytes/s; backward reads inputs and the output's gradient again and writes the inputs' gradients."""
        if self.computes:
            return (self.flop + backward * self.backward_flop) / times.median
        return (1 + 2 * backward) * self.nbytes / times.median

    def as_dict(self) -> dict[str, Any]:
        unit = "FLOP/s" if self.computes else "bytes/s"
        made = {
            "op": self.name,
            "shape": self.shape,
            "unit": unit,
            "ceiling": self.ceiling,
            "flop": self.flop,
            "bytes": self.nbytes,
        }
        for key, times, backward in (("forward", self.forward, False), ("forward_backward", self.both, True)):
            if times is not None:
                made[key] = {
                    **times.as_dict(),
                    "rate": self.rate(times, backward),
                    "share": self.rate(times, backward) / self.ceiling,
                }
        return made


def bench_ops(
    run: Run, ranks: int, device: torch.device, repeats: int, out: str | None, say: Callable[[str], None]
) -> list[OpTiming]:
    """Measure, print a table, and write `out` (JSON)."""
    ceilings = measure_ceilings(run, device)
    plan = make_plan(run, ranks)
    rows = [time_call(call, run, device, ceilings, repeats) for call in calls_of(plan, device)]
    rows.append(time_update(run, device, ceilings, repeats))
    if quantized_base(run) is not None:
        rows.append(time_decoding(run, device, ceilings, repeats))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    t = run.train
    say(
        f"{name}, torch {torch.__version__}, {t.precision}, micro-batch {t.micro_batch} x {t.seq_length} "
        f"tokens, one rank of tp {plan.grid.tp}"
    )
    say("\n".join(ceilings.lines()))
    say(ops_table(rows))
    if out:
        found = {
            "device": name,
            "torch": torch.__version__,
            "ceilings": ceilings.as_dict(),
            "ops": [r.as_dict() for r in rows],
        }
        Path(out).write_text(json.dumps(found, indent=1), encoding="utf-8")
    return rows


# ---- the calls -----------------------------------------------------------------------------------


def calls_of(plan: Plan, device: torch.device) -> list[OpCall]:
    """The distinct calls of ops that an embedding, a layer and a head make in forward, in order."""
    run = plan.run
    blocks = block_samples(plan, device)
    batch = random_batch(run, device)
    dtype = precision(run.train.precision).compute
    found: list[OpCall] = []
    with noted(found):
        x = torch.empty(0, dtype=dtype, device=device)
        for block in blocks:
            x = hidden(run_block(block, x.detach().requires_grad_(x.numel() > 0), batch))
    seen: set[tuple[str, str]] = set()
    return [c for c in found if not ((c.name, c.shape) in seen or seen.add((c.name, c.shape)))]  # type: ignore[func-returns-value]


def block_samples(plan: Plan, device: torch.device) -> list[Block]:
    """Embedding, first layer and head of tp rank 0, with random weights and gradient buffers as in training."""
    n = num_blocks(plan.run.model)
    grid = plan.grid
    axes = ModelAxes(
        LocalAxis("tp", grid.tp),
        LocalAxis("ep", grid.ep),
        LocalAxis("etp", grid.etp),
        LocalAxis("ep x etp", grid.ep * grid.etp),
        LocalAxis("cp", grid.cp),
        LocalAxis("cp heads", grid.ulysses),
        LocalAxis("cp keys", grid.cp // grid.ulysses),
        LocalAxis("tp x cp", grid.tp * grid.cp),
    )
    env = plan.env(Coords(), axes)
    blocks = [make_blocks(plan.run.model, env, range(i, i + 1))[0] for i in (0, 1, n - 1)]
    kind = precision(plan.run.train.precision)
    for linear in (m for block in blocks for m in block.modules() if isinstance(m, Linear)):
        linear.fed_lazily = False  # each op is timed alone, so its inputs and outputs must be in memory
    for block in blocks:
        shapes = [p.shape for p in block.parameters()]
        params = list(block.parameters())
        for p in params:
            p.to_empty(device)
        for p, shape in zip(params, shapes):
            p.data = torch.randn(shape, device=device).mul_(0.02).to(kind.compute)
            p.grad_dtype = kind.master
            p.grad = torch.zeros(shape, dtype=kind.master, device=device)
    return list(blocks)


def random_batch(run: Run, device: torch.device) -> Batch:
    t = run.train
    tokens = t.micro_batch * t.seq_length
    ids = torch.randint(run.model.vocab_size, (2, tokens), device=device)
    positions = torch.arange(t.seq_length, device=device).repeat(t.micro_batch)
    samples = torch.arange(t.micro_batch, device=device).repeat_interleave(t.seq_length)
    return Batch(
        ids[0], ids[1], positions, samples, t.micro_batch, t.seq_length, loss_seed=torch.ones((), device=device)
    )


@contextmanager
def noted(found: list[OpCall]) -> Iterator[None]:
    """While inside, every op that a module of phalanx.nn or phalanx.models calls by name is recorded in `found`."""
    undo: list[tuple[Any, str, Any]] = []
    for module in [m for name, m in list(sys.modules.items()) if name.startswith(("phalanx.nn.", "phalanx.models."))]:
        for name, thing in list(vars(module).items()):
            if is_op(thing):
                undo.append((module, name, thing))
                setattr(module, name, _noting(thing, found))
            elif getattr(thing, "__name__", "").startswith(
                "phalanx.ops."
            ):  # `from phalanx.ops import attention as ops`
                for inner, function in list(vars(thing).items()):
                    if is_op(function) and not inner.startswith("_") and function.__module__ == thing.__name__:
                        undo.append((thing, inner, function))
                        setattr(thing, inner, _noting(function, found))
    try:
        yield
    finally:
        for owner, name, thing in reversed(undo):
            setattr(owner, name, thing)


def is_op(thing: Any) -> bool:
    return (
        callable(thing) and not isinstance(thing, type) and getattr(thing, "__module__", "").startswith("phalanx.ops.")
    )


def _noting(function: Callable[..., Any], found: list[OpCall]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        kept = tuple(_own(a) for a in args), {k: _own(v) for k, v in kwargs.items()}
        result = function(*args, **kwargs)
        made = tensors_of(result)
        written = frozenset(i for i, a in enumerate(args) if any(a is y for y in made))
        # not what only chooses an implementation
        if any(t.is_floating_point() for t in tensors_of([*args, *kwargs.values()])) and made:
            found.append(OpCall(function.__name__, function, *kept, written))
        return result

    return run


def _own(x: Any) -> Any:
    """The value detached from the graph; parameters are returned as they are, because their gradients go into their
    buffers."""
    if isinstance(x, tuple):
        own = map(_own, x)
        return type(x)(*own) if hasattr(x, "_fields") else tuple(own)  # a named tuple stays one
    if not isinstance(x, Tensor) or isinstance(x, nn.Parameter):
        return x
    return x.detach().requires_grad_(x.requires_grad)


# ---- their times ---------------------------------------------------------------------------------


def time_call(call: OpCall, run: Run, device: torch.device, ceilings: Ceilings, repeats: int) -> OpTiming:
    def forward() -> Any:
        with torch.no_grad():
            return call.run()

    outputs = tensors_of(call.run())
    grads = [torch.randn(y.shape, device=device).to(y.dtype) for y in outputs]
    inputs = [t for t in tensors_of([*call.args, *call.kwargs.values()])]

    def both() -> None:
        for x in inputs:
            if not isinstance(x, nn.Parameter):
                x.grad = None
        made = tensors_of(call.run())
        torch.autograd.backward(made, grads)

    backward = any(y.requires_grad for y in outputs)
    flop = forward_flop(call, run, forward)
    attends = "attention" in call.name
    nbytes = sum({t.data_ptr(): t.numel() * t.element_size() for t in [*inputs, *outputs]}.values())
    rate = ceilings.attention if attends else ceilings.gemm
    computes = flop / rate >= nbytes / ceilings.copy
    ceiling = rate if computes else ceilings.copy
    times = measure(forward, device, repeats=repeats)
    return OpTiming(
        call.name,
        call.shape,
        times,
        measure(both, device, repeats=repeats) if backward else None,
        flop,
        nbytes,
        computes,
        ceiling,
        (2.5 if attends else 2.0) * flop,
    )


def time_update(run: Run, device: torch.device, ceilings: Ceilings, repeats: int) -> OpTiming:
    """What a step does once, after its gradients: norm, clip, the optimizers' updates, weights written back, gradients
    zeroed; for one layer and embeddings. With an optimizer of whole matrices its matmuls are the ceiling.

    nbytes is the minimum that must be moved: gradient, master and two moments read; master, moments, weight and zeroed
    gradient written.
    """
    alone = replace(without_layout(run), model=replace(run.model, num_hidden_layers=1))
    plan = make_plan(alone, 1)
    state = build(plan, Mesh(plan.grid, 0, device))
    init_weights(state.model)
    tokens = torch.ones((), dtype=torch.float64, device=device)
    numel = sum(f.weight.numel() for f in state.buffers.flat)
    kind = precision(run.train.precision)
    wide, narrow = kind.master.itemsize, kind.compute.itemsize
    copies = 8 if wide == narrow else 8 + narrow / wide  # fp32: the weights are their own masters
    times = measure(lambda: update(state, tokens, 1e-5), device, repeats=repeats)
    optimizers = optimizers_of(run.optim)
    flop = sum(
        optimizer.flops(matrix)
        for updater, matrices in plan.matrices[0].items()
        for matrix in matrices
        if isinstance(optimizer := optimizers[updater], MatrixOptimizer)
    )
    ceiling, nbytes = ceilings.gemm if flop else ceilings.copy, round(copies * wide * numel)
    return OpTiming("update", f"{numel} parameters", times, None, flop, nbytes, flop > 0, ceiling, 0.0)


def time_decoding(run: Run, device: torch.device, ceilings: Ceilings, repeats: int) -> OpTiming:
    """What a quantized base costs in the forward, and again in the backward, of each micro-batch: the weights of one
    layer from their quantized values. nbytes: quantized values read, weights written."""
    plan = make_plan(replace(without_layout(run), model=replace(run.model, num_hidden_layers=1)), 1)
    state = build(plan, Mesh(plan.grid, 0, device))
    init_weights(state.model)
    base = [f.storage for f in state.buffers.flat if isinstance(f.storage, BaseStorage)]

    def decode() -> None:
        for storage in base:
            storage.fetch()
            storage.ready()

    times, numel = measure(decode, device, repeats=repeats), sum(s.weight.numel() for s in base)
    nbytes = sum(s.whole.nbytes + s.weight.nbytes for s in base)
    return OpTiming("base_decode", f"{numel} weights", times, None, 0.0, nbytes, False, ceilings.copy, 0.0)


def forward_flop(call: OpCall, run: Run, forward: Callable[[], Any]) -> float:
    """FLOP of matmuls in forward, counted by torch as they happen; of attention by its formula, half the square or
    the window."""
    if "attention" in call.name:
        first, *others = call.args
        q, k, v = first if isinstance(first, tuple) else call.args[:3]
        kinds = (a.kind if isinstance(a, AttentionPlan) else a for a in others)
        kind = next((a for a in kinds if isinstance(a, AttentionKind)), CAUSAL)
        keys = k.shape[2] if call.name == "cross_attention" else kind.keys_per_query(q.shape[2])
        return 2.0 * q.shape[:-1].numel() * (q.shape[-1] + v.shape[-1]) * keys
    if call.name == "gated_mlp":  # not torch's GEMMs
        return 2.0 * len(call.args[0]) * run.layout.tp * (call.args[1].numel() + call.args[2].numel())
    with FlopCounterMode(display=False) as counter:
        forward()
    return float(counter.get_total_flops())


def tensors_of(values: Any) -> list[Tensor]:
    """The tensors among values, and in tuples and lists among them."""
    values = values if isinstance(values, (tuple, list)) else [values]
    flat = [t for v in values for t in (v if isinstance(v, (tuple, list)) else [v])]
    return [t for t in flat if isinstance(t, Tensor)]


def ops_table(rows: list[OpTiming]) -> str:
    lines = [("op", "shape", "forward ms", "rate", "of ceiling", "forward+backward ms", "rate", "of ceiling")]
    for r in rows:
        lines.append((r.name, r.shape, *_cells(r, r.forward, False), *_cells(r, r.both, True)))
    return table(lines, left=(0, 1))


def _cells(row: OpTiming, times: Times | None, backward: bool) -> tuple[str, str, str]:
    if times is None:
        return "-", "-", "-"
    rate = row.rate(times, backward)
    text = f"{rate / 1e12:.4g} TFLOP/s" if row.computes else f"{rate / 1e9:.4g} GB/s"
    return times.ms, text, f"{100 * rate / row.ceiling:.0f} %"
