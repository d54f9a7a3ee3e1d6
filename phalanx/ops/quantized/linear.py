"""The communicating matmuls of a sub-layer with quantized operands: forward, gradient of the input, gradient of the
weight.

Quantized values travel between tp ranks, not bf16 ones. If elements that share a scale are spread over ranks, the scale
is computed from the amax of all of them; so values and scales are those of one process wherever no block of fixed size
is split (quantizer.py). A SwiGLU MLP is one op: its activations and their gradients are computed directly as quantized
values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from phalanx.comm.axis import Axis
from phalanx.ops.dense.activation import GATED, Gated, GatedGrad
from phalanx.ops.dense.grads import lasting
from phalanx.ops.dense.row_sums import add_bias_grad
from phalanx.ops.op import Kernels
from phalanx.ops.quantized.quantizer import DY, QUANT, WeightQuantizer, X
from phalanx.ops.quantized.recipes import Scaled


def _gather(q: Scaled, tp: Axis) -> tuple[Any, Tensor]:
    """Start gathering the quantized values (n, F) of each rank into (T, F), as bytes; returns the pending gather and
    the scales of all ranks. ValueError if a block is split between ranks."""
    if tp.size > 1 and q.block[0] > 0 and len(q.quantized) % q.block[0]:
        raise ValueError(f"{len(q.quantized)} tokens of each rank are no whole blocks of {q.block[0]}")
    return tp.gather(q.quantized.view(torch.uint8)), q.scales if q.block[0] == 0 else tp.all_gather(q.scales).wait()


def _gather_multiply(
    q: Scaled, tp: Axis, quantizer: WeightQuantizer, weight: Scaled, fast: bool, y: Tensor
) -> tuple[Any, Tensor]:
    """y (T, out) = the quantized values of all ranks (n, in) times those of the weight (out, in). Returns what
    `_gather` returned."""
    quantized, scales = _gather(q, tp)
    for rows, part in quantized.parts():
        quantizer.product(
            Scaled(part.view(q.quantized.dtype), _rows_of(scales, q.block, rows), q.block),
            weight,
            y.dtype,
            fast,
            out=y[rows],
        )
    return quantized, scales


def _multiply_scatter(q: Scaled, tp: Axis, quantizer: WeightQuantizer, weight: Scaled, fast: bool, like: Tensor) -> Any:
    """Start scattering the matmul of quantized values (T, in) with those of the weight (out, in), summed over ranks, in
    the dtype of `like`."""
    scattering = tp.scatter(len(q.quantized), len(weight.quantized), like)
    for rows, out in scattering.parts():
        quantizer.product(q.rows(rows), weight, like.dtype, fast, out=out)
    return scattering


def _add_from_gathered(
    q: Scaled,
    columns: Scaled,
    gathered: tuple[Any, Tensor],
    tp: Axis,
    quantizer: WeightQuantizer,
    weight: Tensor,
    h: Scaled,
) -> Tensor | None:
    """Account for the weight's gradient from dy of all ranks (q, gathered; `columns` has blocks along tokens) and h
    (in, T)."""
    if tp.size == 1:
        return quantizer.add_weight_grad(weight, columns, h)
    gathering = gathered if columns is q else _gather(columns, tp)
    return quantizer.add_weight_grad(weight, _whole_of(columns, gathering, quantizer, weight), h)


def _whole_of(kept: Scaled, gathering: tuple[Any, Tensor] | None, quantizer: WeightQuantizer, weight: Tensor) -> Scaled:
    """The gathered values of all ranks, transposed, for the gradient of `weight`. With a single rank nothing was
    gathered."""
    if gathering is None:
        return kept
    quantized = lasting(weight, gathering[0].wait(), own=False)
    return quantizer.transposed(Scaled(quantized.view(kept.quantized.dtype), gathering[1], kept.block))


class _QuantizedGatherMatmul(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, quantizer: WeightQuantizer
    ) -> Tensor:  # type: ignore[override]
        ctx.weight, ctx.bias, ctx.tp, ctx.quantizer = weight, bias, tp, quantizer
        q, kept = quantizer.both(X, x, cut=0, turn=tp.size == 1)
        ctx.block = kept.block
        ctx.save_for_backward(kept.quantized, kept.scales)
        y = x.new_empty(len(x) * tp.size, weight.shape[0])
        _gather_multiply(q, tp, quantizer, quantizer.quantized(weight)[0], quantizer.fast_forward, y)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight, bias, tp, quantizer = ctx.weight, ctx.bias, ctx.tp, ctx.quantizer
        kept = Scaled(ctx.saved_tensors[0], ctx.saved_tensors[1], ctx.block)
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        db = add_bias_grad(bias, dy) if need_b else None
        gathering = _gather(kept, tp) if need_w and tp.size > 1 else None
        q, columns = quantizer.both(DY, dy, cut=1, turn=True)
        scattering = (
            _multiply_scatter(q, tp, quantizer, quantizer.quantized(weight)[1], quantizer.fast_backward, dy)
            if need_x
            else None
        )
        dw = (
            quantizer.add_weight_grad(weight, columns, _whole_of(kept, gathering, quantizer, weight))
            if need_w
            else None
        )
        return scattering.wait() if scattering else None, dw, db, None, None


class _QuantizedMatmulScatter(Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, bias: Tensor | None, tp: Axis, quantizer: WeightQuantizer
    ) -> Tensor:  # type: ignore[override]
        ctx.weight, ctx.bias, ctx.tp, ctx.quantizer = weight, bias, tp, quantizer
        q, kept = quantizer.both(X, h, cut=1, turn=True)
        ctx.block = kept.block
        ctx.save_for_backward(kept.quantized, kept.scales)
        y = _multiply_scatter(q, tp, quantizer, quantizer.quantized(weight)[0], quantizer.fast_forward, h).wait()
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight, bias, tp, quantizer = ctx.weight, ctx.bias, ctx.tp, ctx.quantizer
        h = Scaled(ctx.saved_tensors[0], ctx.saved_tensors[1], ctx.block)
        need_h, need_w, need_b = ctx.needs_input_grad[:3]
        db = add_bias_grad(bias, dy) if need_b else None
        if not (need_h or need_w):
            return None, None, db, None, None
        q, columns = quantizer.both(DY, dy, cut=0, turn=tp.size == 1)
        dh = dy.new_empty(h.quantized.shape[::-1]) if need_h else None
        gathered = (
            _gather(q, tp)
            if dh is None
            else _gather_multiply(q, tp, quantizer, quantizer.quantized(weight)[1], quantizer.fast_backward, dh)
        )
        dw = _add_from_gathered(q, columns, gathered, tp, quantizer, weight, h) if need_w else None
        return dh, dw, db, None, None


class _QuantizedGatedMLP(Function):
    """_QuantizedGatherMatmul, SwiGLU and _QuantizedMatmulScatter in one op, with the same quantized values, sums and
    gradients. `up_quantizer` is for gate_up, `quantizer` for down."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        tp: Axis,
        up_quantizer: WeightQuantizer,
        quantizer: WeightQuantizer,
        kernels: Kernels,
    ) -> Tensor:  # type: ignore[override]
        ctx.gate_up, ctx.down, ctx.tp, ctx.quantizers, ctx.kernels = (
            gate_up,
            down,
            tp,
            (up_quantizer, quantizer),
            kernels,
        )
        q, x_kept = up_quantizer.both(X, x, cut=0, turn=tp.size == 1)
        both = x.new_empty(len(x) * tp.size, gate_up.shape[0])
        _gather_multiply(q, tp, up_quantizer, up_quantizer.quantized(gate_up)[0], up_quantizer.fast_forward, both)
        h, h_kept = quantizer.both(X, Gated(both, kernels), cut=1, turn=True)
        ctx.blocks = x_kept.block, h_kept.block
        ctx.save_for_backward(x_kept.quantized, x_kept.scales, both, h_kept.quantized, h_kept.scales)
        return _multiply_scatter(h, tp, quantizer, quantizer.quantized(down)[0], quantizer.fast_forward, x).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gate_up, down, tp, (up_quantizer, quantizer) = ctx.gate_up, ctx.down, ctx.tp, ctx.quantizers
        x_quantized, x_scales, both, h_quantized, h_scales = ctx.saved_tensors
        x, h = Scaled(x_quantized, x_scales, ctx.blocks[0]), Scaled(h_quantized, h_scales, ctx.blocks[1])
        need_x, need_up, need_down = ctx.needs_input_grad[:3]
        q, columns = quantizer.both(DY, dy, cut=0, turn=tp.size == 1)
        dh = dy.new_empty(h.quantized.shape[::-1])
        gathered = _gather_multiply(q, tp, quantizer, quantizer.quantized(down)[1], quantizer.fast_backward, dh)
        d_down = _add_from_gathered(q, columns, gathered, tp, quantizer, down, h) if need_down else None
        q, columns = up_quantizer.both(DY, GatedGrad(dh, both, ctx.kernels), cut=1, turn=True)
        gathering = _gather(x, tp) if need_up and tp.size > 1 else None
        scattering = (
            _multiply_scatter(q, tp, up_quantizer, up_quantizer.quantized(gate_up)[1], up_quantizer.fast_backward, dy)
            if need_x
            else None
        )
        d_up = (
            up_quantizer.add_weight_grad(gate_up, columns, _whole_of(x, gathering, up_quantizer, gate_up))
            if need_up
            else None
        )
        return scattering.wait() if scattering else None, d_up, d_down, None, None, None, None


