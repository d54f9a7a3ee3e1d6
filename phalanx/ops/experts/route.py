"""Which experts each token goes to and with what weights, and the statistics and losses that keep the load of experts
even.

Knows nothing of ranks. Whatever has to be summed over ranks (counts, sums of probabilities) is returned as sums, and
the caller adds it up over any axes before turning it into a loss. Shapes: T tokens, E experts, K experts a token, S
sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.rng import MASK, key_of, philox
from phalanx.ops.experts.router import Router
from phalanx.ops.op import Case, Kernels, Op, triton


@dataclass(frozen=True)
class Choice:
    """A token's chosen experts, the best first, and their weights in the wide dtype (fp64 if the logits are fp64, else
    fp32)."""

    experts_TK: Tensor
    """int64; `num_experts` where the pair is dropped."""
    weights_TK: Tensor
    """The factor of each expert's output; has gradients to the logits."""
    scores_TE: Tensor
    """Probabilities of all experts; each token's sum to 1 (sigmoids are divided by their sum). Has gradients to the
    logits."""


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def route(
    logits_TE: Tensor,
    router: Router,
    bias_E: Tensor | None = None,
    rows: tuple[Tensor, Tensor] | None = None,
    layer: int = 0,
    kernels: Kernels = "auto",
) -> Choice:
    """The choice of each token. Among equal scores the lower expert number wins.

    `bias_E` is added to the values by which experts are chosen, not to their weights, and gets no gradient (DeepSeek-V3
    technical report, section 2.1.2, like sigmoid scores and groups). `rows` = (sample ids, positions), each (T,) int64,
    and `layer` are the keys of a forced random choice, so that it is the same in every layout.

    Computed in fp32 whatever the model's dtype, also where `transformers` rounds: its Qwen3-MoE rounds the weights to
    the model's dtype, and its gpt-oss takes the softmax in it.
    """
    if router.forced == "balanced" and rows is None:
        raise ValueError(
            "a forced choice of experts is drawn by sample ids and positions (`rows`), and none were given"
        )
    return Choice(*ROUTE.choose(kernels, logits_TE).choose_experts(logits_TE, router, bias_E, rows, layer))


