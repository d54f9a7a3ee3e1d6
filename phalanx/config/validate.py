"""From plain values to a Run, or every problem of form: unknown keys, wrong types, and what was probably meant.

pydantic checks types strictly over the config's dataclasses. The rules are in `check.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import typing
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from phalanx.base import tree
from phalanx.base.errors import Problem
from phalanx.base.registry import BUILT_IN, NotFound
from phalanx.config.run import Run
from phalanx.config.synonyms import NOT_BUILT, SAME_IN_OTHERS, SYNONYMS, said_of
from phalanx.config.write import plain
from phalanx.layout.param import ROLES
from phalanx.models.registry import is_known, load_family
from phalanx.nn.adapter import AdapterConfig, find_adapter
from phalanx.nn.objective import TaskConfig, find_objective
from phalanx.optim.config import OptimConfig
from phalanx.optim.optimizer import find_optimizer

if TYPE_CHECKING:  # start-up time, here and in functions: configs made in Python do without it
    from pydantic import BaseModel

FALLBACK = "optim.fallback"
# sections whose fields depend on a name in them (`named_by`): their common class, and how the specific one is found
NAMED: Mapping[str, tuple[Any, Callable[[str], Any]]] = MappingProxyType(
    {
        "optim": (OptimConfig, find_optimizer),
        FALLBACK: (OptimConfig, find_optimizer),
        "task": (TaskConfig, find_objective),
        "lora": (AdapterConfig, find_adapter),
    }
)
NO_MODEL = (
    "is required: a family and its sizes (model.family=llama model.hidden_size=64 ...; `phalanx explain "
    "model` lists them).\n"
    "  Of a Hugging Face folder: init_from=FOLDER takes weights, sizes and tokenizer,\n"
    "  model.from=FOLDER sizes and tokenizer alone (random weights). recipes/ has complete configs"
)


def run_schema(named: Mapping[str, type]) -> type[BaseModel]:
    """A pydantic model with Run's fields: it carries the strict settings that a plain dataclass cannot. `named`: as
    `named_sections` finds them."""
    known = () if "model" in named else tuple(families().items())
    return _run_schema(tuple((name, cls) for name, cls in named.items() if name != FALLBACK), known)


def families() -> Mapping[str, type]:
    """The classes of `model` sections, by model.family."""
    return tree.choices_of(Run, "model")


def _family(section: Any) -> str | None:
    """The family that a `model` section names, by which pydantic chooses the class."""
    if not isinstance(section, dict) or "family" not in section:
        return None
    family = section["family"]
    return family if isinstance(family, str) else json.dumps(family)


@functools.lru_cache(maxsize=8)
def _run_schema(named: tuple[tuple[str, type], ...], known: tuple[tuple[str, type], ...]) -> type[BaseModel]:
    from pydantic import ConfigDict, create_model

    fields: dict[str, Any] = {}
    for f in dataclasses.fields(Run):
        required = f.default is tree.REQUIRED and f.default_factory is tree.REQUIRED
        default = ... if required else (f.default_factory() if f.default_factory is not tree.REQUIRED else f.default)
        fields[f.name] = (_field(f.name, dict(named), known), default)
    return create_model("Run", __config__=ConfigDict(strict=True, extra="forbid"), **fields)


def _field(name: str, named: Mapping[str, type], known: tuple[tuple[str, type], ...]) -> Any:
    """The type of a field of Run, as what the config names has it; of a model without a family, any that is known."""
    from pydantic import Discriminator, Tag

    if name == "model":
        tagged = tuple(Annotated[cls, Tag(family)] for family, cls in known)
        # of a tuple there is no other way to write it
        return named.get(name) or Annotated[typing.Union[tagged], Discriminator(_family)]  # noqa: UP007
    hint = tree.hint_of(Run, name)
    if name not in named:
        return hint
    return named[name] | None if _optional(hint) else named[name]


def _optional(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


@functools.lru_cache(maxsize=8)
def _fallback_schema(fallback: type) -> type[BaseModel]:
    """The same for optim.fallback, a section of an optimizer inside another."""
    from pydantic import ConfigDict, create_model

    config = ConfigDict(strict=True, extra="forbid")
    return create_model("Fallback", __config__=config, fallback=(fallback, ...))


def build(data: dict[str, Any]) -> tuple[Run | None, list[Problem], frozenset[str]]:
    """A Run from plain values. With problems: a repaired Run (or None), every problem, and the fields that were
    repaired."""
    named, nameless = named_sections(data)
    run, errors = (None, []) if nameless else _validate(data, named)
    if nameless:  # without the members that they name, the keys of the sections are unknown
        for section in (p.field.rpartition(".")[0] for p in nameless):
            shared = set(tree.field_names(NAMED[section][0])) - {NAMED[section][0].named_by}
            data = _with(data, section, {k: v for k, v in _at(data, section).items() if k in shared})
        errors = _validate(data, named)[1]
    errors += _bools_for_numbers(data, named)
    if not errors and not nameless:
        return run, [], frozenset()
    problems = [_problem(e, named) for e in errors]
    repaired = copied(data)
    for error, broken in zip(errors, problems):
        _repair(repaired, _steps(error["loc"], named)[0], broken, error["type"])
    problems = nameless + problems
    return _validate(repaired, named)[0], problems, frozenset(p.field for p in problems)


def named_sections(data: Mapping[str, Any]) -> tuple[dict[str, type], list[Problem]]:
    """The classes of the sections in NAMED and of a model whose family is known, from what they name; names in NAMED
    that lead nowhere are problems."""
    classes, problems = dict[str, type](), []
    family = _at(data, "model.family")
    if isinstance(family, str) and is_known(family):
        classes["model"] = load_family(family).config
    for section, (base, find) in NAMED.items():
        given = _at(data, section)
        key = base.named_by
        default = getattr(base, key)
        name = given.get(key, default) if isinstance(given, dict) else default
        try:
            classes[section] = find(name if isinstance(name, str) else default).Config
        except NotFound as error:
            classes[section] = find(default).Config
            found, said = error.problem(f"{section}.{key}", name), said_of(name)
            problems.append(dataclasses.replace(found, rule=f"{found.rule}; {said}" if said else found.rule))
    return classes, problems


def _at(data: Mapping[str, Any], section: str) -> Any:
    """The contents of a dotted section; None if there are none."""
    found: Any = data
    for step in section.split("."):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _with(data: dict[str, Any], section: str, values: Any) -> dict[str, Any]:
    """A copy with other values in a dotted section, which must exist."""
    head, _, rest = section.partition(".")
    return {**data, head: _with(data[head], rest, values) if rest else values}


def _validate(data: dict[str, Any], named: Mapping[str, type]) -> tuple[Run | None, list[Any]]:
    from pydantic import ValidationError

    given = _at(data, FALLBACK)
    if isinstance(given, dict):  # a section of an optimizer inside another: each by its own class
        data = _with(data, FALLBACK, None)
    errors: list[Any] = []
    try:
        # through JSON, because pydantic's strict mode takes lists for tuples only there
        made: Any = run_schema(named).model_validate_json(json.dumps(data))
    except ValidationError as error:
        errors += error.errors(include_url=False)
    if isinstance(given, dict):
        try:
            inner: Any = _fallback_schema(named[FALLBACK]).model_validate_json(json.dumps({"fallback": given}))
        except ValidationError as error:
            errors += [{**e, "loc": ("optim", *e["loc"])} for e in error.errors(include_url=False)]
    if errors:
        return None, errors
    values = {name: getattr(made, name) for name in tree.field_names(Run)}
    if isinstance(given, dict):
        taken = {name: value for name, value in values["optim"].for_fallback.items() if name not in given}
        fallback = dataclasses.replace(inner.fallback, **taken)
        values["optim"] = dataclasses.replace(values["optim"], fallback=fallback)
    return Run(**values), []


def _bools_for_numbers(data: dict[str, Any], named: Mapping[str, type]) -> list[Any]:
    """Errors, in pydantic's form, for `true` where it would accept it as the literal 1."""
    found = []
    for steps, value in _bools(data):
        hint = _steps(steps, named)[1]
        options = [o for m in tree.members(hint) if typing.get_origin(m) is typing.Literal for o in typing.get_args(m)]
        if any(type(o) is int for o in options):
            found.append({"type": "literal_error", "loc": steps, "input": value})
    return found


