"""Ids of texts, word by word: each distinct word is encoded once by its tokenizer and remembered.

Exact wherever words are encoded independently of each other, which `splitter` knows for the usual ways to split. Words
repeat, so most of a text costs one regular expression and one look-up a word (measured: benchmarks/prepare.py).
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

SPACE = r" \t\n\v\f\r"
ASCII_CLASSES = {  # the ASCII members of the classes that patterns use
    r"\p{L}": "A-Za-z",
    r"\p{Lu}": "A-Z",
    r"\p{Ll}": "a-z",
    r"\p{N}": "0-9",
    r"\p{Lt}": "",
    r"\p{Lm}": "",
    r"\p{Lo}": "",
    r"\p{M}": "",
    r"\s": SPACE,
}
# Published ways to split, as spelled in tokenizer.json. CL100K is what tiktoken 0.14 does: white space at the very end
# stays whole.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
CL100K = LLAMA3.replace(r"|\s*[\r\n]+", r"|\s+\z|\s*[\r\n]+")
CAPITAL, SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    r"[^\r\n\p{L}\p{N}]?"
    + CAPITAL
    + "*"
    + SMALL
    + "+"
    + SHORT
    + r"?|[^\r\n\p{L}\p{N}]?"
    + CAPITAL
    + "+"
    + SMALL
    + "*"
    + SHORT
    + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = (GPT2, LLAMA3, QWEN2, CL100K, O200K)
BERT = rf"[!-/:-@\[-`{{-~]|[^{SPACE}!-/:-@\[-`{{-~]+|[{SPACE}]+"  # white space becomes no token

# Words never continue over a space that follows something that is certainly not white space: the usual patterns include
# a space only at the beginning of a word.
BORDER = re.compile(r" (?<=[\w!-~] )")
WINDOW = 1 << 20  # characters processed together, so that a long document does not become a list of all its words
LONGEST = 64  # characters of a word worth remembering
MOST = 1 << 18  # words remembered, about 40 MB; then all are dropped, since a text may have changed to another language


class Words(dict[str, bytes]):
    """word -> its ids as bytes of `dtype`; `encode` encodes words that are not there yet."""

    def __init__(self, encode: Callable[[str], Sequence[int]], split: Callable[[str], list[str]], dtype: np.dtype[Any]):
        super().__init__()
        self._encode, self._split, self._code = encode, split, {"uint16": "H", "int32": "i"}[dtype.name]

    def __missing__(self, word: str) -> bytes:
        ids = array(self._code, self._encode(word)).tobytes()
        if len(word) <= LONGEST:
            if len(self) >= MOST:
                self.clear()
            self[word] = ids
        return ids

    def ids(self, text: str) -> bytes:
        """Ids of a text, as bytes."""
        get = self.__getitem__
        if len(text) <= WINDOW:
            return b"".join(map(get, self._words(text)))
        return b"".join(b"".join(map(get, self._words(window))) for window in windows(text))

    def _words(self, text: str) -> list[str]:
        """The words of a text. If it contains more than ASCII, several words may come together."""
        if text.isascii():
            return self._split(text)
        first, *others = BORDER.split(text)
        found: list[str] = []
        for ascii_only, run in groupby([first, *(" " + other for other in others)], str.isascii):
            chunks = list(run)
            found += self._split("".join(chunks)) if ascii_only else chunks
        return found


def windows(text: str) -> Iterator[str]:
    """Pieces of a text of about WINDOW characters that end where words do."""
    start = 0
    while len(text) - start > WINDOW and (border := BORDER.search(text, start + WINDOW)):
        yield text[start : border.start()]
        start = border.start()
    yield text[start:]


def splitter(normalizer: Any, pre_tokenizer: Any) -> Callable[[str], list[str]] | None:
    """The function that splits an ASCII text into words, given two sections of a tokenizer.json; None if words cannot
    be encoded separately.

    NFC changes no ASCII and joins nothing to a space; other normalizers could. What follows a space may change its
    word, so a way to split that is not known here is not used.
    """
    if normalizer is not None and normalizer.get("type") != "NFC":
        return None
    kind = pre_tokenizer or {}
    if kind.get("type") == "BertPreTokenizer":
        return re.compile(BERT).findall
    if kind.get("type") == "WhitespaceSplit":
        return re.compile(rf"[^{SPACE}]+").findall
    pattern = _byte_level_pattern(kind)
    return re.compile(ascii_pattern(pattern)).findall if pattern in PATTERNS else None


def _byte_level_pattern(kind: dict[str, Any]) -> str | None:
    """GPT-2's pattern of a ByteLevel, or the pattern of a Split in front of a ByteLevel that does not split."""
    steps = kind.get("pretokenizers", [kind])
    last = steps[-1]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if len(steps) == 1:
        return GPT2 if last.get("use_regex", True) else None
    split = steps[0]
    if len(steps) != 2 or last.get("use_regex", True) or split.get("type") != "Split":
        return None
    if split.get("behavior") != "Isolated" or split.get("invert"):
        return None
    return split.get("pattern", {}).get("Regex")


def ascii_pattern(pattern: str) -> str:
    """One of PATTERNS for Python's `re`, equal to it on ASCII text."""
    out, inside = "", False
    for item in re.findall(r"\\p\{\w+\}|\\.|.", pattern):
        inside = item == "[" or (inside and item != "]")
        if item in ASCII_CLASSES:
            out += ASCII_CLASSES[item] if inside else f"[{ASCII_CLASSES[item]}]"
        else:
            out += {r"\S": f"[^{SPACE}]", r"\z": r"\Z"}.get(item, item)
    return out
