"""Reading a run: YAML or Python file + overrides -> typed Run, with the place where each value was set. The rules
are in `checks.py`.

YAML is 1.2: `no` is a string, `1e-3` a number, `010` ten. Types are checked strictly by pydantic over the
dataclasses of the config; every problem is kept, none is repaired in silence.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import importlib.util
import io
import json
import math
import os
import re
import traceback
import typing
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Tag, TypeAdapter, ValidationError, create_model
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from phalanx.base import registry, tree
from phalanx.base.errors import ConfigError, Problem
from phalanx.base.log import describe
from phalanx.base.registry import BUILT_IN, NotFound, RegisteredTwice
from phalanx.base.rules import near_paths
from phalanx.config.model_source import FROM, supply
from phalanx.config.removed import replace_removed, replace_renamed
from phalanx.config.run import Run
from phalanx.config.synonyms import NOT_BUILT, SYNONYMS, said_of
from phalanx.models.registry import SEAM, load_family
from phalanx.optim.config import OptimConfig
from phalanx.optim.optimizer import find_optimizer

COMMAND_LINE, NOBODY = "command line", "the defaults"
NO_MODEL = (
    "is required: a family and its sizes (model.family=llama model.hidden_size=64 ...; `phalanx explain "
    "model` lists them).\n"
    "  Of a Hugging Face folder: init_from=FOLDER takes weights, sizes and tokenizer,\n"
    "  model.from=FOLDER sizes and tokenizer alone (random weights). recipes/ has complete configs"
)
INDENT = "    "
MAX_BYTES = 1 << 20  # of a config file
MAX_VALUES = 50_000  # of a config, each alias counted as what it stands for
MAX_CHARACTERS = 10 << 20  # of all of them
MAX_DEPTH = 100  # of sections and lists inside each other


@dataclass
class ConfigSource:
    """Plain values that a file or an override gave, where each was set, and what was wrong with the text itself."""

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


@dataclass(frozen=True)
class Loaded:
    """`run` is None if not even a repaired config can be built; with problems it is a repaired one, good only for
    finding more. `notes`: the new names of what the config calls by old ones."""

    run: Run | None
    problems: list[Problem]
    origins: Mapping[str, str]
    repaired: frozenset[str] = frozenset()
    base_from: str = NOBODY
    notes: tuple[str, ...] = ()

    def where(self, path: str) -> str:
        """Where the value at a path was set: its own place, else that of the section around it, else `base_from`."""
        inside = [at for key, at in self.origins.items() if key.startswith(f"{path}.")]
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path.rpartition(".")[0]
        return inside[0] if inside else self.base_from

    def placed(self, problems: list[Problem]) -> list[Problem]:
        return [p if p.where else p.at(self.where(p.field)) for p in problems]


def load_run(
    path: str | Path | None = None,
    overrides: list[str] | tuple[str, ...] = (),
    base: Run | Mapping[str, Any] | None = None,
) -> Run:
    """A Run from a file (.yaml or .py), `a.b=c` overrides, or both, on top of `base`. ConfigError with every problem
    of form."""
    loaded = read(path, overrides, base)
    if loaded.problems or loaded.run is None:
        raise ConfigError(loaded.problems)
    for note in loaded.notes:
        warnings.warn(note, stacklevel=2)
    return loaded.run


def read(
    path: str | Path | None = None,
    overrides: list[str] | tuple[str, ...] = (),
    base: Run | Mapping[str, Any] | None = None,
    base_from: str = NOBODY,
) -> Loaded:
    """As `load_run`, but returns the problems, so that those of the rules can be shown with them. `base_from`: where
    messages say that values were set which neither the file nor an override sets; what comes from anywhere but the
    defaults may be anybody's, and names no code."""
    source = ConfigSource(to_dict(base) if isinstance(base, Run) else _copy(base or {}))
    if path is not None:
        source = _merged(source, read_file(path))
    for text in overrides:
        apply_override(source, text)
    if base_from != NOBODY and (foreign := named_by_others(source, base_from)):
        return Loaded(None, foreign, source.origins, frozenset(), base_from)
    no_family = load_named_family(source.data)
    no_model = supply(source.data, source.origins) if not no_family else []
    notes = replace_renamed(source.data)
    removed, replaced = replace_removed(source.data)
    run, problems, repaired = build(source.data)
    problems = removed + [p for p in problems if not (no_family and p.field == "model.family")] + no_family
    if no_model:
        problems = [
            p for p in problems if not (p.field.split(".")[0] == "model" and p.rule.startswith("is required"))
        ] + no_model
    loaded = Loaded(run, [], source.origins, repaired | replaced, base_from, notes)
    at = f"{path}" if path is not None else COMMAND_LINE
    problems = [
        p if not p.rule.startswith("is required") else p.at(source.origins.get(p.field.rpartition(".")[0], at))
        for p in problems
    ]
    # a file that cannot be read at all would only be followed by a row of "is required"
    unreadable = source.problems and not source.data
    found = source.problems if unreadable else source.problems + loaded.placed(problems)
    return dataclasses.replace(loaded, problems=found, run=None if unreadable else run)


