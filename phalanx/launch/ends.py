"""The time at which a scheduler will end the job that this process belongs to. Imports next to nothing, because
ranks read it first."""

from __future__ import annotations

from collections.abc import Mapping

ENDS_AT = "PHALANX_ENDS_AT"


def ends_at(env: Mapping[str, str]) -> float | None:
    """Unix time at which a scheduler ends this job, if it said so."""
    return float(env[ENDS_AT]) if env.get(ENDS_AT, "").isdigit() else None
