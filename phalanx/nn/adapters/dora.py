"""DoRA (Liu et al. 2024, "DoRA: weight-decomposed low-rank adaptation"): LoRA beside a trained length of each output's
weights,

    y = m / |W + scale * B A| * (W x + scale * B(A x))

with the lengths |.| of the rows of the matrix, one for each output. As in the paper (section 4.3) no gradient flows
through them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from phalanx.nn.adapter import LinearPiece, adapter
from phalanx.nn.adapters.lora import LoRA, LowRankConfig, product_of

if TYPE_CHECKING:
    from torch import Tensor


@adapter("dora")
class DoRA(LoRA):
    """m begins as the lengths of the rows of W, so the first step begins at the base model."""

    Config = LowRankConfig
    reads_base = True
    embeds = False
    heads = False
    stacks = False
    started = ("lora_magnitude_vector",)

    def __init__(self, piece: LinearPiece, config: Any):
        from phalanx.nn.initial import ONES  # imports torch: a config that names a method is read without it

        super().__init__(piece, config)
        self.lora_magnitude_vector = self.per_output(piece, ONES)
        self._lengths: Tensor | None = None

    def combine(self, base: Tensor, delta: Tensor) -> Tensor:
        """Each output is multiplied by a factor, which is computed in at least fp32."""
        length = self._made_lengths() if self._lengths is None else self._lengths
        factors = self.lora_magnitude_vector.weight.to(length.dtype) / length
        return (base + delta) * self.piece.spread(factors.to(base.dtype), base)

    def settle(self) -> None:
        """Where the inputs are cut over ranks this is an all-reduce of one number for each output."""
        made = self._made_lengths()
        if self._lengths is None:
            self._lengths = made
        else:  # where CUDA graphs read it
            self._lengths.copy_(made)

    def _made_lengths(self) -> Tensor:
        """Of the rows of W + scale * B A: (outputs here,); of experts (experts here, ...)."""
        weight, a, b = (_wide(t.detach()) for t in (self.piece.weight, self.lora_A.weight, self.lora_B.weight))
        whole = weight + (b @ a).mul_(self.scale)
        return self.piece.sum_over_inputs((whole * whole).sum(-1)).sqrt()

    @classmethod
    def start(cls, config: Any, module: str, weight: Tensor) -> dict[str, Tensor]:
        return {"lora_magnitude_vector": weight.norm(dim=1)}

    @classmethod
    def merge(cls, config: Any, module: str, weight: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        whole = weight + product_of(config, module, own)
        return whole * (own["lora_magnitude_vector"] / whole.norm(dim=1)).unsqueeze(1)

    @classmethod
    def peft_config(cls, config: Any) -> dict[str, Any]:
        return {**super().peft_config(config), "use_dora": True}


def _wide(x: Tensor) -> Tensor:
    """In fp64 if it is, else in fp32."""
    return x if x.dtype.itemsize == 8 else x.float()
