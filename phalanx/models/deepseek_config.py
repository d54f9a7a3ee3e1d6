"""The `model` section of DeepSeek-V3, with Hugging Face's field names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.models.moe_config import ExpertsConfig


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(ExpertsConfig):
    """Llama's fields, less num_key_value_heads and head_dim: heads are made from latents. intermediate_size is the
    width of dense layers."""

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
    """The first so many layers have a dense MLP, all others experts."""
    n_routed_experts: int = 256
    """Experts per layer that tokens choose among."""
    num_experts_per_tok: int = 8
    """Experts that each token goes to."""
    n_shared_experts: int = 1
    """Experts that every token goes to, as one MLP of so many times moe_intermediate_size; 0: none."""
    moe_intermediate_size: int = 2048
    """Width of an expert."""
    n_group: int = 8
    """Experts lie in this many equal groups."""
    topk_group: int = 4
    """A token chooses its experts in so many groups: those with the highest sum of two scores."""
    routed_scaling_factor: float = 2.5
    """What the weights of the chosen experts are multiplied by."""
    norm_topk_prob: bool = True
    """Divide the chosen experts' scores by their sum."""
    router_bias_update_rate: float = 0.001
    """After a step the bias that experts are chosen by moves by this: up for experts with less than the mean load,
    else down; 0: it stays."""
    router_aux_loss_coef: float = 0.0001
    """Coefficient of the balancing loss E * sum f_i P_i of each layer (technical report, equation 17); 0: none."""
    router_aux_loss_scope: Literal["micro_batch", "sequence", "global_batch"] = "sequence"
    """Tokens whose load the balancing loss evens out: micro_batch, sequence, or global_batch (the load of the whole
    step before)."""
    num_nextn_predict_layers: int = 0
    """Modules after the last layer, each with a layer of its own, that in training predict one token further ahead
    each (DeepSeek-V3: 1)."""
    mtp_loss_weight: float = 0.3
    """Weight of the mean of their losses beside the main loss."""

    @property
    def routed_experts(self) -> int:
        return self.n_routed_experts if self.has_experts(self.num_hidden_layers + self.predict_layers - 1) else 0

    @property
    def predict_layers(self) -> int:
        return self.num_nextn_predict_layers

    @property
    def expert_size(self) -> int:
        return self.moe_intermediate_size

    def has_experts(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace
