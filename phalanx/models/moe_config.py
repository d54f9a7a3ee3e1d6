"""The `model` section of families with experts: what they share, and one dataclass per family, with Hugging Face's
field names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.models.config import LayerType, LlamaConfig


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(LlamaConfig):
    """How tokens are spread over experts; the same for every family."""

    num_experts_per_tok: int = 2
    """Experts that each token goes to."""
    router_aux_loss_coef: float = 0.001
    """Coefficient of the balancing loss E * sum f_i P_i of each layer (Switch Transformers); 0: none."""
    router_aux_loss_scope: Literal["micro_batch", "sequence", "global_batch"] = "micro_batch"
    """Tokens whose load the balancing loss evens out: micro_batch, sequence, or global_batch (the load of the whole
    step before)."""
    router_z_loss_coef: float = 0.0
    """Coefficient of the mean squared log-sum-exp of the router's logits (ST-MoE); 0: none."""
    expert_capacity_factor: float | None = None
    """Tokens that an expert takes of each sequence, over its fair share; the rest are dropped. unset: no token is
    dropped."""
    expert_capacity_drop: Literal["probability", "position"] = "probability"
    """Whom a full expert drops: those it weighs least (probability), or the last (position)."""
    router_forced_balance: bool = False
    """For benchmarks: experts are drawn at random, each as likely, instead of chosen."""

    @property
    def expert_size(self) -> int:
        """Width of an expert."""
        return self.intermediate_size

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts or a dense MLP."""
        return True


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(ExpertsConfig):
    """Llama's fields; intermediate_size is the width of an expert."""

    family: Literal["mixtral"] = "mixtral"  # type: ignore[assignment]
    """Which model this section describes: mixtral."""
    num_local_experts: int = 8
    """Experts per layer."""
    rope_theta: float = 1000000.0
    """Base of the rotary embedding."""
    sliding_window: int | None = None
    """A token reads itself and so many tokens less one before it; unset: all before it."""

    def window(self, layer: int) -> int | None:
        return self.sliding_window

    @property
    def routed_experts(self) -> int:
        return self.num_local_experts


@dataclass(frozen=True, kw_only=True)
class Qwen3MoEConfig(ExpertsConfig):
    """Qwen3's fields; intermediate_size is the width of dense layers."""

    family: Literal["qwen3_moe"] = "qwen3_moe"  # type: ignore[assignment]
    """Which model this section describes: qwen3_moe."""
    num_experts: int = 128
    """Experts per layer."""
    num_experts_per_tok: int = 8
    """Experts that each token goes to."""
    moe_intermediate_size: int
    """Width of an expert."""
    norm_topk_prob: bool = True
    """Divide the chosen experts' probabilities by their sum."""
    decoder_sparse_step: int = 1
    """Every so many layers has experts (the last of each run of them)."""
    mlp_only_layers: tuple[int, ...] = ()
    """Layers with a dense MLP all the same."""
    head_dim: int | None = 128
    """Width of a head; null: hidden_size / num_attention_heads."""
    rms_norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    rope_theta: float = 1000000.0
    """Base of the rotary embedding."""
    sliding_window: int | None = None
    """A token reads itself and so many tokens less one before it; unset: all before it."""

    def window(self, layer: int) -> int | None:
        return self.sliding_window

    @property
    def routed_experts(self) -> int:
        return self.num_experts

    @property
    def expert_size(self) -> int:
        return self.moe_intermediate_size

    def has_experts(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(ExpertsConfig):
    """Llama's fields; intermediate_size is the width of an expert. The experts and the router have biases, heads
    have sinks."""

    family: Literal["gpt_oss"] = "gpt_oss"  # type: ignore[assignment]
    """Which model this section describes: gpt_oss."""
    num_local_experts: int = 128
    """Experts per layer."""
    num_experts_per_tok: int = 4
    """Experts that each token goes to."""
    head_dim: int | None = 64
    """Width of a head; null: hidden_size / num_attention_heads."""
    rope_theta: float = 150000.0
    """Base of the rotary embedding."""
    attention_bias: bool = True
    """The projections of attention (q, k, v and output) have biases."""
    sliding_window: int = 128
    """In a layer with a window a token reads itself and so many tokens less one before it."""
    layer_types: tuple[LayerType, ...] | None = None
    """Whether each layer has the window; unset: they take turns, the first has it."""
    swiglu_alpha: float = 1.702
    """Gate of the experts: gate * sigmoid(alpha * gate) * (up + 1)."""
    swiglu_limit: float = 7.0
    """The gate is cut off above this, up above it and below minus it."""

    @property
    def routed_experts(self) -> int:
        return self.num_local_experts

    def window(self, layer: int) -> int | None:
        given = self.layer_types
        slides = layer % 2 == 0 if given is None else given[layer] == "sliding_attention"
        return self.sliding_window if slides else None
