"""Records of files as chats: messages as templates take them, or a prompt with its completion. The format of a record
is recognised by its fields; what is in a message is checked here, what a template makes of it is not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.base.registry import BUILT_IN, names
from phalanx.data.media import SEAM

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
SPEAKERS = {  # `from` in ShareGPT's form
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
REASONING = ("reasoning_content", "reasoning", "thinking")  # what people call it


class BadChat(Exception):
    """A record that cannot be trained on: a reason to count by, a description, and the number of the turn, from 1."""

    def __init__(self, reason: str, message: str, turn: int | None = None):
        super().__init__(message if turn is None else f"turn {turn}: {message}")
        self.reason, self.turn = reason, turn


@dataclass(frozen=True)
class Chat:
    """Messages in OpenAI's form: content a text, arguments of calls objects.

    tools      functions that may be called, in OpenAI's form
    answers    numbers, from 0, of the messages that the model is to learn
    variables  others that the template is given (chat_template_kwargs of the record)
    files      names of images or recordings, in the order of the parts of messages that stand for them
    kind       the type of these parts (base.registry, seam "media"); None: there are none
    """

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None
    answers: tuple[int, ...]
    variables: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    kind: str | None = None

    @property
    def transcript(self) -> str | None:
        """The answer, if all that it answers is one file without a text. Such a chat needs no template."""
        if self.answers != (1,) or len(self.messages) != 2 or len(self.files) != 1 or self.messages[0]["content"]:
            return None
        said: str = self.messages[1]["content"]
        return said


@dataclass(frozen=True)
class Completion:
    """A text and how it goes on; no template has a part in it."""

    prompt: str
    completion: str


def read_record(record: Mapping[str, Any]) -> Chat | Completion:
    """BadChat for what is no chat, or could be one in two ways."""
    given = {name: value for name, value in record.items() if value is not None}
    found = [(fields, read) for fields, read in FORMATS if all(name in given for name in fields)]
    if len(found) > 1:
        names = " and as ".join(" with ".join(fields) for fields, _ in found)
        raise BadChat("ambiguous", f"can be read as {names}: leave the fields of one of them out")
    if not found:
        known = ", ".join(" with ".join(fields) for fields, _ in FORMATS)
        raise BadChat("no chat", f"has fields {', '.join(given) or 'of no value'}, but none of {known}")
    return found[0][1](given)


# ---- the formats


def _messages(record: Mapping[str, Any]) -> Chat:
    return chat_of(record["messages"], record)


def _conversations(record: Mapping[str, Any]) -> Chat:
    """ShareGPT's form; also OpenAI's messages under this name."""
    given = _list_of_messages(record["conversations"])
    if all("role" in message for message in given):
        return chat_of(given, record)
    messages: list[Message] = []
    if isinstance(record.get("system"), str) and record["system"]:
        messages.append({"role": "system", "content": record["system"]})
    before = len(messages)
    for number, message in enumerate(given, 1):
        speaker, value = message.get("from"), message.get("value")
        if speaker not in SPEAKERS:
            raise BadChat("unknown role", f"from is {speaker!r}, expected one of {', '.join(SPEAKERS)}", number)
        if speaker == "function_call":
            calls = _from_json(value, "a call of a function", number)
            calls = calls if isinstance(calls, list) else [calls]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        else:
            messages.append({"role": SPEAKERS[speaker], "content": value})
        if "weight" in message:
            messages[-1]["weight"] = message["weight"]
    return chat_of(messages, record, before)


def _completion(record: Mapping[str, Any]) -> Chat | Completion:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise BadChat("no answer", "completion is empty")
        return Completion(_text(prompt, "prompt", None), _text(completion, "completion", None))
    if isinstance(prompt, str) or isinstance(completion, str):
        raise BadChat("ambiguous", "prompt and completion must both be texts, or both lists of messages")
    first = len(_list_of_messages(prompt))
    return chat_of([*prompt, *_list_of_messages(completion)], record, first_answer=first)


def _instruction(record: Mapping[str, Any]) -> Chat:
    """Alpaca's form: the input follows the instruction after an empty line."""
    asked = [_text(record.get(name, ""), name, None) for name in ("instruction", "input")]
    messages: list[Message] = []
    if isinstance(record.get("system"), str) and record["system"]:
        messages.append({"role": "system", "content": record["system"]})
    messages.append({"role": "user", "content": "\n\n".join(filter(None, asked))})
    messages.append({"role": "assistant", "content": _text(record["output"], "output", None)})
    return chat_of(messages, record)


