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

from phalanx.base.dataclass import dataclass
from phalanx.ops.attention.kind import RelativeBias
from phalanx.sequence.batch import Batch, PerBatch

BUCKETS = PerBatch[tuple[Tensor, ...]]()
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


@dataclass(frozen=True)
class Biased:
    """The bias of the scores of some queries and keys, as it is read in its table.

    buckets  of the distances of each run of queries and each run of keys, ascending
    count    rows of the table
    """

    queries: Runs
    keys: Runs
    buckets: tuple[Tensor, ...]
    count: int

    @staticmethod
    def of(batch: Batch, bias: RelativeBias, queries: Runs, keys: Runs) -> Biased:
        """Buckets are found once for each micro-batch; all layers read them, and backward."""
        queries, keys = (tuple(run for run in runs if run) for runs in (queries, keys))
        device = batch.tokens.device

        def find() -> tuple[Tensor, ...]:
            spans = [(k.start - q.stop + 1, k.stop - q.start) for q in queries for k in keys]
            return tuple(bucket_of(torch.arange(*span, device=device), bias) for span in spans)

        return Biased(queries, keys, BUCKETS.of(batch, find, bias, queries, keys), bias.buckets)

    def scores(self, table: Tensor, dtype: torch.dtype) -> Tensor:
        """table (buckets, heads) -> (heads, queries, keys)."""
        table, buckets = table.to(dtype), iter(self.buckets)
        rows = [torch.cat([_rectangle(table[next(buckets)].mT, len(k)) for k in self.keys], -1) for _ in self.queries]
        return torch.cat(rows, 1)

    def table_grad(self, dbias: Tensor | None) -> Tensor:
        """The table's gradient from that of `scores`, in at least fp32."""
        if dbias is None:
            raise RuntimeError("a backend that was given a bias returned no gradient for it")
        dtype = torch.promote_types(dbias.dtype, torch.float32)
        grad = torch.zeros(self.count, len(dbias), dtype=dtype, device=dbias.device)
        buckets = iter(self.buckets)
        for rows in dbias.split([len(q) for q in self.queries], 1):
            for block in rows.split([len(k) for k in self.keys], 2):
                chosen = F.one_hot(next(buckets), self.count).to(dtype)
                grad += chosen.mT @ _diagonal_sums(block.to(dtype)).mT
        return grad


def _rectangle(each: Tensor, keys: int) -> Tensor:
    """each (heads, distances) -> (heads, queries, keys): a row is a window on the distances that starts one earlier
    than that of the row before."""
    return each.unfold(1, keys, 1).flip(1)


def _diagonal_sums(x: Tensor) -> Tensor:
    """(heads, Q, K) -> (heads, Q + K - 1): sums of equal distances. Padded by Q, rows that are read as one row less
    wide are each shifted by one."""
    heads, q, k = x.shape
    shifted = F.pad(x.flip(1), (0, q)).flatten(1)[:, : q * (k + q - 1)]
    return shifted.view(heads, q, k + q - 1).sum(1)
