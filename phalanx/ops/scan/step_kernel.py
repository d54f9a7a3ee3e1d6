"""One token of each sequence: a program has some features of one sequence, and reads and writes their stored
state once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.ops.kernel_tools import triton_wide, wide_of
from phalanx.ops.scan.rows import StateSlots
from phalanx.ops.scan.step import StepInputs, StepTile

CHANNELS = 512  # of a program of the convolution


@triton.jit
def _softplus(v):
    """log(1 + exp(v)), with the relative accuracy of its dtype where it is small: steps are about 0.001."""
    u = tl.exp(-tl.abs(v))
    w = 1.0 + u
    rest = tl.where(w == 1.0, u, tl.log(w) * u / tl.where(w == 1.0, 1.0, w - 1.0))  # Kahan: log(1 + u)
    return tl.maximum(v, 0.0) + rest


def _features_last(x: Tensor) -> Tensor:
    """The same, contiguous in its features: a slice of a projection's output need not be copied."""
    return x if x.stride(1) == 1 else x.contiguous()


def heads_last(x: Tensor) -> Tensor:
    """The same, contiguous in its last two dims."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def as_bytes(fresh: Tensor | None) -> Tensor | None:
    return None if fresh is None else fresh.view(torch.uint8)


@triton.jit
def _conv_step(
    x,
    weight,
    bias,
    kept,
    slots,
    fresh,
    y,
    x_seq,
    C,
    K: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    FRESH: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(C, BLOCK)
    seq = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = cols < C
    seen = inside
    if FRESH:
        seen = seen & (tl.load(fresh + seq) == 0)
    rows = kept + tl.load(slots + seq) * (K - 1) * C + cols
    new = tl.load(x + seq * x_seq + cols, mask=inside, other=0.0)
    z = new.to(WIDE) * tl.load(weight + cols * K + K - 1, mask=inside, other=0.0).to(WIDE)
    if BIAS:
        z += tl.load(bias + cols, mask=inside, other=0.0).to(WIDE)
    for k in tl.static_range(K - 1):
        old = tl.load(rows + k * C, mask=seen, other=0.0)
        z += old.to(WIDE) * tl.load(weight + cols * K + k, mask=inside, other=0.0).to(WIDE)
        if k > 0:
            tl.store(rows + (k - 1) * C, old, mask=inside)
    tl.store(rows + (K - 2) * C, new.to(kept.dtype.element_ty), mask=inside)
    if SILU:
        z = z / (1.0 + tl.exp(-z))
    tl.store(y + seq * C + cols, z.to(y.dtype.element_ty), mask=inside)


def conv_step(x: Tensor, slots: StateSlots, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """As the reference."""
    x, (sequences, channels) = _features_last(x), x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        _conv_step[(sequences * triton.cdiv(channels, CHANNELS),)](
            x,
            weight.contiguous(),
            bias,
            slots.kept,
            slots.slots,
            as_bytes(slots.fresh),
            y,
            x.stride(0),
            channels,
            K=weight.shape[1],
            SILU=silu,
            BIAS=bias is not None,
            FRESH=slots.fresh is not None,
            WIDE=triton_wide(wide_of(x.dtype)),
            BLOCK=CHANNELS,
        )
    return y


@triton.jit
def _state_step(
    x,
    dt,
    b,
    c,
    bias,
    log,
    d,
    kept,
    slots,
    fresh,
    y,
    x_seq,
    dt_seq,
    b_seq,
    c_seq,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    EACH: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SKIP: tl.constexpr,
    FRESH: tl.constexpr,
    WIDE: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    """A program has some features of a head; they are in the order in which states lie in memory."""
    parts = tl.cdiv(P, BP)
    seq = (tl.program_id(0) // (H * parts)).to(tl.int64)
    head = tl.program_id(0) // parts % H
    p, n = tl.program_id(0) % parts * BP + tl.arange(0, BP), tl.arange(0, BN)
    inside = (p < P)[:, None] & (n < N)[None, :]
    seen = inside
    if FRESH:
        seen = seen & (tl.load(fresh + seq) == 0)
    place = kept + (tl.load(slots + seq) * H + head) * (P * N) + p[:, None] * N + n[None, :]
    state = tl.load(place, mask=seen, other=0.0).to(WIDE)
    values = tl.load(x + seq * x_seq + head * P + p, mask=p < P, other=0.0).to(WIDE)
    keys = tl.load(b + seq * b_seq + head // EACH * N + n, mask=n < N, other=0.0).to(WIDE)
    queries = tl.load(c + seq * c_seq + head // EACH * N + n, mask=n < N, other=0.0).to(WIDE)
    step = _softplus(tl.load(dt + seq * dt_seq + head).to(WIDE) + tl.load(bias + head).to(WIDE))
    step = tl.minimum(tl.maximum(step, LOW), HIGH)
    rate = -tl.exp(tl.load(log + head).to(WIDE))
    state = tl.exp(step * rate) * state + (step * values)[:, None] * keys[None, :]
    tl.store(place, state.to(kept.dtype.element_ty), mask=inside)
    out = tl.sum(state * queries[None, :], 1)
    if SKIP:
        out += tl.load(d + head).to(WIDE) * values
    tl.store(y + (seq * H + head) * P + p, out.to(y.dtype.element_ty), mask=p < P)


@dataclass(frozen=True)
class StateSteps:
    """Kernels of scans of single tokens, with states cut in tiles of one size."""

    tile: StepTile

    def state_step(self, s: StepInputs, slots: StateSlots) -> Tensor:
        """As the reference."""
        x, b, c = (heads_last(t) for t in (s.x, s.b, s.c))
        dt, (sequences, heads, width), (groups, state) = _features_last(s.dt), x.shape, b.shape[1:]
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        features = min(self.tile.features, triton.next_power_of_2(width))
        grid = (sequences * heads * triton.cdiv(width, features),)
        if y.numel():
            _state_step[grid](
                x,
                dt,
                b,
                c,
                s.bias,
                s.log,
                s.d,
                slots.kept,
                slots.slots,
                as_bytes(slots.fresh),
                y,
                *(t.stride(0) for t in (x, dt, b, c)),
                H=heads,
                P=width,
                N=state,
                EACH=heads // groups,
                LOW=float(s.limits[0]),
                HIGH=float(s.limits[1]),
                SKIP=s.d is not None,
                FRESH=slots.fresh is not None,
                WIDE=triton_wide(wide_of(x.dtype)),
                BP=features,
                BN=triton.next_power_of_2(state),
                num_warps=self.tile.warps,
            )
        return y
