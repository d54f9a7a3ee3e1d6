"""MLPs sharded over tp by their inner features (of any width: ranks may differ by one): SwiGLU, GeGLU and GELU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.layout.param import MatrixOutputs
from phalanx.nn.env import Env
from phalanx.nn.initial import Normal
from phalanx.nn.linear import ColumnLinear, Linear, RowLinear
from phalanx.nn.module import Module, OutputRows
from phalanx.ops.dense.activation import GATED, gelu, gelu_by_formula, quick_gelu, swiglu
from phalanx.ops.dense.biased_gelu import BIASED_GELU, biased_gelu
from phalanx.ops.dense.gate import EXACT_GEGLU, GEGLU, SWIGLU
from phalanx.ops.dense.gated_mlp import MLP, gated_mlp
from phalanx.ops.dense.relu2 import RELU2, relu2
from phalanx.sequence.batch import Batch

OTHER_ACTIVATIONS = ("quick_gelu", "relu2")  # than GELU, which is one op with the bias before it


def run_mlp(mlp: Module, make: Callable[[Tensor], Tensor], x: Tensor, *linears: Linear) -> Tensor:
    """make(x), on a slice of the tokens at a time if "mlp" is recomputed. Linears that are not plain process all tokens
    at once, because quantized values share scales over all tokens."""
    if all(linear.is_plain for linear in linears):
        return mlp.env.recompute.in_pieces(make, x, mlp.parameters())
    return make(x)


class SwiGLU(Module):
    """down(silu(gate x) * up x), gate and up stacked in one matrix; `bias`: all three have one. Equal names of gate and
    up mean one fused global matrix, all gates before all ups.

    gate   the activation; a subclass may have another, which the fused MLPs do not compute
    """

    gate = SWIGLU
    first_in_memory = ("gate_up.weight", "down.weight", "gate_up.bias", "down.bias")

    def __init__(self, env: Env, names: tuple[str, str, str], width: int, inner: int, std: float, bias: bool = False):
        super().__init__(env)
        a, b = env.cut(inner)
        rows, init = [OutputRows(name, inner, a, b) for name in names[:2]], Normal(std)
        if names[0] == names[1]:
            rows = fused_rows(names[0], inner, (a, b), ("gate", "up"))
        self.gate_up = ColumnLinear(env, rows, width, init, bias=bias)
        self.down = RowLinear(env, names[2], width, inner, (a, b), init, bias=bias)
        self.num_weights = 3 * width * inner

    def forward(self, x: Tensor, batch: Batch | None = None) -> Tensor:
        """x (T / tp, D) -> (T / tp, D); the batch is not used."""
        return run_mlp(self, self._of_rows, x, self.gate_up, self.down)

    def _of_rows(self, x: Tensor) -> Tensor:
        up, down, recomputes = self.gate_up, self.down, self.env.recompute.recomputes
        if up.bias is not None or self.gate != SWIGLU or recomputes("up"):  # one op cannot be recomputed in part
            return self._in_ops(x)
        if up.is_plain and down.is_plain:
            gemms = MLP.fast(self.env.kernels_for(MLP), x, *down.weight.shape)
            if gemms is not None:
                return gated_mlp(x, up.weight, down.weight, self.env.tp, gemms)
        elif not recomputes("activation"):
            fused = up.method.fused_mlp(up.weight, down.weight, self.env.kernels_for(GATED), x)
            if fused is not None:
                return fused(x, up.weight, down.weight, self.env.tp)
        return self._in_ops(x)

    def _in_ops(self, x: Tensor) -> Tensor:
        gate_up = self.env.recompute.op("up", self.gate_up, x)
        hidden = self.env.recompute.op(
            "activation", lambda x: swiglu(x, self.env.kernels_for(GATED), self.gate), gate_up
        )
        return self.down(hidden)

    def takes_lazy(self, x: Tensor) -> bool:
        return not any(map(self.env.recompute.recomputes, ("norm", "up", "mlp"))) and self.gate_up.takes_lazy(x)

    def flops(self, seq_length: int) -> float:
        return 2.0 * self.num_weights


def fused_rows(name: str, inner: int, at: tuple[int, int], matrices: tuple[str, str]) -> list[OutputRows]:
    """Outputs at[0]..at[1] of both matrices of `inner` outputs that one global matrix holds, one after the other."""
    return [
        OutputRows(name, 2 * inner, first + at[0], first + at[1], outputs=(MatrixOutputs(matrix, inner),))
        for first, matrix in zip((0, inner), matrices)
    ]


class GeGLU(SwiGLU):
    """The same with GELU in its tanh form."""

    gate = GEGLU


class GeluMLP(Module):
    """project(gelu(expand x)).

    activation   gelu_new (the tanh form), gelu (exact), quick_gelu (CLIP's) or relu2, the square of ReLU
    transposed   matrices are stored as (inputs, outputs) in checkpoints (GPT-2's Conv1D)
    """

    def __init__(
        self,
        env: Env,
        names: tuple[str, str],
        width: int,
        inner: int,
        std: float,
        std_out: float,
        activation: str = "gelu_new",
        transposed: bool = True,
        bias: bool = True,
    ):
        super().__init__(env)
        a, b = env.cut(inner)
        rows = [OutputRows(f"{names[0]}.weight", inner, a, b)]
        how: Any = {"transposed": transposed, "bias": bias}
        self.expand = ColumnLinear(env, rows, width, Normal(std), **how)
        self.project = RowLinear(env, f"{names[1]}.weight", width, inner, (a, b), Normal(std_out), **how)
        self.activation = activation
        self.num_weights = 2 * width * inner

    def forward(self, x: Tensor, batch: Batch | None = None) -> Tensor:
        """x (T / tp, D) -> (T / tp, D); the batch is not used."""
        return run_mlp(self, self._of_rows, x, self.expand, self.project)

    def _of_rows(self, x: Tensor) -> Tensor:
        bias, recompute = self.expand.bias, self.env.recompute
        if bias is None or self.env.ops.batch_invariant or self.activation in OTHER_ACTIVATIONS:
            expanded = recompute.op("up", self.expand, x)
            return self.project(recompute.op("activation", self._activated, expanded))
        kernels, exact = self.env.kernels_for(BIASED_GELU), self.activation == "gelu"
        expanded = recompute.op("up", self.expand.product, x)
        return self.project(recompute.op("activation", lambda x: biased_gelu(x, bias, kernels, exact), expanded))

    def _activated(self, x: Tensor) -> Tensor:
        if self.activation == "relu2":
            return relu2(x, self.env.kernels_for(RELU2))
        if self.activation == "quick_gelu":
            return quick_gelu(x)
        activate = gelu_by_formula if self.env.ops.batch_invariant else gelu
        return activate(x, self.activation == "gelu")

    def flops(self, seq_length: int) -> float:
        return 2.0 * self.num_weights


@dataclass(frozen=True, kw_only=True)
class FusedGeGLUSpec:
    """names: of the fused input matrix, whose first half of the outputs is activated and whose second half is the gate,
    and of the output matrix. std, std_out: of their initial weights. exact: GELU itself, not its tanh form. bias: both
    have one."""

    names: tuple[str, str]
    width: int
    inner: int
    std: float
    std_out: float
    exact: bool = True
    bias: bool = False


class FusedGeGLU(Module):
    """down(gelu(input x) * gate x), with input and gate in one matrix, as ModernBERT has it (Shazeer, "GLU variants
    improve transformer", 2020)."""

    first_in_memory = ("gate_up.weight", "down.weight", "gate_up.bias", "down.bias")

    def __init__(self, env: Env, spec: FusedGeGLUSpec):
        super().__init__(env)
        (fused, out), inner, (a, b) = spec.names, spec.inner, env.cut(spec.inner)
        rows = fused_rows(fused, inner, (a, b), ("input", "gate"))
        self.gate_up = ColumnLinear(env, rows, spec.width, Normal(spec.std), bias=spec.bias)
        self.down = RowLinear(env, out, spec.width, inner, (a, b), Normal(spec.std_out), bias=spec.bias)
        self.gate, self.num_weights = EXACT_GEGLU if spec.exact else GEGLU, 3 * spec.width * inner

    def forward(self, x: Tensor) -> Tensor:
        """x (T / tp, D) -> (T / tp, D)."""
        return run_mlp(self, self._of_rows, x, self.gate_up, self.down)

    def _of_rows(self, x: Tensor) -> Tensor:
        recompute, kernels = self.env.recompute, self.env.kernels_for(GATED)
        gate_up = recompute.op("up", self.gate_up, x)
        return self.down(recompute.op("activation", lambda x: swiglu(x, kernels, self.gate), gate_up))

    def flops(self, seq_length: int) -> float:
        return 2.0 * self.num_weights
