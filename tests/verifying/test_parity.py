"""The central test: every layout computes what one process computes, in float64."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from phalanx.layout.config import LayoutConfig
from phalanx.nn.recompute import PRESETS
from tests.harness.parity import MODELS, base_run, compare, truth_of
from tests.harness.sample import covering, rest_in_soak
from tests.quick import QUICK

STEPS = 2


def case(
    model: str,
    world: int,
    global_batch: int | None = None,
    micro_batch: int = 1,
    documents: bool | str = False,
    recompute: str = "none",
    bucket_mb: int = 0,
    one_group: bool = False,
    **layout,
):
    """Without a global batch: micro-batches of each rank for twice the stages, which fills a pipeline, but 4 to 8
    sequences in all. one_group: all heads of a scan share B and C, or those of linear attention a key head."""
    if global_batch is None:
        pp = layout.get("pp", 1)
        dp = world // (layout.get("tp", 1) * layout.get("cp", 1) * pp)
        global_batch = max(4, min(8, 2 * pp * dp * micro_batch))
    return dict(
        model=model,
        world=world,
        global_batch=global_batch,
        micro_batch=micro_batch,
        documents=documents,
        recompute=recompute,
        bucket_mb=bucket_mb,
        one_group=one_group,
        layout=layout,
    )


NAMED = {
    "tp4 with 2 kv heads, odd vocabulary": case("llama", 4, tp=4),
    "tp8, documents": case("llama", 8, tp=8, documents=True, global_batch=2),
    "pp4 x 2 virtual stages, tied": case("llama-tied", 4, pp=4, virtual_stages=2),
    "gpt2 pp4 x 2 virtual stages, tied, dropout": case("gpt2", 4, pp=4, virtual_stages=2),
    "tp2 pp2 dp2 sharded": case("llama", 8, tp=2, pp=2),
    "gpt2 tp2 pp2 dp2 sharded, full recompute": case("gpt2", 8, tp=2, pp=2, recompute="full"),
    "tied tp2 pp2 dp2 sharded": case("llama-tied", 8, tp=2, pp=2, micro_batch=2),
    "fewer micro-batches than stages": case("llama", 4, pp=4, global_batch=2),
    "interleaved, 3 micro-batches on 2 ranks": case("llama", 2, pp=2, virtual_stages=3, global_batch=3),
    "qwen3 tp2 pp2 dp2": case("qwen3", 8, tp=2, pp=2),
    "qwen3 tp4 with 2 kv heads, overlapped, pointwise recompute, documents": case(
        "qwen3", 4, tp=4, tp_overlap="on", recompute="pointwise", documents=True
    ),
    "olmo2 tp4 with 2 kv heads, overlapped, selective recompute, documents": case(
        "olmo2", 4, tp=4, tp_overlap="on", recompute="selective", documents=True
    ),
    "olmo3 cp2 tp2, ring, documents": case("olmo3", 4, cp=2, tp=2, documents=True),
    "gemma3_text cp2 pp2, all-gather, tied, documents": case(
        "gemma3_text", 4, cp=2, pp=2, cp_attention="allgather", documents=True
    ),
    "gemma4_text cp2 tp2, ring, documents": case("gemma4_text", 4, cp=2, tp=2, documents=True),
    "gemma4_text, shared keys, cp2 pp2, ring, documents": case("gemma4_text-shared", 4, cp=2, pp=2, documents=True),
    "gemma4_text, shared keys, tp2 pp2 x 2 virtual stages, packed, selective recompute": case(
        "gemma4_text-shared", 4, tp=2, pp=2, virtual_stages=2, documents="packed", recompute="selective"
    ),
    "gemma4_text, shared keys, pp3 dp2, level 3, split backward": case(
        "gemma4_text-shared", 6, pp=3, schedule="zb_h1", sharding=2, global_batch=4
    ),
    "gemma4_text, shared keys, tp4, full recompute": case("gemma4_text-shared", 4, tp=4, recompute="full"),
    "gemma4_text, experts, tp2 cp2, all-gather, ep2, documents": case(
        "gemma4_text-experts", 4, tp=2, cp=2, ep=2, cp_attention="allgather", documents=True
    ),
    "gemma4_text, experts, pp2 dp2, heads, ep2, sharding 3, pointwise recompute": case(
        "gemma4_text-experts", 8, pp=2, cp=2, cp_ulysses=2, ep=2, sharding=3, recompute="pointwise", global_batch=4
    ),
    "smollm3 cp2 pp2, ring, window where nothing is rotated, documents": case(
        "smollm3", 4, cp=2, pp=2, cp_attention="ring", documents=True, global_batch=4
    ),
    "gpt_neox tp2, full recompute, documents": case("gpt_neox", 2, tp=2, recompute="full", documents=True),
    "gpt_neox pp3 dp2, level 3, split backward": case(
        "gpt_neox", 6, pp=3, schedule="zb_h1", sharding=2, global_batch=4
    ),
    "mamba2 cp3, documents": case("mamba2", 3, cp=3, documents=True, global_batch=2),
    "mamba2 cp2 tp2, packed, selective recompute": case(
        "mamba2", 4, cp=2, tp=2, documents="packed", recompute="selective", global_batch=2
    ),
    "mamba2 cp4 pp2, full recompute": case("mamba2", 8, cp=4, pp=2, recompute="full", global_batch=2),
    "mamba2 tp4 with 2 groups, sharding 3": case("mamba2", 8, tp=4, sharding=3, documents=True, global_batch=4),
    "mamba2 pp2 x 2 virtual stages, dp2, pointwise recompute": case(
        "mamba2", 4, pp=2, virtual_stages=2, recompute="pointwise", documents=True
    ),
    "nemotron_h cp2 tp2, ring, documents": case("nemotron_h", 4, cp=2, tp=2, documents=True, global_batch=2),
    "nemotron_h cp2 pp2, heads, packed, full recompute": case(
        "nemotron_h", 4, cp=2, cp_ulysses=2, pp=2, documents="packed", recompute="full", global_batch=2
    ),
    "qwen3_next cp2 tp2, ring, ep2, documents": case("qwen3_next", 4, cp=2, tp=2, ep=2, documents=True, global_batch=2),
    "qwen3_next with a further token, cp2 pp2, heads, packed, full recompute": case(
        "qwen3_next-mtp", 4, cp=2, cp_ulysses=2, pp=2, documents="packed", recompute="full", global_batch=2
    ),
    "qwen3_next cp3, packed, selective recompute": case(
        "qwen3_next", 3, cp=3, documents="packed", recompute="selective", global_batch=2
    ),
    "qwen3_next with a further token, tp4 with 2 key heads, ep4, sharding 3": case(
        "qwen3_next-mtp", 8, tp=4, ep=4, sharding=3, documents=True, global_batch=4
    ),
    "qwen3_next with a further token, pp2 x 2 virtual stages, dp2, ep2, pointwise recompute": case(
        "qwen3_next-mtp", 4, pp=2, virtual_stages=2, ep=2, recompute="pointwise", documents=True
    ),
    "qwen3_5_text tp2 cp2, all-gather, packed, selective recompute": case(
        "qwen3_5_text",
        4,
        tp=2,
        cp=2,
        cp_attention="allgather",
        documents="packed",
        recompute="selective",
        global_batch=2,
    ),
    "qwen3_5_text pp2, dp2, level 3, documents": case("qwen3_5_text", 4, pp=2, sharding=3, documents=True),
    "qwen3_5_moe_text tp2 pp2, ep2, documents": case("qwen3_5_moe_text", 4, tp=2, pp=2, ep=2, documents=True),
    "qwen3_5 tp2 cp2 pp2, packed, full recompute": case(
        "qwen3_5", 8, tp=2, cp=2, pp=2, documents="packed", recompute="full", micro_batch=2
    ),
    "qwen3_5 pp2 x 2 virtual stages, dp2, each other's images, level 2": case(
        "qwen3_5", 4, pp=2, virtual_stages=2, sharding=2, media_group=2, micro_batch=2
    ),
    "qwen3_5_moe cp2 dp2, ep2, level 3, documents": case(
        "qwen3_5_moe", 4, cp=2, ep=2, sharding=3, documents=True, micro_batch=2
    ),
    "kimi_linear cp2 tp2, ring, documents": case("kimi_linear", 4, cp=2, tp=2, documents=True, global_batch=2),
    "kimi_linear cp3, packed, selective recompute": case(
        "kimi_linear", 3, cp=3, documents="packed", recompute="selective", global_batch=2
    ),
    "kimi_linear tp4, ep4, sharding 3, documents": case(
        "kimi_linear", 8, tp=4, ep=4, sharding=3, documents=True, global_batch=4
    ),
    "kimi_linear pp2 x 2 virtual stages, ep2, full recompute": case(
        "kimi_linear", 4, pp=2, virtual_stages=2, ep=2, recompute="full"
    ),
    "olmo_hybrid cp2 tp2, heads, packed, selective recompute": case(
        "olmo_hybrid", 4, cp=2, cp_ulysses=2, documents="packed", recompute="selective", global_batch=4
    ),
    "olmo_hybrid tp4 pp2, sharding 3, documents": case("olmo_hybrid", 8, tp=4, pp=2, documents=True),
    "nemotron_h with experts, ep2 tp2 cp2, packed": case(
        "nemotron_h-moe", 4, ep=2, tp=2, cp=2, documents="packed", global_batch=2
    ),
    "nemotron_h with latents, ep2 x etp2, pp2, sharding 3, pointwise recompute": case(
        "nemotron_h-latent", 8, ep=2, etp=2, pp=2, sharding=3, recompute="pointwise", documents=True, global_batch=4
    ),
    "falcon_h1 tp2 pp2 cp2, packed, sharding 3": case(
        "falcon_h1", 8, tp=2, pp=2, cp=2, documents="packed", sharding=3, global_batch=2
    ),
    "falcon_h1 tp4 with 2 groups, pointwise recompute, documents": case(
        "falcon_h1-norm", 4, tp=4, recompute="pointwise", documents=True, global_batch=2
    ),
    "llama4_text cp2 ep2, heads, chunks, documents": case(
        "llama4_text", 2, cp=2, cp_ulysses=2, ep=2, documents=True, global_batch=2
    ),
    "llama4_text tp2 pp2, etp2, full recompute": case("llama4_text", 4, tp=2, pp=2, etp=2, recompute="full"),
    "minimax_m2 tp2 dp2, ep4, level 3": case("minimax_m2", 4, tp=2, ep=4, sharding=3, micro_batch=2, global_batch=4),
    "glm4_moe tp2 ep2, pointwise recompute, documents": case(
        "glm4_moe", 2, tp=2, ep=2, recompute="pointwise", documents=True
    ),
    "glm4_moe with a further token, pp2 dp2, documents": case("glm4_moe-mtp", 4, pp=2, documents=True),
    "kimi_k25 cp2 pp2, all-gather, packed": case(
        "kimi_k25", 4, cp=2, pp=2, cp_attention="allgather", documents="packed", global_batch=2
    ),
    "phi3 tp4 with 2 kv heads, overlapped, window": case("phi3", 4, tp=4, tp_overlap="on"),
    "phi3 pp2 dp2, level 3, documents": case("phi3", 4, pp=2, sharding=3, documents=True),
    "gemma2 cp2, ring, capped scores, windows, documents": case("gemma2", 2, cp=2, documents=True),
    "gemma2 tp2 pp2 dp2, tied, documents": case("gemma2", 8, tp=2, pp=2, documents=True),
    "gemma2 dp2, level 3, pointwise recompute": case("gemma2", 2, sharding=3, recompute="pointwise"),
    "mistral tp2 pp2 dp2, documents": case("mistral", 8, tp=2, pp=2, documents=True),
    "mistral tp4 with 2 kv heads, overlapped, selective recompute": case(
        "mistral", 4, tp=4, tp_overlap="on", recompute="selective"
    ),
    "qwen2 tp4 with 2 kv heads, documents": case("qwen2", 4, tp=4, documents=True),
    "qwen2 pp2 x 2 virtual stages, dp2": case("qwen2", 4, pp=2, virtual_stages=2),
    "deepseek_v3 dense, tp2 pp2 dp2, documents": case("deepseek_v3-dense", 8, tp=2, pp=2, documents=True),
    "deepseek_v3 dense, tp4, overlapped, selective recompute": case(
        "deepseek_v3-dense", 4, tp=4, tp_overlap="on", recompute="selective"
    ),
    "deepseek_v3 with two further tokens, tp2 dp2, ep4": case("deepseek_v3-mtp", 4, tp=2, ep=4, micro_batch=2),
    "deepseek_v3 with two further tokens, pp2 dp2, documents, full recompute": case(
        "deepseek_v3-mtp", 4, pp=2, documents=True, recompute="full"
    ),
    "deepseek_v3 with two further tokens, tied, pp4, each block alone": case(
        "deepseek_v3-mtp-tied", 4, pp=4, stages=(1, 2, 1, 1)
    ),
    "deepseek_v3 with two further tokens, pp3, tp2, head and embedding shared by two pairs": case(
        "deepseek_v3-mtp", 6, pp=3, tp=2, stages=(1, 3, 1), documents=True
    ),
    "deepseek_v3 with two further tokens, pp2 x 2 virtual stages, each rank has two ends": case(
        "deepseek_v3-mtp-tied", 2, pp=2, virtual_stages=2, stages=(1, 2, 1, 1)
    ),
    "deepseek_v3 tp2 pp2 dp2, ep4, documents": case("deepseek_v3", 8, tp=2, pp=2, ep=4, documents=True),
    "deepseek_v3 tp2, ep2 x etp2, pointwise recompute, level 0": case(
        "deepseek_v3", 4, tp=2, ep=2, etp=2, recompute="pointwise", sharding=0
    ),
    "deepseek_v3 tp2 dp2, ep4 by all-gather, overlapped, full recompute": case(
        "deepseek_v3", 4, tp=2, ep=4, dispatch="allgather", ep_overlap="on", tp_overlap="on", recompute="full"
    ),
    "gpt2 tp2 pp2, everything but attention again": case(
        "gpt2", 4, tp=2, pp=2, recompute="norm, qkv, up, activation, dropout"
    ),
    "deepseek_v3 tp2 ep2, everything again": case(
        "deepseek_v3", 2, tp=2, ep=2, recompute="norm, qkv, rope, attention, experts, up, activation"
    ),
    "qwen3 cp2 tp2, attention and its inputs again": case(
        "qwen3", 4, cp=2, tp=2, documents=True, recompute="norm, qkv, rope, attention"
    ),
    "gpt_oss ep4 by all-gather, experts again": case(
        "gpt_oss", 4, ep=4, dispatch="allgather", recompute="experts, norm"
    ),
    "pointwise recompute tp2": case("llama", 2, tp=2, recompute="pointwise", documents=True),
    "gpt2 tp2 pp2, pointwise recompute, overlapped": case(
        "gpt2", 4, tp=2, pp=2, recompute="pointwise", tp_overlap="on"
    ),
    "tp4, overlapped": case("llama", 4, tp=4, tp_overlap="on"),
    "tp8, overlapped, documents": case("llama", 8, tp=8, tp_overlap="on", documents=True, global_batch=2),
    "gpt2 tp2 pp2 dp2, overlapped, full recompute": case("gpt2", 8, tp=2, pp=2, tp_overlap="on", recompute="full"),
    "tied tp2 pp2 x 2 virtual stages, overlapped": case("llama-tied", 4, tp=2, pp=2, virtual_stages=2, tp_overlap="on"),
    "mixtral ep2": case("mixtral", 2, ep=2),
    "mixtral ep4 across tp2 x dp2, all-gather": case("mixtral", 4, ep=4, tp=2, dispatch="allgather"),
    "mixtral ep4 across tp2 x dp2, overlapped": case(
        "mixtral", 4, ep=4, tp=2, dispatch="allgather", ep_overlap="on", tp_overlap="on"
    ),
    "mixtral ep2, push": case("mixtral", 2, ep=2, dispatch="push"),
    "mixtral ep4 across tp2 x dp2, push": case("mixtral", 4, ep=4, tp=2, dispatch="push", tp_overlap="on"),
    "qwen3_moe ep2 x etp2, tp2 pp2, push": case(
        "qwen3_moe", 8, ep=2, etp=2, tp=2, pp=2, dispatch="push", documents=True
    ),
    "deepseek_v3 with two further tokens, tp2 dp2, ep4, push, full recompute": case(
        "deepseek_v3-mtp", 4, tp=2, ep=4, dispatch="push", micro_batch=2, recompute="full"
    ),
    "gpt_oss ep8, tp2, push, no spare room": case("gpt_oss", 8, tp=2, ep=8, dispatch="push", expert_room=1.0),
    "mixtral etp2 x ep2, tp2 pp2 dp2": case("mixtral", 8, ep=2, etp=2, tp=2, pp=2),
    "mixtral etp2 x ep4, overlapped, full recompute": case(
        "mixtral", 8, ep=4, etp=2, ep_overlap="on", dispatch="allgather", recompute="full"
    ),
    "qwen3_moe ep4, tp2 pp2 dp2, tied, full recompute": case("qwen3_moe", 8, ep=4, tp=2, pp=2, recompute="full"),
    "qwen3_moe tp4, experts whole on each rank": case("qwen3_moe", 4, tp=4, documents=True),
    "gpt_oss tp4 with 2 kv heads, ep2 x etp2, documents": case("gpt_oss", 4, tp=4, ep=2, etp=2, documents=True),
    "gpt_oss tp2 pp2 dp2, ep4 across tp2 x dp2, overlapped": case(
        "gpt_oss", 8, tp=2, pp=2, ep=4, dispatch="allgather", expert_room=4.0, ep_overlap="on", tp_overlap="on"
    ),
    "gpt_oss etp2 x edp2, level 0, full recompute": case("gpt_oss", 4, etp=2, sharding=0, recompute="full"),
    "gpt_oss dp2 ep2, pointwise recompute, tp2": case("gpt_oss", 4, tp=2, ep=2, recompute="pointwise", micro_batch=2),
    "bert tp2 pp2 dp2, documents, dropout, pointwise recompute": case(
        "bert", 8, tp=2, pp=2, documents="packed", recompute="pointwise"
    ),
    "bert dp2 pp2, level 3, dropout, full recompute": case("bert", 4, pp=2, sharding=3, recompute="full"),
    "modernbert tp4, overlapped, documents, selective recompute": case(
        "modernbert", 4, tp=4, tp_overlap="on", documents="packed", recompute="selective"
    ),
    "modernbert pp2, split backward, dp2": case("modernbert", 4, pp=2, schedule="zb_h1", documents=True),
    "bert cp2 pp2, all-gather, dropout": case("bert", 4, cp=2, pp=2, cp_attention="allgather", global_batch=2),
    "modernbert cp4, ring, documents": case("modernbert", 4, cp=4, documents="packed", global_batch=2),
    "cp2": case("llama", 2, cp=2),
    "cp4, ring, tp2": case("llama", 8, cp=4, tp=2, cp_attention="ring", micro_batch=2),
    "cp4, all-gather, pp2": case("llama", 8, cp=4, pp=2, cp_attention="allgather"),
    "cp2, heads": case("llama", 2, cp=2, cp_ulysses=2, documents=True, recompute="selective"),
    "cp2, heads, level 3, for long sequences": case("llama", 2, cp=2, cp_ulysses=2, sharding=3, recompute="long"),
    "qwen3 cp2 tp2, ring, for long sequences, documents": case(
        "qwen3", 4, cp=2, tp=2, documents=True, recompute="long"
    ),
    "gpt2 tp2 pp2, overlapped, for long sequences": case("gpt2", 4, tp=2, pp=2, tp_overlap="on", recompute="long"),
    "gpt_oss cp2 ep2, heads, sinks, for long sequences": case("gpt_oss", 2, cp=2, cp_ulysses=2, ep=2, recompute="long"),
    "deepseek_v3 with two further tokens, cp2, MLPs in pieces": case(
        "deepseek_v3-mtp", 2, cp=2, recompute="block, mlp"
    ),
    "dynamic cp2, for long sequences": case(
        "llama", 2, cp=2, cp_degree="dynamic", documents="packed", recompute="long"
    ),
    "tied cp4, heads": case("llama-tied", 4, cp=4, cp_ulysses=4, micro_batch=2),
    "tied cp4, heads in pairs, ring between, pp2": case(
        "llama-tied", 8, cp=4, cp_ulysses=2, pp=2, cp_attention="ring", recompute="pointwise"
    ),
    "qwen3 cp4, heads in pairs, all-gather between, dp2": case(
        "qwen3", 8, cp=4, cp_ulysses=2, cp_attention="allgather", documents=True
    ),
    "tied cp6 in uneven parts, heads in pairs": case(
        "llama-tied", 6, cp=6, cp_ulysses=2, documents=True, micro_batch=2
    ),
    "gpt2 cp4, heads in pairs, dropout": case("gpt2", 4, cp=4, cp_ulysses=2, micro_batch=2),
    "gpt2 cp4, heads, dropout, tp2": case("gpt2", 8, cp=4, cp_ulysses=4, tp=2, global_batch=4),
    "mistral cp4, ring, window": case("mistral", 4, cp=4, cp_attention="ring"),
    "mistral cp4, all-gather, window, documents": case("mistral", 4, cp=4, cp_attention="allgather", documents=True),
    "mistral cp4, heads in pairs, window, documents": case("mistral", 4, cp=4, cp_ulysses=2, documents=True),
    "qwen2 cp3 in uneven parts, two kinds of layers, full recompute": case("qwen2", 3, cp=3, recompute="full"),
    "gpt_oss cp4, ring, sinks, window, ep4": case("gpt_oss", 4, cp=4, ep=4, documents=True, micro_batch=2),
    "gpt_oss cp4, heads in pairs, sinks, pp2": case("gpt_oss", 8, cp=4, cp_ulysses=2, pp=2, ep=2),
    "gpt_oss cp2, heads, sinks, dp2": case(
        "gpt_oss", 4, cp=2, cp_ulysses=2, dispatch="allgather", ep=2, ep_overlap="on"
    ),
    "deepseek_v3 dense cp4, ring, latent": case("deepseek_v3-dense", 4, cp=4, documents=True, cp_attention="ring"),
    "deepseek_v3 dense cp4, heads in pairs, all-gather between, tp2": case(
        "deepseek_v3-dense", 8, cp=4, cp_ulysses=2, tp=2, cp_attention="allgather"
    ),
    "deepseek_v3 with two further tokens, cp2 pp2, heads": case(
        "deepseek_v3-mtp", 4, cp=2, pp=2, cp_ulysses=2, documents=True
    ),
    "deepseek_v3 with two further tokens, cp4 ep4, ring": case(
        "deepseek_v3-mtp", 4, cp=4, ep=4, cp_attention="ring", recompute="full"
    ),
    "cp4 tp2, documents": case("llama", 8, cp=4, tp=2, documents=True, micro_batch=2),
    "gpt2 cp2 pp2 dp2, dropout, full recompute": case("gpt2", 8, cp=2, pp=2, recompute="full"),
    "mistral cp2 tp2 dp2, documents, level 0": case("mistral", 8, cp=2, tp=2, documents=True, sharding=0),
    "tied cp3 in uneven parts, pp2": case("llama-tied", 6, cp=3, pp=2, micro_batch=2),
    "deepseek_v3 with two further tokens, cp3 in uneven parts, documents": case(
        "deepseek_v3-mtp", 3, cp=3, documents=True
    ),
    "mixtral cp2 dp2, ep4 over both": case("mixtral", 4, cp=2, ep=4, micro_batch=2),
    "mixtral capacity, cp2 tp2": case("mixtral-full", 4, cp=2, tp=2, micro_batch=2),
    "qwen3_moe cp4, ep2 x etp2, documents": case("qwen3_moe", 4, cp=4, ep=2, etp=2, documents=True, micro_batch=2),
    "gpt_oss cp3 in uneven parts, etp3, documents": case(
        "gpt_oss", 3, cp=3, etp=3, documents=True, dispatch="allgather"
    ),
    "deepseek_v3 cp2 tp2 pp2, ep4, documents, push": case(
        "deepseek_v3", 8, cp=2, tp=2, pp=2, ep=4, documents=True, dispatch="push"
    ),
    "dynamic cp2, documents": case("llama", 2, cp=2, cp_degree="dynamic", documents=True),
    "dynamic cp4 tp2, packed": case("llama", 8, cp=4, tp=2, cp_degree="dynamic", documents="packed"),
    "dynamic cp4 pp2, tied, packed, heads in pairs": case(
        "llama-tied", 8, cp=4, cp_ulysses=2, pp=2, cp_degree="dynamic", documents="packed", recompute="full"
    ),
    "dynamic cp4 by all-gather, qwen3, level 3": case(
        "qwen3", 4, cp=4, cp_attention="allgather", cp_degree="dynamic", documents="packed", sharding=3
    ),
    "dynamic cp4, heads, mistral": case("mistral", 4, cp=4, cp_ulysses=2, cp_degree="dynamic", documents="packed"),
    "dynamic cp3 in uneven parts, qwen2, two kinds of layers": case(
        "qwen2", 3, cp=3, cp_degree="dynamic", documents=True, micro_batch=2
    ),
    "dynamic cp6, gpt_oss with sinks and window, ep2": case(
        "gpt_oss", 6, cp=6, ep=2, cp_degree="dynamic", documents="packed", micro_batch=2
    ),
    "dynamic cp2 tp2, gpt2 with dropout": case("gpt2", 4, cp=2, tp=2, cp_degree="dynamic", documents="packed"),
    "dynamic cp4 ep4, deepseek_v3 with two further tokens": case(
        "deepseek_v3-mtp", 4, cp=4, ep=4, cp_degree="dynamic", documents="packed"
    ),
    "dynamic cp2 pp2 dp2, deepseek_v3, ep4, push": case(
        "deepseek_v3", 8, cp=2, pp=2, ep=4, dispatch="push", cp_degree="dynamic", documents="packed"
    ),
    "dynamic cp4, gpt_oss with sinks and window": case("gpt_oss", 4, cp=4, cp_degree="dynamic", documents="packed"),
    "dynamic cp2 tp2, room by document": case("mixtral-full", 4, cp=2, tp=2, cp_degree="dynamic", documents="packed"),
    "dynamic cp4, parts of other lengths, gpt_oss with sinks and window, ep4": case(
        "gpt_oss", 4, cp=4, ep=4, cp_degree="dynamic", documents="filling"
    ),
    "dynamic cp4, parts of other lengths, heads in pairs, tp2, pointwise recompute": case(
        "llama-tied", 8, cp=4, cp_ulysses=2, tp=2, cp_degree="dynamic", documents="filling", recompute="pointwise"
    ),
    "dynamic cp4 by all-gather, parts of other lengths, deepseek_v3 dense, level 2": case(
        "deepseek_v3-dense", 4, cp=4, cp_attention="allgather", cp_degree="dynamic", documents="filling", sharding=2
    ),
    "dynamic cp4, qwen3_moe by document, ep2 x etp2": case(
        "qwen3_moe", 4, cp=4, ep=2, etp=2, cp_degree="dynamic", documents="packed"
    ),
    "t5 tp2, documents, level 0": case("t5", 2, tp=2, documents=True, sharding=0),
    "t5 pp2 x 3 virtual stages, packed": case("t5", 2, pp=2, virtual_stages=3, documents="packed"),
    "t5 pp3 x 2 virtual stages, long recompute": case("t5", 3, pp=3, virtual_stages=2, recompute="long"),
    "t5 pp4 x 2 virtual stages, a stage per block": case("t5", 4, pp=4, virtual_stages=2),
    "t5 tied pp4, gpipe, full recompute, documents": case(
        "t5-tied", 4, pp=4, schedule="gpipe", recompute="full", documents=True
    ),
    "t5 tied tp2 pp2 dp2, level 1, selective recompute": case(
        "t5-tied", 8, tp=2, pp=2, sharding=1, recompute="selective"
    ),
    "t5 pp2 dp2, level 2, split backward, packed": case(
        "t5", 4, pp=2, schedule="zb_h1", sharding=2, documents="packed", micro_batch=2
    ),
    "t5 tied dp4, level 3, pointwise recompute": case("t5-tied", 4, sharding=3, recompute="pointwise"),
    "t5 tp4, overlapped": case("t5", 4, tp=4, tp_overlap="on"),
    "t5 with dropout, tp2 pp2, packed, full recompute": case(
        "t5-dropout", 4, tp=2, pp=2, documents="packed", recompute="full", micro_batch=2
    ),
    "t5 with dropout, cp2 dp2, all-gather, documents": case(
        "t5-dropout", 4, cp=2, cp_attention="allgather", documents=True
    ),
    "t5 cp2, ring, level 3": case("t5", 2, cp=2, cp_attention="ring", sharding=3),
    "t5 tied cp2 tp2, all-gather, packed": case(
        "t5-tied", 4, cp=2, tp=2, cp_attention="allgather", documents="packed", micro_batch=2
    ),
    "t5 cp2 pp2, heads, full recompute": case("t5", 4, cp=2, cp_ulysses=2, pp=2, recompute="full"),
    "llava tp2 cp2 pp2, packed": case("llava", 8, tp=2, cp=2, pp=2, documents="packed", micro_batch=2),
    "llava pp2 x 2 virtual stages, dp2, level 3, full recompute": case(
        "llava", 4, pp=2, virtual_stages=2, sharding=3, recompute="full", micro_batch=2
    ),
    "llava tp2 pp2, split backward, level 2": case(
        "llava", 4, tp=2, pp=2, schedule="zb_h1", sharding=2, documents=True
    ),
    "llava cp3 in uneven parts, ring": case("llava", 3, cp=3, cp_attention="ring", micro_batch=4),
    "llava dp2, each other's images, level 3": case("llava", 2, sharding=3),
    "llava dp4 in pairs, each other's images, two sequences": case(
        "llava", 4, media_group=2, micro_batch=2, documents=True
    ),
    "llava tp2 pp2 dp2, each other's images, split backward": case(
        "llava", 8, tp=2, pp=2, schedule="zb_h1", sharding=2
    ),
    "qwen2_5_vl tp2 dp2, each other's images, packed": case("qwen2_5_vl", 4, tp=2, micro_batch=2, documents="packed"),
    "qwen3_vl cp2 pp2 dp2, each other's images, full recompute": case(
        "qwen3_vl", 8, cp=2, pp=2, recompute="full", documents="packed"
    ),
    "gemma3 dynamic cp2 dp2, each other's images": case("gemma3", 4, cp=2, cp_degree="dynamic", documents="packed"),
    "qwen3_vl tp2 cp2 pp2, packed": case("qwen3_vl", 8, tp=2, cp=2, pp=2, documents="packed", micro_batch=2),
    "qwen3_vl pp3 x 2 virtual stages, full recompute": case(
        "qwen3_vl", 3, pp=3, virtual_stages=2, recompute="full", micro_batch=2
    ),
    "qwen2_5_vl tp2 dp2, each its own images, level 3, long recompute": case(
        "qwen2_5_vl", 4, tp=2, media_group=1, sharding=3, recompute="long", documents=True
    ),
    "whisper tp2 pp2 x 2 virtual stages, packed, full recompute": case(
        "whisper", 4, tp=2, pp=2, virtual_stages=2, documents="packed", recompute="full", micro_batch=2
    ),
    "whisper cp2 dp2, level 3, documents": case("whisper", 4, cp=2, sharding=3, documents=True),
    "gemma3 tp2 cp2 pp2, packed": case("gemma3", 8, tp=2, cp=2, pp=2, documents="packed", micro_batch=2),
    "gemma3 dynamic cp2, level 3, full recompute": case(
        "gemma3", 2, cp=2, cp_degree="dynamic", documents="packed", sharding=3, recompute="full", micro_batch=2
    ),
    "t5 cp3 in uneven parts, documents": case("t5", 3, cp=3, documents=True, micro_batch=2),
    "uneven stages": case("llama", 4, pp=4, stages=(1, 1, 3, 1)),
    "gpipe": case("gpt2", 2, pp=2, schedule="gpipe"),
    "split backward pp2, a segment per block": case("llama", 2, pp=2, schedule="zb_h1"),
    "split backward pp4, fewer micro-batches than stages, tied": case(
        "llama-tied", 4, pp=4, schedule="zb_h1", global_batch=3
    ),
    "split backward pp4, gpt2 tied, dropout, large buckets": case(
        "gpt2", 4, pp=4, schedule="zb_h1", global_batch=7, bucket_mb=100
    ),
    "split backward pp2 tp2 with 2 kv heads, overlapped, documents": case(
        "llama", 4, pp=2, tp=2, schedule="zb_h1", tp_overlap="on", documents=True
    ),
    "split backward pp2 dp2 level 1, selective recompute": case(
        "qwen3", 4, pp=2, schedule="zb_h1", recompute="selective"
    ),
    "split backward pp2 dp2 level 2, tied across stages, full recompute, prefetch 2": case(
        "llama-tied", 4, pp=2, schedule="zb_h1", sharding=2, prefetch=2, recompute="full"
    ),
    "split backward pp2 dp2 level 3": case("llama", 4, pp=2, schedule="zb_h1", sharding=3),
    "split backward pp2 dp2 level 3, weights kept, by copies, long recompute": case(
        "qwen2",
        4,
        pp=2,
        schedule="zb_h1",
        sharding=3,
        reshard_after_forward=False,
        dp_overlap="on",
        recompute="long",
    ),
    "split backward pp2 tp2, mixtral ep2": case("mixtral", 4, pp=2, tp=2, ep=2, schedule="zb_h1"),
    "split backward pp2, gpt_oss ep2 by all-gather, overlapped, level 3": case(
        "gpt_oss", 4, pp=2, ep=2, dispatch="allgather", ep_overlap="on", sharding=3, schedule="zb_h1"
    ),
    "split backward pp2 tp2, deepseek_v3 ep2 push, experts again": case(
        "deepseek_v3", 4, pp=2, tp=2, ep=2, dispatch="push", recompute="experts, norm", schedule="zb_h1"
    ),
    "split backward pp4, deepseek_v3 with two further tokens, tied, each block alone": case(
        "deepseek_v3-mtp-tied", 4, pp=4, stages=(1, 2, 1, 1), schedule="zb_h1"
    ),
    "split backward pp2 cp2": case("llama", 4, pp=2, cp=2, schedule="zb_h1", documents=True),
    "selective recompute tp2": case("gpt2", 2, tp=2, recompute="selective"),
    "full recompute pp2 tp2": case("llama", 4, pp=2, tp=2, recompute="full", documents=True),
    "dp4 level 0": case("llama", 4, sharding=0),
    "dp8 level 1": case("gpt2", 8),
    "dp2 tp4 gpt2": case("gpt2", 8, tp=4, micro_batch=2),
    "one rank, level 1, accumulation": case("llama", 1),
    "level 2, dp4, accumulation": case("llama", 4, sharding=2, global_batch=16),
    "level 2, dp4, one micro-batch, prefetch 0, documents": case(
        "gpt2", 4, sharding=2, prefetch=0, global_batch=4, documents=True
    ),
    "level 2, tp2 pp2 dp2, tied across stages, full recompute": case(
        "llama-tied", 8, tp=2, pp=2, sharding=2, recompute="full"
    ),
    "level 2, pp2 x 2 virtual stages, dp2, tied": case("gpt2", 4, pp=2, virtual_stages=2, sharding=2, prefetch=2),
    "level 2, dp2 tp4 with 2 kv heads, overlapped": case("llama", 8, tp=4, sharding=2, tp_overlap="on"),
    "level 2, mixtral edp2 x ep2, tp2": case("mixtral", 4, tp=2, ep=2, sharding=2),
    "level 2, deepseek_v3 with two further tokens, tied, pp2 dp2": case("deepseek_v3-mtp-tied", 4, pp=2, sharding=2),
    "level 2 in pairs of dp4": case("llama", 4, sharding=2, shard_group=2),
    "level 1 in pairs of dp4, optimizer over both, tied": case(
        "llama-tied", 4, sharding=1, shard_group=2, shard_across="optimizer"
    ),
    "level 1 in pairs of dp4, experts": case("qwen3_moe", 4, sharding=1, shard_group=2, ep=2),
    "level 3, dp4, accumulation": case("llama", 4, sharding=3, global_batch=16),
    "level 3, dp2, tied, kept until the step's end, pointwise recompute": case(
        "llama-tied", 2, sharding=3, reshard_after_forward=False, recompute="pointwise"
    ),
    "level 3, dp4, gpt2 with dropout, prefetch 0, full recompute": case(
        "gpt2", 4, sharding=3, prefetch=0, recompute="full"
    ),
    "level 3, tp2 pp2 dp2, tied across stages, documents": case(
        "llama-tied", 8, tp=2, pp=2, sharding=3, documents=True
    ),
    "level 3, pp2 x 2 virtual stages, dp2, tied, prefetch 3, selective recompute": case(
        "gpt2", 4, pp=2, virtual_stages=2, sharding=3, prefetch=3, recompute="selective"
    ),
    "level 3, pp2 gpipe, dp2, kept until the step's end": case(
        "mistral", 4, pp=2, schedule="gpipe", sharding=3, reshard_after_forward=False
    ),
    "level 3, dp2 tp4 with 2 kv heads, overlapped, pointwise recompute": case(
        "qwen3", 8, tp=4, sharding=3, tp_overlap="on", recompute="pointwise"
    ),
    "level 3, mixtral edp2 x ep2 x etp2, tp2": case("mixtral", 8, tp=2, ep=2, etp=2, sharding=3),
    "level 3, deepseek_v3, ep4 of dp4: experts whole, the rest cut": case(
        "deepseek_v3", 4, ep=4, sharding=3, recompute="full"
    ),
    "level 3, deepseek_v3 with two further tokens, pp2 dp2": case(
        "deepseek_v3-mtp", 4, pp=2, sharding=3, recompute="full"
    ),
    "level 3, deepseek_v3 ep2 x etp2, edp2, push, experts again": case(
        "deepseek_v3", 8, tp=2, ep=2, etp=2, dispatch="push", sharding=3, recompute="experts, norm"
    ),
    "level 3, gpt_oss dp2 ep2 tp2, all-gather": case(
        "gpt_oss", 4, tp=2, ep=2, dispatch="allgather", ep_overlap="on", sharding=3
    ),
    "level 3, cp2 dp2 tp2, tied": case("llama-tied", 8, cp=2, tp=2, sharding=3, global_batch=4),
    "level 3, mixtral cp2 dp2, ep2, in pairs, optimizer over both": case(
        "mixtral", 4, cp=2, ep=2, sharding=3, shard_group=2, shard_across="optimizer", global_batch=4
    ),
    "level 3 in pairs of dp4, optimizer over both": case(
        "llama", 4, sharding=3, shard_group=2, shard_across="optimizer"
    ),
    "level 3 in pairs of dp4, optimizer over both, by copies": case(
        "llama", 4, sharding=3, shard_group=2, shard_across="optimizer", dp_overlap="on"
    ),
    "level 2, pp2 dp2, gpt2 tied across stages, by copies": case("gpt2", 4, pp=2, sharding=2, dp_overlap="on"),
    "level 3, mixtral edp2 x ep2, tp2, by copies": case("mixtral", 4, tp=2, ep=2, sharding=3, dp_overlap="on"),
    "level 1 in pairs of dp4, optimizer over both, tied, by copies": case(
        "llama-tied", 4, sharding=1, shard_group=2, shard_across="optimizer", dp_overlap="on"
    ),
    "level 3 in pairs of dp4, tp2, tied": case("llama-tied", 8, tp=2, sharding=3, shard_group=2),
    "level 3 in pairs of dp4, pp2, qwen3_moe ep2": case(
        "qwen3_moe", 8, pp=2, ep=2, sharding=3, shard_group=2, shard_across="optimizer"
    ),
}


EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")  # families whose layers have 8


def build_run(c: dict):
    recomputed = (
        dict(recompute=c["recompute"]) if c["recompute"] in PRESETS else dict(recompute_ops=c["recompute"].split(", "))
    )
    run = base_run(c["model"], c["global_batch"], c["micro_batch"], **recomputed)
    if c["one_group"]:
        one = {name: 1 for name in ONE_GROUP if hasattr(run.model, name)}
        run = replace(run, model=replace(run.model, **one))
    return replace(run, layout=LayoutConfig(**{"bucket_mb": c["bucket_mb"], **c["layout"]}))


def sharding(pick: random.Random, dp: int, tp: int = 1, experts: int = 1) -> dict:
    """A level of sharding with its options; groups where there are ranks for them."""
    level = pick.choice([0, 1, 2, 2, 3, 3])
    options: dict = {"sharding": level}
    if level >= 2:
        options["prefetch"] = pick.choice([0, 1, 1, 2])
    if level == 3:
        options["reshard_after_forward"] = pick.choice([True, True, False])
    groups = [g for g in (2, 4) if dp % g == 0 and (g * tp % experts == 0 or experts % (g * tp) == 0)]
    if level and groups and pick.random() < 0.4:
        options |= {"shard_group": pick.choice(groups), "shard_across": pick.choice(["nothing", "optimizer"])}
    if level:
        options["dp_overlap"] = pick.choice(["on", "auto"])
    return options


def generated() -> dict[str, dict]:
    """Factorisations of up to 8 ranks over pp, dp, tp; schedules; sharding levels; recompute; bucket sizes."""
    cases = {}
    models = ("llama", "llama-tied", "gpt2", "mistral", "qwen2", "deepseek_v3-dense", "bert", "modernbert")
    for model, (pp, dp, tp) in itertools.product(models, itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4))):
        if not 1 < pp * dp * tp <= 8:
            continue
        for number in range(3):
            pick = random.Random(f"{model} {pp} {dp} {tp} {number}")
            layout: dict = {"pp": pp, "tp": tp, **sharding(pick, dp)}
            if pp > 1:
                layout["virtual_stages"] = pick.choice([1, 1, 2] if pp == 2 or model in ("llama-tied", "gpt2") else [1])
                layout["schedule"] = pick.choice(["auto", "gpipe"])
            options = dict(
                global_batch=dp * pick.choice([1, 2, 3, 4]) * 2,
                micro_batch=pick.choice([1, 2]),
                documents=pick.choice([False, True]),
                recompute=pick.choice(["none", "norm, qkv, up", "selective", "full"]),
                bucket_mb=pick.choice([0, 100]),
            )
            if tp > 1:
                layout["tp_overlap"] = pick.choice(["on", "off"])
            name = f"{model} {layout} {options}"
            cases[name] = case(model, pp * dp * tp, **options, **layout)
    return cases


def generated_experts() -> dict[str, dict]:
    """The same for families with experts: ep and etp cut the ranks of a stage in every way, across tp and dp; both
    exchanges."""
    cases = {}
    for model, (pp, dp, tp) in itertools.product(EXPERTS, itertools.product((1, 2), (1, 2, 4, 8), (1, 2, 4))):
        stage = dp * tp
        if not 1 < pp * stage <= 8:
            continue
        for ep, etp in itertools.product((1, 2, 4, 8), (1, 2)):
            if stage % (ep * etp):
                continue
            pick = random.Random(f"{model} {pp} {dp} {tp} {ep} {etp}")
            layout: dict = {"pp": pp, "tp": tp, "ep": ep, "etp": etp, **sharding(pick, dp, tp, ep * etp)}
            layout["dispatch"] = pick.choice(["allgather", "alltoall", "push"])
            if layout["dispatch"] != "alltoall":
                layout["expert_room"] = pick.choice([1.0, 2.0])
            if layout["dispatch"] == "allgather":
                layout["ep_overlap"] = pick.choice(["on", "off"])
            if tp > 1:
                layout["tp_overlap"] = pick.choice(["on", "off"])
            options = dict(
                global_batch=dp * pick.choice([1, 2, 3]) * 2,
                micro_batch=pick.choice([1, 2]),
                documents=pick.choice([False, True]),
                recompute=pick.choice(["none", "norm, experts", "pointwise", "full"]),
                bucket_mb=pick.choice([0, 100]),
            )
            cases[f"{model} {layout} {options}"] = case(model, pp * stage, **options, **layout)
    return cases


OF_CONTEXT = (
    "llama",
    "llama-tied",
    "gpt2",
    "mistral",
    "qwen2",
    "qwen3",
    "deepseek_v3-dense",
    "deepseek_v3-mtp",
    "mixtral",
    "gpt_oss",
    "bert",
    "modernbert",
)


def generated_context() -> dict[str, dict]:
    """Factorisations of up to 8 ranks over pp, dp, cp, tp for all families; forms of exchange; ep over whatever is
    there; uneven parts."""
    cases = {}
    for model, (pp, dp, cp, tp) in itertools.product(
        OF_CONTEXT, itertools.product((1, 2), (1, 2), (2, 3, 4, 8), (1, 2, 4))
    ):
        stage = dp * cp * tp
        if pp * stage > 8:
            continue
        pick = random.Random(f"{model} {pp} {dp} {cp} {tp}")
        each = max(1, MODELS[model].kv_heads // tp)
        layout: dict = {"pp": pp, "cp": cp, "tp": tp, "sharding": pick.choice([0, 1, 1, 2, 3])}
        layout["cp_ulysses"] = pick.choice([u for u in range(1, cp + 1) if cp % u == 0 and each % u == 0])
        if layout["cp_ulysses"] < cp:
            layout["cp_attention"] = pick.choice(
                ["allgather"] if model in ("gpt2", "bert") else ["ring", "ring", "allgather"]
            )
        if pp > 1:
            layout["virtual_stages"] = pick.choice([1, 2] if model in ("llama-tied", "gpt2") else [1])
        if tp > 1:
            layout["tp_overlap"] = pick.choice(["on", "off"])
        if model in ("mixtral", "gpt_oss", "deepseek_v3-mtp"):
            layout["ep"] = pick.choice([e for e in (1, 2, 4) if stage % e == 0])
            layout["dispatch"] = pick.choice(["allgather", "alltoall"])
        options = dict(
            global_batch=dp * pick.choice([2, 4]) * (2 if tp == 4 and cp == 3 else 1),
            documents=pick.choice([False, True]),
            micro_batch=2 if cp == 3 and tp > 1 else pick.choice([1, 2]),
            bucket_mb=pick.choice([0, 100]),
            recompute=pick.choice(["none", "none", "pointwise", "selective", "attention, norm", "full"]),
        )
        cases[f"{model} {layout} {options}"] = case(model, pp * stage, **options, **layout)
    return cases


LINEAR = (
    "mamba2",
    "nemotron_h",
    "nemotron_h-moe",
    "falcon_h1",
    "falcon_h1-norm",
    "qwen3_next-mtp",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_5",
    "qwen3_5_moe",
    "kimi_linear",
    "olmo_hybrid",
)
"""Families whose layers hand on a state."""
ONE_GROUP = ("n_groups", "mamba_n_groups", "linear_num_key_heads")


def generated_linear() -> dict[str, dict]:
    """Every such family in every layout that treats states apart: heads cut over tp, groups and key heads fewer than
    ranks, chunks over cp beside each form of attention, stages of unequal layers, experts, levels of sharding."""
    cases = {}
    for model in LINEAR:
        attends, experts = MODELS[model].attends, MODELS[model].routed_experts > 0
        each: dict[str, dict] = {
            "tp2, pointwise recompute": dict(tp=2, recompute="pointwise"),
            "tp4 with one group, level 3": dict(tp=4, dp=2, one_group=True, sharding=3),
            "pp2 x 2 virtual stages, level 2": dict(pp=2, dp=2, virtual_stages=2, sharding=2),
            "cp3, all-gather, full recompute": dict(cp=3, cp_attention="allgather", recompute="full"),
            "cp2, dp2, level 1": dict(cp=2, dp=2, sharding=1),
        }
        if attends:
            each |= {
                "cp2, ring": dict(cp=2, cp_attention="ring"),
                "cp2, all-gather, tp2": dict(cp=2, tp=2, cp_attention="allgather"),
                "cp2, heads": dict(cp=2, cp_ulysses=2, recompute="selective"),
                "cp3, ring, selective recompute": dict(cp=3, cp_attention="ring", recompute="selective"),
            }
        if experts:
            each |= {"ep2, tp2, push": dict(tp=2, ep=2, dispatch="push"), "ep2, dp2": dict(dp=2, ep=2, sharding=3)}
        for name, layout in each.items():
            layout = {key: value for key, value in layout.items() if attends or key != "cp_attention"}
            world = math.prod(layout.get(axis, 1) for axis in ("tp", "cp", "pp", "dp"))
            layout.pop("dp", None)
            cases[f"{model} {name}"] = case(model, world, documents="packed", micro_batch=2, **layout)
    return cases


def generated_by_document() -> dict[str, dict]:
    """The same with packed documents that are dealt to ranks by their lengths."""
    balanced = {"cp_degree": "dynamic"}
    return {
        f"by document: {name}": {**c, "documents": "packed", "layout": c["layout"] | balanced}
        for name, c in generated_context().items()
    }


def check(ranks, c: dict) -> None:
    run = build_run(c)
    truth = truth_of(ranks, run, STEPS, c["documents"])
    compare(ranks.run("tests.harness.parity:run_layout", c["world"], run, STEPS, c["documents"]), truth, STEPS)


def features(c: dict) -> set:
    """Of a named layout: its family, each value of each option, and each two axes that it cuts together."""
    recomputed = [f"again {op}" for op in c["recompute"].split(", ")]
    options = [*c["layout"], *recomputed, f"documents {c['documents']}"]
    values = {(name, "given" if isinstance(value, tuple) else value) for name, value in c["layout"].items()}
    axes = [name for name in c["layout"] if name in ("tp", "pp", "cp", "ep", "etp", "sharding")]
    return {c["model"], *options, *values, *map(frozenset, itertools.combinations(axes, 2))}


# Eight ranks on two cores take seconds: every other one of those is for `make soak`, and others that no feature needs.
LARGE = [name for name in NAMED if NAMED[name]["world"] > 6][1::2]
OF_QUICK = {entry.partition("[")[2].rstrip("]") for entry in QUICK if "test_named_layouts[" in entry}
NAMED_SAMPLE = covering(
    {name: features(c) for name, c in NAMED.items() if name not in LARGE}, {n: c["world"] for n, c in NAMED.items()}
)
NAMED_SAMPLE += sorted(OF_QUICK - set(NAMED_SAMPLE))
SAMPLE = random.Random(20261120).sample(sorted(generated()), 5)
EXPERT_SAMPLE = random.Random(20261121).sample(sorted(generated_experts()), 4)
CONTEXT_SAMPLE = random.Random(20261122).sample(sorted(generated_context()), 4)
DOCUMENT_SAMPLE = random.Random(20261123).sample(sorted(generated_by_document()), 2)


@pytest.mark.parametrize("name", rest_in_soak(NAMED, NAMED_SAMPLE))
def test_named_layouts(ranks, name):
    check(ranks, NAMED[name])


@pytest.mark.parametrize("name", CONTEXT_SAMPLE)
def test_sampled_layouts_of_context(ranks, name):
    check(ranks, generated_context()[name])


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(set(generated_context()) - set(CONTEXT_SAMPLE)))
def test_all_layouts_of_context(ranks, name):
    check(ranks, generated_context()[name])


@pytest.mark.soak
@pytest.mark.parametrize("name", generated_linear())
def test_all_layouts_of_states(ranks, name):
    check(ranks, generated_linear()[name])


@pytest.mark.parametrize("name", DOCUMENT_SAMPLE)
def test_sampled_layouts_by_document(ranks, name):
    check(ranks, generated_by_document()[name])


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(set(generated_by_document()) - set(DOCUMENT_SAMPLE)))
def test_all_layouts_by_document(ranks, name):
    check(ranks, generated_by_document()[name])


@pytest.mark.parametrize("name", EXPERT_SAMPLE)
def test_sampled_layouts_of_experts(ranks, name):
    check(ranks, generated_experts()[name])


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(set(generated_experts()) - set(EXPERT_SAMPLE)))
def test_all_layouts_of_experts(ranks, name):
    check(ranks, generated_experts()[name])


@pytest.mark.parametrize("name", SAMPLE)
def test_sampled_layouts(ranks, name):
    check(ranks, generated()[name])


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(set(generated()) - set(SAMPLE)))
def test_all_layouts(ranks, name):
    check(ranks, generated()[name])
