"""Join attention outputs over more keys with those over the keys before: output and log-sum-exp in place, in one pass
over memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.kernel_tools import triton_wide

ROWS = 16


@triton.jit
def _join(
    out,
    lse,
    more,
    more_lse,
    heads,
    length,
    first,
    count,
    out_seq,
    out_head,
    out_tok,
    more_seq,
    more_head,
    more_tok,
    V: tl.constexpr,
    V_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """`more` (sequences, heads, count, V) belongs to the tokens first .. first + count of `out` (sequences, heads,
    length, V)."""
    which = tl.program_id(0).to(tl.int64)
    seq, head = which // heads, which % heads
    token = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    here = token < count
    before = tl.load(lse + which * length + first + token, mask=here, other=0.0).to(WIDE)
    new = tl.load(more_lse + which * count + token, mask=here, other=0.0).to(WIDE)
    top = tl.maximum(before, new)
    joint = top + tl.log(tl.exp(before - top) + tl.exp(new - top))
    i = tl.arange(0, V_BLOCK)[None, :]
    mask = here[:, None] & (i < V)
    mine = out + seq * out_seq + head * out_head + (first + token[:, None]) * out_tok + i
    a = tl.load(mine, mask=mask, other=0.0).to(WIDE)
    b = tl.load(more + seq * more_seq + head * more_head + token[:, None] * more_tok + i, mask=mask, other=0.0).to(WIDE)
    tl.store(mine, a * tl.exp(before - joint)[:, None] + b * tl.exp(new - joint)[:, None], mask=mask)
    tl.store(lse + which * length + first + token, joint, mask=here)


def join_(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor, first: int) -> None:
    """Update out (sequences, heads, L, V) and lse (sequences, heads, L), contiguous and in the wide dtype, with `more`
    (sequences, heads, count, V) and its log-sum-exp, for tokens from `first` on. Every value of `lse` is finite; -inf
    in `more_lse` means that there is nothing to join."""
    sequences, heads, count, width = more.shape
    out_strides = [out.stride(d) for d in (0, 1, 2)]
    more = more if more.stride(-1) == 1 else more.contiguous()
    if out.stride(-1) != 1:
        raise ValueError(f"the last dim of out must be contiguous, its strides are {out.stride()}")
    _join[(sequences * heads, triton.cdiv(count, ROWS))](
        out,
        lse,
        more,
        more_lse.contiguous(),
        heads,
        lse.shape[2],
        first,
        count,
        *out_strides,
        *(more.stride(d) for d in (0, 1, 2)),
        V=width,
        V_BLOCK=triton.next_power_of_2(width),
        ROWS=ROWS,
        WIDE=triton_wide(out.dtype),
        num_warps=4,
    )
