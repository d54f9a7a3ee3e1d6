"""The short convolution before a scan or a delta rule: how its weights are stored, and what it makes of the tokens of
this rank."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phalanx.layout.box import Box
from phalanx.layout.param import ParamSpec, Piece
from phalanx.nn.env import Env
from phalanx.nn.initial import Uniform
from phalanx.nn.module import OutputRows
from phalanx.ops.scan.context import chunks_of, tokens_before
from phalanx.ops.scan.conv1d import CONV1D, conv1d
from phalanx.ops.scan.rows import TokenRows
from phalanx.sequence.batch import Batch


def conv_spec(rows: list[OutputRows], taps: int) -> ParamSpec:
    """Storage (channels here, 1, taps), as torch.nn.Conv1d has it, that stacks slices of channels."""
    init, pieces, at = Uniform(1 / math.sqrt(taps)), [], 0
    for r in rows:
        count = r.stop - r.start
        local, box = (slice(at, at + count), slice(0, 1), slice(0, taps)), Box((r.start, 0, 0), (r.stop, 1, taps))
        pieces.append(Piece(r.name, (r.size, 1, taps), box, local, init, replicas=r.replicas))
        at += count
    return ParamSpec((at, 1, taps), tuple(pieces), role="conv")


def convolve_chunks(mixed: Tensor, batch: Batch, weight: Tensor, bias: Tensor | None, env: Env) -> Tensor:
    """mixed (T, C) -> the same, convolved inside documents and activated. A chunk of a sequence that context-parallel
    ranks share gets the tokens before it from its neighbour."""
    x = mixed.unflatten(0, (batch.num_sequences, -1))
    before = tokens_before(x, batch, weight.shape[-1] - 1, env.axes.cp)
    kernels = env.kernels_for(CONV1D)
    made = [
        conv1d(x[:, chunk.rows], weight, bias, TokenRows(chunk.numbers, old), True, kernels)
        for chunk, old in zip(chunks_of(batch), before)
    ]
    return torch.cat(made, 1).flatten(0, 1) if len(made) > 1 else made[0].flatten(0, 1)
