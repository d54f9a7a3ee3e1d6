"""The model that is served: turns prompts into tokens and bodies into sampling options, and refuses what it
cannot do."""

from __future__ import annotations

import json
import secrets
from base64 import b64decode
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from phalanx.base.dataclass import dataclass
from phalanx.base.errors import DataError
from phalanx.inference.chat_prompts import ChatPrompts, ImageFile, encoder_text
from phalanx.inference.grammar import GrammarCompiler
from phalanx.inference.request import Grammar, Prompt, RequestError, SamplingOptions
from phalanx.retrieval.prompting import PassageAdder
from phalanx.server.errors import ApiError, near
from phalanx.server.schemas import ChatMessage, ImagePart, SamplingBody, TextPart, Tool
from phalanx.text.chat_reply import ReplyFormat, reply_format
from phalanx.text.chat_template import ChatPrompt, ChatTemplate
from phalanx.text.marked import TextMarks
from phalanx.text.token_texts import TokenNumbers, TokenTexts
from phalanx.text.tokenizer_base import Tokenizer

if TYPE_CHECKING:
    from phalanx.inference.pictures import PictureReader
    from phalanx.inference.recordings import SpeechPrompts

MAX_IMAGES = 32  # of a request
SHOWN = 60  # characters of a URL in a message
OURS = ("messages", "tools", "documents", "add_generation_prompt")  # what requests cannot set in a template


Found = list[list[dict[str, Any]]]
"""The passages of each prompt, as answers have them."""


@dataclass(frozen=True)
class ServedEmbedder:
    """width: of embeddings; normalized: their length is 1; marks: how texts begin and end (None: ids alone)."""

    width: int
    normalized: bool
    marks: TextMarks | None


