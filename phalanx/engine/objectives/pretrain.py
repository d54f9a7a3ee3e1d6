"""Pretraining: cross entropy of the next token, a mean over the tokens of the step that have a label."""

from __future__ import annotations

from phalanx.nn.objective import TokenObjective, cross_entropy, objective


@objective("pretrain")
class Pretrain(TokenObjective):
    token_loss = staticmethod(cross_entropy)  # identifies the fused op for the head