def _rows_of(scales: Tensor, block: tuple[int, int], rows: slice) -> Tensor:
    return scales if block[0] == 0 else scales[rows.start // block[0] : -(-rows.stop // block[0])]


def quantized_gather_matmul(
    x: Tensor, weight: Tensor, tp: Axis, bias: Tensor | None, quantizer: WeightQuantizer
) -> Tensor:
    """As ops.dense.matmul.gather_matmul, with quantized x and weight."""
    return _QuantizedGatherMatmul.apply(x, weight, bias, tp, quantizer)


def quantized_matmul_scatter(
    h: Tensor, weight: Tensor, tp: Axis, bias: Tensor | None, quantizer: WeightQuantizer
) -> Tensor:
    """As ops.dense.matmul.matmul_scatter, with quantized h and weight."""
    return _QuantizedMatmulScatter.apply(h, weight, bias, tp, quantizer)


def use_quantized_gated_mlp(quantizers: tuple[WeightQuantizer, WeightQuantizer], kernels: Kernels, x: Tensor) -> bool:
    """Whether an MLP whose weights have these quantizers runs as one op. Its savings are passes of Triton casts, so
    those must run. `kernels`: of SwiGLU."""
    casts = all(QUANT.fast(quantizer.kernels, x) is not None for quantizer in quantizers)
    return casts and GATED.fast(kernels, x) is not None


def quantized_gated_mlp(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    tp: Axis,
    quantizers: tuple[WeightQuantizer, WeightQuantizer],
    kernels: Kernels = "auto",
) -> Tensor:
    """As ops.dense.gated_mlp.gated_mlp, with quantized x and weights: gate_up (2F, D) stacked, down (D, F)."""
    return _QuantizedGatedMLP.apply(x, gate_up, down, tp, *quantizers, kernels)
