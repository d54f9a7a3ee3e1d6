"""The first eight layers of Nemotron-H-8B, embedding and head, in plain PyTorch with the kernels of mamba-ssm and
flash-linear-attention: scans and gated norms by the one, convolutions by the other, attention by torch's SDPA, the rest
compiled by torch.compile. fp32 weights under bf16 autocast, fused AdamW, norm and clip every step: as plain.py.

python3 benchmarks/peers/hybrid.py [--small] [--eager] [--out rows.jsonl]
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from kernels import Missing, Steps, fla, fla_conv, mamba, mamba_norm, mamba_scan, plain_conv, plain_norm, plain_scan
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Sizes:
    """Of Nemotron-H-8B; pattern: M a scan, - an MLP, * attention."""

    pattern: str = "M-M-M-M*"
    vocab: int = 131072
    hidden: int = 4096
    inner: int = 21504
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    scan_heads: int = 128
    width: int = 64
    groups: int = 8
    state: int = 128
    taps: int = 4
    chunk: int = 128
    eps: float = 1e-5
    least_step: float = 0.001
    length: int = 8192
    batch: int = 8  # sequences of a step, one at a time


SMALL = Sizes("M-M*", 512, 64, 128, 4, 2, 16, 4, 16, 2, 16, 4, 16, 1e-5, 0.001, 64, 2)


@dataclass(frozen=True)
class ByKernels:
    """What scans, norms after them and convolutions are computed by."""

    name: str
    scan: Callable[[Steps, int], Tensor]
    norm: Callable[[Tensor, Tensor, Tensor, int, float], Tensor]
    conv: Callable[[Tensor, Tensor, Tensor | None], Tensor]


PLAIN = ByKernels("plain torch", plain_scan, plain_norm, plain_conv)


def fast() -> ByKernels:
    """Missing if they cannot be used."""
    name = f"{mamba()[0]} + {fla()[0]} + SDPA + torch.compile"
    outside = torch.compiler.disable  # kernels of their own, which dynamo need not see
    return ByKernels(name, outside(mamba_scan), outside(mamba_norm), outside(fla_conv))


class Scan(nn.Module):
    def __init__(self, s: Sizes, by: ByKernels):
        super().__init__()
        self.s, self.by = s, by
        inner = s.scan_heads * s.width
        self.mixed = inner + 2 * s.groups * s.state
        self.in_proj = nn.Linear(s.hidden, inner + self.mixed + s.scan_heads, bias=False)
        self.conv = nn.Parameter(torch.empty(self.mixed, s.taps))
        self.conv_bias = nn.Parameter(torch.empty(self.mixed))
        self.dt_bias, self.a_log, self.d = (nn.Parameter(torch.empty(s.scan_heads)) for _ in range(3))
        self.norm = nn.Parameter(torch.empty(inner))
        self.out_proj = nn.Linear(inner, s.hidden, bias=False)

    def start(self) -> None:
        nn.init.uniform_(self.conv, -0.5, 0.5)
        nn.init.zeros_(self.conv_bias)
        nn.init.constant_(self.dt_bias, -4.0)  # steps of about 0.02
        with torch.no_grad():
            self.a_log.copy_(torch.arange(1, len(self.a_log) + 1).log())
        nn.init.ones_(self.d)
        nn.init.ones_(self.norm)

    def forward(self, x: Tensor) -> Tensor:
        s = self.s
        inner, shared = s.scan_heads * s.width, s.groups * s.state
        gate, mixed, dt = self.in_proj(x).split((inner, self.mixed, s.scan_heads), -1)
        mixed = self.by.conv(mixed, self.conv.to(mixed.dtype), self.conv_bias.to(mixed.dtype))
        x, b, c = mixed.split((inner, shared, shared), -1)
        b, c = (t.unflatten(-1, (s.groups, -1)) for t in (b, c))
        limits = s.least_step, float("inf")
        steps = Steps(x.unflatten(-1, (-1, s.width)), dt, -self.a_log.exp(), b, c, self.d, self.dt_bias, limits)
        y = self.by.scan(steps, s.chunk).flatten(2)
        return self.out_proj(self.by.norm(y, gate, self.norm.to(y.dtype), s.groups, s.eps))


class Attention(nn.Module):
    def __init__(self, s: Sizes):
        super().__init__()
        self.s = s
        self.qkv = nn.Linear(s.hidden, (s.heads + 2 * s.kv_heads) * s.head, bias=False)
        self.out = nn.Linear(s.heads * s.head, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        s = self.s
        q, k, v = self.qkv(x).unflatten(-1, (-1, s.head)).transpose(1, 2).split((s.heads, s.kv_heads, s.kv_heads), 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s.heads != s.kv_heads)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, s: Sizes):
        super().__init__()
        self.up = nn.Linear(s.hidden, s.inner, bias=False)
        self.down = nn.Linear(s.inner, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Hybrid(nn.Module):
    def __init__(self, s: Sizes, by: ByKernels):
        super().__init__()
        self.s = s
        self.embed = nn.Embedding(s.vocab, s.hidden)
        made = {"M": lambda: Scan(s, by), "*": lambda: Attention(s), "-": lambda: MLP(s)}
        self.mixers = nn.ModuleList(made[kind]() for kind in s.pattern)
        self.norms = nn.ModuleList(nn.RMSNorm(s.hidden, eps=s.eps) for _ in s.pattern)
        self.norm = nn.RMSNorm(s.hidden, eps=s.eps)
        self.head = nn.Linear(s.hidden, s.vocab, bias=False)

    def start(self) -> None:
        for p in self.parameters():
            nn.init.normal_(p, std=0.02) if p.dim() > 1 else nn.init.ones_(p)
        for mixer in self.mixers:
            if isinstance(mixer, Scan):
                mixer.start()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy."""
        x = self.embed(ids)
        for norm, mixer in zip(self.norms, self.mixers):
            x = x + mixer(norm(x))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def measure(small: bool, warmup: int, steps: int, eager: bool) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    s, by = (SMALL if small else Sizes()), (fast() if device == "cuda" else PLAIN)
    torch.manual_seed(1)
    with torch.device(device):
        model = Hybrid(s, by)
    model.start()
    if not eager and device == "cuda":
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    draws = torch.Generator(device).manual_seed(100)
    losses: list[Tensor] = []

    def step() -> None:
        total = torch.zeros((), device=device)
        for _ in range(s.batch):
            ids = torch.randint(s.vocab, (1, s.length + 1), generator=draws, device=device)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                with sdpa_kernel(BACKENDS, set_priority=True):
                    loss = model(ids[:, :-1], ids[:, 1:].contiguous()) / s.batch
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)

    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    seconds = []
    for number in range(warmup + steps):
        wait()
        if number == warmup and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        step()
        wait()
        seconds.append(time.perf_counter() - began)
    took = median(seconds[warmup:])
    return {
        "by": by.name + (", eager" if eager else ""),
        "step_ms": 1e3 * took,
        "tokens_per_s": s.batch * s.length / took,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "losses": [losses[0].item(), losses[-1].item()],
        "torch": torch.__version__,
    }


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """If torch.compile cannot do it, without."""
    how = options.small, options.warmup, options.steps
    try:
        return measure(*how, eager=options.eager)
    except Missing:
        raise
    except Exception as error:  # of a compiler that is not ours, for whatever reason
        if options.eager:
            raise
        why = f"{type(error).__name__}: {error}"[:300]
    gc.collect()
    torch.cuda.empty_cache()
    return {**measure(*how, eager=True), "not compiled": why}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="five small layers; on a CPU without their kernels")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", help="append the result to this file, a line of JSON")
    options = parser.parse_args()
    try:
        found = measured(options)
    except Missing as why:
        found = {"by": "peer", "missing": str(why)}
    print(json.dumps(found), flush=True)
    if options.out:
        with open(options.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
