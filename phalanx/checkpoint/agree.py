"""agree: a step that all ranks must take together. If it fails on one rank, every rank raises the same error instead of
waiting for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from safetensors import SafetensorError

from phalanx.base.errors import CheckpointError, DamagedCheckpoint, PeerLost, PhalanxError
from phalanx.comm.axis import Axis

T = TypeVar("T")


def agree(axis: Axis, work: Callable[[], Any]) -> list[Any]:
    """Run `work` on every rank of the axis and give each rank all results (JSON values), in rank order.

    Raises CheckpointError on every rank if `work` failed on any of them: DamagedCheckpoint if all failures were damage.
    PeerLost if what arrived is not an answer. Errors other than those of users and of the disk are bugs, and keep their
    type on their own rank.
    """
    failure: Exception | None = None
    try:
        answer = {"result": work()}
    except PeerLost:
        raise  # the other ranks cannot be informed
    except Exception as error:
        failure, answer = (
            error,
            {"error": str(error) or type(error).__name__, "damaged": isinstance(error, DamagedCheckpoint)},
        )
    try:
        answers = [json.loads(text) for text in axis.all_gather_text(json.dumps(answer))]
    except ValueError as error:  # no rank sends anything unreadable, so these bytes are something else
        raise PeerLost(
            f"what the ranks of {axis.name} told each other cannot be read: one of them went another way ({error})"
        ) from error
    errors = {rank: a["error"] for rank, a in zip(axis.ranks, answers) if "error" in a}
    if failure is not None and not isinstance(failure, (PhalanxError, OSError, SafetensorError)):
        raise failure
    if errors:
        damaged = all(a["damaged"] for a in answers if "error" in a)
        raise (DamagedCheckpoint if damaged else CheckpointError)(_text(errors, axis.size)) from failure
    return [a["result"] for a in answers]


def together(axis: Axis, work: Callable[[], T]) -> T:
    """This rank's own result of `work` (any value), once it has succeeded on every rank."""
    made: list[T] = []
    agree(axis, lambda: made.append(work()))
    return made[0]


def _text(errors: dict[int, str], size: int) -> str:
    """One message for an error that all ranks share; otherwise each line says whose it is."""
    if len(errors) == size and len(set(errors.values())) == 1:
        return next(iter(errors.values()))
    shown = [f"rank {rank}: {text}" for rank, text in list(errors.items())[:4]]
    more = len(errors) - len(shown)
    return "\n".join(shown + ([f"and {more} more ranks"] if more else []))
