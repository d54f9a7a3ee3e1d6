"""Every Triton kernel against its reference implementation, forward and each gradient, odd shapes too, in Triton's
interpreter on the CPU.

On a GPU the same ops run compiled: tests/gpu. Here also: each kernel compiles for sm_90 without a GPU.
"""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.base.registry import BUILT_IN
from phalanx.comm.axis import Axis
from phalanx.comm.overlap import add_pieces
from phalanx.comm.sum_kernel import add_pieces_, sum_parts
from phalanx.ops.dense.cross_entropy import LOSS, linear_cross_entropy
from phalanx.ops.dense.norm import NORM
from phalanx.ops.dense.relu2 import relu2
from phalanx.ops.op import Case, Implementation, Op, compared_cases, table, unusable
from phalanx.ops.optimizer.adamw import AdamOptions, AdamRange, adamw_, adamw_reference_
from phalanx.ops.proof import run_case
from phalanx.sequence.batch import IGNORE
from tests.harness.op_cases import compared
from tests.harness.op_table import with_table
from tests.harness.sample import rest_in_soak
from tests.ops.test_ops import normal

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and sys.platform != "linux", reason="triton has wheels for Linux alone"
)
ONE = Axis("tp")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CASES = {f"{op.name}: {case.name}": (op, case) for op in table() for case in op.cases if not case.large}


def cross(x: Tensor, w: Tensor, kernels: str, seed: Tensor | None = None) -> Tensor:
    """The last three rows are padding."""
    vocab = w.shape[0] - 3
    drawn = torch.randint(0, vocab, (len(x),), generator=torch.Generator().manual_seed(5))
    drawn[::3] = IGNORE
    return linear_cross_entropy(x, w, drawn, 0, vocab, ONE, seed, kernels)


SEED = torch.tensor(0.37, dtype=torch.float64)


def runs_here(made: Implementation) -> bool:
    """Triton's are interpreted."""
    return "triton" in made.insisted or (made.device in ("cpu", "any") and unusable(made) is None)


COMPARED = [
    (name, made.name, dtype)
    for name, (op, case) in CASES.items()
    for made in op.candidates
    if runs_here(made) and made.has(case.asked)
    for dtype in case.dtypes or DTYPES
]


def in_turns(compared: list[tuple[str, str, torch.dtype]]) -> set[tuple[str, str, torch.dtype]]:
    """Of each case BF16 (its first dtype if it has none of that), and of every second one of the others, which take
    turns; of large casts FP32 alone: numpy has no BF16, and their tiles would be interpreted for many seconds."""
    forms = dict.fromkeys((name, made) for name, made, _ in compared)
    chosen = set()
    for turn, (name, made) in enumerate(forms):
        dtypes = [d for n, m, d in compared if (n, m) == (name, made)]
        large = "272 x 144" in name and torch.float32 in dtypes
        first = torch.float32 if large else torch.bfloat16 if torch.bfloat16 in dtypes else dtypes[0]
        others = [d for d in dtypes if d != first and not large]
        at = turn % max(2, 2 * len(others))
        chosen |= {(name, made, d) for d in (first, *others[at : at + 1])}
    return chosen


@pytest.mark.parametrize("form", rest_in_soak(COMPARED, in_turns(COMPARED)), ids=lambda form: "-".join(map(str, form)))
def test_equals_its_reference(form):
    """tests/ops/test_ops.py compares the references with formulas. Truth: the reference in float64 on the same rounded
    inputs; within a few roundings."""
    name, made, dtype = form
    compare(*CASES[name], made, dtype)


def compare(op: Op, case: Case, name: str, dtype: torch.dtype) -> None:
    [made] = (found for found in op.candidates if found.name == name)
    pairs = compared(op, case, made, dtype)
    rounding = {torch.float64: 1e-13, torch.float32: 2e-6}.get(dtype, 8 * torch.finfo(dtype).eps)
    assert pairs, f"{made.name} does not take it"
    for i, (a, b) in enumerate(pairs):
        if case.exact:
            assert a.dtype == b.dtype and torch.equal(a, b), (case.name, i)
            continue
        assert a.shape == b.shape and (a.double() - b).abs().max() <= rounding * b.abs().max(), (case.name, i)


