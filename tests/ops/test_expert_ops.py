"""Routing, permuting and multiplying for mixtures of experts: against transformers' modules and plain formulas in
float64."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from phalanx.base.rng import key_of
from phalanx.ops.dense.activation import gated_rows, swiglu
from phalanx.ops.dense.gate import CLAMPED_SWIGLU, SWIGLU
from phalanx.ops.dense.matmul import PIECES, pieces
from phalanx.ops.dense.relu2 import relu2_rows
from phalanx.ops.experts.grouped import add_grouped_product_, grouped_matmul, grouped_product
from phalanx.ops.experts.permute import combine_rows, gather_rows, plan_rows, row_weights
from phalanx.ops.experts.route import (
    BalanceSums,
    Choice,
    balance_loss,
    balance_sums,
    dropping,
    entropy,
    expert_capacity,
    expert_counts,
    route,
    updated_bias,
    within_capacity,
    z_loss,
)
from phalanx.ops.experts.router import Router
from phalanx.ops.experts.rows import ExpertRows
from tests.ops.test_ops import normal

T, D, F, E, K = 23, 12, 7, 8, 3


class KeepFloat64(TorchFunctionMode):
    """transformers' routers cast to float32 whatever they are given; under this mode they stay in float64."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        if func is Tensor.float:
            return args[0].double()
        return func(*(torch.float64 if a is torch.float32 else a for a in args), **kwargs)


def mixtral() -> tuple[Any, Router, int]:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=K)
    return MixtralSparseMoeBlock(config), Router(K, E), 0


def qwen3(renormalize: bool) -> tuple[Any, Router, int]:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=D, moe_intermediate_size=F, num_experts=E, num_experts_per_tok=K, norm_topk_prob=renormalize
    )
    return Qwen3MoeSparseMoeBlock(config), Router(K, E, renormalize=renormalize), 0


def deepseek(renormalize: bool, groups: int, top_groups: int) -> tuple[Any, Router, int]:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = DeepseekV3Config(
        hidden_size=D,
        moe_intermediate_size=F,
        n_routed_experts=E,
        num_experts_per_tok=K,
        n_group=groups,
        topk_group=top_groups,
        norm_topk_prob=renormalize,
        routed_scaling_factor=2.5,
        n_shared_experts=1,
    )
    return DeepseekV3MoE(config), Router(K, E, "sigmoid", "before", renormalize, 2.5, groups, top_groups), 0


def gpt_oss() -> tuple[Any, Router, int]:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    return (
        GptOssMLP(GptOssConfig(hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=K)),
        Router(K, E, order="after"),
        1,
    )


THEIRS = {
    "mixtral": mixtral,
    "qwen3": lambda: qwen3(True),
    "qwen3, not renormalised": lambda: qwen3(False),
    "deepseek_v3": lambda: deepseek(True, 4, 2),
    "deepseek_v3, all groups": lambda: deepseek(True, 1, 1),
    "deepseek_v3, not renormalised": lambda: deepseek(False, 2, 1),
    "gpt_oss": gpt_oss,
}


def their_block(name: str) -> tuple[Any, Router]:
    """transformers' block in float64 with every parameter (and the bias of the choice) drawn; gpt-oss's activation
    is really clamped."""
    block, router, _ = THEIRS[name]()
    block = block.double()
    for i, (key, p) in enumerate([*block.named_parameters(), *block.named_buffers()]):
        p.data.copy_(normal(*p.shape, seed=100 + i) * (3.0 if name == "gpt_oss" and "gate_up" in key else 0.5))
    return block, router


def their_router(block: Any) -> Any:
    return block.router if hasattr(block, "router") else block.gate


