"""What the central test runs on each rank: a few steps of a tiny model in any layout, and everything that must not
depend on it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from phalanx.comm.debug import Site
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.engine.build import State, build
from phalanx.engine.step import accumulate, update
from phalanx.forecast.decide import make_plan
from phalanx.layout.box import Box
from phalanx.models.bert import BertConfig
from phalanx.models.deepseek_v3 import DeepseekV3Config
from phalanx.models.falcon_h1 import FalconH1Config
from phalanx.models.gemma2 import Gemma2Config
from phalanx.models.gemma3 import Gemma3Config
from phalanx.models.gemma3_text import Gemma3TextConfig
from phalanx.models.gemma4_text import Gemma4TextConfig
from phalanx.models.glm4_moe import Glm4MoEConfig
from phalanx.models.gpt2 import GPT2Config
from phalanx.models.gpt_neox import GPTNeoXConfig
from phalanx.models.gpt_oss import GptOssConfig
from phalanx.models.kimi_k25 import KimiK25Config
from phalanx.models.kimi_linear import KimiLinearConfig
from phalanx.models.llama import LlamaConfig
from phalanx.models.llama4_text import Llama4TextConfig
from phalanx.models.llava import LlavaConfig
from phalanx.models.mamba2 import Mamba2Config
from phalanx.models.minimax_m2 import MiniMaxM2Config
from phalanx.models.mistral import MistralConfig
from phalanx.models.mixtral import MixtralConfig
from phalanx.models.model_config import ModelConfig
from phalanx.models.modernbert import ModernBertConfig
from phalanx.models.nemotron_h import NemotronHConfig
from phalanx.models.olmo2 import Olmo2Config
from phalanx.models.olmo3 import Olmo3Config
from phalanx.models.olmo_hybrid import OlmoHybridConfig
from phalanx.models.phi3 import Phi3Config
from phalanx.models.qwen2 import Qwen2Config
from phalanx.models.qwen2_5_vl import Qwen25Vision, Qwen25VLConfig
from phalanx.models.qwen3 import Qwen3Config
from phalanx.models.qwen3_5 import Qwen35Config
from phalanx.models.qwen3_5_moe import Qwen35MoEConfig
from phalanx.models.qwen3_5_moe_text import Qwen35MoETextConfig
from phalanx.models.qwen3_5_text import Qwen35TextConfig
from phalanx.models.qwen3_moe import Qwen3MoEConfig
from phalanx.models.qwen3_next import Qwen3NextConfig
from phalanx.models.qwen3_vl import Qwen3Vision, Qwen3VLConfig
from phalanx.models.qwen_vision import LearnedVision
from phalanx.models.rope import RopeScaling
from phalanx.models.smollm3 import SmolLM3Config
from phalanx.models.t5 import T5Config
from phalanx.models.vision_config import VisionConfig
from phalanx.models.whisper import WhisperConfig
from phalanx.nn.objective import TaskConfig, find_objective
from phalanx.ops.optimizer.shard import widened
from phalanx.planning.order import media_group_of
from phalanx.sequence.batch import ENCODER, IGNORE, Batch
from phalanx.sequence.frames import FRAMES, frame_rows
from phalanx.sequence.patches import PictureSpec
from phalanx.verifying.compare import allowed, random_weights
from tests.harness.pictures import picture_batch, shared_among

SEQ, VOCAB = 16, 131
ENCODER_SEQ = 24  # tokens of a sequence that an encoder reads

SIZES = {"vocab_size": VOCAB, "hidden_size": 32}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LATENTS = {"kv_lora_rank": 10, "qk_nope_head_dim": 5, "qk_rope_head_dim": 6, "v_head_dim": 7}

MODELS = {
    "llama": LlamaConfig(
        **SIZES,
        intermediate_size=42,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=6,
        rope_scaling=RopeScaling(
            factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8
        ),
    ),
    "llama-tied": LlamaConfig(
        **SIZES,
        intermediate_size=42,
        num_hidden_layers=6,
        num_attention_heads=4,
        tie_word_embeddings=True,
    ),
    "qwen3": Qwen3Config(
        **SIZES,
        **HEADS,
        intermediate_size=42,
        num_hidden_layers=3,
        head_dim=10,
    ),
    "olmo2": Olmo2Config(
        **SIZES,
        **HEADS,
        intermediate_size=42,
        num_hidden_layers=3,
        head_dim=10,
    ),
    "olmo3": Olmo3Config(
        **SIZES,
        **HEADS,
        intermediate_size=42,
        num_hidden_layers=5,
        head_dim=10,
        sliding_window=5,
        rope_local_base_freq=700.0,
        rope_scaling=RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=8),
    ),
    "gemma3_text": Gemma3TextConfig(
        **SIZES | {"hidden_size": 36},
        **HEADS,
        intermediate_size=42,
        num_hidden_layers=7,
        head_dim=10,
        sliding_window=5,
        query_pre_attn_scalar=7,
        rope_scaling=RopeScaling(rope_type="linear", factor=8.0),
    ),
    "gemma2": Gemma2Config(
        **SIZES | {"hidden_size": 36},
        **HEADS,
        intermediate_size=42,
        num_hidden_layers=3,
        head_dim=10,
        sliding_window=5,
        query_pre_attn_scalar=7,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "phi3": Phi3Config(
        **SIZES,
        **HEADS,
        intermediate_size=42,
        num_hidden_layers=3,
        sliding_window=9,
        partial_rotary_factor=0.75,
        max_position_embeddings=64,
        rope_scaling=RopeScaling(
            rope_type="longrope",
            short_factor=(1.0, 1.5, 2.0),
            long_factor=(2.0, 3.0, 4.0),
            original_max_position_embeddings=8,
        ),
    ),
    "mixtral": MixtralConfig(
        **SIZES,
        **HEADS,
        intermediate_size=21,
        num_hidden_layers=3,
        num_local_experts=8,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.1,
        router_z_loss_coef=0.01,
    ),
    "mixtral-full": MixtralConfig(
        **SIZES,
        intermediate_size=21,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.1,
        router_aux_loss_scope="global_batch",
        expert_capacity_factor=1.0,
    ),
    "qwen3_moe": Qwen3MoEConfig(
        **SIZES,
        **HEADS,
        intermediate_size=42,
        moe_intermediate_size=14,
        num_hidden_layers=4,
        head_dim=10,
        num_experts=8,
        num_experts_per_tok=3,
        decoder_sparse_step=2,
        tie_word_embeddings=True,
        norm_topk_prob=False,
        router_aux_loss_coef=0.1,
        router_aux_loss_scope="sequence",
    ),
    "gpt_oss": GptOssConfig(
        **SIZES,
        **HEADS,
        intermediate_size=14,
        num_hidden_layers=3,
        head_dim=10,
        num_local_experts=8,
        num_experts_per_tok=3,
        sliding_window=5,
        swiglu_limit=1.5,
        router_aux_loss_coef=0.1,
        router_z_loss_coef=0.01,
        rope_scaling=RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=8, truncate=False),
    ),
    "mistral": MistralConfig(
        **SIZES,
        intermediate_size=42,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        sliding_window=5,
        rope_scaling=RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=8),
    ),
    "qwen2": Qwen2Config(
        **SIZES,
        **HEADS,
        intermediate_size=42,
        num_hidden_layers=4,
        sliding_window=9,
        max_window_layers=2,
    ),
    "deepseek_v3": DeepseekV3Config(
        **SIZES,
        **LATENTS,
        intermediate_size=42,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=4,
        q_lora_rank=18,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=2,
        moe_intermediate_size=14,
        n_group=4,
        topk_group=2,
        router_bias_update_rate=0.05,
        router_aux_loss_coef=0.1,
    ),
    "deepseek_v3-mtp": DeepseekV3Config(
        **SIZES,
        **LATENTS,
        intermediate_size=42,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=4,
        q_lora_rank=None,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=14,
        n_group=2,
        topk_group=1,
        router_aux_loss_coef=0.1,
        num_nextn_predict_layers=2,
        mtp_loss_weight=0.7,
    ),
    "deepseek_v3-dense": DeepseekV3Config(
        **SIZES,
        **LATENTS,
        intermediate_size=42,
        num_hidden_layers=3,
        first_k_dense_replace=3,
        num_attention_heads=4,
        q_lora_rank=18,
        rms_norm_eps=1e-5,
        rope_scaling=RopeScaling(
            rope_type="yarn", factor=4.0, original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=0.8
        ),
    ),
    "gpt2": GPT2Config(
        **SIZES,
        num_hidden_layers=6,
        num_attention_heads=8,
        max_position_embeddings=SEQ,
        dropout=0.1,
        attention_dropout=0.1,
    ),
}
MODELS["gemma4_text"] = Gemma4TextConfig(
    **SIZES | {"hidden_size": 36},
    num_attention_heads=4,
    num_key_value_heads=4,
    intermediate_size=42,
    num_hidden_layers=4,
    head_dim=6,
    global_head_dim=10,
    num_global_key_value_heads=2,
    attention_k_eq_v=True,
    sliding_window=5,
    layer_types=("sliding_attention", "full_attention", "sliding_attention", "full_attention"),
    rope_scaling=RopeScaling(rope_type="proportional", partial_rotary_factor=0.5),
    final_logit_softcapping=3.0,
)
MODELS["gemma4_text-shared"] = replace(
    MODELS["gemma4_text"],
    num_hidden_layers=6,
    layer_types=("sliding_attention", "full_attention") * 3,
    hidden_size_per_layer_input=9,  # scales are square roots, in float32 in transformers
    num_kv_shared_layers=3,
    use_double_wide_mlp=True,
    attention_k_eq_v=False,
)
MODELS["gemma4_text-experts"] = replace(
    MODELS["gemma4_text"],
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=14,
    router_aux_loss_coef=0.1,
    hidden_size_per_layer_input=4,
    vocab_size_per_layer_input=SIZES["vocab_size"] + 3,
    num_kv_shared_layers=2,
)
MODELS["t5"] = T5Config(
    **SIZES,
    intermediate_size=42,
    num_hidden_layers=2,
    num_decoder_layers=3,
    num_attention_heads=4,
    head_dim=6,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=10,
)
MODELS["whisper"] = WhisperConfig(
    **SIZES,
    intermediate_size=42,
    num_hidden_layers=2,
    num_decoder_layers=3,
    num_attention_heads=4,
    num_mel_bins=5,
    max_source_positions=6,
    max_position_embeddings=SEQ,
    decoder_start_token_id=3,
)
MODELS["t5-dropout"] = replace(MODELS["t5"], dropout_rate=0.1)
MODELS["t5-tied"] = replace(MODELS["t5"], feed_forward_proj="relu", tie_word_embeddings=True, num_decoder_layers=None)
MODELS["smollm3"] = SmolLM3Config(
    **SIZES,
    **HEADS,
    intermediate_size=42,
    num_hidden_layers=3,
    no_rope_layer_interval=2,
    sliding_window=5,
    tie_word_embeddings=False,
)
MODELS["bert"] = BertConfig(
    **SIZES,
    intermediate_size=42,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=SEQ,
    dropout=0.1,
    attention_dropout=0.1,
)
MODELS["modernbert"] = ModernBertConfig(
    **SIZES,
    intermediate_size=42,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=SEQ,
    local_attention=6,
)
MODELS["llama4_text"] = Llama4TextConfig(
    **SIZES,
    **HEADS,
    intermediate_size=14,
    intermediate_size_mlp=42,
    num_hidden_layers=4,
    head_dim=10,
    no_rope_layer_interval=3,
    num_local_experts=8,
    interleave_moe_layer_step=2,
    attention_chunk_size=5,
    floor_scale=3,
    router_aux_loss_coef=0.1,
)
MODELS["kimi_k25"] = KimiK25Config(
    **SIZES,
    **LATENTS,
    intermediate_size=42,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    num_attention_heads=4,
    q_lora_rank=18,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=14,
    router_bias_update_rate=0.05,
    router_aux_loss_coef=0.1,
)
MODELS["minimax_m2"] = MiniMaxM2Config(
    **SIZES,
    **HEADS,
    intermediate_size=14,
    num_hidden_layers=3,
    head_dim=12,
    num_local_experts=8,
    num_experts_per_tok=3,
    router_bias_update_rate=0.05,
    router_aux_loss_coef=0.1,
)
MODELS["glm4_moe"] = Glm4MoEConfig(
    **SIZES,
    **HEADS,
    intermediate_size=42,
    num_hidden_layers=3,
    head_dim=12,
    use_qk_norm=True,
    first_k_dense_replace=1,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=14,
    n_group=2,
    topk_group=1,
    routed_scaling_factor=1.5,
    router_bias_update_rate=0.05,
    router_aux_loss_coef=0.1,
)
MODELS["glm4_moe-mtp"] = replace(
    MODELS["glm4_moe"], num_hidden_layers=2, use_qk_norm=False, attention_bias=True, num_nextn_predict_layers=1
)
MODELS["llava"] = LlavaConfig(
    **SIZES,
    **HEADS,
    intermediate_size=42,
    num_hidden_layers=3,
    image_token_id=7,
    vision=VisionConfig(
        hidden_size=24,
        intermediate_size=30,
        num_hidden_layers=3,
        num_attention_heads=3,
        image_size=6,
        patch_size=3,
    ),
)
MODELS["gemma3"] = Gemma3Config(
    **SIZES | {"hidden_size": 36},
    **HEADS,
    intermediate_size=42,
    num_hidden_layers=3,
    head_dim=10,
    sliding_window=3,
    layer_types=("sliding_attention", "full_attention", "sliding_attention"),
    query_pre_attn_scalar=7,
    image_token_id=7,
    boi_token_id=8,
    eoi_token_id=9,
    mm_tokens_per_image=4,
    vision=VisionConfig(
        tower="siglip",
        hidden_size=24,
        intermediate_size=30,
        num_hidden_layers=2,
        num_attention_heads=3,
        image_size=12,
        patch_size=3,
        hidden_act="gelu_pytorch_tanh",
        layer_norm_eps=1e-6,
    ),
)
VL = {
    "hidden_size": 24,
    "intermediate_size": 30,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "patch_size": 2,
}
MODELS["qwen2_5_vl"] = Qwen25VLConfig(
    **SIZES,
    **HEADS,
    intermediate_size=42,
    num_hidden_layers=3,
    image_token_id=7,
    mrope_section=(2, 1, 1),
    rope_theta=100.0,
    vision=Qwen25Vision(**VL, window_size=8, fullatt_block_indexes=(1,)),
)
MODELS["qwen3_vl"] = Qwen3VLConfig(
    **SIZES,
    **HEADS,
    intermediate_size=42,
    num_hidden_layers=3,
    head_dim=12,
    image_token_id=7,
    mrope_section=(2, 2, 2),
    rope_theta=100.0,
    vision=Qwen3Vision(**VL, num_position_embeddings=9, deepstack_visual_indexes=(0, 2)),
)
MODELS["gpt_neox"] = GPTNeoXConfig(
    **SIZES, intermediate_size=42, num_hidden_layers=3, num_attention_heads=4, partial_rotary_factor=0.5
)
MODELS["mamba2"] = Mamba2Config(
    **SIZES,
    num_hidden_layers=4,
    num_heads=8,
    head_dim=8,
    state_size=5,
    n_groups=2,
    conv_kernel=3,  # cp3 and cp4 have chunks of 2 tokens
    time_step_limit=(0.01, 2.0),
)
MODELS["nemotron_h"] = NemotronHConfig(
    **SIZES,
    **HEADS,
    intermediate_size=42,
    num_hidden_layers=4,
    layers_block_type=("linear_attention", "mlp", "full_attention", "linear_attention"),
    head_dim=10,
    mamba_num_heads=8,
    mamba_head_dim=3,
    ssm_state_size=5,
    n_groups=2,
    conv_kernel=3,
)
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3,
    "layer_types": ("linear_attention", "full_attention") * 2,
}
GATED = {**SIZES, **HEADS, **DELTA, "head_dim": 12, "partial_rotary_factor": 0.5, "rope_theta": 100.0}
CHOSEN = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 14,
    "shared_expert_intermediate_size": 10,
    "router_aux_loss_coef": 0.1,
}
MODELS["qwen3_next"] = Qwen3NextConfig(
    **GATED, **CHOSEN, intermediate_size=42, num_hidden_layers=4, mlp_only_layers=(1,)
)
MODELS["qwen3_next-mtp"] = replace(MODELS["qwen3_next"], num_nextn_predict_layers=1, mtp_loss_weight=0.7)
MODELS["qwen3_5_text"] = Qwen35TextConfig(**GATED, intermediate_size=42, num_hidden_layers=4)
MODELS["kimi_linear"] = KimiLinearConfig(
    **SIZES,
    **LATENTS,
    intermediate_size=42,
    num_hidden_layers=4,
    num_attention_heads=4,
    layer_types=DELTA["layer_types"],
    linear_num_heads=4,
    linear_head_dim=5,
    linear_conv_kernel_dim=3,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=14,
    n_group=2,
    router_aux_loss_coef=0.1,
)
MODELS["olmo_hybrid"] = OlmoHybridConfig(
    **SIZES, **HEADS, **DELTA, intermediate_size=42, num_hidden_layers=4, head_dim=8
)
MODELS["qwen3_5_moe_text"] = Qwen35MoETextConfig(**GATED, **CHOSEN, num_hidden_layers=4)
PICTURED = {"image_token_id": 7, "mrope_section": (1, 1, 1), "vision": LearnedVision(**VL, num_position_embeddings=9)}
MODELS["qwen3_5"] = Qwen35Config(**GATED, **PICTURED, intermediate_size=42, num_hidden_layers=4)
MODELS["qwen3_5_moe"] = Qwen35MoEConfig(**GATED, **CHOSEN, **PICTURED, num_hidden_layers=4)
MODELS["nemotron_h-moe"] = replace(
    MODELS["nemotron_h"],
    num_hidden_layers=5,
    layers_block_type=("linear_attention", "moe", "full_attention", "mlp", "moe"),
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=22,
    moe_shared_expert_intermediate_size=14,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    router_aux_loss_coef=0.01,
    router_bias_update_rate=0.02,
)
MODELS["nemotron_h-latent"] = replace(
    MODELS["nemotron_h-moe"], moe_latent_size=12, mlp_bias=True, n_group=1, topk_group=1, norm_topk_prob=False
)
MODELS["falcon_h1"] = FalconH1Config(
    **SIZES,
    **HEADS,
    intermediate_size=42,
    num_hidden_layers=4,
    head_dim=10,
    rope_theta=100.0,
    mamba_n_heads=8,
    mamba_d_head=3,
    mamba_d_state=5,
    mamba_n_groups=2,
    mamba_d_conv=3,
    time_step_limit=(0.01, 2.0),
    embedding_multiplier=5.7,
    lm_head_multiplier=0.3,
    key_multiplier=0.6,
    attention_in_multiplier=1.2,
    attention_out_multiplier=0.9,
    ssm_in_multiplier=1.25,
    ssm_out_multiplier=0.4,
    ssm_multipliers=(0.375, 0.25, 0.75, 0.5, 0.875),  # transformers rounds them to fp32
    mlp_multipliers=(0.88, 0.58),
)
MODELS["falcon_h1-norm"] = replace(MODELS["falcon_h1"], mamba_rms_norm=True, tie_word_embeddings=True)
MODELS["deepseek_v3-mtp-tied"] = replace(MODELS["deepseek_v3-mtp"], tie_word_embeddings=True)


def base_run(model: str, global_batch: int = 8, micro_batch: int = 1, **train) -> Run:
    options = {
        "steps": 10,
        "global_batch": global_batch,
        "micro_batch": micro_batch,
        "seq_length": SEQ,
        "precision": "fp64",
        **train,
    }
    room = {stream.name: 4 * stream.largest for stream in MODELS[model].needs_room}
    packing = "online" if MODELS[model].numbers_beside else "off"
    data = DataConfig(mock=True, room=room, packing=packing) if room else DataConfig()
    return Run(model=MODELS[model], train=TrainConfig(**options), task=task_of(MODELS[model]), data=data)


def task_of(model: ModelConfig) -> TaskConfig:
    """The task of a model's runs: what makes the streams that it reads."""
    if model.numbers_beside:
        made: TaskConfig = find_objective("transcribe").Config(name="transcribe")
        return made
    if not model.reads_beside:
        return TaskConfig()
    config: TaskConfig = find_objective("span").Config(name="span", encoder_length=ENCODER_SEQ)
    return config