def _recording(record: Mapping[str, Any]) -> Chat:
    """A recording and its text."""
    heard = {"role": "user", "content": [{"type": "audio", "audio": record["audio"]}]}
    return chat_of([heard, {"role": "assistant", "content": _text(record["text"], "text", None)}], record)


FORMATS: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, Any]], Chat | Completion]], ...] = (
    (("messages",), _messages),
    (("conversations",), _conversations),
    (("prompt", "completion"), _completion),
    (("instruction", "output"), _instruction),
    (("audio", "text"), _recording),
)


# ---- messages


def chat_of(given: Any, record: Mapping[str, Any], before: int = 0, first_answer: int = 0) -> Chat:
    """before: messages that are no turns of the record's own. first_answer: assistant's messages before it are not
    learned."""
    messages, answers = list[Message](), list[int]()
    for number, message in enumerate(_list_of_messages(given)):
        turn = max(1, number + 1 - before)
        ready = _message({name: value for name, value in message.items() if value is not None}, turn)
        weight = ready.pop("weight", 1)
        if isinstance(weight, bool) or weight not in (0, 1):
            raise BadChat("weight", f"weight is {weight!r}, expected 0 or 1", turn)
        if ready["role"] == "assistant" and weight and number >= first_answer:
            answers.append(number)
        messages.append(ready)
    if not answers:
        why = "no message of the assistant" + (" in completion" if first_answer else "")
        raise BadChat("no answer", f"no answer: {why} has a weight other than 0")
    files, kind = _files(messages, record)
    return Chat(tuple(messages), _tools(record.get("tools")), tuple(answers), _variables(record), files, kind)


