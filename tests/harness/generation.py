"""What tests of generation run on each rank: a tiny model with random weights, computed whole and in pieces that go on
from memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from phalanx.base.errors import ConfigError
from phalanx.comm.mesh import Mesh
from phalanx.config.run import Run
from phalanx.engine.build import build_for_inference
from phalanx.forecast.decide import make_plan
from phalanx.inference import graphs
from phalanx.inference.engine import Engine, EngineOptions
from phalanx.inference.graphs import step_batch
from phalanx.inference.load import InferenceModel, Outputs, without_training
from phalanx.inference.memory import (
    MemoryLimits,
    give_memory,
    give_states,
    keeping,
    kept_by,
    layer_groups,
    remembering,
)
from phalanx.inference.pictures import PictureReader
from phalanx.inference.request import EngineLoad, NewToken, PromptScored, SamplingOptions, TokenScore
from phalanx.inference.runner import Drawn
from phalanx.inference.scheduler import Step
from phalanx.nn.initial import ONES, Normal
from phalanx.nn.module import Block, Module
from phalanx.nn.objective import TaskConfig
from phalanx.sequence.batch import IGNORE, Batch
from phalanx.sequence.paged import NO_PAGE, PagedSequences, PagedSpans, StateSpans
from phalanx.text.tokenizers import byte_tokenizer
from tests.harness.parity import base_run


def run_of(model: str, precision: str = "fp64", **layout) -> Run:
    run = base_run(model, precision=precision)
    task = run.task if run.model.reads_beside else TaskConfig()
    return replace(run, layout=replace(run.layout, **layout), task=task)


def invariant_run(model: str, precision: str = "fp32", **layout) -> Run:
    """With train.batch_invariant: inner features that 8 divides, no dropout."""
    run = run_of(model, precision, **layout)
    inner: dict[str, Any] = {"intermediate_size": 40} if run.model.intermediate_size else {}
    inner |= {name: 0.0 for name in ("dropout", "attention_dropout") if hasattr(run.model, name)}
    train = replace(run.train, batch_invariant=True)
    return replace(run, model=replace(run.model, num_hidden_layers=2, **inner), train=train)


def random_model(rank: int, world: int, run: Run, device: torch.device | str = "cpu") -> InferenceModel:
    """With random values in every tensor, norms and biases too: the same in every layout."""
    plan = make_plan(without_training(run, world), world)
    mesh = Mesh(plan.grid, rank, device)
    _, stages = build_for_inference(plan, mesh)
    model = InferenceModel(plan, mesh, stages, stages.handlers(), pictures=PictureReader.of(run.model))
    for block in model.blocks:
        for p in block.parameters():
            storage = torch.zeros(p.spec.shape, dtype=torch.float64)
            for piece in p.spec.pieces:
                Normal(0.3).fill(piece.of(storage), piece, 7)
                if piece.init == ONES:
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
    row = torch.tensor(tokens, device=model.mesh.device)
    positions = torch.arange(len(row), device=row.device)
    return forward_logits(
        model, Batch(row, torch.full_like(row, IGNORE), positions, torch.zeros_like(row), 1, len(row))
    )


def training_logits(
    rank: int,
    world: int,
    run: Run,
    lengths: Sequence[int],
    tokens: int | None = None,
    device: torch.device | str = "cpu",
) -> list[Tensor] | None:
    """Those of every token of sequences of these lengths by training's forward: one after another, or together as
    documents of a batch filled up to `tokens`."""
    model = random_model(rank, world, run, device)
    for block in model.blocks:
        block.train()
    rows = sequences_of(lengths, run.model.vocab_size)
    if tokens is None:
        return [whole_logits(model, row) for row in rows]
    lengths = [*lengths, tokens - sum(lengths)]
    row = torch.tensor([token for each in rows for token in each] + [0] * lengths[-1])
    positions = torch.cat([torch.arange(n) for n in lengths])
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    labels = torch.full_like(row, IGNORE)
    batch = Batch(row, labels, positions, torch.zeros_like(row), 1, tokens, documents)
    return list(forward_logits(model, batch.to(device)).split(lengths))[:-1]


def forward_logits(model: InferenceModel, batch: Batch) -> Tensor:
    """(T, vocabulary) of a batch of whole sequences; without pipeline stages."""
    n = batch.num_tokens

    def all_logits(block: Block, x: Tensor, batch: Batch) -> Tensor:
        made: Tensor = block.logits(x, torch.arange(n, device=x.device))  # type: ignore[operator]
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
    groups = layer_groups(layers, kept_by(model.plan), model.dtype, page_size)
    pages = 1 + sequences * -(-length // page_size)
    give_memory(layers, groups, [pages] * len(groups), page_size, model.dtype, model.mesh)
    limits = MemoryLimits(sequences, 1, length)
    give_states(keeping(model.blocks), limits, model.dtype, model.mesh)
    for layer in layers:  # what was never written must not be read
        for each in layer.memory.pages.tensors if layer.memory else ():
            each.fill_(torch.nan)
    for layer in keeping(model.blocks):
        if layer.states is not None:
            layer.states.states.fill_(torch.nan)
            layer.states.tokens.fill_(torch.nan)
    return [group.window for group in groups]


def piece_batch(
    pieces: Sequence[tuple[list[int], int, int]],
    windows: Sequence[int | None],
    length: int,
    page_size: int,
    fill_to: int,
    batch_invariant: bool = False,
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
            batch_invariant=batch_invariant,
        )
        for t in tables
    )
    paged = PagedSequences(
        spans,
        tuple(torch.tensor(slots + [0] * padding) for _ in windows),
        torch.arange(here),
        length,
        StateSpans.of(range(1, 1 + count), starts, [first for _, first, _ in pieces]),
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
    rank: int,
    world: int,
    run: Run,
    lengths: Sequence[int],
    steps: Sequence[Sequence[int]],
    page_size: int = 4,
    device: torch.device | str = "cpu",
) -> list[Tensor] | None:
    """The logits of every token of sequences of these lengths, computed in steps: of each step how many tokens of each
    sequence. None on ranks without the last block."""
    model = random_model(rank, world, run, device)
    rows, longest = sequences_of(lengths, run.model.vocab_size), max(lengths)
    windows = remember(model, len(rows), longest, page_size)
    done, found = [0] * len(rows), [[] for _ in rows]
    for step in steps:
        pieces = [(row, first, n) for row, first, n in zip(rows, done, step)]
        batch = piece_batch(pieces, windows, longest, page_size, run.layout.tp, model.batch_invariant)
        outputs = model.logits([batch.to(device)])
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


def little_room(
    rank: int, world: int, run: Run, asked: Sequence[Asked], options: EngineOptions
) -> tuple[int, list[list[Answer]], list[int], list[int]]:
    """Bytes of this rank's pages. On rank 0: answers, and those to the same prompts once more without their scores;
    tokens computed for each; requests that have lost their pages."""
    engine = Engine(random_model(rank, world, run), options, wait_s=60)
    tensors = [t for layer in remembering(engine.model.blocks) if layer.memory for t in layer.memory.pages.tensors]
    size, found, computed, preempted = sum(t.nbytes for t in tensors), [], [], []
    if rank:
        engine.follow()
        return size, found, computed, preempted
    schedule = engine.scheduler.schedule

    def watched(*asked: Any) -> Step:
        step = schedule(*asked)
        computed[-1] += len(step.tokens)
        preempted.extend(step.preempted)
        return step

    engine.scheduler.schedule = watched
    for prompt_logprobs in (1, None):
        computed.append(0)
        found.append(answers_of(engine, [(p, replace(how, prompt_logprobs=prompt_logprobs)) for p, how in asked], 2))
    engine.pause()
    return size, found, computed, preempted


class Uncaptured:
    """Stands for a StepGraph: the same numbers of a step through the same batch. sizes: of the layouts replayed."""

    sizes: set[tuple[int, int, bool]] = set()

    def __init__(self, model, limits, layout, rows, adapters, pool):
        self.model, self.limits, self.layout, self.rows, self.adapters = model, limits, layout, rows, adapters

    def replay(self, step: Step) -> Outputs:
        layout = self.layout
        self.sizes.add((layout.sequences, layout.tokens, layout.pieces))
        packed = torch.full((layout.numel,), 77, dtype=torch.int32)  # of an earlier step
        layout.write(packed.numpy(), step)
        found = layout.split(packed)
        assert (found["starts"].diff() >= 0).all()  # kernels search there
        if self.adapters is not None:
            self.adapters.choose(found["owners"].long())
        batch = step_batch(layout, found, self.rows, self.limits, self.model.mesh.cp)
        made = self.model.outputs([batch])[0]
        return replace(made, logits=made.logits[: len(step.draws[0])])


@contextmanager
def uncaptured() -> Iterator[set[tuple[int, int, bool]]]:
    """Inside, steps go through the numbers that graphs are replayed from; the sizes of those graphs."""
    Uncaptured.sizes.clear()
    capturable = mock.patch.object(InferenceModel, "capturable", property(lambda self: True))
    pool = mock.patch.object(torch.cuda, "graph_pool_handle", lambda: None)
    with mock.patch.object(graphs, "StepGraph", Uncaptured), capturable, pool:
        yield Uncaptured.sizes


def answers_by_graphs(
    rank: int, world: int, run: Run, asked: Sequence[Asked], options: EngineOptions, arrive: int
) -> tuple[list[Answer], set[tuple[int, int, bool]]]:
    """`answers`, with steps from the numbers that graphs are replayed from, and the sizes of the graphs."""
    with uncaptured() as sizes:
        return answers(rank, world, run, asked, options, arrive), sizes


def constrained_answers(
    rank: int, world: int, run: Run, asked: Sequence[Asked], options: EngineOptions, arrive: int = 100
) -> list[Answer]:
    """The same of an engine that knows the tokenizer of bytes."""
    engine = Engine(random_model(rank, world, run), options, 60, tokenizer=byte_tokenizer())
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


def stage_events(
    rank: int, world: int, run: Run, asked: Sequence[Asked], options: EngineOptions
) -> list[tuple[str, int]]:
    """In what order this rank computes steps, and waits for the tokens of earlier ones: what, and the step's number."""
    engine = Engine(random_model(rank, world, run), options, wait_s=60)
    found: list[tuple[str, int]] = []
    compute, arrive = engine.runner._run, Drawn.arrive

    def computing(step: Step, *given: Any) -> Drawn:
        found.append(("compute", step.number))
        return compute(step, *given)

    def arriving(drawn: Drawn) -> None:
        found.append(("wait", drawn.step.number))
        arrive(drawn)

    engine.runner._run = computing
    with mock.patch.object(Drawn, "arrive", arriving):
        if rank:
            engine.follow()
        else:
            answers_of(engine, asked)
            engine.pause()
    return found


