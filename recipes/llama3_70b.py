"""Llama 3.1 70B from scratch on 128 GPUs: tp=4 inside a node, pp=4, dp=8 (or any number of replicas of 16 GPUs).

Sizes: the published config of meta-llama/Llama-3.1-70B, 70,553,706,496 parameters. Learning rate and schedule:
Grattafiori et al., "The Llama 3 herd of models", 2024, table 3 and section 3.4.1. Try it: `phalanx plan
recipes/llama3_70b.py --ranks 128`.
"""

from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.layout.config import LayoutConfig
from phalanx.models.llama import LlamaConfig
from phalanx.models.rope import RopeScaling
from phalanx.optim.config import OptimConfig


def run(data: tuple[str, ...] = (), tokenizer: str | None = None, steps: int = 100_000, virtual_stages: int = 1) -> Run:
    """data: prefixes of token files; none: made-up tokens, to try speed and memory.

    Fits GPUs of 141 GB without recompute. `virtual_stages=2` makes the pipeline's bubble half as long and keeps more
    activations.
    """
    return Run(
        model=LlamaConfig(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            rope_theta=500000.0,
            max_position_embeddings=131072,
            rope_scaling=RopeScaling(
                factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
            ),
        ),
        layout=LayoutConfig(tp=4, pp=4, virtual_stages=virtual_stages),
        train=TrainConfig(steps=steps, global_batch=512, micro_batch=1, seq_length=8192, precision="bf16"),
        optim=OptimConfig(lr=1.5e-4, min_lr=1.5e-6, schedule="cosine", warmup_steps=min(2000, steps // 10)),
        data=DataConfig(paths=data, mock=not data, tokenizer=tokenizer),
        dir="runs/llama3-70b",
    )
