"""Which tensors of a model carry adapters, what PEFT is told of them, and how they are merged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.checkpoint.adapters import Modules, peft_text
from phalanx.config.run import Run
from phalanx.models.model_config import ModelConfig
from phalanx.models.registry import family_of
from phalanx.nn.adapted_linear import fits, fits_outside, names_of, pieces_of
from phalanx.nn.adapter import AdapterConfig, find_adapter
from phalanx.nn.base_linears import BaseLinears
from phalanx.nn.embedding import Embedding
from phalanx.nn.env import Env, WeightRules
from phalanx.nn.head import Head
from phalanx.nn.linear import Linear, ReplicatedLinear
from phalanx.nn.module import Block
from phalanx.planning.blocks import global_numel, make_blocks, num_blocks, whole_model
from phalanx.planning.freeze import stored_together
from phalanx.planning.plan import adapted_linears


@dataclass(frozen=True)
class AdaptedNames:
    """Global names of a model's tensors. carriers: linears' weights, which can have adapters, those of the experts of a
    layer together; experts: those of experts among them; by_inputs: of their output matrices; shapes: (outputs, inputs)
    of each carrier. What has an adapter where a glob names it: embeddings; heads (tied ones are embeddings); stacks,
    each a tensor that holds all experts of a layer, the two of a layer together, with stack_shapes of an expert's
    matrices. others: all that cannot have one."""

    carriers: tuple[tuple[str, ...], ...]
    experts: tuple[tuple[str, ...], ...]
    by_inputs: tuple[tuple[str, ...], ...]
    shapes: tuple[tuple[int, int], ...]
    embeddings: tuple[str, ...]
    heads: tuple[str, ...]
    stacks: tuple[tuple[str, ...], ...]
    stack_shapes: dict[str, tuple[int, int]]
    others: tuple[str, ...]


@lru_cache(maxsize=8)
def adapted_names(model: ModelConfig) -> AdaptedNames:
    """Of a whole model."""
    found = [piece for linear in linears_in(whole_model(model)) for piece in pieces_of(linear)]
    pieces = [piece for piece in found if piece.stack is None]
    stack_shapes = {piece.name: (piece.outputs, piece.inputs) for piece in found if piece.stack is not None}
    stacks = tuple(tuple(own) for _, own in groupby(stack_shapes, lambda name: name.rpartition(".")[0]))
    carriers = {tuple(names_of(piece)): (piece.outputs, piece.inputs) for piece in pieces}
    stacked = {tuple(names_of(piece)): piece.by_inputs for piece in pieces if piece.experts is not None}
    cut = tuple(names for names, by_inputs in stacked.items() if by_inputs)
    embeddings = tuple(dict.fromkeys(m.weight.spec.name for m in embeddings_in(whole_model(model))))
    heads = tuple(dict.fromkeys(m.names[0] for m in heads_in(whole_model(model)) if m.names[0] not in embeddings))
    able = {*embeddings, *heads, *stack_shapes, *(name for names in carriers for name in names)}
    others = (name for matrix in stored_together(model) for name in matrix if name not in able)
    shapes, rest = tuple(carriers.values()), tuple(dict.fromkeys(others))
    return AdaptedNames(tuple(carriers), tuple(stacked), cut, shapes, embeddings, heads, stacks, stack_shapes, rest)


@lru_cache(maxsize=8)
def linear_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """By name, outputs and inputs of a whole model's matrices that can have an adapter; not of experts."""
    pieces = [piece for linear in linears_in(whole_model(model)) for piece in pieces_of(linear)]
    return {piece.name: (piece.outputs, piece.inputs) for piece in pieces if piece.experts is None}


def linears_in(blocks: Iterable[Block]) -> list[Linear | ReplicatedLinear]:
    """Each once."""
    kinds = (Linear, ReplicatedLinear)
    return list({id(m): m for block in blocks for m in block.modules() if isinstance(m, kinds)}.values())


def embeddings_in(blocks: Iterable[Block]) -> list[Embedding]:
    return [m for block in blocks for m in block.modules() if isinstance(m, Embedding)]


def heads_in(blocks: Iterable[Block]) -> list[Head]:
    return [m for block in blocks for m in block.modules() if isinstance(m, Head)]


def kinds(names: Iterable[str]) -> str:
    """Names without the numbers of layers and experts, each once."""
    return ", ".join(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names))


def num_adapters(run: Run) -> int:
    """Parameters of all adapters of a run."""
    env = Env(weights=WeightRules(linears=adapted_linears(run), freeze=("*",)))
    blocks = make_blocks(run.model, env, range(num_blocks(run.model)))
    specs = {id(p): p.spec for block in blocks for p in block.parameters()}
    return sum(global_numel(spec) for spec in specs.values() if spec.learns)