def allocated(rank: int, world: int, run: Run, options: EngineOptions) -> tuple[int, int, int]:
    """Bytes on this rank of weights, of pages, and of what an engine keeps of each sequence beside them, after a
    request with penalties."""
    model = random_model(rank, world, run)
    engine = Engine(model, options, wait_s=60)
    if rank:
        engine.follow()
    else:
        answers_of(engine, [([1, 2, 3], SamplingOptions(tokens=2, repetition_penalty=1.5))])
        engine.pause()
    layers = [m for block in model.blocks for m in block.modules() if isinstance(m, Module) and m.memory]
    pages = [t for layer in layers for t in layer.memory.pages.tensors]
    counts, predictor = engine.runner.counts, engine.runner.predictor
    kept = [engine.runner.rows.last, engine.runner.rows.drafts, *([] if predictor is None else [predictor.states])]
    kept += [*([] if counts is None else [counts.made, counts.prompt])]
    weights = [p.data for block in model.blocks for p in block.parameters()]
    return storage_bytes(weights), storage_bytes(pages), storage_bytes(kept)


def refusals(
    rank: int, world: int, run: Run, tried: Sequence[EngineOptions]
) -> list[list[tuple[str, object, str, tuple[object, ...]]] | None]:
    """By field, value, rule and what would be valid, why an engine refuses each of these options; None: it does not."""
    model, found = random_model(rank, world, run), list[list[tuple[str, object, str, tuple[object, ...]]] | None]()
    for options in tried:
        try:
            engine = Engine(model, options, wait_s=60)
        except ConfigError as error:
            found.append([(p.field, p.value, p.rule, p.valid) for p in error.problems])
            continue
        found.append(None)
        engine.close() if rank == 0 else engine.follow()
    return found


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the memory behind tensors, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def loads(rank: int, world: int, run: Run, prompts: Sequence[list[int]]) -> tuple[EngineLoad, EngineLoad]:
    """What an engine of two sequences a replica has to do after its first step, and when all is done."""
    options = EngineOptions(sequences=2, tokens=32, page_size=4, length=24)
    engine = Engine(random_model(rank, world, run), options, wait_s=60)
    if rank:
        engine.follow()
        return engine.load(), engine.load()
    for prompt in prompts:
        engine.submit(prompt, SamplingOptions(tokens=9))
    engine.step()
    amid = engine.load()
    while not engine.idle:
        engine.step()
    after = engine.load()
    engine.pause()
    return amid, after
