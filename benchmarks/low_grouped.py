"""How fast are the products and casts of experts in 8 bits on one GPU, and with which tiles? One table, about 40 s, most of it compiling.

python benchmarks/low_grouped.py [--experts 16] [--rows 65536]

W4's experts (2,048 features, 768 inside), as ops.low_grouped calls them with delayed scaling and `accumulate: mixed`: forward with the tensor
cores' own sums, gradients with sums in fp32 every 128 terms. Each product in TFLOP/s beside our bf16 one; a star marks the tiles in use.
`off`: of results with other tiles, the largest difference from those, over the largest value. Casts in GB/s of the bytes that must move.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.bench.timing import measure
from phalanx.comm.axis import ModelAxes
from phalanx.ops.activation import SWIGLU
from phalanx.ops.kernels import gated, grouped, low_grouped
from phalanx.ops.kernels.low_grouped import Tiles
from phalanx.ops.low_grouped import LowExperts
from phalanx.ops.low_matmul import DY, X
from phalanx.ops.quant import COUNTS, RECIPES, SLOTS

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
TYPE = torch.bfloat16 if GPU else torch.float32
WIDTH, INNER = (2048, 768) if GPU else (256, 128)
OWN_SUMS = (
    Tiles(128, 256, 4, 8), Tiles(128, 256, 4, 8, flatten=True), Tiles(128, 256, 3, 8, flatten=True), Tiles(256, 128, 4, 8),
    Tiles(128, 128, 3, 4, per_processor=2), Tiles(128, 128, 3, 8, per_processor=2), Tiles(128, 128, 3, 8, per_processor=2, flatten=True),
)  # fmt: skip
FP32_SUMS = (
    Tiles(128, 128, 4, 8), Tiles(128, 256, 4, 8, halves=True), Tiles(128, 256, 4, 8, halves=True, flatten=True),
    Tiles(128, 128, 3, 8, per_processor=2, registers=128, halves=True), Tiles(128, 128, 3, 8, per_processor=2, registers=128),
    Tiles(128, 128, 3, 4, per_processor=2, halves=True),
)  # fmt: skip


def told(t: Tiles) -> str:
    more = [f"{t.per_processor} a processor"] * (t.per_processor > 1) + ["flat"] * t.flatten + ["halves"] * t.halves
    return ", ".join([f"{t.m}x{t.n}", f"{t.stages} stages", f"{t.warps} warps", *more])


def timed(call: Callable[[], Any]) -> float:
    return measure(call, DEVICE, warmup=2, repeats=6, batch=8).median if GPU else measure(call, DEVICE, 0, 1).median


def rates(name: str, flop: float, bf16: Callable[[], Any], low: Callable[[Tiles], Tensor], tiles: tuple[Tiles, ...], used: Tiles,
          sum_: Tensor | None = None) -> None:  # fmt: skip
    """`sum_`: what `low` adds to."""
    print(f"{name:24} bf16 {flop / timed(bf16) / 1e12:6.0f}", flush=True)

    def once(t: Tiles) -> Tensor:
        if sum_ is not None:
            sum_.zero_()
        return low(t).float()

    truth = once(used).clone()
    for t in tiles:
        if sum_ is not None and t.flatten:
            continue  # its kernel has one tile a program
        try:
            seconds, off = timed(lambda t=t: low(t)), (once(t) - truth).abs().max() / truth.abs().max()
            print(f"{name:24} fp8  {flop / seconds / 1e12:6.0f} {'*' if t == used else ' '} {told(t):44} off {off.item():.1e}", flush=True)
        except Exception as error:  # does not fit, mostly
            print(f"{name:24} fp8  {told(t)}: {type(error).__name__} {str(error)[:80]}", flush=True)


def products(name: str, outer: int, inner: int, rows: int, ends: Tensor, low: LowExperts) -> None:
    experts, flop = len(ends), 2.0 * rows * outer * inner
    x, dy, w = (torch.randn(*s, device=DEVICE).to(TYPE) for s in ((rows, inner), (rows, outer), (experts, outer, inner)))
    buffer = torch.zeros(experts, outer, inner, device=DEVICE)
    low._codes = None
    (a, a_laid), (d, d_laid), (straight, turned) = low.rows(X, x, ends), low.rows(DY, dy, ends), low.codes(w)
    fast, careful = low_grouped.FAST, low_grouped.CAREFUL

    def added(t: Tiles) -> Tensor:
        low_grouped.add_product_(buffer, d_laid, a_laid, ends, False, t)
        return buffer

    rates(f"{name} forward", flop, lambda: grouped.grouped_product(x, w.transpose(1, 2), ends),
          lambda t: low_grouped.product(a, straight, ends, TYPE, None, True, t), OWN_SUMS, fast)  # fmt: skip
    rates(f"{name} input's", flop, lambda: grouped.grouped_product(dy, w, ends),
          lambda t: low_grouped.product_by_places(d, turned, ends, TYPE, False, t), FP32_SUMS, careful)  # fmt: skip
    rates(f"{name} weight's", flop, lambda: grouped.add_grouped_product_(buffer, dy, x, ends), added, FP32_SUMS, careful,
          buffer)  # fmt: skip


def casts(rows: int, ends: Tensor, low: LowExperts) -> None:
    """The four casts of a layer, as tensors in memory, and what the activation takes on its own."""
    for name, which, width in (("x", X, WIDTH), ("hidden", X, INNER), ("dy", DY, WIDTH), ("d gate, up", DY, 2 * INNER)):
        x = torch.randn(rows, width, device=DEVICE).to(TYPE)
        seconds = timed(lambda x=x, which=which: low.rows(which, x, ends))
        print(f"cast of {name:16} {1e6 * seconds:6.0f} us {4 * x.numel() / seconds / 1e9:6.0f} GB/s")
    gate_up, dh = torch.randn(rows, 2 * INNER, device=DEVICE).to(TYPE), torch.randn(rows, INNER, device=DEVICE).to(TYPE)
    weights = torch.rand(rows, device=DEVICE)
    for name, call, bytes_ in (("activation", lambda: gated.gated_forward(gate_up, SWIGLU, weights, ends[-1]), 6),
                               ("its gradient", lambda: gated.gated_backward(dh, gate_up, SWIGLU, weights, ends[-1]), 10)):  # fmt: skip
        seconds = timed(call)
        print(f"{name:24} {1e6 * seconds:6.0f} us {bytes_ * dh.numel() / seconds / 1e9:6.0f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--rows", type=int, default=65536)
    options = parser.parse_args()
    rows, experts = (options.rows, options.experts) if GPU else (512, 2)
    ends = torch.arange(1, experts + 1, dtype=torch.int32, device=DEVICE) * (rows // experts)
    low = LowExperts(RECIPES["delayed"], "w", 0, ModelAxes(), "triton")
    low.multiplier = torch.tensor([50.0, 50.0, 2000.0], device=DEVICE)
    low.counts, low.amax = torch.zeros(3, SLOTS, COUNTS, dtype=torch.int64, device=DEVICE), torch.zeros(3, device=DEVICE)
    print(torch.cuda.get_device_name() if GPU else "no GPU: tiny sizes", f"torch {torch.__version__}, {experts} experts, {rows} rows")
    casts(rows, ends, low)
    for name, outer, inner in (("gate+up", 2 * INNER, WIDTH), ("down", WIDTH, INNER)):
        products(name, outer, inner, rows, ends, low)


if __name__ == "__main__":
    main()