def _bools(data: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], bool]]:
    """The steps to each `true` and `false`, and which it is."""
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _bools(value, (*above, key))
        elif isinstance(value, bool):
            yield (*above, key), value


def _steps(loc: tuple[Any, ...], named: Mapping[str, type]) -> tuple[list[str], Any, type]:
    """pydantic's location -> (steps of the path, type expected there, class of the section, in `named` for those that
    it has). Tags of unions are left out."""
    steps: list[str] = []
    hint: Any = Run
    owner: type = Run
    rest = list(loc)
    while rest:
        options = tree.sections(hint)
        if len(options) > 1 and rest[0] in families():
            hint = families()[rest.pop(0)]
            continue
        step = rest.pop(0)
        steps.append(str(step))
        if options:
            owner = options[0]
            if ".".join(steps) in named:
                hint = named[".".join(steps)]
            else:
                hint = tree.hint_of(owner, step) if step in tree.field_names(owner) else None
        else:
            args = [a for m in tree.members(hint) for a in typing.get_args(m) if a is not ...]
            hint = args[-1] if args else None
    if len(tree.sections(hint)) == 1:
        owner = tree.sections(hint)[0] if dataclasses.is_dataclass(hint) else owner
    return steps, hint, owner


def _problem(error: Any, named: Mapping[str, type]) -> Problem:
    steps, hint, owner = _steps(error["loc"], named)
    path, kind, value = ".".join(steps), error["type"], error["input"]
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return _unknown(path, value, owner)
    if kind == "missing" and path == "model":
        return Problem(path, None, NO_MODEL)
    if kind == "missing":
        doc = tree.field_docs(owner).get(steps[-1], "")
        return Problem(
            path, None, f"is required: {tree.type_text(hint)}{f' ({doc[0].lower()}{doc[1:-1]})' if doc else ''}"
        )
    if kind in ("union_tag_not_found", "union_tag_invalid") and isinstance(value, dict):
        names, family = tuple(families()), value.get("family")
        rule = "is required: one of " if kind == "union_tag_not_found" else "must be one of "
        return Problem(
            f"{path}.family",
            family,
            rule + ", ".join(f'"{n}"' for n in names) + ", or a package's as PACKAGE.MODULE:NAME",
            {},
            close_to(str(family), names) or names,
        )
    if hint == tree.hints(Run)["model"]:
        rule = (
            "must be a section with its family, got "
            + yaml_type(value)
            + "; of a Hugging Face folder: model.from=FOLDER"
        )
        return Problem(path, value, rule)
    if kind == "literal_error":
        said = said_of(value) if isinstance(value, str) else ""
        return Problem(
            path,
            value,
            f"must be {tree.type_text(hint)}" + (f"; {said}" if said else ""),
            {},
            _close_literals(value, hint),
        )
    return Problem(
        path,
        value,
        f"must be {tree.type_text(hint)}, got {yaml_type(value)}",
        {},
        _casts(value, hint, owner, steps[-1]),
    )