def sample_batch(ids: list[int], documents: bool | str, length: int = SEQ) -> Batch:
    """Sequences made from their sample ids alone, some labels ignored (more in later samples: counts differ between
    micro-batches)."""
    rows = [torch.randint(0, VOCAB, (length + 1,), generator=torch.Generator().manual_seed(i)) for i in ids]
    tokens = torch.stack(rows)
    labels = tokens[:, 1:].clone()
    for row, i in enumerate(ids):
        labels[row, : i % 5] = IGNORE
    positions = torch.arange(length).repeat(len(ids))
    docs = real = None
    if documents:
        cuts = torch.tensor([[(t >= 3 + i % 7) + (t >= 11) for t in range(length)] for i in ids])
        if documents == "packed":  # one of 1 to 5 tokens, a long one, perhaps a short one, and padding
            cuts = torch.tensor([[(t >= 1 + i % 5) + (t >= 9 + i % 4) + (t >= 13) for t in range(length)] for i in ids])
            real = (cuts < 3).long().reshape(-1)
            labels = torch.where(cuts < 3, labels, IGNORE)
        if (
            documents == "filling"
        ):  # short ones that fill four ranks of 4 tokens only where the long one is cut into parts of other lengths
            cuts = torch.tensor(
                [[(t >= (12, 2)[i % 2]) + (t >= 13 + i % 2) + (t >= 14 + i % 2) for t in range(length)] for i in ids]
            )
        docs = (cuts + torch.arange(len(ids)).unsqueeze(1) * 4).reshape(-1)
        starts = torch.cat([torch.tensor([0]), (docs[1:] != docs[:-1]).nonzero()[:, 0] + 1])
        positions = (
            torch.arange(len(docs)) - starts[torch.searchsorted(starts, torch.arange(len(docs)), right=True) - 1]
        )
    samples = torch.tensor(ids).repeat_interleave(length)
    prefix = (positions < 2 + samples % 3).long() if documents == "prefix" else None
    rows = (tokens[:, :-1].reshape(-1), labels.reshape(-1), positions, samples)
    return Batch(*rows, len(ids), length, docs, real=real, prefix=prefix)


