"""How a text that stands by itself begins and ends: with the tokenizer's token for classes ([CLS]), if it has one, and
with its separator ([SEP]) or its end of document. Classes and embeddings are of such texts."""

from __future__ import annotations

import json
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.text.tokenizer import load_tokenizer
from phalanx.text.tokenizer_base import Tokenizer
from phalanx.text.vocabulary import roles_of

PROBE = "a"


@dataclass(frozen=True)
class TextMarks:
    """The ids that a tokenizer puts around a text: `opening` before it, `closing` after it."""

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

    def written_into(self, tokenizer_json: bytes) -> bytes:
        """A tokenizer.json that puts the same tokens around a text as `encode`, for programs that go by it. One that
        does so already stays as it is."""
        if self.tokenizer.encode_whole(PROBE) == self.encode(PROBE):
            return tokenizer_json
        names = {number: name for name, number in self.tokenizer.special_tokens.items()}
        around = [[names[token] for token in tokens] for tokens in (self.opening, self.closing)]
        opening, closing = ([{"SpecialToken": {"id": name, "type_id": 0}} for name in part] for part in around)
        used = {name: self.tokenizer.special_tokens[name] for part in around for name in part}
        text, other = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        template = {
            "type": "TemplateProcessing",
            "single": [*opening, text, *closing],
            "pair": [*opening, text, *closing, other, *closing],
            "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in used.items()},
        }
        stated = json.loads(tokenizer_json)
        kept = [each for each in _processors(stated.get("post_processor")) if each["type"] == "ByteLevel"]
        stated["post_processor"] = {"type": "Sequence", "processors": [*kept, template]} if kept else template
        return json.dumps(stated, ensure_ascii=False).encode()


def _processors(stated: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a post-processor."""
    if stated is None:
        return []
    return stated["processors"] if stated["type"] == "Sequence" else [stated]
