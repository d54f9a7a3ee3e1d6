"""Relative position bias: what is added to the score of a query and a key, by head and by the bucket of their distance.

Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text transformer" (T5), 2020, section
2.1. A distance is the key's position less the query's. Queries and keys are given as runs of consecutive positions, so
each pair of runs has a bias with equal numbers along its diagonals: it is made from one number for each distance, and
its gradient is first summed along the diagonals. The sums have one order on every device.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.ops.attention.kind import RelativeBias

Runs = tuple[range, ...]
"""Consecutive positions, one run after another."""


@lru_cache(maxsize=64)
def thresholds(bias: RelativeBias) -> tuple[int, ...]:
    """The least distance of each bucket of one side, from bucket 1 on; buckets without distances are skipped.

    Half of the buckets have a distance each. The rest grow by the logarithm, in float32 as T5's weights were trained.
    Computed on the host, so that no device rounds a logarithm to another bucket.
    """
    side = bias.buckets // 2 if bias.bidirectional else bias.buckets
    exact = side // 2
    far = torch.arange(exact, bias.max_distance + 1)
    grown = torch.log(far.float() / exact) / math.log(bias.max_distance / exact) * (side - exact)
    bucket = torch.cat((torch.arange(exact), exact + grown.long())).clamp_max(side - 1)
    return tuple(int((bucket < b).sum()) for b in range(1, side))


def bucket_of(distance: Tensor, bias: RelativeBias) -> Tensor:
    """The bucket of each distance, int64."""
    size = distance.abs() if bias.bidirectional else (-distance).clamp_min(0)
    bucket = torch.zeros_like(size)
    for least in thresholds(bias):
        bucket += size >= least
    return bucket + (distance > 0) * (bias.buckets // 2) if bias.bidirectional else bucket


def bias_of(table: Tensor, bias: RelativeBias, queries: Runs, keys: Runs) -> Tensor:
    """table (buckets, heads) -> (heads, queries, keys)."""
    rows = [torch.cat([_rectangle(table, bias, q, k) for k in keys if k], -1) for q in queries if q]
    return torch.cat(rows, 1)


def bias_grad(dbias: Tensor, bias: RelativeBias, queries: Runs, keys: Runs) -> Tensor:
    """The gradient of the table from that of `bias_of`, in at least fp32."""
    dtype = torch.promote_types(dbias.dtype, torch.float32)
    grad = torch.zeros(bias.buckets, len(dbias), dtype=dtype, device=dbias.device)
    for q, rows in zip(queries, dbias.split([len(q) for q in queries], 1)):
        for k, block in zip(keys, rows.split([len(k) for k in keys], 2)):
            if q and k:
                bucket = bucket_of(_distances(q, k, dbias.device), bias)
                chosen = F.one_hot(bucket, bias.buckets).to(dtype)
                grad += chosen.mT @ _diagonal_sums(block.to(dtype)).mT
    return grad


def _distances(q: range, k: range, device: torch.device) -> Tensor:
    """Those of two runs, ascending."""
    return torch.arange(k.start - q.stop + 1, k.stop - q.start, device=device)


def _rectangle(table: Tensor, bias: RelativeBias, q: range, k: range) -> Tensor:
    """Row i of it is a window on the distances that starts one earlier than that of row i - 1."""
    each = table[bucket_of(_distances(q, k, table.device), bias)].mT
    return each.unfold(1, len(k), 1).flip(1)


def _diagonal_sums(x: Tensor) -> Tensor:
    """(heads, Q, K) -> (heads, Q + K - 1): sums of equal distances. Padded by Q, rows that are read as one row less
    wide are each shifted by one."""
    heads, q, k = x.shape
    shifted = F.pad(x.flip(1), (0, q)).flatten(1)[:, : q * (k + q - 1)]
    return shifted.view(heads, q, k + q - 1).sum(1)
