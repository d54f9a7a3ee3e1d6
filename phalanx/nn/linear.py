"""Linears: a weight, a bias and a method. ColumnLinear is sharded over tp by its outputs, RowLinear by its inputs;
ReplicatedLinear is whole on every rank; GroupedLinear holds one matrix for each expert of this rank.

A layer decides how its parameters are stored (fused, transposed, replicated). The method (nn.linear_method) decides how
they are multiplied.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from phalanx.comm.axis import Axis
from phalanx.layout.param import Init, ParamSpec
from phalanx.nn.env import Env
from phalanx.nn.initial import ZEROS
from phalanx.nn.linear_method import INVARIANT, PLAIN, LinearMethod
from phalanx.nn.module import Module, OutputRows, bias_spec, column_spec, row_spec
from phalanx.nn.parameter import Parameter
from phalanx.ops.dense.invariant import parts_of_rank
from phalanx.ops.experts.grouped import GROUPED, Later


class Linear(Module):
    """Common base of the linears.

    names, cut, experts  of its global matrices: their names, the dim that is sharded (0 outputs, 1 inputs), and the
                         number of experts in the layer (0: not a layer of experts)
    fed_lazily           whether the ops around it may pass it lazy tensors, provided that its method accepts them
    """

    fed_lazily = True

    def __init__(self, env: Env, weight: ParamSpec, names: Sequence[str], cut: int, experts: int = 0):
        super().__init__(env)
        self.names, self.cut, self.experts = tuple(names), cut, experts
        self.weight: Parameter = self.param(weight)
        self.bias: Parameter | None = None
        self.method: LinearMethod = self._method()

    def _method(self) -> LinearMethod:
        linears = self.env.weights.linears
        if linears is not None:
            self.env.refuse_invariance("a linear in FP8 or with adapters")
            return linears.method_of(self)
        return INVARIANT if self.env.ops.batch_invariant else PLAIN

    @property
    def is_plain(self) -> bool:
        """Whether its matmul currently uses the stored weight as it is."""
        return self.method.is_plain(self.weight)

    def takes_lazy(self, x: Tensor) -> bool:
        return self.fed_lazily and self.method.reads_lazy(self.weight, x)


class ColumnLinear(Linear):
    """x (T / tp, in) of each rank -> (T, this rank's outputs). The weight stacks the slices `rows` of the outputs of
    its global matrices. The bias is sharded like the outputs and named after the same matrices; `bias` may name the
    matrices that have one."""

    def __init__(
        self,
        env: Env,
        rows: list[OutputRows],
        inputs: int,
        init: Init,
        *,
        transposed: bool = False,
        bias: bool | Collection[str] = False,
    ):
        super().__init__(env, column_spec(rows, inputs, init, transposed), [r.name for r in rows], cut=0)
        biased = [r for r in rows if bias is True or (bias and r.name in bias)]
        if biased:
            biases = [OutputRows(bias_name(r.name), r.size, r.start, r.stop, r.replicas) for r in biased]
            self.bias = self.param(bias_spec(biases))
        self.spread = None if len(biased) in (0, len(rows)) else [(r.stop - r.start, r in biased) for r in rows]

    def forward(self, x: Tensor) -> Tensor:
        if self.spread is None or self.bias is None:
            return self.method.gather_matmul(x, self.weight, self.env.tp, self.bias)
        return self.product(x) + self._spread(self.bias, self.spread)

    def product(self, x: Tensor) -> Tensor:
        """`forward` without the bias."""
        return self.method.gather_matmul(x, self.weight, self.env.tp, None)

    def _spread(self, bias: Tensor, spread: Sequence[tuple[int, bool]]) -> Tensor:
        """A number for each output: zeros where a matrix has no bias."""
        parts = iter(bias.split([size for size, biased in spread if biased]))
        return torch.cat([next(parts) if biased else bias.new_zeros(size) for size, biased in spread])


class UnadaptedColumnLinear(ColumnLinear):
    """One whose matrix is no linear in transformers, so that PEFT has no adapter of it: it has none."""


class RowLinear(Linear):
    """h (T, this rank's inputs) -> this rank's tokens (T / tp, out) of the sum over tp. The weight holds inputs `own`
    (start, stop) of a global matrix. Each rank holds the whole bias and adds it to its own tokens."""

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
        if env.ops.batch_invariant:
            parts_of_rank(inputs, env.grid.tp)  # refused here, before there are ranks
        super().__init__(env, row_spec(name, outputs, inputs, *own, init, transposed), [name], cut=1)
        if bias:
            self.bias = self.replicated(bias_name(name), outputs, ZEROS)

    def forward(self, h: Tensor) -> Tensor:
        return self.method.matmul_scatter(h, self.weight, self.env.tp, self.bias)


class ReplicatedLinear(Module):
    """x (T / tp, in) -> (T / tp, out) of this rank's own tokens. Each tp rank holds all of the matrices, stacked, and
    their biases, if they have any. Meant for narrow outputs, and for what normalizes them: never in FP8."""

    cut: int | None = None
    experts: int = 0

    def __init__(self, env: Env, rows: list[OutputRows], inputs: int, init: Init, bias: bool = False):
        super().__init__(env)
        env.refuse_invariance("a linear that every rank holds whole")
        self.names = tuple(r.name for r in rows)
        self.weight = self.param(column_spec(rows, inputs, init))
        biases = [OutputRows(bias_name(r.name), r.size, r.start, r.stop, r.replicas) for r in rows] if bias else []
        self.bias = self.param(bias_spec(biases)) if bias else None
        linears = env.weights.linears
        self.method: LinearMethod = PLAIN if linears is None else linears.method_of(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.method.gather_matmul(x, self.weight, Axis("alone"), self.bias)


class GroupedLinear(Linear):
    """x (R, in) sorted by expert -> (R, out): each row times its expert's matrix. The weight is (experts here, out,
    in). Where gradients of micro-batches are kept separate (OpChoices.sources), weight and bias have one gradient for
    each."""

    def __init__(
        self, env: Env, weight: ParamSpec, names: Sequence[str], cut: int, experts: int, bias: ParamSpec | None = None
    ):
        env.refuse_invariance("a layer of experts")
        super().__init__(env, weight, names, cut, experts)
        if bias is not None:
            self.bias = self.param(bias)
        for p in (self.weight, self.bias):
            if p is not None:
                p.add_extra_grads(env.ops.sources - 1)

    def forward(self, x: Tensor, ends: Tensor, source: int = 0, later: Later | None = None) -> Tensor:
        """`ends` (experts here,): one past each expert's last row. Gradients are added to those of micro-batch number
        `source`; with `later`, the weight's gradient is computed when `later` is called."""
        bias = None if self.bias is None else gradient_of(self.bias, source)
        weight = gradient_of(self.weight, source)
        return self.method.grouped_matmul(x, weight, ends, self.env.kernels_for(GROUPED), bias, later)


class UnadaptedGroupedLinear(GroupedLinear):
    """Experts in one tensor whose inputs and outputs PEFT takes for each other: they have no adapters."""


def gradient_of(p: Parameter, source: int) -> Parameter:
    """A parameter that shares p's values and whose gradient is that of micro-batch number `source`."""
    return p if source == 0 else p.extra_grads[source - 1]


def bias_name(weight: str) -> str:
    return weight.replace(".weight", ".bias")
