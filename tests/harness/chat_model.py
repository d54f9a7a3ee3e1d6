"""A tokenizer and a chat template in the form of ChatML, with tools and reasoning, made here."""

from __future__ import annotations

from pathlib import Path

import tokenizers

from phalanx.text.tokenizers import train_bpe

SPECIAL = ("<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
WORDS = ["the quick brown fox jumps over the lazy dog, and the weather in Paris is fine. "] * 40 + ["stop here\n"] * 20
TEMPLATE = """\
{%- if tools %}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}
Call a tool with <tool_call>{"name": ..., "arguments": ...}</tool_call>. There are:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'assistant' %}
<|im_start|>assistant
{{ message.content }}
{%- for call in message.tool_calls or [] %}

<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'user' %}
<|im_start|>user
{{ message.content }}<|im_end|>
{% elif message.role == 'developer' %}
{{ raise_exception('there are no developers here') }}
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}
<think>
{% endif %}
{%- endif %}"""


def chat_folder(folder: Path) -> Path:
    """A folder with tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    train_bpe(WORDS, 320, folder)
    core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.add_special_tokens(list(SPECIAL))
    core.add_tokens(list(ADDED))
    core.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
