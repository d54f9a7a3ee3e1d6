"""CUDA graphs of decode steps: a token of each of some sequences through all blocks, replayed from one small copy of
what the host knows of the step.

A graph is for a number of sequences; a step of fewer fills up with padding. What differs between steps lies in one
tensor of int32 (`StepLayout`), so a step costs the host one copy and one replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.inference.load import InferenceModel
from phalanx.inference.memory import MemoryLimits
from phalanx.inference.scheduler import Step
from phalanx.pipeline.segments import uncollected
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.sequence.paged import PagedSequences, PagedSpans

ALIGNED = 32  # above so many sequences there is a graph for each multiple
BUFFERS = 3  # steps that the host may be ahead of the device, and one more


def graph_sizes(most: int, tp: int) -> list[int]:
    """Numbers of sequences for which there are graphs: powers of two, then multiples of ALIGNED; what tp divides."""
    sizes = [1 << n for n in range(ALIGNED.bit_length()) if 1 << n <= most]
    sizes += range(2 * ALIGNED, most + 1, ALIGNED)
    return sorted({-(-size // tp) * tp for size in (*sizes, most)})


@dataclass(frozen=True)
class StepLayout:
    """Where the numbers of a step of `size` sequences lie in a run of int32.

    pages  entries of a row of tables; groups: of layers
    """

    size: int
    pages: int
    groups: int

    @property
    def sections(self) -> tuple[tuple[str, int], ...]:
        """Names and lengths. tokens: -1 where the device has the last one; real: 1, and 0 of padding."""
        each = [(name, self.size) for name in ("rows", "tokens", "positions", "lengths", "real")]
        of_groups = [(f"{name}{g}", n) for g in range(self.groups) for name, n in self._of_group]
        return (*each, ("starts", self.size + 1), *of_groups)

    @property
    def _of_group(self) -> tuple[tuple[str, int], ...]:
        return ("slots", self.size), ("table", self.size * self.pages)

    def split(self, packed: Tensor) -> dict[str, Tensor]:
        names, lengths = zip(*self.sections)
        return dict(zip(names, packed.split(list(lengths))))

    @property
    def numel(self) -> int:
        return sum(length for _, length in self.sections)

    def write(self, out: np.ndarray, step: Step) -> None:
        """Fill a run (numel,) with a step of at most `size` sequences of a token each."""
        count, at = len(step), 0
        values = {
            "rows": step.rows,
            "tokens": step.tokens,
            "positions": step.positions,
            "lengths": step.lengths,
            "real": np.ones(count, np.int32),
        }
        values |= {f"slots{g}": slots for g, slots in enumerate(step.slots)}
        for name, length in self.sections:
            run = out[at : at + length]
            at += length
            if name == "starts":
                np.minimum(np.arange(length), count, out=run)
            elif name.startswith("table"):
                table = run.reshape(self.size, self.pages)
                table[:count] = step.tables[int(name.removeprefix("table"))][step.rows, : self.pages]
                table[count:] = 0
            else:
                run[:count] = values[name]
                run[count:] = 0


class DecodeGraph:
    """One graph, captured when it is made. logits (size, vocabulary): of the last replay."""

    def __init__(self, model: InferenceModel, limits: MemoryLimits, layout: StepLayout, last: Tensor, pool: Any):
        self.layout = layout
        self._packed = torch.zeros(layout.numel, dtype=torch.int32, device=last.device)
        self._buffers = [torch.zeros(layout.numel, dtype=torch.int32).pin_memory() for _ in range(BUFFERS)]
        self._turn = 0

        def run() -> Tensor:
            return model.logits([decode_batch(layout, layout.split(self._packed), last, limits)])[0]

        stream = torch.cuda.Stream(last.device)
        stream.wait_stream(torch.cuda.current_stream(last.device))
        with torch.cuda.stream(stream), uncollected():
            run()  # kernels are compiled, libraries loaded
            stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self.logits = run()
        torch.cuda.current_stream(last.device).wait_stream(stream)

    def replay(self, step: Step) -> Tensor:
        """(sequences, vocabulary): overwritten by the next replay of any graph."""
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % BUFFERS
        self.layout.write(buffer.numpy(), step)
        self._packed.copy_(buffer, non_blocking=True)
        self._graph.replay()
        return self.logits[: len(step)]


def decode_batch(layout: StepLayout, found: dict[str, Tensor], last: Tensor, limits: MemoryLimits) -> Batch:
    """A token of each sequence, of numbers on the device."""
    tokens = found["tokens"].long()
    ids = torch.where(tokens < 0, last[found["rows"].long()], tokens)
    spans = tuple(
        PagedSpans(
            starts=found["starts"],
            lengths=found["lengths"],
            table=found[f"table{g}"].view(layout.size, layout.pages),
            page_size=limits.page_size,
            most_queries=1,
            most_keys=limits.length,
        )
        for g in range(layout.groups)
    )
    ends = torch.arange(layout.size, device=last.device)
    paged = PagedSequences(spans, tuple(found[f"slots{g}"].long() for g in range(layout.groups)), ends, limits.length)
    labels, samples = torch.full_like(ids, IGNORE), torch.zeros_like(ids)
    real = found["real"].long()
    return Batch(ids, labels, found["positions"].long(), samples, 1, layout.size, real=real, paged=paged)


class DecodeGraphs:
    """Those that steps of one token per sequence are replayed from, if there are any (InferenceModel.capturable)."""

    def __init__(self, model: InferenceModel, limits: MemoryLimits, groups: int, last: Tensor):
        self._model, self._limits, self._groups, self._last = model, limits, groups, last
        usable = model.capturable
        self.sizes = graph_sizes(limits.most_sequences, model.mesh.grid.tp) if usable else []
        self._graphs: dict[int, DecodeGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if usable else None

    def fits(self, step: Step) -> bool:
        """Whether a step is one token of each sequence, after which another is drawn."""
        return bool(self.sizes) and len(step.tokens) == len(step) and bool(step.samples.all())

    def replay(self, step: Step) -> Tensor:
        size = next(size for size in self.sizes if size >= len(step))
        if size not in self._graphs:
            layout = StepLayout(size, self._limits.pages_of(self._limits.length), self._groups)
            self._graphs[size] = DecodeGraph(self._model, self._limits, layout, self._last, self._pool)
        return self._graphs[size].replay(step)

    def capture(self, sizes: Sequence[int] | None = None) -> None:
        """Make graphs before they are needed."""
        for size in reversed(self.sizes if sizes is None else sizes):
            layout = StepLayout(size, self._limits.pages_of(self._limits.length), self._groups)
            self._graphs[size] = DecodeGraph(self._model, self._limits, layout, self._last, self._pool)
