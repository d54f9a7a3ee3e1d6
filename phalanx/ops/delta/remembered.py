"""Delta rules over sequences that continue from a stored state: single tokens update states in place; pieces
of prompts run as rows, one after another, and leave their last state."""

from __future__ import annotations

from torch import Tensor

from phalanx.ops.delta.delta import DeltaInputs, delta
from phalanx.ops.delta.step import delta_step
from phalanx.ops.op import Kernels
from phalanx.ops.scan.remembered import joined, state_before
from phalanx.ops.scan.rows import StateSlots
from phalanx.sequence.paged import StateSpans


def delta_remembered(s: DeltaInputs, states: Tensor, spans: StateSpans, kernels: Kernels = "auto") -> Tensor:
    """q, k (T, HK, K), v (T, HV, V), decay (T, HV) or (T, HV, K), beta (T, HV) of the sequences of a batch -> (T, HV,
    V). states (slots, HV, K, V): updated in place."""
    singles, made = len(spans.slots), list[Tensor]()

    def some(rows: slice | tuple[None, slice]) -> DeltaInputs:
        return s._replace(q=s.q[rows], k=s.k[rows], v=s.v[rows], decay=s.decay[rows], beta=s.beta[rows])

    if singles:
        made.append(delta_step(some(slice(0, singles)), StateSlots(states, spans.slots, spans.fresh), kernels))
    for piece in spans.pieces:
        row = some((None, slice(piece.start, piece.stop)))
        y, state = delta(row._replace(initial=state_before(states, piece)), kernels)
        made.append(y[0])
        states[piece.slot] = state[0].to(states.dtype)
    return joined(made, s.v)
