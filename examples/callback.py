"""A program that listens to a run: it keeps the best validation loss, and says where its checkpoint is.

python examples/callback.py
torchrun --nproc-per-node 2 examples/callback.py layout.pp=2
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import phalanx as px

train = dict(steps=20, global_batch=8, micro_batch=2, seq_length=64, eval_interval=5, eval_samples=16)
model = dict(family="llama", vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2)
config = dict(
    dir="runs/callback",
    model=dict(model, num_attention_heads=4),
    train=train,
    optim=dict(lr=3e-3),
    data=dict(mock=True),
    checkpoint=dict(interval=5),
)


class Best(px.Callback):
    """Called on every rank, in the same order."""

    def __init__(self) -> None:
        self.slowest_s, self.losses, self.paths = 0.0, dict[int, float](), list[Path]()

    def on_step(self, values: Mapping) -> None:
        self.slowest_s = max(self.slowest_s, values["step_s"])

    def on_evaluation(self, step: int, losses: Mapping[str, float]) -> None:
        self.losses[step] = losses["valid"]

    def on_save(self, path: Path) -> None:
        self.paths.append(path)


if __name__ == "__main__":
    best = Best()
    px.train(px.load(None, *sys.argv[1:], base=config), callbacks=[best])
    step = min(best.losses, key=best.losses.get)
    print(f"best step={step} loss={best.losses[step]:.4f} saves={len(best.paths)} slowest={best.slowest_s:.2f} s")
