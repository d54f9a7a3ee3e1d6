"""Runs the steps of a scheduler on the device: pieces of sequences go through this rank's blocks in batches, then the
tokens that follow are drawn.

A drawn token stays on the device, where the next step reads it; the host is given a copy when it asks. Which drafts
stay is decided there too, and drafts of multi-token prediction never leave it. Nothing here waits for the device but
`Drawn.read`. The stages of a pipeline compute several steps at once, of different sequences:
tokens go from the last stage to the others, which take them only when a step goes on from them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.comm.axis import Axis, Work
from phalanx.inference.adapters import TokenAdapters, give_tokens
from phalanx.inference.drafter import Drafts, NgramSpec, takes_drafts
from phalanx.inference.grammar import Constraint
from phalanx.inference.graphs import RowTokens, StepGraphs
from phalanx.inference.load import InferenceModel
from phalanx.inference.memory import MemoryLimits, copy_states, keeping
from phalanx.inference.own_tokens import own_batch, own_slots
from phalanx.inference.predictor import MtpSpec, Predictor, StepTokens, draft_draws
from phalanx.inference.request import TokenScore
from phalanx.inference.sampler import (
    Draws,
    OptionTable,
    Sampled,
    TokenCounts,
    accept_same,
    has_penalties,
    sample,
    wide_dtype,
    widened,
)
from phalanx.inference.scheduler import NO_TOKEN, LiveSequence, Step
from phalanx.inference.scores import ScoredPrompt
from phalanx.inference.streams import StepStreams
from phalanx.sequence.batch import Batch
from phalanx.sequence.paged import PagedSequences, PagedSpans, StateSpans


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
    drafts   (S, width) what may come after each sequence's last token, once they are made; None: nobody drafts

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
        self.drafts: Tensor | None = None
        self.known = False  # to the host
        self._copies: list[HostCopy] = []
        self._pp = Axis("pp")
        self._sent: list[Work] = []

    def send(self, pp: Axis) -> Drawn:
        """The last stage of a pipeline lets it go out, and waits for nobody. All stages must do so in one order."""
        self._pp = pp
        if pp.index == pp.size - 1:
            self._sent = [pp.post_broadcast(t, source=pp.index) for t in self._tensors]
            self._copy()  # before what is drafted: the host need not wait for that
        return self

    def send_drafts(self, drafts: Tensor) -> None:
        """The same of drafts, after all others; on other stages than the last, room for them."""
        self.drafts = drafts
        if self._pp.index == self._pp.size - 1:
            self._sent.append(self._pp.post_broadcast(drafts, source=self._pp.index))

    def arrive(self) -> None:
        """It is needed here: other stages wait for it."""
        for work in self._sent:
            work.wait()
        self._sent = []
        if self._copies:
            return
        for t in (*self._tensors, *([] if self.drafts is None else [self.drafts])):
            self._pp.broadcast(t, source=self._pp.size - 1)
        self._copy()

    def _copy(self) -> None:
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
        self.known = True
        (tokens, scores), (_, prompt_scores) = (copy.read() for copy in self._copies)
        width = int(self.step.drafts.max(initial=0)) + 1
        table = np.full((len(self.step), width), NO_TOKEN, np.int64)
        found: list[list[TokenScore]] = [[] for _ in range(len(self.step))]
        column = np.arange(len(tokens)) - np.searchsorted(self._owners, self._owners)
        table[self._owners, column] = tokens
        for owner, score in zip(self._owners.tolist(), scores):
            found[owner].append(score)
        prompts = [(request, position, score) for (request, position), score in zip(self._scored, prompt_scores)]
        return DrawnTokens(table, found, prompts)


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

    def __init__(self, model: InferenceModel, limits: MemoryLimits, groups: int, drafts: Drafts | None = None):
        """groups: of layers that remember alike."""
        self.model, self.limits, self.mesh = model, limits, model.mesh
        config, device = model.plan.run.model, self.mesh.device
        self._predicts = drafts.width(config) if isinstance(drafts, MtpSpec) else 0
        self.rows = RowTokens(
            torch.zeros(limits.most_sequences, dtype=torch.int64, device=device),
            torch.zeros(limits.most_sequences, self._predicts, dtype=torch.int64, device=device),
        )
        self._begins = np.zeros(limits.most_sequences, np.int64)  # by row, the first position that was computed
        self.options = OptionTable(limits.most_sequences)
        self.counts: TokenCounts | None = None  # made where tokens are drawn, when penalties are asked for
        self.vocab = model.plan.run.model.vocab_size
        self.adapters: TokenAdapters | None = None
        if model.adapters is not None:
            self.adapters = TokenAdapters(model.adapters, limits.most_sequences, model.mesh)
            give_tokens(model.blocks, self.adapters)
        self.predictor: Predictor | None = None
        if isinstance(drafts, MtpSpec) and model.draws:
            self.predictor = Predictor(model, limits, drafts, self.adapters)
        most = drafts.tokens if isinstance(drafts, NgramSpec) else self._predicts
        self.graphs = StepGraphs(model, limits, groups, self.rows, most, self.adapters)
        self.streams = StepStreams(model, limits, self._to_device)
        self._coming: deque[Drawn] = deque()  # in the order of their steps
        self._keeping = keeping(model.blocks)  # layers that keep states
        self._like = torch.empty(0, dtype=wide_dtype(model.dtype), device=self.mesh.device)

    def run(self, step: Step, scored: Mapping[int, ScoredPrompt], constraints: Mapping[int, Constraint]) -> Drawn:
        """Collective over the ranks of a replica. By request, scored: prompts of which all tokens are scored;
        constraints: of those with a grammar."""
        # whatever a step goes on from was drawn so many steps before it (SchedulerSpec.in_flight), or is known
        before = step.number - self.mesh.pp.size
        while self._coming and (self._coming[0].known or self._coming[0].step.number <= before):
            self._feed(self._coming.popleft())
        for i in step.admitted:
            self._admit(int(step.rows[i]), step.sequences[i])
            self._begins[step.rows[i]] = step.firsts[i]
        slots = 1 + self.limits.most_sequences  # of nobody and of rows; those of prefixes follow, from number 1 on
        if step.begin_from:
            rows, states = zip(*step.begin_from)
            copy_states(self._keeping, [slots - 1 + n for n in states], [1 + row for row in rows])
        drawn, hidden, ends = self._run(step, scored, constraints)
        if step.leave:
            rows, states = zip(*step.leave)
            copy_states(self._keeping, [1 + row for row in rows], [slots - 1 + n for n in states])
        drawn.send(self.mesh.pp)
        if self._predicts:
            drawn.send_drafts(self._draft(step, drawn, hidden, ends))
        self._coming.append(drawn)
        return drawn

    def settle(self) -> None:
        """All that was drawn is on all stages: none waits for another."""
        while self._coming:
            self._feed(self._coming.popleft())

    def _feed(self, drawn: Drawn) -> None:
        """Tokens are there for the steps that go on from them."""
        drawn.arrive()
        self.rows.last[drawn.rows] = drawn.tokens.clamp(min=0)
        if drawn.drafts is not None:
            self.rows.drafts[self._to_device(drawn.step.rows)] = drawn.drafts

    def _run(
        self, step: Step, scored: Mapping[int, ScoredPrompt], constraints: Mapping[int, Constraint]
    ) -> tuple[Drawn, Tensor | None, np.ndarray]:
        """What is drawn; where that happens, the model's hidden states; places in the step of the tokens after which it
        is drawn."""
        layout = None if scored else self.graphs.layout_of(step)
        if layout is not None:
            owners, before_last = step.draws
            replayed, all_draw = self.graphs.replay(step, layout), np.ones(len(owners), np.bool_)
            how = self._draws(step, owners, step.lengths[owners] - before_last, constraints)
            rows, sampled = self._draw(replayed.logits, step.rows[owners], all_draw, how)
            sampled = self._accepted(step, sampled)
            ends = step.starts[owners + 1] - 1 - before_last
            return Drawn(step, owners, rows, sampled, [], Sampled(sampled.tokens[:0])), replayed.hidden, ends
        wanted = WantedTokens.of(step, scored)
        owners, draws = wanted.owners, wanted.draws
        made = self.model.outputs([self._batch(step, wanted.ends)])
        logits, hidden = (made[0].logits, made[0].hidden) if made else (None, None)
        places = step.starts[owners] + step.counts[owners] - 1  # of the last token of each owner
        positions = (step.firsts + step.counts)[owners] - (places - wanted.ends)  # of the tokens that come next
        how = self._draws(step, owners[draws], positions[draws], constraints)
        rows, sampled = self._draw(logits, step.rows[owners], draws, how)
        if logits is not None:
            sampled = self._accepted(step, sampled)
        found = [(int(n), int(p)) for n, p in zip(step.requests[owners[~draws]], positions[~draws])]
        scores = self._score(logits, found, draws, scored)
        return Drawn(step, owners[draws], rows, sampled, found, scores), hidden, wanted.ends[draws]

    def _accepted(self, step: Step, sampled: Sampled) -> Sampled:
        """With NO_TOKEN for tokens that were drawn after a draft that is refused."""
        if not step.drafts.any():
            return sampled
        owners, before_last = step.draws
        drawing, column = np.flatnonzero(step.samples), step.drafts[owners] - before_last
        counts, width = step.drafts[drawing], int(step.drafts.max())
        first = np.cumsum(1 + counts) - (1 + counts)
        given = np.zeros((len(drawing), width), np.int64)
        for i, (count, end) in enumerate(zip(counts.tolist(), step.starts[drawing + 1].tolist())):
            given[i, :count] = step.tokens[end - count : end]
        rows = np.repeat(step.rows[drawing], width)
        drafts = self.rows.ids(*(self._to_device(x) for x in (given.reshape(-1), rows))).view(-1, width)
        places = np.minimum(first[:, None] + np.arange(1 + width), len(owners) - 1)
        at = self._to_device(np.searchsorted(drawing, owners)), self._to_device(column)
        stay = accept_same(drafts, self._to_device(counts), sampled.tokens[self._to_device(places)])
        return replace(sampled, tokens=stay[at])

    def _draft(self, step: Step, drawn: Drawn, hidden: Tensor | None, ends: np.ndarray) -> Tensor:
        """(S, width) drafts of what comes after the tokens of a step; without hidden states, room for them."""
        if self.predictor is None or hidden is None:
            return self.rows.drafts.new_zeros(len(step), self._predicts)
        tokens = self._step_tokens(step, drawn, hidden, ends)
        takes = [takes_drafts(s.request.options) for s, draws in zip(step.sequences, step.samples) if draws]
        how = None
        if any(takes) or self.model.in_step:  # replicas that share experts draft together
            host = self.options.draws(step.rows, step.lengths, self.mesh.device)
            how = draft_draws(host, tokens.positions[tokens.ends[: len(step)]] + 1)
        return self.predictor.draft(tokens, hidden, how)

    def _step_tokens(self, step: Step, drawn: Drawn, hidden: Tensor, ends: np.ndarray) -> StepTokens:
        """ends: places of the tokens after which others were drawn."""
        ranks, here, count = self.mesh.grid.tp * self.mesh.cp.size, len(step.tokens), len(step)
        total, sequences = len(hidden) * ranks, ranks * max(1, -(-count // ranks))
        following = np.zeros(here, np.int64)
        following[:-1] = step.tokens[1:]
        for i, (sequence, end) in enumerate(zip(step.sequences, (step.firsts + step.counts).tolist())):
            following[step.starts[i + 1] - 1] = sequence.tokens[end] if end < len(sequence.tokens) else 0
        numbers = {
            "rows": padded(step.rows, sequences),
            "begins": padded(self._begins[step.rows], sequences),
            "starts": padded(step.starts, sequences + 1, here),
            "lengths": padded(step.lengths, sequences),
            "last": padded(step.starts[1:] - 1 - step.drafts, sequences),
            "owners": padded(np.repeat(np.arange(count), step.counts), total),
            "positions": padded(step.positions, total),
            "real": padded(np.ones(here, np.int64), total),
            "following": padded(following.clip(min=0), total),
            "ends": ends.astype(np.int64),
            "drawing": step.draws[0],
        }
        packed = self._to_device(np.concatenate(list(numbers.values()))).split([len(x) for x in numbers.values()])
        there = dict(zip(numbers, packed))
        there["following"][there["ends"]] = drawn.tokens.clamp(min=0)
        stays = torch.ones_like(there["rows"])
        if step.drafts.any():
            kept = (drawn.tokens != NO_TOKEN).to(torch.int64)
            stays = torch.zeros_like(stays).index_add_(0, there["drawing"], kept).clamp_(min=1)
        return StepTokens(
            count=count,
            rows=there["rows"],
            begins=there["begins"],
            starts=there["starts"].to(torch.int32),
            lengths=there["lengths"].to(torch.int32),
            tables=tuple(self._table(table, step.rows, sequences) for table in step.tables),
            owners=there["owners"],
            positions=there["positions"],
            real=there["real"],
            following=there["following"],
            ends=there["last"] + stays - 1,
            most=int(step.counts.max(initial=1)),
        )

    def _table(self, table: np.ndarray, rows: np.ndarray, sequences: int) -> Tensor:
        out = np.zeros((sequences, table.shape[1]), np.int32)
        out[: len(rows)] = table[rows]
        return self._to_device(out)

    def _admit(self, row: int, sequence: LiveSequence) -> None:
        """A sequence has a row: for the first time, or anew with what it has made so far."""
        options = sequence.request.options
        self.options.begin(row, options, sequence.prompt)
        self.streams.begin(row, sequence)
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
            return self._to_device(padded(x, tokens))

        ids = filled(step.tokens)
        if (step.tokens < 0).any():
            ids = self.rows.ids(ids, filled(np.repeat(step.rows, step.counts)))
        if self.adapters is not None:
            self.adapters.choose(filled(np.repeat(step.rows, step.counts)))
        starts, most_keys = self._to_device(step.starts), int(step.lengths.max(initial=1))
        pictures, together = self.model.pictures, None
        if pictures is not None and pictures.spec.together and step.images:
            reach = np.zeros((tokens, 2), np.int32)
            reach[:here] = step.image_spans
            together = self._to_device(reach)
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
                together=together,
            ).with_prompts(step.counts.tolist(), step.lengths.tolist())
            for table in step.tables
        )
        slots = tuple(own_slots(filled(slots), cp) for slots in step.slots)
        states = None
        if self.model.plan.run.model.scans:  # a row's state is in the slot after its number
            states = StateSpans.of((step.rows + 1).tolist(), step.starts.tolist(), step.firsts.tolist())
            states = states.to(self.mesh.device)
        paged = PagedSequences(spans, slots, self._to_device(ends), self.limits.length, states)
        real = None if here == tokens else filled(np.ones(here, np.int64))
        return self.streams.added_to(own_batch(ids, filled(step.positions), real, paged, cp), step, tokens)

    def _to_device(self, x: np.ndarray) -> Tensor:
        there = torch.from_numpy(np.ascontiguousarray(x))
        return there if self.mesh.device.type == "cpu" else there.pin_memory().to(self.mesh.device, non_blocking=True)


def padded(x: np.ndarray, length: int, padding: int = 0) -> np.ndarray:
    """(length,) int64: x, and padding behind it."""
    out = np.full(length, padding, np.int64)
    out[: len(x)] = x
    return out


def to_host(x: Tensor) -> Tensor:
    """A copy on the host, there when the device is through with what was asked of it: only into pinned memory is the
    host not made to wait."""
    return x if x.is_cpu else torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def empty_sample(rows: int, width: int | None, like: Tensor) -> Sampled:
    """With room for what another rank has drawn: log-probabilities with dtype and device of `like`, and those of
    `width` likeliest tokens."""
    tokens = torch.zeros(rows, dtype=torch.int64, device=like.device)
    if width is None:
        return Sampled(tokens)
    wide = like.new_zeros(rows, width)
    return Sampled(tokens, like.new_zeros(rows), torch.zeros_like(wide, dtype=torch.int64), wide)