@dataclass(frozen=True)
class ServedModel:
    """What the endpoints need to know.

    tokenizer   None: token ids are served alone
    template    None: no chats
    ends        tokens that end an answer
    vocab_size  ids are below it; None: unknown
    grammars    that answers can keep to; None: none
    adapters    names of models that are this one with an adapter
    embeds      how texts are embedded; None: it generates
    passages    puts passages into prompts; None: they stay as they are
    pictures    reads images; None: it has none
    encodes     an encoder reads prompts, and answers have the positions for themselves
    speech      makes prompts of recordings, of which it writes the text; None: it hears none
    """

    name: str
    positions: int
    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    ends: tuple[int, ...] = ()
    vocab_size: int | None = None
    grammars: GrammarCompiler | None = None
    adapters: tuple[str, ...] = ()
    embeds: ServedEmbedder | None = None
    passages: PassageAdder | None = None
    pictures: PictureReader | None = None
    encodes: bool = False
    speech: SpeechPrompts | None = None

    @cached_property
    def texts(self) -> TokenTexts | TokenNumbers:
        return TokenTexts(self.tokenizer) if self.tokenizer else TokenNumbers()

    @cached_property
    def reply_format(self) -> ReplyFormat:
        return reply_format(self.template.source) if self.template else ReplyFormat()

    @property
    def names(self) -> list[str]:
        """Of the models that clients may ask for."""
        return [self.name, *self.adapters]

    def need_generation(self) -> None:
        """ApiError for a model that makes embeddings, or texts of recordings."""
        if self.embeds is not None:
            message = f"{self.name} makes embeddings and no text: POST /v1/embeddings."
            raise ApiError(400, message, param="model", code="model_embeds")
        if self.speech is not None:
            message = f"{self.name} writes the text of recordings: POST /v1/audio/transcriptions."
            raise ApiError(400, message, param="model", code="model_transcribes")

    def need_speech(self) -> SpeechPrompts:
        """ApiError for a model that hears no recordings."""
        if self.speech is None:
            message = f"{self.name} hears no recordings: serve a model that does, such as one of family whisper."
            raise ApiError(400, message, param="model", code="model_hears_nothing")
        return self.speech

    def need_embedder(self) -> ServedEmbedder:
        """ApiError for a model that generates."""
        if self.embeds is None:
            message = f"{self.name} generates text and makes no embeddings: serve a model of task.name=embed."
            raise ApiError(400, message, param="model", code="model_generates")
        return self.embeds

    def check_name(self, asked: str | None) -> None:
        """ApiError 404 for another model."""
        if asked is not None and asked not in self.names:
            hint = near(asked, self.names) or f" This server has {', '.join(self.names)}."
            raise ApiError(404, f"there is no model {asked!r}.{hint}", param="model", code="model_not_found")

    def need_tokenizer(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ApiError(
                400,
                f"{field}: this model has no tokenizer (its folder holds none), so texts cannot be read or written; "
                "send token ids to /v1/completions.",
                param=field,
                code="no_tokenizer",
            )
        return self.tokenizer

    def with_passages(self, value: str | list[Any]) -> tuple[str | list[Any], Found]:
        """Prompts with passages, and these for each; without an index they stay as they are. ApiError for token ids."""
        if self.passages is None:
            return value, []
        texts = [value] if isinstance(value, str) else value
        if not all(isinstance(text, str) for text in texts):
            message = "prompt: passages are found for texts (the server has an --index), not for token ids."
            raise ApiError(400, message, param="prompt", code="invalid_value")
        made, found = self.passages.add(texts)
        return made, [[each.plain() for each in row] for row in found]

    def chat_with_passages(self, messages: Sequence[ChatMessage]) -> tuple[Sequence[ChatMessage], Found]:
        """Messages, the last of the user's with passages."""
        last = next((i for i in reversed(range(len(messages))) if messages[i].role == "user"), None)
        if self.passages is None or last is None:
            return messages, []
        content = messages[last].content
        parts = [] if isinstance(content, str) or content is None else content
        shown = [part for part in parts if isinstance(part, ImagePart)]
        asked = content if isinstance(content, str) else text_of(parts)
        text, found = self.passages.one(asked)
        made: str | list[Any] = [*shown, TextPart(type="text", text=text)] if shown else text
        changed = messages[last].model_copy(update={"content": made})
        return [*messages[:last], changed, *messages[last + 1 :]], [[each.plain() for each in found]]

    def prompts(self, value: str | list[Any]) -> list[tuple[int, ...]]:
        """Token ids of each prompt. An empty one is the end of the document before it."""
        several = isinstance(value, list) and not isinstance(value[0], int)
        return [self._prompt(each) for each in (value if several else [value])]

    def _prompt(self, value: str | list[int]) -> tuple[int, ...]:
        if isinstance(value, str):
            tokenizer = self.need_tokenizer("prompt")
            try:
                ids = encoder_text(tokenizer, value) if self.encodes else tuple(tokenizer.encode_with_special(value))
            except DataError as error:
                raise ApiError(400, f"prompt: {error}", param="prompt", code="invalid_value") from None
        else:
            self.check_ids(value, "prompt")
            ids = tuple(value)
        if ids:
            return ids
        if self.tokenizer is None or self.tokenizer.eod is None:
            rule = "must not be empty: this model has no end-of-document token to begin with"
            raise ApiError(400, f"prompt: {rule}.", param="prompt", code="invalid_value")
        return (self.tokenizer.eod,)

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        limit = self.vocab_size
        wrong = next((each for each in ids if each < 0 or (limit is not None and each >= limit)), None)
        if wrong is not None:
            rule = f"must hold token ids from 0 to {limit - 1}" if limit else "must hold token ids, 0 or more"
            raise ApiError(400, f"{field}: {rule}, not {wrong}.", param=field, code="invalid_value")

    def room(self, prompt: Sequence[int], tokens: int | None, field: str) -> int:
        """Tokens that may be made after a prompt. ApiError if there is none, or not room for those asked for."""
        left = self.positions - (1 if self.encodes else len(prompt))
        if self.encodes and len(prompt) > self.positions:
            message = f"the encoder has {self.positions} positions; the prompt takes {len(prompt)}."
            raise ApiError(400, message, param="prompt", code="context_length_exceeded")
        if left < (1 if tokens is None else tokens):
            asked = "" if tokens is None else f", and {tokens} are asked for ({field})"
            message = f"the model has {self.positions} positions; the prompt takes {len(prompt)} of them{asked}."
            raise ApiError(400, message, param=field if left > 0 else "prompt", code="context_length_exceeded")
        return left if tokens is None else tokens

    def chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None, variables: dict[str, Any]
    ) -> tuple[ChatPrompt, Prompt]:
        """A chat as the template writes it, and as the model reads it."""
        tokenizer = self.need_tokenizer("messages")
        if self.template is None:
            raise ApiError(
                400,
                "messages: this model has no chat template (its folder holds none); /v1/completions continues texts.",
                param="messages",
                code="no_chat_template",
            )
        if tools and not self.template.reads("tools"):
            raise ApiError(
                400, "tools: this model's chat template has no place for them.", param="tools", code="invalid_value"
            )
        self._check_variables(variables)
        ready = [template_message(number, message) for number, message in enumerate(messages)]
        offered = [tool.model_dump(exclude_none=True) for tool in tools or ()] or None
        chats = ChatPrompts(self.template, tokenizer, self.pictures, self.encodes)
        try:
            return chats.prompt(ready, offered, self._images(messages), **variables)
        except DataError as error:
            raise ApiError(400, f"messages: {error}", param="messages", code="invalid_value") from None
        except RequestError as error:
            raise ApiError(400, f"messages: {error}", param="messages", code="invalid_value") from None

    def _images(self, messages: Sequence[ChatMessage]) -> list[ImageFile]:
        """The files in messages, in order. ApiError for what is none, and for a model that reads none."""
        found: list[ImageFile] = []
        for number, message in enumerate(messages):
            for at, part in enumerate(message.content if isinstance(message.content, list) else ()):
                if not isinstance(part, ImagePart):
                    continue
                field = f"content[{at}].image_url"
                if self.pictures is None:
                    raise bad_message(number, field, f"{self.name} reads texts alone")
                if message.role not in ("user", "tool"):
                    raise bad_message(number, field, f"is a user's, not of role {message.role}")
                found.append((f"messages[{number}].{field}", image_data(number, f"{field}.url", part.image_url.url)))
        if len(found) > MAX_IMAGES:
            rule = f"have {len(found)} images; a request may have {MAX_IMAGES}"
            raise ApiError(400, f"messages: {rule}.", param="messages", code="too_many_images")
        return found

    def _check_variables(self, variables: dict[str, Any]) -> None:
        for name in variables:
            if name in OURS or self.template is None or not self.template.reads(name):
                field = name if name == "reasoning_effort" else f"chat_template_kwargs.{name}"
                raise ApiError(
                    400, f"{field}: this model's chat template does not read it.", param=field, code="invalid_value"
                )

    def check_grammar(self, grammar: Grammar, field: str) -> None:
        """ApiError if answers cannot keep to it. Compiles it, for milliseconds or more: not on the event loop."""
        if self.grammars is None:
            rule = "this model has no tokenizer, so answers cannot keep to a grammar"
            raise ApiError(400, f"{field}: {rule}.", param=field, code="invalid_value")
        try:
            self.grammars.compile(grammar)
        except RequestError as error:
            raise ApiError(400, f"{field}: {error.rule}.", param=field, code="invalid_value") from None

    def sampling(self, body: SamplingBody, tokens: int, sample: int, seed: int) -> SamplingOptions:
        """Options of one sequence, without log-probabilities."""
        bias = body.logit_bias or {}
        self.check_ids(list(bias), "logit_bias")
        if (body.min_tokens or 0) > tokens:
            raise ApiError(
                400,
                f"min_tokens: must be at most the {tokens} tokens that are made, not {body.min_tokens}.",
                param="min_tokens",
                code="invalid_value",
            )
        return SamplingOptions(
            tokens=tokens,
            temperature=1.0 if body.temperature is None else float(body.temperature),
            top_k=body.top_k or 0,
            top_p=1.0 if body.top_p is None else float(body.top_p),
            min_p=float(body.min_p or 0.0),
            repetition_penalty=1.0 if body.repetition_penalty is None else float(body.repetition_penalty),
            presence_penalty=float(body.presence_penalty or 0.0),
            frequency_penalty=float(body.frequency_penalty or 0.0),
            bias=tuple((token, float(value)) for token, value in bias.items()),
            end_tokens=() if body.ignore_eos else self.ends,
            least_tokens=body.min_tokens or 0,
            seed=seed,
            sample=sample,
            adapter=body.model if body.model in self.adapters else None,
        )


