"""Every op against a plain autograd formula in float64, odd shapes too; alone and over tensor-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.base.rng import keep_mask
from phalanx.comm.axis import Axis
from phalanx.comm.mesh import Mesh
from phalanx.layout.box import cut
from phalanx.layout.grid import Grid
from phalanx.nn.dry_run import Allocations
from phalanx.ops.attention import backends, one_block
from phalanx.ops.attention.attention import ProbabilityDropout, attention, attention_with_dropout
from phalanx.ops.attention.flash import ByTorchFlash
from phalanx.ops.attention.kind import CAUSAL, NOTHING, AttentionKind, Learned, RelativeBias
from phalanx.ops.attention.relative_bias import Biased
from phalanx.ops.dense import cross_entropy
from phalanx.ops.dense.activation import gelu, swiglu
from phalanx.ops.dense.cross_entropy import linear_cross_entropy
from phalanx.ops.dense.dropout import dropout
from phalanx.ops.dense.embedding import embedding, learned_positions
from phalanx.ops.dense.head_norm import norm_rope
from phalanx.ops.dense.matmul import gather_matmul, matmul_scatter
from phalanx.ops.dense.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from phalanx.ops.dense.relu2 import relu2, relu2_rows
from phalanx.ops.dense.rope import rope, rotary_table
from phalanx.ops.dense.rope_scaling import inverse_frequencies
from phalanx.sequence.batch import IGNORE, Batch

ONE = Axis("tp")


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass
class Op:
    """An op, its plain formula, the shapes of its tensors, and which of them are parameters."""

    op: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    params: tuple[int, ...] = ()

    def inputs(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        return [normal(*s, seed=i + 1, dtype=dtype).requires_grad_() for i, s in enumerate(self.shapes)]


def plain_rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-3) * w


def plain_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def plain_swiglu(x: Tensor) -> Tensor:
    gate, up = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
    return gate / (1 + torch.exp(-gate)) * up


IDS = torch.tensor([4, 8, 0, 6, 6, 9, 3, 8, 12, 4])  # 4..8 are held, 6 and 8 and 4 twice


def plain_embedding(w: Tensor) -> Tensor:
    rows = [w[i - 4] if 4 <= i <= 8 else torch.zeros_like(w[0]) for i in IDS.tolist()]
    return torch.stack(rows)


LABELS = torch.tensor([3, 0, IGNORE, 10, 10, IGNORE, 5])


def plain_cross_entropy(x: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(x @ w[:11].t(), LABELS, ignore_index=IGNORE, reduction="sum")  # rows 11 and 12 are padding


POSITIONS = torch.tensor([0, 1, 5, 2, 1000])
TABLE = rotary_table(POSITIONS, inverse_frequencies(6, 100.0), torch.float64)


def plain_rope(x: Tensor) -> Tensor:
    """Features i and i + K/2 are one complex number, turned by position * theta^(-2i/K); Su et al. 2021, equation
    34."""
    angle = POSITIONS.double()[:, None] * 100.0 ** (-torch.arange(3, dtype=torch.float64) / 3)
    transposed = torch.complex(x[:, :3, :3], x[:, :3, 3:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((torch.cat((transposed.real, transposed.imag), -1), x[:, 3:]), 1)


def make_batch(sequences: int, length: int, documents: list[int] | None = None) -> Batch:
    n = sequences * length
    zero, docs = torch.zeros(n, dtype=torch.int64), None if documents is None else torch.tensor(documents)
    return Batch(zero, zero, zero, torch.arange(sequences).repeat_interleave(length) + 40, sequences, length, docs)


UNIFORM, PACKED = (
    make_batch(2, 5),
    make_batch(2, 5, [0, 0, 1, 1, 1, 1, 2, 3, 3, 3]),
)  # document 1 runs on into sequence 2 by number
ODD, ODD_PACKED = make_batch(2, 7), make_batch(1, 8, [0, 0, 0, 0, 0, 1, 2, 2])
PREFIXED = replace(
    PACKED, prefix=torch.tensor([1, 0, 1, 1, 0, 0, 0, 1, 1, 1]), _made={}
)  # the last document is all prefix


def plain_attention(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    batch: Batch,
    keep: Tensor | None = None,
    p: float = 0.0,
    kind: AttentionKind = CAUSAL,
    sinks: Tensor | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T scale) v token by token; `keep` (sequences, heads, S, S); a sink is one more score, whose value
    is zero; `table` (buckets, heads): bias of distances."""
    rows, length = [], batch.seq_length
    scale = 1 / math.sqrt(qkv.shape[-1]) if kind.scale is None else kind.scale
    for t in range(batch.num_tokens):
        s, i = divmod(t, length)
        sees = [
            s * length + j
            for j in range(length)
            if kind.direction == "both" or j <= i or (kind.direction == "prefix" and batch.prefix[s * length + j])
            if batch.documents is None or batch.documents[s * length + j] == batch.documents[t]
        ]
        sees = [j for j in sees if kind.window is None or abs(t - j) < kind.window]
        if kind.chunk is not None:  # counted from the document's first token
            start = min(
                j
                for j in range(s * length, t + 1)
                if batch.documents is None or batch.documents[j] == batch.documents[t]
            )
            sees = [j for j in sees if (j - start) // kind.chunk == (t - start) // kind.chunk]
        out = []
        for h in range(heads):
            g = h // (heads // kv_heads)
            scores = torch.stack([qkv[t, h] @ qkv[j, heads + g] for j in sees]) * scale
            if kind.soft_cap is not None:
                scores = kind.soft_cap * torch.tanh(scores / kind.soft_cap)
            if table is not None:
                scores = scores + torch.stack([table[plain_bucket(j - t, kind.bias), h] for j in sees])
            more = [] if sinks is None else [sinks[h : h + 1]]
            probs = torch.softmax(torch.cat([scores, *more]), 0)[: len(sees)]
            if keep is not None:
                probs = probs * keep[s, h, i, [j % length for j in sees]] / (1 - p)
            out.append(sum(a * qkv[j, heads + kv_heads + g] for a, j in zip(probs, sees)))
        rows.append(torch.cat(out))
    return torch.stack(rows)


def plain_bucket(distance: int, bias: RelativeBias) -> int:
    """T5's bucket of a key so many tokens after its query, from the paper's words: one side's nearer half of the
    distances have a bucket each, the others share some by logarithm up to the largest."""
    side, first = bias.buckets, 0
    if bias.bidirectional:
        side, first = side // 2, side // 2 if distance > 0 else 0
    n = abs(distance) if bias.bidirectional else max(0, -distance)
    exact = side // 2
    if n < exact:
        return first + n
    grown = math.log(n / exact) / math.log(bias.max_distance / exact) * (side - exact)
    return first + min(side - 1, exact + int(grown + 1e-9))


def rotated(
    x: Tensor, heads: int, kv_heads: int, sequences: int, table: tuple[Tensor, Tensor] | None, kernels: str = "auto"
) -> Tensor:
    """What rope takes apart, packed again."""
    return torch.cat(rope(x, heads, kv_heads, sequences, table, kernels), 1).transpose(1, 2).flatten(0, 1)


def normed_rotated(
    x: Tensor,
    q: Tensor,
    k: Tensor,
    heads: int,
    kv_heads: int,
    sequences: int,
    table: tuple[Tensor, Tensor] | None,
    kernels: str = "auto",
) -> Tensor:
    """What norm_rope takes apart, packed again."""
    return (
        torch.cat(norm_rope(x, q, k, 1e-3, heads, kv_heads, sequences, table, kernels), 1).transpose(1, 2).flatten(0, 1)
    )


def plain_norm_rope(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return plain_rope(torch.cat((plain_rms_norm(x[:, :2], q), plain_rms_norm(x[:, 2:3], k), x[:, 3:]), 1))


def attend(
    x: Tensor, heads: int, kv_heads: int, batch: Batch, kind: AttentionKind = CAUSAL, learned: Learned = NOTHING
) -> Tensor:
    return attention(*rope(x, heads, kv_heads, batch.num_sequences, None), batch, kind, learned)


def attending(heads: int, kv_heads: int, name: str, width: int, p: float | None = None, **kind) -> Op:
    """Attention of one kind; documents and odd lengths come with the batch, a global of this module. p: of dropout, by
    its formula."""
    kind, tokens = AttentionKind(**kind), globals()[name].num_tokens
    shapes = {"sinks": (heads,)} if kind.sinks else {}
    shapes |= {} if kind.bias is None else {"bias": (kind.bias.buckets, heads)}

    def op(x: Tensor, *given: Tensor) -> Tensor:
        learned, batch = Learned(**dict(zip(shapes, given))), globals()[name]
        if p is None:
            return attend(x, heads, kv_heads, batch, kind, learned)
        return attend_dropping(x, heads, kv_heads, batch, p, 1, 2, 0, kind=kind, learned=learned)

    def plain(x: Tensor, *given: Tensor) -> Tensor:
        given, batch = dict(zip(shapes, given)), globals()[name]
        return plain_attention(x, heads, kv_heads, batch, kind=kind, sinks=given.get("sinks"), table=given.get("bias"))

    packed = (tokens, heads + 2 * kv_heads, width)
    return Op(op, plain, (packed, *shapes.values()), tuple(range(1, 1 + len(shapes))))


def attend_dropping(
    x: Tensor,
    heads: int,
    kv_heads: int,
    batch: Batch,
    *dropout: Any,
    kind: AttentionKind = CAUSAL,
    learned: Learned = NOTHING,
) -> Tensor:
    heads_of = rope(x, heads, kv_heads, batch.num_sequences, None)
    return attention_with_dropout(heads_of, batch, kind, learned, ProbabilityDropout(*dropout))


def plain_add_norm(x: Tensor, delta: Tensor, w: Tensor) -> Tensor:
    return torch.cat((x + delta, plain_rms_norm(x + delta, w)))


SEED = torch.tensor(0.37, dtype=torch.float64)


def seeded_cross_entropy(x: Tensor, w: Tensor, kernels: str = "auto") -> Tensor:
    """With the gradient of the loss told beforehand; what backward is then given does not matter."""
    return linear_cross_entropy(x, w, LABELS, 0, 11, ONE, SEED, kernels)


OPS = {
    "gather_matmul": Op(lambda x, w: gather_matmul(x, w, ONE), lambda x, w: x @ w.t(), ((7, 5), (3, 5)), (1,)),
    "gather_matmul with bias": Op(
        lambda x, w, b: gather_matmul(x, w, ONE, b), lambda x, w, b: x @ w.t() + b, ((1, 5), (3, 5), (3,)), (1, 2)
    ),
    "matmul_scatter": Op(lambda x, w: matmul_scatter(x, w, ONE), lambda x, w: x @ w.t(), ((7, 5), (3, 5)), (1,)),
    "matmul_scatter with bias": Op(
        lambda x, w, b: matmul_scatter(x, w, ONE, b), lambda x, w, b: x @ w.t() + b, ((7, 1), (3, 1), (3,)), (1, 2)
    ),
    "rms_norm": Op(lambda x, w: rms_norm(x, w, 1e-3), plain_rms_norm, ((5, 7), (7,)), (1,)),
    "add_rms_norm": Op(
        lambda x, d, w: torch.cat(add_rms_norm(x, d, w, 1e-3)), plain_add_norm, ((5, 7), (5, 7), (7,)), (2,)
    ),
    "norm of the stream": Op(
        lambda x, w: torch.cat(add_rms_norm(x, None, w, 1e-3)),
        lambda x, w: torch.cat((x, plain_rms_norm(x, w))),
        ((5, 7), (7,)),
        (1,),
    ),
    "add_layer_norm": Op(
        lambda x, d, w, b: torch.cat(add_layer_norm(x, d, w, b, 1e-3)),
        lambda x, d, w, b: torch.cat((x + d, F.layer_norm(x + d, (7,), w, b, 1e-3))),
        ((5, 7), (5, 7), (7,), (7,)),
        (2, 3),
    ),
    "layer_norm": Op(
        lambda x, w, b: layer_norm(x, w, b, 1e-3),
        lambda x, w, b: F.layer_norm(x, (7,), w, b, 1e-3),
        ((5, 7), (7,), (7,)),
        (1, 2),
    ),
    "swiglu": Op(swiglu, plain_swiglu, ((5, 6),)),
    "gelu": Op(gelu, plain_gelu, ((5, 3),)),
    "relu2": Op(relu2, lambda x: F.relu(x) ** 2, ((5, 3),)),
    "relu2_rows": Op(
        lambda x, w: relu2_rows(x, torch.tensor([2, 2, 5], device=x.device), w),  # a kernel leaves rows past them alone
        lambda x, w: F.relu(x) ** 2 * w[:, None],
        ((5, 3), (5,)),
    ),
    "rope": Op(lambda x: rotated(x, 2, 1, 1, TABLE), plain_rope, ((5, 4, 6),)),
    "norm_rope": Op(
        lambda x, q, k: normed_rotated(x, q, k, 2, 1, 1, TABLE), plain_norm_rope, ((5, 4, 6), (6,), (6,)), (1, 2)
    ),
    "norm_rope, no angles": Op(
        lambda x, q, k: normed_rotated(x, q, k, 3, 2, 1, None),
        lambda x, q, k: torch.cat((plain_rms_norm(x[:, :3], q), plain_rms_norm(x[:, 3:5], k), x[:, 5:]), 1),
        ((4, 7, 5), (5,), (5,)),
        (1, 2),
    ),
    "taking heads apart": Op(lambda x: rotated(x, 2, 1, 1, None), lambda x: x, ((5, 4, 5),)),
    "embedding": Op(lambda w: embedding(IDS, w, 4, 5, ONE), plain_embedding, ((7, 3),), (0,)),
    "learned_positions": Op(lambda w: learned_positions(IDS, w), lambda w: F.embedding(IDS, w), ((13, 3),), (0,)),
    "linear_cross_entropy": Op(
        lambda x, w: linear_cross_entropy(x, w, LABELS, 0, 11, ONE), plain_cross_entropy, ((7, 5), (13, 5)), (1,)
    ),
    "attention": Op(lambda x: attend(x, 2, 2, UNIFORM), lambda x: plain_attention(x, 2, 2, UNIFORM), ((10, 6, 3),)),
    "attention, grouped": Op(
        lambda x: attend(x, 6, 2, UNIFORM), lambda x: plain_attention(x, 6, 2, UNIFORM), ((10, 10, 3),)
    ),
    "attention, grouped, documents": Op(
        lambda x: attend(x, 4, 2, PACKED), lambda x: plain_attention(x, 4, 2, PACKED), ((10, 8, 2),)
    ),
    "attention, window": attending(2, 2, "UNIFORM", 3, window=3),
    "attention, window, documents": attending(4, 2, "PACKED", 2, window=3, scale=0.9),
    "attention, window as long as the sequence": attending(2, 1, "UNIFORM", 2, window=5),
    "attention, window of 1": attending(2, 2, "UNIFORM", 3, window=1),
    "attention, window, blocks": attending(4, 2, "ODD", 2, window=2, scale=0.3),
    "attention, window, blocks, documents": attending(4, 2, "ODD_PACKED", 2, window=3),
    "attention, soft cap": attending(4, 2, "UNIFORM", 3, soft_cap=0.7, scale=0.9),
    "attention, soft cap, documents, window": attending(4, 2, "ODD_PACKED", 2, soft_cap=1.5, window=3),
    "attention, soft cap, sinks": attending(4, 2, "UNIFORM", 3, sinks=True, soft_cap=0.7),
    "attention, both directions": attending(2, 1, "UNIFORM", 3, direction="both"),
    "attention, both directions, documents, window": attending(4, 2, "PACKED", 2, direction="both", window=2),
    "attention, chunks": attending(4, 2, "ODD", 2, chunk=3),
    "attention, chunks, both directions, documents": attending(2, 2, "ODD_PACKED", 2, chunk=3, direction="both"),
    "attention, chunks, documents": attending(4, 2, "PACKED", 2, chunk=3),
    "attention, chunks, window, sinks": attending(4, 2, "ODD_PACKED", 2, chunk=4, window=2, sinks=True),
    "attention, both directions, window, blocks": attending(4, 2, "ODD", 2, direction="both", window=2),
    "attention, both directions, window, blocks, documents": attending(
        4, 2, "ODD_PACKED", 2, direction="both", window=2
    ),
    "attention, both directions, sinks": attending(2, 1, "UNIFORM", 3, direction="both", sinks=True),
    "attention, both directions, soft cap": attending(4, 2, "PACKED", 3, direction="both", soft_cap=0.7),
    "attention, prefix": attending(4, 2, "PREFIXED", 2, direction="prefix"),
    "attention, prefix, window, soft cap": attending(4, 2, "PREFIXED", 2, direction="prefix", window=2, soft_cap=0.7),
    "attention, bias": attending(4, 2, "UNIFORM", 3, bias=RelativeBias(6, 5), scale=1.0),
    "attention, bias, both directions": attending(4, 4, "ODD", 2, direction="both", bias=RelativeBias(8, 5, True)),
    "attention, bias, documents, sinks": attending(4, 2, "PACKED", 2, bias=RelativeBias(6, 5), sinks=True),
    "attention, bias, window, blocks": attending(4, 2, "ODD_PACKED", 2, bias=RelativeBias(4, 3), window=2),
    "attention, bias, both, window, blocks, soft cap": attending(
        4, 2, "ODD_PACKED", 2, direction="both", bias=RelativeBias(8, 3, True), window=2, soft_cap=0.8
    ),
    "attention, p = 0, both directions, bias": attending(
        4, 2, "PACKED", 2, 0.0, direction="both", bias=RelativeBias(8, 5, True)
    ),
    "attention, p = 0, chunks, sinks, soft cap": attending(
        4, 2, "ODD_PACKED", 2, 0.0, chunk=3, sinks=True, soft_cap=0.9
    ),
    "attention, sinks": attending(4, 2, "UNIFORM", 3, sinks=True),
    "attention, sinks, documents": attending(6, 2, "PACKED", 2, sinks=True, scale=0.8),
    "attention, sinks, window": attending(2, 2, "UNIFORM", 3, sinks=True, window=4),
    "attention, sinks, blocks, documents": attending(4, 2, "ODD_PACKED", 2, sinks=True, window=2),
    "attention_with_dropout, p = 0": Op(
        lambda x: attend_dropping(x, 4, 2, PACKED, 0.0, 1, 2, 0),
        lambda x: plain_attention(x, 4, 2, PACKED),
        ((10, 8, 2),),
    ),
}


def gradients(fn: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    y = fn(*inputs)
    return y.detach(), list(torch.autograd.grad(y, inputs, normal(*y.shape, seed=99, dtype=y.dtype)))


@pytest.mark.parametrize("name", OPS)
def test_forward_and_gradients(name):
    """Truth: the plain formula and autograd; then finite differences."""
    op = OPS[name]
    found, expected = gradients(op.op, op.inputs()), gradients(op.plain, op.inputs())
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(op.op, op.inputs(), atol=1e-6)


@pytest.mark.parametrize("name", [n for n in OPS if OPS[n].params])
def test_gradients_accumulate(name):
    """Truth: what `.grad` held plus autograd's gradient; twice; without `.grad`, autograd's own accumulation."""
    op = OPS[name]
    inputs, before = op.inputs(), {i: normal(*op.shapes[i], seed=50 + i) for i in op.params}
    buffers = {}
    for i in op.params[:1]:  # the others have none: both ways in one call
        buffers[i] = inputs[i].grad = before[i].clone()
    _, expected = gradients(op.plain, op.inputs())
    for _ in range(2):
        y = op.op(*inputs)
        y.backward(normal(*y.shape, seed=99))
    for i, (p, g) in enumerate(zip(inputs, expected)):
        torch.testing.assert_close(p.grad, 2 * g + (before[i] if i in buffers else 0), rtol=1e-12, atol=1e-12)
    for i, buffer in buffers.items():
        assert inputs[i].grad is buffer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_low_precision_with_fp32_gradients(name, dtype):
    """Truth: the formula in float64 on the same rounded inputs, within a few roundings of the scale; weight
    gradients stay fp32."""
    op = OPS[name]
    inputs = op.inputs(dtype)
    exact, expected = gradients(op.plain, [x.detach().double().requires_grad_() for x in inputs])
    for i in op.params:
        inputs[i].grad_dtype = torch.float32
        inputs[i].grad = torch.zeros(op.shapes[i])
    y = op.op(*inputs)
    y.backward(normal(*y.shape, seed=99, dtype=y.dtype))
    rounding = 8 * torch.finfo(dtype).eps
    assert (y - exact).abs().max() <= rounding * exact.abs().max()
    for i, (p, g) in enumerate(zip(inputs, expected)):
        assert p.grad.dtype == (torch.float32 if i in op.params else dtype)
        assert (p.grad - g).abs().max() <= rounding * g.abs().max(), i


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weight_gradients_are_summed_unrounded(dtype):
    """Truth: float64 sums of the same rounded factors to fp32 precision: no product or partial sum went through 16
    bits."""
    x, dy, w, b = (
        normal(301, 7, dtype=dtype),
        normal(301, 5, seed=1, dtype=dtype),
        normal(5, 7, seed=2, dtype=dtype),
        normal(5, dtype=dtype),
    )
    expected = (dy.double().t() @ x.double(), dy.double().sum(0))
    for op in (gather_matmul, matmul_scatter):
        weight, bias = w.clone().requires_grad_(), b.clone().requires_grad_()
        for p in (weight, bias):
            p.grad_dtype, p.grad = torch.float32, torch.zeros(p.shape)
        op(x, weight, ONE, bias).backward(dy)
        torch.testing.assert_close((weight.grad.double(), bias.grad.double()), expected, rtol=1e-5, atol=1e-4)
    table = torch.zeros(2, 5, dtype=dtype, requires_grad=True)
    table.grad_dtype, table.grad = torch.float32, torch.zeros(2, 5)
    embedding(torch.zeros(301, dtype=torch.int64), table, 0, 2, ONE).backward(dy)
    torch.testing.assert_close(table.grad[0].double(), expected[1], rtol=1e-5, atol=1e-4)


def test_frozen_weights_get_no_gradient():
    """A weight that needs no gradient: the input's gradient is still right."""
    for name in ("gather_matmul with bias", "matmul_scatter with bias", "linear_cross_entropy"):
        op = OPS[name]
        x, *params = op.inputs()
        frozen = [p.detach() for p in params]
        (dx,) = torch.autograd.grad(op.op(x, *frozen).sum(), x)
        torch.testing.assert_close(dx, torch.autograd.grad(op.plain(x, *frozen).sum(), x)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 100])
def test_cross_entropy_in_chunks(monkeypatch, chunk):
    """Truth: F.cross_entropy; whatever the number of tokens at once, the last chunk being short too."""
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", chunk * 13)
    test_forward_and_gradients("linear_cross_entropy")
    test_gradients_accumulate("linear_cross_entropy")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_cross_entropy_of_extreme_logits(dtype):
    """Truth: F.cross_entropy in float64; logits around +-1e6 neither overflow nor lose the label."""
    x, w = normal(7, 5, dtype=dtype).mul(1e6).requires_grad_(), normal(13, 5, seed=1, dtype=dtype).requires_grad_()
    found, (dx, dw) = gradients(lambda x, w: linear_cross_entropy(x, w, LABELS, 0, 11, ONE), [x, w])
    y, (ex, ew) = gradients(plain_cross_entropy, [t.detach().double().requires_grad_() for t in (x, w)])
    for a, b in ((found, y), (dx, ex), (dw, ew)):
        assert a.isfinite().all()
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_cross_entropy_without_any_label():
    x, w = normal(3, 5).requires_grad_(), normal(13, 5, seed=1).requires_grad_()
    loss, grads = gradients(lambda x, w: linear_cross_entropy(x, w, torch.full((3,), IGNORE), 0, 11, ONE), [x, w])
    assert loss == 0 and all((g == 0).all() for g in grads)


@pytest.mark.parametrize("name", [n for n in OPS if "sinks" in n])
def test_plain_sinks(name, monkeypatch):
    """The reference implementation, which GPUs use for float64 and odd widths, is the same function."""
    monkeypatch.setitem(backends.BLOCKS.__dict__, "candidates", ())
    test_forward_and_gradients(name)
    test_low_precision_with_fp32_gradients(name, torch.bfloat16)


@pytest.mark.parametrize(
    "backend, masked, biased",
    [
        ("FLASH", False, False),
        ("CUDNN", False, False),
        ("EFFICIENT", False, False),
        ("EFFICIENT", True, False),
        ("EFFICIENT", False, True),
        ("EFFICIENT", True, True),
        ("DRY", True, True),
    ],
)
def test_gpu_backends_take_what_torch_wants(monkeypatch, backend, masked, biased):
    """On the meta device: torch checks types and number of arguments and gives the shapes that its kernels would."""
    shape = (2, 8, 40, 64)
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3))
    s = torch.empty(8, dtype=torch.bfloat16, device="meta", requires_grad=True)
    mask = torch.empty(1, 1, 40, 40, dtype=torch.bfloat16, device="meta") if masked else None
    how = backends.Scoring(mask, mask is None, 0.1)
    monkeypatch.setattr(one_block, "block_backend", lambda *_: getattr(backends, backend))
    bias, place = RelativeBias(32, 128), (range(40),)
    table = torch.empty(32, 8, dtype=torch.bfloat16, device="meta", requires_grad=True) if biased else None
    ids = torch.empty(40, dtype=torch.int64, device="meta")
    read = Biased.of(Batch(ids, ids, ids, ids, 1, 40), bias, place, place) if biased else None
    learned = Learned(s, table)
    y = one_block.attend_block(q, k, v, learned, how, read)
    y.backward(torch.empty_like(y))
    assert y.shape == q.grad.shape == k.grad.shape == v.grad.shape == shape and s.grad.shape == (8,)
    assert table is None or table.grad.shape == (32, 8)


