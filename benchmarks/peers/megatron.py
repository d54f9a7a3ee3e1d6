"""Megatron-Core with Transformer Engine, through the public API of its package. W1, W2 (dp4, tp4), W4, W5 and the
small model.

torchrun --nproc-per-node 4 benchmarks/peers/megatron.py W2 [--tp 4] [--out megatron.jsonl]

Distributed optimizer, gradients in fp32 summed by the GEMMs, reductions and gathers overlapped, sequence parallelism
with tp, Transformer Engine's cross entropy and cuDNN attention. W4: experts spread over all ranks, all-to-all
dispatcher, grouped GEMMs, fused router and permutation; `--gpus N` takes as many, with their share of the batch;
`--natural` the router's own choice instead of a forced balance. W5: 4 stages of 2 virtual ones, layers balanced
against the head. Written for megatron-core 0.19 and transformer_engine 2.20; NVLink multicast stays off, so that all
machines can run it.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", UB_SKIPMC="1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from workloads import WORKLOADS, Workload, arguments, fresh_tokens, report, start, timed

BALANCED = "Et*5|t*5|t*5|t*4|t*4|t*4|t*4|tL"  # W5: the head weighs about four layers


def fuse_head_gradient() -> None:
    """The output layer looks for apex to sum its weight gradient in fp32; Transformer Engine's GEMM does the same."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    def add(x: Tensor, dy: Tensor, grad: Tensor) -> None:
        general_gemm(x, dy, out_dtype=grad.dtype, layout="NT", out=grad, accumulate=True, grad=True)

    module = types.ModuleType("fused_weight_gradient_mlp_cuda")
    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = add  # type: ignore[attr-defined]
    sys.modules["fused_weight_gradient_mlp_cuda"] = module


def expert_options(w: Workload, forced: bool) -> dict[str, Any]:
    if not w.experts:
        return {}
    return {
        "num_moe_experts": w.experts,
        "moe_router_topk": w.chosen,
        "moe_ffn_hidden_size": w.inner,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-3,
        "moe_permute_fusion": True,
        "moe_router_fusion": True,
        "moe_router_dtype": "fp32",
        "moe_router_force_load_balancing": forced,
        "expert_model_parallel_size": w.gpus,
        "expert_tensor_parallel_size": 1,
    }


def model_config(w: Workload, tp: int, pp: int, virtual: int | None, forced: bool = False) -> Any:
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    stages: dict[str, Any] = {}
    if pp > 1:
        stages = {
            "pipeline_dtype": torch.bfloat16,
            "batch_p2p_comm": False,
            "overlap_p2p_comm": True,
            "deallocate_pipeline_outputs": True,
            "virtual_pipeline_model_parallel_size": virtual,
            "pipeline_model_parallel_layout": BALANCED,
        }
    return TransformerConfig(
        num_layers=w.layers,
        hidden_size=w.hidden,
        num_attention_heads=w.heads,
        num_query_groups=w.kv_heads,
        kv_channels=w.head,
        ffn_hidden_size=w.inner,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        apply_rope_fusion=True,
        persist_layer_norm=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        sequence_parallel=tp > 1,
        gradient_accumulation_fusion=True,
        cross_entropy_loss_fusion=True,
        cross_entropy_fusion_impl="te",
        attention_backend=AttnBackend.fused,
        **stages,
        **expert_options(w, forced),
    )


