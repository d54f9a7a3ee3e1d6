# ruff: noqa: E501 (the tables are easier to read with a rule per line)

"""Reading configs and their rules: every rule has a failing example, and every suggestion makes its problem go away."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.base import tree
from phalanx.base.errors import CheckpointError, ConfigError, DataError, Problem
from phalanx.config.device_check import Facts
from phalanx.config.limits import check_limits
from phalanx.config.read import explain, load_run, read, recipes
from phalanx.config.run import Run
from phalanx.config.write import save_run, to_dict, to_yaml
from phalanx.forecast import check as checks
from phalanx.forecast.check import check, raise_problems

LLAMA = {
    "family": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
GPT2 = {"family": "gpt2", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
TRAIN = {"steps": 100, "global_batch": 16, "micro_batch": 2, "seq_length": 64}
BASE = {"model": LLAMA, "train": TRAIN, "data": {"mock": True}}
GPT2_BASE = {**BASE, "model": GPT2}
MIXTRAL = "model.family=mixtral model.num_local_experts=8"
QWEN3_MOE = "model.family=qwen3_moe model.num_experts=8 model.moe_intermediate_size=32 model.num_experts_per_tok=2"
SMOLLM3 = "model.family=smollm3"
GEMMA4 = "model.family=gemma4_text"
GEMMA2 = "model.family=gemma2"
LLAMA4 = "model.family=llama4_text model.intermediate_size_mlp=96"
MINIMAX = "model.family=minimax_m2 model.num_local_experts=8"
NEOX = "model.family=gpt_neox"
OSS = "model.family=gpt_oss model.num_local_experts=8"
FP8 = "train.precision=bf16 train.fp8.recipe"
RECIPES = Path(__file__).parents[2] / "recipes"
IN_BACKWARD = "optim.in_backward=true optim.clip_by=bucket train.global_batch=2"
OUTSIDE = str(Path(__file__).parents[1] / "outside")
if OUTSIDE not in sys.path:
    sys.path.append(OUTSIDE)
MATRIX = "whole_matrix.orthogonal:OrthogonalMomentum"
LATENT = "model.family=deepseek_v3 model.first_k_dense_replace=4"
GROUPED = "model.family=deepseek_v3 model.first_k_dense_replace=1 model.n_routed_experts=8 model.num_experts_per_tok=2 model.n_group=4 model.topk_group=2"
LAPTOP = Facts(files=False)


def problems(overrides: list[str], facts: Facts = LAPTOP, base: dict = BASE) -> list[Problem]:
    return check(load_run(None, overrides, base), facts)


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# overrides, world size, field, value, part of the rule, names in `because`, suggestions
CHATS = "data.chats=a.jsonl data.mock=false data.split=100,0,0 task.name=sft"
RULES = [
    # a part of each head rotated
    (f"{NEOX} model.partial_rotary_factor=0", 1, "model.partial_rotary_factor", 0, "(0, 1]", set(), (0.5, 1.0)),
    (f"{NEOX} model.partial_rotary_factor=1.5", 1, "model.partial_rotary_factor", 1.5, "(0, 1]", set(), (0.5, 1.0)),
    (
        f"{NEOX} model.partial_rotary_factor=0.2",
        1,
        "model.partial_rotary_factor",
        0.2,
        "must give an even number of rotated features",
        {"rotated features", "head_dim"},
        (0.125, 0.25),
    ),
    (
        f"{NEOX} model.head_dim=8 model.num_key_value_heads=2",
        1,
        "model.num_key_value_heads",
        2,
        "has no effect without another family",
        set(),
        (None,),
    ),
    (
        f"{NEOX} model.rms_norm_eps=0.1",
        1,
        "model.rms_norm_eps",
        0.1,
        "has no effect without another family",
        set(),
        (1e-5,),
    ),
    (f"{NEOX} model.layer_norm_eps=0", 1, "model.layer_norm_eps", 0, "(0, inf)", set(), (1e-5,)),
    (f"{NEOX} model.dropout=1", 1, "model.dropout", 1, "[0, 1)", set(), (0.0, 0.1)),
    # kinds of layers of Llama 4
    (
        f"{LLAMA4} model.moe_layers=[1,4]",
        1,
        "model.moe_layers",
        (1, 4),
        "must be numbers of layers",
        {"model.num_hidden_layers"},
        ((1,), None),
    ),
    (
        f"{LLAMA4} model.moe_layers=[1] model.interleave_moe_layer_step=2",
        1,
        "model.interleave_moe_layer_step",
        2,
        "has no effect without model.moe_layers=null",
        {"model.moe_layers"},
        (1,),
    ),
    (
        f"{LLAMA4} model.interleave_moe_layer_step=5",
        1,
        "model.interleave_moe_layer_step",
        5,
        "must leave a layer with experts",
        {"model.num_hidden_layers"},
        (1,),
    ),
    (f"{LLAMA4} model.interleave_moe_layer_step=0", 1, "model.interleave_moe_layer_step", 0, ">= 1", set(), (1, 2)),
    (
        f"{LLAMA4} model.moe_layers=[]",
        1,
        "model.moe_layers",
        (),
        "must leave a layer with experts",
        {"model.num_hidden_layers"},
        (None,),
    ),
    (f"{LLAMA4} model.attention_chunk_size=0", 1, "model.attention_chunk_size", 0, ">= 1", set(), (1, 2)),
    (f"{LLAMA4} model.attn_scale=-1", 1, "model.attn_scale", -1, "[0, inf)", set(), (0.1,)),
    (
        f"{LLAMA4} model.no_rope_layer_interval=1 model.attention_chunk_size=16",
        1,
        "model.attention_chunk_size",
        16,
        "has no effect without a layer with rotary embedding",
        {"model.no_rope_layer_interval"},
        (8192,),
    ),
    (
        f"{LLAMA4} model.no_rope_layer_interval=5 model.floor_scale=16",
        1,
        "model.floor_scale",
        16,
        "has no effect without a layer without rotary embedding",
        {"model.no_rope_layer_interval"},
        (8192,),
    ),
    (
        f"{LLAMA4} model.attn_temperature_tuning=false model.attn_scale=0.3",
        1,
        "model.attn_scale",
        0.3,
        "has no effect without model.attn_temperature_tuning",
        {"model.attn_temperature_tuning"},
        (0.1,),
    ),
    (
        f"{LLAMA4} model.rope_scaling={{rope_type: yarn, factor: 4, original_max_position_embeddings: 32}}",
        1,
        "model.rope_scaling.rope_type",
        "yarn",
        "must keep the lengths of queries and keys",
        {"model.use_qk_norm"},
        ("linear",),
    ),
    (
        f"{MINIMAX} model.router_bias_update_rate=-1",
        1,
        "model.router_bias_update_rate",
        -1,
        "[0, inf)",
        set(),
        (0.001,),
    ),
    # layers without rotary embedding
    (f"{GEMMA2} model.query_pre_attn_scalar=0", 1, "model.query_pre_attn_scalar", 0, ">= 1", set(), (1, 2)),
    (f"{GEMMA2} model.attn_logit_softcapping=0", 1, "model.attn_logit_softcapping", 0, "(0, inf)", set(), (50.0, None)),
    (
        f"{GEMMA2} model.final_logit_softcapping=-1",
        1,
        "model.final_logit_softcapping",
        -1,
        "(0, inf)",
        set(),
        (30.0, None),
    ),
    (
        f"{GEMMA2} model.hidden_size=66",
        1,
        "model.hidden_size",
        66,
        "must be a multiple of num_attention_heads",
        {"model.num_attention_heads"},
        (64, 68),
    ),
    (
        "model.family=olmo3 model.rope_local_base_freq=0",
        1,
        "model.rope_local_base_freq",
        0,
        "(0, inf)",
        set(),
        (10000.0,),
    ),
    (
        "model.family=phi3 model.rope_scaling.rope_type=linear model.rope_scaling.factor=2.0",
        1,
        "model.rope_scaling.rope_type",
        "linear",
        "must be longrope",
        {"model.family"},
        (),
    ),
    (f"{SMOLLM3} model.no_rope_layer_interval=0", 1, "model.no_rope_layer_interval", 0, ">= 1", set(), (1, 2)),
    (
        f"{SMOLLM3} model.no_rope_layers=[1,0]",
        1,
        "model.no_rope_layers",
        (1, 0),
        "must have a 0 or a 1 for each layer",
        {"model.num_hidden_layers"},
        (None,),
    ),
    (
        f"{SMOLLM3} model.no_rope_layers=[1,0,1,2]",
        1,
        "model.no_rope_layers",
        (1, 0, 1, 2),
        "must have a 0 or a 1 for each layer",
        {"model.num_hidden_layers"},
        (None,),
    ),
    (
        f"{SMOLLM3} model.no_rope_layers=[1,0,1,0] model.no_rope_layer_interval=2",
        1,
        "model.no_rope_layer_interval",
        2,
        "has no effect without model.no_rope_layers=null",
        {"model.no_rope_layers"},
        (4,),
    ),
    (
        f"{SMOLLM3} model.no_rope_layer_interval=5 model.sliding_window=8",
        1,
        "model.sliding_window",
        8,
        "has no effect without a layer without rotary embedding",
        {"model.no_rope_layer_interval"},
        (None,),
    ),
    # chats
    (
        "data.chats=a.jsonl data.mock=false data.tokenizer=bytes",
        1,
        "data.chats",
        ("a.jsonl",),
        "needs an objective that trains on chats",
        {"task.name"},
        ((),),
    ),
    (
        "data.paths=a data.mock=false task.name=sft",
        1,
        "data.chats",
        (),
        "is required: files of chats",
        {"task.name"},
        (),
    ),
    (
        f"{CHATS} data.tokenizer=null",
        1,
        "data.tokenizer",
        None,
        "is required with data.chats",
        {"data.chats"},
        ("bytes",),
    ),
    (
        f"{CHATS} data.tokenizer=bytes data.packing=online",
        1,
        "data.packing",
        "online",
        "has no effect with data.chats",
        {"data.chats"},
        ("off",),
    ),
    (
        f"{CHATS} data.tokenizer=bytes data.document_attention=false",
        1,
        "data.document_attention",
        False,
        "must be true with data.chats",
        {"data.chats"},
        (True,),
    ),
    (
        "data.template=t.jinja",
        1,
        "data.template",
        "t.jinja",
        "has no effect without data.chats",
        {"data.chats"},
        (None,),
    ),
    ("data.bad_chats=skip", 1, "data.bad_chats", "skip", "has no effect without data.chats", {"data.chats"}, ("stop",)),
    ("data.too_long=cut", 1, "data.too_long", "cut", "has no effect without data.chats", {"data.chats"}, ("stop",)),
    (f"{CHATS} data.paths=b", 1, "data.chats", ("a.jsonl",), "excludes data.paths", {"data.paths"}, ((),)),
    # world and tensor parallelism (rows 1, 2, 4, 5)
    (
        "layout.tp=3 model.num_attention_heads=12 model.hidden_size=96 train.micro_batch=3 train.global_batch=24",
        8,
        "layout.tp",
        3,
        "must divide world_size",
        {"world_size"},
        (2, 4),
    ),
    (
        "layout.tp=4 layout.pp=4",
        8,
        "layout.pp",
        4,
        "tp * pp must divide world_size",
        {"tp * pp", "layout.tp", "world_size"},
        (2,),
    ),
    ("layout.cp=3", 8, "layout.cp", 3, "must divide world_size", {"world_size"}, (2, 4)),
    (
        "layout.cp_attention=ring",
        1,
        "layout.cp_attention",
        "ring",
        "has no effect without cp > 1",
        {"layout.cp"},
        ("auto",),
    ),
    ("layout.cp_ulysses=2", 1, "layout.cp_ulysses", 2, "has no effect without cp > 1", {"layout.cp"}, (1,)),
    (
        "layout.cp_degree=dynamic",
        1,
        "layout.cp_degree",
        "dynamic",
        "has no effect without cp > 1",
        {"layout.cp"},
        ("fixed",),
    ),
    ("layout.cp=4 layout.cp_ulysses=3", 4, "layout.cp_ulysses", 3, "must divide cp", {"layout.cp"}, (2, 4)),
    (
        "model.num_attention_heads=16 model.num_key_value_heads=4 layout.cp=4 layout.tp=2 layout.cp_ulysses=4",
        8,
        "layout.cp_ulysses",
        4,
        "must divide the number of key-value heads",
        {"key-value heads of model", "layout.tp"},
        (2,),
    ),
    (
        "layout.cp=2 layout.cp_ulysses=2 layout.cp_attention=ring",
        2,
        "layout.cp_attention",
        "ring",
        "has no effect without cp_ulysses < cp",
        {"layout.cp_ulysses", "layout.cp"},
        ("auto",),
    ),
    (
        "model.family=gpt2 model.attention_dropout=0.1 layout.cp=2 layout.cp_attention=ring",
        2,
        "layout.cp_attention",
        "ring",
        "has no dropout of probabilities",
        {"model.attention_dropout"},
        ("auto", "allgather"),
    ),
    ("layout.cp=0", 1, "layout.cp", 0, ">= 1", set(), (1,)),
    (
        "layout.tp=2 layout.cp=4 layout.pp=2",
        8,
        "layout.cp",
        4,
        "tp * cp * pp must divide world_size",
        {"tp * cp * pp", "layout.tp", "layout.pp", "world_size"},
        (2,),
    ),
    ("layout.cp=4 train.seq_length=7", 4, "train.seq_length", 7, "two chunks of a sequence", {"layout.cp"}, (8,)),
    (
        "layout.cp=4 layout.tp=2 train.seq_length=1004 train.micro_batch=1",
        8,
        "train.seq_length",
        1004,
        "a rank's tokens of each sequence",
        {"train.micro_batch", "layout.tp", "layout.cp"},
        (1000, 1008),
    ),
    ("layout.tp=0", 1, "layout.tp", 0, ">= 1", set(), (1,)),
    ("layout.tp=-1", 1, "layout.tp", -1, ">= 1", set(), (1,)),
    ("layout.pp=0", 1, "layout.pp", 0, ">= 1", set(), (1,)),
    (
        "model.num_attention_heads=12 model.hidden_size=96 layout.tp=8",
        8,
        "layout.tp",
        8,
        "must divide num_attention_heads",
        {"model.num_attention_heads"},
        (4,),
    ),
    (
        "model.num_attention_heads=12 model.hidden_size=96 model.num_key_value_heads=6 layout.tp=4",
        4,
        "layout.tp",
        4,
        "must divide num_key_value_heads or be a multiple",
        {"model.num_key_value_heads"},
        (2,),
    ),
    (
        "model.intermediate_size=2 layout.tp=4",
        4,
        "layout.tp",
        4,
        "must be <= intermediate_size",
        {"model.intermediate_size"},
        (2,),
    ),
    ("model.vocab_size=2 layout.tp=4", 4, "layout.tp", 4, "must be <= vocab_size", {"model.vocab_size"}, (2,)),
    # shapes (6, 8, 9)
    (
        "model.num_attention_heads=12 model.hidden_size=96 model.num_key_value_heads=5",
        1,
        "model.num_key_value_heads",
        5,
        "must divide num_attention_heads",
        {"model.num_attention_heads"},
        (4, 6),
    ),
    (
        "model.hidden_size=100 model.num_attention_heads=12",
        1,
        "model.hidden_size",
        100,
        "must be a multiple of num_attention_heads unless head_dim is set",
        {"model.num_attention_heads"},
        (96, 120),
    ),
    ("model.head_dim=15", 1, "model.head_dim", 15, "must be even", set(), (14, 16)),
    (
        "model.hidden_size=60",
        1,
        "model.hidden_size",
        60,
        "even head_dim",
        {"head_dim", "model.num_attention_heads"},
        (56, 64),
    ),
    ("model.num_hidden_layers=0", 1, "model.num_hidden_layers", 0, ">= 1", set(), (1, 2)),
    (
        "model.rope_scaling={factor: 8, low_freq_factor: 4, high_freq_factor: 1, original_max_position_embeddings: 64}",
        1,
        "model.rope_scaling.high_freq_factor",
        1,
        "must be >= low_freq_factor",
        {"model.rope_scaling.low_freq_factor"},
        (16,),
    ),
    (
        "model.rope_scaling={factor: 0, low_freq_factor: 1, high_freq_factor: 4, original_max_position_embeddings: 64}",
        1,
        "model.rope_scaling.factor",
        0,
        "(0, inf)",
        set(),
        (8.0,),
    ),
    (
        "model.rope_scaling={rope_type: yarn, factor: 2}",
        1,
        "model.rope_scaling.original_max_position_embeddings",
        None,
        "is needed by rope_type yarn",
        {"model.rope_scaling.rope_type"},
        (8192,),
    ),
    (
        "model.rope_scaling={rope_type: dynamic}",
        1,
        "model.rope_scaling.factor",
        None,
        "is needed by rope_type dynamic",
        {"model.rope_scaling.rope_type"},
        (8.0,),
    ),
    (
        "model.rope_scaling={rope_type: linear, factor: 2, truncate: false}",
        1,
        "model.rope_scaling.truncate",
        False,
        "has no effect without rope_type yarn",
        {"model.rope_scaling.rope_type"},
        (True,),
    ),
    (
        "model.rope_scaling={rope_type: linear, factor: 2, attention_factor: 2}",
        1,
        "model.rope_scaling.attention_factor",
        2,
        "has no effect without rope_type yarn or longrope",
        {"model.rope_scaling.rope_type"},
        (None,),
    ),
    (
        "model.rope_scaling={rope_type: yarn, factor: 2, original_max_position_embeddings: 64, beta_slow: 40}",
        1,
        "model.rope_scaling.beta_fast",
        32.0,
        "must be >= beta_slow",
        {"model.rope_scaling.beta_slow"},
        (1280,),
    ),
    (
        "model.rope_scaling={rope_type: longrope, short_factor: [1, 2], long_factor: [1, 1, 1, 1, 1, 1, 1, 1], original_max_position_embeddings: 64}",
        1,
        "model.rope_scaling.short_factor",
        (1, 2),
        "a number per pair of rotated features",
        {"pairs"},
        ((1.0,) * 8,),
    ),
    (
        "model.rope_scaling={rope_type: longrope, short_factor: [1, 1, 1, 1, 1, 1, 1, 0], long_factor: [1, 1, 1, 1, 1, 1, 1, 1], original_max_position_embeddings: 64}",
        1,
        "model.rope_scaling.short_factor",
        (1, 1, 1, 1, 1, 1, 1, 0),
        "must be numbers in (0, inf)",
        set(),
        ((1.0,) * 8,),
    ),
    (
        "model.rope_scaling={rope_type: proportional, partial_rotary_factor: 1.5}",
        1,
        "model.rope_scaling.partial_rotary_factor",
        1.5,
        "[0, 1]",
        set(),
        (0.5,),
    ),
    (
        "model.rope_scaling={rope_type: proportional}",
        1,
        "model.rope_scaling.partial_rotary_factor",
        None,
        "is needed by rope_type proportional",
        {"model.rope_scaling.rope_type"},
        (0.5,),
    ),
    (
        "model.rope_scaling={rope_type: longrope, short_factor: [1, 1, 1, 1, 1, 1, 1, 1], long_factor: [1, 1, 1, 1, 1, 1, 1, 1], original_max_position_embeddings: 1}",
        1,
        "model.rope_scaling.original_max_position_embeddings",
        1,
        "must be > 1",
        set(),
        (4096,),
    ),
    (
        "model.rope_theta=1 model.rope_scaling={rope_type: yarn, factor: 2, original_max_position_embeddings: 64}",
        1,
        "model.rope_theta",
        1.0,
        "must not be 1",
        {"model.rope_scaling.rope_type"},
        (10000.0,),
    ),
    (
        "model.head_dim=2 model.rope_scaling={rope_type: dynamic, factor: 2}",
        1,
        "model.rope_scaling.rope_type",
        "dynamic",
        "must not be dynamic for heads with two",
        {"rotated features"},
        ("linear",),
    ),
    (
        "model.family=mistral model.attention_bias=true",
        1,
        "model.attention_bias",
        True,
        "has no effect without a model.family that has this switch",
        {"model.family"},
        (False,),
    ),
    (
        "model.family=qwen3 model.mlp_bias=true",
        1,
        "model.mlp_bias",
        True,
        "has no effect without a model.family that has this switch",
        {"model.family"},
        (False,),
    ),
    (
        "model.family=mistral model.layer_types=[sliding_attention,full_attention,full_attention,full_attention]",
        1,
        "model.sliding_window",
        None,
        "must be set for layers of sliding_attention",
        {"model.layer_types"},
        (4096,),
    ),
    # latent attention (79)
    (f"{LATENT} model.qk_rope_head_dim=7", 1, "model.qk_rope_head_dim", 7, "must be even and >= 2", set(), (6, 8)),
    (f"{LATENT} model.qk_rope_head_dim=0", 1, "model.qk_rope_head_dim", 0, "must be even and >= 2", set(), (2,)),
    (f"{LATENT} model.kv_lora_rank=0", 1, "model.kv_lora_rank", 0, ">= 1", set(), (1, 2)),
    (f"{LATENT} model.q_lora_rank=0", 1, "model.q_lora_rank", 0, ">= 1", set(), (1, 2)),
    (f"{LATENT} model.v_head_dim=0", 1, "model.v_head_dim", 0, ">= 1", set(), (1, 2)),
    (f"{LATENT} model.qk_nope_head_dim=0", 1, "model.qk_nope_head_dim", 0, ">= 1", set(), (1, 2)),
    (
        f"{LATENT} model.head_dim=16",
        1,
        "model.head_dim",
        16,
        "has no effect without heads of their own",
        set(),
        (None,),
    ),
    (
        f"{LATENT} model.num_key_value_heads=2",
        1,
        "model.num_key_value_heads",
        2,
        "has no effect without heads of their own",
        set(),
        (None,),
    ),
    (
        f"{GROUPED} model.n_group=3",
        1,
        "model.n_group",
        3,
        "must divide n_routed_experts",
        {"model.n_routed_experts"},
        (2, 4),
    ),
    (f"{GROUPED} model.n_group=0", 1, "model.n_group", 0, ">= 1", set(), (2,)),
    (f"{GROUPED} model.topk_group=0", 1, "model.topk_group", 0, ">= 1", set(), (1, 2)),
    (f"{GROUPED} model.topk_group=5", 1, "model.topk_group", 5, "must be <= n_group", {"model.n_group"}, (4,)),
    (
        f"{GROUPED} model.num_experts_per_tok=5",
        1,
        "model.num_experts_per_tok",
        5,
        "experts in topk_group groups",
        {"experts in topk_group groups", "model.n_routed_experts", "model.topk_group", "model.n_group"},
        (4,),
    ),
    (f"{GROUPED} model.moe_intermediate_size=0", 1, "model.moe_intermediate_size", 0, ">= 1", set(), (1, 2)),
    (f"{GROUPED} model.first_k_dense_replace=-1", 1, "model.first_k_dense_replace", -1, ">= 0", set(), (0, 1)),
    (f"{GROUPED} model.n_shared_experts=-1", 1, "model.n_shared_experts", -1, ">= 0", set(), (0, 1)),
    (f"{GROUPED} model.routed_scaling_factor=0", 1, "model.routed_scaling_factor", 0, "(0, inf)", set(), (2.5,)),
    (
        f"{GROUPED} model.router_bias_update_rate=-1",
        1,
        "model.router_bias_update_rate",
        -1,
        "[0, inf)",
        set(),
        (0.001,),
    ),
    (
        f"{GROUPED} model.moe_intermediate_size=1 layout.tp=4",
        4,
        "layout.tp",
        4,
        "width of the shared experts",
        {"model.n_shared_experts", "model.moe_intermediate_size"},
        (1,),
    ),
    (
        f"{LATENT} model.n_group=2",
        1,
        "model.n_group",
        2,
        "has no effect without layers with experts",
        {"model.first_k_dense_replace", "model.num_hidden_layers"},
        (8,),
    ),
    (f"{GROUPED} model.num_nextn_predict_layers=-1", 1, "model.num_nextn_predict_layers", -1, ">= 0", set(), (0, 1)),
    (
        f"{GROUPED} model.num_nextn_predict_layers=1 model.mtp_loss_weight=-1",
        1,
        "model.mtp_loss_weight",
        -1,
        "[0, inf)",
        set(),
        (0.3,),
    ),
    (
        "model.family=qwen3_5_text model.num_hidden_layers=4 model.num_nextn_predict_layers=2",
        1,
        "model.num_nextn_predict_layers",
        2,
        "must be 0 or 1",
        set(),
        (1,),
    ),
    (
        f"{GROUPED} model.mtp_loss_weight=0.1",
        1,
        "model.mtp_loss_weight",
        0.1,
        "has no effect without",
        {"model.num_nextn_predict_layers"},
        (0.3,),
    ),
    (
        f"{GROUPED} model.num_nextn_predict_layers=1 layout.pp=8",
        8,
        "layout.pp",
        8,
        "stages without a block",
        {"layout.virtual_stages", "blocks (layers + 3)"},
        (4,),
    ),
    (
        f"{LATENT} layout.tp=3",
        3,
        "layout.tp",
        3,
        "must divide num_attention_heads",
        {"model.num_attention_heads"},
        (1,),
    ),
    # what is recomputed in backward (71)
    (
        'train.freeze=["*norm*","*nrom*"]',
        1,
        "train.freeze",
        ["*norm*", "*nrom*"],
        "must fit names of tensors",
        {"fits none", "tensors"},
        (["*norm*"],),
    ),
    ('train.freeze=["*"]', 1, "train.freeze", ["*"], "must leave something to train", {"tensors"}, ([],)),
    (
        'train.freeze=["*.q_proj.*"]',
        1,
        "train.freeze",
        ["*.q_proj.*"],
        "all or none of the tensors that are stored as one matrix",
        {"fits not"},
        (["*.q_proj.*", "model.layers.*.self_attn.k_proj.weight", "model.layers.*.self_attn.v_proj.weight"],),
    ),
    (
        "train.recompute_ops=[norm,nrom]",
        1,
        "train.recompute_ops",
        ["norm", "nrom"],
        "must name ops of the model among norm, qkv, rope",
        {"model.family", "unknown"},
        ([],),
    ),
    (
        "train.recompute_ops=[experts]",
        1,
        "train.recompute_ops",
        ["experts"],
        "must name ops of the model",
        {"model.family", "unknown"},
        ([],),
    ),
    (
        "train.recompute_ops=[scan]",
        1,
        "train.recompute_ops",
        ["scan"],
        "among norm, qkv, rope, attention, up,",
        {"model.family", "unknown"},
        ([],),
    ),
    (
        "train.recompute_ops=[norm] train.recompute=full",
        1,
        "train.recompute_ops",
        ["norm"],
        "has no effect without recompute other than full",
        {"train.recompute"},
        ([],),
    ),
    ("train.recompute_budget_gib=0", 1, "train.recompute_budget_gib", 0, "(0, inf)", set(), (None,)),
    (
        "train.recompute_budget_gib=20 train.recompute=full",
        1,
        "train.recompute",
        "full",
        "has no effect without recompute_budget_gib=null",
        {"train.recompute_budget_gib"},
        ("none",),
    ),
    (
        "train.recompute_budget_gib=20 train.recompute_ops=[norm]",
        1,
        "train.recompute_ops",
        ["norm"],
        "has no effect without recompute_budget_gib=null",
        {"train.recompute_budget_gib"},
        ([],),
    ),
    # activations on the host
    (
        "train.offload_layers=-1",
        1,
        "train.offload_layers",
        -1,
        "[0, layers]",
        {"model.num_hidden_layers"},
        (0, 4),
    ),
    (
        "train.offload_layers=5",
        1,
        "train.offload_layers",
        5,
        "[0, layers]",
        {"model.num_hidden_layers"},
        (4,),
    ),
    (
        "train.offload_layers=1 train.cuda_graphs=on",
        1,
        "train.cuda_graphs",
        "on",
        "excludes train.offload_layers: type train.cuda_graphs=off or train.offload_layers=0",
        {"train.offload_layers"},
        ("off",),
    ),
    # windows
    ("model.family=mistral model.sliding_window=0", 1, "model.sliding_window", 0, ">= 1", set(), (1, 2)),
    (
        "model.family=qwen2 model.sliding_window=8 model.max_window_layers=-1",
        1,
        "model.max_window_layers",
        -1,
        ">= 0",
        set(),
        (0, 1),
    ),
    (
        "model.family=qwen2 model.max_window_layers=2",
        1,
        "model.max_window_layers",
        2,
        "has no effect without model.sliding_window",
        {"model.sliding_window"},
        (0,),
    ),
    # experts and how they are spread (23, 24, 26, 30, 31)
    (f"{MIXTRAL} layout.ep=3", 6, "layout.ep", 3, "must divide the number of experts", {"experts per layer"}, (2,)),
    (
        f"{MIXTRAL} layout.ep=16 train.global_batch=32",
        16,
        "layout.ep",
        16,
        "must divide the number of experts",
        {"experts per layer"},
        (8,),
    ),
    ("layout.ep=2", 2, "layout.ep", 2, "has no effect without experts", {"experts of model"}, (1,)),
    ("layout.etp=2", 2, "layout.etp", 2, "has no effect without experts", {"experts of model"}, (1,)),
    (
        "layout.dispatch=allgather",
        2,
        "layout.dispatch",
        "allgather",
        "has no effect without experts",
        {"experts of model"},
        ("auto",),
    ),
    (
        "layout.expert_room=3.0",
        2,
        "layout.expert_room",
        3.0,
        "has no effect without experts",
        {"experts of model"},
        (2.0,),
    ),
    (
        "layout.ep_overlap=off",
        2,
        "layout.ep_overlap",
        "off",
        "has no effect without experts",
        {"experts of model"},
        ("auto",),
    ),
    (
        f"{MIXTRAL} layout.ep=8 layout.etp=2",
        8,
        "layout.ep",
        8,
        "ep * etp must divide the number of ranks of a stage",
        {"layout.etp", "ep * etp", "ranks of a stage"},
        (4,),
    ),
    (
        f"{MIXTRAL} layout.ep=4 layout.pp=2",
        4,
        "layout.ep",
        4,
        "ep * etp must divide the number of ranks of a stage",
        {"layout.etp", "ep * etp", "ranks of a stage"},
        (2,),
    ),
    (
        f"{MIXTRAL} layout.etp=4 model.intermediate_size=3",
        4,
        "layout.etp",
        4,
        "must be <= the width of an expert",
        {"width of an expert"},
        (2,),
    ),
    (f"{MIXTRAL} layout.ep=0", 1, "layout.ep", 0, ">= 1", set(), (1,)),
    (
        f"{MIXTRAL} layout.ep=2 layout.dispatch=alltoall layout.ep_overlap=on",
        2,
        "layout.ep_overlap",
        "on",
        "has no effect without dispatch=allgather",
        {"layout.dispatch"},
        ("auto",),
    ),
    (
        f"{MIXTRAL} layout.ep=2 layout.dispatch=alltoall layout.expert_room=1.5",
        2,
        "layout.expert_room",
        1.5,
        "has no effect without dispatch=allgather or push",
        {"layout.dispatch"},
        (2.0,),
    ),
    (
        f"{MIXTRAL} layout.ep=2 layout.dispatch=push layout.ep_overlap=off",
        2,
        "layout.ep_overlap",
        "off",
        "has no effect without dispatch=allgather",
        {"layout.dispatch"},
        ("auto",),
    ),
    (f"{MIXTRAL} layout.etp=-1", 1, "layout.etp", -1, ">= 1", set(), (1,)),
    (f"{MIXTRAL} layout.expert_room=0.5", 1, "layout.expert_room", 0.5, "[1, inf]", set(), (2.0,)),
    (
        f"{MIXTRAL} model.num_experts_per_tok=9",
        1,
        "model.num_experts_per_tok",
        9,
        "must be <= num_local_experts",
        {"model.num_local_experts"},
        (8,),
    ),
    (
        f"{QWEN3_MOE} model.num_experts_per_tok=9",
        1,
        "model.num_experts_per_tok",
        9,
        "must be <= num_experts",
        {"model.num_experts"},
        (8,),
    ),
    (
        f"{OSS} model.num_experts_per_tok=9",
        1,
        "model.num_experts_per_tok",
        9,
        "must be <= num_local_experts",
        {"model.num_local_experts"},
        (8,),
    ),
    (f"{MIXTRAL} model.num_experts_per_tok=0", 1, "model.num_experts_per_tok", 0, ">= 1", set(), (1, 2)),
    (f"{MIXTRAL} model.num_local_experts=0", 1, "model.num_local_experts", 0, ">= 1", set(), (2,)),
    (f"{QWEN3_MOE} model.num_experts=0", 1, "model.num_experts", 0, ">= 1", set(), (2,)),
    (f"{MIXTRAL} model.expert_capacity_factor=0", 1, "model.expert_capacity_factor", 0, "(0, inf)", set(), (1.25,)),
    (f"{MIXTRAL} model.expert_capacity_factor=-1", 1, "model.expert_capacity_factor", -1, "(0, inf)", set(), (1.25,)),
    (
        f"{MIXTRAL} model.expert_capacity_drop=position",
        1,
        "model.expert_capacity_drop",
        "position",
        "has no effect without model.expert_capacity_factor",
        {"model.expert_capacity_factor"},
        ("probability",),
    ),
    (f"{MIXTRAL} model.router_aux_loss_coef=-0.1", 1, "model.router_aux_loss_coef", -0.1, "[0, inf)", set(), (0.001,)),
    (
        f"{MIXTRAL} model.router_aux_loss_coef=0 model.router_aux_loss_scope=sequence",
        1,
        "model.router_aux_loss_scope",
        "sequence",
        "has no effect without model.router_aux_loss_coef",
        {"model.router_aux_loss_coef"},
        ("micro_batch",),
    ),
    (f"{MIXTRAL} model.router_z_loss_coef=-1", 1, "model.router_z_loss_coef", -1, "[0, inf)", set(), (0.0,)),
    (f"{QWEN3_MOE} model.moe_intermediate_size=0", 1, "model.moe_intermediate_size", 0, ">= 1", set(), (1, 2)),
    (f"{QWEN3_MOE} model.decoder_sparse_step=0", 1, "model.decoder_sparse_step", 0, ">= 1", set(), (1, 2)),
    (
        f"{QWEN3_MOE} model.mlp_only_layers=[1,4]",
        1,
        "model.mlp_only_layers",
        (1, 4),
        "must be numbers of layers, from 0",
        {"model.num_hidden_layers"},
        ((1,),),
    ),
    (
        f"{QWEN3_MOE} model.mlp_only_layers=[0,1,2,3]",
        1,
        "model.mlp_only_layers",
        (0, 1, 2, 3),
        "must leave a layer with experts",
        {"model.decoder_sparse_step", "model.num_hidden_layers"},
        ((),),
    ),
    (
        f"{OSS} model.layer_types=[full_attention,full_attention,sliding_attention]",
        1,
        "model.layer_types",
        ("full_attention", "full_attention", "sliding_attention"),
        "must have one kind per layer",
        {"kinds", "model.num_hidden_layers"},
        (("full_attention", "full_attention", "sliding_attention", "full_attention"), None),
    ),
    (
        f"{OSS} model.layer_types=[]",
        1,
        "model.layer_types",
        (),
        "must have one kind per layer",
        {"kinds", "model.num_hidden_layers"},
        (None,),
    ),
    (f"{OSS} model.sliding_window=0", 1, "model.sliding_window", 0, ">= 1", set(), (1, 2)),
    (
        f"{OSS} model.sliding_window=64 model.layer_types=[full_attention,full_attention,full_attention,full_attention]",
        1,
        "model.sliding_window",
        64,
        "has no effect without a layer of sliding_attention",
        {"model.layer_types"},
        (128,),
    ),
    (f"{OSS} model.swiglu_limit=0", 1, "model.swiglu_limit", 0, "(0, inf]", set(), (7.0,)),
    (f"{OSS} model.swiglu_alpha=0", 1, "model.swiglu_alpha", 0, "(0, inf)", set(), (1.702,)),
    # pipeline (13, stages)
    ("layout.virtual_stages=2", 1, "layout.virtual_stages", 2, "needs pp >= 2", {"layout.pp"}, (1,)),
    (
        "layout.schedule=interleaved",
        1,
        "layout.schedule",
        "interleaved",
        "needs virtual_stages >= 2",
        {"layout.virtual_stages"},
        ("auto", "1f1b"),
    ),
    (
        "layout.schedule=1f1b layout.virtual_stages=2 layout.pp=2",
        2,
        "layout.schedule",
        "1f1b",
        "one stage per rank",
        {"layout.virtual_stages"},
        ("auto", "interleaved"),
    ),
    (
        "layout.schedule=zb_h1 layout.virtual_stages=2 layout.pp=2",
        2,
        "layout.schedule",
        "zb_h1",
        "one stage per rank",
        {"layout.virtual_stages"},
        ("auto", "interleaved"),
    ),
    ("layout.schedule=zb_h1", 1, "layout.schedule", "zb_h1", "no effect without pp >= 2", {"layout.pp"}, ("auto",)),
    (
        "layout.schedule=zb_h1 layout.pp=2 train.cuda_graphs=on",
        2,
        "train.cuda_graphs",
        "on",
        "excludes a schedule that splits backward",
        {"layout.schedule"},
        ("off", "auto"),
    ),
    ("layout.schedule=zbh1 layout.pp=2", 2, "layout.schedule", "zbh1", "must be one of", set(), ("zb_h1",)),
    (
        "layout.pp=8",
        8,
        "layout.pp",
        8,
        "stages without a block",
        {"layout.virtual_stages", "blocks (layers + 2)"},
        (4,),
    ),
    (
        "layout.pp=2 layout.virtual_stages=4",
        2,
        "layout.virtual_stages",
        4,
        "stages without a block",
        {"layout.pp", "blocks (layers + 2)"},
        (3,),
    ),
    (
        "layout.pp=2 layout.stages=[2,2,2]",
        2,
        "layout.stages",
        (2, 2, 2),
        "pp * virtual_stages numbers",
        {"numbers", "pp * virtual_stages"},
        ((3, 3),),
    ),
    (
        "layout.pp=2 layout.stages=[3,2]",
        2,
        "layout.stages",
        (3, 2),
        "must sum to the number of blocks",
        {"sum", "blocks (layers + 2)"},
        ((3, 3),),
    ),
    ("layout.pp=2 layout.stages=[6,0]", 2, "layout.stages", (6, 0), "at least 1 block", set(), ((3, 3),)),
    ("layout.sharding=2 layout.prefetch=-1", 1, "layout.prefetch", -1, ">= 0", set(), (0, 1)),
    ("layout.prefetch=2", 2, "layout.prefetch", 2, "has no effect without sharding >= 2", {"layout.sharding"}, (1,)),
    (
        "layout.sharding=0 layout.dp_overlap=off",
        2,
        "layout.dp_overlap",
        "off",
        "has no effect without sharding >= 1",
        {"layout.sharding"},
        ("auto",),
    ),
    (
        "layout.sharding=2 layout.reshard_after_forward=false",
        2,
        "layout.reshard_after_forward",
        False,
        "has no effect without sharding=3",
        {"layout.sharding"},
        (True,),
    ),
    (
        "layout.sharding=0 layout.shard_group=2",
        4,
        "layout.shard_group",
        2,
        "has no effect without sharding >= 1",
        {"layout.sharding"},
        (None,),
    ),
    (
        "layout.sharding=3 layout.shard_across=optimizer",
        4,
        "layout.shard_across",
        "optimizer",
        "has no effect without shard_group",
        {"layout.shard_group"},
        ("nothing",),
    ),
    ("layout.sharding=3 layout.shard_group=1", 4, "layout.shard_group", 1, ">= 2", set(), (2, None)),
    (
        "layout.sharding=3 layout.shard_group=3",
        8,
        "layout.shard_group",
        3,
        "must divide the number of data-parallel ranks",
        {"data-parallel ranks"},
        (2, 4),
    ),
    (
        "layout.sharding=3 layout.shard_group=8 layout.tp=2",
        8,
        "layout.shard_group",
        8,
        "must divide the number of data-parallel ranks",
        {"data-parallel ranks"},
        (4,),
    ),
    (
        f"{MIXTRAL} layout.sharding=3 layout.shard_group=3 layout.ep=2 train.global_batch=12",
        12,
        "layout.shard_group",
        3,
        "one divides the other",
        {"shard_group * tp", "ep * etp"},
        (2, 4),
    ),
    ("layout.bucket_mb=0", 1, "layout.bucket_mb", 0, ">= 1", set(), (1, 2)),
    (
        "optim.moments=bf16 optim.beta2=0.999",
        1,
        "optim.beta2",
        0.999,
        "must be <= 0.99 with bf16 moments",
        {"optim.moments"},
        (0.95, 0.99),
    ),
    (
        "optim.moments=bf16 optim.beta1=0.995",
        1,
        "optim.beta1",
        0.995,
        "must be <= 0.99 with bf16 moments",
        {"optim.moments"},
        (0.95, 0.99),
    ),
    # memory of one GPU
    (
        "optim.masters=split train.precision=fp16",
        1,
        "optim.masters",
        "split",
        "split needs bf16 weights, of which",
        {"train.precision"},
        ("whole",),
    ),
    (
        "optim.masters=split train.precision=bf16 train.fp8.recipe=tensorwise layout.sharding=1",
        2,
        "optim.masters",
        "split",
        "train.fp8 stores FP8 values",
        {"train.fp8.recipe", "layout.sharding"},
        ("whole",),
    ),
    (
        f"optim.masters=split train.precision=bf16 optim.name={MATRIX}",
        1,
        "optim.masters",
        "split",
        "those of whole matrices",
        {"optim.name"},
        ("whole",),
    ),
    (
        "optim.clip_by=bucket",
        1,
        "optim.clip_by",
        "bucket",
        "has no effect without optim.in_backward=true",
        {"optim.in_backward"},
        ("model",),
    ),
    (
        f"{IN_BACKWARD} optim.clip_grad=0",
        1,
        "optim.clip_by",
        "bucket",
        "has no effect without optim.clip_grad > 0",
        {"optim.clip_grad"},
        ("model",),
    ),
    (
        f"{IN_BACKWARD} optim.clip_by=model",
        1,
        "optim.clip_by",
        "model",
        "must be bucket with optim.in_backward, or clip_grad 0",
        {"optim.clip_grad"},
        ("bucket",),
    ),
    (
        f"{IN_BACKWARD} train.global_batch=16",
        2,
        "train.global_batch",
        16,
        "one micro-batch a step",
        {"micro_batch * dp"},
        (4,),
    ),
    (f"{IN_BACKWARD} layout.pp=2", 2, "layout.pp", 2, "must be 1 with optim.in_backward", set(), (1,)),
    (
        f"{IN_BACKWARD} train.guard.sigmas=5",
        1,
        "train.guard.sigmas",
        5.0,
        "must be unset with optim.in_backward",
        set(),
        (None,),
    ),
    (
        f"{IN_BACKWARD} train.precision=fp16",
        1,
        "optim.in_backward",
        True,
        "excludes fp16",
        {"train.precision"},
        (False,),
    ),
    (
        f"{IN_BACKWARD} train.deterministic=true",
        1,
        "optim.in_backward",
        True,
        "add them up in a fixed order",
        {"train.deterministic"},
        (False,),
    ),
    (
        f"{IN_BACKWARD} {FP8}=tensorwise",
        1,
        "optim.in_backward",
        True,
        "excludes train.fp8",
        {"train.fp8.recipe"},
        (False,),
    ),
    (
        f"{IN_BACKWARD} train.cuda_graphs=on",
        1,
        "optim.in_backward",
        True,
        "excludes CUDA graphs",
        {"train.cuda_graphs"},
        (False,),
    ),
    (
        f"{IN_BACKWARD} {MIXTRAL} layout.ep=2 train.global_batch=4",
        2,
        "optim.in_backward",
        True,
        "type layout.dispatch=alltoall",
        {"layout.dispatch"},
        (False,),
    ),
    (
        f"{IN_BACKWARD} optim.name={MATRIX}",
        1,
        "optim.in_backward",
        True,
        "excludes optimizers of whole matrices",
        {"optim.name"},
        (False,),
    ),
    # low precision
    (
        f"{FP8}=tensorwise lora.rank=2 lora.base=nf4",
        1,
        "lora.base",
        "nf4",
        "must be bf16 with train.fp8",
        {"train.fp8.recipe"},
        ("bf16",),
    ),
    ("lora.dropout=1.0", 1, "lora.dropout", 1.0, "must be a number in [0, 1)", set(), (0.0,)),
    (
        "lora.dropout=0.1 lora.targets=['*embed_tokens*']",
        1,
        "lora.dropout",
        0.1,
        "has no effect without a target that is a linear",
        {"lora.targets"},
        (0.0,),
    ),
    (
        f"lora.dropout=0.1 {MIXTRAL}",
        1,
        "lora.dropout",
        0.1,
        "must be 0 on experts",
        {"such as"},
        (0.0,),
    ),
    (
        "lora.base=nf4 train.freeze=['*norm*']",
        1,
        "train.freeze",
        ["*norm*"],
        "has no effect with lora",
        {"lora.method"},
        ([],),
    ),
    (
        f"{FP8}=tensorwise train.fp8.history=8",
        1,
        "train.fp8.history",
        8,
        "has no effect without recipe=delayed",
        {"train.fp8.recipe"},
        (1024,),
    ),
    (f"{FP8}=delayed train.fp8.history=0", 1, "train.fp8.history", 0, ">= 1", set(), (1, 2)),
    (
        f"{FP8}=mxfp8 train.fp8.accumulate=fast",
        1,
        "train.fp8.accumulate",
        "fast",
        "has no effect without a recipe that has GEMMs of its own",
        {"train.fp8.recipe"},
        ("mixed",),
    ),
    (
        f"{FP8}=tensorwise train.fp8.min_cosine=0.9",
        1,
        "train.fp8.min_cosine",
        0.9,
        "has no effect without shadow_interval",
        {"train.fp8.shadow_interval"},
        (None,),
    ),
    (
        f"{FP8}=tensorwise train.steps=50 train.fp8.last_steps=50",
        1,
        "train.fp8.last_steps",
        50,
        "must leave steps for the recipe",
        {"train.steps"},
        (5,),
    ),
    (
        f"{FP8}=tensorwise train.fp8.last_steps=-1",
        1,
        "train.fp8.last_steps",
        -1,
        "must be an integer >= 0",
        set(),
        (0, 1),
    ),
    (f"{FP8}=tensorwise train.fp8.max_lost=1.5", 1, "train.fp8.max_lost", 1.5, "(0, 1)", set(), (0.2,)),
    (
        f"{FP8}=tensorwise train.fp8.shadow_interval=5 train.fp8.min_cosine=0",
        1,
        "train.fp8.min_cosine",
        0.0,
        "(0, 1)",
        set(),
        (0.98,),
    ),
    (f"{FP8}=tensorwise train.fp8.shadow_interval=0", 1, "train.fp8.shadow_interval", 0, ">= 1", set(), (1, 2)),
    (f"{FP8}=tensorwise train.fp8.end_layers=-1", 1, "train.fp8.end_layers", -1, ">= 0", set(), (0, 1)),
    (
        f"{FP8}=tensorwise train.fp8.end_layers=2",
        1,
        "train.fp8.end_layers",
        2,
        "must leave layers between the ends",
        {"model.num_hidden_layers"},
        (1,),
    ),
    (
        f"{FP8}=tensorwise train.fp8.exclude=['*.o_porj.*']",
        1,
        "train.fp8.exclude",
        ["*.o_porj.*"],
        "must fit names of linears",
        {"fits none"},
        ([],),
    ),
    (
        f"{FP8}=tensorwise train.fp8.exclude=['*']",
        1,
        "train.fp8.exclude",
        ["*"],
        "must leave a linear",
        {"linears"},
        ([],),
    ),
    (
        f"{FP8}=tensorwise train.seq_length=60 train.micro_batch=1",
        1,
        "train.seq_length",
        60,
        "must be a multiple of 16 with train.fp8.recipe=tensorwise",
        {"train.fp8.recipe", "train.micro_batch", "layout.tp", "layout.cp"},
        (48, 64),
    ),
    (
        f"{FP8}=blockwise train.micro_batch=4",
        1,
        "train.fp8.recipe",
        "blockwise",
        "outputs and inputs of its linears",
        {"model.layers.0.self_attn.q_proj.weight", "nearest sizes", "layout.tp", "sizes in multiples of"},
        ("tensorwise", "delayed", "rowwise"),
    ),
    (
        f"{FP8}=rowwise layout.tp=4 model.intermediate_size=160",
        4,
        "train.fp8.recipe",
        "rowwise",
        "outputs and inputs of its linears",
        {"model.layers.0.mlp.down_proj.weight", "nearest sizes", "layout.tp", "sizes in multiples of"},
        (),
    ),
    (
        f"{QWEN3_MOE} {FP8}=rowwise layout.tp=2 layout.etp=4",
        4,
        "train.fp8.recipe",
        "rowwise",
        "outputs and inputs of its linears",
        {
            "model.layers.0.mlp.experts.0.down_proj.weight",
            "nearest sizes",
            "layout.tp",
            "layout.etp",
            "sizes in multiples of",
        },
        (),
    ),
    # batch (16, 18, 20) and rampup
    (
        "train.global_batch=100 train.micro_batch=8",
        4,
        "train.global_batch",
        100,
        "multiple of micro_batch * dp",
        {"micro_batch * dp", "train.micro_batch", "dp"},
        (96, 128),
    ),
    ("train.micro_batch=0", 1, "train.micro_batch", 0, ">= 1", set(), (1, 2)),
    ("train.global_batch=-1", 1, "train.global_batch", -1, ">= 1", set(), (2,)),
    (
        "train.seq_length=1001 train.micro_batch=1 layout.tp=2",
        2,
        "train.seq_length",
        1001,
        "micro_batch * seq_length must be a multiple of tp",
        {"train.micro_batch", "layout.tp"},
        (1000, 1002),
    ),
    (
        "train.rampup={start: 3, increment: 2, samples: 50}",
        1,
        "train.rampup.start",
        3,
        "multiple of micro_batch * dp",
        {"micro_batch * dp"},
        (2, 4),
    ),
    (
        "train.rampup={start: 4, increment: 3, samples: 50}",
        1,
        "train.rampup.increment",
        3,
        "multiple of micro_batch * dp",
        {"micro_batch * dp"},
        (2, 4),
    ),
    (
        "train.rampup={start: 4, increment: 8, samples: 50}",
        1,
        "train.rampup.increment",
        8,
        "must divide train.global_batch - start",
        {"train.global_batch - start"},
        (6, 12),
    ),
    (
        "train.rampup={start: 16, increment: 2, samples: 50}",
        1,
        "train.rampup.start",
        16,
        "must be < train.global_batch",
        {"train.global_batch"},
        (14,),
    ),
    ("train.rampup={start: 2, increment: 2, samples: 0}", 1, "train.rampup.samples", 0, ">= 1", set(), (1, 2)),
    # optimizer (36, 38, 39, 41, 42)
    ("optim.lr=-0.1", 1, "optim.lr", -0.1, "[0, inf)", set(), (3e-4,)),
    ("optim.lr=.inf", 1, "optim.lr", float("inf"), "[0, inf)", set(), (3e-4,)),
    ("optim.min_lr=1 optim.lr=0.1", 1, "optim.min_lr", 1, "<= lr", {"optim.lr"}, (0.1, 0.01)),
    (
        "optim.warmup_steps=2000 train.steps=1000",
        1,
        "optim.warmup_steps",
        2000,
        "< train.steps",
        {"train.steps"},
        (999,),
    ),
    (
        "optim.warmup_steps=50 optim.decay_steps=10",
        1,
        "optim.decay_steps",
        10,
        "> warmup_steps",
        {"optim.warmup_steps"},
        (51, None),
    ),
    (
        "optim.schedule=wsd optim.warmup_steps=50 optim.wsd_decay_steps=60",
        1,
        "optim.wsd_decay_steps",
        60,
        "fit between",
        {"decay_steps - warmup_steps"},
        (50, None),
    ),
    ("optim.beta1=1.0", 1, "optim.beta1", 1.0, "[0, 1)", set(), (0.9,)),
    ("optim.beta2=1.5", 1, "optim.beta2", 1.5, "[0, 1)", set(), (0.95,)),
    ("optim.eps=0", 1, "optim.eps", 0, "(0, inf)", set(), (1e-8,)),
    ("optim.weight_decay=-1", 1, "optim.weight_decay", -1, "[0, inf)", set(), (0.1,)),
    ("optim.clip_grad=-1", 1, "optim.clip_grad", -1, "0 turns clipping off", set(), (1.0, 0.0)),
    ("optim.lr_scale.*embed.weight=-1", 1, "optim.lr_scale.*embed.weight", -1, "[0, inf)", set(), (1.0,)),
    # checkpoints (46, 47)
    ("checkpoint.interval=0", 1, "checkpoint.interval", 0, ">= 1", set(), (500, None)),
    ("checkpoint.interval=-5", 1, "checkpoint.interval", -5, ">= 1", set(), (500, None)),
    ("checkpoint.keep_last=1", 1, "checkpoint.keep_last", 1, ">= 2", set(), (0, 2)),
    ("checkpoint.keep_every=0", 1, "checkpoint.keep_every", 0, ">= 1", set(), (1, 2)),
    (
        "checkpoint.keep_every=100 checkpoint.keep_last=0",
        1,
        "checkpoint.keep_every",
        100,
        "has no effect",
        {"checkpoint.keep_last"},
        (None,),
    ),
    ("checkpoint.keep_last=-1", 1, "checkpoint.keep_last", -1, ">= 0", set(), (0,)),
    (
        "checkpoint.load=a init_from=b",
        1,
        "init_from",
        "b",
        "has no effect together with checkpoint.load",
        {"checkpoint.load"},
        (None,),
    ),
    # data (64, 68, blends)
    ("data.split='90,-10,20'", 1, "data.split", "90,-10,20", "three numbers >= 0", set(), ("98,2,0",)),
    ("data.split='0,0,0'", 1, "data.split", "0,0,0", "three numbers >= 0", set(), ("98,2,0",)),
    ("data.split='90,10'", 1, "data.split", "90,10", "three numbers >= 0", set(), ("98,2,0",)),
    ("data.split='0,10,0'", 1, "data.split", "0,10,0", "no tokens for training", {"train part"}, ("98,2,0",)),
    (
        "data.mock=false data.paths=[a] train.eval_interval=5 data.split='100,0,0'",
        1,
        "data.split",
        "100,0,0",
        "no tokens for the evaluations",
        {"validation part", "data.valid"},
        ("98,2,0",),
    ),
    ("data.paths=[a]", 1, "data.mock", True, "excludes data.paths", {"data.paths"}, (False,)),
    ("data.mock=false", 1, "data.paths", (), "needs a path", set(), ()),
    (
        "data.mock=false data.paths=[a,b] data.weights=[1]",
        1,
        "data.weights",
        (1,),
        "one number per path",
        {"weights", "paths"},
        ((1.0, 1.0), ()),
    ),
    ("data.mock=false data.paths=[a,b] data.weights=[1,0]", 1, "data.weights", (1, 0), "> 0", set(), ((1.0, 1.0), ())),
    ("data.max_epochs=0 data.mock=false data.paths=[a]", 1, "data.max_epochs", 0, "(0, inf)", set(), (1.0, None)),
    ("data.valid.web=[] train.eval_interval=5", 1, "data.valid.web", (), "needs a path", set(), ()),
    # numbers (70, 76, 77)
    ("model.rms_norm_eps=0", 1, "model.rms_norm_eps", 0, "(0, inf)", set(), (1e-5,)),
    ("train.timeout_s=0", 1, "train.timeout_s", 0, "(0, inf)", set(), (600.0,)),
    ("train.guard.window=1 train.guard.sigmas=6", 1, "train.guard.window", 1, ">= 2", set(), (2, 3)),
    (
        "train.guard.window=64",
        1,
        "train.guard.window",
        64,
        "has no effect without sigmas",
        {"train.guard.sigmas"},
        (128,),
    ),
    ("train.guard.sigmas=0", 1, "train.guard.sigmas", 0, "(0, inf)", set(), (6.0,)),
    (
        "train.guard.policy=rollback",
        1,
        "train.guard.policy",
        "rollback",
        "needs checkpoints",
        {"checkpoint.interval"},
        ("skip", "stop"),
    ),
    ("train.guard.max_rollbacks=2", 1, "train.guard.max_rollbacks", 2, "has no effect", {"train.guard.policy"}, (3,)),
    ("train.guard.replicas_interval=0", 1, "train.guard.replicas_interval", 0, ">= 1", set(), (1, 2)),
    ("cluster.gpus_per_node=0", 1, "cluster.gpus_per_node", 0, ">= 1", set(), (1, 2)),
    (
        "cluster.gpus_per_node=4 cluster.ranks_per_node=8",
        1,
        "cluster.ranks_per_node",
        8,
        "must be <= the GPUs of a node",
        {"cluster.gpus_per_node"},
        (4,),
    ),
    ("cluster.cpus_per_node=0", 1, "cluster.cpus_per_node", 0, ">= 1", set(), (1, 2)),
    ("cluster.max_restarts=-1", 1, "cluster.max_restarts", -1, ">= 0", set(), (0, 1)),
    ("cluster.grace_s=1", 1, "cluster.grace_s", 1, ">= 5", set(), (5, 6)),
    ("cluster.time='90'", 1, "cluster.time", "90", "a time with its unit", set(), ("24h",)),
    ("cluster.time=1m", 1, "cluster.time", "1m", "longer than", {"cluster.grace_s"}, ("240s",)),
    ("cluster.program=''", 1, "cluster.program", "", "must name a program", set(), ("phalanx",)),
    ("cluster.user=0", 1, "cluster.user", 0, ">= 1", set(), (1, 2)),
    ("cluster.topology=rack", 1, "cluster.topology", "rack", "has no effect without", {"cluster.queue"}, (None,)),
    (
        "cluster.nvlink_domain=true",
        1,
        "cluster.nvlink_domain",
        True,
        "has no effect without",
        {"cluster.gpus_per_node"},
        (False,),
    ),
    ("train.time_limit_s=0", 1, "train.time_limit_s", 0, "(0, inf)", set(), (None,)),
    ("train.seed=-1", 1, "train.seed", -1, "[0, 2**63)", set(), (1234,)),
    ("train.seed=18446744073709551616", 1, "train.seed", 2**64, "[0, 2**63)", set(), (1234,)),
    ("train.steps=0", 1, "train.steps", 0, ">= 1", set(), (1, 2)),
    ("train.eval_interval=0", 1, "train.eval_interval", 0, ">= 1", set(), (1, 2)),
    ("log.interval=0", 1, "log.interval", 0, ">= 1", set(), (1, 2)),
    ("log.wandb=a/b", 1, "log.wandb", "a/b", "1 to 128 characters", set(), ("a-b",)),
    ("log.wandb=a log.wandb_name=''", 1, "log.wandb_name", "", "1 to 128 characters", set(), (None,)),
    ("log.wandb=a log.wandb_tags=['']", 1, "log.wandb_tags", [""], "1 to 64 characters", set(), ([],)),
    ("log.wandb_group=sweep", 1, "log.wandb_group", "sweep", "has no effect without log.wandb", {"log.wandb"}, (None,)),
    (
        "train.precision=fp16 train.loss_scale=0.5",
        1,
        "train.loss_scale",
        0.5,
        ">= loss_scale_min",
        {"train.loss_scale_min"},
        (65536.0,),
    ),
    ("train.precision=fp16 train.loss_scale_window=0", 1, "train.loss_scale_window", 0, ">= 1", set(), (1, 2)),
    # options without effect
    ("data.weights=[1]", 1, "data.weights", (1,), "has no effect without data.paths", {"data.paths"}, ((),)),
    ("data.max_epochs=2", 1, "data.max_epochs", 2, "has no effect without token files", {"data.mock"}, (None,)),
    (
        "data.valid.web=[a]",
        1,
        "data.valid",
        {"web": ("a",)},
        "has no effect without train.eval_interval",
        {"train.eval_interval"},
        ({},),
    ),
    (
        "train.eval_samples=5",
        1,
        "train.eval_samples",
        5,
        "has no effect without train.eval_interval",
        {"train.eval_interval"},
        (64,),
    ),
    (
        "train.eval_limit=5",
        1,
        "train.eval_limit",
        5,
        "has no effect without train.eval_tasks",
        {"train.eval_tasks"},
        (None,),
    ),
    (
        "train.eval_data=sets",
        1,
        "train.eval_data",
        "sets",
        "has no effect without train.eval_tasks",
        {"train.eval_tasks"},
        (None,),
    ),
    (
        "data.tokenizer=bytes train.eval_tasks=[arc_easy] train.eval_interval=5 train.eval_limit=0",
        1,
        "train.eval_limit",
        0,
        ">= 1",
        set(),
        (1, 2),
    ),
    (
        "data.tokenizer=bytes train.eval_tasks=[arc_easy]",
        1,
        "train.eval_interval",
        None,
        "must be set with train.eval_tasks",
        {"train.eval_tasks"},
        (100,),
    ),
    (
        "train.eval_tasks=[arc_easy] train.eval_interval=5",
        1,
        "train.eval_tasks",
        ["arc_easy"],
        "needs data.tokenizer",
        {"data.tokenizer"},
        ([],),
    ),
    (
        "train.samples_tokens=5",
        1,
        "train.samples_tokens",
        5,
        "has no effect without train.samples",
        {"train.samples"},
        (64,),
    ),
    (
        "data.tokenizer=bytes train.samples=p.jsonl",
        1,
        "train.samples_interval",
        None,
        "must be set with train.samples",
        {"train.samples"},
        (100,),
    ),
    (
        "data.tokenizer=bytes train.samples=p.jsonl train.samples_interval=0",
        1,
        "train.samples_interval",
        0,
        ">= 1",
        set(),
        (1, 2),
    ),
    (
        "data.tokenizer=bytes train.samples=p.jsonl train.samples_interval=5 train.samples_temperature=-1",
        1,
        "train.samples_temperature",
        -1.0,
        "[0, inf)",
        set(),
        (0.8,),
    ),
    (
        "train.samples=p.jsonl train.samples_interval=5",
        1,
        "train.samples",
        "p.jsonl",
        "needs data.tokenizer",
        {"data.tokenizer"},
        (None,),
    ),
    (
        "data.tokenizer=bytes train.samples=p.jsonl train.samples_interval=5 train.samples_tokens=1000000",
        1,
        "train.samples_tokens",
        1000000,
        "must leave a position for a prompt",
        {"model.max_position_embeddings"},
        (65536,),
    ),
    (
        "train.loss_scale_window=5",
        1,
        "train.loss_scale_window",
        5,
        "has no effect without train.precision=fp16",
        {"train.precision"},
        (1000,),
    ),
    (
        "train.loss_scale=5 train.precision=bf16",
        1,
        "train.loss_scale",
        5,
        "has no effect without train.precision=fp16",
        {"train.precision"},
        (65536.0,),
    ),
    (
        "optim.wsd_decay_steps=5",
        1,
        "optim.wsd_decay_steps",
        5,
        "has no effect without optim.schedule=wsd",
        {"optim.schedule"},
        (None,),
    ),
    ("optim.schedule=constant optim.min_lr=1e-5", 1, "optim.min_lr", 1e-5, "has no effect", {"optim.schedule"}, (0.0,)),
    (
        "optim.schedule=inverse_sqrt optim.decay_steps=50",
        1,
        "optim.decay_steps",
        50,
        "has no effect",
        {"optim.schedule"},
        (None,),
    ),
]
GPT2_RULES = [
    (
        "model.max_position_embeddings=32",
        1,
        "train.seq_length",
        64,
        "positions are learned",
        {"model.max_position_embeddings"},
        (32,),
    ),
    ("model.dropout=1.0", 1, "model.dropout", 1.0, "[0, 1)", set(), (0.0, 0.1)),
    ("model.attention_dropout=-0.1", 1, "model.attention_dropout", -0.1, "[0, 1)", set(), (0.0, 0.1)),
    ("model.layer_norm_epsilon=0", 1, "model.layer_norm_epsilon", 0, "(0, inf)", set(), (1e-5,)),
    (
        "model.hidden_size=66",
        1,
        "model.hidden_size",
        66,
        "must be a multiple of num_attention_heads",
        {"model.num_attention_heads"},
        (64, 68),
    ),
]
T5_RULES = [
    (
        "train.batch_invariant=true",
        1,
        "train.batch_invariant",
        True,
        "no backend computes attention with bias, direction, scale: invariant has no bias, no direction",
        {"model.family"},
        (False,),
    ),
    ("task.encoder_length=null", 1, "task.encoder_length", None, "is required", set(), (512,)),
    (
        "task.encoder_length=91 layout.tp=4",
        4,
        "task.encoder_length",
        91,
        "must be a multiple of tp",
        {"train.micro_batch", "layout.tp"},
        (90, 92),
    ),
    ("task.noise=1.0", 1, "task.noise", 1.0, "must be a number in (0, 1)", set(), (0.15, 0.5)),
    ("task.mean_length=0.5", 1, "task.mean_length", 0.5, "must be a number in [1, inf)", set(), (3.0,)),
    ("task={}", 1, "task.name", "pretrain", "makes no encoder text", {"model.family"}, ()),
    ("data.packing=off", 1, "data.packing", "off", "makes two texts of each document", {"task.name"}, ("online",)),
    (
        "data.document_attention=false",
        1,
        "data.document_attention",
        False,
        "makes two texts of each document",
        {"task.name"},
        (True, None),
    ),
    ("model.dropout_rate=1.0", 1, "model.dropout_rate", 1.0, "must be a number in [0, 1)", set(), (0.0, 0.1)),
    (
        "model.relative_attention_num_buckets=7",
        1,
        "model.relative_attention_num_buckets",
        7,
        "must be an even integer",
        set(),
        (32,),
    ),
    (
        "model.relative_attention_max_distance=16",
        1,
        "model.relative_attention_max_distance",
        16,
        "must be beyond",
        {"model.relative_attention_num_buckets"},
        (128,),
    ),
    (
        "model.decoder_start_token_id=256",
        1,
        "model.decoder_start_token_id",
        256,
        "must be < vocab_size",
        {"model.vocab_size"},
        (0,),
    ),
    (
        "train.deterministic=true",
        1,
        "train.deterministic",
        True,
        "needs a model whose layers share no weight",
        {"model.family"},
        (False,),
    ),
    (
        "layout.cp=2 layout.cp_degree=dynamic",
        2,
        "layout.cp_degree",
        "dynamic",
        "balances the documents of one text",
        {"model.family"},
        ("fixed",),
    ),
    ("train.offload_layers=7", 1, "train.offload_layers", 7, "[0, layers]", {"model.num_hidden_layers"}, (6,)),
]
T5 = {
    "family": "t5",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_decoder_layers": 4,
    "num_attention_heads": 4,
}
T5_BASE = {
    "model": T5,
    "train": TRAIN,
    "task": {"name": "span", "encoder_length": 128},
    "data": {"mock": True, "packing": "online"},
}
BERT = {
    "family": "bert",
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
LLAVA = {
    **{k: v for k, v in BASE["model"].items() if k != "family"},
    "family": "llava",
    "image_token_id": 7,
    "vision": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    },
}
LLAVA_BASE = {**BASE, "model": LLAVA, "data": {"mock": True, "room": {"patches": 40}}}
LLAVA_RULES = [
    (
        "data.room={}",
        1,
        "data.room",
        {},
        "how many rows of patches a sequence has room for",
        {"model.family"},
        ({"patches": 20},),
    ),
    (
        "data.room={patches: 4, frames: 3}",
        1,
        "data.room",
        {"patches": 4, "frames": 3},
        "must name streams of numbers that the model reads: this one reads patches (not frames)",
        {"model.family"},
        ({},),
    ),
    ("data.image_workers=-1", 1, "data.image_workers", -1, "must be an integer >= 0", set(), (0, 1)),
    ("layout.media_group=0", 2, "layout.media_group", 0, "must be an integer >= 1", set(), (1, 2)),
    (
        "layout.media_group=3 layout.tp=2",
        8,
        "layout.media_group",
        3,
        "must divide the number of data-parallel ranks",
        {"data-parallel ranks"},
        (2, 4),
    ),
    (
        "layout.media_group=2 data.mock=false data.source=tests.outside.sums_source:Sums",
        2,
        "layout.media_group",
        2,
        "has no effect without samples with images",
        {"data.source"},
        (None,),
    ),
    (
        "train.deterministic=true",
        1,
        "train.deterministic",
        True,
        "is not built for a model that reads images",
        {"model.family"},
        (False,),
    ),
    (
        "train.batch_invariant=true",
        1,
        "train.batch_invariant",
        True,
        "is not built for a model that reads images",
        {"model.family"},
        (False,),
    ),
    (
        "model.image_token_id=500",
        1,
        "model.image_token_id",
        500,
        "must be a token of the vocabulary",
        {"model.vocab_size"},
        (255,),
    ),
    (
        "model.vision_feature_layer=5",
        1,
        "model.vision_feature_layer",
        5,
        "must name the embedding or a layer",
        {"model.vision.num_hidden_layers"},
        (-1,),
    ),
    (
        "model.vision.patch_size=9",
        1,
        "model.vision.patch_size",
        9,
        "must be <= image_size",
        {"model.vision.image_size"},
        (8,),
    ),
    (
        "model.vision.hidden_size=17",
        1,
        "model.vision.hidden_size",
        17,
        "must be a multiple of num_attention_heads",
        {"model.vision.num_attention_heads"},
        (16, 18),
    ),
    (
        "model.vision.pooling_head=true",
        1,
        "model.vision.pooling_head",
        True,
        "is SigLIP's",
        {"model.vision.tower"},
        (False,),
    ),
    (
        "model.vision.tower=siglip",
        1,
        "model.vision_feature_select_strategy",
        "default",
        "leaves out a class token",
        {"model.vision.tower"},
        ("full",),
    ),
    (
        "model.text_family=qwen2 model.attention_bias=true",
        1,
        "model.attention_bias",
        True,
        "is llama's",
        {"model.text_family"},
        (False,),
    ),
    (
        "model.sliding_window=4",
        1,
        "model.sliding_window",
        4,
        "is mistral's and qwen2's",
        {"model.text_family"},
        (None,),
    ),
]
WHISPER = {
    "family": "whisper",
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_mel_bins": 8,
    "max_source_positions": 50,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 3,
}
WHISPER_BASE = {
    **BASE,
    "model": WHISPER,
    "task": {"name": "transcribe"},
    "data": {"mock": True, "packing": "online", "room": {"sound": 100}},
}
WHISPER_RULES = [
    (
        "train.cuda_graphs=on",
        1,
        "train.cuda_graphs",
        "on",
        "needs micro-batches of equal sizes",
        {"model.family"},
        ("off",),
    ),
    (
        "data.room={}",
        1,
        "data.room",
        {},
        "how many rows of sound a sequence has room for",
        {"model.family"},
        ({"sound": 200},),
    ),
    ("model.num_mel_bins=0", 1, "model.num_mel_bins", 0, "must be an integer >= 1", set(), (1, 2)),
    (
        "model.decoder_start_token_id=131",
        1,
        "model.decoder_start_token_id",
        131,
        "must be < vocab_size",
        {"model.vocab_size"},
        (0,),
    ),
    (
        "model.max_position_embeddings=4",
        1,
        "model.max_position_embeddings",
        4,
        "must be >= train.seq_length",
        {"train.seq_length"},
        (64,),
    ),
    (
        "model.num_attention_heads=7",
        1,
        "model.hidden_size",
        64,
        "must be a multiple of num_attention_heads",
        {"model.num_attention_heads"},
        (70,),
    ),
    (
        "model.hidden_size=5 model.num_attention_heads=1",
        1,
        "model.hidden_size",
        5,
        "half of a fixed position",
        set(),
        (8,),
    ),
    (
        "task={name: seq2seq, encoder_length: 64}",
        1,
        "task.name",
        "seq2seq",
        "makes no sound text, which the model reads beside its own",
        {"model.family"},
        (),
    ),
]
GEMMA3_BASE = {
    **LLAVA_BASE,
    "model": {
        **LLAVA,
        "family": "gemma3",
        "boi_token_id": 8,
        "eoi_token_id": 9,
        "mm_tokens_per_image": 4,
        "vision": {**LLAVA["vision"], "tower": "siglip"},
    },
}
GEMMA3_RULES = [
    (
        "model.boi_token_id=500",
        1,
        "model.boi_token_id",
        500,
        "must be a token of the vocabulary",
        {"model.vocab_size"},
        (255,),
    ),
    ("model.vision.tower=clip", 1, "model.vision.tower", "clip", "must be siglip", set(), ("siglip",)),
    (
        "model.mm_tokens_per_image=3",
        1,
        "model.mm_tokens_per_image",
        3,
        "must be a square number whose root divides the patches along a side",
        {"patches"},
        (4,),
    ),
]
BERT_BASE = {**BASE, "model": BERT, "task": {"name": "mlm"}}
MODERN = "model.family=modernbert"
BERT_RULES = [
    (
        "train.batch_invariant=true",
        1,
        "train.batch_invariant",
        True,
        "no backend computes attention with direction: invariant has no direction",
        {"model.family"},
        (False,),
    ),
    ("task.rate=0", 1, "task.rate", 0, "(0, 1]", set(), (0.15, 0.3)),
    (
        "task={name: pretrain}",
        1,
        "task.name",
        "pretrain",
        "which a model that reads both ways sees",
        {"model.family"},
        (),
    ),
    ("model.dropout=1.0", 1, "model.dropout", 1.0, "[0, 1)", set(), (0.0, 0.1)),
    ("model.attention_dropout=1", 1, "model.attention_dropout", 1, "[0, 1)", set(), (0.0, 0.1)),
    ("model.layer_norm_eps=0", 1, "model.layer_norm_eps", 0, "(0, inf)", set(), (1e-12,)),
    ("model.type_vocab_size=0", 1, "model.type_vocab_size", 0, "must be an integer >= 1", set(), (1, 2)),
    (
        "model.tie_word_embeddings=false",
        1,
        "model.tie_word_embeddings",
        False,
        "is its input embedding",
        set(),
        (True,),
    ),
    (
        "train.seq_length=128",
        1,
        "train.seq_length",
        128,
        "positions are learned",
        {"model.max_position_embeddings"},
        (64,),
    ),
    (
        "data.tokenizer=bytes train.samples=p.jsonl train.samples_interval=5 train.samples_tokens=8",
        1,
        "train.samples",
        "p.jsonl",
        "needs a model that continues text",
        {"model.family"},
        (None,),
    ),
    (
        "data.tokenizer=bytes train.eval_tasks=[arc_easy] train.eval_interval=5",
        1,
        "train.eval_tasks",
        ["arc_easy"],
        "needs a model that continues text",
        {"model.family"},
        ([],),
    ),
    (f"{MODERN} model.norm_eps=0", 1, "model.norm_eps", 0, "(0, inf)", set(), (1e-5,)),
    (f"{MODERN} model.local_attention=1", 1, "model.local_attention", 1, "must be an integer >= 2", set(), (2, 3)),
    (f"{MODERN} model.local_rope_theta=0", 1, "model.local_rope_theta", 0, "(0, inf)", set(), (10000.0,)),
    (f"{MODERN} model.global_rope_theta=0", 1, "model.global_rope_theta", 0, "(0, inf)", set(), (160000.0,)),
    (
        f"{MODERN} model.global_attn_every_n_layers=0",
        1,
        "model.global_attn_every_n_layers",
        0,
        "must be an integer >= 1",
        set(),
        (1, 2),
    ),
    (
        f"{MODERN} model.layer_types=[full_attention]",
        1,
        "model.layer_types",
        ("full_attention",),
        "must have one entry for each layer",
        {"model.num_hidden_layers"},
        (None,),
    ),
    (
        f"{MODERN} model.tie_word_embeddings=false",
        1,
        "model.tie_word_embeddings",
        False,
        "is its input embedding",
        set(),
        (True,),
    ),
]
GEMMA4_RULES = [
    (f"{GEMMA4} model.global_head_dim=0", 1, "model.global_head_dim", 0, "must be an integer >= 1", set(), (2,)),
    (f"{GEMMA4} model.global_head_dim=9", 1, "model.global_head_dim", 9, "must be even", set(), (8, 10)),
    (
        f"{GEMMA4} model.num_hidden_layers=2 model.layer_types=[full_attention,sliding_attention]",
        1,
        "model.layer_types",
        ("full_attention", "sliding_attention"),
        "must end with full_attention",
        set(),
        (("full_attention", "full_attention"), None),
    ),
    (
        f"{GEMMA4} model.num_attention_heads=8 model.num_key_value_heads=4 model.num_global_key_value_heads=3",
        1,
        "model.num_global_key_value_heads",
        3,
        "must divide num_attention_heads",
        {"model.num_attention_heads"},
        (2, 4),
    ),
    (
        f"{GEMMA4} model.num_attention_heads=12 model.num_key_value_heads=4 model.num_global_key_value_heads=2 layout.tp=6 train.global_batch=12",
        6,
        "layout.tp",
        6,
        "must divide num_key_value_heads or be a multiple of it",
        {"model.num_key_value_heads"},
        (2,),
    ),
]
GEMMA4_RULES += [
    (
        f"{GEMMA4} model.hidden_size_per_layer_input=-1",
        1,
        "model.hidden_size_per_layer_input",
        -1,
        "must be an integer >= 0",
        set(),
        (0, 1),
    ),
    (
        f"{GEMMA4} model.vocab_size_per_layer_input=500",
        1,
        "model.vocab_size_per_layer_input",
        500,
        "has no effect without model.hidden_size_per_layer_input",
        {"model.hidden_size_per_layer_input"},
        (None,),
    ),
    (
        f"{GEMMA4} model.hidden_size_per_layer_input=8 model.vocab_size=300 model.vocab_size_per_layer_input=100",
        1,
        "model.vocab_size_per_layer_input",
        100,
        "must be >= vocab_size",
        {"model.vocab_size"},
        (300, None),
    ),
    (
        f"{GEMMA4} model.num_hidden_layers=4 model.num_kv_shared_layers=3 "
        "model.layer_types=[sliding_attention,full_attention,sliding_attention,full_attention]",
        1,
        "model.num_kv_shared_layers",
        3,
        "must leave a layer of each kind",
        {"model.layer_types"},
        (2,),
    ),
    (
        f"{GEMMA4} model.use_double_wide_mlp=true",
        1,
        "model.use_double_wide_mlp",
        True,
        "has no effect without model.num_kv_shared_layers",
        {"model.num_kv_shared_layers"},
        (False,),
    ),
    (
        f"{GEMMA4} model.num_experts=4",
        1,
        "model.moe_intermediate_size",
        None,
        "must be set for experts",
        {"model.num_experts"},
        (96,),
    ),
    (
        f"{GEMMA4} model.num_experts=-1",
        1,
        "model.num_experts",
        -1,
        "must be an integer >= 0",
        set(),
        (0,),
    ),
    (
        f"{GEMMA4} model.moe_intermediate_size=8",
        1,
        "model.moe_intermediate_size",
        8,
        "has no effect without model.num_experts",
        {"model.num_experts"},
        (None,),
    ),
]
MAMBA_BASE = {
    **BASE,
    "model": {
        "family": "mamba2",
        "vocab_size": 256,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_heads": 4,
        "head_dim": 32,
        "n_groups": 2,
    },
}
MAMBA_RULES = [
    (
        "model.num_heads=8 model.head_dim=16 layout.tp=3",
        3,
        "layout.tp",
        3,
        "must divide num_heads",
        {"model.num_heads"},
        (1,),
    ),
    (
        "model.num_heads=12 model.head_dim=32 model.hidden_size=192 model.n_groups=3 layout.tp=2",
        2,
        "layout.tp",
        2,
        "must divide n_groups or be a multiple of it",
        {"model.n_groups"},
        (1,),
    ),
    ("model.n_groups=3", 1, "model.n_groups", 3, "must divide num_heads", {"model.num_heads"}, (2, 4)),
    (
        "model.num_heads=6",
        1,
        "model.num_heads",
        6,
        "must be expand * hidden_size",
        {"expand * hidden_size", "model.head_dim"},
        (4,),
    ),
    ("model.conv_kernel=1", 1, "model.conv_kernel", 1, "must be an integer >= 2", set(), (2, 3)),
    (
        "model.time_step_limit=[0.5,0.1]",
        1,
        "model.time_step_limit",
        (0.5, 0.1),
        "must be two numbers",
        set(),
        ((0.0, float("inf")),),
    ),
    (
        "model.time_step_min=0.2",
        1,
        "model.time_step_min",
        0.2,
        "must be <= time_step_max",
        {"model.time_step_max"},
        (0.1,),
    ),
    ("model.time_step_floor=0", 1, "model.time_step_floor", 0.0, "(0, inf)", set(), (1e-4,)),
    (
        "layout.cp=2 layout.cp_attention=ring",
        2,
        "layout.cp_attention",
        "ring",
        "has no effect without layers with attention",
        {"model.family"},
        ("auto",),
    ),
    (
        "layout.cp=2 layout.cp_degree=dynamic",
        2,
        "layout.cp_degree",
        "dynamic",
        "must be fixed",
        {"model.family"},
        ("fixed",),
    ),
    (
        "layout.cp=4 train.seq_length=16",
        4,
        "train.seq_length",
        16,
        "as many tokens as a convolution reads",
        {"layout.cp", "tokens before one"},
        (24,),
    ),
    (
        "train.recompute_ops=[scan,delta]",
        1,
        "train.recompute_ops",
        ["scan", "delta"],
        "among norm, qkv, conv, scan, up,",
        {"model.family", "unknown"},
        ([],),
    ),
    (
        f"{FP8}=tensorwise",
        1,
        "train.fp8.recipe",
        "tensorwise",
        "or leave them out: train.fp8.exclude=['*.in_proj.weight']",
        {
            "backbone.layers.0.mixer.in_proj.weight",
            "nearest sizes",
            "layout.tp",
            "sizes in multiples of",
        },
        (),
    ),
]
DELTA_BASE = {
    **BASE,
    "model": {
        "family": "qwen3_5_text",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    },
}
DELTA_RULES = [
    (
        "layout.tp=3",
        3,
        "layout.tp",
        3,
        "must divide linear_num_value_heads",
        {"model.linear_num_value_heads"},
        (1,),
    ),
    (
        "model.linear_num_key_heads=4 model.linear_num_value_heads=12 layout.tp=6",
        6,
        "layout.tp",
        6,
        "must divide linear_num_key_heads or be a multiple of it",
        {"model.linear_num_key_heads"},
        (2,),
    ),
    (
        "model.linear_num_key_heads=3",
        1,
        "model.linear_num_key_heads",
        3,
        "must divide linear_num_value_heads",
        {"model.linear_num_value_heads"},
        (2, 4),
    ),
    (
        "model.linear_conv_kernel_dim=1",
        1,
        "model.linear_conv_kernel_dim",
        1,
        "must be an integer >= 2",
        set(),
        (2, 3),
    ),
    (
        "model.layer_types=[full_attention,linear_attention]",
        1,
        "model.layer_types",
        ("full_attention", "linear_attention"),
        "must have one kind per layer",
        {"kinds", "model.num_hidden_layers"},
        (("full_attention", "linear_attention") * 2, None),
    ),
    (
        "model.family=qwen3_5_moe_text model.intermediate_size=96",
        1,
        "model.intermediate_size",
        96,
        "has no effect without layers without experts",
        {"model.family"},
        (None,),
    ),
    (
        "layout.cp=2 layout.cp_degree=dynamic",
        2,
        "layout.cp_degree",
        "dynamic",
        "must be fixed",
        {"model.family"},
        ("fixed",),
    ),
    (
        "train.recompute_ops=[delta,scan]",
        1,
        "train.recompute_ops",
        ["delta", "scan"],
        "among norm, qkv, rope, attention, conv, delta, up,",
        {"model.family", "unknown"},
        ([],),
    ),
]
TABLE = [
    *((MAMBA_BASE, *row) for row in MAMBA_RULES),
    *((DELTA_BASE, *row) for row in DELTA_RULES),
    *((BASE, *row) for row in GEMMA4_RULES),
    *((BERT_BASE, *row) for row in BERT_RULES),
    (BASE, "task={name: mlm}", 1, "task.name", "mlm", "is for models that read both ways", {"model.family"}, ()),
    *((BASE, *row) for row in RULES),
    *((GPT2_BASE, *row) for row in GPT2_RULES),
    *((T5_BASE, *row) for row in T5_RULES),
    *((LLAVA_BASE, *row) for row in LLAVA_RULES),
    *((WHISPER_BASE, *row) for row in WHISPER_RULES),
    *((GEMMA3_BASE, *row) for row in GEMMA3_RULES),
    (BASE, "data.room={patches: 4}", 1, "data.room", {"patches": 4}, "this model reads none", {"model.family"}, ({},)),
    (
        BASE,
        "data.processor=a",
        1,
        "data.processor",
        "a",
        "a model that reads images or sound",
        {"model.family"},
        (None,),
    ),
    (
        BASE,
        "task={name: span, encoder_length: 64}",
        1,
        "task.name",
        "span",
        "which this model does not read",
        {"model.family"},
        (),
    ),
]


@pytest.mark.parametrize(
    "base, overrides, world, field, value, rule, because, valid",
    TABLE,
    ids=lambda x: x if isinstance(x, str) and "=" in x else "",
)
def test_rule(base, overrides, world, field, value, rule, because, valid):
    facts = replace(LAPTOP, world_size=world)
    run = load_run(None, split(overrides), base)
    found = check(run, facts)
    [broken] = [p for p in found if p.field == field and rule in p.rule]
    assert broken.value == value and set(broken.because) == because and broken.valid == valid
    for suggestion in broken.valid:
        after = check(tree.replace_at(run, field, suggestion), facts)
        assert all((p.field, p.rule) != (field, broken.rule) for p in after)
    assert all(name in str(broken) for name in (field, repr(broken.value), *because, *map(str, valid)))


OTHER_TASKS = {
    "an encoder": (BERT_BASE, "task={name: pretrain}"),
    "an encoder whose task makes two texts": (BERT_BASE, "task={name: span, encoder_length: 64, noise: 0.3}"),
    "a head over classes": (BERT_BASE, "task={name: mlm, rate: 0.3} model.head=sequence model.labels=[no,yes]"),
    "a head over the vocabulary": (BERT_BASE, "task={name: classify}"),
    "a decoder": (BASE, "task={name: mlm, rate: 0.3}"),
    "a decoder whose task makes two texts": (BASE, "task={name: span, encoder_length: 64}"),
    "an encoder and a decoder": (T5_BASE, "task={}"),
    "an encoder and a decoder whose task reads both ways": (T5_BASE, "task={name: mlm, rate: 0.3}"),
}


@pytest.mark.parametrize("case", OTHER_TASKS)
def test_the_task_that_a_message_names_works_when_it_is_typed(case):
    """Whatever fields the other task has, and with those that this one needs."""
    base, overrides = OTHER_TASKS[case]
    for broken in problems(split(overrides), replace(LAPTOP, world_size=1), base):
        assert broken.field == "task.name"
        [typed] = re.findall(r"task=\{.*?\}", broken.rule)
        after = problems([*split(overrides), typed], replace(LAPTOP, world_size=1), base)
        assert not [p for p in after if p.field.startswith("task") or p.field in overrides]


def split(overrides: str) -> list[str]:
    """Cut a row of overrides at blanks that stand before a KEY=."""
    parts: list[str] = []
    for word in overrides.split():
        if "=" in word:
            parts.append(word)
        else:
            parts[-1] += f" {word}"
    return parts


ACCEPTED = [
    (BASE, "", 1),
    (BASE, "layout.tp=2 layout.pp=2", 8),
    (BASE, "model.num_hidden_layers=10 layout.pp=4", 4),  # row 11: stages may be uneven
    (BASE, "model.num_hidden_layers=8 layout.pp=2 layout.virtual_stages=3", 2),  # row 12
    (BASE, "layout.pp=4 train.global_batch=4", 4),  # row 15: fewer micro-batches than stages
    (BASE, "layout.pp=4 layout.stages=[1,3,1,1]", 4),
    (BASE, "layout.pp=2 layout.sharding=2 layout.prefetch=0", 4),  # levels 2 and 3 with pipelines
    (BASE, "layout.sharding=3 layout.reshard_after_forward=false layout.shard_group=4", 4),
    (
        BASE,
        f"{MIXTRAL} layout.tp=2 layout.ep=4 layout.sharding=3 layout.shard_group=2 layout.shard_across=optimizer",
        8,
    ),
    (BASE, "model.num_key_value_heads=2 layout.tp=4", 4),  # kv heads shared by ranks
    (BASE, "model.intermediate_size=97 layout.tp=4 model.vocab_size=257", 4),
    (BASE, "model.hidden_size=100 model.num_attention_heads=12 model.head_dim=8", 1),
    (BASE, "train.precision=fp16 train.loss_scale=1024", 1),
    (BASE, "train.rampup={start: 4, increment: 4, samples: 100}", 2),
    (BASE, "optim.schedule=wsd optim.wsd_decay_steps=10 optim.lr=0", 1),
    (BASE, "checkpoint.keep_last=0 checkpoint.interval=10", 1),
    (BASE, "data.mock=false data.paths=[a,b] data.weights=[1,2] data.max_epochs=1", 1),
    (BASE, "data.packing=online layout.cp=2 layout.cp_degree=dynamic layout.tp=2", 4),
    (BASE, "data.packing=online layout.cp=2 layout.cp_degree=dynamic train.cuda_graphs=on", 2),
    (BASE, f"{MIXTRAL} layout.ep=2 layout.dispatch=alltoall train.cuda_graphs=on", 2),
    (BASE, f"{MIXTRAL} train.plain_ops=[grouped] train.cuda_graphs=on", 1),
    (BASE, "train.offload_layers=1", 1),
    (BASE, "train.eval_interval=5 train.eval_samples=8 data.valid.web=[x]", 1),
    (BASE, f"{MIXTRAL} layout.tp=2 layout.ep=4 layout.etp=2", 8),  # the expert view is cut on its own: over tp and dp
    (BASE, f"{MIXTRAL} model.intermediate_size=3 layout.tp=4", 4),  # experts are not cut over tp
    (BASE, f"{QWEN3_MOE} layout.ep=2 layout.dispatch=allgather layout.expert_room=.inf", 2),
    (BASE, f"{QWEN3_MOE} layout.ep=2 layout.dispatch=push layout.expert_room=1.25", 2),
    (BASE, f"{OSS} layout.etp=4 model.swiglu_limit=.inf", 4),
    (
        BASE,
        "train.precision=bf16 train.fp8={recipe: mxfp8, exclude: ['*.3.mlp.*'], end_layers: 1, shadow_interval: 5, min_cosine: 0.9}",
        1,
    ),
    (
        BASE,
        f"{IN_BACKWARD} train.precision=bf16 optim.masters=split optim.moments=8bit train.global_batch=4 layout.sharding=3",
        2,
    ),
    (
        BASE,
        f"{IN_BACKWARD} optim.clip_by=model optim.clip_grad=0 {MIXTRAL} layout.ep=2 layout.dispatch=alltoall train.global_batch=4",
        2,
    ),
    (GPT2_BASE, "train.fp8.recipe=nvfp4 layout.tp=2", 2),
    (GPT2_BASE, "model.dropout=0.1 model.attention_dropout=0.1 layout.tp=2", 2),
]


@pytest.mark.parametrize("base, overrides, world", ACCEPTED, ids=lambda x: x if isinstance(x, str) else "")
def test_accepted(base, overrides, world):
    assert problems(split(overrides), replace(LAPTOP, world_size=world), base) == []


LARGE = [
    ("model.num_hidden_layers=1000000000000000000", 1, "model.num_hidden_layers", "must be an integer <= 1024", 1024),
    ("model.vocab_size=18446744073709551616", 1, "model.vocab_size", "must be an integer <= 2147483647", 2**31 - 1),
    ("model.hidden_size=1000000000000000000", 1, "model.hidden_size", "must be an integer <= 1048576", 2**20),
    (f"model.num_attention_heads={10**400}", 1, "model.num_attention_heads", "must be an integer <= 16384", 2**14),
    ("train.seq_length=9223372036854775808", 1, "train.seq_length", "must be an integer <= 16777216", 2**24),
    (
        "train.seq_length=16777216 train.micro_batch=5 train.global_batch=5",
        1,
        "train.micro_batch",
        "micro_batch * seq_length must be <= 67108864",
        4,
    ),
    ("train.global_batch=1000000000", 2, "train.global_batch", "must be <= 16384 * micro_batch * dp", 2**16),
    ("layout.pp=9223372036854775808", 1, "layout.pp", "must be an integer <= 2147483647", 2**31 - 1),
    ("layout.pp=2", 2**63, "--ranks", "must be <= 1048576", 2**20),
    (
        "layout.cp=2 train.global_batch=1000000000",
        4,
        "train.global_batch",
        "must be <= 16384 * micro_batch * dp",
        2**16,
    ),
    (f"{FP8}=delayed train.fp8.history=2147483647", 1, "train.fp8.history", "must be an integer <= 1048576", 2**20),
    (
        "train.guard.sigmas=6 train.guard.window=2147483647",
        1,
        "train.guard.window",
        "must be an integer <= 1048576",
        2**20,
    ),
    ("optim.warmup_steps=2147483648", 1, "optim.warmup_steps", "must be an integer <= 2147483647", 2**31 - 1),
]


@pytest.mark.parametrize("overrides, world, field, rule, limit", LARGE, ids=[row[2] + row[3] for row in LARGE])
def test_absurd_numbers_are_told_at_once(overrides, world, field, rule, limit):
    """Nothing counts to them, nothing overflows; the limit itself is allowed."""
    [found] = problems(overrides.split(), replace(LAPTOP, world_size=world))
    assert (found.field, found.valid) == (field, (limit,)) and rule in found.rule
    if field == "--ranks":
        assert check_limits(load_run(None, overrides.split(), BASE), limit) == []
    else:
        assert check_limits(load_run(None, [*overrides.split(), f"{field}={limit}"], BASE), world) == []


COUNTED = {
    "num_experts_per_tok": 2**8,
    "n_shared_experts": 2**6,
    "num_nextn_predict_layers": 2**6,
    "num_hidden_layers": 2**10,
}
NAMED_ONLY = (
    "vocab_size",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "sliding_window",
    "max_window_layers",
    "decoder_sparse_step",
    "mlp_only_layers",
    "first_k_dense_replace",
    "n_group",
    "topk_group",
)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_every_size_of_a_model_has_a_limit(family):
    """A million and one is refused of each of them, at once; of what is counted layer by layer and token by token,
    less."""
    run = load_run(RECIPES / f"tiny_{family}.yaml")
    keys = [k for k in tree.keys(type(run.model), "model.") if "int" in k.type and k.name not in NAMED_ONLY]
    assert len(keys) >= 6
    for key in keys:
        large = tree.replace_at(run, key.path, COUNTED.get(key.name, 2**20) + 1)
        assert [p.field for p in check_limits(large, 1)] == [key.path]


def test_a_ramp_may_count_many_samples():
    """More than other numbers, but what 64 bits hold."""
    ramp = ["train.rampup.start=16", "train.rampup.increment=16"]
    for samples, fields in ((2**48, []), (2**48 + 1, ["train.rampup.samples"])):
        run = load_run(RECIPES / "tiny_llama.yaml", [*ramp, f"train.rampup.samples={samples}"])
        assert [p.field for p in check_limits(run, 1)] == fields


sizes = st.integers(min_value=-2, max_value=40)


@settings(max_examples=20, deadline=None)
@given(
    tp=sizes,
    pp=sizes,
    vs=st.integers(0, 4),
    gb=st.integers(-1, 200),
    mb=sizes,
    heads=sizes,
    kv=sizes,
    hidden=sizes,
    layers=sizes,
    seq=sizes,
    world=st.integers(1, 32),
)
def test_every_suggestion_ends_its_problem(tp, pp, vs, gb, mb, heads, kv, hidden, layers, seq, world):
    overrides = [
        f"layout.tp={tp}",
        f"layout.pp={pp}",
        f"layout.virtual_stages={vs}",
        f"train.global_batch={gb}",
        f"train.micro_batch={mb}",
        f"model.num_attention_heads={heads}",
        f"model.num_key_value_heads={kv}",
        f"model.hidden_size={hidden}",
        f"model.num_hidden_layers={layers}",
        f"train.seq_length={seq}",
    ]
    facts = replace(LAPTOP, world_size=world)
    run = load_run(None, overrides, BASE)
    for broken in check(run, facts):
        for suggestion in broken.valid:
            after = check(tree.replace_at(run, broken.field, suggestion), facts)
            assert (broken.field, broken.rule) not in {(p.field, p.rule) for p in after}


def test_suggestions_start_no_new_problem_where_they_can():
    """tp=2 would divide the heads, but not leave a data-parallel size for this batch; 8 does both."""
    run = load_run(
        None,
        [
            "layout.tp=6",
            "model.num_attention_heads=8",
            "train.micro_batch=8",
            "train.global_batch=8",
            "model.hidden_size=64",
        ],
        BASE,
    )
    [broken] = [p for p in check(run, replace(LAPTOP, world_size=8)) if p.rule == "must divide world_size"]
    assert broken.valid == (8,)


@pytest.mark.parametrize("others", [[], ["train.global_batch=6"], ["layout.pp=3"]], ids=["alone", "batch", "pp"])
def test_sizes_that_are_offered_are_those_of_the_ranks(others):
    """tp=6 and 8 divide 24 heads, and 6 does for 6 heads of keys and values; 4 ranks have neither, whatever else is
    wrong."""
    heads = ["model.num_attention_heads=24", "model.num_key_value_heads=6", "model.hidden_size=384", "layout.tp=7"]
    found = [
        p
        for p in check(load_run(None, [*heads, *others], BASE), replace(LAPTOP, world_size=4))
        if p.field == "layout.tp"
    ]
    assert len(found) == 3 and all(p.valid and set(p.valid) <= {1, 2} for p in found)


def test_sizes_that_are_offered_where_the_ranks_follow_the_layout():
    """Nobody asked for 7 ranks: with tp=6 there are 6."""
    heads = ["model.num_attention_heads=24", "model.num_key_value_heads=6", "model.hidden_size=384", "layout.tp=7"]
    found = check(load_run(None, heads, BASE), replace(LAPTOP, world_size=7, world_follows=True))
    assert [p.valid for p in found if p.rule.startswith("must divide num_")] == [(6, 12)] * 2


# ---- the machine ---------------------------------------------------------------------------------


def test_device_rules():
    old_gpu = Facts(
        device="cuda", device_count=2, local_ranks=4, world_size=4, device_name="Tesla V100", bf16_ok=False, files=False
    )
    found = {p.field: p for p in problems(["train.precision=bf16"], old_gpu)}
    assert found["train.precision"].because == {"device": "Tesla V100"} and found["train.precision"].valid == (
        "fp16",
        "fp32",
    )
    assert found["--ranks"].value == 4 and found["--ranks"].because == {"GPUs": 2}
    [no_gpu] = problems(["train.device=cuda"], Facts(device_count=0, files=False))
    assert (no_gpu.field, no_gpu.valid) == ("train.device", ("cpu", "auto"))
    [on_cpu] = problems(["train.cuda_graphs=on", "train.device=cpu"], LAPTOP)
    assert (on_cpu.field, on_cpu.valid) == ("train.cuda_graphs", ("auto", "off"))
    for facts in (
        Facts(device_count=0, files=False),
        replace(old_gpu, bf16_ok=True, local_ranks=2, world_size=2, triton_ok=False),
    ):
        [no_triton] = problems(["train.kernels=triton"], facts)
        assert (no_triton.field, no_triton.valid) == ("train.kernels", ("auto", "plain")) and no_triton.because
    [unknown] = problems(["train.plain_ops=[norm,rpoe]"], LAPTOP)
    assert unknown.field == "train.plain_ops" and unknown.because == {"unknown": "rpoe"} and "rope" in unknown.rule
    assert unknown.valid == (["norm", "rope"],)
    assert (
        problems(["train.kernels=triton", "train.cuda_graphs=on"], LAPTOP) == []
    )  # a plan for machines that have GPUs
    [package] = problems(["log.tensorboard=true"], Facts(missing=("tensorboard",), files=False))
    assert package.field == "log.tensorboard" and package.valid == (False,) and "phalanx[tensorboard]" in package.rule
    asked = ["train.eval_tasks=[arc_easy]", "train.eval_interval=5", "data.tokenizer=bytes"]
    [package] = problems(asked, Facts(missing=("lm_eval",), files=False))
    assert package.field == "train.eval_tasks" and package.valid == ([],) and "phalanx[eval]" in package.rule


def test_recipes_need_their_gpus():
    ampere = replace(LAPTOP, device="cuda", device_name="NVIDIA A100", capability=(8, 0))
    for recipe, capability, valid in (
        ("tensorwise", (8, 0), ("mxfp8", "nvfp4")),
        ("blockwise", (8, 9), ("tensorwise", "delayed", "mxfp8", "nvfp4")),
    ):
        overrides = [
            f"train.fp8.recipe={recipe}",
            "train.precision=bf16",
            "train.micro_batch=4",
            "model.hidden_size=128",
            "model.intermediate_size=128",
        ]
        [lacks] = problems(overrides, replace(ampere, capability=capability))
        assert (
            lacks.field == "train.fp8.recipe"
            and "NVIDIA A100" in lacks.because["device"]
            and set(lacks.valid) == set(valid[:3])
        )
        assert problems(overrides, replace(ampere, capability=(9, 0))) == []


def test_moments_in_8_bits_need_their_gpu():
    ampere = replace(LAPTOP, device="cuda", device_name="NVIDIA A100", capability=(8, 0))
    [lacks] = problems(["optim.moments=fp8"], ampere)
    assert (
        lacks.field == "optim.moments"
        and "NVIDIA A100" in lacks.because["device"]
        and lacks.valid == ("bf16", "master")
    )
    assert problems(["optim.moments=fp8"], replace(ampere, capability=(8, 9))) == [] == problems(["optim.moments=fp8"])


def test_problems_of_the_environment_are_shown_with_the_others():
    found = problems(["train.steps=0"], Facts(env=(Problem("RANK", 5, "must be < WORLD_SIZE"),), files=False))
    assert [p.field for p in found] == ["RANK", "train.steps"]


# ---- paths ---------------------------------------------------------------------------------------


def test_missing_data_is_exit_3_and_names_the_file(tmp_path):
    (tmp_path / "wiki.bin").touch(), (tmp_path / "wiki.idx").touch(), (tmp_path / "half.bin").touch()
    found = problems(
        ["data.mock=false", f"data.paths=[{tmp_path}/wkii, {tmp_path}/half, {tmp_path}/wiki.bin]"], Facts()
    )
    assert [p.field for p in found] == ["data.paths.0", "data.paths.1"]
    assert found[0].valid == (f"{tmp_path}/wiki",) and "wkii.bin" in found[0].rule and "wkii.idx" in found[0].rule
    assert "half.idx" in found[1].rule and "half.bin" not in found[1].rule
    with pytest.raises(DataError, match="half.idx"):
        raise_problems(found)
    with pytest.raises(ConfigError):  # together with a broken rule it is a bad config
        raise_problems([*found, Problem("a", 1, "b")])


def test_missing_tokenizer(tmp_path):
    (tmp_path / "tok").mkdir()
    [empty] = problems([f"data.tokenizer={tmp_path}/tok"], Facts())
    assert "must hold one of tokenizer.json" in empty.rule
    [typo] = problems([f"data.tokenizer={tmp_path}/tko"], Facts())
    assert typo.valid == (f"{tmp_path}/tok",)
    (tmp_path / "tok" / "tokenizer.json").touch()
    assert problems([f"data.tokenizer={tmp_path}/tok"], Facts()) == []


@pytest.mark.parametrize("field", ["checkpoint.load", "init_from"])
def test_a_mistyped_checkpoint_is_exit_4_and_never_random_weights(tmp_path, field):
    (tmp_path / "run1").mkdir()
    found = problems([f"{field}={tmp_path}/rnu1"], Facts())
    assert found[0].field == field and found[0].valid == (f"{tmp_path}/run1",)
    with pytest.raises(CheckpointError, match="rnu1.*does not exist.*random.*run1"):
        raise_problems(found)
    assert problems([f"{field}={tmp_path}/run1"], Facts()) == []
    assert "hf download" not in found[0].rule


def test_a_name_of_the_hub_is_downloaded_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (found,) = problems(["init_from=meta-llama/Llama-3.1-8B"], Facts())
    assert "hf download OWNER/NAME --local-dir FOLDER" in found.rule
    (tmp_path / "runs").mkdir()
    for name in ("runs/first", "./first", "../first", "~/first", "first"):
        assert "hf download" not in problems([f"init_from={name}"], Facts())[0].rule, name


@pytest.mark.parametrize(
    "config, told",
    [
        (
            '{"model_type": "qwen2_moe"}',
            [
                "model_type='qwen2_moe' is no family of Phalanx (nearest: qwen",
                "docs/ops-and-modules.md",
                "model.family='llama'",
            ],
        ),
        (
            '{"model_type": "mistral"}',
            ["must hold a model of the same family", "its model_type='mistral'", "model.family='llama'"],
        ),
        ("{", ["must hold a config.json that can be read"]),
        ('{"model_type": "llama"}', ["must hold"]),
        ("{}", []),
    ],
)
def test_init_from_another_architecture(tmp_path, config, told):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(config)
    found = problems([f"init_from={tmp_path}/hf"], Facts())
    assert [p.field for p in found] == ["init_from"] * bool(told)
    assert all(part in str(found[0]) for part in told)


@pytest.mark.parametrize("name, code", [("file", "ENOTDIR"), ("file/below/it", "ENOTDIR"), ("locked", "EACCES")])
def test_run_folder(tmp_path, name, code, monkeypatch):
    (tmp_path / "file").touch(), (tmp_path / "locked").mkdir()
    really = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("locked") and really(path, mode))
    [found] = problems([f"dir={tmp_path}/{name}"], Facts())
    assert found.field == "dir" and code in found.rule and found.valid
    assert problems([f"dir={found.valid[0]}"] if name == "file" else [f"dir={tmp_path}/new/one"], Facts()) == []
    assert not (tmp_path / "new").exists()


# ---- form ----------------------------------------------------------------------------------------

FORM = [
    ("optim.learning_rte=1", "optim.learning_rte", "is not a key of optim", ("optim.lr",)),
    ("train.stepz=1", "train.stepz", "is not a key of train", ("train.steps",)),
    ("model.lr=1", "model.lr", "it belongs to optim: optim.lr", ("optim.lr",)),
    ("lr=1", "lr", "it belongs to optim: optim.lr", ("optim.lr",)),
    ("tensor_model_parallel_size=2", "tensor_model_parallel_size", "is not a key at the top", ("layout.tp",)),
    ("model.layer_norm_epsilon=1", "model.layer_norm_epsilon", 'only with family "gpt2"', ("model.rms_norm_eps",)),
    ("optim.momentum=0.9", "optim.momentum", "only with name muon, sgd", ("optim.beta1",)),
    ("layout.tp=2.5", "layout.tp", "must be int, got float", (2, 3)),
    ("layout.tp=true", "layout.tp", "must be int, got bool", (1,)),
    ("layout.tp='2'", "layout.tp", "must be int, got string", (2, 1)),
    ("layout.tp=[2]", "layout.tp", "must be int, got list", (2, 1)),
    ("layout.tp=", "layout.tp", "must be int, got null", (1,)),
    ("train.steps=1e6", "train.steps", "must be int or null, got float", (1000000,)),
    ("optim.lr=fast", "optim.lr", "must be float, got string", (3e-4,)),
    ("data.mock=no", "data.mock", "must be bool, got string", (False,)),
    ("layout.sharding=true", "layout.sharding", "must be one of 0, 1, 2, 3", (0, 1)),
    ("layout.sharding=4", "layout.sharding", "must be one of 0, 1, 2, 3", (0, 1)),
    ("train.precision=bf61", "train.precision", 'must be one of "fp32", "bf16"', ("bf16", "fp64")),
    ("train.precision=no", "train.precision", "must be one of", ("fp32", "bf16", "fp16", "fp64")),
    ("optim.name=adamm", "optim.name", 'must be one of "adamw"', ("adamw",)),
    ("model.family=lama", "model.family", 'must be one of "llama", "mistral", "qwen2", "qwen3", ', ("llama",)),
    ("model.family=gpt-oss", "model.family", 'must be one of "llama", ', ("gpt_oss",)),
    ("model.family=qwen3_meo", "model.family", 'must be one of "llama", ', ("qwen3_moe",)),
    (
        "layout.dispatch=deepep",
        "layout.dispatch",
        "must be one of",
        ("auto", "allgather", "alltoall", "push"),
    ),
    ("data.tokenizer=3", "data.tokenizer", "must be str or null, got int", ("3",)),
    ("data.paths=3", "data.paths", "must be list of str, got int", ([],)),
    ("layout.stages=[1,x]", "layout.stages.1", "must be int, got string", ()),
    ("train.rampup.start=2", "train.rampup.increment", "is required: int", ()),
    ("train=3", "train", "must be section", ()),
    (
        "model=pretrained",
        "model",
        "must be a section with its family, got string; of a Hugging Face folder: model.from=FOLDER",
        (),
    ),
]


@pytest.mark.parametrize("override, field, rule, valid", FORM, ids=[row[0] for row in FORM])
def test_form(override, field, rule, valid):
    with pytest.raises(ConfigError) as raised:
        load_run(None, [override], BASE)
    [broken] = [p for p in raised.value.problems if p.field == field]
    assert rule in broken.rule and broken.where == "command line" and f"{field}=" in str(broken)
    assert broken.valid[: len(valid)] == valid and (valid or not broken.valid)
    for suggestion in broken.valid:
        data = load_base_with(override.partition("=")[0], broken, suggestion)
        assert (broken.field, broken.rule) not in {(p.field, p.rule) for p in read(None, [], data).problems}


MUON_KEYS = {
    "beta1": ("optim.momentum", "optim.fallback.beta1"),
    "betas": ("optim.momentum", "optim.fallback.beta1"),
    "eps": ("optim.fallback.eps",),
}


@pytest.mark.parametrize("key", MUON_KEYS)
def test_keys_of_another_optimizer(key):
    """Muon's own key that does the same, and its fallback's; none of another section."""
    with pytest.raises(ConfigError) as raised:
        load_run(None, ["optim.name=muon", f"optim.{key}=0.9"], BASE)
    [broken] = raised.value.problems
    assert broken.valid == MUON_KEYS[key]
    for suggestion in broken.valid:
        assert problems(["optim.name=muon", f"{suggestion}=0.9"]) == []


@pytest.mark.parametrize("recipe", ["nvfp4_fine", "nvfp4_mixed"])
def test_removed_recipes_name_what_replaces_them(tmp_path, recipe):
    """A config problem like any other, with the place where the value was set; what it says to type works."""
    file = tmp_path / "run.yaml"
    file.write_text(f"train: {{fp8: {{recipe: {recipe}}}}}")
    for path, overrides, where in ((None, [f"train.fp8.recipe={recipe}"], "command line"), (file, [], "run.yaml")):
        with pytest.raises(ConfigError) as raised:
            load_run(path, overrides, BASE)
        [broken] = raised.value.problems
        assert (raised.value.exit_code, broken.field, broken.value) == (2, "train.fp8.recipe", recipe)
        assert "was removed: it is an emulation that no GPU runs fast; type train.fp8.recipe=nvfp4" in broken.rule
        assert where in broken.where
    assert problems(["train.fp8.recipe=nvfp4"], base=GPT2_BASE) == []


def load_base_with(key: str, broken: Problem, suggestion) -> dict:
    """The base config with a suggestion taken: another key for the same value, or another value for the same key."""
    data = {k: dict(v) for k, v in BASE.items()}
    path, value = (
        (suggestion, broken.value) if "not a key" in broken.rule or "is a key of" in broken.rule else (key, suggestion)
    )
    at = data
    for step in path.split(".")[:-1]:
        at = at.setdefault(step, {})
    at[path.split(".")[-1]] = value
    return data


def test_required_keys_say_what_they_are():
    with pytest.raises(ConfigError) as raised:
        load_run(None, ["model.family=llama", "train.steps=1"])
    fields = {p.field: p.rule for p in raised.value.problems}
    assert fields["model.vocab_size"].startswith("is required: int (size of the vocabulary")
    assert "train.global_batch" in fields and "train.steps" not in fields
    with pytest.raises(ConfigError, match="model.family=None: is required: one of"):
        load_run(None, ["model.vocab_size=3"], {"train": TRAIN})


def test_everything_at_once_with_places(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {family: llama, vocab_size: 256, hidden_size: 64, intermediate_size: 96, num_hidden_layers: 4, num_attention_heads: 4}\n"
        "train:\n  steps: 10\n  global_batch: '16'\n  micro_batch: 2\n  seq_length: 64\n  learning_rte: 1\ndata: {mock: true}\n"
        "optim:\n  beta1: 2\n"
    )
    from phalanx.cli.setup import all_problems

    found = {
        p.field: p.where for p in all_problems(read(file, ["layout.tp=3", "layuot=1"]), replace(LAPTOP, world_size=8))
    }
    assert found == {
        "train.global_batch": f"{file}:4",
        "train.learning_rte": f"{file}:7",
        "layuot": "command line",
        "layout.tp": "command line",
        "optim.beta1": f"{file}:10",
        "train.seq_length": f"{file}:6",
    }


# ---- YAML ----------------------------------------------------------------------------------------


def yaml_of(tmp_path: Path, text: str):
    file = tmp_path / "x.yaml"
    file.write_text(text)
    return read(file, [], BASE)


def test_yaml_is_1_2(tmp_path):
    run = yaml_of(
        tmp_path,
        "dir: no\noptim: {lr: 1e-3, eps: 1E-9}\ntrain: {seed: 010, steps: 1_000, timeout_s: 60}\ninit_from: 2024-01-01\n",
    ).run
    assert (run.dir, run.optim.lr, run.train.seed, run.train.steps, run.init_from) == (
        "no",
        1e-3,
        10,
        1000,
        "2024-01-01",
    )
    assert yaml_of(tmp_path, "train: {seed: 0o17}\ndata: {tokenizer: 12:30:45}\n").run.train.seed == 15
    assert yaml_of(tmp_path, "data: {tokenizer: 12:30:45}\n").run.data.tokenizer == "12:30:45"


def test_yaml_duplicates_show_both_lines(tmp_path):
    [twice] = yaml_of(tmp_path, "train:\n  steps: 1\n  seed: 2\n  steps: 3\n").problems
    assert (
        twice.field == "train.steps"
        and twice.because == {"first on line": 2, "again on line": 4}
        and twice.where.endswith("x.yaml:4")
    )


@pytest.mark.parametrize(
    "text, rule, line",
    [
        ("train: [1\nb: 2\n", "is not YAML", 2),
        ("- 1\n", "must hold sections", 1),
        ("a: &x [*x]\n", "must not contain itself", 1),
        ("dir: !!python/name:os.system x\n", "has a tag", 1),
        ('dir: "\\q"\n', "is not YAML", 1),
    ],
)
def test_yaml_that_cannot_be_read(tmp_path, text, rule, line):
    found = yaml_of(tmp_path, text).problems
    assert any(rule in p.rule and p.where.endswith(f"x.yaml:{line}") for p in found)


def test_brackets_without_end(tmp_path):
    [deep] = yaml_of(tmp_path, f"train:\n  steps: {'{a: ' * 5000}").problems
    assert "inside each other" in deep.rule and deep.where.endswith("x.yaml:1")
    assert [p.field for p in read(None, [f"train.steps={'- ' * 5000}1"], BASE).problems] == ["train.steps"]


def test_recipes_by_name(tmp_path):
    """In a folder that has none of them; a path of that name goes first."""
    names = {path.stem.replace("_", "-"): path for path in RECIPES.iterdir() if path.is_file()}
    assert recipes() == names and len(names) > 20
    assert load_run("qwen3-8b") == load_run(RECIPES / "qwen3_8b.py")
    assert load_run("tiny-llama", ["train.steps=7"]).train.steps == 7
    assert read("tiny-llama").where("train.steps").startswith(f"{RECIPES / 'tiny_llama.yaml'}:")
    (tmp_path / "tiny-llama").mkdir()
    [problem] = read("tiny-llama").problems
    assert "is a folder without a config.yaml" in problem.rule


def test_an_unknown_recipe_lists_near_names():
    [problem] = read("lama3-8b").problems
    assert "no recipe of this name" in problem.rule and problem.valid[0] == "llama3-8b"
    [problem] = read("zzz").problems
    assert set(problem.valid) == set(recipes())
    [problem] = read("folder/llama3-8b").problems
    assert problem.valid == ()


def test_missing_file_names_near_ones(tmp_path):
    (tmp_path / "small.yaml").write_text("")
    with pytest.raises(ConfigError) as raised:
        load_run(tmp_path / "smal.yaml")
    [missing] = raised.value.problems
    assert missing.valid == (f"{tmp_path}/small.yaml",) and "No such file" in missing.rule


# ---- round trip, recipes, explain ----------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=12)
numbers = st.floats(allow_nan=False)


@settings(max_examples=20, deadline=None)
@given(
    folder=texts,
    lr=numbers,
    scale=st.dictionaries(texts, numbers, max_size=3),
    paths=st.lists(texts, max_size=3),
    seed=st.integers(),
    stages=st.none() | st.lists(st.integers(), max_size=3),
)
def test_round_trip(tmp_path_factory, folder, lr, scale, paths, seed, stages):
    base = {
        **BASE,
        "dir": folder,
        "optim": {"lr": lr, "lr_scale": scale},
        "data": {"paths": paths, "valid": {"no": paths}},
        "train": {**TRAIN, "seed": seed},
        "layout": {"stages": stages},
    }
    run = load_run(base=base)
    file = tmp_path_factory.getbasetemp() / "round.yaml"
    save_run(run, file)
    assert load_run(file) == run == load_run(base=to_dict(run)) == load_run(base=run)
    assert isinstance(run.data.paths, tuple) and run.optim.lr == lr


def test_the_saved_file_shows_every_key_in_order():
    text = to_yaml(load_run(base=BASE))
    assert [line for line in text.splitlines() if line[0] != " "][:3] == ["model:", "train:", "layout:"]
    assert all(f"{f.name}:" in text for f in dataclasses.fields(Run))


def test_overrides_replace_and_know_maps_with_dots():
    run = load_run(
        None,
        [
            "optim.lr_scale.model.*.x=0.5",
            "train.rampup={start: 2, increment: 2, samples: 9}",
            "train.rampup.start=4",
            "data.valid.a=[x]",
        ],
        BASE,
    )
    assert run.optim.lr_scale == {"model.*.x": 0.5} and run.train.rampup.start == 4 and run.data.valid == {"a": ("x",)}
    assert load_run(None, ["optim.lr_scale={b: 1}"], run).optim.lr_scale == {"b": 1}
    assert load_run(None, ["train.rampup=null"], run).train.rampup is None
    with pytest.raises(ConfigError, match=r"foo=None: must be given as KEY=VALUE"):
        load_run(None, ["foo"], BASE)
    with pytest.raises(ConfigError, match=r"dir='\[a': is not YAML.*command line"):
        load_run(None, ["dir=[a"], BASE)


RECIPE = f"""
from phalanx.models.llama import LlamaConfig
from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
def run():
    return Run(model=LlamaConfig({", ".join(f"{k}={v!r}" for k, v in LLAMA.items() if k != "family")}),
               train=TrainConfig({", ".join(f"{k}={v}" for k, v in TRAIN.items())}),
               data=DataConfig(mock=True))