def with_encoder(batch: Batch, ids: list[int], documents: bool | str) -> Batch:
    """The batch and the texts of an encoder, longer ones, also made from the sample ids alone. Documents have other
    lengths than the decoder's and the same numbers; padding, where there is any, reads padding."""
    made = sample_batch([1000 + i for i in ids], False, ENCODER_SEQ)
    docs = real = None
    positions = made.positions
    if documents:
        cuts = torch.tensor(
            [[(t >= 2 + i % 6) + (t >= 11) + (t >= 17 + i % 3) for t in range(ENCODER_SEQ)] for i in ids]
        )
        real = (cuts < 3).long().reshape(-1) if documents == "packed" else None
        docs = (cuts + torch.arange(len(ids)).unsqueeze(1) * 4).reshape(-1)
        first = torch.cat([torch.tensor([True]), docs[1:] != docs[:-1]])
        place = torch.arange(len(docs))
        positions = place - place.where(first, 0).cummax(0).values
    samples = torch.tensor(ids).repeat_interleave(ENCODER_SEQ)
    labels = torch.full_like(made.tokens, IGNORE)
    changed = {"labels": labels, "positions": positions, "documents": docs, "real": real, "samples": samples}
    return replace(batch, beside={ENCODER: replace(made, **changed)})


def with_sound(batch: Batch, ids: list[int], model: ModelConfig) -> Batch:
    """The batch and recordings of noise, one for each document, made from the sample ids alone: four in a sequence, the
    last of padding where there are three documents. Without documents, a sequence reads its four recordings."""
    (stream,) = model.numbers_beside
    size, bands = stream.largest, stream.width // FRAMES
    rng = [np.random.default_rng(i) for i in ids]
    clips = [frame_rows(each.normal(size=(2 * size, bands)).astype(np.float32)) for each in rng for _ in range(4)]
    rows, count = torch.from_numpy(np.concatenate(clips)), 4 * size
    place = torch.arange(len(rows))
    docs = None if batch.documents is None else place // size
    real = None if batch.real is None else (place // size % 4 < 3).long()
    ids_of = torch.tensor(ids).repeat_interleave(count)
    zeros, labels = torch.zeros_like(place), torch.full_like(place, IGNORE)
    made = Batch(zeros, labels, place % size, ids_of, len(ids), count, docs, real=real, values=rows)
    return replace(batch, beside={stream.name: made})


def batch_of(run: Run, ids: list[int], documents: bool | str) -> Batch:
    """A micro-batch of a run."""
    batch = sample_batch(ids, documents, run.train.seq_length)
    if run.model.reads_units:
        return picture_batch(run, batch, ids)
    if run.model.numbers_beside:
        return with_sound(batch, ids, run.model)
    return with_encoder(batch, ids, documents) if run.model.reads_beside else batch


def step_batches(run: Run, mesh: Mesh, step: int, documents: bool | str) -> list[Batch]:
    n, size, dp = run.train.global_batch, run.train.micro_batch, mesh.dp.size
    firsts = [step * n + rank * (n // dp) for rank in media_group_of(run, dp, mesh.dp.index)]
    part, found = mesh.part, list[Batch]()
    for at in range(0, n // dp, size):
        ids = [list(range(first + at, first + at + size)) for first in firsts]
        batch = batch_of(run, ids[part.replica], documents)
        if part.replicas > 1:
            assert isinstance(run.model.media, PictureSpec)
            batch = shared_among(batch, ids, run.model.media, part)
        found.append(batch.cut(part))
    return found


Parts = list[tuple[str, tuple[int, ...], Box, np.ndarray]]


def parts_of(state: State, what: str) -> Parts:
    """This rank's boxes of every global tensor of its shards ('grad' or 'master'); elements of other ranks are NaN."""
    found: Parts = []
    for flat in (f for f in state.buffers.flat if f.bucket.learns or what == "master"):
        whole = torch.full((flat.bucket.numel,), torch.nan, dtype=torch.float64)
        first, values = (flat.lo, flat.own_grad) if what == "grad" else flat.storage.values()
        whole[first : first + len(values)] = widened(values, torch.float64)
        for slot in flat.bucket.slots:
            storage = whole[slot.offset : slot.offset + slot.numel].view(slot.spec.shape)
            for piece in slot.spec.pieces:
                found.append((piece.name, piece.shape, piece.box, piece.of(storage).numpy().copy()))
    return found


def run_layout(
    rank: int,
    world: int,
    run: Run,
    steps: int,
    documents: bool | str = False,
    drop: Site | None = None,
    watch: bool = False,
) -> dict:
    """Train `steps` steps; losses, norms, all gradients of each step and the last weights, as this rank's parts."""
    plan = make_plan(run, world)
    mesh = Mesh(plan.grid, rank)
    state = build(plan, mesh)
    random_weights(state.model)
    mesh.watch.on, mesh.watch.drop = watch or drop is not None, drop
    state.model.train()
    losses, norms, grads = [], [], []
    for step in range(steps):
        with state.buffers.sending_early():
            tokens = accumulate(state, step_batches(run, mesh, step, documents))
        grads.append(parts_of(state, "grad"))
        result = update(state, tokens, lr=1e-2)
        mtp_loss = 0.0 if result.mtp_loss is None else result.mtp_loss.item()
        losses.append((result.loss.item(), mtp_loss, *(value.item() for value in result.metrics.values())))
        norms.append(result.grad_norm.item())
    state.buffers.ready()
    made = {"losses": losses, "norms": norms, "grads": grads, "weights": parts_of(state, "master")}
    counts = {site: count for site, (count, _) in mesh.watch.calls.items()}
    return {**made, "sites": list(counts), "counts": list(counts.values())}


def assemble(parts: list[Parts]) -> dict[str, np.ndarray]:
    """Global tensors from all ranks' boxes: complete, and equal where ranks hold the same elements."""
    whole: dict[str, np.ndarray] = {}
    for rank_parts in parts:
        for name, shape, box, values in rank_parts:
            target = whole.setdefault(name, np.full(shape, np.nan))[box.slices()]
            both = ~np.isnan(target) & ~np.isnan(values)
            np.testing.assert_allclose(
                values[both], target[both], rtol=1e-12, atol=1e-14, err_msg=f"replicas of {name} differ"
            )
            np.copyto(target, values, where=~np.isnan(values))
    for name, values in whole.items():
        assert not np.isnan(values).any(), f"{name} has elements that no rank holds, or NaN"
    return whole


def compare(results: list[dict], truth: dict, steps: int) -> None:
    """All that a layout must not change: per tensor within 1e-9 x max(its own scale, 1e-6 x the largest gradient)."""
    for result in results:
        np.testing.assert_allclose(result["losses"], truth["losses"], rtol=1e-10, err_msg="losses")
        np.testing.assert_allclose(result["norms"], truth["norms"], rtol=1e-9, err_msg="norms")
    for step in range(steps):
        same_tensors(assemble([r["grads"][step] for r in results]), truth["grads"][step], f"step {step} gradient of")
    same_tensors(assemble([r["weights"] for r in results]), truth["weights"], "weights of")


def same_tensors(found: dict[str, np.ndarray], truth: dict[str, np.ndarray], what: str) -> None:
    assert found.keys() == truth.keys()
    largest = max(np.abs(t).max() for t in truth.values())
    for name, expected in truth.items():
        bound = allowed(np.abs(expected).max(), largest)
        off = np.abs(found[name] - expected).max()
        assert off <= bound, f"{what} {name} is off by {off:.3g} (bound {bound:.3g})"


_TRUTHS: dict[tuple[str, int, bool], dict] = {}


def truth_of(ranks, run: Run, steps: int, documents: bool) -> dict:
    """The single-process run of the same config, made once for all layouts of it."""
    from phalanx.planning.plan import storing_all, without_layout

    alone = storing_all(replace(without_layout(run), layout=replace(without_layout(run).layout, sharding=0)))
    key = repr(alone), steps, documents
    if key not in _TRUTHS:
        (result,) = ranks.run("tests.harness.parity:run_layout", 1, alone, steps, documents)
        grads, weights = [assemble([g]) for g in result["grads"]], assemble([result["weights"]])
        _TRUTHS[key] = {**result, "grads": grads, "weights": weights}
    return _TRUTHS[key]
