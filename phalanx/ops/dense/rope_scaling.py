"""Rotary frequencies of models whose context was extended: every `rope_type` of transformers, computed in float64.

A scaling is any object with the fields that its type reads (models/config.RopeScaling). Each function returns the
angles per position (dim / 2,) and the factor by which cos and sin are multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass


@dataclass(frozen=True)
class Rotation:
    """What the angles depend on: `dim` rotated features (the first of a head), base `theta`, a scaling or None, and the
    model's longest sequence. `interleaved`: features 2i and 2i + 1 are a pair, not i and i + dim / 2.

    axes   for each pair, the column of a batch's coordinates that is its position, where tokens have several (M-RoPE;
           Wang et al., "Qwen2-VL", 2024); none: all pairs have the token's position
    axial  the two halves of the pairs have the same frequencies (rows and columns of an image)
    """

    dim: int
    theta: float
    scaling: Any = None
    max_positions: int = 0
    interleaved: bool = False
    axes: tuple[int, ...] = ()
    axial: bool = False

    @property
    def by_length(self) -> bool:
        """Whether the angles depend on the sequence's length."""
        return self.scaling is not None and self.scaling.rope_type in ("dynamic", "longrope")

    def frequencies(self, length: int) -> tuple[Tensor, float]:
        """((dim / 2,) float64 angles per position, factor of cos and sin) for sequences of `length` tokens."""
        if self.axial:
            return inverse_frequencies(self.dim // 2, self.theta).repeat(2), 1.0
        if self.scaling is None:
            return inverse_frequencies(self.dim, self.theta), 1.0
        return SCALINGS[self.scaling.rope_type](self, self.scaling, length)


def inverse_frequencies(dim: int, theta: float) -> Tensor:
    """(dim / 2,) float64: theta^(-2i / dim). Su et al., "RoFormer", 2021."""
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def _linear(r: Rotation, s: Any, length: int) -> tuple[Tensor, float]:
    """Positions divided by `factor`. Chen et al., "Extending context window ... via position interpolation", 2023."""
    return inverse_frequencies(r.dim, r.theta) / s.factor, 1.0


def _dynamic(r: Rotation, s: Any, length: int) -> tuple[Tensor, float]:
    """A larger base for sequences longer than the model's maximum (dynamic NTK). The length that counts is that of the
    whole sequence, whether or not it holds several documents."""
    longest = max(length, r.max_positions)
    stretch = s.factor * longest / r.max_positions - (s.factor - 1)
    return inverse_frequencies(r.dim, r.theta * stretch ** (r.dim / (r.dim - 2))), 1.0


def _llama3(r: Rotation, s: Any, length: int) -> tuple[Tensor, float]:
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, blended in between (by wavelength against the
    original length)."""
    inv = inverse_frequencies(r.dim, r.theta)
    wavelength = 2 * math.pi / inv
    low = s.original_max_position_embeddings / s.low_freq_factor
    high = s.original_max_position_embeddings / s.high_freq_factor
    if s.high_freq_factor == s.low_freq_factor:  # as in Llama 4: nothing lies in between
        return torch.where(wavelength > low, inv / s.factor, inv), 1.0
    smooth = (s.original_max_position_embeddings / wavelength - s.low_freq_factor) / (
        s.high_freq_factor - s.low_freq_factor
    )
    blended = (1 - smooth) * inv / s.factor + smooth * inv
    return torch.where(wavelength > low, inv / s.factor, torch.where(wavelength < high, inv, blended)), 1.0


def _yarn(r: Rotation, s: Any, length: int) -> tuple[Tensor, float]:
    """Features that rotate less than `beta_slow` times over the original length are interpolated, those that rotate
    more than `beta_fast` times are kept, with a linear ramp in between. The factor of cos and sin acts as a temperature
    on the scores. Peng et al., "YaRN", 2023, equations 17 to 22."""
    inv = inverse_frequencies(r.dim, r.theta)

    def feature(turns: float) -> float:
        return r.dim * math.log(s.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(r.theta))

    low, high = feature(s.beta_fast), feature(s.beta_slow)
    low, high = (math.floor(low), math.ceil(high)) if s.truncate else (low, high)
    low, high = max(low, 0), min(high, r.dim - 1)
    ramp = ((torch.arange(r.dim // 2, dtype=torch.float64) - low) / (high - low or 0.001)).clamp(0, 1)
    return inv / s.factor * ramp + inv * (1 - ramp), yarn_attention_factor(s)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 mscale ln(factor) + 1 (YaRN, equation 22, with DeepSeek's coefficient of the logarithm)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_attention_factor(s: Any) -> float:
    if s.attention_factor is not None:
        return s.attention_factor
    if s.mscale and s.mscale_all_dim:
        return yarn_mscale(s.factor, s.mscale) / yarn_mscale(s.factor, s.mscale_all_dim)
    return yarn_mscale(s.factor)


def _longrope(r: Rotation, s: Any, length: int) -> tuple[Tensor, float]:
    """A divisor per feature, another set for sequences longer than the original. Ding et al., "LongRoPE", 2024."""
    original = s.original_max_position_embeddings
    divisors = torch.tensor(s.long_factor if length > original else s.short_factor, dtype=torch.float64)
    factor = r.max_positions / original if s.factor is None else s.factor
    tempered = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return inverse_frequencies(
        r.dim, r.theta
    ) / divisors, tempered if s.attention_factor is None else s.attention_factor


def _proportional(r: Rotation, s: Any, length: int) -> tuple[Tensor, float]:
    """Partial rotary embedding: the first `partial_rotary_factor` of a head's feature pairs is rotated as usual, the
    rest not at all."""
    inv = inverse_frequencies(r.dim, r.theta) / (1.0 if s.factor is None else s.factor)
    rotated = int(s.partial_rotary_factor * r.dim // 2)
    return torch.where(torch.arange(r.dim // 2) < rotated, inv, 0.0), 1.0


SCALINGS: dict[str, Callable[[Rotation, Any, int], tuple[Tensor, float]]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
