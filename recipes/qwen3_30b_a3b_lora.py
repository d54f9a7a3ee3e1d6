"""Qwen3 30B-A3B fine-tuned on chats with LoRA, experts included, on one GPU of 80 GB or more: `phalanx train
recipes/qwen3_30b_a3b_lora.py init_from=FOLDER data.tokenizer=FOLDER data.mock=false "data.chats=[chats.jsonl]"`.

Sizes: the published config of Qwen/Qwen3-30B-A3B, 30,532,122,624 parameters, which are frozen. Adapters of rank 8 on
all linears of attention and of all 128 experts of each layer; learning rate, batch and schedule are ours.
"""

from phalanx.config.run import Run, TrainConfig
from phalanx.data.config import DataConfig
from phalanx.engine.objectives.sft import SFT
from phalanx.layout.config import LayoutConfig
from phalanx.models.qwen3_moe import Qwen3MoEConfig
from phalanx.nn.adapters.lora import LoRA
from phalanx.optim.adamw import AdamWConfig


def run(
    chats: tuple[str, ...] = (), tokenizer: str | None = None, steps: int = 1000, tokens: int = 4096, gpus: int = 1
) -> Run:
    """chats: files of them; none: made-up tokens, to try speed and memory. tokenizer: a folder with its chat template.
    tokens: in a sequence, into which whole chats are packed. gpus: that share the experts of a layer."""
    return Run(
        model=Qwen3MoEConfig(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            num_experts=128,
            num_experts_per_tok=8,
            max_position_embeddings=40960,
        ),
        layout=LayoutConfig(ep=gpus),
        task=SFT.Config(name="sft"),
        lora=LoRA.Config(method="lora", rank=8, alpha=16.0),
        train=TrainConfig(
            steps=steps, global_batch=16, micro_batch=1, seq_length=tokens, precision="bf16", recompute="full"
        ),
        optim=AdamWConfig(lr=1e-4, schedule="cosine", warmup_steps=min(50, steps // 10), weight_decay=0.0),
        data=DataConfig(chats=chats, mock=not chats, document_attention=True, tokenizer=tokenizer),
        dir="runs/qwen3-30b-a3b-lora",
    )
