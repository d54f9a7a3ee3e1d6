"""Supervised fine-tuning: cross entropy of the answers of chats, a mean over the trained tokens of the step."""

from __future__ import annotations

from typing import Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.nn.objective import TokenObjective, cross_entropy, objective


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    train_on: Literal["answers", "last_answer", "all"] = "answers"
    """sft: tokens with a loss: those of all answers, of each chat's last answer, or all tokens."""


@objective("sft")
class SFT(TokenObjective):
    """Weights come from the data: tokens that are only read have no label there."""

    Config = SFTConfig
    needs_chats = True
    token_loss = staticmethod(cross_entropy)  # identifies the fused op for the head

    @property
    def train_on(self) -> Any:
        return self.config.train_on
