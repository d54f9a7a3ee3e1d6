"""All weights of Llama 3.2 1B fine-tuned on chats on one GPU: `phalanx train recipes/llama3_2_1b_sft.py
init_from=FOLDER data.tokenizer=FOLDER data.mock=false "data.chats=[chats.jsonl]"`.

Sizes: the published config of meta-llama/Llama-3.2-1B-Instruct, 1,235,814,400 parameters. Learning rate, batch and
schedule are ours.
"""

from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.engine.objectives.sft import SFT
from phalanx.layout.config import LayoutConfig
from phalanx.models.llama import LlamaConfig
from phalanx.models.rope import RopeScaling
from phalanx.optim.adamw import AdamWConfig


def run(chats: tuple[str, ...] = (), tokenizer: str | None = None, steps: int = 1000, tokens: int = 4096) -> Run:
    """chats: files of them; none: made-up tokens, to try speed and memory. tokenizer: a folder with its chat template.
    tokens: in a sequence, into which whole chats are packed."""
    return Run(
        model=LlamaConfig(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            rope_theta=500000.0,
            max_position_embeddings=131072,
            tie_word_embeddings=True,
            rope_scaling=RopeScaling(
                factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
            ),
        ),
        layout=LayoutConfig(),
        task=SFT.Config(name="sft"),
        train=TrainConfig(steps=steps, global_batch=16, micro_batch=2, seq_length=tokens, precision="bf16"),
        optim=AdamWConfig(lr=1e-5, schedule="cosine", warmup_steps=min(50, steps // 10), weight_decay=0.0),
        data=DataConfig(chats=chats, mock=not chats, document_attention=True, tokenizer=tokenizer),
        dir="runs/llama3-2-1b-sft",
    )
