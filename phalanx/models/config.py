"""The `model` section: one dataclass per family, with the field names of Hugging Face configs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama-3's frequency scaling (Llama 3.1 model card; `rope_type: llama3` in transformers)."""

    factor: float
    """Low frequencies are divided by this."""
    low_freq_factor: float
    """Wavelengths longer than the original length / this are scaled in full."""
    high_freq_factor: float
    """Wavelengths shorter than the original length / this stay as they are."""
    original_max_position_embeddings: int
    """Context length before the scaling."""
    rope_type: Literal["llama3"] = "llama3"
    """The kind of scaling: llama3."""


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    family: Literal["llama"] = "llama"
    """Which model this section describes: llama."""
    vocab_size: int
    """Size of the vocabulary; any size at any tp, padding never leaves the ranks."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of the gated MLP."""
    num_hidden_layers: int
    """Number of transformer layers."""
    num_attention_heads: int
    """Number of query heads."""
    num_key_value_heads: int | None = None
    """Number of key/value heads (grouped-query attention); unset: as many as query heads."""
    head_dim: int | None = None
    """Width of a head; unset: hidden_size / num_attention_heads."""
    max_position_embeddings: int = 131072
    """Longest sequence the model is meant for."""
    rms_norm_eps: float = 1e-5
    """Epsilon of RMSNorm."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding."""
    rope_scaling: RopeScaling | None = None
    """Llama-3 rotary scaling."""
    tie_word_embeddings: bool = False
    """Use the input embedding as output head."""
    initializer_range: float = 0.02
    """Standard deviation of initial weights."""

    @property
    def routed_experts(self) -> int:
        """Experts of a layer that tokens are routed to; 0 for a dense model."""
        return 0


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(LlamaConfig):
    """Llama's fields; queries and keys are normalised head by head before they are turned."""

    family: Literal["qwen3"] = "qwen3"  # type: ignore[assignment]
    """Which model this section describes: qwen3."""
    head_dim: int | None = 128
    """Width of a head; null: hidden_size / num_attention_heads."""
    rms_norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    rope_theta: float = 1000000.0
    """Base of the rotary embedding."""


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    family: Literal["gpt2"] = "gpt2"
    """Which model this section describes: gpt2."""
    vocab_size: int
    """Size of the vocabulary."""
    hidden_size: int
    """Width of the residual stream (n_embd)."""
    num_hidden_layers: int
    """Number of transformer layers (n_layer)."""
    num_attention_heads: int
    """Number of heads (n_head)."""
    intermediate_size: int | None = None
    """Width of the MLP (n_inner); unset: 4 * hidden_size."""
    max_position_embeddings: int = 1024
    """Number of learned positions (n_positions)."""
    layer_norm_epsilon: float = 1e-5
    """Epsilon of LayerNorm."""
    dropout: float = 0.0
    """Dropout of embeddings and of each sub-layer's output, the same in every layout."""
    attention_dropout: float = 0.0
    """Dropout of attention probabilities (runs on the reference path)."""
    initializer_range: float = 0.02
    """Standard deviation of initial weights; output projections use it / sqrt(2 * layers)."""

    @property
    def routed_experts(self) -> int:
        """Experts of a layer that tokens are routed to; 0 for a dense model."""
        return 0
