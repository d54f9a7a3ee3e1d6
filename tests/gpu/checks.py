"""Checks of one device against float64 on the CPU. Each takes the device, raises where something is wrong and
returns what it measured."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from phalanx.base.rng import fill_normal_, keep_mask
from phalanx.comm.axis import Axis
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Fp8Config
from phalanx.engine.build import build, init_weights
from phalanx.engine.step import train_step
from phalanx.forecast.decide import make_plan
from phalanx.layout.grid import Grid
from phalanx.observe.profile import Recording
from phalanx.observe.step_budget import read_budget
from phalanx.ops.attention.flash import FLASH_ATTN
from phalanx.ops.attention.kind import AttentionKind, Learned
from phalanx.ops.dense.cross_entropy import linear_cross_entropy
from phalanx.ops.dense.embedding import embedding
from phalanx.ops.dense.gated_mlp import MLP, gated_mlp
from phalanx.ops.dense.matmul import gather_matmul, matmul_scatter, wide_matmul
from phalanx.ops.op import Case, Implementation, Op, table, unusable
from phalanx.ops.optimizer.adamw import AdamOptions, AdamRange, adamw_, adamw_reference_
from phalanx.pipeline.graphs import Graphs
from phalanx.sequence.batch import Batch
from tests.gpu.checkpoint import checkpoint_checks
from tests.gpu.context import context_checks
from tests.gpu.experts import expert_checks
from tests.gpu.generation import generation_checks
from tests.gpu.invariant import invariant_checks
from tests.gpu.low import low_checks
from tests.gpu.truth import ROUNDINGS, within
from tests.harness.op_cases import compared
from tests.harness.parity import base_run, batch_of, sample_batch
from tests.ops import test_ops
from tests.ops.test_ops import OPS, attend, gradients, make_batch, normal

ONE = Axis("tp")
# tensors that the ops of tests.ops.test_ops close over
CONSTANTS = ("IDS", "LABELS", "POSITIONS", "TABLE", "UNIFORM", "PACKED", "ODD", "ODD_PACKED", "PREFIXED", "SEED")


def on_device(value: Any, device: torch.device) -> Any:
    """Tensors and batches, and tuples with them, on a device; what else a tuple has stays as it is."""
    if isinstance(value, Tensor | Batch):
        return value.to(device)
    if isinstance(value, tuple):
        made = [on_device(each, device) for each in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    return value


@contextmanager
def constants_on(device: torch.device) -> Iterator[None]:
    kept = {name: getattr(test_ops, name) for name in CONSTANTS}
    try:
        for name, value in kept.items():
            setattr(test_ops, name, on_device(value, device))
        yield
    finally:
        for name, value in kept.items():
            setattr(test_ops, name, value)


def op_check(name: str, dtype: torch.dtype) -> Callable[[torch.device], str]:
    def check(device: torch.device) -> str:
        op = OPS[name]
        inputs = op.inputs(dtype)
        exact, expected = gradients(op.plain, [x.detach().double().requires_grad_() for x in inputs])
        moved = [x.detach().to(device).requires_grad_() for x in inputs]
        wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
        for i in op.params:
            moved[i].grad_dtype = wide
            moved[i].grad = torch.ones(op.shapes[i], dtype=wide, device=device)
        with constants_on(device):
            y = op.op(*moved)
            y.backward(normal(*y.shape, seed=99, dtype=y.dtype).to(device))
        worst = within("output", y, exact, ROUNDINGS[dtype])
        for i, (x, g) in enumerate(zip(moved, expected)):
            truth = g + 1 if i in op.params else g
            worst = max(worst, within(f"gradient {i}", x.grad, truth, ROUNDINGS[dtype]))
        return f"{worst:.1e}"

    return check


def weight_gradients(device: torch.device) -> str:
    """16-bit operands add into an fp32 buffer unrounded: the addmm with out_dtype on a GPU. Odd and large shapes,
    twice."""
    worst = 0.0
    for dtype in (torch.bfloat16, torch.float16):
        for tokens, inner, outer in ((1000, 768, 1024), (257, 129, 65)):
            x, dy = normal(tokens, inner, dtype=dtype), normal(tokens, outer, seed=1, dtype=dtype)
            truth = 2 * (dy.double().t() @ x.double())
            for op in (gather_matmul, matmul_scatter):
                weight = normal(outer, inner, seed=2, dtype=dtype).to(device).requires_grad_()
                weight.grad_dtype, weight.grad = torch.float32, torch.zeros(outer, inner, device=device)
                for _ in range(2):
                    op(x.to(device), weight, ONE).backward(dy.to(device))
                worst = max(worst, within(f"{op.__name__} {dtype} {tokens}x{inner}x{outer}", weight.grad, truth, 1e-5))
    return f"{worst:.1e}"


def routers(device: torch.device) -> str:
    """bf16 tokens times a router's weight in fp32, and its gradients, against float64: products of bf16 pieces keep
    fp32's precision."""
    x, weight = normal(8192, 512, dtype=torch.bfloat16), normal(64, 512, seed=1, dtype=torch.bfloat16)
    dy = normal(8192, 64, seed=2, dtype=torch.float32)
    a, w = x.to(device).requires_grad_(), weight.to(device).requires_grad_()
    w.grad_dtype = torch.float32
    w.grad = torch.ones(w.shape, dtype=torch.float32, device=device)
    y = wide_matmul(a, w)
    y.backward(dy.to(device))
    truth = {
        "y": x.double() @ weight.double().t(),
        "dw": dy.double().t() @ x.double(),
        "dx": dy.double() @ weight.double(),
    }
    found = {"y": y, "dw": w.grad - 1.0, "dx": a.grad}
    for name, bound in (("y", 1e-5), ("dw", 1e-5), ("dx", 2.0**-8)):
        off = ((found[name].double().cpu() - truth[name]).norm() / truth[name].norm()).item()
        if off > bound:
            raise AssertionError(f"{name} off by {off:.2e}")
    return "ok"


