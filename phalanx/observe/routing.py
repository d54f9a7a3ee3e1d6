"""A step's routing by layer: from the sums over ranks to the numbers in the step line and the report."""

from __future__ import annotations

from typing import Any

from phalanx.nn.moe import TALLIED


def routing_values(rows: list[list[float]]) -> dict[str, list[float | None]]:
    """By layer (None for layers without experts), from rows as in StepResult.routing:

    load_max, load_min  tokens of the fullest and the emptiest expert, over the mean
    entropy             nats of the router's probabilities, mean over tokens
    dropped             (token, expert) pairs dropped because their expert was full
    missing             pairs for which the expert's rank had no room: the step was repeated (layout.expert_room)
    balance, z          the losses before their coefficients
    """
    found: dict[str, list[float | None]] = {
        k: [] for k in ("load_max", "load_min", "entropy", "dropped", "missing", "balance", "z")
    }
    for row in rows:
        load, sums = row[: -len(TALLIED)], dict(zip(TALLIED, row[-len(TALLIED) :]))
        tokens, mean = sums["tokens"], sum(load) / len(load)
        made: dict[str, float | None] = dict.fromkeys(found)
        if tokens:
            made = {
                "load_max": max(load) / mean,
                "load_min": min(load) / mean,
                "dropped": sums["dropped"],
                "missing": sums["missing"],
            }
            made |= {k: sums[k] / tokens for k in ("entropy", "balance", "z")}
        for key, values in found.items():
            values.append(made[key])
    return found


def routing_text(values: dict[str, list[Any]]) -> str:
    """The end of a step line: the fullest expert, the smallest entropy (with their layers), all dropped pairs, and
    those that caused the step to be repeated."""
    layers = [i for i, v in enumerate(values["load_max"]) if v is not None]
    full = max(layers, key=lambda i: values["load_max"][i])
    sure = min(layers, key=lambda i: values["entropy"][i])
    dropped, missing = (sum(int(values[k][i]) for i in layers) for k in ("dropped", "missing"))
    rerun = f" again={missing}" if missing else ""
    return (
        f" load={values['load_max'][full]:.2f}@layer{full} "
        f"entropy={values['entropy'][sure]:.3g}@layer{sure} dropped={dropped}{rerun}"
    )


def routing_scalars(values: dict[str, list[float | None]]) -> dict[str, float]:
    """Each number of `routing_values` by name: experts/load_max/layer-3."""
    return {
        f"experts/{key}/layer-{i}": v for key, layers in values.items() for i, v in enumerate(layers) if v is not None
    }
