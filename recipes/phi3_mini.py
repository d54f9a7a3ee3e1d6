"""Phi-3-mini from scratch on 8 GPUs: `phalanx train recipes/phi3_mini.py`, or go on from the published weights:
`init_from=FOLDER`.

Sizes: the published config of microsoft/Phi-3-mini-4k-instruct, 3,821,079,552 parameters. Learning rate, batch and
schedule are ours: the report (Abdin et al., "Phi-3 technical report", 2024) does not give them.
"""

from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.layout.config import LayoutConfig
from phalanx.models.phi3 import Phi3Config
from phalanx.optim.config import OptimConfig


def run(data: tuple[str, ...] = (), tokenizer: str | None = None, steps: int = 100_000) -> Run:
    """data: prefixes of token files; none: made-up tokens, to try speed and memory."""
    return Run(
        model=Phi3Config(
            vocab_size=32064,
            hidden_size=3072,
            intermediate_size=8192,
            num_hidden_layers=32,
            num_attention_heads=32,
            max_position_embeddings=4096,
            sliding_window=2047,
        ),
        layout=LayoutConfig(),
        train=TrainConfig(steps=steps, global_batch=512, micro_batch=1, seq_length=4096, precision="bf16"),
        optim=OptimConfig(lr=3e-4, min_lr=3e-5, schedule="cosine", warmup_steps=min(2000, steps // 10)),
        data=DataConfig(paths=data, mock=not data, tokenizer=tokenizer),
        dir="runs/phi3-mini",
    )
