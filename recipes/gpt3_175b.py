"""GPT-3 175B on replicas of 32 GPUs: tp=4 inside a node, pp=8, and dp from the rest of the world (128 GPUs: dp=4).

Sizes and training: Brown et al., "Language models are few-shot learners", 2020, tables 2.1 and appendix B: 96 layers of
width 12288, batches of 3.2 million tokens, 300 billion tokens. The attention is dense in every layer here (theirs
alternates with sparse ones).
"""

from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.layout.config import LayoutConfig
from phalanx.models.gpt2 import GPT2Config
from phalanx.optim.adamw import AdamWConfig


def run(data: tuple[str, ...] = (), tokenizer: str | None = None, steps: int = 95_368) -> Run:
    """data: prefixes of token files; none: made-up tokens, to try speed and memory. Fits GPUs of 141 GB without
    recompute."""
    return Run(
        model=GPT2Config(
            vocab_size=50257,
            hidden_size=12288,
            num_hidden_layers=96,
            num_attention_heads=96,
            max_position_embeddings=2048,
        ),
        layout=LayoutConfig(tp=4, pp=8),
        train=TrainConfig(steps=steps, global_batch=1536, micro_batch=1, seq_length=2048, precision="bf16"),
        optim=AdamWConfig(
            lr=6e-5,
            min_lr=6e-6,
            beta2=0.95,
            weight_decay=0.1,
            clip_grad=1.0,
            schedule="cosine",
            warmup_steps=min(120, steps // 10),
        ),
        data=DataConfig(paths=data, mock=not data, tokenizer=tokenizer),
        dir="runs/gpt3-175b",
    )
