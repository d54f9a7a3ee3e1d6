"""Checks of the ops of mixtures of experts on one device, for tests/gpu/checks.py. On the CPU the reference
implementations run against themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields

import torch
from torch import Tensor

from phalanx.ops.dense.activation import gated_rows
from phalanx.ops.dense.gate import CLAMPED_SWIGLU, SWIGLU, Gate
from phalanx.ops.experts import push
from phalanx.ops.experts.grouped import grouped_matmul
from phalanx.ops.experts.permute import combine_rows, gather_rows, plan_rows, row_weights
from phalanx.ops.experts.route import route
from phalanx.ops.experts.router import Router
from phalanx.ops.experts.spread import Spread
from phalanx.ops.op import Kernels
from tests.gpu.truth import ROUNDINGS, within
from tests.ops.test_expert_ops import ROUTERS, spoil
from tests.ops.test_ops import normal
from tests.ops.test_push import Held

EXPERTS, FIRST, HERE, SLOTS = 64, 16, 16, 8


def twin_on(device: torch.device, kernels: Kernels) -> Kernels:
    return kernels if device.type == "cuda" else "plain"


@contextmanager
def no_host_sync(device: torch.device) -> Iterator[None]:
    """Raise where the host would wait for the GPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def routing(tokens: int) -> Tensor:
    return torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(tokens)).argsort(-1)[:, :SLOTS]


def route_check(router: Router, dtype: torch.dtype, tokens: int, bound: float) -> Callable[[torch.device], str]:
    """Against the reference implementation on the CPU: the same experts, weights and probabilities, and the gradient by
    both."""

    def check(device: torch.device) -> str:
        logits, bias = (
            normal(tokens, router.num_experts, dtype=dtype),
            normal(router.num_experts, seed=1, dtype=dtype) * 0.1,
        )
        rows = torch.arange(tokens) // 100 + 2**33, torch.arange(tokens) % 100
        ups = normal(tokens, router.top_k, seed=2, dtype=dtype), normal(tokens, router.num_experts, seed=3, dtype=dtype)
        found = []
        for where, kernels in ((device, twin_on(device, "triton")), (torch.device("cpu"), "plain")):
            x = logits.to(where).requires_grad_()
            choice = route(x, router, bias.to(where), tuple(r.to(where) for r in rows), 3, kernels)
            ((choice.weights_TK * ups[0].to(where)).sum() + (choice.scores_TE * ups[1].to(where)).sum()).backward()
            found.append((choice.experts_TK, choice.weights_TK, choice.scores_TE, x.grad))
        if not torch.equal(found[0][0].cpu(), found[1][0]):
            raise AssertionError(f"{(found[0][0].cpu() != found[1][0]).sum()} experts differ")
        return f"{max(within(f'{i}', a, b.detach().double(), bound) for i, (a, b) in enumerate(zip(found[0][1:], found[1][1:]))):.1e}"  # noqa: E501

    return check


def plan_check(tokens: int, room: float) -> Callable[[torch.device], str]:
    """The sort of the pairs equals the stable sort on the CPU in every number."""

    def check(device: torch.device) -> str:
        experts, rows = routing(tokens), int(room * tokens * SLOTS * HERE / EXPERTS)
        truth = plan_rows(experts, FIRST, HERE, rows, "plain")
        found = plan_rows(experts.to(device), FIRST, HERE, rows, twin_on(device, "triton"))
        wrong = [f.name for f in fields(truth) if not torch.equal(getattr(truth, f.name), getattr(found, f.name).cpu())]
        if wrong:
            raise AssertionError(f"not as planned: {', '.join(wrong)}")
        return f"{int(truth.ends_E[-1])} of {rows} rows"

    return check


