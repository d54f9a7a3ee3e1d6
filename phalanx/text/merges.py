"""tiktoken's rank files (lines of a token's bytes in base64 and its rank), converted to a tokenizer of the `tokenizers`
library.

The two merge alike: always the pair of neighbours whose bytes together have the lowest rank; and a word that is a token
stays whole.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from pathlib import Path
from typing import Any

import tokenizers

from phalanx.base.errors import DataError
from phalanx.text.words import CL100K, GPT2, O200K

LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
P50K = {"<|endoftext|>": 50256}
CL100K_SPECIAL = {
    "<|endoftext|>": 100257,
    "<|fim_prefix|>": 100258,
    "<|fim_middle|>": 100259,
    "<|fim_suffix|>": 100260,
    "<|endofprompt|>": 100276,
}
ENCODINGS: dict[
    str, tuple[str, dict[str, int]]
] = {  # by the name of the file: how text is split, and the special tokens
    "r50k_base": (GPT2, P50K),
    "p50k_base": (GPT2, P50K),
    "cl100k_base": (CL100K, CL100K_SPECIAL),
    "o200k_base": (O200K, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}


def is_ranks(head: bytes) -> bool:
    """Whether a file that begins so is a rank file."""
    return LINE.match(head) is not None


def from_ranks(path: Path, characters: dict[int, str]) -> tuple[tokenizers.Tokenizer, str | None]:
    """(tokenizer, end-of-document token or None) from a rank file. `characters`: the character for each byte in
    byte-level vocabularies.

    How text is split is not in the file. For the encodings above it is known; for others it is read from FILE.json
    beside it: {"pattern": REGEX, "special_tokens": {NAME: ID}, "eod": NAME}.
    """
    ranks = read_ranks(path)
    pattern, special, eod = _split_and_special(path)
    if taken := [name for name, i in special.items() if i in ranks.values()]:
        raise DataError(
            f"{path}: its special token {taken[0]} has the id {special[taken[0]]}, which is a token of the file"
        )
    names = {token: "".join(characters[byte] for byte in token) for token in ranks}
    merges = [
        (names[left], names[right])
        for token in sorted(ranks, key=ranks.__getitem__)
        for left, right in _halves(token, ranks)
    ]
    vocab = {**{names[token]: rank for token, rank in ranks.items()}, **special}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "ignore_merges": True, "vocab": vocab, "merges": merges}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added: list[dict[str, Any]] = [
        {
            "id": i,
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for name, i in sorted(special.items(), key=lambda item: item[1])
    ]
    whole = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "decoder": level,
    }
    try:
        return tokenizers.Tokenizer.from_str(json.dumps({**whole, "model": model})), eod
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{path}: no tokenizer can be made of it: {error}") from None


def read_ranks(path: Path) -> dict[bytes, int]:
    """token -> rank. DataError with the line that is wrong, or unless all 256 bytes are tokens."""
    ranks: dict[bytes, int] = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error):
                raise DataError(
                    f"{path}: line {number}: expected a token in base64 and its rank, found {line[:40]!r}"
                ) from None
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise DataError(f"{path}: the byte {missing[0]:#04x} is no token of it: cut short, or no byte-level encoding")
    return ranks


def _halves(token: bytes, ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """All pairs of tokens that make up this one."""
    return [(token[:n], token[n:]) for n in range(1, len(token)) if token[:n] in ranks and token[n:] in ranks]


def _split_and_special(path: Path) -> tuple[str, dict[str, int], str | None]:
    beside = path.with_name(path.name + ".json")
    if not beside.exists():
        if path.stem not in ENCODINGS:
            raise DataError(
                f"{path}: how this encoding splits text is not in the file, and it is none of {', '.join(ENCODINGS)}: "
                f'write {beside.name} beside it with {{"pattern": REGEX, "special_tokens": {{NAME: ID}}, "eod": NAME}}'
            )
        return *ENCODINGS[path.stem], None
    try:
        note = json.loads(beside.read_text(encoding="utf-8"))
        pattern, special, eod = (
            str(note["pattern"]),
            {str(name): int(i) for name, i in note.get("special_tokens", {}).items()},
            note.get("eod"),
        )
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataError(
            f'{beside}: expected {{"pattern": REGEX, "special_tokens": {{NAME: ID}}, "eod": NAME}}: {error!r}'
        ) from None
    if eod is not None and eod not in special:
        raise DataError(f"{beside}: eod {eod!r} is none of its special_tokens: {', '.join(special)}")
    return as_onig(pattern), special, eod


def as_onig(pattern: str) -> str:
    r"""A pattern of tiktoken's for the engine of `tokenizers`, to which `{1,3}+` is no possessive quantifier and `$`
    ends a line."""
    pattern = re.sub(r"(\{\d+(?:,\d*)?\})\+", r"\1", pattern)
    return "".join(
        r"\z" if item == "$" else item for item in re.findall(r"\\.|\[(?:\\.|[^\]])*\]|.", pattern, re.DOTALL)
    )