def _unknown(path: str, value: Any, owner: type) -> Problem:
    """A key that no section knows here: says where it belongs, or what it may have meant."""
    section, _, name = path.rpartition(".")
    elsewhere = [k for k in tree.keys(Run) if k.name == name and k.path != path]
    at = f"of {section}" if section else "at the top"
    others = [k.owner for k in tree.keys(Run) if k.path == path and k.owner is not owner]
    if others and section in NAMED:
        base, find = NAMED[section]
        known = (n for n in BUILT_IN[base.seam] if find(n).Config in others)
        rule = f"is a key of {section} only with {base.named_by} {', '.join(known)}"
        return Problem(path, value, rule, {}, keys_instead(name, section, owner))
    if elsewhere:
        home, key = elsewhere[0].path.rpartition(".")[0] or "the top", elsewhere[0].path
        return Problem(
            path,
            value,
            f"is not a key {at}; it belongs to {home}: {key}",
            {},
            tuple(dict.fromkeys(k.path for k in elsewhere)),
        )
    if others:
        with_it = ", ".join(f'"{n}"' for n, c in families().items() if c in others)
        return Problem(
            path, value, f"is a key of {section} only with family {with_it}", {}, near_keys(name, section, owner)
        )
    said = said_of(name)
    valid = () if said and name.lower() in NOT_BUILT else near_keys(name, section, owner)
    return Problem(path, value, f"is not a key {at}" + (f"; {said}" if said else ""), {}, valid)


def near_keys(name: str, section: str, owner: type = Run) -> tuple[str, ...]:
    """Full paths of keys with names similar to this one: known synonyms first, then the same section, then all."""
    short = name.rpartition(".")[2]
    here = tree.field_names(owner)
    close = [f"{section}.{n}" if section else n for n in difflib.get_close_matches(short, here, n=2, cutoff=0.6)]
    by_name: dict[str, list[str]] = {}
    for k in tree.keys(Run):
        by_name.setdefault(k.name, []).append(k.path)
    for n in difflib.get_close_matches(short, [*by_name, *SYNONYMS], n=3, cutoff=0.75):
        close += [SYNONYMS[n]] if n in SYNONYMS else by_name[n]
    meant = [SYNONYMS[short]] if short in SYNONYMS else []
    foreign = (
        {k.path for k in tree.keys(Run) if k.path.startswith(f"{section}.") and k.owner is not owner}
        if owner is not Run
        else set()
    )
    foreign -= {f"{section}.{n}" for n in here}
    if section in NAMED and foreign.intersection(meant):
        return keys_instead(meant[0].rpartition(".")[2], section, owner)
    near = [path for path in dict.fromkeys(meant + close) if path not in foreign]
    if not near:
        near = difflib.get_close_matches(
            f"{section}.{name}" if section else name, {k.path for k in tree.keys(Run)} - foreign, n=2, cutoff=0.7
        )
    return tuple(near[:3])


