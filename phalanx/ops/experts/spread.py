"""How experts are assigned to ranks. Also the buffers through which tokens travel."""

from __future__ import annotations

import math

from phalanx.base.dataclass import dataclass
from phalanx.comm.axis import SwappedRows
from phalanx.comm.symmetric import PushedRows

Buffers = SwappedRows | PushedRows


@dataclass(frozen=True)
class Spread:
    """`here` experts on each rank, in order; each expert sharded over `etp` consecutive ranks; `ranks` in all, of which
    this one is `index`."""

    here: int
    etp: int
    ranks: int
    index: int

    @property
    def first(self) -> int:
        """The first expert on this rank."""
        return self.index // self.etp * self.here

    def share(self, slots: int) -> float:
        """The fraction of tokens that need a given rank, if each has `slots` different experts that are equally likely:
        1 - C(E - here, K) / C(E, K)."""
        count = self.ranks // self.etp * self.here
        return 1.0 - math.comb(count - self.here, slots) / math.comb(count, slots)
