"""The rotary embedding of a `model` section: its scaling, rules, config.json in both directions (its many spellings,
merged as transformers 5 merges them), and a smaller one for `phalanx verify`."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, no_effect, problem, within


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How a rotary embedding is extended to a longer context: `rope_scaling` (or `rope_parameters`) in transformers."""

    rope_type: Literal["llama3", "linear", "dynamic", "yarn", "longrope", "proportional"] = "llama3"
    """llama3 (Llama 3.1), linear (positions divided), dynamic (a base that grows with the sequence), yarn (YaRN),
    longrope (LongRoPE), proportional (partial rotary embedding: only part of each head is rotated)."""
    factor: float | None = None
    """How many times longer the context becomes; longrope: unset, max_position_embeddings / the original length."""
    original_max_position_embeddings: int | None = None
    """llama3, yarn, longrope: context length before the scaling."""
    low_freq_factor: float | None = None
    """llama3: wavelengths longer than the original length / this are scaled in full."""
    high_freq_factor: float | None = None
    """llama3: wavelengths shorter than the original length / this stay as they are."""
    attention_factor: float | None = None
    """yarn, longrope: cos and sin are multiplied by this; unset: computed from factor, as in the papers."""
    beta_fast: float = 32.0
    """yarn: features that rotate more often than this in the original length stay as they are."""
    beta_slow: float = 1.0
    """yarn: features that rotate less often than this in the original length are divided by factor."""
    mscale: float | None = None
    """yarn, DeepSeek: weight of ln(factor) in the attention factor, over that of mscale_all_dim."""
    mscale_all_dim: float | None = None
    """yarn, DeepSeek: weight of ln(factor) in the scale of the scores (latent attention) and in the denominator of the
    attention factor."""
    truncate: bool = True
    """yarn: round the ends of the ramp outwards to whole features."""
    short_factor: tuple[float, ...] | None = None
    """longrope: a divisor per pair of features, for sequences up to the original length."""
    long_factor: tuple[float, ...] | None = None
    """longrope: a divisor per pair of features, for longer sequences."""
    partial_rotary_factor: float | None = None
    """proportional: the fraction of each head that is rotated, from 0 to 1; the rest carries no position."""


@dataclass(frozen=True)
class LayerRope:
    """The rotary embedding of one layer: base, scaling, how many features of a head are rotated (the first ones), and
    whether features 2i and 2i + 1 are a pair (`interleaved`) or i and i + half. `axes`: as of ops.dense.rope_scaling's
    Rotation."""

    theta: float
    scaling: RopeScaling | None
    features: int
    interleaved: bool = False
    axes: tuple[int, ...] = ()


# fields of RopeScaling that each type requires, and those that it accepts
ROPE_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (("short_factor", "long_factor", "original_max_position_embeddings"), ("factor", "attention_factor")),
    "proportional": (("partial_rotary_factor",), ("factor",)),
}
WITH_ORIGINAL = ("llama3", "yarn", "longrope")
COUNTS = ("original_max_position_embeddings",)
LISTS = ("short_factor", "long_factor")
OPTIONAL_NULL = ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate")


@dataclass(frozen=True)
class RopeOf:
    """What reading depends on besides the file: the family's base, the features of a head (that are rotated, unless
    `partial`), the longest sequence, kinds of layers.

    scores   whether the family scales its scores by `mscale_all_dim` (DeepSeek)
    partial  for a family that may rotate a part of each head: the part if the file does not say; None for others
    names    of the base and of that part beside `rope_parameters`
    """

    theta: float
    head_dim: int
    longest: int
    layer_types: Collection[Any] = ()
    scores: bool = False
    partial: float | None = None
    names: tuple[str, str] = ("rope_theta", "partial_rotary_factor")


@dataclass(frozen=True)
class RopeFound:
    theta: float
    scaling: RopeScaling | None
    odd: list[str]
    partial: float = 1.0


