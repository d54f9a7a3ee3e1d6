"""Compile every Triton kernel for sm_90 without a GPU.

`python -m tests.harness.compile_kernels [layouts|whole [PART PARTS]]` prints a line for each (of a part). None may have
a matmul whose left operand is another one's result, transposed in registers: on Hopper, Triton from 3.4 to 3.7.0 gives
wrong ones (fla-org/flash-linear-attention#640). Nor may one read wild addresses (phalanx.ops.machine_code; `whole`).
"""

from __future__ import annotations

import math
import os
import re
import sys
from dataclasses import replace
from itertools import product

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from phalanx.comm import small_kernel, sum_kernel
from phalanx.ops.attention import (
    join_kernel,
    largest_scores_kernel,
    paged_kernel,
    relative_bias_kernel,
    store_kernel,
)
from phalanx.ops.delta import (
    delta_kernel,
    feature_grads_kernel,
    head_grads_kernel,
    prepare_kernel,
    states_kernel,
)
from phalanx.ops.delta import step_kernel as delta_step_kernel
from phalanx.ops.delta.delta import TILES as DELTA_TILES
from phalanx.ops.delta.step import TILES as DELTA_STEP_TILES
from phalanx.ops.dense import (
    biased_gelu_kernel,
    dropout_kernel,
    gated_kernel,
    head_norm_kernel,
    invariant_kernel,
    loss_kernel,
    norm_kernel,
    relu2_kernel,
    rope_kernel,
    row_sums_kernel,
    rows_kernel,
)
from phalanx.ops.dense.activation import Gated, GatedGrad, GatedRows, GatedRowsGrad
from phalanx.ops.dense.norm import Normed
from phalanx.ops.dense.rope import RopeGrad
from phalanx.ops.experts import grouped_kernel, permute_kernel, push_kernel, route_kernel
from phalanx.ops.experts.permute import Gathered
from phalanx.ops.experts.rows import ExpertRows
from phalanx.ops.kernel_tools import HOPPER_SHARED
from phalanx.ops.machine_code import wrong_in
from phalanx.ops.optimizer import (
    adamw_kernel,
    blockwise_kernel,
    directions_kernel,
    moments_kernel,
    symmetric_kernel,
)
from phalanx.ops.optimizer.symmetric import TILES
from phalanx.ops.quantized import (
    base_decode_kernel,
    casts,
    emulated,
    gemm_kernel,
    grouped_gemm_kernel,
    quantize_grouped_kernel,
    quantize_kernel,
    quantize_tile,
    stored_kernel,
)
from phalanx.ops.quantized.base_formats import FORMATS
from phalanx.ops.scan import (
    carried,
    carried_kernel,
    conv1d_kernel,
    gated_norm_kernel,
    norm_gate_kernel,
    scan_kernel,
    step_kernel,
)
from phalanx.ops.scan.step import TILES as STEP_TILES

BF = "*bf16"
TARGET = GPUTarget("cuda", 90, 32)


def aligned(names: list[str], types: dict) -> dict:
    """What is known when a kernel is launched: tensors begin at multiples of 16 bytes, and strides of tokens
    are multiples of 16."""
    known = (i for i, n in enumerate(names) if str(types[n]).startswith("*") or n.endswith("_tok"))
    return {(i,): [["tt.divisibility", 16]] for i in known}