def keys_instead(name: str, section: str, owner: type) -> tuple[str, ...]:
    """Full paths of what to type for a key that only other members of a section in NAMED have: the key of this member
    that does the same, one with a similar name, and the same key of the fallback that this optimizer has."""
    here = tree.field_names(owner)
    close = [SAME_IN_OTHERS.get(name, ""), *difflib.get_close_matches(name, here, n=2, cutoff=0.6)]
    found = [f"{section}.{n}" for n in close if n in here]
    members = [find_optimizer(n) for n in BUILT_IN[OptimConfig.seam]] if section == "optim" else []
    leaves_roles = any(m.Config is owner and set(m.roles) < set(ROLES) for m in members)
    if leaves_roles and name in tree.field_names(find_optimizer(OptimConfig.name).Config):
        found.append(f"{FALLBACK}.{name}")
    return tuple(dict.fromkeys(found))


def yaml_type(value: Any) -> str:
    names = {bool: "bool", int: "int", float: "float", str: "string", list: "list", dict: "section", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def close_to(text: str, names: tuple[Any, ...]) -> tuple[Any, ...]:
    lower = {str(n).lower(): n for n in names}
    return tuple(lower[m] for m in difflib.get_close_matches(text.lower(), lower, n=2, cutoff=0.5))


def _close_literals(value: Any, hint: Any) -> tuple[Any, ...]:
    options = tuple(o for m in tree.members(hint) for o in typing.get_args(m))
    return close_to(str(value), options) or options


def _casts(value: Any, hint: Any, owner: type, name: str) -> tuple[Any, ...]:
    """Values of the right type that the user may have meant; the default if that cannot be guessed."""
    default = next((k.default for k in tree.keys(owner) if k.path == name), None)
    guesses = [
        *_guesses(value),
        *([] if default in (None, tree.REQUIRED) or dataclasses.is_dataclass(default) else [plain(default)]),
    ]
    good: list[Any] = []
    for guess in guesses:
        if _fits(guess, hint) and guess not in good:
            good.append(guess)
    return tuple(good[:2])


def _guesses(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [str(value).lower()]
    if isinstance(value, float) and math.isfinite(value):
        return [*dict.fromkeys((math.floor(value), math.ceil(value))), str(value), [value]]
    if isinstance(value, list) and len(value) == 1:
        return [value[0], *_guesses(value[0])]
    if isinstance(value, str):
        return [*_from_text(value), value.split(","), [value]]
    return [str(value), [value]] if isinstance(value, int) else []


def _from_text(text: str) -> list[Any]:
    words = {"yes": True, "on": True, "true": True, "no": False, "off": False, "false": False, "none": None}
    if text.lower() in words:
        return [words[text.lower()]]
    try:
        number = float(text)
    except ValueError:
        return []
    return [int(number) if number == int(number) else number, number] if math.isfinite(number) else []


def _fits(value: Any, hint: Any) -> bool:
    from pydantic import TypeAdapter, ValidationError

    if len(tree.sections(hint)) > 0:
        return False
    try:
        TypeAdapter(hint).validate_json(json.dumps(value), strict=True)
    except ValidationError:
        return False
    return True


def _repair(data: dict[str, Any], steps: list[str], broken: Problem, kind: str) -> None:
    """Take the first suggestion, or the default by leaving the key out, so that the other rules can be checked too."""
    if kind == "missing":
        steps = steps[:-1]  # an incomplete optional section is left out; a required one cannot be repaired
    if len(steps) < 2 and kind == "missing":
        return
    at: Any = data
    for step in steps[:-1]:
        at = at.get(step) if isinstance(at, dict) else None
    if not isinstance(at, dict):
        return
    at.pop(steps[-1], None)
    unknown = kind in ("unexpected_keyword_argument", "extra_forbidden")
    if broken.valid and not unknown and not kind.startswith("union_tag"):
        at[steps[-1]] = broken.valid[0]


def copied(data: Any) -> Any:
    return {k: copied(v) for k, v in data.items()} if isinstance(data, Mapping) else data
