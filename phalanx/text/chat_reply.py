"""What a model's answer in a chat is made of: reasoning, text for the reader, calls of tools. How they are written is
seen from the chat template; the text may come in pieces of any length."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from phalanx.base.dataclass import dataclass


@dataclass(frozen=True)
class Said:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class Thought:
    """Reasoning."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A call of a function; arguments are the text of a JSON object."""

    name: str
    arguments: str


Reply = Said | Thought | ToolCall
THINK = ("<think>", "</think>")
CHANNEL = "<|channel|>"  # OpenAI's harmony format: messages in channels
MESSAGE = "<|message|>"
CHANNEL_ENDS = ("<|end|>", "<|start|>", CHANNEL)
PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class CallSyntax:
    """How calls are written: between two texts, or from `begin` to the end of the answer.

    begin   None: an answer that begins with a brace is a call, all of it
    """

    begin: str | None
    end: str | None = None


TAGGED = CallSyntax("<tool_call>", "</tool_call>")  # Hermes; JSON or XML inside
WHOLE = CallSyntax(None)  # {"name": ..., "parameters": ...}
LISTED = CallSyntax("[TOOL_CALLS]")
SEPARATED = CallSyntax("<｜tool▁calls▁begin｜>")
ONE_SEPARATED = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([^\n<`]+)(?:<｜tool▁sep｜>|\n)(?:```json\n)?(.*?)(?:\n```)?"
    r"\s*(?:<｜tool▁call▁end｜>|$)",
    re.DOTALL,
)
NAMED_ARGUMENTS = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
XML_CALL = re.compile(r"\s*<function=([^>]+)>(.*?)(?:</function>\s*|$)", re.DOTALL)
NO_CALL = (ValueError, KeyError, TypeError, RecursionError)  # what reading a call raises if it is none
XML_PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True)
class ReplyFormat:
    """thinks: reasoning stands between <think> and </think>. calls: how tools are called; None: the template knows no
    tools. channels: messages in channels, tools and reasoning included."""

    thinks: bool = False
    calls: CallSyntax | None = None
    channels: bool = False

    def special_names(self) -> tuple[str, ...]:
        """Special tokens that are to be seen, since they separate the parts."""
        if self.channels:
            return (CHANNEL, MESSAGE, "<|start|>", "<|end|>", "<|constrain|>")
        names: list[str] = list(THINK) if self.thinks else []
        if self.calls == WHOLE:
            names.append(PYTHON_TAG)
        elif self.calls == SEPARATED:
            names += [SEPARATED.begin or "", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"]
        elif self.calls == LISTED:
            names += [LISTED.begin or "", "[ARGS]", "[CALL_ID]"]
        elif self.calls == TAGGED:
            names += [TAGGED.begin or "", TAGGED.end or ""]
        return tuple(names)


def reply_format(template: str) -> ReplyFormat:
    """Of a chat template's text."""
    if CHANNEL in template:
        return ReplyFormat(channels=True)
    calls = None
    for marker, form in ((TAGGED.begin, TAGGED), (LISTED.begin, LISTED), (SEPARATED.begin, SEPARATED)):
        if marker and marker in template:
            calls = form
    if calls is None and (PYTHON_TAG in template or re.search(r'"parameters"\s*:', template)):
        calls = WHOLE
    return ReplyFormat(thinks=any(mark in template for mark in THINK), calls=calls)


class ReplyReader:
    """Reads an answer piece by piece.

    tools     tools were offered: calls are looked for, else they are text
    opening   the end of the prompt: a template may have begun the reasoning there
    """

    def __init__(self, form: ReplyFormat, tools: bool = False, opening: str = ""):
        self._form = form
        self._calls = form.calls if tools else None
        self._channel: Literal["header", "said", "thought", "call"] = "said"
        self._recipient = ""
        self._text = ""  # not given yet
        self._fresh = form.thinks or form.channels  # white space at the beginning of a part is not shown
        self._state: Literal["start", "think", "say", "call", "whole"] = "start"
        if form.thinks and opening.rstrip().endswith(THINK[0]):
            self._state = "think"

    @property
    def thinking(self) -> bool:
        """What comes next is reasoning."""
        return self._state == "think" or self._channel == "thought"

    def add(self, text: str) -> list[Reply]:
        """What is known now that was not before."""
        self._text += text
        return list(joined(self._channels(False) if self._form.channels else self._read(False)))

    def end(self) -> list[Reply]:
        """The rest: what waited for more, and a call that the end of the answer ends."""
        return list(joined(self._channels(True) if self._form.channels else self._read(True)))

    def _read(self, last: bool) -> Iterator[Reply]:
        while True:
            before = (self._state, self._text)
            if self._state == "start":
                self._begin(last)
            elif self._state == "think":
                yield from self._think(last)
            elif self._state == "say":
                yield from self._say(last)
            elif last or (self._state == "call" and self._calls and self._calls.end and self._calls.end in self._text):
                yield from self._call()
            if (self._state, self._text) == before:
                return

    def _begin(self, last: bool) -> None:
        """Whether the answer begins with reasoning, or is a call as a whole."""
        start = self._text.lstrip()
        openings = [THINK[0]] if self._form.thinks else []
        if self._calls == WHOLE:
            openings += [PYTHON_TAG, "{"]
        if not openings:
            self._state = "say"
        elif not last and any(opening.startswith(start) and start != opening for opening in openings):
            return
        elif self._form.thinks and start.startswith(THINK[0]):
            self._text, self._fresh, self._state = start.removeprefix(THINK[0]), True, "think"
        elif self._calls == WHOLE and start.startswith((PYTHON_TAG, "{")):
            self._text, self._state = start.removeprefix(PYTHON_TAG), "whole"
        else:
            self._state = "say"

    def _think(self, last: bool) -> Iterator[Reply]:
        thought, found = self._until((THINK[1],), last)
        yield Thought(thought)
        if found:
            self._fresh = True
            self._state = "start" if self._calls == WHOLE else "say"

    def _say(self, last: bool) -> Iterator[Reply]:
        begin = self._calls.begin if self._calls else None
        said, found = self._until((begin,) if begin else (), last)
        yield Said(said)
        if found:
            self._state = "call"

    def _call(self) -> Iterator[Reply]:
        """The call that has been read whole; what is none is text, as it was written."""
        form = self._calls or WHOLE
        body, found, rest = self._text.partition(form.end) if form.end else (self._text, "", "")
        try:
            yield from calls_of(body)
        except NO_CALL:
            yield Said((form.begin or "") + body + found)
        self._text, self._fresh, self._state = rest, True, "say"

    def _until(self, markers: Sequence[str], last: bool) -> tuple[str, str | None]:
        """The text before the first of the markers, which is dropped, and which it was; without one the text that
        cannot be the beginning of one."""
        if self._fresh:
            self._text = self._text.lstrip()
        places = [(self._text.index(marker), marker) for marker in markers if marker in self._text]
        if places:
            at, marker = min(places)
            text, self._text = self._text[:at], self._text[at + len(marker) :]
        else:
            marker = None
            keep = 0 if last else held(self._text, markers)
            text, self._text = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
        self._fresh = self._fresh and not text
        return text, marker

    def _channels(self, last: bool) -> Iterator[Reply]:
        while self._text:
            before = (self._channel, self._text)
            if self._channel == "header":
                header, found, rest = self._text.partition(MESSAGE)
                if not found:
                    return
                recipient = re.search(r"to=functions\.([\w.-]+)", header)
                self._recipient = recipient[1] if recipient else ""
                thought = "analysis" in header
                self._channel = "call" if recipient else "thought" if thought else "said"
                self._text = rest
            elif self._channel == "call":
                if not last and not any(end in self._text for end in CHANNEL_ENDS):
                    return
                body, found_end = self._until(CHANNEL_ENDS, True)
                yield call_or_text(self._recipient, body)
                self._after(found_end)
            else:
                text, found_end = self._until(CHANNEL_ENDS, last)
                yield Thought(text) if self._channel == "thought" else Said(text)
                self._after(found_end)
            if (self._channel, self._text) == before:
                return

    def _after(self, marker: str | None) -> None:
        """After a message comes the header of another."""
        if marker is not None:
            self._channel, self._fresh = "header", True


def joined(replies: Iterator[Reply]) -> Iterator[Reply]:
    """Without empty texts; texts of one kind that follow each other as one."""
    waiting: Said | Thought | None = None
    for reply in replies:
        if isinstance(reply, ToolCall):
            if waiting:
                yield waiting
            waiting = None
            yield reply
        elif not reply.text:
            continue
        elif type(waiting) is type(reply):
            waiting = type(reply)(waiting.text + reply.text)  # type: ignore[union-attr]
        else:
            if waiting:
                yield waiting
            waiting = reply
    if waiting:
        yield waiting


def held(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0


def calls_of(body: str) -> list[ToolCall]:
    """CallSyntax in one of the forms that templates teach. One of NO_CALL if it is none of them."""
    text = body.strip()
    if found := list(XML_CALL.finditer(text)):
        return [
            ToolCall(one[1].strip(), json.dumps({k: plain(v) for k, v in XML_PARAMETER.findall(one[2])}))
            for one in found
        ]
    if found := list(ONE_SEPARATED.finditer(text)):
        return [call_of({"name": one[1].strip(), "arguments": json.loads(one[2])}) for one in found]
    calls: list[ToolCall] = []
    decoder = json.JSONDecoder()
    while text:
        name = NAMED_ARGUMENTS.match(text)
        value, end = decoder.raw_decode(text[name.end() :] if name else text)
        if name:
            calls.append(call_of({"name": name[1], "arguments": value}))
            end += name.end()
        else:
            calls += [call_of(each) for each in (value if isinstance(value, list) else [value])]
        text = text[end:].lstrip(" \n\t;,")
    if not calls:
        raise ValueError("no call")
    return calls


def call_of(value: Any) -> ToolCall:
    """Of {"name": ..., "arguments" or "parameters": {...}}."""
    arguments = value.get("arguments", value.get("parameters", {})) if isinstance(value, dict) else None
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict) or not isinstance(value["name"], str):
        raise ValueError("no call of a function")
    made = ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    (made.name + made.arguments).encode()  # UnicodeEncodeError, a ValueError, for an escape of half a character
    return made


def call_or_text(name: str, body: str) -> Reply:
    try:
        return call_of({"name": name, "arguments": json.loads(body)})
    except NO_CALL:
        return Said(body)


def plain(text: str) -> Any:
    """A parameter's value: JSON where it is some, else text."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
        return value
    except (ValueError, RecursionError):
        return text
