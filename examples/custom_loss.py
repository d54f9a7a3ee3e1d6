"""A loss of your own on any layout: cross entropy with a z-loss, which keeps the logits' partition function near one.

    python examples/custom_loss.py                                              (one process)
    torchrun --nproc-per-node 2 examples/custom_loss.py layout.tp=2             (two ranks; or layout.pp=2, ...)

The loss is written per token. Tensor-parallel ranks have a part of the vocabulary each; gradients, averages over
micro-batches and ranks, evaluation and the log follow. In a module of your own, `phalanx train` finds it too:
task.name=my_module:ZLoss.
"""

import sys
from dataclasses import dataclass

from torch import Tensor

import phalanx as px


@dataclass(frozen=True, kw_only=True)
class ZLossConfig:
    coefficient: float = 1e-3
    """Weight of the squared log-partition."""


@px.objective("z_loss")
class ZLoss(px.TokenObjective):
    Config = ZLossConfig

    def token_loss(self, logits: px.LogitStats) -> Tensor:
        return logits.log_z - logits.target + self.config.coefficient * logits.log_z.square()

    def metrics(self, logits: px.LogitStats) -> dict[str, Tensor]:
        return {"nll": logits.log_z - logits.target, "log_z": logits.log_z}


config = dict(
    dir="runs/custom-loss",
    model=dict(
        family="llama",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
    ),
    task=dict(name="z_loss", coefficient=1e-2),
    train=dict(steps=20, global_batch=8, micro_batch=2, seq_length=64, eval_interval=10, eval_samples=16),
    optim=dict(lr=3e-3, warmup_steps=2),
    data=dict(mock=True),  # made-up tokens; data.paths or data.text for your own
)
px.train(px.load(None, *sys.argv[1:], base=config))
