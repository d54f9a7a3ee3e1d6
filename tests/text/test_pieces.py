"""Text of tokens one by one: characters appear whole, and long texts cost no more a token than short ones."""

from __future__ import annotations

import pytest

from phalanx.text.pieces import Pieces
from phalanx.text.tokenizers import load_tokenizer


@pytest.mark.parametrize(
    "text", ["plain words", "h\u00e9llo \u6f22\u5b57 \U0001f642 end", "\U0001f469\u200d\U0001f680"]
)
def test_characters_appear_whole(text):
    """Of a tokenizer whose tokens are bytes, the first bytes of a character show nothing."""
    tokenizer = load_tokenizer("bytes")
    pieces = Pieces(tokenizer)
    shown = [pieces.add(token) for token in tokenizer.encode(text)]
    assert "".join(shown) == text and pieces.rest() == "" and all("\ufffd" not in piece for piece in shown)
    assert len([piece for piece in shown if piece]) == len(text)


def test_bytes_that_are_no_text_are_shown_at_the_end():
    pieces = Pieces(load_tokenizer("bytes"))
    assert pieces.add(0xF0) == "" and pieces.add(ord("a")).endswith("a")
    assert pieces.add(0xF0) == "" and pieces.rest() == "\ufffd" and pieces.rest() == ""


def test_every_window_gives_the_same_text():
    """Tokens that left the window have no part in what comes later."""
    tokenizer = load_tokenizer("bytes")
    text = "Z\u00fcrich \u6f22\u5b57 \U0001f642 " * 40
    pieces = Pieces(tokenizer)
    assert "".join(pieces.add(token) for token in tokenizer.encode(text)) + pieces.rest() == text
    decoded = []
    pieces = Pieces(Counting(tokenizer, decoded))
    for token in tokenizer.encode(text):
        pieces.add(token)
    assert max(decoded) < 40


class Counting:
    """A tokenizer that notes how many tokens it decodes at once."""

    def __init__(self, tokenizer, decoded):
        self.special_tokens = tokenizer.special_tokens
        self._tokenizer, self._decoded = tokenizer, decoded

    def decode(self, ids, skip_special_tokens=False):
        self._decoded.append(len(ids))
        return self._tokenizer.decode(ids, skip_special_tokens)


def test_a_text_goes_on_where_its_context_ends():
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode("\u6f22x")
    pieces = Pieces(tokenizer, context=ids[:2])
    assert pieces.add(ids[2]) + pieces.add(ids[3]) == "\u6f22x"


def test_special_tokens_are_shown_if_asked_for():
    tokenizer = load_tokenizer("bytes")
    ids = [ord("a"), tokenizer.eod, ord("b")]
    for shown, text in (((), "ab"), ((tokenizer.eod,), "a<|endoftext|>b")):
        pieces = Pieces(tokenizer, shown=shown)
        assert "".join(map(pieces.add, ids)) + pieces.rest() == text
