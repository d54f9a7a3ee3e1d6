"""The gated delta rule in chunks. Only states go from chunk to chunk; all else is computed by all chunks at once.

    forward    decay_sums (decays by feature)   prepare_chunks: T and P   pass_states: states before chunks, u   outputs
    backward   the first two again   pass_back: gradients of states after chunks, dx   value_grads, key_grads, or
               grads_by_feature

The kernels are in the files beside this one, which is what calls them.

Names as in the reference: with S the state before a chunk, k~, q~ keys and queries that read it, k^ keys as they are
left at the end,

    T = (1 + A)^-1     x = beta (v - k~ S)     u = T x     y = q~ S + P u     S' = passed S + k^^T u
    du = P^T dy + k^ dS'     dx = T^T du     dS = passed dS' + q~^T dy - k~^T (beta dx)
    dP = dy u^T     dA = - dx u^T     dq~ = dy S^T     dk~ = - (beta dx) S^T     dk^ = u dS'^T     dv = beta dx

With one decay of each head, lengths of keys and what is left of them are factors of whole tokens: they multiply rows
and columns of matmuls of q and k as they are stored. With decays by feature, products of tokens t and s are taken with
what is left of both since a token between them, so that no exponent is above 0: pairs in different halves of a chunk
since the end of the first half, pairs in different quarters of a half likewise, down to neighbours (LEVELS matmuls).

States are kept transposed, (V, K): then every matmul of the passes has its left operand in registers, from the matmul
before it. T is computed in fp32 by substitution in blocks of 16 tokens, which are then joined two by two (in TF32 where
T is rounded to 16 bits afterwards).
Powers of A, by which it can be had in fewer steps, grow like binomials where keys are alike.

The least that moves, for 32,768 tokens, 16 heads of keys and 32 of values of 128 in bf16: forward reads q, k, v and
writes y (0.8 GB), T and P (0.3 GB, read once or twice), u and the states (0.8 GB, written and read): 2.7 GB; backward
4.5 GB. Matmuls: 0.19 TFLOP forward, 0.5 backward. On an H200 (4.8 TB/s; 0.99 PFLOP/s in bf16) bytes take 0.56 and 0.94
ms, matmuls 0.19 and 0.5 ms. What both do not contain is the latency of the passes: 512 chunks, one after another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.ops.delta.delta import BLOCK, CHUNK, EPS, DeltaGrads, DeltaInputs, DeltaTiles
from phalanx.ops.delta.feature_grads_kernel import grads_by_feature
from phalanx.ops.delta.head_grads_kernel import key_grads, query_grads, value_grads
from phalanx.ops.delta.prepare_kernel import decay_sums, prepare_chunks
from phalanx.ops.delta.states_kernel import outputs, pass_back, pass_states
from phalanx.ops.kernel_tools import triton_wide, wide_of

LEAST = 16  # rows and columns of a matmul's operands
LEVELS = CHUNK.bit_length() - 1
REGISTERS = 128  # of a thread that computes T: what waits is the substitution, and four programs fit into a processor


def _last_two(x: Tensor) -> Tensor:
    """The same, contiguous in its last two dims."""
    return x if x.stride(3) == 1 and x.stride(2) == x.shape[3] else x.contiguous()


ELEMENTS = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


class DeltaChunks:
    """What the kernels of a delta rule are given, and what is computed for all chunks at once."""

    def __init__(self, s: DeltaInputs, tiles: DeltaTiles):
        self.inputs, self.tiles = s, tiles
        self.q, self.k, self.v = (_last_two(t) for t in (s.q, s.k, s.v))
        self.decay, self.beta = s.decay.contiguous(), s.beta.contiguous()
        self.numbers = None if s.numbers is None else s.numbers.contiguous()
        (self.rows, self.length, self.heads, self.width), (self.key_heads, self.features) = s.v.shape, s.k.shape[2:]
        self.chunks, self.wide = -(-self.length // CHUNK), wide_of(s.v.dtype)
        self.by_feature, self.precision = s.by_feature, "ieee" if self.wide == torch.float64 else "tf32x3"
        of_tokens = (self.rows, self.length, self.heads)
        of_chunks = (self.chunks, self.rows, self.heads)
        self.read: Tensor | None
        self.write: Tensor | None
        self.ask: Tensor | None
        self.reading: Tensor | None
        self.inverse, self.weights = (self.like(*of_chunks, CHUNK, CHUNK) for _ in range(2))
        if self.by_feature:
            self.sums, self.passed = self.empty(*of_tokens, self.features), self.empty(*of_chunks, self.features)
            self.reading, self.writing, self.asking = (self.like(*of_tokens, self.features) for _ in range(3))
            self.read, self.write, self.ask = None, None, None
        else:
            self.sums, self.passed = self.empty(*of_tokens), self.empty(*of_chunks)
            self.read, self.write, self.ask = (self.empty(*of_tokens) for _ in range(3))
            self.reading, self.writing, self.asking = None, self.k, self.q
        self.prepare()

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.wide, device=self.v.device)

    def like(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.v.dtype, device=self.v.device)

    def strides(self, *tensors: Tensor) -> list[int]:
        return [n for t in tensors for n in (t.stride(0), t.stride(1))]

    @property
    def arithmetic(self) -> dict[str, Any]:
        block = max(LEAST, triton.next_power_of_2(self.features))
        sizes = dict(H=self.heads, K=self.features, EACH=self.heads // self.key_heads, C=CHUNK, BK=block)
        return dict(ELEMENT=ELEMENTS[self.v.dtype], WIDE=triton_wide(self.wide), PRECISION=self.precision, **sizes)

    @property
    def how(self) -> dict[str, Any]:
        return dict(NORMALIZE=self.inputs.normalize, EPSILON=EPS, DOCUMENTS=self.numbers is not None)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Rows come first: of the others a GPU takes 65,535 at most."""
        return self.rows, self.heads, self.chunks

    def block(self, most: int) -> int:
        """Features of values that a program has: fewer of 32 bits, as shared memory has room for."""
        most = most * 2 // max(2, self.v.dtype.itemsize)
        return max(LEAST, min(most, triton.next_power_of_2(self.width)))

    def warps(self, wanted: int, block: int) -> int:
        """Of a program whose tiles have so many features of values: those of fewer than 64 are too narrow for eight
        warps, for which ptxas takes their addresses from a wrong register (ops.delta.delta.TILES)."""
        narrow = min(block, self.arithmetic["BK"]) < CHUNK
        return min(4, wanted) if narrow else wanted

    def stages(self, wanted: int) -> int:
        return wanted if self.v.dtype.itemsize == 2 else 1

    def prepare(self) -> None:
        s, strides = self.inputs, self.strides(self.q, self.k)
        if self.by_feature:
            decay_sums[self.grid](
                self.q,
                self.k,
                self.decay,
                self.numbers,
                self.sums,
                self.reading,
                self.writing,
                self.asking,
                self.passed,
                s.scale,
                self.length,
                *strides,
                **self.how,
                **self.arithmetic,
                num_warps=4,
            )
        prepare_chunks[self.grid](
            self.q,
            self.k,
            self.decay,
            self.beta,
            self.numbers,
            self.sums,
            self.inverse,
            self.weights,
            self.read,
            self.write,
            self.ask,
            self.passed,
            s.scale,
            self.length,
            *strides,
            BY_FEATURE=self.by_feature,
            DEPTH=LEVELS,
            B=BLOCK,
            JOIN="tf32" if self.v.dtype.itemsize == 2 else self.precision,
            **self.how,
            **self.arithmetic,
            num_warps=4,
            maxnreg=None if self.by_feature else REGISTERS,
        )

    def over_states(self, features: int) -> tuple[tuple[int, int, int], dict[str, Any]]:
        """The grid and sizes of kernels that follow so many features of states or gradients from chunk to chunk."""
        block = self.block(features)
        sizes = dict(BY_FEATURE=self.by_feature, V=self.width, BV=block, **self.arithmetic)
        how = dict(num_warps=self.tiles.warps, num_stages=self.stages(self.tiles.stages))
        return (self.rows, self.heads, triton.cdiv(self.width, block)), dict(**sizes, **how)