def build(w: Workload, config: Any, dp: int, virtual: int | None) -> tuple[list[nn.Module], Any]:
    """The chunks of this rank under Megatron's data parallelism, and its optimizer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
    from megatron.core.transformer.module import Float16Module

    overlap = dp > 1
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        use_distributed_optimizer=True,
        check_for_nan_in_grad=False,
        average_in_collective=False,
        bucket_size=40_000_000 if overlap else None,
    )
    chunks = []
    for stage in range(virtual) if virtual else [None]:
        ends = {"ignore_virtual": False, "vp_stage": stage} if virtual else {}
        model = GPTModel(
            config,
            get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=stage),
            w.vocab,
            w.length,
            pre_process=parallel_state.is_pipeline_first_stage(**ends),
            post_process=parallel_state.is_pipeline_last_stage(**ends),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            rotary_base=int(w.theta),
            vp_stage=stage,
        )
        half = Float16Module(config, model.cuda().bfloat16())
        for parameter in half.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(
            DistributedDataParallel(
                config=config, ddp_config=ddp, module=half, disable_bucketing=stage not in (None, 0)
            )
        )
    options = OptimizerConfig(
        optimizer="adam",
        lr=1e-5,
        min_lr=1e-5,
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        clip_grad=1.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        overlap_param_gather=overlap,
    )
    optimizer = get_megatron_optimizer(options, chunks, use_gloo_process_groups=False)
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    if overlap:
        waits = [c.no_sync for c in chunks]
        config.no_sync_func = waits if len(waits) > 1 else waits[0]
    return chunks, optimizer


def main() -> None:
    parser = arguments(__doc__ or "", ("W1", "W2", "W4", "W5", "small"))
    parser.add_argument("--gpus", type=int, help="W4 on another number of GPUs")
    parser.add_argument("--natural", action="store_true", help="W4 with the router's own choice")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size (W2)")
    options = parser.parse_args()
    w = WORKLOADS[options.workload]
    if options.gpus and w.experts:
        w = replace(w, gpus=options.gpus, batch=w.batch // w.gpus * options.gpus)
    rank, world = start(w)
    from megatron.core import num_microbatches_calculator, parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    fuse_head_gradient()
    pp, virtual = (4, 2) if options.workload == "W5" else (1, None)
    tp = options.tp
    dp = world // (tp * pp)
    experts = {"expert_model_parallel_size": w.gpus, "expert_tensor_parallel_size": 1} if w.experts else {}
    parallel_state.initialize_model_parallel(tp, pp, virtual, create_gloo_process_groups=False, **experts)
    model_parallel_cuda_manual_seed(1234)
    num_microbatches_calculator.init_num_microbatches_calculator(rank, None, w.batch, w.micro, dp)
    chunks, optimizer = build(w, model_config(w, tp, pp, virtual, not options.natural), dp, virtual)
    micro_batches = w.batch // (dp * w.micro)
    steps = options.warmup + options.steps
    data: list[Iterator[Tensor]] = [
        fresh_tokens(w, parallel_state.get_data_parallel_rank(), micro_batches * steps) for _ in chunks
    ]
    positions = torch.arange(w.length, device="cuda").expand(w.micro, -1).contiguous()
    run = get_forward_backward_func()
    losses: list[float | None] = []

    def loss_of(out: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = out.float().mean()
        return loss, {"loss": loss.detach().clone()}

    def forward(tokens: Iterator[Tensor], model: nn.Module) -> tuple[Tensor, Any]:
        ids = next(tokens)
        return model(ids[:, :-1].contiguous(), positions, None, labels=ids[:, 1:].contiguous()), loss_of

    def step() -> None:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        several = len(chunks) > 1
        told = run(
            forward_step_func=forward,
            data_iterator=data if several else data[0],
            model=chunks if several else chunks[0],
            num_microbatches=micro_batches,
            seq_length=w.length,
            micro_batch_size=w.micro,
            decoder_seq_length=w.length,
            forward_only=False,
        )
        optimizer.step()
        losses.append(sum(t["loss"] for t in told) / len(told) if told else None)

    seconds = timed(step, options.warmup, options.steps)
    ends = [
        float(x) if x is not None else float("nan") for x in (losses[0], losses[-1])
    ]  # known on the last stage only
    report(
        f"Megatron-Core dp{dp} tp{tp} pp{pp}",
        w,
        seconds,
        ends,
        options.out,
        connections=os.environ["CUDA_DEVICE_MAX_CONNECTIONS"],
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
