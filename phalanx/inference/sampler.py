"""Drawing the next token of each sequence of a batch on the device, without a host sync.

Logits become whole numbers: weights proportional to the probabilities after bias, penalties, temperature, top-k, top-p
and min-p. Sums of whole numbers are exact in any order, so the token drawn for a sequence is a function of its logits,
its options and one random number, and that of (seed, sample, position): the same text whatever else is in the batch,
whichever ranks or kernels add, before and after preemption.

One random number and an inverse of the cumulative sum are used, not Gumbel noise for each token: Philox for 256 x
128,000 tokens is some sixty passes over 268 MB, ten milliseconds of an H200 and far more of a CPU; the weights and
their sums are about eight passes. Sorting is for top-p without top-k alone, and only of sequences that ask for it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.rng import key_of, philox
from phalanx.inference.request import SamplingOptions
from phalanx.inference.scheduler import NO_TOKEN

BLOCK = 512  # tokens whose weights are added before the cumulative sum is looked through
WORD = 0xFFFFFFFF

FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed_low",
    "seed_high",
    "sample",
    "position",
)
COLUMN = {name: i for i, name in enumerate(FIELDS)}


@dataclass(frozen=True)
class Draws:
    """How the next token of each of S rows of logits is drawn; tensors on the device, the rest is known to the host.

    values        (S, FIELDS) float64
    bias          (S', ) rows, (S',) tokens and (S',) what is added to their logits; None: nothing
    forbidden     (S'',) rows and (S'',) tokens that are not drawn; None: nothing
    allowed       (A,) rows and (A, vocabulary / 8) uint8, bits of the tokens that alone are drawn there, the lowest
                  first; None: no row has a grammar
    truncated     (R,) rows with top-k or top-p; None: none has
    most_k        the largest top-k if all of those rows have one
    count_rows    (S,) rows of TokenCounts; None: no penalties
    greedy        all rows want the likeliest token
    min_p         some row has one
    logprobs      likeliest tokens that are returned with log-probabilities; None: none is, nor the drawn one's
    """

    values: Tensor
    bias: tuple[Tensor, Tensor, Tensor] | None = None
    forbidden: tuple[Tensor, Tensor] | None = None
    allowed: tuple[Tensor, Tensor] | None = None
    truncated: Tensor | None = None
    most_k: int | None = None
    count_rows: Tensor | None = None
    greedy: bool = False
    min_p: bool = False
    logprobs: int | None = None

    def column(self, name: str) -> Tensor:
        """(S, 1) float64."""
        i = COLUMN[name]
        return self.values[:, i : i + 1]

    def at(self, positions: Tensor) -> Draws:
        """The same of tokens at other positions (S,), which the device knows."""
        values = self.values.clone()
        values[:, COLUMN["position"]] = positions.to(values.dtype)
        return replace(self, values=values)

    def later(self, tokens: int) -> Draws:
        """The same of tokens so many positions later."""
        return self.at(self.values[:, COLUMN["position"]] + tokens)


@dataclass(frozen=True)
class Sampled:
    """tokens (S,) int64; NO_TOKEN where a logit is NaN or inf, or all are -inf (clamp it before the model reads it).
    If asked for, of the model's own distribution: logprobs (S,) of the tokens, and the likeliest tokens of each row,
    best first: likeliest (S, L) int64, likeliest_logprobs (S, L)."""

    tokens: Tensor
    logprobs: Tensor | None = None
    likeliest: Tensor | None = None
    likeliest_logprobs: Tensor | None = None


def options_row(options: SamplingOptions) -> np.ndarray:
    """(FIELDS,) float64; the position is left 0."""
    seed = options.seed % 2**64
    values = {
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "repetition_penalty": options.repetition_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "seed_low": seed & WORD,
        "seed_high": seed >> 32,
        "sample": options.sample,
        "position": 0,
    }
    return np.array([values[name] for name in FIELDS], np.float64)


def has_penalties(options: SamplingOptions) -> bool:
    neutral = SamplingOptions()
    return (options.repetition_penalty, options.presence_penalty, options.frequency_penalty) != (
        neutral.repetition_penalty,
        neutral.presence_penalty,
        neutral.frequency_penalty,
    )


class OptionTable:
    """Options of the requests that run, by row, on the host.

    What a step needs of them goes to the device in a few small copies.
    """

    def __init__(self, rows: int):
        self._values = np.zeros((rows, len(FIELDS)))
        self._options = [SamplingOptions()] * rows
        self._prompts = np.zeros(rows, np.int64)
        self._penalties = np.zeros(rows, np.bool_)
        self._sparse = np.zeros(rows, np.bool_)  # with bias, or tokens that are forbidden at first
        self._logprobs = np.full(rows, -1, np.int64)

    def begin(self, row: int, options: SamplingOptions, prompt: int) -> None:
        """A request with a prompt of so many tokens has a row."""
        self._values[row] = options_row(options)
        self._options[row] = options
        self._prompts[row] = prompt
        self._penalties[row] = has_penalties(options)
        self._sparse[row] = bool(options.bias) or (bool(options.end_tokens) and options.least_tokens > 0)
        self._sparse[row] |= bool(options.not_first)
        self._logprobs[row] = -1 if options.logprobs is None else options.logprobs

    def draws(self, rows: np.ndarray, positions: np.ndarray, device: torch.device | str = "cpu") -> Draws:
        """For tokens at these positions (S,) of sequences in these rows (S,); a row may be there several times."""
        values = self._values[rows]
        values[:, COLUMN["position"]] = positions
        top_k, top_p = values[:, COLUMN["top_k"]], values[:, COLUMN["top_p"]]
        temperature = values[:, COLUMN["temperature"]]
        truncated = np.flatnonzero(((top_k > 0) | (top_p < 1)) & (temperature > 0))
        most_k = int(top_k[truncated].max()) if len(truncated) and (top_k[truncated] > 0).all() else None
        bias, forbidden = self._sparse_of(rows, positions, device) if self._sparse[rows].any() else (None, None)
        logprobs = int(self._logprobs[rows].max(initial=-1))
        return Draws(
            on(values, device),
            bias=bias,
            forbidden=forbidden,
            truncated=on(truncated, device) if len(truncated) else None,
            most_k=most_k,
            count_rows=on(np.asarray(rows, np.int64), device) if self._penalties[rows].any() else None,
            greedy=bool((temperature == 0).all()),
            min_p=bool((values[:, COLUMN["min_p"]] > 0).any()),
            logprobs=None if logprobs < 0 else logprobs,
        )

    def _sparse_of(
        self, rows: np.ndarray, positions: np.ndarray, device: torch.device | str
    ) -> tuple[tuple[Tensor, Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
        biased: list[tuple[int, int, float]] = []
        forbidden: list[tuple[int, int]] = []
        for i in np.flatnonzero(self._sparse[rows]).tolist():
            row = int(rows[i])
            options = self._options[row]
            biased += [(i, token, value) for token, value in options.bias]
            if positions[i] - self._prompts[row] < options.least_tokens:
                forbidden += [(i, token) for token in options.end_tokens]
            if positions[i] == self._prompts[row]:
                forbidden += [(i, token) for token in options.not_first]
        bias = None
        if biased:
            at, tokens, values = zip(*biased)
            bias = (on(np.array(at), device), on(np.array(tokens), device), on(np.array(values, np.float64), device))
        if not forbidden:
            return bias, None
        at, tokens = zip(*forbidden)
        return bias, (on(np.array(at), device), on(np.array(tokens), device))


def on(values: np.ndarray, device: torch.device | str) -> Tensor:
    """A copy on the device; on its way there the host goes on."""
    tensor = torch.from_numpy(values)
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class TokenCounts:
    """Which tokens each row's prompt has, and how often it made each: for penalties. 5 bytes for each row and token of
    the vocabulary."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device | str = "cpu"):
        self.made = torch.zeros(rows, vocabulary, dtype=torch.int32, device=device)
        self.prompt = torch.zeros(rows, vocabulary, dtype=torch.bool, device=device)

    def begin(self, row: int, prompt: Tensor, made: Tensor) -> None:
        """A row is a sequence's with these tokens (int64) so far."""
        self.prompt[row].zero_().index_fill_(0, prompt, True)
        self.made[row].zero_().index_add_(0, made, torch.ones_like(made, dtype=torch.int32))

    def add(self, rows: Tensor, tokens: Tensor) -> None:
        """Tokens (S,) were made in rows (S,), each there once; NO_TOKEN: none."""
        more = (tokens != NO_TOKEN).to(torch.int32)
        self.made.index_put_((rows, tokens.clamp(min=0)), more, accumulate=True)


def widened(logits: Tensor) -> Tensor:
    """In fp32 at least."""
    return logits.to(wide_dtype(logits.dtype))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def sample(logits: Tensor, draws: Draws, counts: TokenCounts | None = None) -> Sampled:
    """A token for each row of logits (S, vocabulary), fp32 or fp64, that come from the model."""
    adjusted = adjust(logits, draws, counts)
    if draws.greedy:
        best, tokens = adjusted.max(-1)
        tokens = torch.where(best.isfinite(), tokens, NO_TOKEN)
    else:
        tokens = draw(token_weights(adjusted, draws), uniform(draws, "sample"))
    if draws.logprobs is None:
        return Sampled(tokens)
    logprobs = torch.log_softmax(logits, -1)
    best, likeliest = logprobs.topk(min(draws.logprobs, logits.shape[1]), -1)
    return Sampled(tokens, logprobs.gather(1, tokens.clamp(min=0)[:, None])[:, 0], likeliest, best)


def adjust(logits: Tensor, draws: Draws, counts: TokenCounts | None = None) -> Tensor:
    """Logits after bias, penalties (repetition first, as transformers and vLLM do), forbidden tokens and grammars."""
    x = logits
    if draws.bias is not None:
        rows, tokens, values = draws.bias
        x = x.index_put((rows, tokens), values.to(x.dtype), accumulate=True)
    if draws.count_rows is not None:
        if counts is None:
            raise ValueError("requests have penalties, but tokens were not counted")
        made, prompt = counts.made[draws.count_rows], counts.prompt[draws.count_rows]
        repetition = draws.column("repetition_penalty").to(x.dtype)
        repeated = torch.where(x > 0, x / repetition, x * repetition)
        x = torch.where(prompt | (made > 0), repeated, x)
        x = x - draws.column("presence_penalty").to(x.dtype) * (made > 0)
        x = x - draws.column("frequency_penalty").to(x.dtype) * made
    if draws.forbidden is not None:
        rows, tokens = draws.forbidden
        x = x.index_put((rows, tokens), x.new_full((), -math.inf))
    if draws.allowed is not None:
        rows, bits = draws.allowed
        x = x.index_put((rows,), torch.where(unpacked(bits, x.shape[1]), x[rows], -math.inf))
    return x


def unpacked(bits: Tensor, count: int) -> Tensor:
    """(A, count) bool of (A, bytes) uint8, lowest bits first."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, :, None] >> places) & 1).view(len(bits), -1)[:, :count].bool()


def weight_bits(vocabulary: int) -> int:
    """The likeliest token's weight is two to this: a sum of all weights stays below 2**62. What is less likely than
    it by more has weight 0; together that is a probability below 2**-26 at 2**18 tokens."""
    return min(52, 62 - math.ceil(math.log2(max(2, vocabulary))))


def token_weights(adjusted: Tensor, draws: Draws) -> Tensor:
    """(S, vocabulary) int64, proportional to the probabilities of tokens: 0 for tokens that are not drawn; at
    temperature 0 for all but the likeliest (the first of those). A row of NaN or of -inf alone has no weights."""
    temperature = draws.column("temperature")
    greedy = temperature == 0
    best, first = adjusted.max(-1, keepdim=True)
    least = torch.finfo(adjusted.dtype).tiny  # what is smaller would become 0, and the likeliest token NaN
    scale = torch.where(greedy, 1.0, temperature.clamp(min=least)).to(adjusted.dtype)
    probability = ((adjusted - best) / scale).exp_()  # of the likeliest token's
    one = 1 << weight_bits(adjusted.shape[1])
    weights = (probability * one).nan_to_num_(nan=0.0).to(torch.int64)
    if draws.truncated is not None:
        weights[draws.truncated] = truncate(weights[draws.truncated], draws, draws.truncated)
    if draws.min_p:
        weights = torch.where(probability < draws.column("min_p").to(adjusted.dtype), 0, weights)
    alone = torch.zeros_like(weights[:, :1]).masked_fill_(best.isfinite(), one)
    only = torch.zeros_like(weights).scatter_(1, first, alone)
    return torch.where(greedy, only, weights)


def truncate(weights: Tensor, draws: Draws, rows: Tensor) -> Tensor:
    """Weights (R, vocabulary) of these rows without what top-k, then top-p leave out. Kept is a token with the weight
    of the k-th, and one if all that are likelier have together less than top-p of what top-k has kept: tokens of one
    weight are kept or left out together, so the order of equal ones does not matter."""
    vocabulary = weights.shape[1]
    top_k = draws.column("top_k")[rows].to(torch.int64)
    top_p = draws.column("top_p")[rows]
    if draws.most_k is not None and draws.most_k < vocabulary:
        ordered = weights.topk(draws.most_k, -1).values
    else:
        ordered = weights.sort(-1, descending=True).values
    last = torch.where(top_k > 0, top_k, vocabulary).clamp(max=ordered.shape[1]) - 1
    least = ordered.gather(1, last)  # the k-th weight
    kept = torch.where(weights >= least, weights, 0)
    total = kept.sum(-1, keepdim=True)
    before = ordered.cumsum(-1) - ordered
    inside = (before.double() < top_p * total.double()) & (ordered >= least)
    inside[:, 0] = True
    count = inside.to(torch.int64).sum(-1, keepdim=True)
    return torch.where(kept >= ordered.gather(1, count - 1), kept, 0)


def uniform(draws: Draws, what: str) -> Tensor:
    """(S,) float64 in [0, 1): 53 bits for (seed, sample, position) and what they are for."""
    words = [draws.values[:, COLUMN[name]].to(torch.int64) for name in ("position", "sample", "seed_low", "seed_high")]
    first, second, _, _ = philox(tuple(words), key_of(0, what))
    return ((first << 21) + (second >> 11)).double() * 2.0**-53


def draw(weights: Tensor, random: Tensor) -> Tensor:
    """(S,) int64: tokens by the inverse of the cumulative sum of weights (S, vocabulary), in the order of their
    numbers, at random (S,) in [0, 1). NO_TOKEN for a row without weights."""
    rows, vocabulary = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -vocabulary % BLOCK)).view(rows, -1, BLOCK)
    sums = padded.sum(-1).cumsum(-1)
    total = sums[:, -1:]
    place = torch.minimum((random[:, None] * total.double()).to(torch.int64), total - 1)
    block = (sums <= place).to(torch.int64).sum(-1, keepdim=True).clamp_(max=sums.shape[1] - 1)
    inner = padded.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].cumsum(-1)
    before = sums.gather(1, block) - inner[:, -1:]
    token = block * BLOCK + (inner <= place - before).to(torch.int64).sum(-1, keepdim=True)
    return torch.where(total > 0, token, NO_TOKEN)[:, 0]


def accept_same(drafts: Tensor, counts: Tensor, drawn: Tensor) -> Tensor:
    """Which drafts stay, if a draft is one token for sure (of n-grams, or the likeliest of another model).

    drafts  (S, K) int64
    counts  (S,) drafts of each sequence
    drawn   (S, K + 1) tokens that `sample` drew from the logits after the sequence, after its first draft, ...

    Returns (S, K + 1) int64: tokens drawn as long as each before is the draft, then NO_TOKEN. A draft x is accepted
    with its probability p(x), and else the token drawn has the distribution p without x: that is rejection sampling
    (Leviathan et al., "Fast inference from transformers via speculative decoding", 2023), and the text is the one
    without drafts, token by token.
    """
    width = drafts.shape[1]
    places = torch.arange(width, device=drafts.device)
    same = (drafts == drawn[:, :width]) & (places < counts[:, None])
    stay = same.to(torch.int64).cumprod(-1).sum(-1, keepdim=True)
    return torch.where(torch.arange(width + 1, device=drafts.device) <= stay, drawn, NO_TOKEN)
