"""Attention that does not read everything: forward + backward of each way to run it, on one GPU, side by side.

python benchmarks/attention.py [--tokens 8192] [--repeats 10]

A mask (torch's scaled_dot_product_attention with the additive mask of ops/attention/attention.py), torch's flash
kernels over spans, and flash-attn-4 from its wheel where it is installed. FLOPs count only what queries read: keys
of their document, in their window.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from phalanx.bench.timing import measure
from phalanx.ops.attention.attention import attention
from phalanx.ops.attention.flash import FLASH_ATTN, ByFlashAttn, ByTorchFlash
from phalanx.ops.attention.kind import AttentionKind
from phalanx.ops.op import unusable
from phalanx.sequence.batch import Batch, room_for_documents

SHAPES = {  # heads, kv heads, width of queries, of values, window, mean document, sinks
    "8B, documents of ~1,000": (32, 8, 128, 128, None, 1000, False),
    "8B, documents of ~250": (32, 8, 128, 128, None, 250, False),
    "8B, window 4,096": (32, 8, 128, 128, 4096, 0, False),
    "8B, window 1,024": (32, 8, 128, 128, 1024, 0, False),
    "gpt-oss, sinks": (64, 8, 64, 64, None, 0, True),
    "gpt-oss, sinks, window 128": (64, 8, 64, 64, 128, 0, True),
    "DeepSeek-V3's heads (32 of 128)": (32, 32, 192, 128, None, 0, False),
    "the same, documents of ~1,000": (32, 32, 192, 128, None, 1000, False),
}


def batch_of(tokens: int, mean: int) -> Batch:
    ids = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    starts = torch.rand(tokens, generator=torch.Generator().manual_seed(1)) < 1 / max(mean, 1)
    starts[0] = True
    numbers = starts.long().cumsum(0) - 1
    batch = Batch(ids, ids, ids, ids, 1, tokens, numbers.cuda() if mean else None)
    return replace(batch, most_documents=room_for_documents(int(numbers[-1]) + 1, tokens) if mean else 0)


def keys_read(batch: Batch, window: int | None) -> float:
    """Pairs of a query and a key that it reads, the diagonal counted as half."""
    lengths = torch.bincount(batch.documents) if batch.documents is not None else torch.tensor([batch.num_tokens])
    w = lengths.double() if window is None else lengths.double().clamp(max=window)
    return float((lengths * w - w * w / 2).sum())


def row(
    tokens: int,
    repeats: int,
    heads: int,
    kv_heads: int,
    wide_k: int,
    wide_v: int,
    window: int | None,
    mean: int,
    with_sinks: bool,
) -> str:
    device = torch.device("cuda")
    batch, kind = batch_of(tokens, mean), AttentionKind(window=window, sinks=with_sinks)
    drawn = [
        torch.randn(1, h, tokens, w, device=device).bfloat16()
        for h, w in ((heads, wide_k), (kv_heads, wide_k), (kv_heads, wide_v))
    ]
    q, k, v = (t.requires_grad_() for t in drawn)
    sinks = torch.randn(heads, device=device).bfloat16().requires_grad_() if with_sinks else None
    flops = keys_read(batch, window) * heads * 2 * (wide_k + wide_v) * 3.5
    ways = {"a mask" if mean or window else "torch": lambda: attention(q, k, v, batch, kind, sinks, "plain")}
    if mean or window:
        ways["torch's flash"] = lambda: ByTorchFlash.attend(q, k, v, batch, kind, sinks)
    if unusable(FLASH_ATTN) is None:
        ways["flash-attn-4"] = lambda: ByFlashAttn.attend(q, k, v, batch, kind, sinks)

    def both(forward: Callable[[], torch.Tensor], dy: torch.Tensor) -> None:
        for t in (q, k, v, sinks):
            if t is not None:
                t.grad = None
        forward().backward(dy)

    found = []
    for way, forward in ways.items():
        try:
            seconds = measure(partial(both, forward, torch.randn_like(forward())), device, repeats=repeats).median
            found.append(f"{way} {1e3 * seconds:.3f} ({flops / seconds / 1e12:.0f})")
        except (RuntimeError, AssertionError) as error:
            found.append(f"{way} failed: {str(error).splitlines()[0][:80]}")
        batch.forget()
    return "   ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, {options.tokens} tokens, forward + "
        "backward: ms (TFLOP/s)"
    )
    for name, shape in SHAPES.items():
        print(f"{name:34s} {row(options.tokens, options.repeats, *shape)}", flush=True)


if __name__ == "__main__":
    main()
