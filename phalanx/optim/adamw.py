"""AdamW over the shards of flat buckets: groups by weight decay and learning-rate factor, state beside the masters."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import Tensor

from phalanx.layout.buckets import Bucket
from phalanx.layout.param import Piece
from phalanx.ops.op import Kernels
from phalanx.ops.optimizer.adamw import AdamOptions, ParamRange, adamw_
from phalanx.ops.optimizer.moments import BLOCK
from phalanx.ops.optimizer.shard import Shard
from phalanx.optim.config import OptimConfig


def group_of(piece: Piece, config: OptimConfig) -> tuple[float, float]:
    """(weight decay, learning-rate factor) of a global tensor's elements."""
    scale = next((s for glob, s in config.lr_scale.items() if fnmatchcase(piece.name, glob)), 1.0)
    return config.weight_decay if piece.decay else 0.0, scale


def group_ranges(bucket: Bucket, lo: int, hi: int, config: OptimConfig) -> list[tuple[int, int, tuple[float, float]]]:
    """Runs (start, stop, group) of the bucket's elements lo..hi, neighbours of one group merged. Padding goes with
    what is before it."""
    found: list[tuple[int, int, tuple[float, float]]] = []
    starts = sorted(
        (slot.offset + piece.first(slot.spec.shape), group_of(piece, config))
        for slot in bucket.slots
        for piece in slot.spec.pieces
    )
    for i, (start, group) in enumerate(starts):
        stop = starts[i + 1][0] if i + 1 < len(starts) else bucket.numel
        a, b = max(start if i else 0, lo), min(stop, hi)
        if a >= b:
            continue
        if found and found[-1][2] == group and found[-1][1] == a:
            found[-1] = (found[-1][0], b, group)
        else:
            found.append((a, b, group))
    return found


def moment_dtype(config: OptimConfig) -> torch.dtype | None:
    """None: that of the masters."""
    return {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}.get(config.moments)


def moment_bytes(config: OptimConfig) -> float:
    """Of an element of one moment; 0: as many as the masters'."""
    return {"bf16": 2.0, "fp8": 1.0 + 1.0 / BLOCK}.get(config.moments, 0.0)


class AdamW:
    """`step` () counts applied steps on the device: a skipped step does not advance it."""

    def __init__(self, shards: list[Shard], config: OptimConfig, device: torch.device, kernels: Kernels = "auto"):
        self.config, self.shards, self.kernels = config, shards, kernels
        self.step = torch.zeros((), dtype=torch.float32, device=device)
        self.groups: dict[tuple[float, float], list[ParamRange]] = {}
        for s in shards:
            for a, b, group in group_ranges(s.bucket, s.lo, s.hi, config):
                own = slice(a - s.lo, b - s.lo)
                part = ParamRange(s.master[own], s.grad[own], s.m[own], s.v[own], None if s.out is None else s.out[own])
                self.groups.setdefault(group, []).append(part)

    @torch.no_grad()
    def update(self, lr: float, skip: Tensor, factor: Tensor | None = None) -> None:
        """Update masters and weights from the shards' gradients times `factor` (), and set the gradients to zero.

        Where `skip` () is 1 nothing else changes, the count of steps included.
        """
        c = self.config
        factor = torch.ones_like(skip) if factor is None else factor
        self.step.add_(1.0 - skip)
        for (decay, scale), members in self.groups.items():
            adamw_(
                members, self.step, AdamOptions(lr * scale, c.beta1, c.beta2, c.eps, decay), factor, skip, self.kernels
            )