def test_the_table_holds_for_every_op():
    """Names are those of the registry, references have what implementations must have, and each op is compared."""
    for op in table():
        assert all(hasattr(op.reference, name) for name in op.members) and op.implementations and op.title
        assert op.cases, f"{op.name} needs cases"


def test_the_page_has_the_table():
    page = (Path(__file__).parents[2] / "docs/ops-and-modules.md").read_text(encoding="utf-8")
    assert page == with_table(page), "run: python -m tests.harness.op_table docs/ops-and-modules.md"
    assert all(f"| {op.name} | {op.title} |" in page for op in table() if op.name in BUILT_IN["op"])


@pytest.mark.parametrize(
    "name", [op.name for op in table() if op.cases and op.members and "triton" in op.implementations[0].insisted]
)
def test_cases_reach_every_function_of_a_kernel(monkeypatch, name):
    """A member that no case calls would be compared with nothing: not even on a GPU, where a run in bf16 compares the
    cases that have it."""
    [op] = (op for op in table() if op.name == name)
    by, called = op.choose("triton", torch.ones(1)), set()
    by = type(by) if is_dataclass(by) else by  # made with a tuning
    for member in op.members:
        function = getattr(by, member)
        if callable(function):
            monkeypatch.setattr(
                by, member, lambda *a, member=member, function=function, **k: called.add(member) or function(*a, **k)
            )
    members = {member for member in op.members if callable(getattr(by, member))}
    for case in compared_cases(op, op.implementations[0], torch.bfloat16):
        if called != members:
            run_case(case, (case.dtypes or DTYPES)[-1] if name == "adamw" else torch.float32, "triton")
    assert called == members


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_squares_of_relu_are_rounded_once(dtype):
    """Truth: the reference, to the bit; NaN and Inf come through, by which a bad step is known. (The
    interpreter cuts bf16 off.)"""
    bad = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -1.0], dtype=dtype)
    values, dy = torch.cat((bad, normal(1, 1100, dtype=dtype)[0])).view(5, 221), normal(5, 221, seed=1, dtype=dtype)
    found = []
    for kernels in ("plain", "triton"):
        x = values.clone().requires_grad_()
        y = relu2(x, kernels)
        found += [y.detach(), *torch.autograd.grad(y, x, dy)]
    torch.testing.assert_close(found[2:], found[:2], rtol=0, atol=0, equal_nan=True)
    for part in found:
        assert part[0, 0].isnan() and part[0, 1].isinf() and (part[0, 2:5] == 0).all()


