"""An optimizer over the shards of flat buckets: groups by weight decay and learning-rate factor, state stored beside
the masters, steps skipped on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from phalanx.base.align import ELEMENTS, room
from phalanx.layout.buckets import Bucket, Slot
from phalanx.layout.param import Piece
from phalanx.ops.op import Kernels
from phalanx.ops.optimizer import blockwise, masters
from phalanx.ops.optimizer.moments import BLOCK
from phalanx.ops.optimizer.shard import MASTER, Shard, StateRange, keep, widened
from phalanx.optim.config import OptimConfig
from phalanx.optim.optimizer import (
    FusedOptimizer,
    MatrixOptimizer,
    Optimizer,
    ParamRange,
    StepScalars,
    StoredMatrix,
    WholeMatrix,
    optimizers_of,
)

TOGETHER = 1 << 24  # elements of equal matrices that are updated at once, if an optimizer can; larger ones are alone
CHUNK = 1 << 22  # elements per call of an update without a fused form; a multiple of the blocks of packed tensors


def group_of(piece: Piece, config: OptimConfig) -> tuple[float, float]:
    """(weight decay, learning-rate factor) of a global tensor's elements."""
    scale = next((s for glob, s in config.lr_scale.items() if fnmatchcase(piece.name, glob)), 1.0)
    return config.weight_decay if piece.decay else 0.0, scale


def group_ranges(bucket: Bucket, lo: int, hi: int, config: OptimConfig) -> list[tuple[int, int, tuple[float, float]]]:
    """Ranges (start, stop, group) of the bucket's elements lo..hi, with neighbours of one group merged. Padding joins
    the range before it."""
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
    """The dtype of moments; None: that of the masters."""
    dtypes = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "8bit": torch.uint8}
    return dtypes.get(config.moments)


def state_bytes(config: OptimConfig, master: int) -> list[float]:
    """Bytes of an element's whole state, with masters of `master` bytes: of the optimizer, and of its fallback."""
    moments = {"bf16": 2.0, "fp8": 1.0 + 1.0 / BLOCK, "8bit": blockwise.BYTES}
    return [len(o.state) * moments.get(o.config.moments, float(master)) for o in optimizers_of(config)]


def master_bytes(config: OptimConfig, master: int) -> float:
    """Bytes of an element's master that are stored beside its weight."""
    return masters.BYTES if config.masters == "split" else master


Groups = dict[tuple[float, float], list[StateRange]]
"""Ranges by (weight decay, learning-rate factor)."""
Updated = Callable[[Shard, Sequence[Slot]], None]


class UpdateRule:
    """One optimizer and the shards that it updates. rate: its learning rate relative to that of the step; together: how
    many elements of equal matrices it may update at once."""

    def __init__(self, optimizer: Optimizer, shards: list[Shard], rate: float, kernels: Kernels, together: int):
        self.optimizer, self.rate, self.kernels = optimizer, rate, kernels
        self.homes = [HomeRule(optimizer, s, kernels, together) for s in shards if s.home is not None]
        self.shards = [s for s in shards if s.home is None]
        self._of_bucket: dict[int, Groups] = {}

    @property
    def slots(self) -> list[Slot]:
        """Of what this rank updates a part of, or has whole."""
        whole = [slot for home in self.homes for bucket in home.groups for slot in home.exchange.slots(bucket)]
        return [*(slot for shard in self.shards for slot in shard.bucket.slots), *whole]

    @cached_property
    def groups(self) -> Groups:
        """Of all shards."""
        return self._grouped(self.shards)

    def _grouped(self, shards: list[Shard]) -> Groups:
        found: Groups = {}
        for s in shards:
            for a, b, group in group_ranges(s.bucket, s.lo, s.hi, self.optimizer.config):
                found.setdefault(group, []).append(s.range(a - s.lo, b - s.lo))
        return found

    def begin(self) -> None:
        """As ShardedOptimizer.begin."""
        for home in self.homes:
            home.exchange.begin()

    def update(self, lr: float, scalars: StepScalars) -> None:
        """What needs no exchange between ranks."""
        self._update(self.groups, lr, scalars)

    def update_homes(self, lr: float, scalars: StepScalars, updated: Updated | None) -> None:
        """Whole matrices, with their way there and back."""
        for home in self.homes:
            home.update(lr * self.rate, scalars, updated)

    def update_bucket(self, bucket: int, lr: float, scalars: StepScalars) -> None:
        """As ShardedOptimizer.update_bucket."""
        if bucket not in self._of_bucket:  # made here because gradients without memory have no ranges
            self._of_bucket[bucket] = self._grouped([s for s in self.shards if s.bucket.id == bucket])
        self._update(self._of_bucket[bucket], lr, scalars)

    def _update(self, groups: Groups, lr: float, scalars: StepScalars) -> None:
        for (decay, scale), ranges in groups.items():
            if isinstance(self.optimizer, FusedOptimizer):
                self.optimizer.update_ranges(ranges, lr * self.rate * scale, decay, scalars, self.kernels)
            else:
                update_in_chunks(self.optimizer, ranges, lr * self.rate * scale, decay, scalars)


