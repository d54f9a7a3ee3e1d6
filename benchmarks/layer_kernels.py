"""What one GPU takes for the casts and pointwise kernels of a layer in 8 bits, beside a copy of the same bytes:
delayed scaling and blocks.

python benchmarks/layer_kernels.py [--tokens 8192 --width 4096 --inner 14336 --heads 32 8 128 --vocab 128256]
[--warps 8 16] [--device cuda]

The sizes are W3's (benchmarks/configs/w3.yaml). Bytes are those that must be read and written at least; the copy
moves as many. "a step": times 64 (8 layers, 8 micro-batches), of the loss 8, of weights' codes and Adam 8 layers
once. --warps: casts with blocks by so many warps, too. On a GPU each kernel is timed inside a CUDA graph, so that no
time of the host counts. An older version of the package is timed with PYTHONPATH=FOLDER before it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.bench.timing import measure
from phalanx.ops.dense import loss_kernel, norm_kernel, rope_kernel
from phalanx.ops.dense.activation import Gated, GatedGrad
from phalanx.ops.dense.norm import Normed
from phalanx.ops.dense.rope import ROPE, Angles, RopeGrad, rotary_table
from phalanx.ops.optimizer import adamw_kernel
from phalanx.ops.optimizer.adamw import AdamOptions, AdamRange
from phalanx.ops.quantized import quantize_kernel as kernels
from phalanx.ops.quantized.casts import CastSpec
from phalanx.ops.quantized.recipes import COUNTS, E4M3, E5M2, SLOTS
from phalanx.ops.quantized.scale_blocks import Blocks
from phalanx.ops.quantized.stored import STORED

LAYERS, MICRO_BATCHES = 8, 8
CALLS = 10  # in a graph
ADAM = AdamOptions(1e-3, 0.9, 0.95, 1e-8, 0.0)


@dataclass(frozen=True)
class Sizes:
    tokens: int
    width: int
    inner: int
    heads: tuple[int, int, int]  # of queries, of keys, features of each
    vocab: int

    @property
    def qkv(self) -> int:
        return (self.heads[0] + 2 * self.heads[1]) * self.heads[2]


@dataclass(frozen=True)
class Row:
    """`moved`: bytes at least; `times`: calls in a step."""

    what: str
    call: Callable[[], Any]
    moved: int
    times: int


def values(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def sources(s: Sizes, device: torch.device) -> Iterator[tuple[str, Any, bool, int, int]]:
    """(what, source of a cast, whether it is a gradient, its bytes to be read, casts of it in a layer)"""
    heads, kv_heads, features = s.heads
    x, both = values(device, s.tokens, s.width), values(device, s.tokens, 2 * s.inner)
    yield "cast of attention's output, of two gradients", x, False, 2 * x.numel(), 3
    yield (
        "cast of a norm",
        Normed(x, torch.ones(s.tokens, device=device), torch.ones(s.width, device=device).bfloat16()),
        False,
        2 * x.numel(),
        2,
    )
    yield "cast of SwiGLU", Gated(both), False, 2 * both.numel(), 1
    yield "cast of SwiGLU's gradient", GatedGrad(values(device, s.tokens, s.inner), both), True, 3 * both.numel(), 1
    dq, dk, dv = (values(device, 1, n, s.tokens, features) for n in (heads, kv_heads, kv_heads))
    rope_grad = RopeGrad(dq, dk, dv, table(s, device), ROPE.choose("triton", dq))
    yield "cast of RoPE's gradient", rope_grad, True, 2 * s.tokens * s.qkv, 1


def table(s: Sizes, device: torch.device) -> Angles:
    features = s.heads[2]
    return rotary_table(
        torch.arange(s.tokens, device=device),
        5e5 ** -(torch.arange(0, features, 2) / features).double(),
        torch.bfloat16,
    )


def casts(s: Sizes, device: torch.device, warps: list[int]) -> Iterator[Row]:
    counts, one = torch.zeros(SLOTS, COUNTS, dtype=torch.int64, device=device), torch.ones(1, device=device)
    for what, x, gradient, read, times in sources(s, device):
        moved, times = read + 2 * x.shape[0] * x.shape[1], times * LAYERS * MICRO_BATCHES
        wide = E5M2 if gradient else E4M3
        yield Row(
            f"{what}, delayed",
            lambda x=x, f=wide: kernels.cast_both(x, CastSpec(f, kernels.GIVEN, one, counts=counts), True),
            moved,
            times,
        )
        yield Row(
            f"{what}, blocks",
            lambda x=x: kernels.cast_both(x, CastSpec(E4M3, kernels.BLOCKS, counts=counts), True),
            moved,
            times,
        )
        for n in warps:
            tiles = kernels.CastTiles(kernels.TILE, kernels.TILE, n)
            yield Row(
                f"{what}, {n} warps",
                lambda x=x, t=tiles: kernels.cast_both(x, CastSpec(E4M3, kernels.BLOCKS, counts=counts), True, tiles=t),
                moved,
                0,
            )


def others(s: Sizes, device: torch.device) -> Iterator[Row]:
    x, y, z = (values(device, s.tokens, s.width) for _ in range(3))
    weight = values(device, s.width)
    n, each = x.numel(), LAYERS * MICRO_BATCHES
    yield Row("norm's scale", lambda: norm_kernel.norm_scale(x, None, 1e-5), 2 * n, each)
    yield Row("sum of the residual stream, norm's scale", lambda: norm_kernel.norm_scale(x, y, 1e-5), 6 * n, each)
    scale, mean = torch.ones(s.tokens, device=device), torch.empty(0, device=device)
    yield Row(
        "norm's gradient, the residual stream's added",
        lambda: norm_kernel.norm_backward(y, x, weight, mean, scale, z),
        8 * n,
        2 * each,
    )
    yield Row("sum of the residual stream", lambda: x + y, 6 * n, each)
    heads, kv_heads, features = s.heads
    qkv = values(device, s.tokens, heads + 2 * kv_heads, features).transpose(0, 1).unsqueeze(0)
    parts, angles = qkv.split((heads, kv_heads, kv_heads), 1), table(s, device)
    yield Row("RoPE", lambda: rope_kernel.pack_heads(*parts, angles), 4 * s.tokens * s.qkv, each)
    some = min(1024, s.tokens)
    logits, labels = values(device, some, s.vocab), torch.zeros(some, dtype=torch.int64, device=device)
    here, lse, factor = (
        torch.ones(some, dtype=torch.bool, device=device),
        torch.full((some,), 20.0, device=device),
        torch.ones(some, device=device),
    )
    times = MICRO_BATCHES * s.tokens // some
    yield Row(
        "softmax's sums", lambda: loss_kernel.softmax_stats(logits, labels, here, s.vocab), 2 * logits.numel(), times
    )
    yield Row(
        "softmax's gradient",
        lambda: loss_kernel.softmax_gradient_(logits, labels, here, lse, factor, s.vocab),
        4 * logits.numel(),
        times,
    )


def weights(s: Sizes, device: torch.device) -> Iterator[Row]:
    """Of gate and up, for all of a layer."""
    rows, columns = 2 * s.inner, s.width
    n, layer = rows * columns, (2 * s.inner + s.inner + s.qkv + s.heads[0] * s.heads[2]) / (2 * s.inner)
    master, codes = torch.randn(n, device=device), torch.zeros(n, dtype=torch.uint8, device=device)
    turned, counts = (
        torch.zeros(columns, rows, dtype=torch.uint8, device=device),
        torch.zeros(SLOTS, COUNTS, dtype=torch.int64, device=device),
    )
    times, stored = round(LAYERS * layer), STORED.choose("triton", master)
    for what, block in (("delayed", (rows, columns)), ("blocks", (kernels.TILE, kernels.TILE))):
        blocks = Blocks(rows, columns, block)
        one, bits = torch.ones(blocks.count, device=device), torch.zeros(blocks.count, dtype=torch.int32, device=device)
        if what == "blocks":
            yield Row(
                "amaxes of weights, blocks",
                lambda b=blocks, bits=bits: stored.note_largest_(bits, master, 0, b, torch.bfloat16),
                4 * n,
                times,
            )
        seen = bits if what == "delayed" else None
        yield Row(
            f"weights' codes, {what}",
            lambda b=blocks, m=one, c=seen: stored.cast_run_(codes, master, 0, b, m, E4M3, torch.bfloat16, counts, c),
            5 * n,
            times,
        )
    yield Row("weights' codes, transposed", lambda: stored.turn_(turned, codes.view(rows, columns)), 2 * n, times)
    g, m, v = (torch.zeros(n, device=device) for _ in range(3))
    scalars = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64, device=device)
    yield Row("Adam", lambda: adamw_kernel.adamw_flat_(AdamRange(master, g, m, v), scalars, ADAM), 32 * n, times)


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Of a call, by the device alone."""
    if device.type != "cuda":
        return measure(call, device, warmup=0, repeats=1).median
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return measure(graph.replay, device, warmup=1, repeats=5, batch=2).median / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("tokens", 8192), ("width", 4096), ("inner", 14336), ("vocab", 128256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--heads", type=int, nargs=3, default=(32, 8, 128))
    parser.add_argument("--warps", type=int, nargs="*", default=())
    parser.add_argument("--device", default="cuda")
    o = parser.parse_args()
    device, s = torch.device(o.device), Sizes(o.tokens, o.width, o.inner, tuple(o.heads), o.vocab)
    lines: list[str] = []
    sums, copies = {"delayed": 0.0, "blocks": 0.0}, dict[int, float]()
    for make in (lambda: casts(s, device, o.warps), lambda: others(s, device), lambda: weights(s, device)):
        for row in make():
            if row.moved not in copies:
                a, b = torch.empty(2, row.moved // 2, dtype=torch.uint8, device=device)
                copies[row.moved] = seconds(lambda a=a, b=b: b.copy_(a), device)
            took, copy = seconds(row.call, device), copies[row.moved]
            for recipe in sums:
                sums[recipe] += (
                    1e3 * took * row.times * (not any(row.what.endswith(other) for other in sums if other != recipe))
                )
            lines.append(
                f"{row.what:48} {1e3 * took:8.4f} ms {1e3 * copy:8.4f} copy {took / copy:6.2f}x "
                f"{1e3 * took * row.times:7.1f} ms a step "
                f"({1e3 * copy * row.times:5.1f})"
            )
            print(lines[-1].split(" ms ")[0], flush=True)
    print("", torch.cuda.get_device_name(0) if device.type == "cuda" else "CPU", torch.__version__)
    print("\n".join(lines))
    print(*(f"{recipe}: {total:.1f} ms a step of the rows above" for recipe, total in sums.items()), sep="; ")


if __name__ == "__main__":
    main()
