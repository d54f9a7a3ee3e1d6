"""How fast are casts to 8 bits and products of 8-bit codes on one GPU? Two tables, at the shapes of an 8B layer
(8,192 tokens).

python benchmarks/low_ops.py [--only linears|experts|casts|algorithms] [--sweep] [--out FILE]

Casts in GB/s of the bytes that must be read and written at least. Products in TFLOP/s: torch's GEMMs (fast and
precise sums), the same and an addition to an fp32 buffer as a weight's gradient needs, cuBLASLt's
(ops.quantized.cublaslt) and ours, which add in the GEMM. --sweep tries tile sizes of ours (--only casts --sweep:
those of casts and nothing else; a star marks what is used).
--only algorithms: every way that cuBLASLt proposes for a product; the first is the one that is used. The same of 16
experts with 65,536 rows (2,048 features, 768 inside), beside the bf16 products that they stand for.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from ctypes import byref, c_int, c_uint64, c_void_p, sizeof
from functools import partial
from pathlib import Path
from typing import Any

import torch

from phalanx.bench.timing import measure
from phalanx.comm.axis import ModelAxes
from phalanx.ops.dense.activation import Gated, GatedGrad
from phalanx.ops.experts import grouped_kernel
from phalanx.ops.quantized import gemm_kernel, grouped_gemm_kernel
from phalanx.ops.quantized import quantize_kernel as kernels
from phalanx.ops.quantized.casts import CastSpec
from phalanx.ops.quantized.cublaslt import (
    MOST_WORKSPACE,
    WORKSPACE,
    Gemm,
    _Choice,
    _Plan,
    cublaslt,
    describe,
    layouts,
    scales_in_order,
)
from phalanx.ops.quantized.expert_quantizer import ExpertQuantizer
from phalanx.ops.quantized.gemm import fast_product
from phalanx.ops.quantized.gemm_kernel import GemmTiles
from phalanx.ops.quantized.quantize_tile import CastTiles
from phalanx.ops.quantized.quantizer import DY, WeightQuantizer, X
from phalanx.ops.quantized.recipes import COUNTS, E4M3, SLOTS, Scaled, find_recipe

TOKENS = 8192
LINEARS = {
    "qkv": (6144, 4096),
    "attention out": (4096, 4096),
    "gate+up": (28672, 4096),
    "down": (4096, 14336),
}  # (out, in)


def cast_rows(device: torch.device) -> list[dict[str, Any]]:
    found = []
    for width in (4096, 14336, 28672):
        x = torch.randn(TOKENS, width, device=device).bfloat16()
        for recipe in ("tensorwise", "delayed", "rowwise", "blockwise"):
            low = WeightQuantizer(find_recipe(recipe), "w", 0, ModelAxes(), "triton")
            if recipe == "delayed":
                low.multiplier = torch.ones(3, device=device)
            for counted in (False, True):
                if counted:
                    low.counts, low.amax = (
                        torch.zeros(3, SLOTS, COUNTS, dtype=torch.int64, device=device),
                        torch.zeros(3, device=device),
                    )
                times = measure(lambda x=x, low=low: low.both(X, x, 0, True), device)
                found.append(
                    {
                        "what": f"{recipe}{', counted' if counted else ''}",
                        "width": width,
                        "ms": 1e3 * times.median,
                        "GB/s": 4 * x.numel() / times.median / 1e9,
                    }
                )
        for what, call in (("amax", lambda x=x: kernels.amax(x)), ("copy of the same bytes", lambda x=x: x.clone())):
            seconds = measure(call, device).median
            found.append(
                {
                    "what": what,
                    "width": width,
                    "ms": 1e3 * seconds,
                    "GB/s": (2 if what == "amax" else 4) * x.numel() / seconds / 1e9,
                }
            )
        q, _ = kernels.cast_both(x, CastSpec(E4M3, kernels.GIVEN, torch.ones(1, device=device)), False)
        seconds = measure(lambda q=q: kernels.transposed(q.quantized), device).median
        found.append(
            {"what": "transpose of codes", "width": width, "ms": 1e3 * seconds, "GB/s": 2 * x.numel() / seconds / 1e9}
        )
    return found


def gated_rows(device: torch.device) -> list[dict[str, Any]]:
    """SwiGLU and the cast of what it makes, forward and backward: in two kernels, and as it is made. Bytes: read,
    and codes written twice."""
    found = []
    x, dy = (
        torch.randn(TOKENS, 2 * 14336, device=device).bfloat16(),
        torch.randn(TOKENS, 14336, device=device).bfloat16(),
    )
    for recipe in ("tensorwise", "delayed", "rowwise", "blockwise"):
        low = WeightQuantizer(find_recipe(recipe), "w", 0, ModelAxes(), "triton")
        low.counts, low.amax = (
            torch.zeros(3, SLOTS, COUNTS, dtype=torch.int64, device=device),
            torch.zeros(3, device=device),
        )
        if recipe == "delayed":
            low.multiplier = torch.ones(3, device=device)
        for name, which, source in (("forward", X, Gated(x)), ("backward", DY, GatedGrad(dy, x))):
            for how in ("one", "two"):
                seconds = measure(
                    lambda s=source, w=which, low=low, how=how: low.both(w, s if how == "one" else s.tensor(), 1, True),
                    device,
                ).median
                bytes_ = 2 * x.numel() + 2 * dy.numel() if which == X else 2 * (x.numel() + dy.numel()) + 2 * x.numel()
                found.append(
                    {
                        "what": f"SwiGLU {name} {recipe}, {how}",
                        "width": 14336,
                        "ms": 1e3 * seconds,
                        "GB/s": bytes_ / seconds / 1e9,
                    }
                )
    return found


CAST_TILES = ((64, 128, 8), (128, 64, 8), (32, 128, 4), (64, 64, 4), (128, 128, 16))  # rows, columns, warps


def cast_sweep(device: torch.device) -> list[dict[str, Any]]:
    """Tiles of casts with a given multiplier, counted; the one in use is marked. About 40 s, most of it compiling."""
    found = []
    counts, one = torch.zeros(SLOTS, COUNTS, dtype=torch.int64, device=device), torch.ones(1, device=device)
    for width in (4096, 14336):
        x, both = (
            torch.randn(TOKENS, width, device=device).bfloat16(),
            torch.randn(TOKENS, 2 * width, device=device).bfloat16(),
        )
        for name, source, bytes_ in (
            ("cast", x, 4),
            ("SwiGLU", Gated(both), 6),
            ("SwiGLU's gradient", GatedGrad(x, both), 10),
        ):
            for tile in map(CastTiles, *zip(*CAST_TILES)):
                cast = CastSpec(E4M3, kernels.GIVEN, one, counts=counts)
                call = partial(kernels.cast_both, source, cast, True, tiles=tile)
                seconds, used = (
                    measure(call, device).median,
                    " *" if tile == kernels.tiles_of(source, kernels.GIVEN) else "",
                )
                what = f"{name} {tile.rows} x {tile.columns}, {tile.warps} warps{used}"
                found.append(
                    {"what": what, "width": width, "ms": 1e3 * seconds, "GB/s": bytes_ * x.numel() / seconds / 1e9}
                )
    return found


def codes(rows: int, columns: int, block: tuple[int, int], device: torch.device) -> Scaled:
    x = torch.randn(rows, columns, device=device).mul_(20).to(torch.float8_e4m3fn)
    shape = [1 if b == 0 else -(-n // b) for n, b in zip((rows, columns), block)]
    scales = (
        torch.ones(*shape, device=device) if block == (128, 128) else torch.ones(*reversed(shape), device=device).t()
    )
    return Scaled(x, scales, block)


def tried(call: Callable[[], Any], flop: float, device: torch.device) -> tuple[float, float] | str:
    try:
        seconds = measure(call, device).median
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"
    return 1e3 * seconds, flop / seconds / 1e12


def by_cublaslt(out: torch.Tensor, a: Scaled, b: Scaled, fast: bool, add: bool) -> None:
    library = cublaslt(out.device.index or 0)
    if library is None or not library.product(out, a, b, fast, add):
        raise RuntimeError("cuBLASLt has no such GEMM" if library else "no cuBLASLt")


def product_rows(device: torch.device) -> list[dict[str, Any]]:
    found = []
    for name, (outer, inner) in LINEARS.items():
        gemms = {
            "forward": (TOKENS, outer, inner),
            "input's gradient": (TOKENS, inner, outer),
            "weight's": (outer, inner, TOKENS),
        }
        for gemm, (m, n, k) in gemms.items():
            flop, add = 2.0 * m * n * k, gemm == "weight's"
            kinds = {
                "tensorwise": ((0, 0), (0, 0)),
                "rowwise": ((1, 0), (1, 0)),
                "blockwise": ((1, 128), (1, 128) if add else (128, 128)),
            }
            for recipe, blocks in kinds.items():
                a, b = codes(m, k, blocks[0], device), codes(n, k, blocks[1], device)
                buffer = (
                    torch.zeros(m, n, device=device) if add else torch.empty(m, n, dtype=torch.bfloat16, device=device)
                )
                ways: dict[str, Callable[[], Any]] = {}
                for fast in (True, False):
                    word = "fast" if fast else "precise"
                    if recipe != "blockwise":
                        ways[f"torch {word}"] = lambda a=a, b=b, fast=fast: fast_product(a, b, torch.bfloat16, fast)
                        if add and not fast:
                            ways["torch precise, fp32 + add"] = lambda a=a, b=b, y=buffer: y.add_(
                                fast_product(a, b, torch.float32, False)
                            )
                            ways["torch precise, bf16 + add"] = lambda a=a, b=b, y=buffer: y.add_(
                                fast_product(a, b, torch.bfloat16, False)
                            )
                    elif not fast:
                        ways["torch"] = lambda a=a, b=b: torch._scaled_mm(
                            a.quantized, b.quantized.t(), a.scales, b.scales.t(), out_dtype=torch.bfloat16
                        )
                if recipe == "blockwise" or add:
                    ways["cuBLASLt"] = lambda a=a, b=b, y=buffer, add=add: by_cublaslt(y, a, b, False, add)
                if recipe != "blockwise" and add:
                    ways["cuBLASLt fast"] = lambda a=a, b=b, y=buffer: by_cublaslt(y, a, b, True, True)
                if recipe != "rowwise":
                    ways["ours"] = lambda a=a, b=b, y=buffer, add=add: gemm_kernel.product(y, a, b, add)
                for way, call in ways.items():
                    found.append(
                        {
                            "linear": name,
                            "gemm": gemm,
                            "recipe": recipe,
                            "way": way,
                            "result": tried(call, flop, device),
                        }
                    )
    return found


def algorithm_rows(device: torch.device) -> list[dict[str, Any]]:
    """Of tensors with one scale (precise and fast sums) and of blocks, forward and a weight's gradient, which is
    added."""
    found, most, lt = [], 8, cublaslt(device.index or 0)
    if lt is None:
        return [{"linear": "", "gemm": "", "recipe": "", "way": "", "result": "no cuBLASLt"}]
    for (name, (outer, inner)), add in itertools.product(LINEARS.items(), (False, True)):
        m, n, k = (outer, inner, TOKENS) if add else (TOKENS, outer, inner)
        for recipe, blocks, fast in (
            ("tensorwise", ((0, 0), (0, 0)), False),
            ("tensorwise, fast", ((0, 0), (0, 0)), True),
            ("blockwise", ((1, 128), (1, 128) if add else (128, 128)), False),
        ):
            a, b = codes(m, k, blocks[0], device), codes(n, k, blocks[1], device)
            y = torch.zeros(m, n, dtype=torch.float32 if add else torch.bfloat16, device=device)
            gemm = Gemm(m, n, k, (a.quantized.dtype, b.quantized.dtype, y.dtype), blocks, fast, add, (256, 256, 256))
            scales = [scales_in_order(q) for q in (a, b)]
            description, preference, count = (
                describe(lt._library, gemm, *(q.data_ptr() for q in scales)),
                c_void_p(),
                c_int(),
            )
            a_at, b_at, y_at = layouts(lt._library, gemm)
            choices, room = (_Choice * most)(), c_uint64(MOST_WORKSPACE)
            lt._call("cublasLtMatmulPreferenceCreate", byref(preference))
            lt._call("cublasLtMatmulPreferenceSetAttribute", preference, WORKSPACE, byref(room), sizeof(room))
            lt._library.cublasLtMatmulAlgoGetHeuristic(
                lt._handle, description, b_at, a_at, y_at, y_at, preference, most, choices, byref(count)
            )
            for i in range(count.value):
                chosen = _Plan(a_at, b_at, y_at, choices[i])
                result = tried(
                    lambda p=chosen, d=description, g=gemm, y=y, a=a, b=b: lt._run(p, d, g, y, a, b),
                    2.0 * m * n * k,
                    device,
                )
                found.append(
                    {
                        "linear": name,
                        "gemm": "weight's" if add else "forward",
                        "recipe": recipe,
                        "way": f"number {i}",
                        "result": result,
                    }
                )
    return found


def sweep(device: torch.device) -> list[dict[str, Any]]:
    found = []
    m, n, k = 28672, 4096, TOKENS
    buffer = torch.zeros(m, n, device=device)
    for block, add in (((0, 0), True), ((1, 128), True)):
        a, b = codes(m, k, block, device), codes(n, k, block, device)
        for (bm, bn), stages, warps in itertools.product(
            ((128, 128), (128, 256), (256, 128), (64, 256)), (3, 4, 5), (4, 8)
        ):
            tiles = GemmTiles(bm, bn, stages, warps)
            result = tried(
                lambda a=a, b=b, add=add, t=tiles: gemm_kernel.product(buffer, a, b, add, t), 2.0 * m * n * k, device
            )
            found.append({"block": block, "tiles": (bm, bn, stages, warps), "result": result})
    return found


ROWS, EXPERTS = 65536, 16
EXPERT_LINEARS = {"gate+up": (1536, 2048), "down": (2048, 768)}


def expert_rows(device: torch.device, sweeping: bool) -> list[dict[str, Any]]:
    ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32, device=device) * (ROWS // EXPERTS)
    found: list[dict[str, Any]] = []
    tried_tiles = [
        grouped_gemm_kernel.GroupedGemmTiles(m, n, stages, warps)
        for m, n in ((128, 256), (128, 128), (256, 128), (64, 256))
        for stages in (3, 4, 5)
        for warps in (4, 8)
    ]
    for name, (outer, inner) in EXPERT_LINEARS.items():
        x, dy, w = (
            torch.randn(*s, device=device).bfloat16() for s in ((ROWS, inner), (ROWS, outer), (EXPERTS, outer, inner))
        )
        buffer, flop = torch.zeros(EXPERTS, outer, inner, device=device), 2.0 * ROWS * outer * inner

        def note(
            gemm: str, recipe: str, way: str, call: Callable[[], Any], name: str = name, flop: float = flop
        ) -> None:
            found.append(
                {"linear": name, "gemm": gemm, "recipe": recipe, "way": way, "result": tried(call, flop, device)}
            )

        note("forward", "bf16", "ours", lambda x=x, w=w: grouped_kernel.grouped_product(x, w.transpose(1, 2), ends))
        note("input's gradient", "bf16", "ours", lambda x=dy, w=w: grouped_kernel.grouped_product(x, w, ends))
        note("weight's", "bf16", "ours", lambda x=x, y=dy, b=buffer: grouped_kernel.add_grouped_product_(b, y, x, ends))
        for recipe in ("delayed", "tensorwise", "rowwise", "blockwise"):
            low = ExpertQuantizer(find_recipe(recipe), "w", 0, ModelAxes(), "triton")
            if recipe == "delayed":
                low.multiplier = torch.ones(3, device=device)
            low.counts, low.amax = (
                torch.zeros(3, SLOTS, COUNTS, dtype=torch.int64, device=device),
                torch.zeros(3, device=device),
            )
            low.refresh(w)
            (a, a_laid), (d, d_laid), (forward, turned) = low.rows(X, x, ends), low.rows(DY, dy, ends), low.quantized(w)
            for which, rows in ((X, x), (DY, dy)):
                seconds = measure(lambda low=low, which=which, rows=rows: low.rows(which, rows, ends), device).median
                found.append(
                    {
                        "linear": name,
                        "gemm": "cast",
                        "recipe": recipe,
                        "way": f"{rows.shape[1]} features",
                        "result": (1e3 * seconds, 0.0),
                    }
                )
            ways = (
                {"fast": (True, None), "precise": (False, None)}
                if recipe != "blockwise"
                else {"precise": (False, None)}
            )
            if sweeping and recipe in ("delayed", "rowwise"):
                for t, word in itertools.product(tried_tiles, ("fast", "precise")):
                    ways[f"{word} {t.m}x{t.n} {t.stages} stages {t.warps} warps"] = word == "fast", t
            for way, (fast, tiles) in ways.items():
                note(
                    "forward",
                    recipe,
                    way,
                    lambda a=a, b=forward, f=fast, t=tiles: grouped_gemm_kernel.product(
                        a, b, ends, torch.bfloat16, None, f, t
                    ),
                )
                note(
                    "input's gradient",
                    recipe,
                    way,
                    lambda a=d, b=turned, f=fast, t=tiles: grouped_gemm_kernel.product_by_places(
                        a, b, ends, torch.bfloat16, f, t
                    ),
                )
                note(
                    "weight's",
                    recipe,
                    way,
                    lambda a=d_laid, b=a_laid, y=buffer, f=fast, t=tiles: grouped_gemm_kernel.add_product_(
                        y, a, b, ends, f, t
                    ),
                )
            if recipe == "rowwise":
                codes, scales = (
                    forward.quantized.view(EXPERTS, outer, inner).transpose(1, 2),
                    forward.scales.view(EXPERTS, outer),
                )
                for fast in (True, False):
                    note(
                        "forward",
                        recipe,
                        f"torch {'fast' if fast else 'precise'}",
                        lambda a=a, c=codes, s=scales, f=fast: torch._scaled_grouped_mm(
                            a.quantized, c, a.scales.view(-1), s, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=f
                        ),
                    )
    return found


def shown(result: Any) -> str:
    return result if isinstance(result, str) else f"{result[0]:8.3f} ms {result[1]:7.0f} TFLOP/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("linears", "experts", "casts", "algorithms"))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda")
    made: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__}
    made["products"] = product_rows(device) if options.only in (None, "linears") else []
    made["products"] += algorithm_rows(device) if options.only == "algorithms" else []
    made["products"] += expert_rows(device, options.sweep) if options.only in (None, "experts") else []
    for r in made["products"]:
        print(f"{r['linear']:14} {r['gemm']:17} {r['recipe']:11} {r['way']:26} {shown(r['result'])}", flush=True)
    made["casts"] = cast_sweep(device) if options.sweep and options.only in (None, "casts") else []
    if options.only in (None, "linears") or (options.only == "casts" and not options.sweep):
        made["casts"] += cast_rows(device) + gated_rows(device)
    for r in made["casts"]:
        print(f"cast {r['what']:34} {TOKENS} x {r['width']:6} {r['ms']:8.4f} ms {r['GB/s']:6.0f} GB/s", flush=True)
    if options.sweep and options.only in (None, "linears"):
        made["sweep"] = sweep(device)
        for r in made["sweep"]:
            print(f"{r['block']} {r['tiles']} {shown(r['result'])}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(made, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
