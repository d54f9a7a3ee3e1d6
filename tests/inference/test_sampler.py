"""Sampling: frequencies against probabilities, distributions against transformers, independence of the batch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from phalanx.inference.request import SamplingOptions
from phalanx.inference.sampler import (
    BLOCK,
    OptionTable,
    TokenCounts,
    accept_same,
    adjust,
    draw,
    sample,
    token_weights,
    uniform,
    weight_bits,
)
from phalanx.inference.scheduler import NO_TOKEN

DRAWS = 20_000
PROMPT, MADE = [1, 2, 2, 7], [7, 3, 3]


def some_logits(vocabulary: int, seed: int = 0, rows: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)


def table_of(*options: SamplingOptions) -> OptionTable:
    table = OptionTable(len(options))
    for row, each in enumerate(options):
        table.begin(row, each, len(PROMPT))
    return table


def counts_of(rows: int, vocabulary: int) -> TokenCounts:
    counts = TokenCounts(rows, vocabulary)
    for row in range(rows):
        counts.begin(row, torch.tensor(PROMPT), torch.tensor(MADE[:-1]))
    counts.add(torch.arange(rows), torch.full((rows,), MADE[-1]))
    return counts


def probabilities(logits: Tensor, options: SamplingOptions, position: int = 100) -> Tensor:
    """What our sampler draws from, in float64."""
    draws = table_of(options).draws(np.array([0]), np.array([position]))
    weights = token_weights(adjust(logits, draws, counts_of(1, logits.shape[1])), draws).double()
    return (weights / weights.sum(-1, keepdim=True))[0]


def expected(logits: Tensor, options: SamplingOptions) -> Tensor:
    """The same from transformers' processors, and from the formulas for what it does not have."""
    x = logits.clone()
    for token, value in options.bias:
        x[0, token] += value
    processors: list[Any] = []
    if options.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    ids = torch.tensor([PROMPT + MADE])
    x = LogitsProcessorList(processors)(ids, x)
    for token in set(MADE):
        x[0, token] -= options.presence_penalty + options.frequency_penalty * MADE.count(token)
    warpers: list[Any] = [TemperatureLogitsWarper(float(options.temperature))]
    if options.top_k:
        warpers.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        warpers.append(TopPLogitsWarper(options.top_p))
    if options.min_p:
        warpers.append(MinPLogitsWarper(options.min_p))
    return torch.softmax(LogitsProcessorList(warpers)(ids, x), -1)[0]


def chi_square(tokens: Tensor, p: Tensor) -> float:
    """The probability of frequencies this far from p or farther. Rare tokens are counted together."""
    assert (p[tokens] > 0).all(), "a token was drawn that has no probability"
    count = torch.bincount(tokens, minlength=len(p)).double()
    often = p * len(tokens) >= 10
    seen = torch.cat((count[often], count[~often].sum()[None]))
    wanted = torch.cat((p[often], p[~often].sum()[None])) * len(tokens)
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    if len(seen) == 1:
        return 1.0
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2, dtype=torch.float64), statistic / 2))


