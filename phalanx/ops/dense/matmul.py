"""The two communicating matmuls of a sub-layer: gather tokens then multiply, multiply then scatter tokens.

Between blocks each tensor-parallel rank holds T / tp tokens of the micro-batch (sequence parallelism, Korthikanti et
al., "Reducing activation recomputation in large transformer models", 2022). Inside a sub-layer each rank holds all T
tokens and its shard of the features. For y = x W^T: dx = dy W and dW = dy^T x; a gather in forward is a scatter in
backward, and the reverse. The tokens are gathered again in backward instead of being stored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.comm.axis import Axis
from phalanx.ops.dense.grads import add_grad, add_product_grad, lasting
from phalanx.ops.dense.row_sums import add_bias_grad
from phalanx.ops.op import ALL_KERNELS, Case, Implementation, Kernels, Op, invariant, triton

ALONE = Axis("alone")


class PlainMatmuls:
    """The definition of MATMUL: torch's matmuls."""

    @staticmethod
    def gathered(x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis) -> Tensor:
        """The forward of gather_matmul."""
        y = x.new_empty(len(x) * tp.size, weight.shape[0])
        for rows, part in tp.gather(x).parts():
            multiply(part, weight.t(), y[rows], bias)
        return y

    @staticmethod
    def scattered(h: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis) -> Tensor:
        """The forward of matmul_scatter."""
        scattering, whole = tp.scatter(len(h), weight.shape[0], h), tp.size == 1
        for rows, out in scattering.parts():
            multiply(h[rows], weight.t(), out, bias if whole else None)
        y = scattering.wait()
        return y if bias is None or whole else y + bias


class _GatherMatmul(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, by: Any) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.tp = weight, bias, tp  # slots, read again in backward: the values may move
        y: Tensor = by.gathered(x, weight, bias, tp)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,), weight, bias, tp = ctx.saved_tensors, ctx.weight, ctx.bias, ctx.tp
        need_x, need_w, need_b, *_ = ctx.needs_input_grad
        gathering = tp.gather(x) if need_w else None
        scattering = tp.scatter(len(dy), weight.shape[1], dy) if need_x else None
        if scattering:
            for rows, out in scattering.parts():
                torch.mm(dy[rows], weight, out=out)
        dw = add_product_grad(weight, dy, lasting(weight, gathering.wait(), tp.size == 1)) if gathering else None
        db = add_bias_grad(bias, dy) if need_b else None
        return scattering.wait() if scattering else None, dw, db, None, None


class _MatmulScatter(Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, by: Any) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(h)
        ctx.weight, ctx.bias, ctx.tp = weight, bias, tp
        y: Tensor = by.scattered(h, weight, bias, tp)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (h,), weight, bias, tp = ctx.saved_tensors, ctx.weight, ctx.bias, ctx.tp
        need_h, need_w, need_b, *_ = ctx.needs_input_grad
        db = add_bias_grad(bias, dy) if need_b else None
        if not (need_h or need_w):
            return None, None, db, None, None
        gathering, dh = tp.gather(dy), torch.empty_like(h) if need_h else None
        if dh is not None:
            for rows, part in gathering.parts():
                torch.mm(part, weight, out=dh[rows])
        dw = add_product_grad(weight, lasting(weight, gathering.wait(), tp.size == 1), h) if need_w else None
        return dh, dw, db, None, None


class _WideMatmul(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, by: Any) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.by = weight, bias, by
        y: Tensor = by.product(x, weight)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        need_x, need_w, need_b, _ = ctx.needs_input_grad
        dx, dw = ctx.by.gradients(dy, x, weight, need_x, need_w)
        db = add_bias_grad(bias, dy) if need_b else None
        return dx, dw if dw is None else dw.to(weight.dtype), db, None


