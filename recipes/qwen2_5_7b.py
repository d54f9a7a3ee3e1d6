"""Qwen2.5 7B from scratch on 8 GPUs: `phalanx train recipes/qwen2_5_7b.py`, or go on from the published weights:
`init_from=FOLDER`.

Sizes: the published config of Qwen/Qwen2.5-7B (family qwen2), 7,615,616,512 parameters. Learning rate, batch and
schedule are ours: the report (Yang et al., "Qwen2.5 technical report", 2024) does not give them.
"""

from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.layout.config import LayoutConfig
from phalanx.models.qwen2 import Qwen2Config
from phalanx.optim.config import OptimConfig


def run(data: tuple[str, ...] = (), tokenizer: str | None = None, steps: int = 100_000) -> Run:
    """data: prefixes of token files; none: made-up tokens, to try speed and memory."""
    return Run(
        model=Qwen2Config(
            vocab_size=152064,
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            max_position_embeddings=131072,
            rope_theta=1000000.0,
        ),
        layout=LayoutConfig(),
        train=TrainConfig(steps=steps, global_batch=512, micro_batch=1, seq_length=4096, precision="bf16"),
        optim=OptimConfig(lr=3e-4, min_lr=3e-5, schedule="cosine", warmup_steps=min(2000, steps // 10)),
        data=DataConfig(paths=data, mock=not data, tokenizer=tokenizer),
        dir="runs/qwen2.5-7b",
    )
