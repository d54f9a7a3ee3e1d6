"""Mixtral 8x7B from scratch on 32, 64 or more GPUs: `phalanx train recipes/mixtral_8x7b.py`.

Or go on from the published weights: `init_from=FOLDER`. Sizes: the published config of mistralai/Mixtral-8x7B-v0.1,
46,702,792,704 parameters. Learning rate, batch and schedule are ours: the paper (Jiang et al., "Mixtral of experts",
2024) does not give them.
"""

from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.layout.config import LayoutConfig
from phalanx.models.mixtral import MixtralConfig
from phalanx.optim.config import OptimConfig


def run(data: tuple[str, ...] = (), tokenizer: str | None = None, steps: int = 100_000) -> Run:
    """data: prefixes of token files; none: made-up tokens, to try speed and memory.

    On 64 GPUs 8 ranks share the experts of a layer, and 2 hold the same ones.
    """
    return Run(
        model=MixtralConfig(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            num_local_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=32768,
            router_aux_loss_coef=0.01,
        ),
        layout=LayoutConfig(pp=4, ep=8),
        train=TrainConfig(
            steps=steps, global_batch=512, micro_batch=1, seq_length=4096, precision="bf16", recompute="none"
        ),
        optim=OptimConfig(lr=3e-4, min_lr=3e-5, schedule="cosine", warmup_steps=min(2000, steps // 10)),
        data=DataConfig(paths=data, mock=not data, tokenizer=tokenizer),
        dir="runs/mixtral-8x7b",
    )
