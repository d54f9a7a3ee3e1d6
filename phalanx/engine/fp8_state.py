"""Fp8State: what a run with train.fp8 keeps over steps: histories of delayed scaling, counts of what casts lost,
linears that fell back.

L linears of the whole model in the order of their names, three tensors of each (activations, weights, gradients). All
of it is the same on every rank, so it has no layout in a checkpoint. Nothing here waits for the device except
`fall_back`, which takes values that the host has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.config.run import Fp8Config
from phalanx.data_parallel.flat import FlatBucket
from phalanx.data_parallel.quantized import CastGroup, QuantizedStorage, cast_groups
from phalanx.nn.parameter import Parameter
from phalanx.ops.quantized.quantizer import DY, TENSORS, W, WeightQuantizer
from phalanx.ops.quantized.recipes import COUNTED, COUNTS, FLOOR, SLOTS, Recipe

TOTALS = ("amax", "ranks", *COUNTED)  # of each tensor: sum of the ranks' amaxes, number of ranks that have it, counts


class Fp8State:
    """`names`: all linears of the model that use the recipe; `here`: those of this rank's parameters, by bucket."""

    def __init__(self, names: Sequence[str], recipe: Recipe | None, config: Fp8Config | None, device: torch.device):
        self.names, self.recipe, self.config = tuple(names), recipe, config
        count = len(self.names)
        self.counts = torch.zeros(count, 3, SLOTS, COUNTS, dtype=torch.int64, device=device)
        self.mine = torch.zeros(count, 1, dtype=torch.float64)
        self.amax = torch.zeros(count, 3, device=device)
        length = config.history if config is not None and recipe is not None and recipe.delayed else 0
        self.history = torch.zeros(count if length else 0, 3, length, device=device)
        self.multiplier = torch.ones(count, 3, device=device)
        self.off = torch.zeros(count, dtype=torch.float64, device=device)  # 1: fell back
        self._gone: set[str] = set()
        self.over = False  # whether the run has reached its last steps, which are in train.precision
        self.lows: dict[int, list[tuple[WeightQuantizer, Parameter]]] = {}  # by bucket
        self._stale: set[int] = set()
        self.coded: list[QuantizedStorage] = []  # buckets whose weights are stored quantized, by `kept`
        self.kept: list[CastGroup] = []
        self._full = False  # whether the history has any entries

    def keep(self, buckets: Sequence[FlatBucket]) -> None:
        """After `attach`: make the weights that are stored quantized count into the state too."""
        self.coded = [f.storage for f in buckets if isinstance(f.storage, QuantizedStorage)]
        self.kept = cast_groups(self.coded, {name: i for i, name in enumerate(self.names)})

    def attach(self, bucket: int, params: Iterable[Parameter]) -> None:
        """Make this rank's linears in a bucket count into the state."""
        found = self.lows.setdefault(bucket, [])
        for p in params:
            fp8 = p.quantizer
            if not isinstance(fp8, WeightQuantizer):
                continue
            i = self.names.index(fp8.name)
            fp8.counts, fp8.amax, self.mine[i] = self.counts[i], self.amax[i], 1.0
            if self.history.numel():
                fp8.multiplier = self.multiplier[i]
            found.append((fp8, p))

    @property
    def here(self) -> Iterator[tuple[WeightQuantizer, Parameter]]:
        for found in self.lows.values():
            yield from found

    def renew(self) -> None:
        """The masters may have changed: quantize the weights that are stored quantized, and start sending them. At the
        end of a step the device still has work, which hides the many small launches."""
        for family in self.kept:
            family.renew()

    def begin(self) -> None:
        """The weights have changed. What the casts of weights that are stored quantized saw counts whenever they are
        used. A linear that fell back uses none, even if its bucket holds quantized values."""
        gone = self.off > 0
        self._stale = set(self.lows) - {s.share.bucket.id for s in self.coded}
        self.renew()
        for family in () if self.over else self.kept:
            self.counts[:, W] += torch.where(gone[:, None, None], 0, family.counts)
            self.amax[:, W].copy_(torch.maximum(self.amax[:, W], torch.where(gone, 0, family.seen)))

    def refresh(self, bucket: int) -> None:
        """A bucket's weights have arrived: quantize them, once per step."""
        if bucket in self._stale:
            self._stale.remove(bucket)
            for fp8, p in self.lows[bucket]:
                if fp8.on:
                    fp8.refresh(p)

    @contextmanager
    def without(self) -> Iterator[None]:
        """Inside, every matmul is in train.precision."""
        on = [fp8 for fp8, _ in self.here if fp8.on]
        for fp8 in on:
            fp8.on = False
        try:
            self._keep_values()
            yield
        finally:
            for fp8 in on:
                fp8.on = True
            self._keep_values()

    def _keep_values(self) -> None:
        """Keep the weights themselves wherever a matmul is to use them."""
        for f in self.coded:
            f.keep_values(not all(m.quantizer.on for m in f.matrices))

    def totals(self) -> Tensor:
        """(L, 3, 5) float64, in the order of TOTALS: of this rank, in this step. The counts start again at zero."""
        seen = self.counts[..., -1].amax(2).int().view(torch.float32)
        self.amax.copy_(torch.maximum(self.amax, seen))
        ranks = self.mine.to(self.amax.device).expand(-1, 3)
        totals = torch.cat((torch.stack((self.amax.double(), ranks), -1), self.counts[..., :-1].sum(2).double()), -1)
        self.counts.zero_()
        return totals

    # ---- delayed scaling -------------------------------------------------------------------------

    @property
    def needs_history(self) -> bool:
        """Whether a step's scales are still unknown: it then runs once with its own amaxes, and again with scales from
        them."""
        return bool(self.history.numel()) and not self._full

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Inside, scales come from each tensor itself, and its amax is recorded."""
        for fp8, _ in self.here:
            fp8.current = True
        try:
            yield
        finally:
            for fp8, _ in self.here:
                fp8.current = False

    def settle(self, world: Axis, grown: Tensor | None = None) -> None:
        """After a step: its amaxes, from all ranks, are added to the history. One that is not finite is replaced by the
        one before.

        grown (): the factor from this step's loss scale to the next one's (fp16): gradients were measured with this
        step's.
        """
        if not self.history.numel():
            self.amax.zero_()
            return
        world.all_reduce(self.amax, "max").wait()
        before = self.history[..., 0]
        new = torch.where(self.amax.isfinite() & (self.amax > 0), self.amax, before)
        self.history.copy_(torch.cat((new.unsqueeze(-1), self.history[..., :-1]), -1))
        self.amax.zero_()
        self._full = True
        self.rescale(1.0 if grown is None else grown)

    def rescale(self, grown: Tensor | float) -> None:
        """From here on the loss scale is larger by this factor."""
        self.history[:, DY] *= grown
        self.scale_by_history()

    def scale_by_history(self) -> None:
        if not self.history.numel() or self.recipe is None or self.config is None:
            return
        amax = self.history.amax(-1)
        largest = torch.full((3,), self.recipe.forward.max, device=amax.device)
        largest[DY] = self.recipe.backward.max
        self.multiplier.copy_(torch.where(amax > 0, largest / amax.clamp_min(FLOOR), 1.0))

    # ---- checkpoints -----------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Equal on all ranks."""
        if not self.names:
            return {}
        return {"off": self.off, **({"history": self.history} if self.history.numel() else {})}

    def loaded(self) -> None:
        """The tensors of `state` hold values from a checkpoint (zeros if it had none)."""
        self._full = bool(self.history.any())
        self.scale_by_history()
        self._gone = {name for name, value in zip(self.names, self.off.tolist()) if value}
        self._leave_out_gone()

    def _leave_out_gone(self) -> None:
        for fp8, _ in self.here:
            fp8.on = self.is_on(fp8.name)
        self._keep_values()

    # ---- falling back ----------------------------------------------------------------------------

    def fall_back(self, names: Iterable[str]) -> None:
        """These linears stay in train.precision from now on."""
        self._gone |= set(names)
        for i, name in enumerate(self.names):
            if name in self._gone:
                self.off[i] = 1.0
        self._leave_out_gone()

    def turn(self, over: bool) -> bool:
        """Update whether the next step is one of train.fp8.last_steps; returns whether that has changed. Not
        checkpointed, so a run that is extended or rolled back returns to FP8."""
        if over == self.over:
            return False
        self.over = over
        self._leave_out_gone()
        return True

    def is_on(self, name: str) -> bool:
        return not self.over and name not in self._gone


