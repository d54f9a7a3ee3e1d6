"""The tokens that end an answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.text.chat_reply import reply_format
from phalanx.text.tokenizer_base import Tokenizer
from phalanx.text.tokenizer_files import read_json, token_text

if TYPE_CHECKING:
    from phalanx.text.chat_template import ChatTemplate  # jinja2, which a run need not load

# names of tokens that end a turn, where a template uses them; few folders list all of theirs
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|call|>")
HARMONY_END = "<|end|>"  # ends a message there, not the turn


def end_tokens(folder: Path, tokenizer: Tokenizer | None, template: ChatTemplate | None = None) -> tuple[int, ...]:
    """Tokens that end an answer: those of generation_config.json and config.json, the tokenizer's end of a document,
    and the ends of turns that the template writes."""
    ends: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        ends += [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)]
    if tokenizer is not None:
        ends += [] if tokenizer.eod is None else [tokenizer.eod]
        names = [token_text(read_json(folder / "tokenizer_config.json").get("eos_token"))]
        if template is not None:
            in_channels = reply_format(template.source).channels
            names += [end for end in TURN_ENDS if end in template.source and not (in_channels and end == HARMONY_END)]
            names += ["<|return|>", "<|call|>"] if in_channels else []
        ends += [tokenizer.special_tokens[name] for name in names if name in tokenizer.special_tokens]
    return tuple(dict.fromkeys(ends))
