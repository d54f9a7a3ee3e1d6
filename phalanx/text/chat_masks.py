"""Chats as tokens, and which of the tokens are trained on: each answer, up to the token that ends its turn, in the
text in which the model will have to write it in inference.

Where the template marks answers (`{% generation %}`), they are what it marks. Elsewhere an answer is what its turn adds
to the text that the template writes, less the prompt with which inference begins it:

    prompt   template(messages before the answer, add_generation_prompt=True)      what inference supplies
    turn     template(messages up to the answer)                                   must begin with the prompt

Some templates write earlier turns in another way once there are later ones (they leave reasoning out). A chat is then
several samples, so that each answer is trained once, after exactly what the model will have before it.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.text.chat_records import BadChat, Chat, Completion, Message, is_media, tool_name
from phalanx.text.chat_template import (
    ANSWER,
    ANSWER_END,
    BREAK,
    ChatTemplate,
    WrittenMedia,
    broken,
    special_names,
    with_media,
)
from phalanx.text.tokenizer_base import Tokenizer, tokens_before

TrainOn = Literal["answers", "last_answer", "all"]
Span = tuple[int, int]
PROBE = "\U000f0003"  # an answer that begins like no other
ASKING = ("system", "developer", "user")
SHOWN = 60  # characters of a text in a message
# what a report counts of chats that are as their template writes them, and that a reader should know
REWRITTEN = "the template writes their earlier turns in another way later: several samples each"
OTHER_PROMPT = "inference begins their answers with {}, which the template leaves out of them"
NO_END = "the template ends no answer with a special token: the tokenizer's end of a document ends the last"
MARKED_SHORT = "what the template marks with {% generation %} ends before a special token: how to stop is not learned"
CUT_TOKENS = "an answer begins or ends inside a token: its text is encoded by itself"


@dataclass(frozen=True)
class ChatSample:
    """ids, and the ascending ranges of them that are trained, up to the last id."""

    ids: tuple[int, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Turn:
    """The answer at message `number`, from 0: the text up to its end, and the ranges of characters that are trained."""

    number: int
    text: str
    spans: tuple[Span, ...]
    ends: bool
    """Whether nothing more has to end it."""


class ChatEncoder:
    """Makes samples of chats. `notes` counts chats with something to know about them, by what it is."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        train_on: TrainOn,
        media: WrittenMedia | None = None,
    ):
        self.tokenizer, self.template, self.train_on, self.media = tokenizer, template, train_on, media
        self.special = special_names(tokenizer)
        self.notes = Counter[str]()
        self._noted = set[str]()  # of the chat at hand
        self._before = tokens_before(tokenizer)
        bos = None if template is None else template.variables.get("bos_token")
        self._bos = None if bos is None else tokenizer.special_tokens.get(bos)

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatEncoder, (self.tokenizer, self.template, self.train_on, self.media)

    def samples(self, given: Chat | Completion) -> list[ChatSample]:
        """BadChat for what cannot be trained on; DataError without a template for messages."""
        self._noted.clear()
        made = self._samples(given)
        self.notes.update(self._noted)
        return made

    def _samples(self, given: Chat | Completion) -> list[ChatSample]:
        if isinstance(given, Completion):
            return [self._completion(given)]
        if given.files and (self.media is None or given.kind != self.media.kind):
            raise BadChat(str(given.kind), f"has parts of type {given.kind}, which this model does not read")
        if self.template is None:
            if given.transcript is not None:
                return [self._completion(Completion("", given.transcript))]
            raise DataError("has messages, which need a chat template: data.template=FILE.jinja")
        return _Rendered(self, self.template, given).samples()

    def note(self, what: str) -> None:
        self._noted.add(what)

    def _completion(self, given: Completion) -> ChatSample:
        prompt, completion = self.plain(given.prompt), self.plain(given.completion)
        text, start = prompt + completion, len(prompt)
        spans = [(0, len(text))] if self.train_on == "all" else [(start, len(text))]
        found = self.encode(text, spans)
        ids = [*self._before, *found.ids]
        spans = [(first + len(self._before), stop + len(self._before)) for first, stop in found.spans]
        return self.finished(ids, spans, ends=False)

    def plain(self, text: str) -> str:
        """A text in which names of special tokens stay text."""
        return str(broken(text, self.special))

    def encode(self, text: str, spans: Sequence[Span]) -> ChatSample:
        """A text with BREAK inside what is no special token, and ranges of its characters."""
        ids, places = self._encode(text)
        borders = {border for span in spans for border in span}
        starts, stops = [first for first, _ in places], [stop for _, stop in places]
        if torn := {border for border in borders if _is_inside(border, starts, stops)}:
            self.note(CUT_TOKENS)
            cuts = [0, *sorted(torn), len(text)]
            parts = [(first, *self._encode(text[first:stop])) for first, stop in zip(cuts, cuts[1:])]
            ids = [i for _, own, _ in parts for i in own]
            places = [(first + a, first + b) for first, _, own in parts for a, b in own]
            starts, stops = [first for first, _ in places], [stop for _, stop in places]
        found = [(bisect_left(starts, first), bisect_right(stops, stop)) for first, stop in spans]
        return ChatSample(tuple(ids), tuple(found))

    def _encode(self, text: str) -> tuple[list[int], list[Span]]:
        ids, places, at = list[int](), list[Span](), 0
        for part in text.split(BREAK):
            own, offsets = self.tokenizer.encode_offsets(part) if part else ([], [])
            ids += own
            places += [(at + first, at + stop) for first, stop in offsets]
            at += len(part) + 1
        return ids, places

    def finished(self, ids: list[int], spans: list[Span], ends: bool) -> ChatSample:
        """Up to the end of the last span. ends: whether a special token ends it; the end of a document does
        otherwise."""
        first, stop = spans[-1]
        ids = ids[:stop]
        if not ends and self.tokenizer.eod is not None:
            ids, spans = [*ids, self.tokenizer.eod], [*spans[:-1], (first, stop + 1)]
        if ids[:2] == [self._bos] * 2 and self._bos is not None:
            raise BadChat("double BOS", f"begins with two tokens {self.tokenizer.token_name(ids[0])}")
        if not any(max(first, 1) < stop for first, stop in spans):
            raise BadChat("nothing to train on", "no token of an answer has another before it: nothing is trained")
        return ChatSample(tuple(ids), tuple(span for span in spans if span[0] < span[1]))


