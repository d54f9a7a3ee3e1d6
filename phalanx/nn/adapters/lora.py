"""LoRA (Hu et al. 2021): y = W x + scale * B(A x). Rank-stabilised LoRA (Kalajdzievski 2023) is another scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, within
from phalanx.nn.adapter import Adapter, LinearPiece, adapter

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    rank: int = 16
    """Features between the two small matrices of an adapter."""
    alpha: float = 32.0
    """What the adapter adds is multiplied by alpha / rank."""
    rank_stabilised: bool = False
    """Multiply by alpha / sqrt(rank) instead, so that larger ranks learn as fast (rsLoRA)."""


@adapter("lora")
class LoRA(Adapter):
    """A as PEFT makes it, uniform within 1 / sqrt(inputs), and B zero: the first step begins at the base model."""

    Config = LoRAConfig
    linear = True
    peft_type = "LORA"

    def __init__(self, piece: LinearPiece, config: Any):
        super().__init__(piece, config)
        self.lora_A = self.down(piece, config.rank, init="kaiming")
        self.lora_B = self.up(piece, config.rank, init="zeros")
        self.scale = config.alpha / (math.sqrt(config.rank) if config.rank_stabilised else config.rank)

    def delta(self, x: Tensor) -> Tensor:
        return self.lora_B(self.lora_A(x)) * self.scale

    @classmethod
    def check(cls, config: Any) -> list[Problem]:
        return [*at_least("lora", config, 1, "rank"), *within("lora", config, "alpha", "(0, inf)")]

    @classmethod
    def peft_config(cls, config: Any) -> dict[str, Any]:
        return {"r": config.rank, "lora_alpha": config.alpha, "use_rslora": config.rank_stabilised}
