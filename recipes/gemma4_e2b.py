"""Gemma 4 E2B's text model from scratch on 8 GPUs: `phalanx train recipes/gemma4_e2b.py`, or go on from the published
weights, of which the text's are read: `init_from=FOLDER`.

Sizes: the text_config of google/gemma-4-E2B. More than half of its weights are the table of inputs that each layer has
of its own. Learning rate, batch and schedule are ours.
"""

from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.layout.config import LayoutConfig
from phalanx.models.gemma4_text import Gemma4TextConfig
from phalanx.models.rope import RopeScaling
from phalanx.optim.config import OptimConfig


def run(data: tuple[str, ...] = (), tokenizer: str | None = None, steps: int = 100_000) -> Run:
    """data: prefixes of token files; none: made-up tokens, to try speed and memory."""
    return Run(
        model=Gemma4TextConfig(
            vocab_size=262144,
            hidden_size=1536,
            intermediate_size=6144,
            num_hidden_layers=35,
            num_attention_heads=8,
            num_key_value_heads=1,
            head_dim=256,
            global_head_dim=512,
            layer_types=(*("sliding_attention",) * 4, "full_attention") * 7,
            sliding_window=512,
            rope_scaling=RopeScaling(rope_type="proportional", partial_rotary_factor=0.25),
            final_logit_softcapping=30.0,
            hidden_size_per_layer_input=256,
            num_kv_shared_layers=20,
            use_double_wide_mlp=True,
        ),
        layout=LayoutConfig(sharding=2),
        train=TrainConfig(steps=steps, global_batch=512, micro_batch=1, seq_length=4096, precision="bf16"),
        optim=OptimConfig(lr=4e-4, min_lr=4e-5, schedule="cosine", warmup_steps=min(2000, steps // 10)),
        data=DataConfig(paths=data, mock=not data, tokenizer=tokenizer),
        dir="runs/gemma4-e2b",
    )
