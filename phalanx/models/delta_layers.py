"""Families in which layers with linear attention (the gated delta rule) and with attention follow each other in a
pattern: fields of the `model` section, rules, config.json in both directions, the layer, a small copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import Problem
from phalanx.base.rules import at_least, divisors, problem
from phalanx.models.config_json import LIST_OR_NULL, ConfigJson, integer, shown
from phalanx.models.decoder_config import DecoderConfig, small_types
from phalanx.models.model_config import SmallSizes

if TYPE_CHECKING:
    from phalanx.nn.env import Env
    from phalanx.nn.gated_delta import DeltaRows, GatedDelta, RowsOfHeads

DeltaKind = Literal["linear_attention", "full_attention"]


class DeltaSizes(NamedTuple):
    """Numbers of heads of keys and of values in linear attention, and the widths of a key and of a value."""

    keys: int
    values: int
    key: int
    value: int


@dataclass(frozen=True, kw_only=True)
class LinearLayersConfig(DecoderConfig):
    """Llama's fields, and which layers have linear attention."""

    layer_types: tuple[DeltaKind, ...] | None = None
    """What each layer is: linear_attention (a gated delta rule) or full_attention; unset: of every four layers, the
    last has attention."""
    linear_conv_kernel_dim: int = 4
    """Tokens that the convolution before the delta rule reads: each token and those before it."""

    period: ClassVar[int] = 4
    """Of so many layers in a row the last has attention."""
    heads_fields: ClassVar[tuple[str, str]] = ("linear_num_key_heads", "linear_num_value_heads")
    """The fields that say how many heads of keys and of values linear attention has."""

    @property
    def types(self) -> tuple[DeltaKind, ...]:
        """The kind of each layer."""
        return pattern(self.num_hidden_layers, self.period) if self.layer_types is None else self.layer_types

    @property
    def attends(self) -> bool:
        return "full_attention" in self.types

    @property
    def taps(self) -> int:
        return self.linear_conv_kernel_dim if "linear_attention" in self.types else 0

    @property
    def recurrence(self) -> str | None:
        return "delta" if self.scans else None

    @property
    def delta_sizes(self) -> DeltaSizes:
        """Heads of linear attention, and their widths."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DeltaLayersConfig(LinearLayersConfig):
    """The same, with heads of keys that groups of value heads share."""

    linear_num_key_heads: int = 16
    """Heads of keys and queries in a layer with linear attention."""
    linear_num_value_heads: int = 32
    """Heads of values there, each with a state; groups of them share a head of keys and queries."""
    linear_key_head_dim: int = 128
    """Width of a head of keys and queries there."""
    linear_value_head_dim: int = 128
    """Width of a head of values there."""

    @property
    def delta_sizes(self) -> DeltaSizes:
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        return DeltaSizes(keys, values, self.linear_key_head_dim, self.linear_value_head_dim)


def pattern(layers: int, period: int) -> tuple[DeltaKind, ...]:
    """The kinds of layers if each `period`-th has attention."""
    return tuple("linear_attention" if (i + 1) % period else "full_attention" for i in range(layers))


# ---- the layer; functions that build it import torch themselves, because reading a config must not


def gated_delta(config: LinearLayersConfig, env: Env, name: str, rows: DeltaRows, **changes: Any) -> GatedDelta:
    """A layer whose tensors' names begin with `name`, as Qwen has it. `changes`: fields of GatedDeltaSpec in which a
    family differs."""
    from phalanx.nn.gated_delta import GatedDelta, GatedDeltaSpec
    from phalanx.nn.initial import ONES, LogUniform

    c = config
    usual: dict[str, Any] = dict(
        rows=rows,
        out=f"{name}.out_proj",
        norm=f"{name}.norm",
        rate=f"{name}.A_log",
        shift=f"{name}.dt_bias",
        width=c.hidden_size,
        **c.delta_sizes._asdict(),
        taps=c.linear_conv_kernel_dim,
        eps=c.rms_norm_eps,
        std=c.initializer_range,
        init=(LogUniform(low=0.01, high=16.0), ONES),
    )
    return GatedDelta(env, GatedDeltaSpec(**(usual | changes)))


def one_after_the_other(config: DeltaLayersConfig, name: str) -> tuple[RowsOfHeads, RowsOfHeads, RowsOfHeads]:
    """Queries, keys and values in one tensor: all heads of each, one kind after the other."""
    from phalanx.nn.gated_delta import RowsOfHeads

    s = config.delta_sizes
    of_keys = s.keys * s.key
    size = 2 * of_keys + s.values * s.value
    return (
        RowsOfHeads.whole(name, s.keys, s.key, 0, size),
        RowsOfHeads.whole(name, s.keys, s.key, of_keys, size),
        RowsOfHeads.whole(name, s.values, s.value, 2 * of_keys, size),
    )


def one_tensor_each(config: LinearLayersConfig, names: Sequence[str]) -> tuple[RowsOfHeads, RowsOfHeads, RowsOfHeads]:
    """Queries, keys and values in tensors of their own, of these names."""
    from phalanx.nn.gated_delta import RowsOfHeads

    (q, k, v), s = names, config.delta_sizes
    return (
        RowsOfHeads.whole(q, s.keys, s.key),
        RowsOfHeads.whole(k, s.keys, s.key),
        RowsOfHeads.whole(v, s.values, s.value),
    )


# ---- rules ---------------------------------------------------------------------------------------

SIZES = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")


def check_delta_layers(config: DeltaLayersConfig) -> list[Problem]:
    found = at_least("model", config, 1, *SIZES) + check_kinds_of_layers(config)
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if not found and values % keys:
        because, rule = {"model.linear_num_value_heads": values}, "must divide linear_num_value_heads"
        found.append(problem("model", config, "linear_num_key_heads", rule, because, divisors(keys, values)))
    return found


def check_kinds_of_layers(config: LinearLayersConfig) -> list[Problem]:
    found = at_least("model", config, 2, "linear_conv_kernel_dim")
    layers, kinds = config.num_hidden_layers, config.layer_types
    if kinds is not None and len(kinds) != layers >= 1:
        because = {"kinds": len(kinds), "model.num_hidden_layers": layers}
        whole = (kinds * layers)[:layers]
        valid = ((whole,) if whole else ()) + (None,)
        found.append(problem("model", config, "layer_types", "must have one kind per layer", because, valid))
    return found


def split_delta_heads(config: LinearLayersConfig, tp: int) -> list[Problem]:
    """What the heads of linear attention say; those of attention are every model's."""
    (keys, values, *_), (of_keys, of_values) = config.delta_sizes, config.heads_fields
    found = list[Problem]()
    if "linear_attention" not in config.types:
        return found
    valid = divisors(tp, values, config.num_attention_heads)
    if values % tp:
        found.append(Problem("layout.tp", tp, f"must divide {of_values}", {f"model.{of_values}": values}, valid))
    if keys != values and keys % tp and tp % keys:
        rule = f"must divide {of_keys} or be a multiple of it"
        found.append(Problem("layout.tp", tp, rule, {f"model.{of_keys}": keys}, valid))
    return found


