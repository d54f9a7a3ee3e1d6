"""Tokens one by one as text and bytes, as log-probabilities are shown with them."""

from __future__ import annotations

import re
from functools import lru_cache

from phalanx.text.pieces import UNFINISHED
from phalanx.text.tokenizer_base import Tokenizer
from phalanx.text.tokenizers import byte_characters

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
CACHED = 200_000


class TokenTexts:
    """Text of single tokens, as it stands in the middle of a text."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._bytes = {character: byte for byte, character in byte_characters().items()}
        self._anchor = tokenizer.encode("a")  # some decoders drop the white space that a text begins with
        self._before = tokenizer.decode(self._anchor)
        self.text = lru_cache(CACHED)(self._text)

    def bytes_of(self, token: int) -> list[int] | None:
        """UTF-8 of its text, or of the part of a character that it is; None if there is no telling."""
        text = self._decoded(token)
        if UNFINISHED not in text:
            return list(text.encode())
        try:
            name = self._tokenizer.token_name(token)
        except IndexError:
            return None
        if found := BYTE.fullmatch(name):
            return [int(found[1], 16)]
        return [self._bytes[c] for c in name] if all(c in self._bytes for c in name) else None

    def _text(self, token: int) -> str:
        """`bytes:\\xNN` if it is no whole character, as OpenAI writes it."""
        text = self._decoded(token)
        if UNFINISHED not in text:
            return text
        raw = self.bytes_of(token)
        return text if raw is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _decoded(self, token: int) -> str:
        together = self._tokenizer.decode([*self._anchor, token])
        if together.startswith(self._before):
            return together[len(self._before) :]
        return self._tokenizer.decode([token])


class TokenNumbers:
    """For a model without a tokenizer: a token is called `token_id:N`."""

    def text(self, token: int) -> str:
        return f"token_id:{token}"

    def bytes_of(self, token: int) -> None:
        return None