def named_by_others(source: ConfigSource, base_from: str) -> list[Problem]:
    """Names of packages' code that stand in somebody else's config, such as a checkpoint's: nothing is imported for
    them unless the user says them too."""
    found = []
    for key in ("model.family", "optim.name"):
        section, name = key.split(".")
        values = source.data.get(section)
        value = values.get(name) if isinstance(values, dict) else None
        if isinstance(value, str) and ":" in value and key not in source.origins:
            rule = f"is code of a package, which is imported only if you name it: type {key}={value}"
            found.append(Problem(key, value, rule, where=base_from))
    return found


def load_named_family(data: Mapping[str, Any]) -> list[Problem]:
    """Import the family of another package that model.family names, so that its section is known."""
    model = data.get("model")
    name = model.get("family") if isinstance(model, Mapping) else None
    if not isinstance(name, str) or name in families():
        return []
    if ":" not in name and name not in registry.names(SEAM):
        return []  # no name at all: the types of fields say so
    try:
        load_family(name)
    except NotFound as error:
        return [error.problem("model.family", name)]
    except RegisteredTwice as error:
        return [Problem("model.family", name, f"must be one of a kind: {error}")]
    return []


def to_dict(run: Run) -> dict[str, Any]:
    """Plain values, every field written out; tuples become lists."""
    return _plain(dataclasses.asdict(run))


def save_run(run: Run, path: str | Path) -> None:
    """Write the resolved config; loading the file gives an equal Run."""
    partial = Path(path).with_suffix(".partial")
    partial.write_text(to_yaml(run), encoding="utf-8")
    os.replace(partial, path)  # a run may be started from this very file, and killed here


def to_yaml(run: Run) -> str:
    yaml, out = YAML(typ="safe", pure=True), io.StringIO()
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output = False, False  # type: ignore[assignment]
    yaml.dump(to_dict(run), out)
    return out.getvalue()


def explain(key: str) -> str:
    """What a key means, its type and default; of a section: all its keys. ConfigError with near names if there is
    none."""
    if key == "model.from":
        return FROM
    known = list(tree.keys(Run))
    found = [k for k in known if k.path == key]
    if not found:
        said = said_of(key)
        valid = () if key.lower() in NOT_BUILT else near_keys(key, "")
        raise ConfigError(
            [Problem("explain", key, "is not a config key" + (f"; {said}" if said else ""), {}, valid, COMMAND_LINE)]
        )
    if any(tree.sections(k.hint) for k in found):
        below = [k for k in known if k.path.startswith(f"{key}.")]
        return "\n".join(f"{k.path}: {k.type}{_default_text(k)}\n{indent(k.doc, INDENT)}".rstrip() for k in below)
    maps = [
        (k.path, typing.get_args(m)[1]) for k in found for m in tree.members(k.hint) if typing.get_origin(m) is dict
    ]
    inside = [
        k for path, value in maps for section in tree.sections(value) for k in tree.keys(section, f"{path}.NAME.")
    ]
    texts = dict.fromkeys(
        f"{k.path}: {k.type}{_default_text(k)}\n{indent(k.doc, INDENT)}".rstrip() for k in (*found, *inside)
    )
    return "\n".join(texts)


