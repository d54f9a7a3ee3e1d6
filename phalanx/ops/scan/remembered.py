"""Convolutions and scans of sequences that go on from what is remembered of them: single tokens update states in place;
pieces of prompts run as rows, one after another, and leave their last state.

What is remembered lies in slots, one for each sequence (sequence.paged.StateSpans).
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.ops.op import Kernels
from phalanx.ops.scan.conv1d import conv1d, conv1d_step, last_tokens
from phalanx.ops.scan.rows import StateSlots, TokenRows
from phalanx.ops.scan.scan import ScanInputs, scan, scan_step
from phalanx.sequence.paged import StatePiece, StateSpans


def convolve_remembered(
    x: Tensor, tokens: Tensor, spans: StateSpans, weight: Tensor, bias: Tensor | None, kernels: Kernels = "auto"
) -> Tensor:
    """x (T, C) of the sequences of a batch -> (T, C). tokens (slots, K - 1, C): the inputs that came last, updated in
    place."""
    out, singles = torch.zeros_like(x), len(spans.slots)
    if singles:
        slots = StateSlots(tokens, spans.slots, spans.fresh)
        out[:singles] = conv1d_step(x[:singles], slots, weight, bias)
    for piece in spans.pieces:
        row, before = x[piece.start : piece.stop].unsqueeze(0), _first(tokens, piece).to(x.dtype)
        out[piece.start : piece.stop] = conv1d(row, weight, bias, TokenRows(None, before), True, kernels)[0]
        tokens[piece.slot] = last_tokens(row, before, weight.shape[-1])[0]
    return out


def scan_remembered(s: ScanInputs, states: Tensor, spans: StateSpans, kernels: Kernels = "auto") -> Tensor:
    """x (T, H, P), b and c (T, G, N), dt (T, H) -> (T, H, P). states (slots, H, P, N): updated in place."""
    out, singles = torch.zeros_like(s.x), len(spans.slots)

    def some(rows: slice) -> ScanInputs:
        return s._replace(x=s.x[rows], dt=s.dt[rows], b=s.b[rows], c=s.c[rows])

    if singles:
        own = slice(0, singles)
        out[own] = scan_step(some(own), StateSlots(states, spans.slots, spans.fresh))
    for piece in spans.pieces:
        rows = slice(piece.start, piece.stop)
        here = some(rows)
        x, dt, b, c = (t.unsqueeze(0) for t in (here.x, here.dt, here.b, here.c))
        y, state = scan(here._replace(x=x, dt=dt, b=b, c=c, initial=_first(states, piece)), kernels)
        out[rows], states[piece.slot] = y[0], state[0].to(states.dtype)
    return out


def _first(remembered: Tensor, piece: StatePiece) -> Tensor:
    """(1, ...): what a piece goes on from; zeros if its sequence begins here."""
    found = remembered[piece.slot].unsqueeze(0)
    return torch.zeros_like(found) if piece.fresh else found.clone()
