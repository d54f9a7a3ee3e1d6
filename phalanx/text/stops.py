"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a text before the first stop string, wherever token borders are: of several the one that is complete
    first. What may be the beginning of one is held back.

    found   the stop string that has come, if one has
    """

    def __init__(self, texts: Sequence[str] = ()):
        self._texts = tuple(text for text in texts if text)
        self._held = ""
        self.found: str | None = None

    def add(self, text: str) -> str:
        """What is certain to be text; nothing after a stop string."""
        if self.found is not None:
            return ""
        self._held += text
        ends = [(at + len(stop), at, stop) for stop in self._texts if (at := self._held.find(stop)) >= 0]
        if ends:
            _, at, self.found = min(ends)
            given, self._held = self._held[:at], ""
            return given
        keep = max((overlap(self._held, stop) for stop in self._texts), default=0)
        given, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return given

    def rest(self) -> str:
        """What was held back, at the end of the text: it was no stop string after all."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that begin `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
