"""The sizes of torchtitan's models: (name, flavor) -> our `model` section, as its TOML days ended in February 2026.

torchtitan keeps them in code (torchtitan/models/*/__init__.py), so a TOML has only their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType
from typing import Any

from phalanx.base.dataclass import dataclass

YARN_FROM = 4096  # longest sequences without YaRN, of the models that have it


@dataclass(frozen=True)
class Flavor:
    """sizes: of the model section. documents: attention stays inside documents. lacks: traits of theirs that the family
    does not have, and what it has. yarn: the scaling of sequences longer than YARN_FROM."""

    sizes: Mapping[str, Any]
    documents: bool = False
    lacks: tuple[tuple[str, str], ...] = ()
    yarn: Mapping[str, Any] | None = None


def rounded(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def gated_width(dim: int, multiplier: float | None, unit: int) -> int:
    """The MLP's width of Llama models."""
    width = int(2 * 4 * dim / 3)
    return rounded(width if multiplier is None else int(multiplier * width), unit)


@dataclass(frozen=True)
class LlamaSizes:
    dim: int
    layers: int
    heads: int
    kv_heads: int | None = None
    multiplier: float | None = None
    unit: int = 256
    vocab: int = 128256
    theta: float = 500000.0

    def fields(self, family: str) -> dict[str, Any]:
        return {
            "family": family,
            "vocab_size": self.vocab,
            "hidden_size": self.dim,
            "intermediate_size": gated_width(self.dim, self.multiplier, self.unit),
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads or self.heads,
            "head_dim": self.dim // self.heads,
            "rms_norm_eps": 1e-5,
            "rope_theta": self.theta,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
        }


def llama3(sizes: LlamaSizes) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {**sizes.fields("llama"), "rope_scaling": scaling}


LLAMA3 = {
    "debugmodel": LlamaSizes(256, 6, 16, vocab=2048),
    "8B": LlamaSizes(4096, 32, 32, 8, 1.3, 1024),
    "70B": LlamaSizes(8192, 80, 64, 8, 1.3, 4096),
    "405B": LlamaSizes(16384, 126, 128, 8, 1.2, 4096),
}
LLAMA2 = {
    "debugmodel": LlamaSizes(256, 8, 16, vocab=32000, theta=10000.0),
    "271M": LlamaSizes(1024, 16, 8, vocab=32000, theta=10000.0),
    "1B": LlamaSizes(2048, 18, 16, vocab=32000, theta=10000.0),
    "7B": LlamaSizes(4096, 32, 32, vocab=32000, theta=10000.0),
    "13B": LlamaSizes(5120, 40, 40, vocab=32000, theta=10000.0),
    "26B": LlamaSizes(5120, 80, 40, vocab=32000, theta=10000.0),
    "70B": LlamaSizes(8192, 80, 64, 8, 1.3, 4096, 32000, 10000.0),
}


@dataclass(frozen=True)
class Llama4Sizes:
    llama: LlamaSizes
    experts: int
    step: int
    scaled: bool


def llama4(sizes: Llama4Sizes, chunk: int | None) -> dict[str, Any]:
    """chunk: of attention, in three of four layers, where they alone have rotary embeddings; None: in none."""
    c = sizes.llama
    scaling = {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    }
    whole = int(2 * 4 * c.dim / 3)
    half = int((whole if c.multiplier is None else int(c.multiplier * whole)) / 2)  # one chosen expert, one shared
    everywhere = {"no_rope_layers": [1] * c.layers}
    rotary = everywhere if chunk is None else {"no_rope_layer_interval": 4, "attn_temperature_tuning": False}
    return {
        **c.fields("llama4_text"),
        "intermediate_size": rounded(half, c.unit),
        "intermediate_size_mlp": gated_width(c.dim, c.multiplier, c.unit),
        "num_local_experts": sizes.experts,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": sizes.step,
        "router_aux_loss_coef": 0.0,
        "use_qk_norm": False,
        "attention_chunk_size": chunk,
        **rotary,
        **({"rope_scaling": scaling} if sizes.scaled else {}),
    }


LLAMA4 = {
    "debugmodel": Llama4Sizes(LlamaSizes(256, 6, 16, vocab=2048), 8, 2, True),
    "17bx16e": Llama4Sizes(LlamaSizes(5120, 48, 40, 8, 1.2, 2048, 202048), 16, 1, True),
    "17bx128e": Llama4Sizes(LlamaSizes(5120, 48, 40, 8, 1.2, 2048, 202048), 128, 2, False),
}
BIAS = ("experts evened out by a bias of the router", "llama4_text has no such bias")


@dataclass(frozen=True)
class QwenSizes:
    dim: int
    layers: int
    heads: int
    kv_heads: int
    width: int
    tied: bool = False
    vocab: int = 151936
    theta: float = 1000000.0
    experts: int = 0
    expert_width: int = 0


def qwen3(c: QwenSizes) -> dict[str, Any]:
    experts = {
        "num_experts": c.experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": c.expert_width,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.0,
    }
    return {
        "family": "qwen3_moe" if c.experts else "qwen3",
        "vocab_size": c.vocab,
        "hidden_size": c.dim,
        "intermediate_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": c.theta,
        "tie_word_embeddings": c.tied,
        "initializer_range": 0.02,
        **(experts if c.experts else {}),
    }


