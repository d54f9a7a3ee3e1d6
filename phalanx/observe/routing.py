"""What a step's routing looked like, layer by layer: from the sums that ranks tell each other to the numbers of log
line and report."""

from __future__ import annotations

from typing import Any

from phalanx.nn.moe import TALLIED


def routing_values(rows: list[list[float]]) -> dict[str, list[float | None]]:
    """Per layer (None where it has no experts), of rows as in StepResult.routing:

    load_max, load_min  tokens of the fullest and the emptiest expert, over the mean
    entropy             nats of the router's probabilities, mean over tokens
    dropped             (token, expert) pairs that found no room
    missing             pairs that found no room with the expert's rank: the step was done again (layout.expert_room)
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
    """The end of a step line: the fullest expert, the least entropy (with their layers), all dropped pairs, and
    those for which the step was done again."""
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
    """Of `routing_values`, each number by its name: experts/load_max/layer-3."""
    return {
        f"experts/{key}/layer-{i}": v for key, layers in values.items() for i, v in enumerate(layers) if v is not None
    }
