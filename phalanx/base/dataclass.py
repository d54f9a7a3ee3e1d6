"""`dataclass` as in Python's `dataclasses`, for classes that cost little until they are used.

Python's decorator compiles up to six methods of each class while its module is imported: with hundreds of classes that
is half of what a run imports. It makes the fields here too, but `__init__` is compiled when it is first asked for, and
the other methods need no compiler. To type checkers this is Python's decorator. `InitVar` is the one part left out.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, FrozenInstanceError, fields, is_dataclass
from functools import partial
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any


class UncompiledInit:
    """Stands in for `__init__`, and puts the real one in its place when somebody asks for it: who makes the first
    instance, or reads the signature."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        method = compiled_init(self.cls)
        self.cls.__init__ = method
        return method.__get__(instance, owner)


class OwnFactory:
    """The default of an argument that stands for a call of the field's factory."""

    def __repr__(self) -> str:
        return "<factory>"


OWN_FACTORY = OwnFactory()


def compiled_init(cls: Any) -> Any:
    """`__init__` of a dataclass: sets the fields in their order, then calls `__post_init__`."""
    frozen = cls.__dataclass_params__.frozen
    names: dict[str, Any] = {"__set__": object.__setattr__, "__own_factory__": OWN_FACTORY}  # that it reads
    positional = ["self"]
    by_name = ["*"]
    body: list[str] = []
    for f in fields(cls):
        value, default = f.name, ""
        if f.default_factory is not MISSING:
            made, default = f"__factory_{f.name}__()", "=__own_factory__"
            names[f"__factory_{f.name}__"] = f.default_factory
            value = f"{made} if {f.name} is __own_factory__ else {f.name}" if f.init else made
        elif f.default is not MISSING:
            names[f"__default_{f.name}__"] = f.default
            default = f"=__default_{f.name}__"
            value = f.name if f.init else default[1:]
        if f.init:
            (by_name if f.kw_only else positional).append(f.name + default)
        elif value == f.name or (f.default is not MISSING and "__slots__" not in vars(cls)):
            continue  # it has none until somebody sets it, or that of the class, which one with slots does not keep
        body.append(f"__set__(self, {f.name!r}, {value})" if frozen else f"self.{f.name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    arguments = ", ".join(positional + (by_name if len(by_name) > 1 else []))
    lines = [f"def make({', '.join(names)}):", f" def __init__({arguments}):"]
    lines += [f"  {line}" for line in body or ["pass"]]
    module = sys.modules.get(cls.__module__)
    found: dict[str, Any] = {}
    # in the module of the class, where annotations of arguments are looked up
    exec("\n".join([*lines, " return __init__"]), {} if module is None else vars(module), found)
    method = found["make"](**names)
    method.__qualname__ = f"{cls.__qualname__}.__init__"
    method.__annotations__ = {f.name: f.type for f in fields(cls) if f.init} | {"return": None}
    return method


@recursive_repr()
def text_of(self: Any) -> str:
    """`Name(field=value, ...)`."""
    shown = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.repr)
    return f"{type(self).__qualname__}({shown})"


def values_of(names: Iterable[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Reads these attributes of an instance. A tuple even of one: it compares what is identical without `==`."""
    several = tuple(names)
    if not several:
        return lambda instance: ()
    read = attrgetter(*several)
    return read if len(several) > 1 else lambda instance: (read(instance),)


def equality_of(cls: type) -> Any:
    """`__eq__`: instances of one class are equal if their compared fields are."""
    values = values_of(f.name for f in fields(cls) if f.compare)

    def __eq__(self: Any, other: Any) -> bool:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    return __eq__


def hash_of(cls: type) -> Any:
    """`__hash__` of the fields that are compared, or that ask for it."""
    values = values_of(f.name for f in fields(cls) if (f.compare if f.hash is None else f.hash))

    def __hash__(self: Any) -> int:
        return hash(values(self))

    return __hash__


def refusals_of(cls: Any) -> dict[str, Any]:
    """`__setattr__` and `__delattr__` of a frozen class. A subclass that is no dataclass may have other attributes."""
    names = frozenset(f.name for f in fields(cls))

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}


def decorate(
    cls: type, *, frozen: bool = False, kw_only: bool = False, slots: bool = False, eq: bool = True, **others: Any
) -> type:
    """What `@dataclass` does to a class. `others` (`order`, ...) are rare: Python's decorator does all of it."""
    if others:
        return dataclasses.dataclass(frozen=frozen, kw_only=kw_only, slots=slots, eq=eq, **others)(cls)
    own = dict(vars(cls))
    if own.get("__hash__", ...) is None and "__eq__" in own:
        del own["__hash__"]  # Python's doing: every class body with `__eq__` gets it
    # `frozen` makes Python's decorator compile two methods. It has something to do where a base may not be frozen,
    # where the class has one of these methods, and where pickle needs two more, because of slots
    inherits = any(map(is_dataclass, cls.__mro__[1:]))
    needed = inherits or slots or not own.keys().isdisjoint(("__setattr__", "__delattr__"))
    doc = cls.__doc__
    # without one, Python's decorator would write a signature there, and compile the `__init__` of a base for it
    cls.__doc__ = doc or cls.__name__
    fields_alone = {"init": False, "repr": False, "eq": False}
    cls = dataclasses.dataclass(**fields_alone, kw_only=kw_only, slots=slots, frozen=frozen and needed)(cls)
    cls.__doc__ = doc
    params = cls.__dataclass_params__  # type: ignore[attr-defined]
    params.init = params.repr = True
    params.eq = eq
    params.frozen = frozen
    methods = {"__init__": UncompiledInit(cls), "__repr__": text_of}
    if eq:
        methods |= {"__eq__": equality_of(cls), "__hash__": hash_of(cls) if frozen else None}
    if frozen:
        methods |= refusals_of(cls)
    for name, method in methods.items():
        if name not in own:
            setattr(cls, name, method)
    return cls


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls: type | None = None, /, **options: Any) -> Any:
        """Python's `dataclass`, made cheap to import."""
        return partial(decorate, **options) if cls is None else decorate(cls, **options)
