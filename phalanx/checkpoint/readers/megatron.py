"""GPT models of Megatron-Core in its torch_dist checkpoints: their tensors under Hugging Face names, cut and ordered as
in Hugging Face checkpoints.

Their contents (Megatron-Core 0.16, determined from its own files): layers stacked along a leading dim, or one by one;
q, k and v in one matrix, by groups of query heads, each group followed by its key and its value; gate above up in one
matrix, or separate; vocabularies padded with rows; experts stacked after the layers, equally for its sequential and
grouped ones, or one by one (`singleton_local_shards`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError
from phalanx.checkpoint.tensors import Index, Open, Stored, StoredBox
from phalanx.layout.box import Box

EMBEDDING = "embedding.word_embeddings.weight"
LAYERS = "decoder.layers."
Shape = tuple[int, ...]

# For decoders with RMSNorm and with LayerNorm, outside the layers and in each: Hugging Face name -> Megatron's names
# (in fused modules, layer norms belong to the matrix after them).
RMS_NORM = {
    "model.embed_tokens.weight": EMBEDDING,
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
RMS_NORM_LAYER = {
    "input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "self_attn.q_proj.weight": ("self_attention.linear_qkv.weight", "self_attention.linear_q_proj.weight"),
    "self_attn.k_proj.weight": ("self_attention.linear_qkv.weight",),
    "self_attn.v_proj.weight": ("self_attention.linear_qkv.weight",),
    "self_attn.q_proj.bias": ("self_attention.linear_qkv.bias",),
    "self_attn.k_proj.bias": ("self_attention.linear_qkv.bias",),
    "self_attn.v_proj.bias": ("self_attention.linear_qkv.bias",),
    "self_attn.q_norm.weight": ("self_attention.q_layernorm.weight",),
    "self_attn.k_norm.weight": ("self_attention.k_layernorm.weight",),
    "self_attn.o_proj.weight": ("self_attention.linear_proj.weight",),
    "post_attention_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    "mlp.gate_proj.weight": ("mlp.linear_fc1.weight",),
    "mlp.up_proj.weight": ("mlp.linear_fc1.weight",),
    "mlp.down_proj.weight": ("mlp.linear_fc2.weight",),
    "mlp.gate.weight": ("mlp.router.weight",),
    "block_sparse_moe.gate.weight": ("mlp.router.weight",),
    "mlp.gate.e_score_correction_bias": ("mlp.router.expert_bias",),
    "mlp.shared_experts.gate_proj.weight": ("mlp.shared_experts.linear_fc1.weight",),
    "mlp.shared_experts.up_proj.weight": ("mlp.shared_experts.linear_fc1.weight",),
    "mlp.shared_experts.down_proj.weight": ("mlp.shared_experts.linear_fc2.weight",),
    "self_attn.q_a_proj.weight": ("self_attention.linear_q_down_proj.weight",),
    "self_attn.q_a_layernorm.weight": (
        "self_attention.q_layernorm.weight",
        "self_attention.linear_q_up_proj.layer_norm_weight",
    ),
    "self_attn.q_b_proj.weight": ("self_attention.linear_q_up_proj.weight",),
    "self_attn.kv_a_proj_with_mqa.weight": ("self_attention.linear_kv_down_proj.weight",),
    "self_attn.kv_a_layernorm.weight": (
        "self_attention.kv_layernorm.weight",
        "self_attention.linear_kv_up_proj.layer_norm_weight",
    ),
    "self_attn.kv_b_proj.weight": ("self_attention.linear_kv_up_proj.weight",),
}
LAYER_NORM = {
    "transformer.wte.weight": EMBEDDING,
    "transformer.wpe.weight": "embedding.position_embeddings.weight",
    "transformer.ln_f.weight": "decoder.final_layernorm.weight",
    "transformer.ln_f.bias": "decoder.final_layernorm.bias",
    "lm_head.weight": "output_layer.weight",
}
LAYER_NORM_LAYER = {
    "ln_1.weight": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "ln_1.bias": ("self_attention.linear_qkv.layer_norm_bias", "input_layernorm.bias"),
    "attn.c_attn.weight": ("self_attention.linear_qkv.weight",),
    "attn.c_attn.bias": ("self_attention.linear_qkv.bias",),
    "attn.c_proj.weight": ("self_attention.linear_proj.weight",),
    "attn.c_proj.bias": ("self_attention.linear_proj.bias",),
    "ln_2.weight": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    "ln_2.bias": ("mlp.linear_fc1.layer_norm_bias", "pre_mlp_layernorm.bias"),
    "mlp.c_fc.weight": ("mlp.linear_fc1.weight",),
    "mlp.c_fc.bias": ("mlp.linear_fc1.bias",),
    "mlp.c_proj.weight": ("mlp.linear_fc2.weight",),
    "mlp.c_proj.bias": ("mlp.linear_fc2.bias",),
}
EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
UP, GATE = ("up_proj.weight", "w3.weight"), ("gate_proj.weight", "w1.weight")
HALVES = ("_w", "_v")  # suffixes of the names of gates and ups that are stored separately


@dataclass(frozen=True)
class MegatronBox(StoredBox):
    """A Hugging Face tensor inside `key`, at the positions `at` of its leading dims (layer, expert; none where it is
    not stacked). Its rows are divided into `groups`; the tensor takes the same range of rows of every group, one after
    the other (GPT-2's fused matrix has three: q, k, v). transposed: like GPT-2's matrices."""

    at: tuple[int, ...]
    groups: int
    runs: tuple[tuple[int, int], ...]
    transposed: bool

    def read(self, files: Open, where: tuple[slice, ...]) -> Tensor:
        whole = files(self.file).read(self.key, tuple(slice(i, i + 1) for i in self.at))
        whole = whole.flatten(0, len(self.at))[: whole.shape[len(self.at)]] if self.at else whole
        rows = whole.view(self.groups, -1, *whole.shape[1:])
        picked = [rows[:, first:last].flatten(0, 1) for first, last in self.runs]
        found = torch.cat(picked)
        return (found.mT if self.transposed else found)[where]


def with_megatron(index: Index, wanted: Mapping[str, Shape], config: Mapping[str, Any], where: str) -> Index:
    """The index under Hugging Face names, if it is one of Megatron-Core's. CheckpointError names whatever does not
    belong to the model."""
    if EMBEDDING not in index:
        return index
    fixed, layer_names, prefix = (
        (LAYER_NORM, LAYER_NORM_LAYER, "transformer.h.")
        if "transformer.wte.weight" in wanted
        else (RMS_NORM, RMS_NORM_LAYER, "model.layers.")
    )
    found: Index = {}
    used = set[str]()
    last_expert: dict[str, int] = {}
    for name, shape in wanted.items():
        numbered = re.fullmatch(re.escape(prefix) + r"(\d+)\.(.*)", name)
        options = _places(numbered[2], layer_names) if numbered else [(fixed[name], ())] if name in fixed else []
        for option, expert in options:
            stacked, single = LAYERS + option, f"{LAYERS}{numbered[1]}.{option}" if numbered else option
            key = stacked if numbered and stacked in index else single
            layer = int(numbered[1]) if numbered and key == stacked else None
            if key in index and (layer is None or layer < index[key].shape[0]):
                used.add(key)
                at = (*([] if layer is None else [layer]), *expert)
                if expert and at[-1] >= index[key].shape[len(at) - 1]:
                    break
                last_expert[key] = max(last_expert.get(key, 0), at[-1]) if expert else -1
                found[name] = Stored(shape, [_part(name, shape, key, at, index[key].shape, config, where)])
                break
    layers = config.get("num_hidden_layers") or config.get("n_layer") or 0
    deeper = sorted(
        n for n in used if n.startswith(LAYERS) and not n[len(LAYERS) :][0].isdigit() and index[n].shape[0] != layers
    )
    if deeper:
        raise CheckpointError(f"{where} has {index[deeper[0]].shape[0]} layers ({deeper[0]}), the config has {layers}")
    for key, last in last_expert.items():
        stored = index[key].shape[-3:][0]
        if last >= 0 and stored != last + 1:
            raise CheckpointError(f"{where} has {stored} experts ({key}), the config has {last + 1}")
    left = sorted(
        n for n in index if n not in used and not (n == "output_layer.weight" and config.get("tie_word_embeddings"))
    )
    if left:
        raise CheckpointError(f"{where} has tensors that the model of the config has not: {', '.join(left[:5])}")
    return found


def _places(name: str, layer_names: Mapping[str, tuple[str, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    """Megatron's names for a tensor of a layer, each with the position of its expert where experts are stacked."""
    expert, half = EXPERT.fullmatch(name), HALVES[name.endswith(UP)] if name.endswith(GATE + UP) else ""
    if expert:
        matrix = f"linear_fc{1 if half else 2}.weight"
        return [
            (f"mlp.experts.experts.{matrix}", (int(expert[1]),)),
            (f"mlp.experts.experts.{expert[1]}.{matrix}{half}", ()),
        ]
    return [(option + end, ()) for option in layer_names.get(name, ()) for end in dict.fromkeys(("", half))]


def _part(
    name: str, shape: Shape, key: str, at: tuple[int, ...], stored: Shape, config: Mapping[str, Any], where: str
) -> MegatronBox:
    """Where a Hugging Face tensor is in a stored one; its size is checked."""
    own = stored[len(at) :]
    transposed = name.startswith("transformer.h.") and len(shape) == 2
    rows = shape[1] if transposed else shape[0]
    groups = 1
    runs: tuple[tuple[int, int], ...] = ((0, rows),)
    if ".linear_qkv." in key and "layer_norm" not in key:
        heads = config.get("num_attention_heads") or config.get("n_head") or 1
        groups = config.get("num_key_value_heads") or heads
        width, dim = heads // groups, own[0] // (heads + 2 * groups)
        q, k, v = (0, width * dim), (width * dim, (width + 1) * dim), ((width + 1) * dim, (width + 2) * dim)
        one = {"q_proj": q, "k_proj": k, "v_proj": v}.get(name.split(".")[-2])
        runs = (one,) if one else (q, k, v)
    elif name.endswith(UP) and not key.endswith(HALVES):
        runs = ((rows, 2 * rows),)
    padded = key in (EMBEDDING, "output_layer.weight")
    have = sum(b - a for a, b in runs) * groups
    fits = (
        own[1:] == (shape[:1] if transposed else shape[1:])
        and have == rows
        and (own[0] >= rows if padded else own[0] % groups == 0)
    )
    fused = 2 if key.endswith(".linear_fc1.weight") and not name.startswith("transformer.") else 1
    if not fits or (not padded and groups == 1 and own[0] != fused * rows):
        raise CheckpointError(
            f"{where}: {key} has the shape {stored}, which does not hold {name} {shape} of the config"
        )
    return MegatronBox("", key, Box.full(shape), at, groups, runs, transposed)