def was_cast(tally: Sequence[Sequence[Sequence[float]]]) -> bool:
    """Whether a step had casts at all; rows as in Fp8State.totals."""
    return any(values[TOTALS.index("values")] for tensors in tally for values in tensors)


def worst(names: Sequence[str], tally: Sequence[Sequence[Sequence[float]]]) -> tuple[float, str]:
    """The largest fraction of a tensor's values that casts lost in a step, and the tensor; rows as in
    Fp8State.totals."""
    found = (0.0, "")
    for name, tensors in zip(names, tally):
        for tensor, values in zip(TENSORS, tensors):
            found = max(found, (lost_part(values), f"{tensor} of {name}"))
    return found


def lost_part(values: Sequence[float]) -> float:
    """The fraction of a tensor's values that became zero or were clamped."""
    counted = dict(zip(TOTALS, values))
    return (counted["zeros"] + counted["cut"]) / counted["values"] if counted["values"] else 0.0


def fp8_values(names: Sequence[str], tally: Sequence[Sequence[Sequence[float]]]) -> dict[str, list[list[float]]]:
    """By linear, three numbers each (activations, weights, gradients): the step's amax (mean over ranks), the fraction
    of values that became zero, the fraction that was clamped to the largest."""
    found: dict[str, list[list[float]]] = {}
    for name, tensors in zip(names, tally):
        rows = [dict(zip(TOTALS, values)) for values in tensors]
        found[name] = [
            [r["amax"] / r["ranks"] if r["ranks"] else 0.0 for r in rows],
            *([r[key] / r["values"] if r["values"] else 0.0 for r in rows] for key in ("zeros", "cut")),
        ]
    return found


