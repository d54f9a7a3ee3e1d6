"""RMSNorm by groups beside a gate: a program has one group, and some tokens at a time.

Forward reads x and the gate once. Backward computes what the gate passes and what is normalized anew; each program
handles every n-th tile of tokens and keeps its share of the weight's gradient in registers. Where a group is spread
over ranks, a first pass makes this rank's sums, one number for each token and group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.ops.kernel_tools import num_programs, triton_wide, wide_of
from phalanx.ops.scan.gated_norm import NormGroups

ELEMENTS = 2048  # of a tile of several tokens
PER_WARP = 256  # elements: with more, a thread of backward needs over 128 registers


@triton.jit
def _passed(z):
    """silu and its derivative."""
    s = 1.0 / (1.0 + tl.exp(-z))
    return z * s, s * (1.0 + z * (1.0 - s))


@triton.jit
def _load(x, token, step, cols, mask, WIDE: tl.constexpr):
    """(tokens, features of a group)."""
    return tl.load(x + token.to(tl.int64)[:, None] * step + cols[None, :], mask=mask, other=0.0).to(WIDE)


@triton.jit
def _forward(
    x,
    gate,
    weight,
    scale,
    y,
    tokens,
    x_tok,
    gate_tok,
    width,
    HERE: tl.constexpr,
    F: tl.constexpr,
    EPS: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    PART: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """scale (T, HERE). PART 0: all; 1: only the sums of squares, to `scale`; 2: `scale` has the factors."""
    group = tl.program_id(1)
    token, i = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK)
    here, inside = token < tokens, i < F
    mask, cols = here[:, None] & inside[None, :], group * F + i
    at_scale = scale + token.to(tl.int64) * HERE + group
    u = _load(x, token, x_tok, cols, mask, WIDE)
    passed, _ = _passed(_load(gate, token, gate_tok, cols, mask, WIDE))
    if GATE_FIRST:
        u = u * passed
    if PART == 1:
        tl.store(at_scale, tl.sum(u * u, 1), mask=here)
    else:
        if PART == 2:
            factor = tl.load(at_scale, mask=here, other=0.0)
        else:
            factor = 1.0 / tl.sqrt(tl.sum(u * u, 1) / width + EPS)
            tl.store(at_scale, factor, mask=here)
        w = tl.load(weight + cols, mask=inside, other=0.0).to(WIDE)
        # rounded before the weight, as the reference implementation and Hugging Face do
        out = (u * factor[:, None]).to(y.dtype.element_ty).to(WIDE) * w[None, :]
        if not GATE_FIRST:
            out = out.to(y.dtype.element_ty).to(WIDE) * passed
        place = token.to(tl.int64)[:, None] * (HERE * F) + cols[None, :]
        tl.store(y + place, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    dy,
    x,
    gate,
    weight,
    scale,
    sums,
    dx,
    dgate,
    dw_parts,
    tokens,
    dy_tok,
    x_tok,
    gate_tok,
    width,
    programs,
    HERE: tl.constexpr,
    F: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    PART: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dw_parts (programs, HERE * F). PART 0: all; 1: only the sums over features of g * n, to `sums` (T, HERE); 2: they
    are read from there."""
    group, first, i = tl.program_id(1), tl.program_id(0), tl.arange(0, BLOCK)
    inside, cols = i < F, group * F + i
    w = tl.load(weight + cols, mask=inside, other=0.0).to(WIDE)[None, :]
    dw = tl.zeros((TILE, BLOCK), WIDE)
    for start in range(first * TILE, tokens, programs * TILE):
        token = start + tl.arange(0, TILE)
        here = token < tokens
        mask = here[:, None] & inside[None, :]
        of_group = token.to(tl.int64) * HERE + group
        above, value = _load(dy, token, dy_tok, cols, mask, WIDE), _load(x, token, x_tok, cols, mask, WIDE)
        passed, slope = _passed(_load(gate, token, gate_tok, cols, mask, WIDE))
        factor = tl.load(scale + of_group, mask=here, other=0.0)[:, None]
        if GATE_FIRST:
            n, d = value * passed * factor, above
        else:
            n, d = value * factor, above * passed
        g = d * w
        if PART == 1:
            tl.store(sums + of_group, tl.sum(g * n, 1), mask=here)
        else:
            if PART == 2:
                mean = tl.load(sums + of_group, mask=here, other=0.0) / width
            else:
                mean = tl.sum(g * n, 1) / width
            dw += d * n
            du = (g - n * mean[:, None]) * factor
            if GATE_FIRST:
                dvalue, dz = du * passed, du * value * slope
            else:
                dvalue, dz = du, above * n * w * slope
            place = token.to(tl.int64)[:, None] * (HERE * F) + cols[None, :]
            tl.store(dx + place, dvalue.to(dx.dtype.element_ty), mask=mask)
            tl.store(dgate + place, dz.to(dgate.dtype.element_ty), mask=mask)
    if PART != 1:
        tl.store(dw_parts + first * (HERE * F) + cols, tl.sum(dw, 0), mask=inside)