def grouped_check(
    dtype: torch.dtype, inner: int, outer: int, kernels: Kernels, biased: bool
) -> Callable[[torch.device], str]:
    """Against the reference implementation in float64 on the same device; uneven experts, one empty, padding of NaN,
    gradients on top of buffers."""

    def check(device: torch.device) -> str:
        stops = torch.tensor([300, 1711, 1711, 1712, 3000, 3128, 3129, 4990]).int().to(device)
        values = [
            normal(*s, seed=i, dtype=dtype).to(device)
            for i, s in enumerate(((5100, inner), (8, outer, inner), (8, outer), (5100, outer)))
        ]
        for padded in (values[0], values[3]):
            padded[4990:] = torch.nan
        found = []
        for kind, twin in ((dtype, twin_on(device, kernels)), (torch.float64, "plain")):
            x, weight, bias, dy = (v.detach().to(kind, copy=True) for v in values)
            wide = torch.float64 if kind == torch.float64 else torch.float32
            for p in (weight.requires_grad_(), bias.requires_grad_()):
                p.grad_dtype, p.grad = wide, torch.full(p.shape, 3.0, dtype=wide, device=device)
            y = grouped_matmul(x.requires_grad_(), weight, stops, twin, bias if biased else None)
            y.backward(dy)
            found.append([y.detach()[:4990], x.grad[:4990], weight.grad, bias.grad])
        sums = {torch.float64: 1e-11}.get(dtype, 1e-5)  # bf16 products are exact in fp32: only the sum rounds
        bounds = (ROUNDINGS[dtype], ROUNDINGS[dtype], sums, sums)
        return f"{max(within(f'{i}', a, b.cpu(), bound) for i, (a, b, bound) in enumerate(zip(*found, bounds))):.1e}"

    return check


