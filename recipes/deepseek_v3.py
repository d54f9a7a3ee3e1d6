"""DeepSeek-V3 from scratch on 2,048 GPUs: pp=16, ep=64 (a stage's experts on 64 of its 128 ranks), no tensor
parallelism.

Sizes: the published config of deepseek-ai/DeepSeek-V3, 671.0 B parameters and 11.5 B more in the module that predicts
one token further. Layout, learning rate, batch, balancing and weights of losses: DeepSeek-AI, "DeepSeek-V3 technical
report", 2024, sections 3.2 and 4.2 (there: fp8, batches of 3,072 to 15,360 sequences; here: bf16, all blocks made again
in backward, and the final batch). Try it: `phalanx plan recipes/deepseek_v3.py --ranks 2048`.
"""

from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.layout.config import LayoutConfig
from phalanx.models.deepseek_v3 import DeepseekV3Config
from phalanx.optim.config import OptimConfig


def run(data: tuple[str, ...] = (), tokenizer: str | None = None, steps: int = 235_000) -> Run:
    """data: prefixes of token files; none: made-up tokens, to try speed and memory. 235,000 steps are 14.8 T tokens."""
    return Run(
        model=DeepseekV3Config(
            vocab_size=129280,
            hidden_size=7168,
            intermediate_size=18432,
            num_hidden_layers=61,
            num_attention_heads=128,
            first_k_dense_replace=3,
            num_nextn_predict_layers=1,
            initializer_range=0.006,
        ),
        layout=LayoutConfig(pp=16, ep=64),
        train=TrainConfig(
            steps=steps, global_batch=15360, micro_batch=1, seq_length=4096, precision="bf16", recompute="full"
        ),
        optim=OptimConfig(lr=2.2e-4, min_lr=2.2e-5, schedule="cosine", warmup_steps=min(2000, steps // 10)),
        data=DataConfig(paths=data, mock=not data, tokenizer=tokenizer),
        dir="runs/deepseek-v3",
    )
