"""A conversation with a model on this process: messages in, answers out, streamed as they are generated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from phalanx.base.errors import ConfigError, Problem
from phalanx.base.interrupts import interrupts_wait
from phalanx.inference.chat_prompts import ImageFile
from phalanx.inference.ends import end_tokens
from phalanx.inference.engine import EngineOptions
from phalanx.inference.generate import TextSampler
from phalanx.inference.request import Finished, NewToken, RequestError, SamplingOptions
from phalanx.text.pieces import Pieces

TOGETHER = 512  # tokens of a prompt that are read in one step


class Conversation:
    """What was said so far is read again from memory, not computed again (a prefix whose pages are there).

    notice   after an answer: why it ended before it was complete, if that needs a word; else None
    """

    def __init__(self, path: str, options: SamplingOptions, system: str | None = None, adapter: str | None = None):
        """adapter: folder of a LoRA adapter. CheckpointError for a model without a chat template."""
        self._sampler = TextSampler(path, EngineOptions(sequences=1, tokens=TOGETHER), adapter=adapter)
        self._chats = self._sampler.chats
        ends = end_tokens(self._sampler.folder, self._sampler.tokenizer, self._chats.template)
        self._options = replace(options, end_tokens=ends)
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.notice: str | None = None
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._messages: list[dict[str, Any]] = list(self._first)
        self._images: list[ImageFile] = []

    def check_image(self, image: ImageFile) -> None:
        """RequestError if the model reads no images, BadImage if it cannot be read."""
        if self._chats.pictures is None:
            raise RequestError("image", image[0], "is not read by this model: it has no vision tower")
        self._chats.pictures.image(image[1], image[0])

    def answer(self, message: str, written: str | None = None, images: Sequence[ImageFile] = ()) -> Iterator[str]:
        """The answer, piece by piece. What was made of one that is given up stays part of the conversation. written:
        what the model reads in place of the message, this once. images: that the message begins with."""
        asked = [*self._messages, user_message(message if written is None else written, len(images))]
        shown = [*self._images, *images]
        _, read = self._chats.prompt(asked, images=shown)
        prompt = read.tokens
        engine, tokens = self._sampler.engine, self._options.tokens
        room = engine.positions - len(prompt)
        if room < 1:
            rule = "leaves no position for an answer: type /new, or a shorter message"
            because = {"model.max_position_embeddings": engine.positions}
            raise ConfigError([Problem("tokens of the chat", len(prompt), rule, because)])
        made = room if tokens is None else min(tokens, room)
        pieces, text = Pieces(self._sampler.tokenizer, prompt), ""
        number = engine.submit(read, replace(self._options, tokens=made))
        self.notice, ended = None, False
        try:
            while not ended:
                with interrupts_wait():  # a step that is left halfway leaves an engine that cannot go on
                    events = engine.step()
                for event in events:
                    if isinstance(event, NewToken) and event.token not in self._options.end_tokens:
                        piece = pieces.add(event.token)
                        text += piece
                        yield piece
                    elif isinstance(event, Finished):
                        ended = True
                        self.notice = self._notice(event, made)
            rest = pieces.rest()
            text += rest
            yield rest
        finally:
            if not ended:
                engine.cancel(number)
                with interrupts_wait():
                    engine.close()
            said = [user_message(message, len(images)), {"role": "assistant", "content": text}]
            self._messages, self._images = [*self._messages, *said], shown

    def _notice(self, ended: Finished, made: int) -> str | None:
        if ended.error is not None:
            return f"the answer broke off: {ended.error}"
        return f"the answer was cut off after {made} tokens" if ended.reason == "length" else None


def user_message(text: str, images: int) -> dict[str, Any]:
    """With so many images before its text."""
    message: dict[str, Any] = {"role": "user", "content": text}
    if images:
        message["parts"] = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": text}]
    return message
