"""Random config.json files of every family, read by us and by transformers: the same logits in float64, or a
refusal, never another model.

    python -m tests.harness.hf_fuzz 5000 [first seed]

A trial deletes, changes or adds one to three keys of a tiny model's config.json. Its weights fit the changed config
as transformers reads it, or (in some trials) are those of the unchanged one; norms, biases and routers are random,
and weights large, so that every key matters.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from phalanx.base.errors import CheckpointError, ConfigError, PhalanxError
from phalanx.checkpoint.hf import read_folder
from phalanx.checkpoint.load import load_weights
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.engine.build import build_for_inference
from phalanx.forecast.decide import make_plan
from phalanx.models.check import check
from phalanx.models.model_config import ModelConfig
from phalanx.nn.objective import TaskConfig, find_objective
from phalanx.pipeline.execute import execute
from phalanx.sequence.batch import ENCODER, Batch
from phalanx.sequence.frames import FRAMES, frame_rows
from phalanx.sequence.sample import SOUND

SEQ, VOCAB, BATCH = 16, 61, 2
LARGEST = 3_000_000  # parameters of a model that is built: a deleted size may mean billions
HEAD, TIMES = "lm_head.weight", 1e-9
COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=32,
)
DELTA = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=5,
    linear_value_head_dim=6,
    layer_types=["linear_attention", "full_attention"],
)
WINDOW = dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(COMMON, num_key_value_heads=2),
    "mistral": dict(COMMON, num_key_value_heads=2, sliding_window=5),
    "ministral": dict(
        COMMON, num_key_value_heads=2, sliding_window=5, layer_types=["full_attention", "sliding_attention"], head_dim=8
    ),
    "qwen2": dict(COMMON, num_key_value_heads=2, **WINDOW),
    "qwen3": dict(COMMON, num_key_value_heads=2, head_dim=10, **WINDOW),
    "olmo2": dict(COMMON, num_key_value_heads=2),
    "phi3": dict(COMMON, num_key_value_heads=2, sliding_window=5, pad_token_id=0),
    "olmo3": dict(COMMON, num_key_value_heads=2, sliding_window=5, num_hidden_layers=4),
    "gemma3_text": dict(
        COMMON,
        hidden_size=36,
        num_key_value_heads=2,
        head_dim=10,
        sliding_window=5,
        num_hidden_layers=6,
        query_pre_attn_scalar=7,
    ),
    "gemma4_text": dict(
        COMMON,
        hidden_size=36,
        num_key_value_heads=4,
        head_dim=10,
        sliding_window=5,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        global_head_dim=12,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=9,
        vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=2,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=12,
    ),
    "gemma2": dict(
        COMMON, hidden_size=36, num_key_value_heads=2, head_dim=10, sliding_window=5, query_pre_attn_scalar=7
    ),
    "mixtral": dict(
        COMMON, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=6
    ),
    "qwen3_moe": dict(
        COMMON,
        num_key_value_heads=2,
        head_dim=10,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        use_sliding_window=True,
        sliding_window=5,
    ),
    "qwen3_next": dict(
        COMMON,
        **DELTA,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=10,
    ),
    "kimi_linear": dict(
        COMMON,
        num_key_value_heads=4,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_heads=4,
        linear_head_dim=5,
        kv_lora_rank=10,
        qk_nope_head_dim=5,
        qk_rope_head_dim=6,
        v_head_dim=7,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=12,
        pad_token_id=0,
    ),
    "olmo_hybrid": dict(COMMON, **DELTA, num_key_value_heads=2, pad_token_id=0),
    "qwen3_5_text": dict(COMMON, **DELTA, num_key_value_heads=2, head_dim=16),
    "qwen3_5_moe_text": dict(
        {k: v for k, v in COMMON.items() if k != "intermediate_size"},
        **DELTA,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=10,
    ),
    "gpt_oss": dict(
        COMMON, num_key_value_heads=2, head_dim=10, num_local_experts=4, num_experts_per_tok=2, sliding_window=5
    ),
    "deepseek_v3": dict(
        COMMON,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=8,
        kv_lora_rank=10,
        q_lora_rank=12,
        qk_rope_head_dim=6,
        v_head_dim=7,
        qk_nope_head_dim=5,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        first_k_dense_replace=1,
        moe_intermediate_size=12,
    ),
    "llama4_text": dict(
        COMMON,
        intermediate_size_mlp=20,
        num_hidden_layers=3,
        num_key_value_heads=2,
        head_dim=12,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        no_rope_layers=[1, 0, 1],
        attention_chunk_size=5,
        floor_scale=3,
    ),
    "minimax_m2": dict(
        COMMON, num_key_value_heads=2, head_dim=12, num_local_experts=4, num_experts_per_tok=2, rotary_dim=6
    ),
    "glm4_moe": dict(
        COMMON,
        num_key_value_heads=2,
        head_dim=12,
        use_qk_norm=True,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        n_group=2,
        first_k_dense_replace=1,
        num_mtp_layers=0,
    ),
    "gpt_neox": dict(COMMON, rope_parameters=dict(partial_rotary_factor=0.5)),
    "smollm3": dict(
        COMMON, num_key_value_heads=2, no_rope_layers=[0, 1], use_sliding_window=True, sliding_window=5, pad_token_id=0
    ),
    "mamba2": dict(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        state_size=6,
        n_groups=2,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "nemotron_h": dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=24,
        layers_block_type=["linear_attention", "mlp", "full_attention", "moe"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        mamba_num_heads=6,
        mamba_head_dim=4,
        ssm_state_size=5,
        n_groups=2,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        moe_shared_expert_intermediate_size=14,
        n_group=4,
        topk_group=2,
        max_position_embeddings=32,
    ),
    "falcon_h1": dict(
        COMMON,
        num_key_value_heads=2,
        head_dim=10,
        mamba_d_ssm=24,
        mamba_n_heads=6,
        mamba_n_groups=2,
        mamba_d_state=5,
        mamba_rms_norm=True,
        embedding_multiplier=2.5,
        lm_head_multiplier=0.5,
        key_multiplier=0.75,
        ssm_multipliers=[0.5, 0.25, 0.75, 1.5, 0.375],
    ),
    "gpt2": dict(vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=4, n_inner=40),
    "t5": dict(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=10,
        d_ff=24,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=12,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
        tie_word_embeddings=False,
    ),
    "whisper": dict(
        vocab_size=VOCAB,
        d_model=32,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_mel_bins=5,
        max_source_positions=6,
        max_target_positions=32,
        decoder_start_token_id=1,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 60),
    ),
    "bert": dict(COMMON),
    "modernbert": dict(
        COMMON,
        local_attention=6,
        layer_types=["full_attention", "sliding_attention"],
        pad_token_id=0,
        **dict.fromkeys(("bos_token_id", "cls_token_id"), 1),
        **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
    ),
}
ENCODERS = ("bert", "modernbert")
PICTURED = ("llava", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe", "gemma3")  # tests.harness.hf_fuzz_images
ENCODER_DECODERS = ("t5",)
HEARING = ("whisper",)
ENCODER_SEQ = 24
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8)
ROPES: tuple[dict[str, Any], ...] = (
    {},
    dict(rope_type="default"),
    dict(rope_type="default", rope_theta=500.0),
    dict(rope_theta=77.0),
    dict(type="linear", factor=2.0),
    dict(rope_type="linear", factor=3.0, rope_theta=100.0),
    dict(rope_type="dynamic", factor=2.0),
    YARN,
    dict(YARN, rope_theta=100.0),
    dict(YARN, type="linear"),
    dict(YARN, truncate=False),
    dict(YARN, truncate=None),
    dict(YARN, beta_fast=0, beta_slow=None),
    dict(YARN, mscale=1.0, mscale_all_dim=0.7),
    dict(YARN, attention_factor=1.3),
    dict(YARN, factor=None),
    dict(YARN, beta_fast=6, beta_slow=2),
    dict(type="yarn", factor=2.5),
    dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0),
    dict(
        rope_type="llama3",
        factor=4.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8,
        rope_theta=50.0,
    ),
    dict(
        rope_type="longrope",
        short_factor=[1.0, 1.5, 2.0, 2.5],
        long_factor=[2.0, 3.0, 4.0, 5.0],
        original_max_position_embeddings=8,
    ),
    dict(
        rope_type="longrope",
        short_factor=[1.0, 1.5, 2.0],
        long_factor=[2.0, 3.0, 4.0],
        original_max_position_embeddings=30,
        factor=3.0,
    ),
    dict(
        type="longrope",
        short_factor=[1.1] * 5,
        long_factor=[2.0, 3.0, 4.0, 5.0, 6.0],
        original_max_position_embeddings=12,
        attention_factor=1.2,
    ),
    dict(rope_type="proportional", partial_rotary_factor=0.5),
    dict(rope_type="proportional", factor=2.0),
    dict(type="mrope", mrope_section=[1, 2]),
    dict(rope_type="linear", factor=2.0, partial_rotary_factor=0.5),
    dict(rope_type="default", partial_rotary_factor=0.5),
    dict(rope_type=None),
    dict(full_attention=dict(rope_type="default", rope_theta=9.0)),
    dict(rope_type="linear", factor=2.0, mscale_all_dim=1.0),
)
BY_KIND: tuple[dict[str, Any], ...] = (
    dict(full_attention=dict(YARN, rope_theta=100.0), sliding_attention=dict(rope_type="default", rope_theta=30.0)),
    dict(full_attention=dict(rope_type="linear", factor=2.0), sliding_attention=dict(rope_theta=30.0)),
    dict(full_attention=dict(rope_type="default"), sliding_attention=dict(rope_type="linear", factor=2.0)),
    dict(full_attention=dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)),
    dict(sliding_attention=dict(rope_theta=9.0), full_attention=None),
)
TYPES = ("full_attention", "sliding_attention")
OLD_BASES = ("global_rope_theta", "local_rope_theta")
POOL: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"),
    "query_pre_attn_scalar": (1, 9, 2.5),
    "rope_local_base_freq": (50.0, 300),
    "sliding_window_pattern": (1, 2, 3, 0),
    "attn_logit_softcapping": (2.0, 1.5, None),
    "use_bidirectional_attention": (True, False),
    "hidden_act": ("gelu", "swish", "silu", "relu", "gelu_new"),
    "activation_function": ("gelu", "gelu_pytorch_tanh", "relu", "gelu_fast"),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "tie_word_embeddings": (True, False),
    "rms_norm_eps": (0.3, 1e-2, 0, 1),
    "layer_norm_epsilon": (0.3, 1e-2),
    "rope_theta": (100.0, 500, 1e6),
    "partial_rotary_factor": (0.5, 1.0, 0.9),
    "original_max_position_embeddings": (4, 8, 64),
    "max_position_embeddings": (8, 64, 1024),
    "n_positions": (16, 8, 64),
    "num_key_value_heads": (1, 2, 4, 3, 8),
    "head_dim": (8, 10, 6, 7, 16),
    "hidden_size": (24, 40, 30),
    "n_embd": (24, 40),
    "vocab_size": (64, 50),
    "intermediate_size": (16, 31),
    "n_inner": (16, 31),
    "num_hidden_layers": (1, 3),
    "n_layer": (1, 3),
    "num_attention_heads": (2, 8, 1),
    "n_head": (2, 8),
    "sliding_window": (3, 7, 100, 1, 0),
    "use_sliding_window": (True, False),
    "max_window_layers": (0, 1, 2, 28, -1),
    "layer_types": (
        [TYPES[1], TYPES[0]],
        [TYPES[1]] * 2,
        [TYPES[0]] * 2,
        ["attention", TYPES[1]],
        ["linear_attention"] * 2,
        ["full_attention", "linear_attention"],
        [TYPES[0]],
        "full",
    ),
    "num_local_experts": (4, 6, 8, 2),
    "num_experts": (4, 6, 8, 0),
    "num_experts_per_tok": (1, 3, 4, 9),
    "norm_topk_prob": (True, False),
    "decoder_sparse_step": (1, 2, 3, 0),
    "mlp_only_layers": ([], [1], [0, 1], [7], [-1]),
    "moe_intermediate_size": (8, 13),
    "scoring_func": ("softmax", "sigmoid"),
    "topk_method": ("greedy", "noaux_tc"),
    "router_aux_loss_coef": (0.1, 0.0, 1),
    "output_router_logits": (True, False),
    "router_jitter_noise": (0.0, 0.1),
    "attention_dropout": (0.0, 0.1),
    "resid_pdrop": (0.0, 0.2),
    "embd_pdrop": (0.0, 0.2),
    "attn_pdrop": (0.0, 0.2),
    "initializer_range": (0.01, 0.5, 1, 3.0),
    "swiglu_alpha": (1.0, 0.5),
    "swiglu_limit": (0.5, 2.0, 7),
    "n_shared_experts": (0, 2, 3),
    "n_routed_experts": (4, 16),
    "n_group": (2, 1, 8),
    "topk_group": (1, 4, 3),
    "routed_scaling_factor": (1.0, 3.3),
    "kv_lora_rank": (6,),
    "q_lora_rank": (None, 6),
    "qk_rope_head_dim": (4, 8, 5),
    "qk_nope_head_dim": (3,),
    "v_head_dim": (5,),
    "first_k_dense_replace": (0, 2, 5),
    "rope_interleave": (True, False),
    "num_nextn_predict_layers": (0, 1, 2),
    "num_mtp_layers": (0, 1),
    "no_rope_layers": ([1, 0], [0, 0, 1], [1], [], [2, 0], None),
    "no_rope_layer_interval": (1, 2, 4, 0),
    "rotary_dim": (4, 6, None, 7, 12),
    "intermediate_size_mlp": (12, 30),
    "interleave_moe_layer_step": (1, 3, 0),
    "moe_layers": ([0], [0, 2], [], None, [7, 1]),
    "attention_chunk_size": (3, 8, None, 100),
    "attn_temperature_tuning": (True, False),
    "floor_scale": (2, 100),
    "attn_scale": (0.5, 0.0),
    "use_qk_norm": (True, False),
    "hidden_dropout": (0.1, 0.0),
    "use_parallel_residual": (True, False),
    "rotary_emb_base": (100.0, 5000),
    "scale_attn_weights": (True, False),
    "scale_attn_by_inverse_layer_idx": (True, False),
    "reorder_and_upcast_attn": (True, False),
    "add_cross_attention": (False, True),
    "n_ctx": (16,),
    "use_cache": (False,),
    "dtype": ("float16",),
    "torch_dtype": ("bfloat16",),
    "pad_token_id": (0, 5),
    "bos_token_id": (3,),
    "eos_token_id": ([1, 2],),
    "architectures": (["X"],),
    "quantization_config": ({"bits": 4},),
    "pretraining_tp": (2,),
    "per_layer_config": ({"0": {"hidden_act": "gelu"}},),
    "moe_layer_freq": (1, 2),
    "logit_scale": (2.0,),
    "use_alibi": (True,),
    "attn_implementation": ("eager",),
    "aux_loss_alpha": (0.1,),
    "seq_aux": (False,),
    "qk_head_dim": (3,),
    "experts_per_token": (3,),
    "rotary_pct": (0.5,),
    "chunk_size_feed_forward": (4,),
    "return_dict": (False,),
    "is_encoder_decoder": (True,),
    "auto_map": ({"AutoModelForCausalLM": "code.Model"},),
    "num_labels": (5,),
    "tokenizer_class": ("X",),
    "rope_scaling": ROPES,
    "rope_parameters": (*ROPES, *BY_KIND),
    "final_logit_softcapping": (3.0, None),
    "attention_multiplier": (2.0,),
    "top_k": (3,),
    "local_attention": (4, 8, 5, 1, 100),
    "global_attn_every_n_layers": (1, 2, 3, 0),
    "global_rope_theta": (100.0, 7),
    "local_rope_theta": (50.0,),
    "norm_bias": (True, False),
    "decoder_bias": (False, True),
    "classifier_bias": (True,),
    "classifier_activation": ("gelu_new", "relu"),
    "norm_eps": (1e-3, 0.1),
    "layer_norm_eps": (1e-3, 0.1),
    "mlp_dropout": (0.1, 0.0),
    "embedding_dropout": (0.1,),
    "hidden_dropout_prob": (0.0, 0.3),
    "attention_probs_dropout_prob": (0.0, 0.3),
    "type_vocab_size": (1, 3),
    "is_decoder": (True, False),
    "position_embedding_type": ("relative_key", "absolute"),
    "sparse_prediction": (True,),
    "attention_k_eq_v": (True, False),
    "hidden_size_per_layer_input": (0, 4),
    "vocab_size_per_layer_input": (70, 40),
    "top_k_experts": (1, 3, None, 5),
    "num_kv_shared_layers": (0, 1, 3, 4),
    "enable_moe_block": (True, False),
    "use_double_wide_mlp": (True, False),
    "global_head_dim": (8, 10, 7),
    "num_global_key_value_heads": (1, 2, None, 3),
    "d_kv": (8, 6, 7),
    "d_ff": (16, 31),
    "d_model": (24, 40),
    "num_layers": (1, 3),
    "num_heads": (2, 8, 3),
    "num_decoder_layers": (1, 2, None),
    "relative_attention_num_buckets": (4, 6, 16, 7, 2),
    "relative_attention_max_distance": (20, 6, 3),
    "feed_forward_proj": ("relu", "gated-gelu", "gated-silu", "gelu", "gated-relu"),
    "dense_act_fn": ("relu", "silu"),
    "is_gated_act": (True, False),
    "dropout_rate": (0.0, 0.3),
    "initializer_factor": (0.5, 2.0),
    "scale_decoder_outputs": (True, False, None),
    "decoder_start_token_id": (0, 3, None),
    "classifier_pooling": ("mean",),
    "linear_num_key_heads": (1, 4, 2, 3),
    "linear_num_value_heads": (2, 8, 4, 3),
    "linear_key_head_dim": (4, 7),
    "linear_value_head_dim": (8, 3),
    "linear_conv_kernel_dim": (2, 3, 4, 1),
    "linear_allow_neg_eigval": (True, False),
    "full_attention_interval": (1, 2, 3, 0),
    "shared_expert_intermediate_size": (8, 13, 0),
    "state_size": (4, 9),
    "ssm_state_size": (4, 9),
    "conv_kernel": (2, 3, 1),
    "n_groups": (1, 4, 3),
    "expand": (1, 3),
    "use_bias": (True, False),
    "use_conv_bias": (True, False),
    "time_step_limit": ([0.1, 0.9], [0.0, 0.5], [1.0], [0.5, 0.1]),
    "time_step_min": (0.5, 0.01),
    "layers_block_type": (
        ["linear_attention", "full_attention"],
        ["mlp", "moe", "linear_attention"],
        ["mamba", "attention", "mlp"],
        ["conv"],
        [],
    ),
    "hybrid_override_pattern": ("M-*E", "M*", "X"),
    "mlp_hidden_act": ("relu2", "silu", "relu"),
    "mamba_hidden_act": ("silu", "gelu"),
    "mamba_num_heads": (4, 8, 5),
    "mamba_head_dim": (3, 8),
    "moe_latent_size": (12, None),
    "moe_shared_expert_intermediate_size": (8, 20),
    "mamba_d_ssm": (48, 12, None, 25),
    "mamba_expand": (3,),
    "mamba_n_heads": (4, 12),
    "mamba_d_head": ("auto", 4, 8),
    "mamba_n_groups": (1, 3, 4),
    "mamba_d_state": (3, 8),
    "mamba_d_conv": (2, 3),
    "mamba_conv_bias": (False,),
    "mamba_proj_bias": (True,),
    "projectors_bias": (True,),
    "mamba_rms_norm": (True, False),
    "mamba_norm_before_gate": (True, False),
    "mamba_use_mlp": (False, True),
    "attn_layer_indices": ([0],),
    "embedding_multiplier": (0.3, 4),
    "lm_head_multiplier": (0.1, 0),
    "key_multiplier": (2.5, -1.0),
    "attention_in_multiplier": (0.7,),
    "attention_out_multiplier": (0.7, 2),
    "ssm_in_multiplier": (0.7,),
    "ssm_out_multiplier": (0.7, 2),
    "ssm_multipliers": ([0.5, 2.0, 1.0, 0.25, 4.0], [1.0, 2.0], None),
    "mlp_multipliers": ([0.5, 1.5], [1.0], None),
}
ANY = (None, "x", -1, 0, 1, 1.5, True, False, [], {}, [1])
# what is refused although transformers reads it, and why
REASONS: dict[str, str] = {
    "a size is missing": r"(vocab_size|hidden_size|intermediate_size|num_hidden_layers|num_attention_heads|n_embd|n_layer|n_head|d_model|d_ff|num_layers|num_heads|(en|de)coder_(layers|attention_heads|ffn_dim)) is missing",  # noqa: E501
    "a value of another type": r"\(it must be ",
    "a value beyond what trains (zero widths, windows or epsilons, an odd head)": r"must be (an integer|a "
    r"number|even|numbers|two numbers|> |>= |<= |true)",
    "an activation or dropout that we do not have": r"(hidden_act|mamba_hidden_act|mlp_hidden_act|hidden_activation|classifier_activation|mlp_dropout|embedding_dropout|activation_function|attention_dropout|activation_dropout|dropout|coder_layerdrop|router_jitter_noise|resid_pdrop|embd_pdrop)=",  # noqa: E501
    "GPT-2 scores scaled otherwise, or cross attention": r"(scale_attn_weights|scale_attn_by_inverse_layer_idx|add_cross_attention)=",  # noqa: E501
    "keys of DeepSeek's own code that transformers ignores": r"(scoring_func|topk_method|moe_layer_freq|attention_bias)=",  # noqa: E501
    "rope_scaling would drop the base of rope_parameters": r"of rope_parameters beside rope_scaling",
    "rope parameters by kind of layer, of one rotary embedding": r"\(supported: one rotary embedding for all layers\)",
    "weights that the config has no place for, or lacks": r"does not fit the model|has (no|a) (lm_head|embed_out)",
    "quantised or heterogeneous": r"(quantization_config|per_layer_config)=",
    "rope parameters that transformers only warns of": r"rope_type|partial_rotary_factor|original_max_position|high_freq_factor|short_factor",  # noqa: E501
    "a Whisper whose encoder and decoder have other heads or widths": r"decoder_(attention_heads|ffn_dim)=",
    "a Whisper whose embeddings are scaled, or whose frames are masked": r"(scale_embedding|apply_spec_augment)=",
    "a text that begins with a token beyond the vocabulary": r"decoder_start_token_id=",
    "T5's MLPs other than relu and gated-gelu": r"feed_forward_proj=",
    "T5's buckets of which not one is of several distances": r"must be beyond the distances that have a bucket each",
    "a Gemma 4 with inputs of each layer, shared keys or experts": r"(hidden_size_per_layer_input|num_kv_shared_layers|enable_moe_block)=",  # noqa: E501
    "a base beside Gemma 4's two rotary embeddings": r" beside rope_parameters \(of ",
    "no layer has experts": r"must leave a layer with experts",
    "heads that do not divide": r"must divide|must be a multiple|num_key_value_heads=|head_dim=",
    "modules of multi-token prediction": r"num_nextn_predict_layers",
    "experts or groups that do not fit": r"must be <= ",
    "an encoder made a decoder, or with scaled angles": r"(is_decoder|position_embedding_type|rope_scaling)=",
    "a Gemma that reads both ways, or caps that Gemma 3 reads and does not use": r"(use_bidirectional_attention|attn_logit_softcapping)=",  # noqa: E501
    "an encoder whose head is not its embedding": r"tie_word_embeddings=False \(supported: True\)",
    "layers without rotary embedding by other numbers than 0 and 1": r"no_rope_layers=",
    "layer types that we do not have": r"layer_types=|layer_types with|one kind per layer|layers_block_type",
    "what published hybrids have one form of, or transformers does not read": r"(mamba_use_mlp|attn_layer_indices|n_shared_experts|mlp_bias)=|tie_word_embeddings=True \(supported: False\)",  # noqa: E501
}


@dataclass(frozen=True)
class Outcome:
    kind: str  # equal, both refuse, we refuse, only we read, different, traceback
    why: str = ""


class _Wide:
    """torch with float64 in the place of float32."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def wide() -> Iterator[None]:
    """transformers computes norms, angles and routers in float32 whatever the weights are: here in float64."""
    from transformers import modeling_rope_utils

    import_families()
    names = [n for n in sys.modules if re.fullmatch(r"transformers\.models\.(\w+)\.modeling_\1", n)]
    modules = [modeling_rope_utils, *(sys.modules[n] for n in names if hasattr(sys.modules[n], "torch"))]
    before = [module.torch for module in modules]
    narrow = torch.Tensor.float
    try:
        for module in modules:
            module.torch = _Wide()
        torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
        yield
    finally:
        torch.Tensor.float = narrow  # type: ignore[method-assign]
        for module, own in zip(modules, before):
            module.torch = own


