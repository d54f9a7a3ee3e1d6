"""Linears: weight, bias and a method. ColumnLinear cuts its outputs over tp, RowLinear its inputs, ReplicatedLinear
nothing, GroupedLinear holds a matrix for each expert of this rank.

Parameters are stored as the layer says (fused, transposed, with replicas); what a matmul does with them is the
method's (nn.linear_method).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.layout.param import Init, ParamSpec
from phalanx.nn.env import Env
from phalanx.nn.linear_method import PLAIN, LinearMethod
from phalanx.nn.module import ZEROS, Module, OutputRows, bias_spec, column_spec, row_spec
from phalanx.nn.parameter import Parameter
from phalanx.ops.experts.grouped import GROUPED, Later


class Linear(Module):
    """What all linears have.

    names, cut, experts  of its global matrices: names, the dim that is cut over ranks (0 outputs, 1 inputs), and how
                         many experts the layer has (0: it is no layer of experts)
    fed_lazily           whether ops around it may hand it lazy tensors, if its method takes them
    """

    fed_lazily = True

    def __init__(self, env: Env, weight: ParamSpec, names: Sequence[str], cut: int, experts: int = 0):
        super().__init__(env)
        self.names, self.cut, self.experts = tuple(names), cut, experts
        self.weight: Parameter = self.param(weight)
        self.bias: Parameter | None = None
        self.method: LinearMethod = PLAIN if env.weights.linears is None else env.weights.linears.method_of(self)

    @property
    def is_plain(self) -> bool:
        """Whether its matmul is that of the stored weight now."""
        return self.method.is_plain(self.weight)

    def takes_lazy(self, x: Tensor) -> bool:
        return self.fed_lazily and self.method.reads_lazy(self.weight, x)


class ColumnLinear(Linear):
    """x (T / tp, in) of each rank -> (T, this rank's outputs): the runs `rows` of the outputs of global matrices,
    stacked. The bias is cut like the outputs; its global names are those of the matrices."""

    def __init__(
        self,
        env: Env,
        rows: list[OutputRows],
        inputs: int,
        init: Init,
        *,
        transposed: bool = False,
        bias: bool = False,
    ):
        super().__init__(env, column_spec(rows, inputs, init, transposed), [r.name for r in rows], cut=0)
        if bias:
            biases = [OutputRows(bias_name(r.name), r.size, r.start, r.stop, r.replicas) for r in rows]
            self.bias = self.param(bias_spec(biases))

    def forward(self, x: Tensor) -> Tensor:
        return self.method.gather_matmul(x, self.weight, self.env.tp, self.bias)


class RowLinear(Linear):
    """h (T, this rank's inputs) -> this rank's tokens (T / tp, out) of the sum over tp: inputs `own` (start, stop) of
    a global matrix. Each rank holds the whole bias and adds it to its own tokens."""

    def __init__(
        self,
        env: Env,
        name: str,
        outputs: int,
        inputs: int,
        own: tuple[int, int],
        init: Init,
        *,
        transposed: bool = False,
        bias: bool = False,
    ):
        super().__init__(env, row_spec(name, outputs, inputs, *own, init, transposed), [name], cut=1)
        if bias:
            self.bias = self.replicated(bias_name(name), outputs, ZEROS)

    def forward(self, h: Tensor) -> Tensor:
        return self.method.matmul_scatter(h, self.weight, self.env.tp, self.bias)


class ReplicatedLinear(Module):
    """x (T / tp, in) -> (T / tp, out) of this rank's own tokens: each tp rank holds all of the matrices, stacked. It
    is narrow, and always plain."""

    def __init__(self, env: Env, rows: list[OutputRows], inputs: int, init: Init):
        super().__init__(env)
        self.weight = self.param(column_spec(rows, inputs, init))

    def forward(self, x: Tensor) -> Tensor:
        return PLAIN.gather_matmul(x, self.weight, Axis("alone"))


class GroupedLinear(Linear):
    """x (R, in) sorted by expert -> (R, out): each row times its expert's matrix. The weight is (experts here, out,
    in). Weight and bias have a gradient for each micro-batch whose gradients stay apart (OpChoices.sources)."""

    def __init__(
        self, env: Env, weight: ParamSpec, names: Sequence[str], cut: int, experts: int, bias: ParamSpec | None = None
    ):
        super().__init__(env, weight, names, cut, experts)
        if bias is not None:
            self.bias = self.param(bias)
        for p in (self.weight, self.bias):
            if p is not None:
                p.add_extra_grads(env.ops.sources - 1)

    def forward(self, x: Tensor, ends: Tensor, source: int = 0, later: Later | None = None) -> Tensor:
        """`ends` (experts here,): one past each expert's last row. Gradients go where those of micro-batch number
        `source` go, the weight's when `later` is called."""
        bias = None if self.bias is None else gradient_of(self.bias, source)
        weight = gradient_of(self.weight, source)
        return self.method.grouped_matmul(x, weight, ends, self.env.kernels_for(GROUPED), bias, later)


def gradient_of(p: Parameter, source: int) -> Parameter:
    """The parameter with p's values whose gradient is that of micro-batch number `source`."""
    return p if source == 0 else p.extra_grads[source - 1]


def bias_name(weight: str) -> str:
    return weight.replace(".weight", ".bias")
