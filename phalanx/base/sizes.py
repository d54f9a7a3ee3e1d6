"""Bytes as text for people: MiB below one GiB, GiB from there on."""

from __future__ import annotations

from phalanx.base.dataclass import dataclass


@dataclass(frozen=True)
class Unit:
    """A unit of bytes used for all numbers of a table."""

    name: str
    bytes: int

    def text(self, nbytes: float) -> str:
        """The number alone, with two decimals; `-` for none."""
        return f"{nbytes / self.bytes:.2f}" if nbytes else "-"


MIB = Unit("MiB", 2**20)
GIB = Unit("GiB", 2**30)


def unit_for(largest: float) -> Unit:
    """The unit of a table whose largest number of bytes is this."""
    return GIB if largest >= GIB.bytes else MIB


def size_text(nbytes: float) -> str:
    """A size such as `1.50 GiB` or `12.0 MiB`."""
    return f"{nbytes / 2**30:,.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.1f} MiB"
