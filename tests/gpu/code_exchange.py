"""Experts' tokens as codes against tokens in bf16, over the GPUs of a machine, at the sizes of W4
(benchmarks/configs/w4.yaml): to the bit, and how long a layer's experts take forward and backward. `torchrun
--nproc-per-node 4 -m tests.gpu.code_exchange`. Without a GPU the sizes are tiny, and nothing is timed."""

from __future__ import annotations

import os
import statistics
import sys
from functools import partial

import torch
from torch import Tensor

from phalanx.comm.axis import ModelAxes
from phalanx.comm.mesh import Mesh, init_world, leave_world, local_device
from phalanx.layout.grid import Grid
from phalanx.ops.dense.activation import gated_rows
from phalanx.ops.dense.gate import SWIGLU
from phalanx.ops.experts.exchange import EXCHANGES, Casts
from phalanx.ops.quantized.experts import LowExperts, low_grouped_matmul, low_grouped_mlp
from phalanx.ops.quantized.recipes import COUNTS, RECIPES, SLOTS

GPU = torch.cuda.is_available()
TOKENS, WIDTH, INNER, EXPERTS, CHOSEN = (8192, 2048, 768, 64, 8) if GPU else (64, 64, 32, 8, 2)
KERNELS, ROOM, TIMES = ("triton", 2.0, 20) if GPU else ("plain", 4.0, 1)


class Layer:
    """The experts of one rank, and its tokens."""

    def __init__(self, axes: ModelAxes, device: torch.device):
        g = torch.Generator().manual_seed(axes.experts.index)
        new = partial(torch.randn, generator=g)
        self.axes, here = axes, EXPERTS // axes.ep.size
        self.choice = torch.rand(TOKENS, EXPERTS, generator=g).argsort(1)[:, :CHOSEN].to(device)
        self.x, self.dy = (new(TOKENS, WIDTH).bfloat16().to(device) for _ in range(2))
        self.weights = torch.rand(TOKENS, CHOSEN, generator=g).to(device)
        self.stacks = [
            (new(here, *shape) * 0.02).bfloat16().to(device).requires_grad_()
            for shape in ((2 * INNER, WIDTH), (WIDTH, INNER))
        ]
        for stack in self.stacks:
            low = LowExperts(RECIPES["delayed"], "w", 0, ModelAxes(), KERNELS)  # type: ignore[arg-type]
            low.multiplier = torch.tensor([90.0, 3000.0, 9000.0], device=device)
            low.counts, low.amax = (
                torch.zeros(3, SLOTS, COUNTS, dtype=torch.int64, device=device),
                torch.zeros(3, device=device),
            )
            stack.grad_dtype, stack.low = torch.float32, low  # type: ignore[attr-defined]
            stack.grad = torch.zeros(stack.shape, device=device)

    def compute(self, rows: Tensor, ends: Tensor, weights: Tensor | None, later: object, source: int) -> Tensor:
        up, down = self.stacks
        if KERNELS == "triton":
            return low_grouped_mlp(rows, up, down, ends, weights, SWIGLU, KERNELS, later)  # type: ignore[arg-type]
        hidden = gated_rows(low_grouped_matmul(rows, up, ends, up.low), ends, weights, SWIGLU, KERNELS)  # type: ignore[attr-defined]
        return low_grouped_matmul(hidden, down, ends, down.low)  # type: ignore[attr-defined]

    def run(self, dispatch: str, coded: bool) -> list[Tensor]:
        x, weights = self.x.detach().requires_grad_(), self.weights.detach().requires_grad_()
        up, down = (stack.low for stack in self.stacks)  # type: ignore[attr-defined]
        for stack in self.stacks:
            stack.grad.zero_()  # type: ignore[union-attr]
        exchange = EXCHANGES[dispatch](x, self.axes, ROOM, casts=Casts(up, down) if coded else None)  # type: ignore[index]
        exchange.send(self.choice, EXPERTS, KERNELS)
        y, missing = exchange(weights, self.compute, KERNELS, up.nan(x) if coded or KERNELS == "triton" else None)
        y.backward(self.dy)
        return [y.detach(), x.grad, weights.grad, *(stack.grad for stack in self.stacks), missing]  # type: ignore[list-item]


def milliseconds(layer: Layer, dispatch: str, coded: bool) -> float:
    """The median."""
    found = []
    for _ in range(TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        layer.run(dispatch, coded)
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def main() -> int:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = local_device("cuda" if GPU else "cpu", int(os.environ["LOCAL_RANK"]))
    init_world(rank, world, "env://", device, 120.0)
    mesh = Mesh(Grid(dp=world, ep=world), rank, device)
    mesh.prepare_experts()
    wrong = 0
    for dispatch in ("allgather", "push", "alltoall"):
        for beside in (True, False) if dispatch != "alltoall" else (False,):
            mesh.overlap(mesh.model.experts, "on" if beside else "off", world * TOKENS * WIDTH * 2)
            layer = Layer(mesh.model, device)
            for _ in range(2):  # buffers come in two sets
                found = [[t.clone() for t in layer.run(dispatch, coded)] for coded in (True, False)]
                same = all(torch.equal(a, b) for a, b in zip(*found)) and all(t.abs().sum() > 0 for t in found[0][:-1])
                wrong += not same
            took = [milliseconds(layer, dispatch, coded) for coded in (True, False)] if GPU else [0.0, 0.0]
            told = "to the bit" if same else "DIFFER: " + ", ".join(str((a != b).sum().item()) for a, b in zip(*found))
            print(
                f"rank {rank}: {dispatch}{' in memory' if beside else ''}: {told}; codes {took[0]:.3f} ms, "
                f"bf16 {took[1]:.3f} ms",
                flush=True,
            )
    mesh.close()
    leave_world()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
