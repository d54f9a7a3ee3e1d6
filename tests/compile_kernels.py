"""Compile every Triton kernel for sm_90 without a GPU: `python -m tests.compile_kernels` prints a line for each."""

from __future__ import annotations

import math
import os

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from phalanx.comm import sum_kernel
from phalanx.ops.kernels import adamw, gated, loss, norm, rope

BF = "*bf16"


def kernels() -> list[tuple]:
    """(kernel, types of its pointers and integers, its constants)"""
    import triton.language as tl

    wide = {"WIDE": tl.float32}
    norms = dict(EPS=1e-5, BLOCK=4096, **wide)
    heads = dict(Q=32, KV=8, Q_BLOCK=32, KV_BLOCK=8, HALF=64, HALF_BLOCK=64, **wide)
    strides = [f"{x}_{d}" for x in "qkv" for d in ("seq", "head", "tok")]
    found = []
    for center in (False, True):
        pointers = dict(x=BF, delta=BF, weight=BF, bias=BF, total=BF, y=BF, mean_out="*fp32", scale_out="*fp32", D="i32")
        found.append((norm._norm_forward, pointers, dict(ADD=True, CENTER=center, **norms)))
        pointers = dict(dy=BF, x=BF, weight=BF, mean_in="*fp32", scale_in="*fp32", dtotal=BF, dx=BF, dw_parts="*fp32", db_parts="*fp32",
                        rows="i32", D="i32", programs="i32")  # fmt: skip
        found.append((norm._norm_backward, pointers, dict(ADD=True, CENTER=center, BLOCK=1024, TILE=4, **wide)))
    for gate in (dict(ALPHA=1.0, LIMIT=math.inf, SHIFT=0.0, CLAMP=False), dict(ALPHA=1.702, LIMIT=7.0, SHIFT=1.0, CLAMP=True)):
        some = dict(weights="*fp32", last="*i32")
        gate |= dict(WEIGH=gate["CLAMP"], SOME=gate["CLAMP"], BLOCK=256, **wide)
        found.append((gated._forward, dict(x=BF, **some, y=BF, F="i32"), gate))
        found.append((gated._backward, dict(dy=BF, x=BF, **some, dx=BF, dweights="*fp32", F="i32"), dict(BLOCKS=3, **gate)))
    pointers = dict(q=BF, k=BF, v=BF, out=BF, cos_table=BF, sin_table=BF, length="i32", **dict.fromkeys(strides, "i32"))
    found.append((rope._pack, pointers, dict(SIGN=1.0, ROTATE=True, **heads)))
    rows = dict(row_of_label="*i64", here="*i1", lse="*fp32")
    found.append((loss._stats, dict(logits=BF, **rows, label_logit="*fp32", V="i32", stride="i32"), dict(BLOCK=4096, **wide)))
    found.append((loss._gradient, dict(logits=BF, **rows, scale="*fp32", V="i32", stride="i32"), dict(BLOCK=4096, **wide)))
    found.append((sum_kernel._sum, dict(parts=BF, out=BF, n="i32", distance="i32"), dict(COUNT=4, BLOCK=2048, **wide)))
    flat = dict(p="*fp32", g="*fp32", m="*fp32", v="*fp32", out=BF, scalars="*fp64", n="i64")
    found.append((adamw._adamw, flat, dict(BETA1=0.9, BETA2=0.95, EPS=1e-8, COPY=True, BLOCK=1024, **wide)))
    return found


if __name__ == "__main__":
    for kernel, signature, constants in kernels():
        types = {**signature, **dict.fromkeys(constants, "constexpr")}
        made = triton.compile(ASTSource(kernel, types, constants), target=GPUTarget("cuda", 90, 32))
        print(f"{kernel.fn.__name__}: sm_90, {len(made.asm['cubin'])} bytes")
