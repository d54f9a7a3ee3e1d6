"""What every tokenizer can do. `tokenizers` and `sentencepieces` implement the kinds."""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.base.errors import DataError
from phalanx.data.index import optimal_dtype

TYPECODES = {"uint16": "H", "int32": "i"}
ROUND = 128  # models often round their vocabulary up to this


class Tokenizer:
    """Text to ids and back. Text is only text: the name of a special token inside it does not become that token.

    kind            json, bytes, null or sentencepiece
    vocab_size      the largest id plus one
    eod, eod_token  the end-of-document token, or None if the tokenizer has none
    special_tokens  name -> id
    fingerprint     SHA-256 of the data that defines it
    dtype           in which Megatron stores ids of this vocabulary
    """

    kind: str
    eod_token: str | None

    def __init__(self, vocab_size: int, eod: int | None, special_tokens: dict[str, int], fingerprint: str):
        self.vocab_size, self.eod, self.special_tokens, self.fingerprint = vocab_size, eod, special_tokens, fingerprint
        self.dtype = optimal_dtype(vocab_size)

    def encode(self, text: str) -> list[int]:
        """Ids of a text. DataError if the vocabulary lacks something in it."""
        raise NotImplementedError

    def encode_with_special(self, text: str) -> list[int]:
        """Ids of a text in which the names of special tokens mean those tokens: what a chat template wrote, or a
        prompt that somebody composed of them. DataError as of `encode`."""
        ids: list[int] = []
        names = sorted(self.special_tokens, key=len, reverse=True)
        for piece in re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]:
            if piece in self.special_tokens:
                ids.append(self.special_tokens[piece])
            elif piece:
                ids += self.encode(piece)
        return ids

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """As `encode_with_special`, with the characters that each token stands for: from, and up to."""
        raise NotImplementedError

    def encode_whole(self, text: str) -> list[int]:
        """As `encode_with_special`, with the tokens that tokenizer.json puts around a text, such as one before it."""
        return self.encode_with_special(text)

    def token_name(self, token: int) -> str:
        """How the vocabulary writes a token. IndexError for an id that it lacks."""
        raise NotImplementedError

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_raw(self, texts: Sequence[str]) -> list[bytes]:
        """Ids of each text as bytes of `dtype`: what token files hold. The fastest way."""
        code = TYPECODES[self.dtype.name]
        return [array(code, ids).tobytes() for ids in self.encode_batch(texts)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        raise NotImplementedError

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the files that `load_tokenizer` and, where it can, `transformers.AutoTokenizer` read; returns the
        folder."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """What a manifest says about it."""
        padded = -(-self.vocab_size // ROUND) * ROUND
        return {
            "kind": self.kind,
            "vocab_size": self.vocab_size,
            "padded_vocab_size": padded,
            "eod": self.eod,
            "special_tokens": self.special_tokens,
        }


def tokens_before(tokenizer: Tokenizer) -> list[int]:
    """The tokens that the tokenizer puts before a text."""
    try:
        whole, plain = tokenizer.encode_whole("a"), tokenizer.encode_with_special("a")
    except DataError:  # one that has no letters
        return []
    return next((whole[:at] for at in range(len(whole)) if whole[at : at + len(plain)] == plain), [])