def fp8_scalars(values: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, float]:
    """Each number of `fp8_values` by name: fp8/amax/weights/NAME."""
    return {
        f"fp8/{what}/{tensor}/{name}": number
        for name, rows in values.items()
        for what, row in zip(("amax", "zeros", "cut"), rows)
        for tensor, number in zip(TENSORS, row)
    }


def shadow_scalars(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Each number of a shadow step by name: fp8_shadow/cosine/NAME."""
    return {
        f"fp8_shadow/{what}/{name}": number
        for name, distances in values.items()
        for what, number in zip(("cosine", "error"), distances)
    }


def unsafe(
    names: Sequence[str],
    config: Fp8Config,
    tally: Sequence[Sequence[Sequence[float]]],
    distances: Sequence[Sequence[float]] | None,
) -> dict[str, str]:
    """Linears for which train.fp8's limits forbid to continue in FP8, and why, from the totals of a step."""
    found: dict[str, str] = {}
    for name, tensors in zip(names, tally):
        part, tensor = max((lost_part(values), tensor) for tensor, values in zip(TENSORS, tensors))
        if config.max_lost is not None and part > config.max_lost:
            found[name] = f"casts lost {100 * part:.1f} % of its {tensor} (train.fp8.max_lost={config.max_lost})"
    for name, (cosine, _) in zip(names, distances or ()):
        if config.min_cosine is not None and cosine < config.min_cosine:
            found[name] = (
                f"the cosine of its weight's gradient is {cosine:.4f} (train.fp8.min_cosine={config.min_cosine})"
            )
    return found


def shadow_text(names: Sequence[str], distances: Sequence[Sequence[float]]) -> list[str]:
    """Lines for the log: the worst first."""
    rows = sorted(zip(names, distances), key=lambda row: row[1][0])
    return [f"shadow {name}: cosine {cosine:.5f}, relative error {error:.4f}" for name, (cosine, error) in rows]
