"""Text of tokens that come one by one: characters whose bytes are not all there yet wait for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from phalanx.text.tokenizer_base import Tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder makes of bytes that are not a whole character
KEPT = 8  # tokens before a new one that are decoded with it: a decoder looks at its neighbours (white space, bytes)
WINDOW = 24  # so many, and those before the last KEPT are dropped


class Pieces:
    """Decodes a few tokens at a time, whatever the length of the text.

    context   tokens before the first one: their text is not shown, but the first piece continues it
    shown     special tokens whose names are part of the text; others are left out
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), shown: Collection[int] = ()):
        self._tokenizer = tokenizer
        self._skip = not shown
        self._hidden = set(tokenizer.special_tokens.values()) - set(shown) if shown else set()
        self._window = [token for token in context[-KEPT:] if token not in self._hidden]
        self._given = whole(self._text())

    def add(self, token: int) -> str:
        """What can be shown with this token that could not before."""
        if token in self._hidden:
            return ""
        self._window.append(token)
        more = self._beyond(whole(self._text()))
        if len(self._window) > WINDOW:
            del self._window[:-KEPT]
            self._given = whole(self._text())
        return more

    def rest(self) -> str:
        """What is left at the end."""
        return self._beyond(self._text())

    def _text(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip)

    def _beyond(self, text: str) -> str:
        more = text.removeprefix(self._given) if text.startswith(self._given) else ""
        self._given += more
        return more


def whole(text: str) -> str:
    """`text` without the bytes at its end that may become a character: a decoder shows one sign for all of them."""
    return text.removesuffix(UNFINISHED)