def choose_experts(
    logits_TE: Tensor, router: Router, bias_E: Tensor | None, rows: tuple[Tensor, Tensor] | None, layer: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The fields of Choice, in order, as in `route`; with gradients to the logits."""
    logits = wide(logits_TE)
    all_scores = F.softmax(logits, -1) if router.score == "softmax" else torch.sigmoid(logits)
    if router.forced == "balanced" and rows is not None:
        experts = drawn_experts(router, rows, layer)
    else:
        experts = best_experts((all_scores if router.order == "before" else logits).detach(), router, bias_E)
    if router.order == "before":
        weights = all_scores.gather(1, experts)
    else:
        chosen = logits.gather(1, experts)
        weights = F.softmax(chosen, -1) if router.score == "softmax" else torch.sigmoid(chosen)
    if router.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    probabilities = all_scores if router.score == "softmax" else all_scores / (all_scores.sum(-1, keepdim=True) + 1e-20)
    return experts, weights * router.scale if router.scale != 1.0 else weights, probabilities


def best_experts(ranks_TE: Tensor, router: Router, bias_E: Tensor | None) -> Tensor:
    """(T, K) experts of the highest values (plus bias) within the best groups."""
    if bias_E is not None:
        ranks_TE = ranks_TE + bias_E.detach()
    if router.top_groups < router.groups:
        grouped = ranks_TE.unflatten(-1, (router.groups, -1))
        of_group = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
        best = torch.zeros_like(of_group, dtype=torch.bool).scatter_(-1, _highest(of_group, router.top_groups), True)
        ranks_TE = grouped.masked_fill(~best.unsqueeze(-1), -torch.inf).flatten(-2)
    return _highest(ranks_TE, router.top_k)


def _highest(x: Tensor, count: int) -> Tensor:
    """Positions of the `count` highest values along the last dim, from the highest down, equal ones in order of
    position (topk promises no order)."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def drawn_experts(router: Router, rows: tuple[Tensor, Tensor], layer: int) -> Tensor:
    """(T, K) different experts drawn at random, keyed by sample, position and layer: those with the highest random
    numbers."""
    samples, positions = rows
    lanes = torch.arange((router.num_experts + 3) // 4, device=samples.device)
    words = philox((lanes, positions.unsqueeze(-1), samples.unsqueeze(-1) & MASK, layer), key_of(0, "forced experts"))
    drawn = torch.stack(torch.broadcast_tensors(*words), -1).flatten(-2)[..., : router.num_experts]
    return _highest(drawn, router.top_k)


# Balance. Counts and sums are added up over ranks, sequences and micro-batches; the losses are computed from the
# totals.


@dataclass(frozen=True)
class BalanceSums:
    """Sums over the tokens of each sequence (or over all tokens, S = 1), in the wide dtype. They may be added up over
    an axis to cover more tokens."""

    counts_SE: Tensor
    """How often each expert was chosen; no gradient."""
    scores_SE: Tensor
    """Sum of each expert's probability; gradient to the logits."""
    tokens_S: Tensor
    """How many tokens."""


def balance_sums(
    choice: Choice, sequence_T: Tensor | None = None, sequences: int = 1, real_T: Tensor | None = None
) -> BalanceSums:
    """The sums from which the balancing losses are computed. `sequence_T` (T,) in [0, sequences): the sequence of each
    token; without it, all belong to one. `real_T` (T,) 1 or 0: tokens with a 0 are left out (their pairs must be
    dropped); without it, all count."""
    scores = choice.scores_TE
    counts = expert_counts(choice.experts_TK, scores.shape[1], sequence_T, sequences).to(scores.dtype)
    if sequence_T is None and real_T is None:
        return BalanceSums(counts, scores.sum(0, keepdim=True), scores.new_full((1,), len(scores)))
    number_T = torch.zeros_like(choice.experts_TK[:, 0]) if sequence_T is None else sequence_T
    member_ST = (number_T == torch.arange(sequences, device=scores.device).unsqueeze(-1)).to(scores.dtype)
    if real_T is not None:
        member_ST = member_ST * real_T
    return BalanceSums(
        counts, member_ST @ scores, member_ST.sum(-1)
    )  # a product sums in a fixed order; index_add_ does not


def expert_counts(experts_TK: Tensor, experts: int, sequence_T: Tensor | None = None, sequences: int = 1) -> Tensor:
    """(S, E) int64: tokens of each sequence at each expert; dropped pairs are not counted."""
    index = experts_TK if sequence_T is None else experts_TK + sequence_T.unsqueeze(-1) * (experts + 1)
    counts = torch.zeros(sequences * (experts + 1), dtype=torch.int64, device=experts_TK.device)
    counts.scatter_add_(0, index.flatten(), torch.ones_like(index.flatten()))  # integers: any order gives the same
    return counts.view(sequences, experts + 1)[:, :experts]


def balance_loss(local: BalanceSums, total: BalanceSums | None = None) -> Tensor:
    """(S,) E * sum_i f_i P_i, with f_i the fraction of choices that fell on expert i and P_i its mean probability: 1
    when balanced, 0 without tokens.

    Fedus et al., "Switch Transformers", 2021, equations 4 to 6; with the sums of one sequence, DeepSeek-V3's
    complementary loss (technical report, equations 17 to 20). `transformers`' load_balancing_loss_func is K times this.
    `total`: the same sums added up over ranks. The loss is then that of the total, the same on every rank, and its
    gradient goes to the local scores only, so that the ranks' gradients add up to that of the loss.
    """
    total = total or local
    mean_scores = (total.scores_SE.detach() + (local.scores_SE - local.scores_SE.detach())) / total.tokens_S.unsqueeze(
        -1
    ).clamp_min(1)
    fractions = total.counts_SE / total.counts_SE.sum(-1, keepdim=True).clamp_min(1)
    return total.counts_SE.shape[-1] * (fractions * mean_scores).sum(-1)


def z_loss(logits_TE: Tensor, real_T: Tensor | None = None) -> Tensor:
    """() sum over (real) tokens of logsumexp(logits)^2, in the wide dtype. Zoph et al., "ST-MoE", 2022, equation 5."""
    squares = torch.logsumexp(wide(logits_TE), -1).square()
    return squares.sum() if real_T is None else (squares * real_T).sum()


def updated_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """The bias of the choice after a step: experts with less than the mean load gain `rate`, those with more lose it.

    Wang et al., "Auxiliary-loss-free load balancing strategy for mixture-of-experts", 2024. `counts_E`: of the whole
    global batch.
    """
    load = counts_E.to(bias_E.dtype)
    return bias_E + rate * torch.sign(load.mean() - load)


def entropy(choice: Choice, real_T: Tensor | None = None) -> Tensor:
    """() sum over (real) tokens of the entropy (nats) of their probabilities, in the wide dtype; no gradient."""
    each = torch.special.entr(choice.scores_TE.detach())
    return each.sum() if real_T is None else (each * real_T.unsqueeze(-1)).sum()


# Capacity.


def expert_capacity(router: Router, tokens: int, factor: float) -> int:
    """Tokens that an expert accepts from a sequence (or another unit) of `tokens` tokens, rounded up."""
    return math.ceil(factor * tokens * router.top_k / router.num_experts)


def expert_capacities(router: Router, tokens_S: Tensor, factor: float) -> Tensor:
    """(S,) the same for sequences whose lengths are on the device."""
    return torch.ceil(factor * tokens_S.double() * router.top_k / router.num_experts).long()


def within_capacity(
    choice: Choice,
    experts: int,
    limit: int | Tensor,
    by: Literal["position", "probability"] = "position",
    sequence_T: Tensor | None = None,
    sequences: int = 1,
) -> Tensor:
    """(T, K) bool: the pairs that are kept when each of `experts` accepts `limit` tokens of a sequence: the first ones,
    or those with the largest weights.

    `sequence_T` as in balance_sums; `limit` may be (S,), one for each sequence. Among equal weights the earlier token
    is kept. Dropped + kept = T * K. The value for pairs that were already dropped is arbitrary.
    """
    span = experts + 1  # the last one stands for pairs that are already dropped
    pairs = (
        choice.experts_TK.flatten()
        if sequence_T is None
        else (choice.experts_TK + sequence_T.unsqueeze(-1) * span).flatten()
    )
    if by == "position":
        best_first = torch.arange(len(pairs), device=pairs.device)
    else:
        best_first = choice.weights_TK.detach().flatten().sort(descending=True, stable=True).indices
    by_expert, order = pairs[best_first].sort(stable=True)
    starts = torch.searchsorted(by_expert, torch.arange(sequences * span, device=pairs.device))
    turn = torch.arange(len(pairs), device=pairs.device) - starts[by_expert]
    kept = torch.empty_like(pairs, dtype=torch.bool)
    kept[best_first[order]] = turn < (limit if isinstance(limit, int) else limit[by_expert // span])
    return kept.view_as(choice.experts_TK)


def dropping(choice: Choice, kept_TK: Tensor, experts: int) -> Choice:
    """The choice without the pairs that are not kept: their expert becomes `experts`, which no rank holds, and their
    weight 0."""
    return replace(
        choice,
        experts_TK=torch.where(kept_TK, choice.experts_TK, experts),
        weights_TK=torch.where(kept_TK, choice.weights_TK, 0),
    )


def _case(router: Router) -> Callable[..., Tensor]:
    """Weights and probabilities by expert number. The logits are far apart, so that rounding changes no choice."""

    def call(logits: Tensor, kernels: Kernels) -> Tensor:
        steps = torch.arange(logits.numel(), device=logits.device).view_as(logits) * 7 % 16
        choice = route(logits * 0.01 + steps.to(logits.dtype) / 4, router, kernels=kernels)
        weights = torch.zeros_like(choice.scores_TE).scatter(1, choice.experts_TK, choice.weights_TK)
        return torch.cat((weights, choice.scores_TE), 1)

    return call


WIDE = (torch.float32, torch.float64)
ROUTE = Op(
    "route",
    "the experts of each token, their weights and probabilities",
    __name__,
    ("choose_experts",),
    (triton("phalanx.ops.experts.route_kernel"),),
    cases=(
        Case("softmax before choosing", _case(Router(3, 8)), ((37, 8),), dtypes=WIDE),
        Case(
            "sigmoid, groups",
            _case(Router(2, 8, "sigmoid", scale=2.5, groups=4, top_groups=2)),
            ((37, 8),),
            dtypes=WIDE,
        ),
        Case("128 experts", _case(Router(8, 128)), ((1030, 128),), dtypes=(torch.float32,), large=True),
    ),
)