class DeltaBuffers(NamedTuple):
    """Of a backward: the gradient of y; states before, and gradients of states after chunks; and what the gradients of
    values (dx so far), decays and beta are written to."""

    dy: Tensor
    before: Tensor
    after: Tensor
    dv: Tensor
    ddecay: Tensor
    dbeta: Tensor


class DeltaKernels:
    """The op's members with tiles of a kind."""

    def __init__(self, tiles: DeltaTiles):
        self.tiles = tiles

    def delta_forward(self, s: DeltaInputs) -> tuple[Tensor, Tensor, Tensor]:
        """As the reference; states before chunks are in the dtype of v, as (chunks, R, HV, V, K)."""
        call = DeltaChunks(s, self.tiles)
        states = call.like(call.chunks, call.rows, call.heads, call.width, call.features)
        u = call.like(*s.v.shape)
        final = call.empty(*s.state_shape)
        initial = None if s.initial is None else s.initial.contiguous()
        grid, sizes = call.over_states(self.tiles.values)
        pass_states[grid](
            initial,
            call.writing,
            call.reading,
            call.v,
            call.beta,
            call.inverse,
            call.read,
            call.write,
            call.passed,
            states,
            u,
            final,
            call.length,
            call.chunks,
            *call.strides(call.writing, call.v),
            INITIAL=initial is not None,
            **sizes,
        )
        y, block = call.like(*s.v.shape), call.block(self.tiles.outputs)
        outputs[call.rows, call.heads, call.chunks * triton.cdiv(call.width, block)](
            call.asking,
            call.ask,
            call.weights,
            states,
            u,
            y,
            call.length,
            call.chunks,
            *call.strides(call.asking),
            BY_FEATURE=call.by_feature,
            V=call.width,
            BV=block,
            **call.arithmetic,
            num_warps=4,
        )
        return y, final, states

    def delta_backward(self, dy: Tensor, dstate: Tensor | None, s: DeltaInputs, before: Tensor) -> DeltaGrads:
        """As the reference."""
        call, dy = DeltaChunks(s, self.tiles), dy.contiguous()
        after, dv, dinitial = torch.empty_like(before), call.like(*s.v.shape), call.empty(*s.state_shape)
        given = None if dstate is None else dstate.contiguous()
        grid, sizes = call.over_states(self.tiles.back)
        pass_back[grid](
            given,
            dy,
            call.asking,
            call.writing,
            call.reading,
            call.beta,
            call.inverse,
            call.weights,
            call.read,
            call.write,
            call.ask,
            call.passed,
            after,
            dv,
            dinitial,
            call.length,
            call.chunks,
            *call.strides(call.asking, call.writing),
            FINAL=given is not None,
            **sizes,
        )
        ddecay, dbeta = call.empty(*s.decay.shape), call.empty(*s.beta.shape)
        found = self.by_feature if call.by_feature else self.by_head
        dq, dk = found(call, DeltaBuffers(dy, before, after, dv, ddecay, dbeta))
        return DeltaGrads(dq, dk, dv, ddecay, dbeta, None if s.initial is None else dinitial.to(s.initial.dtype))

    def by_head(self, call: DeltaChunks, b: DeltaBuffers) -> tuple[Tensor, Tensor]:
        s = call.inputs
        dq, dk = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (s.q, s.k))
        u = call.like(*s.v.shape)
        of_reads, of_queries, of_inside = (call.empty(*s.beta.shape) for _ in range(3))
        strides = call.strides(call.q, call.k)
        block = call.block(self.tiles.grads)
        how = dict(V=call.width, BV=block, **call.how, **call.arithmetic)
        how |= dict(num_warps=call.warps(self.tiles.grad_warps, block), num_stages=call.stages(self.tiles.grad_stages))
        value_grads[call.grid](
            b.dy,
            call.q,
            call.k,
            call.v,
            call.beta,
            call.numbers,
            call.sums,
            call.inverse,
            call.weights,
            call.read,
            b.before,
            u,
            of_reads,
            of_inside,
            b.dv,
            b.dbeta,
            s.scale,
            call.length,
            *strides,
            *call.strides(call.v),
            **how,
        )
        of_key_heads = call.rows, call.key_heads, call.chunks
        query_grads[of_key_heads](
            b.dy,
            call.q,
            call.k,
            call.weights,
            call.ask,
            b.before,
            of_queries,
            dq,
            call.length,
            *strides,
            **how,
        )
        key_grads[of_key_heads](
            call.q,
            call.k,
            call.numbers,
            call.inverse,
            call.weights,
            call.read,
            call.write,
            call.passed,
            b.before,
            b.after,
            u,
            of_reads,
            of_queries,
            of_inside,
            dk,
            b.dv,
            b.ddecay,
            call.length,
            *strides,
            **how,
        )
        return dq, dk

    def by_feature(self, call: DeltaChunks, b: DeltaBuffers) -> tuple[Tensor, Tensor]:
        s, each, block = call.inputs, call.heads // call.key_heads, call.block(self.tiles.grads)
        of_tokens = (call.rows, call.length, call.heads, call.features)
        dq, dk = (call.like(*of_tokens) if each == 1 else call.empty(*of_tokens) for _ in range(2))
        grads_by_feature[call.grid](
            b.dy,
            call.q,
            call.k,
            call.v,
            call.beta,
            call.numbers,
            call.sums,
            call.inverse,
            call.weights,
            call.reading,
            call.passed,
            b.before,
            b.after,
            dq,
            dk,
            b.dv,
            b.ddecay,
            b.dbeta,
            s.scale,
            call.length,
            *call.strides(call.q, call.k, call.v),
            DEPTH=LEVELS,
            V=call.width,
            BV=block,
            **call.how,
            **call.arithmetic,
            num_warps=call.warps(8, block),  # twice as many sums by feature as by_head has
            num_stages=call.stages(self.tiles.grad_stages),
        )
        if each > 1:
            dq, dk = (t.unflatten(2, (call.key_heads, each)).sum(3).to(s.q.dtype) for t in (dq, dk))
        return dq, dk