@pytest.mark.parametrize("kind", [AttentionKind("both"), AttentionKind("both", window=9), AttentionKind(chunk=16)])
def test_flash_kernels_take_what_torch_wants(kind):
    """As above, inside documents."""
    q, k, v = (torch.empty(2, h, 40, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for h in (8, 2, 2))
    ids = torch.empty(80, dtype=torch.int64, device="meta")
    y = ByTorchFlash.attend(q, k, v, Batch(ids, ids, ids, ids, 2, 40, ids, most_documents=9), kind, NOTHING)
    y.backward(torch.empty_like(y))
    assert y.shape == (80, 512) and q.grad.shape == q.shape and k.grad.shape == v.grad.shape == k.shape


def test_long_windows_make_no_square():
    """Truth: the full mask, at a length where the square would show in what forward makes."""
    long = make_batch(1, 300, [t // 70 for t in range(300)])
    x = normal(300, 4, 2)
    with Allocations() as seen:
        found = attend(x, 2, 1, long, AttentionKind(window=16))
    assert seen.peak < 300 * 300 * 8 / 3
    torch.testing.assert_close(
        found, plain_attention(x, 2, 1, long, kind=AttentionKind(window=16)), rtol=1e-12, atol=1e-12
    )


P = 0.25
HEADS, LENGTH = 4, 24
ROWS = make_batch(3, LENGTH)


def test_attention_dropout_drops_probabilities():
    """Truth: the plain formula with the mask of rng.keep_mask, gradients too."""
    places = torch.arange(5).repeat(2).view(2, 5)
    keep = torch.stack([keep_mask(P, 9, 2, 0, (PACKED.samples.view(2, 5), places), 5, 3 + h) for h in range(4)], 1)
    x = [normal(10, 8, 2).requires_grad_()]
    found = gradients(lambda x: attend_dropping(x, 4, 2, PACKED, P, 9, 2, 3), x)
    torch.testing.assert_close(
        found, gradients(lambda x: plain_attention(x, 4, 2, PACKED, keep, P), x), rtol=1e-12, atol=1e-12
    )


def dropped(qkv: Tensor, heads: int, kv_heads: int, first_head: int, p: float = P) -> Tensor:
    return attend_dropping(qkv, heads, kv_heads, ROWS, p, 9, 2, first_head)


def test_attention_dropout_keeps_the_right_share():
    """With values that are one-hot in the key position the output is the dropped probabilities themselves: count the
    zeros."""
    qkv = normal(ROWS.num_tokens, 3 * HEADS, LENGTH) * 0.1
    qkv[:, 2 * HEADS :] = torch.eye(LENGTH, dtype=torch.float64).repeat(3, 1)[:, None]
    probs = dropped(qkv, HEADS, HEADS, 0).view(3, LENGTH, HEADS, LENGTH).transpose(1, 2)
    seen = torch.ones(LENGTH, LENGTH).tril().bool()
    assert (probs[..., ~seen] == 0).all()
    kept = (probs[..., seen] != 0).double()
    assert abs(kept.mean().item() - (1 - P)) < 5 * math.sqrt(P * (1 - P) / kept.numel())
    full = dropped(qkv, HEADS, HEADS, 0, 0.0).view(3, LENGTH, HEADS, LENGTH).transpose(1, 2)
    torch.testing.assert_close(probs[probs != 0], (full / (1 - P))[probs != 0], rtol=1e-12, atol=0)
    patterns = (probs != 0).flatten(2)[:, :, None] == (probs != 0).flatten(2)[:, None]
    assert (patterns.all(-1).sum((1, 2)) == HEADS).all()  # no two heads share a mask


def test_attention_dropout_is_the_same_in_two_head_splits():
    """Truth: all heads on one rank."""
    qkv = normal(ROWS.num_tokens, 3 * HEADS, 4)
    q, k, v = qkv.split(HEADS, 1)
    halves = [dropped(torch.cat([t[:, a : a + 2] for t in (q, k, v)], 1), 2, 2, a) for a in (0, 2)]
    torch.testing.assert_close(
        torch.cat([h.view(-1, 2, 4) for h in halves], 1).flatten(1),
        dropped(qkv, HEADS, HEADS, 0),
        rtol=1e-14,
        atol=1e-15,
    )


def test_dropout_zeroes_and_scales():
    """Each element is 0 or x / (1 - p), its gradient the same factor; rows cut elsewhere get the same bits."""
    rows = (torch.arange(300) // 30, torch.arange(300) % 30)
    x = normal(300, 17).requires_grad_()
    y = dropout(x, P, 3, 1, 2, rows)
    factor = y.detach() / x.detach()
    assert torch.equal(factor == 0, ~keep_mask(P, 3, 1, 2, rows, 17))
    torch.testing.assert_close(
        factor[factor != 0], torch.full_like(factor[factor != 0], 1 / (1 - P)), rtol=1e-14, atol=0
    )
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], factor, rtol=1e-14, atol=0)
    parts = [dropout(x[a:b], P, 3, 1, 2, (rows[0][a:b], rows[1][a:b])) for a, b in ((0, 7), (7, 100), (100, 300))]
    assert torch.equal(torch.cat(parts), y)
    assert dropout(x, 0.0, 3, 1, 2, rows) is x


# over ranks: each returns (name, its output, its gradients); the parent puts the pieces together

TOKENS, WIDTH, INNER, VOCAB = 6, 5, 7, 11


def run_ops(rank: int, world: int, holdings: list[tuple[int, int]]) -> dict:
    """Every communicating op on this rank's pieces; `holdings`: the vocabulary rows (start, stop) of each rank."""
    tp = Mesh(Grid(tp=world), rank).tp
    (a, b), (v0, v1) = cut(INNER, world)[rank], holdings[rank]
    mine = slice(rank * TOKENS // world, (rank + 1) * TOKENS // world)
    rows = max(stop - start for start, stop in holdings)
    table = torch.zeros(rows, WIDTH, dtype=torch.float64)
    table[: v1 - v0] = normal(VOCAB, WIDTH, seed=4)[v0:v1]
    calls = {
        "gather_matmul": (
            lambda x, w, c: gather_matmul(x, w, tp, c),
            [normal(TOKENS, WIDTH)[mine], normal(INNER, WIDTH, seed=1)[a:b], normal(INNER, seed=2)[a:b]],
            (slice(None), slice(a, b)),
        ),
        "matmul_scatter": (
            lambda h, w, c: matmul_scatter(h, w, tp, c),
            [normal(TOKENS, INNER)[:, a:b], normal(WIDTH, INNER, seed=1)[:, a:b], normal(WIDTH, seed=2)],
            (mine,),
        ),
        "embedding": (lambda w: embedding(TP_IDS, w, v0, v1 - v0, tp), [table], (mine,)),
        "cross_entropy": (
            lambda x, w: linear_cross_entropy(x, w, TP_LABELS, v0, v1 - v0, tp),
            [normal(TOKENS, WIDTH)[mine], table],
            (),
        ),
    }
    found = {}
    for name, (op, inputs, part) in calls.items():
        inputs = [x.clone().requires_grad_() for x in inputs]
        y = op(*inputs)
        y.backward(normal(*PLAIN[name][2], seed=9)[part])
        found[name] = (y.detach().numpy(), [x.grad.numpy() for x in inputs])
    return found


TP_IDS, TP_LABELS = torch.tensor([0, 10, 4, 4, 7, 3]), torch.tensor([10, 0, IGNORE, 5, 5, 3])
PLAIN = {  # formula, shapes of its inputs, shape of its output
    "gather_matmul": (lambda x, w, c: x @ w.t() + c, ((TOKENS, WIDTH), (INNER, WIDTH), (INNER,)), (TOKENS, INNER)),
    "matmul_scatter": (lambda h, w, c: h @ w.t() + c, ((TOKENS, INNER), (WIDTH, INNER), (WIDTH,)), (TOKENS, WIDTH)),
    "embedding": (lambda w: F.embedding(TP_IDS, w), ((VOCAB, WIDTH),), (TOKENS, WIDTH)),
    "cross_entropy": (
        lambda x, w: F.cross_entropy(x @ w.t(), TP_LABELS, ignore_index=IGNORE, reduction="sum"),
        ((TOKENS, WIDTH), (VOCAB, WIDTH)),
        (),
    ),
}
SEEDS = {"embedding": (4,), "cross_entropy": (0, 4)}


HOLDINGS = [[(0, 6), (6, 11)], [(0, 4), (4, 8), (8, 11)], [(0, 11), (11, 11)], [(0, 0), (0, 1), (1, 11)]]


@pytest.mark.parametrize("holdings", HOLDINGS, ids=str)
def test_ops_over_ranks(ranks, holdings):
    """Truth: the plain formula on the whole tensors. Inner features and vocabulary are cut unevenly; a rank may hold
    no row of it."""
    results = ranks.run("tests.ops.test_ops:run_ops", len(holdings), holdings)
    held = [stop - start for start, stop in holdings]
    cat = lambda parts, dim=0: torch.cat(parts, dim)  # noqa: E731
    rows = lambda parts: torch.cat([p[:n] for p, n in zip(parts, held)])  # noqa: E731
    joins = {  # how the ranks' pieces of the output and of each gradient make the whole
        "gather_matmul": (lambda p: cat(p, 1), [cat, cat, cat]),
        "matmul_scatter": (cat, [lambda p: cat(p, 1), lambda p: cat(p, 1), sum]),
        "embedding": (cat, [rows]),
        "cross_entropy": (lambda p: p[0], [cat, rows]),
    }
    for name, (plain, shapes, out_shape) in PLAIN.items():
        inputs = [normal(*s, seed=seed).requires_grad_() for s, seed in zip(shapes, SEEDS.get(name, (0, 1, 2)))]
        y = plain(*inputs)
        expected = torch.autograd.grad(y, inputs, normal(*out_shape, seed=9))
        outputs = [torch.as_tensor(r[name][0]) for r in results]
        join, joins_of_grads = joins[name]
        torch.testing.assert_close(join(outputs), y.detach(), rtol=1e-12, atol=1e-12)
        for i, (join, e) in enumerate(zip(joins_of_grads, expected)):
            torch.testing.assert_close(
                join([torch.as_tensor(r[name][1][i]) for r in results]), e, rtol=1e-12, atol=1e-12
            )
        if name == "cross_entropy":
            assert all(torch.equal(o, outputs[0]) for o in outputs)
        if name in ("embedding", "cross_entropy"):
            assert all(
                (torch.as_tensor(r[name][1][-1][n:]) == 0).all() for r, n in zip(results, held)
            )  # padding rows stay untouched
