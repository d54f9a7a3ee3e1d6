"""Reading a run: YAML or Python file + overrides -> typed Run, with the place where each value was set.

YAML is 1.2: `no` is a string, `1e-3` a number, `010` ten. `validate.py` turns plain values into a Run; the rules are in
`check.py`. Every problem is reported, none is repaired silently.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import os
import re
import traceback
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from textwrap import indent
from types import MappingProxyType
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from phalanx.base import registry, tree
from phalanx.base.dataclass import dataclass
from phalanx.base.errors import ConfigError, Problem
from phalanx.base.log import describe
from phalanx.base.registry import NotFound, RegisteredTwice
from phalanx.base.rules import near_paths
from phalanx.config.model_source import FROM, supply
from phalanx.config.removed import replace_removed, replace_renamed
from phalanx.config.run import Run
from phalanx.config.synonyms import NOT_BUILT, said_of
from phalanx.config.validate import FALLBACK, build, close_to, copied, near_keys
from phalanx.config.write import as_given, plain
from phalanx.models.registry import SEAM, is_known, load_family

COMMAND_LINE, NOBODY = "command line", "the defaults"
INDENT = "    "
MAX_BYTES = 1 << 20  # of a config file
MAX_VALUES = 50_000  # of a config, each alias counted as what it stands for
MAX_CHARACTERS = 10 << 20  # in all of them
MAX_DEPTH = 100  # of nested sections and lists


@dataclass
class ConfigSource:
    """Plain values from a file or an override, where each was set, and what was wrong with the text itself."""

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


@dataclass(frozen=True)
class Loaded:
    """`run` is None if not even a repaired config can be built; with problems it is a repaired one, only good for
    finding more. `notes`: the new names of keys and values that the config calls by old ones."""

    run: Run | None
    problems: list[Problem]
    origins: Mapping[str, str]
    repaired: frozenset[str] = frozenset()
    base_from: str = NOBODY
    notes: tuple[str, ...] = ()

    def where(self, path: str) -> str:
        """Where the value at a path was set: its own place, or that of the section around it, or `base_from`."""
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
    """A Run from a file (.yaml or .py), `a.b=c` overrides, or both, on top of `base`. ConfigError with all problems of
    form."""
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
    cluster: str | Path | None = None,
) -> Loaded:
    """As `load_run`, but returns the problems, so that those of the rules can be shown with them. `base_from`: where
    messages say that values were set that neither the file nor an override sets. Unless these are the defaults, they
    may come from anybody, so they must not name code. `cluster`: a YAML file of the section `cluster`, below
    the config's own."""
    source = ConfigSource(as_given(base) if isinstance(base, Run) else copied(base or {}))
    if cluster is not None:
        source = _merged(source, section_of_file("cluster", cluster))
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
    # after a file that cannot be read, a list of "is required" would not help
    unreadable = source.problems and not source.data
    found = source.problems if unreadable else source.problems + loaded.placed(problems)
    return dataclasses.replace(loaded, problems=found, run=None if unreadable else run)


def named_by_others(source: ConfigSource, base_from: str) -> list[Problem]:
    """Names of packages' code in somebody else's config, such as a checkpoint's. Nothing is imported for them unless
    the user names them too."""
    found = []
    for key, name, path in named_in(source.data):
        if isinstance(name, str) and ":" in name and key not in source.origins:
            rule = f"is code of a package, which is imported only if you name it: type {key}={path}"
            found.append(Problem(key, name, rule, where=base_from))
    return found


NAMED: Mapping[str, str] = MappingProxyType(
    {
        "model.family": "family",
        "layout.schedule": "pipeline_schedule",
        "train.fp8.recipe": "fp8_recipe",
        "optim.name": "optimizer",
        "optim.fallback.name": "optimizer",
        "optim.schedule": "lr_schedule",
        "task.name": "objective",
        "lora.method": "adapter",
        "data.source": "source",
    }
)
"""Keys whose values may be code of a package, and their seams (base/registry.py)."""


