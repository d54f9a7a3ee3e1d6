"""What the report of memory that ran out (`out_of_memory.py`) describes."""

from __future__ import annotations

from phalanx.base.dataclass import dataclass
from phalanx.comm.mesh import Mesh
from phalanx.engine.build import State
from phalanx.planning.plan import Plan


@dataclass
class Watched:
    """A run on this rank; `state` is set once it is built."""

    plan: Plan
    mesh: Mesh
    state: State | None = None
