"""Drafts from the model's own multi-token prediction modules (nn.mtp), made on the device when the tokens of a step are
drawn. DeepSeek-V3 technical report, section 2.2.

Depth k (the first is 1) reads, at position i of a sequence, the token at i + k and what depth k - 1 made of position i;
it predicts the token at i + k + 1. So when a step has drawn the token after position j, each depth goes through the
step's tokens, k - 1 positions behind; what it remembers of them lies in the pages of its layer, where it hangs on the
sequence alone. After these, drafts take the place of tokens that are not known yet:

    round 1   the drawn token     depths 1 ... M, of the whole step     draft 1: depth 1 at j
    round 2   draft 1             depths 2 ... M, at j, j - 1, ...      draft 2: depth 2 at j
    round n   draft n - 1         depths n ... M                        draft n: depth n at j
    beyond M                      depth M at j + 1, ...                 it reads what it made itself

What rounds after the first write into pages is written over by the next step, whose tokens are drawn. A draft is drawn
as the token of its position will be, with the same random number: where both distributions agree, so do the tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.base.dtypes import precision
from phalanx.base.errors import ConfigError, Problem
from phalanx.inference.adapters import TokenAdapters
from phalanx.inference.load import InferenceModel
from phalanx.inference.memory import DraftRoom, MemoryLimits
from phalanx.inference.own_tokens import own_batch, own_slots
from phalanx.inference.sampler import Draws, sample, widened
from phalanx.models.model_config import ModelConfig
from phalanx.nn.mtp import MultiTokenPrediction
from phalanx.planning.plan import Plan
from phalanx.sequence.batch import Batch
from phalanx.sequence.paged import NO_PAGE, PagedSequences, PagedSpans


@dataclass(frozen=True)
class MtpSpec:
    """tokens: drafts of a sequence in one step; None: as many as the model has modules. Beyond those, the last module
    goes on from what it made itself. ValueError for a number that makes no drafts."""

    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"tokens={self.tokens}: must be at least 1")

    def width(self, model: ModelConfig) -> int:
        """Drafts of a sequence in one step of this model."""
        return model.predict_layers if self.tokens is None else self.tokens

    def depths(self, model: ModelConfig) -> int:
        """Modules that draft: the first so many."""
        return min(model.predict_layers, self.width(model))

    def room(self, plan: Plan, draws: bool) -> DraftRoom:
        """What is kept of each sequence on a rank; draws: tokens are drawn there."""
        model = plan.run.model
        itemsize = precision(plan.run.train.precision).compute.itemsize
        states = (self.depths(model) - 1) * model.hidden_size * itemsize if draws else 0
        return DraftRoom(self.width(model), states)


def rounds(width: int, depths: int) -> list[range]:
    """Which depths (0 is the first) each round computes; the first of a round makes its draft."""
    later = [min(n, depths - 1) for n in range(1, width)]
    needed = [first + 1 if n == width - 1 else depths for n, first in enumerate(later, 1)]  # by later rounds
    return [range(depths), *map(range, later, needed)]


def check_takes_drafts(model: ModelConfig, value: str, field: str) -> None:
    """ConfigError for a model that cannot check drafts, whoever makes them."""
    if model.scans:
        rule = "must not be made for a model whose layers keep a state: a refused draft cannot be taken out of it"
        raise ConfigError([Problem(field, value, rule, {"model.family": model.family})])


def check_modules(plan: Plan, spec: MtpSpec, field: str) -> None:
    """ConfigError unless the model has modules that can draft in this layout. field: what asked for them."""
    model, value = plan.run.model, "mtp" if spec.tokens is None else f"mtp:{spec.tokens}"
    check_takes_drafts(model, value, field)
    if not model.predict_layers:
        rule = "needs a model with multi-token prediction modules, and its weights with them; this one has none"
        raise ConfigError([Problem(field, value, rule, {"model.family": model.family}, ("ngram:4",))])
    if plan.mtp_stage != plan.stage_rank[-1]:
        sizes = stages_with_modules_last([len(stage) for stage in plan.stages])
        how = f"layout.stages=[{','.join(map(str, sizes))}]" if sizes[0] > 0 else f"layout.pp={plan.grid.pp - 1}"
        rule = f"needs the modules on the pipeline stage that draws tokens, the last: set {how}"
        because = {"layout.pp": plan.grid.pp, "stage of the modules": plan.mtp_stage}
        raise ConfigError([Problem(field, value, rule, because, ("ngram:4",))])


def stages_with_modules_last(sizes: list[int]) -> list[int]:
    """Blocks of each stage, where the last one has two, multi-token prediction and the head, and none has none."""
    found = list(sizes)
    for stage in range(len(found) - 1, 0, -1):
        least = 2 if stage == len(found) - 1 else 1
        missing = max(0, least - found[stage])
        found[stage] += missing
        found[stage - 1] -= missing
    return found


@dataclass(frozen=True)
class StepTokens:
    """What depths read of a step: T tokens of S sequences, each number filled up with padding to what tp x cp divides.

    count      of the sequences, those that are not padding
    rows       (S,) the row of each
    begins     (S,) the first position that was computed since it has its row: what lies before is others' too, and not
               written
    starts     (S + 1,) int32  the first token of each in the step
    lengths    (S,) int32  tokens of each so far
    tables     of each group of layers (S, P) int32
    owners     (T,) the sequence of each token
    positions  (T,)
    real       (T,) 1 for tokens, 0 for padding
    following  (T,) the token that comes after each
    most       a bound on the tokens of one sequence
    ends       (S,) the place in the step of each one's last token that stays: drafts after it were refused
    """

    count: int
    rows: Tensor
    begins: Tensor
    starts: Tensor
    lengths: Tensor
    tables: tuple[Tensor, ...]
    owners: Tensor
    positions: Tensor
    real: Tensor
    following: Tensor
    ends: Tensor
    most: int


@dataclass(frozen=True)
class Where:
    """The places of N tokens that a depth reads, of sequences of a step: owners, positions (which may lie before the
    first) and real (N,); starts and lengths as in PagedSpans; most: of one sequence."""

    owners: Tensor
    positions: Tensor
    starts: Tensor
    lengths: Tensor
    real: Tensor
    most: int


class Predictor:
    """The depths that draft, and what they keep of each row, on a rank that draws tokens."""

    def __init__(self, model: InferenceModel, limits: MemoryLimits, spec: MtpSpec, adapters: TokenAdapters | None):
        self._block = next(b for b in model.blocks if isinstance(b, MultiTokenPrediction))
        self._mesh, self._limits, self._adapters = model.mesh, limits, adapters
        self._depths = spec.depths(model.plan.run.model)
        self._rounds = rounds(spec.width(model.plan.run.model), self._depths)
        shape = (self._depths - 1, limits.most_sequences, model.plan.run.model.hidden_size)
        self.states = torch.zeros(shape, dtype=model.dtype, device=model.mesh.device)  # of depths 1 ... M - 1

    @torch.no_grad()
    def draft(self, step: StepTokens, hidden: Tensor, how: Draws | None) -> Tensor:
        """hidden (T / tp / cp, D), the model's normed hidden states of this rank's tokens -> (count, width) int64, what
        may come after the tokens that the step drew; how: `count` tokens at the positions of these are drawn. Without
        it nothing is drafted, only remembered, and the result is zeros. Collective over tp, cp and the ranks that share
        experts."""
        made = self._go_on(step, hidden)
        drafts = step.rows.new_zeros(step.count, len(self._rounds))
        if how is None:
            return drafts
        drafts[:, 0] = self._drawn(made[0], how, 1)
        last = step.positions[step.ends]
        for n, depths in enumerate(self._rounds[1:], 1):
            ids = torch.nn.functional.pad(drafts[:, n - 1], (0, len(step.rows) - step.count))
            before = list(made)
            for depth in depths:
                source = before[depth - 1] if n < self._depths else before[depth]
                batch = self._single(step, ids, last + n - depth)
                made[depth] = self._whole(self._block.draft(depth, self._own(source), batch.tokens, batch))
            drafts[:, n] = self._drawn(made[depths.start], how, 1 + n)
        return drafts

    def _go_on(self, step: StepTokens, hidden: Tensor) -> list[Tensor]:
        """Each depth goes through the tokens of a step. What it made of the last one of each sequence that stays: (S,
        D), on each rank."""
        self._choose(step.rows[step.owners])
        made: list[Tensor] = []
        here, rows = hidden, step.rows[: step.count]
        for depth in range(self._depths):
            if depth:
                whole = self._whole(here)
                here = self._own(self._behind(step, whole, self.states[depth - 1][step.rows]))
            where = Where(step.owners, step.positions - depth, step.starts, step.lengths - depth, step.real, step.most)
            batch = self._batch(step, step.following, where)
            here = self._block.draft(depth, here, batch.tokens, batch)
            made.append(self._whole(here)[step.ends])
        for depth, state in enumerate(made[:-1]):
            self.states[depth][rows] = state[: step.count]
        self._choose(step.rows)
        return made

    def _behind(self, step: StepTokens, whole: Tensor, before: Tensor) -> Tensor:
        """(T, D) one token later; first tokens of sequences get what was kept of the token before, (S, D)."""
        places = torch.arange(len(whole), device=whole.device)
        first = (places == step.starts[step.owners]).unsqueeze(1)
        return torch.where(first, before[step.owners], whole[(places - 1).clamp(min=0)])

    def _single(self, step: StepTokens, ids: Tensor, positions: Tensor) -> Batch:
        """Of one token of each sequence."""
        places = torch.arange(len(ids) + 1, device=ids.device)
        real = (places[:-1] < step.count).to(torch.int64)
        where = Where(places[:-1], positions, places.to(torch.int32), (positions + 1).to(torch.int32), real, 1)
        return self._batch(step, ids, where)

    def _batch(self, step: StepTokens, ids: Tensor, where: Where) -> Batch:
        """ids (N,). Nothing is remembered of places before `begins`, nor where a sequence has no page."""
        size, cp, limits = self._limits.page_size, self._mesh.cp, self._limits
        room = step.tables[0].shape[1] * size
        at, owners = where.positions, where.owners
        written = (at >= step.begins[owners]) & (at < room) & (where.real > 0)
        places = at.clamp(0, room - 1)
        slots = (table[owners, places // size].long() * size + places % size for table in step.tables)
        spans = tuple(
            PagedSpans(
                starts=where.starts,
                lengths=where.lengths,
                table=table,
                page_size=limits.own_page_size,
                most_queries=where.most,
                most_keys=limits.length,
                offset=cp.index,
                stride=cp.size,
            )
            for table in step.tables
        )
        in_pages = tuple(own_slots(torch.where(written, each, NO_PAGE), cp) for each in slots)
        paged = PagedSequences(spans, in_pages, ids.new_empty(0), limits.length)
        return own_batch(ids, places, where.real, paged, cp)

    def _drawn(self, made: Tensor, how: Draws, further: int) -> Tensor:
        """(count,) the tokens that a depth predicts of what it made, (S, D); further: than the token of `how`."""
        count = len(how.values)
        rows = torch.arange(count, device=made.device)
        logits = self._block.head.logits(self._own(made), rows)
        return sample(widened(logits), how.later(further)).tokens.clamp(min=0)

    def _choose(self, rows: Tensor) -> None:
        if self._adapters is not None:
            self._adapters.choose(rows)

    def _own(self, x: Tensor) -> Tensor:
        return self._mesh.tp.own_rows(self._mesh.cp.own_rows(x))

    def _whole(self, x: Tensor) -> Tensor:
        return self._mesh.cp.all_gather(self._mesh.tp.all_gather(x).wait()).wait()


def draft_draws(how: Draws, positions: Tensor) -> Draws:
    """How tokens at these positions (S,) are drawn, which the device knows, but for what hangs on the text."""
    return replace(how.at(positions), logprobs=None, count_rows=None, allowed=None, forbidden=None)
