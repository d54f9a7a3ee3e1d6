"""Which file says how images or recordings of a prompt become numbers: the processor the model was trained with."""

from __future__ import annotations

from pathlib import Path

from phalanx.base.errors import DataError
from phalanx.data.images import CONFIG


def processor_file(weights: Path | None, processor: str | None) -> str | None:
    """`processor` (data.processor of the run that trained the model), or else the one beside the weights; None if
    neither is there."""
    if processor is not None and Path(processor).exists():
        return processor
    beside = None if weights is None else weights / CONFIG
    return str(beside) if beside is not None and beside.is_file() else None


def check_found(weights: Path | None, processor: str | None) -> None:
    """The family's own processor serves a model that was trained with it. DataError if the run had another, which is
    gone."""
    if processor is not None:
        raise DataError(
            f"data.processor={processor}, by which the model was trained, is not there, and neither is a {CONFIG} "
            f"in {weights}: put it there"
        )
