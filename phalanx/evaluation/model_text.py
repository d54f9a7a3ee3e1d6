"""A model's text as programs that use transformers read and write it: its tokenizer, tokens that begin and end a text,
its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.inference.ends import end_tokens
from phalanx.inference.generate import tokenizer_of
from phalanx.text.chat_template import ChatTemplate, load_chat_template
from phalanx.text.tokenizer_files import read_json, token_text
from phalanx.text.tokenizers import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class ModelText:
    """How texts and chats of the model in a Hugging Face folder are written as tokens.

    end     the end-of-sequence token; prefix: the token before a text that nothing precedes
    ends    tokens after any of which an answer is over
    begins  whether tokenizer_config.json says that a text begins with `prefix`; None: what tokenizer.json says
    """

    tokenizer: Tokenizer
    end: int
    prefix: int
    ends: tuple[int, ...]
    begins: bool | None
    template: ChatTemplate | None

    def encode(self, text: str, whole: bool) -> list[int]:
        """whole: with the tokens that the tokenizer puts around a text of its own."""
        if not whole:
            return self.tokenizer.encode_with_special(text)
        ids = self.tokenizer.encode_whole(text)
        if self.begins is None or self.begins == (ids[:1] == [self.prefix]):
            return ids
        return [self.prefix, *ids] if self.begins else ids[1:]

    def chat(self, messages: Sequence[Mapping[str, Any]], answer: bool) -> str:
        """The text of a chat, with the beginning of an answer, or broken off after what the last message says. A
        template that refuses system messages is given the others, as the harness does."""
        if self.template is None:
            raise DataError("the model's folder holds no chat template; leave out --chat-template")
        try:
            text = self.template.text(messages, add_generation_prompt=answer)
        except DataError:
            others = [message for message in messages if message["role"] != "system"]
            if len(others) == len(messages):
                raise
            text = self.template.text(others, add_generation_prompt=answer)
        if answer:
            return text
        said = str(messages[-1]["content"])
        said = said if said in text else said.strip()
        return text[: text.rindex(said) + len(said)]


def model_text(folder: Path) -> ModelText:
    """CheckpointError without a tokenizer; DataError for one without an end-of-sequence token."""
    return text_with(tokenizer_of(folder), folder)


def text_of_tokenizer(path: str) -> ModelText:
    """The text of a model that is trained with a tokenizer: what its checkpoints will have beside the weights."""
    tokenizer = load_tokenizer(path)
    return text_with(tokenizer, Path(path) if Path(path).is_dir() else Path(path).parent)


def text_with(tokenizer: Tokenizer, folder: Path) -> ModelText:
    """folder: of the files beside the tokenizer, if there are any."""
    config = read_json(folder / "tokenizer_config.json")
    named = {**read_json(folder / "special_tokens_map.json"), **config}

    def id_of(name: str) -> int | None:
        text = token_text(named.get(name))
        return None if text is None else tokenizer.special_tokens.get(text)

    end = id_of("eos_token")
    end = tokenizer.eod if end is None else end
    if end is None:
        raise DataError(f"{folder}: its tokenizer has no end-of-sequence token (eos_token in tokenizer_config.json)")
    prefix = id_of("bos_token")
    template = load_chat_template(folder)
    return ModelText(
        tokenizer=tokenizer,
        end=end,
        prefix=end if prefix is None else prefix,
        ends=end_tokens(folder, tokenizer, template),
        begins=config.get("add_bos_token"),
        template=template,
    )
