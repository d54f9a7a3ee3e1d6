"""How a linear computes its output from its input and its weight: a plain matmul here, and the interface that other
methods override.

Whatever changes a linear without changing the layer around it is a method: FP8 (nn.fp8), adapters, quantized base
weights. Layers call their linears and never ask which method they use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from phalanx.comm.axis import Axis, ModelAxes
from phalanx.nn.parameter import Parameter
from phalanx.ops.dense.cross_entropy import HeadMatrix
from phalanx.ops.dense.matmul import gather_matmul, matmul_scatter
from phalanx.ops.experts.grouped import Later, grouped_matmul
from phalanx.ops.op import Kernels, Op

FusedOp = Callable[..., Tensor]


class LinearMethod:
    """The plain method: matmuls with the stored weight. Subclasses override what they do differently.

    A method does not own the linear's weights. They are passed to it, because the weights of experts differ between
    micro-batches (Parameter.extra_grads). A method with parameters of its own is also a Module, and a sub-module of its
    linear.
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
        """Whether it is currently a matmul with the stored weight. Then an op that spans several linears may read the
        weights directly, and tokens may be processed a slice at a time."""
        return True

    def reads_lazy(self, weight: Parameter, x: Tensor) -> bool:
        """Whether the input, or the gradient of the output, may be a lazy tensor (ops.lazy_tensor) in place of one like
        x."""
        return False

    def fused_mlp(self, gate_up: Parameter, down: Parameter, kernels: Kernels, x: Tensor) -> FusedOp | None:
        """One op for a whole SwiGLU MLP whose linears are not plain, called with (x, gate_up, down, tp); None if there
        is none. `kernels`: those of the activation."""
        return None

    def fused_experts(self, gate_up: Parameter, down: Parameter, kernels: Kernels, x: Tensor) -> FusedOp | None:
        """The same for experts without biases, called with (x, gate_up, down, ends, weights, gate, kernels, later)."""
        return None


PLAIN = LinearMethod()


class InvariantMethod(LinearMethod):
    """Matmuls whose bits do not depend on the batch or on tp (train.batch_invariant)."""

    def gather_matmul(self, x: Tensor, weight: Parameter, tp: Axis, bias: Tensor | None = None) -> Tensor:
        return gather_matmul(x, weight, tp, bias, "invariant")

    def matmul_scatter(self, h: Tensor, weight: Parameter, tp: Axis, bias: Tensor | None = None) -> Tensor:
        return matmul_scatter(h, weight, tp, bias, "invariant")


INVARIANT = InvariantMethod()


class LinearPlace(Protocol):
    """What a method may know about the rank and the run (nn.env.Env)."""

    @property
    def axes(self) -> ModelAxes: ...

    @property
    def seed(self) -> int: ...

    def kernels_for(self, op: Op) -> Kernels: ...


class AnyLinear(Protocol):
    """The properties of a linear by which its method is chosen.

    names    of its global matrices; for experts, `{}` stands for the expert's number
    cut      the dim of a matrix that is sharded: 0 its outputs, 1 its inputs; None: each rank of tp has it whole
    experts  number of experts in the layer; 0: not a layer of experts
    training whether the model trains, as torch's modules have it
    """

    weight: Parameter
    training: bool
    names: tuple[str, ...]
    experts: int
    env: Any  # a LinearPlace

    @property
    def cut(self) -> int | None: ...


class AnyEmbedding(Protocol):
    """An embedding: ids first .. first + count - 1 are here."""

    weight: Parameter
    first: int
    count: int
    env: Any  # a LinearPlace


RowsAdapter = Callable[[Tensor, Tensor], Tensor]
"""The rows of an embedding that were looked up, and the ids -> the rows to use."""


class LogitsAdapter(Protocol):
    """What a head has besides its matrix."""

    def enter(self, x: Tensor) -> Tensor:
        """x (T / tp, D) -> what the head is to multiply."""
        ...

    def matrix(self, weight: Tensor) -> HeadMatrix:
        """The matrix by which it does."""
        ...


class LinearMethods(Protocol):
    """Chooses the method of each linear while a model is built (WeightRules.linears), and what an embedding and a head
    have besides their matrices."""

    def method_of(self, linear: AnyLinear) -> LinearMethod: ...

    def rows_of(self, embedding: AnyEmbedding) -> RowsAdapter | None: ...

    def logits_of(self, head: AnyLinear) -> LogitsAdapter | None: ...