def kernels() -> list[tuple]:
    """(kernel, types of its pointers and integers, its constants[, options of the compiler])"""
    import triton.language as tl

    wide = {"WIDE": tl.float32}
    norms = dict(EPS=1e-5, BLOCK=4096, **wide)
    heads = dict(Q=32, KV=8, Q_BLOCK=32, KV_BLOCK=8, HALF=64, HALF_BLOCK=64, **wide)
    strides = [f"{x}_{d}" for x in "qkv" for d in ("seq", "head", "tok")]
    found = []
    for center in (False, True):
        pointers = dict(
            x=BF, delta=BF, weight=BF, bias=BF, total=BF, y=BF, mean_out="*fp32", scale_out="*fp32", D="i32"
        )
        found.append((norm_kernel._norm_forward, pointers, dict(ADD=True, CENTER=center, WRITE=True, **norms)))
        pointers = dict(
            dy=BF,
            dsecond=BF,
            x=BF,
            weight=BF,
            mean_in="*fp32",
            scale_in="*fp32",
            dtotal=BF,
            dx=BF,
            parts="*fp32",
            rows="i32",
            D="i32",
            programs="i32",
        )
        how = dict(ADD=True, TWICE=center, CENTER=center, BLOCK=1024, TILE=4, **wide)
        found.append((norm_kernel._norm_backward, pointers, how))
    for gate in (
        dict(ALPHA=1.0, CUBIC=0.0, LIMIT=math.inf, SHIFT=0.0, CLAMP=False),
        dict(ALPHA=1.702, CUBIC=0.0, LIMIT=7.0, SHIFT=1.0, CLAMP=True),
        dict(ALPHA=1.596, CUBIC=0.044715, LIMIT=math.inf, SHIFT=0.0, CLAMP=False),
        dict(ALPHA=1.0, CUBIC=0.0, LIMIT=math.inf, SHIFT=0.0, CLAMP=False, EXACT=True),
    ):
        gate = {"EXACT": False, **gate}
        gate["PAIRS"] = gate["CLAMP"]
        some = dict(weights="*fp32", last="*i32")
        gate |= dict(WEIGH=gate["CLAMP"], SOME=gate["CLAMP"], INTERPRETED=False, BLOCK=256, **wide)
        found.append((gated_kernel._forward, dict(x=BF, **some, y=BF, F="i32"), gate))
        found.append(
            (
                gated_kernel._backward,
                dict(dy=BF, x=BF, **some, dx=BF, dweights="*fp32", F="i32"),
                dict(BLOCKS=3, **gate),
            )
        )
    for exact in (False, True):
        how = dict(EXACT=exact, SHORT=exact, ALPHA=1.596, CUBIC=0.044715, INTERPRETED=False, **wide)
        how |= dict(ROWS=biased_gelu_kernel.ROWS, COLS=biased_gelu_kernel.COLS)
        sizes = dict(T="i32", F="i32")
        found.append((biased_gelu_kernel._forward, dict(x=BF, bias=BF, y=BF, **sizes), how, dict(num_warps=8)))
        pointers = dict(dy=BF, x=BF, bias=BF, dx=BF, sums="*fp32", **sizes, EACH="i32")
        found.append((biased_gelu_kernel._backward, pointers, how, dict(num_warps=8)))
    for weigh in (False, True):
        how = dict(WEIGH=weigh, SOME=weigh, BLOCK=1024, **wide)
        some = dict(weights="*fp32", last="*i32", F="i32")
        found.append((relu2_kernel._forward, dict(x=BF, y=BF, **some), how))
        pointers = dict(dy=BF, x=BF, dx=BF, dweights="*fp32", **some)
        found.append((relu2_kernel._backward, pointers, dict(BLOCKS=3, **how)))
    sizes = dict(T="i32", F="i32", EACH="i32")
    tile = dict(ROWS=row_sums_kernel.ROWS, COLS=row_sums_kernel.COLS)
    found.append((row_sums_kernel._parts, dict(x=BF, sums="*fp32", **sizes), dict(**tile, **wide)))
    taken = dict(rows="*i64", gradient="*fp32", parts="*fp32", T="i32", D="i32")
    chunks = dict(CHUNK=rows_kernel.CHUNK, BLOCK=rows_kernel.BLOCK)
    found.append((rows_kernel._chunks, dict(order="*i64", dy=BF, **taken), dict(**chunks, **wide)))
    found.append((rows_kernel._rows_over_chunks, dict(ends="*i64", **taken), chunks))
    sizes = dict.fromkeys(("width", "stride", "first", "key0", "key1", "least"), "i32")
    tokens = dict(samples="*i64", positions="*i64", **sizes)
    found.append((dropout_kernel._drop, dict(x=BF, y=BF, **tokens), dict(SCALE=1.25, LANES=256, **wide)))
    pointers = dict(q=BF, k=BF, v=BF, out=BF, cos_table=BF, sin_table=BF, length="i32", **dict.fromkeys(strides, "i32"))
    whole = dict(ROTATE=True, PAIRS=heads["HALF"], NEIGHBOURS=False)
    pairings = (whole, whole | dict(PAIRS=heads["HALF"] // 2), whole | dict(NEIGHBOURS=True))
    normed = dict(qkv=BF, q_weight=BF, k_weight=BF, cos_table=BF, sin_table=BF)
    for pairs in pairings:
        found.append((rope_kernel._pack, pointers, dict(SIGN=1.0, **pairs, **heads)))
        found.append((head_norm_kernel._forward, dict(**normed, out=BF), dict(EPS=1e-6, **pairs, **heads)))
    more = dict(
        dq=BF,
        dk=BF,
        dv=BF,
        dqkv=BF,
        dw_parts="*fp32",
        tokens="i32",
        length="i32",
        programs="i32",
        **dict.fromkeys(strides, "i32"),
    )
    for pairs in pairings:
        found.append((head_norm_kernel._backward, dict(**normed, **more), dict(EPS=1e-6, **pairs, **heads)))
    rows = dict(row_of_label="*i64", here="*i1", lse="*fp32")
    for cap in (0.0, 30.0):
        chunk, constants = dict(logits=BF, **rows, V="i32", stride="i32"), dict(CAP=cap, BLOCK=4096, **wide)
        found.append((loss_kernel._stats, dict(**chunk, label_logit="*fp32"), constants))
        found.append((loss_kernel._gradient, dict(**chunk, scale="*fp32"), constants))
    found.append((sum_kernel._sum, dict(parts=BF, out=BF, n="i32", distance="i32"), dict(COUNT=4, BLOCK=2048, **wide)))
    flat = dict(out="*fp32", own="*fp32", received="*fp32", n="i32", distance="i32")
    found += [(sum_kernel._add, flat, dict(INDEX=index, SIZE=4, ADD=index > 0, BLOCK=2048)) for index in (0, 2)]
    exchange = dict(addresses="*i64", counts="*i32", n="i32")
    sizes = dict(INDEX=1, SIZE=4, CHANNELS=512, WORDS=512)
    found.append((small_kernel._gather, dict(x="*i32", out="*i32", **exchange), sizes))
    summed = dict(x=BF, words_in="*i32", received=BF, words_received="*i32", out=BF, **exchange)
    found.append((small_kernel._scatter, summed, dict(VALUES=1024, **sizes, **wide)))
    places = dict.fromkeys(
        ("heads", "length", "first", "count", *(f"{x}_{d}" for x in ("out", "more") for d in ("seq", "head", "tok"))),
        "i32",
    )
    found.append(
        (
            join_kernel._join,
            dict(out="*fp32", lse="*fp32", more=BF, more_lse="*fp32", **places),
            dict(V=128, V_BLOCK=128, ROWS=16, **wide),
        )
    )
    numbers = (
        "heads",
        "group",
        "length",
        "keys",
        "blocks",
        *(f"{x}_{d}" for x in "qk" for d in ("seq", "head", "tok")),
    )
    given = dict(q=BF, k=BF, first="*i32", stop="*i32", bounds="*fp32", out="*fp32", scale="fp32", least="fp32")
    sizes = dict(QUERIES=largest_scores_kernel.QUERIES, KEYS=largest_scores_kernel.KEYS, SLACK=1.001, **wide)
    for width in (64, 128, 192):
        widths = dict(WIDTH=width, WIDTH_BLOCK=triton.next_power_of_2(width))
        found.append((largest_scores_kernel._largest, given | dict.fromkeys(numbers, "i32"), sizes | widths))
    found += (
        experts(wide)
        + fp8_linears()
        + paged(wide)
        + relative_bias(wide)
        + invariant(wide)
        + scans(wide)
        + deltas(wide, (False,))
        + symmetric()
    )
    decays = dict(BETA1=0.9, BETA2=0.95, EPS=1e-8, **wide)
    whole, split = dict(p="*fp32", ties="*fp32"), dict(p="*i16", ties="*u8")
    step = dict(g="*fp32", out=BF, scalars="*fp64", n="i64")
    fp8 = dict(m="*fp8e4nv", m_exponents="*i8", v="*fp8e4nv", v_exponents="*i8", step="*fp32")
    maps = dict.fromkeys(("signed_map", "signed_middles", "unsigned_map", "unsigned_middles"), "*fp32")
    blockwise = dict(m="*u8", m_scales="*fp32", v="*u8", v_scales="*fp32", **maps)
    for master in (whole, split):
        consts = dict(COPY=master is whole, SPLIT=master is split, **decays)
        flat = dict(m="*fp32", v="*fp32", **master, **step)
        found.append((adamw_kernel._adamw, flat, dict(BLOCK=1024, **consts)))
        powers = dict(LEAST=-54, MOST=100, RUN=1024, BLOCK=32, **consts)
        found.append((moments_kernel._adamw, dict(**fp8, **master, **step), powers))
        scaled = dict(RUN=1024, BLOCK=64, **consts)
        found.append((blockwise_kernel._adamw, dict(**blockwise, **master, **step), scaled))
    return found


def symmetric() -> list[tuple]:
    """Symmetric products, with the tuning that is preferred and a smaller one; Muon's passes over memory."""
    import triton.language as tl

    found = []
    for t, across, down in ((TILES[0], False, 2), (TILES[0], True, 2), (TILES[0], False, 1), (TILES[3], True, 1)):
        tall, side = (f"{t.k},{rows}" if across else f"{rows},{t.k}" for rows in (down * t.side, t.side))
        read = {name: f"tensordesc<bf16[1,{tile}]>" for name, tile in (("a", tall), ("a_side", side), ("b", side))}
        types = read | dict(c=BF, out=BF, alpha="fp32", beta="fp32", diagonal="fp32")
        consts = dict(M=4096, K=4096, ADD=down == 1, TMA=True, ACROSS=across, WIDE=tl.float32)
        consts |= dict(SIDE=t.side, DOWN=down, STEP=t.k)
        stages = t.tall if down == 2 else t.stages
        found.append((symmetric_kernel._symmetric, types, consts, dict(num_warps=t.warps, num_stages=stages)))
    flat, wide = dict(skip="*fp32", n="i32"), dict(WIDE=tl.float32, BLOCK=directions_kernel.BLOCK)
    passed = dict(DECAY=0.95, NESTEROV=True, **wide), dict(COPY=True, **wide)
    first = dict(g="*fp32", m="*fp32", out=BF, factor="*fp32", **flat)
    found.append((directions_kernel._directions, first, passed[0]))
    over = dict(x=BF, norms="*fp32", out="*fp16", n="i32")
    wides = dict(WIDE=tl.float32, BLOCK=directions_kernel.LONG_BLOCK)
    found.append((directions_kernel._normalized, over, wides, dict(num_warps=8)))
    ends = dict(p="*fp32", u="*fp16", w=BF, lr="*fp64", kept="*fp64", **flat)
    found.append((directions_kernel._apply, ends, passed[1]))
    return found


def deltas(wide: dict, forms: tuple[bool, ...]) -> list[tuple]:
    """Delta rules of Qwen3-Next's heads, and of Kimi Linear's, whose decays are by feature; with documents."""
    import triton.language as tl

    found: list[tuple] = []
    t = DELTA_TILES[0]
    tokens = dict.fromkeys(("dy", "q", "k", "v", "y", "dq", "dk", "dv", "u_in", "u_out", "dx_out"), BF)
    kept = dict.fromkeys(("inverse", "weights", "states", "before", "after"), BF)
    wides = (
        "decay",
        "beta",
        "sums",
        "passed",
        "passed_out",
        "initial",
        "final",
        "dinitial",
        "dfinal",
        "of_reads",
        "of_queries",
        "of_inside",
    )
    known = dict(scale="fp32", numbers="*i64", **tokens, **kept, **dict.fromkeys((*wides, "ddecay", "dbeta"), "*fp32"))
    how = dict(NORMALIZE=True, EPSILON=1e-6, DOCUMENTS=True)
    for by_feature in forms:
        of_tokens = dict.fromkeys(("read", "write", "ask"), "*fp32")
        scaled = dict.fromkeys(("reading", "writing", "asking"), BF)
        absent = of_tokens if by_feature else {"reading": BF}
        sizes = dict(H=32, K=128, EACH=1 if by_feature else 2, C=delta_kernel.CHUNK, BK=128)
        shape = dict(ELEMENT=tl.bfloat16, PRECISION="tf32x3", **sizes, **wide)
        types = {**known, **of_tokens, **scaled}

        def add(kernel, constants: dict, options: dict, absent: dict = absent, types: dict = types) -> None:
            constants = dict(constants, **{name: None for name in kernel.arg_names if name in absent})
            given = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
            found.append((kernel, given, constants, options))

        of_states = dict(BY_FEATURE=by_feature, V=128, BV=t.values, **shape)
        options = dict(num_warps=t.warps, num_stages=t.stages)
        of_chunks = dict(num_warps=4)
        if by_feature:
            add(prepare_kernel.decay_sums, how | shape, of_chunks, {})
        depth = dict(DEPTH=delta_kernel.LEVELS)
        prepared = dict(BY_FEATURE=by_feature, B=delta_kernel.BLOCK, JOIN="tf32", **depth)
        add(prepare_kernel.prepare_chunks, prepared | how | shape, of_chunks)
        add(states_kernel.pass_states, dict(INITIAL=True, **of_states), options)
        add(states_kernel.outputs, of_states | dict(BV=t.outputs), of_chunks)
        add(states_kernel.pass_back, dict(FINAL=True, **(of_states | dict(BV=t.back))), options)
        of_grads = dict(V=128, BV=t.grads) | how | shape
        options = dict(num_warps=8 if by_feature else t.grad_warps, num_stages=t.grad_stages)
        if by_feature:
            add(feature_grads_kernel.grads_by_feature, of_grads | depth, options, {})
        else:
            add(head_grads_kernel.value_grads, of_grads, options)
            add(head_grads_kernel.query_grads, of_grads, options)
            add(head_grads_kernel.key_grads, of_grads, options)
    return found


def scans(wide: dict) -> list[tuple]:
    """The convolution, and scans of Nemotron-H's and Falcon-H1's heads, with documents; the gated norm of
    Qwen3-Next's."""
    import triton.language as tl

    found: list[tuple] = []
    heads = dict(H=32, K=128, EPS=1e-6, SILU=True, BLOCK=128, TILE=16, **wide)
    gate = dict(x=BF, z=BF, weight=BF, rows="i32", step="i32")
    found.append((norm_gate_kernel._forward, dict(**gate, y=BF), heads, dict(num_warps=4)))
    grads = dict(dy=BF, dx=BF, dz=BF, dw_parts="*fp32", programs="i32")
    found.append((norm_gate_kernel._backward, dict(**gate, **grads), heads, dict(num_warps=4)))
    strides = dict.fromkeys(("x_row", "x_tok"), "i32")
    given = dict(x=BF, weight=BF, bias=BF, numbers="*i64", before=BF)
    conv = dict(K=4, SILU=True, BIAS=True, TURN=conv1d_kernel.TURN, **wide)
    sizes = dict(L="i32", C="i32", **strides)
    outs = dict(dx=BF, dw_parts="*fp32", db_parts="*fp32")
    how, options = dict(DOCUMENTS=True, BEFORE=True, **conv), dict(num_warps=conv1d_kernel.WARPS)
    found.append((conv1d_kernel._forward, dict(**given, y=BF, **sizes), how | conv1d_kernel.FORWARD, options))
    backward = dict(dy=BF, **given, **outs, **sizes, dy_row="i32", dy_tok="i32")
    found.append((conv1d_kernel._backward, backward, how | conv1d_kernel.BACKWARD, options))
    wides = (
        "dt",
        "a",
        "steps",
        "sums",
        "reaches",
        "lefts",
        "passed",
        "passed_out",
        "initial",
        "final",
        "dfinal",
        "dinitial",
    )
    known = dict.fromkeys(("x", "b", "c", "d", "y", "dy", "dx", "before", "after"), BF) | dict(numbers="*i64")
    known |= dict.fromkeys((*wides, "ddt", "asked", "asked_out", "db", "dc", "da", "dd"), "*fp32")
    chunk = dict(H=128, Q=scan_kernel.CHUNK, DOCUMENTS=True, **wide)
    whole = dict(num_warps=scan_kernel.WARPS)
    follow = dict(num_stages=scan_kernel.STAGES, **whole)
    forms = [(scan_kernel._decays, dict(BH=scan_kernel.LEAST, **chunk), whole)]
    for width, state in ((128, 256), (64, 128)):  # Falcon-H1-7B's, the largest of a recipe, and Nemotron-H's
        shape = dict(P=width, N=state, EACH=16, ELEMENT=tl.bfloat16, BP=width, BN=state, **chunk)
        of_states = {name: shape[name] for name in shape if name != "DOCUMENTS"} | dict(BN=scan_kernel.STATES)
        together = dict(TOGETHER=scan_kernel.HEADS, **shape)
        grads = dict(num_stages=scan_kernel.grad_stages(width, state, HOPPER_SHARED), **whole)
        forms += [
            (scan_kernel._pass, dict(INITIAL=True, **of_states), follow),
            (scan_kernel._outputs, dict(SKIP=True, **shape), dict(maxnreg=scan_kernel.OUTPUT_REGISTERS, **whole)),
            (scan_kernel._pass_back, dict(FINAL=True, **of_states), follow),
            (scan_kernel._query_grads, together, grads),
            (scan_kernel._key_grads, together, grads),
            (scan_kernel._value_grads, dict(SKIP=True, **shape), dict(maxnreg=scan_kernel.VALUE_REGISTERS, **whole)),
        ]
    for kernel, constants, options in forms:
        types = {name: known.get(name, "i32") for name in kernel.arg_names if name not in constants}
        found.append((kernel, types, constants, options))
    known |= dict.fromkeys(("reach", "dreach", "parts"), "*fp32") | dict(dc=BF)
    of_heads = {n: shape[n] for n in shape if n not in ("Q", "DOCUMENTS")} | dict(BT=carried_kernel.TOKENS)
    for kernel, more, options in (
        (carried_kernel._carried, {}, whole),
        (carried_kernel._carried_query_grads, {}, carried_kernel.QUERY),
        (carried_kernel._carried_state_grads, dict(SIZE=carried.SEGMENT), whole),
    ):
        constants = of_heads | more
        types = {name: known.get(name, "i32") for name in kernel.arg_names if name not in constants}
        found.append((kernel, types, constants, options))
    return found + gated_norms(wide) + steps(wide)


def steps(wide: dict) -> list[tuple]:
    """Single tokens of Nemotron-H's scans and convolutions, and of Qwen3-Next's and Kimi's delta rules."""
    found: list[tuple] = []
    seen = dict(slots="*i64", fresh="*u8")
    given = dict(x=BF, weight=BF, bias=BF, kept=BF, y=BF, x_seq="i32", C="i32", **seen)
    sizes = dict(K=4, SILU=True, BIAS=True, FRESH=True, BLOCK=step_kernel.CHANNELS, **wide)
    found.append((step_kernel._conv_step, given, sizes))
    given = dict.fromkeys(("x", "dt", "b", "c", "bias", "log", "d", "y"), BF) | dict(kept="*fp32", **seen)
    given |= dict.fromkeys(("x_seq", "dt_seq", "b_seq", "c_seq"), "i32")
    sizes = dict(H=128, P=64, N=128, EACH=16, LOW=0.001, HIGH=math.inf, SKIP=True, FRESH=True, BN=128, **wide)
    for tile in STEP_TILES[::2]:
        found.append((step_kernel._state_step, given, dict(BP=tile.features, **sizes), dict(num_warps=tile.warps)))
    given = dict.fromkeys(("q", "k", "v", "y"), BF) | dict.fromkeys(("decay", "beta", "kept"), "*fp32") | seen
    given |= dict(scale="fp32", q_seq="i32", k_seq="i32", v_seq="i32")
    sizes = dict(H=32, K=128, V=128, EACH=2, NORMALIZE=True, EPSILON=1e-6, FRESH=True, BK=128, **wide)
    for by_feature, tile in product((False, True), DELTA_STEP_TILES[:2]):
        options = dict(num_warps=tile.warps)
        found.append(
            (delta_step_kernel._rule_step, given, dict(BY_FEATURE=by_feature, BV=tile.values, **sizes), options)
        )
    return found


def gated_norms(wide: dict) -> list[tuple]:
    """Nemotron-H's 8 groups, one group whole and spread over ranks, and small groups with the norm first."""
    found: list[tuple] = []
    given = dict(x=BF, gate=BF, weight=BF, scale="*fp32", tokens="i32", x_tok="i32", gate_tok="i32", width="i32")
    grads = dict(dy=BF, sums="*fp32", dx=BF, dgate=BF, dw_parts="*fp32", dy_tok="i32", programs="i32")
    for here, features, first, part in (
        (8, 1024, True, 0),
        (1, 2560, True, 1),
        (1, 2560, True, 2),
        (32, 128, False, 0),
    ):
        sizes = dict(HERE=here, F=features, GATE_FIRST=first, PART=part, **wide)
        sizes |= gated_norm_kernel.tile_of(features)
        options = dict(num_warps=sizes.pop("num_warps"))
        found.append((gated_norm_kernel._forward, dict(**given, y=BF), dict(EPS=1e-5, **sizes), options))
        found.append((gated_norm_kernel._backward, given | grads, sizes, options))
    return found


def invariant(wide: dict) -> list[tuple]:
    """Batch-invariant matmuls of few rows and of many, by parts and whole."""
    found: list[tuple] = []
    for rows, parts, tma in ((64, 1, True), (256, 8, True), (8192, 8, True), (8192, 4, False), (8192, 1, True)):
        c = invariant_kernel.tiles_of(rows, 4096, 14336, parts, torch.bfloat16)
        together = parts if c.together else 1
        pair = dict(x=f"tensordesc<bf16[{c.m},{c.k}]>", weight=f"tensordesc<bf16[{c.n},{c.k}]>")
        pointers = (pair if tma else dict(x=BF, weight=BF)) | dict(bias=BF, out="*fp32" if together > 1 else BF)
        consts = dict(BIAS=together == 1, TOGETHER=together, TMA=tma, INTERPRETED=False, **wide)
        consts |= dict(BM=c.m, BN=c.n, BK=c.k, GROUP=c.group)
        run = dict(num_warps=c.warps, num_stages=c.stages)
        found.append(
            (invariant_kernel._matmul, pointers | dict.fromkeys(("M", "N", "K", "length"), "i32"), consts, run)
        )
    found.append((invariant_kernel._add_parts, dict(sums="*fp32", out=BF, count="i32"), dict(PARTS=8, BLOCK=1024)))
    return found


def paged(wide: dict) -> list[tuple]:
    """Attention over pages: single tokens and pieces of prompts of an 8B model, latents, FP8; what is stored."""
    found: list[tuple] = []
    numbers = dict.fromkeys(paged_kernel.NUMBERS, "i32")
    invariant = dict(INVARIANT_KEYS=paged_kernel.INVARIANT_KEYS, INVARIANT_PARTS=paged_kernel.INVARIANT_PARTS)
    made = dict(sinks="*fp32", out=BF, lse="*fp32", part_out="*fp32", part_sums="*fp32", starts="*i32", lengths="*i32")
    for large, group, key, value, fp8 in (
        (False, 4, 128, 128, False),
        (True, 4, 128, 128, False),
        (False, 128, 576, 512, False),
        (False, 8, 64, 64, True),
    ):
        shared, window, stored = value < key, 128 if fp8 else 0, "*fp8e4nv" if fp8 else BF
        scales = "*fp32" if fp8 else None
        tiles = paged_kernel.tiles_of(group, key, False)[large]
        rows = min(group, tiles.rows)
        shape = dict(HEADS=8 * group, GROUP=group, GROUP_BLOCK=rows, Q=tiles.rows // rows, M=tiles.rows, N=tiles.keys)
        shape |= dict(WHICH=int(large), SEARCH=large, PAD=3, V=value, PAGE=16, WINDOW=window, CHUNK=0, INVARIANT=fp8)
        shape |= dict(OFFSET=int(large), STRIDE=1 + large)
        main, rest = paged_kernel.key_blocks(key)
        read = dict(K=key, KV=8, K_MAIN=main, K_REST=rest, V_BLOCK=value, SCALE=0.1, CAP=0.0, SHARED=shared)
        pages = dict(keys=stored, values=None if shared else stored, key_scales=scales, value_scales=scales)
        consts = dict(CLEAR=True, DIRECT=large, INTERPRETED=False, **shape, **read, **invariant, **wide)
        pointers = dict(q=BF, **pages, **made, table="*i32", **numbers, q_tok="i32", q_head="i32")
        consts |= {name: None for name, kind in pointers.items() if kind is None}
        pointers = {name: kind for name, kind in pointers.items() if kind is not None}
        options = dict(num_warps=tiles.warps, num_stages=tiles.stages)
        found.append((paged_kernel._attend, pointers, consts, options))
        given = {name: "i32" for name in ("S", "P", "per", "parts", "few")}
        consts = dict(**shape, V_BLOCK=64, V_BLOCKS=value // 64, PARTS_BLOCK=16, **invariant, **wide)
        found.append((paged_kernel._join_parts, dict(**made, **given), consts))
    for fp8 in (False, True):
        stored, scales = ("*fp8e4nv", "*fp32") if fp8 else (BF, None)
        pointers = dict(k=BF, v=BF, keys=stored, values=stored, slots="*i64", k_tok="i32", k_head="i32")
        pointers |= dict(v_tok="i32", v_head="i32", **(dict(key_scales=scales, value_scales=scales) if fp8 else {}))
        consts = dict(HEADS=8, K=128, V=128, H_BLOCK=8, K_BLOCK=128, V_BLOCK=128, LARGEST=448.0, LEAST=2.0**-126)
        consts |= dict(INTERPRETED=False) | ({} if fp8 else dict(key_scales=None, value_scales=None))
        found.append((store_kernel._store, pointers, consts))
    return found


def fp8_linears() -> list[tuple]:
    """Casts to 8 bits in every mode, and the GEMMs of codes with their own options."""
    import triton.language as tl

    found: list[tuple] = []
    sizes = dict(R="i32", C="i32")
    strides = {f"{x}_{d}": "i32" for x in "qkv" for d in ("seq", "head", "tok")}
    rope_grad = dict(**dict.fromkeys(("q", "k", "v", "cos", "sin"), BF), length="i32", **strides)
    like, heads = torch.empty(0, 0, device="meta"), torch.empty(0, 0, 0, 128, device="meta")
    sources = {
        quantize_kernel._cast: (like, dict(x=BF), {}),
        quantize_kernel._cast_gated: (Gated(like), dict(x=BF), {}),
        quantize_kernel._cast_gated_grad: (GatedGrad(like, like), dict(dy=BF, x=BF), {}),
        quantize_kernel._cast_normed: (Normed(like, like, like), dict(x=BF, scale="*fp32", weight=BF), {}),
        quantize_kernel._cast_rope_grad: (
            RopeGrad(heads, heads, heads, None, None),
            rope_grad,
            dict(Q=32, KV=8, ROTATE=True),
        ),
    }
    for kernel, (source, pointers, more) in sources.items():
        for mode in range(7):
            if kernel is not quantize_kernel._cast and mode == casts.SQUARES:
                continue  # of weights alone
            wide = mode == casts.GIVEN
            code = "*fp8e5" if wide else "*fp8e4nv"
            amaxes = dict.fromkeys(("row_amax", "col_amax"), "*fp32" if mode == casts.GIVEN else "*i32")
            outs = dict(out=code, other="*i32", row_scales="*fp32", col_scales="*fp32", counts="*i64")
            t = quantize_kernel.tiles_of(source, mode)
            consts = dict(HOW=cast_constants(mode, wide, t))
            given = dict(**pointers, **amaxes, **outs, **sizes)
            found.append((quantize_kernel._kernel_of(source, mode)[0], given, consts | more, dict(num_warps=t.warps)))
            if mode in (casts.GIVEN, casts.BLOCKS):
                found.append(uncounted(found[-1]))
    for wide in (False, True):  # of what ranks of tp gather: as it lies
        t, code = quantize_kernel.tiles_of(like, casts.GIVEN), "*fp8e5" if wide else "*fp8e4nv"
        outs = dict(
            row_amax="*fp32", col_amax=None, out=code, other=None, row_scales="*fp32", col_scales="*fp32", counts="*i64"
        )
        how = replace(
            cast_constants(casts.GIVEN, wide, t),
            largest=57344.0 if wide else 448.0,
            other=False,
            transposed=False,
        )
        consts = dict(HOW=how, col_amax=None, other=None)
        outs = {name: kind for name, kind in outs.items() if kind is not None}
        found.append((quantize_kernel._cast, dict(x=BF, **outs, R="i32", C="i32"), consts, dict(num_warps=t.warps)))
        found.append(uncounted(found[-1]))
    found.append(
        (
            quantize_kernel._amax,
            dict(x=BF, out="*i32", n="i32", steps="i32"),
            dict(BLOCK=quantize_kernel.ALL),
            dict(num_warps=8),
        )
    )
    found.append((quantize_kernel._turn, dict(x="*u8", out="*u8", **sizes), dict(TILE=casts.TILE), dict(num_warps=8)))
    run_of, run = (
        dict.fromkeys(("first", "n", "columns", "high", "wide", "across"), "i32"),
        dict(num_warps=stored_kernel.WARPS),
    )
    groups = dict(LINES=False, GROUP=stored_kernel.GROUP, GROUPS=stored_kernel.GROUPS, DTYPE=tl.bfloat16)
    found.append((stored_kernel._largest, dict(x="*fp32", bits="*i32", **run_of), groups, run))
    noted = dict(NOTE=True, LARGEST=True, MAX=448.0, LEAST=2.0**-10, WIDE_RANGE=False, ROUND=False, EVERY=16, SLOTS=32)
    outs = dict(quantized="*fp8e4nv", multiplier="*fp32", counts="*i64", bits="*i32")
    found.append((stored_kernel._cast_run, dict(x="*fp32", **outs, **run_of), groups | noted, run))
    found += base_decode()
    numbers = dict.fromkeys(("M", "N", "K", "a_row", "a_col", "b_row", "b_col"), "i32")
    for kinds, out, add in (((0, 0), "*fp32", True), ((0, 0), BF, False), ((1, 2), BF, False), ((1, 1), "*fp32", True)):
        c = gemm_kernel.WHOLE_TILES if kinds == (0, 0) else gemm_kernel.BLOCK_TILES
        pair = dict(a=f"tensordesc<fp8e5[{c.m},128]>", b=f"tensordesc<fp8e4nv[{c.n},128]>")
        consts = dict(A_KIND=kinds[0], B_KIND=kinds[1], ADD=add, TMA=True, BM=c.m, BN=c.n, BK=128, GROUP=c.group)
        run = dict(num_warps=c.warps, num_stages=c.stages)
        found.append(
            (
                gemm_kernel._scaled_gemm,
                dict(**pair, out=out, a_scales="*fp32", b_scales="*fp32", **numbers),
                consts,
                run,
            )
        )
    return found + emulated_casts() + expert_quantizer()


def cast_constants(mode: int, wide: bool, t: quantize_tile.CastTiles) -> quantize_tile.CastConstants:
    return quantize_tile.CastConstants(mode, True, 16, t.rows, t.columns, 448.0, 2.0**-10, wide, round=False)


def uncounted(cast: tuple) -> tuple:
    """The cast where nobody asks what it loses: there is no tensor to count in."""
    kernel, pointers, consts, options = cast
    consts = consts | dict(HOW=replace(consts["HOW"], note=False), counts=None)
    return kernel, {k: v for k, v in pointers.items() if k != "counts"}, consts, options


def base_decode() -> list[tuple]:
    """Of each format of lora.base; groups of values that lie in one block, and others."""
    import triton.language as tl

    k, found = base_decode_kernel, list[tuple]()
    for f in FORMATS.values():
        scales = "*u8" if f.double else {torch.float32: "*fp32", torch.bfloat16: BF}[f.scale]
        pointers = dict(stored="*u8", scales=scales, groups="*fp32", out=BF, values="*fp32", scale_values="*fp32")
        tables = dict(matrices="*i64", programs="*i32")
        sizes = dict(BITS=f.bits, HIGH=f.block[0], WIDE_BLOCK=f.block[1], DOUBLE=f.double, WIDE=tl.float32)
        tiles = dict(FIELDS=k.FIELDS, GROUPS=k.GROUPS, ROW=k.ROW)
        for aligned in (True, False):
            consts = sizes | tiles | dict(ALIGNED=aligned)
            found.append((k._decode, pointers | tables, consts, dict(num_warps=k.WARPS, enable_fp_fusion=False)))
    return found


def emulated_casts() -> list[tuple]:
    """Of MXFP8 and NVFP4, of blocks along features and along tokens."""
    found: list[tuple] = []
    for size, four_bits in ((32, False), (16, True)):
        for tokens in (False, True):
            lines, length = emulated.TILE[::-1] if tokens else emulated.TILE
            numbers = dict.fromkeys(("N", "K", "across", "C", "signs"), "i32")
            consts = dict(TOKENS=tokens, MIX=4 if tokens and four_bits else 0, SIZE=size, LINES=lines, LENGTH=length)
            found.append(
                (emulated._block_amax, dict(x=BF, out="*i32") | numbers, consts, dict(num_warps=emulated.WARPS))
            )
            given = dict(x=BF, multiplier="*fp32", out="*fp8e4nv", counts="*i64") | numbers | dict(k0="i32", k1="i32")
            more = dict(
                FOUR_BITS=four_bits,
                RANDOM=four_bits,
                NOTE=not tokens,
                MAX=6.0 if four_bits else 448.0,
                GRID=emulated.GRID,
                F0=emulated.FACTORS[0],
                F1=emulated.FACTORS[1],
                SLOTS=32,
                ROUND=False,
            )
            found.append((emulated._cast, given, consts | more, dict(num_warps=emulated.WARPS)))
    return found


def expert_quantizer() -> list[tuple]:
    """The same of experts."""
    found: list[tuple] = []
    like = torch.empty(0, 0, device="meta")
    rows = ExpertRows(*(like[0:0] for _ in range(5)))
    sources = (
        like,
        Gathered(like, rows, None),
        GatedRows(like, like, like),
        GatedRowsGrad(like, like, like, dy=like, sums=like),
    )
    for source in sources:
        for mode in range(7):
            if mode == casts.SQUARES and source is not like:
                continue  # of weights alone
            wide, amax = mode == casts.GIVEN, "*fp32" if mode == casts.GIVEN else "*i32"
            code, more = "*fp8e5" if wide else "*fp8e4nv", quantize_grouped_kernel.sources(source)[2]
            read = dict(x=BF, dy=BF, source="*i32", weights="*fp32", sums="*fp32", ends="*i32")
            outs = dict(
                row_amax=amax,
                col_amax=amax,
                out=code,
                other="*i32",
                row_scales="*fp32",
                col_scales="*fp32",
                counts="*i64",
            )
            t = quantize_grouped_kernel.tiles_of(source, mode)
            how = replace(cast_constants(mode, wide, t), per_expert=int(mode == casts.WHOLE))
            consts = dict(HOW=how, TILE=128, E_BLOCK=16)
            found.append(
                (
                    quantize_grouped_kernel._cast,
                    read | outs | dict.fromkeys("RCPE", "i32"),
                    consts | more,
                    dict(num_warps=t.warps),
                )
            )
            if mode in (casts.GIVEN, casts.BLOCKS):
                found.append(uncounted(found[-1]))
    for per_step, fast, by_row, run_of in ((False, True, False, 1), (False, False, True, 1), (True, False, True, 128)):
        c = (
            grouped_gemm_kernel.BY_BLOCK
            if per_step
            else grouped_gemm_kernel.FAST
            if fast
            else grouped_gemm_kernel.CAREFUL
        )
        tiles, run = (
            dict(BM=c.m, BN=c.n, BK=128, GROUP=c.group, HALVES=c.halves),
            dict(num_warps=c.warps, num_stages=c.stages, maxnreg=c.registers),
        )
        kinds, left = dict(PER_STEP=per_step, FAST=fast, E_BLOCK=16), "fp8e4nv" if by_row else "fp8e5"
        scales = dict(a_scales="*fp32", b_scales="*fp32")
        numbers = dict.fromkeys(
            ("R", "N", "K", "E", "b_rows", "b_cols", "a_row", "a_col", "b_expert", "b_row", "b_col"), "i32"
        )
        stored_kernel = dict(
            a=f"tensordesc<{left}[{c.m},128]>",
            b=f"tensordesc<fp8e4nv[{c.n >> c.halves},128]>",
            bias=BF,
            y=BF,
            ends="*i32",
        )
        more = dict(BY_ROW=by_row, BY_COL=by_row, RUN=run_of, BIAS=fast, FLATTEN=c.flatten)
        found.append((grouped_gemm_kernel._gemm, dict(**stored_kernel, **scales, **numbers), more | kinds | tiles, run))
        numbers = dict.fromkeys(("M", "N", "E", "dy_row", "dy_group", "x_row", "x_group"), "i32")
        stored_kernel = dict(
            dy=f"tensordesc<{left}[{c.m},128]>",
            x=f"tensordesc<fp8e4nv[{c.n >> c.halves},128]>",
            dw="*fp32",
            ends="*i32",
        )
        more = kinds | tiles | dict(BY_LINE=by_row, INTERPRETED=False)
        found.append(
            (
                grouped_gemm_kernel._gemm_dw,
                dict(**stored_kernel, dy_scales="*fp32", x_scales="*fp32", **numbers),
                more,
                run,
            )
        )
    return found


def relative_bias(wide: dict) -> list[tuple]:
    """Flash attention with the bias of T5, of heads of 64, then of 128."""
    import triton.language as tl

    made, found = relative_bias_kernel, []

    def strides(*names: str) -> dict:
        return dict.fromkeys((f"{x}_{d}" for x in names for d in ("seq", "head", "tok")), "i32")

    sums = dict(lse="*fp32", dots="*fp32")
    given = dict(q=BF, k=BF, v=BF, dout=BF, each="*fp32", first="*i32", stop="*i32")
    numbers = dict(heads="i32", group="i32", length="i32", scale="fp32")
    for dtype, width in ((BF, 64), (BF, 128), ("*fp16", 64)):
        narrow = {name: dtype for name in ("q", "k", "v", "dout", "out", "dq", "dk", "dv")}
        sizes = dict(WIDTH=width, WIDTH_BLOCK=width, VALUE=width, VALUE_BLOCK=width)
        sizes |= dict(FAR=128, INTERPRETED=False, WIDE=tl.float32)
        tiles = sizes | dict(TILE=made.TILE)
        read = given | narrow
        forward = {name: read[name] for name in ("q", "k", "v", "each", "first", "stop")}
        forward |= dict(out=dtype, lse="*fp32", **numbers, **strides(*"qkvo"))
        found.append((made._flash_bias_forward, forward, sizes | dict(QUERIES=made.QUERIES, KEYS=made.KEYS), made.MANY))
        of_values = {name: sizes[name] for name in ("VALUE", "VALUE_BLOCK", "WIDE")}
        dots = dict(dout=dtype, out=dtype, found="*fp32", heads="i32", length="i32", **strides("o"))
        found.append((made._flash_bias_dots, dots, of_values | dict(ROWS=made.TILE)))
        read = {name: read[name] for name in given} | sums
        more = numbers | dict(plain_scale="fp32") | strides(*"qkvo")
        queries = read | dict(dq=dtype, far_sums="*fp32", **more, **strides("d"))
        found.append((made._flash_bias_queries, queries, tiles, made.FEW))
        keys = read | dict(begins="*i32", ends="*i32", dk=dtype, dv=dtype, **more, **strides("dk", "dv"))
        found.append((made._flash_bias_keys, keys, tiles, made.FEW))
        near = read | dict(buckets="*i32", sums="*fp32", sequences="i32", least="i32", count="i32")
        found.append((made._flash_bias_near, near | numbers | strides(*"qkvo"), tiles, made.MANY))
    return found


def experts(wide: dict) -> list[tuple]:
    """Those of mixtures of experts. A tile on tensor cores needs the number of warps it was made for: the fourth
    entry."""
    import triton.language as tl

    found = []
    for dtype, tma in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True), (torch.float64, False)):
        c = grouped_kernel.tiles_of(dtype)
        name = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}[dtype]
        sizes = dict(TMA=tma, WIDE=tl.float64 if name == "fp64" else tl.float32, BM=c.m, BN=c.n, BK=c.k, GROUP=c.group)
        run, sums = dict(num_warps=c.warps, num_stages=c.stages), "*fp64" if name == "fp64" else "*fp32"

        def tile(*shape: int, tma: bool = tma, name: str = name) -> str:
            return f"tensordesc<{name}[{','.join(map(str, shape))}]>" if tma else f"*{name}"

        for transposed in (True, False):
            pointers = dict(
                x=tile(c.m, c.k),
                weight=tile(1, c.n, c.k) if transposed else tile(1, c.k, c.n),
                bias=f"*{name}",
                y=f"*{name}",
                ends="*i32",
            )
            more = dict(TRANSPOSED=transposed, BIAS=transposed, E_BLOCK=16, FLATTEN=c.flatten)
            found.append(
                (grouped_kernel._grouped_gemm, dict(**pointers, R="i32", N="i32", K="i32", E="i32"), sizes | more, run)
            )
        pointers = dict(dy=tile(c.k, c.m), x=tile(c.k, c.n), dw=sums, ends="*i32")
        found.append((grouped_kernel._grouped_gemm_dw, dict(**pointers, R="i32", M="i32", N="i32"), sizes, run))
    found.append(
        (grouped_kernel._grouped_sum, dict(dy=BF, db="*fp32", ends="*i32", N="i32"), dict(BR=64, BC=64, **wide))
    )
    sort = dict(COUNT=16, COUNT_BLOCK=16, BLOCK=256)
    found.append((permute_kernel._count, dict(experts="*i64", counts="*i32", pairs="i32", first="i32"), sort))
    pointers = dict.fromkeys(("counts", "sums", "source", "slot", "row", "ends"), "*i32")
    found.append(
        (
            permute_kernel._place,
            dict(experts="*i64", **pointers, **dict.fromkeys(("pairs", "first", "rows", "slots"), "i32")),
            sort,
        )
    )
    found.append((permute_kernel._gather, dict(x=BF, y=BF, row="*i32", D="i32"), dict(SLOTS=8, BLOCK=2048)))
    found.append(
        (
            permute_kernel._sum,
            dict(y=BF, weights="*fp32", out=BF, row="*i32", D="i32"),
            dict(SLOTS=8, WEIGH=True, BLOCK=2048, **wide),
        )
    )
    pointers = dict(dout=BF, y=BF, weights="*fp32", dy=BF, dweights="*fp32", row="*i32", D="i32")
    found.append((permute_kernel._weighted_backward, pointers, dict(SLOTS=8, BLOCK=2048, **wide)))
    form = dict(HERE=8, ETP=2, RANKS=8, SLOTS=8, K_BLOCK=8, BLOCK=2048)
    found.append((push_kernel._send_tokens, dict(x=BF, experts="*i64", addresses="*i64", first="i32", D="i32"), form))
    pointers = dict(y=BF, row="*i32", experts="*i64", addresses="*i64", tokens="i32", first="i32", index="i32", D="i32")
    found.append((push_kernel._send_sums, pointers, dict(**form, **wide)))
    found.append(
        (push_kernel._add_sums, dict(parts=BF, out=BF, experts="*i64", tokens="i32", D="i32"), dict(**form, **wide))
    )
    pointers = dict(
        logits="*fp32",
        bias="*fp32",
        samples="*i64",
        positions="*i64",
        experts_out="*i64",
        weights_out="*fp32",
        scores_out="*fp32",
    )
    form = dict(SIGMOID=True, AFTER=False, RENORMALIZE=True, SCALE=2.5, ROWS=4, E_BLOCK=256, E=256, K=8, **wide)
    for drawn in (False, True):
        choice = dict(GROUPS=8, TOP_GROUPS=4, DRAWN=drawn, BIAS=True, KEY=2**64 - 3, K_BLOCK=8)
        found.append((route_kernel._route, dict(**pointers, T="i32", layer="i32"), form | choice))
    pointers = dict(logits="*fp32", experts_in="*i64", dweights="*fp32", dscores="*fp32", dlogits="*fp32", T="i32")
    found.append((route_kernel._route_backward, pointers, form | dict(WEIGHTS=True, SCORES=True)))
    found.append(
        (route_kernel._route_backward, pointers, form | dict(WEIGHTS=True, SCORES=True, SIGMOID=False, AFTER=True))
    )
    return found


def chosen(which: str, part: str, parts: str) -> list[tuple]:
    """Every `parts`-th of them from number `part` on. layouts: each kernel in one form. whole: in all of them, and
    those that take long."""
    import triton.language as tl

    found = kernels()
    if which == "layouts":
        found = list({kernel[0].fn: kernel for kernel in reversed(found)}.values())
    else:
        found += deltas({"WIDE": tl.float32}, (True,))
    return found[int(part) :: int(parts)]


def with_layouts(source: ASTSource, options: dict) -> str:
    """The first third of compiling, which most mistakes do not survive: types are inferred, loops pipelined, layouts
    chosen. What is left is LLVM's and ptxas's."""
    backend, context = make_backend(TARGET), ir.context()
    parsed = backend.parse_options(options)
    ir.load_dialects(context)
    backend.load_dialects(context)
    made = source.make_ir(TARGET, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)
    stages: dict = {}
    backend.add_stages(stages, parsed, source.language)
    for stage in ("ttir", "ttgir"):
        made = stages[stage](made, {})
    return str(made)


def crossed(ttgir: str) -> str | None:
    """The line of a matmul whose left operand comes from a transposed result of another one; None: there is none."""
    come: set[str] = set()
    for line in ttgir.splitlines():
        found = re.match(r"\s*(%\S+) = (\S+) (.*?) : (.*)", line)
        if found is None:
            continue
        name, op, given, types = found.groups()
        operands = re.findall(r"%[\w#]+", given)
        if op == "tt.trans" and re.match(r"tensor<[^>]*, #(mma|linear)\d*>", types):
            come.add(name)
        elif op in ("ttng.warp_group_dot", "tt.dot") and operands[0] in come:
            if "xf64" not in types:  # not multiplied by groups of warps, on whose instruction it is wrong
                return line.strip()
        elif op.startswith(("arith.", "math.", "ttg.convert_layout", "ttg.local_")) and come & set(operands):
            come.add(name)
    return None


if __name__ == "__main__":
    which, *parts = sys.argv[1:] or ["whole"]
    for kernel, signature, constants, *options in chosen(which, *(parts or ("0", "1"))):
        types = {**signature, **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(kernel, types, constants, aligned(kernel.arg_names, types))
        wild = ""
        if which == "layouts":
            ttgir, size = with_layouts(source, dict(*options)), ""
        else:
            made = triton.compile(source, target=TARGET, options=dict(*options))
            ttgir, size = made.asm["ttgir"], f", {len(made.asm['cubin'])} bytes"
            wild = wrong_in(made.metadata_group)
            if made.metadata.shared > HOPPER_SHARED:
                sys.exit(f"{kernel.fn.__name__} has {made.metadata.shared} bytes of shared memory")
        wrong = crossed(ttgir) or wild
        if wrong:
            sys.exit(f"{kernel.fn.__name__} has a matmul that some versions of Triton miscompile: {wrong[:300]}")
        print(f"{kernel.fn.__name__}: sm_90{size}")
