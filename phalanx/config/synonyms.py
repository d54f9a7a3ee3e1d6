"""What other frameworks call our config keys, used to suggest what an unknown key may have meant."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from phalanx.base.registry import BUILT_IN

SYNONYMS: Mapping[str, str] = MappingProxyType(
    {
        "learning_rate": "optim.lr",
        "max_lr": "optim.lr",
        "lora_r": "lora.rank",
        "lora_rank": "lora.rank",
        "lora_alpha": "lora.alpha",
        "lora_dropout": "lora.dropout",
        "use_rslora": "lora.rank_stabilised",
        "bnb_4bit_quant_type": "lora.base",
        "quantize_base": "lora.base",
        "modules_to_save": "lora.also",
        "use_dora": "lora.method",
        "init_lora_weights": "lora.start",
        "target_modules": "lora.targets",
        "lora_target_modules": "lora.targets",
        "optimizer": "optim.name",
        "lr_scheduler": "optim.schedule",
        "lr_decay_style": "optim.schedule",
        "lr_warmup_steps": "optim.warmup_steps",
        "warmup": "optim.warmup_steps",
        "clip_grad_norm": "optim.clip_grad",
        "max_grad_norm": "optim.clip_grad",
        "max_norm": "optim.clip_grad",
        "optimizer_in_bwd": "optim.in_backward",
        "optim_bits": "optim.moments",
        "betas": "optim.beta1",
        "train_iters": "train.steps",
        "max_steps": "train.steps",
        "iterations": "train.steps",
        "gbs": "train.global_batch",
        "global_batch_size": "train.global_batch",
        "mbs": "train.micro_batch",
        "micro_batch_size": "train.micro_batch",
        "batch_size": "train.global_batch",
        "seq_len": "train.seq_length",
        "sequence_length": "train.seq_length",
        "dtype": "train.precision",
        "bf16": "train.precision",
        "fp16": "train.precision",
        "mixed_precision": "train.precision",
        "amp": "train.precision",
        "max_seq_len": "train.seq_length",
        "block_size": "train.seq_length",
        "num_steps": "train.steps",
        "train_steps": "train.steps",
        "per_device_train_batch_size": "train.micro_batch",
        "gradient_accumulation_steps": "train.global_batch",
        "random_seed": "train.seed",
        "eval_every": "train.eval_interval",
        "eval_steps": "train.eval_interval",
        "cpu_offload": "train.offload_layers",
        "activation_offload": "train.offload_layers",
        "recompute_granularity": "train.recompute",
        "cudagraphs": "train.cuda_graphs",
        "profiler": "train.profile",
        "fp8_recipe": "train.fp8.recipe",
        "clip_grad": "optim.clip_grad",
        "wd": "optim.weight_decay",
        "adam_beta1": "optim.beta1",
        "adam_beta2": "optim.beta2",
        "adam_epsilon": "optim.eps",
        "lr_warmup_iters": "optim.warmup_steps",
        "warmup_ratio": "optim.warmup_steps",
        "activation_checkpoint": "train.recompute",
        "gradient_checkpointing": "train.recompute",
        "tensor_parallel": "layout.tp",
        "tensor_parallel_size": "layout.tp",
        "tensor_model_parallel_size": "layout.tp",
        "pipeline_parallel": "layout.pp",
        "pipeline_parallel_size": "layout.pp",
        "pipeline_model_parallel_size": "layout.pp",
        "virtual_pipeline_model_parallel_size": "layout.virtual_stages",
        "vpp": "layout.virtual_stages",
        "zero_stage": "layout.sharding",
        "zero": "layout.sharding",
        "zero_optimization": "layout.sharding",
        "distributed_optimizer": "layout.sharding",
        "use_distributed_optimizer": "layout.sharding",
        "fsdp": "layout.sharding",
        "fully_shard": "layout.sharding",
        "sharding_strategy": "layout.sharding",
        "data_parallel_shard_degree": "layout.sharding",
        "ddp": "layout.sharding",
        "hsdp": "layout.shard_group",
        "data_parallel_replicate_degree": "layout.shard_group",
        "context_parallel": "layout.cp",
        "context_parallel_size": "layout.cp",
        "context_parallel_degree": "layout.cp",
        "ring_attention": "layout.cp",
        "ulysses": "layout.cp_ulysses",
        "expert_parallel": "layout.ep",
        "expert_parallel_size": "layout.ep",
        "expert_parallel_degree": "layout.ep",
        "expert_model_parallel_size": "layout.ep",
        "expert_tensor_parallel_size": "layout.etp",
        "sequence_parallel": "layout.tp",
        "tensor_parallel_degree": "layout.tp",
        "pipeline_parallel_degree": "layout.pp",
        "interleaved": "layout.virtual_stages",
        "pipeline_schedule": "layout.schedule",
        "layers": "model.num_hidden_layers",
        "num_layers": "model.num_hidden_layers",
        "n_layer": "model.num_hidden_layers",
        "hidden": "model.hidden_size",
        "n_embd": "model.hidden_size",
        "ffn_hidden_size": "model.intermediate_size",
        "n_inner": "model.intermediate_size",
        "heads": "model.num_attention_heads",
        "n_head": "model.num_attention_heads",
        "kv_heads": "model.num_key_value_heads",
        "num_query_groups": "model.num_key_value_heads",
        "model_type": "model.family",
        "norm_eps": "model.rms_norm_eps",
        "data_path": "data.paths",
        "dataset": "data.paths",
        "train_files": "data.text",
        "chat_template": "data.template",
        "chat_template_path": "data.template",
        "train_on_inputs": "task.train_on",
        "assistant_only_loss": "task.train_on",
        "completion_only_loss": "task.train_on",
        "tokenizer_model": "data.tokenizer",
        "tokenizer_path": "data.tokenizer",
        "packed": "data.packing",
        "load": "checkpoint.load",
        "resume_from_checkpoint": "checkpoint.load",
        "async_save": "checkpoint.background",
        "save_steps": "checkpoint.interval",
        "checkpoint_interval": "checkpoint.interval",
        "pretrained": "init_from",
        "model_name_or_path": "init_from",
        "logging_steps": "log.interval",
        "wandb_project": "log.wandb",
        "report_to": "log.wandb",
        "save_interval": "checkpoint.interval",
        "save_total_limit": "checkpoint.keep_last",
        "output_dir": "dir",
        "save": "dir",
        "log_interval": "log.interval",
    }
)

SAME_IN_OTHERS: Mapping[str, str] = MappingProxyType({"beta1": "momentum", "momentum": "beta1"})
"""Keys of an optimizer that do what a key of another name does in others: the decay of the mean of gradients."""

VALUES: Mapping[str, str] = MappingProxyType(
    {
        "fsdp": "FSDP and ZeRO-3 are layout.sharding=3",
        "sft": "supervised fine-tuning on chats is task.name=sft with data.chats",
        "dpo": "preferences are task.name=dpo with data.pairs",
        "peft": "adapters are the section lora: lora.rank=16 trains LoRA",
        "qlora": "QLoRA is lora.base=nf4: adapters over a base of 4 bits",
        "load_in_4bit": "a base of 4 bits under adapters is lora.base=nf4 (QLoRA) or int4",
        "load_in_8bit": "a base of 8 bits under adapters is lora.base=int8 or fp8",
        "fully_shard": "FSDP and ZeRO-3 are layout.sharding=3",
        "hsdp": "HSDP is layout.sharding=3 with layout.shard_group=RANKS_OF_A_NODE",
        "zero": "ZeRO stages 0 to 3 are layout.sharding=0 to 3",
        "zero_optimization": "ZeRO stages 0 to 3 are layout.sharding=0 to 3",
        "ddp": "plain data parallelism (DDP) is layout.sharding=0, over the ranks that the other sizes leave",
        "dp": "the data-parallel size is what the other sizes leave of --ranks",
        "data_parallel_size": "the data-parallel size is what the other sizes leave of --ranks",
        "sequence_parallel": "sequence parallelism comes with layout.tp",
        "muon": "Muon is an optimizer: optim.name=muon",
        "lion": "Lion is an optimizer: optim.name=lion",
        "sgd": "SGD is an optimizer: optim.name=sgd",
        "gradient_accumulation_steps": "micro-batches follow from train.global_batch, train.micro_batch and the ranks",
    }
)
"""Settings that are not made by a key of that name: a sentence about each."""

_OPTIMIZERS = (
    "what exists: optim.name=adamw, muon, lion and sgd, with moments in fp32, bf16, fp8 or 8 bits (optim.moments), and "
    "optimizers of your own, element by element or over whole matrices: optim.name=PACKAGE.MODULE:NAME"
)
_OBJECTIVE = (
    f"what exists: task.name={', '.join(BUILT_IN['objective'])}, and losses of your own: task.name=PACKAGE.MODULE:NAME"
)
NOT_BUILT: Mapping[str, str] = MappingProxyType(
    {
        "adafactor": f"Adafactor is not built yet; {_OPTIMIZERS}",
        "shampoo": f"Shampoo is not built yet; {_OPTIMIZERS}",
        "soap": f"SOAP is not built yet; {_OPTIMIZERS}",
        "z_loss": f"a z-loss is not built in; {_OBJECTIVE}",
        "compile": "torch.compile is not used; what exists: train.kernels and train.cuda_graphs",
        "torch_compile": "torch.compile is not used; what exists: train.kernels and train.cuda_graphs",
    }
)
"""Features that people ask for and that do not exist yet: a sentence that says so and names what exists."""


def said_of(name: str) -> str:
    """A sentence about a key or value of another framework; empty if there is none."""
    short = name.lower().rpartition(".")[2]
    return NOT_BUILT.get(short) or VALUES.get(short, "")