def _default_text(key: tree.ConfigField) -> str:
    if tree.sections(key.hint) and (not key.default or dataclasses.is_dataclass(key.default)):
        return ""
    return ", required" if key.default is tree.REQUIRED else f", default {json.dumps(_plain(key.default))}"


# ---- files and overrides -> plain values ---------------------------------------------------------


def recipes() -> dict[str, Path]:
    """The packaged recipes by name: llama3_8b.py is llama3-8b. A wheel has them inside the package, a checkout beside
    it."""
    package = Path(__file__).parents[1]
    folder = package / "recipes" if (package / "recipes").is_dir() else package.parent / "recipes"
    files = (path for path in folder.glob("[a-z]*") if path.suffix in (".py", ".yaml"))
    return {path.stem.replace("_", "-"): path for path in sorted(files)}


def read_file(path: str | Path) -> ConfigSource:
    """A YAML or Python file, the name of a recipe, or the folder of a run: its config.yaml, and the run goes on in
    that folder, wherever it is called from."""
    if not os.path.exists(path):
        path = recipes().get(str(path), path)
    if not os.path.isdir(path):
        return read_python(path) if Path(path).suffix == ".py" else read_yaml(path)
    inside = Path(path) / "config.yaml"
    if not inside.is_file():
        return ConfigSource(
            problems=[
                Problem(
                    "CONFIG",
                    str(path),
                    "is a folder without a config.yaml, so it is not that of a run",
                    where=COMMAND_LINE,
                )
            ]
        )
    file = read_yaml(inside)
    return ConfigSource({**file.data, "dir": str(path)}, {**file.origins, "dir": COMMAND_LINE}, file.problems)


def read_yaml(path: str | Path) -> ConfigSource:
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
        text = raw.decode()
    except (OSError, ValueError) as error:
        return ConfigSource(problems=[_unreadable(path, error)])
    if len(raw) > MAX_BYTES:
        return ConfigSource(
            problems=[
                Problem(
                    "CONFIG", str(path), f"is no config: it has more than {MAX_BYTES:,} bytes", {}, (), COMMAND_LINE
                )
            ]
        )
    source = ConfigSource()
    node = _compose(
        text, lambda rule, line: source.problems.append(Problem("CONFIG", str(path), rule, where=f"{path}:{line}"))
    )
    if isinstance(node, MappingNode):
        try:
            source.data = Constructor(str(path), source).value(node, "")
        except TooLarge as error:
            return ConfigSource(problems=[Problem("CONFIG", str(path), str(error), {}, (), f"{path}:{error.line}")])
    elif node is not None:
        source.problems.append(
            Problem("CONFIG", str(path), "must hold sections (model:, train:, ...)", where=f"{path}:1")
        )
    return source


def read_python(path: str | Path) -> ConfigSource:
    """Run a recipe that the user named: a file with `def run() -> Run`."""
    if not os.path.isfile(path):
        return ConfigSource(problems=[_unreadable(path, FileNotFoundError(2, "No such file or directory"))])
    spec = importlib.util.spec_from_file_location("phalanx_recipe", path)
    if spec is None or spec.loader is None:
        return ConfigSource(problems=[Problem("CONFIG", str(path), "cannot be imported")])
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        made = module.run() if callable(getattr(module, "run", None)) else None
    except Exception as error:
        own = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        line = own[-1] if own else getattr(error, "lineno", 1)
        return ConfigSource(
            problems=[Problem("CONFIG", str(path), f"raised {describe(error)}", where=f"{path}:{line}")]
        )
    if not isinstance(made, Run):
        return ConfigSource(
            problems=[Problem("CONFIG", str(path), "must define run() that returns a Run", where=str(path))]
        )
    return ConfigSource(to_dict(made), _python_origins(Path(path)))


