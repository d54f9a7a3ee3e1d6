"""Rotary: the table of angles of a batch's positions, computed once per micro-batch for all layers with the same
rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.ops.dense.rope import Angles, rotary_table
from phalanx.ops.dense.rope_scaling import Rotation
from phalanx.sequence.batch import Batch, PerBatch

TABLES = PerBatch[Angles]()


class Rotary:
    """Keeps the frequencies on the device: copying them from the host in every step would make the host wait."""

    def __init__(self, rotation: Rotation):
        self.rotation = rotation
        self._made: dict[tuple[int, torch.device], tuple[Tensor, float]] = {}
        self._axes: dict[torch.device, Tensor] = {}

    def frequencies(self, length: int, device: torch.device) -> tuple[Tensor, float]:
        key = (length if self.rotation.by_length else 0, device)
        if key not in self._made:
            inv, factor = self.rotation.frequencies(length)
            self._made[key] = inv.to(device), factor
        return self._made[key]

    def table(self, batch: Batch, dtype: torch.dtype) -> Angles:
        """cos and sin (T, dim / 2) of the batch's positions, times the scaling's factor."""
        length = batch.seq_length if batch.paged is None else batch.paged.length
        inv, factor = self.frequencies(length, batch.positions.device)
        interleaved = self.rotation.interleaved
        return TABLES.of(
            batch, lambda: rotary_table(self._positions(batch), inv, dtype, factor, interleaved), self.rotation, dtype
        )

    def _positions(self, batch: Batch) -> Tensor:
        """(T,), or (T, pairs) where tokens have several positions."""
        if batch.coordinates is None or not self.rotation.axes:
            return batch.positions
        return batch.coordinates[:, self.axes(batch.coordinates.device)]

    def axes(self, device: torch.device) -> Tensor:
        """(pairs,): which of a token's positions turns each pair."""
        if device not in self._axes:
            self._axes[device] = torch.tensor(self.rotation.axes, device=device)
        return self._axes[device]