@pytest.mark.parametrize("kernels", ["plain", "triton"])
def test_gradients_in_forward_are_those_of_backward(kernels):
    """Truth: the op that makes them in backward, given the same gradient of the loss. Also: without gradients
    nothing is added."""
    found = []
    for seed in (SEED, None):
        x, w = normal(7, 5).requires_grad_(), normal(13, 5, seed=1).requires_grad_()
        w.grad = torch.ones(13, 5, dtype=torch.float64)
        with torch.no_grad():
            cross(x, w, kernels, seed)
        assert torch.equal(w.grad, torch.ones_like(w.grad))
        loss = cross(x, w, kernels, seed)
        loss.backward(SEED)
        found.append((loss.detach(), x.grad, w.grad))
    torch.testing.assert_close(*found, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("elements", [13, 40, 1000])
def test_cross_entropy_in_chunks(monkeypatch, elements):
    """Truth: all tokens at once; chunks of 1, 3 and all tokens."""
    [case] = (case for case in LOSS.cases if case.name == "cross entropy, gradient in forward")
    whole = run_case(case, torch.float64, "triton")
    monkeypatch.setattr(LOSS.choose("triton", SEED), "CHUNK_ELEMENTS", elements)
    torch.testing.assert_close(run_case(case, torch.float64, "triton"), whole, rtol=1e-14, atol=1e-14)


def test_cross_entropy_of_extreme_logits():
    """Truth: the reference implementation; logits around +-1e6 neither overflow nor lose the label."""
    x, w = normal(7, 5, dtype=torch.float32).mul(1e6), normal(13, 5, seed=1, dtype=torch.float32)
    found = cross(x, w, "triton")
    assert found.isfinite()
    torch.testing.assert_close(found, cross(x, w, "plain"), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "dtype, out, rtol", [("float32", torch.bfloat16, 2e-6), ("float32", None, 2e-6), ("float64", None, 1e-13)], ids=str
)
@pytest.mark.parametrize("step", [1, 2, 1000])
def test_adamw_equals_its_slow_twin(dtype, out, rtol, step):
    """Truth: the reference. The copy is the rounded master, the gradient ends at zero; a skipped step changes only
    the gradient."""
    found, dtype = [], getattr(torch, dtype)
    for twin in ("triton", None):
        parts = []
        for n in (1, 7, 2050):
            p, g, m, v = (normal(n, seed=i + n, dtype=dtype) for i in range(4))
            parts.append(AdamRange(p, g, m, v.abs(), None if out is None else torch.zeros(n, dtype=out)))
        options = (
            torch.tensor(float(step)),
            AdamOptions(0.01, 0.9, 0.999, 1e-8, 0.1),
            torch.tensor(0.3, dtype=torch.float64),
        )
        update = (lambda *a: adamw_(*a, kernels="triton")) if twin else adamw_reference_
        update(parts, *options, torch.tensor(0.0))
        found.append([(p.master, p.m, p.v) for p in parts])
        assert all((p.grad == 0).all() for p in parts)
        if out is not None:  # the interpreter cuts fp32 to bf16, a GPU rounds
            assert all((p.out.to(dtype) - p.master).abs().max() <= 2**-7 * p.master.abs().max() for p in parts)
        before = [[t.clone() for t in (p.master, p.m, p.v)] for p in parts]
        for p in parts:
            p.grad.fill_(math.nan)
        update(parts, *options, torch.tensor(1.0))
        assert all(torch.equal(a, b) for p, ts in zip(parts, before) for a, b in zip((p.master, p.m, p.v), ts))
        assert all((p.grad == 0).all() for p in parts)
    torch.testing.assert_close(*found, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_of_parts(dtype):
    """Truth: the sum in float64. Parts lie apart, their size is no multiple of a block."""
    separate = normal(3, 2500, dtype=dtype)
    parts = torch.as_strided(separate, (3, 41, 57), (2500, 57, 1))
    truth = parts.double().sum(0)
    rounding = {torch.float64: 1e-15, torch.float32: 2e-7}.get(dtype, 2 * torch.finfo(dtype).eps)
    assert (sum_parts(parts).double() - truth).abs().max() <= rounding * truth.abs().max()


@pytest.mark.parametrize("index, add", [(0, False), (0, True), (2, False), (3, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sum_of_pieces(dtype, index, add):
    """The same bits as its twin: both add in rank order. Pieces lie apart; with `add` onto what was there, else in
    place of the own one."""
    received = torch.as_strided(normal(3, 3000, dtype=dtype), (3, 2437), (3000, 1))
    own, kept = normal(2437, dtype=dtype), normal(2437, dtype=dtype, seed=1)
    found, truth = (kept.clone(), kept.clone()) if add else (own.clone(), own.clone())
    add_pieces_(found, own if add else found, received, index, add)
    add_pieces(truth, own if add else truth, received, index, add)
    assert torch.equal(found, truth) and not torch.equal(found, kept if add else own)


def test_auto_is_the_reference_on_the_cpu():
    x = torch.ones(1)
    assert NORM.choose("auto", x) is NORM.choose("plain", x) is NORM.reference
    assert NORM.choose("triton", x) is NORM.choose("optional", x) is NORM.implementations[0].load()


@pytest.mark.parametrize("part", "012")
@pytest.mark.parametrize("which", ["layouts", pytest.param("whole", marks=pytest.mark.soak)])
def test_kernels_compile_for_hopper(which, part):
    """Ahead of time, without a GPU (in a process of its own: here triton interprets): each kernel until layouts are
    chosen, in make soak to a cubin for sm_90, in all its forms. None has a matmul that Triton miscompiles there."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.harness.compile_kernels", which, part, "3"],
        capture_output=True,
        text=True,
        timeout=280 if which == "layouts" else 900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("sm_90") >= 6, done.stdout
