"""The rules of `lora`: every glob and pattern fits something, what is trained whole has no adapter, and what the method
needs of targets, layout and run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from phalanx.base.errors import CheckpointError, Problem
from phalanx.base.registry import near
from phalanx.base.rules import no_effect, problem
from phalanx.checkpoint.adapters import CONFIG, FOLDER, AdapterFolder, adapter_folder, adapter_source
from phalanx.checkpoint.hf_files import folder_of
from phalanx.checkpoint.lora_folder import STARTED_FROM, read_peft_config
from phalanx.checkpoint.manifest import NAME, read_manifest
from phalanx.config.run import Run
from phalanx.models.registry import family_of
from phalanx.nn.adapted_linear import fits, fits_outside
from phalanx.nn.adapter import AdapterConfig, find_adapter, fits_module
from phalanx.nn.objective import SequenceObjective, find_objective, make_objective
from phalanx.planning.adapters import AdaptedNames, adapted_names, kinds
from phalanx.planning.freeze import stored_together

MAY_DIFFER = ("targets", "also", "init_from", "base", "dropout")  # of what a run with these adapters goes on with


def check_adapters(run: Run) -> list[Problem]:
    """Of a run whose model has no problem of its own."""
    lora = run.lora
    if lora is None:
        return []
    method, names = find_adapter(lora.method), adapted_names(run.model)
    able = [name for of_one in names.carriers for name in of_one]
    wrong = {glob: each for glob in lora.targets for each in _check_glob(run, lora, glob, names)}
    found = [replace(each, valid=_mended(lora, glob, wrong)) for glob, each in wrong.items()]
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
    if run.train.freeze:
        rule = "has no effect with lora, which keeps all weights of the model as they are"
        found.append(problem("train", run.train, "freeze", rule, {"lora.method": lora.method}, ([],)))
    found += _check_method(run, lora, names) + _check_outside(run, lora, names)
    return found + _check_also(run, lora, able) + method.check(lora)


def _mended(lora: AdapterConfig, glob: str, wrong: Mapping[str, Problem]) -> tuple[list[str], ...]:
    """The targets with each name that `glob` may mean, or without it. The other wrong globs are replaced too: while one
    of them stays, no value ends the problem."""
    meant = {g: [name for value in p.valid for name in value if name not in lora.targets] for g, p in wrong.items()}
    made = list[list[str]]()
    for like in meant[glob] or [""]:
        names = {g: [like] if g == glob else meant.get(g, [g])[:1] for g in lora.targets}
        made.append(list(dict.fromkeys(name for found in names.values() for name in found if name)) or ["*"])
    return tuple(made)


def _check_outside(run: Run, lora: AdapterConfig, names: AdaptedNames) -> list[Problem]:
    """Whether the embedding and the head can have an adapter where a glob names them."""
    method, tied = find_adapter(lora.method), getattr(run.model, "tie_word_embeddings", False)
    stacks = tuple(name for of_layer in names.stacks for name in of_layer)
    found = []
    for what, of_what, able in (
        ("embedding", names.embeddings, method.embeds),
        ("head", names.heads, method.heads),
        ("experts that are one tensor", stacks, method.stacks),
    ):
        named = [name for name in of_what if fits_outside(name, lora.targets)]
        ends = what in ("embedding", "head")
        why = {
            f"the method {lora.method} has no form for it": not able,
            "PiSSA has no form for it": getattr(lora, "start", "random") == "pissa",
            "it is the head too, which would be another matrix": ends and tied,
            "multi-token prediction reads it too": ends and run.model.predict_layers > 0,
            "it is trained whole (lora.also)": any(fits(name, lora.also) for name in named),
        }
        rest = [glob for glob in lora.targets if not any(fits_outside(name, [glob]) for name in named)] or ["*"]
        broken = [reason for reason, is_so in why.items() if is_so] if named else []
        found += [
            problem("lora", lora, "targets", f"must not name the {what}: {reason}", {"names": named[0]}, (rest,))
            for reason in broken[:1]
        ]
    torn = next((both for both in names.stacks if len({fits_outside(n, lora.targets) for n in both}) > 1), None)
    if torn is not None and not found:
        both = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in torn))
        missing = next(name for name in torn if not fits_outside(name, lora.targets))
        rule = "must fit both tensors of a layer's experts, or none"
        found = [problem("lora", lora, "targets", rule, {"fits not": missing}, ([*lora.targets, *both],))]
    return found


def _check_method(run: Run, lora: AdapterConfig, names: AdaptedNames) -> list[Problem]:
    """What the method needs of its targets and of the run."""
    method, found = find_adapter(lora.method), list[Problem]()
    targets = [(of_one, s) for of_one, s in zip(names.carriers, names.shapes) if fits(of_one[0], lora.targets)]
    if run.train.fp8 is not None and method.reads_base:
        rule = "must be null: the method reads the frozen weights, of which only FP8 values may be there"
        found.append(problem("train", run.train, "fp8", rule, {"lora.method": lora.method}, (None,)))
    if method.check(lora):  # what is wrong alone comes first: it may not even be a pattern
        return found
    targets += [((name,), s) for name, s in names.stack_shapes.items() if fits_outside(name, lora.targets)]
    if not targets and hasattr(lora, "dropout"):
        because = {"lora.targets": lora.targets}
        found += no_effect("lora", lora, ("dropout",), "a target that is a linear", because)
    stacked = [name for name in names.stack_shapes if fits_outside(name, lora.targets)]
    experts = next((of_one[0] for of_one in names.experts if fits(of_one[0], lora.targets)), next(iter(stacked), None))
    found += [] if experts is None else method.check_experts(lora, experts.removesuffix(".weight"))
    modules = [[name.removesuffix(".weight") for name in of_one] for of_one, _ in targets]
    for field, patterns in method.patterns(lora).items():
        found += [each for pattern in patterns for each in _check_pattern(lora, field, pattern, modules)]
    sizes = [(name, shape) for of_one, (_, shape) in zip(modules, targets) for name in of_one]
    sizes.sort(key=lambda each: min(each[1]))  # what the smallest matrix can have, all can
    wrong = (each for name, shape in sizes for each in method.check_module(lora, name, *shape))
    return found + [*wrong][:1]


def _check_pattern(lora: AdapterConfig, field: str, pattern: str, modules: list[list[str]]) -> list[Problem]:
    """A regular expression fits a target; of the experts of a layer, which stand together in `modules`, all or none."""
    fitting = [[name for name in of_one if fits_module(pattern, name)] for of_one in modules]
    rest = {key: value for key, value in getattr(lora, field).items() if key != pattern}
    if not any(fitting):
        rule = "must have patterns that fit the end of a target's name"
        return [problem("lora", lora, field, rule, {"fits none": pattern}, (rest,))]
    torn = next((some for some, of_one in zip(fitting, modules) if some and len(some) != len(of_one)), None)
    if torn is None:
        return []
    rule = "must have patterns that fit all or none of the experts of a layer"
    return [problem("lora", lora, field, rule, {"fits only": torn[0]}, (rest,))]


def _check_also(run: Run, lora: AdapterConfig, able: list[str]) -> list[Problem]:
    """Weights that are trained whole: they are there, all of what is stored as one, and have no adapter."""
    together = stored_together(run.model)
    if not lora.also:
        return []
    names = [name for matrix in together for name in matrix]
    idle = [glob for glob in lora.also if not any(fits(name, [glob]) for name in names)]
    rest = [glob for glob in lora.also if glob not in idle]
    if idle:
        like = near(idle[0], tuple(dict.fromkeys(kinds([name]) for name in names)))
        valid = tuple([*rest, each] for each in like) or (rest,)
        because = {"fits none": ", ".join(idle), "tensors": kinds(names)}
        return [problem("lora", lora, "also", "must fit names of tensors", because, valid)]
    both = [name for name in able if fits(name, lora.also) and fits(name, lora.targets)]
    if both:
        free = [glob for glob in lora.also if not any(fits(name, [glob]) for name in both)]
        rule = "must fit no matrix that has an adapter: it is trained whole or has one"
        return [problem("lora", lora, "also", rule, {"lora.targets": lora.targets, "such as": both[0]}, (free,))]
    torn = [matrix for matrix in together if len({fits(name, lora.also) for name in matrix}) > 1]
    if torn:
        missing = [name for matrix in torn for name in matrix if not fits(name, lora.also)]
        rule = "must fit all or none of the tensors that are stored as one matrix"
        valid = ([*lora.also, *dict.fromkeys(kinds([name]) for name in missing)],)
        return [problem("lora", lora, "also", rule, {"fits not": missing[0]}, valid)]
    kind = find_objective(run.task.name)
    if issubclass(kind, SequenceObjective) and kind.needs_reference and make_objective(run.task).scores is None:
        rule = "must be empty for an objective whose reference is the base with adapters off"
        return [problem("lora", lora, "also", rule, {"task.name": run.task.name}, ([],))]
    return []


def _check_glob(run: Run, lora: AdapterConfig, glob: str, names: AdaptedNames) -> list[Problem]:
    """A problem if it fits no linear and names neither embedding nor head."""
    able = [name for of_one in names.carriers for name in of_one]
    outside = (*names.embeddings, *names.heads, *names.stack_shapes)
    if any(fits(name, [glob]) for name in able) or any(fits_outside(name, [glob]) for name in outside):
        return []
    others = [name for name in names.others if fits(name, [glob])]
    rest = [g for g in lora.targets if g != glob]
    head = family_of(run.model).tensors.head
    if not names.heads and fits(head, [glob]):
        rule = "must not name the head: it is the embedding too, which would be another matrix"
        return [problem("lora", lora, "targets", rule, {"names": head}, (rest or ["*"],))]
    if others:
        rule = "must fit weights of linears that can carry an adapter; norms, routers, biases and experts that "
        rule += "are one tensor cannot (lora.also trains weights whole)"
        return [problem("lora", lora, "targets", rule, {"fits only": kinds(others)}, (rest or ["*"],))]
    ends = tuple(dict.fromkeys(re.sub(r".*\.(?=\w+\.weight$)", "*.", name) for name in able))
    like = tuple(end for end in ends if end == f"*.{glob}.weight") or near(glob, ends)  # as PEFT names modules
    valid = tuple([*rest, each] for each in like) or ((rest or ["*"]),)
    return [
        problem(
            "lora", lora, "targets", "must fit names of tensors", {"fits none": glob, "linears": kinds(able)}, valid
        )
    ]


def check_adapter_source(run: Run) -> list[Problem]:
    """What lora.init_from or init_from names holds adapters, and they do what this section says of them. Their shapes
    are compared when they are loaded."""
    lora = run.lora
    if lora is None or run.checkpoint.load is not None:
        return []
    try:
        saved = None if run.init_from is None else adapter_folder(folder_of(run.init_from))
    except CheckpointError as error:
        return [Problem("init_from", run.init_from, f"must hold good adapters ({error})")]
    if lora.init_from is None:
        return [] if saved is None else _check_section(lora, _section_of(saved, lora), {"init_from": run.init_from})
    if saved is not None:
        rule = "has no effect where init_from has adapters of its own: name the weights that they belong to there"
        return [problem("lora", lora, "init_from", rule, {"init_from": run.init_from}, (None,))]
    try:
        found = adapter_source(lora.init_from, family_of(run.model).tensors, run.model.tied)
        section = _section_of(found, lora)
    except CheckpointError as error:
        return [problem("lora", lora, "init_from", f"must hold adapters ({error})", {}, (None,))]
    return _check_section(lora, section, {"lora.init_from": lora.init_from})


def _section_of(found: AdapterFolder, lora: AdapterConfig) -> dict[str, Any]:
    """What is known of the `lora` section that adapters were trained with."""
    if found.path.name == FOLDER and (found.path.parent / NAME).is_file():
        section = read_manifest(found.path.parent).config.get("lora") or {}
        return {name: value for name, value in section.items() if name not in MAY_DIFFER}
    if not (found.path / CONFIG).is_file():
        return {}
    return find_adapter(lora.method).from_peft(read_peft_config(found.path, STARTED_FROM))


def _check_section(lora: AdapterConfig, wanted: Mapping[str, Any], because: dict[str, Any]) -> list[Problem]:
    own = json.loads(json.dumps(asdict(lora)))
    other = wanted.get("method", lora.method) != lora.method
    names = ["method"] if other else [name for name in wanted if name in own and own[name] != wanted[name]]
    rule = "must be that of the adapters that the run starts from"
    return [problem("lora", lora, name, rule, because, (wanted[name],)) for name in names]
