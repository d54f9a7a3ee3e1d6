"""Grammars of calls that tool_choice demands, in each form that templates teach; answers are read back as calls."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the server needs the extra serve")
pytest.importorskip("llguidance", reason="grammars need the extra serve")

import tokenizers

from phalanx.inference.grammar import GrammarCompiler
from phalanx.server.forced_calls import call_grammar
from phalanx.server.schemas import Function, Tool
from phalanx.text.chat_reply import LISTED, TAGGED, WHOLE, ReplyFormat, ReplyReader, ToolCall
from phalanx.text.tokenizers import load_tokenizer, train_bpe

AT = {"type": "object", "properties": {"at": {"enum": ["a", "b"]}}, "required": ["at"], "additionalProperties": False}
TOOLS = [Tool(type="function", function=Function(name=name, parameters=AT)) for name in ("one", "two")]


def tokenizer_with(special, folder):
    """Tags are tokens of their own, or text."""
    train_bpe(["a b one two"], 270, folder)
    core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.add_special_tokens(special)
    core.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


@pytest.mark.parametrize("form, special", [(TAGGED, []), (TAGGED, ["<tool_call>", "</tool_call>"]), (WHOLE, [])])
def test_any_answer_is_a_call(form, special, tmp_path):
    tokenizer = tokenizer_with(special, tmp_path)
    grammar = call_grammar(form, "", TOOLS, tokenizer.special_tokens)
    end = tokenizer.vocab_size
    compiler, rng, names = GrammarCompiler(tokenizer, end + 1), random.Random(3), set()
    for _ in range(12):
        constraint, tokens = compiler.begin(grammar, (end,)), []
        while not tokens or tokens[-1] != end:
            allowed = np.unpackbits(constraint.mask(), count=end + 1, bitorder="little")
            tokens.append(rng.choice(np.flatnonzero(allowed).tolist()))
            constraint.add(tokens[-1])
        reader = ReplyReader(ReplyFormat(calls=form), tools=True)
        [call] = reader.add(tokenizer.decode(tokens[:-1])) + reader.end()
        assert isinstance(call, ToolCall) and json.loads(call.arguments)["at"] in ("a", "b")
        names.add(call.name)
    assert names == {"one", "two"}


def test_calls_that_are_not_json_alone_are_not_demanded():
    assert call_grammar(LISTED, "", TOOLS, {}) is None and call_grammar(None, "", TOOLS, {}) is None
    assert call_grammar(TAGGED, "<tool_call>\n<function=name>", TOOLS, {}) is None
