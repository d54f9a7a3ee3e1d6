"""Tokenizers: loading every kind, and training and saving those of the Hugging Face `tokenizers` library. No code is
ever loaded."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from phalanx.base.errors import DataError
from phalanx.data.files import BYTES, NULL, must_exist, replacing, tokenizer_file
from phalanx.text.merges import from_ranks, is_ranks
from phalanx.text.sentencepieces import SentencePieceTokenizer
from phalanx.text.tokenizer_base import Tokenizer
from phalanx.text.words import Words, splitter

END_OF_DOCUMENT = "<|endoftext|>"
BRACKETED = ("unk", "cls", "sep", "mask", "pad")  # of BERT's special tokens: what each is for, by its name
OTHER_ENDS = ("<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")
MIN_VOCAB_SIZE = 257  # every byte, and the end of a document


class JsonTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library; `fingerprint` covers the sections of its JSON that determine ids."""

    kind = "json"

    def __init__(self, core: tokenizers.Tokenizer, eod_token: str | None):
        self._core = core
        self._core.encode_special_tokens = True
        self._core.no_padding()
        self._core.no_truncation()
        self.eod_token = eod_token
        self._text = core.to_str()
        self._special_core: tokenizers.Tokenizer | None = None  # these two are made when they are needed
        self._bare_core: tokenizers.Tokenizer | None = None
        eod = core.token_to_id(eod_token) if eod_token is not None else None
        added = core.get_added_tokens_decoder()
        special = {token.content: i for i, token in sorted(added.items()) if token.special}
        if eod_token is not None and eod is not None:
            special.setdefault(eod_token, eod)
        vocab_size = max(core.get_vocab(with_added_tokens=True).values()) + 1
        sections = json.loads(self._text)
        deciding = [sections[name] for name in ("added_tokens", "normalizer", "pre_tokenizer", "model")]
        super().__init__(vocab_size, eod, special, hashlib.sha256(json.dumps(deciding).encode()).hexdigest())
        self._words = self._make_words(sections, all(token.special for token in added.values()))

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_text, (type(self), self._text, self.eod_token)

    def encode(self, text: str) -> list[int]:
        return self._encode_one(text)

    def encode_with_special(self, text: str) -> list[int]:
        """As the library finds special tokens in a text: with the white space around them that they may swallow."""
        return self._encode_special(text, around=False)

    def encode_whole(self, text: str) -> list[int]:
        return self._encode_special(text, around=True)

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        if self._bare_core is None:  # without a post-processor, which may leave white space out of offsets
            self._bare_core = _finds_special({**json.loads(self._text), "post_processor": None})
        found = _encoded(self._bare_core, text, around=False)
        return found.ids, found.offsets

    def _encode_special(self, text: str, around: bool) -> list[int]:
        """around: with the tokens that the post-processor adds."""
        if self._special_core is None:
            self._special_core = _finds_special(json.loads(self._text))
        return _encoded(self._special_core, text, around).ids

    def token_name(self, token: int) -> str:
        name = self._core.id_to_token(token)
        if name is None:
            raise IndexError(f"no token has the id {token}")
        return name

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, on all cores."""
        try:
            return [encoding.ids for encoding in self._core.encode_batch_fast(list(texts), add_special_tokens=False)]
        except Exception:  # the library raises plain Exception, and does not say for which text
            return super().encode_batch(texts)

    def encode_raw(self, texts: Sequence[str]) -> list[bytes]:
        """Ids of each text as bytes of `dtype`: word by word where that is exact, else as `encode_batch`."""
        if self._words is None:
            return super().encode_raw(texts)
        return [self._words.ids(text) for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._core.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write tokenizer.json and the tokenizer_config.json that transformers needs; returns the folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.eod_token,
            "bos_token": self.eod_token,
            "clean_up_tokenization_spaces": False,
            **{
                f"{name}_token": f"[{name.upper()}]" for name in BRACKETED if f"[{name.upper()}]" in self.special_tokens
            },
        }
        with replacing(folder / "tokenizer.json") as file:
            file.write(self._core.to_str(pretty=True).encode())
        with replacing(folder / "tokenizer_config.json") as file:
            file.write(json.dumps({k: v for k, v in config.items() if v is not None}, indent=2).encode())
        return folder

    def _encode_one(self, text: str) -> list[int]:
        try:
            return self._core.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"the tokenizer cannot encode {text[:60]!r}: {error}") from None

    def _make_words(self, sections: dict[str, Any], plain: bool) -> Words | None:
        """plain: no added token is looked for in texts."""
        split = splitter(sections["normalizer"], sections["pre_tokenizer"])
        return (
            Words(self._encode_one, split, self.dtype)
            if split and plain and not sections["model"].get("dropout")
            else None
        )


class ByteTokenizer(JsonTokenizer):
    """Ids 0..255 are the bytes of UTF-8, 256 ends a document."""

    kind = BYTES

    def encode_raw(self, texts: Sequence[str]) -> list[bytes]:
        return [np.frombuffer(text.encode(), np.uint8).astype(self.dtype).tobytes() for text in texts]


class NullTokenizer(JsonTokenizer):
    """Text that already consists of ids, in decimal with white space between them; the id after the last one ends a
    document (Megatron's tokenizer of this name)."""

    kind = "null"


def _finds_special(sections: dict[str, Any]) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer.from_str(json.dumps(sections))
    core.encode_special_tokens = False
    return core


def _encoded(core: tokenizers.Tokenizer, text: str, around: bool) -> tokenizers.Encoding:
    try:
        return core.encode(text, add_special_tokens=around)
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"the tokenizer cannot encode {text[:60]!r}: {error}") from None