def read_rope(config: dict[str, Any], of: RopeOf, default: dict[str, Any] | None = None) -> RopeFound:
    """Base, scaling, and what is not supported.

    A `rope_scaling` that is not empty replaces `rope_parameters`; what it lacks comes from keys beside it, never from
    `rope_parameters`. `default`: a family's own rope_parameters.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters")
    given = default if given is None and default is not None else given
    if not isinstance(given or {}, dict):
        return RopeFound(of.theta, None, [f"rope_scaling={given!r} (it must be an object)"])
    rope = {"rope_theta": config.get(of.names[0], of.theta), **(given or {})}
    beside = config.get(of.names[1], of.partial)
    if beside is not None:
        rope.setdefault("partial_rotary_factor", beside)
    kind = rope.setdefault("rope_type", rope.get("type", "default"))
    nested = [key for key in rope if key in of.layer_types]
    odd = _lost(config, rope) + [
        f"{key} of rope_parameters (supported: one rotary embedding for all layers)" for key in nested
    ]
    if not _is_number(rope["rope_theta"]):
        odd.append(f"rope_theta={rope['rope_theta']!r} (it must be a number)")
    if not isinstance(kind, str) or kind not in ("default", *ROPE_FIELDS):
        odd.append(f"rope_type={kind!r} (supported: {', '.join(map(repr, ('default', *ROPE_FIELDS)))})")
    part, lost = (1.0, []) if of.partial is None else _part(rope, kind)
    odd += lost
    if odd or kind == "default":
        return RopeFound(of.theta if odd else float(rope["rope_theta"]), None, odd, part)
    if kind in WITH_ORIGINAL:
        rope.setdefault("original_max_position_embeddings", of.longest)
        if "original_max_position_embeddings" in config:
            rope["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    odd = _odd_values(rope, kind, of)
    return RopeFound(float(rope["rope_theta"]), None if odd else _scaling(rope, kind, of), odd, part)


def _part(rope: dict[str, Any], kind: Any) -> tuple[float, list[str]]:
    """The part of each head that is rotated, and why it cannot be."""
    part = rope.get("partial_rotary_factor", 1.0)
    if not _is_number(part):
        return 1.0, [f"partial_rotary_factor={part!r} (it must be a number)"]
    if kind == "proportional":
        return 1.0, ["rope_type='proportional' (supported: any other, with a partial_rotary_factor)"]
    return float(part), []


def _lost(config: dict[str, Any], rope: dict[str, Any]) -> list[str]:
    """What `rope_parameters` says and is lost because `rope_scaling` replaces it: adding the latter is hardly meant to
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
    if (
        of.partial is None
        and kind != "proportional"
        and not (_is_number(partial) and int(of.head_dim * partial) == of.head_dim)
    ):
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


def rope_to_hf(theta: float, scaling: RopeScaling | None, partial: float | None = None) -> dict[str, Any]:
    """Rotary parameters in both spellings: transformers 5 reads `rope_parameters`, others `rope_theta`, `rope_scaling`
    and, for families that have it, `partial_rotary_factor`."""
    part = {} if partial is None else {"partial_rotary_factor": partial}
    used = (
        {} if scaling is None else {k: getattr(scaling, k) for names in ROPE_FIELDS[scaling.rope_type] for k in names}
    )
    written = {k: list(v) if isinstance(v, tuple) else v for k, v in used.items() if v is not None}
    old = None if scaling is None else {"rope_type": scaling.rope_type, **written}
    return {
        "rope_theta": theta,
        "rope_scaling": old,
        "rope_parameters": {"rope_theta": theta, **part, **(old or {"rope_type": "default"})},
        **part,
    }


# ---- rules ---------------------------------------------------------------------------------------

ROPE_EXAMPLES: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "partial_rotary_factor": 0.5,
}


