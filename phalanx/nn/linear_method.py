"""How a linear's input and weight become its output: the plain matmul here, and what another method can override.

A method is the seam of everything that changes a linear without changing the layer that has it: FP8 (nn.fp8), adapters,
quantized base weights. Layers ask their linears, never which method it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from phalanx.comm.axis import Axis, ModelAxes
from phalanx.nn.parameter import Parameter
from phalanx.ops.dense.matmul import gather_matmul, matmul_scatter
from phalanx.ops.experts.grouped import Later, grouped_matmul
from phalanx.ops.op import Kernels, Op

FusedOp = Callable[..., Tensor]


class LinearMethod:
    """The plain method: matmuls of the stored weight. Subclasses override what they do otherwise.

    Methods have no weights of the linear; they are given them, since those of experts differ by micro-batch
    (Parameter.extra_grads). A method with parameters of its own is a Module too, and a sub-module of its linear.
    """

    def gather_matmul(self, x: Tensor, weight: Parameter, tp: Axis, bias: Tensor | None = None) -> Tensor:
        """As ops.dense.matmul.gather_matmul."""
        return gather_matmul(x, weight, tp, bias)

    def matmul_scatter(self, h: Tensor, weight: Parameter, tp: Axis, bias: Tensor | None = None) -> Tensor:
        """As ops.dense.matmul.matmul_scatter."""
        return matmul_scatter(h, weight, tp, bias)

    def grouped_matmul(
        self,
        x: Tensor,
        weight: Parameter,
        ends: Tensor,
        kernels: Kernels,
        bias: Tensor | None = None,
        later: Later | None = None,
    ) -> Tensor:
        """As ops.experts.grouped.grouped_matmul."""
        return grouped_matmul(x, weight, ends, kernels, bias, later)

    def is_plain(self, weight: Parameter) -> bool:
        """Whether it is the matmul of the stored weight now, so that an op of several linears may read the weights
        and some tokens may go through at a time."""
        return True

    def reads_lazy(self, weight: Parameter, x: Tensor) -> bool:
        """Whether a lazy tensor (ops.lazy_tensor) may be the input, or the gradient of the output, in place of one
        like x."""
        return False

    def fused_mlp(self, gate_up: Parameter, down: Parameter, kernels: Kernels, x: Tensor) -> FusedOp | None:
        """One op for a SwiGLU MLP whose linears are not plain, called with (x, gate_up, down, tp); None: there is
        none. `kernels`: of the activation."""
        return None

    def fused_experts(self, gate_up: Parameter, down: Parameter, kernels: Kernels, x: Tensor) -> FusedOp | None:
        """The same of experts without biases, called with (x, gate_up, down, ends, weights, gate, kernels, later)."""
        return None


PLAIN = LinearMethod()


class LinearPlace(Protocol):
    """What a method can know of the rank and the run (nn.env.Env)."""

    @property
    def axes(self) -> ModelAxes: ...

    @property
    def seed(self) -> int: ...

    def kernels_for(self, op: Op) -> Kernels: ...


class AnyLinear(Protocol):
    """What a method is chosen by.

    names    of its global matrices; of experts `{}` stands for their number
    cut      the dim of a matrix that is cut over ranks: 0 its outputs, 1 its inputs
    experts  how many the layer has; 0: it is no layer of experts
    """

    weight: Parameter
    names: tuple[str, ...]
    cut: int
    experts: int
    env: Any  # a LinearPlace


class LinearMethods(Protocol):
    """Chooses the method of each linear while a model is built (WeightRules.linears)."""

    def method_of(self, linear: AnyLinear) -> LinearMethod: ...
