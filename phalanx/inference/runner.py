"""Runs the steps of a scheduler on the device: pieces of sequences go through this rank's blocks in batches, then the
tokens that follow are drawn.

A drawn token stays on the device, where the next step reads it; the host is given a copy when it asks. Nothing here
waits for the device but `Drawn.read`. The stages of a pipeline compute several steps at once, of different sequences:
tokens go from the last stage to the others, which take them only when a step goes on from them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from phalanx.comm.axis import Axis, Work
from phalanx.inference.adapters import TokenAdapters, give_tokens
from phalanx.inference.grammar import Constraint
from phalanx.inference.graphs import StepGraphs
from phalanx.inference.load import InferenceModel
from phalanx.inference.memory import MemoryLimits
from phalanx.inference.own_tokens import own_batch, own_slots
from phalanx.inference.request import TokenScore
from phalanx.inference.sampler import Draws, OptionTable, Sampled, TokenCounts, accept_same, has_penalties, sample
from phalanx.inference.scheduler import NO_TOKEN, SAMPLED, LiveSequence, Step
from phalanx.inference.scores import ScoredPrompt
from phalanx.sequence.batch import Batch
from phalanx.sequence.paged import PagedSequences, PagedSpans


@dataclass(frozen=True)
class WantedTokens:
    """The tokens of a step whose logits are wanted.

    ends    (R,) their places in the step, in order
    owners  (R,) the sequence of the step to which each belongs
    draws   (R,) bool: a token is drawn there; elsewhere a prompt's next token is scored
    """

    ends: np.ndarray
    owners: np.ndarray
    draws: np.ndarray

    @staticmethod
    def of(step: Step, scored: Mapping[int, ScoredPrompt]) -> WantedTokens:
        """scored: prompts, by request, of which all tokens are scored."""
        last = step.starts[1:]  # one past each sequence's last token
        drawing = np.flatnonzero(step.samples)
        if not step.drafts.any() and not scored:
            return WantedTokens(last[drawing].astype(np.int64) - 1, drawing, np.ones(len(drawing), np.bool_))
        ends: list[int] = []
        owners: list[int] = []
        draws: list[bool] = []
        for i in range(len(step)):
            end, count = int(last[i]), int(step.counts[i])
            drawn = int(step.drafts[i]) + 1 if step.samples[i] else 0
            prompt = scored.get(int(step.requests[i]))
            wanted = drawn if prompt is None else max(drawn, count - prompt.unscored(int(step.firsts[i])))
            ends += range(end - wanted, end)
            owners += [i] * wanted
            draws += [place >= wanted - drawn for place in range(wanted)]
        return WantedTokens(np.array(ends, np.int64), np.array(owners, np.int64), np.array(draws, np.bool_))


class Drawn:
    """What a step made, on its way from the last stage of a pipeline to all others, and to the host.

    owners   (D,) the sequence of the step that each token was drawn for, in order
    rows     (D,) of those, on the device
    scored   of tokens of prompts: their requests and positions
    prompts  their log-probabilities

    On other stages than the last `sampled` and `prompts` are room for what the last one has.
    """

    def __init__(
        self,
        step: Step,
        owners: np.ndarray,
        rows: Tensor,
        sampled: Sampled,
        scored: list[tuple[int, int]],
        prompts: Sampled,
    ):
        self.step, self.rows, self.tokens = step, rows, sampled.tokens
        self._owners, self._scored, self._made = owners, scored, (sampled, prompts)
        self._copies: list[HostCopy] = []
        self._pp = Axis("pp")
        self._sent: list[Work] = []

    def send(self, pp: Axis) -> Drawn:
        """The last stage of a pipeline lets it go out, and waits for nobody. All stages must do so in one order."""
        self._pp = pp
        if pp.index == pp.size - 1:
            self._sent = [pp.post_broadcast(t, source=pp.index) for t in self._tensors]
        return self

    def arrive(self) -> None:
        """It is needed here: other stages wait for it."""
        if self._copies:
            return
        for work in self._sent:
            work.wait()
        if self._pp.index < self._pp.size - 1:
            for t in self._tensors:
                self._pp.broadcast(t, source=self._pp.size - 1)
        self._copies = [HostCopy(made) for made in self._made]

    @property
    def _tensors(self) -> list[Tensor]:
        sampled, prompts = self._made
        made = (
            sampled.tokens,
            *(t for s in (sampled, prompts) for t in (s.logprobs, s.likeliest, s.likeliest_logprobs)),
        )
        return [t for t in made if t is not None]

    def read(self) -> DrawnTokens:
        """Waits until it is there."""
        self.arrive()
        (tokens, scores), (_, prompt_scores) = (copy.read() for copy in self._copies)
        width = int(self.step.drafts.max(initial=0)) + 1
        table = np.full((len(self.step), width), NO_TOKEN, np.int64)
        found: list[list[TokenScore]] = [[] for _ in range(len(self.step))]
        column = np.arange(len(tokens)) - np.searchsorted(self._owners, self._owners)
        table[self._owners, column] = tokens
        if width > 1:
            table = accepted_of(self.step, table)
        for owner, score in zip(self._owners.tolist(), scores):
            found[owner].append(score)
        prompts = [(request, position, score) for (request, position), score in zip(self._scored, prompt_scores)]
        return DrawnTokens(table, found, prompts)


def accepted_of(step: Step, drawn: np.ndarray) -> np.ndarray:
    """(S, 1 + K): what stays of the tokens drawn after each sequence's last one and after each of its drafts."""
    drafts = np.zeros((len(step), drawn.shape[1] - 1), np.int64)
    for i in np.flatnonzero(step.drafts).tolist():
        count, end = int(step.drafts[i]), int(step.starts[i + 1])
        drafts[i, :count] = step.tokens[end - count : end]
    return accept_same(*(torch.from_numpy(x) for x in (drafts, step.drafts, drawn))).numpy()