def _python_origins(path: Path) -> dict[str, str]:
    """The line of a keyword that occurs once in a recipe; the file alone for the others."""
    lines: dict[str, list[int]] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg:
            lines.setdefault(node.arg, []).append(node.value.lineno)
    own = {k.path: lines[k.name][0] for k in tree.leaves(Run) if len(lines.get(k.name, ())) == 1}
    return {name: str(path) for name in tree.field_names(Run)} | {key: f"{path}:{line}" for key, line in own.items()}


def _unreadable(path: str | Path, error: Exception) -> Problem:
    reason = getattr(error, "strerror", None) or "is not UTF-8 text"
    near = near_paths(str(path))
    if isinstance(error, FileNotFoundError) and re.fullmatch(r"[\w-]+", str(path)):
        names = recipes()
        near += _close(str(path).replace("_", "-"), tuple(names)) or tuple(names)
        reason = "there is no such file, and no recipe of this name"
    return Problem("CONFIG", str(path), f"cannot be read ({reason})", {}, near, COMMAND_LINE)


def apply_override(source: ConfigSource, text: str) -> None:
    """`a.b=c` with c in YAML; what it sets replaces what was there."""
    key, equals, value_text = text.partition("=")
    key = key.strip()
    if not equals or not key:
        source.problems.append(Problem(key or text, None, "must be given as KEY=VALUE", {}, (), COMMAND_LINE))
        return

    def complain(rule: str, line: int) -> None:
        source.problems.append(Problem(key, value_text, rule, {}, (), COMMAND_LINE))

    count = len(source.problems)
    node = _compose(value_text, complain)
    if len(source.problems) > count:
        return
    inner = ConfigSource()
    try:
        value = None if node is None else Constructor(COMMAND_LINE, inner, lines=False).value(node, key)
    except TooLarge as error:
        complain(str(error), error.line)
        return
    source.problems += inner.problems
    for old in [path for path in source.origins if path.startswith(f"{key}.")]:
        del source.origins[old]
    source.origins |= inner.origins | {key: COMMAND_LINE}
    _put(source.data, _path(key), value)


def _path(key: str) -> list[str]:
    """The steps of a dotted key. Below a map of free names (such as optim.lr_scale) the rest is one
    name, dots and all; of a map to sections (data.sources) the last step is a field."""
    for k in tree.leaves(Run):
        maps = [m for m in tree.members(k.hint) if typing.get_origin(m) is dict]
        if maps and key.startswith(f"{k.path}."):
            name, dot, field = key[len(k.path) + 1 :].rpartition(".")
            inside = [name, field] if dot and tree.sections(typing.get_args(maps[0])[1]) else [f"{name}{dot}{field}"]
            return [*k.path.split("."), *inside]
    return key.split(".")


def _put(data: dict[str, Any], steps: list[str], value: Any) -> None:
    for step in steps[:-1]:
        if not isinstance(data.get(step), dict):
            data[step] = {}
        data = data[step]
    data[steps[-1]] = value


def _merged(low: ConfigSource, high: ConfigSource) -> ConfigSource:
    def merge(a: Any, b: Any) -> Any:
        if not (isinstance(a, dict) and isinstance(b, dict)):
            return b
        return {**a, **{k: merge(a.get(k), v) for k, v in b.items()}}

    return ConfigSource(merge(low.data, high.data), low.origins | high.origins, low.problems + high.problems)


def _compose(text: str, complain: Callable[[str, int], None]) -> Node | None:
    if _brackets(text) > 5 * MAX_DEPTH:
        complain("is not YAML that can be read (too many brackets inside each other)", 1)
        return None
    try:
        return YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        complain(f"is not YAML ({error.problem or error.context})", mark.line + 1 if mark else 1)
    except YAMLError as error:
        complain(f"is not YAML ({str(error).splitlines()[0]})", 1)
    except RecursionError:
        complain("is not YAML that can be read (too many brackets inside each other)", 1)
    return None


