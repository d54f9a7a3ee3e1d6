"""What the device can do, measured now: its GEMM at a model's shapes, its memory, its attention. Other measurements are
compared with this."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F

from phalanx.base.dataclass import dataclass
from phalanx.base.dtypes import precision
from phalanx.bench.timing import calls_in, measure
from phalanx.config.run import Run

WARM_S = {"cuda": 0.3, "cpu": 0.05}  # how long a GPU is kept busy first: its rate drops to what its power limit allows
RUN_S = 0.06  # then each measurement lasts about this long
COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}
GEMM_SIZE = {"cuda": 8192, "cpu": 512}  # rows, columns and inner size of a matmul that stands for no model
# of a micro-batch and of a sequence, in what is measured: rates grow no further, memory and time do
MOST_TOKENS = 2**16


@dataclass(frozen=True)
class Ceilings:
    """gemm: FLOP/s over the linears of a layer, weighted by their size. copy: bytes/s read plus written. attention:
    FLOP/s forward and backward, where causal counts half the square and backward counts as 2.5 forwards (it recomputes
    the scores)."""

    gemm: float
    copy: float
    attention: float
    shapes: dict[str, float]  # GEMM shape -> FLOP/s

    def lines(self) -> list[str]:
        shapes = ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in self.shapes.items())
        return [
            f"ceilings measured in this run: GEMM {self.gemm / 1e12:.4g} TFLOP/s, memory copy "
            f"{self.copy / 1e9:.4g} GB/s, "
            f"attention {self.attention / 1e12:.4g} TFLOP/s forward and backward",
            f"GEMM by shape (tokens x in -> out), TFLOP/s: {shapes}",
        ]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_ceilings(run: Run, device: torch.device) -> Ceilings:
    dtype = precision(run.train.precision).compute
    flop = {shape: 2.0 * shape[0] * shape[1] * shape[2] for shape in gemm_shapes(run)}
    rates = {shape: _gemm(*shape, dtype, device) for shape in flop}
    gemm = sum(flop.values()) / sum(flop[s] / rates[s] for s in flop)
    names = {f"{t} x {i} -> {o}": rates[t, i, o] for t, i, o in rates}
    return Ceilings(gemm, copy_rate(device), attention_rate(run, dtype, device), names)


def gemm_shapes(run: Run) -> list[tuple[int, int, int]]:
    """(tokens, in, out) of one layer's linears on one rank of the layout, for at most MOST_TOKENS."""
    m, tp = run.model, run.layout.tp
    tokens, heads = min(MOST_TOKENS, run.train.micro_batch * run.train.seq_length), m.num_attention_heads
    head = getattr(m, "head_dim", None) or m.hidden_size // heads
    kv = getattr(m, "num_key_value_heads", None) or heads
    inner = m.intermediate_size or 4 * m.hidden_size
    gated = 2 if m.gated_mlp else 1
    q = heads * head // tp
    return [
        (tokens, m.hidden_size, q + 2 * max(1, kv // tp) * head),
        (tokens, q, m.hidden_size),
        (tokens, m.hidden_size, gated * inner // tp),
        (tokens, inner // tp, m.hidden_size),
    ]


def gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matmul."""
    return _gemm(*(GEMM_SIZE[device.type],) * 3, dtype, device)


def _gemm(tokens: int, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of x W^T, random values (zeros would run faster: they need less power)."""
    x, w = (torch.randn(n, inputs, device=device, dtype=torch.float32).to(dtype) for n in (tokens, outputs))
    out = torch.empty(tokens, outputs, dtype=dtype, device=device)
    seconds = _sustained(lambda: torch.mm(x, w.t(), out=out), device)
    return 2.0 * tokens * inputs * outputs / seconds


def _sustained(call: Any, device: torch.device) -> float:
    """Seconds per call after running for a while."""
    began = time.perf_counter()
    batch = calls_in(RUN_S, measure(call, device, warmup=1, repeats=3).median)
    while time.perf_counter() - began < WARM_S[device.type]:
        measure(call, device, warmup=0, repeats=1, batch=batch)
    times = measure(call, device, warmup=0, repeats=5, batch=batch)
    # a CPU is shared with others, so its best time is what it can do
    return times.median if device.type == "cuda" else times.low


def copy_rate(device: torch.device) -> float:
    """Bytes/s read plus written by a copy within the device's memory."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    to = torch.empty_like(source)
    return 2.0 * source.numel() / measure(lambda: to.copy_(source), device).low


def attention_rate(run: Run, dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of causal attention as torch runs it, at the model's heads and length (at most MOST_TOKENS)."""
    m, train = run.model, run.train
    length = min(MOST_TOKENS, train.seq_length)
    heads = max(1, m.num_attention_heads // run.layout.tp)
    size = getattr(m, "head_dim", None) or m.hidden_size // m.num_attention_heads
    q, k, v = (
        torch.randn(train.micro_batch, heads, length, size, device=device).to(dtype).requires_grad_() for _ in range(3)
    )
    grad = torch.randn(q.shape, device=device).to(dtype)

    def both() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(grad)
        q.grad = k.grad = v.grad = None

    return attention_flop(train.micro_batch, heads, length, size) * 3.5 / _sustained(both, device)


def attention_flop(sequences: int, heads: int, length: int, size: int) -> float:
    """Of causal attention's forward, half the square: two products of (length x size) by (size x length)."""
    return 2.0 * sequences * heads * length * length * size
