"""One token of each sequence: a program has some features of the values of one head, and reads and writes their part of
the stored state once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.ops.delta.delta import EPS, DeltaInputs
from phalanx.ops.delta.step import DeltaStepTile
from phalanx.ops.kernel_tools import triton_wide, wide_of
from phalanx.ops.scan.rows import StateSlots
from phalanx.ops.scan.step_kernel import as_bytes, heads_last


@triton.jit
def _unit(x, NORMALIZE: tl.constexpr, EPSILON: tl.constexpr):
    """(features,) of a head, over its length if asked."""
    if NORMALIZE:
        x = x / tl.sqrt(tl.sum(x * x, 0) + EPSILON)
    return x


@triton.jit
def _rule_step(
    q,
    k,
    v,
    decay,
    beta,
    kept,
    slots,
    fresh,
    y,
    scale,
    q_seq,
    k_seq,
    v_seq,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    EACH: tl.constexpr,
    BY_FEATURE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPSILON: tl.constexpr,
    FRESH: tl.constexpr,
    WIDE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    parts = tl.cdiv(V, BV)
    seq = (tl.program_id(0) // (H * parts)).to(tl.int64)
    head = tl.program_id(0) // parts % H
    n, m = tl.arange(0, BK), tl.program_id(0) % parts * BV + tl.arange(0, BV)
    inside = (n < K)[:, None] & (m < V)[None, :]
    seen = inside
    if FRESH:
        seen = seen & (tl.load(fresh + seq) == 0)
    place = kept + (tl.load(slots + seq) * H + head) * (K * V) + n[:, None] * V + m[None, :]
    state = tl.load(place, mask=seen, other=0.0).to(WIDE)
    of_key = head // EACH * K + n
    queries = _unit(tl.load(q + seq * q_seq + of_key, mask=n < K, other=0.0).to(WIDE), NORMALIZE, EPSILON) * scale
    keys = _unit(tl.load(k + seq * k_seq + of_key, mask=n < K, other=0.0).to(WIDE), NORMALIZE, EPSILON)
    values = tl.load(v + seq * v_seq + head * V + m, mask=m < V, other=0.0).to(WIDE)
    if BY_FEATURE:
        left = tl.exp(tl.load(decay + (seq * H + head) * K + n, mask=n < K, other=0.0).to(WIDE))
        state *= left[:, None]
    else:
        state *= tl.exp(tl.load(decay + seq * H + head).to(WIDE))
    held = tl.sum(state * keys[:, None], 0)
    u = tl.load(beta + seq * H + head).to(WIDE) * (values - held)
    state += keys[:, None] * u[None, :]
    tl.store(place, state.to(kept.dtype.element_ty), mask=inside)
    out = tl.sum(state * queries[:, None], 0)
    tl.store(y + (seq * H + head) * V + m, out.to(y.dtype.element_ty), mask=m < V)


@dataclass(frozen=True)
class DeltaSteps:
    """Kernels of delta rules of single tokens, with states cut in tiles of one size."""

    tile: DeltaStepTile

    def rule_step(self, s: DeltaInputs, slots: StateSlots) -> Tensor:
        """As the reference."""
        q, k, v = (heads_last(t) for t in (s.q, s.k, s.v))
        (sequences, heads, width), (key_heads, features) = v.shape, k.shape[1:]
        y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        block = min(self.tile.values, triton.next_power_of_2(width))
        if y.numel():
            _rule_step[(sequences * heads * triton.cdiv(width, block),)](
                q,
                k,
                v,
                s.decay.contiguous(),
                s.beta.contiguous(),
                slots.kept,
                slots.slots,
                as_bytes(slots.fresh),
                y,
                s.scale,
                *(t.stride(0) for t in (q, k, v)),
                H=heads,
                K=features,
                V=width,
                EACH=heads // key_heads,
                BY_FEATURE=s.decay.dim() == 3,
                NORMALIZE=s.normalize,
                EPSILON=EPS,
                FRESH=slots.fresh is not None,
                WIDE=triton_wide(wide_of(v.dtype)),
                BK=triton.next_power_of_2(features),
                BV=block,
                num_warps=self.tile.warps,
            )
        return y
