"""What a task's transform of samples must know about the ids of a tokenizer: which stand for text, what special tokens
are for, where words begin."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.base.errors import DataError
from phalanx.data.config import DataConfig
from phalanx.data.files import tokenizer_file
from phalanx.models.model_config import ModelConfig
from phalanx.sequence.sample import SampleFacts, Vocabulary
from phalanx.text.tokenizer import load_tokenizer
from phalanx.text.tokenizer_base import Tokenizer

# what special tokens are for, and their usual names, for tokenizers whose tokenizer_config.json does not say
ROLES = {
    "mask": ("[MASK]", "<mask>", "<|mask|>", "<MASK>"),
    "cls": ("[CLS]", "<s>", "<|cls|>"),
    "sep": ("[SEP]", "</s>", "<|sep|>"),
    "pad": ("[PAD]", "<pad>", "<|pad|>", "<|padding|>"),
    "fim_prefix": ("<fim_prefix>", "<|fim_prefix|>", "<PRE>", "▁<PRE>", "<fim-prefix>"),
    "fim_middle": ("<fim_middle>", "<|fim_middle|>", "<MID>", "▁<MID>", "<fim-middle>"),
    "fim_suffix": ("<fim_suffix>", "<|fim_suffix|>", "<SUF>", "▁<SUF>", "<fim-suffix>"),
    "eos": ("</s>", "<|endoftext|>", "<eos>", "[EOS]", "<|end_of_text|>"),
}
MOCK_SENTINELS = 100  # of the vocabulary of mock tokens, as many as T5 has
SPACES = ("Ġ", "Ċ", "▁", "ĉ", "č", " ")  # how byte-level vocabularies and SentencePiece write white space


def sample_facts(data: DataConfig, model: ModelConfig, *, seq_length: int, seed: int) -> SampleFacts:
    """What a task's transform of this data may know. Its vocabulary is read when it is asked for."""
    read = partial(vocabulary_of_data, data, model.vocab_size)
    return SampleFacts(seed, seq_length, read, model.decoder_start, data.room)


def vocabulary_of_data(data: DataConfig, vocab_size: int) -> Vocabulary:
    """That of data.tokenizer. Mock tokens are all text but the last ids, which stand for the special tokens. DataError
    for data without a tokenizer."""
    if data.tokenizer is not None:
        return vocabulary_of(data.tokenizer, vocab_size)
    if not data.mock:
        raise DataError("data.tokenizer is required by the task: name the tokenizer that made the token files")
    roles = {name: vocab_size - 1 - i for i, name in enumerate(ROLES) if vocab_size > len(ROLES)}
    text = vocab_size - len(roles)
    sentinels = {f"<extra_id_{i}>": text - 1 - i for i in range(min(MOCK_SENTINELS, text // 4))}
    return Vocabulary(vocab_size, np.arange(text - len(sentinels)), sentinels, roles, source="data.mock")


def vocabulary_of(path: str, vocab_size: int) -> Vocabulary:
    """Of the tokenizer at a path, for a model with `vocab_size` ids."""
    tokenizer = load_tokenizer(path)
    special = np.fromiter(tokenizer.special_tokens.values(), np.int64)
    text = np.setdiff1d(np.arange(min(tokenizer.vocab_size, vocab_size)), special)
    continues, leaves_open = _word_borders(tokenizer, text, vocab_size) or (None, None)
    roles, source = roles_of(tokenizer, path), f"data.tokenizer {path}"
    return Vocabulary(vocab_size, text, tokenizer.special_tokens, roles, continues, leaves_open, source)


def roles_of(tokenizer: Tokenizer, path: str) -> dict[str, int]:
    """The special tokens that tokenizer_config.json names; else those with a usual name."""
    stated = _tokenizer_config(path)
    found = dict[str, int]()
    for role, usual in ROLES.items():
        named = stated.get(f"{role}_token")
        named = named.get("content") if isinstance(named, dict) else named
        for name in (named,) if isinstance(named, str) else usual:
            if name in tokenizer.special_tokens:
                found[role] = tokenizer.special_tokens[name]
                break
    return found


def _tokenizer_config(path: str) -> dict[str, Any]:
    if not Path(path).exists():  # `bytes` and `null:N`, which are no files
        return {}
    beside = tokenizer_file(path).with_name("tokenizer_config.json")
    try:
        found = json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {}
    except ValueError as error:
        raise DataError(f"{beside}: not a tokenizer_config.json: {error}") from None
    return found if isinstance(found, dict) else {}


def _word_borders(
    tokenizer: Tokenizer, text: NDArray[np.int64], size: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]] | None:
    """Vocabulary.continues and leaves_open. WordPiece marks the pieces that continue a word (##). Byte-level BPE and
    SentencePiece mark white space: a word goes on from letter to letter. None if pieces are marked in neither way."""
    names = {int(token): _name(tokenizer, int(token)) for token in text}
    continues, leaves_open = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
    if any(name.startswith("##") and len(name) > 2 for name in names.values()):
        leaves_open[text] = True
        for token, name in names.items():
            continues[token] = name.startswith("##")
        return continues, leaves_open
    if not any(name[:1] in SPACES and len(name) > 1 for name in names.values()):
        return None
    for token, name in names.items():
        continues[token] = _is_letter(name[:1])
        leaves_open[token] = _is_letter(name[-1:]) or name[-1:] in SPACES  # a space may be a piece of its own
    return continues, leaves_open


def _name(tokenizer: Tokenizer, token: int) -> str:
    try:
        return tokenizer.token_name(token)
    except IndexError:  # a hole in the vocabulary
        return ""


def _is_letter(character: str) -> bool:
    """Letters, digits, and the signs by which byte-level vocabularies write parts of letters beyond ASCII."""
    return bool(character) and character not in SPACES and (character.isalnum() or not character.isascii())
