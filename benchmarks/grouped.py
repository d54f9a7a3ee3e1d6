"""How fast are the ops of a mixture of experts on one GPU? Three tables: grouped matmuls, the moves of rows, and
(--sweep) tile sizes.

python benchmarks/grouped.py [--only W4] [--sweep] [--uneven 0.25]

Grouped matmuls in TFLOP/s: our Triton kernels, torch._grouped_mm (its weight gradient makes a bf16 tensor; `+ add`
adds it to an fp32 buffer as training needs), and one dense product of the same FLOPs. Moves in GB/s of the bytes
that must be read and written at least. Without a GPU the sizes are tiny and the numbers mean nothing: a way to try
the script (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.ops.dense import gated_kernel
from phalanx.ops.dense.gate import SWIGLU
from phalanx.ops.experts import grouped_kernel, permute_kernel
from phalanx.ops.experts import route_kernel as route_kernels
from phalanx.ops.experts.grouped_kernel import GroupedTiles, tiles_of
from phalanx.ops.experts.router import Router
from phalanx.ops.experts.rows import ExpertRows

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
TYPE = torch.bfloat16 if GPU else torch.float16


@dataclass(frozen=True)
class Shape:
    """`tokens` of this rank, each at `slots` of `all_experts`, of which `experts` are here; as many rows come as go."""

    experts: int
    width: int
    inner: int
    tokens: int
    slots: int
    all_experts: int

    @property
    def rows(self) -> int:
        return self.tokens * self.slots


SHAPES = {
    "W4": Shape(16, 2048, 768, 8192, 8, 64),
    "W4 wide": Shape(16, 2048, 1024, 8192, 8, 64),
    "Qwen3-30B ep8": Shape(16, 2048, 768, 4096, 8, 128),
    "Mixtral ep4": Shape(2, 4096, 14336, 8192, 2, 8),
    "DeepSeek-V3 ep32": Shape(8, 7168, 2048, 4096, 8, 256),
    "gpt-oss-120b ep8": Shape(16, 2880, 2880, 8192, 4, 128),
}
SWEEP = [  # m, n, k, stages, warps, group, flatten, programs a processor
    GroupedTiles(128, 256, 64, 3, 8),
    GroupedTiles(128, 256, 64, 4, 8),
    GroupedTiles(128, 256, 64, 3, 8, 4),
    GroupedTiles(128, 256, 64, 3, 8, 16),
    GroupedTiles(128, 256, 64, 3, 8, 8, True),
    GroupedTiles(256, 128, 64, 3, 8),
    GroupedTiles(256, 128, 64, 4, 8),
    GroupedTiles(128, 128, 64, 3, 4, 8, False, 2),
    GroupedTiles(128, 128, 64, 3, 8, 8, False, 2),
    GroupedTiles(128, 128, 64, 5, 4),
    GroupedTiles(128, 128, 64, 4, 4, 8, True),
    GroupedTiles(128, 128, 32, 6, 4, 8, False, 2),
    GroupedTiles(64, 256, 64, 4, 4),
]


def seconds(fn: Callable[[], object], window: float = 0.06, repeats: int = 5) -> float:
    """Median over `repeats` windows of calls back to back, long enough for the GPU to settle at its power limit."""
    if not GPU:
        start = time.perf_counter()
        fn()
        return time.perf_counter() - start
    fn()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def run(calls: int) -> float:
        start.record()
        for _ in range(calls):
            fn()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / calls

    calls = max(1, int(window / max(run(3), 1e-6)))
    return statistics.median(run(calls) for _ in range(repeats))


def ends_of(shape: Shape, uneven: float) -> Tensor:
    """Row ends: the mean load times 1 +- `uneven`."""
    share = 1 + uneven * (2 * torch.rand(shape.experts, generator=torch.Generator().manual_seed(0)) - 1)
    stops = (share.cumsum(0) / share.sum() * shape.rows).round().int()
    return stops.to(DEVICE)


def normal(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float32, device=DEVICE).to(TYPE)


def attempt(fn: Callable[[], object]) -> float | None:
    """Seconds, None where it does not run here (its reason is printed)."""
    try:
        return seconds(fn)
    except Exception as error:  # any backend's refusal
        print(f"  ({type(error).__name__}: {str(error).splitlines()[0][:100]})")
        return None


def library(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(x, weight, offs=ends)


def add_dense_(buffer: Tensor, dy: Tensor, x: Tensor) -> None:
    if GPU:
        torch.addmm(buffer, dy.t(), x, out_dtype=torch.float32, out=buffer)
    else:
        buffer.addmm_(dy.t().float(), x.float())


Ours = Callable[[GroupedTiles | None], object]


def products(
    shape: Shape, uneven: float
) -> list[tuple[str, float, Ours, list[Callable[[], object]], Callable[[], object]]]:
    """(name, FLOPs, ours of tile sizes, torch's, the dense product of as many FLOPs) of each matmul of the layer."""
    found = []
    ends, rows = ends_of(shape, uneven), shape.rows
    for name, outer, inner in (("gate+up", 2 * shape.inner, shape.width), ("down", shape.width, shape.inner)):
        x, dy, weight = normal(rows, inner), normal(rows, outer), normal(shape.experts, outer, inner)
        dense, buffer = normal(outer, inner), torch.zeros(shape.experts, outer, inner, device=DEVICE)
        one = torch.zeros(outer, inner, device=DEVICE)
        flops = 2.0 * rows * outer * inner
        turned = weight.transpose(1, 2)
        found += [
            (
                f"{name} fwd {inner}->{outer}",
                flops,
                lambda t, x=x, w=turned, e=ends: grouped_kernel.grouped_product(x, w, e, None, t),
                [lambda x=x, w=turned, e=ends: library(x, w, e)],
                lambda x=x, w=dense: x @ w.t(),
            ),
            (
                f"{name} dgrad",
                flops,
                lambda t, d=dy, w=weight, e=ends: grouped_kernel.grouped_product(d, w, e, None, t),
                [lambda d=dy, w=weight, e=ends: library(d, w, e)],
                lambda d=dy, w=dense: d @ w,
            ),
            (
                f"{name} wgrad",
                flops,
                lambda t, d=dy, x=x, e=ends, b=buffer: grouped_kernel.add_grouped_product_(b, d, x, e, t),
                [
                    lambda d=dy, x=x, e=ends: library(d.t(), x, e),
                    lambda d=dy, x=x, e=ends, b=buffer: b.add_(library(d.t(), x, e)),
                ],
                lambda d=dy, x=x, b=one: add_dense_(b, d, x),
            ),
        ]
    return found


def tflops(flops: float, took: float | None) -> str:
    return "-" if took is None else f"{flops / took / 1e12:.0f}"


def matmul_table(name: str, shape: Shape, uneven: float) -> None:
    print(
        f"\n{name}: {shape.experts} experts, {shape.rows} rows, width {shape.width}, inner {shape.inner}, loads "
        f"+-{uneven:.0%}; TFLOP/s"
    )
    print("| product | ours | torch._grouped_mm | + add | dense |\n| --- | --- | --- | --- | --- |")
    totals: dict[str, float] = {}
    for what, flops, ours, theirs, dense in products(shape, uneven):
        took = {"ours": attempt(lambda ours=ours: ours(None)), "torch": attempt(theirs[-1]), "dense": attempt(dense)}
        plain = attempt(theirs[0]) if len(theirs) > 1 else took["torch"]
        print(
            "|",
            " | ".join([what, *(tflops(flops, t) for t in (took["ours"], plain, took["torch"], took["dense"]))]),
            "|",
        )
        for key, t in took.items():
            totals[key] = totals.get(key, 0.0) + (t or float("nan"))
    flops = 18.0 * shape.rows * shape.inner * shape.width
    cells = [tflops(flops, totals[k]) for k in ("ours", "torch", "dense")]
    print(
        f"| all six, ms {', '.join(f'{k} {v * 1e3:.2f}' for k, v in totals.items())} | {cells[0]} | - | {cells[1]} "
        f"| {cells[2]} |"
    )


def sweep_table(name: str, shape: Shape, uneven: float, most: int = 3) -> None:
    print(f"\n{name}: the {most} best tile sizes; TFLOP/s")
    for what, flops, ours, _, _ in products(shape, uneven):
        found = []
        for tiles in SWEEP if GPU else SWEEP[:1]:
            if "wgrad" in what and (tiles.flatten or tiles.per_processor > 1):
                continue  # that kernel has no such choice
            try:
                found.append((flops / seconds(lambda t=tiles, ours=ours: ours(t), 0.03, 3) / 1e12, tiles))
            except Exception as error:  # does not fit into shared memory, mostly
                print(f"  {tiles}: {type(error).__name__}")
        for speed, tiles in sorted(found, key=lambda f: -f[0])[:most]:
            print(f"  {what:24} {speed:6.0f}  {tiles}")
        default = next((s for s, t in found if t == tiles_of(TYPE)), float("nan"))
        print(f"  {what:24} {default:6.0f}  default")


def moves_table(name: str, shape: Shape) -> None:
    """Dropless routing of this rank's tokens, every expert's rows here."""
    tokens, rows, width, inner, slots = shape.tokens, shape.rows, shape.width, shape.inner, shape.slots
    router = Router(slots, shape.all_experts)
    logits = torch.randn(tokens, shape.all_experts, device=DEVICE)
    experts, weights, _ = route_kernels.route_forward(logits, router, None, None, 0)
    plan = ExpertRows(*permute_kernel.plan_forward(experts, 0, shape.all_experts, rows))
    x, y, gate_up, dh = normal(tokens, width), normal(rows, width), normal(rows, 2 * inner), normal(rows, inner)
    last, row_weight, size = plan.ends_E[-1], torch.rand(rows, device=DEVICE), x.element_size()
    scores = torch.randn_like(logits)
    places = torch.arange(tokens, device=DEVICE)
    forced = Router(slots, shape.all_experts, forced="balanced")
    moved = {
        "route": (logits.nbytes * 2, lambda: route_kernels.route_forward(logits, router, None, None, 0)),
        "route, forced": (
            logits.nbytes * 2,
            lambda: route_kernels.route_forward(logits, forced, None, (places, places), 0),
        ),
        "route backward": (
            logits.nbytes * 3,
            lambda: route_kernels.route_backward(weights, scores, logits, experts, router),
        ),
        "plan rows": (
            experts.nbytes * 2 + rows * 12,
            lambda: permute_kernel.plan_forward(experts, 0, shape.all_experts, rows),
        ),
        "gather rows": ((tokens + rows) * width * size, lambda: permute_kernel.gather_forward(x, plan)),
        "sum rows": ((tokens + rows) * width * size, lambda: permute_kernel.sum_forward(y, None, plan)),
        "weighted sum": ((tokens + rows) * width * size, lambda: permute_kernel.sum_forward(y, weights, plan)),
        "weighted sum backward": (
            (tokens + 2 * rows) * width * size,
            lambda: permute_kernel.weighted_backward(x, y, weights, plan),
        ),
        "gated": (rows * 3 * inner * size, lambda: gated_kernel.gated_forward(gate_up, SWIGLU, None, last)),
        "gated backward": (
            rows * 5 * inner * size,
            lambda: gated_kernel.gated_backward(dh, gate_up, SWIGLU, None, last),
        ),
        "gated, weighed": (
            rows * 3 * inner * size,
            lambda: gated_kernel.gated_forward(gate_up, SWIGLU, row_weight, last),
        ),
        "gated, weighed, backward": (
            rows * 5 * inner * size,
            lambda: gated_kernel.gated_backward(dh, gate_up, SWIGLU, row_weight, last),
        ),
        "copy of rows": (2 * rows * width * size, lambda: y.clone()),
    }
    print(f"\n{name}: {tokens} tokens x {slots}, width {width}, inner {inner}, {shape.all_experts} experts")
    print("| move | us | GB/s |\n| --- | --- | --- |")
    for what, (count, fn) in moved.items():
        took = attempt(fn)
        print(f"| {what} | " + ("- | - |" if took is None else f"{took * 1e6:.0f} | {count / took / 1e9:.0f} |"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--sweep", action="store_true", help="also try other tile sizes (minutes: each is compiled)")
    parser.add_argument("--uneven", type=float, default=0.0, help="experts' loads are the mean times 1 +- this")
    options = parser.parse_args()
    print(torch.cuda.get_device_name() if GPU else "no GPU: tiny sizes", "torch", torch.__version__)
    for name, shape in SHAPES.items():
        if options.only in name:
            shape = shape if GPU else Shape(2, 64, 32, 16, 2, 4)
            matmul_table(name, shape, options.uneven)
            moves_table(name, shape)
            if options.sweep:
                sweep_table(name, shape, options.uneven)


if __name__ == "__main__":
    main()
