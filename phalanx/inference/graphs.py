"""CUDA graphs of the common kinds of steps, replayed after one small copy of what the host knows of a step. A step has
one token of each of some sequences, and perhaps pieces of prompts.

A graph is for numbers of sequences and tokens; a smaller step fills up with padding. What differs between steps lies in
one tensor of int32 (`StepLayout`), so a step costs the host one copy and one replay. Without a graph the host takes
about as long to start the kernels of a step as the device takes for 2,000 tokens of a model of 8 billion parameters.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.base.dataclass import dataclass
from phalanx.comm.axis import Axis
from phalanx.inference.adapters import TokenAdapters
from phalanx.inference.load import InferenceModel, Outputs
from phalanx.inference.memory import MemoryLimits
from phalanx.inference.own_tokens import own_batch, own_slots
from phalanx.inference.scheduler import DRAFTED, SAMPLED, Step
from phalanx.pipeline.segments import uncollected
from phalanx.sequence.batch import Batch
from phalanx.sequence.paged import NO_SLOT, PagedSequences, PagedSpans, StateSpans

ALIGNED = 32  # above so many sequences there is a graph for each multiple
MOST_TOKENS = 2048  # of a step with pieces of prompts; beyond, the device is busy for longer than the host
BUFFERS = 3  # steps that the host may be ahead of the device, and one more


def graph_sizes(most: int, ranks: int) -> list[int]:
    """Numbers of sequences for which there are graphs: powers of two, then multiples of ALIGNED; what the ranks of tp
    and cp divide."""
    sizes = [1 << n for n in range(ALIGNED.bit_length()) if 1 << n <= most]
    sizes += range(2 * ALIGNED, most + 1, ALIGNED)
    return sorted({-(-size // ranks) * ranks for size in (*sizes, most)})


def token_sizes(most: int, ranks: int) -> list[int]:
    """Numbers of tokens, with pieces of prompts, for which there are graphs: a quarter apart at the most, what the
    ranks of tp and cp divide."""
    sizes = (*range(64, 512, 64), *range(512, 1024, 128), *range(1024, MOST_TOKENS + 1, 256))
    most = min(most, MOST_TOKENS)
    return sorted({-(-size // ranks) * ranks for size in (*sizes, most) if size <= most})


@dataclass(frozen=True)
class StepLayout:
    """Where the numbers of a step lie in a run of int32.

    sequences  at most
    tokens     at most
    ends       tokens whose logits are wanted, at most
    pieces     sequences may have several tokens; else each has one
    pages      entries of a row of tables
    groups     of layers
    """

    sequences: int
    tokens: int
    ends: int
    pieces: bool
    pages: int
    groups: int

    @property
    def sections(self) -> tuple[tuple[str, int], ...]:
        """Names and lengths. owners: rows of the sequences of tokens; tokens: below 0 where the device has them
        (RowTokens); real: 1, and 0 of padding; ends: places of the tokens whose logits are wanted."""
        of_tokens = [(name, self.tokens) for name in ("owners", "tokens", "positions", "real")]
        of_sequences = [("lengths", self.sequences), ("ends", self.ends), ("starts", self.sequences + 1)]
        of_groups = [(f"{name}{g}", n) for g in range(self.groups) for name, n in self._of_group]
        return (*of_tokens, *of_sequences, *of_groups)

    @property
    def _of_group(self) -> tuple[tuple[str, int], ...]:
        return ("slots", self.tokens), ("table", self.sequences * self.pages)

    def split(self, packed: Tensor) -> dict[str, Tensor]:
        names, lengths = zip(*self.sections)
        return dict(zip(names, packed.split(list(lengths))))

    @property
    def numel(self) -> int:
        return sum(length for _, length in self.sections)

    def write(self, out: np.ndarray, step: Step) -> None:
        """Fill a run (numel,) with a step; what is left of each section with what padding has."""
        drawing, before_last = step.draws
        values = {
            "owners": np.repeat(step.rows, step.counts),
            "tokens": step.tokens,
            "positions": step.positions,
            "real": np.ones(len(step.tokens), np.int32),
            "lengths": step.lengths,
            "ends": step.starts[1:][drawing] - 1 - before_last,
            "starts": step.starts,
        }
        values |= {f"slots{g}": slots for g, slots in enumerate(step.slots)}
        at, count = 0, len(step)
        for name, length in self.sections:
            run = out[at : at + length]
            at += length
            if name.startswith("table"):
                table = run.reshape(self.sequences, self.pages)
                table[:count] = step.tables[int(name.removeprefix("table"))][step.rows, : self.pages]
                table[count:] = 0
            else:
                here = len(values[name])
                run[:here] = values[name]
                run[here:] = len(step.tokens) if name == "starts" else 0


@dataclass(frozen=True)
class RowTokens:
    """What the device keeps of each row, for steps that are scheduled before the host knows it.

    last    (rows,) int64  the token drawn last
    drafts  (rows, width) int64  what may come after it, by multi-token prediction
    """

    last: Tensor
    drafts: Tensor

    def ids(self, tokens: Tensor, owners: Tensor) -> Tensor:
        """tokens (T,) of a step, and the row of each -> their ids: where a token is SAMPLED or DRAFTED, the row's."""
        ids = torch.where(tokens == SAMPLED, self.last[owners], tokens)
        width = self.drafts.shape[1]
        if not width:
            return ids
        return torch.where(tokens > DRAFTED, ids, self.drafts[owners, (DRAFTED - tokens).clamp(0, width - 1)])


