"""An optimizer over the shards of flat buckets: groups by weight decay and learning-rate factor, state beside the
masters, steps that are skipped on the device."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import Tensor

from phalanx.layout.buckets import Bucket
from phalanx.layout.param import Piece
from phalanx.ops.op import Kernels
from phalanx.ops.optimizer.moments import BLOCK
from phalanx.ops.optimizer.shard import MASTER, Shard, StateRange, keep, widened
from phalanx.optim.config import OptimConfig
from phalanx.optim.optimizer import FusedOptimizer, Optimizer, ParamRange, StepScalars, find_optimizer

CHUNK = 1 << 22  # elements that an update without a fused form works on at once; whole blocks of FP8 moments


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


def state_bytes(config: OptimConfig, master: int) -> float:
    """Of the optimizer's whole state of one element, beside a master of so many bytes."""
    moment = {"bf16": 2.0, "fp8": 1.0 + 1.0 / BLOCK}.get(config.moments, float(master))
    return len(find_optimizer(config.name).state) * moment


class ShardedOptimizer:
    """The optimizer of one rank. `step` () counts applied steps on the device: a skipped step does not advance it."""

    def __init__(self, optimizer: Optimizer, shards: list[Shard], device: torch.device, kernels: Kernels = "auto"):
        self.optimizer, self.shards, self.kernels = optimizer, shards, kernels
        self.config: OptimConfig = optimizer.config
        self.step = torch.zeros((), dtype=torch.float32, device=device)
        self.groups: dict[tuple[float, float], list[StateRange]] = {}
        for s in shards:
            for a, b, group in group_ranges(s.bucket, s.lo, s.hi, self.config):
                self.groups.setdefault(group, []).append(s.range(a - s.lo, b - s.lo))

    @property
    def kinds(self) -> tuple[str, ...]:
        """What there is of each element: its master, then the optimizer's state."""
        return MASTER, *self.optimizer.state

    @torch.no_grad()
    def update(self, lr: float, skip: Tensor, factor: Tensor | None = None) -> None:
        """Update masters and weights from the shards' gradients times `factor` (), and set the gradients to zero.

        Where `skip` () is 1 nothing else changes, the count of steps included.
        """
        factor = torch.ones_like(skip) if factor is None else factor
        self.step.add_(1.0 - skip)
        scalars = StepScalars(self.step, factor, skip)
        for (decay, scale), ranges in self.groups.items():
            if isinstance(self.optimizer, FusedOptimizer):
                self.optimizer.update_ranges(ranges, lr * scale, decay, scalars, self.kernels)
            else:
                update_in_chunks(self.optimizer, ranges, lr * scale, decay, scalars)


def update_in_chunks(
    optimizer: Optimizer, ranges: list[StateRange], lr: float, weight_decay: float, scalars: StepScalars
) -> None:
    """One step of an optimizer's `update` on working copies, written back where the step is not skipped."""
    skipped = scalars.skip.bool()
    for stored in (r[a : a + CHUNK] for r in ranges for a in range(0, len(r.master), CHUNK)):
        dtype = stored.master.dtype
        before = {name: widened(kept, dtype) for name, kept in stored.state.items()}
        p = ParamRange(
            stored.master.clone(),
            stored.grad * scalars.factor.to(dtype),
            {name: value.clone() for name, value in before.items()},
            lr,
            weight_decay,
            scalars.step,
        )
        optimizer.update(p)
        stored.master.copy_(torch.where(skipped, stored.master, p.master))
        for name, kept in stored.state.items():
            keep(kept, torch.where(skipped, before[name], p.state[name]), scalars.step)
        if stored.out is not None:
            stored.out.copy_(stored.master)
        stored.grad.zero_()
