"""States of prefixes: what recurrent layers kept after a full page of a prompt, so that a prompt with the same
beginning goes on from there. On the host and without a device, as pages are (inference/pages.py).

A state is large and is in a sequence's row at its last token alone, so it is copied at few places: after the last full
page of a prompt, and where a prompt ends to be like one before it. A piece of the prompt ends at each of these, and the
step that computes it leaves a copy behind. The first prompt with a beginning leaves nothing amid it, the second one a
state where both part, and the third one begins there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from phalanx.inference.pages import PagePool

MOST_KEYS = 2**16  # of pages that were computed before; the longest unused are forgotten


class PrefixStates:
    """Which slot holds the state after which page, and which pages were computed before. Slots are numbered from 1."""

    def __init__(self, slots: int):
        self.pool = PagePool(1 + slots)
        self._computed: OrderedDict[bytes, None] = OrderedDict()

    def has(self, key: bytes) -> bool:
        """Whether there is a state after the page of this key."""
        return self.pool.find(key) is not None

    def use(self, key: bytes) -> int:
        """The slot with the state after a page, which stays until it is released."""
        slot = self.pool.find(key)
        if slot is None:
            raise ValueError("no state of the prefix is kept")
        self.pool.share(slot)
        return slot

    def computed(self, keys: Sequence[bytes]) -> int:
        """How many of a sequence's first pages another one has had too."""
        count = next((i for i, key in enumerate(keys) if key not in self._computed), len(keys))
        for key in keys[:count]:
            self._computed.move_to_end(key)
        return count

    def add_computed(self, key: bytes) -> None:
        self._computed[key] = None
        if len(self._computed) > MOST_KEYS:
            self._computed.popitem(last=False)

    def leave(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        """Slots for the states after these pages, as far as they are new and there are slots that nobody is to begin
        from."""
        found: dict[bytes, int] = {}
        for key in keys:
            if key not in found and not self.has(key) and self.pool.available:
                found[key] = self.pool.take()
        for key, slot in found.items():  # each has its own before any can be taken again
            self.pool.know(slot, key)
            self.pool.release(slot)
        return found
