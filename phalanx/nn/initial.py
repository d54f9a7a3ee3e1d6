"""Initial values of weights, one class a kind. A layer with values of another kind brings a class of its own, derived
from layout.param.Init."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.rng import fill_normal_, fill_uniform_
from phalanx.layout.param import Init, Piece


@dataclass(frozen=True)
class Normal(Init):
    """Normally distributed around 0."""

    std: float

    def fill(self, out: Tensor, piece: Piece, seed: int) -> None:
        fill_normal_(out, self.std, piece.shape, piece.box.start, seed, piece.name)


@dataclass(frozen=True)
class Uniform(Init):
    """Uniform in [-bound, bound)."""

    bound: float

    def fill(self, out: Tensor, piece: Piece, seed: int) -> None:
        fill_uniform_(out, self.bound, piece.shape, piece.box.start, seed, piece.name)


@dataclass(frozen=True)
class Constant(Init):
    """One number everywhere."""

    value: float

    def fill(self, out: Tensor, piece: Piece, seed: int) -> None:
        out.fill_(self.value)


ZEROS, ONES = Constant(0.0), Constant(1.0)


@dataclass(frozen=True)
class Sinusoids(Init):
    """Of each row its number, counted from 0, as sines and then cosines of wave lengths from 2 pi to 10,000 x 2 pi
    (Vaswani et al., 2017), in the order of Whisper's files."""

    def fill(self, out: Tensor, piece: Piece, seed: int) -> None:
        rows, width = piece.shape
        falling = torch.exp(-math.log(10_000) / (width // 2 - 1) * torch.arange(width // 2))
        angles = torch.arange(rows).unsqueeze(1) * falling
        out.copy_(torch.cat([angles.sin(), angles.cos()], 1)[piece.box.slices()])


@dataclass(frozen=True)
class LogCount(Init):
    """The logarithm of each element's number, counted from 1."""

    def fill(self, out: Tensor, piece: Piece, seed: int) -> None:
        out.copy_(torch.arange(piece.box.start[0] + 1, piece.box.stop[0] + 1, dtype=torch.float64).log())


@dataclass(frozen=True)
class LogUniform(Init):
    """The logarithm of a number drawn uniformly in [low, high)."""

    low: float
    high: float

    def fill(self, out: Tensor, piece: Piece, seed: int) -> None:
        fill_uniform_(out, 1.0, piece.shape, piece.box.start, seed, piece.name)
        drawn = self.low + (self.high - self.low) * (out + 1) / 2
        out.copy_(drawn.clamp(min=1e-9).log())  # a draw of exactly 0 has no logarithm


@dataclass(frozen=True)
class TimeStep(Init):
    """The number of which softplus is a time step: drawn log-uniformly from `low` to `high`, and at least `floor`
    (Gu & Dao, "Mamba", 2023)."""

    low: float
    high: float
    floor: float

    def fill(self, out: Tensor, piece: Piece, seed: int) -> None:
        fill_uniform_(out, 1.0, piece.shape, piece.box.start, seed, piece.name)
        low, high = math.log(self.low), math.log(self.high)
        step = torch.exp(low + (high - low) * (out + 1) / 2).clamp(min=self.floor)
        out.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
