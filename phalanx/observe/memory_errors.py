"""Running out of memory becomes an error whose text is the report of `out_of_memory.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from phalanx.base.errors import PhalanxError
from phalanx.comm.mesh import Mesh
from phalanx.observe.watched import Watched
from phalanx.planning.plan import Plan


class OutOfMemory(PhalanxError):
    """A device has too little memory for the run. The text is the report."""

    kind = ""


@contextmanager
def reported(plan: Plan, mesh: Mesh) -> Iterator[Watched]:
    """Convert running out of memory inside the context into OutOfMemory."""
    watched = Watched(plan, mesh)
    try:
        yield watched
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        from phalanx.observe.out_of_memory import report  # start-up time: most runs never need it

        raise OutOfMemory(report(error, watched)) from None


def is_out_of_memory(error: BaseException) -> bool:
    """torch has a class for GPUs and only a message for the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)
