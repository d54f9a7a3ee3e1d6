"""Mamba-2's selective scan, a recurrence over the tokens of a document that needs memory for one state of each head:

    S_t = exp(dt_t a) S_{t-1} + dt_t x_t b_t^T        y_t = S_t c_t + D x_t        S (P, N) of each head

Dao & Gu, "Transformers are SSMs", 2024 (state-space duality). The reference implementation works in chunks of Q tokens:
inside a chunk outputs are a masked matmul, as in attention, and from chunk to chunk only the state is handed on.

Tokens come as rows (ops.scan.rows). No state crosses from one document into the next. A row may begin with a state,
which the document of its first token goes on from, and leaves the one after its last token. Saved for backward: the
inputs, and the state before each chunk.

Shapes: R rows, L tokens of a row, H heads of P features, G groups that share B and C, N features of a state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from phalanx.base.dataclass import dataclass
from phalanx.ops.dense.activation import widened
from phalanx.ops.dense.grads import add_grad
from phalanx.ops.op import ALL_KERNELS, Case, Implementation, Kernels, Op, triton
from phalanx.ops.scan.rows import documents_of

CHUNK = 64
NOTHING_LEFT = {torch.float32: -104.0, torch.float64: -746.0}
"""By dtype, a logarithm of a decay at which exp is 0. Sums of logarithms take none below it, which changes no product
of decays: what a token left by less is 0 with it too. But sums stay small, and what is left between two other tokens is
a difference of two sums, each rounded in proportion to its size."""


class ScanInputs(NamedTuple):
    """What a scan reads.

    x (R, L, H, P)   dt (R, L, H): steps, at least 0, in at least fp32   a (H,): below 0, in at least fp32
    b, c (R, L, G, N)   d (H,) or None   numbers (R, L) int64 or None: the document of each token
    initial (R, H, P, N) or None: the state before each row
    """

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor | None = None
    numbers: Tensor | None = None
    initial: Tensor | None = None


@dataclass(frozen=True)
class ScanGrads:
    """Gradients of a scan's inputs; None: there is no such input."""

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor | None
    initial: Tensor | None