def cross_entropy_large(device: torch.device) -> str:
    """bf16 over 32,003 ids in 32,064 rows, D 512: loss and gradients."""
    x, w = normal(300, 512, dtype=torch.bfloat16) * 0.2, normal(32064, 512, seed=1, dtype=torch.bfloat16) * 0.2
    labels = torch.randint(0, 32003, (300,), generator=torch.Generator().manual_seed(0))
    exact = [t.double().requires_grad_() for t in (x, w)]
    truth = F.cross_entropy(exact[0] @ exact[1][:32003].t(), labels, reduction="sum")
    truth.backward()
    moved = [t.to(device).requires_grad_() for t in (x, w)]
    moved[1].grad_dtype, moved[1].grad = torch.float32, torch.zeros(w.shape, device=device)
    loss = linear_cross_entropy(*moved, labels.to(device), 0, 32003, ONE)
    loss.backward()
    worst = within("loss", loss, truth.detach(), 1e-3)
    return f"{max(worst, *(within('gradient', a.grad, b.grad, 0.03) for a, b in zip(moved, exact))):.1e}"


def sinks_check(length: int, window: int | None, dtype: torch.dtype) -> Callable[[torch.device], str]:
    """Sinks (and a window) over grouped heads of gpt-oss's width against float64 on the CPU, all gradients."""

    def check(device: torch.device) -> str:
        found = []
        for place, kind in ((torch.device("cpu"), torch.float64), (device, dtype)):
            x, s = (
                normal(*shape, seed=i, dtype=dtype).to(place).to(kind).requires_grad_()
                for i, shape in enumerate(((2 * length, 12, 64), (8,)))
            )
            s.grad_dtype, s.grad = (torch.float64 if kind == torch.float64 else torch.float32), None
            y = attend(x, 8, 2, make_batch(2, length).to(place), AttentionKind(window=window, sinks=True), Learned(s))
            y.backward(normal(*y.shape, seed=99, dtype=dtype).to(place).to(kind))
            found.append((y.detach(), x.grad, s.grad))
        return f"{max(within(f'sinks {i}', b, a, 4 * ROUNDINGS[dtype]) for i, (a, b) in enumerate(zip(*found))):.1e}"

    return check


