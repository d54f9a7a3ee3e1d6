"""`base/dataclass.py` against Python's own decorator: the same methods, `__init__` compiled later."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import pickle
import sys
import threading
import typing
from dataclasses import KW_ONLY, FrozenInstanceError, field
from typing import Annotated, Any, ClassVar, Literal

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

import phalanx.training.main  # noqa: F401 - its classes, and those of what it imports, are compared
from phalanx.base.dataclass import UncompiledInit, dataclass

BOTH = pytest.mark.parametrize("decorator", [dataclass, dataclasses.dataclass])


def undecorated() -> type:
    """A class with fields of every kind, decorated by nobody yet."""

    class Sample:
        """Fields of every kind."""

        kind: ClassVar[str] = "sample"
        a: int
        b: float = 1.5
        hidden: str = field(default="", repr=False)
        aside: Any = field(default=None, compare=False)
        unhashed: Any = field(default=0, hash=False)
        later: list[int] = field(default_factory=list, hash=False)
        named: int = field(default=7, kw_only=True)
        doubled: int = field(init=False, default=0)
        made: list[int] = field(init=False, default_factory=list, hash=False)
        fixed: int = field(init=False, default=3)
        unset: int = field(init=False, repr=False, compare=False)
        _: KW_ONLY
        last: str = "z"

        def __post_init__(self) -> None:
            assert not hasattr(self, "unset")
            object.__setattr__(self, "doubled", 2 * self.a)
            object.__setattr__(self, "unset", 1)

    Sample.__qualname__ = "Sample"
    return Sample


def undecorated_one() -> type:
    class One:
        """One field: its values are compared as a tuple's are, by identity first."""

        value: Any

    One.__qualname__ = "One"
    return One


def undecorated_none() -> type:
    class Nothing:
        """No field at all."""

    Nothing.__qualname__ = "Nothing"
    return Nothing


OPTIONS = (
    {},
    {"frozen": True},
    {"frozen": True, "kw_only": True},
    {"kw_only": True},
    {"frozen": True, "slots": True},
    {"slots": True},
    {"eq": False},
    {"frozen": True, "eq": False},
    {"frozen": True, "order": True},
    {"unsafe_hash": True},
)


@dataclass(frozen=True)
class Point:
    """At module level, so that pickle finds it."""

    x: int
    y: int = 0


@dataclass(frozen=True, slots=True)
class SlotsPoint:
    """The same with slots."""

    x: int
    y: int = 0


@pytest.mark.parametrize("options", OPTIONS)
def test_as_pythons(options: dict[str, Any]) -> None:
    """Signature, text, equality, hash and parameters are those of Python's decorator."""
    ours = dataclass(**options)(undecorated())
    theirs: Any = dataclasses.dataclass(**options)(undecorated())
    assert str(inspect.signature(ours)) == str(inspect.signature(theirs))
    assert typing.get_type_hints(ours.__init__) == typing.get_type_hints(theirs.__init__)
    for name in ("__qualname__", "__module__", "__annotations__", "__name__"):
        assert getattr(ours.__init__, name) == getattr(theirs.__init__, name)
    assert repr(ours.__dataclass_params__) == repr(theirs.__dataclass_params__)
    assert ours.__match_args__ == theirs.__match_args__ and ours.__doc__ == theirs.__doc__
    assert list(map(repr, dataclasses.fields(ours))) == list(map(repr, dataclasses.fields(theirs)))
    values = [{"a": 1}, {"a": 2}, {"a": 1, "aside": 3}, {"a": 1, "unhashed": 4}, {"a": 1, "later": [5], "last": "y"}]
    for one in values:
        assert repr(ours(**one)) == repr(theirs(**one))
        assert dataclasses.asdict(ours(**one)) == dataclasses.asdict(theirs(**one))
        for other in values:
            assert (ours(**one) == ours(**other)) == (theirs(**one) == theirs(**other))
        assert ours(**one) != theirs(**one)
    mine, other = ours(a=1), theirs(a=1)
    assert mine.later is not ours(a=1).later and mine.made is not ours(a=1).made, "one value for each instance"
    if "slots" not in options:
        assert list(vars(mine)) == list(vars(other)), "also which are read from the class"
    if ours.__hash__ is None or theirs.__hash__ is None:
        assert ours.__hash__ is theirs.__hash__
    elif options.get("eq", True):
        assert hash(mine) == hash(other)
    else:
        assert ours.__hash__ is object.__hash__ is theirs.__hash__ and ours.__eq__ is object.__eq__


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("body", [undecorated_one, undecorated_none])
def test_few_fields(options: dict[str, Any], body: Any) -> None:
    ours, theirs = dataclass(**options)(body()), dataclasses.dataclass(**options)(body())
    given = {"value": torch.zeros(2)} if body is undecorated_one else {}  # no tensor has a truth value
    assert str(inspect.signature(ours)) == str(inspect.signature(theirs))
    assert repr(ours(**given)) == repr(theirs(**given))
    assert (ours(**given) == ours(**given)) == (theirs(**given) == theirs(**given))


