"""Mistral 7B v0.1 from scratch on 8 GPUs: `phalanx train recipes/mistral_7b.py`, or go on from the published weights:
`init_from=FOLDER`.

Sizes: Jiang et al., "Mistral 7B", 2023, and the published config of mistralai/Mistral-7B-v0.1, 7,241,732,096
parameters. The report does not give learning rate, batch or schedule: those are ours.
"""

from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.layout.config import LayoutConfig
from phalanx.models.mistral import MistralConfig
from phalanx.optim.config import OptimConfig


def run(data: tuple[str, ...] = (), tokenizer: str | None = None, steps: int = 100_000) -> Run:
    """data: prefixes of token files; none: made-up tokens, to try speed and memory."""
    return Run(
        model=MistralConfig(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=32768,
            sliding_window=4096,
        ),
        layout=LayoutConfig(),
        train=TrainConfig(
            steps=steps, global_batch=256, micro_batch=1, seq_length=8192, precision="bf16", recompute="selective"
        ),
        optim=OptimConfig(lr=3e-4, min_lr=3e-5, schedule="cosine", warmup_steps=min(2000, steps // 10)),
        data=DataConfig(paths=data, mock=not data, tokenizer=tokenizer),
        dir="runs/mistral-7b",
    )
