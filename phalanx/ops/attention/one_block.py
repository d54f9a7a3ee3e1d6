"""Attention to keys that are all here, by the kernels of blocks (ops.attention.backends): for what joins the softmax or
the scores, which torch's public call has no gradients for.

    q, k, v ──scores · scale──▶ soft cap ──▶ + bias of distances, masks ──▶ softmax, with sinks ──▶ values

Saved for backward: q, k, v, the output and one number for each query and head. A bias is made from its table again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from phalanx.ops.attention.backends import SavedBlock, Scoring, block_backend
from phalanx.ops.attention.kind import Learned
from phalanx.ops.attention.relative_bias import Biased
from phalanx.ops.attention.sinks import join_sinks, sinks_grad
from phalanx.ops.dense.grads import add_grad


def attend_block(q: Tensor, k: Tensor, v: Tensor, learned: Learned, how: Scoring, biased: Biased | None) -> Tensor:
    """q (B, heads, S, K), k and v (B, kv_heads, keys, ...) -> (B, heads, S, V). `biased`: how the bias of `learned` is
    read; `how` has none yet."""
    out: Tensor = _OneBlock.apply(q, k, v, learned.sinks, learned.bias, how, biased)
    return out


class _OneBlock(Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:  # type: ignore[override]
        q, k, v, sinks, table, how, biased = given
        whole = _with_bias(how, biased, table, q)
        ctx.backend = block_backend(q, v, whole)
        out, lse, *kept = ctx.backend.forward(q, k, v, whole)
        if sinks is not None:
            out, lse = join_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.sinks, ctx.table, ctx.how, ctx.biased, ctx.kept = sinks, table, how, biased, tuple(kept)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        saved = SavedBlock(q, k, v, out, lse, ctx.kept)
        found = ctx.backend.backward(dout, saved, _with_bias(ctx.how, ctx.biased, ctx.table, q))
        dsinks = dtable = None
        if ctx.sinks is not None and ctx.needs_input_grad[3]:
            dsinks = sinks_grad(ctx.sinks, dout, out, lse)
        if ctx.table is not None and ctx.needs_input_grad[4]:
            dtable = add_grad(ctx.table, ctx.biased.table_grad(found.bias))
        return found.q, found.k, found.v, dsinks, dtable, None, None


def _with_bias(how: Scoring, biased: Biased | None, table: Tensor | None, q: Tensor) -> Scoring:
    return how if biased is None or table is None else how._replace(bias=biased.scores(table, q.dtype))
