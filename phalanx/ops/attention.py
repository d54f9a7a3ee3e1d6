"""Causal attention over q, k, v of whole sequences: the dense path for uniform batches, a mask where documents end inside.

Reference for every backend: softmax(q k^T / sqrt(K)) v. torch's scaled_dot_product_attention computes it; on GPUs it picks
cuDNN or flash kernels. Dropout of probabilities runs on the explicit path only.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.base.batch import Batch
from phalanx.base.rng import keep_mask
from phalanx.ops.flash import flash_attention, use_flash
from phalanx.ops.kernels import Kernels


def attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch, kernels: Kernels = "plain") -> Tensor:
    """q (sequences, heads, S, K), k and v (sequences, kv_heads, S, K) -> (T, heads * K). Query head h reads kv head h // (heads / kv_heads)."""
    if batch.documents is None and use_flash(kernels, q):
        return flash_attention(q, k, v)
    grouped = q.shape[1] != k.shape[1]
    if batch.documents is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=_mask(batch), enable_gqa=grouped)
    return out.transpose(1, 2).reshape(batch.num_tokens, -1)


def attention_with_dropout(q: Tensor, k: Tensor, v: Tensor, batch: Batch, p: float, seed: int, layer: int, first_head: int) -> Tensor:
    """The same with dropout of the probabilities, keyed by (sample, query position, layer, global head, key position)."""
    heads = q.shape[1]
    k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~_mask(batch), -torch.inf)
    probs = torch.softmax(scores if scores.dtype == torch.float64 else scores.float(), -1)
    rows = tuple(t.view(batch.num_sequences, batch.seq_length) for t in (batch.samples, _places(batch)))
    keep = torch.stack([keep_mask(p, seed, layer, 0, rows, batch.seq_length, first_head + h) for h in range(heads)], 1)  # type: ignore[arg-type]
    out = (probs * keep / (1.0 - p)).to(v.dtype) @ v
    return out.transpose(1, 2).reshape(batch.num_tokens, -1)


def _places(batch: Batch) -> Tensor:
    """Place of each token in its sequence (positions restart at documents; places do not)."""
    return torch.arange(batch.seq_length, device=batch.tokens.device).repeat(batch.num_sequences)


def _mask(batch: Batch) -> Tensor:
    """(sequences or 1, 1, S, S) bool, True where query i may read key j: j <= i, and the same document."""
    return batch.derive("attention mask", lambda: _make_mask(batch))


def _make_mask(batch: Batch) -> Tensor:
    causal = torch.ones(batch.seq_length, batch.seq_length, dtype=torch.bool, device=batch.tokens.device).tril()
    if batch.documents is None:
        return causal[None, None]
    doc = batch.documents.view(batch.num_sequences, 1, batch.seq_length)
    return causal & (doc.unsqueeze(-1) == doc.unsqueeze(-2))
