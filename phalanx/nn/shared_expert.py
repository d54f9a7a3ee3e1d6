"""The shared expert with a gate: what every token gets of it is multiplied by a number between 0 and 1 that the token
itself says (Qwen2-MoE, Qwen3-Next)."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.layout.box import Box
from phalanx.layout.param import ParamSpec, Piece
from phalanx.nn.env import Env
from phalanx.nn.initial import Normal
from phalanx.nn.mlp import SwiGLU
from phalanx.nn.module import Module
from phalanx.ops.dense.matmul import wide_matmul
from phalanx.sequence.batch import Batch


class GatedExpert(Module):
    """x (T / tp, D) -> mlp(x) * sigmoid(gate x). `name`: of the gate, (1, D), which each tp rank holds whole for its
    own tokens; as a router's, it stays with AdamW whatever the optimizer."""

    def __init__(self, env: Env, name: str, mlp: SwiGLU, width: int, std: float):
        super().__init__(env)
        self.mlp, box = mlp, Box.full((1, width))
        piece = Piece(name, (1, width), box, box.slices(), Normal(std), replicas=env.everyone)
        self.gate = self.param(ParamSpec((1, width), (piece,), role="router"))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.mlp(x) * torch.sigmoid(wide_matmul(x, self.gate)).to(x.dtype)

    def flops(self, seq_length: int) -> float:
        return super().flops(seq_length) + 2.0 * self.gate.shape[1]