# ---- config.json ---------------------------------------------------------------------------------

DELTA_FIELDS = (*SIZES, "linear_conv_kernel_dim")
DELTA_KEYS = {
    "layer_types": LIST_OR_NULL,
    "full_attention_interval": integer(4),
    "linear_num_key_heads": integer(16),
    "linear_num_value_heads": integer(32),
    "linear_key_head_dim": integer(128),
    "linear_value_head_dim": integer(128),
    "linear_conv_kernel_dim": integer(4),
}


def delta_fields(found: ConfigJson) -> dict[str, Any]:
    """Sizes of linear attention, and the kinds of layers unless they follow the family's pattern."""
    v, own = found.values, found.pick(*DELTA_FIELDS)
    layers, types, interval = v["num_hidden_layers"], v["layer_types"], v["full_attention_interval"]
    if types is None and interval < 1:
        found.odd.append(f"full_attention_interval={interval!r} (supported: 1 and more)")
        return own
    kinds = pattern(layers, interval) if types is None else tuple(types)
    check_kinds(found, kinds, "layer_types")
    usual = pattern(layers, found.config.period)
    return own if kinds == usual else {**own, "layer_types": kinds}


def check_kinds(found: ConfigJson, kinds: tuple[Any, ...], key: str) -> None:
    """Record kinds of layers that we do not have, with the layer's number, or too few."""
    layers, known = found.values["num_hidden_layers"], get_args(DeltaKind)
    bad = next((i for i, kind in enumerate(kinds) if kind not in known), None)
    if bad is not None:
        found.odd.append(f"{key}: layer {bad} is {kinds[bad]!r} (supported: {shown(known)})")
    elif len(kinds) != layers:
        found.odd.append(f"{key} has {len(kinds)} kinds (supported: one for each of {layers} layers)")


def delta_to_hf(config: DeltaLayersConfig) -> dict[str, Any]:
    return {**{name: getattr(config, name) for name in DELTA_FIELDS}, "layer_types": list(config.types)}


# ---- a small copy --------------------------------------------------------------------------------


def small_delta(config: DeltaLayersConfig, small: SmallSizes) -> dict[str, Any]:
    """Layers of both kinds stay; heads keep their relation to the ranks."""
    grouped = config.linear_num_key_heads < config.linear_num_value_heads
    return {
        "layer_types": small_types(config.types, small.layers),
        "linear_num_key_heads": small.kv_heads if grouped else small.heads,
        "linear_num_value_heads": small.heads,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 6,
        "linear_conv_kernel_dim": min(config.linear_conv_kernel_dim, 3),
    }


def delta_least_layers(config: LinearLayersConfig) -> int:
    """Layers until each kind has come once."""
    return max(config.types.index(kind) for kind in set(config.types)) + 1
