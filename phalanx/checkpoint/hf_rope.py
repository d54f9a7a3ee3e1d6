"""The rotary embedding of a config.json: its many spellings, merged as transformers 5 merges them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from phalanx.models.config import ROPE_FIELDS, RopeScaling

OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}  # of gpt-oss where a config has none
WITH_ORIGINAL = ("llama3", "yarn", "longrope")
COUNTS = ("original_max_position_embeddings",)
LISTS = ("short_factor", "long_factor")
OPTIONAL_NULL = ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate")


@dataclass(frozen=True)
class RopeOf:
    """What the reading depends on beside the file: the family's base, the rotated features of a head, the longest
    sequence, kinds of layers.

    scores: whether the family tempers its scores by `mscale_all_dim` (DeepSeek).
    """

    theta: float
    head_dim: int
    longest: int
    layer_types: Collection[Any] = ()
    scores: bool = False


@dataclass(frozen=True)
class RopeFound:
    theta: float
    scaling: RopeScaling | None
    odd: list[str]


def read_rope(config: dict[str, Any], of: RopeOf, default: dict[str, Any] | None = None) -> RopeFound:
    """Base, scaling, and what cannot be honoured.

    `rope_scaling`, where it says anything, takes the place of `rope_parameters`; what it lacks comes from keys
    beside it, never from `rope_parameters`. `default`: what a family has for rope_parameters of its own.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters")
    given = default if given is None and default is not None else given
    if not isinstance(given or {}, dict):
        return RopeFound(of.theta, None, [f"rope_scaling={given!r} (it must be an object)"])
    rope = {"rope_theta": config.get("rope_theta", of.theta), **(given or {})}
    if config.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    kind = rope.setdefault("rope_type", rope.get("type", "default"))
    nested = [key for key in rope if key in of.layer_types]
    odd = _lost(config, rope) + [
        f"{key} of rope_parameters (supported: one rotary embedding for all layers)" for key in nested
    ]
    if not _is_number(rope["rope_theta"]):
        odd.append(f"rope_theta={rope['rope_theta']!r} (it must be a number)")
    if not isinstance(kind, str) or kind not in ("default", *ROPE_FIELDS):
        odd.append(f"rope_type={kind!r} (supported: {', '.join(map(repr, ('default', *ROPE_FIELDS)))})")
    if odd or kind == "default":
        return RopeFound(of.theta if odd else float(rope["rope_theta"]), None, odd)
    if kind in WITH_ORIGINAL:
        rope.setdefault("original_max_position_embeddings", of.longest)
        if "original_max_position_embeddings" in config:
            rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    odd = _odd_values(rope, kind, of)
    return RopeFound(float(rope["rope_theta"]), None if odd else _scaling(rope, kind, of), odd)


def _lost(config: dict[str, Any], rope: dict[str, Any]) -> list[str]:
    """What `rope_parameters` says and `rope_scaling` drops by taking its place: nobody who added the latter meant to
    change the base."""
    beside = config.get("rope_parameters")
    if not config.get("rope_scaling") or not isinstance(beside, dict):
        return []
    lost = [k for k in ("rope_theta", "partial_rotary_factor") if k in beside and beside[k] != rope.get(k)]
    why = "rope_scaling takes the place of rope_parameters, and transformers then computes with"
    fix = "put it into rope_scaling too, or move all of rope_scaling into rope_parameters"
    return [
        f"{k}={beside[k]!r} of rope_parameters beside rope_scaling ({why} {k}={rope.get(k)!r}: {fix})" for k in lost
    ]


def _odd_values(rope: dict[str, Any], kind: str, of: RopeOf) -> list[str]:
    needed, optional = ROPE_FIELDS[kind]
    if kind == "proportional":
        rope.setdefault("partial_rotary_factor", 1.0)
    odd = [f"{name} is missing (rope_type {kind} needs it)" for name in needed if name not in rope]
    for name in (n for n in (*needed, *optional) if n in rope):
        value = rope[name]
        null = name in OPTIONAL_NULL or (name == "factor" and kind in ("yarn", "longrope"))
        if name in LISTS:
            if not isinstance(value, list) or not all(map(_is_number, value)):
                odd.append(f"{name}={value!r} (it must be a list of numbers)")
        elif name == "truncate":
            odd += [] if isinstance(value, bool | None) else [f"truncate={value!r} (it must be true or false)"]
        elif name in COUNTS:
            odd += [] if _is_number(value) and value == int(value) else [f"{name}={value!r} (it must be an integer)"]
        elif not (_is_number(value) or (value is None and null)):
            odd.append(f"{name}={value!r} (it must be a number)")
    partial = rope.get("partial_rotary_factor", 1.0)
    if kind != "proportional" and not (_is_number(partial) and int(of.head_dim * partial) == of.head_dim):
        odd.append(
            f"partial_rotary_factor={partial!r} with rope_type {kind!r} (supported: 1.0, or rope_type 'proportional')"
        )
    if of.scores and rope.get("mscale_all_dim") and (kind != "yarn" or rope.get("factor") is None):
        odd.append(
            f"mscale_all_dim={rope['mscale_all_dim']!r} with rope_type {kind!r} (supported: with rope_type "
            "'yarn' and a factor)"
        )
    return odd


def _scaling(rope: dict[str, Any], kind: str, of: RopeOf) -> RopeScaling:
    names = [name for names in ROPE_FIELDS[kind] for name in names]
    found = {name: rope[name] for name in names if rope.get(name) is not None}
    if kind == "yarn":
        found = {
            name: value
            for name, value in found.items()
            if value or name not in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        }
        found["truncate"] = bool(rope.get("truncate", True))  # null is false
        found.setdefault(
            "factor",
            of.longest / rope["original_max_position_embeddings"] if rope["original_max_position_embeddings"] else 0.0,
        )
    if "original_max_position_embeddings" in found:
        found["original_max_position_embeddings"] = int(found["original_max_position_embeddings"])
    return RopeScaling(rope_type=kind, **{k: tuple(v) if isinstance(v, list) else v for k, v in found.items()})  # type: ignore[arg-type]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
