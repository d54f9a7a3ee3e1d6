"""Attention of sequences that are cut over context-parallel ranks: how each rank's queries get to read the keys before them.

All-gather: every rank gets all keys and values; backward scatters the sums of their gradients. Llama 3 (Llama team, 2024, section 3.3.2).
Shapes: L tokens of a sequence that are here, S of a whole one, K and V widths of a query and a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.base.batch import Batch
from phalanx.comm.axis import Axis
from phalanx.ops import attention as whole
from phalanx.ops.attention import CAUSAL, Kind
from phalanx.ops.exchange import gather
from phalanx.ops.kernels import Kernels


def attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch, cp: Axis, kind: Kind = CAUSAL, sinks: Tensor | None = None,
              kernels: Kernels = "plain") -> Tensor:  # fmt: skip
    """As ops.attention, of this rank's part of each sequence: q (sequences, heads, L, K), k, v alike -> (T, heads * V)."""
    if cp.size == 1:
        return whole.attention(q, k, v, batch, kind, sinks, kernels)
    k, v = gather_keys(k, v, batch, cp)
    return whole.attention_to_all(q, k, v, batch, kind, sinks)


def attention_with_dropout(q: Tensor, k: Tensor, v: Tensor, batch: Batch, cp: Axis, p: float, seed: int, layer: int, first_head: int) -> Tensor:
    """As ops.attention_with_dropout, of this rank's part of each sequence."""
    k, v = gather_keys(k, v, batch, cp)
    return whole.attention_with_dropout(q, k, v, batch, p, seed, layer, first_head)


def gather_keys(k: Tensor, v: Tensor, batch: Batch, cp: Axis) -> tuple[Tensor, Tensor]:
    """k and v (sequences, kv_heads, L, ...) of all parts -> (sequences, kv_heads, S, ...), by one collective."""
    if cp.size == 1:
        return k, v
    mine = torch.cat((k, v), -1).transpose(1, 2).flatten(0, 1)
    everyones = batch.join(gather(batch.pad(mine), cp)).unflatten(0, (batch.num_sequences, batch.seq_length)).transpose(1, 2)
    return everyones[..., : k.shape[-1]], everyones[..., k.shape[-1] :]
