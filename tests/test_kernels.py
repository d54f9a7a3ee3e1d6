"""Every Triton kernel against its reference implementation, forward and each gradient, odd shapes too, in Triton's
interpreter on the CPU.

On a GPU the same ops run compiled: tests/gpu. Here also: each kernel compiles for sm_90 without a GPU.
"""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.comm.overlap import add_pieces
from phalanx.comm.sum_kernel import add_pieces_, sum_parts
from phalanx.ops.dense import cross_entropy
from phalanx.ops.dense.activation import swiglu
from phalanx.ops.dense.cross_entropy import linear_cross_entropy
from phalanx.ops.dense.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from phalanx.ops.dense.rope import rotary_table
from phalanx.ops.dense.rope_scaling import inverse_frequencies
from phalanx.ops.op import use_triton
from phalanx.ops.optimizer.adamw import AdamOptions, AdamRange, adamw_, adamw_reference_
from phalanx.sequence.batch import IGNORE
from tests.test_ops import normal, normed_rotated, rotated

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and sys.platform != "linux", reason="triton has wheels for Linux alone"
)
ONE = Axis("tp")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def table(tokens: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return rotary_table(torch.arange(tokens) * 7, inverse_frequencies(width, 100.0), dtype)


def labels(tokens: int, vocab: int) -> Tensor:
    drawn = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(5))
    drawn[::3] = IGNORE
    return drawn


def cross(x: Tensor, w: Tensor, kernels: str, seed: Tensor | None = None, held: int = 0) -> Tensor:
    """Rows `held`.. of the vocabulary are on other ranks."""
    vocab = w.shape[0] - 3
    return linear_cross_entropy(x, w, labels(len(x), vocab + held), 0, vocab, ONE, seed, kernels)


SEED = torch.tensor(0.37, dtype=torch.float64)
CASES = {  # name -> (op of tensors and `kernels`, shapes, which are parameters)
    "rms_norm": (lambda x, w, k: rms_norm(x, w, 1e-3, k), ((5, 7), (7,)), (1,)),
    "rms_norm, wide": (lambda x, w, k: rms_norm(x, w, 1e-6, k), ((9, 1100), (1100,)), (1,)),
    "rms_norm, several tiles": (lambda x, w, k: rms_norm(x, w, 1e-6, k), ((91, 300), (300,)), (1,)),
    "add_rms_norm": (lambda x, d, w, k: torch.cat(add_rms_norm(x, d, w, 1e-3, k)), ((6, 40), (6, 40), (40,)), (2,)),
    "stream and rms_norm": (lambda x, w, k: torch.cat(add_rms_norm(x, None, w, 1e-3, k)), ((1, 64), (64,)), (1,)),
    "layer_norm": (lambda x, w, b, k: layer_norm(x, w, b, 1e-3, k), ((5, 7), (7,), (7,)), (1, 2)),
    "add_layer_norm": (
        lambda x, d, w, b, k: torch.cat(add_layer_norm(x, d, w, b, 1e-5, k)),
        ((13, 33), (13, 33), (33,), (33,)),
        (2, 3),
    ),
    "swiglu": (lambda x, k: swiglu(x, k), ((3, 14),), ()),
    "swiglu, wide": (lambda x, k: swiglu(x, k), ((2, 2 * 1030),), ()),
    "rope": (lambda x, k: rotated(x, 3, 2, 2, table(10, 6, x.dtype), k), ((10, 7, 6),), ()),
    "rope, one head": (lambda x, k: rotated(x, 1, 1, 1, table(5, 64, x.dtype), k), ((5, 3, 64),), ()),
    "norm_rope": (
        lambda x, q, y, k: normed_rotated(x, q, y, 3, 2, 2, table(10, 6, x.dtype), k),
        ((10, 7, 6), (6,), (6,)),
        (1, 2),
    ),
    "norm_rope, one head": (
        lambda x, q, y, k: normed_rotated(x, q, y, 1, 1, 1, table(5, 64, x.dtype), k),
        ((5, 3, 64), (64,), (64,)),
        (1, 2),
    ),
    "norm_rope, no angles": (
        lambda x, q, y, k: normed_rotated(x, q, y, 5, 1, 3, None, k),
        ((9, 7, 20), (20,), (20,)),
        (1, 2),
    ),
    "taking heads apart": (lambda x, k: rotated(x, 4, 4, 3, None, k), ((6, 12, 8),), ()),
    "cross entropy": (cross, ((7, 5), (13, 5)), (1,)),
    "cross entropy, many ids": (cross, ((4, 3), (4200, 3)), (1,)),
    "cross entropy, ids held elsewhere": (lambda x, w, k: cross(x, w, k, None, 9), ((8, 5), (13, 5)), (1,)),
    "cross entropy, gradient in forward": (lambda x, w, k: cross(x, w, k, SEED), ((7, 5), (13, 5)), (1,)),
}


def run(name: str, dtype: torch.dtype, kernels: str) -> list[Tensor]:
    op, shapes, params = CASES[name]
    inputs = [normal(*s, seed=i + 1, dtype=dtype).requires_grad_() for i, s in enumerate(shapes)]
    for i in params:
        inputs[i].grad_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        inputs[i].grad = torch.ones(shapes[i], dtype=inputs[i].grad_dtype)
    y = op(*inputs, kernels)
    y.backward(normal(*y.shape, seed=99, dtype=y.dtype))
    return [y.detach(), *(x.grad for x in inputs)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equals_its_plain_twin(name, dtype):
    """Truth: the reference implementation in float64 on the same rounded inputs, which tests/test_ops.py compares with
    formulas; within a few roundings."""
    found = run(name, dtype, "triton")
    truth = [t.double() for t in exact(name, dtype)]
    rounding = {torch.float64: 1e-13, torch.float32: 2e-6}.get(dtype, 8 * torch.finfo(dtype).eps)
    for i, (a, b) in enumerate(zip(found, truth)):
        assert (a.double() - b).abs().max() <= rounding * b.abs().max(), (name, i)


def exact(name: str, dtype: torch.dtype) -> list[Tensor]:
    op, shapes, params = CASES[name]
    inputs = [normal(*s, seed=i + 1, dtype=dtype).double().requires_grad_() for i, s in enumerate(shapes)]
    for i in params:
        inputs[i].grad = torch.ones(shapes[i], dtype=torch.float64)
    y = op(*inputs, "plain")
    upstream = torch.float32 if "cross" in name and dtype in (torch.bfloat16, torch.float16) else dtype
    y.backward(normal(*y.shape, seed=99, dtype=upstream).double())
    return [y.detach(), *(x.grad for x in inputs)]


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
    whole = run("cross entropy, gradient in forward", torch.float64, "triton")
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS_TRITON", elements)
    torch.testing.assert_close(
        run("cross entropy, gradient in forward", torch.float64, "triton"), whole, rtol=1e-14, atol=1e-14
    )


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


def test_auto_is_plain_on_the_cpu():
    assert (
        not use_triton("auto", torch.ones(1))
        and use_triton("triton", torch.ones(1))
        and not use_triton("plain", torch.ones(1))
    )


@pytest.mark.parametrize("part", range(3))
def test_kernels_compile_for_hopper(part):
    """Ahead of time, without a GPU: each kernel to a cubin for sm_90 (in a process of its own: here triton
    interprets). In parts, since all of them take two minutes where Triton's cache is empty."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels", str(part), "3"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("sm_90") >= 9, done.stdout