def quantized_names(model: ModelConfig, lora: AdapterConfig) -> frozenset[str]:
    """Names of the weights that lora.base quantizes."""
    if lora.base == "bf16":
        return frozenset()
    env = Env(weights=WeightRules(linears=BaseLinears(lora.base), freeze=("*",), also=tuple(lora.also)))
    blocks = make_blocks(model, env, range(num_blocks(model)))
    specs = (p.spec for block in blocks for p in block.parameters() if p.spec.base_format is not None)
    return frozenset(piece.name for spec in specs for piece in spec.pieces)


def saved_peft_config(run: Run, base: str | None = None) -> dict[str, Any] | None:
    """`peft_config` of a run whose checkpoints hold adapters as PEFT reads them; None of others."""
    lora = run.lora
    reads = lora is not None and find_adapter(lora.method).as_peft_reads(lora) and not _tied_and_trained(run)
    return peft_config(run, base) if reads and unknown_to_peft(run) is None else None


def unknown_to_peft(run: Run) -> str | None:
    """What a run's adapters have that PEFT has no form for; None: nothing."""
    lora = run.lora
    if lora is None or find_adapter(lora.method).peft_type is None:
        return None if lora is None else f"has adapters of {lora.method}, which PEFT does not have"
    adapted = {name.removesuffix(".weight") for name in _all_targets(run.model, lora)}
    names = (name for matrix in stored_together(run.model) for name in matrix)
    torn = next((name for name in names if name.rpartition(".")[0] in adapted and fits(name, lora.also)), None)
    if torn is None:
        return None
    return f"trains {torn} (lora.also), and PEFT trains a module whole or gives it an adapter: export it with --merge"


def _all_targets(model: ModelConfig, lora: AdapterConfig) -> Iterator[str]:
    """Names of the matrices that have an adapter."""
    known = adapted_names(model)
    yield from (name for of_one in known.carriers for name in of_one if fits(name, lora.targets))
    yield from (name for name in (*known.embeddings, *known.heads) if fits_outside(name, lora.targets))


def _tied_and_trained(run: Run) -> bool:
    """Whether the embedding is trained whole and is the head too: PEFT then needs it under both names."""
    return run.lora is not None and run.model.tied and fits(family_of(run.model).tensors.embedding, run.lora.also)


def peft_config(run: Run, base: str | None = None) -> dict[str, Any] | None:
    """adapter_config.json of a run's adapters; None: it has none, or PEFT does not have the method. base: the folder of
    the weights that they belong to, if it is known better than from the config."""
    lora = run.lora
    method = None if lora is None else find_adapter(lora.method)
    if lora is None or method is None or method.peft_type is None:
        return None
    known = adapted_names(run.model)
    able = [name.removesuffix(".weight") for of_one in known.carriers for name in of_one]
    outside = (*known.embeddings, *known.heads)
    rows = [name.removesuffix(".weight") for name in outside if fits_outside(name, lora.targets)]
    own, named = {"peft_type": method.peft_type, **method.peft_config(lora)}, family_of(run.model).tensors.in_memory
    taken = [name for name in able if fits(f"{name}.weight", lora.targets)]
    pieces = (piece for linear in linears_in(whole_model(run.model)) for piece in linear.weight.spec.pieces)
    transposed = any(piece.transposed and piece.name.removesuffix(".weight") in taken for piece in pieces)
    names = [name for matrix in stored_together(run.model) for name in matrix]
    also = dict.fromkeys(name.rpartition(".")[0] for name in names if fits(name, lora.also))
    if _tied_and_trained(run):
        also[family_of(run.model).tensors.head.removesuffix(".weight")] = None
    where = base or run.init_from
    stacks = list(known.stack_shapes)
    whole = target_modules([name for name in stacks if fits_outside(name, lora.targets)], stacks, parts=3)
    # a tower has modules that are no linears and end as linears of the text do
    targets = taken if run.model.reads_units else target_modules(taken, able)
    modules = Modules([named(name) for name in (*targets, *rows)], [named(name) for name in also], whole)
    return peft_text(own, where, modules, transposed, peft_task(run.model))


def peft_task(model: ModelConfig) -> str | None:
    """What PEFT is to take a model for. Its class for encoder-decoders reads ids, and none of its classes masked
    tokens; those for classes want the head trained whole."""
    if model.headless:
        return "FEATURE_EXTRACTION"
    if model.both_ways or model.classes or model.numbers_beside:
        return None
    return "SEQ_2_SEQ_LM" if model.reads_beside else "CAUSAL_LM"


def target_modules(taken: list[str], able: list[str], parts: int = 1) -> list[str]:
    """The modules that have an adapter, as PEFT's target_modules: by the last parts of their names where all modules of
    that name have one, else whole."""

    def end(name: str) -> str:
        return ".".join(name.split(".")[-parts:])

    left = {end(name) for name in set(able) - set(taken)}
    last = {name: end(name) for name in taken}
    return list(dict.fromkeys(name if last[name] in left else last[name] for name in taken))