OPTIONS = {
    "plain": SamplingOptions(),
    "cold": SamplingOptions(temperature=0.5),
    "hot": SamplingOptions(temperature=1.7),
    "top_k": SamplingOptions(top_k=5),
    "top_k_of_one": SamplingOptions(top_k=1),
    "top_p": SamplingOptions(top_p=0.7),
    "small_top_p": SamplingOptions(top_p=0.01),
    "min_p": SamplingOptions(min_p=0.1),
    "repetition": SamplingOptions(repetition_penalty=1.8),
    "presence": SamplingOptions(presence_penalty=1.1),
    "frequency": SamplingOptions(frequency_penalty=0.7),
    "bias": SamplingOptions(bias=((4, 2.5), (0, -3.0), (4, 0.5))),
    "truncated": SamplingOptions(temperature=1.3, top_k=8, top_p=0.8, min_p=0.03),
    "all": SamplingOptions(
        temperature=0.8, top_k=9, top_p=0.9, min_p=0.02, repetition_penalty=1.3, presence_penalty=0.3,
        frequency_penalty=0.2, bias=((1, 1.0),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("vocabulary", (11, 97))
@pytest.mark.parametrize("name", OPTIONS)
def test_distribution_is_that_of_transformers(name, vocabulary):
    for seed in range(5):
        logits = some_logits(vocabulary, seed)
        torch.testing.assert_close(
            probabilities(logits, OPTIONS[name]), expected(logits, OPTIONS[name]), atol=1e-9, rtol=1e-9
        )


@pytest.mark.parametrize("vocabulary", (11, 97))
@pytest.mark.parametrize("name", OPTIONS)
def test_frequencies(name, vocabulary):
    logits, options = some_logits(vocabulary, 3), OPTIONS[name]
    rows, positions = np.zeros(DRAWS, np.int64), np.arange(DRAWS) + len(PROMPT)
    draws = table_of(options).draws(rows, positions)
    tokens = sample(logits.expand(DRAWS, -1), draws, counts_of(1, vocabulary)).tokens
    assert chi_square(tokens, expected(logits, options)) > 1e-4


def test_frequencies_over_seeds_and_samples():
    logits, p = some_logits(11, 4), torch.softmax(some_logits(11, 4), -1)[0]
    for options in (
        [SamplingOptions(seed=seed) for seed in range(5000)],
        [SamplingOptions(sample=number, seed=-1) for number in range(5000)],
        [SamplingOptions(seed=seed << 32) for seed in range(5000)],
    ):
        draws = table_of(*options).draws(np.arange(5000), np.full(5000, 17))
        assert chi_square(sample(logits.expand(5000, -1), draws).tokens, p) > 1e-4


def test_chi_square_finds_a_wrong_distribution():
    logits = some_logits(11, 3)
    draws = table_of(SamplingOptions()).draws(np.zeros(DRAWS, np.int64), np.arange(DRAWS))
    tokens = sample(logits.expand(DRAWS, -1), draws).tokens
    wrong = torch.softmax(1.05 * logits, -1)[0]
    assert chi_square(tokens, wrong) < 1e-4


def mixed() -> list[SamplingOptions]:
    named = [replace(each, seed=5 + i, sample=i % 3) for i, each in enumerate(OPTIONS.values())]
    greedy = SamplingOptions(temperature=0.0)
    return [*named, greedy, replace(greedy, repetition_penalty=1.5, logprobs=2), SamplingOptions(logprobs=4, seed=9)]


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("vocabulary", (97, 3 * BLOCK + 5))
def test_a_row_is_drawn_as_if_it_were_alone(dtype, vocabulary):
    """Bit for bit: token and log-probability, whatever the options of the others make the batch do."""
    options = mixed()
    n = len(options)
    logits = some_logits(vocabulary, 1, n).to(dtype)
    positions = np.arange(n) * 3 + 11
    counts, table = counts_of(n, vocabulary), table_of(*options)
    together = sample(logits, table.draws(np.arange(n), positions), counts)
    for order in (list(range(n))[::-1], list(range(0, n, 2)), *([i] for i in range(n))):
        some = sample(logits[order], table.draws(np.array(order), positions[order]), counts)
        assert torch.equal(some.tokens, together.tokens[order])
        if some.logprobs is not None:
            assert torch.equal(some.logprobs, together.logprobs[order])
            width = some.likeliest.shape[1]
            assert torch.equal(some.likeliest, together.likeliest[order][:, :width])
            assert torch.equal(some.likeliest_logprobs, together.likeliest_logprobs[order][:, :width])


def test_seed_sample_and_position_each_change_the_draw():
    options = SamplingOptions(seed=3)
    others = (options, replace(options, seed=4), replace(options, sample=1), replace(options, seed=3 + (1 << 32)))
    first = table_of(*others).draws(np.array([0, 0, 0, 1, 2, 3]), np.array([5, 5, 6, 5, 5, 5]))
    numbers = uniform(first, "sample").tolist()
    assert numbers[0] == numbers[1] and len(set(numbers)) == 5
    assert uniform(first, "accept").tolist()[0] != numbers[0]
    assert all(0 <= number < 1 for number in numbers)


def test_greedy_is_the_likeliest_and_the_first_of_equals():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, -1.0, 0.0, 2.0]])
    table = table_of(SamplingOptions(temperature=0.0), SamplingOptions())
    both = table.draws(np.array([0, 0, 1]), np.array([9, 9, 9]))
    assert sample(logits, table.draws(np.array([0, 0]), np.array([9, 9]))).tokens.tolist() == [1, 0]
    assert sample(torch.cat((logits, logits[:1])), both).tokens[:2].tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_smallest_temperatures_draw_the_likeliest(dtype):
    """They are 0 in the dtype of the logits, or a logit over them is inf."""
    logits = some_logits(97).to(dtype)
    for temperature in (5e-324, 1e-300, 1e-46, 1e-39):
        draws = table_of(SamplingOptions(temperature=temperature)).draws(np.array([0]), np.array([9]))
        assert sample(logits, draws).tokens.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("name", [*OPTIONS, "greedy"])
def test_one_token_that_is_left_is_drawn_and_rows_without_any_are_marked(name):
    options = OPTIONS.get(name, SamplingOptions(temperature=0.0))
    logits = torch.full((5, 97), -math.inf)
    logits[0, 13] = -5.0
    logits[1, 96] = 1e30
    logits[3, 5] = math.nan
    logits[4] = torch.arange(97.0)
    logits[4, 7] = math.inf
    options = replace(options, logprobs=1)
    tokens = sample(logits, table_of(options).draws(np.zeros(5, int), np.arange(5) + 8), counts_of(1, 97)).tokens
    assert tokens.tolist() == [13, 96, NO_TOKEN, NO_TOKEN, NO_TOKEN]