class StepGraph:
    """One graph, captured when it is made. made: logits (ends, vocabulary) and hidden states of the last replay."""

    def __init__(
        self,
        model: InferenceModel,
        limits: MemoryLimits,
        layout: StepLayout,
        rows: RowTokens,
        adapters: TokenAdapters | None,
        pool: Any,
    ):
        self.layout = layout
        last = rows.last
        self._packed = torch.zeros(layout.numel, dtype=torch.int32, device=last.device)
        self._buffers = [torch.zeros(layout.numel, dtype=torch.int32).pin_memory() for _ in range(BUFFERS)]
        self._turn = 0

        def run() -> Outputs:
            found = layout.split(self._packed)
            if adapters is not None:
                adapters.choose(found["owners"].long())
            batch = step_batch(layout, found, rows, limits, model.mesh.cp, model.batch_invariant)
            return model.outputs([batch])[0]

        stream = torch.cuda.Stream(last.device)
        stream.wait_stream(torch.cuda.current_stream(last.device))
        with torch.cuda.stream(stream), uncollected():
            run()  # kernels are compiled, libraries loaded
            stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self.made = run()
        torch.cuda.current_stream(last.device).wait_stream(stream)

    def replay(self, step: Step) -> Outputs:
        """logits (tokens that are drawn, vocabulary) and hidden states of all tokens, padding included: overwritten by
        the next replay of any graph."""
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % BUFFERS
        self.layout.write(buffer.numpy(), step)
        self._packed.copy_(buffer, non_blocking=True)
        self._graph.replay()
        return Outputs(self.made.logits[: len(step.draws[0])], self.made.hidden)


def step_batch(
    layout: StepLayout,
    found: dict[str, Tensor],
    rows: RowTokens,
    limits: MemoryLimits,
    cp: Axis,
    batch_invariant: bool = False,
) -> Batch:
    """The tokens of a step, of numbers on the device; of these this rank's."""
    ids = rows.ids(found["tokens"].long(), found["owners"].long())
    spans = tuple(
        PagedSpans(
            starts=found["starts"],
            lengths=found["lengths"],
            table=found[f"table{g}"].view(layout.sequences, layout.pages),
            page_size=limits.own_page_size,
            most_queries=layout.tokens if layout.pieces else 1,
            most_keys=limits.length,
            offset=cp.index,
            stride=cp.size,
            batch_invariant=batch_invariant,
        )
        for g in range(layout.groups)
    )
    slots = tuple(own_slots(found[f"slots{g}"].long(), cp) for g in range(layout.groups))
    # of layers that keep a state: a row's is in the slot after its number, and padding is written to the first
    own = torch.where(found["real"] > 0, found["owners"] + 1, NO_SLOT).long()
    states = None if layout.pieces else StateSpans(own, found["positions"] == 0)
    paged = PagedSequences(spans, slots, found["ends"].long(), limits.length, states)
    return own_batch(ids, found["positions"].long(), found["real"].long(), paged, cp)


class StepGraphs:
    """Those that steps are replayed from, if there are any (InferenceModel.capturable). Each is made when a step first
    needs it, unless all are asked for before."""

    def __init__(
        self,
        model: InferenceModel,
        limits: MemoryLimits,
        groups: int,
        rows: RowTokens,
        drafts: int = 0,
        adapters: TokenAdapters | None = None,
    ):
        """drafts: of a sequence in a step, at most."""
        self._model, self._limits, self._groups, self._rows, self._drafts = model, limits, groups, rows, drafts
        self._adapters, self._keeps = adapters, model.plan.run.model.scans  # where its state goes on, the host says
        ranks = model.mesh.grid.tp * model.mesh.cp.size
        self.usable = model.capturable
        self._sizes = graph_sizes(limits.most_sequences, ranks)
        self._token_sizes = token_sizes(limits.most_tokens, ranks)
        self._graphs: dict[StepLayout, StepGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.usable else None

    def layout_of(self, step: Step) -> StepLayout | None:
        """Of the graph for a step, if there is one."""
        if not self.usable:
            return None
        pieces = len(step.tokens) > len(step) or not step.samples.all()
        if not pieces:
            sequences = tokens = next(size for size in self._sizes if size >= len(step))
        elif len(step.tokens) <= self._token_sizes[-1] and not self._keeps:
            sequences = next(size for size in self._few_and_all if size >= len(step))
            tokens = next(size for size in self._token_sizes if size >= len(step.tokens))
        else:
            return None
        return self._layout(sequences, tokens, pieces)

    def _layout(self, sequences: int, tokens: int, pieces: bool) -> StepLayout:
        ends = min(tokens, sequences * (1 + self._drafts)) if pieces else sequences
        pages = self._limits.pages_of(self._limits.length)
        return StepLayout(sequences, tokens, max(ends, sequences), pieces, pages, self._groups)

    @property
    def _few_and_all(self) -> tuple[int, int]:
        """Numbers of sequences with pieces of prompts for which there are graphs."""
        return ALIGNED, max(ALIGNED, self._sizes[-1])

    def capture(self) -> None:
        """Make all graphs now, the largest first: a later step never waits for one. Seconds; collective over tp and
        the ranks that share experts."""
        if not self.usable:
            return
        layouts = [self._layout(size, size, False) for size in self._sizes]
        few_and_all = () if self._keeps else set(self._few_and_all)
        layouts += [self._layout(few, size, True) for few in few_and_all for size in self._token_sizes]
        for layout in sorted(layouts, key=lambda layout: (layout.tokens, layout.sequences), reverse=True):
            self._graph(layout)

    def replay(self, step: Step, layout: StepLayout) -> Outputs:
        """logits (tokens that are drawn, vocabulary), and hidden states."""
        return self._graph(layout).replay(step)

    def _graph(self, layout: StepLayout) -> StepGraph:
        if layout not in self._graphs:
            self._graphs[layout] = StepGraph(self._model, self._limits, layout, self._rows, self._adapters, self._pool)
        return self._graphs[layout]
