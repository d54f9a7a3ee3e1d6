"""Attention over pages on one GPU: time, share of the memory's rate, torch's attention over dense keys beside it.

python benchmarks/paged.py [--only TEXT] [--page 16] [--sweep] [--tiny]

A row is one layer of a model and a batch of sequences in pages that lie in no order. Calls go over as many layers as
fill 256 MiB, so that nothing is found in the L2 cache, and are replayed from a CUDA graph. "floor" is the time that
the keys and values which are read would take at the rate of a copy, measured in the same run. "dense" is
scaled_dot_product_attention over keys and values gathered before (all as long as the longest). --sweep tries tiles
and numbers of programs; a star marks what is used. --tiny: small shapes, for a machine without a GPU.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.base.text_table import table
from phalanx.bench.ceilings import copy_rate
from phalanx.bench.timing import measure
from phalanx.nn.memory import PageSpec
from phalanx.ops.attention import paged_kernel
from phalanx.ops.attention.kind import CAUSAL, AttentionKind
from phalanx.ops.attention.paged import FP8, PagedExample, Pages, attend_pages, store_pages
from phalanx.ops.attention.paged_kernel import PagedTiles, tiles_of

COLD = 2**28


@dataclass(frozen=True)
class Shape:
    """Heads of queries, sequences (tokens here, tokens so far), and what is remembered of each token."""

    heads: int
    spec: PageSpec
    sequences: tuple[tuple[int, int], ...]
    kind: AttentionKind = CAUSAL
    fp8: bool = False
    invariant: bool = False


LLAMA, LATENT, GPT_OSS = PageSpec(8, 128, 128), PageSpec(1, 576, 512, shared=True), PageSpec(8, 64, 64)
DECODE = Shape(32, LLAMA, ((1, 1024),) * 256)
RAGGED = replace(DECODE, sequences=tuple((1, 512 + 2 * i) for i in range(256)))
PIECE = Shape(32, LLAMA, ((2048, 4096),))
SHAPES = {
    "decode 1 x 1,024": Shape(32, LLAMA, ((1, 1024),)),
    "decode 1 x 1,024, invariant": Shape(32, LLAMA, ((1, 1024),), invariant=True),
    "decode 1 x 32,768": Shape(32, LLAMA, ((1, 32768),)),
    "decode 16 x 4,096": Shape(32, LLAMA, ((1, 4096),) * 16),
    "decode 256 x 1,024": DECODE,
    "decode 256 x 512..1,024": RAGGED,
    "decode 256 x 512..1,024, invariant": replace(RAGGED, invariant=True),
    "decode 256 x 512..1,024, FP8": replace(RAGGED, fp8=True),
    "decode 256 x 2,048, window, sinks": Shape(64, GPT_OSS, ((1, 2048),) * 256, AttentionKind(window=128, sinks=True)),
    "decode 64 x 4,096, 128 heads on a latent": Shape(128, LATENT, ((1, 4096),) * 64),
    "decode 64 x 4,096, 16 heads on a latent": Shape(16, LATENT, ((1, 4096),) * 64),
    "decode 1 x 4,096, 128 heads on a latent": Shape(128, LATENT, ((1, 4096),)),
    "piece of 2,048 after 2,048": PIECE,
    "piece of 2,048 after 2,048, invariant": replace(PIECE, invariant=True),
    "piece of 8,192": Shape(32, LLAMA, ((8192, 8192),)),
    "piece of 1,024, decode 255 x 1,024": Shape(32, LLAMA, ((1024, 2048), *((1, 1024),) * 255)),
}


class Layers:
    """A shape's inputs: one batch, pages of several layers."""

    def __init__(self, shape: Shape, page_size: int, device: torch.device):
        self.shape, spec = shape, shape.spec
        example = PagedExample(shape.sequences, page_size, shape.kind)
        spans, slots = example.laid_out(device)
        self.spans = replace(spans, batch_invariant=shape.invariant)
        count = sum(-(-length // page_size) for _, length in shape.sequences) + 1
        dtype = FP8 if shape.fp8 else torch.bfloat16
        self.q = torch.randn(example.tokens, shape.heads, spec.key, device=device).bfloat16()
        self.sinks = torch.randn(shape.heads, device=device) if shape.kind.sinks else None
        most = [min(length, here + (shape.kind.window or length) - 1) for here, length in shape.sequences]
        self.bytes = sum(most) * spec.token_bytes(dtype)
        many = 1 if device.type == "cpu" else min(64, -(-COLD // self.bytes))
        self.pages = [spec.allocate(count, page_size, dtype, device) for _ in range(many)]
        for pages in self.pages:
            for first in range(0, len(slots), 2**18):
                part = slots[first : first + 2**18]
                k, v = (torch.randn(len(part), spec.heads, w, device=device).bfloat16() for w in (spec.key, spec.value))
                store_pages(k, None if spec.shared else v, pages, part)

    def seconds(self, call: Callable[[Pages], object]) -> float:
        """Of one call."""
        device = self.q.device

        def every() -> None:
            for pages in self.pages:
                call(pages)

        if device.type == "cpu":
            return measure(every, device, warmup=1, repeats=1).median
        every()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            every()
        return measure(graph.replay, device).median / len(self.pages)

    def attend(self, pages: Pages, tiles: tuple[PagedTiles, PagedTiles] | None = None) -> Tensor:
        return paged_kernel.attend_pages(self.q, pages, self.spans, self.shape.kind, self.sinks, tiles)[0]

    @property
    def flops(self) -> float:
        width, window = self.shape.spec.key + self.shape.spec.value, self.shape.kind.window or 2**40
        read = sum(
            sum(min(p + 1, window) for p in range(length - here, length)) for here, length in self.shape.sequences
        )
        return 2.0 * read * self.shape.heads * width

    def off(self) -> float:
        """The largest difference to the reference, of single tokens."""
        truth = attend_pages(self.q.float(), self.pages[0], self.spans, self.shape.kind, self.sinks)[0]
        return ((self.attend(self.pages[0]) - truth).abs().max() / truth.abs().max()).item()

    def dense(self) -> float | None:
        """Seconds of torch's attention; None: it has no form of this."""
        if self.shape.kind != CAUSAL or self.shape.fp8 or len({here for here, _ in self.shape.sequences}) > 1:
            return None
        spec, (here, length) = self.shape.spec, max(self.shape.sequences)
        count = len(self.shape.sequences)
        q = self.q.unflatten(0, (count, here)).transpose(1, 2)
        shapes = [(count, spec.heads, length, width) for width in (spec.key, spec.value)]
        dense = [[torch.randn(s, device=q.device).bfloat16() for s in shapes] for _ in self.pages]
        if 1 < here < length:
            return None
        left = iter(itertools.cycle(dense))

        def call(_: Pages) -> Tensor:
            k, v = next(left)
            return F.scaled_dot_product_attention(q, k, v, is_causal=here > 1, enable_gqa=True)

        return self.seconds(call)


def row(name: str, layers: Layers, rate: float) -> tuple[str, ...]:
    seconds = layers.seconds(layers.attend)
    floor = layers.bytes / rate
    try:
        dense = layers.dense()
    except RuntimeError as error:  # no kernel, or too little memory
        dense, name = None, f"{name} (dense: {str(error).splitlines()[0][:40]})"
    single = layers.spans.most_queries == 1
    return (
        name,
        f"{1e3 * seconds:.4f}",
        f"{1e3 * floor:.4f}",
        f"{100 * floor / seconds:.0f} %",
        f"{layers.bytes / seconds / 1e12:.2f}",
        f"{layers.flops / seconds / 1e12:.0f}",
        "-" if dense is None else f"{1e3 * dense:.4f}",
        f"{layers.off():.1e}" if single else "-",
    )


def choices(used: tuple[PagedTiles, PagedTiles], many: bool) -> list[tuple[PagedTiles, PagedTiles]]:
    """Tiles to try: those of many queries, or of few."""
    rows = (64, 128) if many else (used[0].rows,)
    made = [PagedTiles(*t) for t in itertools.product(rows, (32, 64, 128), (4, 8), (2, 3, 4))]
    if not many and used[0].rows >= 64:
        made += [PagedTiles(r, keys, 4, stages) for r in (16, 32) for keys in (16, 32) for stages in (2, 3)]
    return [(used[0], t) if many else (t, used[1]) for t in made]


def sweep(name: str, layers: Layers) -> list[tuple[str, ...]]:
    """The fastest first."""
    used = tiles_of(layers.shape.heads // layers.shape.spec.heads, layers.shape.spec.key, False)
    many = layers.spans.most_queries > max(1, used[0].rows * layers.shape.spec.heads // layers.shape.heads)
    kept, found, failed = paged_kernel.PROGRAMS, [], 0
    for tiles in choices(used, many):
        for programs in (2, 4, 8):
            paged_kernel.PROGRAMS = programs
            try:
                seconds = layers.seconds(partial(layers.attend, tiles=tiles))
            except Exception as error:  # a tile that does not fit into a processor: an error of Triton's, of many kinds
                if "resource" not in f"{type(error).__name__} {error}".lower():
                    raise
                failed += 1
                break
            star = "*" if tiles == used and programs == kept else ""
            t = tiles[many]
            said = f"{t.rows} rows, {t.keys} keys, {t.warps} warps, {t.stages} stages, {programs} programs"
            found.append((seconds, (name, said, star, f"{1e3 * seconds:.4f}", f"{layers.bytes / seconds / 1e12:.2f}")))
    paged_kernel.PROGRAMS = kept
    found.sort()
    best = found[:8] + [f for f in found[8:] if f[1][2]]
    return [line for _, line in best] + [(name, f"{failed} do not fit", "", "", "")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu" if options.tiny else "cuda")
    rate = copy_rate(device)
    shapes = {name: shape for name, shape in SHAPES.items() if options.only in name}
    name_of = "CPU" if options.tiny else torch.cuda.get_device_name()
    print(
        f"{name_of}, torch {torch.__version__}, bf16, pages of {options.page}, copy {rate / 1e12:.2f} TB/s", flush=True
    )
    head = ("shape", "ms", "floor", "of floor", "TB/s", "TFLOP/s", "dense ms", "off")
    if options.sweep:
        head = ("shape", "tiles", "", "ms", "TB/s")
    lines = [head]
    for name, shape in shapes.items():
        if options.tiny:
            few = tuple((-(-here // 64), -(-length // 32)) for here, length in shape.sequences[:2])
            shape = replace(shape, sequences=few)
        layers = Layers(shape, options.page, device)
        lines += sweep(name, layers) if options.sweep else [row(name, layers, rate)]
        print(lines[-1], flush=True)
        del layers
    print(table(lines, left=(0, 1) if options.sweep else (0,)))


if __name__ == "__main__":
    main()