def _brackets(text: str) -> int:
    """How many brackets are inside each other at most, those in quotes and comments counted too: reading many takes
    minutes."""
    depth = most = 0
    for bracket in re.findall(r"[\[{\]}]", text):
        depth += 1 if bracket in "[{" else -1
        most = max(most, depth)
    return most


class TooLarge(Exception):
    """A config that holds more than any config does, or lists inside each other without end."""

    def __init__(self, rule: str, line: int):
        self.line = line
        super().__init__(rule)


class Constructor:
    """YAML nodes -> plain values, keeping the line of every key. Only the types of YAML 1.2's core schema are made."""

    def __init__(self, file: str, source: ConfigSource, lines: bool = True):
        self.file, self.source, self.lines = file, source, lines
        self._open: list[Node] = []
        self._values = self._characters = 0

    def value(self, node: Node, path: str) -> Any:
        self._count(node)
        if any(node is outer for outer in self._open):
            return self._wrong(node, path, "*alias", "must not contain itself")
        self._open.append(node)
        try:
            if isinstance(node, MappingNode):
                return self._mapping(node, path)
            if isinstance(node, SequenceNode):
                return [self.value(item, f"{path}.{i}") for i, item in enumerate(node.value)]
            return self._scalar(node, path)  # type: ignore[arg-type]
        finally:
            self._open.pop()

    def _count(self, node: Node) -> None:
        self._values += 1
        self._characters += len(node.value) if isinstance(node, ScalarNode) else 0
        line = node.start_mark.line + 1
        if self._values > MAX_VALUES:
            raise TooLarge(f"must hold at most {MAX_VALUES:,} values (an alias counts as all that it stands for)", line)
        if self._characters > MAX_CHARACTERS:
            raise TooLarge(
                f"must hold at most {MAX_CHARACTERS:,} characters (an alias counts as all that it stands for)", line
            )
        if len(self._open) > MAX_DEPTH:
            raise TooLarge(f"must have at most {MAX_DEPTH} sections or lists inside each other", line)

    def _mapping(self, node: MappingNode, path: str) -> dict[str, Any]:
        made: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            below = f"{path}.{key}" if path else key
            if key in first:
                because = {"first on line": first[key], "again on line": line}
                at = self._at(key_node)
                self.source.problems.append(
                    Problem(below, self.value(value_node, below), "is given twice", because, (), at)
                )
                continue
            first[key] = line
            self.source.origins[below] = self._at(key_node)
            made[key] = self.value(value_node, below)
        return made

    def _scalar(self, node: ScalarNode, path: str) -> Any:
        tag, text = str(node.tag).rpartition(":")[2], node.value
        try:
            if tag == "int":
                return int(text.replace("_", ""), 0 if text.lstrip("+-")[:2].lower() in ("0o", "0x") else 10)
            if tag == "float":
                return float(
                    text.replace("_", "")
                    .replace(".inf", "inf")
                    .replace(".Inf", "inf")
                    .replace(".INF", "inf")
                    .replace(".nan", "nan")
                    .replace(".NaN", "nan")
                    .replace(".NAN", "nan")
                )
            if tag == "bool":
                return {"true": True, "false": False}[text.lower()]
        except (ValueError, KeyError):
            return self._wrong(node, path, text, f"is not a YAML {tag}")
        if tag == "null":
            return None
        if tag in ("str", "timestamp", "value", "merge"):
            return text
        return self._wrong(node, path, text, f"has a tag that configs do not use ({node.tag})")

    def _wrong(self, node: Node, path: str, value: Any, rule: str) -> None:
        self.source.problems.append(Problem(path, value, rule, {}, (), self._at(node)))

    def _at(self, node: Node) -> str:
        return f"{self.file}:{node.start_mark.line + 1}" if self.lines else self.file


