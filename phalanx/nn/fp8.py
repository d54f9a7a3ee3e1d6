"""The FP8 method of linears: matmuls of quantized values (ops.quantized), for the linears that train.fp8 selects.

Only runs with train.fp8 import this file; the layers do not know about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.comm.axis import Axis
from phalanx.nn.linear_method import PLAIN, AnyEmbedding, AnyLinear, FusedOp, LinearMethod, LinearPlace
from phalanx.nn.parameter import Parameter
from phalanx.ops.experts.grouped import Later
from phalanx.ops.op import Kernels
from phalanx.ops.quantized.expert_quantizer import ExpertQuantizer
from phalanx.ops.quantized.experts import quantized_grouped_matmul, quantized_grouped_mlp, use_quantized_grouped_mlp
from phalanx.ops.quantized.linear import (
    quantized_gated_mlp,
    quantized_gather_matmul,
    quantized_matmul_scatter,
    use_quantized_gated_mlp,
)
from phalanx.ops.quantized.quantizer import QUANT, Accumulate, WeightQuantizer
from phalanx.ops.quantized.recipes import Recipe


def quantizer_of(weight: Parameter) -> WeightQuantizer | None:
    """The quantizer of a weight, if its matmuls currently use quantized values."""
    quantizer = weight.quantizer
    return quantizer if isinstance(quantizer, WeightQuantizer) and quantizer.on else None


def expert_quantizer_of(weight: Parameter) -> ExpertQuantizer | None:
    quantizer = quantizer_of(weight)
    return quantizer if isinstance(quantizer, ExpertQuantizer) else None


class Fp8Method(LinearMethod):
    """Matmuls of quantized values while the weight's quantizer is on; plain while it is off, or without one
    (inference)."""

    def gather_matmul(self, x: Tensor, weight: Parameter, tp: Axis, bias: Tensor | None = None) -> Tensor:
        quantizer = quantizer_of(weight)
        if quantizer is None:
            return super().gather_matmul(x, weight, tp, bias)
        return quantized_gather_matmul(x, weight, tp, bias, quantizer)

    def matmul_scatter(self, h: Tensor, weight: Parameter, tp: Axis, bias: Tensor | None = None) -> Tensor:
        quantizer = quantizer_of(weight)
        if quantizer is None:
            return super().matmul_scatter(h, weight, tp, bias)
        return quantized_matmul_scatter(h, weight, tp, bias, quantizer)

    def grouped_matmul(
        self,
        x: Tensor,
        weight: Parameter,
        ends: Tensor,
        kernels: Kernels,
        bias: Tensor | None = None,
        later: Later | None = None,
    ) -> Tensor:
        quantizer = expert_quantizer_of(weight)
        if quantizer is None:
            return super().grouped_matmul(x, weight, ends, kernels, bias, later)
        return quantized_grouped_matmul(x, weight, ends, quantizer, bias, later)

    def is_plain(self, weight: Parameter) -> bool:
        return quantizer_of(weight) is None

    def reads_lazy(self, weight: Parameter, x: Tensor) -> bool:
        quantizer = quantizer_of(weight)
        return quantizer is not None and quantizer.by_triton(x)

    def fused_mlp(self, gate_up: Parameter, down: Parameter, kernels: Kernels, x: Tensor) -> FusedOp | None:
        first, second = quantizer_of(gate_up), quantizer_of(down)
        if first is None or second is None:
            return None
        quantizers = first, second
        return (
            partial(quantized_gated_mlp, quantizers=quantizers, kernels=kernels)
            if use_quantized_gated_mlp(quantizers, kernels, x)
            else None
        )

    def fused_experts(self, gate_up: Parameter, down: Parameter, kernels: Kernels, x: Tensor) -> FusedOp | None:
        first, second = expert_quantizer_of(gate_up), expert_quantizer_of(down)
        if first is None or second is None:
            return None
        quantizers = first, second
        return (
            partial(quantized_grouped_mlp, quantizers=quantizers)
            if use_quantized_grouped_mlp(quantizers, kernels, x)
            else None
        )


FP8 = Fp8Method()


@dataclass(frozen=True)
class Fp8Linears:
    """Which linears use a recipe: those whose weights match no glob of `exclude` and whose layer is in `layers`.
    `kept`: their weights are stored as quantized values, where the recipe allows it."""

    recipe: Recipe
    layers: range
    exclude: tuple[str, ...] = ()
    accumulate: Accumulate = "mixed"
    kept: bool = False

    def takes(self, names: Iterable[str]) -> bool:
        """Whether a linear with these matrices uses the recipe: all or none of them do, over all experts, so that all
        ranks agree."""
        return all(self._takes(name) for name in names)

    def _takes(self, name: str) -> bool:
        layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
        return (layer is None or layer in self.layers) and not any(fnmatchcase(name, glob) for glob in self.exclude)

    def method_of(self, linear: AnyLinear) -> LinearMethod:
        if linear.cut is None or not self.takes(matrices_of(linear)):
            return PLAIN
        weight, place = linear.weight, linear.env
        quantizer = self._quantizer(joint_name(linear), linear.cut, linear.experts > 0, place)
        weight.quantizer = quantizer
        coded = self.kept and weight.spec.learns and quantizer.keeps_quantized(weight.spec.shape)
        weight.spec = replace(weight.spec, coded=coded)
        return FP8

    def rows_of(self, embedding: AnyEmbedding) -> None:
        return None

    def logits_of(self, head: AnyLinear) -> None:
        return None

    def _quantizer(self, name: str, cut: int, experts: bool, place: LinearPlace) -> WeightQuantizer:
        kind = ExpertQuantizer if experts else WeightQuantizer
        return kind(self.recipe, name, cut, place.axes, place.kernels_for(QUANT), self.accumulate, place.seed)


def matrices_of(linear: AnyLinear) -> tuple[str, ...]:
    """Names of a linear's global matrices, of every expert."""
    return tuple(name.format(e) for name in dict.fromkeys(linear.names) for e in range(max(1, linear.experts)))


def joint_name(linear: AnyLinear) -> str:
    """One name for the matrices that are stored together."""
    first, *others = (name.replace("{}.", "").removesuffix(".weight") for name in dict.fromkeys(linear.names))
    return "+".join((first, *(other.rsplit(".", 1)[-1] for other in others)))