def check_rope_scaling(config: RopeScaling, dim: int) -> list[Problem]:
    """`dim`: rotated features of a head; 0 if that is itself wrong."""
    at, because = "model.rope_scaling", {"model.rope_scaling.rope_type": config.rope_type}
    needed, optional = ROPE_FIELDS[config.rope_type]
    found = []
    for name in needed:
        if getattr(config, name) is None:
            example = ROPE_EXAMPLES.get(name, (1.0,) * (dim // 2))
            found.append(
                problem(
                    at,
                    config,
                    name,
                    f"is needed by rope_type {config.rope_type}",
                    because,
                    (example,) if example else (),
                )
            )
    others = [f.name for f in fields(config) if f.name not in ("rope_type", *needed, *optional)]
    of_type = {name: [kind for kind, names in ROPE_FIELDS.items() if name in names[0] + names[1]] for name in others}
    for name in others:
        found += no_effect(at, config, [name], f"rope_type {' or '.join(of_type[name])}", because)
    return found + check_rope_values(config, dim)


def check_rope_values(config: RopeScaling, dim: int) -> list[Problem]:
    at = "model.rope_scaling"
    found = at_least(at, config, 1, "original_max_position_embeddings")
    for name in ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow"):
        found += within(at, config, name, "(0, inf)", (ROPE_EXAMPLES.get(name, 1.0),))
    for name in ("short_factor", "long_factor"):
        given = getattr(config, name)
        if given is not None and dim and len(given) != dim // 2:
            found.append(
                problem(
                    at,
                    config,
                    name,
                    "must have a number per pair of rotated features",
                    {"pairs": dim // 2},
                    ((1.0,) * (dim // 2),),
                )
            )
        elif given is not None and not all(0 < x < math.inf for x in given):
            found.append(problem(at, config, name, "must be numbers in (0, inf)", {}, ((1.0,) * len(given),)))
    found += within(at, config, "partial_rotary_factor", "[0, 1]", (0.5,))
    if config.rope_type == "longrope" and config.original_max_position_embeddings == 1:
        found.append(
            problem(at, config, "original_max_position_embeddings", "must be > 1 (its logarithm divides)", {}, (4096,))
        )
    low, high = config.low_freq_factor, config.high_freq_factor
    if not found and low is not None and high is not None and high < low:
        found.append(
            problem(
                at, config, "high_freq_factor", "must be >= low_freq_factor", {f"{at}.low_freq_factor": low}, (4 * low,)
            )
        )
    if not found and config.beta_fast < config.beta_slow:
        because = {f"{at}.beta_slow": config.beta_slow}
        found.append(problem(at, config, "beta_fast", "must be >= beta_slow", because, (32 * config.beta_slow,)))
    return found


def check_rope_base(config: Any, dim: int) -> list[Problem]:
    """YaRN divides by the logarithm of the base; dynamic scaling by the rotated features (`dim`) minus two."""
    scaling = config.rope_scaling
    if scaling is None:
        return []
    because = {"model.rope_scaling.rope_type": scaling.rope_type}
    if scaling.rope_type == "yarn" and config.rope_theta == 1.0:
        return [problem("model", config, "rope_theta", "must not be 1", because, (10000.0,))]
    if scaling.rope_type == "dynamic" and dim == 2:
        rule = "must not be dynamic for heads with two rotated features"
        return [problem("model.rope_scaling", scaling, "rope_type", rule, {"rotated features": 2}, ("linear",))]
    return []


# ---- a smaller one -------------------------------------------------------------------------------


def small_scaling(scaling: RopeScaling | None, seq_length: int, given_length: int) -> RopeScaling | None:
    """Sequences longer than the original context stay longer."""
    if scaling is None or scaling.original_max_position_embeddings is None:
        return scaling
    original = scaling.original_max_position_embeddings
    return replace(scaling, original_max_position_embeddings=seq_length // 2 if given_length > original else original)


def with_factors(scaling: RopeScaling | None, pairs: int) -> RopeScaling | None:
    """longrope has one number for each pair of features."""
    if scaling is None or scaling.short_factor is None or scaling.long_factor is None:
        return scaling
    return replace(scaling, short_factor=scaling.short_factor[:pairs], long_factor=scaling.long_factor[:pairs])