class WideProducts:
    """The definition: matmuls in fp32 (fp64 for fp64)."""

    @staticmethod
    def product(x: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(_widened(x), _widened(weight).t())

    @staticmethod
    def gradients(
        dy: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_w: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Of x, and what a backward must return for the weight, whose gradient it accounts for."""
        dx = torch.mm(dy, _widened(weight)).to(x.dtype) if need_x else None
        return dx, add_product_grad(weight, dy, _widened(x)) if need_w else None


class NarrowProducts(WideProducts):
    """Matmuls of 16-bit numbers with fp32 sums."""

    @staticmethod
    def product(x: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)


class PieceProducts(NarrowProducts):
    """The gradients, too, from bf16 matmuls with fp32 sums: fp32 matmuls run at a tenth of their rate."""

    @staticmethod
    def gradients(
        dy: Tensor, x: Tensor, weight: Tensor, need_x: bool, need_w: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        parts, dw = pieces(dy), None
        dx = torch.mm(parts, weight.repeat(PIECES, 1)) if need_x else None
        if need_w:
            product = torch.mm(parts.t(), x, out_dtype=torch.float32).view(PIECES, *weight.shape).sum(0)
            dw = add_grad(weight, product)
        return dx, dw


PIECES = 3  # of 8 bits each: an fp32 number has 24


def pieces(y: Tensor) -> Tensor:
    """y (T, N) fp32 -> (T, 3 N) bf16: three numbers side by side whose sum is y, up to fp32's own rounding."""
    found, rest = [], y
    for _ in range(PIECES):
        found.append(rest.bfloat16())
        rest = rest - found[-1]
    return torch.cat(found, 1)


def _widened(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def multiply(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """out = x weight + bias, with the bias added in the GEMM's epilogue."""
    torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)


def wide_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (T, in), weight (out, in), whole on each rank -> (T, out) in fp32 (fp64 for fp64 inputs), so that rounding does
    not decide which experts a router chooses."""
    return _WideMatmul.apply(x, weight, bias, WIDE_MATMUL.choose("auto", x))


def gather_matmul(x: Tensor, weight: Tensor, tp: Axis, bias: Tensor | None = None, kernels: Kernels = "auto") -> Tensor:
    """x (T / tp, in) of each rank, weight (out_local, in) -> y (T, out_local). The bias is sharded like the outputs."""
    return _GatherMatmul.apply(x, weight, bias, tp, MATMUL.choose(kernels, x))


def local_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None, kernels: Kernels = "auto") -> Tensor:
    """x (T, in), weight (out, in) -> (T, out) of this rank's own tokens: gather_matmul over one rank."""
    return gather_matmul(x, weight, ALONE, bias, kernels)


def matmul_scatter(
    h: Tensor, weight: Tensor, tp: Axis, bias: Tensor | None = None, kernels: Kernels = "auto"
) -> Tensor:
    """h (T, in_local), weight (out, in_local) -> this rank's tokens (T / tp, out) of the sum over tp.

    The bias is added to this rank's tokens only, so its gradient is a partial sum over tp.
    """
    return _MatmulScatter.apply(h, weight, bias, tp, MATMUL.choose(kernels, h))


MATMUL = Op(
    "matmul",
    "matmuls of linears and of the head, with their exchanges over tp",
    f"{__name__}:PlainMatmuls",
    ("gathered", "scattered"),
    (
        replace(
            triton("phalanx.ops.dense.invariant_kernel:TritonMatmuls"),
            modes=("invariant",),
            insisted=(),
            dtypes=(torch.bfloat16, torch.float16, torch.float32),
        ),
        invariant("phalanx.ops.dense.invariant:InvariantMatmuls", "any"),
    ),
    cases=(
        Case("outputs sharded", lambda x, w, b, k: gather_matmul(x, w, ALONE, b, k), ((5, 7), (9, 7), (9,)), (1, 2)),
        Case("inputs sharded", lambda h, w, b, k: matmul_scatter(h, w, ALONE, b, k), ((5, 24), (9, 24), (9,)), (1, 2)),
    ),
)
WIDE_MATMUL = Op(
    "wide_matmul",
    "matmuls of routers, in fp32",
    f"{__name__}:WideProducts",
    ("product", "gradients"),
    (
        Implementation("pieces", f"{__name__}:PieceProducts", "cuda", dtypes=(torch.bfloat16,), modes=ALL_KERNELS),
        Implementation("narrow", f"{__name__}:NarrowProducts", "cuda", dtypes=(torch.float16,), modes=ALL_KERNELS),
    ),
    switches=("route",),
    cases=tuple(
        Case(
            f"64 experts, {dtype}",
            lambda x, weight, kernels: wide_matmul(x, weight),
            ((8192, 512), (64, 512)),
            (1,),
            dtypes=(dtype,),
            large=True,
        )
        for dtype in (torch.bfloat16, torch.float16)
    ),
)
