"""Dotted paths over nested dataclasses: read, replace, list and describe their fields, whatever the config means."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.base.registry import configs

REQUIRED = dataclasses.MISSING


@dataclass(frozen=True)
class ConfigField:
    """One field in a tree of dataclasses. `default` is REQUIRED if there is none; `owner` is the class that declares
    it."""

    path: str
    hint: Any
    default: Any
    owner: type

    @property
    def name(self) -> str:
        return self.path.rsplit(".", 1)[-1]

    @property
    def doc(self) -> str:
        return field_docs(self.owner).get(self.name, "")

    @property
    def type(self) -> str:
        return type_text(self.hint)


def get(tree: Any, path: str) -> Any:
    """The value at a dotted path. Inside a dict, the rest of the path is the key. KeyError if there is no such
    field."""
    if not path:
        return tree
    if isinstance(tree, Mapping):
        return tree[path]
    head, _, rest = path.partition(".")
    if isinstance(tree, (tuple, list)) and head.isdigit() and int(head) < len(tree):
        return get(tree[int(head)], rest)
    if not dataclasses.is_dataclass(tree) or head not in field_names(type(tree)):
        raise KeyError(path)
    return get(getattr(tree, head), rest)


def replace_at(tree: Any, path: str, value: Any) -> Any:
    """A copy of the tree with another value at a dotted path."""
    if not path:
        return value
    if isinstance(tree, Mapping):
        return {**tree, path: value}
    head, _, rest = path.partition(".")
    if isinstance(tree, tuple) and head.isdigit() and int(head) < len(tree):
        i = int(head)
        return (*tree[:i], replace_at(tree[i], rest, value), *tree[i + 1 :])
    if not dataclasses.is_dataclass(tree) or isinstance(tree, type) or head not in field_names(type(tree)):
        raise KeyError(path)
    return dataclasses.replace(tree, **{head: replace_at(getattr(tree, head), rest, value)})


def field_names(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls))


@dataclass(frozen=True)
class Choices:
    """Metadata of a field (`Annotated[Base, Choices(known)]`) that holds one of several dataclasses, selected by the
    name in one of its own fields. `known()` returns those known so far: more may be found while a config is read."""

    known: Callable[[], Mapping[str, type]]


@dataclass(frozen=True)
class FromText:
    """Metadata of a field (`Annotated[int, FromText(read)]`) whose value is passed to `read` before its type is
    checked, so that it may be written as text."""

    read: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core import core_schema  # start-up time: configs made in Python do without it

        return core_schema.no_info_before_validator_function(self.read, handler(source))


def hint_of(cls: type, name: str) -> Any:
    """The type of a field; of one with Choices, their union."""
    found, choices = _hints_and_choices(cls)
    return _union(tuple(choices[name].known().values())) if name in choices else found[name]


def map_at(cls: type, name: str) -> Any:
    """The type of a field that holds a map of free names; None of other fields. Imports no members of Choices."""
    hint = _hints_and_choices(cls)[0].get(name)
    return next((m for m in members(hint) if typing.get_origin(m) is dict), None)


def hints(cls: type) -> Mapping[str, Any]:
    """The type of each field."""
    return {name: hint_of(cls, name) for name in _hints_and_choices(cls)[0]}


@cache
def _union(classes: tuple[type, ...]) -> Any:
    return typing.Union[classes]  # noqa: UP007 - of a tuple there is no other way to write it


@cache
def _hints_and_choices(cls: type) -> tuple[Mapping[str, Any], Mapping[str, Choices]]:
    whole = typing.get_type_hints(cls, include_extras=True)
    marks = {name: getattr(hint, "__metadata__", ()) for name, hint in whole.items()}
    choices = {name: mark for name, found in marks.items() for mark in found if isinstance(mark, Choices)}
    return typing.get_type_hints(cls), choices


def choices_of(cls: type, name: str) -> Mapping[str, type]:
    """The dataclasses that a field with Choices can hold, by name; none for other fields."""
    found = _hints_and_choices(cls)[1].get(name)
    return {} if found is None else found.known()


def members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union without None; for any other type, the type itself."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(a for a in typing.get_args(hint) if a is not type(None))
    return (hint,)


def sections(hint: Any) -> tuple[type, ...]:
    """The dataclasses that a field of this type can hold. For a class with a `seam`, those are our own members
    registered there, each with its own fields."""
    found = (m for m in members(hint) if dataclasses.is_dataclass(m) and isinstance(m, type))
    return tuple(c for m in found for c in (configs(vars(m)["seam"]) if "seam" in vars(m) else (m,)))


def keys(cls: type, prefix: str = "", inside: tuple[str, ...] = (), only: str | None = None) -> Iterator[ConfigField]:
    """Every field below `cls`, sections before their contents. A path occurs once for each class that it can hold. A
    section of a seam inside one of the same seam (listed in `inside`) is named, but its fields are not. `only`: of the
    fields of `cls` itself, this one and what is below it."""
    inside = (*inside, *([cls.seam] if hasattr(cls, "seam") else []))
    for f in dataclasses.fields(cls):
        if only in (None, f.name):
            path, hint = f"{prefix}{f.name}", hint_of(cls, f.name)
            default = f.default_factory() if f.default_factory is not REQUIRED else f.default
            yield ConfigField(path, hint, default, cls)
            for section in sections(hint):
                if getattr(section, "seam", None) not in inside:
                    yield from keys(section, f"{path}.", inside)


def leaves(cls: type, only: str | None = None) -> list[ConfigField]:
    """Every field below `cls` (with `only`, below that field) that holds a value rather than a section."""
    return [k for k in keys(cls, only=only) if not sections(k.hint)]


def integers(tree: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    """The integers in fields of a tree of dataclasses, and their paths."""
    for name in field_names(type(tree)):
        value = getattr(tree, name)
        if dataclasses.is_dataclass(value):
            yield from integers(value, f"{prefix}{name}.")
        elif type(value) is int:
            yield f"{prefix}{name}", value


# reading a config walks over all keys for each override; parsing the sources again would take most of the time
@cache
def field_docs(cls: type) -> Mapping[str, str]:
    """The string below each field of a class, inherited fields included. Python drops these strings, so they are read
    from the source."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        docs |= _own_field_docs(base)
    return docs


@cache
def _own_field_docs(cls: type) -> Mapping[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # a class of the user's that is not in a file
        return {}
    body = tree.body[0].body  # type: ignore[attr-defined]
    docs: dict[str, str] = {}
    for field, text in zip(body, body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
                docs[field.target.id] = inspect.cleandoc(text.value.value)
    return docs


def type_text(hint: Any) -> str:
    """A type in words for a YAML file: `int`, `list of str`, `one of "a", "b"`, `int or null`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is type(None):
        return "null"
    if origin is typing.Literal:
        return "one of " + ", ".join(f'"{a}"' if isinstance(a, str) else str(a) for a in args)
    if origin in (tuple, list):
        return f"list of {type_text(args[0])}"
    if origin is dict:
        return f"map of {type_text(args[0])} to {type_text(args[1])}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_text(a) for a in args)
    if dataclasses.is_dataclass(hint):
        return f"section ({', '.join(field_names(hint))})"  # type: ignore[arg-type]
    return getattr(hint, "__name__", str(hint))
