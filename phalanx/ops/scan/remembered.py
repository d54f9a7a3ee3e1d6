"""Convolutions and scans of sequences that go on from what is remembered of them: single tokens update states in place;
pieces of prompts run as rows, one after another, and leave their last state.

What is remembered lies in slots, one for each sequence (sequence.paged.StateSpans).
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.ops.op import Kernels
from phalanx.ops.scan.conv1d import conv1d, conv1d_step, last_tokens
from phalanx.ops.scan.scan import scan, scan_step
from phalanx.sequence.paged import StatePiece, StateSpans


def convolve_remembered(
    x: Tensor, tokens: Tensor, spans: StateSpans, weight: Tensor, bias: Tensor | None, kernels: Kernels = "auto"
) -> Tensor:
    """x (T, C) of the sequences of a batch -> (T, C). tokens (slots, K - 1, C): the inputs that came last, updated in
    place."""
    out, singles = torch.zeros_like(x), len(spans.slots)
    if singles:
        out[:singles] = conv1d_step(x[:singles], tokens, spans.slots, weight, bias, fresh=spans.fresh)
    for piece in spans.pieces:
        row, before = x[piece.start : piece.stop].unsqueeze(0), _first(tokens, piece).to(x.dtype)
        out[piece.start : piece.stop] = conv1d(row, weight, bias, None, before, True, kernels)[0]
        tokens[piece.slot] = last_tokens(row, before, weight.shape[-1])[0]
    return out


def scan_remembered(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    steps: Tensor,
    a: Tensor,
    d: Tensor,
    states: Tensor,
    spans: StateSpans,
    kernels: Kernels = "auto",
) -> Tensor:
    """x (T, H, P), b and c (T, G, N), steps (T, H) -> (T, H, P). states (slots, H, P, N): updated in place."""
    out, singles = torch.zeros_like(x), len(spans.slots)
    if singles:
        own = slice(0, singles)
        out[own] = scan_step(x[own], steps[own], a, b[own], c[own], d, states, spans.slots, spans.fresh)
    for piece in spans.pieces:
        rows = slice(piece.start, piece.stop)
        row, step, row_b, row_c = (t[rows].unsqueeze(0) for t in (x, steps, b, c))
        y, state = scan(row, step, a, row_b, row_c, d, None, _first(states, piece), kernels)
        out[rows], states[piece.slot] = y[0], state[0].to(states.dtype)
    return out


def _first(remembered: Tensor, piece: StatePiece) -> Tensor:
    """(1, ...): what a piece goes on from; zeros if its sequence begins here."""
    found = remembered[piece.slot].unsqueeze(0)
    return torch.zeros_like(found) if piece.fresh else found.clone()
