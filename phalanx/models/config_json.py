"""Reading Hugging Face's config.json: the JSON types that transformers 5 accepts for each key, and its default if one
is missing. Which keys a family has is defined in its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError

GELUS = {"gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "gelu": "gelu", "gelu_python": "gelu"}
"""Names of GELU in config.json -> its form: exact (gelu), or by tanh (gelu_new)."""


@dataclass(frozen=True)
class HfKey:
    """types: what a value may be. default: the value if the key is missing; NEEDED: the config is then refused."""

    types: tuple[type, ...]
    default: Any

    def takes(self, value: Any) -> bool:
        """Whether a JSON value has one of these types; true and false are not numbers."""
        return isinstance(value, self.types) and (bool in self.types or not isinstance(value, bool))

    @property
    def wanted(self) -> str:
        return " or ".join(dict.fromkeys(NAMES[kind] for kind in self.types))


NONE = type(None)
NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
    NONE: "null",
}
NEEDED = object()  # transformers would use the sizes of some published model; we require a folder to state its own


def integer(default: Any) -> HfKey:
    return HfKey((int,), default)


def integer_or_null(default: Any = None) -> HfKey:
    return HfKey((int, NONE), default)


def number(default: Any) -> HfKey:
    return HfKey((float, int), default)


def number_or_null(default: Any) -> HfKey:
    return HfKey((float, int, NONE), default)


def switch(default: bool) -> HfKey:
    return HfKey((bool,), default)


def text(default: str) -> HfKey:
    return HfKey((str,), default)


LIST_OR_NULL = HfKey((list, NONE), None)


@dataclass
class ConfigJson:
    """A config.json from which a family builds its config."""

    family: str
    """The resulting model.family."""
    config: type[Any]
    """The class of the family's config."""
    stated: dict[str, Any]
    """The contents of the file."""
    values: dict[str, Any]
    """Every key that the family reads, with its value or, if it is missing, transformers' default."""
    odd: list[str] = field(default_factory=list)
    """What it asks for that we cannot compute. It is refused with this list, to which the family's reader adds."""

    def pick(self, *names: str) -> dict[str, Any]:
        return {name: self.values[name] for name in names}


def equal_heads(found: ConfigJson) -> None:
    """Refuses a `head_dim` that is not hidden_size / num_attention_heads, of a family whose heads are that wide: it is
    no key of its own, and transformers rotates so many features all the same."""
    width = found.values["hidden_size"] // max(1, found.values["num_attention_heads"])
    if found.stated.get("head_dim") not in (None, width):
        why = "hidden_size / num_attention_heads, or none"
        found.odd.append(f"head_dim={found.stated['head_dim']!r} (supported: {width}, {why})")


def values_of(
    config: dict[str, Any], keys: Mapping[str, HfKey], other_names: Mapping[str, str], where: str
) -> dict[str, Any]:
    """The value of each of these keys or, if it is missing, transformers' default; CheckpointError names all invalid
    ones.

    other_names   key -> its other name, which takes precedence if both are there
    """
    found: dict[str, Any] = {}
    odd = []
    for name, key in keys.items():
        said = next((n for n in (other_names.get(name, name), name) if n in config), None)
        value = key.default if said is None else config[said]
        if value is NEEDED:
            odd.append(f"{name} is missing")
        elif said is not None and not key.takes(value):
            odd.append(f"{said}={value!r} (it must be {key.wanted})")
        found[name] = value
    if odd:
        raise CheckpointError(f"{where}: {'; '.join(odd)}")
    return found


def other_values(values: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """The keys whose value our models do not compute."""
    return [
        f"{k}={values[k]!r} (supported: {shown(ok)})" for k, ok in only.items() if k in values and values[k] not in ok
    ]


def shown(values: tuple[Any, ...]) -> str:
    return ", ".join(repr(v) for v in values if v is not None) or "unset"
