"""Runs the steps of a scheduler on the device: pieces of sequences go through this rank's blocks in batches, then the
tokens that follow are drawn.

A drawn token stays on the device, where the next step reads it; the host is given a copy when it asks. Nothing here
waits for the device but `Drawn.read`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from phalanx.inference.graphs import DecodeGraphs
from phalanx.inference.load import InferenceModel
from phalanx.inference.memory import MemoryLimits
from phalanx.inference.request import TokenScore
from phalanx.inference.sampler import OptionTable, Sampled, TokenCounts, has_penalties, sample
from phalanx.inference.scheduler import NO_TOKEN, SAMPLED, LiveSequence, Step
from phalanx.inference.scores import ScoredPrompt
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.sequence.paged import PagedSequences, PagedSpans


@dataclass(frozen=True)
class StepPart:
    """Sequences first .. stop of a step, which go through the blocks as one batch.

    ends    (R,) places in the part of the tokens whose logits are wanted, in order
    owners  (R,) the sequence of the step to which each belongs
    draws   (R,) bool: a token is drawn there; elsewhere a prompt's next token is scored
    """

    first: int
    stop: int
    ends: np.ndarray
    owners: np.ndarray
    draws: np.ndarray


def parts_of(step: Step, count: int, scored: Mapping[int, ScoredPrompt]) -> list[StepPart]:
    """A step in `count` parts of about as many tokens each; some may be empty. scored: prompts, by request, of which
    all tokens are scored."""
    marks = np.searchsorted(step.starts, [len(step.tokens) * i / count for i in range(1, count)])
    edges = [0, *marks.tolist(), len(step)]
    return [_part(step, a, b, scored) for a, b in pairwise(edges)]


def _part(step: Step, first: int, stop: int, scored: Mapping[int, ScoredPrompt]) -> StepPart:
    begin = step.starts[first]
    last = step.starts[first + 1 : stop + 1] - begin  # one past each sequence's last token
    drawing = np.flatnonzero(step.samples[first:stop])
    if not step.drafts[first:stop].any() and not scored:
        return StepPart(first, stop, last[drawing] - 1, drawing + first, np.ones(len(drawing), np.bool_))
    ends: list[int] = []
    owners: list[int] = []
    draws: list[bool] = []
    for i in range(first, stop):
        end, count = int(last[i - first]), int(step.counts[i])
        drawn = int(step.drafts[i]) + 1 if step.samples[i] else 0
        prompt = scored.get(int(step.requests[i]))
        wanted = drawn if prompt is None else max(drawn, count)
        ends += range(end - wanted, end)
        owners += [i] * wanted
        draws += [place >= wanted - drawn for place in range(wanted)]
    return StepPart(first, stop, np.array(ends, np.int64), np.array(owners, np.int64), np.array(draws, np.bool_))


class Drawn:
    """What a step made, on its way to the host.

    owners   (D,) the sequence of the step that each token was drawn for, in order
    scored   of tokens of prompts: their requests and positions
    """

    def __init__(self, step: Step, owners: np.ndarray, sampled: Sampled, scored: list[tuple[int, int]], of: Sampled):
        self.step, self._owners, self._scored = step, owners, scored
        self._sampled, self._prompts = HostCopy(sampled), HostCopy(of)

    def read(self) -> DrawnTokens:
        """Waits until it is there."""
        tokens, scores = self._sampled.read()
        width = int(self.step.drafts.max(initial=0)) + 1
        table = np.full((len(self.step), width), NO_TOKEN, np.int64)
        found: list[list[TokenScore]] = [[] for _ in range(len(self.step))]
        column = np.arange(len(tokens)) - np.searchsorted(self._owners, self._owners)
        table[self._owners, column] = tokens
        for owner, score in zip(self._owners.tolist(), scores):
            found[owner].append(score)
        _, prompt_scores = self._prompts.read()
        prompts = [(request, position, score) for (request, position), score in zip(self._scored, prompt_scores)]
        return DrawnTokens(table, found, prompts)


@dataclass(frozen=True)
class DrawnTokens:
    """Of a step, on the host.

    tokens   (S, 1 + drafts) drawn for each sequence, then NO_TOKEN
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

    def __init__(self, model: InferenceModel, limits: MemoryLimits, groups: int):
        """groups: of layers that remember alike."""
        self.model, self.limits, self.mesh = model, limits, model.mesh
        self.last = torch.zeros(limits.most_sequences, dtype=torch.int64, device=self.mesh.device)
        self.options = OptionTable(limits.most_sequences)
        self.counts: TokenCounts | None = None  # made when penalties are asked for
        self.vocab = model.plan.run.model.vocab_size
        self.graphs = DecodeGraphs(model, limits, groups, self.last)
        self._like = torch.empty(0, dtype=wide_dtype(model.dtype), device=self.mesh.device)

    def run(self, step: Step, scored: Mapping[int, ScoredPrompt]) -> Drawn:
        """Collective over the ranks of a replica. scored: prompts, by request, of which all tokens are scored."""
        for i in step.admitted:
            self._admit(int(step.rows[i]), step.sequences[i])
        if not scored and self.graphs.fits(step):
            sampled = self._draw(self.graphs.replay(step), step.rows, step.lengths, np.ones(len(step), np.bool_))
            return Drawn(step, np.arange(len(step)), sampled, [], Sampled(sampled.tokens[:0]))
        parts = parts_of(step, self.mesh.grid.pp, scored)
        logits = self.model.logits([self._batch(step, part) for part in parts])
        owners = np.concatenate([part.owners for part in parts]).astype(np.int64)
        draws = np.concatenate([part.draws for part in parts]).astype(np.bool_)
        places = step.starts[owners] + step.counts[owners] - 1  # of the last token of each owner
        wanted = np.concatenate([part.ends + step.starts[part.first] for part in parts]).astype(np.int64)
        positions = (step.firsts + step.counts)[owners] - (places - wanted)  # of the tokens that come next
        whole = torch.cat(logits) if logits else None
        sampled = self._draw(whole, step.rows[owners], positions, draws)
        found = [(int(n), int(p)) for n, p in zip(step.requests[owners[~draws]], positions[~draws])]
        prompt_scores = self._score(whole, found, draws, scored)
        return Drawn(step, owners[draws], sampled, found, prompt_scores)

    def _admit(self, row: int, sequence: LiveSequence) -> None:
        """A sequence has a row: for the first time, or anew with what it has made so far."""
        options = sequence.request.options
        self.options.begin(row, options, sequence.prompt)
        if has_penalties(options):
            if self.counts is None:
                self.counts = TokenCounts(self.limits.most_sequences, self.vocab, self.mesh.device)
            tokens = self._to_device(np.array(sequence.tokens, np.int64))
            self.counts.begin(row, tokens[: sequence.prompt], tokens[sequence.prompt :])

    def _draw(self, logits: Tensor | None, rows: np.ndarray, positions: np.ndarray, draws: np.ndarray) -> Sampled:
        """Tokens for the rows of logits that draw: by the last stage of a pipeline, which tells the others."""
        device, pp = self.mesh.device, self.mesh.pp
        rows, how = rows[draws], self.options.draws(rows[draws], positions[draws], device)
        if logits is not None:
            mine = logits if draws.all() else logits[self._to_device(np.flatnonzero(draws))]
            sampled = sample(widened(mine), how, self.counts)
        else:
            width = None if how.logprobs is None else min(how.logprobs, self.vocab)
            sampled = empty_sample(len(rows), width, self._like)
        if pp.size > 1:
            for t in (sampled.tokens, sampled.logprobs, sampled.likeliest, sampled.likeliest_logprobs):
                if t is not None:
                    pp.broadcast(t, source=pp.size - 1)
        at = self._to_device(rows)
        self.last[at] = sampled.tokens.clamp(min=0)
        if self.counts is not None:
            self.counts.add(at, sampled.tokens)
        return sampled

    def _score(
        self, logits: Tensor | None, found: list[tuple[int, int]], draws: np.ndarray, scored: Mapping[int, ScoredPrompt]
    ) -> Sampled:
        """Log-probabilities of tokens of prompts, found as (request, position), at the rows that do not draw."""
        pp = self.mesh.pp
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
        if pp.size > 1:
            for t in (made.logprobs, made.likeliest, made.likeliest_logprobs):
                if t is not None:
                    pp.broadcast(t, source=pp.size - 1)
        return replace(made, tokens=tokens)

    def _batch(self, step: Step, part: StepPart) -> Batch:
        """The tokens of a part, filled up to what tp divides."""
        begin, end = int(step.starts[part.first]), int(step.starts[part.stop])
        here = end - begin
        tokens = self.mesh.grid.tp * max(1, -(-here // self.mesh.grid.tp))
        rows = step.rows[part.first : part.stop]
        lengths, counts = step.lengths[part.first : part.stop], step.counts[part.first : part.stop]

        def filled(x: np.ndarray) -> Tensor:
            out = np.zeros(tokens, np.int64)
            out[:here] = x[begin:end]
            return self._to_device(out)

        host = step.tokens[begin:end]
        ids = filled(np.where(step.tokens == SAMPLED, 0, step.tokens))
        fed = np.flatnonzero(host == SAMPLED)
        if len(fed):
            owners = np.searchsorted(step.starts[part.first : part.stop + 1] - begin, fed, side="right") - 1
            ids[self._to_device(fed)] = self.last[self._to_device(rows[owners])]
        starts = self._to_device((step.starts[part.first : part.stop + 1] - begin).astype(np.int32))
        spans = tuple(
            PagedSpans(
                starts=starts,
                lengths=self._to_device(lengths.astype(np.int32)),
                table=self._to_device(table[rows, : self.limits.pages_of(int(lengths.max(initial=1)))]),
                page_size=self.limits.page_size,
                most_queries=int(counts.max(initial=1)),
                most_keys=int(lengths.max(initial=1)),
            )
            for table in step.tables
        )
        ends = self._to_device(part.ends)
        paged = PagedSequences(spans, tuple(filled(slots) for slots in step.slots), ends, self.limits.length)
        real = None if here == tokens else filled(np.ones(len(step.tokens), np.int64))
        labels = torch.full_like(ids, IGNORE)
        return Batch(ids, labels, filled(step.positions), torch.zeros_like(ids), 1, tokens, real=real, paged=paged)

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
