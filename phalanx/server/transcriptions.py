"""POST /v1/audio/transcriptions: the text of a recording, in the format of OpenAI's API."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from phalanx.base.errors import DataError
from phalanx.inference.recordings import SpeechRules
from phalanx.inference.request import Prompt, RequestError, SamplingOptions
from phalanx.server.choices import ChoiceText
from phalanx.server.engine_thread import Answers, SequenceJob
from phalanx.server.errors import ApiError
from phalanx.server.forms import FormPart, form_parts
from phalanx.server.metrics import Stopwatch
from phalanx.server.responses import GONE, EventStream, read_body, unless_gone
from phalanx.server.schemas import TranscriptionBody, parse_fields
from phalanx.server.served import ServedModel
from phalanx.server.service import Service, note, service_of, steps

FORM = "multipart/form-data"


async def transcriptions(request: Request) -> Response:
    service = service_of(request)
    data = await read_body(request, service.limits.body, service.limits.read_seconds, FORM)
    parts = form_parts(data, request.headers["content-type"])
    recordings = [part for part in parts if part.name == "file"]
    texts: dict[str, Any] = {}
    for part in parts:
        if part.name in texts:
            raise ApiError(400, f"{part.name}: is given twice.", param=part.name, code="invalid_value")
        if part.name != "file":
            texts[part.name] = part.text()
    body = parse_fields(TranscriptionBody, texts)
    service.model.check_name(body.model)
    service.model.need_speech()
    prompt = await run_in_threadpool(heard, service.model, recordings, body)
    options = options_of(service.model, prompt, body)
    answers = await service.start([SequenceJob(prompt, options)])
    watch = Stopwatch(service.metrics, len(prompt.tokens))
    note(request, watch, None)
    choice = ChoiceText(service.model.tokenizer, (), options.end_tokens, context=())
    if body.stream:
        chunks = events(service, choice, answers, watch)
        return EventStream(chunks, service.limits.write_seconds, request.app.state.failed)
    text = await unless_gone(request.receive, whole_text(service, choice, answers, watch))
    if text is None:
        return Response(status_code=GONE)
    return PlainTextResponse(f"{text}\n") if body.response_format == "text" else JSONResponse({"text": text})


def heard(model: ServedModel, recordings: Sequence[FormPart], body: TranscriptionBody) -> Prompt:
    """The recording as the model hears it, and how its text begins. ApiError for what cannot be heard."""
    speech = model.need_speech()
    if len(recordings) != 1 or recordings[0].filename is None:
        raise ApiError(400, "file: must be one recording.", param="file", code="invalid_value")
    [recording] = recordings
    variables = {} if body.language is None else {"language": body.language}
    if speech.template is not None and variables and not speech.template.reads("language"):
        rule = "this model's chat template, which writes how texts begin, does not read it"
        raise ApiError(400, f"language: {rule}.", param="language", code="invalid_value")
    if speech.template is None:
        check_language(speech.rules, speech.reader.spec.begins, body.language)
    part = {"type": "audio", "audio": recording.filename}
    try:
        files = [(recording.filename or "file", recording.data)]
        return speech.prompt([{"role": "user", "content": [part]}], files=files, **variables)
    except (DataError, RequestError) as error:
        raise ApiError(400, f"file: {error}", param="file", code="invalid_value") from None


def check_language(rules: SpeechRules, start: int, language: str | None) -> None:
    """ApiError for a text that cannot begin."""
    try:
        rules.begins(start, language)
    except DataError as error:
        known = ", ".join(sorted(name.strip("<|>") for name in rules.languages))
        rule = f"is missing: the model is not asked which it hears, and knows {known}." if language is None else error
        raise ApiError(400, f"language: {rule}", param="language", code="invalid_value") from None


def options_of(model: ServedModel, prompt: Prompt, body: TranscriptionBody) -> SamplingOptions:
    """As many tokens as the model has positions for; those that its folder forbids are not made."""
    rules = model.need_speech().rules
    room = model.positions - len(prompt.tokens)
    if room < 1:
        message = f"the model has {model.positions} positions, and a text begins with {len(prompt.tokens)} tokens."
        raise ApiError(400, message, param="file", code="context_length_exceeded")
    return SamplingOptions(
        tokens=room,
        temperature=body.temperature or 0.0,
        bias=tuple((token, -math.inf) for token in rules.never),
        not_first=rules.not_first,
        end_tokens=model.ends,
        seed=secrets.randbits(63),
    )


async def whole_text(service: Service, choice: ChoiceText, answers: Answers, watch: Stopwatch) -> str:
    began, found = time.monotonic(), list[str]()
    async for step in steps(answers, [choice], watch):
        found.append(step.increment.text)
    service.over(began)
    return "".join(found).strip()


async def events(
    service: Service, choice: ChoiceText, answers: Answers, watch: Stopwatch
) -> AsyncIterator[dict[str, Any]]:
    """What is said since the last event, and at the end all of it."""
    began, text = time.monotonic(), ""
    async for step in steps(answers, [choice], watch):
        if step.increment.text:
            text += step.increment.text
            yield {"type": "transcript.text.delta", "delta": step.increment.text}
    service.over(began)
    yield {"type": "transcript.text.done", "text": text.strip()}
