"""Tool calls that a request enforces (tool_choice), as a grammar: one call, in the format of the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from phalanx.inference.grammar import COMPACT
from phalanx.inference.request import Grammar
from phalanx.server.schemas import Tool
from phalanx.text.chat_reply import TAGGED, WHOLE, CallSyntax

XML = "<function="  # in templates whose calls are not JSON


def call_grammar(
    form: CallSyntax | None, source: str, tools: Sequence[Tool], special: Mapping[str, int]
) -> Grammar | None:
    """Of a call of one of these tools. None: a template of this source and form has calls that are not JSON alone.
    special: tokens by name."""
    if form not in (TAGGED, WHOLE) or XML in source:
        return None
    arguments = "parameters" if form == WHOLE else "arguments"
    schema = {"anyOf": [call_schema(tool, arguments) for tool in tools], "x-guidance": COMPACT}
    if form == WHOLE:
        return Grammar("json_schema", json.dumps(schema))
    begin, end = (marker(name or "", special) for name in (TAGGED.begin, TAGGED.end))
    return Grammar("lark", f'start: {begin} "\\n" call "\\n" {end}\ncall: %json {json.dumps(schema)}')


def call_schema(tool: Tool, arguments: str) -> dict[str, object]:
    function = tool.function
    properties = {"name": {"const": function.name}, arguments: function.parameters or {"type": "object"}}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def marker(name: str, special: Mapping[str, int]) -> str:
    """Before or after a call: a token of its own, or text."""
    return f"<[{special[name]}]>" if name in special else json.dumps(name)