class ShardedOptimizer:
    """The optimizer of one rank and its fallback: `optimizers`, each with its shards. `step` () counts applied steps on
    the device; a skipped step does not advance it. `updated` is called with each shard and those of its slots that
    have been updated, before their weights are sent to other ranks."""

    def __init__(
        self,
        optimizers: Sequence[tuple[Optimizer, list[Shard]]],
        device: torch.device,
        kernels_for: Callable[[str], Kernels] = lambda op: "auto",
        together: int = TOGETHER,
    ):
        """kernels_for: the kernels of an op (FusedOptimizer.op, MatrixOptimizer.op). together: how many elements of
        equal matrices may be updated at once; 0: each alone, whichever others there are."""
        self.config: OptimConfig = optimizers[0][0].config
        self.shards = [shard for _, shards in optimizers for shard in shards]
        self.step = torch.zeros((), dtype=torch.float32, device=device)
        self.updated: Updated | None = None
        self.rules = [
            UpdateRule(
                optimizer,
                shards,
                rate_of(self.config, optimizer.config),
                kernels_for(optimizer.op) if isinstance(optimizer, FusedOptimizer | MatrixOptimizer) else "plain",
                together,
            )
            for optimizer, shards in optimizers
        ]

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is stored for each element: its master, then the state of each optimizer."""
        return tuple(dict.fromkeys((MASTER, *(name for rule in self.rules for name in rule.optimizer.state))))

    @property
    def idle_globs(self) -> list[str]:
        """Keys of `optim` with rates of tensors by name, none of which this rank updates."""
        found = []
        for section, rule in zip(("optim", "optim.fallback"), self.rules):
            names = [piece.name for slot in rule.slots for piece in slot.spec.pieces]
            globs = rule.optimizer.config.lr_scale
            found += [f"{section}.lr_scale.{glob}" for glob in globs if not any(fnmatchcase(n, glob) for n in names)]
        return found

    def begin(self) -> None:
        """Start sending complete gradients to the homes of whole matrices, if there are any. `update` does it
        otherwise."""
        for rule in self.rules:
            rule.begin()

    @torch.no_grad()
    def update(self, lr: float, skip: Tensor, factor: Tensor | None = None) -> None:
        """Update masters and weights from the shards' gradients times `factor` (), and set the gradients to zero.

        Where `skip` () is 1, nothing else changes, including the count of steps.
        """
        factor = torch.ones_like(skip) if factor is None else factor
        self.step.add_(1.0 - skip)
        scalars = StepScalars(self.step, factor, skip)
        for rule in self.rules:
            rule.update(lr, scalars)
            if self.updated is not None:
                for shard in rule.shards:
                    self.updated(shard, shard.bucket.slots)
        for rule in self.rules:
            rule.update_homes(lr, scalars, self.updated)

    @torch.no_grad()
    def update_bucket(self, bucket: int, lr: float, skip: Tensor, factor: Tensor) -> None:
        """As `update`, of one bucket. The count of steps is the caller's to advance (`step`), once for all buckets."""
        scalars = StepScalars(self.step, factor, skip)
        for rule in self.rules:
            rule.update_bucket(bucket, lr, scalars)


def rate_of(config: OptimConfig, own: OptimConfig) -> float:
    """The learning rate of one of a config's optimizers relative to the step's, which is that of optim.name."""
    return 1.0 if own is config or own.lr == config.lr else own.lr / config.lr


def update_in_chunks(
    optimizer: Optimizer, ranges: list[StateRange], lr: float, weight_decay: float, scalars: StepScalars
) -> None:
    """One step of an optimizer's `update` on ranges of limited size."""
    for stored in (r[a : a + CHUNK] for r in ranges for a in range(0, len(r.master), CHUNK)):
        update_copies(optimizer, stored, (lr, weight_decay), scalars)


