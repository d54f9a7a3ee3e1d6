"""Qwen3 8B from scratch on 8 GPUs: `phalanx train recipes/qwen3_8b.py`, or go on from the published weights:
`init_from=FOLDER`.

Sizes: the published config of Qwen/Qwen3-8B, 8,190,735,360 parameters. Learning rate, batch and schedule are ours: the
report (Yang et al., "Qwen3 technical report", 2025) does not give them.
"""

from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.layout.config import LayoutConfig
from phalanx.models.qwen3 import Qwen3Config
from phalanx.optim.config import OptimConfig


def run(data: tuple[str, ...] = (), tokenizer: str | None = None, steps: int = 100_000) -> Run:
    """data: prefixes of token files; none: made-up tokens, to try speed and memory."""
    return Run(
        model=Qwen3Config(
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=40960,
        ),
        layout=LayoutConfig(),
        train=TrainConfig(steps=steps, global_batch=512, micro_batch=1, seq_length=4096, precision="bf16"),
        optim=OptimConfig(lr=3e-4, min_lr=3e-5, schedule="cosine", warmup_steps=min(2000, steps // 10)),
        data=DataConfig(paths=data, mock=not data, tokenizer=tokenizer),
        dir="runs/qwen3-8b",
    )