def large_case(op: Op, case: Case, made: Implementation, dtype: torch.dtype) -> Callable[[torch.device], str]:
    """An implementation of an op at a real model's shapes against its reference in float64 on the same device; all
    gradients."""

    def check(device: torch.device) -> str:
        if made.device not in ("any", device.type):
            return f"not run: not for a {device.type}"
        if device.type == "cuda" and (why := unusable(made, device.index or 0)):
            return f"not run: {why}"
        if not made.has(case.asked):
            return "not for this implementation"
        pairs = compared(op, case, made, dtype, device)
        if pairs is None:
            return "not for this implementation"
        if case.exact:
            for i, (a, b) in enumerate(pairs):
                if not torch.equal(a.cpu(), b):
                    raise AssertionError(f"{case.name} {i} differs")
            return "to the bit"
        bound = min(2.0**-5, ROUNDINGS[dtype]) if dtype.itemsize == 2 else ROUNDINGS[dtype]
        return f"{max(within(f'{case.name} {i}', a, b.cpu(), bound) for i, (a, b) in enumerate(pairs)):.1e}"

    return check


def large_cases() -> dict[str, Callable[[torch.device], str]]:
    """Of every op of the table and every implementation for GPUs: a new kernel comes with its own."""
    return {
        f"{op.name}: {case.name}, {made.name}{'' if dtype == torch.bfloat16 else f', {str(dtype)[6:]}'}": large_case(
            op, case, made, dtype
        )
        for op in table()
        for case in op.cases
        for made in op.candidates
        for dtype in case.dtypes or (torch.bfloat16,)
        if case.large and made.device in ("cuda", "any")
    }


def attention_check(length: int, dtype: torch.dtype, backend: SDPBackend | None) -> Callable[[torch.device], str]:
    def check(device: torch.device) -> str:
        heads, kv_heads, width = 4, 2, 64
        n = length if device.type == "cuda" else length // 16
        batch = Batch(*(torch.zeros(n, dtype=torch.int64) for _ in range(4)), 1, n)
        qkv = normal(n, heads + 2 * kv_heads, width, dtype=dtype)
        exact = qkv.double().requires_grad_()
        truth = attend(exact, heads, kv_heads, batch)
        dy = normal(*truth.shape, seed=1, dtype=dtype)
        truth.backward(dy.double())
        x = qkv.to(device).requires_grad_()
        try:
            with sdpa_kernel(backend or list(SDPBackend.__members__.values())):
                y = attend(x, heads, kv_heads, batch.to(device))
        except RuntimeError as error:
            if backend is None or "kernel" not in str(error):
                raise
            return "refused by torch"
        y.backward(dy.to(device))
        return f"{max(within('output', y, truth.detach(), ROUNDINGS[dtype]), within('gradient', x.grad, exact.grad, ROUNDINGS[dtype])):.1e}"  # noqa: E501

    return check


def gated_mlp_check(tokens: int, width: int, inner: int) -> Callable[[torch.device], str]:
    """The wheel's MLP against its reference implementations in float64 on the same device: output, gradients, fp32
    accumulation into ones."""

    def check(device: torch.device) -> str:
        why = "not a GPU" if device.type != "cuda" else unusable(MLP.implementations[0], device.index or 0)
        shapes = ((tokens, width), (2 * inner, width), (width, inner)) if why is None else ((6, 16), (48, 16), (16, 24))
        found = []
        for wide in (True, False):
            drawn = [normal(*s, seed=i, dtype=torch.bfloat16) * (1.0 if i == 0 else 0.05) for i, s in enumerate(shapes)]
            x, gate_up, down = ((t.double() if wide else t).to(device).requires_grad_() for t in drawn)
            for p in (gate_up, down):
                p.grad_dtype = torch.float64 if wide else torch.float32
                p.grad = torch.ones(p.shape, dtype=p.grad_dtype, device=device)
            y = gated_mlp(x, gate_up, down, ONE, MLP.choose("plain" if wide or why else "optional", x))
            y.backward(normal(*y.shape, seed=9, dtype=torch.bfloat16).to(device).to(y.dtype))
            found.append((y.detach(), x.grad, gate_up.grad, down.grad))
        names = ("output", "d_x", "d_gate_up", "d_down")
        worst = max(within(what, b, a.cpu(), ROUNDINGS[torch.bfloat16]) for what, a, b in zip(names, *found))
        return f"{worst:.1e}" if why is None else f"plain GEMMs instead ({why})"

    return check


