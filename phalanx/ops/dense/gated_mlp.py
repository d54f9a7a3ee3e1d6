"""A whole SwiGLU MLP as one op, with the activation in the epilogue of the first GEMM and its gradient in the epilogue
of a backward GEMM.

Compared with `gather_matmul`, `swiglu` and `matmul_scatter` in turn, this saves two passes over memory and does not
store the hidden activations. The GEMMs need gate and up interleaved, feature by feature, in their outputs. Only the
activations are, and only inside this op; the weight stays stacked [gate; up], and the GEMMs read and write it in that
form. The GEMMs come from an optional package (quack-kernels); the reference implementations below say what each one
computes.

Shapes: T tokens, D model, F inner features of this rank; `pre` and `d_pre` (T, 2F) are gate 0, up 0, gate 1, up 1, ...
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.comm.axis import Axis
from phalanx.ops.dense.activation import gated_backward, gated_forward
from phalanx.ops.dense.gate import SWIGLU
from phalanx.ops.dense.grads import account, add_product_grad, lasting
from phalanx.ops.op import Case, Implementation, Kernels, Op, Package


class PlainGemms:
    """The reference: defines what each GEMM computes."""

    @staticmethod
    def gated(x: Tensor, gate_up: Tensor, pre: Tensor, hidden: Tensor) -> None:
        """pre = x gate_up^T, interleaved; hidden = silu(gate) * up."""
        stacked = x @ gate_up.t()
        pre.copy_(torch.stack(stacked.chunk(2, -1), -1).flatten(1))
        hidden.copy_(gated_forward(stacked, SWIGLU))

    @staticmethod
    def gated_backward(dy: Tensor, down: Tensor, pre: Tensor, d_pre: Tensor, hidden: Tensor) -> None:
        """d_pre from dy through y = hidden down^T; hidden is recomputed."""
        d_stacked, _ = gated_backward(dy @ down, _stacked(pre), SWIGLU)
        d_pre.copy_(torch.stack(d_stacked.chunk(2, -1), -1).flatten(1))
        hidden.copy_(gated_forward(_stacked(pre), SWIGLU))

    @staticmethod
    def times(d_pre: Tensor, gate_up: Tensor, out: Tensor) -> None:
        """out = d_pre times the weight, with the features of d_pre separated into gate and up."""
        torch.mm(_stacked(d_pre), gate_up, out=out)

    @staticmethod
    def add_product(d_pre: Tensor, x: Tensor, gradient: Tensor) -> None:
        """gradient += d_pre^T x, with its rows separated into gate and up; in the dtype of the gradient, unrounded."""
        gradient.addmm_(_stacked(d_pre).t().to(gradient.dtype), x.to(gradient.dtype))


def _stacked(pre: Tensor) -> Tensor:
    return torch.cat((pre[:, ::2], pre[:, 1::2]), -1)


class DryGemms:
    """Without data: each GEMM writes to memory that it is given."""

    @staticmethod
    def gated(x: Tensor, gate_up: Tensor, pre: Tensor, hidden: Tensor) -> None:
        pass

    @staticmethod
    def gated_backward(dy: Tensor, down: Tensor, pre: Tensor, d_pre: Tensor, hidden: Tensor) -> None:
        pass

    @staticmethod
    def times(d_pre: Tensor, gate_up: Tensor, out: Tensor) -> None:
        pass

    @staticmethod
    def add_product(d_pre: Tensor, x: Tensor, gradient: Tensor) -> None:
        pass


class _GatedMLP(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, tp: Axis, gemms: Any) -> Tensor:  # type: ignore[override]
        ctx.gate_up, ctx.down, ctx.tp, ctx.gemms = (
            gate_up,
            down,
            tp,
            gemms,
        )  # weight slots, read again in backward: the values may move
        tokens = len(x) * tp.size
        pre, hidden = x.new_empty(tokens, gate_up.shape[0]), x.new_empty(tokens, down.shape[1])
        for rows, part in tp.gather(x).parts():
            gemms.gated(part, gate_up, pre[rows], hidden[rows])
        ctx.save_for_backward(x, pre)
        scattering = tp.scatter(tokens, down.shape[0], hidden)
        for rows, out in scattering.parts():
            torch.mm(hidden[rows], down.t(), out=out)
        return scattering.wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x, pre), gate_up, down, tp, gemms = ctx.saved_tensors, ctx.gate_up, ctx.down, ctx.tp, ctx.gemms
        need_x, need_gate_up, need_down, _, _ = ctx.needs_input_grad
        d_pre, hidden = torch.empty_like(pre), pre.new_empty(len(pre), down.shape[1])
        gathering = tp.gather(dy)
        for rows, part in gathering.parts():
            gemms.gated_backward(part, down, pre[rows], d_pre[rows], hidden[rows])
        whole_dy = gathering.wait()
        d_down = add_product_grad(down, lasting(down, whole_dy, tp.size == 1), hidden) if need_down else None
        gathering = tp.gather(x) if need_gate_up else None
        scattering = tp.scatter(len(pre), x.shape[1], d_pre) if need_x else None
        if scattering:
            for rows, out in scattering.parts():
                gemms.times(d_pre[rows], gate_up, out)
        d_gate_up = None
        if gathering:
            whole_x = lasting(gate_up, gathering.wait(), tp.size == 1)
            d_gate_up = account(gate_up, partial(gemms.add_product, d_pre, whole_x))
        return scattering.wait() if scattering else None, d_gate_up, d_down, None, None


def gated_mlp_fits(width: int, inner: int) -> bool:
    """Sizes that the package's GEMMs support: rows of multiples of 16 bytes. `inner`: of this rank."""
    return width % 8 == 0 and inner % 8 == 0