def _from_text(kind: type[JsonTokenizer], text: str, eod_token: str | None) -> JsonTokenizer:
    return kind(tokenizers.Tokenizer.from_str(text), eod_token)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in a file, in a folder, or named by the words `bytes` and `null:N`.

    Files: tokenizer.json, GPT-2's vocab.json beside merges.txt, a SentencePiece .model, a .tiktoken rank file. Nothing
    is downloaded and no code in a folder is run. DataError if it is missing or none of these.
    """
    name = os.fspath(path)
    if name == BYTES:
        return byte_tokenizer()
    if name.startswith(NULL):
        return null_tokenizer(name.removeprefix(NULL))
    file = tokenizer_file(path)
    if file.name == "vocab.json":
        return _gpt2_files(file.parent)
    with open(file, "rb") as stream:
        head = stream.read(4096)
    if is_ranks(head):
        core, eod = from_ranks(file, byte_characters())
        return JsonTokenizer(core, eod or _end_of_document(core, file.with_name("tokenizer_config.json")))
    if file.suffix == ".model":
        return SentencePieceTokenizer(file.read_bytes(), str(file))
    if file.suffix == ".tiktoken":
        raise DataError(
            f"{file}: not tiktoken ranks: the first line should be a token in base64 and its rank, it begins "
            f"with {head[:40]!r}"
        )
    try:
        core = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{file}: not a tokenizer.json: {error}") from None
    return JsonTokenizer(core, _end_of_document(core, file.with_name("tokenizer_config.json")))


def _gpt2_files(folder: Path) -> Tokenizer:
    """GPT-2's vocab.json and merges.txt: a byte-level BPE."""
    vocab, merges = folder / "vocab.json", must_exist(folder / "merges.txt")
    try:
        core = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{vocab}, {merges}: not a vocabulary and its merges: {error}") from None
    _make_byte_level(core)
    if core.token_to_id(END_OF_DOCUMENT) is not None:
        core.add_special_tokens([END_OF_DOCUMENT])
    return JsonTokenizer(core, _end_of_document(core, folder / "tokenizer_config.json"))


