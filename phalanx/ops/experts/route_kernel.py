"""The router in one kernel each way: scores, groups, the best experts, their weights; and the gradient of both
outputs to the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from phalanx.base.rng import key_of
from phalanx.ops.kernel_tools import triton_wide, wide_of

if TYPE_CHECKING:
    from phalanx.ops.experts.router import Router

TINY = tl.constexpr(1e-20)


@triton.jit
def _probabilities(logits, inside, SIGMOID: tl.constexpr):
    """(score of each expert, 0 outside; sum of a token's scores); with softmax the sum is 1."""
    if SIGMOID:
        scores = tl.where(inside, 1.0 / (1.0 + tl.exp(-logits)), 0.0)
        sums = tl.sum(scores, 1)[:, None] + TINY
    else:
        powers = tl.where(inside, tl.exp(logits - tl.max(logits, 1)[:, None]), 0.0)
        scores = powers / tl.sum(powers, 1)[:, None]
        sums = tl.full((logits.shape[0], 1), 1.0, logits.dtype)
    return scores, sums


@triton.jit
def _drawn(samples, positions, experts, layer, KEY: tl.constexpr):
    """The random number of each (token, expert) as phalanx.base.rng defines it: word expert % 4 of counter expert //
    4."""
    lanes = experts // 4 + tl.zeros_like(positions).to(tl.int32)
    c1 = positions.to(tl.int32) + tl.zeros_like(experts)
    c2 = samples.to(tl.uint32).to(tl.int32, bitcast=True) + tl.zeros_like(experts)
    w0, w1, w2, w3 = tl.philox(KEY, lanes, c1, c2, tl.zeros_like(c1) + layer)
    word = experts % 4
    return tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3))).to(tl.int64)


