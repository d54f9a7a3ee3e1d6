"""Qwen3 235B-A22B from scratch on 64, 256 or more GPUs: `phalanx train recipes/qwen3_235b_a22b.py`.

Or go on from the published weights: `init_from=FOLDER`. Sizes: the published config of Qwen/Qwen3-235B-A22B,
235,093,634,560 parameters. Learning rate, batch and schedule are ours: the report (Yang et al., "Qwen3 technical
report", 2025) does not give them.
"""

from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.layout.config import LayoutConfig
from phalanx.models.qwen3_moe import Qwen3MoEConfig
from phalanx.optim.config import OptimConfig


def run(data: tuple[str, ...] = (), tokenizer: str | None = None, steps: int = 100_000) -> Run:
    """data: prefixes of token files; none: made-up tokens, to try speed and memory.

    8 ranks share the experts of a layer, on 64 GPUs (of 141 GB) all ranks of a stage, on 256 four sets of them.
    """
    return Run(
        model=Qwen3MoEConfig(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            moe_intermediate_size=1536,
            num_hidden_layers=94,
            num_attention_heads=64,
            num_key_value_heads=4,
            num_experts=128,
            num_experts_per_tok=8,
            max_position_embeddings=40960,
        ),
        layout=LayoutConfig(pp=8, ep=8),
        train=TrainConfig(
            steps=steps, global_batch=1024, micro_batch=1, seq_length=4096, precision="bf16", recompute="full"
        ),
        optim=OptimConfig(lr=2e-4, min_lr=2e-5, schedule="cosine", warmup_steps=min(2000, steps // 10)),
        data=DataConfig(paths=data, mock=not data, tokenizer=tokenizer),
        dir="runs/qwen3-235b-a22b",
    )
