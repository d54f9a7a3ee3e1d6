"""GPT-2: LayerNorm, learned positions, GELU, biases, embeddings tied or not, dropout. Radford et al., 2019."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import within
from phalanx.models.config_json import GELUS, NEEDED, ConfigJson, integer, integer_or_null, number, shown, switch, text
from phalanx.models.family import Family
from phalanx.models.model_config import ModelConfig, SmallSizes, TensorNames, check_head_dim, check_learned_positions

if TYPE_CHECKING:
    from phalanx.models.family import BlockMaker
    from phalanx.nn.env import Env


@dataclass(frozen=True, kw_only=True)
class GPT2Config(ModelConfig):
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
    def rotary(self) -> bool:
        return False

    @property
    def gated_mlp(self) -> bool:
        return False


def blocks(config: GPT2Config, env: Env) -> Sequence[BlockMaker]:
    from phalanx.models.layer_norm_decoder import layer_norm_blocks  # imports torch, which reading a config need not

    return layer_norm_blocks(config, env, FAMILY.tensors)


def rules(config: GPT2Config, seq_length: int) -> list[Problem]:
    found = within("model", config, "layer_norm_epsilon", "(0, inf)")
    for name in ("dropout", "attention_dropout"):
        found += within("model", config, name, "[0, 1)", (0.0, 0.1))
    if min(config.hidden_size, config.num_attention_heads) >= 1:
        found += check_head_dim(config)
    return found + check_learned_positions(config, seq_length)


KEYS = {
    "vocab_size": integer(NEEDED),
    "n_embd": integer(NEEDED),
    "n_layer": integer(NEEDED),
    "n_head": integer(NEEDED),
    "n_positions": integer(1024),
    "n_inner": integer_or_null(),
    "activation_function": text("gelu_new"),
    "resid_pdrop": number(0.1),
    "embd_pdrop": number(0.1),
    "attn_pdrop": number(0.1),
    "layer_norm_epsilon": number(1e-5),
    "initializer_range": number(0.02),
    "scale_attn_weights": switch(True),
    "scale_attn_by_inverse_layer_idx": switch(False),
    "add_cross_attention": switch(False),
    "tie_word_embeddings": switch(True),
}
ONLY: dict[str, tuple[Any, ...]] = {
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}


def from_hf(found: ConfigJson) -> GPT2Config | None:
    dropout, embedding = found.values["resid_pdrop"], found.values["embd_pdrop"]
    activation = found.values["activation_function"]
    if dropout != embedding:
        found.odd.append(f"embd_pdrop={embedding!r} beside resid_pdrop={dropout!r} (supported: equal ones)")
    if activation not in GELUS:
        found.odd.append(f"activation_function={activation!r} (supported: {shown(tuple(GELUS))})")
        return None
    return GPT2Config(
        vocab_size=found.values["vocab_size"],
        hidden_size=found.values["n_embd"],
        num_hidden_layers=found.values["n_layer"],
        num_attention_heads=found.values["n_head"],
        intermediate_size=found.values["n_inner"],
        max_position_embeddings=found.values["n_positions"],
        layer_norm_epsilon=found.values["layer_norm_epsilon"],
        dropout=dropout,
        attention_dropout=found.values["attn_pdrop"],
        initializer_range=found.values["initializer_range"],
        tie_word_embeddings=found.values["tie_word_embeddings"],
        activation_function=GELUS[found.values["activation_function"]],  # type: ignore[arg-type]
    )


def to_hf(config: GPT2Config) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "n_inner": config.intermediate_size,
        "n_positions": config.max_position_embeddings,
        "n_ctx": config.max_position_embeddings,  # the same: llama.cpp's converter asks for the latter
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
        "initializer_range": config.initializer_range,
        "activation_function": config.activation_function,
        "scale_attn_weights": True,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def fill(model: dict[str, Any]) -> dict[str, Any]:
    return {**model, "intermediate_size": model.get("intermediate_size") or 4 * model["hidden_size"]}


def shrink(config: GPT2Config, small: SmallSizes) -> GPT2Config:
    return replace(
        config,
        vocab_size=small.vocab_size,
        hidden_size=small.hidden_size,
        num_hidden_layers=small.layers,
        num_attention_heads=small.heads,
        intermediate_size=small.intermediate_size if config.intermediate_size else None,
        max_position_embeddings=small.seq_length,
    )


FAMILY = Family(
    "gpt2",
    GPT2Config,
    blocks,
    architecture="GPT2LMHeadModel",
    tensors=TensorNames(
        prefix="transformer.",
        embedding="transformer.wte.weight",
        layer="transformer.h.{}",
        constants=(".attn.bias", ".attn.masked_bias"),
    ),
    rules=rules,
    keys=KEYS,
    other_names={
        "n_embd": "hidden_size",
        "n_positions": "max_position_embeddings",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
    },
    only=ONLY,
    from_hf=from_hf,
    to_hf=to_hf,
    fill=fill,
    may_change=(),  # positions are learned: their number is a shape
    shrink=shrink,
)