"""


def test_a_recipe_gives_the_same_object_as_yaml(tmp_path):
    file = tmp_path / "small.py"
    file.write_text(RECIPE)
    assert load_run(file) == load_run(base=BASE)
    assert load_run(file, ["layout.tp=2"]).layout.tp == 2
    loaded = read(file, ["optim.lr=1"])
    assert (
        loaded.where("train.steps") == f"{file}:7"
        and loaded.where("optim.lr") == "command line"
        and loaded.where("model") == str(file)
    )


@pytest.mark.parametrize(
    "text, rule, line",
    [
        ("x = 1", "must define run()", ""),
        ("def run(): return 3", "must define run()", ""),
        ("\n\n1 / 0", "raised ZeroDivisionError", ":3"),
        ("(", "raised SyntaxError", ":1"),
    ],
)
def test_a_recipe_that_does_not_work(tmp_path, text, rule, line):
    file = tmp_path / "bad.py"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_run(file)
    [broken] = raised.value.problems
    assert rule in broken.rule and broken.where == f"{file}{line}"


def test_explain():
    assert explain("layout.tp") == (
        "layout.tp: int, default 1\n    Tensor-parallel size: each layer's weights are sharded over this many ranks; activations "
        "between blocks are\n    sharded along tokens."
    )
    for section in (f.name for f in dataclasses.fields(Run) if tree.sections(tree.hints(Run)[f.name])):
        lines = explain(section).splitlines()
        assert len(lines) > 2 and all(
            line.startswith((f"{section}.", "    ")) for line in lines
        )  # of a text of several lines each
    assert "optim.lr: float, default 0.0003" in explain("optim") and "optim.eps" in explain("optim")
    assert "model.rope_scaling.factor: float or null, default null" in explain("model.rope_scaling")
    assert 'one of "fp32", "bf16", "fp16", "fp64", default "fp32"' in explain("train.precision")
    with pytest.raises(ConfigError) as raised:
        explain("layout.pt")
    assert "layout.tp" in str(raised.value) or "layout.pp" in str(raised.value)


def test_every_key_has_a_doc():
    undocumented = [
        k.path
        for k in tree.leaves(Run)
        if not k.doc and not k.path.startswith("model.rope_scaling") and k.name != "family"
    ]
    assert undocumented == []


def test_tree():
    run = load_run(base=BASE)
    assert tree.get(run, "train.steps") == 100 and tree.replace_at(run, "train.steps", 5).train.steps == 5
    assert run.train.steps == 100
    for path in ("train.nope", "nope", "train.steps.x"):
        with pytest.raises(KeyError):
            tree.get(run, path)
        with pytest.raises(KeyError):
            tree.replace_at(run, path, 1)


def test_checking_tries_few_values(monkeypatch):
    """Under `-O` too: nothing here is an assert. Many problems with far suggestions: the rules are gone through less
    than a hundred times for each."""
    tried, rules = list[Run](), checks.broken_rules
    monkeypatch.setattr(checks, "broken_rules", lambda run, facts: (tried.append(run), rules(run, facts))[1])
    far = ["train.global_batch=100003", "train.micro_batch=7", "layout.tp=5", "layout.pp=7", "model.hidden_size=10007"]
    found = problems(far, replace(LAPTOP, world_size=64))
    assert len(found) == 5 and all(p.valid for p in found) and len(found) < len(tried) < 100 * len(found)


NO_TORCH = """
import sys
import phalanx as px
from phalanx.base.registry import BUILT_IN
from phalanx.models.registry import load_family
from phalanx.nn.adapter import find_adapter
from phalanx.nn.objective import find_objective
from phalanx.optim.optimizer import find_optimizer

px.load, px.train
assert "pydantic" not in sys.modules
run = px.load(sys.argv[1], "lora.method=dora", "optim.name=muon", "optim.fallback.name=adamw")
finders = {"family": load_family, "adapter": find_adapter, "objective": find_objective, "optimizer": find_optimizer}
for seam, find in finders.items():
    for name in BUILT_IN[seam]:
        find(name)
        assert "torch" not in sys.modules, (seam, name)
assert run.lora.rank
"""


def test_a_config_is_read_without_torch():
    """Whatever of ours it names. pydantic comes with the first config that is read."""
    environment = {**os.environ, "PYTHONPATH": str(RECIPES.parent)}
    command = [sys.executable, "-c", NO_TORCH, str(RECIPES / "tiny_llama.yaml")]
    subprocess.run(command, env=environment, check=True, timeout=60)
