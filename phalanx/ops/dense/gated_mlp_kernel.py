"""The GEMMs of a SwiGLU MLP from quack-kernels (CuTe DSL, an optional package), with activations in their epilogues and
fp32 accumulation.

`tuned=False`: the package chooses its tiles by rule. Autotuning gained nothing at the shapes of an 8B model and takes
minutes.
"""

from __future__ import annotations

from quack.gemm_interface import gemm, gemm_add_inplace, gemm_dgated, gemm_gated
from torch import Tensor


class QuackGemms:
    """ops.dense.gated_mlp.PlainGemms defines what each one computes. `concat_layout` names the operands that are
    stacked [gate; up] in memory."""

    @staticmethod
    def gated(x: Tensor, gate_up: Tensor, pre: Tensor, hidden: Tensor) -> None:
        gemm_gated(
            x, gate_up.t(), activation="swiglu", preact_out=pre, postact_out=hidden, concat_layout=("B",), tuned=False
        )

    @staticmethod
    def gated_backward(dy: Tensor, down: Tensor, pre: Tensor, d_pre: Tensor, hidden: Tensor) -> None:
        gemm_dgated(dy, down, pre, activation="swiglu", dx_out=d_pre, postact_out=hidden, tuned=False)

    @staticmethod
    def times(d_pre: Tensor, gate_up: Tensor, out: Tensor) -> None:
        gemm(d_pre, gate_up, out=out, concat_layout=("B",), dynamic_scheduler=True, tuned=False)

    @staticmethod
    def add_product(d_pre: Tensor, x: Tensor, gradient: Tensor) -> None:
        gemm_add_inplace(d_pre.t(), x, gradient, concat_layout=("C", "out"), dynamic_scheduler=True, tuned=False)