def gated_mlp(x: Tensor, gate_up: Tensor, down: Tensor, tp: Axis, gemms: Any) -> Tensor:
    """x (T / tp, D) of each rank, gate_up (2F, D) stacked, down (D, F) -> this rank's tokens (T / tp, D) of the sum
    over tp.

    gemms: the GEMMs to use, an implementation of MLP. The reference serves for comparisons; without a fast one, calling
    the separate ops is just as fast.
    """
    return _GatedMLP.apply(x, gate_up, down, tp, gemms)


def _case(x: Tensor, gate_up: Tensor, down: Tensor, kernels: Kernels) -> Tensor:
    return gated_mlp(x, gate_up, down, Axis("tp"), MLP.choose(kernels, x, *down.shape))


MLP = Op(
    "mlp",
    "a whole SwiGLU MLP, the activation inside the GEMMs",
    f"{__name__}:PlainGemms",
    ("gated", "gated_backward", "times", "add_product"),
    (
        Implementation(
            "quack",
            "phalanx.ops.dense.gated_mlp_kernel:QuackGemms",
            "cuda",
            (9, 0),
            (torch.bfloat16, torch.float16),
            # elsewhere it takes functions of nvidia-cutlass-dsl for the user's own, and refuses them
            Package("quack-kernels", "quack.gemm_interface", "0.6.5", ("site-packages", "dist-packages")),
            gated_mlp_fits,
            "widths in multiples of 8",
            modes=("auto",),
            insisted=("optional",),
            cost="SwiGLU is a kernel between two GEMMs: two more passes over memory",
        ),
        Implementation(
            "dry",
            f"{__name__}:DryGemms",
            "meta",
            dtypes=(torch.bfloat16, torch.float16),
            fits=gated_mlp_fits,
            modes=("optional",),
        ),
    ),
    switches=("mlp", "swiglu"),
    cases=(
        Case("a small MLP", _case, ((3, 72), (80, 72), (72, 40)), (1, 2)),
        Case("an MLP of a GPT-2", _case, ((1000, 768), (4096, 768), (768, 2048)), (1, 2), large=True),
    ),
)
