"""The bodies of requests. Fields that are not listed here are refused by name; none is silently ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from phalanx.base.errors import shortened
from phalanx.server.errors import ApiError, near

TYPES = ("str", "NamedTool", "int", "float", "TextPart", "ImagePart")  # names of alternatives, in places of problems
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_SECONDS = 24 * 3600.0

# Parameters of OpenAI's that do nothing here, and what to do instead. Null is taken, as if they were not given.
NOT_SERVED = {
    "suffix": "text is continued, never filled in; leave it out",
    "functions": "give them as tools",
    "function_call": "use tool_choice",
    "audio": "models here write text alone",
    "modalities": "models here write text alone",
    "prediction": "leave it out; the answer is the same",
    "web_search_options": "offer a tool that searches",
    "service_tier": "there is one tier",
    "verbosity": "ask for it in a message",
    "metadata": "nothing is stored; x-request-id is in the server's log",
    "store": "nothing is stored",
    "prompt_cache_key": "prefixes are found without a key",
    "prompt_cache_options": "prefixes are found without options",
    "prompt_cache_retention": "prefixes are kept as long as there is room",
    "safety_identifier": "use user, which is written to the log",
    "moderation": "nothing moderates here",
}


# The same of transcriptions.
NOT_TRANSCRIBED = {
    "prompt": "a text begins as the model's folder says",
    "timestamp_granularities[]": "no times are written",
    "include[]": "texts come without log-probabilities",
    "chunking_strategy": "a recording is at most as long as the model hears at once",
}


def token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)


def check_prompt(value: Any) -> Any:
    """A text, token ids, or a list of either."""
    good = isinstance(value, str) or (isinstance(value, list) and value and token_ids(value))
    if isinstance(value, list) and value and not good:
        good = all(isinstance(each, str) for each in value) or all(token_ids(each) for each in value)
    if not good:
        raise PydanticCustomError("prompt", "must be a text, token ids, or a list of texts or of lists of token ids")
    return value


def check_stop(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise PydanticCustomError("stop", "must be a text or a list of texts, none of them empty")
    if len(texts) > MAX_STOPS:
        raise PydanticCustomError("stop", "must be at most {n} texts", {"n": MAX_STOPS})
    return texts


def check_bias(value: Any) -> Any:
    if not isinstance(value, dict) or not all(key.isdecimal() for key in value):
        raise PydanticCustomError("logit_bias", "must be an object from token ids to numbers from -100 to 100")
    return {int(key): bias for key, bias in value.items()}


class Body(BaseModel):
    """Strict: a number in quotes is no number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class SamplingBody(Body):
    """What both kinds of completions take. None: the default."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(check_bias)] | None = (
        None
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[str], BeforeValidator(check_stop)] | None = None
    user: str | None = None
    # beyond OpenAI's
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    timeout: Annotated[float, Field(gt=0, le=MAX_SECONDS)] | None = None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: Annotated[Any, BeforeValidator(check_prompt)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class ImageUrl(Body):
    """url: data:image/png;base64,..., or of another type."""

    url: str
    detail: Literal["auto"] | None = None


class ImagePart(Body):
    type: Literal["image_url"]
    image_url: ImageUrl


def kind_of_part(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return {"text": "TextPart", "image_url": "ImagePart"}.get(kind or "", "")


KINDS = Discriminator(
    kind_of_part, custom_error_type="part", custom_error_message="must be a part of type text or image_url"
)
Part = Annotated[Annotated[TextPart, Tag("TextPart")] | Annotated[ImagePart, Tag("ImagePart")], KINDS]


class FunctionCall(Body):
    name: str
    arguments: str


class ChatMessageToolCall(Body):
    id: str
    type: Literal["function"]
    function: FunctionCall
    index: int | None = None


class ChatMessage(Body):
    """Of any role; what a role needs is checked where it is made ready for the template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ChatMessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # what answers of OpenAI's have in them, and clients send back
    refusal: None = None
    annotations: list[None] | None = None
    audio: None = None
    function_call: None = None


class Function(Body):
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class JsonSchema(Body):
    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    # beyond OpenAI's
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingBody(Body):
    """POST /v1/embeddings."""

    input: Annotated[Any, BeforeValidator(check_prompt)]
    model: str | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None


class TranscriptionBody(Body):
    """POST /v1/audio/transcriptions, beside its file."""

    model: str | None = None
    language: str | None = None
    response_format: Literal["json", "text"] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = None


class TokenizeBody(Body):
    """POST /tokenize: a text, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


B = TypeVar("B", bound=Body)


def parse(kind: type[B], data: bytes) -> B:
    """The body of a request. ApiError 400 names every problem; `param` is the first."""
    try:
        value = pydantic_core.from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    for name, instead in NOT_SERVED.items():
        if name not in kind.model_fields and value.get(name, ...) is not ...:
            if value.pop(name) is not None:
                raise ApiError(400, f"{name}: is not supported: {instead}.", param=name, code="unsupported_parameter")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise as_api_error(kind, error) from None


def parse_fields(kind: type[B], texts: dict[str, str]) -> B:
    """The fields of a form. ApiError as `parse`."""
    for name, instead in NOT_TRANSCRIBED.items():
        if name in texts:
            raise ApiError(400, f"{name}: is not supported: {instead}.", param=name, code="unsupported_parameter")
    try:
        return kind.model_validate_strings(texts)
    except ValidationError as error:
        raise as_api_error(kind, error) from None


def as_api_error(kind: type[Body], error: ValidationError) -> ApiError:
    """One sentence for each problem: field, rule, value."""
    every = error.errors(include_url=False)
    places = [place(each["loc"]) for each in every]
    inside = [any(p != name and p.startswith((f"{name}.", f"{name}[")) for p in places) for name in places]
    problems = [each for each, within in zip(every, inside, strict=True) if not within]  # another form's is nearer
    names = [place(each["loc"]) for each in problems]
    texts: list[str] = []
    for name, each in zip(names, problems, strict=True):
        if each["type"] == "extra_forbidden":
            known = kind.model_fields if len(each["loc"]) == 1 else ()
            text = f"{name}: is not a parameter that this server knows.{near(str(each['loc'][-1]), known)}"
        elif each["type"] == "missing":
            text = f"{name}: is missing."
        else:
            rule = each["msg"][:1].lower() + each["msg"][1:]
            text = f"{name}: {rule}, not {shortened(repr(each['input']))}."
        texts.append(text)
    unknown = problems[0]["type"] == "extra_forbidden"
    code = (
        "unknown_parameter" if unknown else "missing_parameter" if problems[0]["type"] == "missing" else "invalid_value"
    )
    return ApiError(400, " ".join(dict.fromkeys(texts)), param=names[0], code=code)


def place(loc: tuple[int | str, ...]) -> str:
    """messages[0].content of ("messages", 0, "content", "str"): without the names of alternatives, which are types."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in TYPES:
            text += f".{part}" if text else part
    return text
