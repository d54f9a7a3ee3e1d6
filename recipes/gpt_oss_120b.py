"""gpt-oss 120B from scratch on 64, 256 or more GPUs: `phalanx train recipes/gpt_oss_120b.py`.

Or go on from the published weights: `init_from=FOLDER`. Sizes: the published config of openai/gpt-oss-120b,
116,829,156,672 parameters. Learning rate, batch and schedule are ours: the model card (OpenAI, "gpt-oss-120b &
gpt-oss-20b model card", 2025) does not give them. The published weights are MXFP4, unpacked as they are read.
"""

from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.layout.config import LayoutConfig
from phalanx.models.gpt_oss import GptOssConfig
from phalanx.models.rope import RopeScaling
from phalanx.optim.config import OptimConfig


def run(data: tuple[str, ...] = (), tokenizer: str | None = None, steps: int = 100_000) -> Run:
    """data: prefixes of token files; none: made-up tokens, to try speed and memory.

    16 ranks share the experts of a layer.
    """
    return Run(
        model=GptOssConfig(
            vocab_size=201088,
            hidden_size=2880,
            intermediate_size=2880,
            num_hidden_layers=36,
            num_attention_heads=64,
            num_key_value_heads=8,
            num_local_experts=128,
            max_position_embeddings=131072,
            rope_scaling=RopeScaling(
                rope_type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False
            ),
        ),
        layout=LayoutConfig(pp=4, ep=16),
        train=TrainConfig(
            steps=steps, global_batch=512, micro_batch=1, seq_length=4096, precision="bf16", recompute="full"
        ),
        optim=OptimConfig(lr=2e-4, min_lr=2e-5, schedule="cosine", warmup_steps=min(2000, steps // 10)),
        data=DataConfig(paths=data, mock=not data, tokenizer=tokenizer),
        dir="runs/gpt-oss-120b",
    )