# ---- plain values -> Run, or problems of form ----------------------------------------------------


def run_schema(optim: type) -> type[BaseModel]:
    """A pydantic model with Run's fields: it carries the strict settings that a plain dataclass cannot. `optim`: what
    stands in its section."""
    return _run_schema(optim, tuple(families().items()))


def families() -> Mapping[str, type]:
    """The `model` sections there are, by what model.family says."""
    return tree.choices_of(Run, "model")


def _family(section: Any) -> str | None:
    """What a `model` section says of its family, for pydantic to choose the class by."""
    if not isinstance(section, dict) or "family" not in section:
        return None
    family = section["family"]
    return family if isinstance(family, str) else json.dumps(family)


@functools.lru_cache(maxsize=8)
def _run_schema(optim: type, known: tuple[tuple[str, type], ...]) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for f in dataclasses.fields(Run):
        hint = optim if f.name == "optim" else tree.hints(Run)[f.name]
        if f.name == "model":
            tagged = tuple(Annotated[cls, Tag(name)] for name, cls in known)
            hint = Annotated[typing.Union[tagged], Discriminator(_family)]  # noqa: UP007 - of a tuple there is no other way
        required = f.default is tree.REQUIRED and f.default_factory is tree.REQUIRED
        default = ... if required else (f.default_factory() if f.default_factory is not tree.REQUIRED else f.default)
        fields[f.name] = (hint, default)
    return create_model("Run", __config__=ConfigDict(strict=True, extra="forbid"), **fields)


def build(data: dict[str, Any]) -> tuple[Run | None, list[Problem], frozenset[str]]:
    """A Run from plain values. With problems: a repaired Run (or None), every problem, and the fields that were
    repaired."""
    optim, nameless = _optimizer_of(data)
    run, errors = (None, []) if nameless else _validate(data, optim)
    if nameless:  # without its optimizer nobody knows which keys the section has
        data = {**data, "optim": {k: v for k, v in data["optim"].items() if k in tree.field_names(OptimConfig)}}
        del data["optim"]["name"]
        errors = _validate(data, optim)[1]
    errors += _bools_for_numbers(data)
    if not errors and not nameless:
        return run, [], frozenset()
    problems = [_problem(data, e, optim) for e in errors]
    repaired = _copy(data)
    for error, broken in zip(errors, problems):
        _repair(repaired, _steps(error["loc"], optim)[0], broken, error["type"])
    problems = nameless + problems
    return _validate(repaired, optim)[0], problems, frozenset(p.field for p in problems)


def _optimizer_of(data: dict[str, Any]) -> tuple[type[OptimConfig], list[Problem]]:
    """The class of the section `optim`, which the optimizer that it names brings along; a name that leads nowhere is a
    problem."""
    default = OptimConfig.name
    section = data.get("optim")
    name = section.get("name", default) if isinstance(section, dict) else default
    if not isinstance(name, str):
        return find_optimizer(default).Config, []
    try:
        return find_optimizer(name).Config, []
    except NotFound as error:
        found, said = error.problem("optim.name", name), said_of(name)
        rule = f"{found.rule}; {said}" if said else found.rule
        return find_optimizer(default).Config, [dataclasses.replace(found, rule=rule)]


def _validate(data: dict[str, Any], optim: type[OptimConfig]) -> tuple[Run | None, list[Any]]:
    try:
        section: Any = optim  # mypy takes no class of a dataclass for hashable
        # through JSON, because pydantic's strict mode takes lists for tuples only there
        made = run_schema(section).model_validate_json(json.dumps(data))
    except ValidationError as error:
        return None, error.errors(include_url=False)
    return Run(**{name: getattr(made, name) for name in tree.field_names(Run)}), []