def _chunk(s: ScanInputs, state: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (R, Q, H, P) of one chunk without D, and the state after it; `carried` (R, 1): the document of `state`,
    which is read in the place of s.initial. All in one dtype."""
    x, dt, numbers, each = s.x, s.dt, s.numbers, s.x.shape[2] // s.b.shape[2]
    b, c = s.b.repeat_interleave(each, 2), s.c.repeat_interleave(each, 2)
    size, steps = x.shape[1], dt.unsqueeze(-1) * x
    seen = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
    seen = seen if numbers is None else seen & (numbers.unsqueeze(2) == numbers.unsqueeze(1))
    logs = (dt * s.a).clamp(min=NOTHING_LEFT[x.dtype])
    decays = _sums_of(logs, seen if numbers is None else seen.to(x.dtype))
    between = decays.unsqueeze(2) - decays.unsqueeze(1)  # (R, reader, source, H)
    weights = between.masked_fill(~seen.unsqueeze(-1), -torch.inf).exp()
    y = torch.einsum("rthn,rshn,rtsh,rshp->rthp", c, b, weights, steps)
    reach, last = decays, decays[:, -1:] - decays
    if numbers is not None:
        reach = reach.masked_fill((numbers != carried).unsqueeze(-1), -torch.inf)
        last = last.masked_fill((numbers != numbers[:, -1:]).unsqueeze(-1), -torch.inf)
    y = y + reach.exp().unsqueeze(-1) * torch.einsum("rthn,rhpn->rthp", c, state)
    made = torch.einsum("rsh,rshp,rshn->rhpn", last.exp(), steps, b)
    return y, made + reach[:, -1].exp()[..., None, None] * state


def _sums_of(logs: Tensor, seen: Tensor) -> Tensor:
    """(R, Q, H): the logarithm of what is left at each token of a state at the beginning of its document, or of the
    chunk. A cumulative sum over borders would leave the rounding of one document in the next. `seen` (R, Q, Q): which
    tokens each one counts; (Q, Q): there are no borders."""
    return logs.cumsum(1) if seen.dim() == 2 else seen @ logs


def _pieces(s: ScanInputs, start: int, dtype: torch.dtype) -> tuple[ScanInputs, Tensor]:
    """Inputs of the chunk that begins at token `start`, in a dtype; and the document of the state before it."""
    rows = slice(start, start + CHUNK)
    x, dt, b, c = (t[:, rows].to(dtype) for t in (s.x, s.dt, s.b, s.c))
    numbers = None if s.numbers is None else s.numbers[:, rows]
    carried = s.a if s.numbers is None else s.numbers[:, max(0, start - 1)].unsqueeze(1)
    return ScanInputs(x, dt, s.a.to(dtype), b, c, numbers=numbers), carried


def _first_state(s: ScanInputs) -> Tensor:
    """The state before the rows, in the dtype of the arithmetic."""
    if s.initial is not None:
        return widened(s.initial)
    rows, _, heads, width = s.x.shape
    return widened(s.x[:0]).new_zeros(rows, heads, width, s.b.shape[-1])


def scan_forward(s: ScanInputs) -> tuple[Tensor, Tensor, Tensor]:
    """y (R, L, H, P) in the dtype of x; the state after each row and those before each chunk (chunks, R, H, P, N), both
    in at least fp32."""
    state, made, before = _first_state(s), [], []
    for start in range(0, s.x.shape[1], CHUNK):
        before.append(state)
        piece, carried = _pieces(s, start, state.dtype)
        y, state = _chunk(piece, state, carried)
        made.append(y)
    y = torch.cat(made, 1)
    y = y if s.d is None else y + widened(s.d).unsqueeze(-1) * widened(s.x)
    return y.to(s.x.dtype), state, torch.stack(before)


def scan_backward(dy: Tensor, dstate: Tensor | None, s: ScanInputs, before: Tensor) -> ScanGrads:
    """From the gradients of y and of the state after each row; `before`: the states that forward returned. Chunks run
    again, the last one first, and hand on the gradient of the state before them."""
    wide = widened(dy)
    dstate = torch.zeros_like(before[0]) if dstate is None else dstate.to(before.dtype)
    found: list[list[Tensor]] = []
    da = torch.zeros_like(s.a, dtype=before.dtype)
    starts = range(0, s.x.shape[1], CHUNK)
    for state, start in reversed(list(zip(before, starts))):
        piece, carried = _pieces(s, start, state.dtype)
        given = (piece.x, piece.dt, piece.a, piece.b, piece.c, state)
        x, dt, a, b, c, first = leaves = tuple(t.detach().requires_grad_() for t in given)
        with torch.enable_grad():
            y, after = _chunk(ScanInputs(x, dt, a, b, c, numbers=piece.numbers), first, carried)
        dx, ddt, more, db, dc, dstate = torch.autograd.grad(
            (y, after), leaves, (wide[:, start : start + CHUNK], dstate)
        )
        found.append([dx, ddt, db, dc])
        da += more
    dx, ddt, db, dc = (torch.cat(parts[::-1], 1) for parts in zip(*found))
    dd = None
    if s.d is not None:
        dd = (wide * widened(s.x)).sum((0, 1, 3))
        dx = dx + widened(s.d).unsqueeze(-1) * wide
    dinitial = None if s.initial is None else dstate.to(s.initial.dtype)
    return ScanGrads(dx.to(s.x.dtype), ddt, da, db.to(s.b.dtype), dc.to(s.c.dtype), dd, dinitial)


class DryScan:
    """Without data: allocates what the fused implementation does, which keeps states in the dtype of x."""

    @staticmethod
    def scan_forward(s: ScanInputs) -> tuple[Tensor, Tensor, Tensor]:
        state = _first_state(s)
        chunks = -(-s.x.shape[1] // CHUNK)
        states = torch.empty((chunks, *state.shape), dtype=s.x.dtype, device="meta")
        return torch.empty(s.x.shape, dtype=s.x.dtype, device="meta"), state, states

    @staticmethod
    def scan_backward(dy: Tensor, dstate: Tensor | None, s: ScanInputs, before: Tensor) -> ScanGrads:
        x, dt, a, b, c = (torch.empty(t.shape, dtype=t.dtype, device="meta") for t in (s.x, s.dt, s.a, s.b, s.c))
        states = torch.empty_like(before)  # the gradients of the states before each chunk
        d, initial = (None if t is None else torch.empty_like(t) for t in (s.d, s.initial))
        made = ScanGrads(x, dt, a, b, c, d, initial)
        del states
        return made


class _Scan(Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, dt, a, b, c, d, numbers, initial, by = given
        s = ScanInputs(x, dt, a, b, c, None if d is None else d.detach(), numbers, initial)
        y, state, before = by.scan_forward(s)
        ctx.save_for_backward(x, dt, a, b, c, numbers, initial, before)
        ctx.d, ctx.by = d, by
        ctx.set_materialize_grads(False)
        return y, state

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, dt, a, b, c, numbers, initial, before = ctx.saved_tensors
        d = ctx.d
        s = ScanInputs(x, dt, a, b, c, None if d is None else d.detach(), numbers, initial)
        dy = torch.zeros_like(x) if dy is None else dy
        g = ctx.by.scan_backward(dy, dstate, s, before)
        dd = add_grad(d, g.d) if d is not None and ctx.needs_input_grad[5] else None
        return g.x, g.dt, g.a, g.b, g.c, dd, None, g.initial, None


def scan(s: ScanInputs, kernels: Kernels = "auto") -> tuple[Tensor, Tensor]:
    """y (R, L, H, P) of the recurrence above, in the dtype of x, and the state (R, H, P, N) after each row, in at least
    fp32. `s.d` may be a parameter."""
    by = SCAN.choose(kernels, s.x, s.x.shape[-1], s.b.shape[-1], s.x.dtype.itemsize)
    made: tuple[Tensor, Tensor] = _Scan.apply(s.x, s.dt, s.a, s.b, s.c, s.d, s.numbers, s.initial, by)
    return made


def whole_decay(dt: Tensor, a: Tensor) -> Tensor:
    """(R, H): what is left of a state that passes a row."""
    return (dt.sum(1) * a).exp()


class _Wide(Function):
    @staticmethod
    def forward(ctx: Any, param: Tensor) -> Tensor:  # type: ignore[override]
        ctx.param = param
        return param.detach().clone() if param.dtype == torch.float64 else param.detach().float()

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Tensor | None:  # type: ignore[override]
        return add_grad(ctx.param, d)


def wide_values(param: Tensor) -> Tensor:
    """A parameter's values in at least fp32, for formulas of plain torch ops; its gradient goes where those of our ops
    go."""
    made: Tensor = _Wide.apply(param)
    return made


def steps_of(dt: Tensor, bias: Tensor, limits: tuple[float, float]) -> Tensor:
    """softplus(dt + bias) within `limits`, in at least fp32: dt (..., H), bias (H,) a parameter."""
    return F.softplus(widened(dt) + wide_values(bias)).clamp(*limits)


def decay_rates(log: Tensor) -> Tensor:
    """a (H,) = -exp of a parameter, in at least fp32."""
    return -wide_values(log).exp()


def _has_room(width: int, state: int, itemsize: int) -> bool:
    """Whether the Triton kernels have room in registers and shared memory for a head's state. Sizes are rounded up to
    powers of two of at least 16."""
    features, values = (max(16, 1 << (size - 1).bit_length()) for size in (width, state))
    return features <= 128 and values * itemsize <= 2**10 and features * values * itemsize <= 2**16


def _case(documents: bool) -> Any:
    def call(*given: Any) -> Tensor:
        x, dt, a, b, c, d, initial, kernels = given
        numbers = documents_of(x) if documents else None
        steps, rates = F.softplus(widened(dt) - 1), -widened(a).exp()
        y, state = scan(ScanInputs(x, steps, rates, b, c, d, numbers, initial if documents else None), kernels)
        return torch.cat((y.flatten(), state.to(y.dtype).flatten()))

    return call


def _shapes(tokens: tuple[int, int], head: tuple[int, int], group: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """Of (rows, length), (heads, width) and (groups, features of a state)."""
    heads, rows = head[0], tokens[0]
    small = ((*tokens, heads), (heads,), (*tokens, *group), (*tokens, *group), (heads,))
    return (*tokens, *head), *small, (rows, *head, group[1])


EXACT = (torch.float32, torch.float64)
NARROW = (torch.float16,)  # on GPUs bf16
SCAN = Op(
    "scan",
    "Mamba-2's selective scan inside documents, from a first state to the last",
    __name__,
    ("scan_forward", "scan_backward"),
    (
        triton(
            "phalanx.ops.scan.scan_kernel",
            fits=_has_room,
            shapes="heads of at most 128 features; states of at most 1 KiB a feature and 64 KiB a head",
        ),
        Implementation("dry", f"{__name__}:DryScan", "meta", modes=ALL_KERNELS),
    ),
    cases=(
        Case("scan, documents", _case(True), _shapes((2, 75), (4, 6), (2, 5)), (5,), EXACT),
        Case("scan, whole rows", _case(False), _shapes((1, 130), (2, 16), (1, 16)), (5,), EXACT),
        Case("scan, one token", _case(True), _shapes((3, 1), (2, 4), (1, 3)), (5,), EXACT),
        Case("scan of states of 128", _case(True), _shapes((1, 130), (2, 64), (1, 128)), (5,), NARROW),
        Case("scan of 80 heads", _case(True), _shapes((1, 4096), (80, 64), (8, 128)), (5,), large=True),
    ),
)
