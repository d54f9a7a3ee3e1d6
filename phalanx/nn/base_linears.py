"""Which linears keep their frozen weights as quantized values (lora.base): all whose weights are frozen, but for those
that each rank holds whole.

They compute as plain linears: a segment's weights are decoded before it runs (data_parallel.base_storage).
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.base.dataclass import dataclass
from phalanx.nn.linear_method import PLAIN, AnyEmbedding, AnyLinear, LinearMethod


@dataclass(frozen=True)
class BaseLinears:
    """format: its name in ops.quantized.base_formats.FORMATS."""

    format: str

    def method_of(self, linear: AnyLinear) -> LinearMethod:
        weight = linear.weight
        if weight.spec.frozen and linear.cut is not None:
            weight.spec = replace(weight.spec, base_format=self.format)
        return PLAIN

    def rows_of(self, embedding: AnyEmbedding) -> None:
        return None

    def logits_of(self, head: AnyLinear) -> None:
        return None