QWEN3 = {
    "debugmodel": QwenSizes(256, 8, 16, 8, 3072, True, 2048),
    "0.6B": QwenSizes(1024, 28, 16, 8, 3072, True),
    "1.7B": QwenSizes(2048, 28, 16, 8, 6144, True),
    "4B": QwenSizes(2560, 36, 32, 8, 9728, True),
    "8B": QwenSizes(4096, 36, 32, 8, 12288),
    "14B": QwenSizes(5120, 40, 40, 8, 17408),
    "32B": QwenSizes(5120, 64, 64, 8, 25600),
    "debugmodel_moe": QwenSizes(256, 8, 16, 8, 3072, vocab=2048, experts=64, expert_width=768),
    "30B-A3B": QwenSizes(2048, 48, 32, 4, 6144, experts=128, expert_width=768),
    "235B-A22B": QwenSizes(4096, 94, 64, 4, 12288, theta=5000000.0, experts=128, expert_width=1536),
}


@dataclass(frozen=True)
class DeepSeekSizes:
    dim: int
    layers: int
    dense: int
    heads: int
    width: int
    expert_width: int
    experts: int
    shared: int
    chosen: int
    vocab: int = 102400
    groups: tuple[int, int] = (1, 1)
    scale: float = 1.0
    query_rank: int | None = None
    sigmoid: bool = False
    normed: bool = False
    mscale: float = 0.70
    documents: bool = field(default=True)


def deepseek_v3(c: DeepSeekSizes) -> dict[str, Any]:
    return {
        "family": "deepseek_v3",
        "vocab_size": c.vocab,
        "hidden_size": c.dim,
        "intermediate_size": c.width,
        "moe_intermediate_size": c.expert_width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "first_k_dense_replace": c.dense,
        "n_routed_experts": c.experts,
        "n_shared_experts": c.shared,
        "num_experts_per_tok": c.chosen,
        "n_group": c.groups[0],
        "topk_group": c.groups[1],
        "routed_scaling_factor": c.scale,
        "norm_topk_prob": c.normed,
        "router_bias_update_rate": 0.001,
        "router_aux_loss_coef": 0.0,
        "router_aux_loss_scope": "sequence",
        "q_lora_rank": c.query_rank,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    }


DEEPSEEK = {
    "debugmodel": DeepSeekSizes(256, 6, 1, 16, 1024, 256, 8, 2, 3, 2048, documents=False),
    "16B": DeepSeekSizes(2048, 27, 1, 16, 10944, 1408, 64, 2, 6),
    "236B": DeepSeekSizes(5120, 60, 1, 128, 12288, 1536, 160, 2, 6, 102400, (8, 3), 16.0, 1536, mscale=1.0),
    "671B": DeepSeekSizes(7168, 61, 3, 128, 18432, 2048, 256, 1, 8, 129280, (8, 4), 2.5, 1536, True, True, 1.0),
}
SOFTMAX = ("experts scored by a softmax", "deepseek_v3 scores them by sigmoids")


def deepseek_flavor(c: DeepSeekSizes) -> Flavor:
    yarn = {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": YARN_FROM,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": c.mscale,
        "mscale_all_dim": c.mscale,
    }
    return Flavor(deepseek_v3(c), c.documents, () if c.sigmoid else (SOFTMAX,), yarn)


def gpt_oss(layers: int, experts: int, dim: int = 2880) -> dict[str, Any]:
    return {
        "family": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": dim,
        "intermediate_size": 2880,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "router_aux_loss_coef": 0.0,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    }


OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": YARN_FROM,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
OSS_BIAS = (BIAS[0], "gpt_oss has no such bias")


def flavors() -> Mapping[tuple[str, str], Flavor]:
    """All published ones; `_flex` and `_varlen` are the same sizes with attention inside documents."""
    made: dict[tuple[str, str], Flavor] = {}
    for name, sizes in LLAMA3.items():
        same = llama3(sizes)
        ends = ("_flex_attn", "_varlen_attn") if name == "debugmodel" else ("_flex", "_varlen")
        made |= {("llama3", name): Flavor(same)}
        made |= {("llama3", name + end): Flavor(same, True) for end in ends}
    for name, sizes in LLAMA2.items():  # called llama before there was a third one
        made[("llama2", name)] = made[("llama", name)] = Flavor(sizes.fields("llama"))
    for name, four in LLAMA4.items():
        chunk = 256 if name == "debugmodel" else 8192
        made[("llama4", name)] = Flavor(llama4(four, None), False, (BIAS,))
        made[("llama4", f"{name}_irope")] = Flavor(llama4(four, chunk), True, (BIAS,))
    made |= {("qwen3", name): Flavor(qwen3(own)) for name, own in QWEN3.items()}
    made |= {("deepseek_v3", name): deepseek_flavor(own) for name, own in DEEPSEEK.items()}
    made[("deepseek_v3", "debugmodel_flex_attn")] = Flavor(deepseek_v3(DEEPSEEK["debugmodel"]), True, (SOFTMAX,))
    made[("gpt_oss", "debugmodel")] = Flavor(gpt_oss(4, 8, 256), False, (OSS_BIAS,), OSS_YARN)
    made[("gpt_oss", "20b")] = Flavor(gpt_oss(24, 32), False, (OSS_BIAS,), OSS_YARN)
    made[("gpt_oss", "120b")] = Flavor(gpt_oss(36, 128), False, (OSS_BIAS,), OSS_YARN)
    return MappingProxyType(made)


FLAVORS = flavors()