def optional_kernels_train(device: torch.device) -> str:
    """10 bf16 steps with attention and MLP from optional packages against fp32 on the CPU; CUDA graphs change nothing
    beyond the order of sums."""
    why = (
        "not a GPU"
        if device.type != "cuda"
        else unusable(FLASH_ATTN, device.index or 0) or unusable(MLP.implementations[0], device.index or 0)
    )
    if why is not None:
        return f"not run ({why})"
    shape = {"head_dim": 16, "intermediate_size": 48}
    truth = losses(torch.device("cpu"), "llama", "fp32", shape=shape)
    worst = 0.0
    for graphs in ("off", "on"):
        found = losses(device, "llama", "bf16", shape=shape, kernels="optional", cuda_graphs=graphs)
        worst = max(worst, *(abs(a / b - 1) for a, b in zip(found, truth)))
        if not worst <= 2.0**-7:
            raise AssertionError(f"graphs {graphs}: losses off by {worst:.2e}: {found} against {truth}")
    return f"{worst:.1e}"


def budget_check(**train: str) -> Callable[[torch.device], str]:
    """Every kernel of a recorded step is of a kind that the step budget knows, and its rows leave nothing out of the
    recording."""

    def check(device: torch.device) -> str:
        why = None if "kernels" not in train or device.type == "cuda" else "not a GPU"
        why = why or (
            unusable(MLP.implementations[0], device.index or 0) if train.get("kernels") == "optional" else None
        )
        run = base_run("llama", 4, 2, precision="bf16", **(train if why is None else {}))
        run = replace(run, model=replace(run.model, head_dim=16, intermediate_size=48))
        state = build(make_plan(run, 1), Mesh(Grid(), device=device))
        init_weights(state.model)
        state.model.train()
        batches = [sample_batch(ids, documents=False).to(device) for ids in ([1, 2], [3, 4])]
        for _ in range(3):
            train_step(state, batches, lr=1e-3)
        with tempfile.TemporaryDirectory() as folder:
            recording = Recording(state, Path(folder) / "trace.json")
            recording.start()
            train_step(state, batches, lr=1e-3)
            with recording.step(1):
                train_step(state, batches, lr=1e-3)
            recording.stop()
            budget = read_budget(recording.path)
        if budget.unknown or abs(budget.unattributed) > 1e-3 * budget.step_s:
            raise AssertionError(f"unknown {budget.unknown}, unattributed {budget.unattributed} of {budget.step_s} s")
        return ", ".join(f"{name} {1e3 * s:.2f} ms" for name, s in budget.rows.items()) + (
            "" if why is None else f" ({why})"
        )

    return check


def optional_kernel_cases() -> dict[str, Callable[[torch.device], str]]:
    cases: dict[str, Callable[[torch.device], str]] = {}
    for tokens, width, inner in ((2048, 4096, 14336), (1000, 768, 2048), (77, 64, 176), (3, 72, 40)):
        cases[f"optional kernels: SwiGLU MLP {tokens} x {width} x {inner}"] = gated_mlp_check(tokens, width, inner)
    return {
        **cases,
        "optional kernels: 10 steps, bf16": optional_kernels_train,
        "optional kernels: step budget": budget_check(kernels="optional"),
        "step budget": budget_check(),
    }


def embedding_is_deterministic(device: torch.device) -> str:
    """Many equal ids: two runs give equal bits, near the float64 sum."""
    ids = torch.randint(0, 50, (8192,), generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float32):
        dx, found = normal(8192, 256, dtype=dtype), []
        for _ in range(3):
            weight = torch.zeros(64, 256, dtype=dtype, device=device, requires_grad=True)
            weight.grad_dtype, weight.grad = torch.float32, torch.zeros(64, 256, device=device)
            embedding(ids.to(device), weight, 0, 60, ONE).backward(dx.to(device))
            found.append(weight.grad)
        if not all(torch.equal(found[0], f) for f in found):
            raise AssertionError(f"{dtype}: runs differ by {max((found[0] - f).abs().max().item() for f in found):.2e}")
        error = within(
            str(dtype), found[0], torch.zeros(64, 256, dtype=torch.float64).index_add_(0, ids, dx.double()), 1e-5
        )
    return f"bit-equal, {error:.1e}"


def fused_adamw(device: torch.device) -> str:
    """Against the reference in float64 on the CPU; a skipped step changes no bit."""
    worst = 0.0
    for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        start = [[normal(n, seed=10 * i + n, dtype=dtype) for n in (1, 7, 100_003)] for i in range(4)]
        start[3] = [v.abs() for v in start[3]]
        ours = [
            AdamRange(*(t.to(device) for t in ts), torch.zeros(len(ts[0]), dtype=torch.bfloat16, device=device))
            for ts in zip(*start)
        ]
        truth = [AdamRange(*(t.double().clone() for t in ts)) for ts in zip(*start)]

        pairs = ((ours, adamw_, device), (truth, adamw_reference_, torch.device("cpu")))

        def both(step: float, skip: float, pairs: tuple = pairs) -> None:
            for parts, update, where in pairs:
                scalars = [torch.tensor(x, device=where) for x in (step, 0.3, skip)]
                update(parts, scalars[0], AdamOptions(0.01, 0.9, 0.95, 1e-8, 0.1), *scalars[1:])

        for step in (1.0, 2.0, 3.0):
            for part, other, grad in zip(ours, truth, start[1]):
                part.grad.copy_(grad * step)
                other.grad.copy_(grad.double() * step)
            both(step, 0.0)
        found = [(getattr(a, k), getattr(b, k)) for a, b in zip(ours, truth) for k in ("master", "m", "v")]
        worst = max([worst, *(within(f"{dtype}", a, b, bound) for a, b in found)])
        if not all(torch.equal(p.out, p.master.bfloat16()) and bool((p.grad == 0).all()) for p in ours):
            raise AssertionError("the copy is not the rounded master, or a gradient is not zero")
        before = [[t.clone() for t in (p.master, p.m, p.v, p.out)] for p in ours]
        ours[2].grad.fill_(math.nan)
        both(3.0, 1.0)
        if not all(torch.equal(a, b) for p, ts in zip(ours, before) for a, b in zip((p.master, p.m, p.v, p.out), ts)):
            raise AssertionError("a skipped step changed something")
    return f"{worst:.1e}"


def normals(device: torch.device) -> str:
    """CPU and device within one unit in the last place of fp32; a box equals the slice of the whole bit by bit on
    the device."""
    made = []
    for where in (torch.device("cpu"), device):
        out = torch.empty(1001, 777, device=where)
        fill_normal_(out, 0.02, (1001, 777), (0, 0), 3, "w")
        made.append(out)
    box = torch.empty(500, 333, device=device)
    fill_normal_(box, 0.02, (1001, 777), (31, 101), 3, "w")
    if not torch.equal(box, made[1][31:531, 101:434]):
        raise AssertionError("a box is not the slice of the whole")
    ulps = (made[0].view(torch.int32) - made[1].cpu().view(torch.int32)).abs()
    if ulps.max() > 1:
        raise AssertionError(f"{ulps.max()} ulps apart")
    return f"{(ulps > 0).float().mean():.1e} differ by 1 ulp"


