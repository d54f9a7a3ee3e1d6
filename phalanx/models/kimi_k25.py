"""Kimi K2.5's text model: DeepSeek-V3's architecture inside a folder that also holds a vision tower, which is left out.
Moonshot AI, "Kimi K2.5: Visual agentic intelligence", 2026.

What is exported holds the text model's tensors under their names in the published folder.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError
from phalanx.models import deepseek_v3
from phalanx.models.config_json import switch
from phalanx.models.deepseek_v3 import LatentConfig
from phalanx.models.model_config import TensorNames

PREFIX = "language_model."


@dataclass(frozen=True, kw_only=True)
class KimiK25Config(LatentConfig):
    """DeepSeek-V3's fields, with the sizes of Kimi K2.5's experts."""

    family: Literal["kimi_k25"] = "kimi_k25"
    """Which model this section describes: kimi_k25."""
    max_position_embeddings: int = 262144
    """Longest sequence the model is meant for."""
    n_routed_experts: int = 384
    """Experts per layer that tokens choose among."""
    n_group: int = 1
    """Experts are divided into this many equal groups, in order."""
    topk_group: int = 1
    """A token chooses its experts in this many groups: those with the highest sum of two scores."""
    routed_scaling_factor: float = 2.827
    """Factor of the weights of the chosen experts."""

    prefix: ClassVar[str] = PREFIX


TEXT_TYPES = ("deepseek_v3", "kimi_k2")


def text_keys(config: dict[str, Any]) -> dict[str, Any]:
    """text_config; whether head and embedding are one, and how weights are packed, is said beside it."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError(f"text_config={text!r} (it must be an object)")
    kind = text.get("model_type", TEXT_TYPES[0])
    if kind not in TEXT_TYPES:
        raise CheckpointError(f"text_config: model_type={kind!r} (supported: {', '.join(map(repr, TEXT_TYPES))})")
    packed = config.get("quantization_config") or text.get("quantization_config")
    whole = {"tie_word_embeddings": config.get("tie_word_embeddings", True), "quantization_config": packed}
    return {**text, **whole}


def to_hf(config: KimiK25Config) -> dict[str, Any]:
    text = {"model_type": TEXT_TYPES[0], **deepseek_v3.to_hf(config)}
    return {"text_config": text, "tie_word_embeddings": config.tie_word_embeddings}


def named(names: TensorNames) -> TensorNames:
    """The names of DeepSeek-V3's tensors in a folder of Kimi K2.5."""
    inside = PREFIX.replace(".", r"\.")
    return replace(
        names,
        prefix=PREFIX,
        embedding=PREFIX + names.embedding,
        layer=PREFIX + names.layer,
        head=PREFIX + names.head,
        copies=f"{inside}{names.copies}",
        predictors=f"{inside}{names.predictors}",
        others=r"(model\.)?(vision_tower|mm_projector)\..*",
        renames={  # of transformers, which saves the first
            f"{PREFIX}model.blocks.": f"{PREFIX}model.layers.",
            "model.language_model.": f"{PREFIX}model.",
            "lm_head.": f"{PREFIX}lm_head.",
        },
        modules={f"{PREFIX}model.": "model.language_model.", f"{PREFIX}lm_head": "lm_head"},
    )


FAMILY = replace(
    deepseek_v3.FAMILY,
    name="kimi_k25",
    config=KimiK25Config,
    architecture="Kimi_K25ForConditionalGeneration",
    tensors=named(deepseek_v3.FAMILY.tensors),
    keys={**deepseek_v3.KEYS, "tie_word_embeddings": switch(True)},
    text_keys=text_keys,
    to_hf=to_hf,
)
