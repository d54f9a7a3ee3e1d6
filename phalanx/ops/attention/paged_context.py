"""Attention over pages that ranks of context parallelism share: of every sequence each rank remembers the tokens at
every cp-th position (sequence.paged), and computes a part of each step's tokens.

Queries travel, not keys: a step has few tokens, and a long sequence many. All ranks have the step's queries, and each
reads its own keys with them. What they read goes home and is joined there by its log-sum-exp (Dao et al.,
"Flash-Decoding for long-context inference", 2023, over ranks). Keys and values of the step's tokens travel once, to be
remembered.

    this rank's tokens ──gather──▶ all tokens: k, v to own pages; q reads own pages ──all-to-all──▶ own tokens: joined
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.comm.axis import Axis


def gather_tokens(heads: tuple[Tensor, Tensor, Tensor | None], cp: Axis) -> tuple[Tensor, Tensor, Tensor | None]:
    """q, k and v (or None), each (T / cp, ...) of this rank's tokens -> (T, ...) of all."""
    q, k, v = heads
    return cp.all_gather(q).wait(), cp.all_gather(k).wait(), None if v is None else cp.all_gather(v).wait()


def join_over(out: Tensor, lse: Tensor, sinks: Tensor | None, cp: Axis) -> Tensor:
    """What all T tokens read here, out (T, heads, V) with its log-sum-exp (T, heads), without sinks -> (T / cp, heads,
    V), what this rank's tokens read everywhere, with sinks (heads,) if there are some."""
    outs, sums = (cp.all_to_all(part).unflatten(0, (cp.size, -1)) for part in (out, lse))
    return joined_parts(outs, sums, sinks)


def joined_parts(outs: Tensor, sums: Tensor, sinks: Tensor | None) -> Tensor:
    """outs (parts, T, heads, V) and their log-sum-exps (parts, T, heads) -> (T, heads, V). Zeros for tokens that read
    nothing in any part."""
    total = torch.logsumexp(sums, 0)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.to(total.dtype))
    weights = (sums - total.masked_fill(total == -torch.inf, 0)).exp()
    return (outs.to(sums.dtype) * weights.unsqueeze(-1)).sum(0).to(outs.dtype)
