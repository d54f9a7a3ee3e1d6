"""How experts are spread over ranks, and the buffers that tokens are written to on their way."""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.comm.axis import SwappedRows
from phalanx.comm.symmetric import PushedRows

Buffers = SwappedRows | PushedRows


@dataclass(frozen=True)
class Spread:
    """`here` experts on each rank, in order; each expert cut over `etp` ranks that follow each other; `ranks` in
    all, this one is `index`."""

    here: int
    etp: int
    ranks: int
    index: int

    @property
    def first(self) -> int:
        """The first expert here."""
        return self.index // self.etp * self.here

    def share(self, slots: int) -> float:
        """Of tokens with `slots` different experts, each as likely, those that need a given rank: 1 - C(E - here, K)
        / C(E, K)."""
        count = self.ranks // self.etp * self.here
        return 1.0 - math.comb(count - self.here, slots) / math.comb(count, slots)
