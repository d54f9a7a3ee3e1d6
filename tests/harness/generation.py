"""What tests of generation run on each rank: a tiny model with random weights, computed whole and in pieces that go on
from memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.engine.build import build_for_inference, fill
from phalanx.forecast.decide import make_plan
from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.load import InferenceModel, without_training
from phalanx.inference.memory import give_memory, layer_groups, remembering, windows_of
from phalanx.inference.request import NewToken, PromptScored, SamplingOptions, TokenScore
from phalanx.nn.module import Block
from phalanx.nn.objective import TaskConfig
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.sequence.paged import NO_PAGE, PagedSequences, PagedSpans
from tests.harness.parity import base_run


def run_of(model: str, precision: str = "fp64", **layout) -> Run:
    run = base_run(model, precision=precision)
    return replace(run, layout=replace(run.layout, **layout), task=TaskConfig())


def random_model(rank: int, world: int, run: Run) -> InferenceModel:
    """With random values in every tensor, norms and biases too: the same in every layout."""
    plan = make_plan(without_training(run, world), world)
    mesh = Mesh(plan.grid, rank)
    _, stages = build_for_inference(plan, mesh)
    model = InferenceModel(plan, mesh, stages)
    for block in model.blocks:
        for p in block.parameters():
            storage = torch.zeros(p.spec.shape, dtype=torch.float64)
            for piece in p.spec.pieces:
                init = replace(piece, init=replace(piece.init, kind="normal", std=0.3))
                fill(init.of(storage), init, 7)
                if piece.init.kind == "ones":
                    piece.of(storage).add_(1.0)
            p.data.copy_(storage)
    return model


def sequences_of(lengths: Sequence[int], vocab: int) -> list[list[int]]:
    """Tokens made from the number of a sequence alone."""
    return [
        torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(i)).tolist()
        for i, n in enumerate(lengths)
    ]


def whole_logits(model: InferenceModel, tokens: Sequence[int]) -> Tensor:
    """(tokens, vocabulary) computed at once, without memory; on one process."""
    n = len(tokens)
    row = torch.tensor(tokens)
    batch = Batch(row, torch.full_like(row, IGNORE), torch.arange(n), torch.zeros_like(row), 1, n)

    def all_logits(block: Block, x: Tensor, batch: Batch) -> Tensor:
        made: Tensor = block.logits(x, torch.arange(n))  # type: ignore[operator]
        return made

    stages = model.stages
    stages.finish = all_logits
    stages.begin([batch], seed=None)
    with torch.no_grad():
        for instruction in model.program(1):
            stages.handlers()[type(instruction)](instruction)
    stages.end()
    return stages.outputs[0]


def remember(model: InferenceModel, sequences: int, length: int, page_size: int) -> list[int | None]:
    """Give each group of layers pages for so many sequences; the windows of the groups."""
    layers = remembering(model.blocks)
    groups = layer_groups(layers, windows_of(model.plan), torch.float64, page_size)
    pages = 1 + sequences * -(-length // page_size)
    give_memory(layers, groups, [pages] * len(groups), page_size, torch.float64, torch.device("cpu"))
    for layer in layers:  # what was never written must not be read
        for each in layer.memory.pages.tensors if layer.memory else ():
            each.fill_(torch.nan)
    return [group.window for group in groups]


def piece_batch(
    pieces: Sequence[tuple[list[int], int, int]],
    windows: Sequence[int | None],
    length: int,
    page_size: int,
    fill_to: int,
) -> Batch:
    """Of each sequence (its tokens, the first that is here, how many are). Tables are scattered: page p of sequence s
    is not beside page p + 1."""
    tokens, positions, starts, lengths, slots = [], [], [0], [], []
    per = -(-length // page_size)
    count = len(pieces)
    table = torch.tensor([[1 + ((p * 7 + s * 3) % (per * count)) for p in range(per)] for s in range(count)])
    order = torch.randperm(per * count, generator=torch.Generator().manual_seed(5))
    table = torch.stack([1 + order[s * per : (s + 1) * per] for s in range(count)])
    for s, (row, first, n) in enumerate(pieces):
        for at in range(first, first + n):
            tokens.append(row[at])
            positions.append(at)
            slots.append(int(table[s, at // page_size]) * page_size + at % page_size)
        starts.append(len(tokens))
        lengths.append(first + n)
    here = len(tokens)
    padding = -here % fill_to
    row = torch.tensor(tokens + [0] * padding)
    tables = []
    for window in windows:
        shown = table.clone()
        if window is not None:  # what has left the window is gone
            for s, (_, first, _) in enumerate(pieces):
                shown[s, : max(0, first - window + 1) // page_size] = NO_PAGE
        tables.append(shown.int())
    spans = tuple(
        PagedSpans(
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            t,
            page_size,
            max(n for _, _, n in pieces),
            max(lengths),
        )
        for t in tables
    )
    paged = PagedSequences(
        spans, tuple(torch.tensor(slots + [0] * padding) for _ in windows), torch.arange(here), length
    )
    real = torch.cat((torch.ones(here, dtype=torch.int64), torch.zeros(padding, dtype=torch.int64)))
    return Batch(
        row,
        torch.full_like(row, IGNORE),
        torch.tensor(positions + [0] * padding),
        torch.zeros_like(row),
        1,
        len(row),
        real=real if padding else None,
        paged=paged,
    )


def cached_logits(
    rank: int, world: int, run: Run, lengths: Sequence[int], steps: Sequence[Sequence[int]], page_size: int = 4
) -> list[Tensor] | None:
    """The logits of every token of sequences of these lengths, computed in steps: of each step how many tokens of each
    sequence. None on ranks without the last block."""
    model = random_model(rank, world, run)
    rows, longest = sequences_of(lengths, run.model.vocab_size), max(lengths)
    windows = remember(model, len(rows), longest, page_size)
    done, found = [0] * len(rows), [[] for _ in rows]
    for step in steps:
        pieces = [(row, first, n) for row, first, n in zip(rows, done, step)]
        outputs = model.logits([piece_batch(pieces, windows, longest, page_size, run.layout.tp)])
        done = [first + n for first, n in zip(done, step)]
        if outputs:
            for each, part in zip(found, outputs[0].split(list(step))):
                each.append(part)
    return [torch.cat(parts) for parts in found] if found[0] else None


Asked = tuple[list[int], SamplingOptions]
Answer = tuple[list[int], list[TokenScore | None], tuple[TokenScore | None, ...], str]


def answers(
    rank: int, world: int, run: Run, asked: Sequence[Asked], options: EngineOptions, arrive: int = 100
) -> list[Answer]:
    """What an engine answers: of each request its tokens, their scores, those of its prompt, and why it ended. arrive:
    so many requests come between two steps. Nothing on ranks other than 0."""
    engine = Engine(random_model(rank, world, run), options, wait_s=60)
    if rank:
        engine.follow()
        return []
    found = answers_of(engine, asked, arrive)
    engine.pause()
    return found


def answers_of(engine: Engine, asked: Sequence[Asked], arrive: int = 100) -> list[Answer]:
    tokens: dict[int, list[NewToken]] = {}
    prompts: dict[int, tuple[TokenScore | None, ...]] = {}
    reasons: dict[int, str] = {}
    coming = list(asked)
    while coming or not engine.idle:
        for prompt, how in coming[:arrive]:
            tokens[engine.submit(prompt, how)] = []
        del coming[:arrive]
        for event in engine.step():
            if isinstance(event, NewToken):
                tokens[event.request].append(event)
            elif isinstance(event, PromptScored):
                prompts[event.request] = event.scores
            else:
                reasons[event.request] = event.reason
    return [
        ([event.token for event in made], [event.score for event in made], prompts.get(number, ()), reasons[number])
        for number, made in tokens.items()
    ]