@triton.jit
def _within_groups(ranks, experts, lowest, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """The ranks, with `lowest` for experts outside the token's best groups. A group counts by the sum of its two
    highest."""
    group = experts // SIZE
    of_group = tl.full(ranks.shape, lowest, ranks.dtype)
    for g in tl.static_range(GROUPS):
        members = tl.where(group == g, ranks, lowest)
        best, at = tl.max(members, 1, return_indices=True, return_indices_tie_break_left=True)
        total = best
        if SIZE > 1:
            total += tl.max(tl.where(experts == at[:, None], lowest, members), 1)
        of_group = tl.where(group == g, total[:, None], of_group)
    taken = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        at = tl.argmax(tl.where(taken, lowest, of_group), 1)
        taken = taken | (group == (at // SIZE)[:, None])
    return tl.where(taken, ranks, lowest)


@triton.jit
def _route(
    logits,
    bias,
    samples,
    positions,
    experts_out,
    weights_out,
    scores_out,
    T,
    E: tl.constexpr,
    K: tl.constexpr,
    layer,
    SIGMOID: tl.constexpr,
    AFTER: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    DRAWN: tl.constexpr,
    BIAS: tl.constexpr,
    KEY: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    E_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    experts = tl.arange(0, E_BLOCK)[None, :]
    slots = tl.arange(0, K_BLOCK)[None, :]
    inside = (experts < E) & (token < T)
    x = tl.load(logits + token * E + experts, mask=inside, other=float("-inf")).to(WIDE)
    x = tl.where(token < T, x, 0.0)
    scores, sums = _probabilities(x, experts < E, SIGMOID)
    tl.store(scores_out + token * E + experts, scores / sums, mask=inside)
    if DRAWN:
        s = tl.load(samples + token, mask=token < T, other=0)
        ranks = _drawn(s, tl.load(positions + token, mask=token < T, other=0), experts, layer, KEY)
        lowest = -1
    else:
        ranks = x if AFTER else scores
        lowest = float("-inf")  # type: ignore[assignment]
        if BIAS:
            ranks += tl.load(bias + experts, mask=experts < E, other=0.0).to(WIDE)
        if TOP_GROUPS < GROUPS:
            ranks = _within_groups(
                tl.where(experts < E, ranks, lowest), experts, lowest, GROUPS, TOP_GROUPS, E // GROUPS
            )
    values = x if AFTER and not SIGMOID else scores
    ranks = tl.where(experts < E, ranks, lowest)
    chosen = tl.zeros((ROWS, K_BLOCK), tl.int32)
    weights = tl.full((ROWS, K_BLOCK), float("-inf") if AFTER and not SIGMOID else 0.0, WIDE)
    for k in tl.static_range(K):
        best = tl.minimum(tl.argmax(ranks, 1), E - 1)[:, None]  # of NaNs, any expert
        mine = experts == best
        value = tl.sum(tl.where(mine, values, 0.0), 1)[:, None]
        ranks = tl.where(mine, lowest, ranks)
        chosen = tl.where(slots == k, best, chosen)
        weights = tl.where(slots == k, value, weights)
    if AFTER and not SIGMOID:
        powers = tl.where(slots < K, tl.exp(weights - tl.max(weights, 1)[:, None]), 0.0)
        weights = powers / tl.sum(powers, 1)[:, None]
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 1)[:, None] + TINY)
    there = (slots < K) & (token < T)
    tl.store(experts_out + token * K + slots, chosen.to(tl.int64), mask=there)
    tl.store(weights_out + token * K + slots, weights * SCALE, mask=there)


@triton.jit
def _route_backward(
    logits,
    experts_in,
    dweights,
    dscores,
    dlogits,
    T,
    E: tl.constexpr,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    AFTER: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    WEIGHTS: tl.constexpr,
    SCORES: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    E_BLOCK: tl.constexpr,
):
    """With v the chosen scores and w = v / sum(v): dv = (dw - <dw, w>) / sum(v). The scores' gradient is the sum of
    those through both outputs."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    experts = tl.arange(0, E_BLOCK)[None, :]
    inside = (experts < E) & (token < T)
    x = tl.load(logits + token * E + experts, mask=inside, other=float("-inf")).to(WIDE)
    x = tl.where(token < T, x, 0.0)
    scores, sums = _probabilities(x, experts < E, SIGMOID)
    dscore = tl.zeros((ROWS, E_BLOCK), WIDE)
    dlogit = tl.zeros((ROWS, E_BLOCK), WIDE)
    if SCORES:
        d = tl.load(dscores + token * E + experts, mask=inside, other=0.0).to(WIDE)
        if SIGMOID:
            d = (d - tl.sum(d * scores, 1)[:, None] / sums) / sums
        dscore += d
    if WEIGHTS:
        d = tl.zeros((ROWS, E_BLOCK), WIDE)
        picked = experts < 0
        for k in tl.static_range(K):
            e = tl.load(experts_in + token * K + k, mask=token < T, other=-1)
            d += tl.where(
                experts == e, tl.load(dweights + token * K + k, mask=token < T, other=0.0).to(WIDE) * SCALE, 0.0
            )
            picked = picked | (experts == e)
        if AFTER and not SIGMOID:
            among = tl.where(picked, x, float("-inf"))
            powers = tl.where(picked, tl.exp(x - tl.max(among, 1)[:, None]), 0.0)
            share = powers / (tl.sum(powers, 1)[:, None] + TINY)
            dlogit += share * (d - tl.sum(d * share, 1)[:, None])
        elif RENORMALIZE:
            total = tl.sum(tl.where(picked, scores, 0.0), 1)[:, None] + TINY
            dscore += tl.where(picked, (d - tl.sum(d * scores, 1)[:, None] / total) / total, 0.0)
        else:
            dscore += d
    if SIGMOID:
        dlogit += dscore * scores * (1.0 - scores)
    else:
        dlogit += scores * (dscore - tl.sum(dscore * scores, 1)[:, None])
    tl.store(dlogits + token * E + experts, dlogit.to(dlogits.dtype.element_ty), mask=inside)


def _constants(router: Router, dtype: torch.dtype) -> dict:
    block = triton.next_power_of_2(router.num_experts)
    return dict(
        E=router.num_experts,
        K=router.top_k,
        SIGMOID=router.score == "sigmoid",
        AFTER=router.order == "after",
        RENORMALIZE=router.renormalize,
        SCALE=router.scale,
        WIDE=triton_wide(dtype),
        ROWS=max(1, 1024 // block),
        E_BLOCK=block,
    )


def route_forward(
    logits: Tensor, router: Router, bias: Tensor | None, rows: tuple[Tensor, Tensor] | None, layer: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The fields of ops.experts.route.Choice, in their order."""
    logits, tokens, wide = logits.contiguous(), len(logits), wide_of(logits.dtype)
    experts = torch.empty(tokens, router.top_k, dtype=torch.int64, device=logits.device)
    weights, scores = (
        torch.empty(tokens, n, dtype=wide, device=logits.device) for n in (router.top_k, router.num_experts)
    )
    drawn = router.forced == "balanced"
    samples, positions = rows if drawn and rows is not None else (None, None)
    k0, k1 = key_of(0, "forced experts")
    c = _constants(router, wide)
    if tokens:
        _route[(triton.cdiv(tokens, c["ROWS"]),)](
            logits,
            bias,
            samples,
            positions,
            experts,
            weights,
            scores,
            tokens,
            layer=layer,
            GROUPS=router.groups,
            TOP_GROUPS=router.top_groups,
            DRAWN=drawn,
            BIAS=bias is not None,
            KEY=k0 | k1 << 32,
            K_BLOCK=triton.next_power_of_2(router.top_k),
            **c,
        )
    return experts, weights, scores


def route_backward(
    dweights: Tensor | None, dscores: Tensor | None, logits: Tensor, experts: Tensor, router: Router
) -> Tensor:
    """Gradient of the logits from those of the weights (T, K) and of the scores (T, E)."""
    logits = logits.contiguous()
    dweights, dscores = (None if d is None else d.contiguous() for d in (dweights, dscores))
    dlogits = torch.empty_like(logits)
    c = _constants(router, wide_of(logits.dtype))
    if logits.numel():
        _route_backward[(triton.cdiv(len(logits), c["ROWS"]),)](
            logits,
            experts,
            dweights,
            dscores,
            dlogits,
            len(logits),
            WEIGHTS=dweights is not None,
            SCORES=dscores is not None,
            **c,
        )
    return dlogits


class _Route(Function):
    """The router of ops.experts.route in one kernel each way."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, router: Router, bias: Tensor | None, rows: Any, layer: int
    ) -> tuple[Tensor, ...]:  # type: ignore[override]
        experts, weights, scores = route_forward(logits, router, bias, rows, layer)
        ctx.save_for_backward(logits, experts)
        ctx.router = router
        ctx.mark_non_differentiable(experts)
        ctx.set_materialize_grads(False)
        return experts, weights, scores

    @staticmethod
    def backward(
        ctx: Any, dexperts: None, dweights: Tensor | None, dscores: Tensor | None
    ) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, experts = ctx.saved_tensors
        return route_backward(dweights, dscores, logits, experts, ctx.router), None, None, None, None


def choose_experts(
    logits: Tensor, router: Router, bias: Tensor | None, rows: tuple[Tensor, Tensor] | None, layer: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As ops.experts.route.choose_experts."""
    experts, weights, scores = _Route.apply(logits, router, bias, rows, layer)
    return experts, weights, scores
