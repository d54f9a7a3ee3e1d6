"""A model's blocks on the meta device, and what is asked of them as values: sizes, FLOPs, names, linears.

The whole model is made once for all of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from phalanx.base.dataclass import dataclass
from phalanx.config.run import Run
from phalanx.layout.grid import Grid
from phalanx.layout.param import ParamSpec
from phalanx.models.model_config import ModelConfig
from phalanx.models.registry import family_of
from phalanx.nn.env import Env, WeightRules
from phalanx.nn.fp8 import joint_name, matrices_of
from phalanx.nn.linear import Linear
from phalanx.nn.module import Block
from phalanx.nn.objective import make_objective
from phalanx.nn.parameter import Parameter
from phalanx.sequence.batch import TEXT
from phalanx.sequence.sample import UnitRoom
from phalanx.sequence.streams import HIDDEN, Border, StreamSpec, checked


def make_blocks(model: ModelConfig, env: Env, which: Sequence[int]) -> list[Block]:
    """The blocks with these numbers on the meta device. They are built together, so that blocks which share a weight
    hold it once."""
    makers = family_of(model).blocks(model, env)
    made: list[Block] = []
    parameters: dict[str, Parameter] = {}
    for number in which:
        block = makers[number](parameters)
        parameters.update({piece.name: p for p in block.parameters() for piece in p.spec.pieces})
        made.append(block)
    return made


def num_blocks(model: ModelConfig) -> int:
    """Embedding, layers, multi-token prediction (if any), head."""
    return model.num_blocks


@lru_cache(maxsize=2)
def whole_model(model: ModelConfig) -> tuple[Block, ...]:
    """All blocks, unsharded. All callers get the same objects: read them, change nothing."""
    return tuple(make_blocks(model, Env(), range(num_blocks(model))))


@dataclass(frozen=True)
class BlockFacts:
    """Facts about one whole, unsharded block: its parameters, how many of them belong to experts, forward FLOPs per
    token of the text, the FLOPs of heads among them, the FLOPs without attention to other tokens, and the streams that
    it takes and passes on."""

    name: str
    numel: int
    flops: float
    experts: int = 0
    loss_flops: float = 0.0
    alone: float = 0.0
    given: Border = ()
    passed: Border = ()


def facts_of(run: Run) -> tuple[BlockFacts, ...]:
    """Facts about the blocks of a run's model."""
    beside = {**lengths_beside(run), **{room.stream.name: room.capacity for room in unit_rooms(run)}}
    objective, tokens = make_objective(run.task), run.train.micro_batch * run.train.seq_length
    few = run.layout.tp == run.layout.cp == 1 and objective.label_rows(tokens) > 0
    share = objective.label_share if few else 1.0
    return model_facts(run.model, run.train.seq_length, tuple(beside.items()), share)


def lengths_beside(run: Run) -> dict[str, int]:
    """Tokens, or rows of numbers, of a sequence in each stream that its documents have beside the text."""
    numbers = {stream.name: run.data.room.get(stream.name, 0) for stream in run.model.numbers_beside}
    return {**make_objective(run.task).beside, **numbers}


def unit_rooms(run: Run) -> tuple[UnitRoom, ...]:
    """The streams of units (sequence.units) that the model reads, with the capacity that data.room gives them."""
    streams = run.model.reads_units
    return tuple(UnitRoom(each, run.data.room.get(each.name, 0), f"data.room.{each.name}") for each in streams)