def masks(device: torch.device) -> str:
    """Dropout masks are integers: the same bits on every device."""
    rows = (torch.arange(600) // 7 + 2**33, torch.arange(600) % 7)
    here = keep_mask(0.3, 1, 2, 3, rows, 129)
    there = keep_mask(0.3, 1, 2, 3, (rows[0].to(device), rows[1].to(device)), 129)
    if not torch.equal(here, there.cpu()):
        raise AssertionError("masks differ")
    return "bit-equal"


def losses(
    device: torch.device,
    model: str,
    precision: str,
    recompute: str = "none",
    shape: dict[str, int] | None = None,
    **train: str,
) -> list[float]:
    """10 steps on the same samples. `shape`: other sizes of the model."""
    run = base_run(model, 4, 2, precision=precision, recompute=recompute, **train)
    run = replace(run, model=replace(run.model, initializer_range=0.1, **(shape or {})))
    state = build(make_plan(run, 1), Mesh(Grid(), 0, device))
    init_weights(state.model)
    state.model.train()
    batches = [batch_of(run, ids, documents=False).to(device) for ids in ([1, 2], [3, 4])]
    return [train_step(state, batches, lr=1e-3).loss.item() for _ in range(10)]


def counted(batch: Batch) -> Batch:
    """With the bounds of documents that the loader states."""
    beside = {name: each if each.units is not None else counted(each) for name, each in batch.beside.items()}
    if batch.documents is None:
        return replace(batch, beside=beside)
    sizes = torch.bincount(batch.documents)
    bounds = {"most_documents": len(sizes), "longest_document": int(sizes.max())}
    return replace(batch, beside=beside, **bounds)


def training_check(model: str, precision: str, bound: float, recompute: str = "none") -> Callable[[torch.device], str]:
    """10 steps against the same on the CPU: in fp64 for fp64, else in fp32."""

    def check(device: torch.device) -> str:
        truth = losses(torch.device("cpu"), model, "fp64" if precision == "fp64" else "fp32")
        found = losses(device, model, precision, recompute)
        worst = max(abs(a / b - 1) for a, b in zip(found, truth))
        if not worst <= bound or not truth[-1] < truth[0]:
            raise AssertionError(f"losses off by {worst:.2e} (bound {bound:.2e}): {found} against {truth}")
        return f"{worst:.1e}, loss {found[0]:.3f} -> {found[-1]:.3f}"

    return check


def graphs_check(
    model: str,
    precision: str,
    recompute: str,
    dispatch: str = "auto",
    low_steps: int = 0,
    documents: bool | str = False,
    **train: Any,
) -> Callable[[torch.device], str]:
    """Steps with CUDA graphs give the bits of steps without: losses, norms and weights after 4 steps of 3
    micro-batches. low_steps: after so many, and as many more, all is in train.precision, as train.fp8.last_steps has
    it. documents: as of sample_batch."""

    def check(device: torch.device) -> str:
        found = []
        for graphs in ("off", "on") if device.type == "cuda" else ("off", "off"):
            run = base_run(model, 3, precision=precision, recompute=recompute, cuda_graphs=graphs, **train)
            widths = dict(head_dim=16, intermediate_size=96) if low_steps else {}  # whole units of codes
            run = replace(
                run,
                model=replace(run.model, initializer_range=0.1, **widths),
                layout=replace(run.layout, bucket_mb=0, dispatch=dispatch),
            )
            state = build(make_plan(run, 1), Mesh(Grid(), device=device))
            init_weights(state.model)
            state.model.train()
            losses = []
            for step in range(2 * low_steps or 4):
                if state.model.fp8 is not None and state.model.fp8.turn(step >= low_steps):
                    state.model.stages.runner.forget()
                batches = [counted(batch_of(run, [3 * step + i], documents)).to(device) for i in range(3)]
                result = train_step(state, batches, lr=1e-3)
                losses += [result.loss, result.grad_norm]
            runner = state.model.stages.runner
            if graphs == "on" and not (isinstance(runner, Graphs) and runner.captured):
                raise AssertionError("nothing was captured")
            found.append([torch.stack(losses), *(f.master for f in state.buffers.flat)])
        if not all(torch.equal(a, b) for a, b in zip(*found)):
            raise AssertionError(f"graphs change the numbers: {found[0][0].tolist()} {found[1][0].tolist()}")
        return "bit-equal"

    return check


def all_checks() -> dict[str, Callable[[torch.device], str]]:
    found: dict[str, Callable[[torch.device], str]] = {}
    for dtype in ROUNDINGS:
        found.update({f"{name}, {str(dtype)[6:]}": op_check(name, dtype) for name in OPS})
    found["weight gradients in fp32 (addmm out_dtype)"] = weight_gradients
    found["routers: gradients by bf16 pieces"] = routers
    found["cross entropy over 32,003 ids, bf16"] = cross_entropy_large
    found |= (
        large_cases()
        | optional_kernel_cases()
        | expert_checks()
        | low_checks()
        | context_checks()
        | checkpoint_checks()
        | generation_checks()
        | invariant_checks()
    )
    for length in (1000, 4096):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            found[f"attention S={length} {str(dtype)[6:]}, torch's choice"] = attention_check(length, dtype, None)
        for backend in (
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        ):
            found[f"attention S={length} bfloat16, {backend.name}"] = attention_check(length, torch.bfloat16, backend)
    for window in (None, 128, 800):
        for dtype in (torch.bfloat16, torch.float32):
            found[f"sinks S=1001 window {window}, {str(dtype)[6:]}"] = sinks_check(1001, window, dtype)
    found["embedding backward is deterministic"] = embedding_is_deterministic
    found["fused AdamW"] = fused_adamw
    found["normal initial values"] = normals
    found["dropout masks"] = masks
    for model in ("mistral", "qwen2", "deepseek_v3"):
        found[f"{model}: 10 steps, fp64"] = training_check(model, "fp64", 1e-9)
        found[f"{model}: 10 steps, bf16"] = training_check(model, "bf16", 2.0**-7)
        found[f"{model}: graphs on = off, bf16"] = graphs_check(model, "bf16", "none")
    for model in ("t5", "bert", "modernbert", "llama", "nemotron_h", "qwen3_next"):
        for documents in (True, "packed"):
            found[f"{model}: graphs on = off, bf16, documents ({documents})"] = graphs_check(
                model, "bf16", "none", documents=documents
            )
    for model in ("t5", "modernbert", "qwen2_5_vl", "qwen3_vl", "gemma3", "whisper"):
        found[f"{model}: 10 steps, bf16"] = training_check(model, "bf16", 2.0**-6)
    for recipe in ("tensorwise", "nvfp4"):
        fp8 = Fp8Config(recipe=recipe)
        found[f"llama: graphs on = off, {recipe}, then bf16"] = graphs_check(
            "llama", "bf16", "none", low_steps=3, fp8=fp8
        )
    found["mixtral: graphs on = off, bf16, all-to-all"] = graphs_check("mixtral", "bf16", "none", dispatch="alltoall")
    found["mixtral: graphs on = off, bf16, plain experts"] = graphs_check(
        "mixtral", "bf16", "none", dispatch="allgather", plain_ops=["grouped"]
    )
    for model in ("llama", "gpt2", "qwen3"):
        found[f"{model}: 10 steps, fp64"] = training_check(model, "fp64", 1e-9)
        found[f"{model}: 10 steps, fp32"] = training_check(model, "fp32", 1e-4)
        found[f"{model}: 10 steps, fp32, selective recompute"] = training_check(model, "fp32", 1e-4, "selective")
        found[f"{model}: 10 steps, bf16"] = training_check(model, "bf16", 2.0**-7)
        found[f"{model}: 10 steps, bf16, full recompute"] = training_check(model, "bf16", 2.0**-7, "full")
        for precision, recompute in (
            ("fp64", "none"),
            ("bf16", "none"),
            ("bf16", "pointwise"),
            ("bf16", "selective"),
            ("bf16", "full"),
        ):
            found[f"{model}: graphs on = off, {precision}, recompute {recompute}"] = graphs_check(
                model, precision, recompute
            )
    return found
