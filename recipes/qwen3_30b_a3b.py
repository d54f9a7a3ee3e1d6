"""Qwen3 30B-A3B from scratch on 8, 64 or more GPUs: `phalanx train recipes/qwen3_30b_a3b.py`.

Or go on from the published weights: `init_from=FOLDER`. Sizes: the published config of Qwen/Qwen3-30B-A3B,
30,532,122,624 parameters. Learning rate, batch and schedule are ours: the report (Yang et al., "Qwen3 technical
report", 2025) does not give them.
"""

from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.layout.config import LayoutConfig
from phalanx.models.qwen3_moe import Qwen3MoEConfig
from phalanx.optim.config import OptimConfig


def run(data: tuple[str, ...] = (), tokenizer: str | None = None, steps: int = 100_000) -> Run:
    """data: prefixes of token files; none: made-up tokens, to try speed and memory.

    8 ranks share the experts of a layer; 8 GPUs are enough where each holds 141 GB.
    """
    return Run(
        model=Qwen3MoEConfig(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            num_experts=128,
            num_experts_per_tok=8,
            max_position_embeddings=40960,
        ),
        layout=LayoutConfig(ep=8),
        train=TrainConfig(
            steps=steps, global_batch=512, micro_batch=1, seq_length=4096, precision="bf16", recompute="full"
        ),
        optim=OptimConfig(lr=3e-4, min_lr=3e-5, schedule="cosine", warmup_steps=min(2000, steps // 10)),
        data=DataConfig(paths=data, mock=not data, tokenizer=tokenizer),
        dir="runs/qwen3-30b-a3b",
    )
