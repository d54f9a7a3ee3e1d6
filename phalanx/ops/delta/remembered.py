"""Delta rules over sequences that go on from what is remembered of them: single tokens update states in place; pieces
of prompts run as rows, one after another, and leave their last state."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.ops.delta.delta import DeltaInputs, delta, delta_step
from phalanx.ops.op import Kernels
from phalanx.ops.scan.rows import StateSlots
from phalanx.sequence.paged import StateSpans


def delta_remembered(s: DeltaInputs, states: Tensor, spans: StateSpans, kernels: Kernels = "auto") -> Tensor:
    """q, k (T, HK, K), v (T, HV, V), decay (T, HV) or (T, HV, K), beta (T, HV) of the sequences of a batch -> (T, HV,
    V). states (slots, HV, K, V): updated in place."""
    out, singles = torch.zeros_like(s.v), len(spans.slots)

    def some(rows: slice) -> DeltaInputs:
        return s._replace(q=s.q[rows], k=s.k[rows], v=s.v[rows], decay=s.decay[rows], beta=s.beta[rows])

    if singles:
        own = slice(0, singles)
        out[own] = delta_step(some(own), StateSlots(states, spans.slots, spans.fresh))
    for piece in spans.pieces:
        rows = slice(piece.start, piece.stop)
        here = some(rows)
        q, k, v, decay, beta = (t.unsqueeze(0) for t in (here.q, here.k, here.v, here.decay, here.beta))
        first = None if piece.fresh else states[piece.slot].unsqueeze(0).clone()
        y, state = delta(here._replace(q=q, k=k, v=v, decay=decay, beta=beta, initial=first), kernels)
        out[rows], states[piece.slot] = y[0], state[0].to(states.dtype)
    return out
