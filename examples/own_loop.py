"""Phalanx as a library: a mesh, a model and an optimizer in a loop of your own, on two ranks, without data files.

torchrun --nproc-per-node 2 examples/own_loop.py --tp 2 --optimizer torch     (or --tp 1; or --optimizer ours)
"""

import argparse
import os
from functools import partial

import torch

from phalanx.comm.mesh import Mesh, init_world, leave_world, local_device
from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.data.loader import micro_batch_samples, train_loader
from phalanx.engine.build import build, init_weights
from phalanx.engine.step import count_tokens
from phalanx.forecast.check import checked_plan
from phalanx.launch.env import read_placement
from phalanx.layout.config import LayoutConfig
from phalanx.models.llama import LlamaConfig

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=2)
parser.add_argument("--optimizer", choices=["ours", "torch"], default="torch")
options = parser.parse_args()
me, _ = read_placement(os.environ)
device = local_device("cuda" if torch.cuda.is_available() else "cpu", me.local_rank)
run = Run(
    model=LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4
    ),
    train=TrainConfig(steps=20, global_batch=8, micro_batch=2, seq_length=64),
    layout=LayoutConfig(tp=options.tp, sharding=0),  # 0: every rank has whole gradients, as torch's optimizers need
    data=DataConfig(mock=True),
)
plan = checked_plan(run, me.world_size)  # every problem of the config at once, as `phalanx train` says them
init_world(me.rank, me.world_size, me.init_method, device, timeout_s=60)
mesh = Mesh(plan.grid, me.rank, device)
state = build(plan, mesh)
init_weights(state)
adam = torch.optim.Adam(state.model.parameters(), lr=3e-3)
ours = partial(state.optimizer.update, lr=3e-3, skip=torch.zeros((), device=device))
update = ours if options.optimizer == "ours" else adam.step
loader = train_loader(run.data, seq_length=64, seed=run.train.seed, vocab_size=256, samples=160)
for step in range(20):
    batches = [loader.batch(s).to(device) for s in micro_batch_samples(8 * step, 8, 2, mesh.dp.size, mesh.dp.index)]
    tokens = count_tokens(state, batches)  # of all data-parallel ranks
    loss = torch.zeros((), device=device)
    for batch in batches:
        x = torch.empty(0, device=device)  # the first block reads the tokens, the last returns the summed loss
        for block in state.model:
            x = block(x, batch)
        x.backward(1 / tokens.to(x.dtype))  # gradients add up in flat buffers; each p.grad is a view
        loss += x.detach()
    state.buffers.finish()  # sums them over the ranks
    update()
    state.buffers.zero_grads()
    mean = (mesh.dp.all_reduce(loss).wait() / tokens).item()
    if me.rank == 0:
        print(f"step={step + 1} loss={mean:.6f}", flush=True)
mesh.close()
leave_world()