def named_in(data: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Where a config may name code of a package: the key, the name, and what a person types after `key=`."""
    for key in NAMED:
        value: Any = data
        for step in key.split("."):
            value = value.get(step) if isinstance(value, Mapping) else None
        yield key, value, str(value)
    log = data.get("log")
    sinks = log.get("sinks") if isinstance(log, Mapping) else None
    for name, fields in sinks.items() if isinstance(sinks, Mapping) else ():
        yield f"log.sinks.{name}", name, json.dumps(fields)


def load_named_family(data: Mapping[str, Any]) -> list[Problem]:
    """Import the family of another package named by model.family, so that its section is known."""
    model = data.get("model")
    name = model.get("family") if isinstance(model, Mapping) else None
    if not isinstance(name, str) or is_known(name):
        return []
    if ":" not in name and name not in registry.names(SEAM):
        return []  # not a name; the type check reports it
    try:
        load_family(name)
    except NotFound as error:
        return [error.problem("model.family", name)]
    except RegisteredTwice as error:
        return [Problem("model.family", name, f"must be one of a kind: {error}")]
    return []


def explain(key: str) -> str:
    """What a key means, its type and default; for a section, all its keys. ConfigError with similar names if there is
    none."""
    if key == "model.from":
        return FROM
    known = list(tree.keys(Run))
    found = [k for k in known if k.path == key]
    if not found and key.startswith(f"{FALLBACK}."):
        return explain(key.replace(FALLBACK, "optim", 1))  # the same keys
    if not found:
        said = said_of(key)
        valid = () if key.lower() in NOT_BUILT else near_keys(key, "")
        raise ConfigError(
            [Problem("explain", key, "is not a config key" + (f"; {said}" if said else ""), {}, valid, COMMAND_LINE)]
        )
    if any(tree.sections(k.hint) for k in found):
        below = [k for k in known if k.path.startswith(f"{key}.")] or found  # a fallback's keys are those of optim
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
    return ", required" if key.default is tree.REQUIRED else f", default {json.dumps(plain(key.default))}"


# ---- files and overrides -> plain values ---------------------------------------------------------


def recipes() -> dict[str, Path]:
    """The packaged recipes by name: llama3_8b.py is llama3-8b. In a wheel they are inside the package, in a checkout
    beside it."""
    package = Path(__file__).parents[1]
    folder = package / "recipes" if (package / "recipes").is_dir() else package.parent / "recipes"
    files = (path for path in folder.glob("[a-z]*") if path.suffix in (".py", ".yaml"))
    return {path.stem.replace("_", "-"): path for path in sorted(files)}


def read_file(path: str | Path) -> ConfigSource:
    """A YAML or Python file, the name of a recipe, or the folder of a run: its config.yaml, where the run continues in
    that folder, whatever the working directory is."""
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


def section_of_file(section: str, path: str | Path) -> ConfigSource:
    """A YAML file that holds the keys of one section. That of `cluster` may also say where nodes are, in a mapping
    `topology`, which topology_file.py reads."""
    file = read_yaml(path)
    if section == "cluster" and isinstance(file.data.get("topology"), Mapping):
        del file.data["topology"]
    origins = {f"{section}.{key}": at for key, at in file.origins.items()}
    return ConfigSource({section: file.data}, origins, file.problems)


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
    """Run a recipe named by the user: a file with `def run() -> Run`."""
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
    return ConfigSource(as_given(made), _python_origins(Path(path)))


def _python_origins(path: Path) -> dict[str, str]:
    """The line of each keyword that occurs once in a recipe; for the others only the file."""
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
        near += close_to(str(path).replace("_", "-"), tuple(names)) or tuple(names)
        reason = "there is no such file, and no recipe of this name"
    return Problem("CONFIG", str(path), f"cannot be read ({reason})", {}, near, COMMAND_LINE)


def apply_override(source: ConfigSource, text: str) -> None:
    """Apply `a.b=c` with c in YAML; the new value replaces the old one."""
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
    """The steps of a dotted key. Below a map of free names (such as optim.lr_scale) the rest is a single name, dots
    included; in a map of sections (data.sources) the last step is a field."""
    steps = key.split(".")
    owners: tuple[type, ...] = (Run,)
    for i, step in enumerate(steps[:-1]):
        inside = steps[i + 1 :]
        found = next((m for cls in owners if (m := tree.map_at(cls, step)) is not None), None)
        if found is not None:
            names = inside[:-1] if tree.sections(typing.get_args(found)[1]) else inside
            return [*steps[: i + 1], *([".".join(names)] if names else []), *inside[len(names) :]]
        if len(inside) == 1:
            break  # a field of a section: start-up time, all families would be imported to look at it
        hints = [tree.hint_of(cls, step) for cls in owners if step in tree.field_names(cls)]
        owners = tuple(section for hint in hints for section in tree.sections(hint))
    return steps


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
    """The greatest nesting of brackets, including those in quotes and comments: reading deep nesting takes minutes."""
    depth = most = 0
    for bracket in re.findall(r"[\[{\]}]", text):
        depth += 1 if bracket in "[{" else -1
        most = max(most, depth)
    return most


class TooLarge(Exception):
    """A config that holds more than any real config, or endlessly nested lists."""

    def __init__(self, rule: str, line: int):
        self.line = line
        super().__init__(rule)


class Constructor:
    """YAML nodes -> plain values, with the line of every key. Only the types of YAML 1.2's core schema are created."""

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