def logits_of(block: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Our logits from their router's weights, and the bias of its choice."""
    router = their_router(block)
    return torch.nn.functional.linear(x, router.weight, getattr(router, "bias", None)), getattr(
        router, "e_score_correction_bias", None
    )


@pytest.mark.parametrize("name", THEIRS)
def test_route_equals_transformers(name):
    """Truth: transformers' router modules in float64: experts, weights, gradients to the tokens and to the router's
    weight."""
    block, router = their_block(name)
    x = normal(T, D, seed=1).requires_grad_()
    with KeepFloat64():
        _, weights, experts = their_router(block)(x)
    truth = torch.zeros(T, E, dtype=torch.float64).scatter(1, experts, weights)
    upstream = normal(T, E, seed=2)
    expected = torch.autograd.grad(truth, [x, their_router(block).weight], upstream)
    choice = route(logits_of(block, x)[0], router, logits_of(block, x)[1])
    found = torch.zeros(T, E, dtype=torch.float64).scatter(1, choice.experts_TK, choice.weights_TK)
    torch.testing.assert_close(found, truth, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(
        torch.autograd.grad(found, [x, their_router(block).weight], upstream), expected, rtol=1e-12, atol=1e-13
    )


def our_order(name: str, key: str, theirs: Tensor) -> Tensor:
    """gpt-oss stores experts transposed, gate and up interleaved; ours are (out, in) and stacked."""
    if name != "gpt_oss" or "experts" not in key:
        return theirs
    ours = torch.cat((theirs[..., ::2], theirs[..., 1::2]), -1) if "gate_up" in key else theirs
    return ours if "bias" in key else ours.transpose(1, 2)


def our_layer(
    x: Tensor, weights: dict[str, Tensor], correction: Tensor | None, router: Router, weigh_inside: bool, rows: int
) -> Tensor:
    logits = torch.nn.functional.linear(x, weights["weight"], weights.get("bias"))
    choice = route(logits, router, correction)
    plan = plan_rows(choice.experts_TK, 0, E, rows)
    y = grouped_matmul(
        gather_rows(x, plan), weights["gate_up_proj"], plan.ends_E, bias_EO=weights.get("gate_up_proj_bias")
    )
    weights_R = row_weights(choice.weights_TK, plan) if weigh_inside else None
    hidden = gated_rows(y, plan.ends_E, weights_R, CLAMPED_SWIGLU if router.order == "after" else SWIGLU)
    out = grouped_matmul(hidden, weights["down_proj"], plan.ends_E, bias_EO=weights.get("down_proj_bias"))
    return combine_rows(out, None if weigh_inside else choice.weights_TK, plan, len(x))


@pytest.mark.parametrize(
    "name, weigh_inside, rows",
    [
        *((name, False, T * K) for name in THEIRS),
        ("mixtral", True, T * K),
        ("deepseek_v3", True, T * K + 5),
        ("gpt_oss", False, T * K + 5),
    ],
)
def test_a_layer_equals_transformers(name, weigh_inside, rows):
    """Truth: transformers' mixture in float64 (without its shared expert): output, and gradients to the tokens and
    every weight.

    The rows may be more than needed, and be weighed before the second matmul where it has no bias.
    """
    block, router = their_block(name)
    params = {key: p for key, p in block.named_parameters() if "shared" not in key}
    if hasattr(block, "shared_experts"):
        block.shared_experts.down_proj.weight.data.zero_()
    x, dy = normal(1, T, D, seed=1).requires_grad_(), normal(1, T, D, seed=3)
    with KeepFloat64():
        truth = block(x)
    truth = truth[0] if isinstance(truth, tuple) else truth
    expected = torch.autograd.grad(truth, [x, *params.values()], dy)
    ours = {key.split(".")[-1]: our_order(name, key, p.detach()).requires_grad_() for key, p in params.items()}
    found = our_layer(
        x[0], ours, getattr(their_router(block), "e_score_correction_bias", None), router, weigh_inside, rows
    )
    torch.testing.assert_close(found, truth[0], rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(found, [x, *ours.values()], dy[0])
    torch.testing.assert_close(
        gradients, (expected[0], *map(our_order, [name] * len(params), params, expected[1:])), rtol=1e-12, atol=1e-12
    )


def test_clamped_swiglu_equals_gpt_oss():
    """Truth: transformers' GptOssExperts on interleaved gate and up, its limits passed on both sides and met
    exactly; and its gradient.

    At a limit torch passes the gradient or does not, by its version. Ours is the one from inside: of a value just
    inside it. Ours on all gates before all ups, and on pairs as they are.
    """
    block, _ = their_block("gpt_oss")
    x = normal(9, 2 * F) * 8
    x[0, 0], x[1, F], x[2, F + 1] = 7.0, 7.0, -7.0
    within = torch.where(x.abs() == 7, torch.nextafter(x, torch.zeros_like(x)), x)
    interleaved, inside = (torch.stack(t.chunk(2, -1), -1).flatten(-2).requires_grad_() for t in (x, within))
    x.requires_grad_()
    assert (x > 7).any() and (x[:, F:] < -7).any() and (inside != interleaved).sum() == 3
    truth, found, dy = block.experts._apply_gate(interleaved), swiglu(x, gate=CLAMPED_SWIGLU), normal(9, F, seed=1)
    torch.testing.assert_close(found, truth, rtol=1e-14, atol=1e-14)
    (expected,) = torch.autograd.grad(block.experts._apply_gate(inside), inside, dy)
    (gradient,) = torch.autograd.grad(found, x, dy)
    torch.testing.assert_close(gradient, torch.cat((expected[:, ::2], expected[:, 1::2]), -1), rtol=1e-13, atol=1e-13)
    pairs = swiglu(interleaved, gate=replace(CLAMPED_SWIGLU, interleaved=True))
    torch.testing.assert_close(
        [pairs, *torch.autograd.grad(pairs, interleaved, dy)], [truth, expected], rtol=1e-13, atol=1e-13
    )


def test_route_computes_in_fp32():
    """Truth: the choice in float64 of the same bf16 logits, to fp32's precision; the gradient comes back in bf16."""
    logits = normal(T, E, dtype=torch.bfloat16).requires_grad_()
    for router in (Router(K, E), Router(K, E, order="after"), Router(K, E, "sigmoid", scale=2.5)):
        found, truth = route(logits, router), route(logits.detach().double(), router)
        assert found.weights_TK.dtype == found.scores_TE.dtype == torch.float32 and torch.equal(
            found.experts_TK, truth.experts_TK
        )
        torch.testing.assert_close(found.weights_TK.double(), truth.weights_TK, rtol=1e-6, atol=0)
        torch.testing.assert_close(truth.scores_TE.sum(-1), torch.ones(T, dtype=torch.float64), rtol=1e-14, atol=0)
        assert torch.autograd.grad(found.weights_TK.square().sum(), logits)[0].dtype == torch.bfloat16


def test_equal_scores_go_to_the_lower_number():
    logits = torch.zeros(4, 64)
    logits[1, 40:50] = 1.0
    logits[2] = torch.nan
    assert route(logits, Router(4, 64)).experts_TK[[0, 1, 3]].tolist() == [[0, 1, 2, 3], [40, 41, 42, 43], [0, 1, 2, 3]]
    assert (
        (0 <= route(logits, Router(4, 64)).experts_TK) & (route(logits, Router(4, 64)).experts_TK < 64)
    ).all()  # also of a NaN
    grouped = route(
        torch.zeros(1, 8), Router(3, 8, "sigmoid", groups=4, top_groups=2), torch.tensor([0.0, 0, 0, 0, 0, 0, 1, 1])
    )
    assert grouped.experts_TK.tolist() == [[6, 7, 0]]


def test_the_bias_moves_the_choice_and_not_the_weights():
    logits, bias = (
        normal(T, E),
        torch.full((E,), -10.0).index_fill_(0, torch.tensor([2, 5, 6]), 10.0).double().requires_grad_(),
    )
    choice = route(logits.requires_grad_(), Router(K, E, "sigmoid", renormalize=False), bias)
    assert choice.experts_TK.sort(-1).values.tolist() == [[2, 5, 6]] * T
    torch.testing.assert_close(choice.weights_TK, torch.sigmoid(logits).gather(1, choice.experts_TK), rtol=0, atol=0)
    assert not any(g is not None for g in torch.autograd.grad(choice.weights_TK.sum(), [bias], allow_unused=True))


# forced choices


def test_forced_choices_are_even_and_the_same_in_every_layout():
    """Different experts in a token; each expert within 5 sigma of its share; a part of the tokens is drawn the same
    alone; not in two layers."""
    tokens, router = 4096, Router(8, 64, forced="balanced")
    rows = (torch.arange(tokens) // 512 + 2**33, torch.arange(tokens) % 512)
    logits = normal(tokens, 64, dtype=torch.float32)
    choice = route(logits, router, rows=rows, layer=3)
    assert (choice.experts_TK.sort(-1).values.diff() > 0).all()
    counts, share = expert_counts(choice.experts_TK, 64)[0].double(), tokens * 8 / 64
    assert (counts - share).abs().max() < 5 * math.sqrt(share * (1 - 8 / 64)) and counts.sum() == tokens * 8
    part = slice(700, 900)
    assert torch.equal(
        route(logits[part], router, rows=(rows[0][part], rows[1][part]), layer=3).experts_TK, choice.experts_TK[part]
    )
    assert not torch.equal(route(logits, router, rows=rows, layer=4).experts_TK, choice.experts_TK)
    torch.testing.assert_close(choice.weights_TK.sum(-1), torch.ones(tokens), rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match="sample ids"):
        route(logits, router)


# balance


def test_balance_loss_equals_transformers():
    """Truth: load_balancing_loss_func over one layer's logits, which is K times ours; and its gradient."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = normal(T, E).requires_grad_()
    with KeepFloat64():
        truth = load_balancing_loss_func((logits,), E, K)
    found = K * balance_loss(balance_sums(route(logits, Router(K, E))))
    torch.testing.assert_close(found[0], truth, rtol=1e-14, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(found, logits), torch.autograd.grad(truth, logits), rtol=1e-13, atol=1e-15
    )


def complementary_loss(logits: Tensor, bias: Tensor) -> Tensor:
    """DeepSeek-V3 technical report, equations 17 to 20 (without alpha) of one sequence, expert by expert."""
    scores = torch.sigmoid(logits)
    chosen = torch.zeros_like(scores).scatter_(1, (scores + bias).topk(K).indices, 1.0)
    loss = torch.zeros((), dtype=torch.float64)
    for i in range(E):
        f_i = E / (K * len(logits)) * chosen[:, i].sum()
        loss = loss + f_i * (scores[:, i] / scores.sum(-1)).mean()
    return loss


def test_sequence_balance_equals_deepseek():
    """Truth: the report's formula sequence by sequence, sequences of different lengths in no order; and its
    gradient."""
    logits, bias = normal(T, E).requires_grad_(), normal(E, seed=1) * 0.1
    sequence = torch.arange(T) * 7 % 5 % 3
    choice = route(logits, Router(K, E, "sigmoid"), bias)
    found = balance_loss(balance_sums(choice, sequence, 3))
    truth = torch.stack([complementary_loss(logits[sequence == s], bias) for s in range(3)])
    torch.testing.assert_close(found, truth, rtol=1e-13, atol=0)
    weights = normal(3, seed=2)
    torch.testing.assert_close(
        torch.autograd.grad(found, logits, weights), torch.autograd.grad(truth, logits, weights), rtol=1e-12, atol=1e-15
    )


def test_balance_over_ranks():
    """Truth: the loss of all tokens on one rank. Parts of the tokens, their sums added up without autograd: each
    part has the loss of the whole, and the gradients of the parts together are the gradient of the whole."""
    logits, router = normal(T, E).requires_grad_(), Router(K, E)
    truth = balance_loss(balance_sums(route(logits, router)))
    (expected,) = torch.autograd.grad(truth, logits)
    parts = [balance_sums(route(part, router)) for part in logits.split([4, 0, 10, 9])]
    with torch.no_grad():
        total = BalanceSums(
            sum(p.counts_SE for p in parts), sum(p.scores_SE for p in parts), sum(p.tokens_S for p in parts)
        )
    losses = [balance_loss(p, total) for p in parts]
    for loss in losses:
        torch.testing.assert_close(loss, truth, rtol=1e-14, atol=0)
    torch.testing.assert_close(torch.autograd.grad(sum(losses), logits)[0], expected, rtol=1e-13, atol=1e-16)


def test_balanced_loss_is_one_and_worst_is_experts_over_slots():
    even = Choice(torch.arange(E).repeat(K, 1).t() % E, torch.ones(E, K), torch.full((E, E), 1 / E))
    assert balance_loss(balance_sums(even)).item() == pytest.approx(1.0)
    one = Choice(
        torch.zeros(T, 1, dtype=torch.int64), torch.ones(T, 1), torch.eye(E)[torch.zeros(T, dtype=torch.int64)]
    )
    assert balance_loss(balance_sums(one)).item() == pytest.approx(E)


def test_z_loss():
    """Truth: the formula, and autograd through it."""
    logits = normal(T, E).requires_grad_()
    truth = torch.log(torch.exp(logits).sum(-1)).pow(2).sum()
    torch.testing.assert_close(z_loss(logits), truth, rtol=1e-14, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(z_loss(logits), logits), torch.autograd.grad(truth, logits), rtol=1e-12, atol=1e-14
    )


def load_spread(counts_E: torch.Tensor) -> torch.Tensor:
    """(2,) load of the fullest and of the emptiest expert, each over the mean load."""
    return torch.stack((counts_E.max(), counts_E.min())) / counts_E.double().mean()


def test_updated_bias_evens_the_load():
    """One step by hand; then a router with badly skewed logits is balanced by nothing else."""
    assert updated_bias(torch.tensor([1.0, 1.0, 1.0]), torch.tensor([0, 6, 3]), 0.25).tolist() == [1.25, 0.75, 1.0]
    logits, router, bias = (
        normal(512, E) + torch.linspace(-2, 2, E),
        Router(2, E, "sigmoid"),
        torch.zeros(E, dtype=torch.float64),
    )
    first = load_spread(expert_counts(route(logits, router, bias).experts_TK, E)[0])
    for _ in range(300):
        bias = updated_bias(bias, expert_counts(route(logits, router, bias).experts_TK, E)[0], 0.01)
    last = load_spread(expert_counts(route(logits, router, bias).experts_TK, E)[0])
    assert first[0] > 2 and last[0] < 1.15 and last[1] > 0.85


def test_entropy():
    """Truth: the formula; a uniform router has log E a token, and an impossible expert adds nothing."""
    scores = torch.softmax(normal(T, E), -1)
    choice = Choice(torch.zeros(T, K, dtype=torch.int64), scores[:, :K], scores)
    torch.testing.assert_close(entropy(choice), -(scores * scores.log()).sum(), rtol=1e-13, atol=0)
    certain = Choice(choice.experts_TK, choice.weights_TK, torch.eye(E, dtype=torch.float64))
    assert entropy(certain) == 0


# capacity


def kept_by_hand(choice: Choice, limit: int, by: str, sequence: list[int]) -> Tensor:
    kept, experts = torch.zeros_like(choice.experts_TK, dtype=torch.bool), choice.experts_TK.tolist()
    for s in set(sequence):
        for e in range(E):
            pairs = [
                (t, k)
                for t in range(len(experts))
                for k in range(len(experts[t]))
                if sequence[t] == s and experts[t][k] == e
            ]
            pairs.sort(key=lambda p: p if by == "position" else (-choice.weights_TK[p].item(), p))
            for pair in pairs[:limit]:
                kept[pair] = True
    return kept


@pytest.mark.parametrize("by", ["position", "probability"])
@pytest.mark.parametrize("limit", [0, 1, 2, 5, T])
def test_capacity(by, limit):
    """Truth: a loop over sequences, experts and pairs. Equal weights among them; what is dropped has no expert,
    weight or gradient."""
    logits = (normal(T, E) * 2).round().requires_grad_()
    sequence = torch.arange(T) * 5 % 3
    choice = route(logits, Router(K, E))
    kept = within_capacity(choice, E, limit, by, sequence, 3)
    assert torch.equal(kept, kept_by_hand(choice, limit, by, sequence.tolist()))
    assert torch.equal(within_capacity(choice, E, limit, by), kept_by_hand(choice, limit, by, [0] * T))
    left = dropping(choice, kept, E)
    counts = expert_counts(left.experts_TK, E, sequence, 3)
    assert counts.max() <= limit and counts.sum() + (~kept).sum() == T * K
    assert (left.weights_TK[~kept] == 0).all() and torch.equal(left.weights_TK[kept], choice.weights_TK[kept])
    plan = plan_rows(left.experts_TK, 0, E, T * K)
    assert plan.ends_E[-1] == kept.sum() and torch.equal(plan.row_TK >= 0, kept)


def test_capacity_rounds_up():
    assert expert_capacity(Router(2, 8), 10, 1.0) == 3 and expert_capacity(Router(2, 8), 16, 1.25) == 5


# rows

ROUTINGS = {  # adversarial choices of T tokens among E experts
    "even": lambda: torch.arange(T * K).view(T, K) % E,
    "drawn": lambda: torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(t))[:K] for t in range(T)]),
    "all to one": lambda: torch.full((T, 1), 5),
    "all but one have none": lambda: torch.tensor([[0, 7]]).repeat(T, 1),
    "every expert": lambda: torch.arange(E).flip(0).repeat(T, 1),
    "one token": lambda: torch.tensor([[6, 1, 2]]),
    "no token": lambda: torch.zeros(0, K, dtype=torch.int64),
    "some dropped": lambda: torch.where(torch.arange(T * K).view(T, K) % 5 == 0, E, torch.arange(T * K).view(T, K) % E),
}


@pytest.mark.parametrize("first, count, room", [(0, E, 0), (0, E, 9), (2, 3, 0), (5, 1, 4), (0, E, -7)])
@pytest.mark.parametrize("name", ROUTINGS)
def test_plan(name, first, count, room):
    """Truth: Python's stable sort of the pairs. `room` more rows than needed, or fewer: then the last pairs get
    none."""
    check_plan(ROUTINGS[name](), first, count, room, "auto")


def check_plan(experts: Tensor, first: int, count: int, room: int, kernels: str) -> None:
    pairs = sorted((e, i) for i, e in enumerate(experts.flatten().tolist()) if first <= e < first + count)
    rows = max(0, len(pairs) + room)
    plan = plan_rows(experts, first, count, rows, kernels)
    held = pairs[:rows]
    assert plan.wanted == len(pairs) and len(plan.source_R) == len(plan.slot_R) == rows
    assert plan.ends_E.tolist() == [sum(e <= first + i for e, _ in held) for i in range(count)]
    assert plan.slot_R[: len(held)].tolist() == [i for _, i in held] and (plan.slot_R[len(held) :] == 0).all()
    assert torch.equal(plan.source_R, plan.slot_R // experts.shape[1])
    row_of = {i: r for r, (_, i) in enumerate(held)}
    assert plan.row_TK.flatten().tolist() == [row_of.get(i, -1) for i in range(experts.numel())]
    assert {t.dtype for t in (plan.slot_R, plan.source_R, plan.row_TK, plan.ends_E)} == {torch.int32}


def spoil(x: Tensor, plan: ExpertRows) -> Tensor:
    """x with NaN in the padding rows, through which no gradient goes."""
    return torch.where(plan.valid_R.unsqueeze(-1), x, torch.nan)


def mixture(
    x: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    biases: tuple[Tensor, Tensor],
    plan: ExpertRows,
    kernels: str = "auto",
) -> Tensor:
    """Every op in a row, what is in the padding spoiled on the way, in backward too."""
    rows = gather_rows(x, plan, kernels)
    hidden = gated_rows(
        spoil(grouped_matmul(spoil(rows, plan), gate_up, plan.ends_E, kernels, biases[0]), plan),
        plan.ends_E,
        None,
        SWIGLU,
        kernels,
    )
    out = SpoilGradient.apply(grouped_matmul(spoil(hidden, plan), down, plan.ends_E, kernels, biases[1]), plan)
    return combine_rows(spoil(out, plan), weights, plan, len(x), kernels)


class SpoilGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, plan):
        ctx.plan = plan
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return spoil(dy, ctx.plan), None


def mixture_by_hand(
    x: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    biases: tuple[Tensor, Tensor],
    experts: Tensor,
    first: int,
) -> Tensor:
    out = []
    for t in range(len(x)):
        total = x[t] * 0
        for k, e in enumerate(experts[t].tolist()):
            if first <= e < first + len(gate_up):
                hidden = swiglu((gate_up[e - first] @ x[t] + biases[0][e - first]).unsqueeze(0))[0]
                total = total + weights[t, k] * (down[e - first] @ hidden + biases[1][e - first])
        out.append(total)
    return torch.stack(out) if out else x * 0


@pytest.mark.parametrize("first, count", [(0, E), (2, 3), (5, 1)])
@pytest.mark.parametrize("name", ROUTINGS)
def test_mixture(name, first, count):
    """Truth: a loop over tokens and slots with autograd. Padding full of NaN, in forward and in backward, reaches
    nothing."""
    check_mixture(ROUTINGS[name](), first, count, "auto", 1e-12)


def check_mixture(experts: Tensor, first: int, count: int, kernels: str, bound: float) -> None:
    tokens, slots = experts.shape
    shapes = ((tokens, D), (tokens, slots), (count, 2 * F, D), (count, D, F), (count, 2 * F), (count, D))
    ours, theirs = ([normal(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)] for _ in range(2))
    buffers = {i: torch.ones(shapes[i], dtype=torch.float64) for i in (2, 4)}
    for i, buffer in buffers.items():
        ours[i].grad = buffer
    plan = plan_rows(experts, first, count, tokens * slots + 3, kernels)
    found = mixture(*ours[:4], ours[4:], plan, kernels)
    truth = mixture_by_hand(*theirs[:4], theirs[4:], experts, first)
    torch.testing.assert_close(found, truth, rtol=bound, atol=bound)
    dy = normal(tokens, D, seed=77)
    found.backward(dy)
    truth.backward(dy)
    for i, (a, b) in enumerate(zip(ours, theirs)):
        expected = torch.zeros_like(a) if b.grad is None else b.grad
        torch.testing.assert_close(a.grad, expected + 1 if i in buffers else expected, rtol=bound, atol=bound)
        assert i not in buffers or a.grad is buffers[i]


ACTIVATIONS: tuple[tuple[Any, Any, int], ...] = (
    *(
        (partial(swiglu, kernels="plain", gate=gate), partial(gated_rows, gate=gate), 2)
        for gate in (SWIGLU, CLAMPED_SWIGLU, replace(CLAMPED_SWIGLU, interleaved=True))
    ),
    (lambda x: torch.relu(x) ** 2, relu2_rows, 1),
)
"""Activations of single rows, the ops of rows sorted by expert, and how many features they read for one."""


def test_weighing_rows():
    """Truth: rows times their weights by autograd; nothing of the padding, which is NaN, is read."""
    for activation in ACTIVATIONS:
        check_weighing(activation, 6, "auto", 1e-13)


def check_weighing(activation: tuple[Any, Any, int], inner: int, kernels: str, bound: float) -> None:
    of_row, of_rows, read = activation
    ends, dy = torch.tensor([3, 3, 11], dtype=torch.int32), normal(14, inner, seed=2)
    x, weights = (normal(14, read * inner) * 5).requires_grad_(), normal(14, seed=1).requires_grad_()
    truth = of_row(x[:11]) * weights[:11, None]
    expected = torch.autograd.grad(truth, [x, weights], dy[:11])
    spoiled = [t.detach().clone().requires_grad_() for t in (x, weights)]
    for t in spoiled:
        t.data[11:] = torch.nan
    found = of_rows(spoiled[0], ends, spoiled[1], kernels=kernels)
    torch.testing.assert_close(found[:11], truth, rtol=bound, atol=bound)
    dy[11:] = torch.nan
    gradients = torch.autograd.grad(found, spoiled, dy)
    torch.testing.assert_close([g[:11] for g in gradients], [g[:11] for g in expected], rtol=bound, atol=bound)
    assert (gradients[1][11:] == 0).all()  # goes on to the tokens' weights through the slots, where padding stands at 0


def test_shapes_on_meta():
    """Plans and estimates run the ops where there is no data: forward and backward give tensors of the right shapes
    and dtypes."""
    with torch.device("meta"):
        logits = torch.empty(T, E, dtype=torch.bfloat16, requires_grad=True)
        x = torch.empty(T, D, dtype=torch.bfloat16, requires_grad=True)
        gate_up, down = (torch.empty(E, *s, dtype=torch.bfloat16, requires_grad=True) for s in ((2 * F, D), (D, F)))
        bias = torch.empty(E, D, dtype=torch.bfloat16, requires_grad=True)
        choice = route(logits, Router(K, E))
        choice = dropping(choice, within_capacity(choice, E, 4), E)
        plan = plan_rows(choice.experts_TK, 0, E, 50)
        hidden = gated_rows(grouped_matmul(gather_rows(x, plan), gate_up, plan.ends_E), plan.ends_E)
        y = combine_rows(grouped_matmul(hidden, down, plan.ends_E, bias_EO=bias), choice.weights_TK, plan, T)
        loss = y.float().sum() + balance_loss(balance_sums(choice)).sum() + z_loss(logits)
    assert y.shape == (T, D) and y.dtype == torch.bfloat16 and y.is_meta
    loss.backward()
    assert all(p.grad.shape == p.shape for p in (logits, x, gate_up, down, bias))


def test_low_precision_sums_are_wide():
    """Truth: float64 on the same bf16 inputs; the sum over slots and the weight gradient are rounded once, not at
    each addition."""
    experts = ROUTINGS["every expert"]()
    x, weights = normal(T, D, dtype=torch.bfloat16), normal(T, E, seed=1, dtype=torch.float32)
    plan = plan_rows(experts, 0, E, T * E)
    y = normal(T * E, D, seed=2, dtype=torch.bfloat16)
    truth = combine_rows(y.double(), weights.double(), plan, T)
    assert (combine_rows(y, weights, plan, T).double() - truth).abs().max() <= 2**-8 * truth.abs().max()
    weight = normal(E, F, D, seed=3, dtype=torch.bfloat16).requires_grad_()
    weight.grad_dtype, weight.grad = torch.float32, torch.zeros(E, F, D)
    dy = normal(T * E, F, seed=4, dtype=torch.bfloat16)
    grouped_matmul(gather_rows(x, plan), weight, plan.ends_E).backward(dy)
    exact = torch.einsum("etf,td->efd", dy.double().view(E, T, F), x.double())
    assert (weight.grad.double() - exact).abs().max() <= 1e-6 * exact.abs().max()


def test_forced_key_is_not_that_of_dropout():
    assert key_of(0, "forced experts") != key_of(0, "dropout")


# The Triton implementations, interpreted. The checks are those above.


@pytest.mark.parametrize("first, count, room", [(0, E, 0), (0, E, 9), (2, 3, 0), (5, 1, 4), (0, E, -7)])
@pytest.mark.parametrize("name", ROUTINGS)
def test_plan_by_triton(name, first, count, room):
    check_plan(ROUTINGS[name](), first, count, room, "triton")


def test_plan_of_many_pairs_by_triton():
    """Several programs, each with several passes over the padding; then so little room that whole programs have
    none."""
    experts = torch.rand(700, 40, generator=torch.Generator().manual_seed(0)).argsort(-1)[:, :3]
    check_plan(experts, 3, 33, 5000, "triton")
    check_plan(experts, 0, 40, -1500, "triton")


@pytest.mark.parametrize(
    "name, first, count", [("drawn", 0, E), *((name, 2, 3) for name in ROUTINGS), ("all to one", 5, 1)]
)
def test_mixture_by_triton(name, first, count):
    check_mixture(ROUTINGS[name](), first, count, "triton", 1e-12)


@pytest.mark.parametrize("inner, outer", [(72, 40), (36, 20)], ids=["descriptors", "pointers"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_grouped_matmul_by_triton(dtype, inner, outer):
    """Truth: the reference implementation in float64 on the same rounded inputs, within a few roundings. Several tiles
    of rows and steps of the sum, an expert with none, padding of NaN; the weight gradient comes on top of what is in
    its fp32 buffer. (Interpreted, tl.dot multiplies the bits of bf16 as integers: bf16 is checked in tests/gpu.)"""
    ends, rows = torch.tensor([10, 150, 150, 293], dtype=torch.int32), 300
    spoiled = slice(293, rows)
    values = [
        normal(*s, seed=i, dtype=dtype)
        for i, s in enumerate(((rows, inner), (4, outer, inner), (4, outer), (rows, outer)))
    ]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    found = []
    for kernels, kind, buffer in (("triton", dtype, wide), ("plain", torch.float64, torch.float64)):
        x, weight, bias, dy = (v.to(kind).clone() for v in values)
        x[spoiled], dy[spoiled] = torch.nan, torch.nan
        for p in (weight, bias):
            p.grad_dtype, p.grad = buffer, torch.full(p.shape, 3.0, dtype=buffer)
        x, weight, bias = x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()
        y = grouped_matmul(x, weight, ends, kernels, bias)
        y.backward(dy)
        found.append([y.detach()[:293], x.grad[:293], weight.grad, bias.grad])
    rounding = {torch.float64: 1e-13, torch.float32: 2e-6}.get(dtype, 4 * torch.finfo(dtype).eps)
    for bound, a, b in zip(
        (rounding, rounding, max(1e-13, min(rounding, 2e-6)), max(1e-13, min(rounding, 2e-6))), *found
    ):
        assert (a.double() - b).abs().max() <= bound * b.abs().max()


def test_every_tile_is_made_once():
    """Truth: the reference implementations. Tiles so small that an expert has several groups of them, the last group
    not full, in both directions."""
    from phalanx.ops.experts import grouped_kernel as fast

    tiles = fast.GroupedTiles(16, 16, 16, 2, 4, group=2)
    ends, x, dy, weight = (
        torch.tensor([10, 10, 103], dtype=torch.int32),
        normal(110, 40),
        normal(110, 72, seed=1),
        normal(3, 72, 40, seed=2),
    )
    for a, w in ((x, weight.transpose(1, 2)), (dy, weight)):
        torch.testing.assert_close(
            fast.grouped_product(a, w, ends, None, tiles)[:103],
            grouped_product(a, w, ends)[:103],
            rtol=1e-12,
            atol=1e-12,
        )
    found, truth = torch.ones_like(weight), torch.ones_like(weight)
    fast.add_grouped_product_(found, dy, x, ends, tiles)
    add_grouped_product_(truth, dy, x, ends)
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_by_triton(dtype):
    """Truth: the reference implementations in float64 on the same inputs, within a rounding. Wider than one program's
    columns, weighed and not."""
    experts = ROUTINGS["some dropped"]()[:5]
    plan, width = plan_rows(experts, 1, 6, 20), 4100
    x, weights, dy = (
        normal(5, width, dtype=dtype),
        normal(5, K, seed=1, dtype=torch.float32),
        normal(5, width, seed=2, dtype=dtype),
    )
    for weigh in (True, False):
        found = []
        for kernels, kind in (("triton", None), ("plain", torch.float64)):
            a, w, g = (t.detach().to(kind or t.dtype).requires_grad_() for t in (x, weights, dy))
            rows = gather_rows(a, plan, kernels)
            y = combine_rows(spoil(rows, plan), w if weigh else None, plan, 5, kernels)
            found.append([y.detach(), *torch.autograd.grad(y, [a, w] if weigh else [a], g.detach())])
        for a, b in zip(*found):
            assert (a.double() - b).abs().max() <= 2 * torch.finfo(a.dtype).eps * K * b.abs().max()


@pytest.mark.parametrize("inner", [6, 1030])
def test_weighing_rows_by_triton(inner):
    for activation in ACTIVATIONS:
        check_weighing(activation, inner, "triton", 1e-12)


ROUTERS = {
    "softmax": Router(3, 8),
    "one of three": Router(1, 3, renormalize=False),
    "60 experts": Router(4, 60, renormalize=False, scale=1.5),
    "all experts": Router(8, 8),
    "after": Router(4, 12, order="after", renormalize=False),
    "after, renormalised": Router(2, 8, order="after", scale=0.5),
    "sigmoid": Router(3, 8, "sigmoid", scale=2.5),
    "sigmoid, after": Router(3, 8, "sigmoid", "after", renormalize=False),
    "groups": Router(4, 24, "sigmoid", scale=2.5, groups=4, top_groups=2),
    "groups of one": Router(2, 5, "sigmoid", groups=5, top_groups=3),
    "softmax, groups of odd size": Router(3, 15, groups=3, top_groups=2),
    "forced": Router(8, 64, forced="balanced"),
    "forced, 10 experts, sigmoid": Router(3, 10, "sigmoid", forced="balanced"),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROUTERS)
def test_route_by_triton(name, dtype):
    """Truth: the reference implementation: the same experts, ties included; weights, probabilities and the gradient by
    each of them and by both."""
    router, tokens = ROUTERS[name], 37
    logits = (normal(tokens, router.num_experts) * 4).round().div(2).to(dtype)
    bias = (normal(router.num_experts, seed=1) * 2).round() / 8 if "groups" in name or "sigmoid" in name else None
    rows = (torch.arange(tokens) // 5 + 2**33 + 2**31 - 3, torch.arange(tokens) % 5 + 2**31 - 3)
    ups = normal(tokens, router.top_k, seed=2), normal(tokens, router.num_experts, seed=3)
    found = []
    for kernels in ("triton", "plain"):
        x = logits.clone().requires_grad_()
        choice = route(x, router, bias, rows, 5, kernels)
        by = [(choice.weights_TK * ups[0]).sum(), (choice.scores_TE * ups[1]).sum()]
        gradients = [torch.autograd.grad(loss, x, retain_graph=True)[0] for loss in (*by, sum(by))]
        found.append((choice.experts_TK, choice.weights_TK.detach(), choice.scores_TE.detach(), *gradients))
    assert torch.equal(found[0][0], found[1][0])
    bounds = [1e-14] * 5 if dtype == torch.float64 else [1e-6, 1e-6, *[2**-7] * 3]
    for bound, a, b in zip(bounds, found[0][1:], found[1][1:]):
        assert a.dtype == b.dtype and (a.double() - b.double()).abs().max() <= bound * b.double().abs().max()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_experts_of_nan_are_experts_by_triton():
    """Whatever the logits: rows are made of the experts' numbers, so those must be numbers of experts."""
    logits = torch.full((5, 60), torch.nan)
    logits[0] = torch.inf
    logits[1] = -torch.inf
    experts = route(logits, Router(4, 60), kernels="triton").experts_TK
    assert ((0 <= experts) & (experts < 60)).all()


def test_pieces_of_fp32_numbers_add_up_to_them():
    """Three bf16 numbers hold the 24 bits of any fp32 number that is not among the smallest: their sum in float64 is
    the number itself."""
    y = torch.randn(512, 8, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 8)
    parts = pieces(y)
    assert parts.dtype == torch.bfloat16 and parts.shape == (512, 8 * PIECES)
    assert torch.equal(parts.double().view(512, PIECES, 8).sum(1), y.double())
