"""The `model` section: one dataclass per family, with the field names of Hugging Face configs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the rotary embedding of a longer context is made from a shorter one: `rope_scaling` (or `rope_parameters`)
    of transformers."""

    rope_type: Literal["llama3", "linear", "dynamic", "yarn", "longrope", "proportional"] = "llama3"
    """llama3 (Llama 3.1), linear (positions divided), dynamic (a base that grows with the sequence), yarn (YaRN),
    longrope (LongRoPE), proportional (partial rotary embedding: only part of each head is rotated)."""
    factor: float | None = None
    """How many times longer the context is made; longrope: unset, max_position_embeddings / the original length."""
    original_max_position_embeddings: int | None = None
    """llama3, yarn, longrope: context length before the scaling."""
    low_freq_factor: float | None = None
    """llama3: wavelengths longer than the original length / this are scaled in full."""
    high_freq_factor: float | None = None
    """llama3: wavelengths shorter than the original length / this stay as they are."""
    attention_factor: float | None = None
    """yarn, longrope: cos and sin are multiplied by this; unset: from factor, as the papers have it."""
    beta_fast: float = 32.0
    """yarn: features that turn more often than this in the original length stay as they are."""
    beta_slow: float = 1.0
    """yarn: features that turn less often than this in the original length are divided by factor."""
    mscale: float | None = None
    """yarn, DeepSeek: weight of ln(factor) in the attention factor, over that of mscale_all_dim."""
    mscale_all_dim: float | None = None
    """yarn, DeepSeek: weight of ln(factor) in the scale of the scores (latent attention) and below the line of the
    attention factor."""
    truncate: bool = True
    """yarn: round the first and last feature of the ramp outwards."""
    short_factor: tuple[float, ...] | None = None
    """longrope: a divisor per pair of features, for sequences up to the original length."""
    long_factor: tuple[float, ...] | None = None
    """longrope: a divisor per pair of features, for longer sequences."""
    partial_rotary_factor: float | None = None
    """proportional: the part of each head that is rotated, from 0 to 1; the rest carries no position."""


# fields of RopeScaling that each type must be given, and those that it may be given
ROPE_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (("short_factor", "long_factor", "original_max_position_embeddings"), ("factor", "attention_factor")),
    "proportional": (("partial_rotary_factor",), ("factor",)),
}


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
    """Scaling of the rotary embedding for longer contexts; unset: none."""
    tie_word_embeddings: bool = False
    """Use the input embedding as output head."""
    initializer_range: float = 0.02
    """Standard deviation of initial weights."""
    attention_bias: bool = False
    """llama, qwen3, qwen3_moe, gpt_oss: the projections of attention (q, k, v and output) have biases."""
    mlp_bias: bool = False
    """llama: the three projections of the MLP have biases."""

    def window(self, layer: int) -> int | None:
        """The tokens that attention of a layer reads, itself included; None: all before it."""
        return None

    @property
    def routed_experts(self) -> int:
        """Experts of a layer that tokens are routed to; 0 for a dense model."""
        return 0

    @property
    def expert_size(self) -> int:
        """Width of an expert; 0 for a dense model."""
        return 0

    @property
    def predict_layers(self) -> int:
        """Layers after the last one that predict tokens further ahead, all in one block; 0 where there is none."""
        return 0


LayerType = Literal["sliding_attention", "full_attention"]


@dataclass(frozen=True, kw_only=True)
class UpperWindowConfig(LlamaConfig):
    """Llama's fields and a window in the upper layers, or in those that layer_types names."""

    sliding_window: int | None = None
    """In a layer with a window a token reads itself and so many tokens less one before it; unset: all before it in
    every layer."""
    max_window_layers: int = 0
    """The first so many layers have no window."""
    layer_types: tuple[LayerType, ...] | None = None
    """Whether each layer has the window; unset: all from number max_window_layers on."""

    def window(self, layer: int) -> int | None:
        slides = (
            layer >= self.max_window_layers
            if self.layer_types is None
            else self.layer_types[layer] == "sliding_attention"
        )
        return self.sliding_window if slides else None


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(UpperWindowConfig):
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
class MistralConfig(LlamaConfig):
    """Llama's fields and a window."""

    family: Literal["mistral"] = "mistral"  # type: ignore[assignment]
    """Which model this section describes: mistral."""
    sliding_window: int | None = None
    """A token reads itself and so many tokens less one before it; unset: all before it."""
    layer_types: tuple[LayerType, ...] | None = None
    """Whether each layer has the window; unset: every layer."""

    def window(self, layer: int) -> int | None:
        return (
            self.sliding_window if self.layer_types is None or self.layer_types[layer] == "sliding_attention" else None
        )


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(UpperWindowConfig):
    """Llama's fields; queries, keys and values have biases; layers above some number may read in a window."""

    family: Literal["qwen2"] = "qwen2"  # type: ignore[assignment]
    """Which model this section describes: qwen2."""
    rms_norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""


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
    activation_function: Literal["gelu_new", "gelu"] = "gelu_new"
    """Activation of the MLP: gelu_new (GELU in its tanh form, GPT-2's own) or gelu (exact)."""
    tie_word_embeddings: bool = True
    """Use the input embedding as output head."""
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

    @property
    def expert_size(self) -> int:
        """Width of an expert; 0 for a dense model."""
        return 0

    @property
    def predict_layers(self) -> int:
        """Layers after the last one that predict tokens further ahead, all in one block; 0 where there is none."""
        return 0
