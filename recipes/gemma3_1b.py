"""Gemma 3 1B from scratch on 8 GPUs: `phalanx train recipes/gemma3_1b.py`, or go on from the published weights:
`init_from=FOLDER`.

Sizes: the published config of google/gemma-3-1b-pt, 999,885,952 parameters. Learning rate, batch and schedule are ours:
the report (Gemma team, "Gemma 3 technical report", 2025) does not give them.
"""

from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.layout.config import LayoutConfig
from phalanx.models.gemma3_text import Gemma3TextConfig
from phalanx.optim.config import OptimConfig


def run(data: tuple[str, ...] = (), tokenizer: str | None = None, steps: int = 100_000) -> Run:
    """data: prefixes of token files; none: made-up tokens, to try speed and memory."""
    return Run(
        model=Gemma3TextConfig(
            vocab_size=262144,
            hidden_size=1152,
            intermediate_size=6912,
            num_hidden_layers=26,
            num_attention_heads=4,
            num_key_value_heads=1,
            max_position_embeddings=32768,
            sliding_window=512,
        ),
        layout=LayoutConfig(),
        train=TrainConfig(steps=steps, global_batch=512, micro_batch=1, seq_length=4096, precision="bf16"),
        optim=OptimConfig(lr=6e-4, min_lr=6e-5, schedule="cosine", warmup_steps=min(2000, steps // 10)),
        data=DataConfig(paths=data, mock=not data, tokenizer=tokenizer),
        dir="runs/gemma3-1b",
    )