@dataclass(frozen=True)
class DrawnTokens:
    """Of a step, on the host.

    tokens   (S, 1 + drafts) of each sequence the drafts that were accepted and the token drawn after them, then
             NO_TOKEN
    scores   of each sequence, those of its tokens, if log-probabilities were asked for
    prompts  request, position and score of tokens of prompts
    """

    tokens: np.ndarray
    scores: list[list[TokenScore]]
    prompts: list[tuple[int, int, TokenScore]]


class HostCopy:
    """Tokens with their scores on their way to the host."""

    def __init__(self, sampled: Sampled):
        tensors = (sampled.tokens, sampled.logprobs, sampled.likeliest, sampled.likeliest_logprobs)
        self._copies = [None if t is None else to_host(t) for t in tensors]
        self._done = torch.cuda.Event() if sampled.tokens.is_cuda else None
        if self._done is not None:
            self._done.record()

    def read(self) -> tuple[np.ndarray, list[TokenScore]]:
        if self._done is not None:
            self._done.synchronize()
        tokens, logprobs, likeliest, theirs = (None if t is None else t.numpy() for t in self._copies)
        if tokens is None or logprobs is None:
            return (np.empty(0, np.int64) if tokens is None else tokens), []
        best: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
        if likeliest is not None and theirs is not None:
            best = [tuple(zip(a, b)) for a, b in zip(likeliest.tolist(), theirs.tolist())]
        return tokens, [TokenScore(*each) for each in zip(tokens.tolist(), logprobs.tolist(), best)]


