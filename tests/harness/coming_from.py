"""The tables of docs/coming-from.md: what other frameworks call our config keys.

    python -m tests.harness.coming_from docs/coming-from.md

writes them. Names that phalanx/config/synonyms.py knows have the key that messages name; the last table has all the
others that it knows. tests/doors/test_coming_from.py checks that.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from phalanx.config.synonyms import NOT_BUILT, SYNONYMS, VALUES

MARK = re.compile(r"<!-- table: (?P<name>[^>]+?) -->\n.*?<!-- end -->", re.DOTALL)
REST = "other names"

FRAMEWORKS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Megatron-LM": {
            "--tensor-model-parallel-size": "layout.tp",
            "--sequence-parallel": "layout.tp",
            "--pipeline-model-parallel-size": "layout.pp",
            "virtual_pipeline_model_parallel_size": "layout.virtual_stages",
            "--context-parallel-size": "layout.cp",
            "--expert-model-parallel-size": "layout.ep",
            "--expert-tensor-parallel-size": "layout.etp",
            "--moe-token-dispatcher-type": "layout.dispatch",
            "--use-distributed-optimizer": "layout.sharding",
            "--num-layers": "model.num_hidden_layers",
            "--hidden-size": "model.hidden_size",
            "--ffn-hidden-size": "model.intermediate_size",
            "--num-attention-heads": "model.num_attention_heads",
            "--num-query-groups": "model.num_key_value_heads",
            "--micro-batch-size": "train.micro_batch",
            "--global-batch-size": "train.global_batch",
            "--seq-length": "train.seq_length",
            "--train-iters": "train.steps",
            "--bf16": "train.precision",
            "--fp8-recipe": "train.fp8.recipe",
            "--recompute-granularity": "train.recompute",
            "--lr": "optim.lr",
            "--min-lr": "optim.min_lr",
            "--lr-decay-style": "optim.schedule",
            "--lr-warmup-iters": "optim.warmup_steps",
            "--adam-beta1": "optim.beta1",
            "--adam-beta2": "optim.beta2",
            "--weight-decay": "optim.weight_decay",
            "--clip-grad": "optim.clip_grad",
            "--data-path": "data.paths",
            "--split": "data.split",
            "--tokenizer-model": "data.tokenizer",
            "--save": "dir",
            "--load": "checkpoint.load",
            "--save-interval": "checkpoint.interval",
            "--async-save": "checkpoint.background",
            "--eval-interval": "train.eval_interval",
            "--log-interval": "log.interval",
        },
        "torchtitan": {
            "parallelism.tensor_parallel_degree": "layout.tp",
            "parallelism.pipeline_parallel_degree": "layout.pp",
            "parallelism.pipeline_parallel_schedule": "layout.schedule",
            "parallelism.context_parallel_degree": "layout.cp",
            "parallelism.expert_parallel_degree": "layout.ep",
            "parallelism.data_parallel_shard_degree": "layout.sharding",
            "parallelism.data_parallel_replicate_degree": "layout.shard_group",
            "training.local_batch_size": "train.micro_batch",
            "training.global_batch_size": "train.global_batch",
            "training.seq_len": "train.seq_length",
            "training.steps": "train.steps",
            "training.max_norm": "optim.clip_grad",
            "optimizer.lr": "optim.lr",
            "lr_scheduler.warmup_steps": "optim.warmup_steps",
            "activation_checkpoint.mode": "train.recompute",
            "checkpoint.interval": "checkpoint.interval",
            "keep_latest_k": "checkpoint.keep_last",
            "metrics.log_freq": "log.interval",
        },
        "DeepSpeed": {
            "zero_optimization.stage": "layout.sharding",
            "train_batch_size": "train.global_batch",
            "train_micro_batch_size_per_gpu": "train.micro_batch",
            "gradient_accumulation_steps": "train.global_batch",
            "gradient_clipping": "optim.clip_grad",
            "bf16.enabled": "train.precision",
            "fp16.initial_scale_power": "train.loss_scale",
            "activation_checkpointing": "train.recompute",
            "optimizer.params.lr": "optim.lr",
            "optimizer.params.betas": "optim.beta1",
            "optimizer.params.weight_decay": "optim.weight_decay",
            "scheduler.params.warmup_num_steps": "optim.warmup_steps",
            "zero_optimization.reduce_bucket_size": "layout.bucket_mb",
            "zero_hpz_partition_size": "layout.shard_group",
        },
        "Hugging Face": {
            "learning_rate": "optim.lr",
            "per_device_train_batch_size": "train.micro_batch",
            "gradient_accumulation_steps": "train.global_batch",
            "max_steps": "train.steps",
            "max_grad_norm": "optim.clip_grad",
            "weight_decay": "optim.weight_decay",
            "lr_scheduler_type": "optim.schedule",
            "warmup_steps": "optim.warmup_steps",
            "warmup_ratio": "optim.warmup_steps",
            "bf16": "train.precision",
            "gradient_checkpointing": "train.recompute",
            "fsdp": "layout.sharding",
            "seed": "train.seed",
            "logging_steps": "log.interval",
            "eval_steps": "train.eval_interval",
            "save_steps": "checkpoint.interval",
            "save_total_limit": "checkpoint.keep_last",
            "resume_from_checkpoint": "checkpoint.load",
            "report_to": "log.wandb",
            "output_dir": "dir",
            "model_name_or_path": "init_from",
        },
    }
)
"""Framework -> its name, as people type it there -> our key."""


def short(name: str) -> str:
    """The name as phalanx/config/synonyms.py has it."""
    return name.removeprefix("--").replace("-", "_").rpartition(".")[2]


def section_of(name: str) -> str:
    """What `section.key` of another framework is known by, if its last word says too little."""
    return short(name) if short(name) not in ("enabled", "stage", "mode") else short(name.rpartition(".")[0])


def table(framework: str) -> str:
    names = FRAMEWORKS[framework] if framework in FRAMEWORKS else rest()
    note = {name: VALUES.get(section_of(name), "") for name in names}
    rows = [f"| `{name}` | `{key}` | {note[name]} |" for name, key in names.items()]
    head = [f"| {framework} | key | |", "|---|---|---|"]
    return "\n".join([f"<!-- table: {framework} -->", *head, *rows, "<!-- end -->"])


def rest() -> dict[str, str]:
    """Names that synonyms.py knows and no other table has."""
    shown = {section_of(name) for names in FRAMEWORKS.values() for name in names}
    return {name: key for name, key in sorted(SYNONYMS.items()) if name not in shown}


def not_built() -> str:
    rows = [f"| `{name}` | {said} |" for name, said in sorted(NOT_BUILT.items())]
    head = ["| asked for | what there is |", "|---|---|"]
    return "\n".join(["<!-- table: not built -->", *head, *rows, "<!-- end -->"])


def with_tables(page: str) -> str:
    """The page with the tables of today."""
    return MARK.sub(lambda m: not_built() if m["name"] == "not built" else table(m["name"]), page)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