def text_of(parts: Sequence[TextPart | ImagePart]) -> str:
    """The texts among the parts of a message."""
    return "\n".join(part.text for part in parts if isinstance(part, TextPart))


def image_data(number: int, field: str, url: str) -> bytes:
    """What a data: URL holds. ApiError for another URL: nothing is fetched."""
    head, comma, body = url.partition(",")
    scheme, _, kind = head.partition(":")
    if scheme.lower() != "data" or not comma:
        shown = url if len(url) <= SHOWN else f"{url[:SHOWN]}..."
        rule = f"must be a data: URL, such as data:image/png;base64,...: this server fetches nothing ({shown!r})"
        raise bad_message(number, field, rule)
    if not kind.lower().startswith("image/") or not kind.lower().endswith(";base64"):
        raise bad_message(number, field, f"must be an image in base64, and is {kind[:SHOWN]!r}")
    try:
        return b64decode(body, validate=True)
    except ValueError:
        raise bad_message(number, field, "is no base64") from None


def seed_of(body: SamplingBody) -> int:
    """The seed that was asked for, or one that nobody has had."""
    return secrets.randbits(63) if body.seed is None else body.seed % 2**63


def template_message(number: int, message: ChatMessage) -> dict[str, Any]:
    """A message as templates take them: content as text, arguments of calls as objects."""
    ready: dict[str, Any] = {"role": message.role, "content": message.content}
    if isinstance(message.content, list):
        ready["content"] = text_of(message.content)
        if any(isinstance(part, ImagePart) for part in message.content):
            ready["parts"] = [
                {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
                for part in message.content
            ]
    if message.content is None and (message.role != "assistant" or not message.tool_calls):
        raise bad_message(number, "content", "is missing")
    if message.tool_calls and message.role != "assistant":
        raise bad_message(number, "tool_calls", f"are an assistant's, not of role {message.role}")
    if message.role == "tool" and message.tool_call_id is None:
        raise bad_message(number, "tool_call_id", "is missing: it names the call that is answered")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            ready[name] = getattr(message, name)
    if message.tool_calls:
        ready["content"] = ready["content"] or ""
        ready["tool_calls"] = []
        for call in message.tool_calls:
            try:
                arguments = json.loads(call.function.arguments or "{}")
            except (ValueError, RecursionError):
                raise bad_message(number, "tool_calls", "has arguments that are not JSON") from None
            function = {"name": call.function.name, "arguments": arguments}
            ready["tool_calls"].append({"id": call.id, "type": "function", "function": function})
    return ready


def bad_message(number: int, field: str, rule: str) -> ApiError:
    place = f"messages[{number}].{field}"
    return ApiError(400, f"{place}: {rule}.", param=place, code="invalid_value")