@cache
def import_families() -> None:
    from transformers import AutoConfig

    for family in FAMILIES:
        with torch.device("meta"):
            auto_class(family).from_config(AutoConfig.for_model(family, **FAMILIES[family]))


def auto_class(family: str) -> Any:
    """The class of transformers that makes models of a family with a head over the vocabulary."""
    import transformers

    if family in ENCODER_DECODERS:
        return transformers.AutoModelForSeq2SeqLM
    if family in HEARING:
        return transformers.AutoModelForSpeechSeq2Seq
    if family in PICTURED:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForMaskedLM if family in ENCODERS else transformers.AutoModelForCausalLM


def base_config(family: str, old: bool) -> dict[str, Any]:
    """config.json as transformers 5 saves it, or with the rotary embedding as older ones did."""
    import transformers

    found = transformers.AutoConfig.for_model(family, **deepcopy(FAMILIES[family])).to_dict()
    drop = {"transformers_version", "id2label", "label2id", "_name_or_path"}
    found = {k: v for k, v in found.items() if k not in drop and not k.startswith("summary_")}
    if old and "rope_parameters" in found and family != "gemma4_text":  # of which no older versions were
        rope = found.pop("rope_parameters")
        if "rope_theta" not in rope:  # one for each kind of layer
            bases = [rope[kind]["rope_theta"] for kind in TYPES]
            names = OLD_BASES if family == "modernbert" else ("rope_theta", "rope_local_base_freq")
            return json.loads(json.dumps(found | dict(zip(names, bases)), default=str))
        found["rope_theta"] = rope.pop("rope_theta")
        found["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return json.loads(json.dumps(found, default=str))


SKIPPED = {("mamba2", "rescale_prenorm_residual")}
"""Of how new weights are drawn; transformers 5.23 divides those it loads, too, by the root of the number of layers."""


def mutate(config: dict[str, Any], dice: random.Random) -> list[str]:
    """Change one to three keys; what was done, in words."""
    done = []
    for _ in range(dice.choices((1, 2, 3), (6, 3, 1))[0]):
        key = dice.choice(sorted(config)) if dice.random() < 0.5 else dice.choice(sorted(POOL))
        if key == "model_type" or (config["model_type"], key) in SKIPPED:
            continue
        if key in config and dice.random() < 0.25:
            del config[key]
            done.append(f"del {key}")
            continue
        value = deepcopy(dice.choice(POOL[key] if key in POOL and dice.random() < 0.85 else ANY))
        if isinstance(value, dict) and value and dice.random() < 0.25:
            inner = dice.choice(sorted(value))
            if dice.random() < 0.5:
                del value[inner]
            else:
                value[inner] = dice.choice(ANY)
        config[key] = value
        done.append(f"{key}={value!r}")
    return done


def randomise(model: Any) -> None:
    """Weights of the size that makes attention sharp; norms, biases, sinks and routers' biases all random."""
    with torch.no_grad():
        for name, p in [
            *model.named_parameters(),
            *((n, b) for n, b in model.named_buffers() if n.endswith("correction_bias")),
        ]:
            p.normal_(0.0, 0.3).add_(1.0 if p.dim() == 1 and "norm" in name else 0.0)


def write_weights(config: dict[str, Any], folder: Path, seed: int) -> bool:
    """Random weights that fit a config as transformers reads it. False: it refuses the config, or the model is too
    large to be tried."""
    from transformers import AutoConfig

    (folder / "config.json").write_text(json.dumps(config))
    try:
        theirs = AutoConfig.from_pretrained(folder)
        made_by = auto_class(theirs.model_type)
        with torch.device("meta"):
            size = sum(p.numel() for p in made_by.from_config(theirs).parameters())
        if size > LARGEST:
            return False
        torch.manual_seed(seed)
        model = made_by.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float64)
        randomise(model)
        model.save_pretrained(folder)
    except Exception:  # whatever a config does to it: that is what is tried
        return False
    (folder / "config.json").write_text(json.dumps(config))
    return True


