"""Fine-tuning as most people do it: transformers, PEFT, Liger kernels, bitsandbytes. Llama-3-8B with random weights.

python3 benchmarks/peers/tune.py lora-8192 [--out tune.jsonl]

lora-8192, qlora-8192   adapters of rank 16 on all linears, one sequence of 8,192 tokens a step, blocks recomputed
lora-2048, qlora-2048   the same with 2,048 tokens

Base in bf16, or nf4 with double quantization; adapters in bf16 (as PEFT makes them of a bf16 base), AdamW fused; loss,
norms, SwiGLU and rotary embedding by Liger's kernels, attention by torch's. A row without checkpointing is measured too
where it fits (`--keep`). Needs peft, liger-kernel, and bitsandbytes for qlora.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from statistics import median
from typing import Any

import torch

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 32, 4096, 14336, 32, 8, 128256
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK, ALPHA = 16, 32


def config(layers: int, small: bool) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=512 if small else VOCAB,
        hidden_size=64 if small else HIDDEN,
        intermediate_size=96 if small else INNER,
        num_hidden_layers=2 if small else layers,
        num_attention_heads=4 if small else HEADS,
        num_key_value_heads=2 if small else KV_HEADS,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )


def model_of(quantized: bool, keep: bool, small: bool, device: str) -> torch.nn.Module:
    """The base as its users have it after loading, with adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    if device == "cuda":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config(LAYERS, small))
        torch.set_default_dtype(torch.float32)
    if quantized:
        quantize(model, device)
    if not keep:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    model.config.use_cache = False
    return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LINEARS, task_type="CAUSAL_LM"))


def quantize(model: torch.nn.Module, device: str) -> None:
    """Linears of the layers as bitsandbytes' nf4 with double quantization, one after another."""
    import bitsandbytes as bnb

    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, linear in list(parent.named_children()):
                if name in LINEARS:
                    made = bnb.nn.Linear4bit(
                        linear.in_features,
                        linear.out_features,
                        bias=False,
                        compute_dtype=torch.bfloat16,
                        compress_statistics=True,
                        quant_type="nf4",
                    )
                    made.weight = bnb.nn.Params4bit(
                        linear.weight.data.cpu(), requires_grad=False, quant_type="nf4", compress_statistics=True
                    )
                    setattr(parent, name, made.to(device))
        gc.collect()


def measure(options: argparse.Namespace, device: str) -> dict[str, Any]:
    kind, _, length = options.row.partition("-")
    tokens = 64 if options.small else int(length)
    torch.manual_seed(1)
    model = model_of(kind == "qlora", options.keep, options.small, device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    generator = torch.Generator(device).manual_seed(100)
    seconds, losses = [], []
    for number in range(options.warmup + options.steps):
        ids = torch.randint(512 if options.small else VOCAB, (1, tokens), generator=generator, device=device)
        synchronize(device)
        if number == options.warmup and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item())
    took = seconds[options.warmup :]
    return {
        "peer": f"transformers + PEFT{' + bitsandbytes' if kind == 'qlora' else ''} + Liger",
        "row": options.row,
        "recompute": not options.keep,
        "step_ms": 1e3 * median(took),
        "min_ms": 1e3 * min(took),
        "max_ms": 1e3 * max(took),
        "tokens_per_s": tokens / median(took),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "losses": [losses[0], losses[-1]],
        "torch": torch.__version__,
    }


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=("lora-8192", "qlora-8192", "lora-2048", "qlora-2048"))
    parser.add_argument("--keep", action="store_true", help="recompute nothing")
    parser.add_argument("--small", action="store_true", help="a model of two layers, on a CPU too: whether it runs")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", help="append the result to this file, a line of JSON")
    options = parser.parse_args()
    found = measure(options, "cuda" if torch.cuda.is_available() else "cpu")
    print(json.dumps(found), flush=True)
    if options.out:
        with open(options.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
