"""OLMo 2 7B from scratch on 8 GPUs: `phalanx train recipes/olmo2_7b.py`, or go on from the published weights:
`init_from=FOLDER`.

Sizes: the published config of allenai/OLMo-2-1124-7B, 7,298,617,344 parameters. Learning rate, batch and schedule are
ours, of the usual size for such models; those of the authors are in Team OLMo, "2 OLMo 2 Furious", 2024.
"""

from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.layout.config import LayoutConfig
from phalanx.models.olmo2 import Olmo2Config
from phalanx.optim.config import OptimConfig


def run(data: tuple[str, ...] = (), tokenizer: str | None = None, steps: int = 100_000) -> Run:
    """data: prefixes of token files; none: made-up tokens, to try speed and memory."""
    return Run(
        model=Olmo2Config(
            vocab_size=100352,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_attention_heads=32,
            max_position_embeddings=4096,
            rms_norm_eps=1e-6,
            rope_theta=500000.0,
        ),
        layout=LayoutConfig(),
        train=TrainConfig(steps=steps, global_batch=1024, micro_batch=1, seq_length=4096, precision="bf16"),
        optim=OptimConfig(lr=3e-4, min_lr=3e-5, schedule="cosine", warmup_steps=min(2000, steps // 10)),
        data=DataConfig(paths=data, mock=not data, tokenizer=tokenizer),
        dir="runs/olmo2-7b",
    )
