"""The tokenizer that a config or a folder names, for those that may have none."""

from __future__ import annotations

import os

from phalanx.data.files import BYTES, NULL, TOKENIZER_FILES, tokenizer_file
from phalanx.text.tokenizer_base import Tokenizer


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """As `text/tokenizers.py`, which is imported here. DataError if there is no tokenizer."""
    from phalanx.text import tokenizers  # start-up time: the library of the same name

    return tokenizers.load_tokenizer(path)


def is_portable(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint can carry the files at `path` as they are; otherwise `save` must write them first."""
    name = os.fspath(path)
    if name == BYTES or name.startswith(NULL):
        return False
    return tokenizer_file(path).name in TOKENIZER_FILES if os.path.isdir(name) else name.endswith(".json")
