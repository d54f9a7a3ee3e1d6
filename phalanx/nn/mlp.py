"""MLPs cut over tp by their inner features (any width: the ranks' parts may differ by one): SwiGLU and GELU."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from phalanx.layout.param import Init
from phalanx.nn.env import Env
from phalanx.nn.module import ZEROS, Module, OutputRows, bias_spec, column_spec, row_spec
from phalanx.ops.dense.activation import gelu, swiglu
from phalanx.ops.dense.gated_mlp import gated_mlp, use_gated_mlp
from phalanx.ops.dense.matmul import gather_matmul, matmul_scatter
from phalanx.ops.quantized.linear import quantized_gated_mlp, quantizer_of, takes_lazy, use_quantized_gated_mlp
from phalanx.sequence.batch import Batch


def run_mlp(mlp: Module, make: Callable[[Tensor], Tensor], x: Tensor, *weights: Tensor) -> Tensor:
    """make(x), by some of the tokens at a time where "mlp" is made again; not in low precision, whose scales are of
    all tokens."""
    return make(x) if any(map(quantizer_of, weights)) else mlp.env.recompute.in_pieces(make, x, mlp.parameters())


class SwiGLU(Module):
    """down(silu(gate x) * up x), gate and up stacked in one matrix; `bias`: all three have one."""

    def __init__(self, env: Env, names: tuple[str, str, str], width: int, inner: int, std: float, bias: bool = False):
        super().__init__(env)
        a, b = env.cut(inner)
        self.gate_up = self.matrix(
            column_spec(
                [OutputRows(names[0], inner, a, b), OutputRows(names[1], inner, a, b)], width, Init("normal", std)
            ),
            cut=0,
        )
        self.down = self.matrix(row_spec(names[2], width, inner, a, b, Init("normal", std)), cut=1)
        biases = [name.replace(".weight", ".bias") for name in names]
        self.gate_up_bias = (
            self.param(bias_spec([OutputRows(name, inner, a, b) for name in biases[:2]])) if bias else None
        )
        self.down_bias = self.replicated(biases[2], width, ZEROS) if bias else None
        self.num_weights = 3 * width * inner

    def forward(self, x: Tensor, batch: Batch | None = None) -> Tensor:
        """x (T / tp, D) -> (T / tp, D), whatever the batch."""
        return run_mlp(self, self._of_rows, x, self.gate_up, self.down)

    def _of_rows(self, x: Tensor) -> Tensor:
        if self.gate_up_bias is not None:
            return self._in_ops(x)
        quantizer, kernels, recomputes = (
            quantizer_of(self.gate_up) or quantizer_of(self.down),
            self.env.kernels_for("swiglu"),
            self.env.recompute.recomputes,
        )  # of one op, no half can be
        if quantizer is None and not recomputes("up") and use_gated_mlp(self.env.kernels_for("mlp"), x, self.down):
            return gated_mlp(x, self.gate_up, self.down, self.env.tp)
        if (
            quantizer is not None
            and not (recomputes("up") or recomputes("activation"))
            and use_quantized_gated_mlp(self.gate_up, self.down, kernels, x)
        ):
            return quantized_gated_mlp(x, self.gate_up, self.down, self.env.tp, kernels)
        return self._in_ops(x)

    def _in_ops(self, x: Tensor) -> Tensor:
        gate_up = self.env.recompute.op(
            "up", lambda x: gather_matmul(x, self.gate_up, self.env.tp, self.gate_up_bias), x
        )
        hidden = self.env.recompute.op("activation", lambda x: swiglu(x, self.env.kernels_for("swiglu")), gate_up)
        return matmul_scatter(hidden, self.down, self.env.tp, self.down_bias)

    def takes_lazy(self, x: Tensor) -> bool:
        return not any(map(self.env.recompute.recomputes, ("norm", "up", "mlp"))) and takes_lazy(self.gate_up, x)

    def flops(self, seq_length: int) -> float:
        return 2.0 * self.num_weights


class GeluMLP(Module):
    """project(gelu(expand x)), with biases, matrices stored transposed outside (GPT-2's Conv1D).

    activation   gelu_new (the tanh form) or gelu (exact)
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
    ):
        super().__init__(env)
        a, b = env.cut(inner)
        self.expand = self.matrix(
            column_spec([OutputRows(f"{names[0]}.weight", inner, a, b)], width, Init("normal", std), transposed=True),
            cut=0,
        )
        self.expand_bias = self.param(bias_spec([OutputRows(f"{names[0]}.bias", inner, a, b)]))
        self.project = self.matrix(
            row_spec(f"{names[1]}.weight", width, inner, a, b, Init("normal", std_out), transposed=True), cut=1
        )
        self.project_bias = self.replicated(f"{names[1]}.bias", width, Init("zeros"))
        self.exact = activation == "gelu"
        self.num_weights = 2 * width * inner

    def forward(self, x: Tensor) -> Tensor:
        """x (T / tp, D) -> (T / tp, D)."""
        return run_mlp(self, self._of_rows, x, self.expand, self.project)

    def _of_rows(self, x: Tensor) -> Tensor:
        expanded = self.env.recompute.op(
            "up", lambda x: gather_matmul(x, self.expand, self.env.tp, self.expand_bias), x
        )
        hidden = self.env.recompute.op("activation", lambda x: gelu(x, self.exact), expanded)
        return matmul_scatter(hidden, self.project, self.env.tp, self.project_bias)

    def flops(self, seq_length: int) -> float:
        return 2.0 * self.num_weights