@lru_cache(maxsize=8)
def model_facts(
    model: ModelConfig, seq_length: int, beside: tuple[tuple[str, int], ...] = (), labelled: float = 1.0
) -> tuple[BlockFacts, ...]:
    """Facts about the model's blocks, read from the real modules. A tied head counts its FLOPs, not its weights.
    `beside`: names and lengths of the streams of tokens beside the text. labelled: the share of tokens that are read by
    a block which reads those with a label alone."""
    lengths = {TEXT: seq_length, **dict(beside)}
    seen: set[int] = set()
    border: Border = (StreamSpec(HIDDEN, model.hidden_size),)
    facts = []
    for block in whole_model(model):
        fresh = [p for p in block.parameters() if id(p) not in seen]
        seen.update(id(p) for p in fresh)
        specs = [p.spec for p in fresh if p.spec.trained]
        experts = sum(global_numel(s) for s in specs if s.summed_over == "edp")
        flops, of_heads = block.flops_per_token(lengths), block.loss_flops(seq_length)
        alone = block.flops_per_token(lengths, mixing=False)
        given, border = border, checked(block.streams(border), type(block).__name__)
        if block.reads_labelled:
            flops, of_heads, alone = (each * labelled for each in (flops, of_heads, alone))
        sizes = (sum(map(global_numel, specs)), flops, experts, of_heads, alone)
        facts.append(BlockFacts(type(block).__name__, *sizes, given, border))
    return tuple(facts)


def global_numel(spec: ParamSpec) -> int:
    return sum(piece.box.numel for piece in spec.pieces)


def whole_specs(model: ModelConfig, freeze: Iterable[str] = (), also: Iterable[str] = ()) -> list[ParamSpec]:
    """The spec of each parameter of the unsharded model, once, in model order. `freeze`, `also`: as in
    nn.env.WeightRules."""
    once = {id(p): p.spec for block in whole_model(model) for p in block.parameters()}
    rules = Env(weights=WeightRules(freeze=tuple(freeze), also=tuple(also)))
    return [replace(spec, frozen=spec.frozen or rules.freezes(spec)) for spec in once.values()]


def exported_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a Hugging Face checkpoint of this model."""
    return {piece.name: piece.shape for spec in whole_specs(model) if spec.exported for piece in spec.pieces}


@dataclass(frozen=True)
class LinearFacts:
    """A linear that train.fp8 may quantize.

    name      one name for all of its matrices, as in the state of nn.fp8
    matrices  names of its global matrices, those of every expert included
    shape     (out, in) of the weight; for experts, of one expert
    experts   whether it has a matrix for each expert
    """

    name: str
    matrices: tuple[str, ...]
    shape: tuple[int, int]
    experts: bool


def linears_of(blocks: Iterable[Block]) -> tuple[LinearFacts, ...]:
    """The linears of these blocks, each once, in the order of their weights in memory."""
    found: dict[int, LinearFacts] = {}
    for block in blocks:
        here = {id(m.weight): m for m in block.modules() if isinstance(m, Linear)}
        for linear in (here[id(p)] for p in block.parameters() if id(p) in here):
            shape = (linear.weight.shape[-2], linear.weight.shape[-1])
            facts = LinearFacts(joint_name(linear), matrices_of(linear), shape, linear.experts > 0)
            found.setdefault(id(linear.weight), facts)
    return tuple(found.values())


@lru_cache(maxsize=8)
def whole_linears(model: ModelConfig) -> tuple[LinearFacts, ...]:
    """The linears of the unsharded model."""
    return linears_of(whole_model(model))


@lru_cache(maxsize=16)
def cut_linears(model: ModelConfig, tp: int, etp: int) -> tuple[LinearFacts, ...]:
    """The linears as sharded on the first and on the last rank: those of dense layers over tp, of experts over etp."""
    found: dict[LinearFacts, None] = {}
    for grid, experts in ((Grid(tp=tp), False), (Grid(dp=etp, etp=etp), True)):
        for rank in sorted({0, grid.world - 1}):
            cut = linears_at(model, grid, rank) if grid.world > 1 else whole_linears(model)
            found |= dict.fromkeys(linear for linear in cut if linear.experts == experts)
    return tuple(found)


def linears_at(model: ModelConfig, grid: Grid, rank: int) -> tuple[LinearFacts, ...]:
    """The linears of all blocks on one rank of a grid without pipeline stages."""
    return linears_of(make_blocks(model, Env(grid=grid, at=grid.coords(rank)), range(num_blocks(model))))
