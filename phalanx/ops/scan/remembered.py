"""Convolutions and scans of sequences that continue from a stored state: single tokens update states in place;
pieces of prompts run as rows, one after another, and leave their last state.

States are stored in slots, one for each sequence (sequence.paged.StateSpans).
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.ops.op import Kernels
from phalanx.ops.scan.conv1d import conv1d, last_tokens
from phalanx.ops.scan.rows import StateSlots, TokenRows
from phalanx.ops.scan.scan import ScanInputs, decay_rates, scan, steps_of
from phalanx.ops.scan.step import StepInputs, conv1d_step, scan_step
from phalanx.sequence.paged import StatePiece, StateSpans


def convolve_remembered(
    x: Tensor, tokens: Tensor, spans: StateSpans, weight: Tensor, bias: Tensor | None, kernels: Kernels = "auto"
) -> Tensor:
    """x (T, C) of the sequences of a batch -> (T, C). tokens (slots, K - 1, C): the inputs that came last, updated in
    place."""
    singles, made = len(spans.slots), list[Tensor]()
    if singles:
        slots = StateSlots(tokens, spans.slots, spans.fresh)
        made.append(conv1d_step(x[:singles], slots, weight, bias, True, kernels))
    for piece in spans.pieces:
        row, before = x[piece.start : piece.stop].unsqueeze(0), state_before(tokens, piece).to(x.dtype)
        made.append(conv1d(row, weight, bias, TokenRows(None, before), True, kernels)[0])
        tokens[piece.slot] = last_tokens(row, before, weight.shape[-1])[0]
    return joined(made, x)


def scan_remembered(s: StepInputs, states: Tensor, spans: StateSpans, kernels: Kernels = "auto") -> Tensor:
    """x (T, H, P), b and c (T, G, N), dt (T, H) -> (T, H, P). states (slots, H, P, N): updated in place."""
    singles, made = len(spans.slots), list[Tensor]()
    if singles:
        slots = StateSlots(states, spans.slots, spans.fresh)
        made.append(scan_step(s.some(slice(0, singles)), slots, kernels))
    for piece in spans.pieces:
        here = s.some(slice(piece.start, piece.stop))
        steps = steps_of(here.dt, s.bias, s.limits)
        x, dt, b, c = (t.unsqueeze(0) for t in (here.x, steps, here.b, here.c))
        row = ScanInputs(x, dt, decay_rates(s.log), b, c, s.d, initial=state_before(states, piece))
        y, state = scan(row, kernels)
        made.append(y[0])
        states[piece.slot] = state[0].to(states.dtype)
    return joined(made, s.x)


def joined(made: list[Tensor], like: Tensor) -> Tensor:
    """What tokens of a batch became, one sequence after another; zeros for those after the last, which are padding."""
    if len(made) == 1 and made[0].shape == like.shape:
        return made[0]
    padding = like.new_zeros(len(like) - sum(map(len, made)), *like.shape[1:])
    return torch.cat((*made, padding))


def state_before(remembered: Tensor, piece: StatePiece) -> Tensor:
    """(1, ...): what a piece goes on from; zeros if its sequence begins here."""
    found = remembered[piece.slot].unsqueeze(0)
    return torch.zeros_like(found) if piece.fresh else found.clone()