def test_end_tokens_are_not_drawn_before_the_least_number_of_tokens():
    options = SamplingOptions(end_tokens=(2, 5), least_tokens=3, bias=((2, 50.0), (5, 50.0)))
    positions = len(PROMPT) + np.arange(6)
    draws = table_of(options).draws(np.zeros(6, int), positions)
    tokens = sample(some_logits(11).expand(6, -1), draws).tokens.tolist()
    assert not {2, 5} & set(tokens[:3]) and set(tokens[3:]) <= {2, 5}


def test_log_probabilities_are_those_of_the_model():
    options = SamplingOptions(temperature=0.3, top_k=2, repetition_penalty=1.9, bias=((3, 9.0),), logprobs=5)
    logits = some_logits(97, 2, 6)
    table = table_of(options)
    found = sample(logits, table.draws(np.zeros(6, int), np.arange(6) + 20), counts_of(1, 97))
    right = torch.log_softmax(logits, -1)
    torch.testing.assert_close(found.logprobs, right.gather(1, found.tokens[:, None])[:, 0], atol=0, rtol=0)
    values, tokens = right.sort(-1, descending=True)
    assert torch.equal(found.likeliest, tokens[:, :5]) and torch.equal(found.likeliest_logprobs, values[:, :5])
    assert sample(logits, table_of(SamplingOptions()).draws(np.zeros(6, int), np.arange(6))).logprobs is None


def test_penalties_without_counts_are_an_error():
    draws = table_of(OPTIONS["presence"]).draws(np.array([0]), np.array([7]))
    with pytest.raises(ValueError, match="counted"):
        sample(some_logits(11), draws)


def test_a_row_of_counts_begins_anew():
    counts = counts_of(2, 11)
    counts.begin(1, torch.tensor([9]), torch.tensor([4, 4]))
    counts.add(torch.tensor([0, 1]), torch.tensor([NO_TOKEN, 4]))
    assert counts.prompt[1].nonzero().flatten().tolist() == [9] and counts.made[1].tolist()[4] == 3
    assert counts.made[1].sum() == 3 and counts.made[0].sum() == len(MADE)


def test_each_token_has_the_interval_of_its_weight():
    weights = torch.tensor([[0, 3, 0, 0, 5, 2, 0]])
    tokens = draw(weights.expand(10, -1), torch.arange(10) / 10 + 1e-9)
    assert tokens.tolist() == [1] * 3 + [4] * 5 + [5] * 2
    edges = torch.tensor([0.0, 1 - 2.0**-53])
    assert draw(weights.expand(2, -1), edges).tolist() == [1, 5]
    long = torch.zeros(4, 4 * BLOCK, dtype=torch.int64)
    long[:, [0, BLOCK - 1, BLOCK, 4 * BLOCK - 1]] = 1
    tokens = draw(long, torch.arange(4) / 4 + 1e-9)
    assert tokens.tolist() == [0, BLOCK - 1, BLOCK, 4 * BLOCK - 1]


def test_sums_of_weights_do_not_overflow():
    for vocabulary in (2, 3, 1000, 128_256, 262_144, 10**6):
        assert vocabulary * (1 << weight_bits(vocabulary)) <= 2**62
    flat = torch.zeros(1, 128_256)
    draws = table_of(SamplingOptions()).draws(np.array([0]), np.array([3]))
    weights = token_weights(flat, draws)
    assert weights.sum() > 0 and len(weights.unique()) == 1


def test_sure_drafts_leave_the_text_as_it_is():
    drafts = torch.tensor([[3, 4, 5], [3, 4, 5], [3, 9, 5], [8, 4, 5], [3, 4, 5]])
    drawn = torch.tensor([[3, 4, 5, 6]] * 5)
    kept = accept_same(drafts, torch.tensor([3, 2, 3, 3, 0]), drawn)
    n = NO_TOKEN
    assert kept.tolist() == [[3, 4, 5, 6], [3, 4, 5, n], [3, 4, n, n], [3, n, n, n], [3, n, n, n]]


def test_sure_drafts_leave_the_distribution_as_it_is():
    """Of the first token, whatever the draft; drafts are accepted with their probability."""
    logits = some_logits(11, 6)
    p = torch.softmax(logits, -1)[0]
    table = table_of(SamplingOptions())
    positions = np.arange(2 * DRAWS)
    tokens = sample(logits.expand(2 * DRAWS, -1), table.draws(np.zeros(2 * DRAWS, int), positions)).tokens.view(-1, 2)
    draft = int(p.argmax())
    kept = accept_same(torch.full((DRAWS, 1), draft), torch.ones(DRAWS, dtype=torch.int64), tokens)
    assert chi_square(kept[:, 0], p) > 1e-4
    more = kept[:, 1] != NO_TOKEN
    assert torch.equal(more, kept[:, 0] == draft)
    assert chi_square(kept[more, 1], p) > 1e-4


def draws_of_one():
    return table_of(SamplingOptions()).draws(np.array([0]), np.array([0]))