def turn_end(encoder: ChatEncoder) -> int | None:
    """The token with which answers end as they are trained, found in a chat of two words; None: it is no special token,
    or the template has no place for such a chat."""
    words: tuple[Message, ...] = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    try:
        [sample] = encoder.samples(Chat(words, None, (1,)))
    except (BadChat, DataError, ValueError):
        return None
    last, tokenizer = sample.ids[-1], encoder.tokenizer
    return last if last == tokenizer.eod or last in tokenizer.special_tokens.values() else None


class _Rendered:
    """A chat as its template writes it."""

    def __init__(self, encoder: ChatEncoder, template: ChatTemplate, chat: Chat):
        self.encoder, self.template, self.chat = encoder, template, chat
        self.messages = broken(chat.messages, encoder.special)
        self.tools = broken(chat.tools, encoder.special)
        self.variables = broken(chat.variables, encoder.special)
        if any("tool_calls" in message for message in self.messages):
            self.messages = self._with_arguments()

    def samples(self) -> list[ChatSample]:
        how = self.encoder.train_on
        if how == "all":
            return [self._whole()]
        answers = self.chat.answers[-1:] if how == "last_answer" else self.chat.answers
        turn = self._marked_turn if self.template.marks_answers(self.chat.tools) else self._turn
        made, left = list[ChatSample](), [turn(number) for number in answers]
        while left:
            last = left[-1]
            made.append(self._sample(last, [turn for turn in left if last.text.startswith(turn.text)]))
            left = [turn for turn in left if not last.text.startswith(turn.text)]
        if len(made) > 1:
            self.encoder.note(REWRITTEN)
        return made[::-1]

    def _sample(self, last: Turn, turns: Sequence[Turn]) -> ChatSample:
        """The text up to the answer `last`, in which `turns` are trained."""
        self._check_whole(last.text, last.number)
        spans = [span for turn in turns for span in self._spans(turn, last.text)]
        found = self.encoder.encode(last.text, spans)
        if not last.ends:
            self.encoder.note(NO_END)
        return self.encoder.finished(list(found.ids), list(found.spans), last.ends)

    def _spans(self, turn: Turn, whole: str) -> list[Span]:
        """Those of an answer in the text of a later one: with the special token that follows it if none ends it, which
        is then what the model must say to stop."""
        after = None if turn.ends else self.encoder.special.match(whole, len(turn.text))
        first, stop = turn.spans[-1]
        return [*turn.spans[:-1], (first, after.end() if after else stop)]

    def _whole(self) -> ChatSample:
        """All of the chat, in ranges that end where answers end."""
        last = len(self.messages) - 1
        written = self._text_of(last + 1)[0].rstrip()
        self._check_whole(written, last)
        upto = [self._text_of(number + 1)[0].rstrip() for number in self.chat.answers]
        borders = [0, *(len(text) for text in upto if written.startswith(text) and text != written), len(written)]
        found = self.encoder.encode(written, list(zip(borders, borders[1:])))
        ends = self._ends_special(written)
        if not ends:
            self.encoder.note(NO_END)
        return self.encoder.finished(list(found.ids), list(found.spans), ends)

    # ---- what turns add

    def _turn(self, number: int) -> Turn:
        written = self._write(number + 1, number)
        prompt = self._write(number, number, begins=True)
        start = len(prompt) if written.startswith(prompt) else self._start(number, prompt, written)
        end = self._end(number, start, written)
        turn = Turn(number, written[: end or len(written)], ((start, end or len(written)),), end is not None)
        self._check_turn(number, turn.text[start:])
        return turn

    def _start(self, number: int, prompt: str, written: str) -> int:
        """Where an answer begins that does not begin with all of the prompt: where any answer would depart from it.
        BadChat if the answer changes what was written before it."""
        before = self._write(number, number)
        probe: list[Message] = [*self.messages[:number], {"role": "assistant", "content": PROBE}]
        start = len(os.path.commonprefix([prompt, self._render(probe, number)]))
        if start < len(before) or written[:start] != prompt[:start] or not prompt.startswith(before):
            differ = len(os.path.commonprefix([prompt, written]))
            raise BadChat(
                "ambiguous turn",
                f"where this answer begins cannot be told: inference would go on from {_shown(prompt, differ)}, the "
                f"template writes {_shown(written, differ)}: mark answers in the template with {{% generation %}} "
                "(data.template)",
                number + 1,
            )
        self.encoder.note(OTHER_PROMPT.format(repr(prompt[start:])))
        return start

    def _end(self, number: int, start: int, written: str) -> int | None:
        """Where an answer ends: after the last special token, if white space alone follows; None without one. What a
        template writes at the end of a chat alone, such as a second token, is not the answer's."""
        tail = self._special_tail(written, start)
        if len(tail) > 1:
            more: list[Message] = [*self.messages[: number + 1], {"role": "user", "content": PROBE}]
            try:
                shared = os.path.commonprefix([written, self._render(more, number)])
            except BadChat:  # a template may want another message here
                shared = ""
            tail = [end for end in tail if end <= len(shared)] or tail
        return tail[-1] if tail else None

    def _special_tail(self, text: str, start: int) -> list[int]:
        """Ends of the special tokens at the end of a text, with nothing but white space between and after them."""
        ends, last = list[int](), len(text)
        for found in reversed(list(self.encoder.special.finditer(text, start))):
            if text[found.end() : last].strip():
                break
            ends, last = [found.end(), *ends], found.start()
        return ends

    def _marked_turn(self, number: int) -> Turn:
        """Of what the template marks, what this message adds."""
        written, marks = self._text_of(number + 1)
        before, marks_before = self._text_of(number) if number else ("", [])
        if written.startswith(before):
            mine = [span for span in marks if span[0] >= len(before)]
        else:
            mine = marks[len(marks_before) :]
        mine = [span for span in mine if written[slice(*span)]]
        if not mine:
            rule = "the template marks nothing of this answer: its {% generation %} is for others"
            raise BadChat("nothing to train on", rule, number + 1)
        text = written[: mine[-1][1]]
        self._check_turn(number, "".join(text[slice(*span)] for span in mine))
        if not self._ends_special(text.rstrip()):
            self.encoder.note(MARKED_SHORT)
        return Turn(number, text, tuple(mine), True)

    def _check_turn(self, number: int, trained: str) -> None:
        """What the message says must be in what is trained."""
        message = self.messages[number]
        content = message["content"].split("</think>")[-1].strip()
        lacking = ["the answer's text"] if content not in trained else []
        thought = message.get("reasoning_content", "").strip()
        unread = bool(thought) and self._leaves_out(number, "reasoning_content")
        lacking += ["its reasoning"] if unread or thought not in trained else []
        names = [call["function"]["name"] for call in message.get("tool_calls", ())]
        unread = bool(names) and self._leaves_out(number, "tool_calls")
        lacking += [f"its call of {name}" for name in names if unread or name not in trained]
        if lacking:
            raise BadChat(
                "left out by the template",
                f"the template does not write {' and '.join(lacking)}; of this answer it writes {_shown(trained, 0)}",
                number + 1,
            )

    def _ends_special(self, text: str) -> bool:
        return bool(tail := self._special_tail(text, 0)) and tail[-1] == len(text)

    # ---- rendering

    def _with_arguments(self) -> Sequence[Message]:
        """The messages with arguments of calls as the template takes them: objects, or their JSON as text."""
        last = len(self.messages) - 1
        calls = [call["function"] for message in self.messages for call in message.get("tool_calls", ())]
        try:
            written = self._write(last + 1, last)
        except BadChat:
            written = None
        if written is not None and not any(repr(each["arguments"]) in written for each in calls if each["arguments"]):
            return self.messages
        return [_with_text_arguments(message) for message in self.messages]

    def _check_whole(self, written: str, last: int) -> None:
        """What people wrote up to the message `last`, and tools, must be there."""
        for number, message in enumerate(self.messages[: last + 1]):
            texts = [part["text"] for part in message.get("parts", ()) if not is_media(part)] or [message["content"]]
            if message["role"] in ASKING and any(text.strip() not in written for text in texts):
                rule = f"the template leaves out this message of role {message['role']}, or a part of it"
                raise BadChat("left out by the template", rule, number + 1)
        names = [name for tool in self.tools or () if (name := tool_name(tool))]
        unread = bool(names) and self._leaves_out_tools(last)
        for name in names:
            if unread or name not in written:
                raise BadChat("tools", f"has the tool {name}, and the template writes no tools")

    def _leaves_out_tools(self, last: int) -> bool:
        """Whether the text is the same without them: a message may have their names too."""
        try:
            without = _Rendered(self.encoder, self.template, replace(self.chat, tools=None))
            return self._write(last + 1, last) == without._write(last + 1, last)
        except BadChat:  # a template may refuse calls of tools that nobody has described
            return False

    def _leaves_out(self, number: int, part: str) -> bool:
        """Whether a message is written as it would be without a part: its content may have the same words."""
        without = {key: value for key, value in self.messages[number].items() if key != part}
        try:
            return self._write(number + 1, number) == self._render([*self.messages[:number], without], number)
        except BadChat:  # a template may refuse an answer that says nothing
            return False

    def _text_of(self, count: int) -> tuple[str, list[Span]]:
        """The first `count` messages, and what of them is marked."""
        return unmarked(self._write(count, count - 1))

    def _write(self, count: int, turn: int, begins: bool = False) -> str:
        """The first `count` messages. begins: and the beginning of an answer."""
        return self._render(self.messages[:count], turn, begins)

    def _render(self, messages: Sequence[Message], turn: int, begins: bool = False) -> str:
        try:
            words = {**self.variables, "add_generation_prompt": begins}
            shown = with_media(messages, self.template, self.encoder.media)
            written = self.template.render(shown, self.tools, words)
            return written if self.encoder.media is None else self.encoder.media.rewritten(written)
        except Exception as error:  # a template is a program, and this is whatever it raises
            text = str(error) or type(error).__name__
            raise BadChat(
                "refused by the template", f"the template refuses the chat up to here: {text}", turn + 1
            ) from None


def _with_text_arguments(message: Message) -> Message:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def unmarked(written: str) -> tuple[str, list[Span]]:
    """A text without marks, and the ranges that were marked."""
    plain, spans, at = list[str](), list[Span](), 0
    for part in re.split(f"([{ANSWER}{ANSWER_END}])", written):
        if part == ANSWER:
            begun = at
        elif part == ANSWER_END:
            spans.append((begun, at))
        else:
            plain.append(part)
            at += len(part)
    return "".join(plain), spans


def _is_inside(border: int, starts: Sequence[int], stops: Sequence[int]) -> bool:
    """Whether a token has characters on both sides of a border."""
    at = bisect_left(starts, border) - 1
    return at >= 0 and stops[at] > border


def _shown(text: str, around: int) -> str:
    """The part of a text around a place."""
    first = max(0, around - SHOWN // 2)
    return repr(text[first : first + SHOWN].replace(BREAK, ""))