@dataclass(frozen=True)
class AskedChat:
    """A chat whose answer is to be made. files: names, in the order of the parts that stand for them; kind: of them."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None
    variables: Mapping[str, Any]
    files: tuple[str, ...] = ()
    kind: str | None = None


def asked_chat(record: Mapping[str, Any]) -> AskedChat:
    """Of {"messages": [...]}, in the form of chats to train on, or {"audio": FILE}. BadChat for what is none."""
    if "audio" in record and "messages" not in record:
        heard = {"role": "user", "content": [{"type": "audio", "audio": record["audio"]}]}
        record = {"messages": [heard], **{name: value for name, value in record.items() if name != "audio"}}
    unknown = sorted(
        set(record) - {"messages", "tools", "chat_template_kwargs", *(f"{each}s" for each in BUILT_IN[SEAM])}
    )
    if unknown:
        raise BadChat("unknown keys", f"has {', '.join(unknown)} beside its messages, which nothing reads")
    messages = [
        _message({name: value for name, value in message.items() if value is not None}, turn)
        for turn, message in enumerate(_list_of_messages(record.get("messages")), 1)
    ]
    return AskedChat(tuple(messages), _tools(record.get("tools")), _variables(record), *_files(messages, record))


def is_media(part: Message) -> bool:
    return part.get("type") != "text"


def _files(messages: Sequence[Message], record: Mapping[str, Any]) -> tuple[tuple[str, ...], str | None]:
    """Names of files, and their kind: each part has its own, or all are in a list of the record, such as `images`."""
    parts = [part for message in messages for part in message.get("parts", ()) if is_media(part)]
    kinds = {str(part["type"]) for part in parts}
    if len(kinds) > 1:
        raise BadChat("media", f"has parts of types {', '.join(sorted(kinds))}: models read one of them")
    kind = kinds.pop() if kinds else None
    named = [part.pop(part["type"], None) for part in parts]
    for name in (f"{kind}s",) if kind else [f"{each}s" for each in BUILT_IN[SEAM]]:
        beside = record.get(name)
        if beside is None:
            continue
        if not isinstance(beside, list) or len(beside) != len(named) or any(one is not None for one in named):
            count = len(beside) if isinstance(beside, list) else 0
            rule = f"messages have {len(named)} {name}, and the list `{name}` has {count} names of files"
            raise BadChat(name, f"{rule}: name each once, in its part or in the list")
        named = beside
    if not all(isinstance(name, str) and name for name in named):
        raise BadChat(f"{kind}s", f'a part of type {kind} has no file: {{"type": "{kind}", "{kind}": "in/a.x"}}')
    return tuple(named), kind


def _list_of_messages(given: Any) -> list[Any]:
    if not isinstance(given, list) or not given or not all(isinstance(message, dict) for message in given):
        raise BadChat("no chat", "messages must be a list of objects that is not empty")
    return given


def _message(message: Message, turn: int) -> Message:
    role = message.get("role")
    if role not in ROLES:
        raise BadChat("unknown role", f"role is {role!r}, expected one of {', '.join(ROLES)}", turn)
    thought = [message.pop(name) for name in REASONING if name in message]
    if thought and role != "assistant":
        raise BadChat("reasoning", f"reasoning is an assistant's, not of role {role}", turn)
    if thought:
        message["reasoning_content"] = _text(thought[0], "reasoning", turn)
    calls = message.get("tool_calls")
    if calls and role != "assistant":
        raise BadChat("tool calls", f"tool_calls are an assistant's, not of role {role}", turn)
    message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = _calls(calls, turn)
    content = message.get("content")
    if content is None and not calls:
        raise BadChat("no content", "content is missing", turn)
    message["content"] = "" if content is None else _content(content, turn)
    message.pop("parts", None)
    if isinstance(content, list) and any(is_media(part) for part in content):
        if role not in ("user", "tool"):
            kind = next(part["type"] for part in content if is_media(part))
            raise BadChat(f"{kind}s", f"a part of type {kind} is a user's, not of role {role}", turn)
        message["parts"] = [dict(part) for part in content]
    if role == "assistant" and not (message["content"].strip() or calls or message.get("reasoning_content")):
        raise BadChat("no answer", "the answer is empty", turn)
    return message


def _content(content: Any, turn: int) -> str:
    """A text, or the texts of parts, joined by line breaks as the server joins them."""
    if not isinstance(content, list):
        return _text(content, "content", turn)
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if not isinstance(part, dict) or (kind not in ("text", *BUILT_IN[SEAM]) and kind not in names(SEAM)):
            known = ", ".join(("text", *names(SEAM)))
            raise BadChat("no text", f"content has a part of type {kind!r}: those of {known} can be learned", turn)
    return "\n".join(_text(part.get("text"), "content", turn) for part in content if not is_media(part))


def _calls(calls: Any, turn: int) -> list[Message]:
    """In OpenAI's form, arguments as objects: what templates expect."""
    if not isinstance(calls, list):
        raise BadChat("tool calls", "tool_calls must be a list", turn)
    ready = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadChat("tool calls", "a call needs the name of a function", turn)
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _from_json(arguments or "{}", f"arguments of {function['name']}", turn)
        if not isinstance(arguments, dict):
            raise BadChat("tool calls", f"arguments of {function['name']} must be an object", turn)
        more = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        ready.append({**more, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return ready


def _tools(tools: Any) -> tuple[Any, ...] | None:
    if isinstance(tools, str):
        tools = _from_json(tools, "tools", None) if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool_name(tool), str) for tool in tools):
        raise BadChat("tools", "tools must be a list of functions with names")
    return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in tools)


def tool_name(tool: Any) -> str | None:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _variables(record: Mapping[str, Any]) -> Mapping[str, Any]:
    given = record.get("chat_template_kwargs", {})
    if not isinstance(given, dict):
        raise BadChat("template variables", "chat_template_kwargs must be an object")
    return given


def _text(value: Any, name: str, turn: int | None) -> str:
    if not isinstance(value, str):
        raise BadChat("no text", f"{name} must be a text, not {type(value).__name__}", turn)
    try:
        value.encode()
    except UnicodeEncodeError as error:  # "\ud800" is JSON, but half a character
        raise BadChat("no text", f"{name} is not text: {error}", turn) from None
    return value


def _from_json(value: Any, what: str, turn: int | None) -> Any:
    try:
        return json.loads(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadChat("not JSON", f"{what} must be JSON: {error}", turn) from None


def without_none(value: Any) -> Any:
    """A row of a table without the fields that are null: each row has the fields of all others."""
    if isinstance(value, Mapping):
        return {key: without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [without_none(inner) for inner in value]
    return value