def change_head(folder: Path, dice: random.Random) -> str:
    """The head and the embedding in the files: as saved, one more, one less, a copy."""
    tensors = load_file(folder / "model.safetensors")
    embedding = next(
        (n for n in tensors if n.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight", "shared.weight"))),
        None,
    )
    if embedding is None or dice.random() < 0.7:
        return ""
    head = "embed_out.weight" if "embed_in" in embedding else HEAD
    what = dice.choice(("copy", "other", "none", "alone"))
    if what == "none":
        tensors.pop(head, None)
    elif what == "alone":
        tensors[head] = tensors.pop(embedding)
    else:
        tensors[head] = tensors[embedding] + (0.0 if what == "copy" else torch.randn_like(tensors[embedding]) * 0.1)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return f"head: {what}"


def tokens_of(vocab: int, length: int = SEQ) -> torch.Tensor:
    return torch.randint(0, min(vocab, 50), (BATCH, length), generator=torch.Generator().manual_seed(3))


def their_logits(folder: Path) -> torch.Tensor | str:
    """(BATCH x SEQ, vocab), or why there are none."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            if sum(p.numel() for p in auto_class(config.model_type).from_config(config).parameters()) > LARGEST:
                return "too large to be tried"
        model, info = auto_class(config.model_type).from_pretrained(
            folder,
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        parameters = dict(model.named_parameters())
        missing = [n for n in info["missing_keys"] if n not in parameters or parameters[n].numel()]
        if missing:
            return f"random weights for {missing[0]}"
        cached = {} if config.model_type in ENCODERS else {"use_cache": False}
        texts = {"input_ids": tokens_of(VOCAB)}
        if config.model_type in ENCODER_DECODERS:
            texts = {"input_ids": tokens_of(VOCAB, ENCODER_SEQ), "decoder_input_ids": tokens_of(VOCAB)}
        if config.model_type in HEARING:
            frames = frames_of(config.max_source_positions, config.num_mel_bins).transpose(1, 2).double()
            texts = {"input_features": frames, "decoder_input_ids": tokens_of(VOCAB)}
        out = model.eval()(**texts, return_dict=True, **cached).logits
    except Exception as error:  # whatever a config does to it: that is what is tried
        return f"{type(error).__name__}: {error}"
    return out.detach().flatten(0, 1) if out.isfinite().all() else "not finite"


def our_logits(folder: Path, wanted: str | None = None) -> torch.Tensor:
    """The same of ours, on one process; wanted: as in read_folder. PhalanxError: refused."""
    model = read_folder(folder, wanted).model
    problems = check(model, tp=1, seq_length=SEQ)
    if problems:
        raise ConfigError(problems)
    room = {stream.name: stream.largest for stream in model.needs_room}
    plan = make_plan(
        Run(
            model=model,
            train=TrainConfig(steps=1, global_batch=BATCH, micro_batch=BATCH, seq_length=SEQ, precision="fp64"),
            task=task_of(model),
            data=DataConfig(mock=True, packing="online", room=room) if room else DataConfig(),
        ),
        1,
    )
    mesh = Mesh(plan.grid, 0)
    buffers, stages = build_for_inference(plan, mesh)
    load_weights(folder, buffers, mesh)
    if tokens_of(VOCAB).max() >= model.vocab_size:
        raise CheckpointError("must be <= vocab_size")
    batch = batch_of(SEQ)
    if model.numbers_beside:
        batch = replace(batch, beside={SOUND: sound_of(model)})
    elif model.reads_beside:
        batch = replace(batch, beside={ENCODER: batch_of(ENCODER_SEQ)})
    stages.finish = lambda head, x, _: head.logits(x, torch.arange(batch.num_tokens))
    stages.begin([batch], seed=None)
    with torch.no_grad():
        execute(
            [i for i in plan.proved_program(1, backward=False).lists[0] if type(i) in stages.handlers()],
            stages.handlers(),
        )
    stages.end()
    return stages.outputs[0]


def task_of(model: ModelConfig) -> TaskConfig:
    """The task whose batches have what the model reads."""
    if not model.reads_beside:
        return TaskConfig()
    if model.numbers_beside:
        heard: TaskConfig = find_objective("transcribe").Config(name="transcribe")
        return heard
    config: TaskConfig = find_objective("span").Config(name="span", encoder_length=ENCODER_SEQ)
    return config


def frames_of(rows: int, bands: int) -> torch.Tensor:
    """(BATCH, frames, bands) of recordings, two frames for a row."""
    return torch.randn(BATCH, 2 * rows, bands, generator=torch.Generator().manual_seed(4))


def sound_of(model: ModelConfig) -> Batch:
    """A recording for each sequence."""
    (stream,) = model.numbers_beside
    frames = frames_of(stream.largest, stream.width // FRAMES)
    rows = torch.cat([torch.from_numpy(frame_rows(each.numpy())) for each in frames])
    return replace(batch_of(stream.largest), tokens=torch.zeros(len(rows), dtype=torch.int64), values=rows)


def batch_of(length: int) -> Batch:
    tokens = tokens_of(VOCAB, length).flatten()
    zeros = torch.zeros_like(tokens)
    return Batch(tokens, zeros, torch.arange(length).repeat(BATCH), zeros, BATCH, length)


def trial(seed: int, folder: Path) -> tuple[str, list[str], Outcome]:
    """(family, what was changed, what came of it)."""
    dice = random.Random(seed)
    family = sorted(FAMILIES)[seed % len(FAMILIES)]
    config = base_config(family, old=dice.random() < 0.5)
    original = deepcopy(config)
    done = mutate(config, dice)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if dice.random() < 0.25 or not write_weights(config, folder, seed):
        done.append("weights of the unchanged config")
        if not write_weights(original, folder, seed):
            raise RuntimeError(f"transformers refuses its own config of {family}")
    done.append(change_head(folder, dice))
    (folder / "config.json").write_text(json.dumps(config))
    return family, [d for d in done if d], outcome(folder)


def outcome(folder: Path) -> Outcome:
    with wide():
        theirs = their_logits(folder)
    return compared(theirs, lambda: our_logits(folder), REASONS)


def compared(theirs: torch.Tensor | str, read: Callable[[], torch.Tensor], reasons: dict[str, str]) -> Outcome:
    """What transformers finds beside what `read` does. reasons: texts of refusals that are meant."""
    try:
        ours = read()
    except PhalanxError as error:
        if isinstance(theirs, str):
            return Outcome("both refuse", str(error))
        why = next((reason for reason, text in reasons.items() if re.search(text, str(error))), None)
        return Outcome("we refuse", why) if why else Outcome("refused without a stated reason", str(error))
    except Exception as error:  # what a user would see as a traceback
        return Outcome("traceback", f"{type(error).__name__}: {error}")
    if isinstance(theirs, str):
        return Outcome("different" if theirs.startswith("random weights") else "only we read", theirs)
    if ours.shape != theirs.shape:
        return Outcome("different", f"{tuple(ours.shape)} instead of {tuple(theirs.shape)}")
    off = float((ours - theirs).abs().max() / theirs.abs().max())
    return Outcome("equal") if off <= TIMES else Outcome("different", f"logits off by {off:.2g}")


BAD = ("different", "traceback", "refused without a stated reason")


def soak(
    count: int, first: int = 0, tried: Callable[[int, Path], tuple[str, list[str], Outcome]] = trial
) -> tuple[Counter[tuple[str, str]], Counter[str], list[str]]:
    """Trials of seeds from `first` on: (family, outcome) and reasons by number, and every bad one in a line."""
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity(50)
    transformers.logging.disable_progress_bar()
    counts, reasons, bad = Counter[tuple[str, str]](), Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as temporary:
        for seed in range(first, first + count):
            family, done, found = tried(seed, Path(temporary) / "folder")
            counts[family, found.kind] += 1
            if found.kind == "we refuse":
                reasons[found.why] += 1
            if found.kind in BAD:
                bad.append(f"seed {seed} {family}: {'; '.join(done)}: {found.kind}: {found.why[:400]}")
                print(bad[-1], flush=True)
    return counts, reasons, bad


def report(counts: Counter[tuple[str, str]], reasons: Counter[str]) -> None:
    kinds = sorted({kind for _, kind in counts})
    for family in sorted({family for family, _ in counts}):
        print(family, {kind: counts[family, kind] for kind in kinds})
    print("all", {kind: sum(n for (_, k), n in counts.items() if k == kind) for kind in kinds})
    for reason, number in reasons.most_common():
        print(f"  {number:5d} {reason}")


def main(count: int, first: int = 0) -> None:
    torch.set_num_threads(1)
    counts, reasons, _ = soak(count, first)
    report(counts, reasons)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
