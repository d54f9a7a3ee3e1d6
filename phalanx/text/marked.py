"""How a text that stands by itself begins and ends: with the tokenizer's token for classes ([CLS]), if it has one, and
with its separator ([SEP]) or its end of document. Classes and embeddings are of such texts."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.text.tokenizer_base import Tokenizer
from phalanx.text.tokenizers import load_tokenizer
from phalanx.text.vocabulary import roles_of


@dataclass(frozen=True)
class TextMarks:
    tokenizer: Tokenizer
    opening: tuple[int, ...]
    closing: tuple[int, ...]

    @classmethod
    def of(cls, path: str) -> TextMarks:
        """Of the tokenizer at a path."""
        tokenizer = load_tokenizer(path)
        roles = roles_of(tokenizer, path)
        end = roles.get("sep", tokenizer.eod)
        return cls(tokenizer, (roles["cls"],) if "cls" in roles else (), () if end is None else (end,))

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """The ids of a text. Of one that has more than `most`, the end is left out, but not the closing token."""
        return self.around(self.tokenizer.encode(text), most)

    def around(self, ids: list[int], most: int | None = None) -> list[int]:
        """The same of the ids of a text without its marks."""
        room = len(ids) if most is None else max(0, most - len(self.opening) - len(self.closing))
        return [*self.opening, *ids[:room], *self.closing]
