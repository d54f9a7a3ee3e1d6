"""The family of tests/outside/plain.py, its activation by the op of this package."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_example.squared_relu import SQUARED_RELU, squared_relu
from torch import Tensor

from phalanx.models.decoder import decoder_blocks
from phalanx.models.family import BlockMaker, Family
from phalanx.nn.env import Env
from tests.outside.plain import PlainConfig, PlainLayer, SquaredReLU


class MLP(SquaredReLU):
    def forward(self, x: Tensor) -> Tensor:
        kernels = self.env.kernels_for(SQUARED_RELU)
        up = self.env.recompute.op("up", self.up, x)
        return self.down(self.env.recompute.op("activation", lambda x: squared_relu(x, kernels), up))


class Layer(PlainLayer):
    def __init__(self, config: PlainConfig, env: Env, layer: int):
        super().__init__(config, env, layer)
        self.mlp = MLP(config, env, layer)


def blocks(config: PlainConfig, env: Env) -> Sequence[BlockMaker]:
    return decoder_blocks(config, env, Layer)


FAMILY = Family("kernel_example", PlainConfig, blocks, architecture="KernelExampleForCausalLM")
