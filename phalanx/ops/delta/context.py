"""Delta rules over sequences that are sharded over context-parallel ranks.

A rank has two chunks of each sequence (ops.scan.context). What a chunk makes of the state before it is affine: outputs
are y + P S, the state after it is N + M S, with the transition M (K, K) of each head. The rule is linear in values and
in its first state together, so P and M are what it gives for values of zero and the identity as first state: each chunk
runs once, with K more features of values. One all-gather joins the pairs (M, N) of all chunks; each rank follows the
states to its own chunks and adds what these read of them. Backward takes the same way round.

A rank sends 2 B HV K (K + V) numbers in at least fp32 to each of the others, however long the B sequences are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.ops.delta.delta import DeltaInputs, delta
from phalanx.ops.dense.activation import widened
from phalanx.ops.experts.exchange import gather
from phalanx.ops.op import Kernels
from phalanx.ops.scan.context import chunk_links, chunks_of
from phalanx.sequence.batch import Batch


def delta_over_ranks(s: DeltaInputs, batch: Batch, axis: Axis, kernels: Kernels = "auto") -> Tensor:
    """y (B, L, HV, V) of this rank's tokens (B, L) of the sequences of a batch. numbers and initial of `s` are not
    read: documents are the batch's, and nothing comes before a sequence. Collective over `axis` if ranks share
    sequences."""
    chunks = chunks_of(batch)
    pieces = [_rows(s, chunk.rows, chunk.numbers) for chunk in chunks]
    if len(chunks) == 1:
        return delta(pieces[0], kernels)[0]
    found = [delta(_extended(piece), kernels) for piece in pieces]
    before = _states_before([state for _, state in found], batch, axis)
    width = s.v.shape[-1]
    made = []
    for (y, _), state in zip(found, before):
        own, passages = y.split((width, y.shape[-1] - width), -1)
        made.append((widened(own) + torch.einsum("rthk,rhkv->rthv", widened(passages), state)).to(y.dtype))
    return torch.cat(made, 1)


def _rows(s: DeltaInputs, rows: slice, numbers: Tensor | None) -> DeltaInputs:
    q, k, v, decay, beta = (t[:, rows] for t in (s.q, s.k, s.v, s.decay, s.beta))
    return s._replace(q=q, k=k, v=v, decay=decay, beta=beta, numbers=numbers, initial=None)


def _extended(s: DeltaInputs) -> DeltaInputs:
    """With K more features of values: they are zero, and begin with the identity."""
    rows, heads, width, _ = s.state_shape
    wide = widened(s.v[:0])
    first = torch.cat(
        (
            wide.new_zeros(s.state_shape),
            torch.eye(width, dtype=wide.dtype, device=wide.device).expand(rows, heads, width, width),
        ),
        -1,
    )
    more = s.v.new_zeros(*s.v.shape[:-1], width)
    return s._replace(v=torch.cat((s.v, more), -1), initial=first)


def _states_before(left: list[Tensor], batch: Batch, axis: Axis) -> list[Tensor]:
    """For each chunk of this rank, the state (B, HV, K, V) before it. `left` (B, HV, K, V + K): N and M of each."""
    count, keys = batch.part.count, left[0].shape[2]
    everyone = gather(
        torch.stack(left), axis
    )  # (2n, B, ...), the two chunks of each rank after those of the rank before
    goes_on, whole = chunk_links(batch)
    before = [torch.zeros_like(left[0][..., :-keys])]
    for number in range(2 * count - 1):
        at = 2 * number if number < count else 2 * (2 * count - 1 - number) + 1
        added, passage = everyone[at].split((left[0].shape[-1] - keys, keys), -1)
        passed = torch.where(whole[number][:, None, None, None], passage @ before[-1], 0)
        before.append(torch.where(goes_on[number + 1][:, None, None, None], added + passed, 0))
    return [before[chunk.number] for chunk in chunks_of(batch)]