def layer_check(
    kernels: Kernels, gate: Gate, weigh_rows: bool, size: tuple[int, int, int]
) -> Callable[[torch.device], str]:
    """All ops of a layer in bf16, a quarter of the experts here: within bf16's rounding of float64, twice the same
    bits, no wait of the host."""

    def once(device: torch.device, dtype: torch.dtype, twin: Kernels, inputs: list[Tensor]) -> list[Tensor]:
        x, weights, gate_up, down = (t.to(device, dtype, copy=True).requires_grad_() for t in inputs)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for p in (gate_up, down):
            p.grad_dtype, p.grad = wide, torch.zeros(p.shape, dtype=wide, device=device)
        tokens = len(x)
        experts, dy = routing(tokens).to(device), normal(*x.shape, seed=99, dtype=torch.bfloat16).to(device, dtype)
        with no_host_sync(device if twin != "plain" else torch.device("cpu")):
            rows = plan_rows(experts, FIRST, HERE, tokens * SLOTS // 2, twin)
            weights_R = row_weights(weights, rows) if weigh_rows else None
            gathered = spoil(gather_rows(x, rows, twin), rows)
            hidden = spoil(
                gated_rows(
                    spoil(grouped_matmul(gathered, gate_up, rows.ends_E, twin), rows),
                    rows.ends_E,
                    weights_R,
                    gate,
                    twin,
                ),
                rows,
            )
            out = spoil(grouped_matmul(hidden, down, rows.ends_E, twin), rows)
            y = combine_rows(out, None if weigh_rows else weights, rows, tokens, twin)
            y.backward(dy)
        return [y.detach(), x.grad, weights.grad, gate_up.grad, down.grad]

    def check(device: torch.device) -> str:
        tokens, width, inner = size if device.type == "cuda" else (30, 64, 48)
        shapes = ((tokens, width), (tokens, SLOTS), (HERE, 2 * inner, width), (HERE, width, inner))
        inputs = [
            normal(*s, seed=i, dtype=torch.bfloat16) * (0.03 if len(s) == 3 else 1.0) for i, s in enumerate(shapes)
        ]
        twin = twin_on(device, kernels)
        truth = once(device, torch.float64, "plain", inputs)
        first, recomputed = (once(device, torch.bfloat16, twin, inputs) for _ in range(2))
        if not all(torch.equal(a, b) for a, b in zip(first, recomputed)):
            raise AssertionError("twice the same inputs gave different bits")
        if gate.limit < float(
            "inf"
        ):  # a value that rounding takes over the edge of the clamp changes its gradient whole
            worst = max(
                ((a.double() - b).norm() / b.norm()).item()
                for a, b in zip((t.cpu() for t in first), (t.cpu() for t in truth))
            )
            if not worst <= 2.0**-6:
                raise AssertionError(f"off by {worst:.2e} in norm (bound {2.0**-6:.2e})")
            return f"{worst:.1e} in norm, bit-equal"
        return (
            f"{max(within(f'{i}', a, b.cpu(), 2.0**-5) for i, (a, b) in enumerate(zip(first, truth))):.1e}, bit-equal"
        )

    return check


def push_check(tokens: int, width: int, etp: int) -> Callable[[torch.device], str]:
    """Kernels that write to four ranks' memory, all of it on this device, against their reference implementations:
    every number, unwritten places too."""

    def check(device: torch.device) -> str:
        ranks, index = 4, 2
        spread, dtype = Spread(EXPERTS // (ranks // etp), etp, ranks, index), torch.bfloat16
        count, wide = (tokens, width) if device.type == "cuda" else (20, 48)
        everyones = torch.cat([routing(count).roll(r, 0) for r in range(ranks)]).to(device)
        mine = everyones[index * count : (index + 1) * count]
        rows = plan_rows(everyones, spread.first, spread.here, ranks * count * SLOTS // 4, "plain")
        x, y = (
            normal(count, wide, dtype=dtype).to(device),
            normal(len(rows.source_R), wide, seed=1, dtype=dtype).to(device),
        )
        parts = normal(ranks * count, wide, seed=2, dtype=dtype).to(device)
        found = []
        for module in (push.PUSH.choose("triton" if device.type == "cuda" else "plain", torch.ones(1)), push):
            there, back = (
                Held([x.new_full((ranks * count, wide), 7.0) for _ in range(ranks)], index, count) for _ in range(2)
            )
            module.send_tokens(x, mine, spread, there)
            module.send_sums(y, rows, everyones, spread, back)
            found.append([*there.wholes, *back.wholes, module.add_sums(parts, mine, spread)])
        differing = sum((a != b).sum().item() for a, b in zip(*found))
        if differing:
            raise AssertionError(f"{differing} numbers differ")
        return (
            f"{sum((a != 7.0).any(1).sum().item() for a in found[0][:ranks])} of {ranks * count} rows sent, bit-equal"
        )

    return check


def expert_checks() -> dict[str, Callable[[torch.device], str]]:
    found: dict[str, Callable[[torch.device], str]] = {}
    for name, router in ROUTERS.items():
        found[f"router: {name}, fp64"] = route_check(router, torch.float64, 4001, 1e-11)
        found[f"router: {name}, fp32"] = route_check(router, torch.float32, 501, 1e-5)
    for tokens, room in ((1, 4.0), (1000, 1.5), (8192, 0.9), (32768, 4.0)):
        found[f"rows of {tokens} tokens, room {room}"] = plan_check(tokens, room)
    for dtype in ROUNDINGS:
        for inner, outer in ((520, 264), (77, 131)):
            for kernels, biased in (("triton", True), ("auto", False)):
                found[f"grouped matmul {inner}->{outer}, {str(dtype)[6:]}, {kernels}"] = grouped_check(
                    dtype, inner, outer, kernels, biased
                )
    for kernels in ("triton", "auto"):
        found[f"experts' layer, {kernels}"] = layer_check(kernels, SWIGLU, False, (1030, 2048, 768))
        found[f"experts' layer, weighed rows, {kernels}"] = layer_check(kernels, SWIGLU, True, (1030, 2048, 768))
    for tokens, width, etp in ((4096, 2048, 1), (1030, 2880, 2), (77, 130, 4)):
        found[f"push of {tokens} tokens of {width}, etp {etp}"] = push_check(tokens, width, etp)
    found["experts' layer, clamped, width 2880"] = layer_check("auto", CLAMPED_SWIGLU, False, (300, 2880, 2880))
    return found
