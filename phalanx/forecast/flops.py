"""FLOPs of a run and the fraction of a device's peak that they reach (MFU), with the formula behind them.

FLOPs are the model's: recomputation does not count. Backward is twice forward.
"""

from __future__ import annotations

from phalanx.base.dataclass import dataclass
from phalanx.base.devices import Device
from phalanx.config.run import Run
from phalanx.planning.blocks import facts_of


@dataclass(frozen=True)
class Flops:
    """FLOPs per token, forward and backward: 6 N + 6 A S (Narayanan et al., 2021; causal attention counts half the
    square).

    N  weights in matmuls: attention, MLP and head, without the embedding table, norms and biases
    A  layers * heads * head_dim; a layer with a sliding window of W < S tokens counts for 2 (W - W^2 / 2S) / S, the
       keys that it reads
    S  tokens per sequence
    """

    weights: float
    attention: float
    seq_length: int

    @property
    def per_token(self) -> float:
        return 6 * self.weights + 6 * self.attention * self.seq_length

    def text(self, tokens: int) -> str:
        """The formula with its inputs, for `tokens` tokens (T)."""
        n, a, s = self.weights, self.attention, self.seq_length
        return f"6*N*T + 6*A*S*T = {self.per_token * tokens:.4g} FLOP with N={n:.4g} A={a:.4g} S={s} T={tokens}"


def flops_of(run: Run) -> Flops:
    """Read from the real modules: without attention to other tokens (S = 0), a block takes 2 FLOPs per weight and
    token."""
    length = run.train.seq_length
    facts = facts_of(run)
    without, whole = sum(f.alone for f in facts), sum(f.flops for f in facts)
    return Flops(without / 2, (whole - without) / (2 * length), length)


def step_flops(run: Run, global_batch: int | None = None) -> float:
    """FLOPs of one optimizer step of `global_batch` sequences (default: train.global_batch), over all ranks."""
    return flops_of(run).per_token * (global_batch or run.train.global_batch) * run.train.seq_length


def mfu(run: Run, tokens_per_second: float, device: Device | None) -> float | None:
    """Model FLOPs utilization, 0 to 1, of a rank's share `tokens_per_second`; None if the device's peak is unknown."""
    peak = device.peak(run.train.precision) if device else None
    return flops_of(run).per_token * tokens_per_second / peak if peak else None


def mfu_lines(run: Run, world: int, device: Device | None, device_name: str) -> list[str]:
    """Lines for the log at the start of a run: how the mfu of the step lines is computed, or why it is not shown."""
    peak = device.peak(run.train.precision) if device else None
    tokens = run.train.global_batch * run.train.seq_length
    lines = [f"{flops_of(run).per_token * tokens:.4g} FLOP per step (`phalanx plan` shows the formula)"]
    if device_name != "CPU" and not peak:
        lines.append(f"no mfu: no {run.train.precision} peak of {device_name!r} in phalanx/base/devices.py")
    elif device is not None and peak:
        lines.append(f"mfu = FLOP / (step_s * {world} * {peak / 1e12:g}e12 FLOP/s of {device.name})")
    return lines
