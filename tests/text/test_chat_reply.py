"""Answers of chats, cut into pieces of every size: reasoning, text and calls in each form that templates teach."""

from __future__ import annotations

import json

import pytest

from phalanx.text.chat_reply import ReplyFormat, ReplyReader, Said, Thought, ToolCall, reply_format

HERMES = reply_format("<tool_call> <think>")
WHOLE = reply_format('{"name": function name, "parameters": dictionary}')
LISTED = reply_format("[TOOL_CALLS]")
SEPARATED = reply_format("<｜tool▁calls▁begin｜> </think>")
CHANNELS = reply_format("<|start|>assistant<|channel|>")


def call(city="Paris", name="weather"):
    return ToolCall(name, json.dumps({"city": city}))


ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
HARMONY = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    '<|constrain|>json<|message|>{"city": "Paris"}'
)
CASES = {
    "plain": (HERMES, "a < b and <tool", [Said("a < b and <tool")]),
    "one": (HERMES, ONE, [call()]),
    "text and two": (HERMES, f"So:\n{ONE}\n{ONE}", [Said("So:\n"), call(), call()]),
    "thought, text, call": (HERMES, f"<think>\nhm\n</think>\n\nSo {ONE}", [Thought("hm\n"), Said("So "), call()]),
    "xml": (HERMES, XML, [ToolCall("weather", '{"city": "Paris", "days": 3}')]),
    "no call": (HERMES, "<tool_call>\n{oops}\n</tool_call> and on", [Said("<tool_call>\n{oops}\n</tool_call>and on")]),
    "not finite": (HERMES, ONE.replace('"Paris"', "NaN"), [Said(ONE.replace('"Paris"', "NaN"))]),
    "too large": (HERMES, ONE.replace('"Paris"', "1e999"), [Said(ONE.replace('"Paris"', "1e999"))]),
    "half a character": (HERMES, ONE.replace("Paris", "\\ud83d"), [Said(ONE.replace("Paris", "\\ud83d"))]),
    "half a name": (HERMES, ONE.replace("weather", "\\ud83d"), [Said(ONE.replace("weather", "\\ud83d"))]),
    "xml, not finite": (HERMES, XML.replace("3", "NaN"), [ToolCall("weather", '{"city": "Paris", "days": "NaN"}')]),
    "not closed": (HERMES, ONE.removesuffix("</tool_call>"), [call()]),
    "arguments as text": (HERMES, ONE.replace('{"city": "Paris"}', '"{\\"city\\": \\"Paris\\"}"'), [call()]),
    "whole": (WHOLE, '{"name": "weather", "parameters": {"city": "Paris"}}', [call()]),
    "whole, two": (
        WHOLE,
        '{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "weather", "parameters": {"city": "Rome"}}',
        [call(), call("Rome")],
    ),
    "tagged": (WHOLE, '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}', [call()]),
    "json that is no call": (WHOLE, '{"a": 1}', [Said('{"a": 1}')]),
    "text with braces": (WHOLE, 'It is {"name": 1}', [Said('It is {"name": 1}')]),
    "listed": (LISTED, '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}]', [call()]),
    "listed by name": (LISTED, 'So[TOOL_CALLS]weather[ARGS]{"city": "Paris"}', [Said("So"), call()]),
    "separated": (
        SEPARATED,
        "hm</think>So<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [Thought("hm"), Said("So"), call(), call("Rome")],
    ),
    "channels": (CHANNELS, HARMONY, [Thought("hm"), call()]),
    "final": (
        CHANNELS,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Blue.",
        [Thought("hm"), Said("Blue.")],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_pieces_of_every_size_say_the_same(name):
    form, text, wanted = CASES[name]
    opening = "<think>\n" if name == "separated" else "assistant\n"
    for size in (1, 2, 3, 5, 7, 11, len(text)):
        reader, found = ReplyReader(form, tools=True, opening=opening), []
        for at in range(0, len(text), size):
            found += reader.add(text[at : at + size])
        assert merged(found + reader.end()) == wanted, size


def merged(replies):
    """Texts of one kind that follow each other as one."""
    made = []
    for reply in replies:
        if made and type(made[-1]) is type(reply) and not isinstance(reply, ToolCall):
            reply = type(reply)(made.pop().text + reply.text)
        made.append(reply)
    return made


def test_text_is_given_as_soon_as_it_can_be():
    reader = ReplyReader(HERMES, tools=True)
    assert reader.add("So <too") == [Said("So ")]
    assert reader.add("ls>") == [Said("<tools>")]
    assert reader.add("<tool_call>") == [] and reader.add('{"name": "a", "arguments": {}}') == []
    assert reader.add("</tool_call>") == [ToolCall("a", "{}")]
    assert reader.end() == []


def test_calls_are_text_if_no_tool_was_offered():
    for name, (form, text, _) in CASES.items():
        if form in (LISTED, WHOLE):
            reader = ReplyReader(form, tools=False)
            assert merged([*reader.add(text), *reader.end()]) == [Said(text)], name
    assert ReplyReader(ReplyFormat()).add(ONE) == [Said(ONE)]


@pytest.mark.parametrize("form, text", [(HERMES, "<tool_call>"), (CHANNELS, HARMONY[: HARMONY.index("{")])])
def test_json_that_is_nested_without_end_is_text(form, text):
    nested = "[" * 100_000
    reader = ReplyReader(form, True)
    said = [each for each in [*reader.add(text + nested), *reader.end()] if isinstance(each, Said)]
    assert "".join(each.text for each in said).endswith(nested)
