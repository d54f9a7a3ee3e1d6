"""A tiny GPT model of Megatron-Core, saved by its own code in its torch_dist format, with the logits that it computes.

python -m tests.harness.megatron_saves OUT KIND
Megatron-Core asks a GPU for a few things even where everything lies on the CPU; these are answered here.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file


def main(out: Path, kind: str) -> None:
    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.models import backends
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer import (
        MLATransformerConfig,
        TransformerConfig,
        dot_product_attention,
        multi_latent_attention,
    )
    from megatron.core.transformer.moe import moe_utils

    torch.cuda.synchronize, torch.cuda.current_device = lambda *_: None, lambda: "cpu"  # type: ignore[assignment, return-value]
    moe_utils.te_general_gemm = None
    for name in ("TELinear", "TEColumnParallelLinear"):  # asked for what it is not, where Transformer Engine is missing
        setattr(multi_latent_attention, name, type(name, (), {}))
    backends.DotProductAttention = with_widths(dot_product_attention.DotProductAttention)
    filesystem_async._process_memory = lambda: 0
    dot_product_attention.tensor_parallel.get_cuda_rng_tracker = lambda: types.SimpleNamespace(
        fork=contextlib.nullcontext
    )
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    llama, qwen, grouped, latent = (
        kind != "gpt2",
        kind == "qwen3_moe",
        kind == "mixtral-grouped",
        kind.startswith("deepseek"),
    )
    experts = (
        dict(
            num_moe_experts=4,
            moe_router_topk=2,
            moe_ffn_hidden_size=24,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="allgather",
            moe_router_dtype="fp32",
        )
        if "mixtral" in kind or qwen or latent
        else {}
    )
    latents = (
        dict(
            q_lora_rank=12,
            kv_lora_rank=8,
            qk_head_dim=8,
            qk_pos_emb_head_dim=4,
            v_head_dim=6,
            rope_type="rope",
            moe_layer_freq=[0, 1],
            moe_shared_expert_intermediate_size=48,
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_router_num_groups=2,
            moe_router_group_topk=1,
            moe_router_topk_scaling_factor=1.5,
        )
        if latent
        else {}
    )
    config = (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=4 if latent or not llama else 2,
        ffn_hidden_size=48 if llama else 128,
        use_cpu_initialization=True,
        gated_linear_unit=llama,
        add_bias_linear=not llama,
        normalization="RMSNorm" if llama else "LayerNorm",
        activation_func=torch.nn.functional.silu if llama else gelu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        layernorm_epsilon=1e-6 if latent else 1e-5,
        qk_layernorm=qwen or latent,
        kv_channels=16 if qwen else 8,
        **experts,
        **latents,
    )
    one = get_gpt_layer_local_spec(
        num_experts=experts.get("num_moe_experts"), qk_layernorm=qwen, normalization="RMSNorm" if llama else None
    )
    spec = get_gpt_decoder_block_spec(config, False, "RMSNorm") if latent else one
    model = GPTModel(
        config,
        spec,
        vocab_size=128,
        max_sequence_length=16,
        position_embedding_type="rope" if llama else "learned_absolute",
        share_embeddings_and_output_weights=not llama,
        rotary_base=10000,
    )
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2
    for layer in model.decoder.layers if grouped else ():
        layer.mlp.experts.sharded_state_dict = functools.partial(as_grouped, layer.mlp.experts)
    (out / "checkpoint").mkdir(parents=True)
    saved = model.sharded_state_dict(metadata={"singleton_local_shards": kind.endswith("-singleton")})
    dist_checkpointing.save(saved, str(out / "checkpoint"), sharded_strategy=("torch_dist", 1))
    ids, places = torch.arange(12)[None] * 7 % 128, torch.arange(12)[None]
    with torch.no_grad():
        logits = model.eval()(ids, places, torch.ones(1, 1, 12, 12).triu(1).bool())
    save_file({"ids": ids, "logits": logits.contiguous()}, out / "truth.safetensors")
    dist.destroy_process_group()


def with_widths(attention: Any) -> Any:
    """Megatron's plain attention with heads whose values have another width than keys, which it leaves to
    Transformer Engine's."""

    class Attention(attention):
        def __init__(
            self, config: Any, *given: Any, k_channels: int | None = None, v_channels: int | None = None, **options: Any
        ):
            super().__init__(config, *given, **options)
            if v_channels is not None:
                self.hidden_size_per_partition = config.num_attention_heads * v_channels

        def forward(
            self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **options: Any
        ) -> torch.Tensor:
            return super().forward(query, key, value.contiguous(), *rest, **options)

    return Attention


def as_grouped(experts: Any, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> Any:
    """What Megatron's GroupedMLP (whose matmuls need a GPU) writes of these experts: its own code, given its two
    fused weights."""
    from megatron.core.transformer.moe.experts import GroupedMLP

    first, second = (
        torch.stack([getattr(e, name).weight.mT for e in experts.local_experts])
        for name in ("linear_fc1", "linear_fc2")
    )
    fused = {"weight1": first.flatten().view(first.shape[1], -1), "weight2": second.flatten(0, 1)}
    stand_in = types.SimpleNamespace(
        **fused,
        state_dict=lambda **_: fused,
        config=experts.config,
        num_local_experts=experts.num_local_experts,
        ep_group=experts.ep_group,
        tp_group=experts.tp_group,
        dp_group=experts.dp_group,
    )
    return GroupedMLP.sharded_state_dict(stand_in, prefix, sharded_offsets, metadata)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GPT-2's."""
    return torch.nn.functional.gelu(x, approximate="tanh")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
