"""The gated delta rule: a recurrence over the tokens of a document that corrects what its state holds under a key.

    S   = diag(exp(decay_t)) S_{t-1}                             S (K, V) of each value head
    S_t = S + beta_t k_t (v_t - S^T k_t)^T                       y_t = scale S_t^T q_t

Yang et al., "Gated Delta Networks", 2024 (one decay of each head); Kimi Team, "Kimi Linear", 2025 (one of each feature
of a key). The reference implementation works in chunks of C tokens (Yang et al., "Parallelizing Linear Transformers
with the Delta Rule over Sequence Length", 2024). With e_t the sum of decays over the tokens of t's document in the
chunk up to t, and S the state before the chunk, the corrections u_t = beta_t (v_t - S^T k_t) of a chunk solve

    (1 + A) u = beta (v - (k exp(e)) S)                          A_ts = beta_t sum_c k_tc k_sc exp(e_tc - e_sc), s < t

a unit triangular system. What is left is a masked matmul and the state after the chunk:

    y_t = scale ((q_t exp(e_t)) S + sum_{s <= t} sum_c q_tc k_sc exp(e_tc - e_sc) u_s)
    S'  = exp(e_last) S + sum_s (k_s exp(e_last - e_s)) u_s^T

Tokens come as rows (ops.scan.rows). No state crosses from one document into the next. A row may begin with a state,
which the document of its first token goes on from, and leaves the one after its last token. Saved for backward: the
inputs, and the state before each chunk.

Shapes: R rows, L tokens of a row, HK heads of queries and keys of K features, HV heads of values of V features; value
heads share queries and keys in groups of HV / HK.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.base.dataclass import dataclass
from phalanx.ops.dense.activation import widened
from phalanx.ops.op import ALL_KERNELS, Case, Implementation, Kernels, Op, triton
from phalanx.ops.scan.rows import documents_of
from phalanx.ops.scan.scan import NOTHING_LEFT

CHUNK = 64
BLOCK = 16  # tokens; decays by feature are compared token by token inside it
EPS = 1e-6  # of the squared lengths of queries and keys


@dataclass(frozen=True)
class DeltaTiles:
    """How the Triton kernels are cut.

    values   features of values of a program that follows states from chunk to chunk
    back     the same of their gradients; warps and stages: of both
    outputs  features of values of a program that computes outputs
    grads    the same of gradients, at a time; grad_warps and grad_stages: of such a program
    """

    values: int
    back: int
    warps: int
    stages: int
    outputs: int
    grads: int
    grad_warps: int
    grad_stages: int


TILES = (
    DeltaTiles(32, 16, 4, 2, 128, 64, 4, 2),
    DeltaTiles(32, 16, 4, 2, 128, 64, 4, 1),
    DeltaTiles(32, 32, 4, 1, 64, 64, 8, 1),
    DeltaTiles(16, 16, 4, 1, 64, 16, 8, 1),
)
"""Those with which the Triton kernels are tried on a GPU, in this order. Gradients of fewer than 64 features at a time
take four warps (delta_kernel.DeltaChunks.warps): with eight, ptxas 12.8 (Triton 3.6) runs out of uniform registers and
takes the stack pointer for the address of a tile in shared memory, which ended processes on an H200
(phalanx.ops.machine_code)."""


class DeltaInputs(NamedTuple):
    """What a delta rule reads.

    q, k (R, L, HK, K)   v (R, L, HV, V)   decay (R, L, HV) or (R, L, HV, K): logarithms, at most 0, in at least fp32
    beta (R, L, HV): in at least fp32   numbers (R, L) int64 or None: the document of each token
    initial (R, HV, K, V) or None: the state before each row   scale: of queries
    normalize: whether queries and keys are divided by their lengths, sqrt(sum of squares + EPS)
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor
    numbers: Tensor | None = None
    initial: Tensor | None = None
    scale: float = 1.0
    normalize: bool = False

    @property
    def by_feature(self) -> bool:
        """Whether each feature of a key has its own decay."""
        return self.decay.dim() == 4

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """(R, HV, K, V)"""
        rows, _, heads, width = self.v.shape
        return rows, heads, self.k.shape[-1], width


@dataclass(frozen=True)
class DeltaGrads:
    """Gradients of a delta rule's inputs; None: there is no such input."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor
    initial: Tensor | None


def unit(x: Tensor) -> Tensor:
    """x over its length in the last dim."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def of_value_heads(s: DeltaInputs) -> tuple[Tensor, Tensor]:
    """Queries and keys of each value head (R, L, HV, K), normalised and scaled as is asked."""
    each = s.v.shape[-2] // s.k.shape[-2]
    q, k = (unit(s.q), unit(s.k)) if s.normalize else (s.q, s.k)
    return (q * s.scale).repeat_interleave(each, 2), k.repeat_interleave(each, 2)