def _bools_for_numbers(data: dict[str, Any]) -> list[Any]:
    """pydantic takes `true` for the literal 1; as errors of its form."""
    found = []
    for k in tree.leaves(Run):
        steps = k.path.split(".")
        at: Any = data
        for step in steps:
            at = at.get(step) if isinstance(at, dict) else None
        options = [
            o for m in tree.members(k.hint) if typing.get_origin(m) is typing.Literal for o in typing.get_args(m)
        ]
        if isinstance(at, bool) and any(type(o) is int for o in options):
            found.append({"type": "literal_error", "loc": tuple(steps), "input": at})
    return found


def _steps(loc: tuple[Any, ...], optim: type[OptimConfig]) -> tuple[list[str], Any, type]:
    """pydantic's location -> (steps of the path, type expected there, class of the section, `optim` for that of the
    optimizer). Tags of unions are left out."""
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
            hint = optim if owner is Run and step == "optim" else tree.hints(owner).get(str(step))
        else:
            args = [a for m in tree.members(hint) for a in typing.get_args(m) if a is not ...]
            hint = args[-1] if args else None
    if len(tree.sections(hint)) == 1:
        owner = tree.sections(hint)[0] if dataclasses.is_dataclass(hint) else owner
    return steps, hint, owner


def _problem(data: dict[str, Any], error: Any, optim: type[OptimConfig]) -> Problem:
    steps, hint, owner = _steps(error["loc"], optim)
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
            _close(str(family), names) or names,
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
    """A key that no section knows here: say where it belongs, or what it may have been meant for."""
    section, _, name = path.rpartition(".")
    elsewhere = [k for k in tree.keys(Run) if k.name == name and k.path != path]
    at = f"of {section}" if section else "at the top"
    if elsewhere:
        home, key = elsewhere[0].path.rpartition(".")[0] or "the top", elsewhere[0].path
        return Problem(
            path,
            value,
            f"is not a key {at}; it belongs to {home}: {key}",
            {},
            tuple(dict.fromkeys(k.path for k in elsewhere)),
        )
    others = [k.owner for k in tree.keys(Run) if k.path == path and k.owner is not owner]
    if others and issubclass(owner, OptimConfig):
        known = (n for n in BUILT_IN[OptimConfig.seam] if find_optimizer(n).Config in others)
        return Problem(
            path, value, f"is a key of optim only with name {', '.join(known)}", {}, near_keys(name, section, owner)
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
    """Full paths of keys whose name is like this one: known synonyms, then the same section, then all of them."""
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
    near = [path for path in dict.fromkeys(meant + close) if path not in foreign]
    if not near:
        near = difflib.get_close_matches(
            f"{section}.{name}" if section else name, {k.path for k in tree.keys(Run)} - foreign, n=2, cutoff=0.7
        )
    return tuple(near[:3])


def yaml_type(value: Any) -> str:
    names = {bool: "bool", int: "int", float: "float", str: "string", list: "list", dict: "section", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _close(text: str, names: tuple[Any, ...]) -> tuple[Any, ...]:
    lower = {str(n).lower(): n for n in names}
    return tuple(lower[m] for m in difflib.get_close_matches(text.lower(), lower, n=2, cutoff=0.5))


def _close_literals(value: Any, hint: Any) -> tuple[Any, ...]:
    options = tuple(o for m in tree.members(hint) for o in typing.get_args(m))
    return _close(str(value), options) or options


def _casts(value: Any, hint: Any, owner: type, name: str) -> tuple[Any, ...]:
    """Values of the right type that the user may have meant; the default if there is no telling."""
    default = next((k.default for k in tree.keys(owner) if k.path == name), None)
    guesses = [
        *_guesses(value),
        *([] if default in (None, tree.REQUIRED) or dataclasses.is_dataclass(default) else [_plain(default)]),
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
        steps = steps[:-1]  # an optional section that is incomplete is left out; a required one cannot be repaired
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


def _copy(data: Any) -> Any:
    return {k: _copy(v) for k, v in data.items()} if isinstance(data, Mapping) else data


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value
