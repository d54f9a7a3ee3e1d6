"""The batch-invariant matmul against torch's at the shapes of Llama-3-8B, by rows; and other tiles, of which all must
give the same bits.

python benchmarks/invariant_matmul.py             on an NVIDIA GPU; ms
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from unittest import mock

import torch
import triton

from phalanx.ops.dense import invariant_kernel
from phalanx.ops.dense.invariant import PARTS
from phalanx.ops.dense.invariant_kernel import InvariantTiles

SHAPES = {"qkv": (6144, 4096, 1), "out": (4096, 4096, PARTS), "up": (28672, 4096, 1), "down": (4096, 14336, PARTS)}
TILES = (
    InvariantTiles(64, 64, 64, 5, 4),
    InvariantTiles(64, 128, 64, 4, 4),
    InvariantTiles(128, 64, 64, 4, 8),
    InvariantTiles(128, 128, 64, 4, 8),
    InvariantTiles(128, 128, 64, 3, 8),
    InvariantTiles(128, 256, 64, 3, 8),
    InvariantTiles(128, 128, 128, 3, 8),
)


def ms(call) -> float:
    return triton.testing.do_bench_cudagraph(call, rep=20)


def main() -> None:
    for rows in (1, 64, 256, 8192):
        usual, ours = 0.0, 0.0
        for name, (outputs, inputs, parts) in SHAPES.items():
            x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
            weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * inputs**-0.5

            def call(x=x, weight=weight, parts=parts) -> torch.Tensor:
                return invariant_kernel.product(x, weight, parts, torch.bfloat16)

            times = ms(lambda x=x, weight=weight: torch.mm(x, weight.t())), ms(call)
            usual, ours, wanted, line = usual + times[0], ours + times[1], call(), ""
            for tiles, together in product(TILES, (False, True)):
                if together and (parts == 1 or tiles.m * tiles.n > 128 * 64):
                    continue  # sums of parts fill the registers
                if parts > 1 and rows > 256 and not together:
                    continue  # they would be gigabytes
                tiles = replace(tiles, together=together)
                with mock.patch.object(invariant_kernel, "tiles_of", lambda *_, tiles=tiles: tiles):
                    same = torch.equal(call().view(torch.int16), wanted.view(torch.int16))
                    kind = f"{tiles.m}x{tiles.n}x{tiles.k}s{tiles.stages}{' together' if together else ''}"
                    line += f"  {kind} {ms(call):.4f}{'' if same else ' OTHER BITS'}"
            print(f"{rows:5} {name:5} torch {times[0]:.4f} ours {times[1]:.4f};{line}", flush=True)
        print(f"{rows:5} all   torch {usual:.4f} ours {ours:.4f}: {ours / usual:.2f} times", flush=True)


if __name__ == "__main__":
    main()