class HomeRule:
    """An optimizer and the whole matrices of one home: those of each of the ranks' buckets, in groups that are updated
    at once."""

    def __init__(self, optimizer: Optimizer, shard: Shard, kernels: Kernels, together: int):
        if shard.home is None:
            raise TypeError("whole matrices need a home")
        self.optimizer, self.shard, self.kernels, self.exchange = optimizer, shard, kernels, shard.home
        slots = {bucket: shard.home.slots(bucket) for bucket in shard.home.order}
        self.groups = {bucket: grouped_slots(mine, optimizer, together) for bucket, mine in slots.items()}

    def update(self, lr: float, scalars: StepScalars, updated: Updated | None) -> None:
        """One step, including the exchange with the ranks that have gradients and weights. `updated` is called with the
        matrices of a bucket before their weights are sent."""
        self.exchange.begin()
        for bucket, groups in self.groups.items():
            self.exchange.bring_gradients(bucket)
            for (decay, scale), slots in groups:
                stored = [self._stored(slot, alone=updated is None) for slot in slots]
                self._update(slots, stored, (lr * scale, decay), scalars)
            if updated is not None:
                updated(self.shard, self.exchange.slots(bucket))
            self.exchange.send_weights(bucket)

    def _update(
        self, slots: Sequence[Slot], stored: Sequence[StateRange], rates: tuple[float, float], scalars: StepScalars
    ) -> None:
        optimizer = self.optimizer
        if isinstance(optimizer, MatrixOptimizer):
            where = [StoredMatrix(s, slot.spec.shape[-2:], *rates, slot.spec.logical) for s, slot in zip(stored, slots)]
            if optimizer.update_stored(where, scalars, self.kernels):
                return
        copies = [WorkingCopies.of_matrix(s, slot, rates, scalars) for s, slot in zip(stored, slots)]
        if isinstance(optimizer, MatrixOptimizer):
            optimizer.update_matrices([c.p for c in copies], self.kernels)  # type: ignore[misc]
        else:
            for copy in copies:
                optimizer.update(copy.p)
        for copy in copies:
            copy.keep(scalars)

    def _stored(self, slot: Slot, alone: bool) -> StateRange:
        """alone: nothing else changes masters after the update, which then writes the weights too."""
        kept = self.shard.range(slot.offset, slot.offset + room(slot.numel, ELEMENTS))
        out = self.exchange.weights(slot) if alone else None
        return replace(kept, grad=self.exchange.gradient(slot), out=out)


def grouped_slots(
    matrices: Sequence[Slot], optimizer: Optimizer, together: int
) -> list[tuple[tuple[float, float], list[Slot]]]:
    """Matrices in groups that agree in shape, logical matrices and parameter group (which is given), of
    at most so many elements."""
    found = dict[Any, list[list[Slot]]]()
    for slot in matrices:
        (piece,) = slot.spec.pieces
        group = group_of(piece, optimizer.config)
        lists = found.setdefault((group, slot.spec.shape[-2:], slot.spec.logical), [[]])
        most = together // slot.numel if isinstance(optimizer, MatrixOptimizer) else 1
        if len(lists[-1]) >= max(1, most):
            lists.append([])
        lists[-1].append(slot)
    return [(group, slots) for (group, _, _), lists in found.items() for slots in lists]


def update_copies(optimizer: Optimizer, stored: StateRange, rates: tuple[float, float], scalars: StepScalars) -> None:
    """One step of an optimizer's `update` on working copies of a range. rates: learning rate and weight decay."""
    copies = WorkingCopies(stored, ParamRange, stored.grad.shape, rates, scalars)
    optimizer.update(copies.p)
    copies.keep(scalars)


class WorkingCopies:
    """Copies of `stored` in `shape`, as `p`, that an update changes; `keep` writes them back unless the step is
    skipped. Stored elements beyond `shape` are padding."""

    def __init__(
        self,
        stored: StateRange,
        made: type[ParamRange],
        shape: Sequence[int],
        rates: tuple[float, float],
        scalars: StepScalars,
        **more: Any,
    ):
        dtype, numel = stored.grad.dtype, prod(shape)
        self.stored, self.numel = stored, numel
        self.before = {name: widened(kept, dtype) for name, kept in stored.state.items()}
        self.master = widened(stored.master, dtype)
        self.p = made(
            self.master[:numel].view(shape).clone(),
            stored.grad[:numel].view(shape) * scalars.factor.to(dtype),
            {name: value[:numel].view(shape).clone() for name, value in self.before.items()},
            *rates,
            scalars.step,
            **more,
        )

    @classmethod
    def of_matrix(
        cls, stored: StateRange, slot: Slot, rates: tuple[float, float], scalars: StepScalars
    ) -> WorkingCopies:
        return cls(stored, WholeMatrix, slot.spec.shape[-2:], rates, scalars, logical=slot.spec.logical)

    def keep(self, scalars: StepScalars) -> None:
        """Write the copies back, and set the gradient to zero."""
        skipped, stored, master, numel = scalars.skip.bool(), self.stored, self.master, self.numel
        master[:numel].copy_(torch.where(skipped, master[:numel], self.p.master.reshape(-1)))
        if master is not stored.master:
            keep(stored.master, master, scalars.step)
        for name, kept in stored.state.items():
            before = self.before[name]
            values = torch.where(skipped, before[:numel], self.p.state[name].reshape(-1))
            padded = values if numel == len(before) else pad(values, (0, len(before) - numel))
            keep(kept, padded, scalars.step)
        if stored.out is not None:
            stored.out.copy_(master)
        stored.grad.zero_()
