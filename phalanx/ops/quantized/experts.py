"""The matmul of many experts at once (ops.experts.grouped) with quantized operands: forward, gradient of the input,
gradient of the weight. How they are cast: expert_quantizer."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Function

from phalanx.ops.dense.activation import GATED, GatedRows, GatedRowsGrad, parts_of_sums
from phalanx.ops.dense.gate import Gate
from phalanx.ops.experts.grouped import GROUPED, Later, add_sum_grad
from phalanx.ops.op import Kernels
from phalanx.ops.quantized.expert_quantizer import ExpertQuantizer
from phalanx.ops.quantized.quantizer import DY, X
from phalanx.ops.quantized.recipes import Scaled


class _QuantizedGroupedMatmul(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        ends: Tensor,
        bias: Tensor | None,
        quantizer: ExpertQuantizer,
        later: Later | None,
    ) -> Tensor:  # type: ignore[override]
        q, kept = quantizer.rows(X, x, ends)
        ctx.save_for_backward(kept.quantized, kept.scales, ends)
        ctx.weight, ctx.bias, ctx.quantizer, ctx.later, ctx.block = weight, bias, quantizer, later, kept.block
        return quantizer.times_weight(q, weight, ends, x.dtype, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (quantized, scales, ends), weight, bias, quantizer = ctx.saved_tensors, ctx.weight, ctx.bias, ctx.quantizer
        need_x, need_w, _, need_b, _, _ = ctx.needs_input_grad
        q, of_padded = quantizer.rows(DY, dy, ends)
        dx, dw = quantizer.times_transposed(q, weight, ends, dy.dtype) if need_x else None, None
        grads = partial(quantizer.add_grads, weight, of_padded, Scaled(quantized, scales, ctx.block), ends)
        if need_w and ctx.later is not None and weight.grad is not None:
            ctx.later.append(grads)
        elif need_w:
            dw = grads()
        db = add_sum_grad(bias, dy, ends, GROUPED.choose(quantizer.kernels, dy)) if need_b else None
        return dx, dw, None, db, None, None


class _QuantizedGroupedMLP(Function):
    """_QuantizedGroupedMatmul, gated_rows and _QuantizedGroupedMatmul in one op, with the same quantized values and
    results. The first quantizer is for gate_up, the second for down."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        quantizers: tuple[ExpertQuantizer, ExpertQuantizer],
        ends: Tensor,
        weights: Tensor | None,
        gate: Gate,
        kernels: Kernels,
        later: Later | None,
    ) -> Tensor:  # type: ignore[override]
        up_quantizer, quantizer = quantizers
        q, kept = up_quantizer.rows(X, x, ends)
        both = up_quantizer.times_weight(q, gate_up, ends, x.dtype)
        h, h_kept = quantizer.rows(X, GatedRows(both, weights, ends[-1], gate, kernels), ends)
        ctx.gate_up, ctx.down, ctx.gate, ctx.kernels, ctx.later = gate_up, down, gate, kernels, later
        ctx.quantizers, ctx.blocks = quantizers, (kept.block, h_kept.block)
        ctx.save_for_backward(kept.quantized, kept.scales, both, h_kept.quantized, h_kept.scales, ends, weights)
        return quantizer.times_weight(h, down, ends, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gate_up, down, later, (up_quantizer, quantizer) = ctx.gate_up, ctx.down, ctx.later, ctx.quantizers
        x_quantized, x_scales, both, h_quantized, h_scales, ends, weights = ctx.saved_tensors
        need_x, need_up, need_down = ctx.needs_input_grad[:3]
        q, of_padded = quantizer.rows(DY, dy, ends)
        dh = quantizer.times_transposed(q, down, ends, dy.dtype)
        d_down = (
            quantizer.add_grads(down, of_padded, Scaled(h_quantized, h_scales, ctx.blocks[1]), ends)
            if need_down
            else None
        )
        sums = None if weights is None else weights.new_zeros(parts_of_sums(dh.shape[1]), len(weights))
        source = GatedRowsGrad(both, weights, ends[-1], ctx.gate, ctx.kernels, dy=dh, sums=sums)
        q, of_padded = up_quantizer.rows(DY, source, ends)
        dx, d_up = up_quantizer.times_transposed(q, gate_up, ends, dy.dtype) if need_x else None, None
        grads = partial(up_quantizer.add_grads, gate_up, of_padded, Scaled(x_quantized, x_scales, ctx.blocks[0]), ends)
        if need_up and later is not None and gate_up.grad is not None:
            later.append(grads)
        elif need_up:
            d_up = grads()
        return dx, d_up, d_down, None, None, None if sums is None else sums.sum(0), None, None, None


def use_quantized_grouped_mlp(quantizers: tuple[ExpertQuantizer, ExpertQuantizer], kernels: Kernels, x: Tensor) -> bool:
    """Whether experts whose matrices have these quantizers, and no biases, run as one op: only with casts by Triton.
    `kernels`: of the activation."""
    return all(quantizer.by_triton(x) for quantizer in quantizers) and GATED.fast(kernels, x) is not None


def quantized_grouped_mlp(
    x_RD: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ends: Tensor,
    weights_R: Tensor | None,
    gate: Gate,
    kernels: Kernels = "auto",
    later: Later | None = None,
    *,
    quantizers: tuple[ExpertQuantizer, ExpertQuantizer],
) -> Tensor:
    """Gated experts: x (R, D) -> (R, D), with quantized x, activations (times `weights_R`), gate_up (E, 2F, D) and down
    (E, D, F). x, and the gradient of the output, may be lazy tensors (ops.lazy_tensor)."""
    return _QuantizedGroupedMLP.apply(x_RD, gate_up, down, quantizers, ends, weights_R, gate, kernels, later)


def quantized_grouped_matmul(
    x_RI: Tensor,
    weight_EOI: Tensor,
    ends_E: Tensor,
    quantizer: ExpertQuantizer,
    bias_EO: Tensor | None = None,
    later: Later | None = None,
) -> Tensor:
    """As ops.experts.grouped.grouped_matmul, with quantized x and weight."""
    return _QuantizedGroupedMatmul.apply(x_RI, weight_EOI, ends_E, bias_EO, quantizer, later)
