"""The `model` section of DeepSeek-V3, with Hugging Face's field names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.models.config import LlamaConfig


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(LlamaConfig):
    """Llama's fields, less num_key_value_heads and head_dim: heads are made from latents."""

    family: Literal["deepseek_v3"] = "deepseek_v3"  # type: ignore[assignment]
    """Which model this section describes: deepseek_v3."""
    max_position_embeddings: int = 4096
    """Longest sequence the model is meant for."""
    rms_norm_eps: float = 1e-6
    """Epsilon of RMSNorm (of the latents' norms it is always 1e-6)."""
    q_lora_rank: int | None = 1536
    """Width of the latent that queries are made from; null: they are made from the layer's input."""
    kv_lora_rank: int = 512
    """Width of the latent that keys and values are made from."""
    qk_nope_head_dim: int = 128
    """Features of a query or key head that are not turned."""
    qk_rope_head_dim: int = 64
    """Features of a query or key head that are turned; all heads share the key's."""
    v_head_dim: int = 128
    """Width of a value head."""
    rope_interleave: bool = True
    """Whether the weights pair turned features 2i and 2i + 1 (as published); false: i and i + half, as Llama's."""
    first_k_dense_replace: int
    """The first so many layers have a dense MLP."""
