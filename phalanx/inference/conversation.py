"""A conversation with a model on this process: messages in, answers out, each as it is made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phalanx.base.errors import CheckpointError, ConfigError, Problem
from phalanx.inference.ends import end_tokens
from phalanx.inference.engine import EngineOptions
from phalanx.inference.generate import TextSampler
from phalanx.inference.request import Finished, NewToken, SamplingOptions
from phalanx.text.chat_template import load_chat_template
from phalanx.text.pieces import Pieces

TOGETHER = 512  # tokens of a prompt that are read in one step


class Conversation:
    """What was said so far is read again from memory, not computed again (a prefix whose pages are there).

    notice   after an answer: why it ended before it was complete, if that needs a word; else None
    """

    def __init__(self, path: str, options: SamplingOptions, system: str | None = None, adapter: str | None = None):
        """adapter: folder of a LoRA adapter. CheckpointError for a model without a chat template."""
        self._sampler = TextSampler(path, EngineOptions(sequences=1, tokens=TOGETHER), adapter=adapter)
        template = load_chat_template(self._sampler.folder)
        if template is None:
            raise CheckpointError(
                f"{self._sampler.folder} holds no chat template (chat_template.jinja, or in tokenizer_config.json), so "
                "messages cannot be written as the model was taught; continue texts with `phalanx generate`"
            )
        self._template = template
        ends = end_tokens(self._sampler.folder, self._sampler.tokenizer, template)
        self._options = replace(options, end_tokens=ends)
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.notice: str | None = None
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._messages = list(self._first)

    def answer(self, message: str, written: str | None = None) -> Iterator[str]:
        """The answer, piece by piece. What was made of one that is given up stays part of the conversation. written:
        what the model reads in place of the message, this once."""
        asked = [*self._messages, {"role": "user", "content": message if written is None else written}]
        prompt = self._template.prompt(self._sampler.tokenizer, asked).ids
        engine, tokens = self._sampler.engine, self._options.tokens
        room = engine.positions - len(prompt)
        if room < 1:
            rule = "leaves no position for an answer: type /new, or a shorter message"
            because = {"model.max_position_embeddings": engine.positions}
            raise ConfigError([Problem("tokens of the chat", len(prompt), rule, because)])
        made = room if tokens is None else min(tokens, room)
        pieces, text = Pieces(self._sampler.tokenizer, prompt), ""
        number = engine.submit(prompt, replace(self._options, tokens=made))
        self.notice, ended = None, False
        try:
            while not ended:
                for event in engine.step():
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
                engine.close()
            said = [{"role": "user", "content": message}, {"role": "assistant", "content": text}]
            self._messages = [*self._messages, *said]

    def _notice(self, ended: Finished, made: int) -> str | None:
        if ended.error is not None:
            return f"the answer broke off: {ended.error}"
        return f"the answer was cut off after {made} tokens" if ended.reason == "length" else None
