"""Phalanx as a library: a training loop of your own, on any layout, with checkpoints, schedule and evaluation.

    python examples/own_loop.py                                                 (one process)
    torchrun --nproc-per-node 2 examples/own_loop.py layout.tp=2                (two ranks; or layout.pp=2, ...)

Start it again, with the same layout or another, and it goes on from its newest checkpoint.
"""

import sys

import phalanx as px

model = dict(
    family="llama",
    vocab_size=256,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
)
train = dict(steps=20, global_batch=8, micro_batch=2, seq_length=64, eval_interval=10, eval_samples=16)
config = dict(
    dir="runs/own-loop",
    model=model,
    train=train,
    optim=dict(lr=3e-3, schedule="cosine", warmup_steps=2),
    data=dict(mock=True),  # made-up tokens; data.paths or data.text for your own
)
run = px.load(None, *sys.argv[1:], base=config)

with px.session(run) as s:  # process groups, then the newest checkpoint or initial weights
    for batches in s.batches():  # this rank's micro-batches of step s.step, until train.steps or a request to stop
        result = s.train_step(batches)  # lr=... instead of the schedule's
        if s.step % 5 == 0:
            s.log(result, note="mine")
        if s.step % 10 == 0:
            s.log(s.evaluate())
            s.save()

# Deeper: s.model (this rank's blocks), s.accumulate(batches) (gradients in p.grad, reduced), s.apply(lr).
