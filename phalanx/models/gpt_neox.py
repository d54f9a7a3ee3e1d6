"""GPT-NeoX: attention and MLP side by side, LayerNorm, GELU, biases, a quarter of each head rotated. Black et al.,
"GPT-NeoX-20B", 2022; Pythia, Biderman et al. 2023."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import no_effect, within
from phalanx.models.config_json import GELUS, ConfigJson, equal_heads, integer, number, shown, switch, text
from phalanx.models.decoder_config import (
    DECODER_KEYS,
    PartialRotaryConfig,
    common_rules,
    rope_of,
    small_positions,
    with_head_rules,
)
from phalanx.models.family import Family
from phalanx.models.model_config import SmallSizes, TensorNames
from phalanx.models.rope import read_rope, rope_to_hf, small_scaling, with_factors

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env


@dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(PartialRotaryConfig):
    """Llama's fields without those of grouped heads and of RMSNorm."""

    family: Literal["gpt_neox"] = "gpt_neox"
    """Which model this section describes: gpt_neox."""
    intermediate_size: int
    """Width of the MLP."""
    max_position_embeddings: int = 2048
    """Longest sequence the model is meant for."""
    layer_norm_eps: float = 1e-5
    """Epsilon of LayerNorm."""
    partial_rotary_factor: float = 0.25
    """The fraction of each head that is rotated, its first features; the rest carries no position."""
    activation_function: Literal["gelu_new", "gelu"] = "gelu"
    """Activation of the MLP: gelu (exact, hidden_act in Hugging Face's config) or gelu_new (GELU in its tanh form)."""
    use_parallel_residual: bool = True
    """Attention and MLP both read the layer's input; false: the MLP reads what attention has been added to."""
    attention_bias: bool = True
    """The projections of attention (q, k, v and output) have biases."""
    dropout: float = 0.0
    """Dropout of the embedding and of each sub-layer's output (hidden_dropout), the same in every layout."""
    attention_dropout: float = 0.0
    """Dropout of attention probabilities (runs on the reference path)."""

    biases: ClassVar[tuple[str, ...]] = ("attention_bias",)

    @property
    def gated_mlp(self) -> bool:
        return False


def blocks(config: GPTNeoXConfig, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.layer_norm_decoder import parallel_blocks  # imports torch, which reading a config need not

    return parallel_blocks(config, env, FAMILY.tensors)


OTHERS = ("num_key_value_heads", "head_dim", "rms_norm_eps")  # fields of DecoderConfig that it does not read


def rules(config: GPTNeoXConfig, seq_length: int) -> list[Problem]:
    found = common_rules(config) + within("model", config, "layer_norm_eps", "(0, inf)")
    for name in ("dropout", "attention_dropout"):
        found += within("model", config, name, "[0, 1)", (0.0, 0.1))
    found += no_effect(
        "model", config, OTHERS, "another family (gpt_neox has LayerNorm and as many keys as queries)", {}
    )
    return with_head_rules(config, found)


KEYS = {
    **{name: key for name, key in DECODER_KEYS.items() if name != "rms_norm_eps"},
    "max_position_embeddings": integer(2048),
    "hidden_act": text("gelu"),
    "layer_norm_eps": number(1e-5),
    "hidden_dropout": number(0.0),
    "use_parallel_residual": switch(True),
    "attention_bias": switch(True),
}
SAME = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "layer_norm_eps",
    "use_parallel_residual",
    "attention_bias",
    "attention_dropout",
    "tie_word_embeddings",
    "initializer_range",
)


def from_hf(found: ConfigJson) -> GPTNeoXConfig | None:
    v = found.values
    heads, activation = max(1, v["num_attention_heads"]), v["hidden_act"]
    equal_heads(found)
    names = ("rotary_emb_base", "rotary_pct")
    of = replace(rope_of(found, 10000.0, v["hidden_size"] // heads, partial=0.25), names=names)
    rope = read_rope(found.stated, of)
    found.odd += rope.odd
    if activation not in GELUS:
        found.odd.append(f"hidden_act={activation!r} (supported: {shown(tuple(GELUS))})")
    if found.odd:
        return None
    return GPTNeoXConfig(
        **found.pick(*SAME),
        dropout=v["hidden_dropout"],
        activation_function=GELUS[activation],  # type: ignore[arg-type]
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        partial_rotary_factor=rope.partial,
    )


def to_hf(config: GPTNeoXConfig) -> dict[str, Any]:
    return {
        **{name: getattr(config, name) for name in SAME},
        **rope_to_hf(config.rope_theta, config.rope_scaling, config.partial_rotary_factor),
        "rotary_emb_base": config.rope_theta,
        "rotary_pct": config.partial_rotary_factor,
        "hidden_dropout": config.dropout,
        "hidden_act": config.activation_function,
    }


def fill(model: dict[str, Any]) -> dict[str, Any]:
    """All fields are already explicit."""
    return model


def shrink(config: GPTNeoXConfig, small: SmallSizes) -> GPTNeoXConfig:
    scaling = small_scaling(config.rope_scaling, small.seq_length, small.given_length)
    return replace(
        config,
        vocab_size=small.vocab_size,
        hidden_size=small.hidden_size,
        intermediate_size=small.intermediate_size,
        num_hidden_layers=small.layers,
        num_attention_heads=small.heads,
        rope_scaling=with_factors(scaling, int(small.head_dim * config.partial_rotary_factor) // 2),
        **small_positions(config, small),
    )


FAMILY = Family(
    "gpt_neox",
    GPTNeoXConfig,
    blocks,
    architecture="GPTNeoXForCausalLM",
    tensors=TensorNames(
        prefix="gpt_neox.",
        embedding="gpt_neox.embed_in.weight",
        layer="gpt_neox.layers.{}",
        constants=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
        head="embed_out.weight",
        renames={"lm_head.weight": "embed_out.weight"},
    ),
    rules=rules,
    keys=KEYS,
    only={},
    from_hf=from_hf,
    to_hf=to_hf,
    fill=fill,
    shrink=shrink,
)