def _features_last(x: Tensor) -> Tensor:
    """The same, contiguous in its features: a slice of a projection's output need not be copied."""
    return x if x.stride(1) == 1 else x.contiguous()


def tile_of(features: int) -> dict[str, int]:
    """How groups of so many features are cut: tokens and columns of a tile, and warps."""
    block = triton.next_power_of_2(features)
    tile = max(1, min(16, ELEMENTS // block))
    return dict(TILE=tile, BLOCK=block, num_warps=max(1, min(16, tile * block // PER_WARP)))


class _NormCall:
    """What both kernels of a norm are given."""

    def __init__(self, x: Tensor, groups: NormGroups):
        self.groups, self.tokens, features = groups, len(x), x.shape[1] // groups.here
        self.wide, self.device, self.features = wide_of(x.dtype), x.device, features
        cut = tile_of(features)
        self.tiles = triton.cdiv(self.tokens, cut["TILE"])
        self.constants = dict(
            HERE=groups.here,
            F=features,
            GATE_FIRST=groups.order == "gate first",
            WIDE=triton_wide(self.wide),
            **cut,
        )

    def of_groups(self) -> Tensor:
        return torch.empty(self.tokens, self.groups.here, dtype=self.wide, device=self.device)


def norm_forward(x: Tensor, gate: Tensor, weight: Tensor, groups: NormGroups, tp: Axis) -> tuple[Tensor, Tensor]:
    """As the reference."""
    x, gate, call = _features_last(x), _features_last(gate), _NormCall(x, groups)
    y, scale = torch.empty(x.shape, dtype=x.dtype, device=x.device), call.of_groups()
    grid = (call.tiles, groups.here)

    def launch(part: int) -> None:
        if x.numel():
            given = (x, gate, weight, scale, y, call.tokens, x.stride(0), gate.stride(0), groups.width)
            _forward[grid](*given, EPS=groups.eps, PART=part, **call.constants)

    if groups.spread:
        launch(1)
        scale = groups.factors(scale, tp).contiguous()
    launch(2 if groups.spread else 0)
    return y, scale


def norm_backward(
    dy: Tensor, saved: tuple[Tensor, Tensor, Tensor], weight: Tensor, groups: NormGroups, tp: Axis
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference."""
    dy, x, gate, scale = _features_last(dy), _features_last(saved[0]), _features_last(saved[1]), saved[2]
    call = _NormCall(x, groups)
    programs = min(call.tiles, max(1, num_programs(x, per_processor=4) // groups.here))
    dx, dgate = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, gate))
    dw, sums = torch.empty(programs, x.shape[1], dtype=call.wide, device=x.device), call.of_groups()

    def launch(part: int) -> None:
        if x.numel():
            given = (dy, x, gate, weight, scale, sums, dx, dgate, dw, call.tokens)
            strides = (dy.stride(0), x.stride(0), gate.stride(0))
            _backward[programs, groups.here](*given, *strides, groups.width, programs, PART=part, **call.constants)

    if groups.spread:
        launch(1)
        sums = groups.summed(sums, tp).contiguous()
    launch(2 if groups.spread else 0)
    return dx, dgate, dw.sum(0)
