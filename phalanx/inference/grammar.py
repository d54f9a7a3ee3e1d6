"""Texts that conform to a grammar: which tokens may come next, by llguidance (Microsoft; Earley's parser over bytes).

A request's constraint is advanced by the tokens that the host has read, so such a request is never in a step before its
last token is known (scheduler.py); others are a step ahead all the same. All ranks of a replica advance alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from types import ModuleType
from typing import Any

import numpy as np

from phalanx.base.errors import DataError
from phalanx.data.files import extra
from phalanx.inference.request import Grammar, RequestError
from phalanx.text.token_texts import TokenTexts
from phalanx.text.tokenizer_base import Tokenizer

MOST_TEXT = 2**16  # characters of a grammar
KEPT = 64  # compiled grammars
COMPACT = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
"""JSON as Python's json.dumps writes it: models that may add white space can go on with it for ever."""


class GrammarCompiler:
    """Grammars over the tokens of one model; threads may share it. The bytes of all tokens are looked up when it is
    first needed."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        """vocab_size: of the model; tokens beyond the tokenizer's are never drawn."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = Lock()
        self._words: Any = None
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()

    def compile(self, grammar: Grammar) -> Any:
        """An LLMatcher at the beginning of a text, for copies. Bounded in time by llguidance's limits. RequestError for
        what is no grammar, and if llguidance is not installed."""
        try:
            guidance = extra("llguidance", "grammars need", "serve")
        except DataError as error:
            raise RequestError("grammar", grammar.kind, str(error)) from None
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
            if self._words is None:
                self._words = guidance.LLTokenizer(guidance.TokenizerWrapper(TokenBytes(self._tokenizer)))
            made = self._compile(guidance, grammar)
            self._compiled[grammar] = made
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return made

    def begin(self, grammar: Grammar, ends: Sequence[int]) -> Constraint:
        """Of a request that ends with one of these tokens."""
        end = self._tokenizer.vocab_size
        return Constraint(self.compile(grammar).deep_copy(), ends, end, self._vocab_size)

    def _compile(self, guidance: ModuleType, grammar: Grammar) -> Any:
        if len(grammar.text) > MOST_TEXT:
            raise RequestError("grammar", f"{len(grammar.text)} characters", f"must be at most {MOST_TEXT}")
        of = guidance.LLMatcher
        try:
            if grammar.kind == "json_object":
                source = of.grammar_from_json_schema('{"type": "object"}', COMPACT)
            elif grammar.kind == "json_schema":
                source = of.grammar_from_json_schema(grammar.text, COMPACT)
            else:
                source = {"regex": of.grammar_from_regex, "lark": of.grammar_from_lark}[grammar.kind](grammar.text)
        except ValueError as error:
            raise refused(grammar, str(error)) from None
        limits = guidance.LLParserLimits(verbose_errors=False)
        matcher = of(self._words, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise refused(grammar, matcher.get_error())
        return matcher


def refused(grammar: Grammar, why: str) -> RequestError:
    return RequestError("grammar", grammar.text, f"is no {grammar.kind} that can be kept to: {' '.join(why.split())}")


class TokenBytes:
    """A tokenizer as llguidance reads it: what bytes tokens are. One token is added, which ends a text: ends are a
    request's own."""

    def __init__(self, tokenizer: Tokenizer):
        special = set(tokenizer.special_tokens.values())
        texts = TokenTexts(tokenizer)
        found = [b"" if i in special else bytes(texts.bytes_of(i) or b"") for i in range(tokenizer.vocab_size)]
        self._tokenizer = tokenizer
        self._numbers = {each: i for i, each in reversed(list(enumerate(found))) if each}
        self._longest = max(map(len, self._numbers), default=1)
        self.tokens = [b"" if each[:1] == b"\xff" else each for each in found]  # a byte that marks special tokens there
        for i in special:
            self.tokens[i] = f"<|special {i}|>".encode()
        self.tokens.append(b"<|end|>")
        self.eos_token_id = tokenizer.vocab_size
        self.bos_token_id = None
        self.special_token_ids = [*sorted(special), self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens with exactly these bytes: the tokenizer's own, if it adds nothing to them."""
        wanted = text.encode() if isinstance(text, str) else text
        try:
            ids = self._tokenizer.encode(wanted.decode())
        except ValueError:  # part of a character
            ids = []
        if b"".join(self.tokens[i] for i in ids) == wanted:
            return ids
        return self._longest_first(wanted)

    def _longest_first(self, text: bytes) -> list[int]:
        """Up to a byte that no token begins with."""
        ids: list[int] = []
        at = 0
        while at < len(text):
            lengths = range(min(self._longest, len(text) - at), 0, -1)
            fits = next((n for n in lengths if text[at : at + n] in self._numbers), None)
            if fits is None:
                break
            ids.append(self._numbers[text[at : at + fits]])
            at += fits
        return ids


class Constraint:
    """Of one request. problem: why there is no next token, if there is none."""

    def __init__(self, matcher: Any, ends: Sequence[int], end: int, vocab_size: int):
        """end: the token that stands for all `ends` in the matcher."""
        self._matcher, self._ends, self._end, self._vocab_size = matcher, tuple(ends), end, vocab_size
        self.problem: str | None = None

    def mask(self) -> np.ndarray:
        """(ceil(vocab_size / 8),) uint8: bits of the tokens that may come next, the lowest first. An end token may
        where the text may end."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        bits = np.unpackbits(packed, count=self._end + 1, bitorder="little")
        allowed = np.zeros(self._vocab_size, np.uint8)
        size = min(self._end, self._vocab_size)
        allowed[:size] = bits[:size]
        allowed[list(self._ends)] = bits[self._end]
        if self._matcher.is_error():
            allowed[:] = 0
            self.problem = f"the grammar: {' '.join(self._matcher.get_error().split())}"
        elif not allowed.any():
            self.problem = "the grammar: no token of the vocabulary can come next"
        return np.packbits(allowed, bitorder="little")

    def add(self, token: int) -> None:
        """It came next."""
        if token not in self._ends:
            self._matcher.consume_token(token)
