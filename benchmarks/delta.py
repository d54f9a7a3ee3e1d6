"""How fast are the kernels of the gated delta rule on one GPU, and with which tiles? One table, most of its time
compiling.

python benchmarks/delta.py [--tokens 32768] [--by-feature] [--tiles 64,4,2,128,64,4,1 ...]

Heads of Qwen3-Next (16 of keys, 32 of values, 128 features; with --by-feature 32 and 32, as Kimi Linear has). A line:
fields of DeltaTiles, milliseconds of forward and of forward and backward, the largest difference of outputs and
gradients from those of the first line, over the largest value, and milliseconds of each kernel. `off` of the first
line: from the reference, on the first 512 tokens.
"""

from __future__ import annotations

import argparse
from dataclasses import astuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.bench.timing import measure
from phalanx.ops.delta.delta import DELTA, TILES, DeltaInputs, DeltaTiles, delta
from phalanx.ops.op import Implementation, only, triton

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
TYPE = torch.bfloat16 if GPU else torch.float32


def inputs(tokens: int, by_feature: bool) -> DeltaInputs:
    drawn = torch.Generator(DEVICE).manual_seed(0)
    key_heads, heads, width = (32 if by_feature else 16, 32, 128) if GPU else (2, 2, 16)

    def normal(*shape: int, dtype: torch.dtype = TYPE) -> Tensor:
        return torch.randn(1, tokens, *shape, generator=drawn, device=DEVICE, dtype=dtype)

    q, k, v = normal(key_heads, width), normal(key_heads, width), normal(heads, width)
    decay = -0.1 * F.softplus(normal(heads, *([width] if by_feature else []), dtype=torch.float32))
    beta = normal(heads, dtype=torch.float32).sigmoid()
    leaves = [t.detach().requires_grad_() for t in (q, k, v, decay, beta)]
    return DeltaInputs(*leaves, scale=width**-0.5, normalize=True)


def results(s: DeltaInputs, kernels: str = "triton") -> list[Tensor]:
    y = delta(s, kernels)[0]  # type: ignore[arg-type]
    above = torch.randn(y.shape, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE, dtype=y.dtype)
    return [y.detach(), *torch.autograd.grad(y, s[:5], above)]


def off(found: list[Tensor], truth: list[Tensor]) -> str:
    return " ".join(
        f"{float((a.double() - b.double()).abs().max() / b.double().abs().max()):.1e}" for a, b in zip(found, truth)
    )


def by_kernel(s: DeltaInputs) -> str:
    if not GPU:
        return ""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            results(s)
    rows = sorted(profile.key_averages(), key=lambda row: -row.device_time_total)
    return ", ".join(f"{row.key[:24]} {row.device_time_total / 3e3:.3f}" for row in rows[:9])


def made_of(tiles: DeltaTiles) -> Implementation:
    return triton("phalanx.ops.delta.delta_kernel:DeltaKernels", tunings=(tiles,), checked=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768 if GPU else 130)
    parser.add_argument("--by-feature", action="store_true")
    parser.add_argument("--tiles", nargs="*", help="fields of DeltaTiles with commas; the default: those in use")
    args = parser.parse_args()
    given = [DeltaTiles(*map(int, t.split(","))) for t in args.tiles or ()] or list(TILES)
    s, short = (inputs(n, args.by_feature) for n in (args.tokens, min(512, args.tokens)))
    first: list[Tensor] = []
    with only(DELTA):
        truth = results(short, "plain")
    for tiles in given:
        with only(DELTA, made_of(tiles)):
            try:
                found = results(s)
                compared = off(found, first) if first else off(results(short), truth)
                first = first or found
                forward = measure(lambda: delta(s, "triton")[0].detach(), DEVICE)
                both = measure(lambda: results(s), DEVICE)
                print(f"{astuple(tiles)}: {forward.ms}, {both.ms} ms; off {compared}; {by_kernel(s)}", flush=True)
            except Exception as error:  # a compiler's, or more shared memory than there is
                print(f"{astuple(tiles)}: {type(error).__name__}: {str(error)[:200]}", flush=True)


if __name__ == "__main__":
    main()
