"""ModernBERT-base, BERT-large, T5-large and a part of Qwen2.5-VL as most people train them: transformers' models,
attention by torch's SDPA, compiled whole by torch.compile, fp32 weights under bf16 autocast, fused AdamW, norm and clip
every step.

python3 benchmarks/peers/families.py modernbert|bert|t5|vl [--small] [--out families.jsonl]

modernbert has a row of 1,024 for each document of 1 to 1,023 tokens; its tokens a second are those of documents. Logits
are of all tokens (`sparse_prediction`, for the hidden ones alone, has other shapes in each batch, and is not compiled).
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import torch

IGNORE = -100
SIZES = {  # of a step: rows, rows at a time, their length
    "modernbert": (256, 64, 1024),
    "bert": (256, 64, 512),
    "t5": (64, 16, 1024),
    "vl": (8, 1, 4096),
}
IMAGES, IMAGE_TOKEN, SIDE = 4, 1, 2  # in a row; its token; patches of a side of what becomes a token
DECODER = 256


def model_of(row: str, small: bool) -> torch.nn.Module:
    """A model with random weights of the published sizes, or with two layers."""
    import transformers

    more: dict[str, Any] = {"attn_implementation": "sdpa"}
    if row == "modernbert":
        less = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512)
        ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
        config: Any = transformers.ModernBertConfig(**(less if small else {"vocab_size": 50368}), **ids)
        made: Any = transformers.ModernBertForMaskedLM
    elif row == "bert":
        less = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512)
        large = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16)
        sizes = less if small else large
        config = transformers.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        made = transformers.BertForMaskedLM
    elif row == "vl":
        config, made = vl_config(small), transformers.Qwen2_5_VLForConditionalGeneration
    else:
        less = dict(d_model=64, d_ff=128, num_layers=2, num_heads=4, d_kv=16, vocab_size=512)
        large = dict(d_model=1024, d_ff=2816, num_layers=24, num_heads=16, d_kv=64, vocab_size=32128)
        sizes = less if small else large
        how = dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False, dropout_rate=0.0)
        how |= dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
        config, made = transformers.T5Config(**sizes, **how), transformers.T5ForConditionalGeneration
        more = {}  # its bias is not one that SDPA takes in every version: transformers' own choice
    return made._from_config(config, **more)


def vl_config(small: bool) -> Any:
    """Qwen2.5-VL-7B with 8 of its 28 language layers."""
    import transformers

    text = dict(vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=8)
    text |= dict(num_attention_heads=28, num_key_value_heads=4)
    tower = dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, out_hidden_size=3584)
    section = [16, 24, 24]
    if small:
        text = dict(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        text |= dict(num_attention_heads=4, num_key_value_heads=2)
        tower = dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=64)
        tower |= dict(fullatt_block_indexes=[1])
        section = [4, 2, 2]
    rotary = dict(rope_type="default", rope_theta=1e6, mrope_section=section)
    text |= dict(rope_parameters=rotary, tie_word_embeddings=False)
    ids = dict(image_token_id=IMAGE_TOKEN, vision_start_token_id=2, vision_end_token_id=3, video_token_id=4)
    return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **ids)


def with_images(ids: torch.Tensor, draws: torch.Generator, device: str) -> dict[str, Any]:
    """Rows with four images of a sixteenth of their tokens each, and a token of text after each."""
    rows, length = ids.shape
    side = round((length // 16) ** 0.5)
    for number in range(IMAGES):
        first = number * (side * side + 1)
        ids[:, first : first + side * side] = IMAGE_TOKEN
    patches = rows * IMAGES * side * side * SIDE**2
    pixels = torch.randn((patches, 3 * 2 * 14 * 14), generator=draws, device=device)
    grid = torch.tensor([[1, SIDE * side, SIDE * side]] * (rows * IMAGES), device=device)
    kinds = (ids == IMAGE_TOKEN).long()
    labels = torch.where(ids == IMAGE_TOKEN, IGNORE, ids)
    found = {"input_ids": ids, "labels": labels, "pixel_values": pixels, "image_grid_thw": grid}
    return {**found, "mm_token_type_ids": kinds, "use_cache": False, "tokens": ids.numel()}


def batch_of(row: str, rows: int, length: int, vocab: int, draws: torch.Generator, device: str) -> dict[str, Any]:
    """Inputs of the model, and under "tokens" how many tokens of text they hold."""
    ids = torch.randint(5, vocab, (rows, length), generator=draws, device=device)
    if row == "t5":
        labels = torch.randint(5, vocab, (rows, min(DECODER, length)), generator=draws, device=device)
        return {"input_ids": ids, "labels": labels, "tokens": labels.numel()}
    if row == "vl":
        return with_images(ids, draws, device)
    hidden = torch.rand((rows, length), generator=draws, device=device) < (0.3 if row == "modernbert" else 0.15)
    mask, tokens = torch.ones_like(ids), ids.numel()
    if row == "modernbert":
        lengths = torch.randint(1, length, (rows, 1), generator=draws, device=device)
        mask = (torch.arange(length, device=device) < lengths).long()
        tokens = int(lengths.sum())
    labels = torch.where(hidden & (mask == 1), ids, IGNORE)
    inputs = torch.where(labels != IGNORE, 4, ids)
    found = {"input_ids": inputs, "labels": labels, "tokens": tokens}
    return found | ({"attention_mask": mask} if row == "modernbert" else {})


def measure(options: argparse.Namespace, device: str) -> dict[str, Any]:
    rows, micro, length = (2, 1, 64) if options.small else SIZES[options.row]
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = model_of(options.row, options.small).to(device).train()
    vocab = model.get_input_embeddings().num_embeddings
    called = torch.compile(model, dynamic=False) if device == "cuda" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    draws = torch.Generator(device).manual_seed(100)
    seconds, counts, losses = [], [], []
    for number in range(options.warmup + options.steps):
        batches = [batch_of(options.row, micro, length, vocab, draws, device) for _ in range(rows // micro)]
        count = sum(batch.pop("tokens") for batch in batches)
        synchronize(device)
        if number == options.warmup and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for batch in batches:
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = called(**batch).loss / len(batches)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
        counts.append(count)
        losses.append(loss.item())
    took, tokens = seconds[options.warmup :], counts[options.warmup :]
    return {
        "by": "transformers + SDPA + torch.compile",
        "row": options.row,
        "step_ms": 1e3 * median(took),
        "tokens_per_s": sum(tokens) / sum(took),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "losses": [losses[0], losses[-1]],
        "torch": torch.__version__,
    }


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=tuple(SIZES))
    parser.add_argument("--small", action="store_true", help="a model of two layers, on a CPU too: whether it runs")
    parser.add_argument("--warmup", type=int, default=5)
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