@pytest.mark.parametrize("options", [o for o in OPTIONS if o.get("frozen")])
@pytest.mark.parametrize("name", ["a", "doubled", "new"])
def test_frozen(options: dict[str, Any], name: str) -> None:
    """Nothing of a frozen instance is set or deleted; a cached property keeps its value."""
    for cls in (dataclass(**options)(undecorated()), dataclasses.dataclass(**options)(undecorated())):
        if "slots" in options and name == "new":
            continue  # Python's has a class of the time before the slots in mind, and fails with TypeError
        with pytest.raises(FrozenInstanceError, match=f"cannot assign to field '{name}'"):
            setattr(cls(a=1), name, 3)
        with pytest.raises(FrozenInstanceError, match=f"cannot delete field '{name}'"):
            delattr(cls(a=1), name)


@BOTH
def test_plain_subclass_of_frozen(decorator: Any) -> None:
    """It may set what is no field, by way of other bases too, and keep cached properties."""
    noted = []

    class Notes:
        def __setattr__(self, name: str, value: Any) -> None:
            noted.append(name)
            super().__setattr__(name, value)

    @decorator(frozen=True)
    class Frozen:
        a: int

        @functools.cached_property
        def twice(self) -> int:
            return 2 * self.a

    class Plain(Frozen, Notes):
        pass

    plain = Plain(1)
    plain.note = "set"  # type: ignore[attr-defined]
    assert noted == ["note"] and plain.twice == 2
    del plain.note  # type: ignore[attr-defined]
    assert not hasattr(plain, "note")
    for change in (lambda: setattr(plain, "a", 2), lambda: delattr(plain, "a")):
        with pytest.raises(FrozenInstanceError):
            change()


def test_wrong_arguments() -> None:
    for call in (lambda: Point(), lambda: Point(1, 2, 3), lambda: Point(1, z=2)):
        with pytest.raises(TypeError, match=r"Point\.__init__\(\)"):
            call()


@pytest.mark.parametrize("above", [dataclass, dataclasses.dataclass])
@pytest.mark.parametrize("below", [dataclass, dataclasses.dataclass])
def test_inheritance(above: Any, below: Any) -> None:
    """Classes of both decorators inherit from each other, as packages of others do; the same is refused."""

    @above(frozen=True, kw_only=True)
    class Section:
        name: str = "adamw"
        lr: float

    @below(frozen=True)
    class Child(Section):
        a: int = 1
        lr: float = 0.5
        extra: list[str] = field(default_factory=list)

        def __post_init__(self) -> None:
            assert self.lr > 0

    @above(frozen=True)
    class Grandchild(Child):
        b: int = 2

    assert str(inspect.signature(Grandchild)).startswith("(lr: 'float' = 0.5, a: 'int' = 1, extra")
    made = Grandchild(name="sgd")
    assert repr(made).endswith("Grandchild(name='sgd', lr=0.5, a=1, extra=[], b=2)")
    assert Child() == Child(0.5, 1) != made and made == dataclasses.replace(made) != dataclasses.replace(made, b=3)
    with pytest.raises(AssertionError):
        Grandchild(-1.0)
    with pytest.raises(FrozenInstanceError):
        made.b = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="cannot inherit non-frozen"):
        below(type("Loose", (Section,), {}))
    with pytest.raises(TypeError, match="cannot inherit frozen"):
        below(frozen=True)(type("Tight", (above(type("Loose", (), {})),), {}))


@BOTH
def test_init_of_a_base(decorator: Any) -> None:
    """A class without fields of its own calls the one that its base has, also with `super()`."""

    @decorator
    class Base:
        a: int

    class Child(Base):
        def __init__(self) -> None:
            super().__init__(5)

    class Other(Base):
        pass

    assert Child().a == 5 and Other(6).a == 6 and Base(7).a == 7
    assert inspect.signature(Other) == inspect.signature(Base)


@BOTH
def test_methods_of_the_class_stay(decorator: Any) -> None:
    @decorator(frozen=True)
    class Own:
        a: int

        def __init__(self) -> None:
            object.__setattr__(self, "a", 4)

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return True

    assert repr(Own()) == "own" and Own() == 3 and Own().a == 4
    assert hash(Own()) == hash((4,)), "a frozen class with an equality of its own has a hash of its fields"

    for body, expected in (
        ({"__hash__": lambda self: 7}, 7),
        ({"__hash__": lambda self: 7, "__eq__": lambda self, other: True}, 7),
        ({"__hash__": None}, None),
    ):
        for frozen in (True, False):
            cls = decorator(frozen=frozen)(type("Hashed", (), dict(body)))
            assert (hash(cls()) if expected else cls.__hash__) == expected
    loose = decorator(type("Loose", (), {"__eq__": lambda self, other: True}))
    assert loose.__hash__ is None


