"""Fine-tuning as most people do it: transformers, PEFT, Liger kernels, bitsandbytes; all weights by torchtune.
Llama-3-8B with random weights.

python3 benchmarks/peers/tune.py lora-8192 [--out tune.jsonl]

lora-8192, qlora-8192   adapters of rank 16 on all linears, one sequence of 8,192 tokens a step, blocks recomputed
lora-2048, qlora-2048   the same with 2,048 tokens
all-8192                all weights in bf16, as torchtune's config of Llama 3 for one GPU says: AdamW of bitsandbytes
                        with paged moments in 8 bits, applied in backward; blocks recomputed, loss in 8 pieces
                        (`--compile` compiles blocks and loss)

Base in bf16, or nf4 with double quantization; adapters in bf16 (as PEFT makes them of a bf16 base), AdamW fused; loss,
norms, SwiGLU and rotary embedding by Liger's kernels, attention by torch's. A row without checkpointing is measured too
where it fits (`--keep`). Needs peft, liger-kernel, and bitsandbytes for qlora; torchtune 0.6.1, torchao 0.15 (newer
ones lack what torchtune imports), omegaconf and datasets for all-8192.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
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


def measure_all(options: argparse.Namespace, device: str) -> dict[str, Any]:
    """All weights, by torchtune: gradients are applied as soon as each is there."""
    from torchtune import training
    from torchtune.models.llama3 import llama3
    from torchtune.modules import TransformerSelfAttentionLayer
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    tokens, vocab = (64, 512) if options.small else (int(options.row.partition("-")[2]), VOCAB)
    hidden, inner, layers = (64, 96, 2) if options.small else (HIDDEN, INNER, LAYERS)
    heads, kv_heads = (4, 2) if options.small else (HEADS, KV_HEADS)
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = llama3(vocab, layers, heads, kv_heads, hidden, 8192, rope_base=500000, intermediate_dim=inner)
    torch.set_default_dtype(torch.float32)
    loss_of = CEWithChunkedOutputLoss()
    if options.compile:
        training.compile_model(model, verbose=False)
        training.compile_loss(loss_of, verbose=False)
    training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    model.set_num_output_chunks(loss_of.num_output_chunks)
    if device == "cuda":
        from bitsandbytes.optim import PagedAdamW8bit as Updates
    else:
        from torch.optim import AdamW as Updates
    optimizers = {p: Updates([p], lr=1e-5) for p in model.parameters()}
    training.register_optim_in_bwd_hooks(model=model, optim_dict=optimizers)

    def step(ids: torch.Tensor) -> torch.Tensor:
        labels = torch.hstack((ids[:, 1:], ids.new_full((1, 1), loss_of.ignore_index)))
        loss = loss_of(model(ids), labels)
        loss.backward()
        return loss

    return timed(options, device, step, tokens, vocab, "torchtune + bitsandbytes", True)


def measure(options: argparse.Namespace, device: str) -> dict[str, Any]:
    kind, _, length = options.row.partition("-")
    tokens = 64 if options.small else int(length)
    torch.manual_seed(1)
    model = model_of(kind == "qlora", options.keep, options.small, device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    peer = f"transformers + PEFT{' + bitsandbytes' if kind == 'qlora' else ''} + Liger"
    return timed(options, device, step, tokens, 512 if options.small else VOCAB, peer, not options.keep)


def timed(
    options: argparse.Namespace,
    device: str,
    step: Callable[[torch.Tensor], torch.Tensor],
    tokens: int,
    vocab: int,
    peer: str,
    recompute: bool,
) -> dict[str, Any]:
    """Steps over made-up tokens: the host's clock around each, the device idle at both ends."""
    generator = torch.Generator(device).manual_seed(100)
    seconds, losses = [], []
    for number in range(options.warmup + options.steps):
        ids = torch.randint(vocab, (1, tokens), generator=generator, device=device)
        synchronize(device)
        if number == options.warmup and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        loss = step(ids)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item())
    took = seconds[options.warmup :]
    return {
        "peer": peer,
        "row": options.row,
        "recompute": recompute,
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
    parser.add_argument("row", choices=("lora-8192", "qlora-8192", "lora-2048", "qlora-2048", "all-8192"))
    parser.add_argument("--keep", action="store_true", help="recompute nothing")
    parser.add_argument("--compile", action="store_true", help="of all-8192: compile blocks and loss")
    parser.add_argument("--small", action="store_true", help="a model of two layers, on a CPU too: whether it runs")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", help="append the result to this file, a line of JSON")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = (measure_all if options.row == "all-8192" else measure)(options, device)
    print(json.dumps(found), flush=True)
    if options.out:
        with open(options.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
