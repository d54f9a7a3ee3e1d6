"""Llama 3.1 8B fine-tuned with QLoRA on one GPU of 16 GB or more: `phalanx train recipes/llama3_8b_qlora.py
init_from=FOLDER`. Without a folder the base is drawn at random: speed and memory can be tried.

Sizes: the published config of meta-llama/Llama-3.1-8B. Dettmers et al., "QLoRA: efficient finetuning of quantized
LLMs", 2023: NF4 with double quantization, adapters on all linears, table 9's learning rate for 7B and a constant
schedule; their rank is 64, ours 16. `phalanx plan recipes/llama3_8b_qlora.py --ranks 1` shows the memory.
"""

from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.layout.config import LayoutConfig
from phalanx.models.llama import LlamaConfig
from phalanx.models.rope import RopeScaling
from phalanx.nn.adapter import find_adapter
from phalanx.optim.adamw import AdamWConfig


def run(
    data: tuple[str, ...] = (), tokenizer: str | None = None, steps: int = 1000, tokens: int = 2048, layers: int = 32
) -> Run:
    """data: prefixes of token files; none: made-up tokens. tokens: of a sequence, of which 16 make a step."""
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
        lora=find_adapter("lora").Config(rank=16, alpha=32, base="nf4"),
        layout=LayoutConfig(),
        train=TrainConfig(
            steps=steps, global_batch=16, micro_batch=1, seq_length=tokens, precision="bf16", recompute="full"
        ),
        optim=AdamWConfig(lr=2e-4, schedule="constant", weight_decay=0.0, beta2=0.999, clip_grad=0.3),
        data=DataConfig(paths=data, mock=not data, tokenizer=tokenizer),
        dir="runs/llama3-8b-qlora",
    )