@BOTH
def test_refused_classes(decorator: Any) -> None:
    def setter(self: Any, *given: Any) -> None: ...

    for name in ("__setattr__", "__delattr__"):
        with pytest.raises(TypeError, match=f"Cannot overwrite attribute {name}"):
            decorator(frozen=True)(type("Sets", (), {name: setter}))
        assert decorator(type("Sets", (), {name: setter})).__dict__[name] is setter
    with pytest.raises(ValueError, match="mutable default"):
        decorator(type("Mutable", (), {"__annotations__": {"a": "list[int]"}, "a": []}))
    with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
        decorator(speed=True)(type("Option", (), {}))


@pytest.mark.parametrize("cls", [Point, SlotsPoint])
def test_copies(cls: Any) -> None:
    point = cls(1, 2)
    for copied in (pickle.loads(pickle.dumps(point)), copy.copy(point), copy.deepcopy(point)):
        assert copied == point and hash(copied) == hash(point)
    assert dataclasses.replace(point, y=5) == cls(1, 5)


@BOTH
def test_recursive_text(decorator: Any) -> None:
    @decorator
    class Node:
        inside: Any = None

    node = Node()
    node.inside = node
    assert repr(node).endswith("Node(inside=...)")


def test_compiled_once_and_late() -> None:
    """Neither fields nor a subclass compile anything. Threads that make the first instances at once get whole ones."""

    @dataclass(frozen=True)
    class Late:
        a: int
        b: int = 2

    @dataclass(frozen=True)
    class Below(Late):
        c: int = 3

    assert len(dataclasses.fields(Below)) == 3 and isinstance(vars(Late)["__init__"], UncompiledInit)
    barrier, found = threading.Barrier(4), list[Late]()

    def make() -> None:
        barrier.wait()
        found.append(Late(1))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [Late(1)] * 4 and inspect.isfunction(vars(Late)["__init__"])
    assert isinstance(vars(Below)["__init__"], UncompiledInit) and not Below.__doc__


@BOTH
def test_pydantic(decorator: Any) -> None:
    """It checks and describes classes of both alike, before any instance was made."""

    @decorator(frozen=True, kw_only=True)
    class Base:
        name: Literal["a", "b"]
        sizes: tuple[int, ...] = ()

    @decorator(frozen=True, kw_only=True)
    class Section(Base):
        rate: Annotated[float, "of learning"] = 0.1
        inner: dict[str, int] = field(default_factory=dict)

    for cls in (Base, Section):  # found by name, which pydantic does at module level only
        for f in dataclasses.fields(cls):
            f.type = {"name": Literal["a", "b"], "sizes": tuple[int, ...], "rate": float, "inner": dict[str, int]}[
                f.name
            ]
    adapter = TypeAdapter(Section)
    made = adapter.validate_json('{"name": "a", "sizes": [1, 2], "inner": {"x": 1}}', strict=True)
    assert made == Section(name="a", sizes=(1, 2), inner={"x": 1}) and made.rate == 0.1
    with pytest.raises(ValidationError) as caught:
        adapter.validate_json('{"rate": "fast", "inner": {"x": 1.5}}', strict=True)
    kinds = {(e["loc"], e["type"]) for e in caught.value.errors()}
    assert kinds == {(("name",), "missing"), (("rate",), "float_type"), (("inner", "x"), "int_type")}
    schema = adapter.json_schema()
    assert list(schema["properties"]) == ["name", "sizes", "rate", "inner"] and schema["required"] == ["name"]


def test_signatures_of_the_package() -> None:
    """Each class has the arguments that Python's decorator would give it, in number, order, kind and default."""
    compared = 0
    modules = [module for name, module in sys.modules.items() if name.startswith("phalanx.")]
    classes = {found for module in modules for found in vars(module).values() if isinstance(found, type)}
    for cls in classes:
        if not dataclasses.is_dataclass(cls) or not cls.__module__.startswith("phalanx."):
            continue
        init = cls.__init__
        if "__init__" not in vars(cls) or not init.__code__.co_filename.startswith("<"):
            continue  # an `__init__` of its own
        body = {"__annotations__": {f.name: f.type for f in dataclasses.fields(cls)}, "__module__": cls.__module__}
        body |= {f.name: copy.copy(f) for f in dataclasses.fields(cls)}
        pythons = dataclasses.dataclass(init=True, repr=False, eq=False)(type(cls.__name__, (), body))
        found, expected = inspect.signature(cls), inspect.signature(pythons)
        assert list(found.parameters) == list(expected.parameters), cls
        for name, parameter in found.parameters.items():
            assert parameter.kind == expected.parameters[name].kind, (cls, name)
            of_factory = str(expected.parameters[name].default) == "<factory>"
            assert of_factory or parameter.default is expected.parameters[name].default, (cls, name)
        compared += 1
    assert compared > 200