class Runner:
    """What one rank keeps on its device for the sequences that run: the last token of each row, and how its tokens are
    drawn."""

    def __init__(self, model: InferenceModel, limits: MemoryLimits, groups: int, drafts: int = 0):
        """groups: of layers that remember alike. drafts: of a sequence in a step, at most."""
        self.model, self.limits, self.mesh = model, limits, model.mesh
        self.last = torch.zeros(limits.most_sequences, dtype=torch.int64, device=self.mesh.device)
        self.options = OptionTable(limits.most_sequences)
        self.counts: TokenCounts | None = None  # made where tokens are drawn, when penalties are asked for
        self.vocab = model.plan.run.model.vocab_size
        self.adapters: TokenAdapters | None = None
        if model.adapters is not None:
            self.adapters = TokenAdapters(model.adapters, limits.most_sequences, model.mesh)
            give_tokens(model.blocks, self.adapters)
        self.graphs = StepGraphs(model, limits, groups, self.last, drafts, self.adapters)
        self._coming: deque[Drawn] = deque()  # in the order of their steps
        self._like = torch.empty(0, dtype=wide_dtype(model.dtype), device=self.mesh.device)

    def run(self, step: Step, scored: Mapping[int, ScoredPrompt], constraints: Mapping[int, Constraint]) -> Drawn:
        """Collective over the ranks of a replica. By request, scored: prompts of which all tokens are scored;
        constraints: of those with a grammar."""
        # whatever a step goes on from was drawn so many steps before it (SchedulerSpec.in_flight)
        while self._coming and self._coming[0].step.number <= step.number - self.mesh.pp.size:
            self._feed(self._coming.popleft())
        for i in step.admitted:
            self._admit(int(step.rows[i]), step.sequences[i])
        drawn = self._run(step, scored, constraints).send(self.mesh.pp)
        self._coming.append(drawn)
        return drawn

    def settle(self) -> None:
        """All that was drawn is on all stages: none waits for another."""
        while self._coming:
            self._feed(self._coming.popleft())

    def _feed(self, drawn: Drawn) -> None:
        """Tokens are there for the steps that go on from them."""
        drawn.arrive()
        self.last[drawn.rows] = drawn.tokens.clamp(min=0)

    def _run(self, step: Step, scored: Mapping[int, ScoredPrompt], constraints: Mapping[int, Constraint]) -> Drawn:
        layout = None if scored else self.graphs.layout_of(step)
        if layout is not None:
            owners, before_last = step.draws
            replayed, all_draw = self.graphs.replay(step, layout), np.ones(len(owners), np.bool_)
            how = self._draws(step, owners, step.lengths[owners] - before_last, constraints)
            rows, sampled = self._draw(replayed, step.rows[owners], all_draw, how)
            return Drawn(step, owners, rows, sampled, [], Sampled(sampled.tokens[:0]))
        wanted = WantedTokens.of(step, scored)
        owners, draws = wanted.owners, wanted.draws
        made = self.model.logits([self._batch(step, wanted.ends)])
        logits = made[0] if made else None
        places = step.starts[owners] + step.counts[owners] - 1  # of the last token of each owner
        positions = (step.firsts + step.counts)[owners] - (places - wanted.ends)  # of the tokens that come next
        how = self._draws(step, owners[draws], positions[draws], constraints)
        rows, sampled = self._draw(logits, step.rows[owners], draws, how)
        found = [(int(n), int(p)) for n, p in zip(step.requests[owners[~draws]], positions[~draws])]
        return Drawn(step, owners[draws], rows, sampled, found, self._score(logits, found, draws, scored))

    def _admit(self, row: int, sequence: LiveSequence) -> None:
        """A sequence has a row: for the first time, or anew with what it has made so far."""
        options = sequence.request.options
        self.options.begin(row, options, sequence.prompt)
        if self.adapters is not None:
            self.adapters.begin(row, options.adapter)
        if has_penalties(options) and self.model.draws:
            if self.counts is None:
                self.counts = TokenCounts(self.limits.most_sequences, self.vocab, self.mesh.device)
            tokens = self._to_device(np.array(sequence.tokens, np.int64))
            self.counts.begin(row, tokens[: sequence.prompt], tokens[sequence.prompt :])

    def _draws(
        self, step: Step, owners: np.ndarray, positions: np.ndarray, constraints: Mapping[int, Constraint]
    ) -> Draws:
        """How tokens at these positions are drawn for these sequences of a step. What grammars allow every rank asks,
        so that all know alike why a text cannot go on."""
        how = self.options.draws(step.rows[owners], positions, self.mesh.device)
        asked = [constraints.get(number) for number in step.requests[owners].tolist()] if constraints else []
        masks = {i: constraint.mask() for i, constraint in enumerate(asked) if constraint is not None}
        if not masks:
            return how
        which, allowed = np.array(list(masks), np.int64), np.stack(list(masks.values()))
        return replace(how, allowed=(self._to_device(which), self._to_device(allowed)))

    def _draw(self, logits: Tensor | None, rows: np.ndarray, draws: np.ndarray, how: Draws) -> tuple[Tensor, Sampled]:
        """Tokens for the rows of logits that draw, and these rows on the device. Without logits: room for them."""
        at = self._to_device(rows[draws])
        if logits is None:
            width = None if how.logprobs is None else min(how.logprobs, self.vocab)
            return at, empty_sample(len(at), width, self._like)
        mine = logits if draws.all() else logits[self._to_device(np.flatnonzero(draws))]
        sampled = sample(widened(mine), how, self.counts)
        if self.counts is not None:
            self.counts.add(at, sampled.tokens)
        return at, sampled

    def _score(
        self, logits: Tensor | None, found: list[tuple[int, int]], draws: np.ndarray, scored: Mapping[int, ScoredPrompt]
    ) -> Sampled:
        """Log-probabilities of tokens of prompts, found as (request, position), at the rows that do not draw."""
        tokens = self._to_device(np.array([scored[n].tokens[p] for n, p in found], np.int64))
        likeliest = max((scored[n].likeliest for n, _ in found), default=0)
        if not found:
            return Sampled(tokens)
        likeliest = min(likeliest, self.vocab)
        made = empty_sample(len(found), likeliest, self._like)
        if logits is not None:
            logprobs = torch.log_softmax(widened(logits[self._to_device(np.flatnonzero(~draws))]), -1)
            best, which = logprobs.topk(likeliest, -1)
            made = Sampled(tokens, logprobs.gather(1, tokens[:, None])[:, 0], which, best)
        return replace(made, tokens=tokens)

    def _batch(self, step: Step, ends: np.ndarray) -> Batch:
        """The tokens of a step, filled up to what tp x cp divides; of these this rank's. ends: places of those whose
        logits are wanted."""
        here, cp = len(step.tokens), self.mesh.cp
        ranks = self.mesh.grid.tp * cp.size
        tokens = ranks * max(1, -(-here // ranks))

        def filled(x: np.ndarray) -> Tensor:
            out = np.zeros(tokens, np.int64)
            out[:here] = x
            return self._to_device(out)

        ids = filled(np.where(step.tokens == SAMPLED, 0, step.tokens))
        fed = np.flatnonzero(step.tokens == SAMPLED)
        if len(fed):
            owners = np.searchsorted(step.starts, fed, side="right") - 1
            ids[self._to_device(fed)] = self.last[self._to_device(step.rows[owners])]
        if self.adapters is not None:
            self.adapters.choose(filled(np.repeat(step.rows, step.counts)))
        starts, most_keys = self._to_device(step.starts), int(step.lengths.max(initial=1))
        lengths = self._to_device(step.lengths.astype(np.int32))
        spans = tuple(
            PagedSpans(
                starts=starts,
                lengths=lengths,
                table=self._to_device(table[step.rows, : self.limits.pages_of(most_keys)]),
                page_size=self.limits.own_page_size,
                most_queries=int(step.counts.max(initial=1)),
                most_keys=most_keys,
                offset=cp.index,
                stride=cp.size,
                batch_invariant=self.model.batch_invariant,
            ).with_prompts(step.counts.tolist(), step.lengths.tolist())
            for table in step.tables
        )
        slots = tuple(own_slots(filled(slots), cp) for slots in step.slots)
        paged = PagedSequences(spans, slots, self._to_device(ends), self.limits.length)
        real = None if here == tokens else filled(np.ones(here, np.int64))
        return own_batch(ids, filled(step.positions), real, paged, cp)

    def _to_device(self, x: np.ndarray) -> Tensor:
        there = torch.from_numpy(np.ascontiguousarray(x))
        return there if self.mesh.device.type == "cpu" else there.pin_memory().to(self.mesh.device, non_blocking=True)


def to_host(x: Tensor) -> Tensor:
    """A copy on the host, there when the device is through with what was asked of it: only into pinned memory is the
    host not made to wait."""
    return x if x.is_cpu else torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def widened(logits: Tensor) -> Tensor:
    """In fp32 at least."""
    return logits.to(wide_dtype(logits.dtype))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def empty_sample(rows: int, width: int | None, like: Tensor) -> Sampled:
    """With room for what another rank has drawn: log-probabilities with dtype and device of `like`, and those of
    `width` likeliest tokens."""
    tokens = torch.zeros(rows, dtype=torch.int64, device=like.device)
    if width is None:
        return Sampled(tokens)
    wide = like.new_zeros(rows, width)
    return Sampled(tokens, like.new_zeros(rows), torch.zeros_like(wide, dtype=torch.int64), wide)
