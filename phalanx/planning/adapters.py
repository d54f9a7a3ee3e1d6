"""Which tensors of a model carry adapters, and the rules of `lora`: every glob fits a linear's weight, and what the
method needs of the layout."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from phalanx.base.errors import Problem
from phalanx.base.registry import near
from phalanx.base.rules import problem
from phalanx.checkpoint.adapters import peft_text
from phalanx.config.run import Run
from phalanx.models.model_config import ModelConfig
from phalanx.nn.adapted_linear import fits, names_of, pieces_of
from phalanx.nn.adapter import find_adapter
from phalanx.nn.env import Env, WeightRules
from phalanx.nn.linear import Linear
from phalanx.nn.module import Block
from phalanx.planning.blocks import global_numel, make_blocks, num_blocks, whole_model
from phalanx.planning.freeze import stored_together
from phalanx.planning.plan import adapted_linears


@dataclass(frozen=True)
class AdaptedNames:
    """Global names of a model's tensors. carriers: linears' weights, which can have adapters, those of the experts of a
    layer together; by_inputs: of experts' output matrices among them; others: all that cannot have one."""

    carriers: tuple[tuple[str, ...], ...]
    by_inputs: tuple[tuple[str, ...], ...]
    others: tuple[str, ...]


@lru_cache(maxsize=8)
def adapted_names(model: ModelConfig) -> AdaptedNames:
    """Of a whole model."""
    pieces = [piece for linear in linears_in(whole_model(model)) for piece in pieces_of(linear)]
    carriers = tuple(dict.fromkeys(tuple(names_of(piece)) for piece in pieces))
    cut = tuple(tuple(names_of(piece)) for piece in pieces if piece.by_inputs and piece.experts is not None)
    able = {name for names in carriers for name in names}
    others = (name for matrix in stored_together(model) for name in matrix if name not in able)
    return AdaptedNames(carriers, cut, tuple(dict.fromkeys(others)))


@lru_cache(maxsize=8)
def linear_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """By name, outputs and inputs of a whole model's matrices that can have an adapter; not of experts."""
    pieces = [piece for linear in linears_in(whole_model(model)) for piece in pieces_of(linear)]
    return {piece.name: (piece.outputs, piece.inputs) for piece in pieces if piece.experts is None}


def linears_in(blocks: Iterable[Block]) -> list[Linear]:
    """Each once."""
    return list({id(m): m for block in blocks for m in block.modules() if isinstance(m, Linear)}.values())


def check_adapters(run: Run) -> list[Problem]:
    """Of a run whose model has no problem of its own."""
    lora = run.lora
    if lora is None:
        return []
    method, names = find_adapter(lora.method), adapted_names(run.model)
    if run.train.freeze:
        rule = "has no effect with lora, which keeps all weights of the model as they are"
        return [problem("train", run.train, "freeze", rule, {"lora.method": lora.method}, ([],))]
    able = [name for of_one in names.carriers for name in of_one]
    found = [each for glob in lora.targets for each in _check_glob(run, glob, able, names)]
    if not lora.targets:
        found = [problem("lora", lora, "targets", "must name linears", {"linears": kinds(able)}, (["*"],))]
    torn = [of_one for of_one in names.carriers if len({fits(name, lora.targets) for name in of_one}) > 1]
    if torn and not found:
        missing = [name for of_one in torn for name in of_one if not fits(name, lora.targets)]
        whole = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in missing))
        rule = "must fit all or none of the experts of a layer"
        found = [problem("lora", lora, "targets", rule, {"fits not": missing[0]}, ([*lora.targets, *whole],))]
    cut = [of_one[0] for of_one in names.by_inputs if fits(of_one[0], lora.targets)]
    if run.layout.etp > 1 and cut and not method.linear:
        rule = "must be 1 for a method that is not linear, on experts' output matrices"
        found.append(problem("layout", run.layout, "etp", rule, {"lora.method": lora.method, "such as": cut[0]}, (1,)))
    return found + method.check(lora)


def _check_glob(run: Run, glob: str, able: list[str], names: AdaptedNames) -> list[Problem]:
    """A problem if it fits no linear."""
    if any(fits(name, [glob]) for name in able):
        return []
    lora = run.lora
    others = [name for name in names.others if fits(name, [glob])]
    rest = [g for g in lora.targets if g != glob]  # type: ignore[union-attr]
    if others:
        rule = (
            "must fit weights of linears that can carry an adapter; embeddings, norms, routers, biases, the head and "
        )
        rule += "experts that are one tensor cannot"
        return [problem("lora", lora, "targets", rule, {"fits only": kinds(others)}, (rest or ["*"],))]
    like = near(glob, tuple(dict.fromkeys(re.sub(r".*\.(?=\w+\.weight$)", "*.", name) for name in able)))
    valid = tuple([*rest, each] for each in like) or ((rest or ["*"]),)
    return [
        problem(
            "lora", lora, "targets", "must fit names of tensors", {"fits none": glob, "linears": kinds(able)}, valid
        )
    ]


def kinds(names: Iterable[str]) -> str:
    """Names without the numbers of layers and experts, each once."""
    return ", ".join(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names))


def num_adapters(run: Run) -> int:
    """Parameters of all adapters of a run."""
    env = Env(weights=WeightRules(linears=adapted_linears(run), freeze=("*",)))
    blocks = make_blocks(run.model, env, range(num_blocks(run.model)))
    specs = {id(p): p.spec for block in blocks for p in block.parameters()}
    return sum(global_numel(spec) for spec in specs.values() if spec.learns)


def peft_config(run: Run) -> dict[str, Any] | None:
    """adapter_config.json of a run's adapters; None: it has none, or PEFT does not have the method."""
    lora = run.lora
    method = None if lora is None else find_adapter(lora.method)
    if lora is None or method is None or method.peft_type is None:
        return None
    transposed = any(p.transposed for m in linears_in(whole_model(run.model)) for p in m.weight.spec.pieces)
    able = [name.removesuffix(".weight") for of_one in adapted_names(run.model).carriers for name in of_one]
    own = {"peft_type": method.peft_type, **method.peft_config(lora)}
    taken = [name for name in able if fits(f"{name}.weight", lora.targets)]
    return peft_text(own, run.init_from, target_modules(taken, able), transposed)


def target_modules(taken: list[str], able: list[str]) -> list[str]:
    """The modules that have an adapter, as PEFT's target_modules: by the last part of their names where all modules of
    that name have one, else whole."""
    left = {name.rpartition(".")[2] for name in set(able) - set(taken)}
    last = {name: name.rpartition(".")[2] for name in taken}
    return list(dict.fromkeys(name if last[name] in left else last[name] for name in taken))
