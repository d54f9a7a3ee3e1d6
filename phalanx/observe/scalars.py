"""The numbers of a row of metrics.jsonl, each under a name of its own, for trackers that know no tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from phalanx.engine.fp8_state import fp8_scalars, shadow_scalars
from phalanx.observe.routing import routing_scalars

# Tables whose entries have no names in the row.
TABLES: dict[str, Callable[[Any], dict[str, float]]] = {
    "experts": routing_scalars,
    "fp8": fp8_scalars,
    "fp8_shadow": shadow_scalars,
}


def scalars_of(values: Mapping[str, Any]) -> dict[str, float]:
    """Every number of a row under a name of its own: loss, valid/code, experts/load_max/layer-3,
    fp8/amax/weights/NAME, slow/rank-5."""
    return {name: value for name, value in _leaves(values) if isinstance(value, (int, float))}


def texts_of(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: value for name, value in _leaves(values) if isinstance(value, str)}


def _leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key in TABLES:
            yield from TABLES[key](value).items()
        elif key == "slow":
            yield from ((f"slow/rank-{rank}", ratio) for rank, ratio in value.items())
        elif isinstance(value, Mapping):
            yield from ((f"{key}/{name}", inner) for name, inner in value.items())
        elif key != "step":
            yield key, value
