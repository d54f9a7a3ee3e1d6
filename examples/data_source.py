"""Training on samples of your own: additions, made when they are asked for.

    python examples/data_source.py
    torchrun --nproc-per-node 2 examples/data_source.py layout.tp=2

Sample n is a function of n alone, so any layout sees the same samples and a run goes on where it stopped.
"""

import sys
from dataclasses import dataclass

import numpy as np

import phalanx as px


@dataclass(frozen=True, kw_only=True)
class SumsConfig:
    largest: int = 9


@px.source("sums")
class Sums(px.DataSource):
    Config = SumsConfig

    def sample(self, number: int) -> np.ndarray:
        draw = np.random.default_rng((self.start.seed, self.start.part == "train", number))
        text = ""
        while len(text) <= self.start.seq_length:
            a, b = draw.integers(0, self.config.largest + 1, 2)
            text += f"{a}+{b}={a + b}\n"
        return np.frombuffer(text.encode(), np.uint8)[: self.start.seq_length + 1]


model = dict(family="llama", vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2)
train = dict(steps=40, global_batch=16, micro_batch=4, seq_length=64, eval_interval=20, eval_samples=16)
config = dict(
    dir="runs/sums",
    model=dict(model, num_attention_heads=4),
    train=train,
    optim=dict(lr=1e-2, warmup_steps=4),
    data=dict(source="sums", source_config=dict(largest=9)),
)

if __name__ == "__main__":
    px.train(px.load(None, *sys.argv[1:], base=config))