def byte_tokenizer() -> Tokenizer:
    """Ids 0..255 are the bytes of UTF-8, 256 ends a document. Needs no training and no file."""
    vocab = {character: byte for byte, character in byte_characters().items()}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    _make_byte_level(core)
    core.add_special_tokens([END_OF_DOCUMENT])
    return ByteTokenizer(core, END_OF_DOCUMENT)


def null_tokenizer(size: str) -> Tokenizer:
    """Ids 0..size-1 written as numbers; `size` itself ends a document. DataError unless size is a number > 0."""
    if not size.isdecimal() or int(size) < 1:
        raise DataError(f"tokenizer null:{size}: say how many ids there are, such as null:50257")
    core = tokenizers.Tokenizer(models.WordLevel({str(i): i for i in range(int(size))}))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    core.add_special_tokens([END_OF_DOCUMENT])
    return NullTokenizer(core, END_OF_DOCUMENT)


def train_bpe(texts: Iterable[str], vocab_size: int, folder: str | os.PathLike[str]) -> Tokenizer:
    """Train a byte-level BPE and save it to `folder`: id 0 ends a document, every text can be encoded.

    ValueError if vocab_size cannot hold every byte. Few texts can give a smaller vocabulary than asked for.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size {vocab_size}: a byte-level vocabulary has {MIN_VOCAB_SIZE} tokens or more")
    core = tokenizers.Tokenizer(models.BPE())
    _make_byte_level(core)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_DOCUMENT], initial_alphabet=alphabet, show_progress=False
    )
    return _train(core, trainer, texts, folder)


def train_wordpiece(texts: Iterable[str], vocab_size: int, folder: str | os.PathLike[str]) -> Tokenizer:
    """Train a WordPiece vocabulary (Schuster & Nakajima, 2012; BERT's) and save it to `folder`.

    Words are split at white space and punctuation; characters never seen become [UNK], so decoding need not give the
    text back.
    """
    core = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    core.decoder = decoders.WordPiece()  # type: ignore[assignment]
    special = [END_OF_DOCUMENT, "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[PAD]"]
    return _train(
        core,
        trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False),
        texts,
        folder,
    )


def train_unigram(texts: Iterable[str], vocab_size: int, folder: str | os.PathLike[str]) -> Tokenizer:
    """Train a Unigram vocabulary (Kudo, 2018) over bytes and save it to `folder`: every text can be encoded and is
    restored exactly."""
    core = tokenizers.Tokenizer(models.Unigram())
    _make_byte_level(core)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_DOCUMENT], initial_alphabet=alphabet, show_progress=False
    )
    return _train(core, trainer, texts, folder)


TRAINERS = {"bpe": train_bpe, "wordpiece": train_wordpiece, "unigram": train_unigram}


def _train(
    core: tokenizers.Tokenizer, trainer: trainers.Trainer, texts: Iterable[str], folder: str | os.PathLike[str]
) -> Tokenizer:
    core.train_from_iterator(texts, trainer)
    # loaded again, because scores are rounded in the file
    return load_tokenizer(JsonTokenizer(core, END_OF_DOCUMENT).save(folder))


def _make_byte_level(core: tokenizers.Tokenizer) -> None:
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # type: ignore[assignment]
    core.decoder = decoders.ByteLevel()  # type: ignore[assignment]


def byte_characters() -> dict[int, str]:
    """The printable character for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def _end_of_document(core: tokenizers.Tokenizer, config: Path) -> str | None:
    """The end-of-document token: ours, or the end of sequence named by the tokenizer's own config, or a usual one."""
    named: list[str] = []
    if config.exists():
        try:
            eos = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
        except (ValueError, AttributeError) as error:
            raise DataError(f"{config}: not a tokenizer_config.json: {error}") from None
        named = [eos["content"] if isinstance(eos, dict) else eos] if eos else []
    return next(
        (token for token in (END_OF_DOCUMENT, *named, *OTHER_ENDS) if core.token_to_id(token) is not None), None
    )