def _chunk(s: DeltaInputs, state: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (R, C, HV, V) of one chunk, and the state after it; `carried` (R, 1): the document of `state`, which is
    read in the place of s.initial. All in one dtype."""
    q, k = of_value_heads(s)
    size, numbers = k.shape[1], s.numbers
    lower = torch.ones(size, size, dtype=torch.bool, device=k.device).tril()
    seen = lower if numbers is None else lower & (numbers.unsqueeze(2) == numbers.unsqueeze(1))
    decays = _sums_of(s.decay, seen if numbers is None else seen.to(k.dtype))
    reach, last = decays, decays[:, -1:] - decays
    if numbers is not None:
        each = (...,) + (None,) * (decays.dim() - 2)
        reach = reach.masked_fill((numbers != carried)[each], -torch.inf)
        last = last.masked_fill((numbers != numbers[:, -1:])[each], -torch.inf)
    passed = reach[:, -1].exp()
    if not s.by_feature:
        reach, last, passed = reach.unsqueeze(-1), last.unsqueeze(-1), passed.unsqueeze(-1)
    reach, last = reach.exp(), last.exp()
    pairs = _pairs_by_feature if s.by_feature else _pairs
    seen = seen.expand(len(k), size, size).unsqueeze(1)  # (R, 1, reader, source)
    read, of_keys = pairs((q, k), k, decays, seen)
    of_keys = of_keys.tril(-1) * s.beta.transpose(1, 2).unsqueeze(-1)
    wanted = s.beta.unsqueeze(-1) * (s.v - torch.einsum("rthk,rhkv->rthv", k * reach, state))
    system = of_keys + torch.eye(size, dtype=k.dtype, device=k.device)
    u = torch.linalg.solve_triangular(system, wanted.transpose(1, 2), upper=False, unitriangular=True)
    y = torch.einsum("rthk,rhkv->rthv", q * reach, state) + (read @ u).transpose(1, 2)
    return y, passed.unsqueeze(-1) * state + torch.einsum("rthk,rhtv->rhkv", k * last, u)


def _pairs(readers: tuple[Tensor, ...], keys: Tensor, decays: Tensor, seen: Tensor) -> list[Tensor]:
    """(R, HV, reader, source): products of tokens (R, C, HV, K) with keys, times what is left of the source when the
    reader comes; 0 where it is not seen. decays (R, C, HV)."""
    logs = decays.transpose(1, 2)
    between = (logs.unsqueeze(3) - logs.unsqueeze(2)).masked_fill(~seen, -torch.inf).exp()
    return [torch.einsum("rthk,rshk->rhts", x, keys) * between for x in readers]


def _pairs_by_feature(readers: tuple[Tensor, ...], keys: Tensor, decays: Tensor, seen: Tensor) -> list[Tensor]:
    """The same with decays (R, C, HV, K). What is left by a feature is a factor of the reader times one of the source,
    both at most 1, if they are counted from a token between them: the last one before the reader's block."""
    found: list[list[Tensor]] = [[] for _ in readers]
    size = keys.shape[1]
    for start in range(0, size, BLOCK):
        rows = slice(start, start + BLOCK)
        own, mask = decays[:, rows], seen[:, :, rows, rows]
        logs = (own.unsqueeze(2) - own.unsqueeze(1)).masked_fill(~mask.permute(0, 2, 3, 1).unsqueeze(-1), -torch.inf)
        between, before = logs.exp(), None  # (R, reader, source, HV, K)
        if start:
            border, mask = decays[:, start - 1 : start], seen[:, :, rows, :start]
            since, until = (own - border).clamp(max=0).exp(), (border - decays[:, :start]).clamp(max=0).exp()
            before = (since, keys[:, :start] * until, mask)
        for x, out in zip(readers, found, strict=True):
            block = torch.einsum("rthk,rshk,rtshk->rhts", x[:, rows], keys[:, rows], between)
            if before is not None:
                since, far, mask = before
                block = torch.cat((torch.einsum("rthk,rshk->rhts", x[:, rows] * since, far) * mask, block), -1)
            out.append(F.pad(block, (0, size - block.shape[-1])))
    return [torch.cat(blocks, 2) for blocks in found]


def _sums_of(logs: Tensor, seen: Tensor) -> Tensor:
    """The logarithm of what is left at each token of a state at the beginning of its document, or of the chunk. A
    cumulative sum over borders would leave the rounding of one document in the next. `seen` (R, C, C): which tokens
    each one counts; (C, C): there are no borders."""
    return logs.cumsum(1) if seen.dim() == 2 else torch.einsum("rts,rs...->rt...", seen, logs)


def _pieces(s: DeltaInputs, start: int, dtype: torch.dtype) -> tuple[DeltaInputs, Tensor]:
    """Inputs of the chunk that begins at token `start`, in a dtype; and the document of the state before it."""
    rows = slice(start, start + CHUNK)
    q, k, v, decay, beta = (t[:, rows].to(dtype) for t in (s.q, s.k, s.v, s.decay, s.beta))
    decay = decay.clamp(min=NOTHING_LEFT[dtype])
    numbers = None if s.numbers is None else s.numbers[:, rows]
    carried = s.beta if s.numbers is None else s.numbers[:, max(0, start - 1)].unsqueeze(1)
    return s._replace(q=q, k=k, v=v, decay=decay, beta=beta, numbers=numbers, initial=None), carried


def _first_state(s: DeltaInputs) -> Tensor:
    """The state before the rows, in the dtype of the arithmetic."""
    return widened(s.v[:0]).new_zeros(s.state_shape) if s.initial is None else widened(s.initial)


def delta_forward(s: DeltaInputs) -> tuple[Tensor, Tensor, Tensor]:
    """y (R, L, HV, V) in the dtype of v; the state after each row (R, HV, K, V) and, for backward, those before each
    chunk (chunks, R, HV, K, V), both in at least fp32."""
    state, made, before = _first_state(s), [], []
    for start in range(0, s.v.shape[1], CHUNK):
        before.append(state)
        y, state = _chunk(*_with_state(s, start, state))
        made.append(y)
    return torch.cat(made, 1).to(s.v.dtype), state, torch.stack(before)


def _with_state(s: DeltaInputs, start: int, state: Tensor) -> tuple[DeltaInputs, Tensor, Tensor]:
    piece, carried = _pieces(s, start, state.dtype)
    return piece, state, carried


def delta_backward(dy: Tensor, dstate: Tensor | None, s: DeltaInputs, before: Tensor) -> DeltaGrads:
    """From the gradients of y and of the state after each row; `before`: the states that forward returned. Chunks run
    again, the last one first, and hand on the gradient of the state before them."""
    wide = widened(dy)
    dstate = torch.zeros_like(before[0]) if dstate is None else dstate.to(before.dtype)
    found: list[tuple[Tensor, ...]] = []
    starts = range(0, s.v.shape[1], CHUNK)
    for state, start in reversed(list(zip(before, starts))):
        piece, carried = _pieces(s, start, state.dtype)
        given = (piece.q, piece.k, piece.v, piece.decay, piece.beta, state)
        q, k, v, decay, beta, first = leaves = tuple(t.detach().requires_grad_() for t in given)
        with torch.enable_grad():
            made = _chunk(piece._replace(q=q, k=k, v=v, decay=decay, beta=beta), first, carried)
        *grads, dstate = torch.autograd.grad(made, leaves, (wide[:, start : start + CHUNK], dstate))
        found.append(tuple(grads))
    dq, dk, dv, ddecay, dbeta = (torch.cat(parts[::-1], 1) for parts in zip(*found))
    dinitial = None if s.initial is None else dstate.to(s.initial.dtype)
    return DeltaGrads(dq.to(s.q.dtype), dk.to(s.k.dtype), dv.to(s.v.dtype), ddecay, dbeta, dinitial)


class DryDelta:
    """Without data: allocates what the fused implementation does, which keeps states in the dtype of v."""

    @staticmethod
    def delta_forward(s: DeltaInputs) -> tuple[Tensor, Tensor, Tensor]:
        chunks = -(-s.v.shape[1] // CHUNK)
        states = torch.empty((chunks, *s.state_shape), dtype=s.v.dtype, device="meta")
        corrections = torch.empty_like(s.v)
        made = torch.empty(s.v.shape, dtype=s.v.dtype, device="meta"), _first_state(s), states
        del corrections
        return made

    @staticmethod
    def delta_backward(dy: Tensor, dstate: Tensor | None, s: DeltaInputs, before: Tensor) -> DeltaGrads:
        q, k, v, decay, beta = (
            torch.empty(t.shape, dtype=t.dtype, device="meta") for t in (s.q, s.k, s.v, s.decay, s.beta)
        )
        states = torch.empty_like(before)  # the gradients of the states after each chunk
        made = DeltaGrads(q, k, v, decay, beta, None if s.initial is None else torch.empty_like(s.initial))
        del states
        return made


class _Delta(Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        *read, by = given
        s = DeltaInputs(*read)
        y, state, before = by.delta_forward(s)
        ctx.save_for_backward(s.q, s.k, s.v, s.decay, s.beta, s.numbers, s.initial, before)
        ctx.scale, ctx.normalize, ctx.by = s.scale, s.normalize, by
        ctx.set_materialize_grads(False)
        return y, state

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, decay, beta, numbers, initial, before = ctx.saved_tensors
        s = DeltaInputs(q, k, v, decay, beta, numbers, initial, ctx.scale, ctx.normalize)
        dy = torch.zeros_like(s.v) if dy is None else dy
        g = ctx.by.delta_backward(dy, dstate, s, before)
        return g.q, g.k, g.v, g.decay, g.beta, None, g.initial, None, None, None


def delta(s: DeltaInputs, kernels: Kernels = "auto") -> tuple[Tensor, Tensor]:
    """y (R, L, HV, V) of the recurrence above, in the dtype of v, and the state (R, HV, K, V) after each row, in at
    least fp32."""
    by = DELTA.choose(kernels, s.v, s.k.shape[-1])
    made: tuple[Tensor, Tensor] = _Delta.apply(*s, by)
    return made


def _case(documents: bool, normalize: bool) -> Any:
    def call(*given: Any) -> Tensor:
        q, k, v, decay, beta, initial, kernels = given
        numbers = documents_of(v) if documents else None
        logs = -F.softplus(widened(decay) - 1)
        k = k if normalize else k / k.shape[-1] ** 0.5  # keys that are long let states grow
        first = initial if documents else None
        strength, scale = widened(beta).sigmoid(), q.shape[-1] ** -0.5
        y, state = delta(DeltaInputs(q, k, v, logs, strength, numbers, first, scale, normalize), kernels)
        return torch.cat((y.flatten(), state.to(y.dtype).flatten()))

    return call


def _shapes(
    tokens: tuple[int, int], keys: tuple[int, int], values: tuple[int, int], by_feature: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Of (rows, length), heads and features of keys, heads and features of values."""
    of_value_heads = (*tokens, values[0])
    decay = (*of_value_heads, keys[1]) if by_feature else of_value_heads
    state = (tokens[0], values[0], keys[1], values[1])
    return (*tokens, *keys), (*tokens, *keys), (*tokens, *values), decay, of_value_heads, state


EXACT = (torch.float32, torch.float64)
NARROW = (torch.float16,)  # on GPUs bf16
DELTA = Op(
    "delta",
    "the gated delta rule inside documents, from a first state to the last",
    __name__,
    ("delta_forward", "delta_backward"),
    (
        triton(
            "phalanx.ops.delta.delta_kernel:DeltaKernels",
            dtypes=(torch.bfloat16, torch.float16, torch.float32),
            tunings=TILES,
            fits=lambda features: features <= 128,
            shapes="keys of at most 128 features",
        ),
        Implementation("dry", f"{__name__}:DryDelta", "meta", modes=ALL_KERNELS),
    ),
    cases=(
        Case("delta, documents", _case(True, True), _shapes((2, 75), (2, 5), (4, 6)), dtypes=EXACT),
        Case("delta, whole rows", _case(False, False), _shapes((1, 130), (2, 16), (2, 16)), dtypes=EXACT),
        Case("delta, one token", _case(True, False), _shapes((3, 1), (1, 3), (2, 4)), dtypes=EXACT),
        Case("delta by feature, documents", _case(True, True), _shapes((2, 75), (2, 5), (4, 6), True), dtypes=EXACT),
        Case(
            "delta by feature, whole rows", _case(False, False), _shapes((1, 130), (2, 16), (2, 16), True), dtypes=EXACT
        ),
        Case("delta of 128 features", _case(True, True), _shapes((1, 130), (1, 128), (2, 128)), dtypes=NARROW),
        Case("delta by 128 features", _case(True, True), _shapes((1, 130), (1, 128), (1, 128), True), dtypes=NARROW),
        Case("delta of 32 heads", _case(True, True), _shapes((1, 4096), (16, 128), (32, 128)), large=True),
        Case(
            "delta of 32 heads by feature",
            _case(True, True),
            _shapes((1, 4096), (32, 128), (32, 128), True),
            large=True,
        ),
    ),
)
