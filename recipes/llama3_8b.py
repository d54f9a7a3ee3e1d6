"""Llama 3.1 8B from scratch on 1, 4 or 8 GPUs: `phalanx train recipes/llama3_8b.py` (8 GPUs), or `run(gpus=...)` from
Python.

Sizes: the published config of meta-llama/Llama-3.1-8B, 8,030,261,248 parameters. Learning rate, batch and schedule:
Grattafiori et al., "The Llama 3 herd of models", 2024, table 3 and section 3.4.1.
"""

from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.layout.config import LayoutConfig
from phalanx.models.llama import LlamaConfig
from phalanx.models.rope import RopeScaling
from phalanx.optim.config import OptimConfig


def run(
    gpus: int = 8, data: tuple[str, ...] = (), tokenizer: str | None = None, steps: int = 100_000, layers: int = 32
) -> Run:
    """data: prefixes of token files; none: made-up tokens, to try speed and memory.

    With 4 or 8 GPUs the optimizer state is cut over them and 80 GB (8 GPUs, full recompute) or 141 GB each are enough
    without recompute. One GPU holds 18 bytes per parameter, 145 GB: that needs 180 GB and full recompute; `layers=8`
    fits 141 GB.
    """
    if gpus not in (1, 4, 8):
        raise ValueError(f"this recipe is for 1, 4 or 8 GPUs, not {gpus}")
    return Run(
        model=LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=layers,
            num_attention_heads=32,
            num_key_value_heads=8,
            rope_theta=500000.0,
            max_position_embeddings=131072,
            rope_scaling=RopeScaling(
                factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
            ),
        ),
        layout=LayoutConfig(),
        train=TrainConfig(
            steps=steps,
            global_batch=512,
            micro_batch=1,
            seq_length=8192,
            precision="bf16",
            recompute="full" if gpus == 1 and layers > 8 else "none",
        ),
        optim=OptimConfig(lr=3e-4, min_lr=3e-6, schedule="cosine", warmup_steps=min(2000, steps // 10)),
        data=DataConfig(paths=data, mock=not data, tokenizer=tokenizer),
        dir="runs/llama3-8b",
    )
