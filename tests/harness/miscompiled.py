"""A small kernel that ptxas 12.8 (Triton 3.6) miscompiles for sm_90 with 8 warps and not with 4, and what becomes of
it: `python -m tests.harness.miscompiled` prints JSON. Without a GPU: launches compile and do nothing."""

from __future__ import annotations

import json
import os

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from phalanx.ops import machine_code, op, proof
from tests.harness import compared_forms

C, K, V, BV = 64, 128, 128, 32
WRONG, RIGHT = 8, 4  # warps
CPU = torch.device("cpu")


@triton.jit
def corrected(keys, mix, state, values, out, V: tl.constexpr, C: tl.constexpr, K: tl.constexpr, BV: tl.constexpr):
    """A delta rule's matmuls, summed over V, BV at a time: uniform registers do not hold the descriptors of all."""
    c, k = tl.arange(0, C), tl.arange(0, K)
    square = c[:, None] * C + c[None, :]
    a = tl.load(keys + c[:, None] * K + k[None, :])
    t = tl.load(mix + square)
    total = tl.zeros((C, C), tl.float32)
    for first in range(0, V, BV):
        i = first + tl.arange(0, BV)
        s = tl.load(state + i[:, None] * K + k[None, :])
        v = tl.load(values + c[:, None] * V + i[None, :])
        u = v - tl.dot(a, tl.trans(s))
        u = tl.dot(t, u.to(v.dtype)).to(v.dtype)
        total += tl.dot(v, tl.trans(u))
    tl.store(out + square, total)


class Corrected:
    def __init__(self, warps: int):
        self.warps = warps

    def matmuls(self, keys: Tensor, mix: Tensor, state: Tensor, values: Tensor) -> Tensor:
        out = torch.empty(C, C, dtype=torch.float32)
        corrected[1,](keys, mix, state, values, out, V=V, C=C, K=K, BV=BV, num_warps=self.warps, num_stages=1)
        return out


def matmuls(keys: Tensor, mix: Tensor, state: Tensor, values: Tensor) -> Tensor:
    """keys (C, K), mix (C, C), state (V, K), values (C, V) -> (C, C)"""
    return values @ (mix @ (values - keys @ state.T)).T


def call(keys: Tensor, mix: Tensor, state: Tensor, values: Tensor, kernels: op.Kernels) -> tuple[Tensor]:
    found: Tensor = OP.choose(kernels, keys).matmuls(keys, mix, state, values)
    return (found,)


OP = op.Op(
    "corrected",
    "matmuls of a delta rule",
    __name__,
    ("matmuls",),
    (op.triton(f"{__name__}:Corrected", tunings=(WRONG, RIGHT)),),
    cases=(op.Case("matmuls", call, ((C, K), (C, C), (V, K), (C, V))),),
)


def refusals(warps: int) -> list[str]:
    """What three launches say: two of one compiled form, and one of it read from Triton's cache."""
    inputs = [proof.normal(*shape, dtype=torch.bfloat16) for shape in OP.cases[0].shapes]
    said = []
    for number in range(3):
        if number == 2:
            corrected.device_caches.clear()
        try:
            Corrected(warps).matmuls(*inputs)
            said.append("")
        except machine_code.MiscompiledKernel as error:
            said.append(str(error))
    return said


def main() -> None:
    compared_forms.install()
    checked = op.first_right(OP, OP.implementations[0], CPU, torch.bfloat16)
    found = dict(number=checked.number, outcomes=proof.checks().read()[proof.setting_of(CPU)])
    found |= dict(wrong=refusals(WRONG), right=refusals(RIGHT))
    hooks = len(knobs.runtime.kernel_load_start_hook.calls)
    print(json.dumps(found | dict(hooks=hooks, other_ptxas=knobs.nvidia.ptxas_blackwell.path)))


if __name__ == "__main__":
    main()
