"""How fast are the products and casts of experts in 8 bits on one GPU, and with which tiles? One table, about 40 s,
most of it compiling.

python benchmarks/low_grouped.py [--experts 16] [--rows 65536]

W4's experts (2,048 features, 768 inside), as ops.quantized.experts calls them with delayed scaling and `accumulate:
mixed`: forward with the tensor cores' own sums, gradients with sums in fp32 every 128 terms. Each product in TFLOP/s
beside our bf16 one; a star marks the tiles in use. `off`: of results with other tiles, the largest difference from
those, over the largest value. Casts in GB/s of the bytes that must move.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.bench.timing import measure
from phalanx.comm.axis import ModelAxes
from phalanx.ops.dense.activation import GatedRows, GatedRowsGrad, parts_of_sums
from phalanx.ops.experts import grouped_kernel
from phalanx.ops.experts.permute import PERMUTE, Gathered
from phalanx.ops.experts.rows import ExpertRows
from phalanx.ops.quantized import grouped_gemm_kernel, quantize_grouped_kernel
from phalanx.ops.quantized.casts import CastSpec
from phalanx.ops.quantized.expert_quantizer import ExpertQuantizer, tiles_for
from phalanx.ops.quantized.grouped_gemm_kernel import GroupedGemmTiles
from phalanx.ops.quantized.quantize_tile import CastTiles
from phalanx.ops.quantized.quantizer import DY, X
from phalanx.ops.quantized.recipes import COUNTS, E4M3, E5M2, SLOTS, find_recipe

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
TYPE = torch.bfloat16 if GPU else torch.float32
WIDTH, INNER = (2048, 768) if GPU else (256, 128)
OWN_SUMS = (
    GroupedGemmTiles(128, 256, 4, 8),
    GroupedGemmTiles(128, 256, 4, 8, flatten=True),
    GroupedGemmTiles(128, 256, 3, 8, flatten=True),
    GroupedGemmTiles(256, 128, 4, 8),
    GroupedGemmTiles(128, 128, 3, 4, per_processor=2),
    GroupedGemmTiles(128, 128, 3, 8, per_processor=2),
    GroupedGemmTiles(128, 128, 3, 8, per_processor=2, flatten=True),
)
CASTS = tuple(
    CastTiles(*t) for t in ((32, 128, 4), (64, 128, 8), (64, 64, 4), (128, 64, 8), (128, 128, 16), (128, 128, 8))
)  # rows, columns, warps
FP32_SUMS = (
    GroupedGemmTiles(128, 128, 4, 8),
    GroupedGemmTiles(128, 256, 4, 8, halves=True),
    GroupedGemmTiles(128, 256, 4, 8, halves=True, flatten=True),
    GroupedGemmTiles(128, 128, 3, 8, per_processor=2, registers=128, halves=True),
    GroupedGemmTiles(128, 128, 3, 8, per_processor=2, registers=128),
    GroupedGemmTiles(128, 128, 3, 4, per_processor=2, halves=True),
    GroupedGemmTiles(128, 128, 3, 8, per_processor=2, registers=128, halves=True, group=16),
)


def options_of(t: GroupedGemmTiles) -> str:
    more = [f"{t.per_processor} a processor"] * (t.per_processor > 1) + ["flat"] * t.flatten + ["halves"] * t.halves
    return ", ".join([f"{t.m}x{t.n}", f"{t.stages} stages", f"{t.warps} warps", *more])


def timed(call: Callable[[], Any]) -> float:
    return measure(call, DEVICE, warmup=2, repeats=6, batch=8).median if GPU else measure(call, DEVICE, 0, 1).median


def rates(
    name: str,
    flop: float,
    bf16: Callable[[], Any],
    low: Callable[[GroupedGemmTiles], Tensor],
    tiles: tuple[GroupedGemmTiles, ...],
    used: GroupedGemmTiles,
    sum_: Tensor | None = None,
) -> None:
    """`sum_`: what `low` adds to."""
    print(f"{name:24} bf16 {flop / timed(bf16) / 1e12:6.0f}", flush=True)

    def once(t: GroupedGemmTiles) -> Tensor:
        if sum_ is not None:
            sum_.zero_()
        return low(t).float()

    truth = once(used).clone()
    for t in tiles:
        if sum_ is not None and t.flatten:
            continue  # its kernel has one tile a program
        try:
            seconds, off = timed(lambda t=t: low(t)), (once(t) - truth).abs().max() / truth.abs().max()
            print(
                f"{name:24} fp8  {flop / seconds / 1e12:6.0f} {'*' if t == used else ' '} {options_of(t):44} off "
                f"{off.item():.1e}",
                flush=True,
            )
        except Exception as error:  # does not fit, mostly
            print(f"{name:24} fp8  {options_of(t)}: {type(error).__name__} {str(error)[:80]}", flush=True)


def delayed() -> ExpertQuantizer:
    low = ExpertQuantizer(find_recipe("delayed"), "w", 0, ModelAxes(), "triton")
    low.multiplier = torch.tensor([50.0, 50.0, 2000.0], device=DEVICE)
    low.counts, low.amax = (
        torch.zeros(3, SLOTS, COUNTS, dtype=torch.int64, device=DEVICE),
        torch.zeros(3, device=DEVICE),
    )
    return low


def products(name: str, outer: int, inner: int, rows: int, ends: Tensor) -> None:
    experts, flop = len(ends), 2.0 * rows * outer * inner
    x, dy, w = (
        torch.randn(*s, device=DEVICE).to(TYPE) for s in ((rows, inner), (rows, outer), (experts, outer, inner))
    )
    buffer = torch.zeros(experts, outer, inner, device=DEVICE)
    low = delayed()
    (a, a_laid), (d, d_laid), (straight, turned) = low.rows(X, x, ends), low.rows(DY, dy, ends), low.quantized(w)
    fast, careful = grouped_gemm_kernel.FAST, grouped_gemm_kernel.CAREFUL

    def added(t: GroupedGemmTiles) -> Tensor:
        grouped_gemm_kernel.add_product_(buffer, d_laid, a_laid, ends, False, t)
        return buffer

    rates(
        f"{name} forward",
        flop,
        lambda: grouped_kernel.grouped_product(x, w.transpose(1, 2), ends),
        lambda t: grouped_gemm_kernel.product(a, straight, ends, TYPE, None, True, t),
        OWN_SUMS,
        fast,
    )
    rates(
        f"{name} input's",
        flop,
        lambda: grouped_kernel.grouped_product(dy, w, ends),
        lambda t: grouped_gemm_kernel.product_by_places(d, turned, ends, TYPE, False, t),
        FP32_SUMS,
        careful,
    )
    rates(
        f"{name} weight's",
        flop,
        lambda: grouped_kernel.add_grouped_product_(buffer, dy, x, ends),
        added,
        FP32_SUMS,
        careful,
        buffer,
    )


def casts(rows: int, ends: Tensor, low: ExpertQuantizer) -> None:
    """The four casts of a layer: of tensors in memory and as they are made, beside what making them takes on its
    own."""
    tokens = torch.randn(rows // 2, WIDTH, device=DEVICE).to(
        TYPE
    )  # two rows of each, as of 16 of 64 experts with 8 chosen
    gate_up, dh = torch.randn(rows, 2 * INNER, device=DEVICE).to(TYPE), torch.randn(rows, INNER, device=DEVICE).to(TYPE)
    weights, sums, last = (
        torch.rand(rows, device=DEVICE),
        torch.zeros(parts_of_sums(INNER), rows, device=DEVICE),
        ends[-1],
    )
    each = rows // len(ends)
    once = torch.stack(
        [torch.randperm(len(tokens), device=DEVICE) for _ in range(2)]
    )  # either half of the experts has every token once
    source = once.view(2, -1, each).sort(2)[0].flatten().int()
    plan = ExpertRows(source, source, source.argsort(stable=True).int().view(-1, 2), ends, last)
    by = PERMUTE.choose("auto", tokens)
    made: dict[str, tuple[int, Any, int]] = {
        "rows": (X, Gathered(tokens, plan, by), 2 * tokens.numel() + 4 * rows * WIDTH),
        "activation": (X, GatedRows(gate_up, weights, last), 6 * dh.numel()),
        "gradient of rows": (DY, Gathered(tokens, plan, by), 2 * tokens.numel() + 4 * rows * WIDTH),
        "its gradient": (DY, GatedRowsGrad(gate_up, weights, last, dy=dh, sums=sums), 10 * dh.numel()),
    }
    print(f"{'':24} made, us (GB/s)  cast, us (GB/s)  cast as it is made, us (GB/s)")
    for name, (which, what, bytes_) in made.items():
        x = what.tensor()
        times = (
            timed(what.tensor),
            timed(lambda x=x, w=which: low.rows(w, x, ends)),
            timed(lambda s=what, w=which: low.rows(w, s, ends)),
        )
        options_of = (f"{1e6 * t:6.0f} ({n / t / 1e9:5.0f})" for t, n in zip(times, (bytes_, 4 * x.numel(), bytes_)))
        print(f"{name:24}", "  ".join(options_of), flush=True)
    for name, (which, what, bytes_) in made.items() if GPU else ():
        form, counts, one = (
            E5M2 if which == DY else E4M3,
            torch.zeros(SLOTS, COUNTS, dtype=torch.int64, device=DEVICE),
            torch.ones(1, device=DEVICE),
        )
        for c in CASTS:
            seconds = timed(
                lambda s=what, f=form, c=c, n=counts, m=one: quantize_grouped_kernel.cast_both(
                    s, ends, tiles_for(rows, len(ends)), CastSpec(f, quantize_grouped_kernel.GIVEN, m, counts=n), cut=c
                )
            )
            used = "*" if c == quantize_grouped_kernel.tiles_of(what, quantize_grouped_kernel.GIVEN) else " "
            print(
                f"{name:24} {c.rows}x{c.columns}, {c.warps} warps {used} {1e6 * seconds:6.0f} us "
                f"{bytes_ / seconds / 1e9:6.0f} GB/s",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--rows", type=int, default=65536)
    options = parser.parse_args()
    rows, experts = (options.rows, options.experts) if GPU else (512, 2)
    ends = torch.arange(1, experts + 1, dtype=torch.int32, device=DEVICE) * (rows // experts)
    print(
        torch.cuda.get_device_name() if GPU else "no GPU: tiny sizes",
        f"torch {torch.__version__}, {experts} experts, {rows} rows",
    )
    casts(rows, ends, delayed())
    for name, outer, inner in (("gate+up", 2 * INNER, WIDTH), ("down", WIDTH, INNER)):
        products(name, outer, inner, rows, ends)


if __name__ == "__main__":
    main()
