"""All weights of Llama 3.1 8B trained on one GPU of 80 GB: `phalanx train recipes/llama3_8b_full_one_gpu.py
init_from=FOLDER` goes on from published weights.

Sizes: the published config of meta-llama/Llama-3.1-8B, 8,030,261,248 parameters. Beside each bf16 weight stand the bits
that its master has more (2.1 bytes) and two moments in 8 bits (2.1 bytes); gradients are applied layer by layer in
backward. The learning rate is ours, and clipping is off: with in_backward the norm of the model comes too late for it.
"""

from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.layout.config import LayoutConfig
from phalanx.models.llama import LlamaConfig
from phalanx.models.rope import RopeScaling
from phalanx.optim.adamw import AdamWConfig


def run(
    data: tuple[str, ...] = (), tokenizer: str | None = None, steps: int = 1000, tokens: int = 8192, layers: int = 32
) -> Run:
    """data: prefixes of token files; none: made-up tokens, to try speed and memory. tokens: in a step, which is one
    sequence."""
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
            steps=steps, global_batch=1, micro_batch=1, seq_length=tokens, precision="bf16", recompute="full"
        ),
        optim=AdamWConfig(
            lr=1e-5,
            schedule="cosine",
            warmup_steps=min(100, steps // 10),
            weight_decay=0.0,
            beta2=0.999,
            clip_grad=0.0,
            masters="split",
            moments="8bit",
            in_backward=True,
        ),
        data=DataConfig(paths=data, mock=not data, tokenizer=tokenizer),
        dir="runs/llama3-8b-full-one-gpu",
    )
