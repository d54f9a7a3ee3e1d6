"""Chats as prompts: messages written by the model's own template, including the images in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import CheckpointError
from phalanx.inference.request import Prompt, RequestError
from phalanx.text.tokenizer_base import Tokenizer

if TYPE_CHECKING:
    from phalanx.inference.pictures import PictureReader
    from phalanx.text.chat_template import ChatPrompt, ChatTemplate

ImageFile = tuple[str, bytes]
"""A name for messages, and what the file holds."""


def encoder_text(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """What an encoder reads of a text: with the tokens that the tokenizer puts around texts."""
    return encoder_end(tokenizer, tokenizer.encode_whole(text))


def encoder_end(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[int, ...]:
    """Ids that an encoder reads, with the end of a text if the tokenizer has one: as in training (task.name=span, ul2,
    seq2seq)."""
    end = () if tokenizer.eod is None or tuple(ids[-1:]) == (tokenizer.eod,) else (tokenizer.eod,)
    return (*ids, *end)


@dataclass(frozen=True)
class ChatPrompts:
    """Of a model. pictures: reads its images; None: it has none. encodes: an encoder reads its prompts."""

    template: ChatTemplate
    tokenizer: Tokenizer
    pictures: PictureReader | None = None
    encodes: bool = False

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        images: Sequence[ImageFile] = (),
        **variables: Any,
    ) -> tuple[ChatPrompt, Prompt]:
        """As the template writes it, and as the model reads it. images: those for which parts of messages stand, in
        order. DataError if the template refuses the messages, or an image cannot be read; RequestError for a model that
        reads none, or a template that leaves some out."""
        if self.pictures is None:
            if images:
                raise RequestError("images", [name for name, _ in images], "are not read by this model")
            written = self.template.prompt(self.tokenizer, messages, tools, **variables)
            return written, Prompt(encoder_end(self.tokenizer, written.ids) if self.encodes else written.ids)
        from phalanx.text.media import MediaText  # Pillow: start-up time of models without images

        shown = MediaText.with_reader(self.pictures.spec, self.pictures.media, self.tokenizer)
        written = self.template.prompt(self.tokenizer, messages, tools, shown, **variables)
        read = self.pictures.prompt(written.ids, [self.pictures.image(data, name) for name, data in images])
        return replace(written, ids=read.tokens), read


def chat_prompts(
    folder: Path, tokenizer: Tokenizer, pictures: PictureReader | None, encodes: bool = False
) -> ChatPrompts:
    """Of a Hugging Face folder. CheckpointError for one without a chat template."""
    from phalanx.text.chat_template import load_chat_template  # jinja2: start-up time of runs without chats

    template = load_chat_template(folder)
    if template is None:
        raise CheckpointError(
            f"{folder} holds no chat template (chat_template.jinja, or in tokenizer_config.json), so messages cannot "
            "be written as the model was taught; continue texts with `phalanx generate`"
        )
    return ChatPrompts(template, tokenizer, pictures, encodes)
