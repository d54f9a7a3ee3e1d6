"""SentencePiece models (Kudo & Richardson, 2018), through the library that made them."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from phalanx.base.errors import DataError
from phalanx.data.files import extra, replacing
from phalanx.text.tokenizer_base import Tokenizer

FILE = "tokenizer.model"
WIDE = "\N{SNOWMAN}"  # a character of several bytes


class SentencePieceTokenizer(Tokenizer):
    """A .model file. What it changes in a text (such as white space) is part of the model: not every text comes back
    exactly."""

    kind = "sentencepiece"

    def __init__(self, model: bytes, path: str = FILE):
        library = extra("sentencepiece", "a SentencePiece tokenizer needs", "sentencepiece")
        self._core: Any = library.SentencePieceProcessor()
        try:
            self._core.LoadFromSerializedProto(model)
        except Exception as error:  # the library raises RuntimeError, or TypeError for nothing at all
            raise DataError(f"{path}: neither a SentencePiece model nor a file of tiktoken ranks: {error}") from None
        # its name in version 0.2.0, and in later ones, which count bytes
        self._with_places = getattr(self._core, "EncodeAsImmutableProto", None) or self._core.EncodeAsProto
        self._counts_bytes = max((piece.end for piece in self._with_places(WIDE).pieces), default=1) > len(WIDE)
        self._model, size = model, self._core.GetPieceSize()
        special = {
            self._core.IdToPiece(i): i for i in range(size) if self._core.IsControl(i) or self._core.IsUnknown(i)
        }
        eod = self._core.eos_id() if self._core.eos_id() >= 0 else None
        super().__init__(size, eod, special, hashlib.sha256(model).hexdigest())
        self.eod_token = None if eod is None else self._core.IdToPiece(eod)

    def __reduce__(self) -> tuple[Any, ...]:
        return SentencePieceTokenizer, (self._model,)

    def encode(self, text: str) -> list[int]:
        return self._core.Encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._core.Encode(list(texts), num_threads=1)

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids, offsets, at = list[int](), list[tuple[int, int]](), 0
        names = sorted(self.special_tokens, key=len, reverse=True)
        for part in re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]:
            if part in self.special_tokens:
                ids.append(self.special_tokens[part])
                offsets.append((at, at + len(part)))
            elif part:
                pieces = self._with_places(part).pieces
                ids += [piece.id for piece in pieces]
                to_character = self._characters(part)
                offsets += [(at + to_character[piece.begin], at + to_character[piece.end]) for piece in pieces]
            at += len(part)
        return ids, offsets

    def _characters(self, text: str) -> Sequence[int]:
        """The character at each place that the library counts, and the end."""
        if not self._counts_bytes:
            return range(len(text) + 1)
        return [i for i, character in enumerate(text) for _ in character.encode()] + [len(text)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text = ""
        for control, run in groupby(ids, self._core.IsControl):
            if not control:
                text += self._core.Decode(list(run))
            elif not skip_special_tokens:
                text += "".join(map(self._core.IdToPiece, run))
        return text

    def token_name(self, token: int) -> str:
        return self._core.IdToPiece(token)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write tokenizer.model. No tokenizer_config.json: what transformers makes of such a file gives other ids
        (docs/data.md)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / FILE) as file:
            file.write(self._model)
        return folder
